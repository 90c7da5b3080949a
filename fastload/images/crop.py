"""What the fused transforms share: decode, crop, resize and flip in one pass over the pixels.

Geometry is torchvision's, in pixels of the full-resolution image; the result is uint8, RGB or the image's own
single channel. Where `transform` is one of these, only the part of a JPEG that the crop needs is decoded, at
the smallest scale that has enough pixels, straight into the caller's memory. Nearest neighbour, for masks,
takes its pixels from the whole decoded image. An EXIF orientation is not applied, as in torchvision's default
loader.
"""

from __future__ import annotations

import functools
import operator
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import ArgumentError, DecodeError
from fastload.images.decode import MAX_PIXELS, Unindexed, find_format, open_image
from fastload.images.kernel import BoxLaw, Item, Pixels, Source, active, threads
from fastload.images.masks import nearest, open_grey, open_values, own_channel, own_grey
from fastload.images.rng import Rng, SampleRng, TorchRng

if TYPE_CHECKING:
    import torch


_T = TypeVar("_T")
Box = tuple[float, float, float, float]
Size = tuple[int, int]  # (width, height) of an image


LARGEST_SIDE = 8192  # side of a result


class CropBox(NamedTuple):
    """Where the pixels of a result come from.

    Attributes:
        box: (x0, y0, x1, y1) to resize, in pixels of the full-resolution image.
        flip: whether to flip the result horizontally.
        inner: (top, left, height, width) of the part of the result that the box fills; the rest is black.
            None: the box fills all of it.
        turn: whether to flip it vertically too.
    """

    box: Box
    flip: bool = False
    inner: tuple[int, int, int, int] | None = None
    turn: bool = False


_notes: ContextVar[list[tuple[CropBox, bool]] | None] = ContextVar("notes", default=None)


@contextmanager
def noted_boxes(notes: list[tuple[CropBox, bool]]) -> Iterator[None]:
    """Note each box that a transform chooses inside: (box, its sample has a generator of its own)."""
    before = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(before)


def _noted(box: CropBox, rng: Rng) -> CropBox:
    notes = _notes.get()
    if notes is not None:
        notes.append((box, isinstance(rng, SampleRng)))
    return box


