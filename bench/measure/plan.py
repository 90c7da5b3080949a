"""The error of `fastload plan`: `python -m bench plan`.

Predictions and the runs that they predict alternate, over a real S3 server 20 ms away. The errors are those
of the median prediction against the median run, and of every pair. Rates count from the first batch on,
because a plan does not predict the start. An epoch that is nearly over by then tells no rate, and the
benchmark says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from bench.data import BATCH, QUALITY, ROUND_TRIP, WORKERS, WORKPLACE, photo_folder
from fastload.cli.demo.s3_server import delay_proxy, serve_s3

SHORTEST = 0.5  # seconds from the first batch to the last; what is shorter measures batches made ahead


def main() -> None:
    parser = argparse.ArgumentParser(description="The error of `fastload plan`.")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--quality", type=int, default=QUALITY)
    parser.add_argument("--latency-ms", type=float, default=1000 * ROUND_TRIP)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    folder = photo_folder(arguments.images, arguments.quality)
    with (
        serve_s3(WORKPLACE) as server,
        delay_proxy(server.endpoint_url, arguments.latency_ms / 1000) as proxy,
    ):
        options = {"key": server.key, "secret": server.secret, "endpoint_url": proxy.url}
        words = [f"s3://{folder.name}", *_words(options), "--num-workers", str(WORKERS), "--json"]
        pairs = [_pair(words) for _ in range(arguments.repeats)]
    _report(pairs)


def _words(options: dict[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in ("--storage-option", f"{name}={value}")]


def _pair(words: list[str]) -> dict[str, Any]:
    """{epoch: (predicted, measured)}, images/s in cache mode "raw"."""
    demand = ["--size-limit", "1TB", "--gpus", "1", "--gpu-rate", "1000000"]
    predicted = _fastload("plan", *words, *demand)["modes"]["raw"]
    cache = tempfile.mkdtemp(prefix="fastload-bench-plan-")
    try:
        epochs = _fastload("bench", *words, "--cache", cache, "--batch-size", str(BATCH))["epochs"]
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    first, later = map(_rate, epochs)
    pair = {"first": (predicted["first"]["rate"], first), "later": (predicted["later"]["rate"], later)}
    print({name: tuple(map(round, rates)) for name, rates in pair.items()}, f"load {os.getloadavg()[0]:.1f}")
    return pair


def _rate(epoch: dict[str, Any]) -> float:
    """Return the images/s after the first batch; end the program where the epoch is too short to tell."""
    seconds = epoch["seconds"] - epoch["first_batch_seconds"]
    if seconds < SHORTEST:
        raise SystemExit(
            f"{epoch['images']} images are too few to measure a rate: an epoch ended {seconds:.2f} s after "
            f"its first batch, and at least {SHORTEST} s are needed. Give more --images."
        )
    rate: float = (epoch["images"] - BATCH) / seconds
    return rate


def _fastload(*arguments: str) -> Any:
    command = [sys.executable, "-m", "fastload", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


def _report(pairs: list[dict[str, Any]]) -> None:
    for name in ("first", "later"):
        predicted, measured = zip(*(pair[name] for pair in pairs), strict=True)
        errors = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
        overall = statistics.median(predicted) / statistics.median(measured) - 1
        print(
            f"{name} epoch: predicted {statistics.median(predicted):,.0f}, "
            f"measured {statistics.median(measured):,.0f} images/s: {overall:+.0%}; "
            f"pairs {', '.join(f'{error:+.0%}' for error in errors)}, "
            f"median of their sizes {statistics.median(map(abs, errors)):.0%}"
        )


if __name__ == "__main__":
    main()
