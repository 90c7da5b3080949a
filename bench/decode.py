"""What decoding costs per core: `python -m bench.decode`.

RandomResizedCrop(224) with flips to uint8, in memory, on one thread: the kernel, its Python twin, plain
Pillow, and a bare C loop of libjpeg-turbo that decodes the same crops and does not resize (roi_decode.c). All
run in turns, round after round on the same crops, so that what else the machine does hits all of them; the
figures are medians. Photos are made by the demo's generator.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from fastload import RandomResizedCrop
from fastload.cli._photos import make_photo
from fastload.images import SampleRng, backend, decode_image, decode_resized, native, shrink

SIZE = 224
LARGEST_SIDE = 400  # of shrunk and decoded images

Contender = Callable[[Sequence[int]], Any]


class RoiDecode:
    """The bare C loop, compiled on the spot. Decodes the crops that the transform would draw for `seeds`."""

    def __init__(self, images: list[bytes], transform: RandomResizedCrop, folder: Path) -> None:
        library = folder / "roi_decode.so"
        source = Path(__file__).with_name("roi_decode.c")
        command = ["cc", "-O3", "-shared", "-fPIC", str(source), "-o", str(library), "-ljpeg"]
        if not library.exists():
            subprocess.run(command, check=True)
        self.function = ctypes.CDLL(str(library)).roi_decode
        self.function.restype = ctypes.c_size_t
        self.transform = transform
        self.sizes = [Image.open(BytesIO(image)).size for image in images]
        self.pointers = (ctypes.c_char_p * len(images))(*images)
        self.lengths = (ctypes.c_ulong * len(images))(*map(len, images))

    def __call__(self, seeds: Sequence[int]) -> None:
        boxes = [
            self.transform._place(*size, SampleRng(seed))[0]
            for size, seed in zip(self.sizes, seeds, strict=True)
        ]
        flat = (ctypes.c_double * (4 * len(boxes)))(*(edge for box in boxes for edge in box))
        self.function(self.pointers, self.lengths, flat, len(boxes), SIZE, SIZE)


class Fill:
    """A fused transform, batch by batch into the same memory, through the kernel or its twin."""

    def __init__(self, images: list[Any], transform: RandomResizedCrop, kernel: native.Kernel | None) -> None:
        self.images, self.transform, self.kernel = images, transform, kernel
        self.out = np.empty((64, *transform.sample_shape), np.uint8)

    def __call__(self, seeds: Sequence[int]) -> None:
        chosen, native.kernel = native.kernel, self.kernel
        try:
            for start in range(0, len(self.images), 64):
                batch = self.images[start : start + 64]
                failures = self.transform.fill(self.out[: len(batch)], batch, seeds[start : start + 64])
                assert not failures, failures
        finally:
            native.kernel = chosen


class Pillow:
    """As torchvision's ImageFolder does it: open, convert, crop, resize, flip, to a channels-first array."""

    def __init__(self, images: list[bytes], transform: RandomResizedCrop) -> None:
        self.images, self.transform = images, transform

    def __call__(self, seeds: Sequence[int]) -> None:
        for data, seed in zip(self.images, seeds, strict=True):
            image = Image.open(BytesIO(data)).convert("RGB")
            box, flip = self.transform._place(*image.size, SampleRng(seed))
            image = image.crop(tuple(map(int, box))).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
            if flip:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def measure(contenders: dict[str, Contender], count: int, rounds: int) -> dict[str, list[float]]:
    """Images per second of each contender in each round."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + 1):
        seeds = range(round_ * count, (round_ + 1) * count)
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender(seeds)
            if round_:  # the first round warms up
                rates[name].append(count / (time.perf_counter() - start))
    return rates


def quality(denominator: int) -> float:
    """Mean PSNR in dB of crops decoded at 1/`denominator`, against full decode and Pillow's resize."""
    found = []
    box = (100, 75, 900, 675)
    side = 600 // denominator - 2
    transform = RandomResizedCrop(side, channels_last=True)
    out = np.empty((1, side, side, 3), np.uint8)
    for seed in range(6):
        data = make_photo(seed, 1000, 750)
        item = (0, data, *map(float, box), False)
        assert native.active().crop_resize(out, [item], True, True, transform.max_pixels, True) == []
        expected = (
            Image.fromarray(decode_image(data)).crop(box).resize((side, side), Image.Resampling.BILINEAR)
        )
        error = np.mean((out[0].astype(float) - np.asarray(expected)) ** 2)
        found.append(10 * np.log10(255**2 / error))
    return float(np.mean(found))


def contenders_for(
    count: int, photo_quality: int, folder: Path
) -> tuple[dict[str, Contender], dict[str, float]]:
    """What is measured, and the mean bytes per image of each input."""
    photos = [make_photo(seed, quality=photo_quality) for seed in range(count)]
    short_side = LARGEST_SIDE * 375 // 500
    small = [shrink(photo, short_side, 90) for photo in photos]
    decoded = [decode_resized(photo, short_side) for photo in photos]
    crop = RandomResizedCrop(SIZE)
    chosen = native.kernel
    contenders: dict[str, Contender] = {
        "raw: bare ROI decode in C, no resize": RoiDecode(photos, crop, folder),
        "raw: kernel": Fill(photos, crop, chosen),
        "raw: twin (simplejpeg + Pillow)": Fill(photos, crop, None),
        "raw: Pillow": Pillow(photos, crop),
        "shrunk: bare ROI decode in C, no resize": RoiDecode(small, crop, folder),
        "shrunk: kernel": Fill(small, crop, chosen),
        "shrunk: twin": Fill(small, crop, None),
        "decoded: kernel": Fill(decoded, crop, chosen),
        "decoded: twin": Fill(decoded, crop, None),
    }
    sizes = {"raw": np.mean([*map(len, photos)]), "shrunk": np.mean([*map(len, small)])}
    return contenders, {name: float(size) for name, size in sizes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=192, help="photos (default 192)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds to take the median of (default 7)")
    parser.add_argument("--quality", type=int, default=97, help="of the photos (97: about 138 KB each)")
    parser.add_argument("--json", action="store_true", help="one JSON document on the last line")
    options = parser.parse_args()
    if native.kernel is None:
        raise SystemExit(f"the kernel is not built: {backend()['advice'][0]}")
    with tempfile.TemporaryDirectory() as folder:
        contenders, sizes = contenders_for(options.images, options.quality, Path(folder))
        rates = measure(contenders, options.images, options.rounds)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    psnr = {f"1/{denominator}": quality(denominator) for denominator in (1, 2, 4, 8)}

    table = Table(title=f"RandomResizedCrop({SIZE}) + flip to uint8, one core, one thread")
    for column in ("", "img/s", "of the bare decode"):
        table.add_column(column, justify="left" if not column else "right")
    for name, median in medians.items():
        limit = rates.get(name.split(":")[0] + ": bare ROI decode in C, no resize")
        ratio = statistics.median(a / b for a, b in zip(rates[name], limit, strict=True)) if limit else None
        table.add_row(name, f"{median:,.0f}", f"{ratio:.0%}" if ratio else "")
    console = Console()
    console.print(table)
    console.print(f"bytes per image: raw {sizes['raw']:,.0f}, shrunk {sizes['shrunk']:,.0f}")
    console.print(
        "PSNR by DCT scale: " + ", ".join(f"{scale} {value:.1f} dB" for scale, value in psnr.items())
    )
    if options.json:
        print(json.dumps({"img_per_s": medians, "bytes": sizes, "psnr_db": psnr, "backend": backend()}))


if __name__ == "__main__":
    main()
