"""What a node of 8 H100 would get, and 128 of them: the arithmetic of `fastload plan` on measured costs.

    python -m bench node bench/results/compare-DATE.json

Nothing of this was run on such a node. Costs are fitted from the rows of fastload in the document of
`python -m bench compare`; the node is a description from public pages, and every assumption is printed. The
check is the same arithmetic for the machine that was measured on, against what was measured there.

Beside what the document holds, the command prints what the loaders could make if the GPUs took it, and what
the store is asked for without a cache, and in epoch 2 where any node reads any sample.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.show.figures import MAIN, find, rows_of
from fastload.cache.codecs import MODES
from fastload.cli.plan.model import (
    NODE_REQUESTS,
    Data,
    Demand,
    Epoch,
    Mode,
    Node,
    cores_left,
    predict_epoch,
)

__all__ = ["checks", "fit", "predict", "predictions"]

NAME, NODES = "8 x H100", 128
GPUS = 8
GPU_RATE = 400 / 0.224  # images/s
CORES = 96  # vCPUs
WORKERS_PER_GPU = 8
CACHE_BYTES = 28_000 << 30
NETWORK = 80e9 / 8  # bytes/s
DISK_READ = 1.6e6 * 4096  # bytes/s
DISK_WRITE = DISK_READ / 2
IMAGES = 14_197_122
REQUEST_SECONDS = 0.022
STORED_BYTES = {"dct": 152_041.0, "shrunk": 42_687.0, "decoded": 360_000.0}  # 400 x 300 pixels


def predict(document: dict[str, Any]) -> dict[str, Any] | None:
    """What compare's document has under "node"; None where it lacks the rows that it takes.

    `rate` is what the GPUs get: `wanted`, or what the loaders make where they are the limit. The store is
    asked for `store_bytes_per_second` meanwhile. `check` is the worse of `checks`.
    """
    try:
        fitted = fit(document)
        found = checks(document, fitted)
    except LookupError:
        return None
    return {
        "fitted": _named(fitted),
        "assumptions": [*_assumptions(fitted), *map(_sentence, found.items())],
        "predictions": [
            {name: value for name, value in entry.items() if name != "possible"}
            for entry in predictions(fitted)
            if entry["mode"] in MODES
        ],
        "check": max(found.values(), key=lambda check: abs(check["error"])),
    }


# --- fitting


def fit(document: dict[str, Any]) -> dict[str, float]:
    """Bytes, and core-seconds per image, by name.

    decode_cpu_MODE: a sample from the cache: reading back, decoding, handing over.
    get_cpu: what a GET takes beyond that. fill_cpu_MODE: preparing and keeping the sample, where measured.
    """
    cold = _row(document, "cold", MAIN, "fastload")
    fitted = {
        "image_bytes": float(document["settings"]["image_bytes"]),
        "store_bytes": float(cold["store_bytes_per_image"] or document["settings"]["image_bytes"]),
        "requests_per_image": float(cold["store_requests_per_image"] or 1.0),
    }
    for mode in _measured(document):
        fitted[f"decode_cpu_{mode}"] = _cpu(_row(document, "later", mode, "fastload"))
    fitted["get_cpu"] = max(0.0, _cpu(cold) - fitted["decode_cpu_raw"])
    for mode in _measured(document):
        row = find(rows_of(document, "cold", MAIN), f"fastload, filling {mode}")
        if row is not None:
            known = fitted["get_cpu"] + fitted[f"decode_cpu_{mode}"]
            fitted[f"fill_cpu_{mode}"] = max(0.0, _cpu(row) - known)
    return fitted


def _measured(document: dict[str, Any]) -> list[str]:
    """The cache modes. Results of before 2026-11-22 have no "dct"."""
    return [mode for mode in MODES if mode != "dct" or rows_of(document, "later", "dct")]


def _row(document: dict[str, Any], section: str, case: str, contender: str) -> dict[str, Any]:
    row = find(rows_of(document, section, case), contender)
    if row is None:
        raise LookupError(f"no row of {contender!r} in section {section!r}, case {case!r}")
    return row


def _cpu(row: dict[str, Any]) -> float:
    if not row["cpu_seconds_per_1000"]:
        raise LookupError(f"no CPU time of {row['contender']!r} in {row['section']!r}, {row['case']!r}")
    return float(median(row["cpu_seconds_per_1000"])) / 1000


def _named(fitted: dict[str, float]) -> dict[str, float]:
    """The costs for people, in KB and ms; and what the GPUs' rate takes of a node's cores."""
    named = {
        "KB an image": fitted["image_bytes"] / 1000,
        "KB from the store an image": fitted["store_bytes"] / 1000,
        "GETs an image": fitted["requests_per_image"],
        "core ms of a GET": 1000 * fitted["get_cpu"],
    }
    for mode in (mode for mode in MODES if f"decode_cpu_{mode}" in fitted):
        later = fitted[f"decode_cpu_{mode}"]
        named[f"core ms of an image from the cache ({mode})"] = 1000 * later
        named[f"cores of a node busy in later epochs ({mode})"] = GPUS * GPU_RATE * later
        if (filling := fitted.get(f"fill_cpu_{mode}")) is not None:
            first = later + filling + fitted["get_cpu"]
            named[f"core ms of keeping an image ({mode})"] = 1000 * filling
            named[f"cores of a node busy in epoch 1 ({mode})"] = GPUS * GPU_RATE * first
    return {name: round(value, 4) for name, value in named.items()}


# --- predicting


def predictions(fitted: dict[str, float]) -> list[dict[str, Any]]:
    """The document's, and modes "no cache" and "raw, no partition"; `possible` is what the loaders make."""
    return [entry for nodes in (1, NODES) for entry in _predictions(fitted, nodes)]


