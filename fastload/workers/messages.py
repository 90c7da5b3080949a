"""What the trainer and its workers tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fastload.workers.failure import Failure
from fastload.workers.packing import PackedBatch

__all__ = ["Epoch", "Result", "Work", "WorkerSetup"]


@dataclass(frozen=True)
class WorkerSetup:
    """All that a worker needs to know; inherited under fork, pickled otherwise."""

    dataset: Any
    collate_fn: Any
    auto_collation: bool
    drop_last: bool
    worker_init_fn: Any
    num_workers: int
    prefetch_factor: int
    base_seed: int
    on_error: str
    seeded: bool
    batch_size: int
    positions: list[dict[str, Any]] | None  # where each worker takes up the dataset; see `Progress`


class Epoch(NamedTuple):
    first: int  # sequence number of its first batch: what is older is not wanted any more
    seed: int
    epoch: int
    streamed: bool  # index batches are `TakeNext`
    shared_seed: int | None  # of all workers and ranks, for torch's iterable data pipes


class Work(NamedTuple):
    consumed: int  # batches of this epoch and worker that were taken out of the loader, or dropped, so far
    released: list[int]  # slots
    given_up: list[int]  # slots that must not be used again
    seq: int  # -1: there are no more index batches in this epoch
    index: Any
    encoded: bool  # its images are to be decoded by the trainer's process


class Result(NamedTuple):
    """What came of one index batch."""

    seq: int
    packed: PackedBatch | None
    failure: Failure | None
    exhausted: bool  # an iterable dataset or a stream has no more; not one of the batches that are consumed
    counters: dict[str, float]
    bad: list[tuple[str, str]]
    before: Any = None  # the state of a dataset that has one, with the worker's first result of an epoch
    after: Any = None  # the state with this batch made; of a stream, where the epoch is read as streams
