"""`cached`: samples of any map-style dataset, made once."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastload import Cache, DataLoader, cached
from fastload.datasets.wrappers import CachedDataset
from fastload.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("no_leaks")
N = 40


class Nested(Dataset[Any]):
    """Samples of every kind; each one made leaves a byte in a file, whichever process made it."""

    def __init__(self, log: Path, scale: int = 1) -> None:
        self.log = log
        self.scale = scale

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        with self.log.open("ab") as file:
            file.write(b".")
        return {
            "image": torch.full((3, 8, 8), index * self.scale, dtype=torch.uint8),
            "box": np.arange(4, dtype=np.float32) * index,
            "meta": (f"name {index}", index, index / 7, [bytes([index]), None, True]),
        }

    def made(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0


def equal(a: Any, b: Any) -> bool:
    return (
        torch.equal(a["image"], b["image"])
        and a["box"].dtype == b["box"].dtype
        and bool((a["box"] == b["box"]).all())
        and a["meta"] == b["meta"]
        and type(a["meta"]) is tuple
    )


def keep(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("num_workers", [0, 2])
def test_second_epoch_makes_no_sample(tmp_path: Path, num_workers: int) -> None:
    source = Nested(tmp_path / "log")
    dataset = cached(source, Cache(tmp_path / "cache"))
    assert len(dataset) == N
    loader = DataLoader(dataset, 8, shuffle=True, num_workers=num_workers, collate_fn=keep)
    expected = [Nested(tmp_path / "other")[i] for i in range(N)]
    for epoch in range(3):
        samples = sorted((s for batch in loader for s in batch), key=lambda s: s["meta"][1])
        assert all(map(equal, samples, expected))
        assert source.made() == N, f"epoch {epoch} made samples anew"
    dataset.close()


class Samples(list[Any]):
    """A list that may have attributes."""


def stated(dataset: Any, text: Any) -> Any:
    """The dataset, which says itself what it is."""
    dataset = Samples(dataset) if isinstance(dataset, list) else dataset
    dataset.__fingerprint__ = text
    return dataset


def test_default_collate(tmp_path: Path) -> None:
    pairs = cached(stated([(torch.ones(2) * i, i) for i in range(6)], "pairs"), Cache(tmp_path / "cache"))
    for _ in range(2):
        [[values, labels]] = list(DataLoader(pairs, 6, num_workers=1))
        assert torch.equal(values, torch.arange(6.0)[:, None].expand(6, 2)) and labels.tolist() == [*range(6)]
    pairs.close()


def test_fingerprint_tells_datasets_apart(tmp_path: Path) -> None:
    """By default: all that they hold, see test_fingerprint.py. Stated: whatever was stated."""
    cache = Cache(tmp_path / "cache")
    one, two = Nested(tmp_path / "log"), Nested(tmp_path / "log", scale=2)
    assert int(cached(one, cache)[3]["image"].max()) == 3
    assert int(cached(two, cache)[3]["image"].max()) == 6
    kept = cached(stated(one, "mine"), cache)
    assert int(kept[5]["image"].max()) == 5
    kept._flush_cache()
    # The wrong thing to state, and what it does: the fingerprint alone decides.
    assert int(cached(stated(two, "mine"), cache)[5]["image"].max()) == 5
    cache.close()


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (object(), r"sample is a builtins\.object"),
        ({"a": [1, {2, 3}]}, r"sample\['a'\]\[1\] is a builtins\.set"),
        ((torch.ones(2, requires_grad=True),), r"requires_grad=True"),
        (np.array([object()]), r"only pickle could store"),
        (lambda: None, "function"),
    ],
)
def test_samples_that_cannot_be_stored_are_refused(tmp_path: Path, sample: Any, words: str) -> None:
    dataset = cached(stated([sample], "x"), Cache(tmp_path / "cache"))
    with pytest.raises(ArgumentError, match=words) as caught:
        dataset[0]
    assert caught.value.key == 0
    dataset.close()


def test_arguments(tmp_path: Path) -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(())

        def __len__(self) -> int:
            return 0

    with pytest.raises(ArgumentError, match="map-style"):
        cached(Endless(), Cache(tmp_path / "cache"))
    with pytest.raises(ArgumentError, match=r"fastload\.Cache"):
        cached([1], None)  # type: ignore[arg-type]
    with pytest.raises(
        ArgumentError, match=r"dataset\[1\] is a builtins.generator.* dataset.__fingerprint__"
    ):
        cached([1, (i for i in range(3))], tmp_path / "cache")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"dataset\.__fingerprint__ must be a str, found 7"):
        cached(stated([1], 7), Cache(tmp_path / "cache"))


def test_a_damaged_record_is_made_anew(tmp_path: Path) -> None:
    source = Nested(tmp_path / "log")
    dataset = cached(source, Cache(tmp_path / "cache"))
    for i in range(N):
        dataset[i]
    dataset.close()
    [segment] = (tmp_path / "cache").rglob("*.seg")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    expected = [Nested(tmp_path / "other")[i] for i in range(N)]
    assert all(equal(dataset[i], expected[i]) for i in range(N))
    assert source.made() == N + 1
    assert dataset.counters["cache.corrupt"] == 1
    dataset.close()
    assert all(equal(dataset[i], expected[i]) for i in range(N))
    assert source.made() == N + 1
    dataset.close()


def test_a_sound_record_of_another_layout_is_made_anew(tmp_path: Path) -> None:
    """Verified bytes that `load` does not know, as another version may have left them."""
    cache = Cache(tmp_path / "cache")
    source = Nested(tmp_path / "log")
    dataset = cached(stated(source, "x"), cache)
    assert cache.write(cache.key("cached", "x", "4"), b"Z" * 100) and cache.flush()
    for _ in range(2):
        assert equal(dataset[4], Nested(tmp_path / "other")[4]) and cache.flush()
        assert source.made() == 1 and dataset.counters["cache.corrupt"] == 1
    cache.close()


def test_no_pickle_at_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither written nor read: unpickling is made impossible, and a planted pickle is never opened."""
    source = Nested(tmp_path / "log")
    dataset = cached(stated(source, "x"), Cache(tmp_path / "cache"))

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickle was used")

    for name in ("loads", "load", "dumps", "dump", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    for _ in range(2):
        for i in range(N):
            dataset[i]
        dataset._flush_cache()
    assert source.made() == N
    dataset.close()


@pytest.mark.stress
def test_guard_removed_every_epoch_makes_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter of this file sees it when the cache does nothing."""
    source = Nested(tmp_path / "log")
    monkeypatch.setattr(CachedDataset, "__getitem__", lambda self, index: self.dataset[index])
    dataset = cached(source, Cache(tmp_path / "cache"))
    for _ in range(2):
        for i in range(N):
            dataset[i]
    assert source.made() == 2 * N
