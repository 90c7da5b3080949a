"""RandomResizedCrop and CenterCrop, fused: decode, crop, resize, flip in one pass over the pixels.

Geometry is torchvision's, in pixels of the full-resolution image; the result is RGB uint8. Where
`transform` is one of these, only the part of a JPEG that the crop needs is decoded, at the smallest scale
that has enough pixels, straight into the caller's memory. An EXIF orientation is not applied, as in
torchvision's default loader.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ArgumentError, DecodeError
from fastload.images.decode import MAX_PIXELS, open_image, resized_size
from fastload.images.kernel import Item, Source, active
from fastload.images.rng import Rng, SampleRng, TorchRng

if TYPE_CHECKING:
    import torch

__all__ = ["CenterCrop", "Crop", "CropBox", "RandomResizedCrop"]

Box = tuple[float, float, float, float]
_LARGEST = 8192  # side of a result


class CropBox(NamedTuple):
    """Where the pixels of a result come from.

    Attributes:
        box: (x0, y0, x1, y1) to resize, in pixels of the full-resolution image.
        flip: whether to flip the result horizontally.
        inner: (top, left, height, width) of the part of the result that the box fills; the rest is black.
            None: the box fills all of it.
    """

    box: Box
    flip: bool = False
    inner: tuple[int, int, int, int] | None = None


class Crop(ABC):
    """The base of both crops; a subclass chooses the box.

    Attributes:
        sample_shape: (3, H, W), or (H, W, 3) with channels_last; dtype uint8.
        clamp: True leaves pixels outside the box out of the filter (crop, then resize); False includes them
            (resize, then crop).
    """

    clamp: bool

    def __init__(
        self, size: int | Sequence[int], *, channels_last: bool, max_pixels: int, strict: bool
    ) -> None:
        self.height, self.width = _check_size(size)
        self.channels_last = channels_last
        if not isinstance(max_pixels, int) or max_pixels < 1:
            raise ArgumentError(f"max_pixels must be a positive integer, not {max_pixels!r}")
        self.max_pixels = max_pixels
        self.strict = strict

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        return (self.height, self.width, 3) if self.channels_last else (3, self.height, self.width)

    @abstractmethod
    def box_for(self, width: int, height: int, rng: Rng) -> CropBox:
        """Choose the box for an image of that size."""

    def fill(
        self, out: np.ndarray[Any, Any], images: Sequence[Source], seeds: Sequence[int]
    ) -> list[tuple[int, DecodeError]]:
        """Transform a batch into memory that the caller owns.

        One call of the kernel, without the GIL, decodes all JPEGs but the padded ones; those follow.

        Args:
            out: `(n, *sample_shape)` uint8, C-contiguous and writable. Rows of failed images are undefined.
            images: n encoded images (anything with the buffer protocol) or decoded (H, W, 3) uint8 arrays.
            seeds: n integers; everything random about image k is a function of seeds[k] and its size.

        Returns:
            (k, error) of the images that failed, in order of k.
        """
        expected = (len(images), *self.sample_shape)
        if out.shape != expected or out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ArgumentError(
                f"out must be a C-contiguous uint8 array of shape {expected}, not {out.dtype} {out.shape}"
            )
        failures: dict[int, DecodeError] = {}
        items: list[Item] = []
        for k, (image, seed) in enumerate(zip(images, seeds, strict=True)):
            try:
                source, _, _, chosen = self.choose_box(image, SampleRng(seed))
                encoded = source is image or isinstance(source, memoryview)
                if encoded and chosen.inner is None:
                    items.append((k, source, *chosen.box, chosen.flip))
                else:  # already decoded (a PNG, say): used at once, so that only one such image is in memory
                    self.render_one(out[k], source, chosen)
            except DecodeError as error:
                failures[k] = error
        failures.update(self.render(out, items))
        return sorted(failures.items())

    def __call__(self, image: Any) -> torch.Tensor:
        """Transform one image: a PIL image, the bytes of a file, or an (H, W, 3) uint8 array.

        Returns:
            uint8 tensor of `sample_shape`. Randomness comes from torch's global generator, in torchvision's
            order of draws.

        Raises:
            DecodeError: the image cannot be decoded.
        """
        import torch

        if hasattr(image, "convert"):
            image = np.asarray(image.convert("RGB"))
        out = np.empty(self.sample_shape, np.uint8)
        source, _, _, chosen = self.choose_box(image, TorchRng())
        self.render_one(out, source, chosen)
        return torch.from_numpy(out)

    def choose_box(self, image: Source, rng: Rng) -> tuple[Source, int, int, CropBox]:
        """Choose where to cut an image. A JPEG is not decoded for it: its header has the size.

        Returns:
            (source, width, height, box): the JPEG's bytes, or decoded pixels for other formats; the size of
            the full image; the source of the result's pixels.

        Raises:
            DecodeError: not an image, a damaged header, cut (if `strict`), or too large.
        """
        source, width, height = open_image(image, self.max_pixels, self.strict)
        return source, width, height, self.box_for(width, height, rng)

    def fill_rows(
        self, images: NDArray[np.uint8], rows: list[int], sources: Sequence[Source], seeds: Sequence[int]
    ) -> list[tuple[int, DecodeError]]:
        """`fill` for some rows of a batch; (position in `rows`, error) of those that failed.

        Args:
            images: (n, *sample_shape) uint8, the whole batch.
        """
        if not rows:
            return []
        adjacent = rows == list(range(rows[0], rows[0] + len(rows)))
        out = images[rows[0] : rows[0] + len(rows)] if adjacent else images[rows]
        failures = self.fill(out, sources, seeds)
        if not adjacent:
            images[rows] = out
        return failures

    def render(self, out: np.ndarray[Any, Any], items: Sequence[Item]) -> list[tuple[int, DecodeError]]:
        """Decode, crop and resize `items` into their rows of `out`; (row, error) of those that failed."""
        failures = active().crop_resize(
            out, items, self.channels_last, self.clamp, self.max_pixels, self.strict
        )
        return [(row, DecodeError(reason)) for row, reason in failures]

    def render_one(self, out: np.ndarray[Any, Any], source: Source, chosen: CropBox) -> None:
        """Decode, crop and resize one image into `out`, of `sample_shape`; the frame around `inner` is black.

        Raises:
            DecodeError: the image cannot be decoded.
        """
        box = out
        if chosen.inner is not None:
            top, left, height, width = chosen.inner
            rows, columns = slice(top, top + height), slice(left, left + width)
            shape = (height, width, 3) if self.channels_last else (3, height, width)
            box = np.empty(shape, np.uint8)
        for _, error in self.render(box[None], [(0, source, *chosen.box, chosen.flip)]):
            raise error
        if chosen.inner is not None:
            out[:] = 0
            out[(rows, columns) if self.channels_last else (slice(None), rows, columns)] = box

    def _options(self) -> str:
        """The arguments of both crops that `repr` shows, because they differ from their defaults."""
        shown = f", channels_last={self.channels_last}" if self.channels_last else ""
        shown += f", max_pixels={self.max_pixels}" if self.max_pixels != MAX_PIXELS else ""
        return shown + ("" if self.strict else ", strict=False")


class RandomResizedCrop(Crop):
    """A random part of the image, resized to `size`, with torchvision's rules and order of arguments.

    Example::

        from fastload import ImageFolder, RandomResizedCrop

        dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224, scale=(0.35, 1.0), flip=0.5))
        image, label = dataset[0]  # uint8 tensor (3, 224, 224)

    Up to 10 times: an area of U(scale) of the image's, with an aspect ratio whose logarithm is uniform
    between log(ratio[0]) and log(ratio[1]); the first that fits is placed uniformly. If none fits: the
    largest centred box whose ratio is within bounds. The result is always a uint8 tensor, (3, H, W);
    torchvision's has the type of its input. An EXIF orientation is not applied.

    Args:
        size: of the result: an int or a sequence of one means a square, a pair is (height, width).
        scale: smallest and largest share of the area.
        ratio: smallest and largest width / height.
        interpolation: only "bilinear" is supported; torchvision's InterpolationMode.BILINEAR and Pillow's 2
            are accepted as the same.
        antialias: only True is supported; None means True, as in torchvision for PIL images.
        flip: probability of a horizontal flip, like a RandomHorizontalFlip(flip) after the crop. It is drawn
            after the box; 0 draws nothing.
        channels_last: (H, W, 3) instead of (3, H, W).
        max_pixels: larger images are refused before they are decoded.
        strict: a cut JPEG, or one whose damage the decoder notices, is an error (True) or served as far as it
            goes (False).

    Raises:
        ArgumentError: an argument is out of range or not supported.
    """

    clamp = True

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Any = "bilinear",
        antialias: bool | None = True,
        *,
        flip: float = 0.0,
        channels_last: bool = False,
        max_pixels: int = MAX_PIXELS,
        strict: bool = True,
    ) -> None:
        super().__init__(size, channels_last=channels_last, max_pixels=max_pixels, strict=strict)
        self.scale = _check_range("scale", scale)
        self.ratio = _check_range("ratio", ratio)
        if self.scale[1] > 1:
            raise ArgumentError(f"scale is a share of the image's area, so at most 1: not {scale!r}")
        _check_filter(interpolation, antialias)
        if isinstance(flip, bool) or not isinstance(flip, int | float) or not 0 <= flip <= 1:
            raise ArgumentError(f"flip is a probability between 0 and 1, not {flip!r}")
        self.flip = float(flip)

    def box_for(self, width: int, height: int, rng: Rng) -> CropBox:
        top, left, rows, columns = self._sample(width, height, rng)
        flip = self.flip > 0 and rng.random() < self.flip
        return CropBox((left, top, left + columns, top + rows), flip)

    def _sample(self, width: int, height: int, rng: Rng) -> tuple[int, int, int, int]:
        """(top, left, height, width) of the crop."""
        area = height * width
        for _ in range(10):
            target = area * rng.uniform(*self.scale)
            aspect = rng.log_uniform(*self.ratio)
            columns = round(math.sqrt(target * aspect))
            rows = round(math.sqrt(target / aspect))
            if 0 < columns <= width and 0 < rows <= height:
                top = rng.integers(height - rows + 1)
                return top, rng.integers(width - columns + 1), rows, columns
        columns, rows = width, height
        if width / height < self.ratio[0]:
            rows = max(1, round(width / self.ratio[0]))
        elif width / height > self.ratio[1]:
            columns = max(1, round(height * self.ratio[1]))
        return (height - rows) // 2, (width - columns) // 2, rows, columns

    def __repr__(self) -> str:
        shown = f"scale={self.scale}, ratio={self.ratio}" + (f", flip={self.flip}" if self.flip else "")
        return f"RandomResizedCrop({(self.height, self.width)}, {shown}{self._options()})"


class CenterCrop(Crop):
    """The centre of the image, by torchvision's rules, padding included.

    Example::

        from fastload import CenterCrop, ImageFolder

        dataset = ImageFolder("s3://bucket/val", CenterCrop(224, resize=256))
        image, label = dataset[0]  # uint8 tensor (3, 224, 224)

    An image that is smaller than `size` is centred on black. With `resize` the result is that of
    torchvision's Resize(resize) and CenterCrop(size), the usual transform for evaluation, but pixels outside
    the crop are not computed: for example CenterCrop(224, resize=256). The result is always a uint8 tensor,
    (3, H, W); torchvision's has the type of its input. An EXIF orientation is not applied.

    Args:
        size: of the result: an int or a sequence of one means a square, a pair is (height, width).
        resize: length of the image's shorter side before the crop; the longer one is rounded down. None: the
            image keeps its size.
        channels_last, max_pixels, strict: as in RandomResizedCrop.

    Raises:
        ArgumentError: an argument is out of range.
    """

    clamp = False

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        resize: int | None = None,
        channels_last: bool = False,
        max_pixels: int = MAX_PIXELS,
        strict: bool = True,
    ) -> None:
        super().__init__(size, channels_last=channels_last, max_pixels=max_pixels, strict=strict)
        self.resize = None if resize is None else _whole(resize)
        if resize is not None and not (self.resize and 1 <= self.resize <= _LARGEST):
            raise ArgumentError(
                f"resize is the length of the shorter side, an int from 1 to {_LARGEST}, not {resize!r}"
            )

    def box_for(self, width: int, height: int, rng: Rng) -> CropBox:
        full = (width, height) if self.resize is None else resized_size(width, height, self.resize)
        left, x0, columns = _cut(full[0], self.width)
        top, y0, rows = _cut(full[1], self.height)
        across, down = width / full[0], height / full[1]
        box = (x0 * across, y0 * down, (x0 + columns) * across, (y0 + rows) * down)
        if (rows, columns) == (self.height, self.width):
            return CropBox(box)
        return CropBox(box, inner=(top, left, rows, columns))

    def __repr__(self) -> str:
        shown = "" if self.resize is None else f", resize={self.resize}"
        return f"CenterCrop({(self.height, self.width)}{shown}{self._options()})"


def _cut(length: int, size: int) -> tuple[int, int, int]:
    """Of one axis of an image, by torchvision's roundings: (black pixels before it, first pixel, pixels)."""
    if length < size:
        return (size - length) // 2, 0, length
    return 0, round((length - size) / 2), size


