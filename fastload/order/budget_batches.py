"""Which samples share a batch under a budget: arrays, made from (sizes, seed, epoch) alone.

    padded    classes of similar size; a batch is the next samples of a class, as many as the budget holds
    packed    windows of the shuffled order; each is packed by best fit, the largest samples first

The classes do not depend on the epoch, so that padded batches are equally many in every epoch. The number of
ranks has no part in any of this: the batches of an epoch are one list, of which each rank reads its share.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import ArgumentError
from fastload.order.permutations import small_permutation

Numbers = NDArray[Any]

_WINDOW = 1 << 20  # samples that are packed together
_FEWEST = 1_024  # in a window, where that makes eight of them: else an epoch would pack as the one before


@dataclass(frozen=True)
class Batches:
    """The batches of an epoch, over all ranks, in the order in which they are read.

    Attributes:
        samples: of all batches, one batch after the other, in another order than that.
        bounds: batch b has the samples bounds[b] to bounds[b + 1].
        order: which batch comes first, second and so on.
    """

    samples: Numbers
    bounds: Numbers
    order: Numbers

    def __len__(self) -> int:
        return len(self.order)

    def batch(self, place: int) -> list[int]:
        """Return the samples of the batch at a place of the order."""
        number = self.order[place]
        indices: list[int] = self.samples[self.bounds[number] : self.bounds[number + 1]].tolist()
        return indices


# --- arguments


def checked_sizes(sizes: Any, budget: float, *, whole: bool) -> Numbers:
    """Return the sizes as an array of int64 or float64.

    Raises:
        ArgumentError: they are no sizes; the message names the first bad one.
    """
    try:
        numbers = np.asarray(sizes)
    except ValueError:  # lists of unequal length
        numbers = np.empty((0, 0))
    if numbers.ndim != 1 or not len(numbers):
        raise ArgumentError(
            f"sizes must be one number for each sample, found an array of shape {numbers.shape}: give a "
            "list, an array or a column of numbers"
        )
    if numbers.dtype.kind not in "iuf":
        odd = next((number for number, size in enumerate(numbers.tolist()) if not is_real(size)), None)
        what = f"values of type {numbers.dtype}" if odd is None else f"{numbers[odd]!r} at sizes[{odd}]"
        raise ArgumentError(f"sizes must be numbers, found {what}: fill in what is missing, or leave it out")
    if numbers.dtype.kind == "f":
        _check_each(numbers, ~np.isfinite(numbers), "a finite number")
    _check_each(numbers, numbers <= 0, "above 0")
    if whole and numbers.dtype.kind == "f":
        _check_each(numbers, numbers != np.floor(numbers), "a whole number with pack=True")
    large = numbers > budget
    if large.any():
        first, more = int(large.argmax()), int(large.sum()) - 1
        raise ArgumentError(
            f"sizes[{first}] is {numbers[first]}, more than budget={budget}{_and_others(more)}: give a "
            "larger budget, cut such samples, or leave them out by torch.utils.data.Subset"
        )
    return numbers.astype(np.int64 if whole or numbers.dtype.kind in "iu" else np.float64)


def is_real(value: Any) -> bool:
    """Return whether a value is one number, of Python or numpy. A bool is none."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _check_each(numbers: Numbers, bad: Numbers, wanted: str) -> None:
    if bad.any():
        first, more = int(bad.argmax()), int(bad.sum()) - 1
        raise ArgumentError(
            f"sizes[{first}] is {numbers[first]}{_and_others(more)}, and a size must be {wanted}: leave such "
            "samples out of the dataset, for example by torch.utils.data.Subset"
        )


def _and_others(more: int) -> str:
    return f", and {more:,} more like it" if more else ""


