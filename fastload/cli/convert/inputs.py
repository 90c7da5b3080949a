"""What `fastload convert` reads: objects in a known order, or shards from one end to the other.

Both hand out samples part by part, a part being a new shard, and say in JSON where the next part begins:
there another run goes on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from xxhash import xxh3_64

import fastload
from fastload.cli.convert.pieces import PieceReader
from fastload.cli.convert.record_files import Sample, split_name
from fastload.errors import ArgumentError, NotFoundError
from fastload.formats.tar import read_sample
from fastload.store import ObjectInfo, Store, open_store
from fastload.store.listing import IMAGE_EXTENSIONS
from fastload.store.manifest import Manifest

__all__ = ["Source", "open_source"]

_TAR = (".tar", ".tar.gz", ".tgz")
_TFRECORD = (".tfrecord", ".tfrecords", ".tfrec", ".tfrecord.gz", ".tfrecords.gz", ".tfrec.gz")
_BESIDE = (".idx", ".json", ".txt")
_AHEAD = 512  # samples that the window knows of; it bounds requests and bytes by itself
_MOST_JSON = 64 << 20
_LANES = 16  # shards that are mixed by a shuffle
_OVERHEAD = 2048  # bytes of a sample in a shard beside its own: headers, label, padding


class Source(Protocol):
    """Where samples come from.

    Attributes:
        kind: "folder", "objects", "tar" or "tfrecord".
        url, identity: of the store.
        classes: class names, of a folder; or None.
        total_bytes: of all samples, as the store has them.
        fingerprint: another one where any object was added, taken away or changed.
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

    def close(self) -> None: ...


def open_source(url: str, kind: str, options: dict[str, Any], shard_size: int, seed: int | None) -> Source:
    """The source at `url`; kind "auto" looks at the first keys.

    Raises:
        ArgumentError, NotFoundError, StoreError: as a dataset's.
    """
    store = open_store(url, **options)
    if kind == "auto":
        kind = _guess(store)
    if kind == "folder":
        return _Objects(kind, fastload.ImageFolder(url, storage_options=options), shard_size, seed)
    if kind == "objects":
        return _Objects(kind, fastload.ObjectDataset(url, storage_options=options), shard_size, seed)
    return _Shards(kind, store, shard_size, seed)


def _guess(store: Store) -> str:
    page = next(store.list(), [])
    keys = [info.key.lower() for info in page]
    if not keys:
        raise NotFoundError(f"{store.url!r}: no objects there", stage="list")
    if any(key.endswith(_TAR) for key in keys):
        return "tar"
    if any(key.endswith(_TFRECORD) for key in keys):
        return "tfrecord"
    images = [key for key in keys if key.endswith(IMAGE_EXTENSIONS)]
    return "folder" if images and all("/" in key for key in images) else "objects"


def _fingerprint(manifest: Manifest) -> str:
    digest = xxh3_64(manifest.sizes.tobytes())
    for index in range(len(manifest)):
        line = f"{manifest.key(index)}\0{manifest.version(index)}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return str(digest.hexdigest())


def _classes(store: Store, documents: list[ObjectInfo]) -> list[str] | None:
    """The class names, where this command made the shards."""
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


class _Objects:
    """See `Source`: a sample per object, read through the dataset's window, hundreds at a time."""

    def __init__(self, kind: str, dataset: Any, shard_size: int, seed: int | None) -> None:
        manifest = dataset.listing()
        self.kind, self.url, self.identity = kind, dataset.url, manifest.identity
        self.classes = dataset.classes if kind == "folder" else None
        self.total_bytes = manifest.total_bytes
        self._dataset, self._sizes = dataset, manifest.sizes
        rng = np.random.default_rng(seed)
        self._order = np.arange(len(dataset)) if seed is None else rng.permutation(len(dataset))
        # Of the order too: another release of numpy may draw another one.
        self.fingerprint = f"{_fingerprint(manifest)}-{xxh3_64(self._order.tobytes()).hexdigest()}"
        # Cut by the sizes listed, so that the number of shards is known before the first one is written.
        full = np.array(list(accumulate(self._sizes[self._order].tolist(), initial=0)))
        full += _OVERHEAD * np.arange(len(full))
        numbers = full[:-1] // shard_size
        self._ends = [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(dataset)]
        self.shards: int | None = len(self._ends)
        self.position: Any = 0
        self._requested = 0

    def part(self) -> Iterator[Sample]:
        start = int(self.position)
        self._requested = max(self._requested, start)
        stop = next(end for end in self._ends if end > start)
        for at in range(start, stop):
            if self._requested - at < _AHEAD // 2:
                ahead = self._order[self._requested : at + _AHEAD]
                self._dataset.prefetch(ahead.tolist())
                self._requested += len(ahead)
            yield self._sample(int(self._order[at]))
        self.position = stop if stop < len(self._order) else None

    def _sample(self, index: int) -> Sample:
        content = self._dataset.payload(index)
        label = self._dataset.targets[index] if self.kind == "folder" else None
        name = self._dataset.key(index)
        stem, extension = split_name(name)
        size = int(self._sizes[index])
        members: dict[str, Any] = {extension: memoryview(content)}
        if label is not None:
            members["cls"] = str(label).encode()
        return Sample(stem, members, None, size)

    def close(self) -> None:
        self._dataset.close()


