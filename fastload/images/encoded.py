"""Batches of encoded images, made by workers where the device decodes.

    worker                                            trainer
    EncodedBatch.fill ─ crop, flip from the header ─▶ EncodedImages in the slot ─▶ ImageDecoder ─▶ pixels
        └ images that decoders refuse: the kernel ─▶  their pixels ──────────────────┘

A batch holds plain JPEGs; of a cache in mode "dct" it holds records, which another decoder takes.

The crop follows from the size in the JPEG's header, by the rules and the per-sample randomness of the CPU
path, so a sample has the same box and flip with every decoder. The worker itself decodes images that are not
plain JPEGs (PNG, progressive, CMYK), or no records, and images that have to be padded; they travel as
pixels. A damaged header is an error in the worker (`on_error`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import DecodeError
from fastload.formats.jpeg import is_dct, is_plain_jpeg
from fastload.images.crop import Crop
from fastload.images.kernel import Item, Pixels, Source
from fastload.images.rng import SampleRng


@dataclass
class EncodedImages:
    """The images of a batch of n rows, encoded; `data` and `pixels` lie in the slot.

    Attributes:
        crop: the transform that chose the boxes; it has the result's size, layout and limits.
        data: uint8, the files one after another.
        spans: int64 (n, 2), the start and end of each row's file in `data`. Rows may share a file.
        sizes: int32 (n, 2), width and height of the full images.
        boxes: float64 (n, 4), x0, y0, x1, y1 of the part to resize, in pixels of the full image.
        flips: bool (n,), whether to flip the result horizontally.
        pixels: uint8 (k, *crop.sample_shape), the images that the worker decoded.
        pixel_rows: int64 (n,), for each row its row of `pixels`, or -1 where it is still encoded.
        keys: object key of each row, for errors.
    """

    crop: Crop
    data: torch.Tensor
    spans: NDArray[np.int64]
    sizes: NDArray[np.int32]
    boxes: NDArray[np.float64]
    flips: NDArray[np.bool_]
    pixels: torch.Tensor
    pixel_rows: NDArray[np.int64]
    keys: list[str]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the decoded batch: (n, *crop.sample_shape)."""
        return (len(self), *self.crop.sample_shape)

    @property
    def encoded_rows(self) -> NDArray[np.int64]:
        """Return the rows left for the decoder."""
        return np.flatnonzero(self.pixel_rows < 0)

    def file(self, row: int) -> NDArray[np.uint8]:
        """Return the encoded image of a row: a view of `data`."""
        start, end = self.spans[row]
        view: NDArray[np.uint8] = self.data.numpy()[start:end]
        return view

    def fill_in(self, out: torch.Tensor) -> None:
        """Copy the rows that the worker decoded into `out`, on any device."""
        rows = np.flatnonzero(self.pixel_rows >= 0)
        if not len(rows):
            return
        pixels = self.pixels.to(out.device, non_blocking=True)
        out[to_device(rows, out.device)] = pixels[to_device(self.pixel_rows[rows], out.device)]


