"""TFRecordDataset and TarDataset: exactly once, bit by bit, as streams and at random."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faultserver import Fault, FaultServer
from sharddata import (
    COUNTS,
    FEATURES,
    IMAGE,
    LABEL,
    TOTAL,
    at_random,
    batches,
    dataset,
    jpeg,
    labels,
    ordinary,
    read,
    shard,
    shards,
    write,
)
from torch.utils.data import Subset, default_collate

import fastload
from fastload import Cache, RandomResizedCrop
from fastload.datasets.protocols import RowDataset, StreamDataset
from fastload.demo.s3_server import serve_s3
from fastload.errors import (
    ArgumentError,
    DecodeError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
)
from fastload.shards import reader as lane_module
from fastload.shards import readers as lanes_module
from fastload.shards.columns import copy_value, new_column, put_value
from fastload.shards.urls import expand_braces, glob_pattern
from tests.patience import PATIENCE

KINDS = ["tar", "tfrecord"]
CROP = RandomResizedCrop(24, flip=0.5)
pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of a few kilobytes arrive in many ranges."""
    for name, size in (("_FIRST_PIECE", 700), ("_LEAST_PIECE", 1500), ("_USUAL_PIECE", 3000)):
        monkeypatch.setattr(lane_module, name, size)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def closing(data: Any) -> Any:
    OPEN.append(data)
    return data


OPEN: list[Any] = []


@pytest.fixture(autouse=True)
def close_all(no_leaks: None) -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


# --- Exactly once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", ".gz", ".zlib"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_streams_give_every_record_once(
    kind: str, end: str, shuffle: bool, tmp_path: Path, small_pieces: None
) -> None:
    url = write(tmp_path, shards(kind, end=end))
    data = closing(dataset(kind, f"{url}/*", transform=CROP, cycle_length=3, shuffle_buffer=50))
    assert isinstance(data, StreamDataset) and isinstance(data, RowDataset) and data.must_stream()
    orders = []
    for workers, ranks in ((1, 1), (2, 1), (3, 2), (9, 1)):
        found = read(data, workers=workers, ranks=ranks, shuffle=shuffle)
        numbers = labels(found, LABEL[kind])
        assert sorted(numbers) == list(range(TOTAL))
        orders.append(numbers)
        again = labels(read(data, workers=workers, ranks=ranks, shuffle=shuffle), LABEL[kind])
        assert again == numbers
        other = labels(read(data, workers=workers, ranks=ranks, shuffle=shuffle, epoch=1), LABEL[kind])
        assert (other == numbers) != shuffle and sorted(other) == sorted(numbers)
    assert data.counters["get.samples"] == 12 * TOTAL


def test_contents_are_those_of_the_files(kind: str, tmp_path: Path, small_pieces: None) -> None:
    """Bytes as they were written, and pixels as the transform makes them of these."""
    url = write(tmp_path, shards(kind))
    decode = (lambda members: members) if kind == "tar" else None
    raw = closing(dataset(kind, url, decode=decode))
    for _, samples in read(raw):
        for sample in samples:
            number = int(sample[LABEL[kind]])
            assert sample[IMAGE[kind]] == jpeg(number)
    fused = closing(dataset(kind, url, transform=CROP))
    seen = 0
    for ids, batch in read(fused):
        for row, one in enumerate(ids):
            number = int(batch[LABEL[kind]][row])
            assert (one >> 32, one & 0xFFFF) == place_of(number)
            wanted = torch.empty((1, *CROP.sample_shape), dtype=torch.uint8)
            from fastload.images.rng import sample_seed

            assert not CROP.fill(wanted.numpy(), [jpeg(number)], [sample_seed(5, 0, one)])
            assert torch.equal(batch[IMAGE[kind]][row], wanted[0])
            seen += 1
    assert seen == TOTAL


def place_of(number: int) -> tuple[int, int]:
    for index, count in enumerate(COUNTS):
        if number < count:
            return index, number
        number -= count
    raise AssertionError


# --- The cache, and numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["raw", "shrunk", "decoded"])
def test_after_a_streamed_epoch_it_is_a_map(kind: str, mode: Any, tmp_path: Path) -> None:
    """The same pixels as the streams gave, no request for data, in this process and in a new one."""
    with FaultServer(shards(kind)) as server:

        def make() -> Any:
            cache = Cache(tmp_path / "cache", mode, short_side=20)
            options = {"storage_options": server.options, "cache": cache, "transform": CROP}
            return closing(dataset(kind, "s3://bucket", **options))

        data = make()
        with pytest.raises(TypeError, match="no length yet"):
            len(data)
        with pytest.raises(TypeError, match="no numbers yet"):
            data[3]
        found = read(data)
        data.flush_cache()
        pixels = {one: batch[IMAGE[kind]][row] for ids, batch in found for row, one in enumerate(ids)}
        assert not data.must_stream() and len(data) == TOTAL
        data.close()
        before = sum(server.count(key) for key in server.objects)
        for one in (data, make(), pickle.loads(pickle.dumps(data)), copy.deepcopy(data)):
            assert not one.must_stream()
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
        options = {"storage_options": server.options, "cache": cache, "transform": CROP}
        data = closing(dataset(kind, "s3://bucket", **options))
        read(data)
        data.flush_cache()
        assert 0 < cache.info()["entries"] < TOTAL
        assert len(data) == TOTAL
        assert data.must_stream(), "small records, and many of them missing: streams cost fewer requests"
        assert at_random(data)[LABEL[kind]].tolist() == list(range(TOTAL))


