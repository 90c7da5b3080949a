"""What TFRecordDataset and TarDataset share: records of shards, as streams or at random."""

from __future__ import annotations

import logging
import operator
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastload.cache import Cache, as_cache
from fastload.cache.record import Digest
from fastload.datasets.base import StoreDataset, check_function
from fastload.datasets.protocols import Allocate, RowErrors, RowRequests, current_reader
from fastload.datasets.seeds import SampleSeeds
from fastload.errors import ArgumentError, FastloadError
from fastload.fetch.prefetcher import Prefetcher
from fastload.images.rng import sample_seed
from fastload.metrics.counters import Counters
from fastload.metrics.units import parse_size
from fastload.shards.catalog import ShardList
from fastload.shards.fields import Fields
from fastload.shards.index import ShardIndex
from fastload.shards.interleave import StreamedRecord
from fastload.shards.pending import PendingRecords
from fastload.shards.prepare_records import RecordPrepareStep
from fastload.shards.record_source import RecordSource, ShardFormat, record_name
from fastload.shards.samples import SampleMaker
from fastload.shards.stream import NO_NUMBERS, ShardStream, StreamOpener, StreamOptions
from fastload.shards.urls import Wanted
from fastload.store.retry import sleep

__all__ = ["ShardDataset"]

_log = logging.getLogger("fastload")

_CHUNK = 8  # samples decoded by one call of the kernel, as in `datasets.objects`
_SHARD_BITS = 32
_SMALL_RECORD = 32 << 10  # bytes below which a request for each costs more than to stream the shard
_PROBE = 256
_MOST_CACHED_MISSING = 0.1
_COMPRESSED_PATIENCE = 1.0  # seconds to wait for the cache's writer: a miss costs a whole shard later


