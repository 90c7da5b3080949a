"""Samples of any map-style dataset, one by one or by its `__getitems__`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload.datasets.protocols import RowErrors, RowRequests, bulk_getter
from fastload.datasets.seeds import SampleSeeds
from fastload.metrics.counters import Counters
from fastload.workers.on_error import ErrorPolicy

__all__ = ["SampleReader"]


class SampleReader:
    """Reads the samples of an index batch as torch does.

    Args:
        dataset: map-style.
        auto_collation: False where an "index batch" is one index.
        seeds: of the loader's `seed`, or None.
        errors: what happens to bad samples.
        counters: counts decode.samples and decode.seconds.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        auto_collation: bool,
        seeds: SampleSeeds | None,
        errors: ErrorPolicy,
        counters: Counters,
    ) -> None:
        self._dataset = dataset
        self._auto_collation = auto_collation
        self._seeds = seeds
        self._errors = errors
        self._counters = counters

    def read(self, index: Any, indices: list[Any]) -> Any:
        """The samples of an index batch.

        Args:
            index: the index batch itself, which a `__getitems__` receives.
            indices: its sample indices.
        """
        many = bulk_getter(self._dataset) if self._auto_collation else None
        if many is not None and self._seeds is None:
            try:
                with self._counters.timed("decode"):
                    samples = many(index)
                self._counters.add("decode.samples", len(indices))
                return samples
            except Exception as error:
                self._errors.raise_uncovered(error)  # else one by one, to find the bad ones
        parts: list[Any] = [None] * len(indices)

        def fill(requests: RowRequests) -> RowErrors:
            return self._fill(parts, requests, many)

        def copy(target: int, source: int) -> None:
            parts[target] = parts[source]

        with self._counters.timed("decode"):
            self._errors.settle(indices, fill, copy)
        self._counters.add("decode.samples", len(parts))
        return parts if many is None else [sample for part in parts for sample in part]

    def _fill(self, parts: list[Any], requests: RowRequests, many: Callable[[Any], Any] | None) -> RowErrors:
        errors: RowErrors = []
        seeds = self._seeds
        if seeds is not None and requests:
            seeds.begin_batch(requests[0][1])
        for row, index in requests:
            try:
                if seeds is None:
                    parts[row] = self._sample(index, many)
                elif row != requests[-1][0]:
                    parts[row] = seeds.call(index, self._sample, index, many)
                else:  # `collate_fn` draws from the state after the last sample
                    seeds.set(index)
                    parts[row] = self._sample(index, many)
            except Exception as error:
                errors.append((row, error))
                if self._errors.on_error == "raise":
                    break
        return errors

    def _sample(self, index: Any, many: Callable[[Any], Any] | None) -> Any:
        """One sample; a list with it where `many`, a `__getitems__`, makes the samples."""
        try:
            return self._dataset[index] if many is None else many([index])
        except StopIteration as error:
            raise RuntimeError(f"the dataset raised StopIteration for sample {index!r}") from error
