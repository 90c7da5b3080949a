"""The images of one sample: an image and its mask are cut alike, and a cache keeps the mask as it is.

The fused transforms of one sample draw the same random numbers. Where one of its images needs its own values
(a mask), the box is drawn for the first image and scaled to the size of the others, which a cache may have
made smaller. Images without a mask among them are views: each has a box of its own size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fastload.errors import ArgumentError, DecodeError
from fastload.images.by_epoch import all_transforms, first_epochs, transform_at
from fastload.images.crop import Crop, Size
from fastload.images.rng import SampleRng


@dataclass(frozen=True)
class KeptImages:
    """The images of a sample that a cache has to keep as they are: transforms need their own values.

    Args:
        names: of these images.
        every: all images of a sample; then there are no names.
    """

    names: frozenset[str] = frozenset()
    every: bool = False

    def __contains__(self, name: str) -> bool:
        return self.every or name in self.names

    def __bool__(self) -> bool:
        return self.every or bool(self.names)

    def covers(self, other: KeptImages) -> bool:
        """Whether these are all that another transform needs."""
        return self.every or (not other.every and other.names <= self.names)

    def __str__(self) -> str:
        return "all images" if self.every else ", ".join(sorted(self.names))


NO_IMAGES = KeptImages()


def images_kept(transform: Any) -> KeptImages:
    """The images that a cache has to keep as they are for this transform, in all epochs."""
    if isinstance(transform, Mapping):
        return KeptImages(frozenset(name for name, part in transform.items() if _needs_own_values(part)))
    return KeptImages(every=_needs_own_values(transform))


def is_cropped(transform: Any) -> bool:
    """Whether a fused transform interpolates an image, in any epoch."""
    parts = transform.values() if isinstance(transform, Mapping) else [transform]
    return any(
        isinstance(each, Crop) and not each.own_values for part in parts for each in all_transforms(part)
    )


def always_fused(names: Collection[str], transform: Any) -> bool:
    """Whether each of these images has a fused transform, in all epochs."""
    parts = transform if isinstance(transform, Mapping) else dict.fromkeys(names, transform)
    return all(isinstance(each, Crop) for name in names for each in all_transforms(parts.get(name)))


def _needs_own_values(transform: Any) -> bool:
    return any(isinstance(each, Crop) and each.own_values for each in all_transforms(transform))


def check_cut_alike(transform: Any) -> None:
    """Check that a mask and its image are cut by the same rules, in every epoch.

    Raises:
        ArgumentError: they are not.
    """
    if not isinstance(transform, Mapping) or not images_kept(transform):
        return
    for epoch in sorted({first for part in transform.values() for first in first_epochs(part)}):
        parts = {name: transform_at(part, epoch) for name, part in transform.items()}
        crops = {name: part for name, part in parts.items() if isinstance(part, Crop)}
        for name, crop in crops.items():
            first = next(iter(crops))
            if crop.law != crops[first].law:
                raise ArgumentError(
                    f"transform[{first!r}] and transform[{name!r}] must cut alike, for a sample with a mask: "
                    "give both the same scale, ratio and flip, or resize= in the same proportion; found "
                    f"{crops[first]!r} and {crop!r}"
                )


def transform_together(crops: Mapping[str, Crop], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The images of one sample, transformed.

    Of several images, all boxes are drawn from one seed, which comes from torch's global generator. To set
    that generator back for each image was rejected: other threads of a loader draw from it in between.

    Raises:
        DecodeError: an image cannot be decoded, or cut like the first one.
    """
    if len(crops) < 2:
        return {name: crop(fields[name]) for name, crop in crops.items()}
    made: dict[str, Any] = {}
    first: Size | None = None
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    for name, crop in crops.items():
        with _naming(name):
            made[name], size = crop.draw(fields[name], SampleRng(seed), first)
        if _any_mask(crops) and first is None:
            first = size
    return made


def fill_together(
    crops: Mapping[str, Crop],
    batch: Mapping[str, Any],
    rows: list[int],
    images: Mapping[str, list[Any]],
    seeds: list[int],
) -> list[tuple[int, DecodeError]]:
    """Write images into their rows of a batch; (position in `rows`, error) of those that failed.

    Args:
        images: name -> the encoded images of `rows`.
        seeds: one for each row, from which all its images are drawn.
    """
    bad: dict[int, DecodeError] = {}
    sizes: list[Size | None] | None = [None] * len(rows) if len(crops) > 1 and _any_mask(crops) else None
    for name, encoded in images.items():
        for position, error in crops[name].fill_rows(batch[name].numpy(), rows, encoded, seeds, sizes):
            if len(crops) > 1:
                _name(error, name)
            bad.setdefault(position, error)
    return sorted(bad.items())


def _any_mask(crops: Mapping[str, Crop]) -> bool:
    return any(crop.own_values for crop in crops.values())


def _name(error: DecodeError, name: str) -> None:
    error.message = f"image {name!r}: {error.message}"


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except DecodeError as error:
        _name(error, name)
        raise