def _check_size(size: int | Sequence[int]) -> tuple[int, int]:
    sides = [_whole(side) for side in size] if isinstance(size, Sequence) else [_whole(size)]
    height, width = sides if len(sides) == 2 else sides * 2 if len(sides) == 1 else (None, None)
    if height is None or width is None or not (1 <= height <= _LARGEST and 1 <= width <= _LARGEST):
        raise ArgumentError(
            f"size must be an int or (height, width), each from 1 to {_LARGEST}, not {size!r}"
        )
    return height, width


def _whole(number: Any) -> int | None:
    """An int, also one of numpy's; None for all else."""
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None


def _check_range(name: str, bounds: Sequence[float]) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not 0 < low <= high < math.inf:
        raise ArgumentError(f"{name} must be (smallest, largest), both above 0, not {bounds!r}")
    return low, high


def _check_filter(interpolation: Any, antialias: Any) -> None:
    """torchvision's two arguments about the resize, as far as they ask for the one that is done here."""
    wanted = getattr(interpolation, "value", interpolation)  # InterpolationMode.BILINEAR, PIL's BILINEAR
    if isinstance(wanted, bool) or wanted not in ("bilinear", 2):
        raise ArgumentError(
            f"interpolation must be 'bilinear', found {interpolation!r}. For another one give a transform "
            "that is not fused: any callable on a PIL image, such as torchvision's RandomResizedCrop"
        )
    if antialias is not None and antialias is not True:
        raise ArgumentError(
            f"antialias must be True, found {antialias!r}: the resize is antialiased, as torchvision's of "
            "PIL images always is. Leave the argument out"
        )
