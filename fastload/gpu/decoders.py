"""The decoders in the trainer's process: their base, and torch's own operations, on any device.

    bytes ─ unpack ─▶ coefficients ─ one inverse DCT ─▶ planes ─ resize ─▶ luma, chroma ─ colour ─▶ uint8

Torch decodes records of cache mode "dct". They have no Huffman codes, so each block of all images of a batch
is decoded at once: no library for JPEGs is needed, and no engine of the GPU. Each component is resized from
its own resolution, and colours are made of the result: upsampling and resizing are both linear, so one matrix
does both. Pixels differ from the kernel's by the clamping of colours before the resize, and where the kernel
decodes at a smaller scale. `fastload/images/dct.h` and `blocks.h` describe a record. Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.formats.jpeg import DCT_MAGIC
from fastload.images.encoded import EncodedImages, decode_by_kernel, to_device
from fastload.metrics.counters import BadSamples, Counters


class ImageDecoder(ABC):
    """Turns `EncodedImages` into pixels. Used by one thread of the trainer's process.

    On a GPU, `start` and the function it returns are called with the device prefetcher's stream as torch's
    current one, and the tensor is valid for work in that stream's order. `EncodedImages` may be released at
    any time (their slot then returns to its worker): the decoder keeps those that it still reads.

    Args:
        device: "cuda" with an index, or "cpu"; where the pixels are wanted.
        on_error: as the loader's.
        counters: gets decoder.* and bad.samples, see `fastload.metrics.counters`.
        bad: gets the images that cannot be decoded.
    """

    def __init__(self, device: torch.device, on_error: str, counters: Counters, bad: BadSamples) -> None:
        self._device = device
        self._on_error = on_error
        self.counters, self.bad = counters, bad

    @abstractmethod
    def start(self, encoded: EncodedImages) -> Callable[[], torch.Tensor]:
        """Begin to decode. The returned function waits for the result; call it at most once.

        The result is uint8, of `encoded.shape`, on the decoder's device. Waiting raises DecodeError, with the
        sample's key, for an image that no decoder can decode, where `on_error` is "raise". Batches may be
        started ahead; waiting for them in the order of their start is fastest.
        """

    def rest(self) -> None:  # noqa: B027 - nothing to release
        """Release device memory where no batch is being decoded: this epoch may have been the last."""

    def close(self) -> None:  # noqa: B027 - nothing to release
        """Release threads and device memory. Results not waited for by then are lost."""

    def decode_by_kernel(self, encoded: EncodedImages) -> tuple[torch.Tensor, int]:
        """Return (pixels on the device, number of bad images), by the CPU kernel in this process.

        Raises:
            DecodeError: a bad image, where `on_error` does not cover it.
        """
        images, bad = decode_by_kernel(encoded, self._on_error)
        self.note_bad(bad)
        return images.to(self._device), len(bad)

    def note_bad(self, bad: list[tuple[str, str]]) -> None:
        """Count and keep (key, error) of bad images."""
        self.bad.extend(bad)
        self.counters.add("bad.samples", len(bad))


_TABLES = 20  # offset of a record's quantisation tables
_GREY, _YCC = 1, 3  # colour spaces of jpeglib.h
# Natural position of each coefficient in zigzag order, by walking the diagonals: ITU-T T.81, figure A.6.
_ZIGZAG = [
    8 * row + column
    for diagonal in range(15)
    for row, column in sorted(
        ((i, diagonal - i) for i in range(8) if 0 <= diagonal - i < 8), reverse=diagonal % 2 == 0
    )
]


class _Layout(NamedTuple):
    """What images must share to be decoded together: the sampling factors of their components."""

    factors: tuple[tuple[int, int], ...]  # (horizontal, vertical); of a grey image (1, 1)

    @property
    def across(self) -> int:
        return 8 * max(h for h, _ in self.factors)

    @property
    def down(self) -> int:
        return 8 * max(v for _, v in self.factors)


@dataclass
class _Picture:
    """One image of a batch, and the part of it that its box needs, in whole MCUs."""

    row: int
    layout: _Layout
    tables: NDArray[np.int32]  # (components, 64), zigzag order
    left: int  # pixels
    top: int
    starts: NDArray[np.int64]  # (MCU rows, MCU columns), of the packed blocks in the batch's data
    ends: NDArray[np.int64]


class TorchDctDecoder(ImageDecoder):
    """Decodes batches of records. The kernel decodes what is none, and rare colours."""

    def start(self, encoded: EncodedImages) -> Callable[[], torch.Tensor]:
        with self.counters.timed("decoder"), exact_float32(self._device):
            out, whole = self._decode(encoded)
        self.counters.add("decoder.batches")
        self.counters.add("decoder.samples", len(encoded.encoded_rows))

        def result() -> torch.Tensor:
            if bool(whole):
                return out
            self.counters.add("decoder.fallbacks")
            return self.decode_by_kernel(encoded)[0]  # which says what is wrong with which image

        return result

    @functools.cached_property  # not of the module: each loader has a stream of its own
    def _matrix(self) -> torch.Tensor:
        return to_device(_inverse_dct(), self._device)

    def _decode(self, encoded: EncodedImages) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (pixels, whether all records were whole)."""
        crop, device = encoded.crop, self._device
        out = torch.empty((len(encoded), 3, crop.height, crop.width), dtype=torch.uint8, device=device)
        whole = torch.ones((), dtype=torch.bool, device=device)
        groups: dict[_Layout, list[_Picture]] = {}
        for row in encoded.encoded_rows.tolist():
            picture = _open(encoded, row)
            if picture is None:
                return out, ~whole
            groups.setdefault(picture.layout, []).append(picture)
        data = encoded.data.to(device, non_blocking=True)
        for layout, pictures in groups.items():
            counts = [picture.starts.size for picture in pictures]
            image = to_device(np.repeat(np.arange(len(pictures)), counts), device)
            coefficients, fits = _unpack(data, image, pictures, layout)
            whole &= fits
            rows = np.array([picture.row for picture in pictures])
            samples = (coefficients @ self._matrix + 128).round_().clamp_(0, 255)
            planes = _planes(samples, image, pictures, layout)
            resized = _resize(planes, pictures, layout, encoded)
            flips = to_device(encoded.flips[rows], device)[:, None, None, None]
            out[to_device(rows, device)] = _rgb(torch.where(flips, resized.flip(-1), resized))
        if crop.channels_last:
            out = out.permute(0, 2, 3, 1).contiguous()
        encoded.fill_in(out)
        return out, whole


