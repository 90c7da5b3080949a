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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from fastload.checks import refuse_class
from fastload.datasets.file_kinds import IMAGES, PICKLES, extension_of, open_file
from fastload.datasets.pairs import always_fused
from fastload.datasets.shape import Shape
from fastload.errors import ArgumentError, DecodeError
from fastload.formats.tar import read_sample
from fastload.formats.tfrecord import Spec, check_spec, parse_example, read_example
from fastload.images.crop import is_fused
from fastload.images.decode import Oriented, decode_pil


class ExampleFields:
    """Features of a tf.train.Example.

    Args:
        features: see `Spec`.
        images: the features that are encoded images; None: the only one of type bytes.
        lacking: whether an Example may lack any of the features, which its fields then lack too.
    """

    def __init__(self, features: Spec, images: list[str] | None, *, lacking: bool = False) -> None:
        check_spec(features)
        self._features = dict(features)
        self._lacking = lacking
        single = [name for name, kind in features.items() if kind is bytes]
        self._images = images if images is not None else single if len(single) == 1 else []
        for name in self._images:
            if self._features.get(name) is not bytes:
                raise ArgumentError(
                    f"transform names {name!r} as an image, and features has it as "
                    f"{self._features.get(name)!r}: write features={{{name!r}: bytes, ...}}"
                )

    @property
    def key(self) -> str:
        return repr((sorted((name, repr(kind)) for name, kind in self._features.items()), self._images))

    def needs_files(self, transform: Any) -> bool:
        return not always_fused(self._images, transform)  # else a sample has an image's bytes

    def split(self, payload: memoryview) -> dict[str, Any]:
        return parse_example(payload, self._features, lacking=self._lacking)

    def names(self, payload: memoryview) -> list[str]:
        return list(read_example(payload))

    def is_image(self, name: str) -> bool:
        return name in self._images

    def images(self, fields: Mapping[str, Any]) -> list[str]:
        return self._images

    def open(self, name: str, value: Any) -> Any:
        return bytes(value) if isinstance(value, memoryview) else value

    def open_image(self, value: Any) -> Any:
        if isinstance(value, Oriented):
            return value.pixels
        return bytes(value) if isinstance(value, memoryview) else value


class MemberFields:
    """Members of a tar shard's sample.

    Args:
        decoders: extension -> function of its bytes; they replace the built-in ones.
        unsafe: unpickle .pyd, .pkl, .pickle, .pth and .pt, which can run any code.
    """

    def __init__(self, decoders: Mapping[str, Callable[[bytes], Any]], *, unsafe: bool) -> None:
        for name, function in decoders.items():
            refuse_class(f"decode[{name!r}]", function)
        self._decoders = {name.lower().lstrip("."): function for name, function in decoders.items()}
        self._unsafe = unsafe
        self._last: tuple[tuple[str, ...], list[str]] = ((), [])  # names, and those of images

    def __fingerprint__(self) -> Any:
        """All but the memory of the last sample: see `datasets.fingerprint`."""
        return self._decoders, self._unsafe

    @property
    def key(self) -> str:
        return repr(sorted(self._decoders))

    def needs_files(self, transform: Any) -> bool:
        return False

    def split(self, payload: memoryview) -> dict[str, Any]:
        key, members = read_sample(payload)
        if "__key__" in members:
            raise DecodeError(
                f"sample {key!r} has a member '__key__': this name is taken by the key of the sample"
            )
        return {"__key__": key, **members}

    def names(self, payload: memoryview) -> list[str]:
        return list(read_sample(payload)[1])

    def is_image(self, name: str) -> bool:
        return extension_of(name) in IMAGES and self._decoder(name) is None

    def images(self, fields: Mapping[str, Any]) -> list[str]:
        # Called twice a sample, and most samples have the same members.
        names, last = tuple(fields), self._last  # reader threads share it
        if names != last[0]:
            last = self._last = names, [name for name in names if self.is_image(name)]
        return last[1]

    def open(self, name: str, value: Any) -> Any:
        if name == "__key__":
            return value
        decoder = self._decoder(name)
        if decoder is not None:
            return decoder(bytes(value))
        kind = extension_of(name)
        if kind in PICKLES and not self._unsafe:
            raise DecodeError(
                f"member {name!r} is a pickle, which can run any code: pass unsafe=True if you trust the "
                f"author of the shards, or decode={{{name!r}: function}}"
            )
        return open_file(kind, value, f"member {name!r}")

    def open_image(self, value: Any) -> Any:
        return decode_pil(value)

    def _decoder(self, name: str) -> Callable[[bytes], Any] | None:
        return self._decoders.get(name) or self._decoders.get(extension_of(name))


class Leaf(NamedTuple):
    """A leaf of `fields=`: the first of `names` that a record has; None where it may lack all of them."""

    names: tuple[str, ...]
    optional: bool

    @classmethod
    def parse(cls, text: str) -> Leaf:
        """The leaf that is written as "jpg;jpeg;png" or "json?".

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
    """The structure that `fields=` gives a sample. A leaf in a tuple is named by its first alternative.

    Raises:
        ArgumentError: it is no structure of texts, or one of these is not for `Leaf.parse`.
    """
    shape = Shape(chosen, name_of=lambda text: Leaf.parse(text).names[0])
    for text in shape.leaves.values():
        Leaf.parse(text)
    return shape


class _Splitting(Protocol):
    """What `ChosenFields` needs beside `Fields`: `ExampleFields` and `MemberFields` have it."""

    @property
    def key(self) -> str: ...
    def needs_files(self, transform: Any) -> bool: ...
    def split(self, payload: memoryview) -> dict[str, Any]: ...
    def open(self, name: str, value: Any) -> Any: ...
    def open_image(self, value: Any) -> Any: ...

    def names(self, payload: memoryview) -> list[str]:
        """All that a record has, for errors."""

    def is_image(self, name: str) -> bool:
        """Whether a field is an encoded image, by its name."""


class ChosenFields:
    """The fields that `fields=` names, by the names of its leaves. No other field of a record is opened.

    A value is that of the record. Where alternatives are opened in different ways, it is (name, value). Where
    the record lacks an optional leaf, it is None.

    Args:
        fields: of the whole record.
        chosen: for `shape_of`.

    Attributes:
        shape: of a sample.
        optional: the names of the leaves that may be None.

    Raises:
        ArgumentError: as `shape_of`; or a leaf has images and other kinds as alternatives.
    """

    def __init__(self, fields: _Splitting, chosen: Any) -> None:
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
        """Raise `ArgumentError` unless the transform goes with these fields."""
        parts = transform if isinstance(transform, Mapping) else {}
        for name in parts:
            if name not in self._leaves:
                raise ArgumentError(
                    f"transform names {name!r}, and fields= has {', '.join(self._leaves)}: a leaf in a tuple "
                    "is named by its first alternative, one in a dict by its key"
                )
        if is_fused(transform):
            if len(self._images) != 1:
                raise ArgumentError(
                    f"the transform takes one image, and fields= has {', '.join(self._images) or 'none'}: "
                    "name it, as in transform={'jpg': RandomResizedCrop(224)}"
                )
            parts = {self._images[0]: transform}
        for name, part in parts.items():
            if name in self.optional and is_fused(part):
                raise ArgumentError(
                    f"fields= has {name!r} as optional, and a fused transform writes it into a tensor, which "
                    "cannot hold None: leave out the '?', or give transform= a function for it"
                )

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
                return name, bytes(value) if isinstance(value, memoryview) else value
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
