"""Index batches announced to a dataset that can prefetch their samples."""

from __future__ import annotations

import contextlib
from typing import Any

from fastload.datasets.protocols import RowDataset, current_reader

__all__ = ["ReadAhead"]

_UNUSED = 256  # samples prefetched in vain, after which prefetching stops


class ReadAhead:
    """Announces index batches, and cancels those that are not used.

    Args:
        rows: the dataset, or None where it cannot prefetch.
        auto_collation: False where an "index batch" is one index.
        optional: a `__getitem__` of the user's makes the samples, and may not ask for the prefetched ones.
    """

    def __init__(self, rows: RowDataset | None, *, auto_collation: bool, optional: bool) -> None:
        self._rows = rows
        self._auto_collation = auto_collation
        self._optional = optional
        self._reader = object()  # not `self`, which the dataset would keep
        self._unused = 0

    def start_epoch(self) -> None:
        """Prefetch again, also where the last epoch did not use it."""
        self._unused = 0

    def announce(self, index: Any) -> None:
        """Start reading an index batch that will be asked for after those announced before.

        Raises:
            Exception: any that the dataset raises; then none of the batch is announced.
        """
        if self._rows is None or self._unused >= _UNUSED:
            return
        before = current_reader.set(self._reader)
        try:
            self._rows.prefetch(self._indices(index))
        except Exception:
            self.cancel(index)
            if not self._optional:
                raise
            # The user's `__getitem__` may accept an index that the dataset below has no sample for.
            self._unused = _UNUSED
        except BaseException:
            self.cancel(index)
            raise
        finally:
            current_reader.reset(before)

    def cancel(self, index: Any) -> None:
        """An announced index batch will not be asked for. One that could not be announced is ignored."""
        if self._rows is not None:
            with contextlib.suppress(Exception):
                self._rows.cancel(self._indices(index))

    def used(self) -> float:
        """Prefetched samples used so far, as counted by the dataset."""
        return 0.0 if self._rows is None else self._rows.counters["get.ahead"]

    def drop_unused(self, index: Any, samples: int, used: float) -> None:
        """After a batch of the user's `__getitem__`: release the prefetched samples that it did not use.

        A `__getitem__` that never asks for its own sample (it returns the key alone, or another sample) makes
        prefetching useless: it stops after a while.
        """
        if used < samples:
            self.cancel(index)
        self._unused = 0 if used else self._unused + samples

    def _indices(self, index: Any) -> Any:
        return index if self._auto_collation else [index]
