"""RandomResizedCrop and CenterCrop, by torchvision's rules, and ByEpoch; `images.crop` says how crops run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.checks import refuse_class
from fastload.errors import ArgumentError, DecodeError, shorten_errors
from fastload.images.crop import LARGEST_SIDE, Crop, CropBox, Size, check_size, whole_side
from fastload.images.decode import resized_size
from fastload.images.kernel import BoxLaw, kernel
from fastload.images.masks import nearest
from fastload.images.rng import Rng


class RandomResizedCrop(Crop):
    """A random part of the image, resized to `size`, with torchvision's rules and order of arguments.

    Example::

        from fastload import ImageFolder, RandomResizedCrop

        dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224, scale=(0.35, 1.0), flip=0.5))
        image, label = dataset[0]  # uint8 tensor (3, 224, 224)

    Up to 10 times: an area of U(scale) of the image's, with an aspect ratio whose logarithm is uniform
    between log(ratio[0]) and log(ratio[1]); the first that fits is placed uniformly. If none fits: the
    largest centred box whose ratio is within bounds. The result is always a uint8 tensor, (channels, H, W);
    torchvision's has the type of its input. An EXIF orientation is not applied.

    For a mask: `RandomResizedCrop(224, flip=0.5, interpolation="nearest", channels=1)`. The images of one
    sample get the same random numbers; see "Image and mask" in the documentation.

    Args:
        size: size of the result. An int or a sequence of one means a square, a pair is (height, width).
        scale: smallest and largest share of the area.
        ratio: smallest and largest width / height.
        flip: probability of a horizontal flip, like a RandomHorizontalFlip(flip) after the crop. It is drawn
            after the box; 0 draws nothing.
        interpolation: "bilinear", or "nearest" for masks, which equals Pillow's to the bit and invents no
            value. torchvision's InterpolationMode and Pillow's 2 and 0 are accepted as the same.
        channels: 3, RGB; or 1, the image's own single channel of 8 bits, as it is: grey values, the indices
            into a palette (class numbers), 0 and 1 of a 1-bit image. An image in colour or of 16 bits is then
            a DecodeError.
        channels_last: (H, W, channels) instead of (channels, H, W).
        strict: a cut JPEG, or one whose damage the decoder notices, is an error (True) or served as far as it
            goes (False; a cache in mode "shrunk" or "decoded" does not take it).

    Raises:
        ArgumentError: an argument is out of range or not supported.
    """

    _clamp = True

    @shorten_errors
    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        *,
        flip: float = 0.0,
        interpolation: Any = "bilinear",
        channels: int = 3,
        channels_last: bool = False,
        strict: bool = True,
    ) -> None:
        super().__init__(
            size,
            interpolation=check_interpolation(interpolation),
            channels=channels,
            channels_last=channels_last,
            strict=strict,
        )
        if isinstance(scale, int | float):
            raise ArgumentError(
                f"scale must be (smallest, largest) share of the area, found {scale!r}: a size of (height, "
                f"width) is one argument, as in RandomResizedCrop(({size}, {scale}))"
            )
        self.scale = check_range("scale", scale)
        self.ratio = check_range("ratio", ratio)
        if self.scale[1] > 1:
            raise ArgumentError(f"scale is a share of the image's area, so at most 1: not {scale!r}")
        self.flip = check_flip(flip)

    @property
    def _law(self) -> tuple[Any, ...]:
        return "RandomResizedCrop", self.scale, self.ratio, self.flip

    @property
    def _box_law(self) -> BoxLaw | None:
        if type(self) is not RandomResizedCrop or self._own_values:
            return None
        return "random", *self.scale, *self.ratio, self.flip

    def _box_for(self, width: int, height: int, rng: Rng) -> CropBox:
        top, left, rows, columns = self._sample(width, height, rng)
        flip = self.flip > 0 and rng.random() < self.flip
        return CropBox((left, top, left + columns, top + rows), flip)

    def _sample(self, width: int, height: int, rng: Rng) -> tuple[int, int, int, int]:
        """Return (top, left, height, width) of the crop."""
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
    (channels, H, W); torchvision's has the type of its input. An EXIF orientation is not applied.

    Args:
        size: size of the result. An int or a sequence of one means a square, a pair is (height, width).
        resize: length of the image's shorter side before the crop; the longer one is rounded down. A pair is
            (height, width), whatever the image's proportions. None: the image keeps its size.
        interpolation, channels, channels_last, strict: as in RandomResizedCrop.

    Raises:
        ArgumentError: an argument is out of range.
    """

    _clamp = False
    _draws = False

    @shorten_errors
    def __init__(
        self,
        size: int | Sequence[int],
        *,
        resize: int | Sequence[int] | None = None,
        interpolation: Any = "bilinear",
        channels: int = 3,
        channels_last: bool = False,
        strict: bool = True,
    ) -> None:
        super().__init__(
            size,
            interpolation=check_interpolation(interpolation),
            channels=channels,
            channels_last=channels_last,
            strict=strict,
        )
        self.resize = check_resize(resize)

    @property
    def _law(self) -> tuple[Any, ...]:
        size = self.height, self.width
        resize = (self.resize, self.resize) if isinstance(self.resize, int) else self.resize
        if resize is None:
            return "CenterCrop", *size
        kind = "CenterCrop of the resized image", isinstance(self.resize, int)
        return *kind, size[0] / resize[0], size[1] / resize[1]

    @property
    def _box_law(self) -> BoxLaw | None:
        if type(self) is not CenterCrop or self._own_values:
            return None
        height, width = self.resize if isinstance(self.resize, tuple) else (self.resize or 0, 0)
        return "centre", height, width

    def _box_for(self, width: int, height: int, rng: Rng) -> CropBox:
        full = self._resized(width, height)
        left, x0, columns = _cut(full[0], self.width)
        top, y0, rows = _cut(full[1], self.height)
        across, down = width / full[0], height / full[1]
        # Rounding may lead beyond the edge, and a flip to the other side of it.
        right, bottom = min(width, (x0 + columns) * across), min(height, (y0 + rows) * down)
        box = (x0 * across, y0 * down, right, bottom)
        if (rows, columns) == (self.height, self.width):
            return CropBox(box)
        return CropBox(box, inner=(top, left, rows, columns))

    def _scaled_box(self, width: int, height: int, first: Size, rng: Rng) -> CropBox:
        if self.resize is None:
            raise DecodeError(
                f"it has {width} x {height} pixels, and the first image of its sample {first[0]} x "
                f"{first[1]}, perhaps in a cache of smaller ones: CenterCrop needs resize= to cut them alike"
            )
        return self._box_for(width, height, rng)

    def _resized(self, width: int, height: int) -> Size:
        """Return the size of the image that the crop is taken from."""
        if self.resize is None:
            return width, height
        if isinstance(self.resize, int):
            return resized_size(width, height, self.resize)
        return self.resize[1], self.resize[0]

    def _nearest(
        self, image_width: int, image_height: int, chosen: CropBox, height: int, width: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        full = self._resized(image_width, image_height)  # the positions are those of the whole resized image
        x0, y0 = _cut(full[0], self.width)[1], _cut(full[1], self.height)[1]
        rows = nearest(0, image_height, full[1], stop=y0 + height)
        return rows[y0:], nearest(0, image_width, full[0], stop=x0 + width)[x0:]

    def __repr__(self) -> str:
        shown = "" if self.resize is None else f", resize={self.resize}"
        return f"CenterCrop({(self.height, self.width)}{shown}{self._options()})"


def _cut(length: int, size: int) -> tuple[int, int, int]:
    """Crop one axis as torchvision does, by its roundings: (black pixels before it, first pixel, pixels)."""
    if length < size:
        return (size - length) // 2, 0, length
    return 0, round((length - size) / 2), size


class ByEpoch:
    """Transforms that change at given epochs, as in `ByEpoch({0: RandomResizedCrop(128), 18: ...})`.

    Example::

        from fastload import ByEpoch, DataLoader, ImageFolder, RandomResizedCrop

        sizes = ByEpoch({0: RandomResizedCrop(128), 18: RandomResizedCrop(224), 30: RandomResizedCrop(288)})
        dataset = ImageFolder("s3://bucket/train", sizes)
        loader = DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8)
        next(iter(loader))[0].shape  # (256, 3, 128, 128) in epochs 0 to 17

    The transform in use is a function of the epoch, like a sample's randomness: a resumed loader uses the
    right one, and persistent workers need no extra message to change it. (A size in shared memory, set by
    the trainer, was rejected: workers make batches of the next epoch before it is set.)

    fastload's datasets follow the epochs of their DataLoader: its iterations, counted from 0 and kept in its
    state_dict(). Outside a DataLoader the epoch is 0.

    Args:
        transforms: first epoch -> transform. Epoch 0 must have one.

    Raises:
        ArgumentError: epoch 0 has none, an epoch is not an int from 0 on, or a transform is not callable.
    """

    @shorten_errors
    def __init__(self, transforms: Mapping[int, Callable[[Any], Any]]) -> None:
        if not isinstance(transforms, Mapping) or 0 not in transforms:
            raise ArgumentError(f"transforms must be a dict with a transform for epoch 0, not {transforms!r}")
        for epoch, transform in transforms.items():
            if not isinstance(epoch, int) or epoch < 0:
                raise ArgumentError(f"an epoch must be an integer from 0 on, not {epoch!r}")
            refuse_class(f"the transform from epoch {epoch}", transform)
            if not callable(transform):
                raise ArgumentError(f"the transform from epoch {epoch} must be callable, not {transform!r}")
        self.transforms = dict(sorted(transforms.items()))
        self.current = self.transforms[0]

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which all samples are from now on."""
        self.current = transform_at(self, epoch)

    def __call__(self, sample: Any) -> Any:
        return self.current(sample)

    def __repr__(self) -> str:
        return f"ByEpoch({self.transforms!r})"


def current_transform(transform: Any) -> Any:
    """Return the transform in use in this epoch, also where `transform` is not a `ByEpoch`."""
    return transform.current if isinstance(transform, ByEpoch) else transform


def all_transforms(transform: Any) -> list[Any]:
    """Return the transforms of all epochs."""
    return list(transform.transforms.values()) if isinstance(transform, ByEpoch) else [transform]


def first_epochs(transform: Any) -> list[int]:
    """Return the epochs from which on another transform is in use."""
    return list(transform.transforms) if isinstance(transform, ByEpoch) else [0]


def transform_at(transform: Any, epoch: int) -> Any:
    """Return the transform of one epoch."""
    if not isinstance(transform, ByEpoch):
        return transform
    return transform.transforms[max(first for first in transform.transforms if first <= epoch)]


def made_by_kernel(transform: Any) -> bool:
    """Return whether the kernel makes the whole result in every epoch, and no code of the user's does."""
    return kernel is not None and all(
        isinstance(one, Crop)
        and type(one).__module__.startswith("fastload.")
        and one._fills_rows
        and not one._own_values
        for one in all_transforms(transform)
    )


def is_fused(transform: Any) -> bool:
    """Return whether it is one of the crops, or has one in some epoch."""
    return any(isinstance(one, Crop) for one in all_transforms(transform))


# --- arguments


def check_range(name: str, bounds: Sequence[float]) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not 0 < low <= high < math.inf:
        raise ArgumentError(f"{name} must be (smallest, largest), both above 0, not {bounds!r}")
    return low, high


def check_resize(resize: Any) -> int | tuple[int, int] | None:
    if resize is None:
        return None
    if isinstance(resize, Sequence) and len(resize) == 2:
        return check_size(resize)
    short = whole_side(resize)
    if not (short and 1 <= short <= LARGEST_SIDE):
        raise ArgumentError(
            f"resize is the length of the shorter side, an int from 1 to {LARGEST_SIDE}, or "
            f"(height, width), not {resize!r}"
        )
    return short


def check_interpolation(interpolation: Any) -> str:
    """Check torchvision's argument about the resize, as far as it asks for one that is done here."""
    wanted = getattr(interpolation, "value", interpolation)  # InterpolationMode.BILINEAR, PIL's BILINEAR
    known = {"bilinear": "bilinear", 2: "bilinear", "nearest": "nearest", 0: "nearest"}
    if isinstance(wanted, bool) or not isinstance(wanted, int | str) or wanted not in known:
        raise ArgumentError(
            f"interpolation must be 'bilinear' or 'nearest', found {interpolation!r}. For another one give "
            "a transform that is not fused: any callable on a PIL image, such as torchvision's "
            "RandomResizedCrop"
        )
    return known[wanted]


def check_flip(flip: Any) -> float:
    if isinstance(flip, bool) or not isinstance(flip, int | float) or not 0 <= flip <= 1:
        raise ArgumentError(f"flip is a probability between 0 and 1, not {flip!r}")
    return float(flip)
