"""RandomResizedCrop and CenterCrop, fused: decode, crop, resize, flip in one pass over the pixels.

Geometry is torchvision's, in pixels of the full-resolution image; what comes out is RGB uint8. As long as
`transform` is one of these, only the part of a JPEG that the crop needs is decoded, at the smallest scale
that has enough pixels, straight into the caller's memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fastload.errors import ArgumentError, DecodeError
from fastload.images import native
from fastload.images.decode import MAX_PIXELS, open_image, resized_size
from fastload.images.native import Item, Source
from fastload.images.rng import SampleRng

if TYPE_CHECKING:
    import torch

__all__ = ["CenterCrop", "RandomResizedCrop"]

Box = tuple[float, float, float, float]


class Rng(Protocol):
    """What a transform draws from: a sample's own generator, or torch's global one."""

    def random(self) -> float: ...
    def integers(self, n: int) -> int: ...
    def uniform(self, low: float, high: float) -> float: ...
    def log_uniform(self, low: float, high: float) -> float: ...


class TorchRng:
    """torch's global generator, drawn from as torchvision's transforms do: the same seed, the same crops."""

    def random(self) -> float:
        import torch

        return torch.rand(1).item()

    def integers(self, n: int) -> int:
        import torch

        return int(torch.randint(0, n, size=(1,)).item())

    def uniform(self, low: float, high: float) -> float:
        import torch

        return torch.empty(1).uniform_(low, high).item()

    def log_uniform(self, low: float, high: float) -> float:
        import torch

        bounds = torch.log(torch.tensor((low, high)))
        return torch.exp(torch.empty(1).uniform_(float(bounds[0]), float(bounds[1]))).item()


class Crop(ABC):
    """What both crops share; a subclass says where the box lies.

    Attributes:
        sample_shape: (3, H, W), or (H, W, 3) with channels_last; dtype uint8.
        clamp: pixels outside of the box do not count (crop, then resize), or do (resize, then crop).
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
    def _place(self, width: int, height: int, rng: Rng) -> tuple[Box, bool]:
        """The box (x0, y0, x1, y1) to cut from an image of that size, and whether to flip it."""

    def fill(
        self, out: np.ndarray[Any, Any], images: Sequence[Source], seeds: Sequence[int]
    ) -> list[tuple[int, DecodeError]]:
        """Transform a batch into memory that the caller owns; the GIL is released for all its JPEGs at once.

        Args:
            out: (n, *sample_shape) uint8, C-contiguous and writable. Rows of failed images are undefined.
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
                item = self._item(k, image, SampleRng(seed))
            except DecodeError as error:
                failures[k] = error
                continue
            if item[1] is image or isinstance(item[1], memoryview):
                items.append(item)
            else:  # decoded here (PNG ...): done at once, so that only one such image is in memory
                failures.update(self.render(out, [item]))
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
        out = np.empty((1, *self.sample_shape), np.uint8)
        for _, error in self.render(out, [self._item(0, image, TorchRng())]):
            raise error
        return torch.from_numpy(out[0])

    def place(self, image: Source, seed: int) -> tuple[Source, int, int, Box, bool]:
        """What `fill` would do with an image, found without decoding it.

        Returns:
            (source, width, height, box, flip): a JPEG's bytes, or the pixels of what is none; the size of the
            full image; the box (x0, y0, x1, y1) to be resized, in its pixels; whether to flip the result.

        Raises:
            DecodeError: not an image, a damaged header, cut (if `strict`), or too large.
        """
        source, width, height = open_image(image, self.max_pixels, self.strict)
        return source, width, height, *self._place(width, height, SampleRng(seed))

    def render(self, out: np.ndarray[Any, Any], items: Sequence[Item]) -> list[tuple[int, DecodeError]]:
        """Decode, crop and resize `items` into their rows of `out`; (row, error) of those that failed."""
        failures = native.active().crop_resize(
            out, items, self.channels_last, self.clamp, self.max_pixels, self.strict
        )
        return [(row, DecodeError(reason)) for row, reason in failures]

    def _item(self, k: int, image: Source, rng: Rng) -> Item:
        source, width, height = open_image(image, self.max_pixels, self.strict)
        box, flip = self._place(width, height, rng)
        return (k, source, *box, flip)

    def _options(self) -> str:
        """The arguments in `repr` that differ from their defaults, of those that both crops have."""
        shown = f", channels_last={self.channels_last}" if self.channels_last else ""
        shown += f", max_pixels={self.max_pixels}" if self.max_pixels != MAX_PIXELS else ""
        return shown + ("" if self.strict else ", strict=False")


class RandomResizedCrop(Crop):
    """A random part of the image, resized to `size` and randomly flipped; torchvision's law.

    Up to 10 times: an area of U(scale) of the image's, with an aspect ratio whose logarithm is uniform
    between log(ratio[0]) and log(ratio[1]); the first that fits is placed uniformly. If none fits: the
    largest centred box whose ratio is within bounds.

    Args:
        size: of the result; an int means a square, a pair is (height, width).
        scale: smallest and largest share of the area.
        ratio: smallest and largest width / height.
        flip: probability of a horizontal flip; it is drawn after the box, and not at all at 0.
        channels_last: (H, W, 3) instead of (3, H, W).
        max_pixels: larger images are refused before they are decoded.
        strict: a damaged JPEG is an error (True) or served as far as it goes (False).

    Raises:
        ArgumentError: an argument is out of range.
    """

    clamp = True

    def __init__(
        self,
        size: int | Sequence[int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        *,
        flip: float = 0.5,
        channels_last: bool = False,
        max_pixels: int = MAX_PIXELS,
        strict: bool = True,
    ) -> None:
        super().__init__(size, channels_last=channels_last, max_pixels=max_pixels, strict=strict)
        self.scale = _check_range("scale", scale)
        self.ratio = _check_range("ratio", ratio)
        if self.scale[1] > 1:
            raise ArgumentError(f"scale is a share of the image's area, so at most 1: not {scale!r}")
        if not 0 <= flip <= 1:
            raise ArgumentError(f"flip is a probability between 0 and 1, not {flip!r}")
        self.flip = float(flip)

    def _place(self, width: int, height: int, rng: Rng) -> tuple[Box, bool]:
        top, left, rows, columns = self._sample(width, height, rng)
        flip = self.flip > 0 and rng.random() < self.flip
        return (left, top, left + columns, top + rows), flip

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
        return (
            f"RandomResizedCrop({(self.height, self.width)}, scale={self.scale}, ratio={self.ratio}, "
            f"flip={self.flip}{self._options()})"
        )


class CenterCrop(Crop):
    """The shorter side resized to `resize`, then the centre `size` cut out: evaluation's usual transform.

    The same as torchvision's Resize(resize) and CenterCrop(size), without the pixels that are cut away.

    Args:
        size: of the result; an int means a square, a pair is (height, width).
        resize: length of the shorter side before the crop; None: 256/224 of `size`, rounded.
        channels_last, max_pixels, strict: as in RandomResizedCrop.

    Raises:
        ArgumentError: an argument is out of range; `resize` is smaller than `size`.
    """

    clamp = False

    def __init__(
        self,
        size: int | Sequence[int],
        resize: int | None = None,
        *,
        channels_last: bool = False,
        max_pixels: int = MAX_PIXELS,
        strict: bool = True,
    ) -> None:
        super().__init__(size, channels_last=channels_last, max_pixels=max_pixels, strict=strict)
        longest = max(self.height, self.width)
        self.resize = round(longest * 256 / 224) if resize is None else resize
        if not isinstance(self.resize, int) or self.resize < longest:
            raise ArgumentError(
                f"resize must be an integer of at least size ({longest}), not {resize!r}: "
                "a smaller image would have to be padded"
            )

    def _place(self, width: int, height: int, rng: Rng) -> tuple[Box, bool]:
        full_width, full_height = resized_size(width, height, self.resize)
        left, top = round((full_width - self.width) / 2), round((full_height - self.height) / 2)
        across, down = width / full_width, height / full_height
        return (left * across, top * down, (left + self.width) * across, (top + self.height) * down), False

    def __repr__(self) -> str:
        return f"CenterCrop({(self.height, self.width)}, resize={self.resize}{self._options()})"


def _check_size(size: int | Sequence[int]) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    if len(pair) != 2 or not all(isinstance(side, int) and 1 <= side <= 8192 for side in pair):
        raise ArgumentError(f"size must be an int or (height, width), each from 1 to 8192, not {size!r}")
    return pair[0], pair[1]


def _check_range(name: str, bounds: Sequence[float]) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not 0 < low <= high < math.inf:
        raise ArgumentError(f"{name} must be (smallest, largest), both above 0, not {bounds!r}")
    return low, high
