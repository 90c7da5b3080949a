"""Fills the cache of this node with its share; with Ray, each node of a cluster fills its own.

    survey of each node ─▶ its share, cut into slices ─▶ one slice at a time on that node ─▶ sums

Node i of n, in the order of the addresses, warms share i/n. A slice whose process was lost is done again on
that node; what it had stored is present then. The share of a lost node is not given to others: their training
would not read it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, get_worker_info

import fastload
from fastload.checks import format_size
from fastload.cli.cluster import Cluster, Lost, Node, Task, refuse_limits
from fastload.cli.plan.prices import Prices
from fastload.cli.report import Bar, Bars, Output
from fastload.cli.warm_report import (
    Failure,
    Filled,
    Held,
    NodeCounts,
    Quote,
    Target,
    WarmReport,
    report_of,
)
from fastload.datasets.warm import ToRead
from fastload.datasets.wrappers import view_of
from fastload.distributed import find_rank
from fastload.errors import ArgumentError, StoreError, WorkerError
from fastload.order.sampler import indexed_length
from fastload.shards.dataset import ShardDataset

FAILURES_SHOWN = 10
OUTCOMES_A_MESSAGE = 16
SLICE = 20_000  # samples: about a minute, beside which the start of a slice's workers does not count
SLICE_OF_SHARDS = 32
_ANY_AGE = 1e9  # seconds: digests say whether it is the listing that was divided


# --- a share


class Warming(IterableDataset[Any]):
    """A `Warmed` tuple, the outcome, for each sample of a share of a dataset.

    Args:
        dataset: any that reads a store.
        samples: the share (int64).
        by_shard: the share is all samples of these shards.
    """

    def __init__(self, dataset: Any, samples: npt.NDArray[np.int64], *, by_shard: bool = False) -> None:
        self.dataset = dataset
        self.samples = samples
        self.by_shard = by_shard

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        part = self.samples if worker is None else self.samples[worker.id :: worker.num_workers]
        warm = self.dataset._warm_shards if self.by_shard else self.dataset.warm
        yield from warm(index.item() for index in part)


def find_left(warming: Warming) -> ToRead:
    """Return what the store will be asked for."""
    samples = warming.samples.tolist()
    dataset = warming.dataset
    left: ToRead = (
        dataset._left_to_warm_shards(samples) if warming.by_shard else dataset._left_to_warm(samples)
    )
    dataset.cache.close()  # the workers open it themselves
    return left


def find_share(dataset: Any, share: tuple[int, int] | None) -> tuple[Warming, tuple[int, int]]:
    """Return what this node warms, and (share, shares).

    All shards are streamed. A share of them is read by a request per sample, for which they must be indexed
    and not be compressed.
    """
    if not isinstance(dataset, ShardDataset):
        samples, numbers = share_of(dataset, share)
        return Warming(dataset, samples), numbers
    if (share or find_rank())[1] == 1:
        return Warming(dataset, np.arange(len(dataset.shards())), by_shard=True), (0, 1)
    try:
        samples, numbers = share_of(dataset, share)
    except TypeError:
        raise ArgumentError(
            "a share of shards is a share of their samples, and they are not indexed: run fastload index "
            "first, or give --share 0/1 to warm all of them"
        ) from None
    indexes = map(dataset._index.get, range(len(dataset.shards())))
    if any(records.compressed for records in indexes if records is not None):
        raise ArgumentError(
            "compressed shards are read whole, so a share of them costs as much as all: give --share 0/1"
        )
    return Warming(dataset, samples), numbers


def share_of(dataset: Any, share: tuple[int, int] | None) -> tuple[npt.NDArray[np.int64], tuple[int, int]]:
    """Return the samples of a share, and (share, shares), as of such a node with `partition="node"`.

    None: this rank's part of its node's share, by the variables of torchrun or SLURM; without them, all
        samples.
    """
    options: dict[str, Any] = {"shuffle": False, "mode": "eval", "partition": "node"}
    if share is None:
        try:
            sampler = fastload.DistributedSampler(dataset, **options)
        except ArgumentError as error:
            raise ArgumentError(
                f"the launcher's variables give no share of this node; give --share I/N ({error.message})"
            ) from error
    else:
        sampler = fastload.DistributedSampler(dataset, share[1], share[0], num_nodes=share[1], **options)
    samples = np.fromiter(sampler, np.int64, len(sampler))
    return samples, (sampler.rank, sampler.num_replicas)


class Tally:
    """The outcomes of the samples so far.

    Args:
        by_shard: progress is in bytes of shards, for it is not known how many samples they have.
    """

    def __init__(self, by_shard: bool) -> None:
        self._by_shard = by_shard
        self.outcomes: Counter[str] = Counter()
        self.stored: list[int] = []
        self.failures: list[Any] = []
        self.read_bytes = self.passed = 0  # of the samples, inflated; at the end, those that the store sent
        self.requests = 0  # known at the end

    @property
    def done(self) -> int:
        return sum(self.outcomes.values()) - self.outcomes["full"]

    def add(self, warmed: Any) -> None:
        self.outcomes[warmed.outcome] += 1
        self.read_bytes += warmed.size
        self.passed += warmed.passed
        if warmed.outcome == "stored" and not self._by_shard:
            self.stored.append(warmed.sample)
        if warmed.outcome == "failed" and len(self.failures) < FAILURES_SHOWN:
            self.failures.append(warmed)

    def show(self, bar: Bar) -> None:
        done = self.passed if self._by_shard else self.done
        bar.show_rates(done, "objects", self.done, self.read_bytes)


def _fill_slice(
    target: Target, digests: tuple[str, str] | None, share: tuple[int, int], part: slice, num_workers: int
) -> Filled:
    """Fill the cache with a part of a node's share. `digests`: of the listing that was divided."""
    dataset, _ = target.open(_ANY_AGE)
    if view_of(dataset).listed() != digests:
        raise StoreError(
            f"{dataset.url!r} was listed again while slices of it were warmed, and its objects have changed: "
            "run the command again"
        )
    warming, _ = find_share(dataset, share)
    warming.samples = warming.samples[part]
    return fill(warming, num_workers, Output(as_json=True))


