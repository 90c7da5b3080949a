"""Decoding by nvJPEG through torchvision, where DALI is not installed; on the CPU by simplejpeg.

    start ─▶ [wait for the stream] ─▶ decode_jpeg(files) ─▶ crop, resize, flip by torch ─▶ uint8 batch

nvJPEG's hardware engines do not honour the order of the stream that they are given: they write while earlier
work of that stream is still reading the memory that torch's allocator has just taken back from it
(pytorch/vision pull request 9606 has measurements). So this thread waits for the feed's stream before each
call, and after it until the engines are through: then files and images are anybody's. The consumer's stream,
with a whole training step on it, is not waited for: its memory is not handed out on the feed's stream before
it has read it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import simplejpeg
import torch
from torch.nn import functional

from fastload.encoded import Bad, EncodedImages, decode_by_kernel
from fastload.errors import FastloadError
from fastload.stats import Counters

__all__ = ["CpuEngine", "Engine", "NvJpegDecoder", "TorchvisionEngine", "why_no_nvjpeg"]


class Engine(Protocol):
    """What decodes whole JPEGs to a device's memory, and is waited for."""

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """(3, height, width) uint8 of each file, on the device. RuntimeError or ValueError if one is bad."""

    def wait(self) -> None:
        """Until all work given to the device's current stream is done, and that of `decode`."""


class TorchvisionEngine:
    """torchvision's decode_jpeg on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        from torchvision.io import ImageReadMode, decode_jpeg

        self._device, self._decode, self._rgb = device, decode_jpeg, ImageReadMode.RGB

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


class CpuEngine:
    """simplejpeg: so that this path runs, and is tested, without a GPU. Slower than decode="cpu"."""

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            torch.from_numpy(
                simplejpeg.decode_jpeg(file.numpy(), "RGB", fastdct=False, fastupsample=False)
            ).permute(2, 0, 1)
            for file in files
        ]

    def wait(self) -> None:
        pass


def why_no_nvjpeg(device: torch.device) -> str | None:
    """None where it can be used on this device; else what to do."""
    if device.type == "cuda" and importlib.util.find_spec("torchvision") is None:
        return "nvJPEG is used through torchvision, which is not installed: pip install torchvision"
    return None


class NvJpegDecoder:
    """An `ImageDecoder`.

    Args:
        device: "cuda" with an index, or "cpu".
        on_error: as the loader's.
        counters, bad: where it counts, see `ImageDecoder`.
        engine: for tests. None: torchvision on a GPU, simplejpeg on the CPU.
    """

    def __init__(
        self,
        device: torch.device,
        on_error: str,
        counters: Counters,
        bad: Bad,
        engine: Engine | None = None,
    ) -> None:
        self._device = device
        self._on_error = on_error
        self.counters, self.bad = counters, bad
        self._engine: Engine = engine or (TorchvisionEngine(device) if device.type == "cuda" else CpuEngine())

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
