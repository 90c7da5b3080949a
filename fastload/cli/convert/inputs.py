"""What `fastload convert` reads: objects in a known order, or the records of shards.

Both hand out samples part by part. A part becomes a new shard. The position says in JSON where the next part
begins, so that another run can go on there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from xxhash import xxh3_64

from fastload.cache.listings import Listings
from fastload.cli.convert.sample_forms import Sample, sound_payload, split_name
from fastload.cli.data_source import FOLDER, INDEXABLE, OBJECTS, find_kind, list_shards
from fastload.errors import ArgumentError
from fastload.fetch.prefetcher import Prefetcher
from fastload.fetch.reads import ObjectSource
from fastload.fetch.threads import ReadPool
from fastload.formats.tar import read_sample
from fastload.metrics.counters import Counters
from fastload.shards.formats import FORMATS
from fastload.shards.reader import ReadAhead, ShardReader
from fastload.shards.stream import BlockSize, Interleave, ShuffledStream, Span, StreamedRecord
from fastload.store import Store, open_store
from fastload.store.listing import ListingQuery
from fastload.store.manifest import Manifest

_AHEAD = 512  # samples that the prefetcher knows of; it bounds requests and bytes by itself
_MOST_JSON = 64 << 20
_OVERHEAD = 2048  # bytes of a sample in a shard beside its own: headers, label, padding
_MIXED = 16  # shards that a shuffle reads at once
_READ_AHEAD = 64 << 20  # bytes of shards that were read and not taken yet
_SMALL_BLOCK = BlockSize(64, 4 << 20)
_READS = 8  # of shards at once
_PLAN = {"order": 2}  # raise it when the same shards and seed would give another order


class Input(Protocol):
    """Where samples come from.

    Attributes:
        kind: "folder", "objects", "tar" or "tfrecord".
        url, identity: of the store.
        classes: class names, of a folder; or None.
        total_bytes: of all samples, as the store has them.
        fingerprint: another one where any object was added, removed or changed.
        shards: how many parts there will be, where that is known; or None.
        position: where the next part begins (JSON); None at the end.
    """

    kind: str
    url: str
    identity: str
    classes: list[str] | None
    total_bytes: int
    fingerprint: str
    shards: int | None
    position: Any

    def part(self) -> Iterator[Sample]:
        """The samples of the next part; `position` moves when it is through."""

    def close(self) -> None:
        """End the threads that read."""


def open_input(url: str, kind: str, options: dict[str, Any], shard_size: int, seed: int | None) -> Input:
    """Open what is at `url`; kind "auto" looks at the names there.

    Raises:
        ArgumentError: `convert` does not read that kind. Otherwise as a dataset.
    """
    kind = find_kind(url, options, kind)
    if kind in (FOLDER, OBJECTS):
        return ObjectsInput(kind, url, open_store(url, **options), shard_size, seed)
    if kind in INDEXABLE:
        return _ShardsInput(kind, url, options, shard_size, seed)
    raise ArgumentError(f"convert reads folders, objects, {' and '.join(INDEXABLE)}, and {url!r} is {kind}")


def _fingerprint(manifest: Manifest) -> str:
    digest = xxh3_64(manifest.sizes.tobytes())
    for index in range(len(manifest)):
        line = f"{manifest.key(index)}\0{manifest.version(index)}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return str(digest.hexdigest())


class ObjectsInput:
    """See `Input`: a sample per object, hundreds of which are read at a time.

    Attributes:
        manifest: the versions that were listed, for other processes to read. It is large, without secrets.
        opened: the other arguments, to open the same there. They are small; the store holds its credentials.
    """

    def __init__(
        self,
        kind: str,
        url: str,
        store: Store,
        shard_size: int,
        seed: int | None,
        manifest: Manifest | None = None,
    ) -> None:
        folder = kind == FOLDER
        if manifest is None:
            manifest = Listings(None).open(store, ListingQuery(labels=folder))
        self.manifest = manifest
        self.opened = {"kind": kind, "url": url, "store": store, "shard_size": shard_size, "seed": seed}
        self.kind, self.url, self.identity = kind, url, manifest.identity
        self.classes = list(manifest.classes or []) if folder else None
        self.total_bytes = manifest.total_bytes
        # No cache: nothing asks for keys of one.
        objects = ObjectSource(store, manifest, key=lambda index, version: b"")
        self._prefetcher = Prefetcher(objects, None, prepare=None, counters=Counters())
        rng = np.random.default_rng(seed)
        self._order = np.arange(len(manifest)) if seed is None else rng.permutation(len(manifest))
        # Of the order too: another release of numpy may draw another one.
        self.fingerprint = f"{_fingerprint(manifest)}-{xxh3_64(self._order.tobytes()).hexdigest()}"
        # Cut by the sizes listed, so that the number of shards is known before the first one is written.
        full = np.array(list(accumulate(manifest.sizes[self._order].tolist(), initial=0)))
        full += _OVERHEAD * np.arange(len(full))
        numbers = full[:-1] // shard_size
        self._ends = [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(manifest)]
        self.shards: int | None = len(self._ends)
        self.position: Any = 0
        self._requested, self._wanted = 0, len(manifest)

    def starts(self) -> list[int]:
        """The position of each part."""
        return [0, *self._ends[:-1]]

    def seek(self, position: int) -> None:
        """Go to a part, and read nothing ahead that belongs to the parts after it."""
        self.position = position
        self._wanted = next(end for end in self._ends if end > position)

    def part(self) -> Iterator[Sample]:
        start = int(self.position)
        self._requested = max(self._requested, start)
        stop = next(end for end in self._ends if end > start)
        for at in range(start, stop):
            if self._requested - at < _AHEAD // 2:
                ahead = self._order[self._requested : min(at + _AHEAD, self._wanted)]
                self._prefetcher.request(ahead.tolist())
                self._requested += len(ahead)
            yield self._sample(int(self._order[at]))
        self.position = stop if stop < len(self._order) else None

    def _sample(self, index: int) -> Sample:
        content = self._prefetcher.get(index)
        stem, extension = split_name(self.manifest.key(index))
        members: dict[str, Any] = {extension: memoryview(content)}
        if self.classes is not None:
            members["cls"] = str(self.manifest.label(index)).encode()
        return Sample(stem, members, None, self.manifest.size(index))

    def close(self) -> None:
        self._prefetcher.close()


class _ShardsInput:
    """See `Input`: the records of shards, one shard after the other. To shuffle, shards are drawn at random,
    some of them are read in turn, and the records of each part are permuted.
    """

    shards: int | None = None

    def __init__(
        self, kind: str, url: str, options: dict[str, Any], shard_size: int, seed: int | None
    ) -> None:
        self._shards = list_shards(kind, url, cache=None, storage_options=options)
        self._store = self._shards.store
        self.classes = _classes(self._store)
        self.kind, self.url, self.identity = kind, self._store.url, self._store.identity
        self.total_bytes = sum(self._shards[number].size for number in range(len(self._shards)))
        self.fingerprint = self._shards.digest
        self.position: Any = {"plan": _PLAN, "at": None}
        self._limit, self._seed = shard_size, seed
        self._stream: ShuffledStream[StreamedRecord] | None = None
        self._next: StreamedRecord | None = None  # of the part at `position`

    def part(self) -> Iterator[Sample]:
        stream = self._stream or self._open_stream()
        found, size, state = self._next, 0, None
        while found is not None and state is None:
            size += found.record.size
            yield self._sample(found)
            if size >= self._limit:
                state = stream.state()
            found = next(iter(stream.take(1)), None)
        self._next = found
        self.position = None if found is None else state

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _open_stream(self) -> ShuffledStream[StreamedRecord]:
        """The records from `position` on."""
        if self.position.get("plan") != _PLAN:
            raise ArgumentError(
                "another version of fastload began these shards, and its position cannot be read: "
                "finish them with that version, or give another --name"
            )
        order = list(range(len(self._shards)))
        if self._seed is not None:
            random.Random(self._seed).shuffle(order)
        at, readers = self.position["at"], 1 if self._seed is None else _MIXED
        # One more than are read in turn: the next shard is begun while the last bytes of another are cut up.
        ahead, pool = ReadAhead.of(_READ_AHEAD, readers + 1), ReadPool(_READS, Counters())

        def open_reader(span: Span, ordinal: int, offset: int | None) -> ShardReader:
            return ShardReader(
                self._store,
                self._shards[span.shard],
                FORMATS[self.kind].splitter,
                ahead=ahead,
                pool=pool,
                ordinal=ordinal,
                offset=offset or 0,
            )

        interleave = Interleave(
            [Span(shard) for shard in order],
            open_reader,
            cycle_length=readers,
            position=None if at is None else at["position"],
        )
        # To shuffle, a block is a part. Else blocks are small, so that no part has to be in memory.
        part = BlockSize(1 << 62, self._limit, first=1 << 62)
        size = _SMALL_BLOCK if self._seed is None else part
        self._stream = ShuffledStream(
            _PLAN, interleave, pool, lambda found: found, size=size, seed=self._seed, at=at
        )
        self._next = next(iter(self._stream.take(1)), None)
        return self._stream

    def _sample(self, found: StreamedRecord) -> Sample:
        payload = sound_payload(found.record, self._shards[found.shard].key)
        if self.kind == "tfrecord":
            return Sample("", {}, payload, found.record.size)
        return Sample(*read_sample(payload), None, found.record.size)


def _classes(store: Store) -> list[str] | None:
    """Return the class names, where this command made the shards."""
    documents = (info for page in store.list() for info in page if info.key.endswith(".json"))
    for info in documents:
        if info.size > _MOST_JSON or "/" in info.key:
            continue
        try:
            document = json.loads(bytes(store.read(info.key, info.version, info.size)))
        except ValueError:
            continue
        if isinstance(document, dict) and document.get("made_by") == "fastload convert":
            names: list[str] | None = document["classes"]
            return names
    return None
