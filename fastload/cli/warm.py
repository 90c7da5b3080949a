"""`fastload warm URL --cache DIR`: fill the cache before training. The JSON document:

{"command": "warm", "date", "machine": {...}, "versions": {...},
 "settings": {"url", "kind", "cache", "mode", "short_side", "quality", "size_limit", "num_workers",
  "shard": [i, n]},
 "objects" (of the shard), "stored", "skipped" (in the cache already), "failed", "left" (not in the cache;
 null: not known),
 "too_large" (of these: for a record, or for the room left), "full", "interrupted",
 "failures": [{"key", "error"}, ...] (the first), "read_bytes", "requests" (GETs),
 "seconds", "objects_per_second", "megabytes_per_second", "listing_seconds", "cost": {"requests", "egress"},
 "quote": {"objects", "requests", "read_bytes", "cost": {"requests", "egress"}} (what was left before),
 "prices": {"currency", "get", "list", "egress", "source"}, "cache": {"entries", "bytes"}}

Exit code 1: an object cannot be read or decoded. 130: interrupted. A cache that is full, or an object too
large for it, is 0: training reads these from the store.

With --ray the numbers are the sums of all nodes, "settings" has "ray", and there are "redone" (slices whose
process was lost; what that process had read is not counted) and "nodes": [{"address", "shard", "objects",
"stored", "skipped", "failed", "too_large", "read_bytes", "requests", "left", "cache", "lost" (null, or why
the node is gone)}, ...]. A lost node is exit code 1.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from pathlib import Path
from typing import Annotated, Any

import typer

from fastload.cli.cluster import RayOption
from fastload.cli.command_options import (
    CORES,
    Anon,
    CacheMode,
    EndpointUrl,
    FolderUrl,
    ListingMaxAge,
    PricesFile,
    Quality,
    ShortSide,
    StorageOption,
    storage_options,
)
from fastload.cli.measurement import Bars
from fastload.cli.output import JsonOption, Output, answering
from fastload.cli.shard_source import FeaturesOption, FieldsOption
from fastload.errors import ArgumentError, StoreError
from fastload.metrics.units import format_money, format_size

FAILURES_SHOWN = 10
RATE_SECONDS = 5.0
_ANY_AGE = 1e9  # seconds: digests say whether it is the listing that was divided


def warm(
    url: FolderUrl,
    cache: Annotated[Path, typer.Option(metavar="DIR", help="The cache directory of the training.")],
    mode: Annotated[CacheMode, typer.Option(help="The cache mode of the training.")] = CacheMode.auto,
    short_side: ShortSide = 256,
    quality: Quality = 90,
    size_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest size of the cache, such as 500GB or 200MiB.")
    ] = None,
    objects: Annotated[
        bool,
        typer.Option(
            "--objects",
            help="Read all objects, for ObjectDataset. Default: shards, or images for ImageFolder.",
        ),
    ] = False,
    fields: FieldsOption = None,
    features: FeaturesOption = None,
    num_workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Worker processes, of each node.",
            show_default="the cores; with --ray the node's CPUs",
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="The share of node I of N nodes, from 0, as in DistributedSampler(partition='node').",
            show_default="from torchrun or SLURM, else 0/1: all",
        ),
    ] = None,
    listing_max_age: ListingMaxAge = "0",
    endpoint_url: EndpointUrl = None,
    anon: Anon = False,
    storage_option: StorageOption = None,
    prices: PricesFile = None,
    ray: RayOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fill a cache before training. After an interruption, run the same command again to resume."""
    with answering(as_json) as output:
        from fastload.cli.plan.prices import describe_prices, find_prices
        from fastload.cli.warm_share import Target, find_left, find_share

        wanted, options = _parse_shard(shard), storage_options(storage_option, endpoint_url, anon)
        found = find_prices(url, options, prices)
        quote = functools.partial(_quote, prices=found, output=output)
        target = Target(
            url,
            *(str(cache), mode, size_limit, short_side, quality),
            *(objects, fields, features, options),
        )
        if ray is None:
            start = time.perf_counter()
            dataset, kind = target.open(listing_max_age)
            listing_seconds = round(time.perf_counter() - start, 3)
            warming, part = find_share(dataset, wanted)
            quoted = quote(find_left(warming))
            workers = CORES if num_workers is None else num_workers
            document = _fill(warming, part, workers, output, given=wanted)
            document |= {"listing_seconds": listing_seconds, "quote": quoted}
            document["settings"] = {"url": dataset.url, "kind": kind.value, **document["settings"]}
        else:
            from fastload.cli.warm_nodes import NodesWarming

            nodes = NodesWarming(_fill_slice, target, wanted, num_workers, listing_max_age)
            document = nodes.run(ray, output, quote)
        document |= describe_prices(found, document["requests"], document["read_bytes"])
        _print_summary(document, output)
        output.document(document)
        if document["interrupted"]:
            raise typer.Exit(130)
        if document["failed"] or any(node["lost"] for node in document.get("nodes", ())):
            raise typer.Exit(1)


