"""The argument `transform` of a dataset: for a sample, or for its fields; and images that are cut together.

`FieldTransforms` is the one place that refuses a transform which names no field, or which takes an image
where there is none.

The fused transforms of one sample draw the same random numbers. Where one of its images needs its own values
(a mask), the box is drawn for the first image and scaled to the size of the others, which a cache may have
made smaller, and a cache keeps the mask as it is. Images without a mask among them are views: each has a box
of its own size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from fastload.checks import check_function
from fastload.errors import ArgumentError, DecodeError
from fastload.images.crop import Crop, Size
from fastload.images.rng import SampleRng
from fastload.images.transforms import (
    ByEpoch,
    all_transforms,
    current_transform,
    first_epochs,
    is_fused,
    made_by_kernel,
    transform_at,
)

_log = logging.getLogger("fastload")

ADVICE = (
    "Name what a sample consists of, with alternatives and optional members: "
    "fields=('jpg;jpeg;png;webp', 'cls', 'json?'); or give transform= a function of the whole sample that "
    "makes all alike"
)
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_COLOUR = 25  # where its header says: 0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGB and alpha

Transform = Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None


class FieldTransforms:
    """The argument `transform` of a dataset whose samples have several fields.

    Args:
        transform: a callable on the sample; a fused transform, for the one image among the fields; or a dict
            {field: either}.
        lists: the fields that are lists of images. A fused transform takes each image of such a field. They
            have no column in a batch, as their number differs from sample to sample.

    Raises:
        ArgumentError: a transform cannot be called, or is a crop with a `__call__` of the user's.
    """

    def __init__(self, transform: Transform, lists: Collection[str] = ()) -> None:
        self.transform = transform
        self._lists = lists
        self._masks_seen = False
        self.by_epoch: list[ByEpoch] = []
        # Names, what is current of the others, and what came of them. The threads of a loader share it.
        self._last: tuple[tuple[str, ...], list[Any], dict[str, Crop]] | None = None
        for name, each in self._parts():
            check_function(name, each)
            for one in all_transforms(each):
                _refuse_own_call(one)
            if isinstance(each, ByEpoch):
                self.by_epoch.append(each)

    def _parts(self) -> list[tuple[str, Any]]:
        """Return (name of the argument, transform) of each."""
        if isinstance(self.transform, Mapping):
            return [(f"transform[{name!r}]", each) for name, each in self.transform.items()]
        return [("transform", self.transform)]

    def start_epoch(self, epoch: int) -> None:
        """Let the transforms that depend on the epoch know it."""
        for each in self.by_epoch:
            each.start_epoch(epoch)

    # --- what is true before any sample is read

    @property
    def only_fused(self) -> bool:
        """Whether all are fused ones that the kernel does alone, in all epochs."""
        parts = self._parts()
        return bool(parts) and all(made_by_kernel(one) for _, one in parts)

    @property
    def crops(self) -> dict[str, Crop]:
        """The fused transforms of this epoch, by the name of their argument."""
        parts = ((name, current_transform(each)) for name, each in self._parts())
        return {name: each for name, each in parts if isinstance(each, Crop)}

    @property
    def list_crops(self) -> dict[str, Crop]:
        """The fused transforms that take the images of lists, by field."""
        parts = self._by_field() if self._lists else {}
        return {name: parts[name] for name in self._lists if isinstance(parts.get(name), Crop)}

    @property
    def fills_rows(self) -> bool:
        """Whether images are written straight into the batch: all that have a fused transform."""
        crops = self.crops.values()
        return bool(crops) and all(crop._fills_rows for crop in crops)

    @property
    def is_random(self) -> bool:
        """Whether fused transforms draw from the seed of the sample, in this epoch."""
        return self.fills_rows and any(crop._draws for crop in self.crops.values())

    @property
    def crop_hash(self) -> int:
        """A number of what fused transforms do in this epoch; 0: there are none."""
        numbers = sorted((name, crop._number) for name, crop in self.crops.items())
        return xxhash.xxh3_64_intdigest(repr(numbers).encode()) if self.fills_rows else 0

    @property
    def runs_user_code(self) -> bool:
        """Whether functions of the user run while rows are filled, beside a fused transform."""
        return isinstance(self.transform, Mapping) and len(self.crops) < len(self.transform)

    @property
    def of_sample(self) -> Any:
        """The function of the whole sample in this epoch, fused or not; None: there is none."""
        return None if isinstance(self.transform, Mapping) else current_transform(self.transform)

    def crop_for(self, name: str) -> Crop:
        """Return the fused transform of an image in this epoch."""
        crop: Crop = current_transform(
            self.transform[name] if isinstance(self.transform, Mapping) else self.transform
        )
        return crop

    def functions(self) -> dict[str, Callable[[Any], Any]]:
        """Return the functions of single fields in this epoch that are not fused, by field."""
        return {name: each for name, each in self._by_field().items() if not isinstance(each, Crop)}

    def _by_field(self) -> dict[str, Any]:
        """Return the transforms of single fields in this epoch, by field."""
        parts = self.transform.items() if isinstance(self.transform, Mapping) else ()
        return {name: current_transform(each) for name, each in parts}

    def check(
        self,
        names: Sequence[str],
        images: Sequence[str],
        way_out: str,
        *,
        named: Collection[str] | None = None,
        optional: Collection[str] = (),
    ) -> None:
        """Refuse transforms that no sample can satisfy.

        Args:
            names: the fields of all samples.
            images: those that may be encoded images.
            way_out: how to get an image among the fields.
            named: those that a fused transform may be given by name. Default: all.
            optional: the fields that may be None.

        Raises:
            ArgumentError: a transform names no field, or is fused and has no image of its own.
        """
        parts: dict[str, Any] = dict(self.transform) if isinstance(self.transform, Mapping) else {}
        for name in parts:
            if name not in names:
                raise ArgumentError(
                    f"transform names {name!r}, and a sample has {', '.join(names)}: a field in a dict is "
                    "named by its key, any other by its column, or by its first extension"
                )
        if is_fused(self.transform):
            if len(images) > 1:
                raise ArgumentError(
                    f"transform takes one image, and {' and '.join(images)} may be one: name it, as in "
                    f"transform={{{images[0]!r}: RandomResizedCrop(224)}}"
                )
            if not images:
                raise ArgumentError(
                    f"transform={self.transform!r} takes an image, and none of {', '.join(names)} may be "
                    f"one: {way_out}"
                )
            parts = {images[0]: self.transform}
        for name, each in parts.items():
            if is_fused(each) and named is not None and name not in named:
                raise ArgumentError(f"transform[{name!r}] takes an image, and that field is none: {way_out}")
            if is_fused(each) and name in optional:
                raise ArgumentError(
                    f"fields= has {name!r} as optional, and a fused transform writes it into a tensor, which "
                    "cannot hold None: leave out the '?', or give transform= a function for it"
                )

    def refuse_fields(self) -> None:
        """Refuse transforms of fields where a sample has none, because its `decode` makes it.

        Raises:
            ArgumentError: there are some.
        """
        if is_fused(self.transform) or isinstance(self.transform, Mapping):
            raise ArgumentError(
                f"transform={self.transform!r} is for the fields of a sample: pass fields= and no decode=, "
                "or a function of what decode returns"
            )

    # --- of one sample

    def crops_of(
        self, fields: Mapping[str, Any], images: Callable[[Mapping[str, Any]], Sequence[str]]
    ) -> dict[str, Crop]:
        """Return image -> the fused transform that takes it, for the fields of a sample.

        Raises:
            DecodeError: the sample does not have the one image, or those that are named.
        """
        names, current = tuple(fields), [each.current for each in self.by_epoch]
        last = self._last
        if last is None or last[0] != names or last[1] != current:  # samples are mostly alike
            last = self._last = names, current, self._find_crops(fields, images(fields))
        return last[2]

    def _find_crops(self, fields: Mapping[str, Any], images: Sequence[str]) -> dict[str, Crop]:
        if isinstance(self.transform, Mapping):
            missing = sorted(self.transform.keys() - fields.keys())
            if missing:
                raise DecodeError(
                    f"{name_of(fields)} has no {missing[0]!r}; it has {', '.join(fields)}. {ADVICE}"
                )
            parts = self._by_field().items()
            crops = {n: each for n, each in parts if n not in self._lists and isinstance(each, Crop)}
            self._warn_of_masks(fields, crops, images)
            return crops
        crop = current_transform(self.transform)
        if not isinstance(crop, Crop):
            return {}
        if len(images) != 1:
            raise DecodeError(
                f"the transform takes one image, and {name_of(fields)} has {', '.join(images) or 'none'} "
                f"among {', '.join(fields)}: name it, as in transform={{'jpg': RandomResizedCrop(224)}}"
            )
        return {images[0]: crop}

    def _warn_of_masks(
        self, fields: Mapping[str, Any], crops: Mapping[str, Crop], images: Sequence[str]
    ) -> None:
        """Warn. It is no error, for a PNG with a palette or in grey may well be a photo."""
        if self._masks_seen or len(images) < 2:
            return
        masks = [name for name in crops if not crops[name]._own_values and _may_be_mask(fields[name])]
        if masks:
            self._masks_seen = True
            _log.warning(
                "%r of %s is a greyscale or palette PNG. If it is a mask: this transform interpolates its "
                "values and makes them RGB; give it interpolation='nearest' and channels=1",
                masks[0],
                name_of(fields),
            )


def _refuse_own_call(transform: Any) -> None:
    """Raise `ArgumentError` for a subclass of a crop that overrides `__call__`: no row is made by that."""
    kind = type(transform)
    if not isinstance(transform, Crop):
        return
    home = next(cls for cls in kind.__mro__ if "__call__" in vars(cls))
    if not home.__module__.startswith("fastload."):
        raise ArgumentError(
            f"transform= has a {kind.__name__}, and batches would be made without {home.__name__}.__call__: "
            "give a function that calls the crop, or the crop itself and fastload.map(dataset, function)"
        )


def name_of(fields: Mapping[str, Any]) -> str:
    """Return a sample in error messages, beside the record's name there."""
    return f"sample {fields['__key__']!r}" if "__key__" in fields else "the sample"