def test_an_interrupted_first_epoch_does_not_read_complete_shards_again(kind: str, tmp_path: Path) -> None:
    with FaultServer(shards(kind)) as server:
        options = {"storage_options": server.options, "cache": str(tmp_path / "cache"), "transform": CROP}
        data = closing(dataset(kind, "s3://bucket", cycle_length=1, shuffle_buffer=16, **options))
        (state,) = data.plan_streams(1, seed=1, epoch=0, shuffle=False, rank=0, ranks=1)
        stream = data.open_stream(state)
        reading = batches(data, stream)
        for _ in range(6):  # 96 of 173 records: the first shards are complete
            next(reading)
        data.close()
        complete = {key for key in server.objects if key < "part-002"}
        server.requests.clear()
        again = closing(dataset(kind, "s3://bucket", **options))
        assert again.must_stream()
        assert sorted(labels(read(again, shuffle=False), LABEL[kind])) == list(range(TOTAL))
        assert not any(server.count(key) for key in complete)
        assert all(server.count(key) for key in sorted(server.objects)[3:])
        again.flush_cache()
        assert not again.must_stream()


@pytest.mark.parametrize("end", [".gz", ".zlib"])
def test_compressed_shards_are_random_from_the_cache(kind: str, end: str, tmp_path: Path) -> None:
    url = write(tmp_path / "shards", shards(kind, end=end))
    options = {"cache": str(tmp_path / "cache"), "transform": CROP}
    data = closing(dataset(kind, f"{url}/*{end}", **options))
    read(data)
    data.flush_cache()
    assert not data.must_stream()
    assert at_random(data)[LABEL[kind]].tolist() == list(range(TOTAL))
    data.close()
    data.cache.clear()  # the tables too; they are in memory
    assert int(data[TOTAL - 1][LABEL[kind]]) == TOTAL - 1  # the shard is read again for one record


def test_places_from_other_ranks(kind: str, tmp_path: Path) -> None:
    url = write(tmp_path / "shards", shards(kind))
    ours = closing(dataset(kind, url, cache=str(tmp_path / "ours"), transform=CROP))
    read(ours)
    tables = ours.known_places()
    assert sorted(tables) == list(range(len(COUNTS)))
    theirs = closing(dataset(kind, url, cache=str(tmp_path / "theirs"), transform=CROP))
    damaged = {shard_number: table[:-1] + b"?" for shard_number, table in tables.items()}
    theirs.learn_places(damaged | {99: tables[0]})
    with pytest.raises(TypeError):
        len(theirs)
    theirs.learn_places(tables)
    assert len(theirs) == TOTAL
    worker = closing(dataset(kind, url, cache=str(tmp_path / "theirs"), transform=CROP))
    assert len(worker) == TOTAL, "kept where this node's processes find them"


def test_damaged_and_foreign_tables_are_not_believed(kind: str, tmp_path: Path) -> None:
    url = write(tmp_path / "shards", shards(kind))
    data = closing(dataset(kind, url, cache=str(tmp_path / "cache"), transform=CROP))
    read(data)
    data.flush_cache()
    data.close()
    tables = sorted((tmp_path / "cache" / "manifests").glob("*.places"))
    assert len(tables) == len(COUNTS)
    tables[0].write_bytes(tables[1].read_bytes())
    tables[2].write_bytes(tables[2].read_bytes()[:-5])
    again = closing(dataset(kind, url, cache=str(tmp_path / "cache"), transform=CROP))
    assert again.must_stream() and len(list((tmp_path / "cache" / "manifests").glob("*.places"))) < len(
        COUNTS
    )
    assert sorted(labels(read(again), LABEL[kind])) == list(range(TOTAL))
    assert not again.must_stream()


# --- Index files ------------------------------------------------------------------------------------------


def test_index_files_make_it_a_map_at_once(kind: str, tmp_path: Path) -> None:
    with FaultServer(shards(kind, index=True)) as server:
        options = {"storage_options": server.options, "transform": CROP}
        data = closing(dataset(kind, "s3://bucket", **options))
        assert len(data) == TOTAL and data[-1][LABEL[kind]] == TOTAL - 1
        assert at_random(data)[LABEL[kind]].tolist() == list(range(TOTAL))
        assert data.must_stream(), "records of 2 KB, and no cache: streams cost fewer requests"
        assert sorted(labels(read(data, workers=7, ranks=2), LABEL[kind])) == list(range(TOTAL))
        counts = [len(labels(read_one(data, stream, 14), LABEL[kind])) for stream in range(14)]
        assert max(counts) - min(counts) <= 1, "ranges within shards: streams are equal within one"
        beside = closing(dataset(kind, "s3://bucket", index=False, **options))
        with pytest.raises(TypeError):
            len(beside)


def read_one(data: Any, number: int, streams: int) -> list[tuple[list[int], Any]]:
    state = data.plan_streams(streams, seed=1, epoch=0, shuffle=True, rank=0, ranks=1)[number]
    stream = data.open_stream(state)
    found = list(batches(data, stream))
    stream.close()
    return found


def test_index_files_elsewhere_or_of_other_shards(kind: str, tmp_path: Path) -> None:
    objects = shards(kind, index=True)
    url = write(tmp_path / "a", {key: body for key, body in objects.items() if not key.endswith(".idx")})
    places = {key: body for key, body in objects.items() if key.endswith(".idx")}
    index = write(tmp_path / "b", {key.replace(f".{kind}", ""): body for key, body in places.items()})
    assert len(closing(dataset(kind, url, index=index, transform=CROP))) == TOTAL
    (tmp_path / "a" / f"part-000.{kind}.idx").write_bytes(places[f"part-002.{kind}.idx"])
    with pytest.raises(TypeError):
        len(closing(dataset(kind, url, transform=CROP)))  # found beside them: not used, and a warning says so
    with pytest.raises(ArgumentError, match="part-000"):
        dataset(kind, url, index=True, transform=CROP)
    with pytest.raises(ArgumentError, match="holds no index file"):
        dataset(kind, url, index=write(tmp_path / "c", {"x.idx": b""}), transform=CROP)


