"""What TFRecordDataset and TarDataset share: records of shards, as streams or at random."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from fastload.cache import Cache
from fastload.cache.cache import parse_size
from fastload.datasets.fields import Fields
from fastload.datasets.held import Held
from fastload.datasets.lanes import CachedLane, LearningLane
from fastload.datasets.places import PlaceBook
from fastload.datasets.record_prefix import RecordPrefix
from fastload.datasets.record_source import RecordSource, ShardFormat, record_name
from fastload.datasets.samples import SampleMaker
from fastload.datasets.shard_list import ShardList
from fastload.datasets.shard_stream import ShardStream
from fastload.datasets.stream_plan import StreamPlan
from fastload.errors import ArgumentError, FastloadError
from fastload.fetch import Window
from fastload.fetch.interleave import AnyLane, Blocks, Found, Interleave, Span
from fastload.fetch.lane import Lane, Reach
from fastload.fetch.pool import ReadPool
from fastload.fetch.share import process_share
from fastload.images.rng import sample_seed
from fastload.rows import Allocate, Failures, Todo
from fastload.stats import Counters
from fastload.store.retry import sleep

__all__ = ["ShardDataset"]

_log = logging.getLogger("fastload")

_CHUNK = 8  # samples decoded by one call of the kernel, as in `objects`
_SHARD_BITS = 32
_SMALL_RECORD = 32 << 10  # bytes below which a request for each costs more than to stream the shard
_PROBE = 256
_MOST_CACHED_MISSING = 0.1
_UNORDERED_BLOCK = 64  # records of a block that is not shuffled: only the state's grain
_COMPRESSED_PATIENCE = 1.0  # seconds to wait for the cache's writer: a miss costs a whole shard later
_NUMBERS = "its records have no numbers yet"


class ShardDataset(Dataset[Any]):
    """A `StreamDataset` and `RowDataset` over shards of one format; see TFRecordDataset and TarDataset."""

    def __init__(
        self,
        url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        form: ShardFormat,
        fields: Fields | None,
        *,
        names: str,
        decode: Callable[[Any], Any] | None,
        transform: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None,
        cycle_length: int,
        block_length: int,
        shuffle_buffer: int | str,
        cache: Cache | str | os.PathLike[str] | None,
        index: str | os.PathLike[str] | bool | None,
        compression: str | None,
        storage_options: dict[str, Any] | None,
        refresh: bool,
    ) -> None:
        for name, value in (("cycle_length", cycle_length), ("block_length", block_length)):
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name} must be a whole number >= 1, found {value!r}")
        if decode is not None and not callable(decode):
            raise ArgumentError(f"decode must be callable or None, found {decode!r}")
        self.url = url
        self.decode = decode
        self.transform = transform
        self.cycle_length, self.block_length = cycle_length, block_length
        self._most_records, self._most_bytes = _buffer(shuffle_buffer)
        self.cache = Cache(cache) if isinstance(cache, str | os.PathLike) else cache
        self.counters = Counters()
        self._form = form
        self._maker = SampleMaker(fields, decode is not None, transform)
        self._prefix = RecordPrefix(self.cache, fields, decode)
        directory = None if self.cache is None else self.cache.manifests
        self._shards = ShardList(
            url,
            names,
            compression=compression,
            directory=directory,
            refresh=refresh,
            storage_options=storage_options or {},
        )
        self._book = PlaceBook(len(self._shards), self._identity, directory)
        for shard, table in self._shards.indexes(index, form.parse_index).items():
            self._book.give(shard, table)
        self._numbered = False
        self._reset()

    def _reset(self) -> None:
        """The state that belongs to one process."""
        self._pid = os.getpid()
        self._held = Held(self._prefix.prepare, self._keep, self.counters)
        self._offsets: dict[int, int] = {}  # of the records that were taken last, for errors about them
        self._window: Window | None = None
        self._streams: list[ShardStream] = []

    def __getstate__(self) -> dict[str, Any]:
        own = ("_pid", "_held", "_offsets", "_window", "_streams")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __len__(self) -> int:
        if not self._book.complete():
            raise TypeError(f"this dataset has no length yet: {_NUMBERS}. {self._how()}")
        return len(self._book)

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
        split = self._book.complete() and not self._any_compressed()
        streams = count * ranks
        if streams > len(self._shards) and not split:
            _log.warning(
                "%d shards and %d readers: %d of them have nothing to read. %s",
                len(self._shards),
                streams,
                streams - len(self._shards),
                "Compressed shards cannot be shared" if self._any_compressed() else self._how(),
            )
        plans = [
            StreamPlan(seed, epoch, shuffle, stream, streams, count, split, self._listing())
            for stream in range(rank * count, (rank + 1) * count)
        ]
        return [{"plan": plan.to_json(), "at": None} for plan in plans]

    def open_stream(self, state: dict[str, Any]) -> ShardStream:
        self._notice_fork()
        plan, at = StreamPlan(**state["plan"]), state["at"]
        if plan.listing != self._listing():
            raise ArgumentError("the saved state is of other shards, or of other versions of these")
        if plan.split and not self._book.complete():
            raise ArgumentError(
                "the saved state shares out records by their places, which are not known here: give the "
                "index files or the cache that the run had"
            )
        weights = self._book.counts() if plan.split else self._weights()
        lanes = max(1, self.cycle_length // plan.per_rank)
        share = process_share(self._shards.store)
        reach = Reach.of(share[1], lanes)
        pool = ReadPool(max(1, min(lanes * reach.ahead, share[0]._most)), self.counters)
        interleave = Interleave(
            plan.spans(weights),
            functools.partial(self._open_lane, pool, reach),
            cycle_length=lanes,
            block_length=self.block_length,
            position=None if at is None else at["position"],
        )
        blocks = Blocks(
            interleave,
            seed=(plan.seed, plan.epoch, plan.stream) if plan.shuffle else None,
            most_records=self._most_records if plan.shuffle else _UNORDERED_BLOCK,
            most_bytes=self._most_bytes,
            state=at,
        )
        stream = ShardStream(plan.to_json(), blocks, pool, self._hold)
        self._streams.append(stream)
        return stream

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
            self._open_window().request(records)

    def cancel(self, indices: Iterable[int]) -> None:
        self._notice_fork()
        for index in indices:
            if index in self._held:
                self._held.drop(index)
            elif self._window is not None:
                self._window.cancel([self._record(index)])

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        return self._maker.new_batch(n, allocate) if self._maker.fused else None

    def fill(self, batch: Any, todo: Todo, seed: int, epoch: int) -> Failures:
        failures: Failures = []
        for start in range(0, len(todo), _CHUNK):
            rows: list[int] = []
            records: list[int] = []
            images: dict[str, list[Any]] = {}
            self._offsets.clear()
            for row, index in todo[start : start + _CHUNK]:
                record = -1
                try:
                    record = self._record(index)
                    fields = self._prefix.restore(self._take(record))
                    for name, image in self._maker.put(batch, row, fields).items():
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
        if index in self._held:
            return index
        shard, ordinal = index >> _SHARD_BITS, index & 0xFFFF_FFFF
        if shard > 0 or (shard == 0 and not self._book.complete()):
            table = self._book.get(shard) if shard < len(self._shards) else None
            if table is None:
                raise TypeError(f"there is no sample {index!r} to be had: {_NUMBERS}. {self._how()}")
            if ordinal >= len(table.places):
                raise IndexError(f"shard {self._shards[shard].key!r} has {len(table.places)} records")
            return index
        n = len(self)
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

    def _how(self) -> str:
        return (
            "Read it with fastload.DataLoader, which streams it; give index files (index=); or give it a "
            "cache, which learns the places in the first epoch"
        )

    def _random_pays(self) -> bool:
        """Whether to read at random now that it can be done: from the cache, or where records are large."""
        count = len(self._book)
        if count == 0:
            return True
        compressed = self._any_compressed()
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

    @functools.cached_property
    def _compressed(self) -> bool:
        return any(self._shards[shard].compressed for shard in range(len(self._shards)))

    def _any_compressed(self) -> bool:
        return self._compressed

    def _weights(self) -> list[int]:
        """What whole shards are balanced by: their samples where wids' index says, else their bytes."""
        counts = self._shards.counts
        if len(counts) == len(self._shards):
            return [counts[shard] for shard in range(len(counts))]
        return [self._shards[shard].size for shard in range(len(self._shards))]

    def _identity(self, shard: int) -> str:
        key, size, version, compressed = self._shards[shard]
        return repr((self._shards.store.identity, key, size, version, compressed, self._form.name))

    @functools.cached_property
    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for shard in range(len(self._shards)):
            digest.update(repr(tuple(self._shards[shard])).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def _listing(self) -> str:
        return self._digest

    def _cache_key(self, shard: int, offset: int) -> bytes:
        assert self.cache is not None
        key, _, version, _ = self._shards[shard]
        return self.cache.key(
            self._shards.store.identity, key, version, self._form.name, str(offset), *self._prefix.key
        )

    def _place_key(self, record: int) -> bytes:
        return self._cache_key(record >> _SHARD_BITS, self._book.place(record)[0])

    # --- what a stream hands out

    def _open_lane(
        self, pool: ReadPool, reach: Reach, span: Span, ordinal: int, offset: int | None
    ) -> AnyLane:
        """A lane over a span from a record on."""
        shard, table = self._shards[span.shard], self._book.get(span.shard)
        stop = None
        if table is not None:
            count = len(table.places)
            last = count if span.stop is None else span.stop
            if self.cache is not None:
                key = functools.partial(self._cache_key, span.shard)
                read = functools.partial(self._read_again, span.shard)
                cached = CachedLane(table, ordinal, last, self.cache, key, read)
                if cached.complete():
                    return cached
            if ordinal < count and offset is None:
                offset = int(table.places[ordinal, 0])
            if span.stop is not None:
                stop = int(table.places[span.stop - 1].sum())
        begin = offset or 0
        end = None if shard.compressed else (shard.size if stop is None else stop)
        splitter = self._form.splitter(begin, end)
        lane = Lane(
            self._shards.store,
            shard,
            begin,
            stop,
            splitter,
            reach=reach,
            pool=pool,
            counters=self.counters,
        )
        if table is None and ordinal == 0 and self._book.learning:
            return LearningLane(lane, span.shard, self._book)
        return lane

    def _read_again(self, shard: int, ordinal: int) -> Any:
        """A record that the cache had and lost, as the cache would have it."""
        payload = self._source().read(shard << _SHARD_BITS | ordinal, sleep)
        return payload if self._prefix.prepare is None else self._prefix.prepare(payload)

    def _hold(self, found: Found) -> int:
        record = found.shard << _SHARD_BITS | found.ordinal
        if found.record.error is not None:
            found.record.error.key = record_name(self._shards[found.shard].key, found.record.offset)
        self._held.add(record, found)
        return record

    def _keep(self, found: Found, payload: Any) -> None:
        if self.cache is not None:
            wait = _COMPRESSED_PATIENCE if self._shards[found.shard].compressed else 0.0
            self.cache.write(self._cache_key(found.shard, found.record.offset), payload, wait)

    # --- what the steps are made of

    def _take(self, record: int) -> Any:
        if record not in self._held:
            return self._open_window().take(record)
        self._offsets[record] = self._held.offset(record)
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

    def _source(self) -> RecordSource:
        return RecordSource(self._shards, self._book, self._form, self._cache_key)

    def _open_window(self) -> Window:
        if self._window is None:
            self._window = Window(
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
