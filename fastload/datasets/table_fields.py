"""The leaves of a table's samples that are objects, and what a sample is made of."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fastload.checks import check_function
from fastload.datasets.payloads import FilePayloads
from fastload.datasets.sample_fields import Transform
from fastload.errors import ArgumentError
from fastload.images.decode import decode_pil


class File:
    """An object of a sample, below the `url` of a `TableDataset`, by the key that stands in the table.

    Without `decode`, the extension of the key says what it is: an image; .json; .txt; .npy; .cls (an int). An
    object with another extension, or with none, is an image if it begins like one, and bytes otherwise. An
    image is for the fused transform, or is a `PIL.Image` in RGB.

    Example::

        from fastload import File

        File("image")  # the column `image` has the keys
        File("masks/{id}.png", decode=len)  # masks/0001.png where the column `id` has 0001

    Args:
        column: the column with the keys; or a pattern, with columns in braces.
        decode: bytes -> value; deterministic. With a parameter `key` it also gets the object's key.

    Raises:
        ArgumentError: an argument is invalid.
    """

    def __init__(self, column: str, *, decode: Callable[..., Any] | None = None) -> None:
        if not isinstance(column, str):
            raise ArgumentError(f"File takes the name of a column, found {column!r}")
        check_function("decode", decode)
        self.column = column
        self.decode = decode
        self._columns = [name for _, name in pattern_parts(column) if name is not None]
        if not self._columns:
            raise ArgumentError(f"File({column!r}) names no column: every sample would have the same object")

    @property
    def columns(self) -> list[str]:
        """The columns that make the key."""
        return list(self._columns)

    def __repr__(self) -> str:
        return f"File({self.column!r}{'' if self.decode is None else f', decode={self.decode!r}'})"


def pattern_parts(pattern: str) -> list[tuple[str, str | None]]:
    """The pieces of "images/{id}.jpg": a text, and the column behind it or None.

    A pattern without braces is the name of a column.

    Raises:
        ArgumentError: a brace is not closed, or names no column.
    """
    if "{" not in pattern:
        return [("", pattern)]
    try:
        parts = [(text, name) for text, name, _, _ in string.Formatter().parse(pattern)]
    except ValueError as error:
        raise ArgumentError(
            f"File({pattern!r}): {error}. Write {{column}} for the text of a column"
        ) from None
    if any(name == "" for _, name in parts):
        raise ArgumentError(f"File({pattern!r}): {{}} names no column; write a column's name in the braces")
    return parts


class FileLeaf(NamedTuple):
    """A leaf that is an object: its name in a sample, and its way through the cache."""

    name: str
    file: File
    payloads: FilePayloads


class Row(dict[str, Any]):
    """The fields of a sample that are objects, by name.

    Attributes:
        images: the names of those that are images to be decoded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.images: list[str] = []

    def __or__(self, values: Mapping[str, Any]) -> Row:  # type: ignore[override]
        """Return the fields with the values of the table too."""
        whole = Row()
        whole.update(self)
        whole.update(values)
        whole.images = self.images
        return whole


class RowFields:
    """The fields of a `Row`. All but images are as a sample has them. See `SampleFields`."""

    def images(self, fields: Mapping[str, Any]) -> list[str]:
        assert isinstance(fields, Row)
        return fields.images

    def open(self, name: str, value: Any) -> Any:
        return value

    def open_image(self, value: Any) -> Any:
        return decode_pil(value)


def transform_of(name: str, transform: Transform) -> Callable[[Any], Any] | None:
    """Return the transform of one value; that of the whole sample is the one of its image too."""
    return transform.get(name) if isinstance(transform, Mapping) else transform
