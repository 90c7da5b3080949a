"""What a loader shares with its iterators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastload.datasets.wrappers import fastload_datasets, view_of
from fastload.distributed import find_rank
from fastload.loader.remote_caches import RemoteCaches
from fastload.loader.resume import LoaderPosition
from fastload.metrics.counters import BadSamples, Counters, Meter
from fastload.order.exclusions import Exclusions
from fastload.order.history import History
from fastload.store.budget import RequestBudget, RequestCounts
from fastload.trace.digest import Digest, find_part
from fastload.trace.log_writer import LogWriter
from fastload.workers.autoscale import Autoscaler
from fastload.workers.memory_limit import MemoryUse

if TYPE_CHECKING:
    from fastload.gpu.decoding import Decoding
    from fastload.workers.witness import Witness


@dataclass
class LoaderContext:
    """What outlives each iterator of a loader. It pickles with the loader and holds no reference to it.

    Attributes:
        counters: of all epochs.
        memory: of the worker processes, under `memory_limit`.
        meter: the epoch that runs, or the last one.
        bad: samples that could not be read or decoded.
        position: how much was handed out.
        history: the orders of past epochs.
        exclusions: samples and steps that are left out.
        digest: of all that was handed out.
        remote_caches: what pulls and pushes for them.
        log: of each sample that was handed out, with `sample_log=`.
        budgets: the requests of each dataset to its stores, and their limits.
        autoscaler: with num_workers="auto".
        decoding: where the device decodes images.
        kind: of workers, in the iteration that began last: "threads" of the kernel in one process,
            "processes", or "" where this process makes the batches.
    """

    counters: Counters = field(default_factory=Counters)
    bad: BadSamples = field(default_factory=BadSamples)
    position: LoaderPosition = field(default_factory=LoaderPosition)
    history: History = field(default_factory=History)
    exclusions: Exclusions = field(default_factory=Exclusions)
    digest: Digest = field(default_factory=Digest)
    autoscaler: Autoscaler | None = None
    decoding: Decoding | None = None
    memory: MemoryUse = field(default_factory=MemoryUse)
    remote_caches: RemoteCaches = field(default_factory=RemoteCaches)
    log: LogWriter | None = None
    kind: str = ""
    budgets: list[RequestBudget] = field(default_factory=list)
    meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        self.meter = Meter(self.counters)

    def start_epoch(self, loader: Any) -> None:
        """An iteration of the loader begins."""
        self.bad.start_epoch()
        self.find_budgets(loader.dataset)
        rank, world_size = find_part(loader)
        self.digest.rank, self.digest.world_size = rank, world_size
        if self.log is not None:
            self.log.begin(rank, world_size, self.digest.steps)

    def handed_over(self, epoch: int, step: int, witness: Witness | None) -> None:
        """The batch of a step reached the user; without a witness, its error did."""
        if self.log is not None:
            self.log.add(self.digest.steps, epoch, step, witness)
        self.digest.add(epoch, step, witness)
        self.count_requests()

    def find_budgets(self, dataset: Any) -> None:
        """Collect the budgets of the datasets that `dataset` holds."""
        found = [view_of(one).budget() for one in fastload_datasets(dataset)]
        self.budgets = list(dict.fromkeys(one for one in found if one is not None))

    def count_requests(self) -> None:
        """Put into the counters what all processes asked of the stores."""
        spent = RequestCounts(*map(sum, zip(*(budget.spent() for budget in self.budgets), strict=True)))
        if any(spent):
            self.counters.put("store.gets", spent.gets)
            self.counters.put("store.heads", spent.heads)
            self.counters.put("store.lists", spent.lists)
            self.counters.put("store.egress_bytes", spent.egress)

    def limits(self) -> list[dict[str, int | None]]:
        """Of each dataset with limits: the limits, and what was used of them."""
        limited = [one for one in self.budgets if any(one.limits)]
        return [
            {
                "max_gets": one.limits.gets,
                "gets": one.used().gets,
                "max_egress": one.limits.egress,
                "egress": one.used().egress,
            }
            for one in limited
        ]

    def rank(self) -> int:
        """This process's number among the ranks of its job."""
        return find_rank()[0]

    def flush_log(self) -> None:
        """Write the sample log up to here."""
        if self.log is not None:
            self.log.flush()

    def batches_ahead(self, given: int) -> int:
        """Batches that each worker may make ahead: the given number, unless num_workers="auto" found more."""
        return given if self.autoscaler is None else max(given, self.autoscaler.ahead)

    def workers_wanted(self, most: int) -> int:
        """How many of `most` workers make batches: all, unless num_workers="auto" has found fewer."""
        return most if self.autoscaler is None else int(self.autoscaler.workers)
