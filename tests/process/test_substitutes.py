"""The substitute of a bad sample is another sample, wherever there is another one."""

from __future__ import annotations

from typing import Any

import pytest

from fastload import DataLoader
from tests.loaderdata import Numbers


def first_is_bad(index: int) -> int:
    if index == 0:
        raise ValueError("bad")
    return index


def load(count: int, seed: int) -> tuple[list[Any], list[Any]]:
    """(the samples of an epoch, what the loader noted as bad)."""
    loader = DataLoader(Numbers(count, first_is_bad), batch_size=None, seed=seed, on_error="replace")
    return [int(sample) for sample in loader], loader.stats()["bad"]


def test_bad_sample_of_many_seeds_is_noted_once() -> None:
    for seed in range(50):
        samples, bad = load(2, seed)
        assert samples == [1, 1]
        assert bad == [("0", "ValueError: bad")]


def test_bad_sample_without_another_one_is_raised() -> None:
    with pytest.raises(ValueError, match="bad"):
        load(1, 0)


def most_are_bad(index: int) -> int:
    if index % 10 < 6:
        raise ValueError(f"no label\nin {index}")
    return index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_more_than_a_few_bad_samples_are_warned_of_once(num_workers: int) -> None:
    dataset = Numbers(40, most_are_bad)
    loader = DataLoader(dataset, 10, num_workers=num_workers, on_error="repeat")
    with pytest.warns(
        RuntimeWarning, match=r"6 bad samples of this epoch so far.* ValueError: no label\. See"
    ):
        for _ in range(2):
            list(loader)
    stats = loader.stats()
    assert stats["counters"]["bad.samples"] == 48 and len(stats["bad"]) == 48
    assert "24 bad samples were replaced" in stats["verdict"], "those of the epoch"


def test_a_few_bad_samples_an_epoch_are_no_warning() -> None:
    loader = DataLoader(Numbers(8, lambda index: 1 // index % 2), 8, on_error="repeat")
    for _ in range(8):
        list(loader)
    stats = loader.stats()
    assert stats["counters"]["bad.samples"] == 8 and "replaced" not in stats["verdict"]
