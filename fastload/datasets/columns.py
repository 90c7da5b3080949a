"""`batches="columns"`: the rows of a batch are taken as columns, without a Python object for each row.

    index batch ─▶ (chunk, row in it) of each sample ─▶ chunks, read ahead ─▶ take ─▶ columns of the batch

A chunk has rows that are read together: a row group, or a table. A sample is what it is with
`batches="rows"`, and so are its place in the order, its fingerprint and its errors. Only the batch is made in
another way, and it equals the one that `default_collate` makes of the samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.datasets.views import Allocate

Rows = NDArray[np.int64]
Array = NDArray[Any]

STEP = 2048  # rows whose numbers are turned into columns at a time: they stay in the processor's caches


class Jagged(NamedTuple):
    """Lists of different lengths, one for each row of a batch: a column of `batches="columns"`.

    The list of row i is `values[offsets[i]:offsets[i + 1]]`.

    Example::

        import torch

        from fastload import DataLoader, TableDataset

        table = {"items": [[1, 2], [], [3]]}
        loader = DataLoader(TableDataset(table, {"items": "items"}, batches="columns"), batch_size=3)
        batch = next(iter(loader))
        batch["items"].values, batch["items"].offsets  # tensor([1, 2, 3]), tensor([0, 2, 2, 3])
        torch.nested.nested_tensor_from_jagged(*batch["items"])  # torch's own class for such columns

    Attributes:
        values: of all rows, one list after the other, in the dtype of the column.
        offsets: int64, shape (rows + 1,).
    """

    values: torch.Tensor
    offsets: torch.Tensor


class Form(NamedTuple):
    """The form of a column in a batch.

    Attributes:
        dtype: of its tensor; None: it is a list of texts.
        shape: of the value of a row, or of an item of its list.
        jagged: a row has a list of any length.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...] = ()
    jagged: bool = False


Forms = Mapping[str, Form]


class Fault(NamedTuple):
    """Rows of a chunk that no batch can hold, of one column and for one reason."""

    rows: NDArray[np.bool_]
    name: str
    why: str


class Chunk(NamedTuple):
    """Rows that are read together, by column.

    Attributes:
        packed: (names, array (rows, names)) of numbers of one dtype, row by row: a row is taken at once.
        arrays: of columns of one shape, (rows, *shape).
        lists: (values, offsets) of jagged columns.
        texts: `pyarrow.Array`s.
        faults: the rows that cannot be taken.
        nbytes: of all.
    """

    packed: list[tuple[list[str], Array]]
    arrays: dict[str, Array]
    lists: dict[str, tuple[Array, Rows]]
    texts: dict[str, Any]
    faults: list[Fault]
    nbytes: int


class ColumnSource(Protocol):
    """The rows of a dataset in one process, by index, from 0 on.

    Attributes:
        forms: of the columns, in the order of the batch.
    """

    forms: Forms

    def locate(self, rows: Rows) -> tuple[Rows, Rows]:
        """Return of each row: the number of its chunk, and its place there."""

    def chunk(self, number: int) -> Chunk:
        """Return a chunk; it waits for it.

        Raises:
            FastloadError: it cannot be read, or is damaged: so is each of its rows.
        """

    def why_not(self, fault: Fault) -> str:
        """Return the error of a row that no batch can hold, with what to do."""


