"""From the fields of a record to a sample, or to a row of the batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import xxhash

from fastload.datasets.base import check_function
from fastload.datasets.columns import (
    as_batch,
    collate_column,
    copy_value,
    new_column,
    number_view,
    ordinary_memory,
    put_value,
)
from fastload.datasets.fields import SampleFields
from fastload.datasets.pairs import check_cut_alike, fill_together, transform_together
from fastload.datasets.protocols import Allocate
from fastload.datasets.shape import Shape
from fastload.errors import ArgumentError, DecodeError
from fastload.images.by_epoch import ByEpoch, current_transform
from fastload.images.crop import Crop, is_fused, made_by_kernel

_log = logging.getLogger("fastload")

_ADVICE = (
    "Name what a sample consists of, with alternatives and optional members: "
    "fields=('jpg;jpeg;png;webp', 'cls', 'json?'); or give transform= a function of the whole sample that "
    "makes all alike"
)
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_COLOUR = 25  # where its header says: 0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGB and alpha

Transform = Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None


class _Making(NamedTuple):
    """The batch that is being filled."""

    rows: int
    allocate: Allocate
    rest: list[dict[str, Any]]  # the fields of each row in order, for `row`; None in place of its images
    crops: dict[str, Crop]
    numbers: dict[str, tuple[type, Any]]  # see `number_view`
    uneven: set[str]  # fields whose values differ in type or length: `default_collate` makes their columns
    odd: list[int]  # rows that have other fields than the batch


class SampleMaker:
    """Opens fields and applies the transform.

    Args:
        fields: of the records; None: a record is bytes.
        decoded: whether the user's own `decode` replaces the fields.
        transform: a callable on the sample; a fused transform, for the one image among the fields; or a dict
            {field: either}.
        shape: of the samples; its names are the fields'. None: a sample is the dict of its fields.
        optional: the fields that may be None. Their column is a list, whatever is in it: its type must not
            depend on the batch.

    Raises:
        ArgumentError: the transform wants fields, and there are none.
    """

    def __init__(
        self,
        fields: SampleFields | None,
        decoded: bool,
        transform: Transform,
        shape: Shape | None = None,
        *,
        optional: Collection[str] = (),
    ) -> None:
        self._fields = None if decoded else fields
        self._shape = shape
        self._optional = optional
        self._transform = transform
        self._making: _Making | None = None
        self._warned = False  # of masks
        self._last: tuple[tuple[str, ...], Transform, dict[str, Crop]] | None = None
        parts = self._parts()
        for name, part in zip(self._part_names(), parts, strict=True):
            check_function(name, part)
        fused = any(map(is_fused, parts))
        if self._fields is None and (fused or isinstance(transform, Mapping)):
            raise ArgumentError(
                f"transform={transform!r} is for the fields of a sample: pass features= and no decode=, or a "
                "function of what decode returns"
            )
        check_cut_alike(transform)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_making": None}  # the memory of a batch is of this process

    def _part_names(self) -> list[str]:
        fields = self._transform
        return [f"transform[{name!r}]" for name in fields] if isinstance(fields, Mapping) else ["transform"]

    def _parts(self) -> list[Any]:
        return list(self._transform.values()) if isinstance(self._transform, Mapping) else [self._transform]

    def start_epoch(self, epoch: int) -> None:
        """Let the transforms that depend on the epoch know it."""
        self._last = None
        for part in self._parts():
            if isinstance(part, ByEpoch):
                part.start_epoch(epoch)

    @property
    def fused(self) -> bool:
        """Whether images are written straight into the batch: all that have a fused transform."""
        fused = [part for part in map(current_transform, self._parts()) if isinstance(part, Crop)]
        return bool(fused) and all(part.fills_rows for part in fused)

    @property
    def draws(self) -> bool:
        """Whether fused transforms draw from the seed of the sample."""
        parts = [part for part in map(current_transform, self._parts()) if isinstance(part, Crop)]
        return self.fused and any(part.draws for part in parts)

    @property
    def cut(self) -> int:
        """The number of what fused transforms do in this epoch; 0: there are none."""
        parts = zip(self._part_names(), map(current_transform, self._parts()), strict=True)
        fused = [(name, part.number) for name, part in parts if isinstance(part, Crop)]
        return xxhash.xxh3_64_intdigest(repr(sorted(fused)).encode()) if fused and self.fused else 0

    @property
    def by_rows(self) -> bool:
        """Whether batches are made row by row: with fused images, or with columns that may hold None.

        `default_collate` refuses None. What a transform of the whole sample makes of it is for the user.
        """
        crops = any(isinstance(current_transform(part), Crop) for part in self._parts())
        return self.fused or (bool(self._optional) and not crops and not callable(self._transform))

    @property
    def runs_user_code(self) -> bool:
        """Whether functions of the user run while rows are filled, beside a fused transform."""
        return isinstance(self._transform, Mapping) and not all(
            isinstance(current_transform(part), Crop) for part in self._parts()
        )

    @property
    def made_by_kernel(self) -> bool:
        """Whether all transforms are fused ones that the kernel does alone."""
        parts = self._parts()
        return self._fields is not None and bool(parts) and all(map(made_by_kernel, parts))

    def sample(self, value: Any) -> Any:
        """The value that `RecordPrepareStep.restore` returns -> sample.

        Raises:
            DecodeError: a field is not what it should be. What the user's functions raise.
        """
        transform = current_transform(self._transform)
        if self._fields is None:
            return value if transform is None else transform(value)
        crops = self._crops(value)
        rest = self._open(value, crops)
        images = transform_together(crops, value)
        made = {name: images[name] if name in images else rest[name] for name in value}
        sample = self._shaped(made)
        return transform(sample) if callable(transform) and not crops else sample

    # --- rows of a batch

    def new_batch(self, n: int, allocate: Allocate) -> dict[str, Any]:
        """A batch of `n` rows. Its columns are made with the first row, one for each of its fields.

        In `ordinary_memory` only its images get columns: the other fields are handed out row by row.
        """
        self._making = _Making(n, allocate, [{} for _ in range(n)], {}, {}, set(), [])
        return {}

    def put(self, batch: dict[str, Any], row: int, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Write all but the images into a row; returns these, still encoded.

        Raises:
            DecodeError: as `sample`.
        """
        crops = self._crops(fields)
        rest = self._open(fields, crops)
        made = self._made
        made.rest[row] = {name: rest.get(name) for name in fields}
        if not batch or made.allocate is ordinary_memory:
            self._add_columns(batch, fields, crops, rest)
        elif crops.keys() != made.crops.keys() or batch.keys() != fields.keys():
            made.odd.append(row)
            return {}
        for name, column in batch.items():
            if name in rest and name not in made.uneven and not self._put(column, row, name, rest[name]):
                made.uneven.add(name)
        return {name: fields[name] for name in crops}

    def _add_columns(
        self,
        batch: dict[str, Any],
        fields: Mapping[str, Any],
        crops: dict[str, Crop],
        rest: Mapping[str, Any],
    ) -> None:
        """The columns that rows like this one need, and the batch does not have yet."""
        made = self._made
        for name in [name for name in fields if name not in batch]:
            if name in crops:
                batch[name] = made.allocate((made.rows, *crops[name].sample_shape), crops[name].dtype)
                made.crops[name] = crops[name]
            elif made.allocate is ordinary_memory:
                continue
            elif name in self._optional or not crops:
                batch[name] = [None] * made.rows
            else:
                column = new_column(rest[name], made.rows, made.allocate)
                batch[name] = [None] * made.rows if column is None else column
                if column is None:
                    made.uneven.add(name)
                elif (view := number_view(column, rest[name])) is not None:
                    made.numbers[name] = view

    def _put(self, column: Any, row: int, name: str, value: Any) -> bool:
        """Write a value into its row; False if the column was made for values unlike it."""
        if name in self._optional or not self._made.crops:
            column[row] = value
            return True
        number = self._made.numbers.get(name)
        if number is not None and type(value) is number[0]:
            try:
                number[1][row] = value
            except OverflowError:  # an int beyond 64 bits
                return False
            return True
        return put_value(column, row, value)

    def put_images(
        self, batch: dict[str, Any], rows: list[int], images: Mapping[str, list[Any]], seeds: list[int]
    ) -> list[tuple[int, DecodeError]]:
        """Decode images into their rows; (position in `rows`, error) of those that failed.

        All images of a sample are drawn with the same seed; see `fastload.datasets.pairs`.
        """
        return fill_together(self._made.crops, batch, rows, images, seeds)

    def row(self, batch: dict[str, Any], row: int) -> Any:
        """The sample in a row, as `sample` gives it."""
        rest, crops = self._made.rest[row], self._made.crops
        images = {name: crop.as_sample(batch[name][row]) for name, crop in crops.items() if name in rest}
        return self._shaped({name: images[name] if name in images else rest[name] for name in rest})

    def finish(self, batch: dict[str, Any]) -> Any:
        """The filled batch, as `default_collate` would make it of the samples.

        Raises:
            ArgumentError: samples have different fields.
            Exception: that of `default_collate` for values that make no batch.
        """
        made = self._made
        if made.odd:
            raise ArgumentError(_differs(made.rest[made.odd[0]], batch), stage="collate")
        columns = {name: self._column(name, column) for name, column in batch.items()}
        self._making = None  # or its values would live until the next batch
        return as_batch(columns if self._shape is None else self._shape.batch(columns))

    def _column(self, name: str, column: Any) -> Any:
        if name in self._optional:
            return column
        if not self.fused:
            return collate_column(column)
        return collate_column([row[name] for row in self._made.rest]) if name in self._made.uneven else column

    def copy_row(self, batch: dict[str, Any], target: int, source: int) -> None:
        """Make row `target` equal to row `source`."""
        for column in batch.values():
            copy_value(column, target, source)
        self._made.rest[target] = self._made.rest[source]

    def _shaped(self, values: dict[str, Any]) -> Any:
        return values if self._shape is None else self._shape.sample(values)

    @property
    def _made(self) -> _Making:
        assert self._making is not None
        return self._making

    # --- fields

    def _crops(self, fields: Mapping[str, Any]) -> dict[str, Crop]:
        """Image -> the fused transform that takes it.

        Raises:
            DecodeError: the sample does not have the one image, or those that are named.
        """
        transform = current_transform(self._transform)
        names = tuple(fields)
        last = self._last  # the threads of a loader share it
        if last is None or last[:2] != (names, transform):  # samples are mostly alike
            last = self._last = names, transform, self._find_crops(fields, transform)
        return last[2]

    def _find_crops(self, fields: Mapping[str, Any], transform: Transform) -> dict[str, Crop]:
        if isinstance(transform, Mapping):
            missing = sorted(transform.keys() - fields.keys())
            if missing:
                raise DecodeError(
                    f"{_name(fields)} has no {missing[0]!r}; it has {', '.join(fields)}. {_ADVICE}"
                )
            parts = {name: current_transform(part) for name, part in transform.items()}
            crops = {name: part for name, part in parts.items() if isinstance(part, Crop)}
            self._warn_of_masks(fields, crops)
            return crops
        if not isinstance(transform, Crop):
            return {}
        assert self._fields is not None
        images = self._fields.images(fields)
        if len(images) != 1:
            raise DecodeError(
                f"the transform takes one image, and {_name(fields)} has {', '.join(images) or 'none'} among "
                f"{', '.join(fields)}: name it, as in transform={{'jpg': RandomResizedCrop(224)}}"
            )
        return {images[0]: transform}

    def _warn_of_masks(self, fields: Mapping[str, Any], crops: Mapping[str, Crop]) -> None:
        """Not an error, for a PNG with a palette or in grey may well be a photo."""
        assert self._fields is not None
        if self._warned or len(self._fields.images(fields)) < 2:
            return
        masks = [name for name in crops if not crops[name].own_values and _may_be_mask(fields[name])]
        if masks:
            self._warned = True
            _log.warning(
                "%r of %s is a greyscale or palette PNG. If it is a mask: this transform interpolates its "
                "values and makes them RGB; give it interpolation='nearest' and channels=1",
                masks[0],
                _name(fields),
            )

    def _open(self, fields: Mapping[str, Any], crops: Mapping[str, Crop]) -> dict[str, Any]:
        """The fields that no fused transform takes, as a sample has them."""
        assert self._fields is not None
        images = self._fields.images(fields)
        rest = {
            name: self._fields.open_image(value) if name in images else self._fields.open(name, value)
            for name, value in fields.items()
            if name not in crops
        }
        transform = current_transform(self._transform)
        if isinstance(transform, Mapping):
            rest |= {
                name: part(rest[name])
                for name, part in transform.items()
                if name not in crops and (rest[name] is not None or name not in self._optional)
            }
        return rest


def _name(fields: Mapping[str, Any]) -> str:
    """A sample in error messages, beside the record's name there."""
    return f"sample {fields['__key__']!r}" if "__key__" in fields else "the sample"


def _differs(fields: Mapping[str, Any], batch: Mapping[str, Any]) -> str:
    lacks = [name for name in batch if name not in fields]
    what = f"lacks {', '.join(lacks)}, which others in the batch have" if lacks else ""
    more = [name for name in fields if name not in batch]
    if more:
        what += f"{' and ' if what else ''}has {', '.join(more)}, which others in the batch lack"
    return f"{_name(fields)} {what or 'has other images than others in the batch'}. {_ADVICE}"


def _may_be_mask(value: Any) -> bool:
    if not isinstance(value, bytes | memoryview) or value[: len(_PNG)] != _PNG or len(value) <= _PNG_COLOUR:
        return False
    return value[_PNG_COLOUR] in (0, 3)