@pytest.mark.parametrize("workers", [0, 2])
def test_through_the_loader_with_an_index(kind: str, workers: int, tmp_path: Path) -> None:
    """Torch's samplers, Subset and batches, as for any map-style dataset; also without a fused transform."""
    url = write(tmp_path / "shards", shards(kind, index=True))
    data = closing(dataset(kind, url, cache=str(tmp_path / "cache"), transform=CROP))
    loader = fastload.DataLoader(Subset(data, range(10, 60)), 8, shuffle=True, num_workers=workers)
    for _ in range(2):
        found = list(loader)
        assert sorted(torch.cat([batch[LABEL[kind]] for batch in found]).tolist()) == list(range(10, 60))
        assert found[0][IMAGE[kind]].shape == (8, 3, 24, 24)
    plain = closing(dataset(kind, url, transform=just_label if kind == "tar" else just_label_of_features))
    loader = fastload.DataLoader(Subset(plain, range(10, 60)), 8, num_workers=workers)
    assert torch.cat(list(loader)).tolist() == list(range(10, 60))


def just_label(sample: dict[str, Any]) -> int:
    assert sample["jpg"].size[0] >= 40
    return int(sample["cls"])


def just_label_of_features(sample: dict[str, Any]) -> int:
    return int(sample["label"])


# --- Resume -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_state_goes_on_with_the_very_next_record(
    kind: str, end: str, cached: bool, tmp_path: Path, small_pieces: None
) -> None:
    url = write(tmp_path / "shards", shards(kind, end=end))
    arguments: dict[str, Any] = {
        "transform": CROP,
        "cycle_length": 3,
        "block_length": 2,
        "shuffle_buffer": 40,
    }
    if cached:
        arguments["cache"] = str(tmp_path / "cache")
    data = closing(dataset(kind, f"{url}/*", **arguments))
    (start,) = data.plan_streams(1, seed=7, epoch=2, shuffle=True, rank=0, ranks=1)
    stream = data.open_stream(start)
    states, ids = [stream.state()], []
    draw = random.Random(end)
    while taken := stream.take(draw.randrange(1, 12)):
        data.cancel(taken)
        ids += taken
        states.append(json.loads(json.dumps(stream.state())))
        assert len(json.dumps(states[-1])) < 2000
    stream.close()
    assert len(ids) == TOTAL == len(set(ids)) and not data.outstanding()
    position = {json.dumps(state): number for number, state in enumerate(states)}
    other = closing(dataset(kind, f"{url}/*", **arguments))
    for state in [*draw.sample(states, 6), states[0], states[-1]]:
        number = position[json.dumps(state)]
        resumed = other.open_stream(state)
        left = []
        while taken := resumed.take(9):
            other.cancel(taken)
            left += taken
        resumed.close()
        assert left == ids[len(ids) - len(left) :]
        assert len(left) == len(ids) - sum_before(states, number, data, start)
    with pytest.raises(ArgumentError, match="other shards"):
        closing(dataset(kind, f"{url}/part-00[0-3]*", **arguments)).open_stream(states[3])


def sum_before(states: list[Any], number: int, data: Any, start: Any) -> int:
    """How many records had been handed out at a state, counted by reading again."""
    stream = data.open_stream(start)
    count = 0
    while json.loads(json.dumps(stream.state())) != states[number]:
        data.cancel(stream.take(1))
        count += 1
    stream.close()
    return count


# --- Bad input --------------------------------------------------------------------------------------------


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
    if kind == "tfrecord":
        at = third.index(jpeg(106)[-8:]) - len(jpeg(106))
        length = third.rindex(b"\x0a", 0, at - 20)
        third[: length + 40] = third[: length + 40]
    return {key: bytes(body) for key, body in objects.items()}


def test_damage_is_an_error_with_shard_and_offset_and_costs_no_more_than_it_must(
    kind: str, tmp_path: Path, small_pieces: None
) -> None:
    url = write(tmp_path / "shards", damaged(kind))
    data = closing(dataset(kind, url, transform=CROP, cache=str(tmp_path / "cache")))
    for _ in range(2):
        good, bad = [], []
        for state in data.plan_streams(2, seed=1, epoch=0, shuffle=True, rank=0, ranks=1):
            stream = data.open_stream(state)
            while ids := stream.take(8):
                batch = data.new_batch(len(ids), ordinary)
                failed = dict(data.fill(batch, list(enumerate(ids)), 0, 0))
                bad += [str(error) for error in failed.values()]
                assert all(isinstance(error, DecodeError) for error in failed.values())
                good += [int(n) for row, n in enumerate(batch[LABEL[kind]].tolist()) if row not in failed]
            stream.close()
        assert len(good) == len(set(good)) and 5 not in good and set(good) < set(range(TOTAL))
        assert set(range(6, 40)) <= set(good), "what follows a bad record is read"
        assert set(range(128, TOTAL)) <= set(good), "other shards are read"
        assert len(bad) == 3 and all(f".{kind} @ " in text for text in bad), bad
        assert {text.split(f".{kind}")[0][-8:] for text in bad} == {"part-000", "part-002", "part-003"}
        assert data.counters["bad.bytes"] > 3000
        data.flush_cache()
        assert len(data) == len(good) + 3
    random_access = data.fill(data.new_batch(len(data), ordinary), [(i, i) for i in range(len(data))], 0, 0)
    assert [str(error) for _, error in random_access] == sorted(bad)


def test_what_a_shard_is_not(kind: str, tmp_path: Path) -> None:
    other = KINDS[1 - KINDS.index(kind)]
    url = write(tmp_path, {f"x.{kind}": shard(other, range(5))[0], f"y.{kind}": b"", f"z.{kind}": b"\0" * 50})
    data = closing(dataset(kind, url, transform=CROP))
    with pytest.raises(DecodeError, match=rf"[xz]\.{kind} @ 0"):
        read(data)


