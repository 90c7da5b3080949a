"""Decoding and resizing in memory, without a loader: our kernel, its fallback, Pillow, a bare loop in C.

A contender takes one seed per image and returns its seconds. All draw the same crops.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.data import BATCH, SIZE, WORKPLACE
from fastload import RandomResizedCrop
from fastload.cli.demo.photos import make_photo
from fastload.images import SampleRng, decode_image
from fastload.images import kernel as native

Contender = Callable[[Sequence[int]], float]


class RoiDecode:
    """roi_decode.c, compiled here: decodes the crops as the kernel does, and does not resize them.

    Args:
        threads: each decodes its share of the images, without the GIL.
    """

    def __init__(self, images: list[bytes], transform: RandomResizedCrop, threads: int = 1) -> None:
        self.function = _compiled().roi_decode
        self.function.restype = ctypes.c_size_t
        self.images, self.transform, self.threads = images, transform, threads
        self.sizes = [Image.open(BytesIO(image)).size for image in images]

    def __call__(self, seeds: Sequence[int]) -> float:
        jobs = [self._job(range(part, len(self.images), self.threads), seeds) for part in range(self.threads)]
        with ThreadPoolExecutor(self.threads) as pool:
            start = time.perf_counter()
            list(pool.map(lambda job: self.function(*job), jobs))
            return time.perf_counter() - start

    def _job(self, part: range, seeds: Sequence[int]) -> tuple[Any, ...]:
        boxes = [self.transform._box_for(*self.sizes[i], SampleRng(seeds[i]))[0] for i in part]
        n = len(part)
        pointers = (ctypes.c_char_p * n)(*(self.images[i] for i in part))
        lengths = (ctypes.c_ulong * n)(*(len(self.images[i]) for i in part))
        flat = (ctypes.c_double * (4 * n))(*(edge for box in boxes for edge in box))
        return pointers, lengths, flat, n, SIZE, SIZE


def _compiled() -> ctypes.CDLL:
    source = Path(__file__).with_name("roi_decode.c")
    library = WORKPLACE / "roi_decode.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        library.parent.mkdir(exist_ok=True)
        subprocess.run(
            ["cc", "-O3", "-shared", "-fPIC", str(source), "-o", str(library), "-ljpeg"], check=True
        )
    return ctypes.CDLL(str(library))


class Making:
    """Makes what a cache keeps of each photo: what the first epoch costs more.

    Args:
        make: `to_dct` or `with_rows`.
    """

    def __init__(self, images: list[bytes], make: Callable[[bytes], Any]) -> None:
        self.images, self.make = images, make

    def __call__(self, seeds: Sequence[int]) -> float:
        start = time.perf_counter()
        for image in self.images:
            self.make(image)
        return time.perf_counter() - start


class Fill:
    """A fused transform, batch by batch into the same memory, through the kernel (None: the fallback)."""

    def __init__(
        self,
        images: list[Any],
        transform: RandomResizedCrop,
        kernel: native.Kernel | None,
        threads: int = 1,
    ) -> None:
        self.images, self.transform, self.kernel, self.threads = images, transform, kernel, threads

    def __call__(self, seeds: Sequence[int]) -> float:
        chosen, native.kernel = native.kernel, self.kernel
        try:
            with ThreadPoolExecutor(self.threads) as pool:
                start = time.perf_counter()
                list(pool.map(lambda part: self._run(part, seeds), range(self.threads)))
                return time.perf_counter() - start
        finally:
            native.kernel = chosen

    def _run(self, part: int, seeds: Sequence[int]) -> None:
        out = np.empty((BATCH, *self.transform.sample_shape), np.uint8)
        for start in range(part * BATCH, len(self.images), BATCH * self.threads):
            batch = self.images[start : start + BATCH]
            failures = self.transform.fill(out[: len(batch)], batch, seeds[start : start + BATCH])
            assert not failures, failures


class Pillow:
    """The steps of torchvision's ImageFolder: open, convert, crop, resize, flip, channels first."""

    def __init__(self, images: list[bytes], transform: RandomResizedCrop) -> None:
        self.images, self.transform = images, transform

    def __call__(self, seeds: Sequence[int]) -> float:
        start = time.perf_counter()
        for data, seed in zip(self.images, seeds, strict=True):
            pillow_sample(Image.open(BytesIO(data)), self.transform, SampleRng(seed))
        return time.perf_counter() - start


def pillow_sample(image: Any, transform: RandomResizedCrop, rng: Any) -> np.ndarray[Any, Any]:
    """Crop, resize and flip by Pillow: (3, SIZE, SIZE) uint8."""
    image = image.convert("RGB")
    box, flip = transform._box_for(*image.size, rng)[:2]
    image = image.crop(tuple(map(int, box))).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


