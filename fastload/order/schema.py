"""Dataclasses as JSON, and back from JSON that anybody may have written.

    plain(value) ─▶ dicts, lists, numbers, texts ─▶ read(Kind, ...): every type is checked, or ValueError

A field of the type `Any` is a value of the user's, as the state of a sampler. It passes as a copy. Of a union
of dataclasses, a value is the first whose required entries it has. An entry that is a word of Python has a
"_" behind it as a field.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, Union

import numpy as np

T = TypeVar("T")

_LARGEST = 1 << 64  # a number in a state, of either sign


def plain(value: Any, *, whole: bool = False) -> Any:
    """Return a dataclass, and all of those in it, as a dict. Nothing in it is shared with `value`.

    Numbers of numpy become Python's, which JSON and torch.load know.

    Args:
        whole: its own fields are there even where they have their defaults.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints, entries = _hints(type(value)), {}
        for field in dataclasses.fields(value):
            entry = getattr(value, field.name)
            if whole or _is_required(field) or entry != _default(field):
                users = hints[field.name] is Any and not isinstance(entry, np.generic)
                entries[_entry(field)] = copy.deepcopy(entry) if users else plain(entry)
        return entries
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _entry(field: dataclasses.Field[Any]) -> str:
    return field.name.removesuffix("_")


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def read(kind: type[T], value: Any) -> T:
    """Return a dataclass from what `plain` gave. Entries that it has no field for are passed over.

    Raises:
        ValueError: an entry is missing, or has another type. Its text has the entry and the value.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{kind.__name__} is {reprlib.repr(value)}")
    hints, arguments = _hints(kind), {}  # type: ignore[arg-type]
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name = _entry(field)
        if name in value:
            arguments[field.name] = _read_as(hints[field.name], value[name], name)
        elif _is_required(field):
            raise ValueError(f"{kind.__name__} lacks {name!r}")
    return kind(**arguments)


def _read_as(hint: Any, value: Any, name: str) -> Any:
    """Return a value of this type; `name` is its entry."""
    if hint is Any:
        return copy.deepcopy(value)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in parts:
            return None
        kinds = [part for part in parts if part is not type(None)]
        entries = value.keys() if isinstance(value, Mapping) else set[str]()
        fitting = (kind for kind in kinds[:-1] if _required(kind) <= entries)
        return _read_as(next(fitting, kinds[-1]), value, name)
    if origin is list and isinstance(value, list | tuple):
        return [_read_as(parts[0], item, name) for item in value]
    if origin is dict and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _read_as(parts[1], item, name) for key, item in value.items()}
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(parts):
        return tuple([_read_as(part, item, name) for part, item in zip(parts, value, strict=True)])
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read(hint, value)
    if type(value) is hint and not (isinstance(value, int) and abs(value) >= _LARGEST):
        return value
    raise ValueError(f"{name!r} is {reprlib.repr(value)}")


@functools.cache
def _required(kind: Any) -> set[str]:
    """Return the entries that a value of this dataclass always has."""
    return {_entry(field) for field in dataclasses.fields(kind) if _is_required(field)}


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)
