"""Index batch in, collated batch out: reads the samples, applies `on_error`, collates into a slot.

A dataset needs no more than torch asks for. A `RowDataset` is read ahead and written straight into the batch:
no sample objects, no stacking.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils import collate as torch_collate

from fastload.errors import FastloadError, NotFoundError, ObjectChangedError, ShortReadError, StoreError
from fastload.rows import (
    Allocate,
    Failures,
    RowDataset,
    Todo,
    as_encoded_rows,
    as_filling,
    as_rows,
    current_reader,
    start_epoch,
)
from fastload.seeds import SampleSeeds, digest
from fastload.stats import Counters

__all__ = ["BatchMaker", "collate_into"]

_REPLACEMENTS = 16  # how many other samples `on_error="replace"` tries before it gives up


def collate_into(allocate: Allocate) -> None:
    """Make torch's `default_collate`, in this process, stack tensors into memory from `allocate`.

    The map is torch's documented extension point, so a `collate_fn` that calls `default_collate` gains too.
    What someone else has put there stays, and only this thread stacks into the slot of the batch it makes.
    """
    thread = threading.get_ident()

    def stack(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        first = batch[0]
        plain = not first.is_nested and all(
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and tensor.shape == first.shape
            and tensor.dtype is first.dtype
            and not tensor.requires_grad
            for tensor in batch
        )
        if not plain or threading.get_ident() != thread:
            return torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
        return torch.stack(batch, 0, out=allocate((len(batch), *first.shape), first.dtype))

    table = torch_collate.default_collate_fn_map
    if table[torch.Tensor] is torch_collate.collate_tensor_fn:
        table[torch.Tensor] = stack


class BatchMaker:
    """Makes the batch of an index batch.

    Args:
        dataset: map-style.
        collate_fn: as torch's.
        auto_collation: False where an "index batch" is one index (`batch_size=None`).
        on_error: "raise"; "skip" (the row repeats another row of its batch); "replace" (the row gets another
            sample, the same one in every run). Both keep the batch full, and count.
        seeded: make all randomness of a sample a function of (seed, epoch, index), user transforms included,
            and what `collate_fn` draws a function of the batch.
        allocate: where batches are made.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate_fn: Callable[[Any], Any],
        auto_collation: bool,
        on_error: str,
        seeded: bool,
        allocate: Allocate,
    ) -> None:
        self._dataset = dataset
        self._rows = as_rows(dataset)
        self._encoded_rows = as_encoded_rows(dataset)
        self._collate = collate_fn
        self._auto_collation = auto_collation
        self._on_error = on_error
        self._seeds = SampleSeeds() if seeded else None
        self._allocate = allocate
        self._seed = self._epoch = 0
        self._numbered = True
        self._reader = object()  # not this one, which the dataset would keep
        self._on_host: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.counters = _counters(self._rows) or _counters(as_filling(dataset)) or Counters()
        self.bad: list[tuple[str, str]] = []  # (sample, what was wrong with it)

    def start_epoch(self, seed: int, epoch: int, *, numbered: bool = True) -> None:
        """From now on samples are drawn with the randomness of this epoch.

        Where they are not `numbered`, no other sample can be asked for: on_error="replace" acts as "skip".
        """
        self._seed, self._epoch, self._numbered = seed, epoch, numbered
        # torch's own functions make tensors of numbers on the default device: CUDA, in a forked worker too.
        elsewhere = torch.get_default_device().type != "cpu"
        pinned = elsewhere and self._collate in (default_collate, default_convert)
        self._on_host = functools.partial(torch.device, "cpu") if pinned else contextlib.nullcontext
        if self._seeds is not None:
            self._seeds.start_epoch(seed, epoch)
        start_epoch(self._dataset, epoch)

    def prefetch(self, index: Any) -> None:
        """Start reading an index batch that will be asked for after those announced before.

        Raises:
            What the dataset raises; then none of the batch is announced.
        """
        if self._rows is None:
            return
        before = current_reader.set(self._reader)
        try:
            self._rows.prefetch(index if self._auto_collation else [index])
        except BaseException:
            self._give_up(index)
            raise
        finally:
            current_reader.reset(before)

    def cancel(self, index: Any) -> None:
        """An index batch that was announced will not be asked for."""
        if self._rows is not None:
            self._rows.cancel(index if self._auto_collation else [index])

    def _give_up(self, index: Any) -> None:
        """As `cancel`, while an error is raised: what cannot be announced cannot be cancelled either."""
        with contextlib.suppress(Exception):
            self.cancel(index)

    def flush_cache(self) -> None:
        """Before the last batch of an epoch is handed over: the next epoch finds this one in the cache."""
        filling = as_filling(self._dataset)
        if filling is not None:
            filling.flush_cache()

    def close_cache(self) -> None:
        """At the end of this process: write out what is queued."""
        filling = as_filling(self._dataset)
        if filling is not None:
            filling.close_cache()

    def __call__(self, index: Any, *, encoded: bool = False) -> Any:
        """The collated batch of `index`; with `encoded`, its images as `EncodedImages`.

        Raises:
            Whatever the dataset raises, with a note of the sample, where `on_error` does not cover it.
        """
        try:
            batch = self._make_encoded(list(index)) if encoded else self._make(index)
        except StopIteration as error:
            self._give_up(index)
            # Left alone it would end the epoch without a word, since it passes for the end of an iterator.
            raise RuntimeError(f"dataset or collate_fn raised StopIteration for batch {index!r}") from error
        except BaseException:  # Ctrl-C too: nobody will take what of it was announced
            self._give_up(index)
            raise
        self.counters.add("collate.batches")
        self.counters.add("collate.samples", len(index) if self._auto_collation else 1)
        return batch

    def _make(self, index: Any) -> Any:
        indices = list(index) if self._auto_collation else [index]
        if self._rows is not None:
            batch = self._fill_rows(self._rows, indices)
            if batch is not None:
                return batch
        samples = self._samples(index, indices)
        with self.counters.timed("collate"):
            return self._collated(samples if self._auto_collation else samples[0])

    def _collated(self, samples: Any) -> Any:
        with self._on_host():
            return self._collate(samples)

    def _fill_rows(self, rows: RowDataset, indices: list[int]) -> Any | None:
        direct = self._auto_collation and self._collate is default_collate
        batch = rows.new_batch(len(indices), self._allocate if direct else _ordinary)
        if batch is None:
            return None
        self._settle_rows(rows, batch, indices)
        if direct:
            return batch
        samples = [rows.sample(batch, row) for row in range(len(indices))]
        if self._seeds is not None and indices:
            self._seeds.set(indices[-1])
        return self._collated(samples if self._auto_collation else samples[0])

    def _make_encoded(self, indices: list[int]) -> Any:
        assert self._rows is not None
        assert self._encoded_rows is not None  # the loader has asked `why_not_encoded`
        batch = self._encoded_rows.new_encoded_batch(len(indices), self._allocate)
        self._settle_rows(self._rows, batch, indices)
        with self.counters.timed("collate"):
            return self._encoded_rows.finish_encoded_batch(batch)

    def _settle_rows(self, rows: RowDataset, batch: Any, indices: list[int]) -> None:
        def fill(todo: Todo) -> Failures:
            return rows.fill(batch, todo, self._seed, self._epoch)

        with self._seeds or contextlib.nullcontext():
            self._settle(indices, fill, lambda target, source: rows.copy_row(batch, target, source))

    def _samples(self, index: Any, indices: list[Any]) -> Any:
        many = getattr(self._dataset, "__getitems__", None)
        if many and self._auto_collation and self._on_error == "raise" and self._seeds is None:
            self.counters.add("decode.samples", len(indices))
            with self.counters.timed("decode"):
                return many(index)
        samples: list[Any] = [None] * len(indices)

        def fill(todo: Todo) -> Failures:
            failures: Failures = []
            if self._seeds is not None and todo:
                self._seeds.begin_batch(todo[0][1])
            for row, index in todo:
                try:
                    samples[row] = self._seeded_sample(index, last=row == todo[-1][0])
                except Exception as error:
                    failures.append((row, error))
                    if self._on_error == "raise":
                        break
            return failures

        def copy(target: int, source: int) -> None:
            samples[target] = samples[source]

        with self.counters.timed("decode"):
            self._settle(indices, fill, copy)
        self.counters.add("decode.samples", len(samples))
        return samples

    def _seeded_sample(self, index: Any, *, last: bool) -> Any:
        if self._seeds is None:
            return self._sample(index)
        if not last:
            return self._seeds.call(index, self._sample, index)
        self._seeds.set(index)
        return self._sample(index)

    def _sample(self, index: Any) -> Any:
        try:
            return self._dataset[index]
        except StopIteration as error:
            raise RuntimeError(f"the dataset raised StopIteration for sample {index!r}") from error

    def _settle(
        self, indices: list[Any], fill: Callable[[Todo], Failures], copy: Callable[[int, int], None]
    ) -> None:
        """Fill every row, putting something else where `on_error` says so."""
        todo = list(enumerate(indices))
        for attempt in range(1 + _REPLACEMENTS):
            failures = fill(todo)
            if not failures:
                return
            wanted = dict(todo)
            for row, error in failures:
                self._judge(wanted[row], error)
                key = getattr(error, "key", None) or wanted[row]
                self.bad.append((str(key), f"{type(error).__name__}: {error}"))
                self.counters.add("bad.samples")
            failed = {row for row, _ in failures}
            if self._on_error == "skip" or not self._numbered:
                good = [row for row in range(len(indices)) if row not in failed]
                if not good:
                    raise failures[0][1]
                for row in failed:
                    copy(row, good[row % len(good)])
                return
            todo = [(row, self._replacement(indices[row], attempt)) for row in sorted(failed)]
        raise failures[0][1]

    def _judge(self, index: Any, error: Exception) -> None:
        """Raise `error` unless `on_error` covers it: a bad sample, not a store that is down."""
        outage = isinstance(error, StoreError) and not isinstance(
            error, NotFoundError | ObjectChangedError | ShortReadError
        )
        if self._on_error == "raise" or outage:
            if not isinstance(error, FastloadError):
                error.__dict__.setdefault("fastload_index", index)
            raise error

    def _replacement(self, index: Any, attempt: int) -> int:
        return digest(self._seed, self._epoch, index, attempt) % len(self._dataset)


def _counters(source: Any) -> Counters | None:
    """Those of a dataset that counts by itself: one instance, so that time spent in reading is told apart."""
    counters = getattr(source, "counters", None)
    return counters if isinstance(counters, Counters) else None


def _ordinary(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")
