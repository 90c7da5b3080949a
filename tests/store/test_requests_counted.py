"""The requests in `stats()` are those that the server has seen, over the trainer and its workers."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload import DataLoader, ObjectDataset, TarDataset
from fastload.datasets.wrappers import view_of
from fastload.metrics.exporters import COUNTERS
from fastload.store import open_store
from tests.commands import answer, store_words
from tests.faultserver import LIST, Fault, FaultServer

OBJECTS = {f"{number:03d}.bin": bytes([number]) * 1000 for number in range(40)}
NAMES = [name for name in COUNTERS if name.startswith("store.")]


def first_byte(body: Any) -> int:
    return int(bytes(body)[0])


def dataset_of(server: FaultServer, cache: Path | None = None, **limits: Any) -> ObjectDataset:
    options = {**server.options, **limits}
    return ObjectDataset("s3://bucket", decode=first_byte, cache=cache, storage_options=options)


def seen(server: FaultServer) -> dict[str, float]:
    """What the server was asked for."""
    requests = server.requests
    found = {
        "store.gets": sum(one.method == "GET" and one.key != LIST for one in requests),
        "store.heads": sum(one.method == "HEAD" for one in requests),
        "store.lists": sum(one.key == LIST for one in requests),
    }
    return {name: count for name, count in found.items() if count}


def counted(loader: DataLoader[Any]) -> dict[str, float]:
    return {name: value for name, value in loader.stats()["counters"].items() if name in NAMES and value}


@pytest.mark.parametrize("workers", [0, 2])
def test_all_requests_of_trainer_and_workers_are_counted(server: FaultServer, workers: int) -> None:
    dataset = dataset_of(server)
    assert dataset[7] == 7
    server.script("003.bin", Fault(status=503), None)
    loader = DataLoader(dataset, 4, num_workers=workers)
    assert sum(len(batch) for batch in loader) == 40
    found = counted(loader)
    assert found.pop("store.egress_bytes") == 42_000, "one was read twice, and one repeated"
    assert found == seen(server) == {"store.gets": 42, "store.lists": 2}
    assert loader.stats()["limits"] == []


@pytest.mark.parametrize("context", ["forkserver", pytest.param("spawn", marks=pytest.mark.stress)])
def test_started_workers_count_with_the_trainer(server: FaultServer, context: str) -> None:
    loader = DataLoader(
        dataset_of(server, max_gets=100, max_egress="1MB"), 8, num_workers=2, multiprocessing_context=context
    )
    assert sum(len(batch) for batch in loader) == 40
    assert counted(loader) == {**seen(server), "store.egress_bytes": 40_000}
    assert loader.stats()["limits"] == [
        {"max_gets": 100, "gets": 40, "max_egress": 1_000_000, "egress": 40_000}
    ]


def test_listing_of_several_pages_counts_each(server: FaultServer) -> None:
    server.objects = {f"{number:04d}.bin": b"x" for number in range(2500)}
    dataset = dataset_of(server)
    assert counted(DataLoader(dataset)) == seen(server) == {"store.lists": 4}


def test_heads_and_reads_of_unknown_size_count(server: FaultServer) -> None:
    store = open_store("s3://bucket", **server.options)
    assert store.folders() == set() and store.head("001.bin").size == 1000
    store.read("002.bin"), store.read_range("003.bin", 10, 20)
    assert store.budget is not None
    assert store.budget.spent()._asdict() == {"gets": 2, "heads": 1, "lists": 1, "egress": 1010}
    assert seen(server) == {"store.gets": 2, "store.heads": 1, "store.lists": 1}


def test_directory_bills_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"a")
    loader = DataLoader(ObjectDataset(tmp_path, decode=first_byte))
    assert len(list(loader)) == 1 and not counted(loader)


def test_datasets_of_a_loader_are_summed_and_each_counts_once(server: FaultServer) -> None:
    first, second = (dataset_of(server, max_gets=most) for most in (100, 200))
    loader = DataLoader(fastload.Mixture([first, second], [1, 1], num_samples=20), 4, num_workers=1)
    assert sum(len(batch) for batch in loader) > 0
    found = counted(loader)
    found.pop("store.egress_bytes")
    assert found == seen(server)
    assert sorted(one["max_gets"] for one in loader.stats()["limits"]) == [100, 200]


def test_copy_for_another_machine_goes_on_from_the_same_numbers(server: FaultServer) -> None:
    dataset = dataset_of(server)
    assert dataset[1] == 1
    other = pickle.loads(pickle.dumps(dataset))
    assert other[2] == 2 and view_of(dataset).budget() is not None
    assert (view_of(dataset).budget().spent().gets, view_of(other).budget().spent().gets) == (1, 2)


OWN_PRICES = 'currency = "EUR"\nget = 1000\nlist = 1\negress = 1000\n'


def tar_of(shard: int, samples: int = 10) -> bytes:
    """A shard whose samples have one member "bin", a byte that is their number."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number in range(shard * samples, (shard + 1) * samples):
            info = tarfile.TarInfo(f"{number:04d}.bin")
            info.size = 100
            tar.addfile(info, io.BytesIO(bytes([number]) * 100))
    return file.getvalue()


