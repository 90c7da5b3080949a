"""torch's `default_collate`: made to stack into memory of our own, and what its errors leave out.

torch's error names neither the samples that do not fit together nor a remedy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fastload.datasets.views import Allocate
from fastload.metrics.torch_private import collate_map, collate_tensors, is_collate_function


def describe_mismatch(samples: Sequence[Any], name: Callable[[int], str]) -> str:
    """Return one sentence on why `default_collate` refuses these samples; "" where the reason is unknown.

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
        difference = _difference(samples[0], sample, "")
        if difference is not None:
            where, first, other = difference
            return f"{name(0)} {first}{_at(where)}, but {name(row)} {other}: {_REMEDY}"
    return ""


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Return (key, value) of the containers that `default_collate` enters."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def _find_image(value: Any, where: str) -> str | None:
    """Return the place of a PIL.Image in a sample: "", "[0]", "['image']"; None where there is none."""
    if any(kind.__module__ == "PIL.Image" for kind in type(value).__mro__):  # it may not be installed
        return where
    images = (_find_image(item, f"{where}[{key!r}]") for key, item in _items(value))
    return next((place for place in images if place is not None), None)


def _difference(a: Any, b: Any, where: str) -> tuple[str, str, str] | None:
    """Return (place, the first sample's form, the other's form) at the first place that cannot be stacked."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in a:
            if key not in b:
                return where, f"has {key!r}", "lacks it"
    else:
        first, other = _form(a), _form(b)
        if first != other:
            return where, first, other
    inside, before = dict(_items(b)), dict(_items(a))
    differences = (_difference(item, inside[key], f"{where}[{key!r}]") for key, item in before.items())
    more = ((where, f"lacks {key!r}", "has it") for key in inside if key not in before)
    return next((difference for difference in differences if difference is not None), next(more, None))


def _form(value: Any) -> str:
    """Return the form that two values must share to be stacked, in words."""
    if isinstance(value, torch.Tensor | np.ndarray) and getattr(value, "shape", None) is not None:
        return f"has shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"is a {type(value).__name__} of {len(value)}"
    return f"is of type {type(value).__name__}"


_REMEDY = "pass collate_fn, or make all samples alike in the dataset's transform"


# What a dataset of fastload's writes into a batch without `default_collate`.
_WRITTEN = (torch.Tensor, np.ndarray, np.bool_, np.int64, np.float32, bool, int, float, str, bytes)


def collates_as_torch() -> bool:
    """Return whether nobody has changed what `default_collate` makes of values that fastload writes itself.

    Its map is torch's documented extension point.
    """
    return all(_is_torchs(_function_for(kind)) for kind in _WRITTEN)


def _function_for(kind: type) -> Any:
    """Return what `default_collate` calls for values of this type, as it finds that."""
    fitting = (function for kinds, function in collate_map.items() if issubclass(kind, kinds))
    return collate_map.get(kind) or next(fitting, None)


def _is_torchs(function: Any) -> bool:
    return isinstance(function, _StackInto) or is_collate_function(function)


def collate_into(allocate: Allocate) -> None:
    """Make torch's `default_collate`, in this process, stack tensors into memory from `allocate`.

    A `collate_fn` that calls `default_collate` gains too. An entry that somebody else has put there stays.
    """
    if collate_map[torch.Tensor] is collate_tensors:
        collate_map[torch.Tensor] = _StackInto(allocate)


class Collating(threading.local):
    """Entered by a thread while it makes a batch of samples.

    What a dataset stacks by `default_collate` lies elsewhere: it is often dropped at once, and the memory of
    a batch is not free again before the batch is sent.
    """

    now = False

    def __enter__(self) -> None:
        self.now = True

    def __exit__(self, *_: object) -> None:
        self.now = False


collating = Collating()


class _StackInto:
    """Stacks tensors as torch does; those of a batch into memory from `allocate`."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate

    def __call__(self, batch: Any, *, collate_fn_map: Any = None) -> Any:
        first = batch[0]
        plain = not first.is_nested and all(
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and tensor.shape == first.shape
            and tensor.dtype is first.dtype
            and not tensor.requires_grad
            for tensor in batch
        )
        if not plain or not collating.now:
            return collate_tensors(batch, collate_fn_map=collate_fn_map)
        return torch.stack(batch, 0, out=self._allocate((len(batch), *first.shape), first.dtype))


def tell_mismatch(error: Exception, samples: Any, name: Callable[[int], str]) -> None:
    """Add to `error` which samples cannot be collated, and why."""
    with contextlib.suppress(Exception):  # of the user's classes: torch's own error must come through
        tell_sample(error, describe_mismatch(samples, name))


def tell_sample(error: Exception, sample: str) -> None:
    """Attach the sample's name to an error whose text is not ours to change."""
    if sample:
        error.__dict__.setdefault("fastload_sample", sample)


def tell_more(error: Exception, text: str) -> None:
    """Add a text to the sample's name, see `tell_sample`."""
    error.__dict__["fastload_sample"] = error.__dict__.get("fastload_sample", "") + text


def note_sample(error: Exception) -> None:
    """Show the name of the sample below the text of an error that does not leave this process."""
    sample = error.__dict__.pop("fastload_sample", "")
    if not sample:
        return
    # One instance may be raised again and again: only the last note stays.
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("(sample ")]
    error.__dict__["__notes__"] = [*notes, f"({sample})"]  # a frozen dataclass takes no attribute
