"""Decoding by nvJPEG through torchvision, on a CUDA device, where DALI is not installed.

    start ─▶ [wait for the stream] ─▶ decode_jpeg(files) ─▶ crop, resize, flip by torch ─▶ uint8 batch

nvJPEG's hardware engines do not honour the order of the stream that they are given: they write while earlier
work of that stream is still reading the memory that torch's allocator has just taken back from it
(pytorch/vision pull request 9606 has measurements). So this thread waits for the feed's stream before each
call, and after it until the engines are through: then files and images are anybody's. The consumer's stream,
with a whole training step on it, is not waited for: its memory is not handed out on the feed's stream before
it has read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import simplejpeg
import torch
from torch.nn import functional

from fastload.errors import FastloadError
from fastload.gpu.decoders import BadSamples
from fastload.images.encoded import EncodedImages, decode_by_kernel
from fastload.metrics.counters import Counters

__all__ = ["Engine", "NvJpegDecoder", "TorchvisionEngine", "why_no_nvjpeg"]


class Engine(Protocol):
    """What decodes whole JPEGs to a device's memory, and is waited for."""

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """(3, height, width) uint8 of each file, on the device. RuntimeError or ValueError if one is bad."""

    def wait(self) -> None:
        """Until all work given to the device's current stream is done, and that of `decode`."""


class TorchvisionEngine:
    """torchvision's decode_jpeg on one CUDA device.

    Raises:
        RuntimeError: it decodes nothing here: a torchvision without nvJPEG, a driver that is too old.
    """

    def __init__(self, device: torch.device) -> None:
        from torchvision.io import ImageReadMode, decode_jpeg

        self._device, self._decode, self._rgb = device, decode_jpeg, ImageReadMode.RGB
        # Otherwise each batch would fail, and be decoded by the kernel in the trainer's process.
        tiny = simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8))
        self.wait()
        self.decode([torch.frombuffer(bytearray(tiny), dtype=torch.uint8)])
        self.wait()

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        try:
            with torch.cuda.device(self._device):
                images: list[torch.Tensor] = self._decode(list(files), mode=self._rgb, device=self._device)
            return images
        except RuntimeError:
            # torchvision decodes on a stream of its own, and only with success does ours wait for that.
            torch.cuda.synchronize(self._device)
            raise

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


def why_no_nvjpeg(device: torch.device) -> str | None:
    """None where it can be used on this device; else what to do. Does not touch the device."""
    if device.type != "cuda":
        return (
            f"nvJPEG decodes on a CUDA device, and the batches go to {device.type}: give device='cuda', or "
            "decode='cpu'"
        )
    try:
        import torchvision.io  # noqa: F401
    except ImportError as error:
        return f"nvJPEG is used through torchvision, and that is missing: pip install torchvision ({error})"
    except (OSError, RuntimeError) as error:  # its operators are of another build than torch
        return (
            f"nvJPEG is used through torchvision, and that does not load: {error}. Install the torchvision "
            f"that belongs to torch {torch.__version__}"
        )
    return None


class NvJpegDecoder:
    """An `ImageDecoder`.

    Args:
        device: where the engine leaves its images: "cuda" with an index.
        on_error: as the loader's.
        counters, bad: where it counts, see `ImageDecoder`.
        engine: what decodes; None: torchvision's nvJPEG.
    """

    def __init__(
        self,
        device: torch.device,
        on_error: str,
        counters: Counters,
        bad: BadSamples,
        engine: Engine | None = None,
    ) -> None:
        self._device = device
        self._on_error = on_error
        self.counters, self.bad = counters, bad
        self._engine: Engine = engine or TorchvisionEngine(device)

    def start(self, encoded: EncodedImages) -> Callable[[], torch.Tensor]:
        # All of it at once: the call into torchvision returns when the images are there, so that there is
        # nothing to wait for later.
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
                self._engine.wait()  # after: the files' memory may now be used again, and the images read
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
        """One image of the batch was refused, and so all were: the kernel decodes them."""
        self.counters.add("decoder.fallbacks")
        try:
            images, bad = decode_by_kernel(encoded, self._on_error)
        except FastloadError as failure:
            return failure
        self.bad.extend(bad)
        self.counters.add("bad.samples", len(bad))
        return images.to(self._device)


def _result(images: torch.Tensor | Exception) -> torch.Tensor:
    if isinstance(images, Exception):
        raise images
    return images


def _resized(image: torch.Tensor, encoded: EncodedImages, row: int) -> torch.Tensor:
    """(3, H, W) float32: the box of one whole image, by torch's antialiased bilinear filter.

    One image at a time. Its three launches are of no account beside the decoding; one launch for a batch
    (roi_align, grid_sample) has no antialiasing filter.
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
    # Pixels around the box count: the whole image is resized, and the box cut out of that, as in torchvision.
    down, across = size[0] / (y1 - y0), size[1] / (x1 - x0)
    whole = (round(height * down), round(width * across))
    resized = functional.interpolate(image[None].float(), whole, mode="bilinear", antialias=True)
    top, left = round(y0 * down), round(x0 * across)
    return resized[0, :, top : top + size[0], left : left + size[1]]
