"""Tar shards in WebDataset's layout, read in pieces: consecutive members with the same key are one sample.

    key        the member's path up to the first dot of its last component
    extension  the rest, in lower case: "images/0001.seg.png" is "seg.png" of sample "images/0001"

ustar, pax and GNU headers (POSIX.1-2024 pax; GNU tar manual, "Basic Tar Format"). Members that WebDataset
skips are skipped: directories, names that begin with a dot or have none, `__name__`; and `__MACOSX`. Files in
a folder `__name__`, which it skips too, are read: indexes and caches have them. A link, a device or a sparse
file makes its sample an error, because its bytes are missing. No name becomes a path.

A header with a wrong checksum ends the shard: tar has no mark to search for. So does one whose size leads
out of the shard. A shard without the two empty blocks at its end is accepted if it ends with a member, as in
WebDataset: stopped writers and `cat` make such files.

Index files beside tars:

    wds2idx    "v1.1 n" or "v1.2 n", then per sample: "extension offset size [name]" for each member, with the
               offset of its content                                          (NVIDIA DALI)
    wids       JSON: {"shardlist": [{"url": ..., "nsamples": ...}, ...]}      (WebDataset)

`TarWriter` writes the first beside its tar. The same samples give the same bytes, in any process.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fastload.errors import ArgumentError, DecodeError
from fastload.formats.pieces import Offsets, Record, Sink, Splitter, check_offsets, hint, is_tar, too_large

BLOCK = 512
_ZEROS = bytes(BLOCK)
# Of the extended headers before one member. All are parsed again as more of them arrives: a chain of
# them without a limit would take quadratic time. tar writes at most four.
_MOST_META, _MOST_HEADERS = 1 << 20, 16  # bytes, headers
_MOST_SKIPPED = 1 << 20  # bytes in front of a sample that are read as part of it
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_PAX = re.compile(rb"([0-9]{1,7}) ([^=]+)=", re.DOTALL)
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")
_FILES = b"0\0" + b"7"
_KINDS = {0x31: "a hard link", 0x32: "a symbolic link", 0x33: "a device", 0x34: "a device", 0x36: "a FIFO"}


class _Member(NamedTuple):
    """A member. `start`, `stop` and `end` (after its padding) count from the start of the view."""

    name: str
    start: int
    stop: int
    end: int
    refused: str  # why it cannot be read; "" for files
    skipped: bool


class TarSplitter(Splitter):
    """See `Splitter`. A record is the slice of the shard with one sample's members and their headers."""

    def __init__(self, offset: int, end: int | None) -> None:
        super().__init__(offset, end)
        self._keys: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        """Begin a new sample with the next byte."""
        self._at = self._stop = 0  # of the next header, and behind the last member, from the sample's begin
        self._key = ""
        self._extensions: set[str] = set()
        self._error = ""

    def next(self) -> Record | None:
        pieces = self._pieces
        while not self.over:
            # Members that belong to no sample begin the next one, as index files have it. Not large ones.
            if not self._key and _MOST_SKIPPED < self._at <= pieces.available:
                pieces.skip(self._at)
                self._at = 0
            try:
                found = self._member()
            except DecodeError as error:
                return self._last(error)
            if found is None and not pieces.closed:
                return None
            if found is None and not pieces.offset and not pieces.available:
                return self._last(DecodeError("the shard is empty: a tar has its end mark at least"))
            if found is None or found.end == self._at:  # the end of the shard
                self.over = True
                return self._record() if self._key else None
            key, extension = sample_name(found.name)
            if found.skipped or not key:
                self._at = found.end  # its bytes may not all have arrived
                continue
            if self._key and key != self._key:
                return self._record()
            if pieces.available < found.end and not pieces.closed:
                return None
            if pieces.available < found.end:
                return self._last(DecodeError(f"the shard was cut within member {found.name!r}"))
            self._add(key, extension, found)
        return None

    def _member(self) -> _Member | None:
        """Return the member at `_at`; None where its header has not arrived, or the shard is over."""
        pieces = self._pieces
        wanted = self._at + BLOCK
        while True:
            if pieces.available < wanted:
                if pieces.closed and pieces.available > self._at:
                    raise DecodeError("the shard was cut within a header")
                if pieces.closed and pieces.available < self._at:
                    raise DecodeError("the shard was cut within a member")
                return None
            view = pieces.peek(wanted)
            assert view is not None
            member = _parse(view, self._at)
            if isinstance(member, _Member):
                self._check_end(member.end)
                return member
            self._check_end(member)
            wanted = member  # bytes needed to see all of its headers

    def _check_end(self, end: int) -> None:
        if self._end is None:
            if end > self.max_inflated:
                raise DecodeError(too_large("a sample", end, self.max_inflated))
        elif self._pieces.offset + end > self._end:
            raise DecodeError(
                f"a member reaches to byte {self._pieces.offset + end:,} of a shard that ends at "
                f"{self._end:,}: the shard was cut"
            )

    def _add(self, key: str, extension: str, member: _Member) -> None:
        if not self._key and key in self._keys:
            self._error = f"sample {key!r} occurs twice in the shard, in two places: sort the tar by name"
        self._key = key
        self._keys.add(key)
        if extension in self._extensions:
            self._error = f"sample {key!r} has two members {extension!r}"
        if member.refused:
            self._error = f"member {member.name!r} is {member.refused}"
        self._extensions.add(extension)
        self._at = self._stop = member.end

    def _record(self) -> Record:
        """Return the sample up to the end of its last member."""
        pieces, size = self._pieces, self._stop
        offset, view, error = pieces.offset, pieces.peek(size), self._error
        pieces.skip(size)
        self._begin()
        if error:
            return Record(offset, size, None, DecodeError(error), lasting=True)
        return Record(offset, size, view)