def fill(warming: Any, num_workers: int, output: Output) -> Filled:
    """Run the workers until all samples are done, the cache is full, or the user interrupts."""
    dataset = warming.dataset
    tally, interrupted = Tally(warming.by_shard), False
    start = time.perf_counter()
    with Bars(output.console) as bars:
        try:
            _follow(warming, num_workers, tally, bars)
        except KeyboardInterrupt:
            interrupted = True
    seconds = time.perf_counter() - start
    if not warming.by_shard and (tally.outcomes["full"] or tally.outcomes["too large"]):
        _recount(dataset, warming.samples, tally)
    counts = tally.outcomes
    total = _number_of_samples(warming)
    held = dataset.cache.info()
    return Filled(
        objects=tally.done if total is None else total,
        stored=counts["stored"],
        skipped=counts["present"],
        failed=counts["failed"],
        too_large=counts["too large"],
        left=None if total is None else total - counts["stored"] - counts["present"] - counts["failed"],
        read_bytes=tally.read_bytes,
        requests=tally.requests,
        cache=Held(entries=held["entries"], bytes=held["bytes"]),
        full=counts["full"] > 0,
        interrupted=interrupted,
        failures=[
            Failure(key=warmed.key or dataset.key(warmed.sample), error=warmed.error)
            for warmed in tally.failures
        ],
        seconds=round(seconds, 3),
    )


def _recount(dataset: Any, samples: Any, tally: Tally) -> None:
    """Look up every sample: the last queued records were dropped, and some samples had no outcome."""

    def kept(sample: Any) -> bool:
        return bool(dataset.contains(int(sample)))

    tally.outcomes["stored"] = sum(map(kept, tally.stored))
    tally.outcomes["present"] = sum(map(kept, samples)) - tally.outcomes["stored"]


