"""Counters, rates and the bottleneck, with real loaders, stores, disks and workers."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from fastload import Cache, DataLoader, ObjectDataset, RandomResizedCrop, cached
from fastload.images.crop import Crop
from fastload.metrics.bottleneck import explain_bottleneck, find_bottleneck
from fastload.metrics.counters import Counters, rates
from fastload.metrics.machine import Cores, usable_cores
from tests.faultserver import Fault, FaultServer
from tests.loaderdata import Numbers, Stream
from tests.photos import pillow_jpeg, scene

pytestmark = pytest.mark.usefixtures("no_leaks")


def burn(seconds: float) -> None:
    """Keep a core busy."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        hashlib.sha256(b"x" * 4096).digest()


class Work(Dataset[Any]):
    """Samples that take CPU."""

    def __init__(self, length: int, seconds: float) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        burn(self.seconds)
        return index


class WorkStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        for index in range(24):
            burn(0.01)
            yield index


class SlowSampler(torch.utils.data.Sampler[int]):
    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[int]:
        for index in range(64):
            burn(0.02)  # all of them for longer than a worker takes to start
            yield index


def epoch(loader: DataLoader[Any], step: float = 0.0) -> dict[str, Any]:
    """Run one epoch whose steps take `step` seconds; returns the stats after it."""
    for _ in loader:
        time.sleep(step)
    return loader.stats()


# --- the bottleneck


@pytest.mark.parametrize("num_workers", [0, 2])
def test_slow_decoding(num_workers: int) -> None:
    stats = epoch(DataLoader(Work(48, 0.01), 2, num_workers=num_workers))
    assert stats["limit"] == "decode"
    assert "decode" in stats["verdict"]
    assert ("more workers" in stats["verdict"]) == (stats["rates"]["node.idle_cores"] >= 0.75)


def test_slow_decoding_of_an_iterable_dataset() -> None:
    assert epoch(DataLoader(WorkStream(), 2, num_workers=1))["limit"] == "decode"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_slow_consumer(num_workers: int) -> None:
    loader = DataLoader(Work(32, 0.0), 2, num_workers=num_workers)
    for step in (0.1, 0.3, 1.0):  # seconds; on a loaded machine a batch may take longer than a short one
        stats = epoch(loader, step=step)
        if stats["limit"] == "consumer":
            break
    assert stats["limit"] == "consumer" and "the training step is the bottleneck" in stats["verdict"]
    assert stats["rates"]["consumer.share"] > 0.5
    if num_workers:
        counters = stats["counters"]  # the workers waited with finished batches, which is most of their time
        assert 0 < counters["slot.seconds"] <= counters["idle.seconds"]


def test_slow_sampler() -> None:
    stats = epoch(DataLoader(Work(64, 0.0), 2, sampler=SlowSampler(), num_workers=1))
    assert stats["limit"] == "sampler" and "sampler" in stats["verdict"]


@pytest.mark.parametrize("fused", [True, False])
def test_slow_store(fused: bool) -> None:
    """Reading inside `__getitem__` does not count as decoding."""
    photo = pillow_jpeg(scene(64, 64))
    objects = {f"{i:03d}.jpg": photo for i in range(32)}
    with FaultServer(objects) as server:
        for key in objects:
            server.script(key, Fault(delay=0.1), repeat=True)
        options = {"endpoint_url": server.endpoint_url, "key": "k", "secret": "s", "max_requests": 2}
        transform = RandomResizedCrop(16) if fused else None
        dataset = ObjectDataset("s3://bucket", transform=transform, storage_options=options)
        loader = DataLoader(dataset, 2, num_workers=2, collate_fn=None if fused else list)
        stats = epoch(loader)
    assert stats["limit"] == "get", stats
    assert "give the dataset a cache" in stats["verdict"] and "connections" in stats["verdict"]
    assert stats["counters"]["get.samples"] == stats["counters"]["decode.samples"] == 32


def slow_disk(_: int) -> None:
    """In a worker: every read of a record takes long, by Python and by the kernel."""
    real_read, real_make = os.preadv, Crop._make_rows

    def preadv(*args: Any) -> int:
        time.sleep(0.01)
        return real_read(*args)

    def make_rows(*args: Any, **options: Any) -> tuple[list[int], float, float]:
        left, reading, decoding = real_make(*args, **options)
        time.sleep(0.02)
        return left, reading + 0.02, decoding

    os.preadv = preadv
    Crop._make_rows = make_rows  # type: ignore[method-assign]


