"""The named fields of a record, split without copies and opened when a sample is made of them.

    TFRecord           the features that the spec names        {"image": view of the bytes, "label": 7}
    tar                the members, by their extension         {"__key__": "0001", "jpg": view, "cls": view}
    either             those that `fields=` names, by leaf     {"jpg": view of the png, "json": None}
    MDS, LitData, FFCV the columns, whose kinds the dataset knows beforehand

Images stay encoded, for a fused transform or for the cache.
"""

from __future__ import annotations

import pickle
import struct
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fastload.checks import refuse_class
from fastload.datasets.sample_fields import RecordFields, Shape
from fastload.datasets.sample_transforms import FieldTransforms, always_fused
from fastload.errors import ArgumentError, DecodeError
from fastload.formats.sample import own_bytes
from fastload.images.transforms import is_fused

NAME_IT = "name the image in fields=, without a function for it in decode="  # of a transform that lacks one


class Leaf(NamedTuple):
    """A leaf of `fields=`: the first of `names` that a record has; None where it may lack all of them."""

    names: tuple[str, ...]
    optional: bool

    @classmethod
    def parse(cls, text: str) -> Leaf:
        """Return the leaf that is written as "jpg;jpeg;png" or "json?".

        Raises:
            ArgumentError: a name is empty or occurs twice, or "?" is not at the end.
        """
        names = tuple(text.removesuffix("?").split(";"))
        if not all(names) or "?" in "".join(names) or len(set(names)) < len(names):
            raise ArgumentError(
                f"fields= has the leaf {text!r}: write a name such as 'jpg', alternatives such as "
                "'jpg;jpeg;png', and '?' behind what a sample may lack, as in 'json?'"
            )
        return cls(names, text.endswith("?"))


def shape_of(chosen: Any) -> Shape:
    """Return the structure that `fields=` gives a sample; a leaf in a tuple has its first alternative's name.

    Raises:
        ArgumentError: it is no structure of texts, or one of these is not for `Leaf.parse`.
    """
    shape = Shape(chosen, name_of=lambda text: Leaf.parse(text).names[0])
    for text in shape.leaves.values():
        Leaf.parse(text)
    return shape


class NamedFields(RecordFields):
    """Fields that a record names itself, of which `fields=` may choose some."""

    def check(self, transform: Any) -> None:
        """Check nothing: each record has its own fields."""

    @abstractmethod
    def names(self, payload: memoryview) -> list[str]:
        """Return the names of all that a record has, for errors."""

    @abstractmethod
    def is_image(self, name: str) -> bool:
        """Return whether a field is an encoded image, by its name."""


class ChosenFields(RecordFields):
    """The fields that `fields=` names, by the names of its leaves. No other field of a record is opened.

    A value is that of the record. Where alternatives are opened in different ways, it is (name, value). Where
    the record lacks an optional leaf, it is None.

    Args:
        fields: of the whole record.
        chosen: for `shape_of`.

    Raises:
        ArgumentError: as `shape_of`; or a leaf has images and other kinds as alternatives.
    """

    def __init__(self, fields: NamedFields, chosen: Any) -> None:
        self.shape = shape_of(chosen)
        self._fields = fields
        self._leaves = {name: Leaf.parse(text) for name, text in self.shape.leaves.items()}
        self.optional = frozenset(name for name, leaf in self._leaves.items() if leaf.optional)
        self._images = [name for name, leaf in self._leaves.items() if self._is_image(leaf)]

    @property
    def key(self) -> str:
        return repr((self._fields.key, [(name, *leaf) for name, leaf in self._leaves.items()]))

    def needs_files(self, transform: Any) -> bool:
        parts = transform if isinstance(transform, Mapping) else dict.fromkeys(self._images, transform)
        return self._fields.needs_files(
            {feature: parts.get(name) for name in self._images for feature in self._leaves[name].names}
        )

    def check(self, transform: Any) -> None:
        transforms = FieldTransforms(transform)
        transforms.check(list(self._leaves), self._images, NAME_IT, optional=self.optional)

    def split(self, payload: memoryview) -> dict[str, Any]:
        found = self._fields.split(payload)
        return {name: self._choose(leaf, found, payload) for name, leaf in self._leaves.items()}

    def images(self, fields: Mapping[str, Any]) -> list[str]:
        if not self.optional:
            return self._images
        return [name for name in self._images if fields[name] is not None]

    def open(self, name: str, value: Any) -> Any:
        names = self._leaves[name].names
        if value is None:
            return None
        return self._fields.open(*value) if len(names) > 1 else self._fields.open(names[0], value)

    def open_image(self, value: Any) -> Any:
        return self._fields.open_image(value)

    def _choose(self, leaf: Leaf, found: Mapping[str, Any], payload: memoryview) -> Any:
        for name in leaf.names:
            if name in found:
                value = found[name]
                if len(leaf.names) == 1 or self._fields.is_image(name):
                    return value
                return name, own_bytes(value)
        if leaf.optional:
            return None
        sample = f"sample {found['__key__']!r}" if "__key__" in found else "the record"
        wanted = ";".join(leaf.names)
        raise DecodeError(
            f"{sample} has no {' or '.join(leaf.names)}, which fields= asks for; it has "
            f"{', '.join(self._fields.names(payload)) or 'nothing'}. Name an alternative, as in "
            f"'{wanted};other', or make it optional: '{wanted}?'"
        )

    def _is_image(self, leaf: Leaf) -> bool:
        images = [self._fields.is_image(name) for name in leaf.names]
        if any(images) and not all(images):
            raise ArgumentError(
                f"fields= has the alternatives {';'.join(leaf.names)!r}, of which some are images and some "
                "are not: name images alone"
            )
        return all(images)


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