def test_a_gzip_bomb_takes_no_memory(kind: str, tmp_path: Path) -> None:
    import gzip
    import resource

    url = write(tmp_path, {f"x.{kind}.gz": gzip.compress(b"\x00" * (300 << 20), 9)})
    data = closing(dataset(kind, url, transform=CROP))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "tar":  # zeros are the end of a tar
        assert read(data) == []
    else:
        with pytest.raises(DecodeError, match="CRC"):
            read(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize("harm", ["cut", "garbage"])
def test_damaged_compression_ends_its_shard(kind: str, harm: str, tmp_path: Path, small_pieces: None) -> None:
    objects = shards(kind, end=".gz")
    key = f"part-002.{kind}.gz"
    body = bytearray(objects[key])
    if harm == "cut":
        del body[len(body) // 2 :]
    else:
        body[len(body) // 2 : len(body) // 2 + 50] = b"\xff" * 50
    data = closing(dataset(kind, write(tmp_path, objects | {key: bytes(body)}), transform=CROP))
    with pytest.raises(DecodeError, match=rf"part-002\.{kind}\.gz @ "):
        read(data)


@pytest.mark.parametrize("split_at", [0, -1, -700])
def test_zeros_behind_a_compressed_shard_are_padding(
    kind: str, split_at: int, tmp_path: Path, small_pieces: None
) -> None:
    """Also where a piece begins with them. Nothing but zeros is a tar without samples, or a damaged shard."""
    objects = shards(kind, end=".gz")
    padded = {name: body + bytes(100_000 + split_at) for name, body in objects.items()}
    data = closing(dataset(kind, write(tmp_path, padded), transform=CROP))
    assert sorted(labels(read(data), LABEL[kind])) == list(range(TOTAL))
    zeros = closing(dataset(kind, write(tmp_path / "z", {f"x.{kind}.gz": bytes(50_000)}), transform=CROP))
    if kind == "tar":
        assert read(zeros) == []
        return
    with pytest.raises(DecodeError, match=r"\.gz @ "):
        read(zeros)


# --- Stores -----------------------------------------------------------------------------------------------


def test_from_a_real_server(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "bucket" / "train", shards(kind, index=True))
    with serve_s3(tmp_path) as server:
        options = {"storage_options": server.options, "transform": CROP}
        data = closing(dataset(kind, "s3://bucket/train", index=False, **options))
        assert sorted(labels(read(data), LABEL[kind])) == list(range(TOTAL))
        indexed = closing(dataset(kind, f"s3://bucket/train/part-{{000..005}}.{kind}", **options))
        assert at_random(indexed)[LABEL[kind]].tolist() == list(range(TOTAL))


FAULTS = {
    "503": Fault(status=503, code="SlowDown"),
    "cut": Fault(cut_after=100),
    "reset": Fault(reset_after=100),
    "short 200": Fault(body=b"short"),
    "XML": Fault(body=b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_pass_are_not_seen(kind: str, fault: str, small_pieces: None) -> None:
    with FaultServer(shards(kind)) as server:
        data = closing(dataset(kind, "s3://bucket", storage_options=server.options, transform=CROP))
        for number in (0, 2, 3):
            server.script(f"part-00{number}.{kind}", None, FAULTS[fault], None, FAULTS[fault])
        assert sorted(labels(read(data), LABEL[kind])) == list(range(TOTAL))
        assert data.counters["get.retries"] >= 6


@pytest.mark.parametrize("honours_if_match", [True, False])
def test_a_shard_that_changes_while_it_is_read_is_an_error(
    kind: str, honours_if_match: bool, small_pieces: None
) -> None:
    with FaultServer(shards(kind)) as server:
        server.honours_if_match = honours_if_match
        data = closing(dataset(kind, "s3://bucket", storage_options=server.options, transform=CROP))
        server.script(f"part-002.{kind}", None, None, Fault(etag="0" * 32), repeat=True)
        with pytest.raises(ObjectChangedError, match="part-002"):
            read(data)
    assert "if-match" in {name for request in server.requests for name in request.headers}


def test_a_store_that_is_down_is_said(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastload.store import retry

    monkeypatch.setattr(retry, "READ", retry.Policy(budget=0.5, first=0.05))
    with FaultServer(shards(kind)) as server:
        data = closing(dataset(kind, "s3://bucket", storage_options=server.options, transform=CROP))
        server.script(f"part-003.{kind}", Fault(status=500), repeat=True)
        with pytest.raises(StoreError, match="part-003"):
            read(data)


def test_a_complete_shard_is_asked_for_once(kind: str, small_pieces: None) -> None:
    """Each range once; together they are the shard."""
    with FaultServer(shards(kind)) as server:
        data = closing(dataset(kind, "s3://bucket", storage_options=server.options, transform=CROP))
        read(data)
        for key, body in server.objects.items():
            spans = sorted(
                tuple(map(int, request.headers["range"].removeprefix("bytes=").split("-")))
                for request in server.requests
                if request.method == "GET" and request.key == key
            )
            edges = [0] + [stop + 1 for _, stop in spans]
            assert [first for first, _ in spans] == edges[:-1]
            # Padding behind a tar's end mark is not read.
            assert edges[-1] == len(body) or (kind == "tar" and not any(body[edges[-1] - 1024 :]))


# --- What names shards ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a-{000..002}.tar", ["a-000.tar", "a-001.tar", "a-002.tar"]),
        ("{8..10}", ["8", "9", "10"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{00..06..3}", ["00", "03", "06"]),
        ("{a,b}{1..2}", ["a1", "a2", "b1", "b2"]),
        ("{a,b{1..2}}", ["a", "b1", "b2"]),
        ("plain", ["plain"]),
    ],
)
def test_braces(text: str, wanted: list[str]) -> None:
    assert sorted(expand_braces(text)) == sorted(wanted)


@pytest.mark.parametrize("text", ["{0..99999999}", "{0..999}{0..1000}", "{abc}"])
def test_braces_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentError):
        list(expand_braces(text))


def test_globs() -> None:
    import re

    for glob, yes, no in (
        ("*.tar", ["a.tar", ".tar"], ["a/b.tar", "a.tarx"]),
        ("**/*.tar", ["a.tar", "a/b/c.tar"], ["a.zip"]),
        ("a?[0-3]", ["ab0", "ac3"], ["ab4", "a/1"]),
        ("x[!a].tar", ["xb.tar"], ["xa.tar"]),
    ):
        assert all(re.fullmatch(glob_pattern(glob), text) for text in yes)
        assert not any(re.fullmatch(glob_pattern(glob), text) for text in no)


def test_every_way_to_name_shards(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = shards(kind)
    url = write(tmp_path / "all", objects | {"README.txt": b"x", "notes.json": b"{}"})
    listed = {"shardlist": [{"url": key, "nsamples": n} for key, n in zip(objects, COUNTS, strict=True)]}
    (tmp_path / "all" / "index.json").write_text(json.dumps(listed))
    monkeypatch.chdir(tmp_path)
    for name in (
        url,
        f"file://{url}",
        f"{url}/part-{{000..005}}.{kind}",
        f"{tmp_path}/*/part-*.{kind}",
        f"all/*.{kind}",
        [f"{url}/{key}" for key in objects],
        [f"{url}/part-00[0-2].{kind}", f"{url}/part-{{003..005}}.{kind}"],
        f"{url}/index.json",
        Path(url),
    ):
        data = closing(dataset(kind, name, transform=CROP))
        assert sorted(labels(read(data, workers=1), LABEL[kind])) == list(range(TOTAL)), name
    one = closing(dataset(kind, f"{url}/part-002.{kind}", transform=CROP))
    assert len(labels(read(one, workers=1), LABEL[kind])) == COUNTS[2]


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("pipe:curl http://x", ArgumentError, "runs none"),
        ("{url}/nothing-{{0..3}}.tar", NotFoundError, "4 of the objects named"),
        ("{url}/*.zip", NotFoundError, "none is of the kind"),
        ([], ArgumentError, "names no shards"),
        (["{url}/part-000.tar"] * 2, ArgumentError, "twice"),
        (["s3://a/x.tar", "s3://b/x.tar"], ArgumentError, "several buckets"),
        ("http://localhost/*.tar", ArgumentError, "glob needs a store"),
    ],
)
def test_names_that_cannot_be_read(name: Any, error: type[Exception], says: str, tmp_path: Path) -> None:
    url = write(tmp_path, shards("tar"))
    with pytest.raises(error, match=says):
        fastload.TarDataset(
            [one.format(url=url) for one in name] if isinstance(name, list) else name.format(url=url)
        )


def test_over_http_shards_are_asked_for_by_name(kind: str, tmp_path: Path) -> None:
    with FaultServer(shards(kind)) as server:
        url = f"{server.endpoint_url}/bucket/part-{{000..005}}.{kind}"
        data = closing(dataset(kind, url, transform=CROP))
        assert sorted(labels(read(data), LABEL[kind])) == list(range(TOTAL))
        with pytest.raises(NotFoundError, match="2 of the objects named"):
            dataset(kind, f"{server.endpoint_url}/bucket/part-{{000..007}}.{kind}", transform=CROP)


def test_the_constructor_starts_no_client(tmp_path: Path) -> None:
    import subprocess
    import sys

    objects = shards("tar", index=True)
    objects["index.json"] = json.dumps([{"url": key} for key in objects if key.endswith(".tar")]).encode()
    with FaultServer(objects) as server:
        code = (
            "import fastload, sys\n"
            f"o = {server.options!r}\n"
            "assert len(fastload.TarDataset('s3://bucket', storage_options=o)) == 173\n"
            "assert len(fastload.TarDataset('s3://bucket/index.json', storage_options=o)) == 173\n"
            "assert 'obstore' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


# --- Fields -----------------------------------------------------------------------------------------------


def tar_of(*samples: dict[str, bytes]) -> bytes:
    import io

    from fastload.formats.write import TarWriter

    file = io.BytesIO()
    writer = TarWriter(file)
    for number, members in enumerate(samples):
        writer.write(f"{number:03d}", members)
    writer.close()
    return file.getvalue()


def npy(array: Any, **options: Any) -> bytes:
    import io

    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def only(tmp_path: Path, members: dict[str, bytes], **arguments: Any) -> Any:
    data = closing(fastload.TarDataset(write(tmp_path, {"x.tar": tar_of(members)}), **arguments))
    stream = data.open_stream(data.plan_streams(1, seed=0, epoch=0, shuffle=True, rank=0, ranks=1)[0])
    (one,) = stream.take(5)
    return data[one]


def test_members_are_opened_by_their_extension(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    sample = only(
        tmp_path,
        {
            "jpg": jpeg(1),
            "seg.png": jpeg(2),
            "cls": b" 12\n",
            "id": b"-3",
            "json": b'{"a": [1, 2.5]}',
            "txt": "grün".encode(),
            "npy": npy(array),
            "f.npy": npy(np.asfortranarray(array)),
            "bin": b"\0\1",
        },
    )
    assert next(iter(sample)) == "__key__" and sample["__key__"] == "000"
    assert sample["jpg"].size == (48, 36) and sample["seg.png"].size == (56, 40)
    assert (sample["cls"], sample["id"], sample["txt"], sample["bin"]) == (12, -3, "grün", b"\0\1")
    assert sample["json"] == {"a": [1, 2.5]}
    assert np.array_equal(sample["npy"], array) and np.array_equal(sample["f.npy"], array)


def test_a_member_that_is_called_like_the_key(tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match="member '__key__'"):
        only(tmp_path, {"jpg": jpeg(1), "__key__": b"x"})


@pytest.mark.parametrize("name", ["pyd", "pkl", "pickle", "pth", "pt"])
def test_pickles_are_refused_unless_opted_in(name: str, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    with pytest.raises(DecodeError, match="unsafe=True"):
        only(tmp_path, {name: pickle.dumps(Bomb())})
    with pytest.raises(DecodeError, match="pickle"):
        only(tmp_path, {"npy": npy(np.array([Bomb()], dtype=object), allow_pickle=True)})
    assert not (tmp_path / "ran").exists()
    assert only(tmp_path, {name: b"7"}, decode={name: int})[name] == 7
    if name in ("pth", "pt"):
        import io

        file = io.BytesIO()
        torch.save({"a": 1}, file)
        content = file.getvalue()
    else:
        content = pickle.dumps({"a": 1})
    assert only(tmp_path, {name: content}, unsafe=True)[name] == {"a": 1}


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"cls": b"seven"}, "cls"),
        ({"cls": b"1" * 5000}, "5000 bytes"),
        ({"json": b"{"}, "json"),
        ({"json": b"[" * 100_000}, "json"),
        ({"txt": b"\xff"}, "txt"),
        ({"npy": b"\x93NUMPY"}, "npy"),
        ({"npy": npy(np.zeros(3))[:-1]}, "more bytes"),
        ({"npy": npy(np.zeros(3)).replace(b"(3,)", b"(9999999999,)")}, "npy"),
        ({"jpg": b"\xff\xd8\xffnot one"}, "decode"),
    ],
)
def test_members_that_are_not_what_they_say(members: dict[str, bytes], says: str, tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match=says) as caught:
        only(tmp_path, members)
    assert caught.value.key is not None and "x.tar" in str(caught.value.key)


def test_transforms_by_field(tmp_path: Path) -> None:
    objects = {"x.tar": tar_of(*({"jpg": jpeg(i), "seg.png": jpeg(i), "cls": b"%d" % i} for i in range(20)))}
    both = {"jpg": CROP, "seg.png": RandomResizedCrop(24, flip=0.5), "cls": lambda label: label + 100}
    data = closing(fastload.TarDataset(write(tmp_path, objects), transform=both))
    ((_, batch), *_) = read(data, workers=1, shuffle=False)
    assert batch["cls"].tolist() == list(range(100, 116))
    assert torch.equal(batch["jpg"], batch["seg.png"]), "drawn with the same seed: a mask is cut as its image"
    with pytest.raises(DecodeError, match=r"takes one image, and sample '0\d\d' has jpg"):
        read(closing(fastload.TarDataset(str(tmp_path), transform=CROP)), workers=1)
    with pytest.raises(DecodeError, match="has no 'png'"):
        read(closing(fastload.TarDataset(str(tmp_path), transform={"png": CROP})), workers=1)
    with pytest.raises(ArgumentError, match="pass features="):
        fastload.TFRecordDataset(write(tmp_path / "t", shards("tfrecord")), transform=CROP)
    with pytest.raises(ArgumentError, match="write features="):
        fastload.TFRecordDataset(str(tmp_path / "t"), {"image": str}, transform={"image": CROP})


def test_missing_members_are_an_error_of_their_sample(tmp_path: Path) -> None:
    complete = {"jpg": jpeg(0), "cls": b"0"}
    url = write(tmp_path, {"x.tar": tar_of(complete, {"jpg": jpeg(1)}, {"cls": b"2"}, complete)})
    data = closing(fastload.TarDataset(url, transform=CROP))
    stream = data.open_stream(data.plan_streams(1, seed=0, epoch=0, shuffle=False, rank=0, ranks=1)[0])
    ids = stream.take(9)
    failures = data.fill(data.new_batch(4, ordinary), list(enumerate(ids)), 0, 0)
    assert [row for row, _ in failures] == [1, 2]
    assert "others in the batch" in str(failures[0][1]) and "x.tar @" in str(failures[0][1])


def test_records_that_are_no_examples(tmp_path: Path) -> None:
    url = write(tmp_path / "shards", shards("tfrecord", index=True))
    whole = closing(fastload.TFRecordDataset(url))
    assert isinstance(whole[0], bytes)
    size = closing(fastload.TFRecordDataset(url, decode=len, transform=lambda n: -n))
    assert size[0] == -len(whole[0])
    kept = closing(fastload.TFRecordDataset(url, decode=len, cache=Cache(tmp_path / "c", "decoded")))
    assert kept[0] == len(whole[0])
    for mode in ("shrunk", "decoded"):
        with pytest.raises(ArgumentError, match="cache mode"):
            fastload.TFRecordDataset(url, cache=Cache(tmp_path / "c", mode))  # type: ignore[arg-type]


def test_tensorflows_own_files() -> None:
    folder = Path(__file__).parents[1] / "data"
    features = {"image": bytes, "label": int, "key": str, "counts": [int], "words": [bytes]}
    for end in ("", ".gz", ".zlib"):
        data = closing(fastload.TFRecordDataset(f"{folder}/tensorflow.tfrecord{end}", features))
        found = [sample for _, samples in read(data, workers=1, shuffle=False) for sample in samples]
        assert [sample["key"] for sample in found] == [f"class_{n % 3}/ä {n}" for n in range(12)]
        assert found[3]["counts"].tolist() == [-(2**63), -3, 0, 127, 128, 2**63 - 1]


# --- Columns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3],
        [True, False, True],
        [0.5, 1.5, -2.0],
        ["a", "b", "c"],
        [b"a", b"b", b"c"],
        [np.float32(1), np.float32(2), np.float32(3)],
        [np.arange(3), np.arange(3) + 1, np.arange(3) + 2],
        [torch.ones(2, 2), torch.zeros(2, 2), torch.ones(2, 2)],
        [{"a": 1, "b": [1.0, "x"]}, {"a": 2, "b": [2.0, "y"]}, {"a": 3, "b": [3.0, "z"]}],
        [[1, 2], [3, 4], [5, 6]],
    ],
)
def test_columns_are_what_default_collate_makes(values: list[Any]) -> None:
    column = new_column(values[0], 3, ordinary)
    for row, value in enumerate(values):
        put_value(column, row, value, "x")
    wanted = default_collate(values)
    assert same(column, wanted), (column, wanted)
    copy_value(column, 0, 2)
    assert same(column, default_collate([values[2], values[1], values[2]]))
    assert type(pickle.loads(pickle.dumps(column))) in (torch.Tensor, dict, list)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(
        x == y if isinstance(x, str | bytes) else same(x, y) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 1.5),
        (1, "a"),
        (1, 2**70),
        (np.arange(3), np.arange(4)),
        ({"a": 1}, {"b": 1}),
        ([1], [1, 2]),
        (1, None),
    ],
)
def test_values_that_cannot_share_a_column(first: Any, second: Any) -> None:
    column = new_column(first, 2, ordinary)
    put_value(column, 0, first, "x")
    with pytest.raises(DecodeError, match="others in the batch"):
        put_value(column, 1, second, "x")


