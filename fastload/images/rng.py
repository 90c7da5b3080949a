"""The randomness of one sample: a function of (seed, epoch, index), in any process and any order.

SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014): a counter goes
up by the golden ratio's 64 fractional bits, and a mixing function turns it into an output. A state is one
integer, so making a generator for each sample is free. `random.Random` (2.5 KB of state, 10 us to seed) and
numpy's generators (20 us to make) were measured: too slow for one per sample.

Code of the user draws from the process-wide generators of torch's CPU, Python and numpy. With `seed=` these
are set for each sample (`SampleSeeds`), which costs 6 us (torch 1.0, Python 3.5, numpy 1.5): measurable when
samples are cheap. So Python's and numpy's are seeded only if samples draw from them:

    watched    the first samples are seeded, and checked for draws
    always     one drew: every sample is seeded
    checked    none drew: a sample that turns out to have drawn is seeded and made a second time
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import operator
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    """Return SplitMix64's output for a state: a bijection; every input bit reaches every output bit."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return the 64-bit seed of one sample's randomness in one epoch.

    Mixed after each part, so that neither (epoch, index) and (epoch + 1, index - 1) nor neighbouring seeds
    share a stream. Takes any Python integers, modulo 2**64.
    """
    state = 0
    for part in (seed, epoch, index):
        state = _mix((state + _GOLDEN + int(part)) & _MASK)
    return state


def sample_seeds(seed: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the `sample_seed` of each of many indices."""
    begun = 0
    for part in (seed, epoch):
        begun = _mix((begun + _GOLDEN + int(part)) & _MASK)
    return mix_all(indices.view(np.uint64) + np.uint64((begun + _GOLDEN) & _MASK))


def mix_all(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's output function to each number, in place."""
    z ^= z >> _SHIFTS[0]
    z *= _FACTORS[0]
    z ^= z >> _SHIFTS[1]
    z *= _FACTORS[1]
    z ^= z >> _SHIFTS[2]
    return z


_SHIFTS = np.array([30, 27, 31], np.uint64)
_FACTORS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


class SampleRng:
    """Uniform numbers from one 64-bit seed; the same on every platform."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = int(seed) & _MASK  # numpy's integers know no 64-bit mask

    def bits(self) -> int:
        """Return 64 random bits."""
        self._state = (self._state + _GOLDEN) & _MASK
        return _mix(self._state)

    def random(self) -> float:
        """Return a float in [0, 1), a multiple of 2**-53."""
        return (self.bits() >> 11) * 2.0**-53

    def integers(self, n: int) -> int:
        """Return an integer in [0, n). Multiply-high without rejection: its bias is below n / 2**64."""
        return (self.bits() * n) >> 64

    def uniform(self, low: float, high: float) -> float:
        """Return a float between low and high."""
        return low + (high - low) * self.random()

    def log_uniform(self, low: float, high: float) -> float:
        """Return a float between low and high whose logarithm is uniform."""
        return math.exp(self.uniform(math.log(low), math.log(high)))


class Rng(Protocol):
    """The generator that a transform draws from: a sample's own, or torch's global one."""

    def random(self) -> float: ...
    def integers(self, n: int) -> int: ...
    def uniform(self, low: float, high: float) -> float: ...
    def log_uniform(self, low: float, high: float) -> float: ...


class TorchRng:
    """torch's global generator, drawn from as torchvision's transforms do: the same seed, the same crops.

    Always float32 on the CPU: a script's default dtype and device do not change the samples.
    """

    def random(self) -> float:
        import torch

        return torch.rand(1, dtype=torch.float32, device="cpu").item()

    def integers(self, n: int) -> int:
        import torch

        return int(torch.randint(0, n, size=(1,), device="cpu").item())

    def uniform(self, low: float, high: float) -> float:
        import torch

        return torch.empty(1, dtype=torch.float32, device="cpu").uniform_(low, high).item()

    def log_uniform(self, low: float, high: float) -> float:
        import torch

        drawn = torch.empty(1, dtype=torch.float32, device="cpu").uniform_(*_logarithms(low, high))
        return drawn.exp_().item()


@functools.lru_cache(maxsize=64)
def _logarithms(low: float, high: float) -> list[float]:
    """Return float32 logarithms, cached: torchvision computes them for each draw, which takes 30 us."""
    import torch

    return torch.log(torch.tensor((low, high), dtype=torch.float32, device="cpu")).tolist()


T = TypeVar("T")

_WATCHED = 100  # samples
_MASK_32, _MASK_63 = 2**32 - 1, 2**63 - 1


def digest(*parts: object) -> int:
    """Return a 64-bit number that is a function of `parts`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def plain_index(index: Any) -> Any:
    """Return an index as an int where it is a whole number, so that those of numpy and torch are alike."""
    try:
        return operator.index(index)
    except TypeError:
        return index


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
        """Return the seeds of the loader whose rows are filled in this thread; None if it has no seed."""
        return getattr(cls.active, "seeds", None)

    def __enter__(self) -> None:
        self.active.seeds = self

    def __exit__(self, *_: object) -> None:
        self.active.seeds = None

    def start_epoch(self, seed: int, epoch: int) -> None:
        self._beginning = hashlib.blake2b(f"({seed!r}, {epoch!r}, ".encode(), digest_size=8)

    @contextlib.contextmanager
    def within(self, part: int) -> Iterator[None]:
        """Give the samples inside the random numbers of this part of a dataset."""
        before = self._beginning
        self._beginning = before.copy()
        self._beginning.update(f"{part!r}, ".encode())
        try:
            yield
        finally:
            self._beginning = before

    def begin_batch(self, index: Any) -> None:
        """Begin a batch whose first sample is `index`: other code may have drawn since the last batch."""
        if not self._always and self._watched == _WATCHED:
            self._step_together(self._number(index))

    def set(self, index: Any) -> None:
        """Set the generators for a sample."""
        import torch

        number = self._number(index)
        torch.default_generator.manual_seed(number & _MASK_63)
        random.seed(number)
        np.random.seed(number & _MASK_32)

    def call(self, index: Any, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of `function` for this sample.

        The last sample of a batch is seeded with `set` instead, as `collate_fn` goes on from there.

        Raises:
            What `function` raises.
        """
        import torch

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
        """Return `digest(seed, epoch, index)`, in half the time."""
        whole = self._beginning.copy()
        whole.update(f"{plain_index(index)!r})".encode())
        return int.from_bytes(whole.digest(), "little")

    def _step_together(self, number: int) -> None:
        random.seed(number)
        np.random.seed(number & _MASK_32)
        self._python.seed(number)
        self._numpy.seed(number & _MASK_32)

    def _in_step(self) -> bool:
        """Return whether only this object has drawn from the generators."""
        if (
            random.getrandbits(64) == self._python.getrandbits(64)
            and np.random.random_sample() == self._numpy.random_sample()
        ):
            return True
        self._always = True
        return False