def warmed(server: FaultServer, url: str, cache: Path, *more: str) -> dict[str, Any]:
    prices = cache.parent / "prices.toml"
    prices.write_text(OWN_PRICES)
    words = ["--cache", cache, "--mode", "raw", "--num-workers", 1, "--prices", prices]
    return answer("warm", url, *words, *store_words(server.options), *more)


def test_warm_quotes_what_is_left_before_it_reads(server: FaultServer, tmp_path: Path) -> None:
    dataset = dataset_of(server, tmp_path / "cache")
    assert sum(one.outcome == "stored" for one in dataset.warm(range(15))) == 15, "an interrupted run"
    dataset.close()
    server.requests.clear()
    document = warmed(server, "s3://bucket", tmp_path / "cache", "--from", "objects")
    assert seen(server)["store.gets"] == 25 == document["requests"]
    assert document["quote"] == {
        "objects": 25,
        "requests": 25,
        "read_bytes": 25_000,
        "cost": {"requests": 25.0, "egress": pytest.approx(0.025)},
    }
    assert warmed(server, "s3://bucket", tmp_path / "cache", "--from", "objects")["quote"]["requests"] == 0


def test_bill_of_compressed_shards_is_what_the_store_sends(server: FaultServer, tmp_path: Path) -> None:
    server.objects = {f"{number}.tar.gz": gzip.compress(tar_of(number)) for number in range(3)}
    whole = sum(map(len, server.objects.values()))
    document = warmed(server, "s3://bucket/*.tar.gz", tmp_path / "cache")
    assert (document["stored"], document["requests"], document["read_bytes"]) == (30, 3, whole)
    assert document["cost"] == {"requests": 3.0, "egress": pytest.approx(whole / 1e6)}


def test_warm_quotes_shards_that_lack_records(server: FaultServer, tmp_path: Path) -> None:
    server.objects = {f"{number}.tar": tar_of(number) for number in range(3)}
    whole = sum(map(len, server.objects.values()))
    first = warmed(server, "s3://bucket/*.tar", tmp_path / "cache")
    assert first["quote"]["objects"] == 3 and first["quote"]["read_bytes"] == whole
    assert warmed(server, "s3://bucket/*.tar", tmp_path / "cache")["quote"]["objects"] == 0


def test_quote_of_shards_that_the_cache_has_in_part_is_what_they_take(
    server: FaultServer, tmp_path: Path
) -> None:
    """Every other record is missing: a request for each."""
    server.objects = {f"{number}.tar": tar_of(number) for number in range(3)}
    answer("index", "s3://bucket/*.tar", *store_words(server.options))
    dataset = TarDataset("s3://bucket/*.tar", cache=tmp_path / "cache", storage_options=server.options)
    assert sum(one.outcome == "stored" for one in dataset.warm(range(0, 30, 2))) == 15
    left = dataset._left_to_warm_shards(range(3))
    server.requests.clear()
    assert sum(one.outcome == "stored" for one in dataset._warm_shards(range(3))) == 15
    assert (left.objects, left.requests) == (3, 15) and seen(server) == {"store.gets": 15}
    assert left.read_bytes >= 15 * 1024
    dataset.close()
