"""Cache modes "auto" and "dct": the rule, what it is applied to, and what goes on as before."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastload import (
    ByEpoch,
    Cache,
    CenterCrop,
    DataLoader,
    ImageFolder,
    MDSDataset,
    ObjectDataset,
    RandomResizedCrop,
    TFRecordDataset,
    cached,
)
from fastload.cache.maintenance import measure_disk
from fastload.datasets import cache_forecast
from fastload.datasets.cache_forecast import Costs, choose
from fastload.errors import ArgumentError, DecodeError
from fastload.formats.jpeg import ROWS_MAGIC, is_dct
from fastload.images import decode
from fastload.metrics.machine import memory_for_pages
from tests.bucketdata import PHOTOS
from tests.patience import wait_until
from tests.photos import pillow_jpeg, scene
from tests.sharddata import FEATURES, jpeg, shard

pytestmark = pytest.mark.usefixtures("no_leaks")
N = PHOTOS


# A million photos of 140 KB, all in memory.
IN_MEMORY = Costs(
    total_bytes=140_000_000_000,
    ratio=1.6,
    file=2.0e-3,
    indexed=1.4e-3,
    record=0.5e-3,
    making=0.8e-3,
    missing=1.0,
    left=1 << 40,
    memory=1 << 40,
)


@pytest.mark.parametrize(
    ("change", "form", "words"),
    [
        ({}, "record", "0.50 ms of a core out of a 'dct' record, of 1.60 times the bytes, and 1.40 ms"),
        ({"left": 200 * 10**9}, "file", "would take 224 GB, which do not fit"),
        ({"left": 230 * 10**9}, "file", "do not fit"),  # but for an error of the forecast it would
        ({"left": 200 * 10**9, "missing": 0.5}, "record", ""),
        ({"memory": 250 * 10**9}, "file", "would take 224 GB, more than memory holds"),
        ({"record": 1.3e-3}, "file", "1.30 ms"),
        ({"making": 2.0e-3}, "file", "to make the record takes 2.00 ms: too long for the first epoch"),
        (dict.fromkeys(("file", "indexed", "record", "making"), 0.0), "file", ""),  # no JPEG among them
    ],
)
def test_rule_weighs_room_memory_and_times(change: dict[str, Any], form: str, words: str) -> None:
    choice = choose(IN_MEMORY._replace(**change))
    assert choice.form == form and words in choice.why
    assert choice.bytes == (224 if form == "record" else 140) * 10**9


# --- in a loader


@pytest.fixture
def folder(demo_photos: Path, keep: Callable[[Any], Any]) -> Callable[..., ImageFolder]:
    def make(cache: Any, transform: Any = None, kind: Any = ImageFolder) -> Any:
        crop = transform or RandomResizedCrop(32, flip=0.5)
        return keep(kind(str(demo_photos), transform=crop, cache=cache))

    return make


@pytest.fixture
def dct_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time of a crop out of a record, with 1 for a file."""

    def set_time(seconds: float) -> None:
        monkeypatch.setattr(
            cache_forecast,
            "crop_seconds",
            lambda data: 0.02 * (seconds if is_dct(data) else 1.0),
        )

    return set_time