def sample_name(name: str) -> tuple[str, str]:
    """Return (key, extension) of a member; empty for one that belongs to no sample."""
    match = _NAME.fullmatch(name)
    if match is None or name.startswith("__MACOSX/") or "/__MACOSX/" in name:
        return "", ""
    return match[1], match[2].lower()


def is_over(tail: memoryview, left: int) -> bool:
    """Return whether a shard has no further sample.

    Args:
        tail: the bytes behind a sample, all of them or the first ones.
        left: how many there are.

    Raises:
        DecodeError: they are no tar.
    """
    at = 0
    while at + BLOCK <= len(tail):
        member = _parse(tail, at)
        if not isinstance(member, _Member):  # its headers are longer than what is here
            return False
        if member.end == at:
            return True
        if not member.skipped and sample_name(member.name)[0]:
            return False
        at = member.end
    return at >= left


class Member(NamedTuple):
    """A member of a sample: its whole name, its extension, and where its content lies in the record."""

    name: str
    extension: str
    start: int
    stop: int


def read_sample(record: memoryview) -> tuple[str, dict[str, memoryview]]:
    """Return (key, extension -> content) of a record: the slice of a shard with one sample.

    Raises:
        DecodeError: the slice does not hold exactly one sample.
    """
    key, members = read_members(record)
    return key, {member.extension: record[member.start : member.stop] for member in members}


def read_members(record: memoryview) -> tuple[str, list[Member]]:
    """Return (key, members) of a record, as `read_sample`."""
    at, sample, members = 0, "", dict[str, Member]()
    while at < len(record):
        member = _parse(record, at) if len(record) - at >= BLOCK else BLOCK + at
        if not isinstance(member, _Member) or member.end > len(record):
            raise DecodeError("this sample's record ends within a member: the index belongs to another shard")
        if member.end == at:
            break
        at = member.end
        key, extension = sample_name(member.name)
        if member.skipped or not key:
            continue
        if member.refused:
            raise DecodeError(f"member {member.name!r} is {member.refused}")
        if extension in members or (sample and key != sample):
            raise DecodeError(f"member {member.name!r} does not belong to sample {sample!r} before it")
        sample = key
        members[extension] = Member(member.name, extension, member.start, member.stop)
    if not sample:
        raise DecodeError("this record has no member of a sample: the index belongs to another shard")
    return sample, list(members.values())