class Crop(ABC):
    """The base of both crops; a subclass chooses the box.

    Attributes:
        sample_shape: (channels, H, W), or (H, W, channels) with channels_last.
    """

    # Whether pixels outside the box are left out of the filter: crop, then resize; False: resize, then crop.
    _clamp: bool
    # Whether all results have `sample_shape`, so that they can be written into a batch. If not, the transform
    # is called with each encoded image.
    _fills_rows = True
    _draws = True  # whether the box depends on random numbers
    _max_pixels = MAX_PIXELS  # of an image; a larger one is refused before it is decoded

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        interpolation: str = "bilinear",
        channels: int = 3,
        channels_last: bool,
        strict: bool,
    ) -> None:
        self.height, self.width = check_size(size)
        self.interpolation = interpolation
        self.channels = check_channels(channels)
        self.channels_last = channels_last
        self.strict = strict

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        return self._shape_of(self.height, self.width)

    def _shape_of(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the shape of a result of that size."""
        return (height, width, self.channels) if self.channels_last else (self.channels, height, width)

    def _result_size(self, width: int, height: int) -> tuple[int, int]:
        """Return (height, width) of the result for an image of that size."""
        return self.height, self.width

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the result, uint8."""
        import torch

        return torch.uint8

    @property
    def _own_values(self) -> bool:
        """Return whether it needs the image's own values, not those of a smaller or re-encoded copy."""
        return self.interpolation == "nearest" or self.channels == 1

    @property
    def _runs_on_device(self) -> bool:
        """Return whether a decoder on the device does the same."""
        return not self._own_values

    @property
    @abstractmethod
    def _law(self) -> tuple[Any, ...]:
        """Return the geometry: equal where two transforms take the same part of an image."""

    @property
    def _box_law(self) -> BoxLaw | None:
        """Return how the kernel chooses the boxes of uint8 rows by itself; None where Python has to do it."""
        return None

    @property
    def _number(self) -> int:
        """Return 64 bits that differ where other pixels come out, of the same image and random numbers."""
        what = self._law, self.height, self.width, self.interpolation, self.channels
        return xxhash.xxh3_64_intdigest(repr(what).encode())

    @abstractmethod
    def _box_for(self, width: int, height: int, rng: Rng) -> CropBox:
        """Choose the box for an image of that size."""

    def _scaled_box(self, width: int, height: int, first: Size, rng: Rng) -> CropBox:
        """Return the box for an image that is cut like one of size `first`, with its proportions."""
        chosen = self._box_for(*first, rng)
        across, down = width / first[0], height / first[1]
        x0, y0, x1, y1 = chosen.box
        right, bottom = min(width, x1 * across), min(height, y1 * down)
        return chosen._replace(box=(x0 * across, y0 * down, right, bottom))

    def fill(
        self,
        out: np.ndarray[Any, Any],
        images: Sequence[Source],
        seeds: Sequence[int],
        sizes: list[Size | None] | None = None,
    ) -> list[tuple[int, DecodeError]]:
        """Transform a batch into memory that the caller owns.

        One call of the kernel, without the GIL, decodes all JPEGs but the padded ones; those follow.

        Args:
            out: `(n, *sample_shape)` uint8, C-contiguous and writable. Rows of failed images are undefined.
            images: n encoded images (anything with the buffer protocol), (H, W, channels) uint8
                arrays, or PIL images.
            seeds: n integers; everything random about image k is a function of seeds[k] and its size.
            sizes: for samples of several images, n entries: None for the first image, whose (width, height)
                is put there; the others are then cut like the first one.

        Returns:
            (k, error) of the images that failed, in order of k.
        """
        self._check_rows(out, len(images), np.dtype(np.uint8))
        failures: dict[int, DecodeError] = {}

        def begin(k: int) -> Item | None:
            """Make row `k`; or return what the kernel is to make it of."""
            try:
                first = None if sizes is None else sizes[k]
                image = images[k]
                source, width, height, chosen = self._choose_box(image, SampleRng(seeds[k]), first)
                if sizes is not None and first is None:
                    sizes[k] = width, height
                encoded = source is image or isinstance(source, memoryview)
                if encoded and chosen[2:] == (None, False) and self.interpolation == "bilinear":
                    room = (image.index_room(height),) if isinstance(image, Unindexed) else ()
                    return (k, source, *chosen.box, chosen.flip, *room)
                # Already decoded (a PNG, say): used at once, so that a thread has one such image in memory.
                self._render_one(out[k], source, chosen)
            except DecodeError as error:
                failures[k] = error
            return None

        items = _map_rows(begin, images)
        failures.update(self._render(out, [item for item in items if item is not None]))
        return sorted(failures.items())

    def _check_rows(self, out: np.ndarray[Any, Any], count: int, dtype: np.dtype[Any]) -> None:
        """Raise `ArgumentError` unless results can be written into `out`."""
        expected = (count, *self.sample_shape)
        if out.shape != expected or out.dtype != dtype or not out.flags.c_contiguous:
            raise ArgumentError(
                f"out must be a C-contiguous {dtype} array of shape {expected}, not {out.dtype} {out.shape}"
            )

    def __call__(self, image: Any) -> torch.Tensor:
        """Transform one image: a PIL image, the bytes of a file, or an (H, W, channels) uint8 array.

        Returns:
            Tensor of `sample_shape`, uint8. Randomness comes from torch's global generator, in torchvision's
            order of draws.

        Raises:
            DecodeError: the image cannot be decoded.
        """
        return self._draw(image, TorchRng())[0]

    def _draw(self, image: Any, rng: Rng, first: Size | None = None) -> tuple[torch.Tensor, Size]:
        """Transform one image; (result, size of the image). `first`: as in `_choose_box`."""
        import torch

        out, size = self._pixels(image, rng, first)
        return torch.from_numpy(out), size

    def _pixels(self, image: Any, rng: Rng, first: Size | None) -> tuple[Pixels, Size]:
        source, width, height, chosen = self._choose_box(image, rng, first)
        out = np.empty(self._shape_of(*self._result_size(width, height)), np.uint8)
        self._render_one(out, source, chosen)
        return out, (width, height)

    def _choose_box(
        self, image: Source, rng: Rng, first: Size | None = None
    ) -> tuple[Source, int, int, CropBox]:
        """Choose where to cut an image. A JPEG is not decoded for it: its header has the size.

        Args:
            first: the size of the first image of its sample, for which the box is drawn; it is scaled to the
                size of this image.

        Returns:
            (source, width, height, box): the JPEG's bytes, or decoded pixels for other formats and for
            nearest neighbour; the size of the full image; the source of the result's pixels.

        Raises:
            DecodeError: not an image, a damaged header, cut (if `strict`), or too large; not of one channel,
                or of other proportions than the first image.
        """
        if hasattr(image, "convert"):  # a PIL image
            channel = own_channel if self.interpolation == "nearest" else own_grey
            image = channel(image) if self.channels == 1 else np.asarray(image.convert("RGB"))
        if self.interpolation == "nearest":
            source: Source = open_values(image, self.channels, self._max_pixels, self.strict)
            height, width = source.shape[:2]
        else:
            open_source = open_image if self.channels == 3 else open_grey
            source, width, height = open_source(image, self._max_pixels, self.strict)
        if first is None or first == (width, height):
            return source, width, height, _noted(self._box_for(width, height, rng), rng)
        if abs(width * first[1] - height * first[0]) > max(width, height, *first):  # a pixel, where rounded
            raise DecodeError(
                f"it has {width} x {height} pixels, and the first image of its sample {first[0]} x "
                f"{first[1]}: images that are cut alike must have the same proportions"
            )
        return source, width, height, _noted(self._scaled_box(width, height, first, rng), rng)

    def _fill_rows(
        self,
        images: NDArray[Any],
        rows: list[int],
        sources: Sequence[Source],
        seeds: Sequence[int],
        sizes: list[Size | None] | None = None,
    ) -> list[tuple[int, DecodeError]]:
        """Do what `fill` does for some rows of a batch; return (position in `rows`, error) of failures.

        Args:
            images: (n, *sample_shape) of `dtype`, the whole batch.
        """
        if not rows:
            return []
        adjacent = rows == list(range(rows[0], rows[0] + len(rows)))
        out = images[rows[0] : rows[0] + len(rows)] if adjacent else images[rows]
        failures = self.fill(out, sources, seeds, sizes)
        if not adjacent:
            images[rows] = out
        return failures

    def _make_rows(
        self,
        images: NDArray[np.uint8],
        rows: NDArray[np.int64],
        places: NDArray[np.void],
        seeds: NDArray[np.uint64],
        *,
        pixels: bool,
        owner: object,
    ) -> tuple[list[int], float, float]:
        """Make rows of a batch from records of a cache, without Python's work on each of them.

        The rows are those of `_fill_rows`, to the bit. A row is left out where the kernel is missing or does
        not know the image's format, and where the record or the image is damaged. To read and fill it in the
        general way makes it, or says what is wrong.

        Args:
            images: (n, *sample_shape) uint8, the whole batch.
            rows: of each record.
            places: where the records lie: `Cache._locate(keys).table`.
            seeds: of each record, as in `fill`.
            pixels: the cache is in mode "decoded".
            owner: keeps the segments open: the result of `Cache._locate`.

        Returns:
            (rows that were not made, seconds of reading, seconds of decoding). The seconds are those of all
            threads together.
        """
        law = None if _notes.get() is not None else self._box_law
        if law is None:
            return rows.tolist(), 0.0, 0.0
        options = pixels, self.channels_last, self._clamp, self._max_pixels, self.strict
        job = active().begin_rows(images, places, rows, seeds, law, *options, owner)
        failed, reading, decoding = active().finish_rows(job)
        return [row for row, _ in failed], reading, decoding

    def _as_sample(self, row: torch.Tensor) -> torch.Tensor:
        """Return a row of a batch, as `__call__` gives it."""
        return row

    def _render(self, out: np.ndarray[Any, Any], items: Sequence[Item]) -> list[tuple[int, DecodeError]]:
        """Decode, crop and resize `items` into their rows of `out`; (row, error) of those that failed."""
        grey = self.channels == 1
        size = out.shape[1:3] if self.channels_last else out.shape[2:4]
        into = np.empty((len(out), 3, *size), np.uint8) if grey else out
        failures = active().crop_resize(
            into, items, self.channels_last and not grey, self._clamp, self._max_pixels, self.strict
        )
        if grey:  # the kernel makes RGB of it, with three equal channels
            written = [item[0] for item in items]
            out[written] = into[written, 0, ..., None] if self.channels_last else into[written, :1]
        return [(row, DecodeError(reason)) for row, reason in failures]

    def _render_one(self, out: np.ndarray[Any, Any], source: Source, chosen: CropBox) -> None:
        """Decode, crop and resize one image into `out`; the frame around `inner` is black.

        Raises:
            DecodeError: the image cannot be decoded.
        """
        box = out
        height, width = out.shape[:2] if self.channels_last else out.shape[1:]
        if chosen.inner is not None:
            top, left, height, width = chosen.inner
            rows, columns = slice(top, top + height), slice(left, left + width)
            box = np.empty(self._shape_of(height, width), np.uint8)
        if self.interpolation == "nearest":
            self._take_nearest(box, source, chosen, height, width)
        else:
            for _, error in self._render(box[None], [(0, source, *chosen.box, chosen.flip)]):
                raise error
        if chosen.turn:
            box[:] = np.flip(box, 0 if self.channels_last else 1).copy()
        if chosen.inner is not None:
            out[:] = 0
            out[(rows, columns) if self.channels_last else (slice(None), rows, columns)] = box

    def _take_nearest(
        self, out: np.ndarray[Any, Any], source: Pixels, chosen: CropBox, height: int, width: int
    ) -> None:
        rows, columns = self._nearest(source.shape[1], source.shape[0], chosen, height, width)
        pixels = source.take(rows, 0).take(columns[::-1] if chosen.flip else columns, 1)
        out[:] = pixels if self.channels_last else pixels.transpose(2, 0, 1)

    def _nearest(
        self, image_width: int, image_height: int, chosen: CropBox, height: int, width: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows and columns of an image that a result of `height` and `width` consists of."""
        x0, y0, x1, y1 = chosen.box
        return nearest(y0, y1, height), nearest(x0, x1, width)

    def _options(self) -> str:
        """Return the arguments of both crops that `repr` shows, because they differ from their defaults."""
        shown = f", interpolation={self.interpolation!r}" if self.interpolation != "bilinear" else ""
        shown += f", channels={self.channels}" if self.channels != 3 else ""
        shown += f", channels_last={self.channels_last}" if self.channels_last else ""
        return shown + ("" if self.strict else ", strict=False")


def _map_rows(make: Callable[[int], _T], images: Sequence[Source]) -> list[_T]:
    """Call `make` for each row. Rows that Python decodes, such as a PNG's, are shared by threads too."""
    others = [k for k, image in enumerate(images) if not _is_for_kernel(image)] if threads() > 1 else []
    made = _share(make, others) if len(others) > 1 else {}
    return [made[k] if k in made else make(k) for k in range(len(images))]


def _share(make: Callable[[int], _T], rows: list[int]) -> dict[int, _T]:
    """Call `make` for each row, in this thread and in as many others as can be started."""
    left, made, helpers = deque(rows), dict[int, _T](), list[Future[None]]()

    def drain() -> None:
        while True:
            try:
                k = left.popleft()
            except IndexError:
                return
            made[k] = make(k)

    try:
        try:
            for _ in range(min(threads(), len(rows)) - 1):
                helpers.append(_decoders(os.getpid(), threads()).submit(drain))
        except RuntimeError:  # a limit of threads
            _decoders.cache_clear()  # its queue keeps the call for which no thread could be started
        drain()
    finally:  # after an error too, no thread writes rows any more
        left.clear()
        wait(helpers)
    for helper in helpers:
        helper.result()
    return made


def _is_for_kernel(image: Source) -> bool:
    if isinstance(image, np.ndarray) and image.ndim == 3:
        return True
    try:
        return find_format(image)[1] == "JPEG"
    except DecodeError:
        return True  # to decode it says what is wrong


@functools.lru_cache(maxsize=1)
def _decoders(process: int, count: int) -> ThreadPoolExecutor:
    """Return threads for the formats that Pillow decodes, most of the time without the GIL."""
    return ThreadPoolExecutor(count, "fastload-decode")


# --- arguments


def check_size(size: int | Sequence[int]) -> tuple[int, int]:
    sides = [whole_side(side) for side in size] if isinstance(size, Sequence) else [whole_side(size)]
    height, width = sides if len(sides) == 2 else sides * 2 if len(sides) == 1 else (None, None)
    if height is None or width is None or not (1 <= height <= LARGEST_SIDE and 1 <= width <= LARGEST_SIDE):
        raise ArgumentError(
            f"size must be an int or (height, width), each from 1 to {LARGEST_SIDE}, not {size!r}"
        )
    return height, width


def whole_side(number: Any) -> int | None:
    """Return an int, also for one of numpy's; None for all else."""
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None


def check_channels(channels: Any) -> int:
    if isinstance(channels, bool) or channels not in (1, 3):
        raise ArgumentError(
            f"channels must be 3 (RGB) or 1 (the image's own single channel), found {channels!r}"
        )
    return int(channels)
