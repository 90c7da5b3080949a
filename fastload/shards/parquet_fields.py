"""The columns of a row as the fields of a sample.

Hugging Face's `datasets` keeps an image, and a sound, as a struct {"bytes": binary, "path": string}: such a
column counts as its bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from fastload.checks import refuse_class
from fastload.datasets.arrow_values import is_numeric, to_python, why_not_number
from fastload.datasets.shape import Shape
from fastload.errors import ArgumentError, DecodeError
from fastload.formats.sample import load_row
from fastload.images.decode import decode_pil, is_image

_FILE = {"bytes", "path"}


def _is_file(kind: Any) -> bool:
    """Whether a column has encoded files, such as images, with their paths."""
    if not pa.types.is_struct(kind) or {field.name for field in kind} != _FILE:
        return False
    return bool(_is_binary(kind.field("bytes").type) or pa.types.is_null(kind.field("bytes").type))


def _is_binary(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def column_values(column: Any) -> list[Any]:
    """The values of a column: views of binary ones; of a file its bytes, or its path if it has no bytes."""
    if not _is_file(column.type):
        return to_python(column, views=True)
    values = []
    for chunk in column.chunks:
        parts = dict(zip([field.name for field in chunk.type], chunk.flatten(), strict=True))
        bodies = to_python(parts["bytes"], views=True)
        if parts["bytes"].null_count:
            paths = to_python(parts["path"])
            bodies = [path if body is None else body for body, path in zip(bodies, paths, strict=True)]
        values += bodies
    return values


class ParquetFields:
    """See `Fields`.

    Args:
        shape: of the samples; None: a dict of all columns.
        decoders: column -> function that replaces the value.
    """

    def __init__(self, shape: Shape | None, decoders: Mapping[str, Callable[[Any], Any]]) -> None:
        for name, function in decoders.items():
            refuse_class(f"decode[{name!r}]", function)
        self._decoders = dict(decoders)
        self._wanted: dict[str, str] | None = None if shape is None else dict(shape.leaves)
        self._columns: dict[str, str] = {}  # name -> column
        self._files: list[str] = []  # columns of encoded files
        self._numeric: set[str] = set()  # columns
        self._sure: set[str] = set()  # names of images, whatever their bytes look like
        self.may_be_images: list[str] = []

    @property
    def wanted(self) -> list[str] | None:
        """The wanted columns; None: all."""
        return None if self._wanted is None else list(self._wanted.values())

    @property
    def names(self) -> list[str]:
        """Of the fields, once `learn` was called."""
        return list(self._columns)

    def learn(self, schema: Any) -> None:
        """Take the columns and their types from the files.

        Raises:
            ArgumentError: `decode` names a column that is not read.
        """
        self._columns = {name: name for name in schema.names} if self._wanted is None else self._wanted
        unknown = sorted(self._decoders.keys() - set(self._columns.values()))
        if unknown:
            raise ArgumentError(
                f"decode names {unknown[0]!r}, and the columns that are read are {', '.join(schema.names)}"
            )
        kinds = {field.name: field.type for field in schema}
        self._files = [column for column, kind in kinds.items() if _is_file(kind)]
        self._numeric = {column for column, kind in kinds.items() if is_numeric(kind)}
        binary = {column for column, kind in kinds.items() if _is_file(kind) or _is_binary(kind)}
        self.may_be_images = [
            name for name, column in self._columns.items() if column in binary - self._decoders.keys()
        ]
        sure = _hugging_face_images(schema.metadata or {})
        self._sure = {name for name in self.may_be_images if self._columns[name] in sure}

    @property
    def key(self) -> str:
        return repr((self._wanted, sorted(self._decoders)))

    def needs_files(self, transform: Any) -> bool:
        return False

    def split(self, payload: memoryview) -> dict[str, Any]:
        row = load_row(payload)
        for column in self._files:
            if isinstance(row[column], str):
                raise DecodeError(
                    f"column {column!r} has only the path {row[column]!r} of its file, and no bytes: write "
                    "the table again with the files in it (Hugging Face: push_to_hub, or "
                    "datasets.table.embed_table_storage)"
                )
        return {name: row[column] for name, column in self._columns.items()}

    def images(self, fields: Mapping[str, Any]) -> list[str]:
        return [name for name in self.may_be_images if self._is_image(name, fields[name])]

    def open(self, name: str, value: Any) -> Any:
        column = self._columns[name]
        value = bytes(value) if isinstance(value, memoryview) else value
        decoder = self._decoders.get(column)
        if decoder is not None:
            return decoder(value)
        why = why_not_number(value) if column in self._numeric else None
        if why is not None:
            raise DecodeError(
                f"column {column!r} {why}, which no batch of numbers can hold: give decode={{{column!r}: a "
                "function that makes a number of it}, or leave such rows out with filters="
            )
        return value

    def open_image(self, value: Any) -> Any:
        return decode_pil(value)

    def _is_image(self, name: str, value: Any) -> bool:
        if value is None:
            return False
        return name in self._sure or not isinstance(value, bytes | memoryview) or is_image(value)


def _hugging_face_images(metadata: Mapping[bytes, bytes]) -> set[str]:
    """The columns that Hugging Face's `datasets` has written down as images."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {name for name, feature in features.items() if feature.get("_type") == "Image"}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return set()