def _mode(fitted: dict[str, float], name: str) -> Mode:
    stored = fitted["image_bytes"] if name == "raw" else STORED_BYTES[name]
    return Mode(stored, fitted.get(f"fill_cpu_{name}", 0.0), 0.0, fitted[f"decode_cpu_{name}"])


def _predictions(fitted: dict[str, float], nodes: int) -> Iterator[dict[str, Any]]:
    data = Data(IMAGES // nodes, fitted["store_bytes"], REQUEST_SECONDS, fitted["get_cpu"], NETWORK)
    node = Node(cores_left(CORES, GPUS), GPUS * WORKERS_PER_GPU, CACHE_BYTES, DISK_WRITE, DISK_READ)
    demand = Demand(GPUS * GPU_RATE)
    for name in (mode for mode in MODES if f"decode_cpu_{mode}" in fitted):
        mode = _mode(fitted, name)
        if f"fill_cpu_{name}" in fitted:
            first = predict_epoch(data, mode, node, demand, hits=0, filling=1)
            yield _entry(name, "first", nodes, demand, first)
        yield _entry(name, "later", nodes, demand, predict_epoch(data, mode, node, demand, hits=1))
    raw = _mode(fitted, "raw")
    plain = replace(raw, prepare_cpu=0.0)
    for epoch in ("first", "later"):
        yield _entry("no cache", epoch, nodes, demand, predict_epoch(data, plain, node, demand, hits=0))
    if nodes > 1:
        hits = 1 / nodes  # so much of what it reads in epoch 2 a node has read in epoch 1
        second = predict_epoch(data, raw, node, demand, hits=hits, filling=1 - hits)
        yield _entry("raw, no partition", "later", nodes, demand, second)


def _entry(mode: str, epoch: str, nodes: int, demand: Demand, found: Epoch) -> dict[str, Any]:
    return {
        "node": NAME,
        "nodes": nodes,
        "mode": mode,
        "epoch": epoch,
        "wanted": round(nodes * demand.rate, 1),
        "rate": round(nodes * min(found.rate, demand.rate), 1),
        "possible": round(nodes * found.rate, 1),
        "limit": found.limit,
        "store_bytes_per_second": round(nodes * found.egress_bytes / found.seconds),
    }


def _assumptions(fitted: dict[str, float]) -> list[str]:
    wanted = GPUS * GPU_RATE
    enough = 1000 * NODE_REQUESTS / wanted
    stored = ", ".join(f"{size / 1000:,.0f} KB {mode}" for mode, size in STORED_BYTES.items())
    return [
        f"an H100 takes {GPU_RATE:,.1f} images/s, batches of 400 in 0.224 s, as MLPerf Storage simulates it "
        "for ResNet-50 (github.com/mlcommons/storage, resnet50_h100.yaml)",
        f"a node has {CORES} vCPUs, 28,000 GiB of local NVMe and 80 Gbit/s to the store, as Azure says of ND "
        "H100 v5 (learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/ndh100v5-series)",
        f"its NVMe reads {DISK_READ / 1e9:.1f} GB/s, which is 1.6 million times 4 KiB, as Google says of 16 "
        "local SSDs (cloud.google.com/compute/docs/disks/local-ssd), and writes half of that; Azure gives no "
        "figure",
        f"{GPUS} vCPUs are busy with training; {WORKERS_PER_GPU} workers a GPU share the others",
        "each does what a core of the measured machine does, and they add up: neither memory bandwidth nor "
        "clocks that sink are in this",
        f"{IMAGES:,} images, as many as ImageNet-21k has, of {fitted['image_bytes'] / 1000:,.0f} KB; in "
        f"other modes a sample takes {stored}; the cache holds all of its node's",
        f"a GET takes {1000 * REQUEST_SECONDS:.0f} ms; {NODE_REQUESTS:,} in flight a node are enough for the "
        f"GPUs up to {enough:.0f} ms, and where one takes 150 ms they make "
        f"{NODE_REQUESTS / 0.15:,.0f} images/s a node in epoch 1",
        "the store gives what it is asked for; nodes do not disturb each other",
        "partition='node': a node reads its own share, so all nodes together read each object once, and "
        "later epochs ask the store for nothing",
        "without a cache later epochs ask it for what the first asks; without a partition epoch 2 does so "
        f"for all but 1 of {NODES} samples, since other nodes read them in epoch 1",
        "on the measured machine, epoch 1: store, round trip and client share its cores, and a GET by all of "
        "them takes the cores' time that it takes in the bare loop",
    ]


# --- checking


def checks(document: dict[str, Any], fitted: dict[str, float]) -> dict[str, dict[str, float]]:
    """{"predicted", "measured", "error"} of the measured machine, by case: median rates."""
    cores = float(document["machine"]["cores"])
    plain = replace(_mode(fitted, "raw"), prepare_cpu=0.0)
    data = Data(document["settings"]["images"], fitted["store_bytes"], REQUEST_SECONDS, 0.0)

    def check(row: dict[str, Any], data: Data, hits: float) -> dict[str, float]:
        node = Node(cores, row["workers"] or 1, CACHE_BYTES)
        predicted = predict_epoch(data, plain, node, Demand(1e9), hits=hits).rate
        measured = median(row["rates"])
        error = round(predicted / measured - 1, 4)
        return {"predicted": round(predicted, 1), "measured": round(measured, 1), "error": error}

    found = {"later raw": check(_row(document, "later", "raw", "fastload"), data, 1)}
    if (bare := _bare_rate(document)) is not None:
        row = _row(document, "cold", MAIN, "fastload")
        found[f"first epoch at {MAIN}"] = check(row, replace(data, get_cpu=cores / bare), 0)
    return found


def _bare_rate(document: dict[str, Any]) -> float | None:
    """GETs per second of the bare loop, which keeps all cores busy."""
    for limit in document["limits"]:
        if (limit["section"], limit["case"]) == ("cold", MAIN) and "GET" in limit["name"]:
            return float(median(limit["rates"]))
    return None


def _sentence(named: tuple[str, dict[str, float]]) -> str:
    case, check = named
    return (
        f"the check, on the measured machine, {case}: {check['predicted']:,.0f} images/s predicted, "
        f"{check['measured']:,.0f} measured ({100 * check['error']:+.1f} %)"
    )


# --- printing


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="a document of `python -m bench compare`")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON document")
    given = parser.parse_args()
    document = json.loads(given.result.read_text())
    try:
        fitted = fit(document)
    except LookupError as error:
        raise SystemExit(f"{given.result}: {error}") from None
    found = predict(document)
    assert found is not None
    show(predictions(fitted), found, to_stderr=given.json)
    if given.json:
        print(json.dumps(found))


def show(entries: list[dict[str, Any]], found: dict[str, Any], *, to_stderr: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
    table = Table("nodes", "mode", "epoch", "images/s wanted", "possible", "limit", "store, GB/s")
    for one in entries:
        store = f"{one['store_bytes_per_second'] / 1e9:,.1f}"
        rates = f"{one['wanted']:,.0f}", f"{one['possible']:,.0f}"
        table.add_row(str(one["nodes"]), one["mode"], one["epoch"], *rates, one["limit"], store)
    console.print(table)
    for name, value in found["fitted"].items():
        console.print(f"{name}: {value:,.3g}")
    for sentence in found["assumptions"]:
        console.print(f"assumed: {sentence}" if not sentence.startswith("the check") else sentence)


if __name__ == "__main__":
    main()
