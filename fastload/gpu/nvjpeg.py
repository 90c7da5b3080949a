"""Decoding by nvJPEG on a CUDA device, through TorchCodec, or through torchvision where that is missing.

    start ─▶ [wait for the stream] ─▶ decode_jpeg(files) ─▶ crop, resize, flip by torch ─▶ uint8 batch

torchvision's decoders are deprecated since its version 0.29, in favour of TorchCodec 0.16.

nvJPEG's hardware engines ignore the order of the stream that they are given: they write while earlier work of
that stream still reads the memory that torch's allocator has just taken back from it (pytorch/vision pull
request 9606 has measurements). So this thread waits for the device prefetcher's stream before each call, and
for the engines after it: then the memory of files and images may be used again. It does not wait for the
consumer's stream, which holds a whole training step: that stream's memory is not given out before it was
read.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import simplejpeg
import torch
from torch.nn import functional

from fastload.errors import FastloadError
from fastload.gpu.decoders import BadSamples, BaseDecoder
from fastload.images.encoded import EncodedImages
from fastload.images.headers import without_exif
from fastload.images.torchcodec import image_decoders, why_no_torchcodec
from fastload.metrics.counters import Counters

__all__ = ["Engine", "NvJpegDecoder", "TorchCodecEngine", "TorchvisionEngine", "new_engine", "why_no_nvjpeg"]

_log = logging.getLogger("fastload")


class Engine(Protocol):
    """Decodes whole JPEGs into a device's memory."""

    library: str  # its name

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """(3, height, width) uint8 of each file, on the device, not turned by its EXIF orientation.

        Raises:
            RuntimeError, ValueError: one of them is bad.
        """

    def wait(self) -> None:
        """Wait until all work of the device's current stream, and that of `decode`, is done."""


class _CudaEngine(ABC):
    """The base of the engines on one CUDA device.

    Raises:
        ImportError, OSError, RuntimeError: it cannot decode here, for example without nvJPEG in the library,
            or with an old driver.
    """

    library: str

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A first image: otherwise each batch would fail, and the kernel would decode it in the trainer's
        # process.
        tiny = simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8))
        self.wait()
        self.decode([torch.frombuffer(bytearray(tiny), dtype=torch.uint8)])
        self.wait()

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        try:
            with torch.cuda.device(self._device):
                return self._decode(files)
        except RuntimeError:
            # Part of the batch may be under way, in torchvision on a stream of its own.
            torch.cuda.synchronize(self._device)
            raise

    @abstractmethod
    def _decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


class TorchCodecEngine(_CudaEngine):
    """TorchCodec's decode_jpeg. It applies the EXIF orientation, so it gets the files without."""

    library = "torchcodec"

    def __init__(self, device: torch.device) -> None:
        self._decode_jpeg = image_decoders().decode_jpeg
        super().__init__(device)

    def _decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        plain = [torch.frombuffer(without_exif(file.numpy().data), dtype=torch.uint8) for file in files]
        images: list[torch.Tensor] = self._decode_jpeg(plain, mode="RGB", device=self._device)
        return images


class TorchvisionEngine(_CudaEngine):
    """torchvision's decode_jpeg. It decodes on a stream of its own, and ours waits for that one."""

    library = "torchvision"

    def __init__(self, device: torch.device) -> None:
        from torchvision.io import ImageReadMode, decode_jpeg

        self._decode_jpeg, self._rgb = decode_jpeg, ImageReadMode.RGB
        super().__init__(device)

    def _decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        images: list[torch.Tensor] = self._decode_jpeg(list(files), mode=self._rgb, device=self._device)
        return images


def new_engine(device: torch.device) -> Engine:
    """TorchCodec's engine where it decodes on this device, else torchvision's.

    Raises:
        RuntimeError: neither does, with both reasons.
    """
    reasons = []
    for kind in (TorchCodecEngine, TorchvisionEngine):
        try:
            engine = kind(device)
        except (ImportError, OSError, RuntimeError) as error:
            reasons.append(f"{kind.library}: {error}")
        else:
            _log.info(
                "decode='nvjpeg' decodes by %s%s", kind.library, "".join(f" ({why})" for why in reasons)
            )
            return engine
    raise RuntimeError("; ".join(reasons))


def why_no_nvjpeg(device: torch.device) -> str | None:
    """None where it can be used on this device; else the reason and the remedy. Does not touch the device."""
    if device.type != "cuda":
        return (
            f"nvJPEG decodes on a CUDA device, and the batches go to {device.type}: give device='cuda', or "
            "decode='cpu'"
        )
    why = why_no_torchcodec()
    other = None if why is None else _why_no_torchvision()
    if other is None:
        return None
    return f"nvJPEG is used through TorchCodec or torchvision. {why}. torchvision: {other}"