def _number_of_samples(warming: Any) -> int | None:
    """Return the samples of the share; None: of shards that are not indexed, or of some shards only."""
    if not warming.by_shard:
        return len(warming.samples)
    if len(warming.samples) < len(warming.dataset.shards()):
        return None
    try:
        return int(indexed_length(warming.dataset))
    except TypeError:
        return None


def _follow(warming: Any, num_workers: int, tally: Tally, bars: Bars) -> None:
    if warming.by_shard:
        shards = warming.dataset.shards()
        bar = bars.add("warming", sum(shards[number].size for number in warming.samples), format_size)
    else:
        bar = bars.add("warming", len(warming.samples))
    loader: Any = fastload.DataLoader(
        warming, OUTCOMES_A_MESSAGE, num_workers=num_workers, collate_fn=list, in_order=False
    )
    try:
        for outcomes in loader:
            for warmed in outcomes:
                tally.add(warmed)
            tally.show(bar)
    finally:
        counters = loader.stats()["counters"]
        tally.requests = int(counters.get("get.requests", 0) + counters.get("get.retries", 0))
        tally.read_bytes = int(counters.get("get.bytes", 0))


# --- the nodes of a cluster


class Survey(NamedTuple):
    """What a node found.

    Args:
        url, kind: of the data.
        samples: of the node's share; or its shards, if `by_shard`.
        digests: of the listing.
        left: to read from the store.
    """

    url: str
    kind: str
    samples: int
    by_shard: bool
    digests: tuple[str, str] | None
    left: ToRead


def _survey(target: Target, shard: tuple[int, int], listing_max_age: str) -> Survey:
    """Look at what a node has to warm: its first task."""
    dataset, kind = target.open(listing_max_age)
    warming, _ = find_share(dataset, shard)
    digests = view_of(dataset).listed()
    return Survey(dataset.url, kind, len(warming.samples), warming.by_shard, digests, find_left(warming))


