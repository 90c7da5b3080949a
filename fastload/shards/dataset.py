"""What TFRecordDataset and TarDataset share: records of shards, as streams or at random."""

from __future__ import annotations

import operator
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.cache import Cache, Digest
from fastload.checks import as_index, check_index, whole_number
from fastload.datasets.payloads import RecordPayloads
from fastload.datasets.sample_fields import RecordFields
from fastload.datasets.sample_transforms import Transform
from fastload.datasets.samples import SampleBuilder
from fastload.datasets.store_dataset import StoreDataset, some_of
from fastload.datasets.views import FLUSH_SECONDS
from fastload.datasets.warm import ToRead, Warmed
from fastload.fetch.reads import Source, record_name, split_name
from fastload.images.rng import mix_all
from fastload.shards.catalog import ShardList
from fastload.shards.epoch_streams import NOT_INDEXED, STREAMED, EpochStreams, StreamOptions
from fastload.shards.filling import ShardFilling
from fastload.shards.formats import ShardFormat
from fastload.shards.index import RecordId, ShardIndex
from fastload.shards.records import (
    IndexedShards,
    PendingRecords,
    RecordBlocks,
    RecordSource,
)
from fastload.shards.stream import ShuffledStream, StreamedRecord
from fastload.store.failures import sleep
from fastload.store.node import ProcessLocal

SMALL_RECORD = 32 << 10  # bytes below which a request for each costs more than to stream the shard
_PROBE = 256
_MOST_CACHED_MISSING = 0.1
_COMPRESSED_PATIENCE = 1.0  # seconds to wait for the cache's writer: a miss costs a whole shard later


class _Here(NamedTuple):
    """What a dataset of shards has in one process.

    Attributes:
        pending: the records that streams have delivered.
        key_beginnings: the first parts of the cache keys of each shard's records.
        streams: that are open.
    """

    pending: PendingRecords
    key_beginnings: dict[int, Digest]
    streams: list[ShuffledStream]