class ColumnBatch:
    """A batch of which it is known where each row lies. Nothing is copied before `finish`."""

    def __init__(self, rows: int, allocate: Allocate, forms: Forms) -> None:
        self.allocate = allocate
        self.forms = forms
        self.chunks: list[Chunk] = []
        self.chunk_of = np.zeros(rows, np.int64)
        self.place_of = np.zeros(rows, np.int64)
        self.index_of = np.zeros(rows, np.int64)  # of the dataset

    def put(self, chunk: Chunk, rows: Rows, places: Rows) -> None:
        """Let rows of the batch be those of a chunk."""
        self.chunk_of[rows] = len(self.chunks)
        self.place_of[rows] = places
        self.chunks.append(chunk)

    def copy_row(self, target: int, source: int) -> None:
        """Make row `target` equal to row `source`."""
        for column in (self.chunk_of, self.place_of, self.index_of):
            column[target] = column[source]

    def finish(self) -> dict[str, Any]:
        """Return the columns."""
        parts = [(chunk, np.flatnonzero(self.chunk_of == number)) for number, chunk in enumerate(self.chunks)]
        taken = [_Part(chunk, rows, self.place_of[rows]) for chunk, rows in parts if len(rows)]
        made = self._packed(taken)
        for name, form in self.forms.items():
            if name in made:
                continue
            if form.dtype is None:
                made[name] = self._texts(name, taken)
            elif form.jagged:
                made[name] = self._jagged(name, form, taken)
            else:
                made[name] = self._stacked(name, form, taken)
        return {name: made[name] for name in self.forms}

    def _new(self, form: Form, rows: int) -> torch.Tensor:
        assert form.dtype is not None
        return self.allocate((rows, *form.shape), form.dtype)

    def _packed(self, taken: list[_Part]) -> dict[str, Any]:
        """Return the columns of numbers that lie row by row in the chunks."""
        made: dict[str, Any] = {}
        count = len(self.chunk_of)
        for number, (names, first) in enumerate(taken[0].chunk.packed if taken else ()):
            table = np.empty((count, len(names)), first.dtype)
            for part in taken:
                _, values = part.chunk.packed[number]
                if len(taken) == 1:
                    values.take(part.places, axis=0, out=table, mode="clip")  # "raise" would copy
                else:
                    table[part.rows] = values[part.places]
            tensors = [self._new(self.forms[name], count) for name in names]
            columns = [tensor.numpy() for tensor in tensors]
            for start in range(0, count, STEP):
                some = table[start : start + STEP]
                for position, column in enumerate(columns):
                    column[start : start + STEP] = some[:, position]
            made.update(zip(names, tensors, strict=True))
        return made

    def _stacked(self, name: str, form: Form, taken: list[_Part]) -> torch.Tensor:
        tensor = self._new(form, len(self.chunk_of))
        column = tensor.numpy()
        for part in taken:
            column[part.rows] = part.chunk.arrays[name][part.places]
        return tensor

    def _jagged(self, name: str, form: Form, taken: list[_Part]) -> Jagged:
        offsets = self._new(Form(torch.int64), len(self.chunk_of) + 1)
        stops = offsets.numpy()
        stops[0] = 0
        for part in taken:
            _, bounds = part.chunk.lists[name]
            stops[part.rows + 1] = bounds[part.places + 1] - bounds[part.places]
        np.cumsum(stops, out=stops)
        values = self._new(form, int(stops[-1]))
        column = values.numpy()
        for part in taken:
            items, bounds = part.chunk.lists[name]
            lengths = bounds[part.places + 1] - bounds[part.places]
            column[_ranges(stops[part.rows], lengths)] = items[_ranges(bounds[part.places], lengths)]
        return Jagged(values, offsets)

    def _texts(self, name: str, taken: list[_Part]) -> list[Any]:
        column = np.empty(len(self.chunk_of), object)
        for part in taken:
            column[part.rows] = part.chunk.texts[name].take(part.places).to_numpy(zero_copy_only=False)
        return column.tolist()


class _Part(NamedTuple):
    """The rows of a batch that lie in one chunk."""

    chunk: Chunk
    rows: Rows
    places: Rows


def _ranges(starts: Rows, lengths: Rows) -> Rows:
    """Return the numbers from each start on, `lengths` of them, one range after the other."""
    stops = np.cumsum(lengths)
    return np.arange(stops[-1] if len(stops) else 0) + np.repeat(starts - stops + lengths, lengths)