def bucket_labels(by: Any, count: int) -> Numbers:
    """Return the bucket of each sample as a number from 0 on.

    Raises:
        ArgumentError: `by` does not name one bucket for each sample.
    """
    if by is None:
        return np.zeros(count, np.uint16)
    try:
        buckets = np.asarray(by)
    except ValueError:
        buckets = np.empty((0, 0))
    if buckets.shape != (count,):
        raise ArgumentError(
            f"by has the shape {buckets.shape}, and sizes has {count:,} samples: give one bucket, a number "
            "or a text, for each sample"
        )
    if buckets.dtype.kind not in "iuUSb":
        raise ArgumentError(
            f"by must be whole numbers or texts, found values of type {buckets.dtype}: number the buckets"
        )
    return np.unique(buckets, return_inverse=True)[1]


# --- padded batches


class SizeClasses:
    """Classes of samples whose sizes are similar, and how many samples of each a batch holds.

    A class begins with the largest size that is left, and goes down to (1 - tolerance) of it. It ends before
    that at the last `budget / k` on the way, so that its successor fills the budget with k samples.

    Args:
        sizes, buckets: of each sample. A class has samples of one bucket only.

    Attributes:
        labels: the class of each sample.
        counts, capacities: of each class its samples, and the samples of a full batch.
    """

    def __init__(self, sizes: Numbers, buckets: Numbers, budget: float, tolerance: float) -> None:
        self.labels = np.empty(len(sizes), np.int32)
        counts: list[int] = []
        capacities: list[int] = []
        for bucket in _split(np.arange(len(sizes)), buckets):
            ascending = np.sort(sizes[bucket])
            bounds = sorted(_classes_of(ascending, budget, tolerance))
            largest = ascending[[stop - 1 for _, stop in bounds]]
            self.labels[bucket] = len(counts) + np.searchsorted(largest, sizes[bucket])
            counts += [stop - first for first, stop in bounds]
            capacities += [capacity(budget, size) for size in largest]
        self.counts, self.capacities = np.array(counts), np.array(capacities)
        if len(counts) < 1 << 16:
            self.labels = self.labels.astype(np.uint16)  # which numpy sorts by radix


def _split(samples: Numbers, buckets: Numbers) -> list[Numbers]:
    """Return the samples of each bucket, in the order in which they are given."""
    if not buckets.any():
        return [samples]
    samples = samples[np.argsort(buckets[samples], kind="stable")]
    return np.split(samples, np.flatnonzero(np.diff(buckets[samples])) + 1)


