"""MDS, LitData's chunks and FFCV's .beton, read by fastload and by their own loaders: the same files, in
turns.

`python -m bench formats [--images 400] [--turns 5] [--seconds 3] [--save]`. Photos of 138 KB, 2 workers,
RandomResizedCrop(224) and flip to uint8 in batches of 64. First epochs are read from an S3 server 20 ms away
on the same cores, with empty caches and new workers; later ones from files on the local disk, without a cache
of fastload's. FFCV has no first epoch: it reads local files only. Each turn begins with the other side.
Ratios are medians of the ratios within one turn. Unattended: below six minutes, once the peers' environments
are there.

The work differs: Streaming and LitData decode the whole photo by Pillow, FFCV by the fast DCT.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from bench.data import BATCH, ROUND_TRIP, SIZE, WORKERS, photo_folder, write_result
from bench.peers.environment import Unavailable
from bench.peers.peer import Peer
from fastload.cli.measurement import describe_machine
from fastload.demo.s3_server import delay_proxy, serve_s3


class Pair(NamedTuple):
    """A format: our source in `bench/peers/scripts/ours.py`, the peer's script and its mode."""

    source: str
    script: str
    mode: str = ""


PAIRS = {
    "MDS": Pair("mds", "mosaicml"),
    "LitData": Pair("litdata", "litdata", "chunks"),
    ".beton, jpg": Pair("jpg-97-9999.beton", "ffcv", "jpg 97 9999"),
    ".beton, raw": Pair("raw-90-400.beton", "ffcv", "raw 90 400"),
}


def measure(pair: Pair, job: dict[str, Any], turns: int, seconds: float) -> dict[str, list[float]]:
    """Images/s of each turn, of "ours" and "theirs"."""
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as scratch:
        sides: dict[str, Peer] = {}
        try:
            for side, script, mode in (
                ("ours", "ours", f"{pair.source} none"),
                ("theirs", pair.script, pair.mode),
            ):
                own = Path(scratch, side)
                own.mkdir()
                sides[side] = Peer(script, job | {"mode": mode, "scratch": str(own)})
            if job["later"]:  # what is compiled, copied or mapped once
                for peer in sides.values():
                    peer.epoch()
            for turn in range(turns):
                for side in sorted(sides, reverse=turn % 2 == 1):
                    rates[side].append(round(sides[side].epoch(seconds).rate, 1))
        finally:
            for peer in sides.values():
                peer.close()
    return rates


def line(row: dict[str, Any]) -> str:
    ours, theirs = (f"{statistics.median(row[side]):,.0f}" for side in ("ours", "theirs"))
    return f"{row['format']:12} {row['epoch']:20} ours {ours}, theirs {theirs} images/s, {row['ratio']:.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of an epoch at most")
    parser.add_argument("--save", action="store_true", help="write bench/results/formats-DATE.json")
    options = parser.parse_args()
    console, rows = Console(), []
    folder = photo_folder(options.images)
    common = {"folder": str(folder), "size": SIZE, "batch": BATCH, "workers": WORKERS}
    ready = {}
    for name, pair in PAIRS.items():
        try:
            Peer(pair.script, common | {"prepare": True, "mode": pair.mode}).close()
            ready[name] = pair
        except Unavailable as error:
            console.print(f"[red]{name}: {error}[/]")
    with serve_s3(folder.parent) as server, delay_proxy(server.endpoint_url, ROUND_TRIP) as proxy:
        access = {"bucket": folder.name, "endpoint": proxy.url, "key": server.key, "secret": server.secret}
        for later in (False, True):
            for name, pair in ready.items():
                if pair.script == "ffcv" and not later:
                    continue
                rates = measure(pair, common | access | {"later": later}, options.turns, options.seconds)
                ratios = [ours / theirs for ours, theirs in zip(rates["ours"], rates["theirs"], strict=True)]
                row = {"format": name, "epoch": "later, local" if later else "first, S3 at 20 ms", **rates}
                rows.append(row | {"ratio": round(statistics.median(ratios), 2)})
                console.print(line(rows[-1]))
    if options.save:
        document = {"bench": "formats", **describe_machine(), "options": vars(options), "rows": rows}
        console.print(write_result(document))


if __name__ == "__main__":
    main()
