"""Damage that came about on the way is not believed for ever; damage of the shard itself is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastload.datasets.wrappers import view_of
from fastload.errors import DecodeError
from tests.faultserver import Fault, FaultServer
from tests.sharddata import COUNTS, LABEL, TOTAL, labels, opened, ordinary, read, shards
from tests.shortform import stress

pytestmark = pytest.mark.usefixtures("close_all")


def epoch(data: Any) -> tuple[list[int], list[str]]:
    """(labels, errors) of a streamed epoch, under what `on_error` does."""
    good, bad = [], []
    for state in data._streams().plan_streams(1, seed=1, epoch=0, shuffle=False, rank=0, ranks=1):
        stream = data._streams().open_stream(state)
        while ids := stream.take(16):
            found, errors = filled(data, ids)
            good, bad = good + found, bad + errors
        stream.close()
    data._flush_cache()
    return sorted(good), bad


def filled(data: Any, ids: list[int]) -> tuple[list[int], list[str]]:
    name = "cls" if type(data).__name__ == "TarDataset" else "label"
    batch = view_of(data).new_batch(len(ids), ordinary)
    failed = dict(view_of(data).fill(batch, list(enumerate(ids)), 0, 0))
    assert all(isinstance(error, DecodeError) for error in failed.values())
    good = [int(batch.rest[row][name]) for row in range(len(ids)) if row not in failed]
    return good, [str(error) for error in failed.values()]


def test_record_damaged_on_the_way_is_read_again(tmp_path: Path) -> None:
    """Its offset is sure, so its index stays: only the error goes."""
    with FaultServer(shards("tfrecord")) as server:
        data = opened("tfrecord", server, cache=tmp_path)
        server.script("part-002.tfrecord", Fault(flip=len(server.objects["part-002.tfrecord"]) // 2))
        good, bad = epoch(data)
        assert len(good) == TOTAL - 1 and len(bad) == 1 and "bad CRC of a record's" in bad[0]
        for one in (data, opened("tfrecord", server, cache=tmp_path)):
            assert len(one) == TOTAL
            found, errors = filled(one, list(range(TOTAL)))
            assert (sorted(found), errors) == (list(range(TOTAL)), [])
        streamed = opened("tfrecord", server, cache=tmp_path)
        assert epoch(streamed) == (list(range(TOTAL)), [])


@pytest.mark.parametrize(
    ("kind", "way"),
    [("tar", "streamed"), ("tfrecord", "at random"), *stress(("tar", "at random"), ("tfrecord", "streamed"))],
)
def test_shard_cut_off_on_the_way_is_read_anew_by_the_next_run(kind: str, way: str, tmp_path: Path) -> None:
    """Where a header was damaged, nobody knew what followed. This run keeps its numbers, and says so."""
    with FaultServer(shards(kind)) as server:
        data = opened(kind, server, cache=tmp_path)
        key, body = f"part-002.{kind}", server.objects[f"part-002.{kind}"]
        at = body.index(b"d/00050") if kind == "tar" else _third_header(body)
        server.script(key, Fault(flip=at))
        good, bad = epoch(data)
        lost = TOTAL - len(good)
        assert lost > 1 and len(bad) == 1
        assert len(data) == len(good) + 1
        for _ in range(2):
            again = epoch(data) if way == "streamed" else filled(data, list(range(len(data))))
            assert (sorted(again[0]), again[1]) == (sorted(good), bad)
        assert len(data) == len(good) + 1
        following = opened(kind, server, cache=tmp_path)
        assert following._streams().must_stream()
        assert epoch(following) == (list(range(TOTAL)), [])
        assert len(following) == TOTAL and len(opened(kind, server, cache=tmp_path)) == TOTAL


def test_compressed_shard_whose_first_byte_was_damaged_on_the_way_is_read_anew(
    kind: str, tmp_path: Path
) -> None:
    """It did not look compressed then."""
    with FaultServer(shards(kind, end=".gz")) as server:
        data = opened(kind, server, cache=tmp_path)
        server.script(f"part-002.{kind}.gz", Fault(flip=0))
        good, bad = epoch(data)
        assert len(good) == TOTAL - COUNTS[2] and len(bad) == 1
        assert filled(data, list(range(len(data))))[1] == bad
        following = opened(kind, server, cache=tmp_path)
        assert following._streams().must_stream() and epoch(following) == (list(range(TOTAL)), [])


def _third_header(body: bytes) -> int:
    at = 0
    for _ in range(2):
        at += 16 + int.from_bytes(body[at : at + 8], "little")
    return at


def test_damage_of_the_shard_itself_stays_and_is_looked_at_once_a_run(kind: str, tmp_path: Path) -> None:
    objects = shards(kind)
    key = f"part-002.{kind}"
    body = bytearray(objects[key])
    body[body.index(b"d/00050") if kind == "tar" else _third_header(body)] ^= 0xFF
    with FaultServer(objects | {key: bytes(body)}) as server:
        data = opened(kind, server, cache=tmp_path)
        good, bad = epoch(data)
        assert len(bad) == 1
        following = opened(kind, server, cache=tmp_path)
        assert not following._streams().must_stream() and len(following) == len(good) + 1
        before = server.count(key)
        for _ in range(2):
            found, errors = filled(following, list(range(len(following))))
            assert (sorted(found), errors) == (sorted(good), bad)
        assert server.count(key) == before + 1
        server.script(key, Fault(status=403, code="AccessDenied"), repeat=True)
        offline = opened(kind, server, cache=tmp_path)
        assert filled(offline, list(range(len(offline))))[1] == bad, "without access the index is believed"


def test_shard_that_was_replaced_is_sound(kind: str, tmp_path: Path) -> None:
    """What was wrong with a version says nothing of the next one."""
    objects = shards(kind)
    key = f"part-002.{kind}"
    with FaultServer(objects | {key: objects[key][:-4000]}) as server:
        damaged = opened(kind, server, cache=tmp_path)
        assert len(epoch(damaged)[1]) == 1
        server.objects[key] = objects[key]
        data = opened(kind, server, cache=tmp_path)
        assert sorted(labels(read(data), LABEL[kind])) == list(range(TOTAL))
        data._flush_cache()
        assert len(data) == sum(COUNTS)
