"""`fastload plan URL`: predict training from a probe of some hundred objects. The JSON document:

{"command": "plan", "date", "machine": {...}, "versions": {...},
 "settings": {"url", "kind", "cache_size", "gpus", "gpu_rate", "num_workers", "epochs", "size", "short_side",
 "quality"},
 "measured": {"objects", "object_bytes", "request_seconds", "get_cpu", "network", "probed", "disk_write",
 "disk_read", "others_busy_cores",
 "modes": {MODE: {"stored_bytes", "prepare_cpu", "read_cpu", "transform_cpu"}}},
 "modes": {MODE: {"disk_bytes", "hit_rate", "total_seconds", "first": EPOCH, "later": EPOCH,
  "cost": {"requests", "egress"}}}, "prices": {"currency", "get", "list", "egress", "source"},
 "demand" (samples/s of the GPUs), "best" (MODE), "advice": [...], "assumptions": [...]}

EPOCH = {"rate", "limit", "stages": {name: samples/s}, "requests", "egress_bytes", "connections", "seconds"}
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fastload.cli.command_options import (
    CORES,
    Anon,
    CropSize,
    EndpointUrl,
    FolderUrl,
    PricesFile,
    Quality,
    ShortSide,
    StorageOption,
    storage_options,
)
from fastload.cli.kinds import SHARDS, Kind, find_kind
from fastload.cli.output import JsonOption, Output, answering
from fastload.cli.shard_source import first_records, list_shards
from fastload.metrics.units import format_money, format_size

ADVICE = {
    "GPUs": "the GPUs are the limit: the loader is fast enough",
    "cores": "the cores are the limit: use more of them, or a cache mode with less work for them",
    "workers": "the workers are the limit: raise --num-workers",
    "connections": "round trips are the limit: more workers, a closer bucket, or a larger cache",
    "network": "the store or the network is the limit: a larger cache, mode 'shrunk', or more bandwidth",
    "disk read": "reading the disk is the limit: mode 'shrunk', or a faster SSD",
    "disk write": "writing the disk is the limit in epoch 1: fastload keeps fewer samples then",
}


def plan(
    url: FolderUrl,
    cache_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Disk space for the cache, such as 500GB or 1.5TB.")
    ],
    gpus: Annotated[int, typer.Option(metavar="N", min=1, help="Number of GPUs of this machine.")],
    gpu_rate: Annotated[float, typer.Option(metavar="N", min=0.001, help="Images per second of one GPU.")],
    num_workers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Worker processes.", show_default="the cores")
    ] = CORES,
    epochs: Annotated[int, typer.Option(metavar="N", min=1, help="Epochs of the whole training.")] = 90,
    size: CropSize = 224,
    short_side: ShortSide = 256,
    quality: Quality = 90,
    objects: Annotated[int, typer.Option(metavar="N", min=16, help="Number of objects to read.")] = 256,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A directory on the disk of the cache. The command measures that disk."
        ),
    ] = None,
    endpoint_url: EndpointUrl = None,
    anon: Anon = False,
    storage_option: StorageOption = None,
    prices: PricesFile = None,
    as_json: JsonOption = False,
) -> None:
    """Read some objects, and predict rates, cache hits, disk space, requests and the limit."""
    with answering(as_json) as output:
        options = storage_options(storage_option, endpoint_url, anon)
        from fastload.cli.plan.model import Demand, Node, cores_left
        from fastload.cli.plan.prices import find_prices
        from fastload.cli.plan.probe import probe_disk, probe_store
        from fastload.metrics.units import parse_size

        found = find_prices(url, options, prices)

        capacity = parse_size(cache_size)
        disk = None if cache_dir is None else probe_disk(cache_dir)
        kept = {"short_side": short_side, "quality": quality}
        kind = find_kind(url, options)
        if kind in SHARDS:
            probe = _probe_shards(
                kind, url, options, objects=objects, size=size, workers=num_workers, cache=kept
            )
        else:
            probe = probe_store(url, options, objects=objects, size=size, cache=kept)
        node = Node(cores_left(CORES, probe.others), num_workers, capacity, *(disk or (None, None)))
        document = _predict(probe, node, Demand(gpus * gpu_rate, epochs))
        document["settings"] = {
            "url": probe.url,
            "kind": kind.value,
            "cache_size": capacity,
            "gpus": gpus,
            "gpu_rate": gpu_rate,
            "num_workers": num_workers,
            "epochs": epochs,
            "size": size,
            **kept,
        }
        _add_bill(document, found)
        _print_report(document, output)
        output.document(document)


def _probe_shards(kind: Kind, url: str, options: dict[str, Any], **arguments: Any) -> Any:
    """The probe of shards whose samples have an image."""
    from fastload.cli.plan.shards import probe_shards

    shards, form = list_shards(kind, url, cache=None, storage_options=options)
    image = first_records(shards, form).image

    def image_of(payload: Any) -> bytes | None:
        found = form.read_fields(payload).get(image)
        return None if found is None else bytes(found)

    return probe_shards(shards, form, image_of, options, **arguments)


def _predict(probe: Any, node: Any, demand: Any) -> dict[str, Any]:
    """The predictions for all modes, and the advice."""
    from fastload.cli.measurement import describe_machine
    from fastload.cli.plan.model import predict

    predictions = {name: predict(probe.data, mode, node, demand) for name, mode in probe.modes.items()}
    best = min(predictions, key=lambda name: predictions[name].total_seconds)
    measured = asdict(probe.data) | {"probed": probe.objects}
    measured |= {
        "others_busy_cores": round(probe.others, 2),
        "disk_write": node.disk_write,
        "disk_read": node.disk_read,
    }
    return {
        "command": "plan",
        **describe_machine(),
        "measured": measured | {"modes": {name: asdict(mode) for name, mode in probe.modes.items()}},
        "modes": {name: asdict(prediction) for name, prediction in predictions.items()},
        "demand": demand.rate,
        "best": best,
        "advice": _advice(predictions[best], best, node),
        "assumptions": _assumptions(probe, node),
    }


def _add_bill(document: dict[str, Any], prices: Any) -> None:
    """Add the prices, and the cost of all epochs in each mode; null where no price is known."""
    from fastload.cli.plan.prices import describe_prices

    later = document["settings"]["epochs"] - 1
    for mode in document["modes"].values():
        gets = mode["first"]["requests"] + later * mode["later"]["requests"]
        egress = mode["first"]["egress_bytes"] + later * mode["later"]["egress_bytes"]
        described = describe_prices(prices, gets, egress)
        mode["cost"], document["prices"] = described["cost"], described["prices"]
    document["assumptions"].append(
        "no prices: give --prices FILE, see the guide on cost"
        if prices is None
        else f"prices by {prices.source}; egress is often free within a region"
    )


def _advice(prediction: Any, best: str, node: Any) -> list[str]:
    advice = [f"mode '{best}' takes the least time"]
    for name, epoch in (("epoch 1", prediction.first), ("later", prediction.later)):
        advice.append(f"{name}: {ADVICE[epoch.limit]}")
    if prediction.hit_rate < 1:
        advice.append(
            f"the cache will hold {prediction.hit_rate:.0%} of the samples: all of them need "
            f"{format_size(prediction.disk_bytes)}, and it has {format_size(node.cache_bytes)}"
        )
    return advice


def _assumptions(probe: Any, node: Any) -> list[str]:
    disk = "measured" if node.disk_read is not None else "assumed to be fast enough (--cache-dir measures it)"
    network = "the probe reached no ceiling" if probe.data.network is None else "the ceiling of the probe"
    server = "the store runs on this machine and uses its CPU" if probe.server_here else "this process's CPU"
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
    ]


def _print_report(document: dict[str, Any], output: Output) -> None:
    """A column for each mode, then advice and assumptions."""
    measured, modes, console = document["measured"], document["modes"], output.console
    console.print(
        f"{measured['objects']:,} images of {format_size(measured['object_bytes'])}; a GET takes "
        f"{measured['request_seconds'] * 1000:.1f} ms and {measured['get_cpu'] * 1000:.2f} ms of a core; "
        f"the GPUs take {document['demand']:,.0f} images/s",
        soft_wrap=True,
    )
    table = Table(header_style="bold")
    table.add_column("")
    for name in modes:
        table.add_column(name + (" *" if name == document["best"] else ""), justify="right")
    for title, cell in _ROWS:
        table.add_row(title, *(cell(measured["modes"][name], mode) for name, mode in modes.items()))
    if document["prices"]["currency"] is not None:
        for title, kind in (("GETs, all epochs", "requests"), ("egress, all epochs", "egress")):
            currency = document["prices"]["currency"]
            table.add_row(title, *(format_money(mode["cost"][kind], currency) for mode in modes.values()))
    console.print(table)
    for line in document["advice"]:
        console.print(line, soft_wrap=True)
    for line in document["assumptions"]:
        console.print(f"assumed: {line}", style="dim", soft_wrap=True)


def _rate(epoch: dict[str, Any]) -> str:
    return f"{epoch['rate']:,.0f} ({epoch['limit']})"


_ROWS: list[tuple[str, Any]] = [
    ("bytes per sample", lambda cost, _: format_size(cost["stored_bytes"])),
    ("decode + crop, ms of a core", lambda cost, _: f"{cost['transform_cpu'] * 1000:.2f}"),
    ("disk for all", lambda _, mode: format_size(mode["disk_bytes"])),
    ("from the cache, later", lambda _, mode: f"{mode['hit_rate']:.0%}"),
    ("epoch 1, images/s (limit)", lambda _, mode: _rate(mode["first"])),
    ("later, images/s (limit)", lambda _, mode: _rate(mode["later"])),
    ("in flight for the GPUs, epoch 1", lambda _, mode: f"{mode['first']['connections']:,}"),
    ("in flight for the GPUs, later", lambda _, mode: f"{mode['later']['connections']:,}"),
    ("GETs, epoch 1", lambda _, mode: f"{mode['first']['requests']:,.0f}"),
    ("GETs, later", lambda _, mode: f"{mode['later']['requests']:,.0f}"),
    ("egress, epoch 1", lambda _, mode: format_size(mode["first"]["egress_bytes"])),
    ("egress, later", lambda _, mode: format_size(mode["later"]["egress_bytes"])),
    ("all epochs", lambda _, mode: f"{mode['total_seconds'] / 3600:,.2f} h"),
]