class Torchvision:
    """torchvision's CPU decoder and its functional transforms, on tensors."""

    def __init__(self, images: list[bytes], transform: RandomResizedCrop) -> None:
        from torchvision.io import decode_jpeg  # type: ignore[import-not-found,import-untyped,unused-ignore]

        self.images = [torch.frombuffer(bytearray(image), dtype=torch.uint8) for image in images]
        self.transform, self._decode = transform, decode_jpeg

    def __call__(self, seeds: Sequence[int]) -> float:
        from torchvision.transforms.v2 import functional as F

        start = time.perf_counter()
        for data, seed in zip(self.images, seeds, strict=True):
            image = self._decode(data, mode="RGB")
            box, flip = self.transform._box_for(image.shape[2], image.shape[1], SampleRng(seed))[:2]
            x0, y0, x1, y1 = map(int, box)
            cut = F.resized_crop(image, y0, x0, y1 - y0, x1 - x0, [SIZE, SIZE], antialias=True)
            if flip:
                F.horizontal_flip(cut)
        return time.perf_counter() - start


class OpenCV:
    """OpenCV's decoder, its resize over areas, and a copy with channels first."""

    def __init__(self, images: list[bytes], transform: RandomResizedCrop) -> None:
        import cv2  # type: ignore[import-not-found,unused-ignore]

        cv2.setNumThreads(1)
        self._cv2: Any = cv2
        self.images = [np.frombuffer(image, np.uint8) for image in images]
        self.transform = transform

    def __call__(self, seeds: Sequence[int]) -> float:
        cv2, start = self._cv2, time.perf_counter()
        for data, seed in zip(self.images, seeds, strict=True):
            image = cv2.imdecode(data, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
            box, flip = self.transform._box_for(image.shape[1], image.shape[0], SampleRng(seed))[:2]
            x0, y0, x1, y1 = map(int, box)
            cut = cv2.resize(image[y0:y1, x0:x1], (SIZE, SIZE), interpolation=cv2.INTER_AREA)
            np.ascontiguousarray((cut[:, ::-1] if flip else cut).transpose(2, 0, 1))
        return time.perf_counter() - start


class Dali:
    """DALI's CPU operators with one thread. Its crops are of its own random numbers, and of the same law."""

    def __init__(self, images: list[bytes], transform: RandomResizedCrop) -> None:
        from nvidia.dali import fn, pipeline_def, types  # type: ignore[import-not-found,unused-ignore]

        photos = [np.frombuffer(image, np.uint8) for image in images]
        self._batches = max(1, len(photos) // BATCH)

        @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)  # type: ignore[untyped-decorator,unused-ignore]
        def pipeline() -> Any:
            files = fn.external_source(
                lambda one: photos[(one.iteration * BATCH + one.idx_in_batch) % len(photos)],
                batch=False,
                dtype=types.UINT8,
            )
            area, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
            cut = fn.decoders.image_random_crop(
                files, device="cpu", random_area=area, random_aspect_ratio=ratio
            )
            small = fn.resize(cut, size=(SIZE, SIZE), interp_type=types.INTERP_LINEAR, antialias=True)
            return fn.transpose(fn.flip(small, horizontal=fn.random.coin_flip()), perm=(2, 0, 1))

        self._pipeline: Any = pipeline()
        self._pipeline.build()

    def __call__(self, seeds: Sequence[int]) -> float:
        start = time.perf_counter()
        for _ in range(self._batches):
            self._pipeline.run()
        return (time.perf_counter() - start) * len(seeds) / (self._batches * BATCH)


PEERS: dict[str, Callable[[list[bytes], RandomResizedCrop], Contender]] = {
    "Pillow-SIMD": Pillow,
    "torchvision, decode_jpeg": Torchvision,
    "OpenCV": OpenCV,
    "DALI, CPU operators": Dali,
}


def installed_peers(images: list[bytes], transform: RandomResizedCrop) -> dict[str, Contender]:
    """The other decoders that work here."""
    found: dict[str, Contender] = {}
    for name, peer in PEERS.items():
        with contextlib.suppress(ImportError, OSError, RuntimeError):
            found[name] = peer(images, transform)
    return found


def kernel_quality(denominator: int) -> float:
    """Mean PSNR in dB of crops decoded at 1/`denominator`, against full decode and Pillow's resize."""
    found = []
    box = (100, 75, 900, 675)
    side = 600 // denominator - 2
    transform = RandomResizedCrop(side, channels_last=True)
    out = np.empty((1, side, side, 3), np.uint8)
    for seed in range(6):
        data = make_photo(seed, 1000, 750)
        item = (0, data, *map(float, box), False)
        assert native.active().crop_resize(out, [item], True, True, transform._max_pixels, True) == []
        expected = (
            Image.fromarray(decode_image(data)).crop(box).resize((side, side), Image.Resampling.BILINEAR)
        )
        error = np.mean((out[0].astype(float) - np.asarray(expected)) ** 2)
        found.append(10 * np.log10(255**2 / error))
    return float(np.mean(found))
