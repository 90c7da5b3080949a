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
