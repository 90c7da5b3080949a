"""`num_workers=N` as N threads of the kernel in one process: when it is, and that nothing else differs."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch.utils.data import ConcatDataset, Subset

import fastload
from bench.peers.scripts.torchvision_on_cpu import torchvision
from fastload import Cache, CenterCrop, DataLoader, File, ImageFolder, ObjectDataset, RandomResizedCrop
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError, WorkerError
from fastload.images import kernel
from tests.loaderdata import Numbers, identity, told
from tests.photos import pillow_jpeg, png, scene
from tests.process.test_autoscale import Scripted
from tests.shortform import short_form

CROP = RandomResizedCrop(16, flip=0.5)
PHOTOS = 24

pytestmark = [
    pytest.mark.skipif(kernel.kernel is None, reason="without the kernel, processes make all batches"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more than this machine's cores
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of two classes, every fourth a PNG."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(PHOTOS):
        pixels = scene(48 + number, 40, number)
        body, ending = (
            (png(Image.fromarray(pixels)), "png") if number % 4 == 3 else (pillow_jpeg(pixels), "jpg")
        )
        path = folder / "ab"[number % 2] / f"{number:02d}.{ending}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(body)
    return folder


def images(root: Path, transform: Any = CROP, **options: Any) -> ImageFolder:
    return ImageFolder(str(root), transform, **options)


def kind_of(loader: DataLoader[Any]) -> tuple[str, int, int]:
    """(kind of its workers, how many, worker processes), once an epoch has begun."""
    iterator: Any = iter(loader)
    workers = loader.stats()["workers"]
    return workers["kind"], workers["count"], len(iterator._workers)


def batches_of(loader: DataLoader[Any], epochs: int = 1) -> list[Any]:
    return [told(batch) for _ in range(epochs) for batch in loader]


# --- when they are threads


class OwnSamples(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


class OwnCrop(RandomResizedCrop):
    """Code of the user's would run in it."""


THREADS: dict[str, Callable[[Path], Any]] = {
    "a folder": images,
    "objects": lambda root: ObjectDataset(str(root / "a"), transform=CenterCrop(16, resize=20)),
    "a subset": lambda root: Subset(images(root), range(0, PHOTOS, 2)),
    "a concatenation": lambda root: ConcatDataset([images(root), images(root, CenterCrop(16))]),
    "by epoch": lambda root: images(root, fastload.ByEpoch({0: CROP, 2: CenterCrop(16)})),
}
PROCESSES: dict[str, Callable[[Path], Any]] = {
    "a user's dataset": lambda root: Numbers(8),
    "an overriding method": lambda root: OwnSamples(str(root), CROP),
    "a user's transform": lambda root: images(root, str),
    "a user's crop": lambda root: images(root, OwnCrop(16)),
    "target_transform": lambda root: images(root, target_transform=int),
    "map": lambda root: fastload.map(images(root), identity),
    "decode": lambda root: ObjectDataset(str(root / "a"), decode=len),
    "nearest": lambda root: images(root, CenterCrop(16, interpolation="nearest")),
    "a table": lambda root: fastload.TableDataset(
        {"name": ["a/00.jpg", "a/04.jpg"]}, File("name"), url=str(root), transform=CROP
    ),
    "no transform": lambda root: images(root, None),
    "one of two parts": lambda root: ConcatDataset([images(root), OwnSamples(str(root), CROP)]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "processes": {"processes": True},
    "collate_fn": {"collate_fn": identity},
    "worker_init_fn": {"worker_init_fn": identity},
    "threads": {"threads": 2},
    "samples without batches": {"batch_size": None},
}


@pytest.mark.parametrize("dataset", THREADS)
def test_threads_make_the_rows_of(dataset: str, root: Path) -> None:
    assert kind_of(DataLoader(THREADS[dataset](root), 4, num_workers=3)) == ("threads", 3, 1)


@pytest.mark.parametrize("dataset", PROCESSES)
def test_processes_make_the_batches_of(dataset: str, root: Path) -> None:
    assert kind_of(DataLoader(PROCESSES[dataset](root), 4, num_workers=1)) == ("processes", 1, 1)


@pytest.mark.parametrize("option", OPTIONS)
def test_processes_make_the_batches_with(option: str, root: Path) -> None:
    options = {"batch_size": 4} | OPTIONS[option]
    assert kind_of(DataLoader(images(root), num_workers=1, **options)) == ("processes", 1, 1)


def test_this_process_is_no_worker(root: Path) -> None:
    assert kind_of(DataLoader(images(root), 4)) == ("", 0, 0)


def test_without_the_kernel_processes_make_the_batches(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.images.transforms.kernel", None)
    assert not view_of(images(root)).made_by_kernel()


@pytest.mark.parametrize("value", [1, "auto", None])
def test_processes_is_true_or_false(value: Any, root: Path) -> None:
    with pytest.raises(ArgumentError, match="processes must be True or False"):
        DataLoader(images(root), 4, num_workers=2, processes=value)


# --- nothing else differs


@pytest.mark.parametrize(
    "mode", short_form((None, "raw", "dct", "shrunk", "decoded"), lambda mode: mode not in ("dct", "shrunk"))
)
def test_batches_and_digests_are_those_of_processes(mode: Any, root: Path, tmp_path: Path) -> None:
    made = []
    for processes in (False, True):
        cache = None if mode is None else Cache(tmp_path / str(processes), mode)
        loader = DataLoader(
            images(root, cache=cache), 5, shuffle=True, num_workers=2, seed=7, processes=processes
        )
        made.append((batches_of(loader, epochs=2), loader.state_dict()["digest"]))
    assert made[0] == made[1]


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (False, False)])
def test_resumed_with_others(before: bool, after: bool, root: Path) -> None:
    def loader(workers: int, processes: bool) -> DataLoader[Any]:
        return DataLoader(
            images(root),
            3,
            shuffle=True,
            num_workers=workers,
            seed=1,
            processes=processes,
            on_error="replace",
        )

    whole = batches_of(loader(2, False))
    first = loader(3, before)
    iterator = iter(first)
    seen = [told(next(iterator)) for _ in range(3)]
    second = loader(2, after)
    second.load_state_dict(first.state_dict())
    assert seen + batches_of(second) == whole


