"""What a user of the public classes sees: their names, their texts, and what their arguments take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data import ConcatDataset

import fastload
from fastload import DataLoader, DistributedSampler, Mixture, MixtureSampler, ShardSampler

QUESTIONS = {"state_dict", "load_state_dict", "stats", "samples_at", "batch_at", "skip", "exclude", "digest"}


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        (DataLoader, torch.utils.data.DataLoader, QUESTIONS),
        (DistributedSampler, torch.utils.data.DistributedSampler, {"state_dict", "load_state_dict"}),
        (ShardSampler, torch.utils.data.DistributedSampler, {"state_dict", "load_state_dict"}),
        (MixtureSampler, torch.utils.data.DistributedSampler, {"state_dict", "load_state_dict"}),
        (Mixture, ConcatDataset, {"ledger", "num_samples", "weights"}),
    ],
)
def test_a_class_shows_what_its_user_needs(ours: type, theirs: type, names: set[str]) -> None:
    assert {name for name in set(dir(ours)) - set(dir(theirs)) if name[0] != "_"} == names


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (fastload.Cache, "check clear close counters exists flush has info key lookup read write"),
        (fastload.RandomResizedCrop, "dtype fill sample_shape"),
        (fastload.CenterCrop, "dtype fill sample_shape"),
        (fastload.ObjectDataset, "close contains find key listing prefetch transform warm"),
        (fastload.TarDataset, "close contains find key prefetch shards transform warm"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_only_the_loader_calls_is_private(kind: type, names: str) -> None:
    assert [name for name in dir(kind) if name[0] != "_"] == names.split()


def test_texts_have_one_line() -> None:
    data: Any = list(range(100_000))
    loader = DataLoader(data, batch_size=8, num_workers=2, seed=1)
    assert repr(loader) == "DataLoader(list of 100,000 samples, batch_size=8, num_workers=2, seed=1)"
    sampler = DistributedSampler(data, 4, 1, seed=3)
    assert (
        repr(sampler) == "DistributedSampler(100,000 samples, num_replicas=4, rank=1, shuffle=True, seed=3)"
    )
    mixture = Mixture({"a": data, "b": data}, [1, 1])
    for thing in (ShardSampler(data, 1, 0), MixtureSampler(mixture, 1, 0), DataLoader(mixture), mixture):
        assert "\n" not in repr(thing) and len(repr(thing)) < 120


def test_modules_are_attributes_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("errors", "testing"):
        monkeypatch.delattr(fastload, name, raising=False)  # which another import may have set
    assert fastload.errors.ArgumentError.__name__ == "ArgumentError"
    assert fastload.testing.__name__ == "fastload.testing"


def test_rows_of_samples_at_can_be_excluded() -> None:
    data: Any = list(range(40))
    loader = DataLoader(data, batch_size=8, shuffle=True, seed=1)
    rows = loader.samples_at(2)
    gone = {row.index for row in rows}
    loader.exclude(rows)
    loader.exclude(rows[0])
    assert len(gone) == 8 and not gone & set(torch.cat(list(loader)).tolist())


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_have_both_types(tmp_path: Path, kind: Any) -> None:
    data: Any = list(range(16))
    log = kind(tmp_path / "log")
    loader = DataLoader(data, batch_size=8, sample_log=log)
    list(loader)
    assert loader.state_dict()["digest"]
    assert fastload.prove(log, loader.state_dict())