def _parse(view: memoryview, at: int) -> _Member | int:
    """Return the member whose headers begin at `at`, or the bytes of `view` needed to see all of them.

    An empty block is a member that ends where it begins.
    """
    begin, long_name, pax_size, sparse, headers = at, None, None, False, 0
    while True:
        if at + BLOCK > len(view):
            return at + BLOCK
        block = bytes(view[at : at + BLOCK])
        if block == _ZEROS:
            if at != begin:
                raise DecodeError("no member follows an extended header")
            return _Member("", at, at, at, "", True)
        if not is_tar(block):
            raise DecodeError(
                f"bad checksum of a tar header, so the start of the next one is unknown{hint(block)}"
            )
        size, kind, at = _number(block[124:136]), block[156], at + BLOCK
        if kind not in b"xgLKX":
            break
        headers += 1
        end = at + _padded(size)
        if headers > _MOST_HEADERS or end - begin > _MOST_META + _MOST_HEADERS * BLOCK:
            raise DecodeError(
                f"{headers} extended headers of {end - begin:,} bytes before one member are more than the "
                f"limits, {_MOST_HEADERS} and {_MOST_META:,} bytes"
            )
        if end > len(view):
            return end + BLOCK
        if kind in b"xX":
            path, pax_size, sparse = _pax(view[at : at + size])
            long_name = path if path is not None else long_name
        elif kind == 0x4C:
            long_name = bytes(view[at : at + size]).rstrip(b"\0")
        at = end
    name = long_name if long_name is not None else _name(block)
    return _finish(name, kind, size if pax_size is None else pax_size, at, sparse)


def _finish(raw_name: bytes, kind: int, size: int, at: int, sparse: bool) -> _Member:
    # Not surrogateescape: such text cannot be printed. The name only has to tell samples apart.
    name = raw_name.decode("utf-8", "backslashreplace")
    if kind == 0x53:  # GNU's old form, whose content is not plain
        raise DecodeError(f"member {name!r} is a sparse file, which is not read; write it without --sparse")
    if sparse:
        return _Member(name, at, at + size, at + _padded(size), "a sparse file, which is not read", False)
    if kind == 0x35 or (kind == 0 and raw_name.endswith(b"/")):
        return _Member(name, at, at, at, "", True)
    if kind in _KINDS:
        why = f"{_KINDS[kind]}, which is not followed: write the tar with files (tar --dereference)"
        return _Member(name, at, at, at, why, False)
    if kind not in _FILES and kind != 0x56:
        return _Member(name, at, at + size, at + _padded(size), f"of unknown type {chr(kind)!r}", False)
    return _Member(name, at, at + size, at + _padded(size), "", kind == 0x56)


