"""Index files beside shards, in the formats of other tools: the offset of each record of one shard.

tfrecord2idx     "offset size" per record, the size with its framing          (NVIDIA DALI, tfrecord)
wds2idx          "v1.1 n" or "v1.2 n", then per sample: "extension offset size [name]" for each member,
                 with the offset of its content                               (NVIDIA DALI)
wids             JSON: {"shardlist": [{"url": ..., "nsamples": ...}, ...]}     (WebDataset)
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import DecodeError
from fastload.formats.tar import BLOCK, Member

__all__ = [
    "Offsets",
    "index_name",
    "parse_tfrecord_index",
    "parse_wds_index",
    "parse_wids",
    "tfrecord_index",
    "wds_index",
]

# (offset, size) of each record of one shard, in order: uint64, shape (n, 2).
Offsets = NDArray[np.uint64]

_ENDINGS = ("tar", "tfrecord", "tfrecords", "tfrec")


def index_name(shard: str) -> str:
    """The name that wds2idx gives the index of a shard: "train-000.idx" of "train-000.tar".

    A shard that is named in another way ("part-00000-of-00012") has ".idx" behind its whole name: without its
    ending it could be that of another shard.
    """
    stem, dot, ending = shard.rpartition(".")
    return f"{stem if dot and ending in _ENDINGS else shard}.idx"


def tfrecord_index(offsets: Offsets) -> bytes:
    """The lines of tfrecord2idx."""
    return "".join(f"{start} {size}\n" for start, size in offsets.tolist()).encode()


def wds_index(samples: list[tuple[int, list[Member]]]) -> bytes:
    """The lines of wds2idx, in version 1.2; in 1.1, which has no names, where a name has white space.

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


def parse_tfrecord_index(text: bytes, shard_size: int) -> Offsets:
    """The offsets of the records of a shard of that size.

    Raises:
        DecodeError: not such an index, or one of another shard.
    """
    try:
        numbers = np.array(text.split(), np.uint64).reshape(-1, 2)
    except (ValueError, OverflowError) as error:
        raise DecodeError(f"not an index of tfrecord2idx: {error}") from None
    return _checked(numbers, shard_size, whole=True)


def parse_wds_index(text: bytes, shard_size: int) -> Offsets:
    """The offsets of the samples of a shard of that size, with the headers of their members.

    A sample begins at the end of the one before.

    Raises:
        DecodeError: not such an index, or one of another shard.
    """
    first, _, rest = text.partition(b"\n")
    version, _, count = first.partition(b" ")
    fields = {b"v1.1": 3, b"v1.2": 4}.get(version)
    if fields is None or not count.strip().isdigit():
        raise DecodeError(f"not an index of wds2idx 1.1 or 1.2: its first line is {first[:80]!r}")
    stops = []
    try:
        for line in rest.splitlines():
            words = line.split()
            if not words or len(words) % fields:
                raise ValueError(f"a line of {len(words)} words")
            stops.append(max(int(words[i + 1]) + int(words[i + 2]) for i in range(0, len(words), fields)))
    except ValueError as error:
        raise DecodeError(f"not an index of wds2idx: {error}") from None
    if len(stops) != int(count):
        raise DecodeError(f"the index has {len(stops)} lines, but its first line says {int(count)}")
    try:
        ends = -(-np.array(stops, np.uint64).astype(np.int64) // BLOCK) * BLOCK
    except OverflowError:
        raise DecodeError("an offset in the index is beyond 64 bits") from None
    starts = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])
    return _checked(np.stack([starts, ends - starts], axis=1).astype(np.uint64), shard_size, whole=False)


def parse_wids(text: bytes) -> list[tuple[str, int | None]]:
    """(URL, number of samples) of each shard.

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


def _checked(offsets: Offsets, shard_size: int, *, whole: bool) -> Offsets:
    """Raise unless the records follow one another within the shard and, with `whole`, fill it."""
    starts, sizes = offsets[:, 0], offsets[:, 1]
    if len(offsets):
        most = np.uint64(shard_size)
        inside = bool((sizes <= most).all() and (starts <= most).all() and (starts + sizes <= most).all())
        if not inside or not (sizes > 0).all() or not (starts[1:] >= starts[:-1] + sizes[:-1]).all():
            raise DecodeError(
                f"the index does not fit a shard of {shard_size:,} bytes: it belongs to another shard "
                "or is out of date"
            )
    end = int(starts[-1] + sizes[-1]) if len(offsets) else 0
    if whole and end != shard_size:
        raise DecodeError(f"the index ends at byte {end:,} of a shard of {shard_size:,}: write it again")
    return offsets
