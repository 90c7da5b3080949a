"""Why samples cannot be collated, as text: torch's error names neither the samples nor a remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["describe_mismatch"]

_REMEDY = "pass collate_fn, or make all samples alike in the dataset's transform"


def describe_mismatch(samples: Sequence[Any], name: Callable[[int], str]) -> str:
    """One sentence on why `default_collate` refuses these samples; "" where the reason is unknown.

    Args:
        samples: of one batch.
        name: row of the batch -> the sample's name, such as "sample 3 'cat/3.jpg'".
    """
    for row, sample in enumerate(samples):
        image = _find_image(sample, "")
        if image is not None:
            return (
                f"{name(row)} is a PIL.Image{_at(image)}: give the dataset a transform, for example "
                "transform=fastload.RandomResizedCrop(224), or pass collate_fn"
            )
    for row, sample in enumerate(samples):
        found = _difference(samples[0], sample, "")
        if found is not None:
            where, first, other = found
            return f"{name(0)} {first}{_at(where)}, but {name(row)} {other}: {_REMEDY}"
    return ""


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def _items(value: Any) -> list[tuple[Any, Any]]:
    """(key, value) of the containers that `default_collate` enters."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def _find_image(value: Any, where: str) -> str | None:
    """The place of a PIL.Image in a sample: "", "[0]", "['image']"; None where there is none."""
    if any(kind.__module__ == "PIL.Image" for kind in type(value).__mro__):  # it may not be installed
        return where
    found = (_find_image(item, f"{where}[{key!r}]") for key, item in _items(value))
    return next((place for place in found if place is not None), None)


def _difference(a: Any, b: Any, where: str) -> tuple[str, str, str] | None:
    """(place, the first sample's form, the other's form) at the first place that cannot be stacked."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in a:
            if key not in b:
                return where, f"has {key!r}", "lacks it"
    else:
        first, other = _form(a), _form(b)
        if first != other:
            return where, first, other
    inside, before = dict(_items(b)), dict(_items(a))
    found = (_difference(item, inside[key], f"{where}[{key!r}]") for key, item in before.items())
    more = ((where, f"lacks {key!r}", "has it") for key in inside if key not in before)
    return next((difference for difference in found if difference is not None), next(more, None))


def _form(value: Any) -> str:
    """The form that two values must share to be stacked, in words."""
    if isinstance(value, torch.Tensor | np.ndarray) and getattr(value, "shape", None) is not None:
        return f"has shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"is a {type(value).__name__} of {len(value)}"
    return f"is of type {type(value).__name__}"
