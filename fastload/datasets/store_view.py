"""A dataset over a store as the loader reads it: read ahead, and written into the rows of a batch.

    rows of a batch ─▶ their records lie in the cache ─▶ one call of the kernel makes all of them
                        └─ no ─▶ prefetcher ─▶ payloads, as they come ─▶ values ─▶ SampleBuilder

The kernel makes rows alone where a sample is one image and no code of the user has a part in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.cache import Cache
from fastload.cache.segment import Places
from fastload.datasets.payloads import keep
from fastload.datasets.sample_fields import ordinary_memory
from fastload.datasets.samples import RowBatch, Todo
from fastload.datasets.store_dataset import StoreDataset, override_of
from fastload.datasets.views import (
    ONE,
    Allocate,
    EncodedRows,
    MadeSample,
    PlainView,
    RowErrors,
    RowRequests,
    StreamDataset,
    reraise,
)
from fastload.images.crop import RowJob
from fastload.images.kernel import active, threads
from fastload.images.rng import mix_all, sample_seed, sample_seeds
from fastload.store.budget import RequestBudget

# Samples decoded by one call of the kernel. While others are still on their way: few enough that decoding
# starts meanwhile. Of those that are here, as many as stay in the processor's caches: decoding seems to throw
# the interpreter's code out of these, and Python then takes twice as long for the next samples.
_CHUNK, _CHUNK_BYTES = 8, 3 << 20


class _Begun(NamedTuple):
    """Rows that the kernel makes, and of each its record and the bytes of that."""

    rows: NDArray[np.int64]
    records: NDArray[np.int64]
    lengths: NDArray[np.int64]
    job: RowJob


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

    def start_epoch(self, epoch: int) -> None:
        self.dataset._builder.start_epoch(epoch)

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
        positions, records = _numbered(list(enumerate(indices)), len(self.dataset))  # type: ignore[arg-type]
        places = self._locate(cache, records)
        if not places.here.any():
            return indices
        active().read_ahead(places.table)
        located = set(positions[places.here].tolist())
        return [index for position, index in enumerate(indices) if position not in located]

    def _locate(self, cache: Cache, records: NDArray[np.int64]) -> Places:
        return cache.locate(self.dataset._keys.get().of(records))

    def form(self) -> Any:
        return self.dataset._builder.structure

    def new_batch(self, n: int, allocate: Allocate) -> RowBatch | None:
        return self.dataset._builder.new_batch(n, allocate)

    def begin(self, batch: RowBatch, todo: RowRequests, seed: int, epoch: int) -> None:
        begun = self._begin(batch, todo, seed, epoch)
        if begun is not None:
            batch.begun[self] = begun

    def fill(self, batch: RowBatch, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        dataset = self.dataset
        errors: RowErrors = []
        most_rows, most_bytes = _CHUNK * max(1, threads()), _CHUNK_BYTES * max(1, threads())
        dataset.counters.add("decode.samples", len(todo))
        begun = batch.begun.pop(self, None) or self._begin(batch, todo, seed, epoch)
        if begun is not None:
            done = self._finish(batch, begun)
            todo = [] if len(done) == len(todo) else [request for request in todo if request[0] not in done]
        builder = dataset._builder
        begun = 0
        while begun < len(todo):
            chosen = Todo([], [], [], [], [])
            payloads: list[Any] = []
            held = 0
            while begun < len(todo):
                row, index = todo[begun]
                record = None
                try:
                    record = dataset._record(index)
                    full = len(chosen.rows) >= most_rows and not dataset._is_here(record)
                    if held >= most_bytes or full:
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
                begun += 1
            if chosen.rows:
                if batch.encoded:
                    chosen.keys.extend(map(dataset._name, chosen.records))
                with dataset.counters.timed("decode"):
                    failures = builder.fill(batch, chosen)
                errors += [
                    (chosen.rows[position], dataset._named(error, chosen.records[position]))
                    for position, error in failures
                ]
            for payload in payloads:
                keep(payload)
        return errors

    def _begin(self, batch: RowBatch, todo: RowRequests, seed: int, epoch: int) -> _Begun | None:
        """Let the kernel begin the rows whose records the cache has, in one call; None where none are."""
        dataset, builder = self.dataset, self.dataset._builder
        crop = builder.kernel_crop(batch)
        if crop is None or dataset.cache is None:
            return None
        rows, records = _numbered(todo, len(dataset))  # type: ignore[arg-type]
        places = self._locate(dataset.cache, records)
        here = places.here
        if not here.any():
            return None
        images, pixels = builder.image_column(batch).numpy(), dataset._payloads.codec.packs
        seeds = sample_seeds(seed, epoch, records[here])
        rows, records, lengths = rows[here], records[here], places.table["length"]
        job = crop.begin_rows(images, rows, places.table, seeds, pixels=pixels, owner=places)
        return _Begun(rows, records, lengths, job)

    def _finish(self, batch: RowBatch, begun: _Begun) -> Set[int]:
        """Wait for rows of the kernel; return those that it made."""
        dataset, builder = self.dataset, self.dataset._builder
        assert dataset.cache is not None  # the records are there
        not_made, reading, decoding = begun.job.finish()
        made: Any = ~np.isin(begun.rows, not_made) if not_made else slice(None)
        made_rows, made_records = begun.rows[made].tolist(), begun.records[made].tolist()
        builder.note_made(batch, made_rows, made_records)
        share = max(1, threads())  # of the process's time, like all that is counted there
        dataset.counters.merge({"cache.seconds": reading / share, "decode.seconds": decoding / share})
        dataset.cache.count_hits(len(made_rows), int(begun.lengths[made].sum()))
        prefetcher = dataset._prefetchers.peek()
        requested = 0 if prefetcher is None else prefetcher.forget_made(made_records)
        dataset.counters.add("get.ahead", len(made_rows) if threads() else requested)  # see `_read_ahead`
        return set(made_rows)

    def sample(self, batch: RowBatch, row: int) -> Any:
        return self.dataset._builder.row(batch, row)

    def copy_row(self, batch: RowBatch, target: int, source: int) -> None:
        self.dataset._builder.copy_row(batch, target, source)

    def finish_batch(self, batch: RowBatch) -> Any:
        return self.dataset._builder.finish(batch)

    # --- images that leave the worker encoded, see `EncodedRows`

    def encoded(self) -> EncodedRows | None:
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

    def finish_encoded_batch(self, batch: RowBatch) -> Any:
        return self.finish_batch(batch)


def _numbered(todo: RowRequests, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (rows, records) of the requests whose samples are among `count`."""
    if {type(index) for _, index in todo} != {int}:
        todo = [(row, int(index)) for row, index in todo if isinstance(index, int | np.integer)]
    rows, indices = np.array(todo, np.int64).reshape(-1, 2).T
    known = (indices >= -count) & (indices < count)
    return rows[known], indices[known] % count


def _bytes_of(payload: Any) -> int:
    """Return the bytes of a payload, or of those of several objects."""
    return sum(map(len, payload)) if isinstance(payload, list) else len(payload)