class ShardDataset(StoreDataset):
    """A `StreamDataset` and `RowDataset` over shards of one format; see TFRecordDataset and TarDataset."""

    def __init__(
        self,
        url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        form: ShardFormat,
        fields: Fields | None,
        *,
        names: Wanted,
        decode: Callable[[Any], Any] | None,
        transform: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None,
        cycle_length: int,
        block_length: int,
        shuffle_buffer: int | str,
        fingerprint: str | None,
        cache: Cache | str | os.PathLike[str] | None,
        index: str | os.PathLike[str] | bool | None,
        compression: str | None,
        storage_options: dict[str, Any] | None,
        refresh: bool,
    ) -> None:
        for name, value in (("cycle_length", cycle_length), ("block_length", block_length)):
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name} must be a whole number >= 1, found {value!r}")
        check_function("decode", decode)
        self.url = url
        self.decode = decode
        self._fields = fields
        self.transform = transform
        self._options = StreamOptions(cycle_length, block_length, *_buffer(shuffle_buffer))
        kept_in = as_cache(cache)
        self.counters = Counters()
        self._form = form
        self._prefix = RecordPrepareStep(kept_in, fields, decode, fingerprint)
        directory = None if kept_in is None else kept_in.manifests
        self._shards = ShardList(
            url,
            names,
            compression=compression,
            directory=directory,
            refresh=refresh,
            storage_options=storage_options or {},
        )
        if not self._shards.cacheable:  # a warning has said why
            kept_in = directory = None
        self.cache = kept_in
        self._book = ShardIndex(len(self._shards), self._identity, directory)
        for shard, table in self._shards.indexes(index, form.parse_index).items():
            self._book.give(shard, table)
        self._numbered = False
        self._reset()

    def _reset(self) -> None:
        """The state that belongs to one process."""
        self._pid = os.getpid()
        self._held = PendingRecords(self._prefix.prepare, self._keep, self.counters)
        self._offsets: dict[int, int] = {}  # of the records that were taken last, for errors about them
        self._key_beginnings: dict[int, Digest] = {}  # of each shard's records
        self._window: Prefetcher | None = None
        self._streams: list[ShardStream] = []

    def __getstate__(self) -> dict[str, Any]:
        own = ("_pid", "_held", "_offsets", "_key_beginnings", "_window", "_streams")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __fingerprint__(self) -> dict[str, Any]:
        """Of what is learned as it is read, no sample depends: see `datasets.fingerprint`."""
        learned = ("_book", "_numbered", "_maker")
        return {name: value for name, value in self.__getstate__().items() if name not in learned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def transform(self) -> Any:
        """As it was given; it may be set again."""
        return self._transform

    @transform.setter
    def transform(self, transform: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None) -> None:
        self._maker = SampleMaker(self._fields, self.decode is not None, transform)
        self._transform = transform

    def __len__(self) -> int:
        if not self._book.complete():
            raise TypeError(f"this dataset has no length yet: {NO_NUMBERS}")
        return len(self._book)

    def __repr__(self) -> str:
        samples = f"{len(self._book):,} samples" if self._book.complete() else "samples not counted yet"
        cache = "" if self.cache is None else f", cache={self.cache!r}"
        where = f"{self._shards.store.url!r}, {len(self._shards):,} shards"
        return f"{type(self).__name__}({where}, {samples}{cache})"

    def __getitem__(self, index: int) -> Any:
        self._offsets.clear()
        record = self._record(index)
        return self._finish(record, self._take(record))

    def key(self, index: int) -> str:
        """The shard of a sample, and its offset there."""
        return self._name(self._record(index))

    def start_epoch(self, epoch: int) -> None:
        """From now on, samples are of this epoch: for transforms that go by it."""
        self._maker.start_epoch(epoch)

    # --- StreamDataset

    def must_stream(self) -> bool:
        if not self._numbered:
            self._numbered = self._book.complete() and self._random_pays()
        return not self._numbered

    def plan_streams(
        self, count: int, *, seed: int, epoch: int, shuffle: bool, rank: int, ranks: int
    ) -> list[dict[str, Any]]:
        return self._opener().plan(count, seed=seed, epoch=epoch, shuffle=shuffle, rank=rank, ranks=ranks)

    def open_stream(self, state: dict[str, Any]) -> ShardStream:
        self._notice_fork()
        self._streams = [stream for stream in self._streams if not stream.closed]
        self._streams.append(self._opener().open(state, self._hold))
        return self._streams[-1]

    def known_places(self) -> dict[int, bytes]:
        self._book.complete()
        return self._book.dump()

    def learn_places(self, places: Mapping[int, bytes]) -> None:
        self._book.load(places)

    # --- RowDataset

    def prefetch(self, indices: Iterable[int]) -> None:
        self._notice_fork()
        records = [self._record(index) for index in indices if index not in self._held]
        if records:
            self._open_window().request(records, current_reader.get())

    def cancel(self, indices: Iterable[int]) -> None:
        self._notice_fork()
        for index in indices:
            if index in self._held:
                self._held.drop(index)
            elif self._window is not None:
                self._window.cancel([self._record(index)])

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        return self._maker.new_batch(n, allocate) if self._maker.fused else None

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        failures: RowErrors = []
        seeded = SampleSeeds.current() if self._maker.runs_user_code else None
        if seeded is not None and todo:
            seeded.begin_batch(todo[0][1])
        for start in range(0, len(todo), _CHUNK):
            rows: list[int] = []
            records: list[int] = []
            images: dict[str, list[Any]] = {}
            self._offsets.clear()
            for row, index in todo[start : start + _CHUNK]:
                record = -1
                try:
                    record = self._record(index)
                    fields = self._prefix.restore(self._take(record), readonly=True)
                    if seeded is None:
                        found = self._maker.put(batch, row, fields)
                    else:
                        found = seeded.call(record, self._maker.put, batch, row, fields)
                    for name, image in found.items():
                        images.setdefault(name, []).append(image)
                    rows.append(row)
                    records.append(record)
                except Exception as error:  # of the user's functions too: `on_error` decides
                    failures.append((row, self._named(error, record)))
            seeds = [sample_seed(seed, epoch, record) for record in records]
            with self.counters.timed("decode"):
                bad = self._maker.put_images(batch, rows, images, seeds)
            failures += [(rows[k], self._named(error, records[k])) for k, error in bad]
        self.counters.add("decode.samples", len(todo))
        return failures

    def sample(self, batch: Any, row: int) -> Any:
        return self._maker.row(batch, row)

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        self._maker.copy_row(batch, target, source)

    # --- CacheFilling

    def flush_cache(self) -> None:
        self._notice_fork()  # what the parent holds, its threads were to prepare
        if self.cache is not None:
            self._held.settle()
            self.cache.flush()
            self.counters.merge(self.cache.counters.drain())

    def close_cache(self) -> None:
        self.close()

    def close(self) -> None:
        """End this process's threads, write out and close the cache. The next access opens it anew."""
        self._notice_fork()
        for stream in self._streams:
            stream.close()
        self._held.close()
        if self._window is not None:
            self._window.close()
        if self.cache is not None:
            self.cache.close()
        self._reset()

    # --- which record

    def _record(self, index: int) -> int:
        """Number of a sample, or id that a stream has handed out -> shard << 32 | ordinal."""
        self._notice_fork()
        index = operator.index(index)  # two tensors of one number are not one key
        if index in self._held:
            return index
        shard, ordinal = index >> _SHARD_BITS, index & 0xFFFF_FFFF
        if shard > 0 or (shard == 0 and not self._book.complete()):
            table = self._book.get(shard) if shard < len(self._shards) else None
            if table is None:
                raise TypeError(f"there is no sample {index!r} to be had: {NO_NUMBERS}")
            if ordinal >= len(table.places):
                raise IndexError(f"shard {self._shards[shard].key!r} has {len(table.places)} records")
            return index
        n = ShardDataset.__len__(self)  # a subclass may have another length
        if not -n <= index < n:
            raise IndexError(f"index {index} is out of range for {n} samples of {self.url}")
        return self._book.record_id(index % n)

    def _name(self, record: int) -> str:
        shard = self._shards[record >> _SHARD_BITS].key
        offset = self._held.offset(record) if record in self._held else self._offsets.get(record)
        return record_name(shard, self._book.place(record)[0] if offset is None else offset)

    def _named(self, error: Exception, record: int) -> Exception:
        if isinstance(error, FastloadError) and error.key is None and record >= 0:
            error.key = self._name(record)
        return error

    def _random_pays(self) -> bool:
        """Whether to read at random now that it can be done: from the cache, or where records are large."""
        count = len(self._book)
        if count == 0:
            return True
        compressed = self._book.compressed()
        if self.cache is not None:
            some = random.Random(0).sample(range(count), min(_PROBE, count))
            records = [self._book.record_id(index) for index in some]
            sound = [record for record in records if self._book.fault(record) is None]
            absent = sum(self.cache.lookup(self._place_key(record)) is None for record in sound)
            self.cache.counters.add("cache.misses", -absent)  # nobody wanted these
            if self._window is None and not self._streams:
                self.cache.close()
            if absent <= (0 if compressed else _MOST_CACHED_MISSING * len(sound)):
                return True
        return not compressed and self._book.total_bytes() >= _SMALL_RECORD * count

    def _identity(self, shard: int) -> str:
        key, size, version, _ = self._shards[shard]
        return repr((self._shards.store.identity, key, size, version, self._form.name))

    def _cache_key(self, shard: int, offset: int) -> bytes:
        assert self.cache is not None
        beginning = self._key_beginnings.get(shard)
        if beginning is None:
            key, _, version, _ = self._shards[shard]
            beginning = self.cache.key_beginning(
                self._shards.store.identity, key, version, self._form.name, *self._prefix.key
            )
            self._key_beginnings[shard] = beginning
        return self.cache.key(str(offset), beginning=beginning)

    def _place_key(self, record: int) -> bytes:
        return self._cache_key(record >> _SHARD_BITS, self._book.place(record)[0])

    # --- what a stream hands out

    def _hold(self, found: StreamedRecord) -> int:
        record = found.shard << _SHARD_BITS | found.ordinal
        if found.record.error is not None:
            found.record.error.key = record_name(self._shards[found.shard].key, found.record.offset)
        self._held.add(record, found)
        return record

    def _keep(self, found: StreamedRecord, payload: Any) -> None:
        if self.cache is not None:
            wait = _COMPRESSED_PATIENCE if found.compressed else 0.0
            self.cache.write(self._cache_key(found.shard, found.record.offset), payload, wait)

    # --- what the steps are made of

    def _take(self, record: int) -> Any:
        if record not in self._held:
            return self._open_window().get(record)
        self._offsets[record] = self._held.offset(record)
        self.counters.add("get.ahead")
        return self._held.take(record)

    def _finish(self, record: int, payload: Any) -> Any:
        """What was read of a record -> sample."""
        try:
            return self._maker.sample(self._prefix.restore(payload))
        except FastloadError as error:
            self._named(error, record)
            raise

    # --- of this process

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():  # threads and clients of the parent are of no use here
            self._reset()

    def _opener(self) -> StreamOpener:
        return StreamOpener(
            self._shards,
            self._book,
            self._form,
            self.cache,
            key=self._cache_key,
            read_again=self._read_again,
            options=self._options,
            counters=self.counters,
        )

    def _read_again(self, record: int) -> Any:
        """A record that the cache had and lost, as the cache would have it."""
        payload = self._source().read(record, sleep)
        return payload if self._prefix.prepare is None else self._prefix.prepare(payload)

    def _source(self) -> RecordSource:
        return RecordSource(self._shards, self._book, self._form, self._cache_key)

    def _open_window(self) -> Prefetcher:
        if self._window is None:
            self._window = Prefetcher(
                self._source(), self.cache, prepare=self._prefix.prepare, counters=self.counters
            )
        return self._window


def _buffer(shuffle_buffer: int | str) -> tuple[int, int]:
    """(records, bytes) of a block at most."""
    if isinstance(shuffle_buffer, str):
        try:
            return 1 << 30, max(1, parse_size(shuffle_buffer))
        except ArgumentError:
            shuffle_buffer = shuffle_buffer[:100]
    if not isinstance(shuffle_buffer, int) or shuffle_buffer < 1:
        raise ArgumentError(
            "shuffle_buffer must be a number of records >= 1 or a size such as '64MB', "
            f"found {shuffle_buffer!r}"
        )
    return shuffle_buffer, 1 << 62
