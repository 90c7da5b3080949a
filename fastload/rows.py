"""What a dataset may offer beside `__getitem__`: being read ahead, and written row by row into the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import Subset

from fastload.stats import Counters

__all__ = ["Allocate", "CacheFilling", "Failures", "RowDataset", "Todo", "as_filling", "as_rows"]

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
Todo = list[tuple[int, Any]]  # rows to be filled: (row of the batch, index of the sample)
Failures = list[tuple[int, Exception]]  # (row of the batch, what went wrong)


@runtime_checkable
class CacheFilling(Protocol):
    """A dataset that fills a cache in the background."""

    def flush_cache(self) -> None:
        """Wait until what was read so far can be found in the cache, by other processes too."""

    def close_cache(self) -> None:
        """Flush, and let go of what this process holds of the cache and the store."""


@runtime_checkable
class RowDataset(Protocol):
    """A map-style dataset that can be read ahead and be filled row by row."""

    counters: Counters

    def prefetch(self, indices: Iterable[int]) -> None:
        """Start reading these samples; they will be asked for in this order. Does not block."""

    def cancel(self, indices: Iterable[int]) -> None:
        """These prefetched samples will not be asked for."""

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        """An empty collated batch of `n` rows, or None where this dataset has to be read sample by sample."""

    def fill(self, batch: Any, todo: Todo, seed: int, epoch: int) -> Failures:
        """Write the samples into their rows; the rows of the failures returned are undefined."""

    def sample(self, batch: Any, row: int) -> Any:
        """The sample in a row, as `__getitem__` would return it."""

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        """Make row `target` equal to row `source`."""


def as_filling(dataset: Any) -> CacheFilling | None:
    """The dataset as a `CacheFilling`, through torch's `Subset` too; None where it is not one."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset if isinstance(dataset, CacheFilling) else None


def as_rows(dataset: Any) -> RowDataset | None:
    """The dataset as a `RowDataset`, through torch's `Subset` too; None where it is not one."""
    if type(dataset) is Subset:
        inner = as_rows(dataset.dataset)
        return None if inner is None else _SubsetRows(inner, dataset.indices)
    return dataset if isinstance(dataset, RowDataset) else None


class _SubsetRows:
    """Some samples of a `RowDataset`, by torch's `Subset`."""

    def __init__(self, inner: RowDataset, indices: Sequence[int]) -> None:
        self._inner = inner
        self._indices = indices
        self.counters = inner.counters
        self.new_batch = inner.new_batch
        self.sample = inner.sample
        self.copy_row = inner.copy_row

    def prefetch(self, indices: Iterable[int]) -> None:
        self._inner.prefetch([self._indices[index] for index in indices])

    def cancel(self, indices: Iterable[int]) -> None:
        self._inner.cancel([self._indices[index] for index in indices])

    def fill(self, batch: Any, todo: Todo, seed: int, epoch: int) -> Failures:
        return self._inner.fill(batch, [(row, self._indices[index]) for row, index in todo], seed, epoch)