class _Shards:
    """See `Source`: the records of shards in their order; or, to shuffle, of some shards in turn, these drawn
    at random, and each part once more in itself.
    """

    shards: int | None = None

    def __init__(self, kind: str, store: Store, shard_size: int, seed: int | None) -> None:
        manifest = Manifest.build(store)
        endings = _TAR if kind == "tar" else _TFRECORD
        found = range(len(manifest))
        named = [index for index in found if manifest.key(index).lower().endswith(endings)]
        # Shards may be called anything (train-00000-of-01024); what else is there is known by its ending.
        chosen = named or [i for i in found if not manifest.key(i).lower().endswith(_BESIDE)]
        if not chosen:
            raise NotFoundError(f"{store.url!r}: no {kind} shards there", stage="list")
        infos = [ObjectInfo(manifest.key(i), int(manifest.sizes[i]), manifest.version(i)) for i in found]
        self._infos = [infos[index] for index in chosen]
        self.classes = _classes(store, [info for info in infos if info.key.endswith(".json")])
        self.kind, self.url, self.identity = kind, store.url, store.identity
        self.total_bytes = sum(info.size for info in self._infos)
        self.fingerprint = _fingerprint(manifest)
        self._limit, self._seed = shard_size, seed
        self._order = list(range(len(chosen)))
        if seed is not None:
            random.Random(seed).shuffle(self._order)
        self._lanes: list[_Lane] = []
        self._reader = PieceReader(store, ahead=8 if seed is None else 1)
        self.position: Any = {"next": 0, "lanes": []}

    def part(self) -> Iterator[Sample]:
        self._open_lanes()
        samples = self._until_full()
        if self._seed is not None:
            gathered = list(samples)
            random.Random(f"{self._seed} {self.position}").shuffle(gathered)
            samples = iter(gathered)
        yield from samples
        lanes = [[lane.shard, lane.taken] for lane in self._lanes]
        self.position = {"next": self._next, "lanes": lanes}
        if not lanes and self._next == len(self._order):
            self.position = None

    def _until_full(self) -> Iterator[Sample]:
        """One sample of each lane in turn, until they fill a shard."""
        most = 1 if self._seed is None else _LANES
        size = 0
        while size < self._limit:
            while len(self._lanes) < most and self._next < len(self._order):
                self._lanes.append(_Lane(self, self._order[self._next], 0))
                self._next += 1
            if not self._lanes:
                return
            lane = self._lanes.pop(0)
            sample = lane.next()
            if sample is not None:
                size += sample.size
                self._lanes.append(lane)
                yield sample

    def _open_lanes(self) -> None:
        """As the position says, unless they stand there already."""
        self._next = int(self.position["next"])
        if [[lane.shard, lane.taken] for lane in self._lanes] != self.position["lanes"]:
            self._lanes = [_Lane(self, shard, taken) for shard, taken in self.position["lanes"]]

    def samples_of(self, shard: int) -> Iterator[Sample]:
        for record in self._reader.records(self._infos[shard], self.kind):
            assert record.payload is not None
            if self.kind == "tfrecord":
                yield Sample("", {}, record.payload, record.size)
            else:
                yield Sample(*read_sample(record.payload), None, record.size)

    def close(self) -> None:
        self._reader.close()


class _Lane:
    """A shard that is being read, and how many of its samples were taken."""

    def __init__(self, source: _Shards, shard: int, taken: int) -> None:
        self.shard, self.taken = shard, 0
        self._samples = source.samples_of(shard)
        while self.taken < taken:
            if self.next() is None:
                raise ArgumentError(f"shard {shard} of the source ends before sample {taken}: it changed")

    def next(self) -> Sample | None:
        sample = next(self._samples, None)
        self.taken += sample is not None
        return sample
