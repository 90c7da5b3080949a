"""The named fields that samples are made of: their structure, and their columns in a batch.

    fields=("image", "label")                 samples (image, label), batches [images, labels]
    fields={"x": "image", "y": "label"}       samples and batches {"x": ..., "y": ...}
    fields=("image", {"y": "label"})          nested
    fields="image"                            the value itself

Datasets make their samples as flat dicts {name: value}; a `Shape` gives these the user's structure.
Each field has a name, and is opened in a way of its own; some are encoded images, which a fused transform may
take as they are.

Images are written straight into their columns of a batch. All others are made by torch's `default_collate`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from fastload.errors import ArgumentError
from fastload.images.crop import Crop
from fastload.images.decode import Oriented, decode_pil
from fastload.images.rng import Rng


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
        """Return a sample of these values: tuples for tuples and lists, dicts for mappings."""
        return map_leaves(self._structure, values.__getitem__)

    def batch(self, columns: Mapping[str, Any]) -> Any:
        """Return the columns of a batch in the structure that `default_collate` gives.

        That is a list for a tuple; and a column of texts is a tuple directly in that list, else a list.
        """
        return _batch(self._structure, columns)

    def __repr__(self) -> str:
        return f"Shape({self._structure!r})"

    def _named(self, fields: Any, key: str | None, path: str, name_of: Callable[[Any], str]) -> Any:
        """Return the structure, with the leaves' names in place of the leaves."""
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
        names = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
        return next(each for each in names if each not in self.leaves)


def map_leaves(structure: Any, function: Callable[[str], Any]) -> Any:
    """Return a structure of dicts, lists and tuples with `function` of each text in its place."""
    if isinstance(structure, str):
        return function(structure)
    if isinstance(structure, dict):
        return {name: map_leaves(part, function) for name, part in structure.items()}
    return type(structure)(map_leaves(part, function) for part in structure)


def _batch(structure: Any, columns: Mapping[str, Any]) -> Any:
    if isinstance(structure, str):
        return columns[structure]
    if isinstance(structure, dict):
        return {name: _batch(part, columns) for name, part in structure.items()}
    made = [(part, _batch(part, columns)) for part in structure]
    return [tuple(each) if isinstance(part, str) and type(each) is list else each for part, each in made]


class SampleFields(ABC):
    """The fields that samples are made of."""

    @abstractmethod
    def images(self, fields: Mapping[str, Any]) -> Sequence[str]:
        """Return the names of the fields that are encoded images."""

    def open(self, name: str, value: Any) -> Any:
        """Return the value in a sample of a field that is no image.

        Raises:
            DecodeError: its bytes are not of its kind, or its kind is refused.
        """
        return value

    def open_image(self, value: Any) -> Any:
        """Return the value of an image, or of (H, W, 3) pixels, in a sample without a fused transform."""
        return decode_pil(value)

    def transform_list(self, value: Any, crop: Crop, rng: Rng) -> list[Any]:
        """Return the images of a field that is a list of these, by a fused transform.

        Raises:
            DecodeError: one is no image.
        """
        raise NotImplementedError


def still_encoded(value: Any) -> Any:
    """Return an image as its bytes, or as the pixels that a cache keeps of it."""
    if isinstance(value, Oriented):
        return value.pixels
    return value if isinstance(value, np.ndarray | bytes) else bytes(value)


class RecordFields(SampleFields):
    """The named fields of a record, in one shape for all formats.

    Attributes:
        shape: of a sample, which names fields; None: a sample is a dict of them.
        optional: the names of the fields that may be None.
    """

    shape: Shape | None = None
    optional: frozenset[str] = frozenset()

    @property
    @abstractmethod
    def key(self) -> str:
        """A text that differs where other arguments give other fields: part of the cache's keys."""

    @abstractmethod
    def split(self, payload: memoryview) -> dict[str, Any]:
        """Return the fields of a record, as they lie in it.

        Raises:
            DecodeError: it is no record of this format.
        """

    def needs_files(self, transform: Any) -> bool:
        """Return whether samples need the files of images, where a cache has records of them."""
        return False

    @abstractmethod
    def check(self, transform: Any) -> None:
        """Raise `ArgumentError` unless the transform goes with these fields."""


# --- columns of a batch


def ordinary_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for the rows of a batch that is taken apart into samples, for the user's `collate_fn`.

    Values that differ in length from row to row need no column there.
    """
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


class _Columns(list[Any]):
    """The columns of a list of values; a plain list is one column."""


def collate_column(values: list[Any]) -> Any:
    """Return the column that `default_collate` makes of these values. Raises what that raises."""
    made = default_collate(values)
    return _Columns(made) if type(made) is list and isinstance(values[0], list | tuple) else made


def as_batch(columns: Any) -> Any:
    """Return the columns of a filled batch with the classes that `default_collate` gives them."""
    if isinstance(columns, dict):
        return {name: as_batch(column) for name, column in columns.items()}
    return [as_batch(column) for column in columns] if isinstance(columns, list) else columns
