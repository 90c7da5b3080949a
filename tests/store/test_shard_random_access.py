"""Shards at random: from the cache that an epoch filled, by the index that it built, by index files."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload import Cache
from fastload.errors import ArgumentError
from fastload.shards import reader
from tests.faultserver import FaultServer
from tests.sharddata import (
    COUNTS,
    IMAGE,
    LABEL,
    TOTAL,
    at_random,
    batches,
    dataset,
    labels,
    opened,
    place_of,
    read,
    shard,
    shards,
    write,
)
from tests.shortform import stress

pytestmark = pytest.mark.usefixtures("close_all")


# --- The cache, and numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("tar", "auto"), ("tfrecord", "decoded"), *stress(("tar", "decoded"), ("tfrecord", "auto"))],
)
def test_after_a_streamed_epoch_it_is_a_map(kind: str, mode: Any, tmp_path: Path) -> None:
    """The same pixels as the streams gave, no request for data, in this process and in a new one."""
    with FaultServer(shards(kind)) as server:

        def make() -> Any:
            return opened(kind, server, cache=Cache(tmp_path / "cache", mode, short_side=20))

        data = make()
        with pytest.raises(TypeError, match="no length yet"):
            len(data)
        with pytest.raises(TypeError, match="not indexed yet"):
            data[3]
        found = read(data)
        data._flush_cache()
        pixels = {one: batch[IMAGE[kind]][row] for ids, batch in found for row, one in enumerate(ids)}
        assert not data._streams().must_stream() and len(data) == TOTAL
        data.close()
        before = sum(server.count(key) for key in server.objects)
        for one in (data, make(), pickle.loads(pickle.dumps(data)), copy.deepcopy(data)):
            assert not one._streams().must_stream()
            batch = at_random(one)
            assert batch[LABEL[kind]].tolist() == list(range(TOTAL))
            for number in range(TOTAL):
                shard_number, ordinal = place_of(number)
                assert torch.equal(batch[IMAGE[kind]][number], pixels[shard_number << 32 | ordinal])
            one.close()
        assert sum(server.count(key) for key in server.objects) == before


def test_a_record_the_cache_lost_is_read_again(kind: str, tmp_path: Path) -> None:
    with FaultServer(shards(kind)) as server:
        cache = Cache(tmp_path / "cache", size_limit=100_000)  # not all fits
        data = opened(kind, server, cache=cache)
        read(data)
        data._flush_cache()
        assert 0 < cache.info()["entries"] < TOTAL
        assert len(data) == TOTAL
        assert data._streams().must_stream(), "small records, many missing: streams cost fewer requests"
        assert at_random(data)[LABEL[kind]].tolist() == list(range(TOTAL))


def test_an_interrupted_first_epoch_does_not_read_complete_shards_again(kind: str, tmp_path: Path) -> None:
    with FaultServer(shards(kind)) as server:
        data = opened(kind, server, cache=tmp_path / "cache", cycle_length=1, shuffle_buffer=16)
        (state,) = data._streams().plan_streams(1, seed=1, epoch=0, shuffle=False, rank=0, ranks=1)
        stream = data._streams().open_stream(state)
        reading = batches(data, stream)
        for _ in range(6):  # 96 of 173 records: the first shards are complete
            next(reading)
        data.close()
        complete = {key for key in server.objects if key < "part-002"}
        server.requests.clear()
        again = opened(kind, server, cache=tmp_path / "cache")
        assert again._streams().must_stream()
        assert sorted(labels(read(again, shuffle=False), LABEL[kind])) == list(range(TOTAL))
        assert not any(server.count(key) for key in complete)
        assert all(server.count(key) for key in sorted(server.objects)[3:])
        again._flush_cache()
        assert not again._streams().must_stream()


def test_indexes_of_other_ranks_are_taken_over_and_kept(kind: str, tmp_path: Path) -> None:
    url = write(tmp_path / "shards", shards(kind))
    ours = opened(kind, url, cache=tmp_path / "ours")
    read(ours)
    indexes = ours._streams().known_indexes()
    assert sorted(indexes) == list(range(len(COUNTS)))
    theirs = opened(kind, url, cache=tmp_path / "theirs")
    damaged = {shard: index[:-1] + b"?" for shard, index in indexes.items()}
    theirs._streams().learn_indexes(damaged | {99: indexes[0]})
    with pytest.raises(TypeError):
        len(theirs)
    theirs._streams().learn_indexes(indexes)
    assert len(theirs) == TOTAL
    worker = opened(kind, url, cache=tmp_path / "theirs")
    assert len(worker) == TOTAL, "kept where this node's processes find them"


def test_damaged_and_foreign_index_files_of_the_cache_are_not_used(kind: str, tmp_path: Path) -> None:
    url = write(tmp_path / "shards", shards(kind))
    data = opened(kind, url, cache=tmp_path / "cache")
    read(data)
    data._flush_cache()
    data.close()
    kept = sorted((tmp_path / "cache" / "manifests").glob("*.places"))
    assert len(kept) == len(COUNTS)
    kept[0].write_bytes(kept[1].read_bytes())
    kept[2].write_bytes(kept[2].read_bytes()[:-5])
    again = opened(kind, url, cache=tmp_path / "cache")
    assert again._streams().must_stream()
    assert len(list((tmp_path / "cache" / "manifests").glob("*.places"))) < len(COUNTS)
    assert sorted(labels(read(again), LABEL[kind])) == list(range(TOTAL))
    assert not again._streams().must_stream()


# --- Index files -------------------------------------------------------------------------------------------


def test_index_files_make_it_a_map_at_once(kind: str, tmp_path: Path) -> None:
    with FaultServer(shards(kind, index=True)) as server:
        data = opened(kind, server)
        assert len(data) == TOTAL and data[-1][LABEL[kind]] == TOTAL - 1
        assert at_random(data)[LABEL[kind]].tolist() == list(range(TOTAL))
        assert data._streams().must_stream(), "records of 2 KB, and no cache: streams cost fewer requests"
        assert sorted(labels(read(data, workers=7, ranks=2), LABEL[kind])) == list(range(TOTAL))
        counts = [len(labels(read_one(data, stream, 14), LABEL[kind])) for stream in range(14)]
        assert max(counts) - min(counts) <= 1, "ranges within shards: streams are equal within one"
        with pytest.raises(TypeError):
            len(opened(kind, server, index=False))


def read_one(data: Any, number: int, streams: int) -> list[tuple[list[int], Any]]:
    state = data._streams().plan_streams(streams, seed=1, epoch=0, shuffle=True, rank=0, ranks=1)[number]
    stream = data._streams().open_stream(state)
    found = list(batches(data, stream))
    stream.close()
    return found


def test_index_files_elsewhere_or_of_other_shards(kind: str, tmp_path: Path) -> None:
    objects = shards(kind, index=True)
    url = write(tmp_path / "a", {key: body for key, body in objects.items() if not key.endswith(".idx")})
    places = {key: body for key, body in objects.items() if key.endswith(".idx")}
    index = write(tmp_path / "b", {key.replace(f".{kind}", ""): body for key, body in places.items()})
    assert len(opened(kind, url, index=index)) == TOTAL
    (tmp_path / "a" / f"part-000.{kind}.idx").write_bytes(places[f"part-002.{kind}.idx"])
    with pytest.raises(TypeError):
        len(opened(kind, url))  # found beside them: not used, and a warning says so
    with pytest.raises(ArgumentError, match="part-000"):
        dataset(kind, url, index=True)
    with pytest.raises(ArgumentError, match="holds no index file"):
        dataset(kind, url, index=write(tmp_path / "c", {"x.idx": b""}))


def test_idle_dataset_leaves_a_cache_open_that_another_one_reads(kind: str, tmp_path: Path) -> None:
    url, cache = write(tmp_path / "shards", shards(kind, index=True)), Cache(tmp_path / "cache", "raw")
    idle = opened(kind, url, cache=cache)
    idle._streams().must_stream()
    assert not cache._is_open, "nobody reads"
    reading = opened(kind, url, cache=cache)
    assert reading[3] and cache._is_open
    idle._streams().must_stream()
    assert cache._is_open


def test_index_file_of_a_shard_that_has_grown_is_not_used(kind: str, tmp_path: Path) -> None:
    (few, index), (more, _) = shard(kind, range(10)), shard(kind, range(15))
    objects = {f"x.{kind}": few, f"x.{kind}.idx": index}
    assert len(opened(kind, write(tmp_path / "few", objects))) == 10
    url = write(tmp_path / "more", {**objects, f"x.{kind}": more})
    data = opened(kind, url)  # a warning says that the index is not used
    with pytest.raises(TypeError):
        len(data)
    assert sorted(labels(read(data), LABEL[kind])) == list(range(15))
    with pytest.raises(ArgumentError, match=r"x\.\w+\.idx.*write (it|its index) again"):
        dataset(kind, url, index=True)


# --- Guards have twins -------------------------------------------------------------------------------------


@pytest.mark.parametrize("removed", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_cached_shards_are_not_read_again_unless_guard_removed(
    kind: str, removed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultServer(shards(kind)) as server:
        data = opened(kind, server, cache=tmp_path / "cache")
        read(data)
        data._flush_cache()
        server.requests.clear()
        if removed:
            monkeypatch.setattr(reader.CachedReader, "complete", lambda cached: False)
        assert sorted(labels(read(data, epoch=1), LABEL[kind])) == list(range(TOTAL))
        gets = [one for one in server.requests if one.method == "GET" and one.key in server.objects]
        assert bool(gets) == removed
