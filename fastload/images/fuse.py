"""fuse: a transform of torchvision whose first steps run in the kernel.

Compose([RandomResizedCrop, RandomHorizontalFlip, ToTensor, Normalize, RandomErasing])
         └────────── one pass over the JPEG ────┘ └── one table ──┘  └ as it is

torchvision is not imported: a step is known by the module and the name of its class. A subclass, or a module
with hooks or a `forward` of its own, may do anything, so it is none of the steps that the kernel can do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import ArgumentError, DecodeError
from fastload.images.crop import Crop, CropBox, Size
from fastload.images.decode import resized_size
from fastload.images.kernel import Pixels, Source
from fastload.images.rng import Rng
from fastload.images.transforms import CenterCrop, RandomResizedCrop, check_flip

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
        step: Any = steps[done]
        kind = _kind(step)
        try:
            if kind in _FLIPS:
                (before if crop is None else after).append(Flip(_FLIPS[kind], check_flip(step.p)))
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

    _clamp = True
    _fills_rows = False
    _draws = False

    def __init__(self, size: int) -> None:
        super().__init__(size, channels_last=False, strict=True)

    @property
    def _law(self) -> tuple[Any, ...]:
        return "Resize", self.height

    def _box_for(self, width: int, height: int, rng: Rng) -> CropBox:
        return CropBox((0, 0, width, height))

    def _result_size(self, width: int, height: int) -> tuple[int, int]:
        width, height = resized_size(width, height, self.height)
        if width * height > self._max_pixels:
            raise DecodeError(
                f"{width} x {height} resized pixels are more than max_pixels={self._max_pixels}: "
                "crop the image before"
            )
        return height, width


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

    The kernel does not follow later changes of its steps: the next sample is an error. Call fuse() again, or
    give both in a `ByEpoch`.

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
        self._fused = tuple(map(repr, planned.fused))
        self._states, self._rest = list(map(_state_of, planned.fused)), planned.kept
        self._clamp = crop._clamp
        self._fills_rows = crop._fills_rows and self._values is not None and not self._rest
        self._draws = crop._draws or bool(self._before or self._after)

    @property
    def fused(self) -> tuple[str, ...]:
        return self._fused

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(map(repr, self._rest))

    @property
    def dtype(self) -> torch.dtype:
        table = None if self._values is None else self._values.table
        return torch.uint8 if table is None else torch.from_numpy(table).dtype

    @property
    def _runs_on_device(self) -> bool:
        return False

    @property
    def _law(self) -> tuple[Any, ...]:
        flips = self._before, self._after
        if flips == ([], []):
            return self._crop._law
        last = self._after[-1] if self._after else Flip(True, 0)
        if flips == ([], [last]) and not last.vertical and isinstance(self._crop, RandomResizedCrop):
            return *self._crop._law[:-1], last.probability
        return "fused", self._crop._law, flips

    def _box_for(self, width: int, height: int, rng: Rng) -> CropBox:
        return self._flipped(width, height, rng, lambda: self._crop._box_for(width, height, rng))

    def _scaled_box(self, width: int, height: int, first: Size, rng: Rng) -> CropBox:
        return self._flipped(width, height, rng, lambda: self._crop._scaled_box(width, height, first, rng))

    def _result_size(self, width: int, height: int) -> tuple[int, int]:
        return self._crop._result_size(width, height)

    def fill(
        self,
        out: np.ndarray[Any, Any],
        images: Sequence[Source],
        seeds: Sequence[int],
        sizes: list[Size | None] | None = None,
    ) -> list[tuple[int, DecodeError]]:
        self._check_steps()
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

    def _choose_box(
        self, image: Any, rng: Rng, first: Size | None = None
    ) -> tuple[Source, int, int, CropBox]:
        mode = getattr(image, "mode", "RGB")
        if mode != "RGB":  # torchvision's steps would make another number of channels of it
            raise DecodeError(f"a PIL image in mode {mode} cannot be a row of RGB: give image.convert('RGB')")
        return super()._choose_box(image, rng, first)

    def _as_sample(self, row: torch.Tensor) -> torch.Tensor:
        kind = torch.Tensor if self._values is None else self._values.kind
        return row if kind is torch.Tensor else row.as_subclass(kind)

    def _draw(self, image: Any, rng: Rng, first: Size | None = None) -> tuple[Any, Size]:
        self._check_steps()
        pixels, size = self._pixels(image, rng, first)
        value = self._value_of(pixels)
        for step in self._rest:
            value = step(value)
        return value, size

    def _check_steps(self) -> None:
        """Raise `ArgumentError` where the transform has other steps than those that were fused.

        To follow was rejected: the loader may have begun batches of the former shape.
        """
        steps, count = steps_of(self._transform), len(self.fused)
        if list(map(_state_of, steps[:count])) != self._states or steps[count:] != self._rest:
            raise ArgumentError(
                f"transform= was changed after fuse(), which does not follow: the fused steps are "
                f"{', '.join(self.fused)}, and those of the transform {', '.join(map(repr, steps))}. "
                "Set dataset.transform = fuse(...) of it, or give ByEpoch({0: fuse(first), 18: fuse(second)})"
            )

    def _value_of(self, pixels: Pixels) -> Any:
        """Return the PIL image or tensor that the next step gets."""
        if self._values is None:
            from PIL import Image

            return Image.fromarray(pixels)
        table = self._values.table
        out = pixels if table is None else np.empty(pixels.shape, table.dtype)
        if table is not None:
            _look_up(table, pixels[None], out[None])
        return self._as_sample(torch.from_numpy(out))

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


def _state_of(step: Step) -> str:
    """Return all that the result of a step of torchvision depends on, as text."""
    values = getattr(step, "__dict__", {}).items()
    used = {name: _plain(value) for name, value in values if name != "training" and not name.startswith("_")}
    return f"{_kind(step)} {used}"


def _plain(value: Any) -> Any:
    """Return arrays and tensors as lists: their own text has few digits, and depends on print options."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


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