@contextlib.contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """Compute float32 as float32: the script's autocast and TF32 change no pixel."""
    # Each matmul's switch, and the one that it inherits from. That of cudnn stands for all of CUDA.
    matmuls: list[tuple[Any, Any]] = [
        (torch.backends.cuda.matmul, torch.backends.cudnn),
        (getattr(torch.backends.mkldnn, "matmul", None), torch.backends.mkldnn),
    ]
    switches = [pair for pair in matmuls if hasattr(pair[0], "fp32_precision")]  # from torch 2.9 on
    values = [(matmul.fp32_precision, above.fp32_precision) for matmul, above in switches]
    legacy = None if switches else torch.get_float32_matmul_precision()
    try:
        for matmul, _ in switches:
            matmul.fp32_precision = "ieee"
        if legacy is not None:
            torch.set_float32_matmul_precision("highest")
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for (matmul, _), (precision, inherited) in zip(switches, values, strict=True):
            matmul.fp32_precision = "none" if precision == inherited else precision  # "none": inherits again
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy)


# ---------------------------------------------------------------- headers, on the CPU


def _open(encoded: EncodedImages, row: int) -> _Picture | None:
    """Find the blocks that a row's box needs. None: the kernel has to decode it."""
    file, base = encoded.file(row), int(encoded.spans[row][0])
    layout = _layout_of(file[:_TABLES].tobytes())
    if layout is None:
        return None
    width, height = encoded.sizes[row].tolist()
    columns, rows = -(-width // layout.across), -(-height // layout.down)
    x0, y0, x1, y1 = encoded.boxes[row].tolist()
    left, right = _needed(x0, x1, encoded.crop.width, width, layout.across)
    top, bottom = _needed(y0, y1, encoded.crop.height, height, layout.down)
    at = _TABLES + 128 * len(layout.factors)
    if at + 4 * (rows + 1) > len(file):
        return None
    offsets = np.frombuffer(file[at : at + 4 * (rows + 1)].tobytes(), "<u4").astype(np.int64)
    if (offsets[top:bottom] + 2 * columns > len(file)).any():
        return None
    sizes = np.stack(
        [np.frombuffer(file[start : start + 2 * columns].tobytes(), "<u2") for start in offsets[top:bottom]]
    ).astype(np.int64)
    ends = base + offsets[top:bottom, None] + 2 * columns + np.cumsum(sizes, 1)
    if (ends > base + len(file)).any():
        return None
    tables = np.frombuffer(file[_TABLES:at].tobytes(), "<u2").astype(np.int32).reshape(-1, 64)
    starts, ends = (ends - sizes)[:, left:right], ends[:, left:right]
    return _Picture(row, layout, tables, left * layout.across, top * layout.down, starts, ends)


def _layout_of(head: bytes) -> _Layout | None:
    """Return the layout of a record, from its first bytes. None for another file, and for rare kinds."""
    if not head.startswith(DCT_MAGIC):
        return None
    if (head[6], head[7]) == (_GREY, 1):
        return _Layout(((1, 1),))
    factors = tuple((head[12 + 2 * c], head[13 + 2 * c]) for c in range(3))
    common = max(factors[0]) <= 2 and factors[1:] == ((1, 1), (1, 1))
    return _Layout(factors) if common and (head[6], head[7]) == (_YCC, 3) else None


def _needed(start: float, end: float, outputs: int, size: int, step: int) -> tuple[int, int]:
    """Return the MCUs of one axis that a resize of [start, end) reads, [first, last)."""
    reach = max(1.0, (end - start) / outputs) + 2  # the filter's, and the upsampling's
    low, high = max(0, math.floor(start - reach)), min(size, math.ceil(end + reach))
    return low // step, -(-high // step)


# ---------------------------------------------------------------- bytes to coefficients


def _unpack(
    data: torch.Tensor, image: torch.Tensor, pictures: list[_Picture], layout: _Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (float32 (MCUs, blocks, 64), zigzag, dequantised; whether each MCU ends where it should).

    Args:
        image: of each MCU, its place in `pictures`.
    """
    device = data.device
    at = to_device(np.concatenate([p.starts.ravel() for p in pictures]), device)
    ends = to_device(np.concatenate([p.ends.ravel() for p in pictures]), device)
    blocks = [c for c, (h, v) in enumerate(layout.factors) for _ in range(h * v)]  # their components
    unpacked = []
    for _ in blocks:
        block, at = _unpack_block(data, at)
        unpacked.append(block)
    tables = to_device(np.stack([p.tables[blocks] for p in pictures]), device)
    return (torch.stack(unpacked, 1) * tables[image]).float(), (at == ends).all()


def _unpack_block(data: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (int32 (n, 64) of one block of each MCU, the positions behind these blocks)."""

    def byte(positions: torch.Tensor) -> torch.Tensor:
        return data[positions.clamp(max=len(data) - 1)].int()  # of a damaged record: found out at the end

    def bits(positions: torch.Tensor, offset: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
        first = positions + (offset >> 3)
        return (byte(first) | byte(first + 1) << 8) >> (offset & 7) & ((1 << width) - 1)

    lanes = torch.arange(8, device=data.device)
    first = byte(at) | byte(at + 1) << 8
    groups = first >> 12
    pairs = byte(at[:, None] + 2 + lanes[:4])
    widths = torch.stack((pairs & 15, pairs >> 4), 2).flatten(1) * (lanes < groups[:, None])
    ends = (at + 2 + (groups + 1) // 2)[:, None] + widths.cumsum(1)
    starts, width = (ends - widths)[..., None], widths[..., None]
    lower = width.clamp(max=8)
    upper = width - lower
    numbers = bits(starts, lanes * lower, lower) | bits(starts + 8, lanes * upper, upper) << 8
    sign = (1 << width) >> 1
    numbers = ((numbers ^ sign) - sign).flatten(1)
    numbers[:, 0] = (first & 0xFFF ^ 0x800) - 0x800
    return numbers, ends[:, -1]


# ---------------------------------------------------------------- coefficients to planes


def _planes(
    samples: torch.Tensor, image: torch.Tensor, pictures: list[_Picture], layout: _Layout
) -> list[torch.Tensor]:
    """Return for each component float32 (images, height, width), 0 to 255; small images end in zeros."""
    device = samples.device
    places = [np.indices(p.starts.shape).reshape(2, -1) for p in pictures]
    row, column = to_device(np.concatenate(places, 1), device)
    rows, columns = (max(p.starts.shape[axis] for p in pictures) for axis in (0, 1))
    planes, first = [], 0
    for h, v in layout.factors:
        shape = (len(pictures), rows, v, 8, columns, h, 8)
        plane = torch.zeros(shape, dtype=torch.float32, device=device)
        blocks = samples[:, first : first + h * v].reshape(-1, v, h, 8, 8)
        plane[image, row, :, :, column] = blocks.transpose(2, 3)
        planes.append(plane.reshape(len(pictures), rows * v * 8, columns * h * 8))
        first += h * v
    return planes


def _inverse_dct() -> NDArray[np.float32]:
    """Return (64, 64), by which coefficients in zigzag order become samples. ITU-T T.81, A.3.3."""
    place = np.arange(8)
    basis = np.cos((2 * place[:, None] + 1) * place * math.pi / 16) / 2
    basis[:, 0] /= math.sqrt(2)
    matrix: NDArray[np.float32] = np.einsum("yv,xu->vuyx", basis, basis).astype(np.float32)
    return matrix.reshape(64, 64)[_ZIGZAG]


# ---------------------------------------------------------------- planes to the result


def _resize(
    planes: list[torch.Tensor], pictures: list[_Picture], layout: _Layout, encoded: EncodedImages
) -> torch.Tensor:
    """Return (images, components, height, width): each component's box, resized by the kernel's filter."""
    crop, device = encoded.crop, planes[0].device
    rows = [picture.row for picture in pictures]
    boxes = to_device(encoded.boxes[rows], device)
    sizes = to_device(encoded.sizes[rows], device)
    origins = to_device(np.array([(p.left, p.top) for p in pictures]), device)
    x0, y0, x1, y1 = boxes.unbind(1)
    height, width = planes[0].shape[1:]
    across = _weights(x0, x1, crop.width, width, origins[:, 0], sizes[:, 0], crop._clamp)
    down = _weights(y0, y1, crop.height, height, origins[:, 1], sizes[:, 1], crop._clamp)
    ends = sizes - origins
    resized = []
    for plane, (h, v) in zip(planes, layout.factors, strict=True):
        columns, lines = across, down
        if 8 * h < layout.across:
            columns = _of_half(across, ends[:, 0])
        if 8 * v < layout.down:
            lines = _of_half(down, ends[:, 1])
        resized.append(lines @ plane @ columns.mT)
    return torch.stack(resized, 1)


def _weights(
    start: torch.Tensor,
    end: torch.Tensor,
    outputs: int,
    inputs: int,
    origin: torch.Tensor,
    size: torch.Tensor,
    clamp: bool,
) -> torch.Tensor:
    """Return float32 (images, outputs, inputs): antialiased bilinear, as `fastload/images/resize.h`."""
    scale = ((end - start) / outputs)[:, None]
    # In double, by name: a sum of whole numbers and 0.5 has torch's default dtype, which may be bfloat16.
    centre = start[:, None] + (torch.arange(outputs, dtype=torch.double, device=start.device) + 0.5) * scale
    pixel = origin[:, None] + torch.arange(inputs, dtype=torch.double, device=start.device)
    low = start.floor() if clamp else torch.zeros_like(start)
    high = torch.minimum(end.ceil(), size) if clamp else size.double()
    distance = (pixel[:, None] + 0.5 - centre[:, :, None]).abs() / scale.clamp(min=1)[:, :, None]
    inside = (pixel >= low[:, None]) & (pixel < high[:, None])
    weights = (1 - distance).clamp(min=0) * inside[:, None]
    return (weights / weights.sum(2, keepdim=True)).float()


def _of_half(weights: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """Return the weights of samples with half the resolution, which are upsampled 3 to 1 with their
    neighbours.

    Args:
        end: (images,) size of the image from the first input on: the last sample has no right neighbour.
    """
    even, odd = weights[..., 0::2], weights[..., 1::2]
    half = 0.75 * (even + odd)
    half[..., :-1] += 0.25 * even[..., 1:]
    half[..., 1:] += 0.25 * odd[..., :-1]
    half[..., 0] += 0.25 * even[..., 0]
    half[..., -1] += 0.25 * odd[..., -1]
    last = ((end + 1) // 2 - 1).clamp(max=half.shape[2] - 1)[:, None, None].expand(-1, half.shape[1], 1)
    behind = (last + 1).clamp(max=half.shape[2] - 1)
    spilled = torch.where(behind > last, half.gather(2, behind), 0)
    half.scatter_add_(2, last, spilled)
    return half.scatter_add_(2, behind, -spilled)


def _rgb(image: torch.Tensor) -> torch.Tensor:
    """Return uint8 RGB of (images, 1 or 3 components, height, width): ITU-T T.871."""
    if image.shape[1] == 1:
        return image.round().clamp(0, 255).byte().expand(-1, 3, -1, -1)
    y, cb, cr = image.unbind(1)
    red = y + 1.402 * (cr - 128)
    green = y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128)
    blue = y + 1.772 * (cb - 128)
    return torch.stack((red, green, blue), 1).round_().clamp_(0, 255).byte()
