"""The payloads of a shard's records, where a damaged one ends the command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload.formats.pieces import Record, Splitter
from fastload.formats.tar import TarSplitter
from fastload.formats.tfrecord import TFRecordSplitter
from fastload.shards.record_source import record_name

__all__ = ["SPLITTERS", "sound_payload"]

# Kind of shard -> what cuts its bytes into records.
SPLITTERS: dict[str, Callable[[int, int | None], Splitter]] = {
    "tar": TarSplitter,
    "tfrecord": TFRecordSplitter,
}


def sound_payload(record: Record, shard: str) -> Any:
    """The payload of a record of that shard.

    Raises:
        DecodeError: the record is damaged. The error names the shard and the offset in it.
    """
    if record.error is not None:
        record.error.key = record_name(shard, record.offset)
        raise record.error
    return record.payload
