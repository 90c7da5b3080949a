"""The shards of `fastload convert` in a store: the files NAME-*, an index beside each, and NAME.json.

NAME.json is written first, and again as shards are done. It always lists the shards that are whole:

{"made_by": "fastload convert", "format": 1, "complete", "settings": {...}, "classes": [...] or null,
 "samples", "bytes", "shards": [{"name", "bytes", "samples", "xxh3" (of the bytes), "content" (of the samples,
 as they were before they were written), "places" (xxh3 of the index), "next" (where the source goes on),
 "renamed" (how many samples have another key than in the source), "renames" (the first of them)},
  ...]}

A shard is made in a temporary file. Readers see it whole or not at all.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64

from fastload.cli.convert.sample_forms import Digest, Form, Sample
from fastload.cli.data_source import read_json
from fastload.errors import ArgumentError, DecodeError, NotFoundError
from fastload.fetch.reads import record_name
from fastload.fetch.threads import ReadPool
from fastload.metrics.counters import Counters
from fastload.shards.catalog import index_name
from fastload.shards.reader import PIECES, ReadAhead, Shard, ShardReader
from fastload.store import ObjectInfo, Store
from fastload.store.failures import Wait, sleep

FORMAT = 1
_READ_AHEAD = 64 << 20  # bytes
_READS = 8  # at once
_SHOWN = 3  # renames of a shard
_REST = 4  # times the duration of a write of NAME.json, before it is written again


class WrittenShard(NamedTuple):
    """A shard that is whole: its entry in NAME.json."""

    name: str
    bytes: int
    samples: int
    xxh3: str
    content: str
    places: str
    next: Any
    renamed: int
    renames: dict[str, str]


class UnsentShard(NamedTuple):
    """A shard in a temporary file, not sent yet, and the bytes of its index."""

    shard: WrittenShard
    file: Any
    places: bytes


class ShardSet:
    """The shards NAME-* below a URL.

    Args:
        store: where the shards are.
        name: NAME.
        form: of the shards.
        count: their number; None: not known before.
        settings: of the conversion. Other settings make another set.
        classes: class names, for NAME.json.

    Attributes:
        shards: those that are whole.
        complete: whether all are there and were verified.

    Raises:
        ArgumentError: other files have these names, or the settings differ.
        StoreError: the store cannot be read or written.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        form: Form,
        count: int | None,
        settings: dict[str, Any],
        classes: list[str] | None,
    ) -> None:
        self.store, self.name, self.form, self._count = store, name, form, count
        self._settings, self._classes = settings, classes
        self.shards: list[WrittenShard] = []
        self.complete = False
        self._saved = self._took = 0.0
        present = self.present()
        if f"{name}.json" in present:
            self._resume(present)
        elif present:
            raise ArgumentError(
                f"{store.url!r} already contains {min(present)!r}, and no '{name}.json' of fastload that "
                "names it: it is not overwritten; give another --name or destination"
            )
        self.save()

    def present(self) -> dict[str, ObjectInfo]:
        """Return the objects in the store with names of this set."""
        try:
            listed = [info for page in self.store.list() for info in page]
        except NotFoundError:  # the directory is made later; without a bucket the first write fails
            return {}
        return {info.key: info for info in listed if self._is_ours(info.key)}

    def _is_ours(self, key: str) -> bool:
        numbered = rf"{re.escape(self.name)}-\d+(-of-\d+)?\.(tar|tfrecord|idx)"
        return key == f"{self.name}.json" or re.fullmatch(numbered, key) is not None

    def _resume(self, present: dict[str, ObjectInfo]) -> None:
        """Take over the shards of an earlier run, up to the first one that is gone or has another size."""
        file = f"{self.name}.json"
        document = read_json(self.store, present[file])
        if not isinstance(document, dict) or document.get("made_by") != "fastload convert":
            raise ArgumentError(
                f"{self.store.url!r} contains a {file!r} that fastload did not write; give another --name"
            )
        try:
            if document["format"] != FORMAT:
                raise ValueError
            was, complete = dict(document["settings"]), bool(document["complete"])
            shards = [WrittenShard(**shard) for shard in document["shards"]]
        except (KeyError, TypeError, ValueError):
            raise ArgumentError(
                f"{self.store.url!r} contains a {file!r} that is damaged, or of another version of fastload; "
                "give another --name or destination"
            ) from None
        now = json.loads(json.dumps(self._settings))
        other = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
        if other:
            raise ArgumentError(
                f"{self.store.url!r} has shards {self.name!r} that were made with other settings "
                f"({', '.join(other)}): they are not overwritten; give another --name or destination"
            )
        for shard in shards:
            info = present.get(shard.name)
            if info is None or info.size != shard.bytes or index_name(shard.name) not in present:
                return
            self.shards.append(shard)
        self.complete = complete

    def file_name(self, number: int) -> str:
        return self.form.file_name(self.name, number, self._count)

    def make(
        self,
        number: int,
        samples: Iterator[Sample],
        position: Callable[[], Any],
        progress: Callable[[Sample], None],
    ) -> UnsentShard:
        """Make shard `number`, of `samples`, in a file. `position()` is called after the last sample."""
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed after it was sent
        whole, content, keys = xxh3_64(), Digest(), dict[str, str]()
        writer = self.form.writer(_Spool(file, whole))
        try:
            for sample in samples:
                self.form.write(writer, sample, f"{number:06d}-{writer.samples:06d}", keys, content)
                progress(sample)
            writer.close()
            file.flush()
        except BaseException:
            file.close()
            raise
        places = writer.index()
        sums = (whole.hexdigest(), content.text(), xxh3_64(places).hexdigest())
        renames = [(given, key) for key, given in keys.items() if key != given]
        shard = WrittenShard(
            self.file_name(number),
            writer.size,
            writer.samples,
            *sums,
            position(),
            len(renames),
            dict(renames[:_SHOWN]),
        )
        return UnsentShard(shard, file, places)

    def send(self, made: UnsentShard) -> None:
        """Write a shard to the store. Its index comes first: no shard is ever seen without one."""
        with made.file:
            self.store.write(index_name(made.shard.name), made.places)
            self.store.write(made.shard.name, Path(f"/proc/self/fd/{made.file.fileno()}"))

    def unfilled(self) -> ShardSet:
        """Return a small copy for another process, without what only NAME.json needs."""
        other = copy.copy(self)
        other.shards, other._classes = [], None
        return other

    def add(self, shard: WrittenShard) -> None:
        """Add a shard that was sent."""
        self.shards.append(shard)
        if time.monotonic() - self._saved > _REST * self._took:
            self.save()

    def keep(self, count: int, *, complete: bool) -> None:
        """Keep the first `count` shards only."""
        self.shards, self.complete = self.shards[:count], complete
        self.save()

    def save(self, *, wait: Wait = sleep) -> None:
        """Write NAME.json. `wait` as in `Store.read`."""
        start = time.monotonic()
        document = {
            "made_by": "fastload convert",
            "format": FORMAT,
            "complete": self.complete,
            "settings": self._settings,
            "classes": self._classes,
            "samples": sum(shard.samples for shard in self.shards),
            "bytes": sum(shard.bytes for shard in self.shards),
            "shards": [shard._asdict() for shard in self.shards],
        }
        content = (json.dumps(document, indent=1) + "\n").encode()
        self.store.write(f"{self.name}.json", content, wait=wait)
        self._saved = time.monotonic()
        self._took = self._saved - start


