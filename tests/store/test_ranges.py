"""Parts of objects that a table names: the requests that read them, changed objects, bad input; and lists."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from fastload import Cache, DataLoader, File, TableDataset, open_store
from fastload.errors import ArgumentError, DecodeError, NotFoundError, ObjectChangedError
from fastload.fetch.threads import ReadSettings
from tests.faultserver import Fault, FaultServer

SIZE = 4 << 20
PART = 1000
OBJECTS = {name: random.Random(name).randbytes(SIZE) for name in ("a.bin", "b.bin")}
CLIP = File("key", range=("start", "stop"), decode=bytes)
FAR = 100 << 10  # between two parts that nobody reads together


def rows_of(starts: list[int], key: str = "a.bin", size: int = PART) -> list[dict[str, Any]]:
    return [{"key": key, "start": start, "stop": start + size} for start in starts]


def opened(server: FaultServer, rows: Any, fields: Any = CLIP, **options: Any) -> TableDataset:
    return TableDataset(rows, fields, url="s3://bucket", storage_options=server.options, **options)


def check(loader: Any, rows: list[dict[str, Any]]) -> None:
    found = [sample for batch in loader for sample in batch]
    wanted = [OBJECTS[row["key"]][row["start"] : row["stop"]] for row in rows]
    assert sorted(found) == sorted(wanted)


def asked(server: FaultServer) -> list[tuple[str, int, int]]:
    """(key, start, stop) of the ranges that were asked for."""
    return [(one.key, *one.span) for one in server.requests if one.method == "GET" and one.span]


# --- requests


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_are_read_ahead_and_no_other_byte(server: FaultServer, workers: int) -> None:
    rows = rows_of(list(range(0, 30 * FAR, FAR))) + rows_of([7], "b.bin", 1)
    loader = DataLoader(opened(server, rows), 4, shuffle=True, num_workers=workers, seed=1)
    check(loader, rows)
    assert sorted(asked(server)) == sorted((row["key"], row["start"], row["stop"]) for row in rows)
    assert loader.stats()["counters"]["get.ahead"] == len(rows)
    assert all("if-match" in request.headers for request in server.requests if "range" in request.headers)


def test_neighbours_of_a_batch_come_by_one_request(server: FaultServer) -> None:
    rows = rows_of(list(range(0, 64 * PART, PART)))
    loader = DataLoader(opened(server, rows), 16)
    check(loader, rows)
    assert sorted(asked(server)) == [("a.bin", 16_000 * n, 16_000 * (n + 1)) for n in range(4)]
    counters = loader.stats()["counters"]
    assert (counters["get.requests"], counters["get.samples"]) == (4, 64)
    assert counters["get.bytes"] == counters["store.egress_bytes"] == 64 * PART


def test_windows_that_overlap_and_parts_with_small_gaps_are_read_once(server: FaultServer) -> None:
    rows = rows_of([2000, 2500, 0, 5000, 2000], size=PART) + rows_of([0, 3_000_000], "b.bin")
    check(DataLoader(opened(server, rows), len(rows)), rows)
    assert sorted(asked(server)) == [
        ("a.bin", 0, 6000),
        ("b.bin", 0, 1000),
        ("b.bin", 3_000_000, 3_001_000),
    ]


def test_neighbours_are_not_joined_to_requests_that_hold_up_the_first(server: FaultServer) -> None:
    size = 300_000
    rows = rows_of(list(range(0, 12 * size, size)), size=size)
    check(DataLoader(opened(server, rows), len(rows)), rows)
    assert all(stop - start <= 1 << 20 for _, start, stop in asked(server)) and len(asked(server)) == 4


def test_large_parts_are_read_side_by_side(server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ReadSettings(large_object=1 << 20, range_size=1 << 19)
    monkeypatch.setattr("fastload.fetch.threads.SETTINGS", settings)
    rows = rows_of([100], size=2 << 20)
    check(DataLoader(opened(server, rows), 1), rows)
    assert sorted(asked(server)) == [("a.bin", 100 + (n << 19), 100 + (n + 1 << 19)) for n in range(4)]


def test_cache_keeps_each_part_under_its_own_range(server: FaultServer, tmp_path: Path) -> None:
    rows = rows_of([0, 0, 500, 3 * FAR]) + rows_of([0], size=PART + 1)
    for requests in (2, 0):
        server.requests.clear()
        dataset = opened(server, rows, cache=tmp_path / "cache")
        check(DataLoader(dataset, len(rows), num_workers=1), rows)
        assert len(asked(server)) == requests
        assert all(map(dataset.contains, range(len(rows))))
        dataset.close()
    server.requests.clear()
    dataset = opened(server, rows_of([1]), cache=tmp_path / "cache")
    check(DataLoader(dataset, 1), rows_of([1]))
    assert asked(server) == [("a.bin", 1, 1001)]
    dataset.close()


def test_warm_reads_every_part_once(server: FaultServer, tmp_path: Path) -> None:
    rows = rows_of(list(range(0, 20 * PART, PART)))
    fields = (CLIP, File("key", range=(0, 10)))
    dataset = opened(server, rows, fields, cache=tmp_path / "cache")
    outcomes = [warmed.outcome for warmed in dataset.warm(range(20))]
    assert outcomes.count("stored") == 20 + 1 and outcomes.count("present") == 19
    assert asked(server) == [("a.bin", 0, 20 * PART)], "neighbours come by one request"
    server.requests.clear()
    check([[first for first, _ in DataLoader(dataset, None)]], rows)
    assert not asked(server)
    dataset.close()


def test_two_loaders_share_a_cache_and_read_each_part_once(server: FaultServer, tmp_path: Path) -> None:
    rows = rows_of(list(range(0, 200 * PART, PART)))
    iterators = []
    for seed in (1, 2):
        dataset = opened(server, rows, cache=tmp_path / "cache")
        iterators.append(iter(DataLoader(dataset, 20, shuffle=True, num_workers=1, seed=seed)))
    found: list[list[bytes]] = [[], []]
    for batches in zip(*iterators, strict=True):
        for samples, batch in zip(found, batches, strict=True):
            samples += batch
    for samples in found:
        assert sorted(samples) == sorted(OBJECTS["a.bin"][row["start"] : row["stop"]] for row in rows)


# --- what goes wrong


def test_object_that_changed_is_an_error_of_each_of_its_parts(server: FaultServer) -> None:
    rows = rows_of([0, 1000, 2 * FAR])
    dataset = opened(server, rows)
    server.objects["a.bin"] = OBJECTS["b.bin"]
    for index in range(3):
        with pytest.raises(ObjectChangedError) as caught:
            dataset[index]
        assert f"a.bin @ {rows[index]['start']} (key of row {index})" in str(caught.value)
    loader = DataLoader(dataset, 3)
    with pytest.raises(ObjectChangedError, match=r"a\.bin @ 0 \(key of row 0\)"):
        next(iter(loader))


def test_failed_request_of_a_group_is_retried_and_then_names_each_sample(server: FaultServer) -> None:
    rows = rows_of([0, 1000, 2000])
    server.script("a.bin", Fault(status=503), None)
    check(DataLoader(opened(server, rows), 3), rows)
    dataset = opened(server, [*rows, *rows_of([0], "b.bin")])
    del server.objects["a.bin"]
    loader = DataLoader(dataset, 4, on_error="repeat")
    (batch,) = loader
    assert batch == [OBJECTS["b.bin"][:1000]] * 4
    with pytest.raises(NotFoundError, match=r"a\.bin @ 1000 \(key of row 1\)"):
        dataset[1]


def test_decode_that_fails_for_one_part_of_a_group_fails_that_sample_only(
    server: FaultServer, tmp_path: Path
) -> None:
    bad = OBJECTS["a.bin"][1000:2000]

    def decode(data: bytes) -> int:
        if data == bad:
            raise ValueError("bad part")
        return len(data)

    file = File("key", range=("start", "stop"), decode=decode)
    for cache in (None, Cache(tmp_path / "cache", "decoded")):
        dataset = opened(server, rows_of([0, 1000, 2000]), file, cache=cache)
        with pytest.raises(ValueError, match="bad part"):
            list(DataLoader(dataset, 3))
        (batch,) = DataLoader(dataset, 3, on_error="repeat")
        assert batch.tolist() == [1000] * 3
        dataset.close()


def test_cancelled_samples_of_a_group_let_the_others_come(server: FaultServer) -> None:
    dataset = opened(server, rows_of(list(range(0, 40 * PART, PART))))
    dataset.prefetch(range(40))
    dataset._cancel(range(0, 40, 2))
    assert [dataset[index] for index in range(1, 40, 2)] == [
        OBJECTS["a.bin"][PART * n : PART * (n + 1)] for n in range(1, 40, 2)
    ]
    assert dataset._outstanding() == 0


BAD = [
    ({"stop": SIZE + 1}, r"row 2 of the table: .* of File\('key'\) is .* of 'a.bin', which has 4,194,304"),
    ({"stop": 2000}, r"row 2 of the table: .* \[2,000, 2,000\) of 'a.bin': 0 <= start < stop"),
    ({"start": -1}, r"row 2 of the table: .* \[-1, 3,000\)"),
    ({"start": None}, "column 'start' of the table has no number in row 2"),
    ({"start": float("nan")}, "column 'start' of the table has no number in row 2"),
    ({"start": 1.5}, "column 'start' of the table is double, 1.5 in row 2"),
    ({"key": None}, "column 'key' of the table has no key in row 2"),
    ({"key": "gone.bin"}, "1 of 3 keys have no object: 'gone.bin'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_range_is_named_with_its_row_and_object(
    server: FaultServer, change: dict[str, Any], message: str
) -> None:
    rows = rows_of([0, 1000, 2000, 3000])
    rows[2] |= change
    rows[3]["key"] = "b.bin"
    with pytest.raises((ArgumentError, NotFoundError), match=message):
        opened(server, rows)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        (5, r"must be \(start, stop\)"),
        ((1,), r"must be \(start, stop\)"),
        ((2, 2), "start < stop"),
        ((-1, "stop"), r"whole number >= 0, found -1"),
        ((0.5, "stop"), "whole number >= 0, found 0.5"),
        ((None, 3), "whole number >= 0, found None"),
    ],
)
def test_arguments_that_are_no_range_are_refused(edges: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        File("key", range=edges)


NO_KEYS = pa.table({"keys": pa.array([[], []], pa.list_(pa.string()))})
EDGES = {"start": [0, 1000], "stop": [2000, 3000]}


@pytest.mark.parametrize(
    ("rows", "file", "options", "message"),
    [
        (rows_of([0]), CLIP, {"on_change": "refresh"}, "make the index again when objects change"),
        (rows_of([0]), File("key", range=("start", "end")), {}, "has 'key', 'start', 'stop'"),
        (NO_KEYS, File("keys"), {}, r"File\('keys'\) names no object: the list of each row is empty"),
        ([{"keys": [["a.bin"]]}], File("keys"), {}, "has lists of lists"),
        *(
            (pa.table({"key": ["a.bin"] * 2, **EDGES, "start": column}), CLIP, {}, message)
            for column, message in (
                (pa.array([0.0, 1000.0]), "column 'start' of the table is double, 0.0 in row 0: .*astype"),
                (pa.array(["0", "1000"]), "column 'start' of the table is large_string, '0' in row 0"),
                (pa.array([2**63, 2**63], pa.uint64()), "0 <= start < stop"),
            )
        ),
    ],
)
def test_table_that_names_no_ranges_is_refused(
    server: FaultServer, rows: Any, file: File, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        opened(server, rows, file, **options)


# --- lists


def test_column_of_lists_makes_its_field_a_list(server: FaultServer) -> None:
    table = pa.table({"key": ["a.bin"] * 2, "start": [[0], [1]], "stop": [2000, 3000]})
    assert opened(server, table)[1] == [OBJECTS["a.bin"][1:3000]]


def test_lists_of_files_and_of_ranges_have_the_order_of_the_table(server: FaultServer) -> None:
    rows = [
        {"keys": ["a.bin", "b.bin"], "starts": [5, 0], "stops": [9, 3], "key": "a.bin", "n": 2},
        {"keys": ["b.bin"], "starts": [1], "stops": [2], "key": "b.bin", "n": 1},
        {"keys": [], "starts": [], "stops": [], "key": "a.bin", "n": 0},
    ]
    fields = {
        "parts": File("keys", range=("starts", "stops")),
        "frames": File("key", range=("starts", "stops")),
        "heads": File("keys", range=(0, 2)),
        "n": "n",
    }
    dataset = opened(server, rows, fields)
    for index, row in enumerate(rows):
        edges = list(zip(row["starts"], row["stops"], strict=True))
        assert dataset[index] == {
            "parts": [OBJECTS[key][a:b] for key, (a, b) in zip(row["keys"], edges, strict=True)],
            "frames": [OBJECTS[row["key"]][a:b] for a, b in edges],
            "heads": [OBJECTS[key][:2] for key in row["keys"]],
            "n": row["n"],
        }
    assert [dataset.key(index) for index in range(3)] == ["a.bin @ 5", "b.bin @ 1", "row 2"]
    assert dataset.find(["a.bin @ 5", "b.bin @ 1", "row 2", "row 1", "a.bin", "b.bin @ 0"]) == {
        "a.bin @ 5": [0],
        "b.bin @ 1": [1],
        "row 2": [2],
    }
    loader = DataLoader(dataset, 3, collate_fn=lambda samples: samples, num_workers=1)
    assert [len(sample["parts"]) for batch in loader for sample in batch] == [2, 1, 0]


def test_lists_of_one_length_collate_as_in_torch_and_others_are_an_error_of_collation(
    server: FaultServer,
) -> None:
    def decode(data: bytes) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(data, np.uint8).copy())

    rows = [{"key": "a.bin", "starts": [n, n + 10], "stops": [n + 2, n + 12]} for n in range(4)]
    file = File("key", range=("starts", "stops"), decode=decode)
    (batch,) = DataLoader(opened(server, rows, file), 4)
    assert [column.shape for column in batch] == [(4, 2), (4, 2)]
    rows[2] |= {"starts": [1], "stops": [3]}
    with pytest.raises(RuntimeError, match="equal size") as caught:
        list(DataLoader(opened(server, rows, file), 4, num_workers=1))
    assert "sample 0" in str(caught.value) and "sample 2" in str(caught.value)
    assert "pass collate_fn" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": None}, "column 'keys' of the table has no list in row 1"),
        ({"keys": ["a.bin", None]}, "column 'keys' of the table has no key in row 1, place 1 of its list"),
        ({"keys": ["a.bin", ""]}, "column 'keys' of the table has no key in row 1, place 1 of its list"),
        ({"keys": ["a.bin"]}, "row 1 of the table has 1 values in 'keys' and 2 in 'starts'"),
        ({"starts": [0, None]}, "column 'starts' of the table has no number in row 1, place 1 of its list"),
        ({"starts": [0, SIZE + 5]}, r"row 1 of the table: .* of 'b.bin', which has"),
        ({"starts": [0, -1]}, r"row 1, place 1 of its list of the table: .* \[-1, "),
    ],
)
def test_bad_list_is_named_with_its_row_and_place(
    server: FaultServer, change: dict[str, Any], message: str
) -> None:
    rows = [{"keys": ["a.bin", "b.bin"], "starts": [0, 1], "stops": [9, SIZE]} for _ in range(3)]
    rows[1] |= change
    if change.get("starts") == [0, SIZE + 5]:
        rows[1]["stops"] = [9, SIZE + 9]
    with pytest.raises(ArgumentError, match=message):
        opened(server, rows, File("keys", range=("starts", "stops")))


def test_damage_in_a_list_names_the_object(server: FaultServer) -> None:
    server.objects["x.jpg"] = b"\xff\xd8\xff\xe0 damaged"
    dataset = opened(server, [{"keys": ["a.bin", "x.jpg"]}], File("keys"))
    with pytest.raises(DecodeError) as caught:
        dataset[0]
    assert caught.value.key == "x.jpg (keys[1] of row 0)"


def test_ranges_that_wait_for_the_first_answer_are_then_asked_side_by_side() -> None:
    """One answer tells whether a server keeps ranges. Those who waited for it took turns after it."""
    with FaultServer({"a.bin": bytes(range(80))}) as server:
        server.script("a.bin", Fault(delay=0.1), repeat=True)
        store = open_store("s3://bucket", **server.options)
        with ThreadPoolExecutor(8) as pool:
            pieces = pool.map(lambda n: bytes(store.read_range("a.bin", 10 * n, 10 * n + 10)), range(8))
            assert b"".join(pieces) == bytes(range(80))
        assert server.most_at_once == 7
