"""What is in a sample, in a form that can be compared, counted and shown.

A sample may be any Python object: tensors of another dtype are unequal, NaN equals NaN, and objects without
an `==` of their own are equal if their attributes are. `==` itself was rejected: it has no single answer for
tensors, and compares most objects by identity, so that no copy from a worker would be equal.
"""

from __future__ import annotations

import pickle
import reprlib
import sys
import types
from collections.abc import Hashable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

# (where in the sample, what is there) of each part, in the order of the sample.
Contents = tuple[tuple[str, Hashable], ...]

_PLAIN = (type(None), bool, int, str, bytes, complex, Enum, PurePath, torch.dtype, torch.device, torch.Size)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)


class _Values(NamedTuple):
    """A tensor, array or image."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __str__(self) -> str:
        return f"{self.dtype} {self.kind} of shape {self.shape}"

    def first_unlike(self, other: _Values) -> int:
        """The first element that is not the same in `other`, which has the same dtype and shape."""
        mine, theirs = (np.frombuffer(one.data, np.uint8) for one in (self, other))
        size = len(self.data) // max(1, int(np.prod(self.shape)))
        return int(np.flatnonzero(mine != theirs)[0]) // size

    def element(self, number: int) -> Any:
        """One element; its bytes where numpy lacks the dtype."""
        size = len(self.data) // max(1, int(np.prod(self.shape)))
        part = self.data[number * size : (number + 1) * size]
        try:
            return np.frombuffer(part, self.dtype)[0].item()
        except TypeError:
            return part


class _Plain(NamedTuple):
    """A value that Python compares."""

    kind: str
    value: Hashable

    def __str__(self) -> str:
        return reprlib.repr(self.value) if self.kind != "object" else str(self.value)


class _Holder(NamedTuple):
    """What holds other parts."""

    kind: str
    size: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.size}"


class Difference(NamedTuple):
    """The first difference of two samples, in words.

    Attributes:
        where: the part, as in "['image'][0, 3]"; "" for the sample itself.
        one, other: what is there.
    """

    where: str
    one: str
    other: str


def contents(sample: Any) -> Contents:
    """All parts of a sample; equal for equal samples, and hashable."""
    found: list[tuple[str, Hashable]] = []
    _add(sample, "", found, ())
    return tuple(found)


def difference(one: Contents, other: Contents) -> Difference | None:
    """The first difference; None between equal samples."""
    if one == other:
        return None
    mine, theirs = dict(one), dict(other)
    for where in {**mine, **theirs}:
        left, right = mine.get(where), theirs.get(where)
        if left == right:
            continue
        if isinstance(left, _Values) and isinstance(right, _Values) and left[:3] == right[:3]:
            at = left.first_unlike(right)
            place = [int(part) for part in np.unravel_index(at, left.shape)] if left.shape else ""
            return Difference(f"{where}{place}", str(left.element(at)), str(right.element(at)))
        return Difference(
            where, *("missing" if part is None else _told(part, left, right) for part in (left, right))
        )
    return Difference("", "in another order", "the same parts")


def _told(part: Any, left: Any, right: Any) -> str:
    """A part in words, with its type where the types are the difference."""
    by_type = isinstance(left, _Plain) and isinstance(right, _Plain) and left.kind != right.kind
    return f"{part.kind} {part}" if by_type else str(part)


def _add(value: Any, where: str, found: list[tuple[str, Hashable]], outer: tuple[int, ...]) -> None:
    kind = type(value).__name__
    if id(value) in outer:
        found.append((where, _Plain("object", "itself")))
    elif isinstance(value, _PLAIN):
        found.append((where, _Plain(kind, value)))
    elif isinstance(value, float):
        found.append((where, _Plain(kind, value if value == value else "nan")))  # NaN is not equal to NaN
    elif isinstance(value, _NAMED):
        found.append((where, _Plain(kind, f"{value.__module__}.{value.__qualname__}")))
    elif (values := _values(value, kind)) is not None:
        found.append((where, values))
    else:
        parts = _parts(value)
        if parts is None:
            found.append((where, _Plain("object", _by_pickle(value))))
            return
        found.append((where, _Holder(kind, len(parts))))
        for name, part in parts:
            _add(part, f"{where}{name}", found, (*outer, id(value)))


def _values(value: Any, kind: str) -> _Values | None:
    """A tensor, array or image; None for all else."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes()
        return _Values(
            "tensor" if kind == "Tensor" else kind,
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            data,
        )
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        shown = "array" if kind == "ndarray" else "numpy scalar"
        return _Values(shown, str(value.dtype), value.shape, value.tobytes())
    image = sys.modules.get("PIL.Image")
    if image is not None and isinstance(value, image.Image):
        return _Values(f"{value.mode} image", "uint8", np.asarray(value).shape, value.tobytes())
    return None


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """(where, part) of what holds other things; None for what does not."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in sorted(value.items(), key=lambda item: repr(item[0]))]
    if isinstance(value, list | tuple):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    if isinstance(value, np.ndarray):
        return [(f"[{number}]", part) for number, part in enumerate(value.tolist())]
    if isinstance(value, set | frozenset):
        return [(f" element {number}", part) for number, part in enumerate(sorted(value, key=repr))]
    names = list(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [(f".{name}", getattr(value, name)) for name in names if hasattr(value, name)] or None


def _by_pickle(value: Any) -> Hashable:
    try:
        return pickle.dumps(value)
    except Exception:  # it has no state that could be compared
        return type(value).__qualname__