def _quote(left: Any, prices: Any, output: Output) -> dict[str, Any]:
    """Say what is left to read, before it is read; the key "quote" of the document."""
    from fastload.cli.plan.prices import describe_prices

    cost = describe_prices(prices, left.requests, left.read_bytes)["cost"]
    text = f"to read: about {left.requests:,} GETs, {format_size(left.read_bytes)}"
    if prices is not None:
        requests, egress = _money(cost, prices.currency)
        text += f"; they cost {requests}, their egress {egress}, by {prices.source}"
    output.console.print(text, soft_wrap=True)
    return {**left._asdict(), "cost": cost}


def _money(cost: dict[str, Any], currency: str) -> tuple[str, str]:
    """(requests, egress)"""
    return format_money(cost["requests"], currency), format_money(cost["egress"], currency)


def _parse_shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, separator, second = text.partition("/")
    if not (separator and first.isdecimal() and second.isdecimal() and int(first) < int(second)):
        raise ArgumentError(f"--shard {text!r}: give I/N with I from 0 to N - 1, such as 0/4")
    return int(first), int(second)


class Tally:
    """The outcomes of the samples so far, and their rate.

    Args:
        by_shard: progress is in bytes of shards, for it is not known how many samples they have.
    """

    def __init__(self, by_shard: bool) -> None:
        self._by_shard = by_shard
        self._passed = 0
        self.outcomes: Counter[str] = Counter()
        self.stored: list[int] = []
        self.read_bytes = 0  # of the samples, inflated; at the end, those that the store sent
        self.requests = 0  # known at the end
        self.failures: list[Any] = []
        self.start = time.perf_counter()
        self._recent = deque([(self.start, 0, 0, 0)])  # (time, samples, their progress, bytes read)

    @property
    def done(self) -> int:
        return sum(self.outcomes.values()) - self.outcomes["full"]

    @property
    def progress(self) -> int:
        return self._passed if self._by_shard else self.done

    def add(self, warmed: Any) -> None:
        self.outcomes[warmed.outcome] += 1
        self.read_bytes += warmed.size
        self._passed += warmed.passed
        if warmed.outcome == "stored" and not self._by_shard:
            self.stored.append(warmed.sample)
        if warmed.outcome == "failed" and len(self.failures) < FAILURES_SHOWN:
            self.failures.append(warmed)

    def describe(self, total: int) -> str:
        """The rates of the last seconds, and the time that the rest takes at these rates."""
        now = time.perf_counter()
        self._recent.append((now, self.done, self.progress, self.read_bytes))
        while len(self._recent) > 2 and now - self._recent[1][0] > RATE_SECONDS:
            self._recent.popleft()
        then, done, progress, read = self._recent[0]
        seconds = max(now - then, 1e-9)
        rate, speed = (self.done - done) / seconds, (self.progress - progress) / seconds
        left = f"{(total - self.progress) / speed:,.0f} s" if speed else "?"
        return f"{rate:6,.0f} objects/s {(self.read_bytes - read) / seconds / 1e6:6,.1f} MB/s, {left} left"


def _fill_slice(
    target: Any, digests: tuple[str, str], shard: tuple[int, int], part: slice, num_workers: int
) -> dict[str, Any]:
    """A part of a node's share; the document of a run over it. `digests`: of the listing that was divided."""
    dataset, _ = target.open(_ANY_AGE)
    if dataset.listing().digests != digests:
        raise StoreError(
            f"{dataset.url!r} was listed again while slices of it were warmed, and its objects have changed: "
            "run the command again"
        )
    from fastload.cli.warm_share import find_share

    warming, found = find_share(dataset, shard)
    warming.samples = warming.samples[part]
    return _fill(warming, found, num_workers, Output(as_json=True), given=shard)


def _fill(
    warming: Any,
    shard: tuple[int, int],
    num_workers: int,
    output: Output,
    *,
    given: tuple[int, int] | None,
) -> dict[str, Any]:
    """Run the workers until all samples are done, the cache is full, or the user interrupts.

    Args:
        given: the `shard` that was asked for; None: found by the launcher.
    """
    from fastload.cli.measurement import describe_machine

    dataset = warming.dataset
    output.console.print(_announcement(warming, shard, given))
    tally, interrupted = Tally(warming.by_shard), False
    with Bars(output.console) as bars:
        try:
            _follow(warming, num_workers, tally, bars)
        except KeyboardInterrupt:
            interrupted = True
    seconds = time.perf_counter() - tally.start
    if not warming.by_shard and (tally.outcomes["full"] or tally.outcomes["too large"]):
        _recount(dataset, warming.samples, tally)
    counts = tally.outcomes
    total = _number_of_samples(warming)
    left = None if total is None else total - counts["stored"] - counts["present"] - counts["failed"]
    info = dataset.cache.info()
    return {
        "command": "warm",
        **describe_machine(),
        "settings": {
            "cache": dataset.cache.path,
            **{
                name: getattr(dataset.cache, name) for name in ("mode", "short_side", "quality", "size_limit")
            },
            "num_workers": num_workers,
            "shard": list(shard),
        },
        "objects": tally.done if total is None else total,
        "stored": counts["stored"],
        "skipped": counts["present"],
        "failed": counts["failed"],
        "left": left,
        "too_large": counts["too large"],
        "full": counts["full"] > 0,
        "interrupted": interrupted,
        "failures": [
            {"key": one.key or dataset.key(one.sample), "error": one.error} for one in tally.failures
        ],
        "read_bytes": tally.read_bytes,
        "requests": tally.requests,
        "seconds": round(seconds, 3),
        "objects_per_second": round((counts["stored"] + counts["failed"]) / seconds, 1),
        "megabytes_per_second": round(tally.read_bytes / seconds / 1e6, 2),
        "cache": {"entries": info["entries"], "bytes": info["bytes"]},
    }


