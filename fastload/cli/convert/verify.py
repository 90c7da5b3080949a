"""Reads a set of shards again, as a dataset would, and compares it with the written records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xxhash import xxh3_64

from fastload.cli.convert.records import SPLITTERS, sound_payload
from fastload.cli.convert.sample_forms import Digest
from fastload.cli.convert.shard_set import Form, ShardSet, WrittenShard, index_name
from fastload.errors import DecodeError, NotFoundError
from fastload.fetch.threads import ReadPool
from fastload.formats.example import read_example
from fastload.formats.shard_index import parse_tfrecord_index, parse_wds_index
from fastload.formats.tar import read_sample
from fastload.metrics.counters import Counters
from fastload.shards.reader import PIECES, ReadAhead, Shard, ShardReader
from fastload.store import ObjectInfo

__all__ = ["find_fault", "verify"]

_READ_AHEAD = 64 << 20  # bytes
_READS = 8  # at once


def verify(shards: ShardSet, progress: Callable[[WrittenShard], None]) -> list[tuple[str, str]]:
    """(name, fault) of each shard that differs from what was written.

    The bytes are compared by their checksum, the samples by theirs (of before they were written), the index
    with the offsets at which the samples were found.
    """
    present = shards.present()
    pool = ReadPool(_READS, Counters())
    wrong = []
    try:
        for shard in shards.shards:
            why = find_fault(shards, pool, present.get(shard.name), shard)
            if why:
                wrong.append((shard.name, why))
            progress(shard)
    finally:
        pool.close()
    return wrong


def find_fault(shards: ShardSet, pool: ReadPool, info: ObjectInfo | None, shard: WrittenShard) -> str:
    """In what a shard differs from what was written; "": in nothing."""
    if info is None or info.size != shard.bytes:
        return f"has {0 if info is None else info.size:,} bytes instead of {shard.bytes:,}"
    whole, content, offsets = xxh3_64(), Digest(), list[list[int]]()
    hashed = 0

    def hash_piece(piece: Any) -> None:
        nonlocal hashed
        whole.update(piece)
        hashed += len(piece)

    reader = ShardReader(
        shards.store,
        Shard(info.key, info.size, info.version, compressed=False),
        SPLITTERS[shards.form.kind],
        ahead=ReadAhead.of(_READ_AHEAD, 1),
        pool=pool,
        counters=Counters(),
        on_piece=hash_piece,
    )
    try:
        while (record := reader.next()) is not None:
            _add(content, shards.form, sound_payload(record, info.key))
            offsets.append([record.offset, record.size])
        index = bytes(shards.store.read(index_name(shard.name)))
        parse = parse_wds_index if shards.form.kind == "tar" else parse_tfrecord_index
        indexed = parse(index, shard.bytes).tolist()
    except (DecodeError, NotFoundError) as error:
        return str(error)
    finally:
        reader.close()
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


def _add(content: Digest, form: Form, payload: Any) -> None:
    """What `ShardSet.make` did before the sample was written, with what is read."""
    if form.copied:
        content.add("", payload)
    elif form.kind == "tar":
        content.add_members(*read_sample(payload))
    else:
        content.add_features(read_example(payload))