@pytest.mark.parametrize("on_error", ["repeat", "replace"])
def test_bad_samples_are_settled_alike(on_error: str, root: Path, tmp_path: Path) -> None:
    for number in range(12):
        body = b"no image" if number % 5 == 2 else pillow_jpeg(scene(40, 40, number))
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / f"{number:02d}.jpg").write_bytes(body)
    made = []
    for processes in (False, True):
        loader = DataLoader(
            images(tmp_path), 4, num_workers=2, seed=3, on_error=on_error, processes=processes
        )
        batches, stats = batches_of(loader), loader.stats()
        made.append((batches, sorted(stats["bad"]), stats["counters"]["bad.samples"]))
    assert made[0] == made[1] and made[0][2]


def test_persistent_workers_leave_out_and_skip(root: Path) -> None:
    made = []
    for processes in (False, True):
        loader = DataLoader(
            images(root), 4, num_workers=2, seed=3, persistent_workers=True, processes=processes
        )
        seen = batches_of(loader)
        for step, batch in enumerate(loader):
            seen.append(told(batch))
            if step == 0:
                loader.exclude([9, 22])
                loader.skip([4])
        made.append(seen)
    assert made[0] == made[1]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods(method: str, root: Path) -> None:
    made = [
        batches_of(DataLoader(images(root), 8, num_workers=2, seed=1, multiprocessing_context=context))
        for context in (method, "fork")
    ]
    assert made[0] == made[1]


def test_what_python_cuts_is_requested_of_the_cache_too(root: Path, tmp_path: Path) -> None:
    """`fill` looks for the records of the kernel's own laws only; others it would read one by one."""
    v1 = torchvision.transforms
    fused = fastload.fuse(v1.Compose([v1.RandomResizedCrop(16), v1.PILToTensor()]))
    for transform, requested in ((CROP, []), (fused, [0, 1, 2])):
        data = images(root, transform, cache=Cache(tmp_path / type(transform).__name__, "raw"))
        batches_of(DataLoader(data, 8))
        data._flush_cache()
        kernel.set_threads(2)
        try:
            assert view_of(data)._read_ahead([0, 1, 2]) == requested
        finally:
            kernel.set_threads(0)
        data.close()


# --- promises of worker processes


def test_a_killed_process_is_named(root: Path) -> None:
    iterator: Any = iter(DataLoader(images(root), 1, num_workers=2))
    next(iterator)
    (process,) = iterator._workers
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"pid {process.pid}\) is killed by signal: .*SIGKILL"):
        for _ in iterator:
            pass


def test_all_of_the_memory_limit_is_for_one_process(root: Path) -> None:
    loader = DataLoader(images(root), 4, num_workers=8, memory_limit="60MB", multiprocessing_context="fork")
    assert sum(len(labels) for _, labels in loader) == PHOTOS
    with pytest.raises(ArgumentError, match="too little for 8 worker processes"):
        DataLoader(images(root), 4, num_workers=8, memory_limit="60MB", processes=True)


def test_torch_warns_of_many_processes_and_not_of_threads(root: Path) -> None:
    with pytest.warns(UserWarning, match="will create 999 worker processes"):
        DataLoader(images(root), 4, num_workers=999, processes=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataLoader(images(root), 4, num_workers=16)


@pytest.mark.parametrize(("threads", "processes"), [(8, 1), (9, 2), (20, 3)])
def test_a_process_has_at_most_eight_threads(threads: int, processes: int, root: Path) -> None:
    loader = DataLoader(images(root), 2, num_workers=threads, seed=1)
    assert batches_of(loader) == batches_of(DataLoader(images(root), 2, seed=1))
    assert kind_of(loader) == ("threads", threads, processes)


def test_auto_switches_threads(root: Path) -> None:
    loader = DataLoader(images(root), 2, num_workers="auto", seed=1)
    loader._context.autoscaler = Scripted([3, 2, 4, 1, 2])  # type: ignore[assignment]
    iterator: Any = iter(loader)
    seen, counts = [], []
    for batch in iterator:
        seen.append(told(batch))
        counts.append((iterator._engine.kernel_threads, len(iterator._workers)))
    assert [threads for threads, _ in counts[:5]] == [3, 2, 4, 1, 2]
    assert {processes for _, processes in counts} == {1}
    assert seen == batches_of(DataLoader(images(root), 2, seed=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_is_a_hit_or_a_miss_once(workers: int, root: Path, tmp_path: Path) -> None:
    data = images(root, cache=Cache(tmp_path / "cache", "shrunk", short_side=32))
    loader = DataLoader(data, 4, shuffle=True, num_workers=workers)
    for epoch in (1, 2):
        batches_of(loader)
        counters = loader.stats()["counters"]
        samples = [counters.get(f"cache.{kind}", 0) for kind in ("hits", "misses")]
        assert sum(samples) == epoch * PHOTOS and counters["get.samples"] == samples[1]
