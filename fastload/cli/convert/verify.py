"""Whether a set of shards holds what was put into it: all of it is read again, as a reader sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xxhash import xxh3_64

from fastload.cli.convert.pieces import PieceReader
from fastload.cli.convert.record_files import Digest
from fastload.cli.convert.shardset import Form, Shard, ShardSet, index_name
from fastload.errors import DecodeError, NotFoundError
from fastload.formats.example import read_example
from fastload.formats.shard_index import parse_tfrecord_index, parse_wds_index
from fastload.formats.tar import read_sample
from fastload.store import ObjectInfo

__all__ = ["verify"]


def verify(shards: ShardSet, progress: Callable[[Shard], None]) -> list[tuple[str, str]]:
    """(name, what is wrong) of each shard that does not hold what was written.

    The bytes are compared by their checksum, the samples by theirs (as they were before they were written),
    the index with the places at which the samples were found.
    """
    present = shards.present()
    reader = PieceReader(shards.store, ahead=8)
    wrong = []
    try:
        for shard in shards.shards:
            why = _fault(shards, reader, present.get(shard.name), shard)
            if why:
                wrong.append((shard.name, why))
            progress(shard)
    finally:
        reader.close()
    return wrong


def _fault(shards: ShardSet, reader: PieceReader, info: ObjectInfo | None, shard: Shard) -> str:
    if info is None or info.size != shard.bytes:
        return f"has {0 if info is None else info.size:,} bytes instead of {shard.bytes:,}"
    whole, content, places = xxh3_64(), Digest(), list[list[int]]()
    try:
        for record in reader.records(info, shards.form.kind, whole.update):
            _add(content, shards.form, record.payload)
            places.append([record.offset, record.size])
        index = bytes(shards.store.read(index_name(shard.name)))
        parse = parse_wds_index if shards.form.kind == "tar" else parse_tfrecord_index
        indexed = parse(index, shard.bytes).tolist()
    except (DecodeError, NotFoundError) as error:
        return str(error)
    if len(places) != shard.samples:
        return f"has {len(places):,} samples instead of {shard.samples:,}"
    if (whole.hexdigest(), content.text()) != (shard.xxh3, shard.content):
        return "holds something else than was written"
    if indexed != places or xxh3_64(index).hexdigest() != shard.places:
        return "has another index than was written"
    return ""


def _add(content: Digest, form: Form, payload: Any) -> None:
    """As `ShardSet.make` did before the sample was written, from what is read."""
    if form.copied:
        content.add("", payload)
    elif form.kind == "tar":
        content.add_members(*read_sample(payload))
    else:
        content.add_features(read_example(payload))
