"""A dataset over a store as the loader reads it: read ahead, and written into the rows of a batch.

    rows of a batch ─▶ their records lie in the cache ─▶ one call of the kernel makes all of them
                        └─ no ─▶ prefetcher ─▶ payloads, as they come ─▶ values ─▶ SampleBuilder

The kernel makes rows alone where a sample is one image and no code of the user has a part in it. With
`batches="columns"` the rows of a batch are looked up, and taken at its end.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Set
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.cache import Cache
from fastload.cache.segment import Places
from fastload.checks import check_index
from fastload.datasets.columns import ColumnBatch, ColumnSource, Rows
from fastload.datasets.payloads import keep
from fastload.datasets.sample_fields import ordinary_memory
from fastload.datasets.samples import RowBatch, Todo
from fastload.datasets.store_dataset import StoreDataset, override_of
from fastload.datasets.views import (
    ONE,
    Allocate,
    MadeSample,
    PlainView,
    RowErrors,
    RowRequests,
    StreamDataset,
    reraise,
    stopping,
)
from fastload.errors import DecodeError
from fastload.images.kernel import active, threads
from fastload.images.rng import mix_all, sample_seed, sample_seeds
from fastload.store.budget import RequestBudget

# Samples decoded by one call of the kernel. While others are still on their way: few enough that decoding
# starts meanwhile. Of those that are here, as many as stay in the processor's caches: decoding seems to throw
# the interpreter's code out of these, and Python then takes twice as long for the next samples.
_CHUNK, _CHUNK_BYTES = 8, 3 << 20


class StoreView(PlainView):
    """A `StoreDataset` as the loader reads it: read ahead, and written into the rows of a batch."""

    reads_ahead = True
    dataset: StoreDataset

    def __init__(self, dataset: StoreDataset) -> None:
        super().__init__(dataset)
        self.override = override_of(dataset)
        self.uses_all = self.override is None

    def leaves(self) -> Iterator[StoreDataset]:
        yield self.dataset

    def made_by_kernel(self) -> bool:
        return self.override is None and self.dataset._builder.made_by_kernel

    def writes(self) -> bool:
        return self.override is None and self.new_batch(1, ordinary_memory) is not None

    def prefetch(self, indices: list[Any]) -> None:
        self.dataset.prefetch(self._read_ahead(indices))

    def cancel(self, indices: list[Any]) -> None:
        self.dataset._cancel(indices)

    def prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        batch = None if self.override is not None else self.new_batch(len(indices), ordinary_memory)
        if batch is None:
            return super().prepare(indices, seed, epoch)
        failed = dict(self.fill(batch, list(enumerate(indices)), seed, epoch))
        return [
            partial(reraise, failed[row]) if row in failed else partial(self.sample, batch, row)
            for row in range(len(indices))
        ]

    def streams(self) -> StreamDataset | None:
        return self.dataset._streams()

    # --- which samples these are

    def find(self, keys: Set[str]) -> dict[str, list[int]] | None:
        own_key = not type(self.dataset).key.__module__.startswith("fastload.")
        return None if own_key else self.dataset.find(keys)

    def key(self, index: Any) -> str | None:
        return str(self.dataset.key(index))

    def fingerprints(self, indices: list[Any], seed: int, epoch: int, *, seeded: bool) -> NDArray[np.uint64]:
        if self.override is not None:
            return super().fingerprints(indices, seed, epoch, seeded=seeded)
        dataset = self.dataset
        records = dataset._records(indices)
        numbers = dataset._identities(records) ^ np.uint64(dataset._crop_hash)
        if seeded or dataset._builder.is_random:
            numbers = numbers ^ sample_seeds(seed, epoch, records)
        return mix_all(numbers + ONE)

    def listed(self) -> tuple[str, str] | None:
        return self.dataset._digests()

    def changes_since(self, keys: str, versions: str) -> str:
        listed = self.dataset._listed()
        if listed is None or listed[1].digests == (keys, versions):
            return ""
        before = listed[0].holding(keys, versions)
        return "" if before is None else listed[1].changes_since(before)

    def budget(self) -> RequestBudget | None:
        return self.dataset._budget

    # --- rows straight into the batch

    def _read_ahead(self, indices: list[Any]) -> list[Any]:
        """Let the system read the records that threads of the kernel will need; return the other indices.

        Such a record is not requested: `fill` looks for it again, and a request costs more than that.
        """
        cache = self.dataset.cache
        if cache is None or not threads() or not self.made_by_kernel():
            return indices
        if self.dataset._builder.kernel_crop() is None:  # `fill` does not look for them: see `Fused`
            return indices
        positions, records = _numbered(list(enumerate(indices)), len(self.dataset))  # type: ignore[arg-type]
        places = self._locate(cache, records)
        if not places.here.any():
            return indices
        active().read_ahead(places.table)
        located = set(positions[places.here].tolist())
        return [index for position, index in enumerate(indices) if position not in located]

    def _locate(self, cache: Cache, records: NDArray[np.int64]) -> Places:
        return cache._locate(self.dataset._keys.get().of(records))

    def form(self) -> Any:
        return self.dataset._builder.structure

    def new_batch(self, n: int, allocate: Allocate) -> RowBatch | None:
        return self.dataset._builder.new_batch(n, allocate)

    def fill(self, batch: RowBatch, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        self.dataset.counters.add("decode.samples", len(todo))
        made = self._fill_cached(batch, todo, seed, epoch)
        todo = [] if len(made) == len(todo) else [request for request in todo if request[0] not in made]
        errors: RowErrors = []
        for chosen, payloads in self._chunks(todo, seed, epoch, errors, named=batch.encoded):
            errors += self._decode(batch, chosen, payloads)
        return errors

    def _chunks(
        self, todo: RowRequests, seed: int, epoch: int, errors: RowErrors, *, named: bool
    ) -> Iterator[tuple[Todo, list[Any]]]:
        """Wait for samples in order; yield those that are decoded together, with their payloads.

        Args:
            errors: takes those of samples that do not come.
            named: their keys are wanted.
        """
        dataset, remaining = self.dataset, deque(todo)
        most_rows, most_bytes = max(_CHUNK, 2 * threads()), _CHUNK_BYTES * max(1, threads())
        stop = stopping.get()
        while remaining and not (stop and stop.is_set()):
            chosen, payloads, held = Todo([], [], [], [], []), list[Any](), 0
            while remaining and held < most_bytes and not (stop and stop.is_set()):
                row, index = remaining[0]
                record = None
                try:
                    record = dataset._record(index)
                    if len(chosen.rows) >= most_rows and not dataset._is_here(record):
                        break
                    payload = dataset._get(record)
                    payloads.append(payload)
                    chosen.values.append(dataset._restore(record, payload, readonly=True))
                except dataset._row_errors as error:
                    errors.append((row, dataset._named(error, record)))
                else:
                    chosen.rows.append(row)
                    chosen.records.append(record)
                    chosen.seeds.append(sample_seed(seed, epoch, record))
                    held += _bytes_of(payload)
                remaining.popleft()
            if named:
                chosen.keys.extend(map(dataset._name, chosen.records))
            yield chosen, payloads

    def _decode(self, batch: RowBatch, chosen: Todo, payloads: list[Any]) -> RowErrors:
        """Write samples into their rows, and let the cache keep what was made of their payloads meanwhile."""
        dataset, failures = self.dataset, []
        if chosen.rows:
            with dataset.counters.timed("decode"):
                failures = dataset._builder.fill(batch, chosen)
        for payload in payloads:
            keep(payload)
        return [
            (chosen.rows[position], dataset._named(error, chosen.records[position]))
            for position, error in failures
        ]

    def _fill_cached(self, batch: RowBatch, todo: RowRequests, seed: int, epoch: int) -> Set[int]:
        """Let the kernel make the rows whose records the cache has; return those that it made."""
        dataset, builder = self.dataset, self.dataset._builder
        crop = builder.kernel_crop(encoded=batch.encoded)
        if crop is None or dataset.cache is None:
            return frozenset()
        rows, records = _numbered(todo, len(dataset))  # type: ignore[arg-type]
        places = self._locate(dataset.cache, records)
        if not places.here.any():
            return frozenset()
        images, pixels = builder.image_column(batch).numpy(), dataset._payloads.codec.packs
        rows, records, lengths = rows[places.here], records[places.here], places.table["length"]
        seeds = sample_seeds(seed, epoch, records)
        failed, reading, decoding = crop._make_rows(
            images, rows, places.table, seeds, pixels=pixels, owner=places
        )
        made: Any = ~np.isin(rows, failed) if failed else slice(None)
        made_rows, made_records = rows[made].tolist(), records[made].tolist()
        builder.note_made(batch, made_rows, made_records)
        share = max(1, threads())  # of the process's time, like all that is counted there
        dataset.counters.merge({"cache.seconds": reading / share, "decode.seconds": decoding / share})
        prefetcher = dataset._prefetchers.peek()
        requested, missed = (0, set[int]()) if prefetcher is None else prefetcher.forget_made(made_records)
        hits = lengths[made] if not missed else lengths[made][~np.isin(records[made], list(missed))]
        dataset.cache._count_hits(len(hits), int(hits.sum()))
        dataset.counters.add("get.ahead", len(made_rows) if threads() else requested)  # see `_read_ahead`
        return set(made_rows)

    def sample(self, batch: RowBatch, row: int) -> Any:
        return self.dataset._builder.row(batch, row)

    def copy_row(self, batch: RowBatch, target: int, source: int) -> None:
        self.dataset._builder.copy_row(batch, target, source)

    def finish_batch(self, batch: RowBatch) -> Any:
        return self.dataset._builder.finish(batch)

    # --- images that leave the worker encoded

    def encoded(self) -> StoreView | None:
        return self if self.dataset._sends_encoded else None

    def why_not_encoded(self, decode: str = "") -> str | None:
        return self.dataset._why_not_encoded(decode)

    def keep_raw(self) -> None:
        dataset = self.dataset
        codec = dataset._payloads.codec
        if codec.chooses:
            dataset.close()
            dataset._set_payloads([dataset._payloads.with_codec(codec.without_choice())])

    def new_encoded_batch(self, n: int, allocate: Allocate) -> Any:
        records = "torch" in self.dataset._payloads.codec.decoders
        return self.dataset._builder.new_batch(n, allocate, encoded=True, records=records)


class ColumnsView(StoreView):
    """A `StoreDataset` whose batches are taken as columns."""

    def made_by_kernel(self) -> bool:
        return self.override is None  # no code of the user runs, and one process reads each chunk once

    def writes(self) -> bool:
        return self.override is None

    def form(self) -> Any:
        return repr(self._source.forms), self.dataset._builder.structure

    def new_batch(self, n: int, allocate: Allocate) -> Any:
        return ColumnBatch(n, allocate, self._source.forms)

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        self.dataset.counters.add("decode.samples", len(todo))
        errors: RowErrors = []
        rows, numbers = self._known(todo, errors)
        batch.index_of[rows] = numbers
        chunks, places = self._source.locate(numbers)
        order = np.argsort(chunks, kind="stable")
        bounds = np.flatnonzero(np.diff(chunks[order])) + 1
        for some in np.split(order, bounds) if len(order) else ():
            errors += self._fill_from(batch, int(chunks[some[0]]), rows[some], places[some])
        return errors

    def _known(self, todo: RowRequests, errors: RowErrors) -> tuple[Rows, Rows]:
        """Return (rows of the batch, rows of the dataset) of the requests that have a sample."""
        count = len(self.dataset)  # type: ignore[arg-type]
        rows, numbers = _numbered(todo, count)
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


def _numbered(todo: RowRequests, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (rows, records) of the requests whose indices are numbers of `count` samples."""
    if set(map(type, map(itemgetter(1), todo))) != {int}:
        todo = [(row, int(index)) for row, index in todo if isinstance(index, int | np.integer)]
    try:
        pairs = np.fromiter(chain.from_iterable(todo), np.int64, 2 * len(todo))
    except OverflowError:
        todo = [request for request in todo if -count <= request[1] < count]
        pairs = np.fromiter(chain.from_iterable(todo), np.int64, 2 * len(todo))
    rows, indices = pairs.reshape(-1, 2).T
    known = (indices >= -count) & (indices < count)
    return rows[known], indices[known] % count


def _bytes_of(payload: Any) -> int:
    """Return the bytes of a payload, or of those of several objects."""
    return sum(map(len, payload)) if isinstance(payload, list) else len(payload)
