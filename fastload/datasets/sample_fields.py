"""The named fields that samples are made of: their structure, and the transforms that go with them.

    fields=("image", "label")                 samples (image, label), batches [images, labels]
    fields={"x": "image", "y": "label"}       samples and batches {"x": ..., "y": ...}
    fields=("image", {"y": "label"})          nested
    fields="image"                            the value itself

Datasets make their samples as flat dicts {name: value}; a `Shape` gives these the user's structure.
Each field has a name, and is opened in a way of its own; some are encoded images, which a fused transform may
take as they are. `FieldTransforms` is the one place that refuses a transform which names no field, or which
takes an image where there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import xxhash

from fastload.checks import check_function
from fastload.errors import ArgumentError, DecodeError
from fastload.images.by_epoch import ByEpoch, current_transform
from fastload.images.crop import Crop, is_fused, made_by_kernel

_log = logging.getLogger("fastload")

ADVICE = (
    "Name what a sample consists of, with alternatives and optional members: "
    "fields=('jpg;jpeg;png;webp', 'cls', 'json?'); or give transform= a function of the whole sample that "
    "makes all alike"
)
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_COLOUR = 25  # where its header says: 0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGB and alpha

Transform = Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None


class SampleFields(Protocol):
    """The fields that samples are made of."""

    def images(self, fields: Mapping[str, Any]) -> Sequence[str]:
        """The names of the fields that are encoded images."""

    def open(self, name: str, value: Any) -> Any:
        """A field that is no image -> its value in the sample.

        Raises:
            DecodeError: its bytes are not of its kind, or its kind is refused.
        """

    def open_image(self, value: Any) -> Any:
        """An image -> its value in a sample without a fused transform.

        Its bytes, or (H, W, 3) pixels where the cache keeps pixels.
        """


class Fields(SampleFields, Protocol):
    """The fields that the records of a format have."""

    @property
    def key(self) -> str:
        """A text that differs where other arguments give other fields: part of the cache's keys."""

    def needs_files(self, transform: Any) -> bool:
        """Whether samples with this transform need the files of images, where a cache has records of them."""

    def split(self, payload: memoryview) -> dict[str, Any]:
        """The fields of a record, as they lie in it.

        Raises:
            DecodeError: it is no record of this format.
        """


class FieldTransforms:
    """The argument `transform` of a dataset whose samples have several fields.

    Args:
        transform: a callable on the sample; a fused transform, for the one image among the fields; or a dict
            {field: either}.

    Raises:
        ArgumentError: a transform cannot be called.
    """

    def __init__(self, transform: Transform) -> None:
        self.transform = transform
        self._masks_seen = False
        self._by_epoch: list[ByEpoch] = []
        # Names, what is current of the others, and what came of them. The threads of a loader share it.
        self._last: tuple[tuple[str, ...], list[Any], dict[str, Crop]] | None = None
        for name, each in self._parts():
            check_function(name, each)
            if isinstance(each, ByEpoch):
                self._by_epoch.append(each)

    def _parts(self) -> list[tuple[str, Any]]:
        """Return (name of the argument, transform) of each."""
        if isinstance(self.transform, Mapping):
            return [(f"transform[{name!r}]", each) for name, each in self.transform.items()]
        return [("transform", self.transform)]

    def start_epoch(self, epoch: int) -> None:
        """Let the transforms that depend on the epoch know it."""
        for each in self._by_epoch:
            each.start_epoch(epoch)

    # --- what is true before any sample is read

    @property
    def has_fused(self) -> bool:
        """Whether a fused transform is among them, in any epoch."""
        return any(is_fused(each) for _, each in self._parts())

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
    def fills_rows(self) -> bool:
        """Whether images are written straight into the batch: all that have a fused transform."""
        crops = self.crops.values()
        return bool(crops) and all(crop.fills_rows for crop in crops)

    @property
    def is_random(self) -> bool:
        """Whether fused transforms draw from the seed of the sample, in this epoch."""
        return self.fills_rows and any(crop.draws for crop in self.crops.values())

    @property
    def crop_hash(self) -> int:
        """A number of what fused transforms do in this epoch; 0: there are none."""
        numbers = sorted((name, crop.number) for name, crop in self.crops.items())
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
        if not isinstance(self.transform, Mapping):
            return {}
        parts = {name: current_transform(each) for name, each in self.transform.items()}
        return {name: each for name, each in parts.items() if not isinstance(each, Crop)}

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
        if self.has_fused or isinstance(self.transform, Mapping):
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
        names, current = tuple(fields), [each.current for each in self._by_epoch]
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
            parts = {name: current_transform(each) for name, each in self.transform.items()}
            crops = {name: each for name, each in parts.items() if isinstance(each, Crop)}
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
        """Not an error, for a PNG with a palette or in grey may well be a photo."""
        if self._masks_seen or len(images) < 2:
            return
        masks = [name for name in crops if not crops[name].own_values and _may_be_mask(fields[name])]
        if masks:
            self._masks_seen = True
            _log.warning(
                "%r of %s is a greyscale or palette PNG. If it is a mask: this transform interpolates its "
                "values and makes them RGB; give it interpolation='nearest' and channels=1",
                masks[0],
                name_of(fields),
            )


