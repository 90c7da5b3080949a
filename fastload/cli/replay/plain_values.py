"""A batch as tensors and plain containers, which torch.load reads with weights_only=True."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fastload.errors import ArgumentError

__all__ = ["plain"]


def plain(value: Any, where: str = "batch") -> Any:
    """The same values: tensors on the CPU, dicts, lists, texts and numbers. Other classes are not kept.

    Raises:
        ArgumentError: something in it is none of these; the message names the place.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()  # a slice would be saved with all of its memory
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, np.ndarray | np.generic) and np.asarray(value).dtype.kind in "biuf":
        return torch.from_numpy(np.array(value))
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item, f"{where}[{at}]") for at, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name), f"{where}.{name}") for name in names}
    raise ArgumentError(
        f"--tensors: {where} is a {type(value).__module__}.{type(value).__qualname__}, and the file takes "
        "tensors, arrays, texts and numbers only: leave --tensors out, and call loader.batch_at() in Python"
    )


def _key(key: Any, where: str) -> Any:
    if type(key) in (bool, int, float, str):
        return key
    raise ArgumentError(f"--tensors: {where} has the key {key!r}, and the file takes texts and numbers only")