class ShardDataset(StoreDataset):
    """The records of shards of one format; see TFRecordDataset and TarDataset.

    Args:
        form: of the shards.
        shards: they, or a function that lists them once the other arguments are checked.
        fields: of a record; None: a sample is its bytes.
        index: see `ShardList.indexes`.
        read_index: adds the records of all shards to the index, where no record is read to know them.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        form: ShardFormat,
        shards: ShardList | Callable[[], ShardList],
        fields: RecordFields | None,
        *,
        decode: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None,
        transform: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None,
        cache: Cache | None,
        streams: StreamOptions = STREAMED,
        index: str | os.PathLike[str] | bool | None = False,
        num_samples: int | None = None,
        read_index: Callable[[ShardList, ShardIndex], None] | None = None,
    ) -> None:
        self._options = streams
        if num_samples is not None:
            num_samples = whole_number("num_samples", num_samples)
        decode = None if isinstance(decode, Mapping) else decode  # of single fields: see `fields`
        super().__init__(url, decode)
        self._fields = fields
        self.transform = transform
        self._form = form
        self._payloads = RecordPayloads(cache, fields, decode, transform)
        self._payloads.check_transform(transform)
        self._shards = shards if isinstance(shards, ShardList) else shards()
        self._budget = self._shards.store.budget
        self.cache = cache if self._shards.cacheable else None  # else a warning has said why
        self._index = ShardIndex(len(self._shards), self._identity, self._shards.kept_in)
        if form.index_files is not None:
            for shard, table in self._shards.indexes(index, form.index_files).items():
                self._index.add(shard, table)
        if read_index is not None:
            read_index(self._shards, self._index)
            self._index.complete()
        self._reads_at_random = False
        self._hint = num_samples
        self._settle_mode(self._shards.total_bytes() if read_index is None else self._index.total_bytes())

    _passing = StoreDataset._passing | {"_index", "_reads_at_random", "_hint"}

    def __len__(self) -> int:
        if not self._index.complete() and self._hint is not None:
            return self._hint
        counted = self._indexed_length()
        if self._hint not in (None, counted):
            warnings.warn(
                f"num_samples={self._hint:,} was given for {self.url!r}, and its shards have {counted:,} "
                f"samples: len() is {counted:,} from now on",
                stacklevel=2,
            )
        self._hint = None
        return counted

    def _digests(self) -> tuple[str, str]:
        return self._shards.digests

    def _indexed_length(self) -> int:
        """See `fastload.order.sampler.indexed_length`."""
        if not self._index.complete():
            raise TypeError(
                f"this dataset has no length yet: {NOT_INDEXED}. num_samples= gives it a length until then"
            )
        return len(self._index)

    def __repr__(self) -> str:
        samples = "samples not counted yet"
        if self._index.complete():
            samples = f"{len(self._index):,} samples"
        elif self._hint is not None:
            samples = f"about {self._hint:,} samples"
        cache = "" if self.cache is None else f", cache={self.cache!r}"
        where = f"{self._shards.store.url!r}, {len(self._shards):,} shards"
        return f"{type(self).__name__}({where}, {samples}{cache})"

    def shards(self) -> ShardList:
        """Return the shards as they were listed: key, size and version of each."""
        return self._shards

    def find(self, keys: Iterable[str]) -> dict[str, list[int]]:
        """Return key -> the indices of its samples, without keys that no sample has. All must be indexed."""
        numbers = {self._shards[shard].key: shard for shard in range(len(self._shards))}
        firsts = [0, *accumulate(self._index.counts())]
        found = {}
        for key in keys:
            name, offset = split_name(key)
            records = self._index.get(numbers[name]) if name in numbers and offset is not None else None
            if records is not None:
                ordinals = np.flatnonzero(records.offsets[:, 0] == offset)
                if len(ordinals):
                    found[key] = (firsts[numbers[name]] + ordinals).tolist()
        return found

    def _warm_shards(self, shards: Iterable[int]) -> Iterator[Warmed]:
        """Read these shards into the cache, and index them. As `ObjectDataset.warm`.

        What the cache has is read again only where a shard has no index, or is compressed.
        """
        if not self._form.can_stream:
            return self.warm(self._records_of(shards))
        return ShardFilling(self._indexed(), self._own_cache()).run(shards)

    def _left_to_warm_shards(self, shards: Iterable[int]) -> ToRead:
        """Return what `_warm_shards` has to read. Raises as `warm`."""
        if not self._form.can_stream:
            return self._left_to_warm(self._records_of(shards))
        return ShardFilling(self._indexed(), self._own_cache()).left(shards)

    def _records_of(self, shards: Iterable[int]) -> Iterator[int]:
        return (record for shard in shards for record in self._index.records_of(shard))

    # --- read ahead

    def key(self, index: int) -> str:
        streamed = self._here.get().pending.offset(index) is not None
        return self._name(index) if streamed else super().key(index)

    def prefetch(self, indices: Iterable[int]) -> None:
        pending = self._here.get().pending
        super().prefetch([index for index in indices if index not in pending] if pending else indices)

    def _cancel(self, indices: Iterable[int]) -> None:
        pending = self._here.get().pending
        others = []
        for index in indices:
            if index in pending:
                pending.drop(index)
            else:
                others.append(index)
        super()._cancel(others)

    def _outstanding(self) -> int:
        return super()._outstanding() + len(self._here.get().pending)

    # --- which samples these are

    def _records(self, indices: Iterable[int]) -> NDArray[np.int64]:
        # Not `_record`: a record of a stream is not pending any more once it was used.
        return self._index.record_ids(np.fromiter(map(operator.index, indices), np.int64))

    def _identities(self, records: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return numbers of the shard, its version, the record's number in it, and what that number means."""
        shards, ordinals = records >> 32, records & 0xFFFFFFFF
        form = np.uint64(xxhash.xxh3_64_intdigest(self._numbering().encode()))
        return mix_all((self._shards.identities(shards) ^ form) + ordinals.view(np.uint64))

    def _numbering(self) -> str:
        """Return a text that decides which record of a shard has which number."""
        return self._form.code

    def _flush_cache(self, timeout: float = FLUSH_SECONDS) -> None:
        here = self._here.peek()
        if here is not None and self.cache is not None:
            here.pending.settle()
        super()._flush_cache(timeout)

    def close(self) -> None:
        here = self._here.drop()
        if here is not None:
            for stream in here.streams:
                stream.close()
            here.pending.close()
        super().close()
        if self.cache is not None:  # streams use it without a prefetcher
            self.cache.close()

    # --- what `StoreDataset` asks for

    def _source(self) -> Source:
        return RecordSource(self._indexed())

    def _indexed(self) -> IndexedShards:
        return IndexedShards(
            self._shards,
            self._form,
            self._index,
            self._cache_key_at,
            self._payloads.encode,
            self.counters,
            self._blocks(),
        )

    def _record(self, index: int) -> int:
        """Return the packed `RecordId` of a sample's number, or of an id that a stream has delivered."""
        index = as_index(index)
        if index in self._here.get().pending:
            return index
        shard, ordinal = RecordId.unpack(index)
        if shard > 0 or (shard == 0 and not self._index.complete()):
            table = self._index.get(shard) if shard < len(self._shards) else None
            if table is None:
                raise TypeError(f"sample {index!r} is not available: {NOT_INDEXED}")
            if ordinal >= len(table.offsets):
                raise IndexError(f"shard {self._shards[shard].key!r} has {len(table.offsets)} records")
            return index
        return self._index.record_id(check_index(index, len(self._index), f"samples of {self.url}"))

    def _name(self, record: int) -> str:
        shard = self._shards[RecordId.unpack(record).shard].key
        offset = self._here.get().pending.offset(record)
        return record_name(shard, self._index.locate(record)[0] if offset is None else offset)

    def _cache_key(self, record: int) -> bytes:
        return self._cache_key_at(RecordId.unpack(record).shard, self._index.locate(record)[0])

    def _new_builder(self, transform: Transform) -> SampleBuilder:
        fields = self._fields if self.decode is None else None
        if fields is None:
            builder = SampleBuilder(None, transform)
            builder.transforms.refuse_fields()
            return builder
        fields.check(transform)
        return SampleBuilder(fields, transform, fields.shape, optional=fields.optional)

    def _get(self, record: int) -> Any:
        pending = self._here.get().pending
        if record not in pending:
            return super()._get(record)
        self.counters.add("get.ahead")
        return pending.get(record)

    # --- which record, and under which key

    def _random_pays(self) -> bool:
        """Return whether to read at random, which is possible: from the cache, or where records are large."""
        count = len(self._index)
        if count == 0 or not self._form.can_stream:
            return True
        compressed = self._index.compressed()
        if self.cache is not None:
            some = random.Random(0).sample(range(count), min(_PROBE, count))
            records = [self._index.record_id(index) for index in some]
            sound = [record for record in records if self._index.fault(record) is None]
            was_open = self.cache._is_open  # by another dataset, which may be reading
            absent = sum(not self.cache.has(self._cache_key(record)) for record in sound)
            if not was_open and self._prefetchers.peek() is None and not self._here.get().streams:
                self.cache.close()
            if absent <= (0 if compressed else _MOST_CACHED_MISSING * len(sound)):
                return True
        return not compressed and self._index.total_bytes() >= SMALL_RECORD * count

    def _identity(self, shard: int) -> str:
        key, size, version, _ = self._shards[shard]
        return repr((self._shards.store.identity, key, size, version, self._numbering()))

    def _cache_key_at(self, shard: int, offset: int | str) -> bytes:
        assert self.cache is not None
        beginnings = self._here.get().key_beginnings
        beginning = beginnings.get(shard)
        if beginning is None:
            key, _, version, _ = self._shards[shard]
            beginning = beginnings[shard] = self.cache._key_beginning(
                self._shards.store.identity,
                key,
                version,
                self._form.code,
                *self._payloads.key,
                codec=self._payloads.codec,
            )
        return self.cache.key(str(offset), beginning=beginning)

    def _set_payloads(self, payloads: list[Any]) -> None:
        super()._set_payloads(payloads)
        self._here.drop()

    def _some_keys(self) -> list[bytes]:
        """Return the keys of the first records of some shards that are indexed."""
        tables = {shard: self._index.get(shard) for shard in some_of(len(self._shards))}
        return [
            self._cache_key(RecordId(shard, 0).pack())
            for shard, table in tables.items()
            if table and len(table.offsets)
        ]

    # --- streams

    def _streams(self) -> ShardStreams:
        return ShardStreams(self)

    def _keep(self, found: StreamedRecord, payload: Any) -> None:
        if self.cache is not None:
            wait = _COMPRESSED_PATIENCE if found.compressed and not self.cache._is_rebuilding else 0.0
            self.cache.write(self._cache_key_at(found.shard, found.record.offset), payload, wait)

    @cached_property
    def _here(self) -> ProcessLocal[_Here]:
        return ProcessLocal(self._new_here)  # no lambda: a subclass may pickle all attributes

    def _new_here(self) -> _Here:
        return _Here(PendingRecords(self._payloads.encode, self._keep, self.counters), {}, [])

    def _blocks(self) -> RecordBlocks | None:
        """Return the blocks that records are read in, where they cannot be read one by one."""
        return None

    def _read_again(self, record: int) -> Any:
        """Return a record that the cache had and lost, as the cache would have it."""
        payload = self._source().read(record, sleep)
        return payload if self._payloads.encode is None else self._payloads.encode(payload)