class NodesWarming:
    """One run over all nodes.

    Args:
        target: what is warmed.
        shard: (0, 1): each node warms all; None: its share.
        num_workers: of each node; None: as many as Ray gives it CPUs.
        listing_max_age: of the listing that a node keeps, as of the command.
    """

    def __init__(
        self,
        target: Target,
        shard: tuple[int, int] | None,
        num_workers: int | None,
        listing_max_age: str,
    ) -> None:
        if shard not in (None, (0, 1)):
            raise ArgumentError(
                f"--share {shard[0]}/{shard[1]} with --ray: each node gets its own share; leave --share "
                "out, or give 0/1 to warm all of the data on every node"
            )
        refuse_limits(target.storage_options)
        self._target = target.anywhere()
        self._whole, self._num_workers, self._max_age = shard is not None, num_workers, listing_max_age
        self._counts: dict[Node, NodeCounts] = {}
        self._full: set[Node] = set()
        self._failures: list[Failure] = []

    def run(
        self,
        address: str,
        output: Output,
        quote: Callable[[ToRead], Quote],
        prices: Prices | None,
    ) -> WarmReport:
        """Warm all nodes.

        Args:
            quote: says what is left to read on all nodes, before it is read.
        """
        start = time.perf_counter()
        with Cluster(address) as cluster:
            for number, node in enumerate(cluster.nodes):
                share = (0, 1) if self._whole else (number, len(cluster.nodes))
                self._counts[node] = NodeCounts(address=node.address, share=share, lost=None, left=None)
            surveys = self._ask(cluster)
            listing_seconds = time.perf_counter() - start
            for node, survey in surveys.items():
                output.console.print(
                    f"node {node.address}: {survey.samples:,} {'shards' if survey.by_shard else 'objects'}, "
                    "share {}/{}".format(*self._counts[node].share),
                    soft_wrap=True,
                )
            lefts = [survey.left for survey in surveys.values()]
            quoted = quote(ToRead(*map(sum, zip(*lefts, strict=True))))
            sums = Filled()
            start = time.perf_counter()
            try:
                self._warm(cluster, surveys, output)
            except KeyboardInterrupt:
                sums.interrupted = True
            sums.seconds = round(time.perf_counter() - start, 3)
            sums.full, sums.failures = bool(self._full), self._failures[:FAILURES_SHOWN]
            for node, counts in self._counts.items():
                if node in surveys and not surveys[node].by_shard:
                    counts.objects = surveys[node].samples
                    counts.left = counts.objects - counts.stored - counts.skipped - counts.failed
                sums.add(counts)
            first = next(iter(surveys.values()))
            return report_of(
                sums,
                self._target.settings(first.url, first.kind, self._num_workers, (0, 1), cluster.address),
                quoted,
                prices,
                listing_seconds=round(listing_seconds, 3),
                redone=cluster.redone,
                nodes=list(self._counts.values()),
            )

    def _outcomes(self, cluster: Cluster, lanes: list[Iterator[Task]]) -> Iterator[tuple[Node, Task, Any]]:
        """Yield (node, task, outcome) as tasks end, and note which nodes are lost."""
        for task, outcome in cluster.run(lanes):
            assert task.node is not None
            if isinstance(outcome, Lost):
                self._counts[task.node].lost = outcome.reason
            else:
                yield task.node, task, outcome

    def _ask(self, cluster: Cluster) -> dict[Node, Survey]:
        lanes = []
        for node, counts in self._counts.items():
            arguments = (self._target, counts.share, self._max_age)
            lanes.append(iter([Task(_survey, arguments, f"node {node.address}", node=node)]))
        surveys: dict[Node, Survey] = {}
        for node, _, survey in self._outcomes(cluster, lanes):
            surveys[node] = survey
            first = next(iter(surveys))
            if survey.digests != surveys[first].digests:
                raise StoreError(
                    f"node {node.address} lists other objects in {survey.url!r} than {first.address}: they "
                    "changed meanwhile, or an old listing is kept; run the command without --listing-max-age"
                )
        if not surveys:
            lost = next(iter(self._counts.values()))
            raise WorkerError(
                f"all nodes are gone, as node {lost.address} ({lost.lost}): run the command again"
            )
        return surveys

    def _slices(self, node: Node, survey: Survey) -> Iterator[Task]:
        """Yield slices of a node's share, until its cache is full."""
        share = self._counts[node].share
        size = SLICE_OF_SHARDS if survey.by_shard else SLICE
        workers = node.cpus if self._num_workers is None else self._num_workers
        cpus = max(1, min(workers, node.cpus))
        for start in range(0, survey.samples, size):
            if node in self._full or self._counts[node].lost:
                return
            part = slice(start, min(start + size, survey.samples))
            name = f"share {share[0]}/{share[1]} from {part.start:,} on node {node.address}"
            arguments = (self._target, survey.digests, share, part, workers)
            yield Task(_fill_slice, arguments, name, cpus, node)

    def _warm(self, cluster: Cluster, surveys: dict[Node, Survey], output: Output) -> None:
        by_shard = any(survey.by_shard for survey in surveys.values())
        total = sum(survey.samples for survey in surveys.values())
        done = read = 0
        lanes = [self._slices(node, survey) for node, survey in surveys.items()]
        with Bars(output.console) as bars:
            bar = bars.add("warming shards" if by_shard else "warming", total)
            for node, task, filled in self._outcomes(cluster, lanes):
                counts = self._counts[node]
                counts.add(filled)
                counts.cache = filled.cache
                self._failures += filled.failures
                if filled.full:
                    self._full.add(node)
                part = task.arguments[3]
                done, read = done + part.stop - part.start, read + filled.read_bytes
                bar.show(done, f"{read / bar.seconds() / 1e6:6,.1f} MB/s, {len(surveys)} nodes")
