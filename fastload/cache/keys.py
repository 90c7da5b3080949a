"""The keys of records: digests of whatever tells two payloads apart."""

from __future__ import annotations

import hashlib

from fastload.cache.codecs import CacheCodec
from fastload.cache.segment import KEY_SIZE

Digest = hashlib.blake2b  # of the first parts of a key


def first_digest(codec: CacheCodec) -> Digest:
    """Return the digest of a mode and its parameters, with which each key begins."""
    parts = (codec.key_mode, *codec.key_parts)
    return Digest(repr(parts).encode(), digest_size=KEY_SIZE, person=b"fastload")


def add_parts(digest: Digest, parts: tuple[str | bytes, ...]) -> Digest:
    """The digest of some parts more, their boundaries kept."""
    digest = digest.copy()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(b"%d:%b" % (len(data), data))
    return digest