@pytest.mark.parametrize("through", ["ObjectDataset", "cached"])
def test_slow_disk(tmp_path: Path, through: str) -> None:
    (tmp_path / "photos").mkdir()
    for i in range(32):
        (tmp_path / "photos" / f"{i}.jpg").write_bytes(pillow_jpeg(scene(64, 64)))
    cache = Cache(tmp_path / "cache")
    dataset: Any = ObjectDataset(str(tmp_path / "photos"), transform=RandomResizedCrop(16), cache=cache)
    if through == "cached":
        dataset = cached(Work(32, 0.0), cache)
    loader = DataLoader(dataset, 2, num_workers=2, worker_init_fn=slow_disk)
    epoch(loader)
    stats = epoch(loader)
    assert stats["limit"] == "cache" and "SSD" in stats["verdict"], stats
    assert stats["rates"]["cache.hit_share"] == 1


def test_more_workers_need_idle_cores() -> None:
    counters = {"wait.batches": 9.0, "wait.seconds": 5.0, "decode.seconds": 9.0, "decode.samples": 90}
    node = {"workers": 2, "node.cores": 8.0}
    assert "more workers would help (num_workers=2 now, 5.9 of 8" in explain_bottleneck(
        counters, node | {"node.idle_cores": 5.9}
    )
    busy = explain_bottleneck(counters, node | {"node.idle_cores": 0.2})
    assert "all 8 cores are busy" in busy and "more workers" not in busy


def test_advice_for_decoding_names_what_changes_no_pixel_first() -> None:
    counters = {"wait.batches": 9.0, "wait.seconds": 5.0, "decode.seconds": 9.0, "decode.samples": 90}
    words = explain_bottleneck(counters)
    assert "(fastload.fuse) in place of your own" in words, "it may be fused already"
    assert words.index("fuse") < words.index("'dct'") < words.index("'shrunk'") < words.index("lossy")
    assert "GPU" not in words, "decoding there has not run on a GPU"


def test_advice_for_collating_does_not_suppose_a_collate_fn() -> None:
    counters = {"wait.batches": 9.0, "wait.seconds": 5.0, "collate.seconds": 9.0}
    assert "a cheaper collate_fn (if it is your own) or smaller samples" in explain_bottleneck(counters)


def test_copy_and_device() -> None:
    base = {"wait.batches": 9.0, "wait.seconds": 0.01, "consumer.seconds": 5.0, "decode.seconds": 1.0}
    assert find_bottleneck(base | {"copy.wait_seconds": 3.0}) == "copy"
    assert "uint8" in explain_bottleneck(base | {"copy.wait_seconds": 3.0})
    device = {"device.seconds": 10.0, "device.idle.seconds": 0.1}
    assert "the device is the bottleneck (busy 99%" in explain_bottleneck(base | device)
    assert "idles 60%" in explain_bottleneck(base | device | {"device.idle.seconds": 6.0})


def test_nothing_yet() -> None:
    stats = DataLoader(Work(4, 0.0)).stats()
    assert stats["counters"]["bad.samples"] == 0  # scripts ask for it after every epoch
    assert stats["verdict"] == "nothing was loaded yet" and stats["limit"] == ""


def test_start_of_an_epoch_is_no_bottleneck() -> None:
    """Two seconds for the start of the workers and no wait after that: the loader is fast enough."""
    counters = {"wait.batches": 9.0, "wait.seconds": 2.0, "consumer.seconds": 5.0, "decode.seconds": 1.0}
    assert find_bottleneck(counters | {"wait.first_seconds": 2.0}) == "consumer"
    assert find_bottleneck(counters | {"wait.first_seconds": 0.0}) == "decode"


# --- the numbers


