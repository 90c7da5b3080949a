"""fuse: a transform of torchvision whose first steps run in the kernel.

Compose([RandomResizedCrop, RandomHorizontalFlip, ToTensor, Normalize, RandomErasing])
         └────────── one pass over the JPEG ────┘ └── one table ──┘  └ as it is
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fastload.errors import ArgumentError, DecodeError
from fastload.images.crop import Crop, CropBox, Size
from fastload.images.kernel import Pixels, Source
from fastload.images.rng import Rng
from fastload.images.torchvision_steps import Flip, Plan, plan, steps_of
from fastload.images.transforms import RandomResizedCrop


def fuse(transform: Callable[[Any], Any]) -> Fused:
    """Let the kernel do as much of a torchvision transform as it can: the same distribution, faster.

    Example (not run: needs torchvision; the how-to page on transforms runs one)::

        from torchvision import transforms

        from fastload import ImageFolder, fuse

        augment = transforms.Compose([
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ])
        dataset = ImageFolder("s3://bucket/train", fuse(augment))  # float32 (3, 224, 224)
        dataset.transform.fused, dataset.transform.kept  # all four steps, none

    The kernel takes, from the first step on: RandomHorizontalFlip and RandomVerticalFlip; one of
    RandomResizedCrop, CenterCrop, or Resize with or without a CenterCrop after it, bilinear; ToTensor,
    PILToTensor, ToImage, ToPureTensor, ToDtype, ConvertImageDtype and Normalize, which may stand before the
    crop only while the values stay uint8. The first other step, or a second crop, is kept, and so are all
    steps after it: they get what torchvision would give them, a PIL image in RGB or a tensor.

    Values of the last group are torchvision's to the bit. Resized pixels differ by 2 grey levels at most from
    those of Pillow; a JPEG is decoded at a smaller scale where the crop is large.

    Args:
        transform: a `Compose` of torchvision.transforms or torchvision.transforms.v2, one of their
            transforms, or a `torch.nn.Sequential` of them.

    Returns:
        A transform for ImageFolder, ObjectDataset, TarDataset and the other datasets, in place of the plain
        one.

    Raises:
        ArgumentError: the first steps are none of these: there is nothing to fuse.
    """
    if not callable(transform) or isinstance(transform, type):
        raise ArgumentError(f"transform must be a torchvision transform such as a Compose, not {transform!r}")
    if isinstance(transform, Crop):
        raise ArgumentError(f"this transform is fused already: {transform!r}")
    return Fused(transform, plan(steps_of(transform)))


class Fused(Crop):
    """What `fuse` returns.

    Attributes:
        fused: the steps that run in the kernel, as text.
        kept: the steps that run after it as they are. Where there are none, samples are written straight into
            the batch; otherwise they are made one by one.
    """

    def __init__(self, transform: Callable[[Any], Any], planned: Plan) -> None:
        crop = planned.crop
        super().__init__(
            (crop.height, crop.width),
            channels_last=planned.values is None,  # as a PIL image has them
            strict=crop.strict,
        )
        self._transform = transform
        self._crop = crop
        self._before, self._after = planned.before, planned.after
        self._values = planned.values
        self._steps, self._rest = planned.fused, planned.kept
        self.clamp = crop.clamp
        self.fills_rows = crop.fills_rows and self._values is not None and not self._rest
        self.draws = crop.draws or bool(self._before or self._after)

    @property
    def fused(self) -> tuple[str, ...]:
        return tuple(map(repr, self._steps))

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(map(repr, self._rest))

    @property
    def dtype(self) -> torch.dtype:
        table = None if self._values is None else self._values.table
        return torch.uint8 if table is None else torch.from_numpy(table).dtype

    @property
    def runs_on_device(self) -> bool:
        return False

    @property
    def law(self) -> tuple[Any, ...]:
        flips = self._before, self._after
        if flips == ([], []):
            return self._crop.law
        last = self._after[-1] if self._after else Flip(True, 0)
        if flips == ([], [last]) and not last.vertical and isinstance(self._crop, RandomResizedCrop):
            return *self._crop.law[:-1], last.probability
        return "fused", self._crop.law, flips

    def box_for(self, width: int, height: int, rng: Rng) -> CropBox:
        return self._flipped(width, height, rng, lambda: self._crop.box_for(width, height, rng))

    def scaled_box(self, width: int, height: int, first: Size, rng: Rng) -> CropBox:
        return self._flipped(width, height, rng, lambda: self._crop.scaled_box(width, height, first, rng))

    def result_size(self, width: int, height: int) -> tuple[int, int]:
        return self._crop.result_size(width, height)

    def fill(
        self,
        out: np.ndarray[Any, Any],
        images: Sequence[Source],
        seeds: Sequence[int],
        sizes: list[Size | None] | None = None,
    ) -> list[tuple[int, DecodeError]]:
        if self._values is None or self._values.table is None:
            return super().fill(out, images, seeds, sizes)
        table = self._values.table
        self._check_rows(out, len(images), table.dtype)
        pixels = np.empty(out.shape, np.uint8)
        failures = super().fill(pixels, images, seeds, sizes)
        _look_up(table, pixels, out)
        return failures

    def __call__(self, image: Any) -> Any:
        """Transform one image: the bytes of a file, an (H, W, 3) uint8 array, or a PIL image in RGB.

        A PIL image in another mode, or a tensor, goes through the plain transform. The random numbers come
        from torch's global generator, in torchvision's order.
        """
        if isinstance(image, torch.Tensor) or getattr(image, "mode", "RGB") != "RGB":
            return self._transform(image)
        return super().__call__(image)

    def choose_box(self, image: Any, rng: Rng, first: Size | None = None) -> tuple[Source, int, int, CropBox]:
        mode = getattr(image, "mode", "RGB")
        if mode != "RGB":  # torchvision's steps would make another number of channels of it
            raise DecodeError(f"a PIL image in mode {mode} cannot be a row of RGB: give image.convert('RGB')")
        return super().choose_box(image, rng, first)

    def as_sample(self, row: torch.Tensor) -> torch.Tensor:
        kind = torch.Tensor if self._values is None else self._values.kind
        return row if kind is torch.Tensor else row.as_subclass(kind)

    def draw(self, image: Any, rng: Rng, first: Size | None = None) -> tuple[Any, Size]:
        pixels, size = self._pixels(image, rng, first)
        value = self._value_of(pixels)
        for step in self._rest:
            value = step(value)
        return value, size

    def _value_of(self, pixels: Pixels) -> Any:
        """Return the PIL image or tensor that the next step gets."""
        if self._values is None:
            from PIL import Image

            return Image.fromarray(pixels)
        table = self._values.table
        out = pixels if table is None else np.empty(pixels.shape, table.dtype)
        if table is not None:
            _look_up(table, pixels[None], out[None])
        return self.as_sample(torch.from_numpy(out))

    def _flipped(self, width: int, height: int, rng: Rng, choose: Callable[[], CropBox]) -> CropBox:
        """Return the box, with the flips around it, in torchvision's order of draws."""
        mirrored, inverted = _draw(self._before, rng)
        (x0, y0, x1, y1), _, inner, _ = choose()
        flip, turn = _draw(self._after, rng)
        if mirrored:
            x0, x1 = width - x1, width - x0
        if inverted:
            y0, y1 = height - y1, height - y0
        if inner is not None:  # the black frame is flipped too
            top, left, rows, columns = inner
            top = self.height - top - rows if turn else top
            left = self.width - left - columns if flip else left
            inner = top, left, rows, columns
        return CropBox((x0, y0, x1, y1), mirrored != flip, inner, inverted != turn)

    def __repr__(self) -> str:
        kept = f"; kept as they are: {', '.join(self.kept)}" if self.kept else ""
        return f"fuse(in the kernel: {', '.join(self.fused)}{kept})"


def _draw(flips: list[Flip], rng: Rng) -> tuple[bool, bool]:
    """Draw (whether to flip horizontally, vertically)."""
    drawn = [False, False]
    for vertical, probability in flips:
        drawn[vertical] ^= rng.random() < probability
    return drawn[False], drawn[True]


def _look_up(table: np.ndarray[Any, Any], pixels: Pixels, out: np.ndarray[Any, Any]) -> None:
    """Write the values of (n, 3, H, W) pixels into `out`.

    Arithmetic of torch on whole batches takes a third of the time, but it depends on torchvision's version
    which one gives the same bits; both are below a tenth of the decoding.
    """
    for image, result in zip(pixels, out, strict=True):
        for channel in range(3):
            np.take(table[channel], image[channel], out=result[channel], mode="clip")
