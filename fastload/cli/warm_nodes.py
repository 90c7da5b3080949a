"""`fastload warm --ray`: each node of a cluster fills its own cache with its own share.

    survey of each node ─▶ its share, cut into slices ─▶ one slice at a time on that node ─▶ sums

Node i of n, in the order of the addresses, warms share i/n. A slice whose process was lost is done again on
that node; what it had stored is present then. The share of a lost node is not given to others: their training
would not read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fastload.cli.cluster import Cluster, Lost, Node, Task, refuse_limits
from fastload.cli.measurement import Bars, describe_machine
from fastload.cli.output import Output
from fastload.cli.warm_share import Target, find_left, find_share
from fastload.datasets.warm import ToRead
from fastload.errors import ArgumentError, StoreError, WorkerError

SLICE = 20_000  # samples: about a minute, beside which the start of a slice's workers does not count
SLICE_OF_SHARDS = 32
_SUMS = ("objects", "stored", "skipped", "failed", "too_large", "read_bytes", "requests")
_FAILURES_SHOWN = 10


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
    digests: tuple[str, str]
    left: ToRead


def _survey(target: Target, shard: tuple[int, int], listing_max_age: str) -> Survey:
    """The first task of a node."""
    dataset, kind = target.open(listing_max_age)
    warming, _ = find_share(dataset, shard)
    digests = dataset.listing().digests
    return Survey(
        dataset.url, kind.value, len(warming.samples), warming.by_shard, digests, find_left(warming)
    )


class NodesWarming:
    """One run over all nodes.

    Args:
        fill: the task of a slice.
        target: what is warmed.
        shard: (0, 1): each node warms all; None: its share.
        num_workers: of each node; None: as many as Ray gives it CPUs.
        listing_max_age: of the listing that a node keeps, as of the command.

    Raises:
        ArgumentError, StoreError, CacheError, WorkerError: as the command.
    """

    def __init__(
        self,
        fill: Callable[..., Any],
        target: Target,
        shard: tuple[int, int] | None,
        num_workers: int | None,
        listing_max_age: str,
    ) -> None:
        if shard not in (None, (0, 1)):
            raise ArgumentError(
                f"--shard {shard[0]}/{shard[1]} with --ray: each node gets its own share; leave --shard "
                "out, or give 0/1 to warm all of the data on every node"
            )
        refuse_limits(target.storage_options)
        self._fill, self._target = fill, target.anywhere()
        self._whole, self._num_workers, self._max_age = shard is not None, num_workers, listing_max_age
        self._documents: dict[Node, list[dict[str, Any]]] = {}
        self._lost: dict[Node, str] = {}

    def run(self, address: str, output: Output, quote: Callable[[ToRead], dict[str, Any]]) -> dict[str, Any]:
        """Warm all nodes; the JSON document.

        Args:
            quote: says what is left to read on all nodes, before it is read.
        """
        start = time.perf_counter()
        with Cluster(address) as cluster:
            self._documents = {node: [] for node in cluster.nodes}
            surveys = self._ask(cluster)
            listing_seconds = time.perf_counter() - start
            self._announce(surveys, output)
            lefts = [survey.left for survey in surveys.values()]
            quoted = quote(ToRead(*map(sum, zip(*lefts, strict=True))))
            interrupted = False
            start = time.perf_counter()
            try:
                self._warm(cluster, surveys, output)
            except KeyboardInterrupt:
                interrupted = True
            seconds = time.perf_counter() - start
            document = self._document(cluster, surveys, seconds)
        return document | {
            "interrupted": interrupted,
            "listing_seconds": round(listing_seconds, 3),
            "quote": quoted,
        }

    def _share_of(self, node: Node) -> tuple[int, int]:
        nodes = list(self._documents)
        return (0, 1) if self._whole else (nodes.index(node), len(nodes))

    def _ask(self, cluster: Cluster) -> dict[Node, Any]:
        lanes = []
        for node in self._documents:
            arguments = (self._target, self._share_of(node), self._max_age)
            lanes.append(iter([Task(_survey, arguments, f"node {node.address}", node=node)]))
        surveys: dict[Node, Any] = {}
        for task, found in cluster.run(lanes):
            assert task.node is not None
            if isinstance(found, Lost):
                self._lost[task.node] = found.reason
                continue
            surveys[task.node] = found
            first = next(iter(surveys.values()))
            if found.digests != first.digests:
                raise StoreError(
                    f"node {task.node.address} lists other objects in {found.url!r} than "
                    f"{next(iter(surveys)).address}: they changed meanwhile, or an old listing is kept; "
                    "run the command without --listing-max-age"
                )
        if not surveys:
            (node, reason), *_ = self._lost.items()
            raise WorkerError(f"all nodes are gone, as node {node.address} ({reason}): run the command again")
        return surveys

    def _slices(self, node: Node, survey: Any) -> Iterator[Task]:
        """Of a node's share, until its cache is full."""
        share = self._share_of(node)
        size = SLICE_OF_SHARDS if survey.by_shard else SLICE
        workers = node.cpus if self._num_workers is None else self._num_workers
        cpus = max(1, min(workers, node.cpus))
        for start in range(0, survey.samples, size):
            part = slice(start, min(start + size, survey.samples))
            if any(done["full"] for done in self._documents[node]) or node in self._lost:
                return
            name = f"share {share[0]}/{share[1]} from {part.start:,} on node {node.address}"
            arguments = (self._target, survey.digests, share, part, workers)
            yield Task(self._fill, arguments, name, cpus, node)

    def _warm(self, cluster: Cluster, surveys: dict[Node, Any], output: Output) -> None:
        by_shard = any(survey.by_shard for survey in surveys.values())
        total = sum(survey.samples for survey in surveys.values())
        start, done, read = time.perf_counter(), 0, 0
        lanes = [self._slices(node, survey) for node, survey in surveys.items()]
        with Bars(output.console) as bars:
            bar = bars.add("warming shards" if by_shard else "warming", total)
            for task, outcome in cluster.run(lanes):
                assert task.node is not None
                if isinstance(outcome, Lost):
                    self._lost[task.node] = outcome.reason
                    continue
                self._documents[task.node].append(outcome)
                part = task.arguments[3]
                done, read = done + part.stop - part.start, read + outcome["read_bytes"]
                rate = read / (time.perf_counter() - start) / 1e6
                bar.show(done, f"{rate:6,.1f} MB/s, {len(surveys)} nodes")

    def _announce(self, surveys: dict[Node, Any], output: Output) -> None:
        for node, survey in surveys.items():
            what = "shards" if survey.by_shard else "objects"
            share = self._share_of(node)
            output.console.print(
                f"node {node.address}: {survey.samples:,} {what}, share {share[0]}/{share[1]}", soft_wrap=True
            )

    def _document(self, cluster: Cluster, surveys: dict[Node, Any], seconds: float) -> dict[str, Any]:
        nodes = [self._of_node(node, surveys.get(node)) for node in self._documents]
        slices = [document for done in self._documents.values() for document in done]
        sums = {name: sum(node[name] for node in nodes) for name in _SUMS}
        first = next(iter(surveys.values()), None)
        kept = slices[0]["settings"] if slices else {}
        left = [node["left"] for node in nodes]
        return {
            "command": "warm",
            **describe_machine(),
            "settings": {
                "url": self._target.url if first is None else first.url,
                "kind": None if first is None else first.kind,
                "cache": self._target.cache,
                **{name: kept.get(name) for name in ("mode", "short_side", "quality", "size_limit")},
                "num_workers": self._num_workers,
                "shard": [0, 1],
                "ray": cluster.address,
            },
            **sums,
            "left": None if None in left else sum(left),
            "full": any(document["full"] for document in slices),
            "failures": [one for document in slices for one in document["failures"]][:_FAILURES_SHOWN],
            "seconds": round(seconds, 3),
            "objects_per_second": round((sums["stored"] + sums["failed"]) / seconds, 1),
            "megabytes_per_second": round(sums["read_bytes"] / seconds / 1e6, 2),
            "cache": {name: sum(node["cache"][name] for node in nodes) for name in ("entries", "bytes")},
            "nodes": nodes,
            "redone": cluster.redone,
        }

    def _of_node(self, node: Node, survey: Any) -> dict[str, Any]:
        done = self._documents[node]
        found = {name: sum(document[name] for document in done) for name in _SUMS}
        left = None
        if survey is not None and not survey.by_shard:
            left = survey.samples - found["stored"] - found["skipped"] - found["failed"]
            found["objects"] = survey.samples
        return {
            "address": node.address,
            "shard": list(self._share_of(node)),
            **found,
            "left": left,
            "cache": done[-1]["cache"] if done else {"entries": 0, "bytes": 0},
            "lost": self._lost.get(node),
        }
