"""The source of `fastload convert`: samples of a dataset, part by part.

A part becomes a new shard. The position says in JSON where the next part begins, so that another run can go
on there.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from xxhash import xxh3_64

from fastload.cli.convert.sample_forms import FORMS, Sample, split_name
from fastload.cli.data_source import FOLDER, INDEXABLE, OBJECTS, dataset_class, find_kind, read_json
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError
from fastload.store import Store
from fastload.store.manifest import Manifest

_AHEAD = 512  # samples that the dataset is told of; it bounds requests and bytes by itself
_OVERHEAD = 2048  # bytes of a sample in a shard beside its own: headers, label, padding
_MIXED = 16  # shards that a shuffle reads at once


def open_source(
    url: str, kind: str, options: dict[str, Any], shard_size: int, seed: int | None
) -> Objects | Records:
    """Open what is at `url`; kind "auto" looks at the names there.

    Raises:
        ArgumentError: `convert` does not read that kind. Otherwise as a dataset.
    """
    kind = find_kind(url, options, kind)
    if kind in (FOLDER, OBJECTS):
        return Objects(kind, dataset_class(kind)(url, storage_options=options), shard_size, seed)
    if kind in INDEXABLE:
        return Records(kind, url, options, shard_size, seed)
    raise ArgumentError(
        f"convert reads folders, objects, {' and '.join(INDEXABLE)}, and {url!r} is {kind}: train on it "
        "as it is, or say what lies there by --from"
    )


@dataclass(frozen=True)
class Packed:
    """Bytes with credentials, which its repr does not show."""

    content: bytes = field(repr=False)


class Objects:
    """A sample per object, hundreds of which are read at a time.

    Args:
        dataset: an `ObjectDataset`.

    Attributes:
        kind: name of the kind of data.
        url, identity: of the store.
        classes: class names, of a folder; or None.
        total_bytes: of all samples, as the store has them.
        fingerprint: another one where any object was added, removed or changed.
        shards: how many parts there will be, where that is known; or None.
        position: where the next part begins (JSON); None at the end.
    """

    def __init__(self, kind: str, dataset: Any, shard_size: int, seed: int | None) -> None:
        self._dataset, self._cut_by = dataset, (kind, shard_size, seed)
        self._listing: Manifest = dataset.listing()
        self.kind, self.url, self.identity = kind, dataset._store.url, self._listing.identity
        self.classes = list(self._listing.classes or []) if kind == FOLDER else None
        self.total_bytes = self._listing.total_bytes
        rng = np.random.default_rng(seed)
        self._order = np.arange(len(dataset)) if seed is None else rng.permutation(len(dataset))
        # Of the order too: another release of numpy may draw another one.
        self.fingerprint = f"{_fingerprint(self._listing)}-{xxh3_64(self._order.tobytes()).hexdigest()}"
        # Cut by the sizes listed, so that the number of shards is known before the first one is written.
        full = np.array(list(accumulate(self._listing.sizes[self._order].tolist(), initial=0)))
        full += _OVERHEAD * np.arange(len(full))
        numbers = full[:-1] // shard_size
        self._ends = [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(dataset)]
        self.shards: int | None = len(self._ends)
        self.position: Any = 0
        self._requested, self._wanted = 0, len(dataset)

    def packed(self) -> tuple[Packed, Manifest]:
        """Return (this source, small, with the credentials; its listing, large, without) for `unpacked`."""
        file = io.BytesIO()
        _Pickler(file, self._listing).dump((self._cut_by, self._dataset))
        return Packed(file.getvalue()), self._listing

    @classmethod
    def unpacked(cls, packed: Packed, listing: Manifest) -> Objects:
        """Return the source in another process, without a request."""
        (kind, shard_size, seed), dataset = _Unpickler(io.BytesIO(packed.content), listing).load()
        return cls(kind, dataset, shard_size, seed)

    def starts(self) -> list[int]:
        """Return the position of each part."""
        return [0, *self._ends[:-1]]

    def seek(self, position: int) -> None:
        """Go to a part, and read nothing ahead that belongs to the parts after it."""
        self.position = position
        self._wanted = next(end for end in self._ends if end > position)

    def part(self) -> Iterator[Sample]:
        """Yield the samples of the next part; `position` moves when it is through."""
        start = int(self.position)
        self._requested = max(self._requested, start)
        stop = next(end for end in self._ends if end > start)
        for place in range(start, stop):
            if self._requested - place < _AHEAD // 2:
                ahead = self._order[self._requested : min(place + _AHEAD, self._wanted)]
                self._dataset.prefetch(ahead.tolist())
                self._requested += len(ahead)
            yield self._sample(int(self._order[place]))
        self.position = stop if stop < len(self._order) else None

    def _sample(self, index: int) -> Sample:
        stem, extension = split_name(self._dataset.key(index))
        members: dict[str, Any] = {extension: memoryview(self._dataset._payload(index))}
        if self.classes is not None:
            members["cls"] = str(self._listing.label(index)).encode()
        return Sample(stem, members, None, self._listing.size(index))

    def close(self) -> None:
        self._dataset.close()


class _Pickler(pickle.Pickler):
    """Leaves out a listing."""

    def __init__(self, file: io.BytesIO, listing: Manifest) -> None:
        super().__init__(file)
        self._listing = listing

    def persistent_id(self, value: Any) -> str | None:
        return "listing" if value is self._listing else None


class _Unpickler(pickle.Unpickler):
    """Puts the listing in its place again."""

    def __init__(self, file: io.BytesIO, listing: Manifest) -> None:
        super().__init__(file)
        self._listing = listing

    def persistent_load(self, name: Any) -> Manifest:
        return self._listing


def _fingerprint(manifest: Manifest) -> str:
    digest = xxh3_64(manifest.sizes.tobytes())
    for index in range(len(manifest)):
        line = f"{manifest.key(index)}\0{manifest.version(index)}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return str(digest.hexdigest())


class Records:
    """The records of shards, one shard after the other. Its attributes are those of `Objects`.

    To shuffle, shards are drawn at random, some of them are read in turn, and their records are permuted in
    blocks as large as a part.
    """

    shards: int | None = None

    def __init__(
        self, kind: str, url: str, options: dict[str, Any], shard_size: int, seed: int | None
    ) -> None:
        self._dataset = dataset_class(kind)(
            url, index=False, cycle_length=_MIXED, shuffle_buffer=f"{shard_size}B", storage_options=options
        )
        listed = self._dataset.shards()
        self.classes = _classes(listed.store)
        self.kind, self.url, self.identity = kind, listed.store.url, listed.store.identity
        self.total_bytes = listed.total_bytes()
        self.fingerprint = listed.digest
        view: Any = view_of(self._dataset)
        self._streams: Any = view.streams()
        (plan,) = self._streams.plan_streams(
            1, seed=seed or 0, epoch=0, shuffle=seed is not None, rank=0, ranks=1
        )
        self.position: Any = plan
        self._plan, self._limit = self.position["plan"], shard_size
        self._stream: Any = None
        self._next: int | None = None  # the first record of the part at `position`

    def part(self) -> Iterator[Sample]:
        if self._stream is None:
            self._open_stream()
        record, size, state = self._next, 0, None
        while record is not None and state is None:
            payload = self._dataset._payload(record)
            size += len(payload)
            yield FORMS[self.kind].read(payload)
            if size >= self._limit:
                state = self._stream.state()
            record = next(iter(self._stream.take(1)), None)
        self._next = record
        self.position = None if record is None else state

    def close(self) -> None:
        self._dataset.close()

    def _open_stream(self) -> None:
        """Read the records from `position` on."""
        if self.position.get("plan") != self._plan:
            raise ArgumentError(
                "another version of fastload began these shards, and its position cannot be read: "
                "finish them with that version, or give another --name"
            )
        self._stream = self._streams.open_stream(self.position)
        self._next = next(iter(self._stream.take(1)), None)


def _classes(store: Store) -> list[str] | None:
    """Return the class names, where this command made the shards."""
    infos = (info for page in store.list() for info in page)
    for info in infos:
        document = read_json(store, info) if info.key.endswith(".json") and "/" not in info.key else None
        if isinstance(document, dict) and document.get("made_by") == "fastload convert":
            names: list[str] | None = document.get("classes")
            return names
    return None
