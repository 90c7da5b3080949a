"""The keys of records: digests of whatever tells two payloads apart."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from fastload.cache.segment import KEY_SIZE
from fastload.formats.jpeg_records import DCT_MAGIC, ROWS_MAGIC

Digest = hashlib.blake2b  # of the first parts of a key
Mode = Literal["auto", "raw", "dct", "shrunk", "decoded"]


def first_digest(mode: Mode, short_side: int, quality: int) -> Digest:
    """The digest of a mode and its parameters, with which each key begins."""
    parameters: tuple[Any, ...] = ()
    if mode == "dct":
        parameters = (DCT_MAGIC, ROWS_MAGIC)  # they tell the versions of the records
    elif mode != "raw":
        parameters = (short_side, quality) if mode == "shrunk" else (short_side,)
    return Digest(repr((mode, *parameters)).encode(), digest_size=KEY_SIZE, person=b"fastload")


def add_parts(digest: Digest, parts: tuple[str | bytes, ...]) -> Digest:
    """The digest of some parts more, their boundaries kept."""
    digest = digest.copy()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(b"%d:%b" % (len(data), data))
    return digest
