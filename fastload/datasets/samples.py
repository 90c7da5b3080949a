"""From the fields of a record to a sample, or to a row of a batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fastload.datasets.sample_fields import (
    SampleFields,
    Shape,
    as_batch,
    collate_column,
    ordinary_memory,
)
from fastload.datasets.sample_transforms import (
    ADVICE,
    FieldTransforms,
    Transform,
    check_cut_alike,
    fill_together,
    name_of,
    transform_together,
)
from fastload.datasets.views import Allocate
from fastload.errors import ArgumentError, DecodeError
from fastload.images.crop import Crop
from fastload.images.encoded import EncodedBatch
from fastload.images.rng import Rng, SampleRng, SampleSeeds, TorchRng

RowFailures = list[tuple[int, Exception]]  # (position among the rows that are filled, what went wrong)


class ValueColumns(Protocol):
    """Values of samples that need no read, in memory that all workers share: labels, columns of a table."""

    @property
    def names(self) -> Sequence[str]:
        """The names of all."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype | None]:
        """Those that can be written into a batch for many samples at once: name -> the dtype of the column,
        None: it is a list.
        """

    def row(self, record: int) -> dict[str, Any]:
        """Return the values of a sample."""

    def fill(self, columns: Mapping[str, Any], rows: list[int], records: list[int]) -> None:
        """Write the values of these samples into rows of columns."""


class Todo(NamedTuple):
    """Samples that are to be written into rows of a batch: one entry for each.

    Attributes:
        values: what `ObjectPayloads.open` returned.
        seeds: from which all images of the sample are drawn.
        keys: the names of the samples, where the device decodes.
    """

    rows: list[int]
    records: list[int]
    values: list[Any]
    seeds: list[int]
    keys: list[str]

    def some(self, positions: list[int]) -> Todo:
        """Return the samples at these positions."""
        columns: list[Any] = [
            [column[position] for position in positions] if column else [] for column in self
        ]
        return Todo(*columns)


class RowBatch:
    """A batch whose rows are being filled.

    Args:
        rows: their number.
        allocate: memory for its tensors.

    Attributes:
        columns: by field; None: `default_collate` makes it of `rest`, once all rows are filled.
        crops: image -> the fused transform that its column was made for.
        values: the columns that `ValueColumns` fill.
        rest: of each row its fields in order, with None in place of images.
        is_complete: all its columns are there before a row is.
        encoded: the column of the image is an `EncodedBatch`.
        odd: rows that have other fields than the batch.
    """

    def __init__(self, rows: int, allocate: Allocate) -> None:
        self.rows = rows
        self.allocate = allocate
        self.columns: dict[str, Any] = {}
        self.crops: dict[str, Crop] = {}
        self.values: dict[str, Any] = {}
        self.rest: list[dict[str, Any]] = [{} for _ in range(rows)]
        self.odd: list[int] = []
        self.encoded = self.is_complete = False


