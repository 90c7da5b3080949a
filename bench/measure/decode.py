"""The cost of decoding on one core, by the kernel, its fallback and others: `python -m bench decode`.

RandomResizedCrop(224) with flips to uint8, on two sets of photos: "dense" ones of 500 x 375 pixels and 138
KB that the demo's generator makes, and "photographs" (bench/photographs.py). Contenders take turns in each
round, so that other work of the machine slows all of them; figures are medians, and shares are medians of
the shares of each round. The limit is a bare C loop of libjpeg-turbo that decodes the same crops and does
not resize (roi_decode.c). "libjpeg's Huffman decoder" is the kernel with that in the place of its own. Whole
loaders: `python -m bench compare`.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from bench.command import begin, finish, make_parser
from bench.data import KEPT_QUALITY, KEPT_SIDE, PHOTOS, QUALITY, SIZE, bits_a_pixel, photo_folder
from bench.measure.kernels import Contender, Fill, Making, RoiDecode, installed_peers, kernel_quality
from fastload import RandomResizedCrop
from fastload.cli.report import figures
from fastload.images import backend, decode_resized, shrink
from fastload.images import kernel as native
from fastload.images.decode import to_dct, with_rows

RAW, SHRUNK = "raw: bare ROI decode in C", "shrunk: bare ROI decode in C"
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
    records = [to_dct(photo) for photo in photos]
    indexed = [with_rows(photo) for photo in photos]
    small = [shrink(photo, KEPT_SIDE, KEPT_QUALITY) for photo in photos]
    pixels = [decode_resized(photo, KEPT_SIDE) for photo in photos]
    crop, kernel = RandomResizedCrop(SIZE, flip=0.5), native.kernel
    contenders: dict[str, Contender] = {
        RAW: RoiDecode(photos, crop),
        "raw: kernel": Fill(photos, crop, kernel),
        "raw: kernel, libjpeg's Huffman decoder": by_libjpeg(Fill(photos, crop, kernel)),
        "raw: kernel, with an index of rows": Fill(indexed, crop, kernel),
        "raw: fallback (simplejpeg, Pillow)": Fill(photos, crop, None),
        **{f"raw: {name}": peer for name, peer in installed_peers(photos, crop).items()},
        "dct: kernel": Fill(records, crop, kernel),
        SHRUNK: RoiDecode(small, crop),
        "shrunk: kernel": Fill(small, crop, kernel),
        "shrunk: fallback": Fill(small, crop, None),
        "decoded: kernel": Fill(pixels, crop, kernel),
        "decoded: fallback": Fill(pixels, crop, None),
        "to a dct record": Making(photos, to_dct),
        "to a dct record, libjpeg's Huffman decoder": by_libjpeg(Making(photos, to_dct)),
        "to an index of rows": Making(photos, with_rows),
    }
    sizes = {"raw": photos, "indexed": indexed, "dct": records, "shrunk": small}
    sizes["decoded"] = [image.data for image in pixels]
    rates = take_turns({name: rate_of(c, len(photos)) for name, c in contenders.items()}, rounds)
    return rates, {name: statistics.mean(memoryview(i).nbytes for i in kind) for name, kind in sizes.items()}


def by_libjpeg(contender: Contender) -> Contender:
    """The same, where libjpeg decodes Huffman codes."""
    kernel: Any = native.kernel

    def run(seeds: Sequence[int]) -> float:
        kernel._set_huffman(False)
        try:
            return contender(seeds)
        finally:
            kernel._set_huffman(True)

    return run


def share(rates: Rates, name: str, limit: str) -> float:
    return statistics.median(a / b for a, b in zip(rates[name], rates[limit], strict=True))


def limit_of(rates: Rates, name: str) -> str | None:
    mode = name.split(":")[0]
    return next((limit for limit in (RAW, SHRUNK) if limit.startswith(mode)), RAW if mode == "dct" else None)


def show(console: Console, rates: Rates, title: str) -> None:
    table = figures("", "img/s", "of the limit")
    table.title = f"one thread, in memory: RandomResizedCrop({SIZE}) + flip to uint8; {title}"
    for name, values in rates.items():
        limit = limit_of(rates, name)
        part = f"{share(rates, name, limit):.0%}" if limit else ""
        table.add_row(name, f"{statistics.median(values):,.0f}", part)
    console.print(table)


def medians(rates: Rates) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--images", type=int, default=256, help="photos in memory (default 256)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take the median of (default 5)")
    parser.add_argument("--quality", type=int, default=QUALITY, help="of the photos (97: about 138 KB each)")
    parser.add_argument("--photos", nargs="+", default=PHOTOS, choices=PHOTOS, help="default: both sets")
    options = parser.parse_args()
    if native.kernel is None:
        raise SystemExit("the kernel is not built: `fastload doctor` says what to install")
    console = Console(width=110)
    result = begin("decode")
    result["photos"] = {}
    for kind in options.photos:
        folder = photo_folder(2000, options.quality, kind)
        photos = [path.read_bytes() for path in sorted(folder.rglob("*.jpg"))[: options.images]]
        core, sizes = per_core(photos, options.rounds)
        bits = bits_a_pixel(photos)
        show(console, core, f"{kind}, {bits:.1f} bits a pixel")
        console.print("bytes per image: " + ", ".join(f"{name} {size:,.0f}" for name, size in sizes.items()))
        result["photos"][kind] = {"per_core": medians(core), "bytes": sizes, "bits_a_pixel": bits}
    psnr = {f"1/{denominator}": kernel_quality(denominator) for denominator in (1, 2, 4, 8)}
    console.print("PSNR by DCT scale: " + ", ".join(f"{k} {v:.1f} dB" for k, v in psnr.items()))
    result |= {"psnr_db": psnr, "backend": backend()}
    finish(result)
