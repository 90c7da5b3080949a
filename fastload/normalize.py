"""Normalize: uint8 images to floats, a whole batch at once, on the device that the batch is on.

Workers ship uint8, a quarter of the bytes of float32. Per sample on the CPU this step would cost more than
the copy to the device does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fastload.errors import ArgumentError

__all__ = ["Normalize"]


class Normalize:
    """`(image / 255 - mean) / std` per channel, of a batch of uint8 images or of one image.

    Args:
        mean, std: one number per channel, in units of 0 to 1, as for torchvision's Normalize.
        dtype: of the result: float32, float16, bfloat16 or float64. The arithmetic is in float32 at least.
        channels_last: the images have their channels last, (N, H, W, C); else (N, C, H, W). The result always
            has the shape (N, C, H, W); that of channels-last images has torch's channels_last strides, and
            the GPU runs as it does after `.to(memory_format=torch.channels_last)`.
        memory_format: of a batch's result, for example torch.channels_last; written so in the same pass.
            None: that of the images.

    Raises:
        ArgumentError: not as many means as standard deviations, one that is not finite or not above 0; when
            called: a tensor that is not uint8, or of other channels.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> None:
        self.mean, self.std = _numbers("mean", mean), _numbers("std", std)
        if len(self.mean) != len(self.std):
            raise ArgumentError(f"mean has {len(self.mean)} channels, std has {len(self.std)}")
        if min(self.std) <= 0:
            raise ArgumentError(f"every std must be above 0, found {self.std}")
        if not dtype.is_floating_point:
            raise ArgumentError(f"dtype must be a floating-point type, found {dtype}")
        self.dtype = dtype
        if not (memory_format is None or isinstance(memory_format, torch.memory_format)):
            raise ArgumentError(
                f"memory_format must be None or a torch.memory_format, found {memory_format!r}"
            )
        self.channels_last = channels_last
        self.memory_format = memory_format
        self._constants: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Images of shape (N, C, H, W) or (C, H, W), or with C last; uint8, on any device."""
        axis = -1 if self.channels_last else -3
        if images.dtype != torch.uint8 or images.ndim not in (3, 4) or images.shape[axis] != len(self.mean):
            raise ArgumentError(
                f"Normalize takes uint8 images with {len(self.mean)} channels, channels "
                f"{'last' if self.channels_last else 'first'}; found {images.dtype} {tuple(images.shape)}"
            )
        if self.channels_last:
            images = images.movedim(-1, -3)
        scale, shift = self._on(images.device)
        # One pass, which on a GPU reads bytes and writes the result: converting before and after would go
        # through memory three times, at four bytes a value.
        result = torch.empty_like(images, dtype=self.dtype, memory_format=self._format(images))
        return torch.addcmul(shift, images, scale, out=result)

    def _format(self, images: torch.Tensor) -> torch.memory_format:
        wanted = self.memory_format if images.ndim == 4 else None
        return torch.preserve_format if wanted is None else wanted

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, shift), each (C, 1, 1), of x / 255 / std - mean / std; kept, for a copy to a GPU waits."""
        if device not in self._constants:
            scale = [1 / 255 / std for std in self.std]
            shift = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]
            wide = torch.promote_types(self.dtype, torch.float32)
            pair = torch.tensor([scale, shift], dtype=wide, device=device)[:, :, None, None]
            self._constants[device] = (pair[0], pair[1])
        return self._constants[device]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_constants": {}}

    def __repr__(self) -> str:
        shown = "" if self.dtype is torch.float32 else f", dtype={self.dtype}"
        shown += ", channels_last=True" if self.channels_last else ""
        shown += f", memory_format={self.memory_format}" if self.memory_format is not None else ""
        return f"Normalize({self.mean}, {self.std}{shown})"


def _numbers(name: str, values: Sequence[float]) -> tuple[float, ...]:
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        numbers = ()
    if not numbers or not all(map(math.isfinite, numbers)):
        raise ArgumentError(f"{name} must be one finite number per channel, found {values!r}")
    return numbers