def capacity(budget: float, size: Any) -> int:
    """Return how many samples of this size the budget holds: n of `budget / n`, however that was rounded."""

    def fits(count: int) -> bool:
        return bool(count * size <= budget or size <= budget / count)

    count = max(1, int(budget // size))
    while fits(count + 1):
        count += 1
    while count > 1 and not fits(count):
        count -= 1
    return count


def _classes_of(ascending: Numbers, budget: float, tolerance: float) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the classes of a bucket, the class of the largest samples first."""
    stop = len(ascending)
    while stop:
        largest = ascending[stop - 1]
        least = (1 - tolerance) * largest
        start = int(np.searchsorted(ascending[:stop], least))
        count = min(capacity(budget, least), stop) if least else stop
        if count > capacity(budget, largest):
            start = max(start, int(np.searchsorted(ascending[:stop], budget / count, "right")))
        start = min(start, stop - 1)
        yield start, stop
        stop = start


def padded_batches(classes: SizeClasses, seed: int | None, *, drop_last: bool, together: int) -> Batches:
    """Return the batches of an epoch. `seed`: of the order; None: samples in the order of their indices."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    order = small_permutation(len(classes.labels), generator)
    samples = order[np.argsort(classes.labels[order], kind="stable")]
    full, rest = np.divmod(classes.counts, classes.capacities)
    per_class = full + ((rest > 0) & (not drop_last))
    if drop_last:
        ends = np.cumsum(classes.counts)
        place = np.arange(len(samples)) - np.repeat(ends - classes.counts, classes.counts)
        samples = samples[place < np.repeat(full * classes.capacities, classes.counts)]
    batch_sizes = np.repeat(classes.capacities, per_class)
    if not drop_last:
        last = np.cumsum(per_class)[rest > 0] - 1
        batch_sizes[last] = rest[rest > 0]
    bounds = np.concatenate([[0], np.cumsum(batch_sizes)])
    return Batches(samples, bounds, _arranged(samples, bounds, per_class, generator, together))


def _arranged(
    samples: Numbers, bounds: Numbers, per_class: Numbers, generator: torch.Generator | None, together: int
) -> Numbers:
    """Return the order of the batches: `together` neighbours have samples of similar size.

    Args:
        per_class: batches of each class, one class after the other.
    """
    firsts = samples[bounds[:-1]]
    if together == 1:
        return np.argsort(firsts) if generator is None else small_permutation(len(firsts), generator)
    place = np.arange(len(firsts)) - np.repeat(np.cumsum(per_class) - per_class, per_class)
    whole = place < np.repeat(per_class // together * together, per_class)
    # What is left of the classes: neighbours in this list have the most similar sizes.
    batches = np.concatenate([np.flatnonzero(whole), np.flatnonzero(~whole)])
    count = len(batches) // together
    groups, last = batches[: count * together].reshape(count, together), batches[count * together :]
    if generator is None:
        groups = groups[np.argsort(firsts[groups].min(axis=1))]
    else:
        groups = groups[small_permutation(count, generator)]
    return np.concatenate([groups.ravel(), last])


# --- packed batches


def packed_batches(sizes: Numbers, buckets: Numbers, budget: int, seed: int | None) -> Batches:
    """Return the batches of an epoch: samples of one bucket, which together are at most the budget."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    samples, batches, count = [], [], 0
    for bucket in _split(small_permutation(len(sizes), generator), buckets):
        windows = max(-(-len(bucket) // _WINDOW), min(8, len(bucket) // _FEWEST), 1)
        for window in np.array_split(bucket, windows):
            falling = window[np.argsort(-sizes[window], kind="stable")]
            numbers, used = best_fit(sizes[falling], budget)
            samples.append(falling)
            batches.append(numbers + count)
            count += used
    of_batch = np.concatenate(batches)
    packed = np.concatenate(samples)[np.argsort(of_batch, kind="stable")]
    bounds = np.concatenate([[0], np.cumsum(np.bincount(of_batch, minlength=count))])
    return Batches(packed, bounds, _arranged(packed, bounds, np.array([count]), generator, 1))


def best_fit(falling: Numbers, budget: int) -> tuple[Numbers, int]:
    """Return (the batch of each size, how many batches there are): the largest size is packed first.

    Each goes into the fullest batch that has space for it.

    All samples of one size are placed at a time. A batch that takes one of them takes as many as it has space
    for, since it stays the fullest that has enough.
    """
    starts = np.concatenate([[0], np.flatnonzero(np.diff(falling)) + 1])
    counts = np.diff(np.append(starts, len(falling))).tolist()
    batches: dict[int, list[int]] = {}  # space that is left -> the batches that have it
    spaces: list[int] = []  # those that some batch has, ascending
    placed: list[int] = []
    used = 0
    for size, count in zip(falling[starts].tolist(), counts, strict=True):
        while count:
            at = bisect_left(spaces, size)
            fits = at < len(spaces)
            space = spaces[at] if fits else budget
            each = space // size
            wanted = -(-count // each)
            if fits:
                available = batches[space]
                chosen = available[-wanted:]
                del available[-wanted:]
                if not available:
                    del spaces[at]
            else:
                chosen = list(range(used, used + wanted))
                used += wanted
            last = min(each, count - each * (len(chosen) - 1))  # samples that the last of them takes
            placed += chosen if each == 1 else [number for number in chosen for _ in range(each)]
            del placed[len(placed) - (each - last) :]
            count -= each * (len(chosen) - 1) + last
            for numbers, left in ((chosen[:-1], space - each * size), (chosen[-1:], space - last * size)):
                if left and numbers:
                    having = batches.setdefault(left, [])
                    if not having:
                        insort(spaces, left)
                    having += numbers
    return np.array(placed, np.int64), used