class SampleBuilder:
    """Opens fields and applies the transform: makes samples, or the rows of a batch.

    Args:
        fields: of the samples; None: a sample is what `decode` of the user returned, or bytes.
        transform: as of `FieldTransforms`; without fields, a function of the sample.
        shape: of the samples; its names are the fields'. None: a sample is the dict of its fields.
        optional: the fields that may be None. Their column is a list, whatever is in it: its type must not
            depend on the batch.
        values: fields that are not in the record.
        image: the one field of the record, which is an image in all samples; "": there is no record; None:
            the fields are known once the record is read.
        lists: as of `FieldTransforms`.
    """

    def __init__(
        self,
        fields: SampleFields | None,
        transform: Transform,
        shape: Shape | None = None,
        *,
        optional: Collection[str] = (),
        values: ValueColumns | None = None,
        image: str | None = None,
        lists: Collection[str] = (),
    ) -> None:
        self.transforms = FieldTransforms(transform, lists)
        check_cut_alike(transform)
        self._fields = fields
        self._shape = shape
        self._optional = optional
        self._values = values
        self._image = image

    def start_epoch(self, epoch: int) -> None:
        """Let the transforms that depend on the epoch know it."""
        self.transforms.start_epoch(epoch)

    @property
    def fused(self) -> bool:
        """Whether images are written straight into the batch."""
        return self._fields is not None and self.transforms.fills_rows

    @property
    def is_values(self) -> bool:
        """Whether samples need no read."""
        return self._image == ""

    @property
    def is_random(self) -> bool:
        """Whether fused transforms draw from the seed of the sample, in this epoch."""
        return self.fused and self.transforms.is_random

    @property
    def crop_hash(self) -> int:
        """The number of what fused transforms do in this epoch; 0: there are none."""
        return self.transforms.crop_hash if self.fused else 0

    @property
    def made_by_kernel(self) -> bool:
        """Whether only fastload's own code makes rows, of one image and values each, in all epochs."""
        return bool(self._image) and self.transforms.only_fused

    @property
    def structure(self) -> Any:
        """Return what two builders must have in common to fill one batch."""
        values = tuple(self._value_names)
        # The column of a value that a function takes is made once all rows are filled, any other one before.
        changed = self.transforms.functions().keys() & set(values)
        return repr(self._shape), self._image, values, changed

    def sample(self, value: Any, record: int) -> Any:
        """Return the sample of what `ObjectPayloads.open` returned for a record.

        Raises:
            DecodeError: a field is not what it should be. What the user's functions raise.
        """
        of_sample = self.transforms.of_sample
        if self._fields is None:
            return value if of_sample is None else of_sample(value)
        fields = value if self._values is None else value | self._values.row(record)
        crops = self.transforms.crops_of(fields, self._fields.images)
        rest = self._open(fields, crops, TorchRng())
        images = transform_together(crops, fields)
        made = {name: images[name] if name in images else rest[name] for name in fields}
        sample = self._shaped(made)
        return of_sample(sample) if callable(of_sample) and not crops else sample

    # --- rows of a batch

    def new_batch(
        self, n: int, allocate: Allocate, *, encoded: bool = False, records: bool = False
    ) -> RowBatch | None:
        """Return an empty batch of `n` rows; None where samples have to be made one by one.

        Columns whose form is known get their memory now, all others with the first row. In `ordinary_memory`
        only images get columns: the other fields are delivered row by row.

        `default_collate` refuses None. What a transform of the whole sample makes of it is for the user.

        Args:
            encoded: the images stay encoded, for the device to decode.
            records: its decoder takes records of the cache, and not JPEGs.
        """
        transforms = self.transforms
        regular = self._regular(allocate)
        if not self.fused:
            lists = bool(self._optional) and not transforms.crops and not callable(transforms.of_sample)
            alone = self.is_values and bool(regular) and len(regular) == len(self._value_names)
            if not lists and not alone:
                return None
        batch = RowBatch(n, allocate)
        batch.is_complete = self._image is not None
        if self._image:
            batch.crops = {self._image: transforms.crop_for(self._image)}
            if encoded:
                batch.encoded = True
                crop = batch.crops[self._image]
                batch.columns[self._image] = EncodedBatch(crop, n, allocate, records=records)
            else:
                self._add_image(batch, self._image)
        if self._values is not None:
            dtypes = {name: self._values.dtypes[name] for name in regular}
            batch.values = {
                name: [None] * n if dtype is None else allocate((n,), dtype) for name, dtype in dtypes.items()
            }
            batch.columns |= batch.values
            if self._image and allocate is not ordinary_memory:
                batch.columns |= {name: None for name in self._value_names if name not in batch.values}
        return batch

    def fill(self, batch: RowBatch, todo: Todo) -> RowFailures:
        """Write samples into their rows."""
        if self.is_values:
            self._fill_values(batch, todo)
            return []
        failures: RowFailures = []
        groups: dict[tuple[str, ...], list[int]] = {}  # images -> positions
        encoded: list[dict[str, Any]] = []
        seeds = SampleSeeds.current() if self.transforms.runs_user_code else None
        others = len(batch.values) < len(self._value_names)
        for position, (row, record, fields, seed) in enumerate(
            zip(todo.rows, todo.records, todo.values, todo.seeds, strict=True)
        ):
            images: dict[str, Any] = {}
            try:
                if others:
                    fields = fields | self._other_values(batch, record)
                if seeds is not None:  # not `call`, which may make a row twice: functions may change fields
                    seeds.set(record)
                images = self._fill_row(batch, row, fields, seed)
                groups.setdefault(tuple(images), []).append(position)
            except Exception as error:  # of the user's functions too: `on_error` decides
                failures.append((position, error))
            encoded.append(images)
        if batch.values:
            self._fill_values(batch, todo)
        for names, group in groups.items():
            images = {name: [encoded[position][name] for position in group] for name in names}
            some = todo if len(group) == len(todo.rows) else todo.some(group)
            failures += [
                (group[position], error) for position, error in self._fill_images(batch, some, images)
            ]
        return failures

    def _fill_images(
        self, batch: RowBatch, todo: Todo, images: Mapping[str, list[Any]]
    ) -> list[tuple[int, DecodeError]]:
        """Decode images into their rows; returns (position, error) of those that failed."""
        if batch.encoded:
            [(name, sources)] = images.items()
            return batch.columns[name].fill(todo.rows, sources, todo.seeds, todo.keys)  # type: ignore[no-any-return]
        crops = {name: self.transforms.crop_for(name) for name in images}
        return fill_together(crops, batch.columns, todo.rows, images, todo.seeds)

    def _fill_values(self, batch: RowBatch, todo: Todo) -> None:
        assert self._values is not None
        self._values.fill(batch.values, todo.rows, todo.records)

    def _other_values(self, batch: RowBatch, record: int) -> dict[str, Any]:
        """Return the values of a sample that are not written for many samples at once."""
        values = {} if self._values is None else self._values.row(record)
        return {name: value for name, value in values.items() if name not in batch.values}

    def kernel_crop(self, *, encoded: bool = False) -> Crop | None:
        """Return the crop by which the kernel makes the image of a row from a record of the cache.

        None: a row is more than an image and values, code of the user has a part in it, or Python chooses the
        boxes.
        """
        if not self._image or encoded or self.transforms.runs_user_code:
            return None
        crop = self.transforms.crop_for(self._image)
        return crop if crop._box_law is not None else None

    def note_made(self, batch: RowBatch, rows: list[int], records: list[int]) -> None:
        """Write the rest of samples whose images are in their rows."""
        only_image = {self._image or "": None}
        for row, record in zip(rows, records, strict=True):
            batch.rest[row] = only_image if batch.values else only_image | self._other_values(batch, record)
        if batch.values:
            self._fill_values(batch, Todo(rows, records, [], [], []))

    def image_column(self, batch: RowBatch) -> Any:
        """Return the column of the one image."""
        return batch.columns[self._image or ""]

    def row(self, batch: RowBatch, row: int) -> Any:
        """Return the sample in a row, as `sample` gives it."""
        made = dict(batch.rest[row])
        for name, crop in batch.crops.items():
            if name in made:
                made[name] = crop._as_sample(batch.columns[name][row])
        for name, column in batch.values.items():
            made[name] = column[row] if isinstance(column, list) else column[row].item()
        return self._shaped(made)

    def copy_row(self, batch: RowBatch, target: int, source: int) -> None:
        """Make row `target` equal to row `source`."""
        for column in batch.columns.values():
            if isinstance(column, EncodedBatch):
                column.copy_row(target, source)
            elif column is not None:
                column[target] = column[source]
        batch.rest[target] = batch.rest[source]

    def finish(self, batch: RowBatch) -> Any:
        """Return the filled batch, as `default_collate` would make it of the samples.

        Raises:
            ArgumentError: samples have different fields.
            Exception: that of `default_collate` for values that make no batch.
        """
        if batch.odd:
            raise ArgumentError(_differs(batch.rest[batch.odd[0]], batch.columns), stage="collate")
        columns = {name: self._column(batch, name, column) for name, column in batch.columns.items()}
        return as_batch(self.batch_of(columns))

    # --- columns

    def batch_of(self, columns: dict[str, Any]) -> Any:
        """Return columns in the structure of a batch."""
        return columns if self._shape is None else self._shape.batch(columns)

    @property
    def _value_names(self) -> Sequence[str]:
        return () if self._values is None else self._values.names

    def _regular(self, allocate: Allocate) -> list[str]:
        """Return the values that are written for many samples at once: no function of the user takes them."""
        of_sample = callable(self.transforms.of_sample) and not self.fused
        if self._values is None or allocate is ordinary_memory or of_sample:
            return []
        functions = self.transforms.functions()
        return [name for name in self._values.dtypes if name not in functions]

    def _add_image(self, batch: RowBatch, name: str) -> None:
        crop = batch.crops[name]
        batch.columns[name] = batch.allocate((batch.rows, *crop.sample_shape), crop.dtype)

    def _fill_row(self, batch: RowBatch, row: int, fields: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Write all but the images into a row; returns these, still encoded.

        Args:
            seed: from which the images of lists are drawn.

        Raises:
            DecodeError: as `sample`.
        """
        assert self._fields is not None
        crops = self.transforms.crops_of(fields, self._fields.images)
        if len(crops) == len(fields) and self._image:  # there is nothing else
            batch.rest[row] = dict.fromkeys(fields)
            return dict(fields)
        rest = self._open(fields, crops, SampleRng(seed))
        batch.rest[row] = {name: rest.get(name) for name in fields}
        own_columns = batch.columns.keys() - batch.values.keys()
        if not own_columns or batch.allocate is ordinary_memory:
            self._add_columns(batch, fields, crops)
        elif crops.keys() != batch.crops.keys() or own_columns != fields.keys():
            batch.odd.append(row)
            return {}
        return {name: fields[name] for name in crops}

    def _add_columns(self, batch: RowBatch, fields: Mapping[str, Any], crops: dict[str, Crop]) -> None:
        """Add the columns that rows like this one need, and the batch does not have yet."""
        for name in [name for name in fields if name not in batch.columns]:
            if name in crops:
                batch.crops[name] = crops[name]
                self._add_image(batch, name)
            elif batch.allocate is not ordinary_memory:
                batch.columns[name] = None

    def _column(self, batch: RowBatch, name: str, column: Any) -> Any:
        if isinstance(column, EncodedBatch):
            return column.finish()
        if column is not None:
            return column
        values = [row[name] for row in batch.rest]
        return values if name in self._optional else collate_column(values)

    # --- fields

    def _shaped(self, values: dict[str, Any]) -> Any:
        return values if self._shape is None else self._shape.sample(values)

    def _open(self, fields: Mapping[str, Any], crops: Mapping[str, Crop], rng: Rng) -> dict[str, Any]:
        """Return the fields that have no column of images, as a sample has them."""
        assert self._fields is not None
        images, lists = self._fields.images(fields), self.transforms.list_crops
        rest = {
            name: self._fields.open_image(value) if name in images else self._fields.open(name, value)
            for name, value in fields.items()
            if name not in crops and name not in lists
        }
        for name, crop in lists.items():
            rest[name] = self._fields.transform_list(fields[name], crop, rng)
        for name, function in self.transforms.functions().items():
            if name in rest and (rest[name] is not None or name not in self._optional):
                rest[name] = function(rest[name])
        return rest


def _differs(fields: Mapping[str, Any], batch: Mapping[str, Any]) -> str:
    lacks = [name for name in batch if name not in fields]
    what = f"lacks {', '.join(lacks)}, which others in the batch have" if lacks else ""
    more = [name for name in fields if name not in batch]
    if more:
        what += f"{' and ' if what else ''}has {', '.join(more)}, which others in the batch lack"
    return f"{name_of(fields)} {what or 'has other images than others in the batch'}. {ADVICE}"