class ShardStreams:
    """See `StreamDataset`."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def _indexed_length(self) -> int:
        return self._dataset._indexed_length()

    def must_stream(self) -> bool:
        dataset = self._dataset
        if not dataset._reads_at_random:
            dataset._reads_at_random = dataset._index.complete() and dataset._random_pays()
        return not dataset._reads_at_random

    def plan_streams(
        self, count: int, *, seed: int, epoch: int, shuffle: bool, rank: int, ranks: int
    ) -> list[dict[str, Any]]:
        return self._epochs().plan(count, seed=seed, epoch=epoch, shuffle=shuffle, rank=rank, ranks=ranks)

    def open_stream(self, state: dict[str, Any]) -> ShuffledStream:
        here = self._dataset._here.get()
        here.streams[:] = [stream for stream in here.streams if not stream.closed]
        here.streams.append(self._epochs().open(state, self._hold))
        return here.streams[-1]

    def known_indexes(self) -> dict[int, bytes]:
        self._dataset._index.complete()  # looks for those of other processes
        return self._dataset._index.dump()

    def learn_indexes(self, indexes: Mapping[int, bytes]) -> None:
        self._dataset._index.load(indexes)

    def _epochs(self) -> EpochStreams:
        dataset = self._dataset
        return EpochStreams(dataset._indexed(), dataset.cache, dataset._options, dataset._read_again)

    def _hold(self, found: StreamedRecord) -> int:
        """Let a record wait for its sample; return its packed `RecordId`."""
        record = RecordId(found.shard, found.ordinal).pack()
        if found.record.error is not None:
            found.record.error.key = record_name(self._dataset._shards[found.shard].key, found.record.offset)
        self._dataset._here.get().pending.add(record, found)
        return record
