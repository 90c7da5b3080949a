"""TFRecordDataset and TarDataset as streams: every record once and unchanged; resume; faults of stores."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload.datasets.views import StreamDataset
from fastload.errors import ArgumentError, ObjectChangedError, StoreError
from fastload.images.rng import sample_seed
from fastload.store import failures
from tests.faultserver import Fault, FaultServer
from tests.sharddata import (
    ALL_KINDS,
    CROP,
    IMAGE,
    LABEL,
    TOTAL,
    closing,
    dataset,
    jpeg,
    labels,
    opened,
    place_of,
    read,
    shards,
    write,
)
from tests.shortform import stress

pytestmark = pytest.mark.usefixtures("close_all")


# --- Exactly once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("end", "shuffle"), [("", True), (".gz", False)])
def test_streams_give_every_record_once(
    kind: str, end: str, shuffle: bool, tmp_path: Path, small_pieces: None
) -> None:
    url = write(tmp_path, shards(kind, end=end))
    data = opened(kind, f"{url}/*", cycle_length=3, shuffle_buffer=50)
    assert isinstance(data._streams(), StreamDataset) and data._streams().must_stream()
    orders = []
    for workers, ranks in ((3, 2), (9, 1)):
        found = read(data, workers=workers, ranks=ranks, shuffle=shuffle)
        numbers = labels(found, LABEL[kind])
        assert sorted(numbers) == list(range(TOTAL))
        orders.append(numbers)
        again = labels(read(data, workers=workers, ranks=ranks, shuffle=shuffle), LABEL[kind])
        assert again == numbers
        other = labels(read(data, workers=workers, ranks=ranks, shuffle=shuffle, epoch=1), LABEL[kind])
        assert (other == numbers) != shuffle and sorted(other) == sorted(numbers)
    assert data.counters["get.samples"] == 6 * TOTAL


def test_contents_are_those_of_the_files(kind: str, tmp_path: Path, small_pieces: None) -> None:
    """Bytes as they were written, and pixels as the transform makes them of these."""
    url = write(tmp_path, shards(kind))
    decode = (lambda members: members) if kind == "tar" else None
    raw = closing(dataset(kind, url, decode=decode))
    for _, samples in read(raw):
        for sample in samples:
            number = int(sample[LABEL[kind]])
            assert sample[IMAGE[kind]] == jpeg(number)
    fused = opened(kind, url)
    seen = 0
    for ids, batch in read(fused):
        for row, one in enumerate(ids):
            number = int(batch[LABEL[kind]][row])
            assert (one >> 32, one & 0xFFFF) == place_of(number)
            wanted = torch.empty((1, *CROP.sample_shape), dtype=torch.uint8)
            assert not CROP.fill(wanted.numpy(), [jpeg(number)], [sample_seed(5, 0, one)])
            assert torch.equal(batch[IMAGE[kind]][row], wanted[0])
            seen += 1
    assert seen == TOTAL


# --- Resume ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("end", "cached"), [("", False), ("", True), (".gz", False)])
def test_a_state_goes_on_with_the_very_next_record(
    kind: str, end: str, cached: bool, tmp_path: Path, small_pieces: None
) -> None:
    url = write(tmp_path / "shards", shards(kind, end=end))
    arguments: dict[str, Any] = {"cycle_length": 3, "shuffle_buffer": 40}
    if cached:
        arguments["cache"] = tmp_path / "cache"
    data = opened(kind, f"{url}/*", **arguments)
    (start,) = data._streams().plan_streams(1, seed=7, epoch=2, shuffle=True, rank=0, ranks=1)
    stream = data._streams().open_stream(start)
    states, ids = [(0, stream.state())], []
    draw = random.Random(end)
    while taken := stream.take(draw.randrange(1, 12)):
        data._cancel(taken)
        ids += taken
        states.append((len(ids), json.loads(json.dumps(stream.state()))))
        assert len(json.dumps(states[-1])) < 2000
    stream.close()
    assert len(ids) == TOTAL == len(set(ids))
    if not cached:
        with pytest.raises(TypeError, match="not available"):  # `cancel` has let go of it
            data[ids[-1]]
    other = opened(kind, f"{url}/*", **arguments)
    for given, state in [*draw.sample(states, 6), states[0], states[-1]]:
        resumed = other._streams().open_stream(state)
        left = []
        while taken := resumed.take(9):
            other._cancel(taken)
            left += taken
        resumed.close()
        assert left == ids[given:]
    _, state = states[3]
    with pytest.raises(ArgumentError, match="other shards"):
        opened(kind, f"{url}/part-00[0-3]*", **arguments)._streams().open_stream(state)
    for given in (-1, 1000):
        stream = other._streams().open_stream(state | {"at": state["at"] | {"given": given}})
        with pytest.raises(
            ArgumentError, match=f"{given} records into a block that has 40 here.*shuffle_buffer"
        ):
            stream.take(1)
        stream.close()


# --- Stores ------------------------------------------------------------------------------------------------


FAULTS = {
    "503": Fault(status=503, code="SlowDown"),
    "cut": Fault(cut_after=100),
    "reset": Fault(reset_after=100),
    "short 200": Fault(body=b"short"),
    "XML": Fault(body=b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>"),
}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_faults_that_pass_are_retried_unseen(kind: str, small_pieces: None) -> None:
    with FaultServer(shards(kind)) as server:
        data = opened(kind, server)
        faults = itertools.cycle(FAULTS.values())
        for number in (0, 2, 3):
            server.script(f"part-00{number}.{kind}", None, next(faults), None, next(faults))
        assert sorted(labels(read(data), LABEL[kind])) == list(range(TOTAL))
        assert data.counters["get.retries"] >= 6 > len(FAULTS)


@pytest.mark.parametrize(
    ("kind", "honours_if_match"),
    [
        *(*((kind, True) for kind in ALL_KINDS), ("tar", False)),
        *stress(("tfrecord", False), ("parquet", False)),
    ],
)
def test_a_shard_that_changes_while_it_is_read_is_an_error(
    kind: str, honours_if_match: bool, small_pieces: None
) -> None:
    with FaultServer(shards(kind)) as server:
        server.honours_if_match = honours_if_match
        data = opened(kind, server)
        server.script(f"part-002.{kind}", None, None, Fault(etag="0" * 32), repeat=True)
        with pytest.raises(ObjectChangedError, match="part-002"):
            read(data)
    assert "if-match" in {name for request in server.requests for name in request.headers}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_store_that_is_down_is_an_error_with_the_shard(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultServer(shards(kind)) as server:
        data = opened(kind, server)
        monkeypatch.setattr(failures, "READ_POLICY", failures.RetryPolicy(budget=0.5, first=0.05))
        server.script(f"part-003.{kind}", Fault(status=500), repeat=True)
        with pytest.raises(StoreError, match="part-003"):
            read(data)


def test_a_complete_shard_is_asked_for_once(kind: str, small_pieces: None) -> None:
    """Each range once; together they are the shard."""
    with FaultServer(shards(kind)) as server:
        read(opened(kind, server))
        for key, body in server.objects.items():
            spans = sorted(server.spans(key))
            edges = [0] + [stop for _, stop in spans]
            assert [first for first, _ in spans] == edges[:-1]
            # Padding behind a tar's end mark is not read.
            assert edges[-1] == len(body) or (kind == "tar" and not any(body[edges[-1] - 1024 :]))