def _recount(dataset: Any, samples: Any, tally: Tally) -> None:
    """Look up every sample: the last queued records were dropped, and some samples had no outcome."""

    def kept(sample: Any) -> bool:
        return bool(dataset.contains(int(sample)))

    tally.outcomes["stored"] = sum(map(kept, tally.stored))
    tally.outcomes["present"] = sum(map(kept, samples)) - tally.outcomes["stored"]


def _number_of_samples(warming: Any) -> int | None:
    """Of the share; None: of shards that are not indexed, or of some shards only."""
    if not warming.by_shard:
        return len(warming.samples)
    if len(warming.samples) < len(warming.dataset.shards()):
        return None
    try:
        return int(warming.dataset.indexed_length())
    except TypeError:
        return None


def _follow(warming: Any, num_workers: int, tally: Tally, bars: Bars) -> None:
    from fastload.cli.warm_share import warming_loader

    if warming.by_shard:
        total = sum(warming.dataset.shards()[number].size for number in warming.samples.tolist())
        bar = bars.add("warming", total, format_size)
    else:
        total = len(warming.samples)
        bar = bars.add("warming", total)
    loader = warming_loader(warming, num_workers)
    try:
        for outcomes in loader:
            for warmed in outcomes:
                tally.add(warmed)
            bar.show(tally.progress, tally.describe(total))
    finally:
        counters = loader.stats()["counters"]
        tally.requests = int(counters.get("get.requests", 0) + counters.get("get.retries", 0))
        tally.read_bytes = int(counters.get("get.bytes", 0))


def _announcement(warming: Any, found: tuple[int, int], given: tuple[int, int] | None) -> str:
    if warming.by_shard:
        return f"{len(warming.samples):,} shards, read by {type(warming.dataset).__name__}"
    samples, objects = len(warming.samples), len(warming.dataset)
    if found[1] == 1:
        return f"{samples:,} objects"
    source = "--shard" if given is not None else "torchrun or SLURM; for all objects give --shard 0/1"
    return f"{samples:,} of {objects:,} objects: shard {found[0]}/{found[1]}, from {source}"


def _print_summary(document: dict[str, Any], output: Output) -> None:
    console = output.console
    console.print(
        f"{document['stored']:,} stored ({format_size(document['read_bytes'])} read), "
        f"{document['skipped']:,} present, {document['failed']:,} failed in {document['seconds']:.1f} s: "
        f"{document['objects_per_second']:,.0f} objects/s, {document['megabytes_per_second']:,.1f} MB/s",
        soft_wrap=True,
    )
    if document["prices"]["currency"] is not None:
        requests, egress = _money(document["cost"], document["prices"]["currency"])
        console.print(
            f"{document['requests']:,} GETs cost {requests}, their egress {egress}; "
            f"prices by {document['prices']['source']}; egress is often free within a region",
            soft_wrap=True,
        )
    held = document["cache"]
    of_nodes = f" of {len(document['nodes'])} nodes" if "nodes" in document else ""
    console.print(
        f"{document['settings']['cache']}{of_nodes} holds {held['entries']:,} entries, "
        f"{format_size(held['bytes'])}",
        soft_wrap=True,
    )
    if document.get("redone"):
        console.print(
            f"{document['redone']:,} slices were done again: what they read before is not among these numbers"
        )
    for node in document.get("nodes", ()):
        if node["lost"]:
            share = "{}/{}".format(*node["shard"])
            console.print(
                f"node {node['address']} is gone, and its share {share} with it ({node['lost']}): "
                "run the same command when it is back",
                soft_wrap=True,
            )
    for failure in document["failures"]:
        console.print(f"  {failure['key']}: {failure['error']}", soft_wrap=True)
    if document["failed"] > len(document["failures"]):
        console.print(f"  and {document['failed'] - len(document['failures']):,} more")
    if document["too_large"] and not document["full"]:
        console.print(
            f"too large for the cache: {document['too_large']:,} objects (above 1 GiB, or above the rest of "
            "--size-limit); training reads them from the store",
            soft_wrap=True,
        )
    left = "the other" if document["left"] is None else f"{document['left']:,}"
    if "nodes" in document and document["interrupted"] and document["left"] is not None:
        left = f"at most {left}"
        console.print("these numbers are without the slices that were ended; what they stored is kept")
    if document["full"]:
        console.print(f"the cache is full: training will read {left} objects from the store")
    if document["interrupted"]:
        console.print(f"interrupted, {left} objects left: run the same command to resume")