class ColumnFields(RecordFields):
    """Columns that a dataset knows before it reads a record.

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

    Attributes:
        columns: name of a field -> its column.

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
        self.shape = shape
        self._opens_files = opens_files
        decoders = decode if isinstance(decode, Mapping) else {}
        self._split = split
        self._open_image = open_image
        self.columns = {name: name for name in columns} if shape is None else dict(shape.leaves)
        for column in (*self.columns.values(), *decoders):
            if column not in columns:
                where = "decode" if column in decoders else "fields"
                read = " that are read" if column in decoders else ""
                raise ArgumentError(
                    f"{where} names {column!r}, and the columns{read} are {', '.join(columns)}"
                )
        for column, function in decoders.items():
            refuse_class(f"decode[{column!r}]", function)
        self._openers: dict[str, Callable[[Any], Any]] = {}
        self._decoded = sorted(decoders)
        self._images: list[str] = []
        self._possible: list[str] | None = None  # those that may be images; None: `decode` makes the sample
        if callable(decode):
            return
        for name, column in self.columns.items():
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
        return repr((sorted(self.columns.items()), self._decoded, self._images))

    def check(self, transform: Any) -> None:
        if self._possible is not None:
            FieldTransforms(transform).check(list(self.columns), self._possible, NAME_IT)

    def needs_files(self, transform: Any) -> bool:
        return self._opens_files and not always_fused(self._images, transform)

    def split(self, payload: memoryview) -> dict[str, Any]:
        found = self._split(payload)
        return {name: found[column] for name, column in self.columns.items()}

    def images(self, fields: Mapping[str, Any]) -> list[str]:
        return self._images

    def open(self, name: str, value: Any) -> Any:
        column = self.columns[name]
        opener = self._openers[name]
        if column in self._decoded:
            return opener(own_bytes(value))
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
        """Return names of encoded images: by their kind, or because a fused transform takes them."""
        plain = {name: columns[column] for name, column in self.columns.items() if column not in decoders}
        images = [name for name, column in plain.items() if column.image]
        self._possible = images or [name for name, column in plain.items() if column.may_be_image]
        if isinstance(transform, Mapping):
            fused = [name for name, part in transform.items() if is_fused(part)]
            return images + [name for name in fused if name not in images and name in plain]
        return self._possible if is_fused(transform) else images


def check_decode(fields: Any, decode: Any) -> None:
    """Raise `ArgumentError` where two arguments say what a sample is."""
    if fields is not None and callable(decode):
        raise ArgumentError(
            "fields= and a function as decode= both say what a sample is: leave one out, or pass "
            "decode={field: function of its bytes}"
        )
