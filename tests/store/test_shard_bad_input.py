"""Shards that are damaged, of another kind, or hostile."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastload.datasets.wrappers import view_of
from fastload.errors import DecodeError
from tests.sharddata import (
    KINDS,
    LABEL,
    TOTAL,
    jpeg,
    labels,
    loader_of,
    numbers_of,
    opened,
    ordinary,
    read,
    shard,
    shards,
    write,
)

pytestmark = pytest.mark.usefixtures("close_all")


def damaged(kind: str) -> dict[str, bytes]:
    """Shard 0: a bad record in its middle; shard 2: cut; shard 3: bad where a record begins."""
    objects = {key: bytearray(body) for key, body in shards(kind).items()}
    first, second, third = (objects[f"part-00{number}.{kind}"] for number in (0, 2, 3))
    if kind == "tar":  # a link in place of a member
        at = first.index(b"d/00005.cls")
        first[at + 156] = ord("2")
        first[at + 124 : at + 136] = b"%011o\0" % 0
        block = first[at : at + 512]
        block[148:156] = b" " * 8
        first[at + 148 : at + 156] = b"%06o\0 " % sum(block)
        del first[at + 512 : at + 1024]
    else:
        first[first.index(jpeg(5)) + 100] ^= 1
    del second[second.rindex(b"d/00095.jpg") + 600 if kind == "tar" else -3000 :]
    third[third.index(b"d/00105" if kind == "tar" else b"n105") + 20] ^= 1
    return {key: bytes(body) for key, body in objects.items()}


def test_damage_is_an_error_with_shard_and_offset_and_costs_no_more_than_it_must(
    kind: str, tmp_path: Path, small_pieces: None
) -> None:
    url = write(tmp_path / "shards", damaged(kind))
    data = opened(kind, url, cache=tmp_path / "cache")
    for _ in range(2):
        good, bad = [], []
        for state in data._streams().plan_streams(2, seed=1, epoch=0, shuffle=True, rank=0, ranks=1):
            stream = data._streams().open_stream(state)
            while ids := stream.take(8):
                batch = view_of(data).new_batch(len(ids), ordinary)
                failed = dict(view_of(data).fill(batch, list(enumerate(ids)), 0, 0))
                bad += [str(error) for error in failed.values()]
                assert all(isinstance(error, DecodeError) for error in failed.values())
                good += [int(batch.rest[row][LABEL[kind]]) for row in range(len(ids)) if row not in failed]
            stream.close()
        assert len(good) == len(set(good)) and 5 not in good and set(good) < set(range(TOTAL))
        assert set(range(6, 40)) <= set(good), "what follows a bad record is read"
        assert set(range(128, TOTAL)) <= set(good), "other shards are read"
        assert len(bad) == 3 and all(f".{kind} @ " in text for text in bad), bad
        assert {text.split(f".{kind}")[0][-8:] for text in bad} == {"part-000", "part-002", "part-003"}
        assert data.counters["bad.bytes"] > 3000
        data._flush_cache()
        assert len(data) == len(good) + 3
    random_access = view_of(data).fill(
        view_of(data).new_batch(len(data), ordinary), [(i, i) for i in range(len(data))], 0, 0
    )
    assert [str(error) for _, error in random_access] == sorted(bad)


def test_shard_of_another_kind_is_an_error_at_its_first_byte(kind: str, tmp_path: Path) -> None:
    other = KINDS[1 - KINDS.index(kind)]
    url = write(tmp_path, {f"x.{kind}": shard(other, range(5))[0], f"y.{kind}": b"", f"z.{kind}": b"\0" * 50})
    data = opened(kind, url)
    with pytest.raises(DecodeError, match=rf"[xz]\.{kind} @ 0"):
        read(data)


@pytest.mark.parametrize("harm", ["cut", "garbage"])
def test_damaged_compression_ends_its_shard(kind: str, harm: str, tmp_path: Path, small_pieces: None) -> None:
    objects = shards(kind, end=".gz")
    key = f"part-002.{kind}.gz"
    body = bytearray(objects[key])
    if harm == "cut":
        del body[len(body) // 2 :]
    else:
        body[len(body) // 2 : len(body) // 2 + 50] = b"\xff" * 50
    data = opened(kind, write(tmp_path, objects | {key: bytes(body)}))
    with pytest.raises(DecodeError, match=rf"part-002\.{kind}\.gz @ "):
        read(data)


@pytest.mark.parametrize("split_at", [0, -1, -700])
def test_zeros_behind_a_compressed_shard_are_padding(
    kind: str, split_at: int, tmp_path: Path, small_pieces: None
) -> None:
    """Also where a piece begins with them. Nothing but zeros is a tar without samples, or a damaged shard."""
    objects = shards(kind, end=".gz")
    padded = {name: body + bytes(100_000 + split_at) for name, body in objects.items()}
    data = opened(kind, write(tmp_path, padded))
    assert sorted(labels(read(data), LABEL[kind])) == list(range(TOTAL))
    zeros = opened(kind, write(tmp_path / "z", {f"x.{kind}.gz": bytes(50_000)}))
    if kind == "tar":
        assert read(zeros) == []
        return
    with pytest.raises(DecodeError, match=r"\.gz @ "):
        read(zeros)


@pytest.mark.parametrize(("kind", "workers"), [("tar", 2), ("tfrecord", 0)])
def test_bad_records_under_on_error(kind: str, workers: int, tmp_path: Path) -> None:
    data = opened(kind, write(tmp_path / "shards", damaged(kind)))
    with pytest.raises(DecodeError, match=rf"\.{kind} @ "):
        list(loader_of(data, workers))
    loader = loader_of(data, workers, on_error="repeat")
    found = set(numbers_of(list(loader), kind))
    stats = loader.stats()
    assert stats["counters"]["bad.samples"] == 3 and stats["counters"]["bad.bytes"] > 3000
    assert {key.split(f".{kind} @ ")[0] for key, _ in stats["bad"]} == {"part-000", "part-002", "part-003"}
    assert set(range(6, 40)) | set(range(128, TOTAL)) <= found and 5 not in found
