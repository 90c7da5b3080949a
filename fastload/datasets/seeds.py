"""`seed=`: the process-wide generators of torch's CPU, Python and numpy, set for each sample.

Seeding them costs 6 us a sample (torch 1.0, Python 3.5, numpy 1.5), which is measurable when samples are
cheap. So Python's and numpy's are seeded only if samples draw from them:

    watched    the first samples are seeded, and checked for draws
    always     one drew: every sample is seeded
    checked    none drew: a sample that turns out to have drawn is seeded and made a second time
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")

_WATCHED = 100  # samples
_MASK_32, _MASK_63 = 2**32 - 1, 2**63 - 1


def digest(*parts: object) -> int:
    """A 64-bit number that is a function of `parts`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class SampleSeeds:
    """Runs the code of samples with random numbers that are a function of (seed, epoch, index).

    That is: the numbers of torch's CPU generator, Python's `random` and numpy's `np.random`. The generators
    of devices belong to the model and are not changed.

    A second generator in the same state shows whether the code drew. Not covered: a sample that draws from
    Python's or numpy's generator and restores its state, if no earlier sample was seen to draw.
    """

    active = threading.local()  # `.seeds` while the rows of a loader with a seed are filled, see `current`

    def __init__(self) -> None:
        self._always = False
        self._watched = 0
        self._python = random.Random()
        self._numpy = np.random.RandomState()
        self.start_epoch(0, 0)

    @classmethod
    def current(cls) -> SampleSeeds | None:
        """The seeds of the loader whose rows are filled in this thread; None if it has no seed."""
        return getattr(cls.active, "seeds", None)

    def __enter__(self) -> None:
        self.active.seeds = self

    def __exit__(self, *_: object) -> None:
        self.active.seeds = None

    def start_epoch(self, seed: int, epoch: int) -> None:
        self._beginning = hashlib.blake2b(f"({seed!r}, {epoch!r}, ".encode(), digest_size=8)

    @contextlib.contextmanager
    def within(self, part: int) -> Iterator[None]:
        """Inside, samples get the random numbers of this part of a dataset."""
        before = self._beginning
        self._beginning = before.copy()
        self._beginning.update(f"{part!r}, ".encode())
        try:
            yield
        finally:
            self._beginning = before

    def begin_batch(self, index: Any) -> None:
        """Before a batch whose first sample is `index`: other code may have drawn since the last batch."""
        if not self._always and self._watched == _WATCHED:
            self._step_together(self._number(index))

    def set(self, index: Any) -> None:
        """Set the generators for a sample."""
        number = self._number(index)
        torch.default_generator.manual_seed(number & _MASK_63)
        random.seed(number)
        np.random.seed(number & _MASK_32)

    def call(self, index: Any, function: Callable[..., T], *arguments: Any) -> T:
        """The result of `function` for this sample.

        The last sample of a batch is seeded with `set` instead, as `collate_fn` goes on from there.

        Raises:
            What `function` raises.
        """
        if self._always:
            self.set(index)
            return function(*arguments)
        number = self._number(index)
        torch.default_generator.manual_seed(number & _MASK_63)
        seeded = self._watched < _WATCHED
        if seeded:
            self._watched += 1
            self._step_together(number)
        try:
            result = function(*arguments)
        except Exception:
            if self._in_step() or seeded:
                raise
        else:
            if self._in_step() or seeded:
                return result
        self.set(index)
        return function(*arguments)

    def _number(self, index: Any) -> int:
        """`digest(seed, epoch, index)`, in half the time."""
        whole = self._beginning.copy()
        whole.update(f"{index!r})".encode())
        return int.from_bytes(whole.digest(), "little")

    def _step_together(self, number: int) -> None:
        random.seed(number)
        np.random.seed(number & _MASK_32)
        self._python.seed(number)
        self._numpy.seed(number & _MASK_32)

    def _in_step(self) -> bool:
        """Whether only this object has drawn from the generators."""
        if (
            random.getrandbits(64) == self._python.getrandbits(64)
            and np.random.random_sample() == self._numpy.random_sample()
        ):
            return True
        self._always = True
        return False
