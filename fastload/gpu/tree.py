"""Nested batches: dicts, lists, tuples, named tuples and dataclasses of tensors and other values.

`torch.utils._pytree` was rejected: it is private, copies containers in which nothing changed, and has no
dataclasses, no subclasses of containers, no objects with a method `to`, and no memory of shared leaves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch


def tree_map(batch: Any, move: Callable[[Any], Any], of: type[Any] | None = None) -> Any:
    """Return the same structure with `move(leaf)` for every tensor, and every object that has a method `to`.

    Enters the containers that torch's `pin_memory` enters, and dataclasses. Other leaves stay the same
    objects, and so do containers in which nothing changed. A leaf that occurs twice is moved once.

    Args:
        of: the class of the objects that are moved, in place of these.
    """
    return _Map(move, _has_to if of is None else lambda value: isinstance(value, of)).of(batch)


def tree_leaves(batch: Any) -> Iterator[torch.Tensor]:
    """Return all dense tensors of a batch, with those in objects that have `to`, and the parts of others."""
    return _leaves(batch, set())


def _has_to(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or callable(getattr(value, "to", None))


class _Map:
    """One walk of `tree_map`, which remembers what it has moved."""

    def __init__(self, move: Callable[[Any], Any], is_leaf: Callable[[Any], bool]) -> None:
        self._move = move
        self._is_leaf = is_leaf
        self._known: dict[
            int, tuple[Any, Any]
        ] = {}  # id -> the value, so that its id stays valid; the result

    def of(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)][1]
        if isinstance(value, str | bytes | int | float | type) or value is None:
            return value
        if self._is_leaf(value):
            result = self._move(value)
        elif isinstance(value, Mapping):
            items = {key: self.of(item) for key, item in value.items()}
            result = value if all(items[key] is value[key] for key in items) else _mapping(value, items)
        elif isinstance(value, Sequence):
            moved = [self.of(item) for item in value]
            unchanged = all(new is old for new, old in zip(moved, value, strict=True))
            result = value if unchanged else _sequence(value, moved)
        elif dataclasses.is_dataclass(value):
            result = self._dataclass(value)
        else:
            return value
        self._known[id(value)] = (value, result)
        return result

    def _dataclass(self, value: Any) -> Any:
        clone = value
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            moved = self.of(item)
            if moved is not item:
                clone = copy.copy(value) if clone is value else clone
                object.__setattr__(clone, field.name, moved)  # frozen ones too
        return clone


def _mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Put `items` into a copy of a mapping, which keeps its other attributes, where that works."""
    try:
        if isinstance(value, MutableMapping):
            clone = copy.copy(value)
            clone.update(items)
            return clone
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _sequence(value: Sequence[Any], items: list[Any]) -> Any:
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    try:
        if isinstance(value, MutableSequence):
            clone = copy.copy(value)
            for position, item in enumerate(items):
                clone[position] = item
            return clone
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _leaves(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen or isinstance(value, str | bytes | int | float | type) or value is None:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield from parts_of(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item, seen)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _leaves(item, seen)
    elif dataclasses.is_dataclass(value) or callable(getattr(value, "to", None)):
        # Other leaves are not entered: one may refer to its dataset, and so to the whole process.
        for item in _attributes(value):
            yield from _leaves(item, seen)


def _attributes(value: Any) -> list[Any]:
    """Return what the object holds: in its dict, and in the slots of its classes."""
    slots = [getattr(base, "__slots__", ()) for base in type(value).__mro__]
    names = [name for found in slots for name in ((found,) if isinstance(found, str) else found)]
    held = [getattr(value, name, None) for name in names if name not in ("__dict__", "__weakref__")]
    return [*getattr(value, "__dict__", {}).values(), *held]


def parts_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the dense tensors that a sparse or nested one is made of; of a dense one itself."""
    if tensor.layout is torch.strided:
        return (tensor.values(),) if tensor.is_nested else (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout is torch.jagged:
        return tensor.values(), tensor.offsets()  # type: ignore[attr-defined]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()
