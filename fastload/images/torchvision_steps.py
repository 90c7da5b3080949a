"""The steps of a torchvision transform, v1 or v2, and which of them the kernel can do.

torchvision is not imported: a step is known by the module and the name of its class. A subclass, or a module
with hooks or a `forward` of its own, may do anything, so it is none of these steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import ArgumentError, DecodeError
from fastload.images.arguments import check_flip
from fastload.images.crop import Crop, CropBox
from fastload.images.decode import resized_size
from fastload.images.rng import Rng
from fastload.images.transforms import CenterCrop, RandomResizedCrop

_FLIPS = {"RandomHorizontalFlip": False, "RandomVerticalFlip": True}
_CROPS = ("RandomResizedCrop", "Resize", "CenterCrop")
# What changes each value by itself, in the same way wherever it stands.
_VALUES = ("ToTensor", "PILToTensor", "ToImage", "ToPureTensor", "ToDtype", "ConvertImageDtype", "Normalize")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

Step = Callable[[Any], Any]


class Flip(NamedTuple):
    vertical: bool
    probability: float


class Values(NamedTuple):
    """What becomes of the values of uint8 RGB pixels.

    Attributes:
        kind: the class of the resulting tensor: torch's, or torchvision's `tv_tensors.Image`.
        table: (3, 256), the result for each channel and value; None where they stay as they are.
    """

    kind: type[torch.Tensor]
    table: NDArray[Any] | None


class Plan(NamedTuple):
    """What the kernel does of a transform.

    Attributes:
        crop: chooses the box, without a flip.
        before, after: the flips before and after the crop.
        values: None where the result is a PIL image.
        fused: the steps that the kernel does.
        kept: the steps that run after it as they are.
    """

    crop: Crop
    before: list[Flip]
    after: list[Flip]
    values: Values | None
    fused: list[Step]
    kept: list[Step]


def steps_of(transform: Any) -> list[Step]:
    """Return the steps of a Compose or Sequential, nested or not; of anything else the thing itself."""
    if _kind(transform) == "Compose":
        inner = transform.transforms
    elif type(transform) is torch.nn.Sequential and not _hooked(transform):
        inner = transform
    else:
        return [transform]
    return [step for part in inner for step in steps_of(part)]


def plan(steps: list[Step]) -> Plan:
    """Find the longest beginning of these steps that the kernel can do, with the same distribution.

    Raises:
        ArgumentError: there is no crop or resize among these; the message says why.
    """
    crop: Crop | None = None
    before: list[Flip] = []
    after: list[Flip] = []
    value_steps: list[Step] = []
    values: Values | None = None
    why = "it has no crop and no resize"
    done = 0
    while done < len(steps):
        step, kind = steps[done], _kind(steps[done])
        try:
            if kind in _FLIPS:
                (before if crop is None else after).append(_flip(step, _FLIPS[kind]))
            elif kind in _VALUES:
                found = _values_of([*value_steps, step])
                if crop is None and found.table is not None:
                    raise ArgumentError("it changes the values before they are resized")
                values = found
                value_steps.append(step)
            elif kind in _CROPS and crop is None:
                crop, used = _crop(steps[done : done + 2], values is not None)
                done += used - 1
            else:
                raise ArgumentError("it is none of the steps that can be fused")
        except ArgumentError as error:
            why = f"its step {step!r} comes first, and {error.message}" if crop is None else ""
            break
        done += 1
    if crop is None:
        raise ArgumentError(f"fuse() can do no part of this transform in the kernel: {why}. Use it as it is")
    return Plan(crop, before, after, values, steps[:done], steps[done:])


def _kind(step: Any) -> str:
    """Return the name of torchvision's class, without module; "" for everything else."""
    kind = type(step)
    known = kind.__module__.startswith("torchvision.transforms") and not _hooked(step)
    return kind.__qualname__ if known else ""


def _hooked(step: Any) -> bool:
    return "forward" in getattr(step, "__dict__", {}) or any(getattr(step, name, None) for name in _HOOKS)


def _flip(step: Any, vertical: bool) -> Flip:
    return Flip(vertical, check_flip(step.p))


def _values_of(steps: list[Step]) -> Values:
    """Return the effect of such steps, by having them change an image that has all values in each channel.

    So the results are torchvision's own, to the bit, in every version of it.
    """
    from PIL import Image

    pixels = np.arange(256, dtype=np.uint8)[None, :, None].repeat(3, axis=2)
    value: Any = Image.fromarray(pixels)
    try:
        for step in steps:
            value = step(value)
        kind, tensor = type(value), value.as_subclass(torch.Tensor)
        table = tensor.numpy().reshape(3, 256).copy()
    except Exception as error:  # of torchvision, for example ToDtype of a PIL image
        raise ArgumentError(f"it fails on an RGB image: {type(error).__name__}: {error}") from error
    same = table.dtype == np.uint8 and (table == np.arange(256)).all()
    return Values(kind, None if same else table)


def _crop(steps: list[Any], of_tensors: bool) -> tuple[Crop, int]:
    """Return the crop that the first of two steps is, or both together; and how many it took."""
    step, kind = steps[0], _kind(steps[0])
    options: dict[str, Any] = {"channels_last": False}
    if kind == "CenterCrop":
        return CenterCrop(step.size, **options), 1
    interpolation = getattr(step.interpolation, "value", step.interpolation)
    if interpolation not in ("bilinear", 2):
        raise ArgumentError(f"its interpolation is {interpolation!r}: only 'bilinear' can be fused")
    if of_tensors and step.antialias is not True:
        raise ArgumentError("it resizes tensors without antialias=True")
    if kind == "RandomResizedCrop":
        return RandomResizedCrop(step.size, step.scale, step.ratio, **options), 1
    if step.max_size is not None or step.size is None:
        raise ArgumentError(f"it has max_size={step.max_size!r}")
    sides = [step.size] if isinstance(step.size, int) else list(step.size)
    resize = sides[0] if len(sides) == 1 else tuple(sides)
    if len(steps) > 1 and _kind(steps[1]) == "CenterCrop":
        return CenterCrop(steps[1].size, resize=resize, **options), 2
    if isinstance(resize, int):
        return _ShorterSide(resize), 1
    return CenterCrop(resize, resize=resize, **options), 1


class _ShorterSide(Crop):
    """torchvision's Resize(int): all of the image, so that results differ in size."""

    clamp = True
    fills_rows = False
    draws = False

    def __init__(self, size: int) -> None:
        super().__init__(size, channels_last=False, strict=True)

    @property
    def law(self) -> tuple[Any, ...]:
        return "Resize", self.height

    def box_for(self, width: int, height: int, rng: Rng) -> CropBox:
        return CropBox((0, 0, width, height))

    def result_size(self, width: int, height: int) -> tuple[int, int]:
        width, height = resized_size(width, height, self.height)
        if width * height > self._max_pixels:
            raise DecodeError(
                f"{width} x {height} resized pixels are more than max_pixels={self._max_pixels}"
            )
        return height, width
