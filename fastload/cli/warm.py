"""`fastload warm URL --cache DIR`: fill the cache before training, here or on the nodes of a cluster."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from fastload.checks import format_size
from fastload.cli.cluster import RayOption
from fastload.cli.command_options import CORES, CacheOptions, ListingMaxAge, PricesFile, StoreOptions
from fastload.cli.data_source import DataUrl, SourceOptions
from fastload.cli.plan.prices import Prices, find_prices
from fastload.cli.report import Output
from fastload.cli.warm_report import Quote, Target, WarmReport, report_of
from fastload.errors import ArgumentError


def warm(
    url: DataUrl,
    source: SourceOptions,
    cached: CacheOptions,
    store: StoreOptions,
    output: Output,
    cache: Annotated[str, typer.Option(metavar="DIR", help="The cache directory of your training script.")],
    num_workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Worker processes, of each node.",
            show_default="the cores; with --ray the node's CPUs",
        ),
    ] = None,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="The share of node I of N nodes, from 0, as in DistributedSampler(partition='node').",
            show_default="from torchrun or SLURM, else 0/1: all",
        ),
    ] = None,
    listing_max_age: ListingMaxAge = "0",
    prices: PricesFile = None,
    ray: RayOption = None,
) -> WarmReport:
    """Fill a cache before training. After an interruption, run the same command again to resume."""
    wanted, options = _parse_share(share), store.parse()
    priced = find_prices(url, options, prices)
    from fastload.cache.cache import absolute
    from fastload.cli.warming import NodesWarming, fill, find_left, find_share

    target = Target(url, absolute(cache), cached, source, options)
    quote: Callable[[Any], Quote] = functools.partial(_quote, prices=priced, output=output)
    if ray is not None:
        nodes = NodesWarming(target, wanted, num_workers, listing_max_age)
        return nodes.run(ray, output, quote, priced)
    start = time.perf_counter()
    dataset, kind = target.open(listing_max_age)
    listing_seconds = time.perf_counter() - start
    warming, numbers = find_share(dataset, wanted)
    quoted = quote(find_left(warming))
    workers = CORES if num_workers is None else num_workers
    output.console.print(_announcement(warming, numbers, given=wanted is not None))
    filled = fill(warming, workers, output)
    settings = target.settings(dataset.url, kind, workers, numbers)
    return report_of(filled, settings, quoted, priced, listing_seconds=round(listing_seconds, 3))


def _quote(left: Any, prices: Prices | None, output: Output) -> Quote:
    """Say what is left to read, before it is read."""
    quote = Quote(**left._asdict(), cost=None)
    text = f"to read: about {left.requests:,} GETs, {format_size(left.read_bytes)}"
    if prices is not None:
        quote.cost = prices.bill(left.requests, left.read_bytes)
        requests, egress = quote.cost.words(prices.currency)
        text += f"; they cost {requests}, their egress {egress}, by {prices.source}"
    output.console.print(text, soft_wrap=True)
    return quote


def _parse_share(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, separator, second = text.partition("/")
    if not (separator and first.isdecimal() and second.isdecimal() and int(first) < int(second)):
        raise ArgumentError(f"--share {text!r}: give I/N with I from 0 to N - 1, such as 0/4")
    return int(first), int(second)


def _announcement(warming: Any, share: tuple[int, int], *, given: bool) -> str:
    if warming.by_shard:
        return f"{len(warming.samples):,} shards, read by {type(warming.dataset).__name__}"
    samples, objects = len(warming.samples), len(warming.dataset)
    if share[1] == 1:
        return f"{samples:,} objects"
    source = "--share" if given else "torchrun or SLURM; for all objects give --share 0/1"
    return f"{samples:,} of {objects:,} objects: share {share[0]}/{share[1]}, from {source}"
