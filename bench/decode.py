"""What decoding costs, per core and through whole loaders: `python -m bench decode`.

RandomResizedCrop(224) with flips to uint8, on photos of 500 x 375 pixels and 138 KB that the demo's generator
makes. Contenders take turns, round after round, so that what else the machine does hits all of them; figures
are medians, shares are medians of the shares of each round. The limit is a bare C loop of libjpeg-turbo that
decodes the same crops and does not resize (roi_decode.c); for decoded images, the resize in memory alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.epochs import WORKERS, Epoch, filling, our_loader, torch_loader
from bench.kernels import BATCH, SIZE, Contender, Fill, Pillow, RoiDecode, kernel_quality
from bench.photos import WORKPLACE, photo_folder
from fastload import Cache, RandomResizedCrop
from fastload.cli._machine import describe_machine
from fastload.images import backend, decode_resized, native, shrink

RESULTS = Path(__file__).parent / "results"
SHORT_SIDE = 300  # of shrunk and decoded images: 400 x 300
RAW, SHRUNK, DECODED = (
    "raw: bare ROI decode in C",
    "shrunk: bare ROI decode in C",
    "decoded: resize in memory",
)
TORCH = "torch DataLoader, Pillow over files"
Rates = dict[str, list[float]]


def take_turns(contenders: dict[str, Callable[[], float]], rounds: int) -> Rates:
    """The rates of each contender, after a round that warms up."""
    rates: Rates = {name: [] for name in contenders}
    for round_ in range(rounds + 1):
        for name, contender in contenders.items():
            rate = contender()
            if round_:
                rates[name].append(rate)
    return rates


def rate_of(contender: Contender, count: int) -> Callable[[], float]:
    """Images per second of a contender, each call with new crops."""
    rng = random.Random(0)
    return lambda: count / contender([rng.getrandbits(64) for _ in range(count)])


def per_core(photos: list[bytes], rounds: int) -> tuple[Rates, dict[str, float]]:
    """One thread, images in memory. Also the mean bytes per image."""
    small = [shrink(photo, SHORT_SIDE, 90) for photo in photos]
    pixels = [decode_resized(photo, SHORT_SIDE) for photo in photos]
    crop, kernel = RandomResizedCrop(SIZE), native.kernel
    contenders: dict[str, Contender] = {
        RAW: RoiDecode(photos, crop),
        "raw: kernel": Fill(photos, crop, kernel),
        "raw: twin (simplejpeg, Pillow)": Fill(photos, crop, None),
        "raw: Pillow": Pillow(photos, crop),
        SHRUNK: RoiDecode(small, crop),
        "shrunk: kernel": Fill(small, crop, kernel),
        "shrunk: twin": Fill(small, crop, None),
        "decoded: kernel": Fill(pixels, crop, kernel),
        "decoded: twin": Fill(pixels, crop, None),
    }
    sizes = {"raw": photos, "shrunk": small, "decoded": [image.data for image in pixels]}
    rates = take_turns({name: rate_of(c, len(photos)) for name, c in contenders.items()}, rounds)
    return rates, {name: statistics.mean(memoryview(i).nbytes for i in kind) for name, kind in sizes.items()}


@contextlib.contextmanager
def loaders(folder: Path) -> Iterator[dict[str, Callable[[], float]]]:
    """Contenders of whole epochs."""
    photos = [path.read_bytes() for path in sorted(folder.rglob("*.jpg"))]
    small = [shrink(photo, SHORT_SIDE, 90) for photo in photos]
    pixels = [decode_resized(photo, SHORT_SIDE) for photo in photos]
    crop, n = RandomResizedCrop(SIZE), len(photos)
    with tempfile.TemporaryDirectory(dir=WORKPLACE) as directory:
        contenders: dict[str, Callable[[], float]] = {
            RAW: rate_of(RoiDecode(photos, crop, WORKERS), n),
            SHRUNK: rate_of(RoiDecode(small, crop, WORKERS), n),
            DECODED: rate_of(Fill(pixels, crop, native.kernel, WORKERS), n),
        }
        for mode in ("raw", "shrunk", "decoded"):
            cache = Cache(Path(directory) / mode, mode, short_side=SHORT_SIDE)
            contenders[f"{mode}: fastload"] = Epoch(our_loader(str(folder), cache))
            while cache.info()["entries"] < n:  # an epoch may leave gaps: filling never waits for the disk
                contenders[f"{mode}: fastload"]()
            cache.close()
        contenders[f"raw: {TORCH}"] = Epoch(torch_loader(folder))
        yield contenders


def share(rates: Rates, name: str, limit: str) -> float:
    return statistics.median(a / b for a, b in zip(rates[name], rates[limit], strict=True))


def limit_of(rates: Rates, name: str) -> str | None:
    mode = name.split(":")[0]
    return next(
        (limit for limit in (RAW, SHRUNK, DECODED) if limit in rates and limit.startswith(mode)), None
    )


def show(console: Console, title: str, rates: Rates) -> None:
    torch_rates = rates.get(f"raw: {TORCH}")
    table = Table(title=title)
    for column in ("", "img/s", "of the limit", *(("of torch",) if torch_rates else ())):
        table.add_column(column, justify="right" if column else "left")
    for name, values in rates.items():
        limit = limit_of(rates, name)
        row = [name, f"{statistics.median(values):,.0f}", f"{share(rates, name, limit):.0%}" if limit else ""]
        if torch_rates:
            row.append(f"{share(rates, name, f'raw: {TORCH}'):.2f} x")
        table.add_row(*row)
    console.print(table)


def show_filling(console: Console, rates: dict[str, Rates]) -> dict[str, float]:
    """Prints, and returns how much slower a first epoch is that fills the cache."""
    table = Table(title="first epoch, raw: what filling the cache costs")
    for column in ("store", "without a cache", "filling raw", "slower"):
        table.add_column(column, justify="left" if column == "store" else "right")
    slower = {}
    for store, found in rates.items():
        slower[store] = 1 - share(found, "filling raw", "without a cache")
        medians = (f"{statistics.median(values):,.0f}" for values in found.values())
        table.add_row(store, *medians, f"{slower[store]:.1%}")
    console.print(table)
    return slower


def medians(rates: Rates) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in rates.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=2000, help="photos of an epoch (default 2000)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take the median of (default 5)")
    parser.add_argument("--quality", type=int, default=97, help="of the photos (97: about 138 KB each)")
    parser.add_argument("--per-core", action="store_true", help="only what runs on one core, without loaders")
    parser.add_argument("--json", action="store_true", help="one JSON document on the last line")
    parser.add_argument("--save", action="store_true", help="write it to bench/results/ too")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if native.kernel is None:
        raise SystemExit(f"the kernel is not built: {backend()['advice'][0]}")
    console = Console(stderr=options.json, width=110)
    result: dict[str, Any] = {"bench": "decode", **describe_machine(), "load_before": os.getloadavg()}
    folder = photo_folder(options.images, options.quality)
    few = [path.read_bytes() for path in sorted(folder.rglob("*.jpg"))[:256]]
    core, sizes = per_core(few, options.rounds)
    show(console, f"one thread, in memory: RandomResizedCrop({SIZE}) + flip to uint8", core)
    psnr = {f"1/{denominator}": kernel_quality(denominator) for denominator in (1, 2, 4, 8)}
    console.print("bytes per image: " + ", ".join(f"{name} {size:,.0f}" for name, size in sizes.items()))
    console.print("PSNR by DCT scale: " + ", ".join(f"{k} {v:.1f} dB" for k, v in psnr.items()))
    result |= {"per_core": medians(core), "bytes": sizes, "psnr_db": psnr, "backend": backend()}
    if not options.per_core:
        with loaders(folder) as contenders:
            epochs = take_turns(contenders, options.rounds)
        show(console, f"epochs of {options.images:,} photos, {WORKERS} workers, batches of {BATCH}", epochs)
        filled = filling(folder, options.rounds)
        slower = show_filling(console, filled)
        shares = {name: share(epochs, name, limit) for name in epochs if (limit := limit_of(epochs, name))}
        result |= {"end_to_end": medians(epochs), "of_the_limit": shares}
        result |= {"filling": {name: medians(found) for name, found in filled.items()}, "slower": slower}
    result["load_after"] = os.getloadavg()
    console.print(f"load before and after: {result['load_before'][0]:.1f}, {result['load_after'][0]:.1f}")
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"decode-{result['date'][:10]}.json").write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
