"""The kind of a file by its first bytes: the one rule for compression. Names of files do not count.

tar        a header that holds its own checksum         gzip     1f 8b 08
tfrecord   a length with its CRC behind it              zlib     78 01, 78 5e, 78 9c or 78 da (RFC 1950)

The kinds with a checksum are tested first, because only they are certain: the length of a TFRecord, or the
first name in a tar, may begin with the bytes of zlib data.
"""

from __future__ import annotations

import re
from typing import Any

from crc32c import crc32c

__all__ = ["HEAD", "hint", "is_compressed", "kind_of", "masked_crc"]

HEAD = 512  # bytes that are enough
_OCTAL = re.compile(rb"[ \0]*([0-7]+)[ \0]*")
_MAGIC = {
    b"\x1f\x8b\x08": "gzip",
    **dict.fromkeys((b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"), "zlib"),
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_READ = ("gzip", "zlib")
_READERS = {"tar": ("tar", "TarDataset"), "tfrecord": ("TFRecord file", "TFRecordDataset")}


def kind_of(head: Any) -> str:
    """ "tar", "tfrecord", "gzip", "zlib", "bzip2", "xz", "zstd", "lz4", or "" for anything else.

    Args:
        head: the file's first 512 bytes or more, or all of a smaller file.
    """
    begin = bytes(head[:HEAD])
    if _is_tar(begin):
        return "tar"
    if len(begin) >= 12 and masked_crc(begin[:8]) == int.from_bytes(begin[8:12], "little"):
        return "tfrecord"
    return next((kind for magic, kind in _MAGIC.items() if begin.startswith(magic)), "")


def is_compressed(head: Any) -> bool:
    """Whether a shard that begins like this has to be inflated."""
    return kind_of(head) in _READ


def hint(head: Any) -> str:
    """Advice for a file that is read as the wrong kind; "" where its kind is unknown."""
    kind = kind_of(head)
    if kind in _READERS:
        name, reader = _READERS[kind]
        return f"; it is a {name}: read it with fastload.{reader}"
    if kind in _READ:
        return f"; these are {kind} data: leave out compression=, and do not compress a shard twice"
    return f"; it is compressed by {kind}, which is not read: write it plain or as gzip" if kind else ""


def masked_crc(data: Any) -> int:
    """The masked CRC32C of TFRecord, of anything with the buffer protocol."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _is_tar(begin: bytes) -> bool:
    if len(begin) < HEAD:
        return False
    match = _OCTAL.fullmatch(begin[148:156])
    return match is not None and int(match[1], 8) == sum(begin) - sum(begin[148:156]) + 256
