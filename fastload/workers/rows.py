"""Batches whose rows a dataset writes itself: as pixels, or as encoded images for the device to decode."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from fastload.datasets.columns import ordinary_memory
from fastload.datasets.protocols import (
    Allocate,
    EncodedRows,
    RowErrors,
    RowRequests,
)
from fastload.datasets.seeds import SampleSeeds
from fastload.datasets.seen_rows import Rows
from fastload.errors import ArgumentError
from fastload.workers.collate import Collation, tell_mismatch

__all__ = ["EncodedRowBatches", "RowBatches"]


class _Batches(ABC):
    """Batches that `rows` fills."""

    def __init__(
        self, rows: Rows, collation: Collation, seeds: SampleSeeds | None, allocate: Allocate
    ) -> None:
        self._rows = rows
        self._collation = collation
        self._seeds = seeds
        self._allocate = allocate

    @abstractmethod
    def new_batch(self, n: int) -> Any | None:
        """An empty batch of `n` rows; None where the dataset has to be read sample by sample."""

    def fill(self, batch: Any, requests: RowRequests, seed: int, epoch: int) -> RowErrors:
        """Wait for the payloads of these samples, and decode them into their rows."""
        with self._seeds or contextlib.nullcontext():
            return self._rows.fill(batch, requests, seed, epoch)

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        """Make row `target` equal to row `source`."""
        self._rows.copy_row(batch, target, source)

    @abstractmethod
    def finish(self, batch: Any, indices: list[Any]) -> Any:
        """The filled batch in the form that the loader hands over. `indices`: the sample in each row."""


class RowBatches(_Batches):
    """Batches of pixels and columns: no sample objects, no stacking.

    Args:
        rows: of the loader's dataset.
        collation: the loader's.
        seeds: of the loader's `seed`, or None.
        allocate: memory for batches that need no `collate_fn`, such as a slot.
        name: index of a sample -> its name, for errors.
    """

    def __init__(
        self,
        rows: Rows,
        collation: Collation,
        seeds: SampleSeeds | None,
        allocate: Allocate,
        name: Callable[[Any], str],
    ) -> None:
        super().__init__(rows, collation, seeds, allocate)
        self._name = name

    def new_batch(self, n: int) -> Any | None:
        return self._rows.new_batch(n, self._allocate if self._collation.direct else ordinary_memory)

    def finish(self, batch: Any, indices: list[Any]) -> Any:
        """The batch itself, or that which a user's `collate_fn` makes of its rows."""
        if not self._collation.direct:
            samples = self._samples(batch, indices)
            if self._seeds is not None and indices:
                self._seeds.set(indices[-1])
            return self._collation(samples, lambda row: self._name(indices[row]))
        with self._collation.on_host():
            try:
                return self._rows.finish_batch(batch)
            except Exception as error:
                tell_mismatch(error, self._samples(batch, indices), lambda row: self._name(indices[row]))
                raise

    def _samples(self, batch: Any, indices: list[Any]) -> list[Any]:
        return [self._rows.sample(batch, row) for row in range(len(indices))]


class EncodedRowBatches(_Batches):
    """Batches with `EncodedImages` in place of pixels.

    Args:
        rows, encoded: the same dataset, in both of its roles.
        collation, seeds, allocate: as for `RowBatches`.
    """

    def __init__(
        self,
        rows: Rows,
        encoded: EncodedRows,
        collation: Collation,
        seeds: SampleSeeds | None,
        allocate: Allocate,
    ) -> None:
        super().__init__(rows, collation, seeds, allocate)
        self._encoded = encoded

    def new_batch(self, n: int) -> Any:
        """An empty batch of `n` rows.

        Raises:
            ArgumentError: the dataset's transform, which may have changed, needs pixels.
        """
        why = self._encoded.why_not_encoded()
        if why is not None:
            raise ArgumentError(f"decode= of the loader does not work here: {why}")
        return self._encoded.new_encoded_batch(n, self._allocate)

    def finish(self, batch: Any, indices: list[Any]) -> Any:
        with self._collation.on_host():
            return self._encoded.finish_encoded_batch(batch)