# --- Guards have twins ------------------------------------------------------------------------------------


def test_without_the_check_a_cached_lane_would_lose_nothing_but_ask_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin of "complete shards are not read again": taken out, every shard is asked for."""
    with FaultServer(shards(kind)) as server:
        options = {"storage_options": server.options, "cache": str(tmp_path / "cache"), "transform": CROP}
        data = closing(dataset(kind, "s3://bucket", **options))
        read(data)
        data.flush_cache()
        server.requests.clear()
        read(data, epoch=1)
        assert not any(
            request.method == "GET" and request.key in server.objects for request in server.requests
        )
        monkeypatch.setattr(lanes_module.CachedLane, "complete", lambda lane: False)
        read(data, epoch=2)
        assert any(request.method == "GET" and request.key in server.objects for request in server.requests)


def test_arguments_are_checked(tmp_path: Path) -> None:
    url = write(tmp_path, shards("tar"))
    for wrong in (
        {"cycle_length": 0},
        {"block_length": "1"},
        {"shuffle_buffer": 0},
        {"shuffle_buffer": "many"},
        {"decode": 3},
        {"transform": 3},
        {"transform": {"jpg": 3}},
        {"compression": "bz2"},
    ):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            fastload.TarDataset(url, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="features"):
        fastload.TFRecordDataset(url, {"a": dict})
    assert FEATURES


# --- Through the loader, as streams ------------------------------------------------------------------------


def loader_of(data: Any, workers: int, **arguments: Any) -> Any:
    return fastload.DataLoader(data, 8, shuffle=True, num_workers=workers, seed=11, **arguments)


def numbers_of(found: list[Any], kind: str) -> list[int]:
    return [int(one) for batch in found for one in batch[LABEL[kind]].tolist()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", [None, "raw", "shrunk", "decoded"])
def test_epochs_through_the_loader(kind: str, workers: int, mode: Any, tmp_path: Path) -> None:
    """Streams, then, with a cache, random access without a request; every record once in each epoch."""
    with FaultServer(shards(kind)) as server:
        cache = None if mode is None else Cache(tmp_path / "cache", mode, short_side=20)
        data = closing(
            dataset(kind, "s3://bucket", storage_options=server.options, transform=CROP, cache=cache)
        )
        loader = loader_of(data, workers)
        orders, gets = [], []
        for _ in range(3):
            found = numbers_of(list(loader), kind)
            assert sorted(found) == list(range(TOTAL))
            orders.append(tuple(found))
            gets.append(sum(server.count(key) for key in server.objects))
        assert len(set(orders)) == 3
        if mode is None:
            assert gets[2] > gets[1] > gets[0]
        else:
            assert gets[2] == gets[0] and len(data) == TOTAL and len(loader) == -(-TOTAL // 8)


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_in_the_middle_of_a_streamed_epoch(kind: str, workers: int, tmp_path: Path) -> None:
    url = write(tmp_path / "shards", shards(kind))
    data = closing(dataset(kind, url, transform=CROP, shuffle_buffer=30))
    whole = list(loader_of(data, 2))
    loader = loader_of(data, 2)
    running = iter(loader)
    head = [next(running) for _ in range(9)]
    state = json.loads(json.dumps(loader.state_dict()))
    del running
    resumed = loader_of(data, workers)
    resumed.load_state_dict(state)
    found = head + list(resumed)
    if workers == 2:
        for one, other in zip(found, whole, strict=True):
            assert torch.equal(one[IMAGE[kind]], other[IMAGE[kind]])
            assert torch.equal(one[LABEL[kind]], other[LABEL[kind]])
    assert sorted(numbers_of(found, kind)) == list(range(TOTAL))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_records_under_on_error(kind: str, workers: int, tmp_path: Path) -> None:
    data = closing(dataset(kind, write(tmp_path / "shards", damaged(kind)), transform=CROP))
    with pytest.raises(DecodeError, match=rf"\.{kind} @ "):
        list(loader_of(data, workers))
    loader = loader_of(data, workers, on_error="skip")
    found = set(numbers_of(list(loader), kind))
    stats = loader.stats()
    assert stats["counters"]["bad.samples"] == 3 and stats["counters"]["bad.bytes"] > 3000
    assert sorted(key.split(f".{kind} @ ")[0] for key, _ in stats["bad"]) == [
        "part-000",
        "part-002",
        "part-003",
    ]
    assert set(range(6, 40)) | set(range(128, TOTAL)) <= found and 5 not in found


# --- What is said -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reader", "name", "error", "says"),
    [
        ("tar", "photos", NotFoundError, r"'cat/0\.jpg'.*\.tar.*ImageFolder.*ObjectDataset"),
        ("tfrecord", "photos", NotFoundError, r"TFRecord file .*ImageFolder.*ObjectDataset"),
        ("tfrecord", "tar/part-000.tar", ArgumentError, r"named as a tar: read it with fastload\.TarDataset"),
        ("tar", "tfrecord/part-000.tfrecord", ArgumentError, r"read it with fastload\.TFRecordDataset"),
        ("tfrecord", "tar", ArgumentError, r"only index files there, .* a tar with fastload\.TarDataset"),
        ("tar", "tfrecord", ArgumentError, r"TFRecord files with fastload\.TFRecordDataset"),
        ("tar", "odd/nothing", NotFoundError, "check the"),
    ],
)
@pytest.mark.parametrize("remote", [False, True])
def test_dataset_of_files_of_another_kind_names_its_reader(
    reader: str, name: str, error: type[Exception], says: str, remote: bool, tmp_path: Path
) -> None:
    objects = {f"{one}/{key}": body for one in KINDS for key, body in shards(one, index=True).items()}
    objects |= {"photos/cat/0.jpg": jpeg(0), "odd/file": shard("tar", range(3))[0]}
    with FaultServer(objects) as server:
        url = "s3://bucket" if remote else write(tmp_path, objects)
        with pytest.raises(error, match=says):
            dataset(reader, f"{url}/{name}", storage_options=server.options if remote else None)


@pytest.mark.parametrize("remote", [False, True])
def test_single_file_without_its_ending_is_read_for_what_it_is(
    kind: str, remote: bool, tmp_path: Path
) -> None:
    other = KINDS[1 - KINDS.index(kind)]
    objects = {"odd/file": shard(kind, range(9))[0]}
    with FaultServer(objects) as server:
        url = "s3://bucket" if remote else write(tmp_path, objects)
        options = {"storage_options": server.options if remote else None, "transform": CROP}
        data = closing(dataset(kind, f"{url}/odd/file", **options))
        assert labels(read(data, workers=1), LABEL[kind]) and len(data._shards) == 1
        wrong = closing(dataset(other, f"{url}/odd/file", **options))
        with pytest.raises(DecodeError, match=f"read it with fastload.{type(data).__name__}"):
            read(wrong, workers=1)


def test_repr_names_the_shards_and_what_is_known_of_them(kind: str, tmp_path: Path) -> None:
    url = write(tmp_path / "shards", shards(kind, index=True))
    name = type(closing(dataset(kind, url))).__name__
    assert repr(closing(dataset(kind, url, index=False))) == (
        f"{name}({url!r}, 6 shards, samples not counted yet)"
    )
    assert repr(closing(dataset(kind, f"{url}/part-00[1-3]*"))) == f"{name}({url!r}, 3 shards, 88 samples)"
    cached = closing(dataset(kind, url, cache=str(tmp_path / "cache")))
    assert repr(cached) == f"{name}({url!r}, 6 shards, 173 samples, cache={cached.cache!r})"


def failures_of(url: str, transform: Any) -> list[str]:
    data = closing(fastload.TarDataset(url, transform=transform))
    stream = data.open_stream(data.plan_streams(1, seed=0, epoch=0, shuffle=False, rank=0, ranks=1)[0])
    ids = stream.take(9)
    stream.close()
    return [str(error) for _, error in data.fill(data.new_batch(9, ordinary), list(enumerate(ids)), 0, 0)]


@pytest.mark.parametrize("transform", [CROP, {"jpg": CROP}])
def test_other_extension_in_the_middle_of_a_shard_is_said_with_the_sample(
    transform: Any, tmp_path: Path
) -> None:
    url = write(tmp_path, {"x.tar": tar_of({"jpg": jpeg(0)}, {"jpeg": jpeg(1)}, {"jpg": jpeg(2)})})
    (error,) = failures_of(url, transform)
    for part in ("x.tar @ ", "sample '001'", "jpeg", "'jpg'" if isinstance(transform, dict) else "lacks jpg"):
        assert part in error
    assert "function of the whole sample" in error


@pytest.mark.parametrize("first", [{"jpg": jpeg(0)}, {"jpg": jpeg(0), "txt": b"t"}])
def test_member_that_only_some_samples_have_is_an_error_whichever_comes_first(
    first: dict[str, bytes], tmp_path: Path
) -> None:
    second = {"jpg": jpeg(1), "txt": b"t"} if len(first) == 1 else {"jpg": jpeg(1)}
    (error,) = failures_of(write(tmp_path, {"x.tar": tar_of(first, second)}), CROP)
    assert f"sample '001' {'has' if len(first) == 1 else 'lacks'} txt, which others in the batch" in error
    with pytest.raises(DecodeError, match=r"'a', 'b'.*others in the batch have.*'a'"):
        put_value(new_column({"a": 1}, 2, ordinary), 0, {"a": 1, "b": 2}, "json")


@pytest.mark.parametrize(("mode", "warned"), [("P", True), ("L", True), ("RGB", False)])
def test_png_that_may_be_a_mask_under_a_fused_transform_is_warned_of(
    mode: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, (48, 36)).save(file, "png")
    sample = {"jpg": jpeg(0), "png": file.getvalue()}
    url = write(tmp_path, {"x.tar": tar_of(sample, sample)})
    assert failures_of(url, {"jpg": CROP, "png": CROP}) == []
    said = [text for text in caplog.messages if "If it is a mask" in text]
    assert len(said) == warned and all("decode={'png': function of its bytes}" in text for text in said)
    assert failures_of(url, {"jpg": CROP, "png": lambda image: image.size[0]}) == []
    assert len([text for text in caplog.messages if "If it is a mask" in text]) == warned