def _may_be_mask(value: Any) -> bool:
    if not isinstance(value, bytes | memoryview) or value[: len(_PNG)] != _PNG or len(value) <= _PNG_COLOUR:
        return False
    return value[_PNG_COLOUR] in (0, 3)


# --- the images of one sample


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
        """Return whether these are all that another transform needs."""
        return self.every or (not other.every and other.names <= self.names)

    def __str__(self) -> str:
        return "all images" if self.every else ", ".join(sorted(self.names))


NO_IMAGES = KeptImages()


def images_kept(transform: Any) -> KeptImages:
    """Return the images that a cache has to keep as they are for this transform, in all epochs."""
    if isinstance(transform, Mapping):
        return KeptImages(frozenset(name for name, part in transform.items() if _needs_own_values(part)))
    return KeptImages(every=_needs_own_values(transform))


def is_cropped(transform: Any) -> bool:
    """Return whether a fused transform interpolates an image, in any epoch."""
    return bool(_interpolating(transform))


def is_lenient(transform: Any) -> bool:
    """Return whether a fused transform interpolates damaged images too, in any epoch."""
    return any(not crop.strict for crop in _interpolating(transform))


def always_fused(names: Collection[str], transform: Any) -> bool:
    """Return whether each of these images has a fused transform, in all epochs."""
    parts = transform if isinstance(transform, Mapping) else dict.fromkeys(names, transform)
    return all(isinstance(each, Crop) for name in names for each in all_transforms(parts.get(name)))


