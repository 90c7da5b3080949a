"""Whether a shard is compressed is found out from its bytes; its name does not count."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import answer
from tests.sharddata import (
    COUNTS,
    LABEL,
    TOTAL,
    at_random,
    batches,
    labels,
    opened,
    read,
    shard,
    shards,
    write,
)

WRITERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zlib": zlib.compress}
pytestmark = pytest.mark.usefixtures("close_all")


def misnamed(kind: str) -> dict[str, bytes]:
    """Shards, of which every second is compressed, under names that say the contrary."""
    objects = {}
    for number, (key, body) in enumerate(sorted(shards(kind).items())):
        writer = [gzip.compress, None, zlib.compress, None][number % 4]
        objects[f"{key}.gz" if writer is None else key] = body if writer is None else writer(body)
    return objects


def test_stream_of_misnamed_shards_resumes_with_the_next_record(
    kind: str, tmp_path: Path, small_pieces: None
) -> None:
    """In the middle of plain and of compressed ones, whose first bytes the new stream has not read."""
    url = write(tmp_path, misnamed(kind))
    data = opened(kind, url, cycle_length=3, shuffle_buffer=30)
    (start,) = data._streams().plan_streams(1, seed=7, epoch=0, shuffle=True, rank=0, ranks=1)
    whole = labels(list(batches(data, data._streams().open_stream(start))), LABEL[kind])
    assert sorted(whole) == list(range(TOTAL))
    for head in (3, 6, 9):
        stream, first = data._streams().open_stream(start), []
        for _, batch in batches(data, stream):
            first += batch[LABEL[kind]].tolist()
            if len(first) == 16 * head:
                break
        state = json.loads(json.dumps(stream.state()))
        again = opened(kind, url, cycle_length=3, shuffle_buffer=30)
        rest = labels(list(batches(again, again._streams().open_stream(state))), LABEL[kind])
        assert [int(one) for one in first] + rest == whole


def test_misnamed_shards_are_read_at_random_from_the_cache_and_without_it(kind: str, tmp_path: Path) -> None:
    url = write(tmp_path / "shards", misnamed(kind))
    data = opened(kind, url, cache=str(tmp_path / "cache"))
    read(data)
    data._flush_cache()
    assert not data._streams().must_stream()
    assert at_random(data)[LABEL[kind]].tolist() == list(range(TOTAL))
    data.close()
    data.cache.clear()  # the index too, which stays in memory
    for number in (0, COUNTS[0], TOTAL - 1):
        assert int(data[number][LABEL[kind]]) == number


def test_index_beside_a_compressed_shard_is_not_used(kind: str, tmp_path: Path) -> None:
    """Compressed at level 0, the shard is larger than it was: every offset in the index lies within it."""
    objects = shards(kind, index=True)
    key = f"part-000.{kind}"
    objects[key] = gzip.compress(objects[key], 0)
    data = opened(kind, write(tmp_path, objects))
    with pytest.raises(TypeError, match="no length yet"):
        len(data)
    assert sorted(labels(read(data), LABEL[kind])) == list(range(TOTAL))


def test_index_beside_a_plain_shard_called_gz_is_used(kind: str, tmp_path: Path) -> None:
    data, places = shard(kind, range(9))
    url = write(tmp_path, {f"x.{kind}.gz": data, f"x.{kind}.gz.idx": places})
    assert at_random(opened(kind, url))[LABEL[kind]].tolist() == list(range(9))


@pytest.mark.parametrize("writer", WRITERS)
def test_convert_reads_misnamed_shards_of_either_kind(kind: str, writer: str, tmp_path: Path) -> None:
    """As the datasets do, with the same rule."""
    data, _ = shard(kind, range(20))
    more, _ = shard(kind, range(20, 30))
    url = write(tmp_path / "in", {f"a.{kind}": WRITERS[writer](data), f"b.{kind}.gz": more})
    assert answer("convert", url, tmp_path / "out", "--to", kind, "--from", kind)["samples"] == 30
    assert at_random(opened(kind, str(tmp_path / "out")))[LABEL[kind]].tolist() == list(range(30))
