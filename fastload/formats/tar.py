"""Tar shards in WebDataset's layout, read in pieces: consecutive members with the same key are one sample.

    key        the member's path up to the first dot of its last component
    extension  the rest, in lower case: "images/0001.seg.png" is "seg.png" of sample "images/0001"

ustar, pax and GNU headers (POSIX.1-2024 pax; GNU tar manual, "Basic Tar Format"). Members that WebDataset
skips are skipped: directories, names that begin with a dot or have none, `__name__`; and `__MACOSX`. A link,
a device or a sparse file makes its sample an error, because its bytes are missing. No name becomes a path.

A header with a wrong checksum ends the shard: tar has no mark to search for. So does one whose size leads
out of the shard. A shard without the two empty blocks at its end is accepted if it ends with a member, as in
WebDataset: stopped writers and `cat` make such files.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from fastload.errors import DecodeError
from fastload.formats.compression import hint
from fastload.formats.pieces import Record, Splitter, too_large

__all__ = ["BLOCK", "Member", "TarSplitter", "read_members", "read_sample", "sample_name"]

BLOCK = 512
_ZEROS = bytes(BLOCK)
# Of the extended headers before one member. All are parsed again as more of them arrives: a chain of
# them without a limit would take quadratic time. tar writes at most four.
_MOST_META, _MOST_HEADERS = 1 << 20, 16  # bytes, headers
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
        """A new sample begins with the next byte."""
        self._at = 0  # of the next header, from the sample's begin
        self._key = ""
        self._extensions: set[str] = set()
        self._error = ""

    def next(self) -> Record | None:
        pieces = self._pieces
        while not self.over:
            try:
                found = self._member()
            except DecodeError as error:
                return self._last(error)
            if found is None and not pieces.closed:
                return None
            if found is None or found.end == self._at:  # the end of the shard
                self.over = True
                return self._record() if self._key else None
            key, extension = sample_name(found.name)
            if found.skipped or not key:
                self._advance(found)
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
        """The member at `_at`; None where its header has not arrived, or the shard is over."""
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

    def _advance(self, member: _Member) -> None:
        """Skip a member that belongs to no sample."""
        if self._key:
            self._at = member.end
        elif self._pieces.available >= member.end:
            self._pieces.skip(member.end)
        else:
            self._at = member.end  # its bytes have not all arrived

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
        self._at = member.end

    def _record(self) -> Record:
        """The sample up to `_at`."""
        pieces, size = self._pieces, self._at
        offset, view, error = pieces.offset, pieces.peek(size), self._error
        pieces.skip(size)
        self._begin()
        if error:
            return Record(offset, size, None, DecodeError(error), lasting=True)
        return Record(offset, size, view)


def sample_name(name: str) -> tuple[str, str]:
    """(key, extension) of a member; empty for one that belongs to no sample."""
    match = _NAME.fullmatch(name)
    if match is None or name.startswith("__MACOSX/") or "/__MACOSX/" in name:
        return "", ""
    return match[1], match[2].lower()


class Member(NamedTuple):
    """A member of a sample: its whole name, its extension, and where its content lies in the record."""

    name: str
    extension: str
    start: int
    stop: int


def read_sample(record: memoryview) -> tuple[str, dict[str, memoryview]]:
    """(key, extension -> content) of a record: the slice of a shard with one sample.

    Raises:
        DecodeError: the slice does not hold exactly one sample.
    """
    key, members = read_members(record)
    return key, {member.extension: record[member.start : member.stop] for member in members}


def read_members(record: memoryview) -> tuple[str, list[Member]]:
    """(key, members) of a record, as `read_sample`."""
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
    """The member whose headers begin at `at`; or the number of bytes of `view` needed to see all of them.

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
        _check_sum(block)
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


def _check_sum(block: bytes) -> None:
    """Raise `DecodeError` unless the checksum is right: the sum of the header's bytes, its own as spaces."""
    field = block[148:156]
    if _OCTAL.fullmatch(field) is None or sum(block) - sum(field) + 256 != _number(field):
        raise DecodeError(
            f"bad checksum of a tar header, so the start of the next one is unknown{hint(block)}"
        )


def _number(field: bytes) -> int:
    """A number in octal, or in base 256 (GNU) where its first bit is set."""
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
    """(path, size, whether sparse) of a pax header: records "length key=value\\n"."""
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