def to_device(numbers: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return the numbers as a tensor on the device, without waiting for the device's work.

    A copy from pageable memory would wait for the stream, and the trainer with it.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class EncodedBatch:
    """Builds `EncodedImages` in a worker. Rows are filled in any order, and again after a failure.

    Args:
        records: whether the decoder takes records of cache mode "dct", and not JPEGs.
    """

    def __init__(
        self,
        crop: Crop,
        n: int,
        allocate: Callable[[Sequence[int], torch.dtype], torch.Tensor],
        *,
        records: bool = False,
    ) -> None:
        self._is_taken = is_dct if records else is_plain_jpeg
        self._crop = crop
        self._allocate = allocate
        self._sources: list[Source | None] = [None] * n  # a file's bytes, or the finished pixels of the row
        self._sizes = np.zeros((n, 2), np.int32)
        self._boxes = np.zeros((n, 4), np.float64)
        self._flips = np.zeros(n, np.bool_)
        self._keys = [""] * n

    def fill(
        self, rows: Sequence[int], images: Sequence[Source], seeds: Sequence[int], keys: Sequence[str]
    ) -> list[tuple[int, DecodeError]]:
        """Choose each image's crop; returns (position, error) of bad images, like `Crop.fill`."""
        failures = []
        for position, (row, image, seed) in enumerate(zip(rows, images, seeds, strict=True)):
            try:
                self._fill_row(row, image, seed)
                self._keys[row] = keys[position]
            except DecodeError as error:
                failures.append((position, error))
        return failures

    def _fill_row(self, row: int, image: Source, seed: int) -> None:
        source, width, height, chosen = self._crop._choose_box(image, SampleRng(seed))
        self._sizes[row], self._boxes[row], self._flips[row] = (width, height), chosen.box, chosen.flip
        # A small image in a black frame is decoded here: a decoder can only fill whole rows.
        if chosen.inner is None and not isinstance(source, np.ndarray) and self._is_taken(source):
            self._sources[row] = source
            return
        pixels = np.empty(self._crop.sample_shape, np.uint8)
        self._crop._render_one(pixels, source, chosen)
        self._sources[row] = pixels

    def copy_row(self, target: int, source: int) -> None:
        """Make row `target` equal to row `source`."""
        parts: tuple[Any, ...] = (self._sources, self._sizes, self._boxes, self._flips, self._keys)
        for part in parts:
            part[target] = part[source]

    def finish(self) -> EncodedImages:
        """Return the filled batch, its files one after another in memory allocated to fit."""
        positions: dict[int, int] = {}  # by id of the source, as rows may share one
        files: list[Source] = []
        pixels: list[Pixels] = []
        total = 0
        spans = np.zeros((len(self._sources), 2), np.int64)
        pixel_rows = np.full(len(self._sources), -1, np.int64)
        for row, source in enumerate(self._sources):
            assert source is not None
            known = positions.get(id(source))
            if isinstance(source, np.ndarray):
                pixel_rows[row] = positions.setdefault(id(source), len(pixels))
                if known is None:
                    pixels.append(source)
                continue
            start = positions.setdefault(id(source), total)
            spans[row] = start, start + len(source)
            if known is None:
                files.append(source)
                total += len(source)
        data = self._allocate((total,), torch.uint8)
        _concatenate(data.numpy(), files)
        decoded = self._allocate((len(pixels), *self._crop.sample_shape), torch.uint8)
        for k, image in enumerate(pixels):
            decoded[k] = torch.from_numpy(image)
        return EncodedImages(
            self._crop,
            data,
            spans,
            self._sizes,
            self._boxes,
            self._flips,
            decoded,
            pixel_rows,
            self._keys,
        )


def _concatenate(out: NDArray[np.uint8], files: Sequence[Any]) -> None:
    at = 0
    for file in files:
        out[at : at + len(file)] = np.frombuffer(file, np.uint8)
        at += len(file)


def decode_by_kernel(encoded: EncodedImages, on_error: str) -> tuple[torch.Tensor, list[tuple[str, str]]]:
    """Decode a batch with the CPU kernel, after the device's decoder gave it up.

    Args:
        on_error: as the loader's, but "replace" repeats another row of the batch, like "repeat": another
            sample would have to be read from the store, which only workers do.

    Returns:
        (uint8 of `encoded.shape`, (key, error) of bad images).

    Raises:
        DecodeError: with the sample's key, where `on_error` is "raise" or no image of the batch is good.
    """
    images, failures = render_rows(encoded, encoded.encoded_rows)
    encoded.fill_in(images)
    return images, repeat_rows(images, encoded, failures, on_error)


def render_rows(
    encoded: EncodedImages, rows: NDArray[np.int64]
) -> tuple[torch.Tensor, list[tuple[int, DecodeError]]]:
    """Return a batch in host memory whose `rows` the CPU kernel has decoded, and (row, error) of bad ones."""
    out: Pixels = np.empty(encoded.shape, np.uint8)
    items: list[Item] = [
        (int(row), encoded.file(row), *encoded.boxes[row].tolist(), bool(encoded.flips[row])) for row in rows
    ]
    failures = encoded.crop._render(out, items)
    for row, error in failures:
        error.key = encoded.keys[row]
    return torch.from_numpy(out), failures


def repeat_rows(
    images: torch.Tensor, encoded: EncodedImages, failures: list[tuple[int, DecodeError]], on_error: str
) -> list[tuple[str, str]]:
    """Put another row of the batch in the place of each bad one; return (key, error) of these.

    Raises:
        DecodeError: where `on_error` is "raise" or no image of the batch is good.
    """
    bad = {row for row, _ in failures}
    good = [row for row in range(len(encoded)) if row not in bad]
    if failures and (on_error == "raise" or not good):
        raise failures[0][1]
    for row in bad:
        images[row] = images[good[row % len(good)]]
    return [(encoded.keys[row], f"{type(error).__name__}: {error}") for row, error in failures]