@pytest.mark.parametrize("num_workers", [0, 2])
def test_numbers_are_flat_and_exact(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    loader = DataLoader(Work(10, 0.0), 4, num_workers=num_workers)
    for epochs in (1, 2):
        stats = epoch(loader)
        assert stats["rank"] == 3 and stats["epochs"] == epochs
        for name, value in (stats["counters"] | stats["rates"]).items():
            assert isinstance(name, str) and isinstance(value, int | float), name
        counters = stats["counters"]
        assert counters["wait.batches"] == counters["collate.batches"] == 3 * epochs
        assert counters["collate.samples"] == counters["decode.samples"] == 10 * epochs
        assert stats["rates"]["workers"] == num_workers
        ratio = stats["rates"]["loader.samples_per_second"] / stats["rates"]["loader.batches_per_second"]
        assert ratio == pytest.approx(10 / 3)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_of_a_last_batch_that_is_not_full_are_counted(num_workers: int) -> None:
    counters = epoch(DataLoader(Stream([10]), batch_size=4, num_workers=num_workers))["counters"]
    assert (counters["collate.batches"], counters["collate.samples"]) == (3, 10)


def test_wait_for_an_error_is_no_step_of_the_consumer() -> None:
    def fails(index: int) -> int:
        burn(0.05 * (index > 0))
        return int(1 / (index == 0))

    loader = DataLoader(Numbers(5, fails))
    iterator = iter(loader)
    next(iterator)
    for _ in range(4):
        with pytest.raises(ZeroDivisionError):
            next(iterator)
    counters = loader.stats()["counters"]
    assert 0.2 <= counters["wait.seconds"] > counters["consumer.seconds"]


def test_what_follows_an_epoch_that_was_left_early_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = 0.0
    monkeypatch.setattr(Cores, "busy_seconds", lambda cores: busy)
    monkeypatch.setattr("fastload.metrics.counters._IDLE_INTERVAL", 0.0)
    loader = DataLoader(Work(32, 0.01), 4, num_workers=2)
    next(iter(loader))
    idle, busy = loader.stats()["rates"]["node.idle_cores"], 100.0
    assert loader.stats()["rates"]["node.idle_cores"] == idle > 0


def test_rates_are_of_the_epoch_that_ran_last() -> None:
    dataset = Work(32, 0.01)
    loader = DataLoader(dataset, 4, num_workers=2, persistent_workers=True)
    slow = epoch(loader)["rates"]
    time.sleep(1)  # between epochs: no part of them
    assert loader.stats()["rates"]["loader.samples_per_second"] == slow["loader.samples_per_second"]
    before = loader.stats()["counters"]
    second = epoch(loader)
    added = {name: value - before.get(name, 0) for name, value in second["counters"].items()}
    assert added["wait.batches"] == 8
    assert added["idle.seconds"] < 2, "two workers waited for a second"
    found = rates(added, 1.0)
    assert second["rates"]["decode.share"] == pytest.approx(found["decode.share"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_cached_datasets_count_what_their_cache_did(tmp_path: Path, num_workers: int) -> None:
    dataset: Any = cached(Work(12, 0.0), Cache(tmp_path / "cache"))
    loader = DataLoader(Subset(dataset, range(12)), 3, num_workers=num_workers)
    first, second = epoch(loader)["counters"], epoch(loader)["counters"]
    dataset.close()
    assert (first["cache.misses"], first.get("cache.hits", 0)) == (12, 0)
    assert (second["cache.misses"], second["cache.hits"]) == (12, 12)
    assert second["decode.samples"] == 24


def test_time_spent_in_reading_is_not_decoding() -> None:
    counters = Counters()
    with counters.timed("decode"), counters.timed("cache"):
        burn(0.2)
    assert counters["cache.seconds"] >= 0.2 > 0.1 > counters["decode.seconds"]


# --- cores


def group(root: Path, files: dict[str, str]) -> Cores:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Cores(str(root))


def test_cores_without_a_limit(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    ticks = os.sysconf("SC_CLK_TCK")
    lines = [f"cpu{mine[0]} {ticks} 0 {ticks} 900 900 0 0 0 0 0", "cpu9999 5 5 5 5 5 5 5 0 0 0", "intr 1"]
    cores = group(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/stat": "\n".join(lines)})
    assert cores.usable == len(mine) and cores.busy_seconds() == 2.0


def test_a_missing_proc_is_no_error(tmp_path: Path) -> None:
    assert Cores(str(tmp_path)).usable == len(os.sched_getaffinity(0))
    assert Cores(str(tmp_path)).busy_seconds() == 0


def test_usable_cores_are_within_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = group(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000"})
    monkeypatch.setattr("fastload.metrics.machine.Cores", lambda: half)
    assert half.usable == 0.5 and usable_cores() == 1


def test_cores_of_a_control_group_of_version_2(tmp_path: Path) -> None:
    cores = group(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/mine\n",
            "sys/fs/cgroup/jobs/mine/cpu.max": "max 100000\n",
            "sys/fs/cgroup/jobs/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/jobs/cpu.stat": "usage_usec 7000000\nuser_usec 1\n",
        },
    )
    assert cores.usable == 0.5 and cores.busy_seconds() == 7.0


def test_cores_of_a_container_of_version_1(tmp_path: Path) -> None:
    """The path is the host's; the container sees its own group at the root."""
    cores = group(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "25000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpuacct.usage": "3000000000\n",
        },
    )
    assert cores.usable == 0.25 and cores.busy_seconds() == 3.0