def name_of(fields: Mapping[str, Any]) -> str:
    """Return a sample in error messages, beside the record's name there."""
    return f"sample {fields['__key__']!r}" if "__key__" in fields else "the sample"


def _may_be_mask(value: Any) -> bool:
    if not isinstance(value, bytes | memoryview) or value[: len(_PNG)] != _PNG or len(value) <= _PNG_COLOUR:
        return False
    return value[_PNG_COLOUR] in (0, 3)


class Shape:
    """The structure of a sample, and the names of its leaves.

    A leaf in a mapping is named by its key, any other one by `name_of`. Of two leaves with one name, the
    second is called "name (2)".

    Args:
        fields: a tuple, list or mapping, nested or not, of leaves; or one leaf.
        leaf_types: the types of leaves.
        name_of: leaf -> name.

    Attributes:
        leaves: name -> leaf, in order.

    Raises:
        ArgumentError: something in `fields` is neither a leaf nor a structure, or a structure is empty.
    """

    def __init__(
        self, fields: Any, leaf_types: tuple[type, ...] = (str,), name_of: Callable[[Any], str] = str
    ) -> None:
        self.leaves: dict[str, Any] = {}
        self._leaf_types = leaf_types
        self._structure = self._named(fields, None, "fields", name_of)

    def sample(self, values: Mapping[str, Any]) -> Any:
        """The values of one sample in its structure: tuples for tuples and lists, dicts for mappings."""
        return _sample(self._structure, values)

    def batch(self, columns: Mapping[str, Any]) -> Any:
        """The columns of a batch in the structure that `default_collate` gives.

        That is a list for a tuple; and a column of texts is a tuple directly in that list, else a list.
        """
        return _batch(self._structure, columns)

    def __repr__(self) -> str:
        return f"Shape({self._structure!r})"

    def _named(self, fields: Any, key: str | None, path: str, name_of: Callable[[Any], str]) -> Any:
        """The structure, with the leaves' names in place of the leaves."""
        if isinstance(fields, self._leaf_types):
            name = self._unused(name_of(fields) if key is None else key)
            self.leaves[name] = fields
            return name
        if not isinstance(fields, tuple | list | Mapping) or not fields:
            wanted = " or ".join(kind.__name__ for kind in self._leaf_types)
            raise ArgumentError(
                f"{path} must be a {wanted}, or a tuple or dict of these that is not empty, found {fields!r}"
            )
        if isinstance(fields, Mapping):
            for name in fields:
                if not isinstance(name, str):
                    raise ArgumentError(f"{path} has the key {name!r}: the keys of a sample are text")
            return {
                name: self._named(part, name, f"{path}[{name!r}]", name_of) for name, part in fields.items()
            }
        return tuple(
            self._named(part, None, f"{path}[{position}]", name_of) for position, part in enumerate(fields)
        )

    def _unused(self, name: str) -> str:
        return next(each for each in _candidates(name) if each not in self.leaves)


def _candidates(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name} ({number})"
        number += 1


def _sample(structure: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(structure, str):
        return values[structure]
    if isinstance(structure, dict):
        return {name: _sample(part, values) for name, part in structure.items()}
    return tuple(_sample(part, values) for part in structure)


def _batch(structure: Any, columns: Mapping[str, Any]) -> Any:
    if isinstance(structure, str):
        return columns[structure]
    if isinstance(structure, dict):
        return {name: _batch(part, columns) for name, part in structure.items()}
    made = [(part, _batch(part, columns)) for part in structure]
    return [tuple(each) if isinstance(part, str) and type(each) is list else each for part, each in made]
