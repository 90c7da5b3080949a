"""`num_samples=`: a hint for `len()` of shards that are not indexed yet, and nothing but that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler, Subset, random_split

import fastload
from fastload import DataLoader, DistributedSampler, ShardSampler
from fastload.errors import ArgumentError
from tests.loaderdata import identity, through_json
from tests.sharddata import CROP, TOTAL, closing, dataset, shards, write
from tests.sharddata import close_all as close_all
from tests.sharddata import kind as kind

pytestmark = pytest.mark.usefixtures("close_all")


def hinted(tmp_path: Path, hint: Any = 1000, *, kind: str = "tar", index: bool = False, **more: Any) -> Any:
    folder = tmp_path / "shards"
    url = str(folder) if folder.exists() else write(folder, shards(kind, index=index))
    return closing(dataset(kind, url, num_samples=hint, transform=CROP, **more))


def test_hint_is_the_length_of_dataset_and_loader_until_the_shards_are_indexed(
    kind: str, tmp_path: Path
) -> None:
    data = hinted(tmp_path, kind=kind, cache=tmp_path / "cache")
    loader = DataLoader(data, 16, shuffle=True)
    assert len(data) == 1000 and len(loader) == 63 and "about 1,000 samples" in repr(data)
    assert len(DataLoader(data, 16, drop_last=True)) == 62
    assert sum(len(batch["__key__" if kind == "tar" else "name"]) for batch in loader) == TOTAL
    with pytest.warns(UserWarning, match=f"num_samples=1,000 was given .* its shards have {TOTAL} samples"):
        assert len(data) == TOTAL
    assert len(data) == TOTAL and len(loader) == 11, "warned once"


@pytest.mark.parametrize(("mode", "drop_last", "found"), [("train", False, 334), ("train", True, 333)])
def test_hint_is_shared_by_the_ranks(mode: str, drop_last: bool, found: int, tmp_path: Path) -> None:
    sampler = ShardSampler(hinted(tmp_path), 3, 1, drop_last=drop_last, mode=mode)
    assert len(sampler) == sampler.num_samples == found
    assert len(DataLoader(sampler.dataset, 10, sampler=sampler)) == 34


def test_right_hint_says_nothing_and_a_known_length_replaces_it(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    assert len(hinted(tmp_path, TOTAL, index=True)) == TOTAL
    assert not recwarn.list


def test_hint_does_not_make_samples_available_by_index(tmp_path: Path) -> None:
    data = hinted(tmp_path)
    not_indexed = "not indexed yet"
    with pytest.raises(TypeError, match=not_indexed):
        data[5]
    with pytest.raises(TypeError, match=not_indexed):
        DistributedSampler(data, 2, 0)
    with pytest.raises(TypeError, match=not_indexed):
        next(iter(ShardSampler(data, 2, 0)))
    with pytest.raises(TypeError, match=not_indexed):
        fastload.cached(data, tmp_path / "cache")
    for part in (Subset(data, range(5)), random_split(data, [0.5, 0.5])[0]):
        with pytest.raises(ArgumentError, match=not_indexed):
            DataLoader(part, 4)
    for sampler in (RandomSampler(data), SequentialSampler(data), [3, 4]):
        with pytest.raises(TypeError, match=not_indexed):
            next(iter(DataLoader(data, 4, sampler=sampler, on_error="replace")))


@pytest.mark.parametrize("wrap", [identity, lambda data: fastload.map(data, identity)], ids=["", "map"])
def test_state_of_a_hinted_epoch_is_that_of_one_without_a_hint(wrap: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    loader = DataLoader(wrap(hinted(tmp_path, cache=cache)), 16, shuffle=True, seed=1)
    batches = iter(loader)
    seen = [int(one) for _ in range(3) for one in next(batches)["cls"]]
    state = through_json(loader.state_dict())
    assert state["length"] is None
    again = DataLoader(wrap(hinted(tmp_path, None, cache=cache)), 16, shuffle=True, seed=1)
    again.load_state_dict(state)
    seen += [int(one) for batch in again for one in batch["cls"]]
    assert sorted(seen) == list(range(TOTAL))
    assert sorted(torch.cat([batch["cls"] for batch in again]).tolist()) == list(range(TOTAL))


def test_hint_is_no_part_of_what_a_dataset_is(tmp_path: Path) -> None:
    from fastload.datasets.fingerprint import describe

    assert describe(hinted(tmp_path, 5), "dataset") == describe(hinted(tmp_path, None), "dataset")
