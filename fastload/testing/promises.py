"""What all test classes share: how a broken promise is reported, seeds, and passes of a loader."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import SkipTest

import numpy as np
import torch

from fastload.loader.dataloader import DataLoader
from fastload.testing.contents import Contents, difference
from fastload.workers.sample_threads import GeneratorStates

SEED, OTHER_SEED = 1, 2
_BATCHES = 6  # of an epoch at most: the state at the end of each one is resumed


def batch_size(samples: int) -> int:
    """For an epoch of a few batches."""
    return max(1, -(-samples // _BATCHES))


def broken(promise: str, found: str, remedy: str) -> NoReturn:
    """Fail the test.

    Args:
        promise: what should hold.
        found: the first thing that shows that it does not.
        remedy: the usual cause, and the next thing to do.
    """
    __tracebackhide__ = True
    raise AssertionError(f"broken promise: {promise}.\nFound: {found}.\nWhat to do: {remedy}.")


def not_promised(why: str) -> NoReturn:
    """Skip the test: pytest takes this exception of the standard library for its own."""
    raise SkipTest(why)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the process's generators (torch's of the CPU, Python's, numpy's) begin with this seed."""
    before = GeneratorStates()
    try:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield
    finally:
        before.restore()


def as_it_is(samples: Any) -> Any:
    """A `collate_fn` that changes nothing; a worker that is spawned finds it by its name."""
    return samples


def close(thing: Any) -> None:
    """Call its `close`, if it has one."""
    closing = getattr(thing, "close", None)
    if callable(closing):
        closing()


def check_same(
    promise: str, what: str, one: Contents, other: Contents, names: tuple[str, str], remedy: str
) -> None:
    """Two contents must be equal.

    Args:
        what: the name of the sample.
        names: where `one` and `other` come from.
    """
    __tracebackhide__ = True
    unlike = difference(one, other)
    if unlike is not None:
        at = f" at {unlike.where}" if unlike.where else ""
        broken(promise, f"{what}{at} is {unlike.one} {names[0]}, and {unlike.other} {names[1]}", remedy)


def check_same_lists(
    promise: str,
    one: Sequence[Contents],
    other: Sequence[Contents],
    names: tuple[str, str],
    remedy: str,
    what: Callable[[int], str] = "sample {}".format,
) -> None:
    """Two lists of samples must be equal."""
    __tracebackhide__ = True
    for number, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        check_same(promise, what(number), mine, theirs, names, remedy)
    if len(one) != len(other):
        broken(promise, f"{len(one)} samples {names[0]}, and {len(other)} {names[1]}", remedy)


def check_once(
    promise: str,
    expected: Sequence[Contents],
    found: Sequence[Contents],
    names: tuple[str, str],
    remedy: str,
) -> None:
    """Two lists must have the same samples, in any order."""
    __tracebackhide__ = True
    wanted, there = Counter(expected), Counter(found)
    for key in {**wanted, **there}:
        if wanted[key] != there[key]:
            broken(
                promise,
                f"{_shown(key)} came {_times(wanted[key])} {names[0]}, and {_times(there[key])} {names[1]}",
                remedy,
            )


def _times(count: int) -> str:
    return ("not at all", "once", "twice")[count] if count < 3 else f"{count} times"


def _shown(found: Contents) -> str:
    """A sample in a few words: its first small parts."""
    parts = [f"{where}={part}" if where else str(part) for where, part in found]
    return "the sample " + ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")


def loader_of(dataset: Any, **options: Any) -> DataLoader[Any]:
    """A loader that gives samples as they are, with `seed=`."""
    return DataLoader(dataset, collate_fn=as_it_is, **{"seed": SEED, **options})


def in_processes(start_method: str, workers: int) -> tuple[dict[str, Any], str]:
    """(options of a loader, the same in words)."""
    if not workers:
        return {}, "with num_workers=0"
    if sys.platform != "linux":
        not_promised("worker processes need Linux")
    return (
        {"num_workers": workers, "multiprocessing_context": start_method},
        f"with num_workers={workers} ({start_method})",
    )