@pytest.fixture
def room_once_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chooses when no record is on its way: that counts as used and not as kept, with few photos as 5 %."""
    room = cache_forecast.Forecaster.room

    def wait_and_measure(self: Any) -> Any:
        assert self._cache.flush()
        return room(self)

    monkeypatch.setattr(cache_forecast.Forecaster, "room", wait_and_measure)


def epoch(dataset: Any, num_workers: int = 0) -> tuple[torch.Tensor, dict[str, float]]:
    loader = DataLoader(dataset, 8, seed=1, num_workers=num_workers)
    images = torch.cat([batch for batch, _ in loader])
    return images, loader.stats()["counters"]


@pytest.mark.parametrize(("seconds", "form"), [(0.3, "dct"), (0.99, "file")])
def test_auto_says_what_it_chooses_and_how_many_bytes_that_takes(
    folder: Any, tmp_path: Path, dct_is: Any, caplog: pytest.LogCaptureFixture, seconds: float, form: str
) -> None:
    dct_is(seconds)
    dataset = folder(Cache(tmp_path / "cache", size_limit="100MB"))
    with caplog.at_level(logging.INFO, "fastload"):
        _, counters = epoch(dataset)
    before, after = [one.message for one in caplog.records if "mode 'auto'" in one.message]
    assert "the first 8 decide" in before and "within size_limit=100 MB" in before
    kept = "'dct' records" if form == "dct" else "files with an index of their rows"
    assert f"it keeps {kept}" in after and "they fit" in after
    assert counters[f"cache.chose_{form}"] == 1
    assert dataset.cache.mode == "auto" and dataset.cache.info()["entries"] == N
    caplog.clear()
    dataset.close()
    _, later = epoch(dataset)
    assert not caplog.records and not later.get("get.requests"), "nothing to choose, nothing to read"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_files_with_an_index_are_kept_after_their_first_sample(
    folder: Any, tmp_path: Path, dct_is: Any, num_workers: int
) -> None:
    dct_is(0.99)
    expected, _ = epoch(folder(None))
    dataset = folder(tmp_path / "cache")
    for requests in (N, 0):
        images, counters = epoch(dataset, num_workers)
        assert torch.equal(images, expected) and counters.get("get.requests", 0) == requests
        dataset.close()
    payloads = [bytes(dataset._payload(index)) for index in range(N)]
    assert sum(payload.startswith(ROWS_MAGIC) for payload in payloads) >= N - 8 * max(1, num_workers)


def test_a_sample_alone_a_payload_and_warm_keep_files_with_an_index_too(
    folder: Any, tmp_path: Path, dct_is: Any
) -> None:
    dct_is(0.99)
    dataset = folder(tmp_path / "cache")
    epoch(torch.utils.data.Subset(dataset, range(8)))
    dataset[9]
    assert dataset._payload(10)[:5] == ROWS_MAGIC
    assert {warmed.outcome for warmed in dataset.warm([11])} == {"stored"}
    dataset.close()
    for index in (9, 10, 11):
        assert dataset.contains(index) and dataset._payload(index)[:5] == ROWS_MAGIC


def test_samples_that_are_read_and_never_made_can_be_read_again_by_others(
    folder: Any, tmp_path: Path, dct_is: Any
) -> None:
    dct_is(0.99)
    dataset = folder(tmp_path / "cache")
    epoch(torch.utils.data.Subset(dataset, range(8)))
    dataset.prefetch(range(8, N))
    wait_until(lambda: all(map(dataset._is_here, range(8, N))), "the samples are read")
    dataset._cancel(range(8, N))
    assert dataset._outstanding() == 0
    locks = [dataset.cache._lock_inflight(dataset._cache_keys(index)[0]) for index in range(8, N)]
    assert all(locks)


@pytest.mark.parametrize(("form", "mode"), [("file", "raw"), ("record", "dct")])
def test_forecast_of_bytes_is_right_within_5_percent(
    folder: Any,
    tmp_path: Path,
    dct_is: Any,
    room_once_written: None,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    mode: Any,
) -> None:
    dct_is(0.3)
    made = []
    monkeypatch.setattr(cache_forecast, "choose", lambda costs: made.append(choose(costs)) or made[-1])
    dataset = folder(Cache(tmp_path / "cache", size_limit=None if form == "record" else "4MB"))
    epoch(dataset)
    filled = folder(Cache(tmp_path / "filled", mode))
    epoch(filled)
    assert filled.cache is not None
    [choice] = made
    assert choice.form == form and choice.bytes == pytest.approx(filled.cache.info()["bytes"], rel=0.05)


@pytest.mark.parametrize("mode", ["dct", "auto"])
def test_a_full_cache_gets_no_records_made(
    folder: Any, tmp_path: Path, dct_is: Any, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    dct_is(0.3)
    made = []
    monkeypatch.setattr(decode, "to_dct", lambda image, to_dct=decode.to_dct: made.append(1) or to_dct(image))
    # The choice of mode "auto" is as if all had fitted when it was made.
    monkeypatch.setattr(cache_forecast, "choose", lambda costs: choose(costs._replace(left=1 << 40)))
    expected, _ = epoch(folder(None))
    dataset = folder(Cache(tmp_path / "cache", mode, size_limit="100kB"))
    for _ in range(2):
        made.clear()
        images, counters = epoch(dataset)
        assert torch.equal(images, expected)
    few = dataset.cache.info()["entries"]
    assert 0 < few < 8 and counters["cache.dropped"] == N - few
    assert not made


def test_what_does_not_fit_is_a_warning(
    folder: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, dct_is: Any, room_once_written: None
) -> None:
    dct_is(0.1)
    dataset = folder(Cache(tmp_path / "cache", size_limit="200kB"))
    with caplog.at_level(logging.WARNING, "fastload"):
        epoch(dataset)
        kept = dataset.cache.info()["entries"]
        dataset.close()
        epoch(folder(Cache(tmp_path / "cache", size_limit="200kB")))
    said = [re.search(r": about (\d+)% of the samples will be kept", one.message) for one in caplog.records]
    shares = [int(one[1]) for one in said if one]
    assert kept and shares == pytest.approx([100 * kept / N] * 2, abs=4)
    assert all("it keeps files" in one.message for one in caplog.records)


def epoch_of_two_processes(dataset: ImageFolder, log: Path) -> tuple[str, dict[str, float]]:
    """(what they and this process logged, counters)."""
    handler, logger = logging.FileHandler(log), logging.getLogger("fastload")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        loader = DataLoader(dataset, 4, num_workers=2, multiprocessing_context="fork", processes=True)
        for _ in loader:
            pass
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
        handler.close()
    return log.read_text(), loader.stats()["counters"]


@pytest.mark.filterwarnings("ignore:the listing cannot be kept:UserWarning")
def test_one_worker_says_that_the_cache_fails(folder: Any, tmp_path: Path) -> None:
    said, _ = epoch_of_two_processes(folder("/proc/cache"), tmp_path / "log")
    assert said.count("passes through its cache /proc/cache") == 1
    assert "Training reads the store in every epoch: give a directory that you can write to. See" in said
    assert "mode 'auto'" not in said, "nothing will be kept"


def test_workers_choose_for_themselves_and_one_of_them_speaks(
    folder: Any, tmp_path: Path, dct_is: Any
) -> None:
    dct_is(0.3)
    said, counters = epoch_of_two_processes(folder(tmp_path / "cache"), tmp_path / "log")
    assert counters["cache.chose_dct"] == 2
    assert said.count("it keeps") == 1


def test_runs_that_choose_apart_read_each_others_records(folder: Any, tmp_path: Path, dct_is: Any) -> None:
    expected, _ = epoch(folder(Cache(tmp_path / "other", "raw")))
    half = torch.utils.data.Subset(folder(Cache(tmp_path / "cache", "dct")), range(0, N, 2))
    epoch(half)
    dct_is(0.99)
    mixed = folder(tmp_path / "cache")
    found, counters = epoch(mixed)
    assert torch.equal(found, expected) and counters["get.requests"] == N // 2
    assert counters["cache.chose_file"] == 1
    mixed.close()
    for again in (mixed, folder(Cache(tmp_path / "cache", "dct"))):
        found, counters = epoch(again)
        assert torch.equal(found, expected) and not counters.get("get.requests")


def test_a_filled_raw_cache_goes_on_and_an_explicit_mode_is_obeyed(folder: Any, tmp_path: Path) -> None:
    raw = folder(Cache(tmp_path / "cache", "raw"))
    expected, _ = epoch(torch.utils.data.Subset(raw, range(N - 4)))
    raw.close()
    dataset = pickle.loads(pickle.dumps(folder(tmp_path / "cache")))
    assert dataset._cache_keys(0)[0] == raw._cache_keys(0)[0]
    found, counters = epoch(dataset)
    assert torch.equal(found[: N - 4], expected) and counters["get.requests"] == 4
    dataset.close()
    exact = folder(Cache(tmp_path / "cache", "dct"))
    found, counters = epoch(exact)
    assert torch.equal(found[: N - 4], expected) and counters["get.requests"] == N
    exact.close()
    assert folder(tmp_path / "cache")._cache_keys(0)[0] == exact._cache_keys(0)[0], "it is the fuller one now"


@pytest.mark.parametrize("count", [80, pytest.param(3000, marks=pytest.mark.stress)])
def test_damaged_files_have_the_same_fate_in_all_lossless_modes(tmp_path: Path, count: int) -> None:
    """Equal pixels or an error of the same kind, made anew and from the cache."""
    rng = np.random.default_rng(count)
    kinds = ({}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_blocks": 3}, {"quality": 30})
    for number in range(count):
        data = bytearray(pillow_jpeg(scene(90, 67, number % 8), **kinds[number % len(kinds)]))
        for _ in range(int(rng.integers(0, 4))):
            data[int(rng.integers(2, len(data)))] = int(rng.integers(0, 256))
        if number % 7 == 0:
            data = data[: int(rng.integers(1, len(data)))]
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / f"{number:05}.jpg").write_bytes(data)
    fates: dict[str, list[Any]] = {}
    for mode in ("raw", "dct", "auto", "dct", "auto"):
        cache = Cache(tmp_path / f"cache-{mode}", mode)
        dataset = ObjectDataset(str(tmp_path / "files"), transform=CenterCrop(32, resize=40), cache=cache)
        found: list[Any] = []
        for number in range(count):
            try:
                found.append(dataset[number].numpy().tobytes())
            except DecodeError as error:
                found.append(type(error))
        assert fates.setdefault("raw", found) == found, mode
        dataset.close()
    assert DecodeError in fates["raw"] and any(type(fate) is bytes for fate in fates["raw"])


# --- what it does not apply to


class Own(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        return bytes(self._payload(index))


@pytest.mark.parametrize(
    ("kind", "transform", "raw_under"),
    [
        (ImageFolder, CenterCrop(8), ()),
        (ObjectDataset, CenterCrop(8), ()),
        (ImageFolder, CenterCrop(8, interpolation="nearest", channels=1), ("auto", "dct")),
        (ObjectDataset, len, ("auto", "dct")),
        (lambda url, transform, cache: ObjectDataset(url, decode=len, cache=cache), None, ("auto", "dct")),
        (Own, CenterCrop(8), ("auto",)),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "dct"])
def test_objects_whose_bytes_are_wanted_are_kept_as_in_mode_raw(
    folder: Any, tmp_path: Path, kind: Any, transform: Any, raw_under: Any, mode: str
) -> None:
    raw = folder(Cache(tmp_path / "raw", "raw"), transform, kind)
    dataset = folder(Cache(tmp_path / "cache", mode), transform, kind)
    same = dataset._cache_keys(0)[0] == raw._cache_keys(0)[0]
    assert same == (mode in raw_under)
    if same:
        assert bytes(dataset._payload(0)) == bytes(raw._payload(0))


@pytest.fixture
def records(tmp_path: Path, keep: Callable[[Any], Any]) -> Callable[..., TFRecordDataset]:
    data, index = shard("tfrecord", range(3))
    (tmp_path / "a.tfrecord").write_bytes(data)
    (tmp_path / "a.tfrecord.idx").write_bytes(index)

    def make(mode: Any, transform: Any = None, **options: Any) -> Any:
        cache = Cache(tmp_path / "cache", mode)
        url = str(tmp_path / "a.tfrecord")
        return keep(TFRecordDataset(url, transform=transform, cache=cache, **{"fields": FEATURES, **options}))

    return make


@pytest.mark.parametrize("mode", ["auto", "dct"])
@pytest.mark.parametrize("options", [{}, {"fields": {"image": "image:bytes"}}])
@pytest.mark.parametrize("transform", [None, dict, ByEpoch({0: dict, 5: CenterCrop(8)})])
def test_feature_without_a_fused_transform_is_the_file(
    records: Any, mode: str, options: Any, transform: Any
) -> None:
    records(mode, CenterCrop(8), **options)[0]  # a record of it is in the cache
    assert records(mode, transform, **options)[0]["image"] == jpeg(0)


@pytest.mark.parametrize("mode", ["auto", "dct"])
def test_feature_kept_as_record_is_not_handed_out(records: Any, mode: str) -> None:
    dataset = records(mode, {"image": CenterCrop(8)})
    with pytest.raises(ArgumentError, match="takes their files: make a new dataset with transform="):
        dataset.transform = {"label": abs}
    dataset.transform = {"image": CenterCrop(4), "label": abs}
    assert dataset[0]["image"].shape == (3, 4, 4)


@pytest.mark.parametrize("mode", ["auto", "dct"])
def test_mds_image_without_a_fused_transform_keeps_its_own_mode(tmp_path: Path, mode: Any) -> None:
    url = Path(__file__).parents[1] / "data/formats/mds"
    crop = {"k_png": CenterCrop(4)}
    dataset = MDSDataset(url, ("j_jpeg", "k_png"), transform=crop, cache=Cache(tmp_path / "cache", mode))
    assert dataset[3][0].mode == "L"
    dataset.close()


@pytest.mark.parametrize("mode", ["auto", "dct"])
def test_transform_that_the_records_cannot_serve_is_refused(folder: Any, tmp_path: Path, mode: str) -> None:
    mask = CenterCrop(8, interpolation="nearest", channels=1)
    dataset = folder(Cache(tmp_path / "cache", mode))
    with pytest.raises(ArgumentError, match="make a new dataset with this transform="):
        dataset.transform = mask
    dataset.transform = np.asarray  # of a PIL image
    assert dataset[0][0].ndim == 3
    objects = folder(Cache(tmp_path / "cache", mode), CenterCrop(8), ObjectDataset)
    with pytest.raises(ArgumentError, match="takes their files: make a new dataset with transform="):
        objects.transform = None
    assert objects[0].shape == (3, 8, 8), "it works as before"


def test_decoding_on_the_device_needs_files(folder: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="mode 'dct' keeps what only fastload decodes: use mode 'raw'"):
        DataLoader(folder(Cache(tmp_path / "cache", "dct")), 8, decoder="dali")
    raw, auto = folder(Cache(tmp_path / "cache", "raw")), folder(tmp_path / "cache")
    assert auto._cache_keys(0)[0] != raw._cache_keys(0)[0]
    DataLoader(auto, 8, decoder="dali")
    assert auto._cache_keys(0)[0] == raw._cache_keys(0)[0]


def test_cached_samples_are_no_images(tmp_path: Path) -> None:
    samples = torch.utils.data.TensorDataset(torch.arange(3))
    with pytest.raises(ArgumentError, match=r"cached\(\) keeps samples: leave mode= out"):
        cached(samples, Cache(tmp_path / "cache", "dct"))
    keys = [
        cached(samples, cache)._key(0) for cache in (tmp_path / "cache", Cache(tmp_path / "cache", "raw"))
    ]
    assert keys[0] == keys[1]


def test_without_the_kernel_auto_is_raw_and_dct_an_error(
    folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "has_records", lambda: False)
    with pytest.raises(ArgumentError, match="mode='dct' needs fastload's compiled kernel"):
        Cache(tmp_path / "cache", "dct")
    auto, raw = folder(tmp_path / "cache"), folder(Cache(tmp_path / "cache", "raw"))
    assert auto._cache_keys(0)[0] == raw._cache_keys(0)[0]


# --- the disk and the memory


def test_disk_measurement_leaves_nothing(tmp_path: Path) -> None:
    assert min(measure_disk(tmp_path / "new")) > 0
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("ours", "folder", "limit", "use", "pages"),
    [
        ("0::/", "", "memory.max", "memory.current", "file"),
        ("0::/job/step", "job", "memory.max", "memory.current", "file"),
        ("5:memory:/", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    ],
    ids=["container", "parent, as of SLURM", "version 1"],
)
def test_memory_for_pages_obeys_the_control_groups(
    ours: str, folder: str, limit: str, use: str, pages: str, tmp_path: Path
) -> None:
    assert memory_for_pages(str(tmp_path)) == 0
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{ours}\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (group / limit).write_text("max\n")
    assert memory_for_pages(str(tmp_path)) == 8000 << 10
    (group / limit).write_text(f"{5000 << 10}\n")
    (group / use).write_text(f"{3000 << 10}\n")
    (group / "memory.stat").write_text(f"anon 1\n{pages} {1000 << 10}\n")
    assert memory_for_pages(str(tmp_path)) == 3000 << 10
