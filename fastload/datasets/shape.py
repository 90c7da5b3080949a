"""The structure of a sample, as the user's `fields=` writes it down.

    fields=("image", "label")                 samples (image, label), batches [images, labels]
    fields={"x": "image", "y": "label"}       samples and batches {"x": ..., "y": ...}
    fields=("image", {"y": "label"})          nested
    fields="image"                            the value itself

Datasets make their samples as flat dicts {name: value}; a `Shape` gives these the user's structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastload.errors import ArgumentError


class Shape:
    """The structure of a sample, and the names of its leaves.

    A leaf in a mapping is named by its key, any other one by `name_of`. Of two leaves with one name, the
    second is called "name (2)".

    Args:
        fields: a tuple, list or mapping, nested or not, of leaves; or one leaf.
        leaf_types: the types of leaves.
        name_of: leaf -> name.

    Attributes:
        leaves: name -> leaf, in order.

    Raises:
        ArgumentError: something in `fields` is neither a leaf nor a structure, or a structure is empty.
    """

    def __init__(
        self, fields: Any, leaf_types: tuple[type, ...] = (str,), name_of: Callable[[Any], str] = str
    ) -> None:
        self.leaves: dict[str, Any] = {}
        self._leaf_types = leaf_types
        self._structure = self._named(fields, None, "fields", name_of)

    def sample(self, values: Mapping[str, Any]) -> Any:
        """The values of one sample in its structure: tuples for tuples and lists, dicts for mappings."""
        return _sample(self._structure, values)

    def batch(self, columns: Mapping[str, Any]) -> Any:
        """The columns of a batch in the structure that `default_collate` gives.

        That is a list for a tuple; and a column of texts is a tuple directly in that list, else a list.
        """
        return _batch(self._structure, columns)

    def __repr__(self) -> str:
        return f"Shape({self._structure!r})"

    def _named(self, fields: Any, key: str | None, path: str, name_of: Callable[[Any], str]) -> Any:
        """The structure, with the leaves' names in place of the leaves."""
        if isinstance(fields, self._leaf_types):
            name = self._unused(name_of(fields) if key is None else key)
            self.leaves[name] = fields
            return name
        if not isinstance(fields, tuple | list | Mapping) or not fields:
            wanted = " or ".join(kind.__name__ for kind in self._leaf_types)
            raise ArgumentError(
                f"{path} must be a {wanted}, or a tuple or dict of these that is not empty, found {fields!r}"
            )
        if isinstance(fields, Mapping):
            for name in fields:
                if not isinstance(name, str):
                    raise ArgumentError(f"{path} has the key {name!r}: the keys of a sample are text")
            return {
                name: self._named(part, name, f"{path}[{name!r}]", name_of) for name, part in fields.items()
            }
        return tuple(
            self._named(part, None, f"{path}[{position}]", name_of) for position, part in enumerate(fields)
        )

    def _unused(self, name: str) -> str:
        return next(one for one in _candidates(name) if one not in self.leaves)


def _candidates(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name} ({number})"
        number += 1


def _sample(structure: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(structure, str):
        return values[structure]
    if isinstance(structure, dict):
        return {name: _sample(part, values) for name, part in structure.items()}
    return tuple(_sample(part, values) for part in structure)


def _batch(structure: Any, columns: Mapping[str, Any]) -> Any:
    if isinstance(structure, str):
        return columns[structure]
    if isinstance(structure, dict):
        return {name: _batch(part, columns) for name, part in structure.items()}
    made = [(part, _batch(part, columns)) for part in structure]
    return [tuple(one) if isinstance(part, str) and type(one) is list else one for part, one in made]