def _why_no_torchvision() -> str | None:
    try:
        import torchvision.io  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:  # its operators may be of another build than torch
        return str(error)
    return None


class NvJpegDecoder(BaseDecoder):
    """An `ImageDecoder`.

    Args:
        device, on_error, counters, bad: see `BaseDecoder`.
        engine: None: that of `new_engine`.

    Attributes:
        library: the name of the one that decodes.
    """

    def __init__(
        self,
        device: torch.device,
        on_error: str,
        counters: Counters,
        bad: BadSamples,
        engine: Engine | None = None,
    ) -> None:
        super().__init__(device, on_error, counters, bad)
        self._engine: Engine = engine or new_engine(device)
        self.library = self._engine.library

    def start(self, encoded: EncodedImages) -> Callable[[], torch.Tensor]:
        # All at once: the call into the library returns when the images are ready, so nothing is left to wait
        # for later.
        with self.counters.timed("decoder"):
            images: torch.Tensor | Exception
            try:
                images = self._decode(encoded)
            except (RuntimeError, ValueError) as error:
                images = self._fall_back(encoded, error)
        self.counters.add("decoder.batches")
        self.counters.add("decoder.samples", len(encoded.encoded_rows))
        return lambda: _result(images)

    def close(self) -> None:
        pass

    def _decode(self, encoded: EncodedImages) -> torch.Tensor:
        rows = encoded.encoded_rows
        size = (encoded.crop.height, encoded.crop.width)
        out = torch.empty((len(encoded), 3, *size), dtype=torch.uint8, device=self._device)
        if len(rows):
            files = [torch.from_numpy(encoded.file(row)) for row in rows]
            self._engine.wait()  # before: see the module
            try:
                images = self._engine.decode(files)
            finally:
                self._engine.wait()  # after: now the files' memory may be used again, and the images read
            self._resize(encoded, rows, images, out)
        if encoded.crop.channels_last:
            out = out.permute(0, 2, 3, 1).contiguous()
        encoded.fill_in(out)
        return out

    def _resize(
        self, encoded: EncodedImages, rows: Any, images: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        resized = torch.empty((len(rows), *out.shape[1:]), dtype=torch.float32, device=self._device)
        for k, (row, image) in enumerate(zip(rows, images, strict=True)):
            resized[k] = _resized(image, encoded, row)
        resized = resized.round_().clamp_(0, 255)
        flips = torch.from_numpy(encoded.flips[rows]).to(self._device)
        resized = torch.where(flips[:, None, None, None], resized.flip(-1), resized)
        out[torch.from_numpy(rows).to(self._device)] = resized.to(torch.uint8)

    def _fall_back(self, encoded: EncodedImages, error: Exception) -> torch.Tensor | Exception:
        """The engine refuses a whole batch for one bad image: the kernel decodes it."""
        self.counters.add("decoder.fallbacks")
        try:
            return self.decode_by_kernel(encoded)[0]
        except FastloadError as failure:
            return failure


def _result(images: torch.Tensor | Exception) -> torch.Tensor:
    if isinstance(images, Exception):
        raise images
    return images


def _resized(image: torch.Tensor, encoded: EncodedImages, row: int) -> torch.Tensor:
    """(3, H, W) float32: the box of one whole image, by torch's antialiased bilinear filter.

    One image at a time: its three launches cost little next to the decoding. The functions that resize a
    batch in one launch (roi_align, grid_sample) were rejected: they have no antialiasing filter.
    """
    crop = encoded.crop
    size = (crop.height, crop.width)
    x0, y0, x1, y1 = encoded.boxes[row].tolist()
    width, height = encoded.sizes[row].tolist()
    if tuple(image.shape) != (3, height, width):
        raise RuntimeError(f"decoded to {tuple(image.shape)}, its header says {(3, height, width)}")
    if crop.clamp:
        part = image[None, :, round(y0) : round(y1), round(x0) : round(x1)].float()
        return functional.interpolate(part, size, mode="bilinear", antialias=True)[0]
    # The filter reaches beyond the box: the whole image is resized, and the box cut out, as in torchvision.
    down, across = size[0] / (y1 - y0), size[1] / (x1 - x0)
    whole = (round(height * down), round(width * across))
    resized = functional.interpolate(image[None].float(), whole, mode="bilinear", antialias=True)
    top, left = round(y0 * down), round(x0 * across)
    return resized[0, :, top : top + size[0], left : left + size[1]]
