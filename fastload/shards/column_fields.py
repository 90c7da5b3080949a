"""The columns of a record whose kinds its dataset knows beforehand, as `Fields`: of MDS, LitData and FFCV."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fastload.datasets.pairs import always_fused
from fastload.datasets.shape import Shape
from fastload.errors import ArgumentError, DecodeError, refuse_class
from fastload.images.crop import is_fused

__all__ = ["Column", "ColumnFields", "check_decode"]

_BAD_VALUES = (
    ValueError, TypeError, KeyError, IndexError, EOFError, OSError, OverflowError, RecursionError,
    AttributeError, ImportError, RuntimeError, pickle.UnpicklingError, struct.error,
)  # fmt: skip
_PICKLES = ("pkl", "pickle")


class Column(NamedTuple):
    """A column.

    kind: as the format calls it.
    open: bytes -> value; None: this kind is not known.
    image: whether it is an encoded image.
    may_be_image: whether a fused transform may take it, though the format does not say that it is an image.
    """

    kind: str
    open: Callable[[Any], Any] | None
    image: bool = False
    may_be_image: bool = False


class ColumnFields:
    """See `Fields`.

    Args:
        columns: name -> column.
        split: a record -> {name: bytes}, or pixels.
        open_image: an encoded image, or (H, W, 3) pixels -> its value in a sample without a fused transform.
        shape: of the samples, which names columns; None: all of them.
        decode: column -> function of its bytes, in place of what belongs to its kind; or the function of all
            columns, with which no column is opened here.
        transform: of the dataset.
        known: the kinds that are known, for the error about others.
        opens_files: whether `open_image` needs the file of an image.

    Raises:
        ArgumentError: an argument names a column that there is not, a column's kind is not known, or a fused
            transform does not say which column it takes.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        split: Callable[[memoryview], dict[str, Any]],
        open_image: Callable[[Any], Any],
        shape: Shape | None,
        decode: Mapping[str, Callable[[Any], Any]] | Callable[[dict[str, Any]], Any] | None,
        transform: Any,
        known: list[str],
        *,
        opens_files: bool = False,
    ) -> None:
        self._opens_files = opens_files
        decoders = decode if isinstance(decode, Mapping) else {}
        self._split = split
        self._open_image = open_image
        self._names = {name: name for name in columns} if shape is None else dict(shape.leaves)
        for column in (*self._names.values(), *decoders):
            if column not in columns:
                where = "decode" if column in decoders else "fields"
                raise ArgumentError(f"{where} names {column!r}, and the columns are {', '.join(columns)}")
        for column, function in decoders.items():
            refuse_class(f"decode[{column!r}]", function)
        self._openers: dict[str, Callable[[Any], Any]] = {}
        self._decoded = sorted(decoders)
        self._images: list[str] = []
        if callable(decode):
            return
        for name, column in self._names.items():
            opener = decoders.get(column, columns[column].open)
            if opener is None and columns[column].kind in _PICKLES:
                raise ArgumentError(
                    f"column {column!r} is a pickle, which can run any code: pass unsafe=True if you trust "
                    f"the author of the shards, decode={{{column!r}: function of its bytes}}, or fields= "
                    "without it"
                )
            if opener is None:
                raise ArgumentError(
                    f"column {column!r} has the encoding {columns[column].kind!r}, which is not known: pass "
                    f"decode={{{column!r}: function of its bytes}}, or fields= without it. Known are "
                    f"{', '.join(known)}"
                )
            self._openers[name] = opener
        self._images = self._find_images(columns, decoders, transform)

    @property
    def key(self) -> str:
        return repr((sorted(self._names.items()), self._decoded, self._images))

    def needs_files(self, transform: Any) -> bool:
        return self._opens_files and not always_fused(self._images, transform)

    def split(self, payload: memoryview) -> dict[str, Any]:
        found = self._split(payload)
        return {name: found[column] for name, column in self._names.items()}

    def images(self, fields: Mapping[str, Any]) -> list[str]:
        return self._images

    def open(self, name: str, value: Any) -> Any:
        column = self._names[name]
        opener = self._openers[name]
        if column in self._decoded:
            return opener(bytes(value) if isinstance(value, memoryview) else value)
        try:
            return opener(value)
        except DecodeError as error:
            raise DecodeError(f"column {column!r}: {error.message}") from error
        except _BAD_VALUES as error:
            raise DecodeError(f"column {column!r} is not what its encoding says: {error}") from error

    def open_image(self, value: Any) -> Any:
        return self._open_image(value)

    def _find_images(
        self, columns: Mapping[str, Column], decoders: Mapping[str, Any], transform: Any
    ) -> list[str]:
        """Names of encoded images: by their kind, or because a fused transform takes them."""
        plain = {name: columns[column] for name, column in self._names.items() if column not in decoders}
        images = [name for name, column in plain.items() if column.image]
        if isinstance(transform, Mapping):
            for name in transform:
                if name not in self._names:
                    raise ArgumentError(
                        f"transform names {name!r}, and a sample has {', '.join(self._names)}"
                    )
            fused = [name for name, part in transform.items() if is_fused(part)]
            return images + [name for name in fused if name not in images and name in plain]
        if not is_fused(transform):
            return images
        images = images or [name for name, column in plain.items() if column.may_be_image]
        if not images:
            raise ArgumentError(
                f"transform=... takes an image, and none of the columns {', '.join(self._names)} may be one: "
                "name the image's column in fields=, without a function for it in decode="
            )
        if len(images) > 1:
            raise ArgumentError(
                f"the transform takes one image, and several columns may be one: {', '.join(images)}. Name "
                f"it, as in transform={{{images[0]!r}: RandomResizedCrop(224)}}"
            )
        return images


def check_decode(fields: Any, decode: Any) -> None:
    """Raise `ArgumentError` where two arguments say what a sample is."""
    if fields is not None and callable(decode):
        raise ArgumentError(
            "fields= and a function as decode= both say what a sample is: leave one out, or pass "
            "decode={column: function of its bytes}"
        )
