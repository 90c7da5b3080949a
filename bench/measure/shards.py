"""Shards: epochs of tar and TFRecord beside loose objects, WebDataset, and a bare ranged read.

`python -m bench shards [--images 2000] [--repeats 5] [--quick] [--save]`. Photos of 138 KB, about
250 in a shard, on an S3 server 20 ms away that runs on the same cores; 2 workers; RandomResizedCrop(224) and
flip to uint8 in batches of 64. All contenders take turns. Ratios are medians of the ratios within one turn.

The server, rclone, answers a ranged request with status 200, which many clients refuse; the proxy that makes
the round trip changes it to 206 for all of them. "streamed" reads shards without an index, "at random" with
the index files that `fastload convert` wrote beside them. At the end comes the table of `bench moxing`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from bench.data import BATCH, ROUND_TRIP, SIZE, WORKERS, WORKPLACE, make_shards, photo_folder, write_result
from bench.measure import moxing
from bench.measure.bare import read_shards
from bench.measure.epochs import (
    count,
    cpu_seconds,
    epoch,
    filling_and_cached,
    median_ratio,
    over_a_full_cache,
    shuffled,
)
from bench.peers.peer import Peer, Run
from fastload import Cache, ImageFolder, RandomResizedCrop, TarDataset, TFRecordDataset
from fastload.cache.codecs import MODES
from fastload.cli.demo.s3_server import delay_proxy, serve_s3
from fastload.cli.report import describe_machine

FEATURES = {"image": bytes, "label": int}

Make = Callable[[Cache | None], Any]


class Place(NamedTuple):
    """The bucket over the round trip: photos, and the same in shards with and without indexes."""

    options: dict[str, str]
    shards: dict[str, list[Path]]
    photos: str


@contextmanager
def place(images: int) -> Iterator[Place]:
    photos = photo_folder(images)
    made = {form: make_shards(photos, images, form) for form in ("tar", "tfrecord")}
    with ExitStack() as stack:
        server = stack.enter_context(serve_s3(photos.parent))
        proxy = stack.enter_context(delay_proxy(server.endpoint_url, ROUND_TRIP))
        shards = {form: sorted(folder.glob(f"*.{form}")) for form, folder in made.items()}
        yield Place(server.options | {"endpoint_url": proxy.url}, shards, f"s3://{photos.name}/")


def shard_dataset(at: Place, form: str, cache: Cache | None, *, index: bool) -> Any:
    """Images and labels out of shards."""
    url = f"s3://{at.shards[form][0].parent.name}/"
    options: dict[str, Any] = {
        "cache": cache,
        "storage_options": at.options,
        "index": None if index else False,
    }
    if form == "tar":
        return TarDataset(url, transform=RandomResizedCrop(SIZE, flip=0.5), **options)
    return TFRecordDataset(url, FEATURES, transform=RandomResizedCrop(SIZE, flip=0.5), **options)


def makers(at: Place) -> dict[str, Make]:
    def folder(cache: Cache | None) -> Any:
        return ImageFolder(
            at.photos, RandomResizedCrop(SIZE, flip=0.5), cache=cache, storage_options=at.options
        )

    found: dict[str, Make] = {"loose objects": folder}
    for form in ("tar", "tfrecord"):
        found[f"{form}, streamed"] = lambda cache, form=form: shard_dataset(at, form, cache, index=False)
        found[f"{form}, at random"] = lambda cache, form=form: shard_dataset(at, form, cache, index=True)
    return found


def cold(make: Make) -> Callable[[], Run]:
    return lambda: epoch(shuffled(make(None)))


def later(make: Make, mode: str, folder: Path, images: int) -> Callable[[], Run]:
    """Epochs from a full cache, by workers that run already."""
    running = over_a_full_cache(make, folder, images, mode)
    return lambda: epoch(running)


def bytes_only(at: Place) -> Callable[[], Run]:
    url = f"s3://{at.shards['tfrecord'][0].parent.name}/"
    dataset = TFRecordDataset(url, index=False, storage_options=at.options)
    return lambda: epoch(shuffled(dataset, collate_fn=count))


def bare(at: Place, images: int) -> Callable[[], Run]:
    """obstore alone, over the same shards."""
    shards = at.shards["tfrecord"]

    def run() -> Run:
        cpu = cpu_seconds()
        seconds = read_shards(shards[0].parent.name, at.options, shards)
        return Run(images, seconds, 0.0, cpu_seconds() - cpu)

    return run


def job(at: Place, scratch: str) -> dict[str, Any]:
    """The job for WebDataset: the same tar shards, as its documentation recommends."""
    access = {
        "endpoint": at.options["endpoint_url"],
        "key": at.options["key"],
        "secret": at.options["secret"],
    }
    photos = str(at.shards["tar"][0].parent).removesuffix("-tar")
    work = {"folder": photos, "batch": BATCH, "size": SIZE, "workers": WORKERS}
    return access | work | {"scratch": scratch, "later": False, "mode": ""}


def contenders(at: Place, images: int, folder: Path, webdataset: Peer) -> dict[str, Callable[[], Run]]:
    found: dict[str, Callable[[], Run]] = {}
    made = makers(at)
    for name, make in made.items():
        filling, _ = filling_and_cached(make)
        found |= {f"first: {name}": cold(make), f"first, filling: {name}": filling}
    found["first: WebDataset"] = webdataset.epoch
    found |= {"bytes: tfrecord, streamed": bytes_only(at), "bytes: bare ranged read": bare(at, images)}
    for mode in MODES:
        for name, short in (
            ("loose objects", "folder"),
            ("tar, streamed", "tar"),
            ("tfrecord, streamed", "tfr"),
        ):
            found[f"later, {mode}: {name}"] = later(made[name], mode, folder / f"{mode}-{short}", images)
    return found


def ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Medians of the ratios within one turn."""

    def of(one: str, other: str) -> float:
        return median_ratio(rates[one], rates[other])

    found = {}
    for form in ("tar", "tfrecord"):
        for way in ("streamed", "at random"):
            name = f"{form}, {way}"
            found[f"{name} / WebDataset"] = of(f"first: {name}", "first: WebDataset")
            found[f"{name} / loose objects, first"] = of(f"first: {name}", "first: loose objects")
            found[f"{name}, filling / not"] = of(f"first, filling: {name}", f"first: {name}")
        for mode in MODES:
            key = f"{form} / loose objects, later, {mode}"
            found[key] = of(f"later, {mode}: {form}, streamed", f"later, {mode}: loose objects")
    return found | {"bytes / bare ranged read": of("bytes: tfrecord, streamed", "bytes: bare ranged read")}


