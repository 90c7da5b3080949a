"""What a batch was really made of, as numbers: which samples stand in it, with which random numbers.

The process that makes a batch says so, once `on_error` has settled. Every other account of a run, such as the
order that the trainer planned, would repeat the plan's mistakes.

    identity      key and version of the object; shard, its version and the record's number; else the index
    witness       identity mixed with the random number of the sample: one 64-bit number for each row
    sums          over the rows of the batch, in four functions of the witness: in any order they are the same
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.datasets.views import View, numbers_of

LANES = 4
_FACTORS = np.array(
    [[0x9E3779B97F4A7C15], [0xC2B2AE3D27D4EB4F], [0xD6E8FEB86659FD93], [0xA0761D6478BD642F]], np.uint64
)
_HALF = np.uint64(32)


class Witness(NamedTuple):
    """Of one batch.

    Attributes:
        samples: how many rows it has.
        sums: see above.
        rows: int64 and uint64, the index and the witness of each row, for a sample log; else None.
    """

    samples: int
    sums: tuple[int, ...]
    rows: tuple[NDArray[np.int64], NDArray[np.uint64]] | None


def sums_of(witnesses: NDArray[np.uint64]) -> tuple[int, ...]:
    """Four sums modulo 2**64. Each is over another function of the witness, so together they are 256 bits."""
    lanes = witnesses * _FACTORS
    lanes ^= lanes >> _HALF
    return tuple(lanes.sum(axis=1, dtype=np.uint64).tolist())


class Witnesses:
    """Makes the witness of each batch.

    Args:
        rows: of the loader's dataset.
        seeded: the loader has a seed, so that all that draws gets random numbers of (seed, epoch, index).
        logged: there is a sample log, which needs each row.
    """

    def __init__(self, rows: View, *, seeded: bool, logged: bool) -> None:
        self._rows = rows
        self._seeded = seeded
        self._logged = logged

    def of(self, indices: list[Any], seed: int, epoch: int) -> Witness:
        """Of the samples that stand in the rows of a batch, substitutes of bad ones included."""
        found = self._rows.fingerprints(indices, seed, epoch, seeded=self._seeded)
        rows = (numbers_of(indices), found) if self._logged else None
        return Witness(len(indices), sums_of(found), rows)
