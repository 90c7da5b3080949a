"""`fastload plan URL`: predict training from a probe of some hundred objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from fastload.checks import format_size, parse_size
from fastload.cli.command_options import CORES, CropSize, PricesFile, Quality, ShortSide, StoreOptions
from fastload.cli.data_source import INDEXABLE, DataUrl, SourceOptions, find_kind
from fastload.cli.plan.model import Data, Demand, Mode, Node, Prediction, cores_left, predict
from fastload.cli.plan.prices import Cost, Prices, find_prices
from fastload.cli.report import Lines, MeasuredReport, dimmed, figures

ADVICE = {
    "GPUs": "the GPUs are the limit: the loader is fast enough",
    "cores": "the cores are the limit: use more of them, or a cache mode with less work for them",
    "workers": "the workers are the limit: raise --num-workers",
    "connections": "round trips are the limit: more workers, a closer bucket, or a larger cache",
    "network": "the store or the network is the limit: a larger cache, mode 'shrunk', or more bandwidth",
    "disk read": "reading the disk is the limit: mode 'shrunk', or a faster SSD",
    "disk write": "writing the disk is the limit in epoch 1: fastload keeps fewer samples then",
}


@dataclass(kw_only=True)
class Settings:
    """What was asked for."""

    url: str
    kind: Annotated[str, "what lies there: as given or found"]
    size_limit: Annotated[int, "as given, in bytes"]
    gpus: int
    gpu_rate: float
    num_workers: int
    epochs: int
    size: int
    short_side: int
    quality: int


@dataclass(frozen=True, kw_only=True)
class Measured(Data):
    """What the probe measured."""

    probed: Annotated[int, "objects that were read for this"]
    disk_write: Annotated[float | None, "bytes/s of the disk of `--cache`, else null"]
    disk_read: Annotated[float | None, "bytes/s of the disk of `--cache`, else null"]
    others_busy_cores: Annotated[float, "cores that other processes kept busy"]
    modes: Annotated[dict[str, Mode], "by cache mode"]


@dataclass(frozen=True, kw_only=True)
class PricedPrediction(Prediction):
    """A whole run in one cache mode, and its price."""

    cost: Annotated[Cost | None, "cost of all epochs; null where no price is known"]


@dataclass(kw_only=True)
class PlanReport(MeasuredReport):
    """The predictions for each cache mode."""

    command = "plan"
    settings: Settings
    measured: Measured
    modes: Annotated[dict[str, PricedPrediction], "by cache mode"]
    prices: Annotated[Prices | None, "null where they are not known"]
    demand: Annotated[float, "images/s of all GPUs"]
    best: Annotated[str, "the mode that takes the least time"]
    advice: Annotated[list[str], "sentences"]
    assumptions: Annotated[list[str], "sentences"]

    def text(self) -> Lines:
        """Yield a column for each mode, then advice and assumptions."""
        measured = self.measured
        yield (
            f"{measured.objects:,} images of {format_size(measured.object_bytes)}; a GET takes "
            f"{measured.request_seconds * 1000:.1f} ms and {measured.get_cpu * 1000:.2f} ms of a core; "
            f"the GPUs take {self.demand:,.0f} images/s"
        )
        table = figures("", *(name + (" *" if name == self.best else "") for name in self.modes))
        for title, cell in _ROWS:
            table.add_row(title, *(cell(measured.modes[name], mode) for name, mode in self.modes.items()))
        if self.prices is not None:
            costs = [mode.cost.words(self.prices.currency) for mode in self.modes.values() if mode.cost]
            table.add_row("GETs, all epochs", *(requests for requests, _ in costs))
            table.add_row("egress, all epochs", *(egress for _, egress in costs))
        yield table
        yield from self.advice
        for line in self.assumptions:
            yield dimmed(f"assumed: {line}")


def _rate(epoch: Any) -> str:
    return f"{epoch.rate:,.0f} ({epoch.limit})"


_ROWS: list[tuple[str, Callable[[Mode, Prediction], str]]] = [
    ("bytes per sample", lambda cost, _: format_size(cost.stored_bytes)),
    ("decode + crop, ms of a core", lambda cost, _: f"{cost.transform_cpu * 1000:.2f}"),
    ("disk for all", lambda _, mode: format_size(mode.disk_bytes)),
    ("from the cache, later", lambda _, mode: f"{mode.hit_rate:.0%}"),
    ("epoch 1, images/s (limit)", lambda _, mode: _rate(mode.first)),
    ("later, images/s (limit)", lambda _, mode: _rate(mode.later)),
    ("in flight for the GPUs, epoch 1", lambda _, mode: f"{mode.first.connections:,}"),
    ("in flight for the GPUs, later", lambda _, mode: f"{mode.later.connections:,}"),
    ("GETs, epoch 1", lambda _, mode: f"{mode.first.requests:,.0f}"),
    ("GETs, later", lambda _, mode: f"{mode.later.requests:,.0f}"),
    ("egress, epoch 1", lambda _, mode: format_size(mode.first.egress_bytes)),
    ("egress, later", lambda _, mode: format_size(mode.later.egress_bytes)),
    ("all epochs", lambda _, mode: f"{mode.total_seconds / 3600:,.2f} h"),
]


@dataclass(frozen=True)
class TrainingOptions:
    """The training that is planned."""

    size_limit: Annotated[
        str, typer.Option(metavar="SIZE", help="Disk space for the cache, such as 500GB or 1.5TB.")
    ]
    gpus: Annotated[int, typer.Option(metavar="N", min=1, help="Number of GPUs of this machine.")]
    gpu_rate: Annotated[float, typer.Option(metavar="N", min=0.001, help="Images per second of one GPU.")]
    num_workers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Workers, as of DataLoader.", show_default="the cores")
    ] = CORES
    epochs: Annotated[int, typer.Option(metavar="N", min=1, help="Epochs of the whole training.")] = 90
    size: CropSize = 224
    short_side: ShortSide = 256
    quality: Quality = 90


def plan(
    url: DataUrl,
    source: SourceOptions,
    store: StoreOptions,
    training: TrainingOptions,
    objects: Annotated[int, typer.Option(metavar="N", min=16, help="Number of objects to read.")] = 256,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="A directory on the disk of the cache. The command measures that disk."
        ),
    ] = None,
    prices: PricesFile = None,
) -> PlanReport:
    """Read some objects, and predict rates, cache hits, disk space, requests and the limit."""
    from fastload.cli.plan.probe import probe_disk, probe_samples, probe_shards

    options = store.parse()
    priced = find_prices(url, options, prices)
    limit, epochs = parse_size(training.size_limit, "--size-limit"), training.epochs
    disk = (None, None) if cache is None else probe_disk(cache)
    kind = find_kind(url, options, source.kind)
    modes = {"short_side": training.short_side, "quality": training.quality}
    if kind in INDEXABLE:
        probe = probe_shards(url, kind, options, objects, training.size, modes, workers=training.num_workers)
    else:
        probe = probe_samples(url, kind, options, objects, training.size, modes, source=source)
    node = Node(cores_left(CORES, probe.others), training.num_workers, limit, *disk)
    demand = Demand(training.gpus * training.gpu_rate, epochs)
    predictions = {name: predict(probe.data, mode, node, demand) for name, mode in probe.modes.items()}
    best = min(predictions, key=lambda name: predictions[name].total_seconds)
    return PlanReport(
        settings=Settings(url=probe.url, kind=kind, **{**vars(training), "size_limit": limit}),
        measured=Measured(
            **vars(probe.data),
            probed=probe.objects,
            disk_write=node.disk_write,
            disk_read=node.disk_read,
            others_busy_cores=round(probe.others, 2),
            modes=probe.modes,
        ),
        modes={
            name: PricedPrediction(**vars(run), cost=_bill(run, epochs, priced))
            for name, run in predictions.items()
        },
        prices=priced,
        demand=demand.rate,
        best=best,
        advice=_advice(predictions[best], best, node),
        assumptions=_assumptions(probe, node, priced),
    )


def _bill(prediction: Prediction, epochs: int, prices: Prices | None) -> Cost | None:
    """Return the cost of all epochs."""
    if prices is None:
        return None
    first, later = prediction.first, prediction.later
    gets = first.requests + (epochs - 1) * later.requests
    return prices.bill(gets, first.egress_bytes + (epochs - 1) * later.egress_bytes)


def _advice(prediction: Prediction, best: str, node: Node) -> list[str]:
    advice = [f"mode '{best}' takes the least time"]
    for name, epoch in (("epoch 1", prediction.first), ("later", prediction.later)):
        advice.append(f"{name}: {ADVICE[epoch.limit]}")
    if prediction.hit_rate < 1:
        advice.append(
            f"the cache will hold {prediction.hit_rate:.0%} of the samples: all of them need "
            f"{format_size(prediction.disk_bytes)}, and it has {format_size(node.cache_bytes)}"
        )
    return advice


def _assumptions(probe: Any, node: Node, prices: Prices | None) -> list[str]:
    disk = "measured" if node.disk_read is not None else "assumed to be fast enough (--cache DIR measures it)"
    network = "the probe reached no ceiling" if probe.data.network is None else "the ceiling of the probe"
    server = "the store runs on this machine and uses its CPU" if probe.server_here else "this process's CPU"
    priced = "no prices: give --prices FILE, see the guide on cost"
    if prices is not None:
        priced = f"prices by {prices.source}; egress is often free within a region"
    streaming = probe.data.streaming
    if streaming is None:
        sample = f"{probe.objects} random objects are representative of all {probe.data.objects:,}"
        requests = "128 requests in flight a worker, 1,024 a node"
    else:
        sample = (
            f"the first {probe.objects} samples of random shards are representative of all, which are about "
            f"{probe.data.objects:,}"
        )
        later = "are read by a request each" if streaming.at_random else "cost an epoch of streams"
        requests = (
            f"epoch 1 streams the shards, {streaming.per_request:,.0f} samples a request and "
            f"{streaming.in_flight:,} requests in flight; later, samples that it lacks {later}"
        )
    return [
        sample,
        f"other processes keep {probe.others:.1f} of {CORES} cores busy, and will continue to",
        f"CPU per GET: {server}; decoding: measured on one core, and cores add up",
        f"network: {network}; disk: {disk}",
        f"the cache fills in epoch 1 and keeps what it has; {requests}",
        priced,
    ]
