"""The sample that stands in the place of another one: of a bad one, or of one that is left out."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator
from typing import Any

from fastload.datasets.seeds import digest
from fastload.datasets.wrappers import view_of

# From then on the samples are tried one after the other: almost all are left out, or there is only one.
_DRAWS = 1000


def substitutes(dataset: Any, seed: int, epoch: int, index: Any, left_out: Container[int]) -> Iterator[int]:
    """The samples that may stand in the place of `index`, the first choice first; there is no end of them.

    They are a function of (seed, epoch, index), and of `left_out` only in that those samples are passed over.
    So one more sample that is left out changes no choice but the choice of that sample. A sample stands in
    its own place only where there is no other.

    Args:
        left_out: indices of the dataset, of a `Mixture` without the pass; not all of them.
    """
    view, length = view_of(dataset), len(dataset)
    number = passed = 0
    for attempt in itertools.count():
        number = digest(seed, epoch, index, attempt) if passed < _DRAWS else number + 1
        other = view.replacement(index, number, length)
        if view.position(other, length) in left_out or (other == index and passed < _DRAWS):
            passed += 1
        else:
            passed = 0
            yield other