class _Spool(NamedTuple):
    """Writes to a file and updates a checksum of its bytes."""

    file: Any
    hash: Any

    def write(self, data: Any) -> None:
        self.file.write(data)
        self.hash.update(data)


def find_fault(shards: ShardSet, info: ObjectInfo | None, shard: WrittenShard) -> str:
    """Return in what a shard differs from what was written; "": in nothing.

    The bytes are compared by their checksum, the samples by theirs (of before they were written), the index
    with the offsets at which the samples were found.
    """
    if info is None or info.size != shard.bytes:
        return f"has {0 if info is None else info.size:,} bytes instead of {shard.bytes:,}"
    whole, content, offsets = xxh3_64(), Digest(), list[list[int]]()
    form, hashed = shards.form, 0
    assert form.format.index_files is not None

    def hash_piece(piece: Any) -> None:
        nonlocal hashed
        whole.update(piece)
        hashed += len(piece)

    pool = ReadPool(_READS, Counters())
    reader = ShardReader(
        shards.store,
        Shard(info.key, info.size, info.version, compressed=False),
        form.format.splitter,
        ahead=ReadAhead.of(_READ_AHEAD, 1),
        pool=pool,
        on_piece=hash_piece,
    )
    try:
        while (record := reader.next()) is not None:
            if record.error is not None:
                record.error.key = record_name(info.key, record.offset)
                raise record.error
            form.add_read(content, record.payload)
            offsets.append([record.offset, record.size])
        index = bytes(shards.store.read(index_name(shard.name)))
        indexed = form.format.index_files.parse(index, shard.bytes).tolist()
    except (DecodeError, NotFoundError) as error:
        return str(error)
    finally:
        reader.close()
        pool.close()
    if len(offsets) != shard.samples:
        return f"has {len(offsets):,} samples instead of {shard.samples:,}"
    while hashed < info.size:  # behind a tar's end mark, where a reader stops
        stop = min(hashed + PIECES.usual, info.size)
        hash_piece(shards.store.read_range(info.key, hashed, stop, info.version))
    if (whole.hexdigest(), content.text()) != (shard.xxh3, shard.content):
        return "contains other bytes than were written"
    if indexed != offsets or xxh3_64(index).hexdigest() != shard.places:
        return "has another index than the one written"
    return ""
