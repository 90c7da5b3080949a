"""Normalize: uint8 images to floats, a whole batch at once, on the batch's device.

Workers send uint8, a quarter of the bytes of float32. Done per sample on the CPU, this step would cost more
than the copy to the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastload.errors import ArgumentError, shorten_errors
from fastload.gpu.tree import tree_leaves, tree_map


class Normalize:
    """`(image / 255 - mean) / std` per channel, of the uint8 images in a batch: a `batch_transform`.

    Example::

        from fastload import DataLoader, ImageFolder, Normalize, RandomResizedCrop

        normalize = Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224))
        loader = DataLoader(dataset, 256, shuffle=True, num_workers=8, batch_transform=normalize)
        next(iter(loader))[0].dtype  # torch.float32

    `DataLoader(dataset, batch_transform=Normalize(mean, std))` takes every kind of batch. In a list, tuple,
    dict or dataclass, nested or not, the images are the one uint8 tensor of 4 dimensions that has as many
    channels as there are means. Labels, masks of one channel and all other values stay as they are. A batch
    without such a tensor, or with several (an image and a colour mask, two views), is an error. To choose one
    of several, pass `batch_transform=lambda batch: (normalize(batch[0]), batch[1])`.

    It also takes an image tensor directly: 4 dimensions for a batch, 3 for one image. So it can follow
    RandomResizedCrop or CenterCrop in torchvision's Compose.

    Args:
        mean, std: one number per channel, in units of 0 to 1, as for torchvision's Normalize.
        dtype: of the result: float32, float16, bfloat16 or float64. The arithmetic is in float32 at least.
        channels_last: the images have their channels last, (N, H, W, C); else (N, C, H, W). The result always
            has the shape (N, C, H, W); that of channels-last images has torch's channels_last strides, and
            the GPU runs as it does after `.to(memory_format=torch.channels_last)`.
        memory_format: of a batch's result, for example torch.channels_last; written so in the same pass.
            None: that of the images.

    Raises:
        ArgumentError: the numbers of means and standard deviations differ, a value is not finite, they are of
            the range 0 to 255, or a standard deviation is not above 0. When called: a tensor is not uint8 or
            has another number of channels; a batch has no images, or several tensors that may be images; or
            the input is neither a tensor nor a batch, such as a PIL image.
    """

    @shorten_errors
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
        if max(self.mean) > 1 and max(self.std) > 1:
            raise ArgumentError(
                f"mean and std are of values from 0 to 1: divide both by 255, found {self.mean}, {self.std}"
            )
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

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its images normalised: (N, C, H, W) floats in place of uint8, on the same
        device.

        Args:
            batch: uint8 images of shape (N, C, H, W) or (C, H, W), or with C last, on any device; or what
                holds such images, (N, C, H, W) only, see above. It is not changed.
        """
        if isinstance(batch, torch.Tensor):
            if batch.ndim not in (3, 4) or not self._fits(batch):
                raise ArgumentError(f"Normalize takes {self._wanted()}; found {_describe(batch)}")
            return self._normalized(batch)
        images: list[torch.Tensor] = []

        def find(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.ndim == 4 and self._fits(leaf):
                images.append(leaf)
            return leaf

        tree_map(batch, find)
        if len(images) != 1:
            raise ArgumentError(self._why_not(batch, images))
        return tree_map(batch, lambda leaf: self._normalized(leaf) if leaf is images[0] else leaf)

    def _fits(self, images: torch.Tensor) -> bool:
        axis = -1 if self.channels_last else -3
        return images.dtype == torch.uint8 and images.shape[axis] == len(self.mean)

    def _wanted(self) -> str:
        order = "last" if self.channels_last else "first"
        return f"uint8 images with {len(self.mean)} channels, channels {order}"

    def _why_not(self, batch: Any, images: list[torch.Tensor]) -> str:
        """Say why the images of a batch cannot be told."""
        which = "choose one with batch_transform=lambda batch: (normalize(batch[0]), batch[1])"
        if images:
            shapes = ", ".join(str(tuple(image.shape)) for image in images)
            return f"this batch has {len(images)} tensors of {self._wanted()}, {shapes}: {which}"
        others = ", ".join(map(_describe, tree_leaves(batch)))
        if others or (isinstance(batch, Mapping | Sequence) and not isinstance(batch, str | bytes)):
            return (
                f"Normalize found no batch of {self._wanted()}, in this {type(batch).__name__}. Its tensors "
                f"are: {others or 'none'}. Make uint8 tensors by a transform such as RandomResizedCrop(224)"
            )
        return (
            f"Normalize takes batches of {self._wanted()}, not a {type(batch).__module__}."
            f"{type(batch).__qualname__}. It is not a transform for a dataset: give the dataset transform="
            "RandomResizedCrop(224), and the loader batch_transform=Normalize(mean, std)"
        )

    def _normalized(self, images: torch.Tensor) -> torch.Tensor:
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
        """Return (scale, shift), each (C, 1, 1), of x / 255 / std - mean / std; kept, for a copy to a GPU
        waits."""
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


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _numbers(name: str, values: Sequence[float]) -> tuple[float, ...]:
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        numbers = ()
    if not numbers or not all(map(math.isfinite, numbers)):
        raise ArgumentError(f"{name} must be one finite number per channel, found {values!r}")
    return numbers
