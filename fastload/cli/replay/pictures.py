"""The images of a batch as arrays to look at."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastload.errors import ArgumentError
from fastload.gpu.tree import tree_leaves

__all__ = ["Picture", "pictures_of"]

Picture = np.ndarray[Any, np.dtype[np.uint8]]  # (H, W, 3)

_CHANNELS = (1, 3)


def pictures_of(batch: Any, rows: int) -> tuple[list[Picture], bool]:
    """(one picture for each row, whether values were scaled so that they can be seen).

    The images are the first tensor of the batch that has `rows` images with one or three channels, first or
    last. Floats are taken as they are where all are from 0 to 1; else each image is scaled from its smallest
    to its largest value.

    Raises:
        ArgumentError: the batch has no images.
    """
    leaves = list(tree_leaves(batch))
    images = next((leaf for leaf in leaves if _is_images(leaf, rows)), None)
    if images is None:
        found = ", ".join(f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" for leaf in leaves)
        raise ArgumentError(
            f"the batch has no images for --html and --png; its tensors are: {found or 'none'}. Leave these "
            "options out: the table and --tensors take any batch"
        )
    values = images.detach().cpu()
    if values.shape[1] in _CHANNELS:
        values = values.movedim(1, -1)
    scaled = values.dtype != torch.uint8 and not bool(((values >= 0) & (values <= 1)).all())
    return [_picture(one, scaled) for one in values], scaled


def _is_images(leaf: torch.Tensor, rows: int) -> bool:
    fits = leaf.ndim == 4 and leaf.shape[0] == rows and min(leaf.shape) > 0
    return fits and bool({leaf.shape[1], leaf.shape[-1]} & set(_CHANNELS)) and not leaf.is_complex()


def _picture(values: torch.Tensor, scaled: bool) -> Picture:
    if values.dtype != torch.uint8:
        values = values.double().nan_to_num()
        if scaled:
            low, high = values.min(), values.max()
            values = (values - low) / (high - low).clamp(min=1e-12)
        values = (values * 255).round().clamp(0, 255).to(torch.uint8)
    picture: Picture = values.expand(-1, -1, 3).contiguous().numpy()
    return picture
