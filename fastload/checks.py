"""Checks of arguments that several rooms have: the same mistake has the same words everywhere."""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import re
from collections.abc import Collection
from typing import Any

from fastload.errors import ArgumentError


def whole_number(argument: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Return the value as an int, numpy's whole numbers too.

    Raises:
        ArgumentError: it is no whole number in this range.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        wanted = f">= {least}" if most is None else f"from {least} to {most:,}"
        raise ArgumentError(f"{argument} must be a whole number {wanted}, found {value!r}")
    return number


def whole_seed(seed: Any) -> int:
    """Return a seed as an int that torch's generators take.

    Raises:
        ArgumentError: it is none.
    """
    with contextlib.suppress(ArgumentError):
        return whole_number("seed", seed, -(1 << 63), (1 << 64) - 1)
    raise ArgumentError(
        f"seed must be a whole number from -2**63 to 2**64 - 1, as torch's seeds are, found {seed!r}: take a "
        "larger one modulo 2**64"
    )


def check_one_of(argument: str, value: Any, choices: Collection[str]) -> None:
    """Raise `ArgumentError` unless the value is one of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{argument} must be one of {tuple(choices)}, found {value!r}")


def check_function(argument: str, value: Any) -> None:
    """Raise `ArgumentError` unless the value is a function or None, and no class of such functions."""
    refuse_class(argument, value)
    if isinstance(value, list | tuple):
        raise ArgumentError(
            f"{argument} must be one function or None, found a {type(value).__name__} of {len(value)}: join "
            "them, as in torchvision.transforms.v2.Compose([...]); a Normalize is the batch_transform of the "
            "DataLoader"
        )
    if value is not None and not callable(value):
        such = ", as RandomResizedCrop(224) is" if argument == "transform" else ""
        raise ArgumentError(f"{argument} must be callable or None{such}; found {value!r}")


def as_index(index: Any) -> int:
    """Return the number that an index of a sample is.

    Raises:
        TypeError: it is no whole number.
    """
    try:
        return operator.index(index)  # two tensors of one number are not one key
    except TypeError:
        raise TypeError(
            f"an index must be a whole number, found {index!r}. For several samples take "
            "torch.utils.data.Subset(dataset, indices); dataset.find(keys) gives the indices of keys"
        ) from None


def check_index(index: Any, count: int, of: str) -> int:
    """Return the position, from 0 on, that an index of a sequence of `count` elements means.

    Args:
        of: the elements, in words.

    Raises:
        IndexError: there is no such element.
        TypeError: it is no whole number.
    """
    index = as_index(index)
    if not -count <= index < count:
        raise IndexError(f"index {index} is out of range for {count:,} {of}")
    return int(index % count)


def refuse_class(argument: str, value: Any) -> None:
    """Refuse a class where an instance is meant: a class with callable instances, or one of fastload's.

    Other classes, such as `float`, pass: their constructor is a function like any other.

    Raises:
        ArgumentError: it is such a class; the message names the call to write.
    """
    if not isinstance(value, type):
        return
    if any("__call__" in vars(base) or base.__module__.startswith("fastload.") for base in value.__mro__):
        raise ArgumentError(f"{argument} is a class: write {_call_of(value)}")


def _call_of(kind: type) -> str:
    """The call that makes an instance, as far as the signature tells."""
    empty = inspect.Parameter.empty
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    needed = [one.name for one in parameters if one.default is empty and one.kind in kinds]
    return f"{kind.__name__}({', '.join('224' if name == 'size' else name for name in needed)})"


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE | re.ASCII)


def parse_size(value: int | str, name: str = "size_limit") -> int:
    """Return bytes, from an int or from text such as "500GB" or "200MiB"."""
    size = None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        number = float(match[1]) * _UNITS[match[2].lower()] if match else math.inf
        size = int(number) if math.isfinite(number) else None
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    if size is None or size < 1:
        raise ArgumentError(
            f'{name}={value!r}; give bytes as a positive int, or text such as "500GB" or "200MiB"'
        )
    return size


def format_size(count: float) -> str:
    """Return `count` bytes for people: "110 KB", "1.2 GB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