def _interpolating(transform: Any) -> list[Crop]:
    parts = transform.values() if isinstance(transform, Mapping) else [transform]
    every = [each for part in parts for each in all_transforms(part)]
    return [each for each in every if isinstance(each, Crop) and not each._own_values]


def _needs_own_values(transform: Any) -> bool:
    return any(isinstance(each, Crop) and each._own_values for each in all_transforms(transform))


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
            if crop._law != crops[first]._law:
                raise ArgumentError(
                    f"transform[{first!r}] and transform[{name!r}] must cut alike, for a sample with a mask: "
                    "give both the same scale, ratio and flip, or resize= in the same proportion; found "
                    f"{crops[first]!r} and {crop!r}"
                )


def transform_together(crops: Mapping[str, Crop], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the images of one sample, transformed.

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
            made[name], size = crop._draw(fields[name], SampleRng(seed), first)
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
        for position, error in crops[name]._fill_rows(batch[name].numpy(), rows, encoded, seeds, sizes):
            if len(crops) > 1:
                _name(error, name)
            bad.setdefault(position, error)
    return sorted(bad.items())


def _any_mask(crops: Mapping[str, Crop]) -> bool:
    return any(crop._own_values for crop in crops.values())


def _name(error: DecodeError, name: str) -> None:
    error.message = f"image {name!r}: {error.message}"


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except DecodeError as error:
        _name(error, name)
        raise
