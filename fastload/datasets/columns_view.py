"""The view of a dataset with `batches="columns"`: rows of a batch are looked up, and taken at its end."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from fastload.checks import check_index
from fastload.datasets.columns import ColumnBatch, ColumnSource, Rows
from fastload.datasets.store_view import StoreView, numbered
from fastload.datasets.views import Allocate, RowErrors, RowRequests
from fastload.errors import DecodeError


class ColumnsView(StoreView):
    """A `StoreDataset` whose batches are taken as columns."""

    def made_by_kernel(self) -> bool:
        return self.override is None  # no code of the user runs, and one process reads each chunk once

    def writes(self) -> bool:
        return self.override is None

    def prefetch(self, indices: list[Any]) -> None:
        self.dataset.prefetch(indices)

    def form(self) -> Any:
        return repr(self._source.forms), self.dataset._builder.structure

    def new_batch(self, n: int, allocate: Allocate) -> Any:
        return ColumnBatch(n, allocate, self._source.forms)

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        self.dataset.counters.add("decode.samples", len(todo))
        errors: RowErrors = []
        rows, numbers = self._numbered(todo, errors)
        batch.index_of[rows] = numbers
        chunks, places = self._source.locate(numbers)
        order = np.argsort(chunks, kind="stable")
        bounds = np.flatnonzero(np.diff(chunks[order])) + 1
        for some in np.split(order, bounds) if len(order) else ():
            errors += self._fill_from(batch, int(chunks[some[0]]), rows[some], places[some])
        return errors

    def _numbered(self, todo: RowRequests, errors: RowErrors) -> tuple[Rows, Rows]:
        """Return (rows of the batch, rows of the dataset) of the requests that have a sample."""
        count = len(self.dataset)  # type: ignore[arg-type]
        rows, numbers = numbered(todo, count)
        if len(rows) == len(todo):
            return rows, numbers
        known = []
        for row, index in todo:
            try:
                self.dataset._record(index)
                known.append((row, check_index(index, count, "samples")))
            except Exception as error:
                errors.append((row, error))
        rows, numbers = np.array(known, np.int64).reshape(-1, 2).T
        return rows, numbers

    def _fill_from(self, batch: ColumnBatch, number: int, rows: Rows, places: Rows) -> RowErrors:
        try:
            chunk = self._source.chunk(number)
        except DecodeError as error:
            return [(row, self._own(batch, row, error)) for row in rows.tolist()]
        except Exception as error:
            return [(row, error) for row in rows.tolist()]
        batch.put(chunk, rows, places)
        errors: dict[int, Exception] = {}
        for fault in chunk.faults:
            for row in rows[fault.rows[places]].tolist():
                errors.setdefault(row, self._own(batch, row, DecodeError(self._source.why_not(fault))))
        return list(errors.items())

    def _own(self, batch: ColumnBatch, row: int, error: DecodeError) -> Exception:
        """Return the error of a chunk as that of one of its rows, which it names."""
        own = copy.copy(error)
        own.key = self.key(int(batch.index_of[row]))
        return own

    def sample(self, batch: Any, row: int) -> Any:
        return self.dataset[int(batch.index_of[row])]

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        batch.copy_row(target, source)

    def finish_batch(self, batch: Any) -> Any:
        with self.dataset.counters.timed("decode"):
            return self.dataset._builder.batch_of(batch.finish())

    @property
    def _source(self) -> ColumnSource:
        return self.dataset._column_source()