def show(console: Console, runs: dict[str, list[Run]], rates: dict[str, list[float]]) -> None:
    table = Table(title=f"20 ms, {WORKERS} workers, RandomResizedCrop({SIZE}) + flip to uint8")
    for column in ("", "images/s", "min", "max", "first batch, s", "CPU, ms"):
        table.add_column(column, justify="right" if column else "left")
    for name, made in rates.items():
        first = statistics.median(run.first_batch for run in runs[name])
        cpu = statistics.median(1e3 * run.cpu_seconds / run.images for run in runs[name])
        cells = [f"{value:,.0f}" for value in (statistics.median(made), min(made), max(made))]
        # The kernel counts the CPU time of ended children only, and these workers go on running.
        table.add_row(name, *cells, f"{first:.2f}", "" if name.startswith("later") else f"{cpu:.2f}")
    console.print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two turns")
    parser.add_argument("--save", action="store_true", help="write bench/results/shards-DATE.json")
    return parser.parse_args()


def main() -> None:
    given = parse()
    console = Console(width=110)
    torch.set_num_threads(1)
    runs: dict[str, list[Run]] = {}
    document: dict[str, Any] = {"bench": "shards", **describe_machine(), "load_before": os.getloadavg()}
    with (
        place(given.images) as at,
        tempfile.TemporaryDirectory(dir=WORKPLACE) as folder,
        Peer("webdataset", job(at, folder)) as webdataset,
    ):
        turns = list(contenders(at, given.images, Path(folder), webdataset).items())
        for turn in range(2 if given.quick else given.repeats):
            for name, run in turns if turn % 2 == 0 else reversed(turns):
                runs.setdefault(name, []).append(run())
                if runs[name][-1].images != given.images:
                    raise RuntimeError(f"{name}: {runs[name][-1].images} images of {given.images}")
        document["shards"] = {form: len(paths) for form, paths in at.shards.items()}
    rates = {name: [one.images / one.seconds for one in made] for name, made in runs.items()}
    show(console, runs, rates)
    document |= {
        "images": given.images,
        "rates": {name: round(statistics.median(made), 1) for name, made in rates.items()},
        "all_rates": {name: [round(rate, 1) for rate in made] for name, made in rates.items()},
        "ratios": ratios(rates),
        "load_after": os.getloadavg(),
    }
    for name, ratio in document["ratios"].items():
        console.print(f"{name:44}{ratio:6.2f}")
    document["moxing"] = moxing.report(
        console, given.images if given.quick else moxing.IMAGES, 2 if given.quick else given.repeats
    )
    if given.save:
        print(f"written: {write_result(document)}")


if __name__ == "__main__":
    main()
