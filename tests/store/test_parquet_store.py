"""ParquetDataset over a store that counts and fails, and through the loader with workers and a cache."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Subset

import fastload
from fastload import ParquetDataset
from tests.faultserver import LIST, Fault, FaultServer
from tests.sharddata import (
    CROP,
    TOTAL,
    at_random,
    batches,
    closing,
    labels,
    parquet,
    read,
    shards,
    table,
    write,
)

pytestmark = pytest.mark.usefixtures("close_all")

FIELDS = ("image", "label")


def bucket(server: FaultServer, *arguments: Any, **options: Any) -> ParquetDataset:
    found: ParquetDataset = closing(
        ParquetDataset("s3://bucket", *arguments, storage_options=server.options, **options)
    )
    return found


def numbers(found: Any) -> list[int]:
    return [int(number) for _, column in found for number in column]


def test_footers_and_filter_columns_are_read_once_for_a_cache(tmp_path: Path) -> None:
    with FaultServer(shards("parquet")) as server:
        arguments = {"filters": [("label", ">=", 100)], "cache": tmp_path / "cache"}
        first = bucket(server, FIELDS, **arguments)
        # A footer of each file; and a column where the statistics do not rule it out.
        assert [len(server.spans(f"part-{at:03d}.parquet")) for at in range(6)] == [1, 1, 1, 4, 2, 5]
        read(first)
        since = len(server.requests)
        again = bucket(server, FIELDS, **arguments)
        assert len(again) == len(first) == TOTAL - 100
        assert {request.key for request in server.requests[since:]} == {LIST}
        assert again[0][1] == 100


def test_row_groups_are_read_in_ranges_side_by_side(small_pieces: None) -> None:
    with FaultServer({"a.parquet": parquet(table(range(64)), 32)}) as server:
        data = bucket(server, transform=CROP)
        server.script("a.parquet", Fault(delay=0.02), repeat=True)
        since = len(server.requests)
        assert sorted(labels(read(data, workers=1), "label")) == list(range(64))
        asked = server.spans("a.parquet", since)
        assert len(asked) == len(set(asked)) > 6 and server.most_at_once > 3
        assert all(stop - start <= 3000 for start, stop in asked[1:])


def test_many_readers_share_a_single_file(tmp_path: Path) -> None:
    """Hugging Face's streaming stops the workers for which there is no file."""
    url = write(tmp_path, {"a.parquet": parquet(table(range(100)), 10)})
    data = closing(ParquetDataset(url, FIELDS, transform=CROP))
    found = []
    for rank in range(2):
        for state in data._streams().plan_streams(8, seed=3, epoch=0, shuffle=True, rank=rank, ranks=2):
            stream = data._streams().open_stream(state)
            found.append([int(n) for _, batch in batches(data, stream) for n in batch["label"]])
            stream.close()
    assert {len(numbers) for numbers in found} == {6, 7}
    assert sorted(itertools.chain(*found)) == list(range(100))


def test_subset_fills_the_cache_with_whole_row_groups(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultServer({"a.parquet": parquet(table(range(64)), 16)}) as server:
        data = bucket(server, FIELDS, transform=CROP, cache=tmp_path / "cache")
        since = len(server.requests)
        loader = fastload.DataLoader(Subset(data, [3, 40, 20, 5, 60, 41, 21]), 1)
        assert numbers(loader) == [3, 40, 20, 5, 60, 41, 21]
        data._flush_cache()
        assert all(data.contains(index) for index in range(64))
        assert numbers(loader) == [3, 40, 20, 5, 60, 41, 21]
        assert len(server.spans("a.parquet", since)) == 1 + 4  # the footer, and the row groups
    assert not caplog.messages


def test_rows_at_random_without_a_cache_bring_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.shards.row_groups._RECENT", 0)  # as if row groups were large
    data = closing(ParquetDataset(write(tmp_path, {"a.parquet": parquet(table(range(40)), 10)}), "label"))
    with caplog.at_level(logging.WARNING, "fastload"):
        assert [data[index] for index in (1, 2, 11, 12)] == [1, 2, 11, 12] and not caplog.messages
        assert [data[index] for index in (3, 13, 4)] == [3, 13, 4]
    assert len(caplog.messages) == 1 and "row group 0 is read again" in caplog.text


def test_row_lost_by_the_cache_is_read_again(tmp_path: Path) -> None:
    with FaultServer(shards("parquet")) as server:
        data = bucket(server, FIELDS, transform=CROP, cache=tmp_path / "cache")
        read(data)
        data._flush_cache()
        (tmp_path / "cache").rename(tmp_path / "gone")
        other = bucket(server, FIELDS, transform=CROP, cache=tmp_path / "cache")
        other._reads_at_random = True
        assert at_random(other)["label"].tolist() == list(range(TOTAL))


def test_cache_is_filled_before_training(tmp_path: Path) -> None:
    """By row groups: one of which the cache has all rows is not read again."""
    with FaultServer({"a.parquet": parquet(table(range(64)), 16)}) as server:
        data = bucket(server, FIELDS, transform=CROP, cache=tmp_path / "cache")
        assert data[20][1] == 20
        data._flush_cache()
        since = len(server.requests)
        outcomes = Counter(warmed.outcome for warmed in data._warm_shards([0]))
        assert outcomes == {"present": 16, "stored": 48}
        assert len(server.spans("a.parquet", since)) == 3
        assert not data._streams().must_stream()
        assert at_random(data)["label"].tolist() == list(range(64))