def _number(field: bytes) -> int:
    """Return a number in octal, or in base 256 (GNU) where its first bit is set."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    match = _OCTAL.fullmatch(field)
    if match is None:
        raise DecodeError(f"{field!r} in a tar header is not a number")
    return int(match[1] or b"0", 8)


def _name(block: bytes) -> bytes:
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0":
        prefix = block[345:500].partition(b"\0")[0]
        return prefix + b"/" + name if prefix else name
    return name


def _pax(data: memoryview) -> tuple[bytes | None, int | None, bool]:
    """Return (path, size, whether sparse) of a pax header: records "length key=value\\n"."""
    path, size, sparse = None, None, False
    text, at = bytes(data), 0
    while at < len(text):
        match = _PAX.match(text, at)
        end = at + int(match[1]) if match is not None else 0
        if match is None or not match.end() < end + 1 <= len(text) + 1 or text[end - 1] != 0x0A:
            raise DecodeError("a pax header does not consist of records")
        key, value = match[2], text[match.end() : end - 1]
        if key == b"path":
            path = value
        elif key == b"size":
            if not value.isdigit():
                raise DecodeError(f"{value!r} in a pax header is not a size")
            size = int(value[:20])
        elif key.startswith(b"GNU.sparse."):
            sparse = True
        at = end
    return path, size, sparse


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


class TarWriter:
    """Writes the samples of one WebDataset tar to `sink`: its members lie together, as `key.extension`.

    Headers are plain ustar (pax where a name or size asks for it), with time 0, owner 0 and mode 0644.

    Attributes:
        size: bytes written so far.
        samples: samples written so far.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._index: list[tuple[int, list[Member]]] = []  # see `wds_index`
        self._keys: set[str] = set()
        self.size = self.samples = 0

    def write(self, key: str, members: Mapping[str, Any]) -> None:
        """Append a sample.

        Args:
            key: its name. It has no "." after its last "/", and no white space, which would break the index.
            members: extension -> bytes, or another buffer of bytes. Extensions are lower-case.

        Raises:
            ArgumentError: readers would see another sample or none; or the key was written before.
        """
        if not members or key in self._keys:
            why = "was written already" if members else "has no members"
            raise ArgumentError(f"sample {key!r} {why}", key=key)
        written = []
        for extension, content in members.items():
            name = f"{key}.{extension}"
            plain = name.isprintable() and "\\" not in name and len(name.split()) == 1
            if sample_name(name) != (key, extension) or not plain:
                raise ArgumentError(
                    f"member {name!r} would not be read as key {key!r} and extension {extension!r}: a key "
                    "has no '.' after its last '/', an extension is lower-case, and neither has white space, "
                    "control characters or backslashes",
                    key=key,
                )
            self._write_header(name, len(content))
            written.append(Member(name, extension, self.size, self.size + len(content)))
            self._put(content)
            self._put(bytes(-len(content) % BLOCK))
        self._keys.add(key)
        self._index.append((0, written))
        self.samples += 1

    def close(self) -> None:
        """Write the end marker, padded to a whole tar record."""
        self._put(bytes(2 * BLOCK + -(self.size + 2 * BLOCK) % tarfile.RECORDSIZE))

    def index(self) -> bytes:
        """Return wds2idx's index of the samples, version 1.2."""
        return wds_index(self._index)

    def _write_header(self, name: str, size: int) -> None:
        header = tarfile.TarInfo(name)
        header.size = size
        self._put(header.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict"))

    def _put(self, data: Any) -> None:
        self._sink.write(data)
        self.size += len(data)


def wds_index(samples: list[tuple[int, list[Member]]]) -> bytes:
    """Return lines of wds2idx, in version 1.2; in 1.1, which has no names, where a name has white space.

    Args:
        samples: (offset of the record, its members), in order.

    Raises:
        DecodeError: an extension has white space, for which the format has no form.
    """
    named = all(len(member.name.split()) == 1 for _, members in samples for member in members)
    lines = [f"v1.{2 if named else 1} {len(samples)}"]
    for offset, members in samples:
        words = []
        for name, extension, start, stop in members:
            if len(extension.split()) != 1:
                raise DecodeError(
                    f"member {name!r} has an extension with white space, which wds2idx's format cannot hold"
                )
            words += [extension, str(offset + start), str(stop - start), *([name] if named else [])]
        lines.append(" ".join(words))
    return ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace")


def parse_wds_index(text: bytes, shard_size: int) -> Offsets:
    """Return the offsets of the samples of a shard of that size, with the headers of their members.

    A sample begins at the end of the one before.

    Raises:
        DecodeError: not such an index, or one of another shard.
    """
    first, _, rest = text.partition(b"\n")
    version, _, told = first.partition(b" ")
    fields = {b"v1.1": 3, b"v1.2": 4}.get(version)
    if fields is None or not told.strip().isdigit():
        raise DecodeError(f"not an index of wds2idx 1.1 or 1.2: its first line is {first[:80]!r}")
    stops = []
    try:
        count = int(told)
        for line in rest.splitlines():
            words = line.split()
            if not words or len(words) % fields:
                raise ValueError(f"a line of {len(words)} words")
            stops.append(max(int(words[i + 1]) + int(words[i + 2]) for i in range(0, len(words), fields)))
    except ValueError as error:
        raise DecodeError(f"not an index of wds2idx: {error}") from None
    if len(stops) != count:
        raise DecodeError(f"the index has {len(stops)} lines, but its first line says {count}")
    try:
        ends = -(-np.array(stops, np.uint64).astype(np.int64) // BLOCK) * BLOCK
    except OverflowError:
        raise DecodeError("an offset in the index is beyond 64 bits") from None
    starts = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])
    return check_offsets(np.stack([starts, ends - starts], axis=1).astype(np.uint64), shard_size, whole=False)


def parse_wids(text: bytes) -> list[tuple[str, int | None]]:
    """Return (URL, number of samples) of each shard.

    Raises:
        DecodeError: not such a file.
    """
    try:
        shards: Any = json.loads(text)
        shards = shards["shardlist"] if isinstance(shards, dict) else shards
        found = [(shard["url"], shard.get("nsamples")) for shard in shards]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DecodeError(f"not an index of wids: {type(error).__name__} {error}") from None
    for url, count in found:
        if not isinstance(url, str) or not isinstance(count, int | None):
            raise DecodeError(f"not an index of wids: url {url!r}, nsamples {count!r}")
    if not found:
        raise DecodeError("the index of wids names no shards")
    return found
