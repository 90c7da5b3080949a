"""What a node of 8 H100 would get, and 64 of them: the arithmetic of `fastload plan` on measured costs.

    python -m bench node bench/results/compare-DATE.json

Nothing of this was run on such a node. Costs are fitted from the rows of fastload in the document of
`python -m bench compare`; the node is a description from public pages, and every assumption is printed. The
check is the same arithmetic for the machine that was measured on, against what was measured there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.command import make_parser
from bench.show.figures import MAIN, MODES, find, median, number, rows_of, table
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

NODES = 64
GPUS = 8
GPU_RATE = 400 / 0.224  # images/s
CORES = 96  # vCPUs
WORKERS_PER_GPU = 8
CACHE_BYTES = 28_000 << 30
NETWORK = 80e9 / 8  # bytes/s
DISK_READ = 1.6e6 * 4096  # bytes/s
DISK_WRITE = DISK_READ / 2
IMAGES = 14_197_122
LISTED = 100_000_000
REQUEST_SECONDS = 0.022
PREFIX_REQUESTS = 5_500  # GETs a second
PREFIX_SOURCE = "docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html"
STORED_BYTES = {"dct": 152_041.0, "shrunk": 42_687.0, "decoded": 360_000.0}  # 400 x 300 pixels


@dataclass(frozen=True)
class Predicted:
    """An epoch of one of `nodes` equal nodes, which share the data.

    Attributes:
        possible: images/s that its loaders make if the GPUs take them; `limit` is what bounds them.
        cores: those that are busy with what the GPUs take.
        store_bytes, requests, disk_bytes: a second; the disk's are written in a first epoch, and read later.
    """

    mode: str
    epoch: str
    possible: float
    limit: str
    cores: float
    store_bytes: float
    requests: float
    disk_bytes: float
    stored_bytes: float


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
    """The cache modes whose later epochs were measured; `raw` has to be."""
    return [mode for mode in MODES if mode == "raw" or rows_of(document, "later", mode)]


def _row(document: dict[str, Any], section: str, case: str, contender: str) -> dict[str, Any]:
    row = find(rows_of(document, section, case), contender)
    if row is None:
        raise LookupError(f"no row of {contender!r} in section {section!r}, case {case!r}")
    return row


def _cpu(row: dict[str, Any]) -> float:
    if not row["cpu_seconds_per_1000"]:
        raise LookupError(f"no CPU time of {row['contender']!r} in {row['section']!r}, {row['case']!r}")
    return float(median(row["cpu_seconds_per_1000"])) / 1000


# --- predicting


def predictions(fitted: dict[str, float], nodes: int = 1) -> Iterator[Predicted]:
    """Both epochs in each measured mode, and without a cache."""
    data = Data(IMAGES // nodes, fitted["store_bytes"], REQUEST_SECONDS, fitted["get_cpu"], NETWORK)
    for name in (mode for mode in MODES if f"decode_cpu_{mode}" in fitted):
        if f"fill_cpu_{name}" in fitted:
            yield _predicted(fitted, data, name, hits=0)
        yield _predicted(fitted, data, name, hits=1)
    yield _predicted(fitted, data, "no cache", hits=0)


def _predicted(fitted: dict[str, float], data: Data, name: str, *, hits: int) -> Predicted:
    node = Node(cores_left(CORES, GPUS), GPUS * WORKERS_PER_GPU, CACHE_BYTES, DISK_WRITE, DISK_READ)
    demand, cached = Demand(GPUS * GPU_RATE), name != "no cache"
    mode = _mode(fitted, name) if cached else replace(_mode(fitted, "raw"), prepare_cpu=0.0)
    found = predict_epoch(data, mode, node, demand, hits=hits, filling=float(cached and not hits))
    rate = min(found.rate, demand.rate)
    work = mode.transform_cpu + (1 - hits) * (fitted["get_cpu"] + mode.prepare_cpu)
    return Predicted(
        mode=name,
        epoch=("later" if hits else "first") if cached else "each",
        possible=found.rate,
        limit=_limit(found),
        cores=rate * work,
        store_bytes=found.egress_bytes / found.seconds,
        requests=fitted["requests_per_image"] * found.requests / found.seconds,
        disk_bytes=rate * mode.stored_bytes * cached,
        stored_bytes=data.objects * mode.stored_bytes * cached,
    )


def _limit(epoch: Epoch) -> str:
    return min(epoch.stages, key=lambda name: epoch.stages[name])


def _mode(fitted: dict[str, float], name: str) -> Mode:
    stored = fitted["image_bytes"] if name == "raw" else STORED_BYTES[name]
    return Mode(stored, fitted.get(f"fill_cpu_{name}", 0.0), 0.0, fitted[f"decode_cpu_{name}"])


def listing(document: dict[str, Any], objects: int = LISTED) -> dict[str, float]:
    """The start of a loader over so many objects: seconds, bytes of memory, bytes of the list on disk.

    What each object adds is taken from the two largest numbers that were measured.
    """
    rows = sorted(
        (row for row in document["growth"]["objects"] if row["contender"] == "fastload"),
        key=lambda row: row["objects"],
    )[-2:]
    if len(rows) < 2:
        raise LookupError("no two numbers of objects were measured")
    few, many = rows

    def at(key: str) -> float:
        low, high = (float(median(row[key])) for row in (few, many))
        return high + (objects - many["objects"]) * (high - low) / (many["objects"] - few["objects"])

    return {key: at(key) for key in ("start_seconds", "pss_bytes", "manifest_bytes")}


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


# --- the text


def markdown(document: dict[str, Any]) -> str:
    """What the documentation shows.

    Raises:
        LookupError: the document lacks a row that this takes.
    """
    fitted = fit(document)
    found = list(predictions(fitted, NODES))
    wanted = GPUS * GPU_RATE
    lines = [
        [
            f"`{one.mode}`" if one.mode in MODES else one.mode,
            one.epoch,
            number(one.possible),
            one.limit,
            number(one.cores),
            number(NODES * one.store_bytes / 1e9),
            number(NODES * one.requests),
            number(one.disk_bytes / 1e9),
            number(NODES * one.stored_bytes / 1e12),
        ]
        for one in found
    ]
    headings = (
        *("cache", "epoch", "a node can make, images/s", "limit", f"cores busy of {CORES}"),
        *(f"{NODES} nodes ask the store for, GB/s", "GETs/s", "SSD of a node, GB/s", "SSD of all, TB"),
    )
    intro = (
        f"The GPUs of a node take {number(wanted)} images/s. This is the arithmetic of `fastload plan`\n"
        "on the figures of this run (`python -m bench node`)."
    )
    assumed = [f"* {sentence}" for sentence in (*_first_to_break(document, fitted), *_assumptions(fitted))]
    checked = [f"* {_sentence(named)}" for named in checks(document, fitted).items()]
    return "\n\n".join([intro, table(headings, lines, texts=2), "\n".join([*assumed, *checked])])


def _first_to_break(document: dict[str, Any], fitted: dict[str, float]) -> Iterator[str]:
    """What limits such a cluster, in sentences."""
    wanted = NODES * GPUS * GPU_RATE
    gets = wanted * fitted["requests_per_image"]
    yield (
        f"**Requests break first**: {number(gets)} GETs/s in the first epoch, where S3 serves "
        f"{PREFIX_REQUESTS:,} a prefix ({PREFIX_SOURCE}): {number(gets / PREFIX_REQUESTS)} prefixes"
    )
    shards = find(rows_of(document, "cold", MAIN), "fastload, tar shards")
    if shards is not None:
        gets = wanted * float(shards["store_requests_per_image"])
        yield f"tar shards take {number(gets)} GETs/s, {number(gets / PREFIX_REQUESTS)} prefixes"
    start = listing(document)
    yield (
        f"{LISTED:,} objects: the first start lists for {number(start['start_seconds'] / 60)} minutes, "
        f"the list takes {number(start['pss_bytes'] / 1e9)} GB of memory with 2 workers and "
        f"{number(start['manifest_bytes'] / 1e9)} GB on the SSD"
    )


def _assumptions(fitted: dict[str, float]) -> list[str]:
    stored = ", ".join(f"{size / 1000:,.0f} KB `{mode}`" for mode, size in STORED_BYTES.items())
    return [
        f"an H100 takes {GPU_RATE:,.0f} images/s, as MLPerf Storage simulates it for ResNet-50 "
        "(github.com/mlcommons/storage, resnet50_h100.yaml)",
        f"a node has {CORES} vCPUs, 28,000 GiB of NVMe and 80 Gbit/s to the store "
        "(learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/ndh100v5-series); the NVMe "
        f"reads {DISK_READ / 1e9:.1f} GB/s (cloud.google.com/compute/docs/disks/local-ssd), and writes half",
        f"{GPUS} vCPUs are busy with training, {WORKERS_PER_GPU} threads a GPU share the others, and each "
        "does what a core of the measured machine does: memory bandwidth and sinking clocks are not in this",
        f"{IMAGES:,} images of {fitted['image_bytes'] / 1000:,.0f} KB, which the nodes share "
        f'(`partition="node"`); a sample takes {stored}',
        f"a GET takes {1000 * REQUEST_SECONDS:.0f} ms, and a node has {NODE_REQUESTS:,} in flight",
    ]


def _sentence(named: tuple[str, dict[str, float]]) -> str:
    case, check = named
    return (
        f"the check, on the measured machine, {case}: {check['predicted']:,.0f} images/s predicted, "
        f"{check['measured']:,.0f} measured ({100 * check['error']:+.1f} %)"
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("result", type=Path, help="a document of `python -m bench compare`")
    result = parser.parse_args().result
    try:
        print(markdown(json.loads(result.read_text())))
    except LookupError as error:
        raise SystemExit(f"{result}: {error}") from None
