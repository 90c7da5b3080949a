"""Index batch in, collated batch out: reads the samples, applies `on_error`, collates into a slot.

A dataset needs no more than torch asks for. A `RowDataset` is read ahead and written straight into the batch:
no sample objects, no stacking. A subclass that makes its samples itself is read ahead, and asked for them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate, default_convert

from fastload.datasets.protocols import (
    Allocate,
    CacheFilling,
    RowDataset,
    RowErrors,
    RowRequests,
    as_encoded_rows,
    as_filling,
    as_rows,
    bulk_getter,
    current_reader,
    finish_batch,
    inner_datasets,
    key_of,
    own_samples,
    start_epoch,
)
from fastload.datasets.seeds import SampleSeeds, digest
from fastload.errors import (
    ArgumentError,
    FastloadError,
    NotFoundError,
    ObjectChangedError,
    ShortReadError,
    StoreError,
)
from fastload.metrics.counters import Counters
from fastload.metrics.torch_private import collate_map, collate_tensors
from fastload.workers.mismatch import describe_mismatch

__all__ = ["BatchCounters", "BatchMaker", "collate_into", "note_sample"]

_REPLACEMENTS = 16  # how many other samples `on_error="replace"` tries before it gives up
_UNUSED = 256  # samples that were read ahead and not asked for, after which no more are read ahead


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
            return collate_tensors(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
        return torch.stack(batch, 0, out=allocate((len(batch), *first.shape), first.dtype))

    if collate_map[torch.Tensor] is collate_tensors:
        collate_map[torch.Tensor] = stack


class BatchCounters(Counters):
    """Of the process that makes batches of `dataset`: with what that counts itself, and those in it do."""

    def __init__(self, dataset: Any) -> None:
        inner = inner_datasets(dataset)
        sources = [as_rows(dataset), as_filling(dataset), *(one.dataset for one in inner)]
        # A cache hands its counters to its dataset only where samples are read ahead.
        sources += [getattr(source, "cache", None) for source in sources]
        found = [getattr(source, "counters", None) for source in sources]
        super().__init__(dict.fromkeys(counters for counters in found if isinstance(counters, Counters)))
        self._alone = any(one.alone for one in inner)

    def made_batch(self, samples: int) -> None:
        """A batch was made, of so many samples."""
        self.add("collate.batches")
        self.add("collate.samples", samples)
        if self._alone:
            self.add("get.alone", samples)


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
        self._row_by_row = self._rows is not None and own_samples(dataset) is None
        self._unused = 0
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
        fastloads = [as_filling(dataset), *(inner.dataset for inner in inner_datasets(dataset))]
        self._filling = [one for one in fastloads if isinstance(one, CacheFilling)]
        self.counters = BatchCounters(dataset)
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
        self._unused = 0
        start_epoch(self._dataset, epoch)

    def prefetch(self, index: Any) -> None:
        """Start reading an index batch that will be asked for after those announced before.

        Raises:
            What the dataset raises; then none of the batch is announced.
        """
        if self._rows is None or self._unused >= _UNUSED:
            return
        before = current_reader.set(self._reader)
        try:
            self._rows.prefetch(index if self._auto_collation else [index])
        except Exception:
            self.cancel(index)
            if self._row_by_row:
                raise
            # A `__getitem__` of its own may take what the dataset below has no sample of: it decides.
            self._unused = _UNUSED
        except BaseException:
            self.cancel(index)
            raise
        finally:
            current_reader.reset(before)

    def cancel(self, index: Any) -> None:
        """An index batch that was announced will not be asked for; what could not be announced is ignored."""
        if self._rows is not None:
            with contextlib.suppress(Exception):
                self._rows.cancel(index if self._auto_collation else [index])

    def flush_cache(self) -> None:
        """Before the last batch of an epoch is handed over: the next epoch finds this one in the cache."""
        for filling in self._filling:
            filling.flush_cache()

    def close_cache(self) -> None:
        """At the end of this process: write out what is queued."""
        for filling in self._filling:
            filling.close_cache()

    def __call__(self, index: Any, *, encoded: bool = False) -> Any:
        """The collated batch of `index`; with `encoded`, its images as `EncodedImages`.

        Raises:
            Whatever the dataset raises, with a note of the sample, where `on_error` does not cover it.
        """
        try:
            batch = self._make_encoded(list(index)) if encoded else self._make(index)
        except StopIteration as error:
            self.cancel(index)
            # Left alone it would end the epoch without a word, since it passes for the end of an iterator.
            raise RuntimeError(f"dataset or collate_fn raised StopIteration for batch {index!r}") from error
        except BaseException:  # Ctrl-C too: nobody will take what of it was announced
            self.cancel(index)
            raise
        self.counters.made_batch(len(index) if self._auto_collation else 1)
        return batch

    def _make(self, index: Any) -> Any:
        indices = list(index) if self._auto_collation else [index]
        if self._rows is not None and self._row_by_row:
            batch = self._fill_rows(self._rows, indices)
            if batch is not None:
                return batch
        asked = self._taken_ahead()
        samples = self._samples(index, indices)
        if self._rows is not None and not self._row_by_row:
            self._drop_unused(indices, self._taken_ahead() - asked)
        with self.counters.timed("collate"):
            try:
                return self._collated(samples if self._auto_collation else samples[0])
            except Exception as error:
                if self._collate is default_collate:
                    _tell(error, self._why_not_collated(samples, indices))
                raise

    def _collated(self, samples: Any) -> Any:
        with self._on_host():
            return self._collate(samples)

    def _why_not_collated(self, samples: Any, indices: list[Any]) -> str:
        def name(row: int) -> str:
            # Another sample may have taken the place of a bad one.
            return self._name(indices[row]) if self._on_error == "raise" else f"sample in row {row}"

        with contextlib.suppress(Exception):  # of the user's classes: torch's own error must come through
            return describe_mismatch(samples, name)
        return ""

    def _name(self, index: Any) -> str:
        """ "sample 3 'cat/3.jpg'": with its key, where the dataset knows that."""
        with contextlib.suppress(Exception):  # not numbered, or out of range: that may be the very error
            key = key_of(self._dataset, index)
            if key is not None:
                return f"sample {index!r} {key!r}"
        return f"sample {index!r}"

    def _taken_ahead(self) -> float:
        """How many samples were asked for that had been read ahead, as the dataset itself counts them."""
        return 0.0 if self._rows is None else self._rows.counters["get.ahead"]

    def _drop_unused(self, indices: list[Any], used: float) -> None:
        """Let go of what was read ahead for these samples and their own `__getitem__` did not ask for.

        One that never asks for its own sample (it gives the key alone, or another sample) is read ahead for
        nothing: that ends after a while.
        """
        if used < len(indices):
            self.cancel(indices if self._auto_collation else indices[0])
        self._unused = 0 if used else self._unused + len(indices)

    def _fill_rows(self, rows: RowDataset, indices: list[int]) -> Any | None:
        direct = self._auto_collation and self._collate is default_collate
        batch = rows.new_batch(len(indices), self._allocate if direct else _ordinary)
        if batch is None:
            return None
        self._settle_rows(rows, batch, indices)
        if direct:
            with self.counters.timed("collate"), self._on_host():
                return self._finish_batch(rows, batch, indices)
        samples = [rows.sample(batch, row) for row in range(len(indices))]
        if self._seeds is not None and indices:
            self._seeds.set(indices[-1])
        return self._collated(samples if self._auto_collation else samples[0])

    def _finish_batch(self, rows: RowDataset, batch: Any, indices: list[Any]) -> Any:
        try:
            return finish_batch(self._dataset, batch)
        except Exception as error:
            samples = [rows.sample(batch, row) for row in range(len(indices))]
            _tell(error, self._why_not_collated(samples, indices))
            raise

    def _make_encoded(self, indices: list[int]) -> Any:
        assert self._rows is not None
        assert self._encoded_rows is not None
        why = self._encoded_rows.why_not_encoded()  # the transform may be another one now
        if why is not None:
            raise ArgumentError(f"decode= of the loader does not work here: {why}")
        batch = self._encoded_rows.new_encoded_batch(len(indices), self._allocate)
        self._settle_rows(self._rows, batch, indices)
        with self.counters.timed("collate"), self._on_host():
            return self._encoded_rows.finish_encoded_batch(batch)

    def _settle_rows(self, rows: RowDataset, batch: Any, indices: list[int]) -> None:
        def fill(todo: RowRequests) -> RowErrors:
            return rows.fill(batch, todo, self._seed, self._epoch)

        with self._seeds or contextlib.nullcontext():
            self._settle(indices, fill, lambda target, source: rows.copy_row(batch, target, source))

    def _samples(self, index: Any, indices: list[Any]) -> Any:
        many = bulk_getter(self._dataset) if self._auto_collation else None
        if many is not None and self._seeds is None:
            try:
                with self.counters.timed("decode"):
                    samples = many(index)
                self.counters.add("decode.samples", len(indices))
                return samples
            except Exception as error:
                self._raise_uncovered(error)  # else one by one, to find the bad ones
        parts: list[Any] = [None] * len(indices)

        def fill(todo: RowRequests) -> RowErrors:
            failures: RowErrors = []
            if self._seeds is not None and todo:
                self._seeds.begin_batch(todo[0][1])
            for row, index in todo:
                try:
                    parts[row] = self._seeded_sample(index, many, last=row == todo[-1][0])
                except Exception as error:
                    failures.append((row, error))
                    if self._on_error == "raise":
                        break
            return failures

        def copy(target: int, source: int) -> None:
            parts[target] = parts[source]

        with self.counters.timed("decode"):
            self._settle(indices, fill, copy)
        self.counters.add("decode.samples", len(parts))
        return parts if many is None else [sample for part in parts for sample in part]

    def _seeded_sample(self, index: Any, many: Callable[[Any], Any] | None, *, last: bool) -> Any:
        if self._seeds is None:
            return self._sample(index, many)
        if not last:
            return self._seeds.call(index, self._sample, index, many)
        self._seeds.set(index)
        return self._sample(index, many)

    def _sample(self, index: Any, many: Callable[[Any], Any] | None) -> Any:
        """A sample; a list of it where `__getitems__`, as `many`, makes the samples."""
        try:
            return self._dataset[index] if many is None else many([index])
        except StopIteration as error:
            raise RuntimeError(f"the dataset raised StopIteration for sample {index!r}") from error

    def _settle(
        self, indices: list[Any], fill: Callable[[RowRequests], RowErrors], copy: Callable[[int, int], None]
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
        """Raise `error` unless `on_error` covers it, with a note of its sample."""
        if not isinstance(error, FastloadError):
            _tell(error, self._name(index))
        self._raise_uncovered(error)

    def _raise_uncovered(self, error: Exception) -> None:
        """Raise `error` unless `on_error` covers it: a bad sample, not a store that is down."""
        outage = isinstance(error, StoreError) and not isinstance(
            error, NotFoundError | ObjectChangedError | ShortReadError
        )
        if self._on_error == "raise" or outage:
            raise error

    def _replacement(self, index: Any, attempt: int) -> int:
        return digest(self._seed, self._epoch, index, attempt) % len(self._dataset)


def _tell(error: Exception, sample: str) -> None:
    """Let `error` say which sample it is about, where its text is not ours to change."""
    if sample:
        error.__dict__.setdefault("fastload_sample", sample)


def note_sample(error: Exception) -> None:
    """Show which sample `error` is about, where it does not leave this process: below its own text."""
    sample = error.__dict__.pop("fastload_sample", "")
    if sample and sys.version_info >= (3, 11):
        # One instance may be raised again and again: the note is that of the last time.
        error.__notes__ = [
            note for note in getattr(error, "__notes__", ()) if not note.startswith("(sample ")
        ]
        error.add_note(f"({sample})")


def _ordinary(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")
