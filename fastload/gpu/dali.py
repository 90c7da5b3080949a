"""Decoding by NVIDIA DALI: on a GPU by its JPEG engines and CUDA, without one by DALI's CPU operators.

    start ─ files, slices, regions ─▶ decoders.image_slice ─▶ resize (crop, flip) ─▶ result
                                      the part of a JPEG        antialiased linear

DALI works on up to `queue_depth` batches in its own threads. An image that it cannot decode ends the whole
pipeline: the kernel then decodes that batch, and that image from then on. A new pipeline takes later batches.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from fastload.checks import whole_number
from fastload.distributed import cores_of_rank, local_ranks
from fastload.errors import ArgumentError, FastloadError
from fastload.gpu.decoders import ImageDecoder
from fastload.images.encoded import EncodedImages, render_rows, repeat_rows, to_device
from fastload.metrics.counters import BadSamples, Counters
from fastload.metrics.machine import usable_cores

_log = logging.getLogger("fastload")

_UNEXPLAINED = 3  # pipelines in a row that end although the kernel decodes every image of their batch
_GPU_THREADS = 8  # more were not needed to keep the engines of one GPU busy
_MOST_HINT = 4096  # pixels; memory for images of the hinted size is allocated at once, many of them
# A pipeline that has nothing scheduled ends with StopIteration, which would end the epoch silently.
_ENDED = (RuntimeError, StopIteration)


@dataclass(frozen=True, kw_only=True)
class Dali:
    """`decoder=Dali(...)`: decode with NVIDIA DALI and other settings than those of `decoder="dali"`.

    Example (not run: it needs a GPU, and has not run on one yet)::

        from fastload import Dali, DataLoader, ImageFolder, RandomResizedCrop

        dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224), cache="/ssd/cache")
        decoder = Dali(hw_decoder_load=0.9, queue_depth=3)
        loader = DataLoader(dataset, batch_size=256, num_workers=4, device="cuda", decoder=decoder)

    Args:
        hw_decoder_load: the share of the JPEGs, 0 to 1, for the GPU's JPEG engines; CUDA and the CPU decode
            the rest. More leaves more of the CPU to the workers, and makes a batch wait for the engines.
        queue_depth: the number of batches in DALI at a time.
        threads: the number of DALI's threads, which parse JPEGs and do the rest of the decoding. None: this
            rank's share of the cores of this node, on a GPU at most 8.
        width_hint, height_hint: the size of large images; memory for many of them is allocated once. None: of
            19 in 20 images of the first batch, at most 4,096 pixels.

    Raises:
        ArgumentError: an argument is out of range.
    """

    hw_decoder_load: float = 0.65
    queue_depth: int = 2
    threads: int | None = None
    width_hint: int | None = None
    height_hint: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.hw_decoder_load <= 1:
            raise ArgumentError(f"hw_decoder_load is a share, 0 to 1, not {self.hw_decoder_load!r}")
        for name in ("queue_depth", "threads", "width_hint", "height_hint"):
            value = getattr(self, name)
            if value is not None or name == "queue_depth":
                whole_number(name, value)


def why_no_dali() -> str | None:
    """Return None where DALI is installed; else the remedy."""
    try:
        spec = importlib.util.find_spec("nvidia.dali")
    except ModuleNotFoundError:
        spec = None
    return (
        None
        if spec
        else "NVIDIA DALI is not installed: pip install 'torch-fastload[dali-cuda13]' (or -cuda12)"
    )


class _Batch:
    """A batch in the pipeline; in the end it has images or an error.

    Attributes:
        rows: those that DALI decodes.
        refused_rows: those that it has refused before, and the kernel decodes.
    """

    def __init__(self, encoded: EncodedImages, refused: set[str]) -> None:
        self.encoded = encoded
        rows = encoded.encoded_rows
        is_refused = np.array([encoded.keys[row] in refused for row in rows], np.bool_)
        self.rows, self.refused_rows = rows[~is_refused], rows[is_refused]
        self.images: torch.Tensor | None = None
        self.error: Exception | None = None


class DaliDecoder(ImageDecoder):
    """Decodes by DALI's pipeline, and what it refuses by the kernel.

    Args:
        device, on_error, counters, bad: see `ImageDecoder`.
        options: the settings of the pipeline.
    """

    def __init__(
        self,
        device: torch.device,
        on_error: str,
        counters: Counters,
        bad: BadSamples,
        options: Dali,
    ) -> None:
        super().__init__(device, on_error, counters, bad)
        self._options = options
        self._queue: deque[_Batch] = deque()  # fed, oldest first
        self._pipe: Any = None
        self._built_for: tuple[Any, ...] = ()
        self._unexplained = 0
        self._refused: set[str] = set()  # keys of the images that ended a pipeline
        self._copied: deque[tuple[Any, Any]] = deque()  # (event, tensors that are read until then)

    def start(self, encoded: EncodedImages) -> Callable[[], torch.Tensor]:
        with self.counters.timed("decoder"), self._in_step():
            batch = _Batch(encoded, self._refused)
            if not len(batch.rows):
                self._complete(batch, None)
                return lambda: self._result(batch)
            while len(self._queue) >= self._options.queue_depth:
                self._finish_oldest()
            if not self._fits(batch):
                while self._queue:
                    self._finish_oldest()
                self._build(batch)
            self._queue.append(batch)
            self._feed_from(len(self._queue) - 1)
            return lambda: self._result(batch)

    def close(self) -> None:
        # The pipeline reads the batches' memory until they are through.
        while self._pipe is not None and self._queue:
            self._finish_oldest()
        while self._copied:
            self._copied.popleft()[0].synchronize()
        self._pipe = None

    def rest(self) -> None:
        """Release the pipeline and its memory, unless a batch is in it: the next batch builds another."""
        if not self._queue:
            self.close()

    def _result(self, batch: _Batch) -> torch.Tensor:
        with self.counters.timed("decoder"):
            while batch in self._queue:
                self._finish_oldest()
            if batch.images is None and batch.error is None:  # an interrupt took its pipeline
                self._by_kernel(batch)
        if batch.error is not None:
            raise batch.error
        images, batch.images = batch.images, None
        assert images is not None
        return images

    # --- one batch through the pipeline

    def _feed(self, batch: _Batch) -> None:
        encoded, rows = batch.encoded, batch.rows
        starts, shapes, low, high = _regions(encoded, rows)
        for name, values in (("start", starts), ("shape", shapes), ("low", low), ("high", high)):
            self._pipe.feed_input(name, values)
        # Views of the slot, no copies: `batch` keeps it until it has its images.
        self._pipe.feed_input("encoded", [encoded.file(row) for row in rows])
        self._pipe.schedule_run()

    def _feed_from(self, position: int) -> None:
        """Feed the queue from this position on, as far as the pipeline accepts it.

        A pipeline that an image has ended accepts nothing more. The batch of that image is in the queue and
        has its turn first. Then a new pipeline gets the rest: a batch that was not fed is never waited for.
        """
        for k in range(position, len(self._queue)):
            try:
                self._feed(self._queue[k])
            except _ENDED:
                if k == 0:
                    raise
                return

    def _finish_oldest(self) -> None:
        with self._in_step():
            batch = self._queue.popleft()
            try:
                self._collect(batch)
                self._unexplained = 0
            except _ENDED as error:
                self._fall_back(batch, error)
        self.counters.add("decoder.batches")
        self.counters.add("decoder.samples", len(batch.rows))

    def _collect(self, batch: _Batch) -> None:
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        outputs = self._pipe.share_outputs(stream)
        images = from_dlpack(outputs[0].as_tensor())
        self._pipe.release_outputs()
        self._complete(batch, images)

    def _complete(self, batch: _Batch, images: torch.Tensor | None) -> None:
        try:
            batch.images = self._with_pixels(batch, images)
        except FastloadError as failure:
            batch.error = failure

    def _with_pixels(self, batch: _Batch, images: torch.Tensor | None) -> torch.Tensor:
        """Join DALI's images and those that workers and the kernel decoded, on a GPU in torch's memory."""
        encoded = batch.encoded
        on_gpu = self._device.type == "cuda"
        if images is not None and len(batch.rows) == len(encoded) and not on_gpu:
            return images
        # On a GPU this copies within its memory, 25 us for 256 images: DALI reuses its own memory without
        # waiting for the streams that still read it.
        out = torch.empty(encoded.shape, dtype=torch.uint8, device=self._device)
        if images is not None and len(batch.rows) == len(encoded):
            out.copy_(images)
        elif images is not None:
            out[to_device(batch.rows, out.device)] = images
        encoded.fill_in(out)
        if len(batch.refused_rows):
            rendered, failures = render_rows(encoded, batch.refused_rows)
            pixels = to_device(rendered.numpy()[batch.refused_rows], out.device)
            out[to_device(batch.refused_rows, out.device)] = pixels
            self.note_bad(repeat_rows(out, encoded, failures, self._on_error))
        if on_gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._copied.append((event, (images, encoded)))
            while self._copied and self._copied[0][0].query():
                self._copied.popleft()
        return out

    # --- when it goes wrong

    def _fall_back(self, batch: _Batch, error: Exception) -> None:
        """Let the kernel decode a batch that ended the pipeline; later batches are fed again."""
        places = [int(place) for place in re.findall(r"sample #(\d{1,6})", str(error))]
        self._refused.update(
            batch.encoded.keys[batch.rows[place]] for place in places if place < len(batch.rows)
        )
        self._unexplained = self._unexplained + 1 if self._by_kernel(batch) else 0
        # Sound batches before a bad one may fail with it: up to `queue_depth` failures prove nothing.
        if self._unexplained > self._options.queue_depth + _UNEXPLAINED:
            self._give_up(error)
        self.counters.add("decoder.rebuilt")
        self._pipe = self._new_pipeline()
        self._feed_from(0)

    def _by_kernel(self, batch: _Batch) -> bool:
        """Let the kernel decode a batch. Return whether every image is sound."""
        self.counters.add("decoder.fallbacks")
        try:
            batch.images, bad = self.decode_by_kernel(batch.encoded)
        except FastloadError as failure:
            batch.error = failure
            return False
        return not bad

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """After an error or Ctrl-C, forget the pipeline and what is in it.

        Its outputs belong to batches by their order alone, and nobody knows how much of a batch it has got.
        """
        try:
            yield
        except BaseException:
            self._pipe = None
            self._queue.clear()
            raise

    def _give_up(self, error: Exception) -> None:
        failure = FastloadError(
            f"DALI has failed {self._unexplained} times in a row on sound images. Use decoder='cpu'; "
            f"DALI's error: {_last_words(error)}",
            stage="decode",
        )
        for batch in self._queue:
            batch.error = failure
        self._queue.clear()
        self.close()
        raise failure from error

    # --- the pipeline

    def _fits(self, batch: _Batch) -> bool:
        crop = batch.encoded.crop
        if self._pipe is None:
            return False
        rows, *form = self._built_for
        return rows >= len(batch.rows) and form == [crop.height, crop.width, crop.channels_last]

    def _build(self, batch: _Batch) -> None:
        crop, sizes = batch.encoded.crop, batch.encoded.sizes
        self._built_for = (len(batch.encoded), crop.height, crop.width, crop.channels_last)
        width, height = np.percentile(sizes[batch.rows], 95, axis=0, method="higher").clip(1, _MOST_HINT)
        self._hints = (
            self._options.width_hint or int(width),
            self._options.height_hint or int(height),
        )
        start = time.perf_counter()
        self._pipe = self._new_pipeline()
        _log.debug("DALI pipeline for %s built in %.2f s", self._built_for, time.perf_counter() - start)

    def _new_pipeline(self) -> Any:
        from nvidia.dali import Pipeline, fn, types

        batch_size, height, width, channels_last = self._built_for
        gpu = self._device.type == "cuda"
        threads = self._options.threads or _threads(_GPU_THREADS if gpu else 1024)
        pipe = Pipeline(
            batch_size=batch_size,
            num_threads=threads,
            device_id=self._device.index if gpu else None,
            prefetch_queue_depth=self._options.queue_depth,
            exec_dynamic=True,  # with the other executor, outputs are overwritten once they are released
        )
        mixed: dict[str, Any] = {}
        if gpu:
            mixed = {
                "hw_decoder_load": self._options.hw_decoder_load,
                "preallocate_width_hint": self._hints[0],
                "preallocate_height_hint": self._hints[1],
                "jpeg_fancy_upsampling": True,  # the chroma filter of libjpeg, like the CPU path
                "affine": False,  # otherwise all ranks of a node would pin their threads to its first cores
            }

        def source(name: str, dtype: Any, **options: Any) -> Any:
            return fn.external_source(name=name, dtype=dtype, ndim=1, **options)

        with pipe:
            images = fn.decoders.image_slice(
                source("encoded", types.UINT8, no_copy=True),
                source("start", types.INT32),
                source("shape", types.INT32),
                device="mixed" if gpu else "cpu",
                axes=(0, 1),
                output_type=types.RGB,
                adjust_orientation=False,  # like the CPU path
                **mixed,
            )
            images = fn.resize(
                images,
                size=(height, width),
                roi_start=source("low", types.FLOAT),
                roi_end=source("high", types.FLOAT),
                interp_type=types.INTERP_LINEAR,
                antialias=True,
            )
            pipe.set_outputs(images if channels_last else fn.transpose(images, perm=(2, 0, 1)))
        pipe.build()
        _run_in(pipe, self._options.queue_depth)
        return pipe


def _threads(most: int) -> int:
    """Return this rank's share of the cores that it may use."""
    cores = usable_cores()
    ranks = 1 if cores <= (cores_of_rank() or 0) else local_ranks()
    return max(1, min(cores // ranks, most))


def _run_in(pipe: Any, queue_depth: int) -> None:
    """Give a new pipeline the input of its first `schedule_run`, which starts `queue_depth` runs at once.

    Later calls start one run each. (`blocking=True`, which lets runs wait for their input, was rejected: it
    takes threads from earlier runs, and with one thread it ends in a deadlock.)
    """
    tiny = np.frombuffer(simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8)), np.uint8)
    for _ in range(queue_depth):
        for name, values in (("start", [0, 0]), ("shape", [8, 8])):
            pipe.feed_input(name, np.array([values], np.int32))
        for name, values in (("low", [0, 0]), ("high", [8, 8])):
            pipe.feed_input(name, np.array([values], np.float32))
        pipe.feed_input("encoded", [tiny])
    pipe.schedule_run()
    for _ in range(queue_depth):
        pipe.share_outputs()
        pipe.release_outputs()


def _regions(
    encoded: EncodedImages, rows: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return (start of the slice, its shape, low and high corner of the box in it) of these rows, as (y, x).

    A box from right to left makes DALI flip. Where the filter reaches beyond the box, so does the slice.
    """
    crop = encoded.crop
    low, high = encoded.boxes[rows, 1::-1], encoded.boxes[rows, 3:1:-1]
    limits = encoded.sizes[rows, ::-1]
    reach = 0 if crop._clamp else np.ceil(np.maximum(1, (high - low) / (crop.height, crop.width))) + 1
    start = np.maximum(0, np.floor(low) - reach).astype(np.int32)
    end = np.minimum(limits, np.ceil(high) + reach).astype(np.int32)
    low, high = (low - start).astype(np.float32), (high - start).astype(np.float32)
    flips = encoded.flips[rows]
    low[flips, 1], high[flips, 1] = high[flips, 1], low[flips, 1]
    return start, end - start, low, high


def _last_words(error: Exception) -> str:
    """Return the cause, out of DALI's many lines."""
    text = str(error)
    return text.partition("encountered:")[2].partition("Current pipeline")[0].strip() or text
