"""The forecast: right about what a filled cache takes, said once, in words, without a read of its own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from fastload import Cache, DataLoader, ImageFolder, RandomResizedCrop
from fastload.datasets.cache_forecast import Forecast, Forecaster
from tests.bucketdata import PHOTOS

pytestmark = pytest.mark.usefixtures("no_leaks")
N = PHOTOS


def folder(photos: Path, cache: Cache) -> ImageFolder:
    return ImageFolder(str(photos), RandomResizedCrop(32), cache=cache)


def forecast(photos: Path, dataset: ImageFolder, tmp_path: Path) -> Forecast:
    """Of the listing, or of the sizes of some samples, which another cache keeps in the same mode."""
    assert dataset.cache is not None
    sizes, read = [], 0
    if dataset.cache.mode != "raw":
        other = Cache(tmp_path / "other", dataset.cache.mode, short_side=dataset.cache.short_side)
        probe = folder(photos, other)
        sizes = [memoryview(probe._payload(index)).nbytes for index in range(0, N, 3)]
        read = sum(probe.listing().size(index) for index in range(0, N, 3))
        probe.close()
    total = dataset.listing().total_bytes
    forecaster = Forecaster(dataset.cache, dataset.cache._codec, total, dataset._share_kept, len(dataset))
    return forecaster.forecast(forecaster.room(), sizes, read)


@pytest.mark.parametrize("mode", ["raw", "dct", "shrunk", "decoded"])
def test_is_right_about_what_a_full_cache_takes(demo_photos: Path, tmp_path: Path, mode: Any) -> None:
    dataset = folder(demo_photos, Cache(tmp_path / "cache", mode, short_side=128))
    said = forecast(demo_photos, dataset, tmp_path)
    assert said.fits and said.missing_bytes == said.total_bytes
    for _ in DataLoader(dataset, 8):
        pass
    assert dataset.cache is not None
    assert said.total_bytes == pytest.approx(
        dataset.cache.info()["bytes"], rel={"raw": 0.01, "dct": 0.05}.get(mode, 0.25)
    )
    assert forecast(demo_photos, dataset, tmp_path).missing_bytes == 0
    dataset.close()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("raw", "mode='shrunk' takes less than the"),
        ("dct", "mode='shrunk' takes less than the"),
        ("shrunk", "A smaller short_side or quality takes less"),
        ("decoded", "mode='shrunk' takes less than the"),
    ],
)
def test_what_does_not_fit_is_said_in_words(
    demo_photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: Any, words: str
) -> None:
    """Once, from this process, and the cache then takes what fits."""
    cache = Cache(tmp_path / "cache", mode, short_side=128, size_limit="200kB")
    dataset = folder(demo_photos, cache)
    with caplog.at_level(logging.INFO, "fastload"):
        for _ in range(2):
            for _ in DataLoader(dataset, 8):
                pass
    said = [record for record in caplog.records if "samples of" in record.message]
    assert len(said) == 1 and said[0].levelno == logging.WARNING
    assert "within size_limit=200 KB" in said[0].message and words in said[0].message
    assert 0 < cache.info()["entries"] < N and cache.info()["bytes"] <= 200_000
    dataset.close()


def test_decoded_that_does_not_fit_names_raw(demo_photos: Path, tmp_path: Path) -> None:
    dataset = folder(demo_photos, Cache(tmp_path / "cache", "decoded", short_side=300, size_limit="8MB"))
    said = forecast(demo_photos, dataset, tmp_path)
    assert not said.fits and "mode='raw' takes" in said.sentence
    dataset.close()


@pytest.mark.parametrize("mode", ["raw", "decoded"])
def test_costs_no_read_and_no_count(
    demo_photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: Any
) -> None:
    dataset = folder(demo_photos, Cache(tmp_path / "cache", mode, short_side=64))
    loader = DataLoader(dataset, 8)
    with caplog.at_level(logging.INFO, "fastload"):
        for _ in loader:
            pass
        [said] = [record for record in caplog.records if "they fit" in record.message]
        assert said.levelno == logging.INFO
        counters = loader.stats()["counters"]
        assert counters["get.requests"] == counters["cache.misses"] == N
        caplog.clear()
        dataset.close()
        for _ in loader:
            pass
        assert not [record for record in caplog.records if "samples of" in record.message], "nothing to fill"
    dataset.close()


def test_workers_say_it_once(demo_photos: Path, tmp_path: Path) -> None:
    dataset = folder(demo_photos, Cache(tmp_path / "cache", size_limit="200kB"))
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("fastload").addHandler(handler)
    try:
        # By fork, so that the workers have the handler.
        for _ in DataLoader(dataset, 4, num_workers=2, multiprocessing_context="fork"):
            pass
    finally:
        logging.getLogger("fastload").removeHandler(handler)
        handler.close()
        dataset.close()
    assert (tmp_path / "log").read_text().count("of the samples will be kept") == 1
