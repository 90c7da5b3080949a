"""Files: what one is by the extension of its name, how each kind is opened, and `File`, one of a table's row.

jpg, png, webp, avif, heic, ...   an encoded image, which stays encoded
cls, cls2, index, inx, id        int
json, jsn                        the JSON value
txt, text, transcript            str
npy                              array; one of Python objects is refused
pyd, pkl, pickle, pth, pt        a pickle, which can run any code
any other                        bytes
"""

from __future__ import annotations

import string
from collections.abc import Callable, Collection, Mapping
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np

from fastload.cache import Cache
from fastload.cache.codecs import Images
from fastload.checks import check_function, whole_number
from fastload.datasets.payloads import ObjectPayloads, known_images
from fastload.datasets.sample_fields import SampleFields
from fastload.datasets.sample_transforms import Transform, images_kept
from fastload.errors import ArgumentError, DecodeError, FastloadError, shorten_errors
from fastload.formats.tokens import npy_header
from fastload.formats.values import as_json, as_text, unpickle
from fastload.images.crop import Crop
from fastload.images.decode import is_image
from fastload.images.rng import Rng

IMAGES = ("jpg", "jpeg", "png", "webp", "avif", "heic", "heif", "ppm", "pgm", "bmp", "gif", "tif", "tiff")
PICKLES = ("pyd", "pkl", "pickle", "pth", "pt")


def extension_of(name: str) -> str:
    """Return what follows the last dot of a name, or all of a name without a dot."""
    return name.rpartition(".")[2]


def open_file(extension: str, value: Any, what: str) -> Any:
    """Return the content of a file that is no image. Whether a pickle may be read is for the caller to
    decide.

    Args:
        extension: as `extension_of`, in lower case.
        value: its bytes, in anything with the buffer protocol.
        what: the file in messages.

    Raises:
        DecodeError: the bytes are not what the extension says.
    """
    open_bytes = _OPENERS.get(extension)
    if open_bytes is None:
        return bytes(value)
    try:
        return open_bytes(value)
    except (ValueError, TypeError, EOFError, OSError, RecursionError) as error:
        raise DecodeError(f"{what} is not what its extension says: {error}") from error


def _open_int(value: Any) -> int:
    if len(value) > 32:
        raise ValueError(f"{len(value)} bytes for a class number")
    return int(bytes(value))


def _open_npy(value: Any) -> Any:
    """Return an array. Its size is checked against the bytes at hand before it is allocated."""
    file = BytesIO(value)
    shape, fortran, dtype = npy_header(file)
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which only pickle could read")
    count = int(np.prod(shape, dtype=object)) if shape else 1
    if not 0 <= count * dtype.itemsize <= len(value) - file.tell():
        raise ValueError(f"shape {shape} needs other bytes than the file has")
    array = np.frombuffer(value, dtype, count, file.tell()).copy()
    return array.reshape(shape, order="F" if fortran else "C")


def _load_torch(value: Any) -> Any:
    import torch

    return torch.load(BytesIO(value), weights_only=False)


_OPENERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), _open_int),
    **dict.fromkeys(("json", "jsn"), as_json),
    **dict.fromkeys(("txt", "text", "transcript"), as_text),
    "npy": _open_npy,
    **dict.fromkeys(("pyd", "pkl", "pickle"), unpickle),
    **dict.fromkeys(("pth", "pt"), _load_torch),
}


class Picture(NamedTuple):
    """An image that is to be decoded: its bytes, or pixels of the cache; and its object in error messages."""

    source: Any
    name: str = ""


class FilePayloads(ObjectPayloads):
    """The way of an object whose extension says what it is (`fastload.datasets.sample_files`).

    An object with an unknown extension, or with none, is an image if it begins like one, and bytes otherwise.

    Args:
        cache, decode: as of `ObjectPayloads`.
        transform: the first one of the objects.
        whole: False for ranges of objects, of which no extension says what they are.
    """

    _way_out = "make a new dataset with this transform="

    def __init__(
        self,
        cache: Cache | None,
        decode: Callable[..., Any] | None,
        transform: Callable[[Any], Any] | None,
        *,
        whole: bool = True,
    ) -> None:
        self._whole = whole
        kept = images_kept(transform)
        known = Images.UNKNOWN if decode is not None or kept else known_images(transform)
        layout = ("kept",) if kept else ()
        super().__init__(cache, decode, images=known, kept=kept, layout=layout)

    def open(self, payload: Any, key: str | None = None, *, readonly: bool = False) -> Any:
        """Return a `Picture`, or the value of an object that is none.

        Raises:
            DecodeError: the payload is not what its key says, or it is a pickle. What `decode` raises.
        """
        if self._decode is not None:
            return super().open(payload, key, readonly=readonly)
        assert key is not None
        if self.codec.packs:
            payload = self._load(payload, readonly)
            if not isinstance(payload, bytes):
                return Picture(self.codec.open(payload))
        extension = self._extension(key)
        return Picture(payload) if _is_image(extension, payload) else _opened(key, extension, payload)

    def _encode(self, payload: Any, key: str | None = None) -> Any:
        assert key is not None
        if self._decode is None and (self._kept or not _is_image(self._extension(key), payload)):
            return self._dump(bytes(payload))
        return super()._encode(payload, key)

    def _extension(self, key: str) -> str:
        return extension_of(key).lower() if self._whole else ""


def _is_image(extension: str, payload: Any) -> bool:
    return extension in IMAGES or (extension not in _OPENERS and is_image(payload))


def _opened(key: str, extension: str, payload: Any) -> Any:
    if extension in PICKLES:
        raise DecodeError(
            "the object is a pickle, which can run any code: if you trust its author, pass a function that "
            "reads it, File(column, decode=function)",
            key=key,
        )
    return open_file(extension, payload, "the object")


class File:
    """An object of a sample, below the `url` of a `TableDataset`, by the key that stands in the table.

    Without `decode`, the extension of the key says what it is: an image; .json; .txt; .npy; .cls (an int). An
    object with another extension, or with none, is an image if it begins like one, and bytes otherwise. An
    image is for the fused transform, or is a `PIL.Image` in RGB.

    With `range`, it is a part of an object: an image if it begins like one, and bytes otherwise. Parts are
    read ahead and cached like objects. Those of one index batch that lie close together are read by one
    request.

    Where the column holds lists, the value in a sample is the list of these objects, which may be empty. As
    torch has it, a batch of lists of one length is a list of columns; lists of other lengths are an error of
    collation, and need a `collate_fn`. A fused transform takes each image of a list, and draws for each.

    Example::

        from fastload import File

        File("image")  # the column `image` has the keys
        File("masks/{id}.png", decode=len)  # masks/0001.png where the column `id` has 0001
        File("video", range=("start", "stop"), decode=len)  # these bytes of the object

    Args:
        column: the column with the keys; or a pattern, with columns in braces.
        range: (start, stop), the bytes [start, stop) of the object: columns, or ints. In a column of lists,
            one for each object of the row.
        decode: bytes -> value; deterministic. With a parameter `key` it also gets the object's key.

    Raises:
        ArgumentError: an argument is invalid.
    """

    @shorten_errors
    def __init__(
        self,
        column: str,
        *,
        range: tuple[int | str, int | str] | None = None,
        decode: Callable[..., Any] | None = None,
    ) -> None:
        if not isinstance(column, str):
            raise ArgumentError(f"File takes the name of a column, found {column!r}")
        check_function("decode", decode)
        self.column = column
        self.range = None if range is None else _checked_range(column, range)
        self.decode = decode
        self._columns = [name for _, name in pattern_parts(column) if name is not None]
        if not self._columns:
            raise ArgumentError(f"File({column!r}) names no column: every sample would have the same object")

    @property
    def columns(self) -> list[str]:
        """The columns that make the key."""
        return list(self._columns)

    @property
    def range_columns(self) -> list[str]:
        """The columns of `range`."""
        return [edge for edge in self.range or () if isinstance(edge, str)]

    @property
    def range_text(self) -> str:
        """The name of `range` in messages."""
        return f"range={self.range!r} of File({self.column!r})"

    def __repr__(self) -> str:
        part = "" if self.range is None else f", range={self.range!r}"
        return f"File({self.column!r}{part}{'' if self.decode is None else f', decode={self.decode!r}'})"


def _checked_range(column: str, edges: Any) -> tuple[int | str, int | str]:
    """Return the argument `range` of a `File`. Raises `ArgumentError`."""
    what = f"range of File({column!r})"
    if not isinstance(edges, tuple | list) or len(edges) != 2:
        raise ArgumentError(f"{what} must be (start, stop), each a column or a number, found {edges!r}")
    start, stop = (edge if isinstance(edge, str) else whole_number(what, edge, least=0) for edge in edges)
    if isinstance(start, int) and isinstance(stop, int) and start >= stop:
        raise ArgumentError(f"{what} must be (start, stop) with start < stop, found {edges!r}")
    return start, stop


def pattern_parts(pattern: str) -> list[tuple[str, str | None]]:
    """Return the pieces of "images/{id}.jpg": a text, and the column behind it or None.

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
    """A leaf that is an object, or a list: its name in a sample, and its way through the cache."""

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


class RowFields(SampleFields):
    """The fields of a `Row`. All but images are as a sample has them.

    Args:
        lists: the fields that are lists of objects.
    """

    def __init__(self, lists: Collection[str]) -> None:
        self._lists = lists

    def images(self, fields: Mapping[str, Any]) -> list[str]:
        assert isinstance(fields, Row)
        return fields.images

    def open(self, name: str, value: Any) -> Any:
        if name not in self._lists:
            return value
        return [_named(item, self.open_image) if type(item) is Picture else item for item in value]

    def transform_list(self, value: Any, crop: Crop, rng: Rng) -> list[Any]:
        pictures = [item if type(item) is Picture else Picture(item) for item in value]
        return [_named(picture, lambda source: crop._draw(source, rng)[0]) for picture in pictures]


def _named(picture: Picture, make: Callable[[Any], Any]) -> Any:
    """Return what is made of an image. An error carries the name of its object."""
    try:
        return make(picture.source)
    except FastloadError as error:
        error.key = picture.name or None
        raise


def transform_of(name: str, transform: Transform) -> Callable[[Any], Any] | None:
    """Return the transform of one value; that of the whole sample is the one of its image too."""
    return transform.get(name) if isinstance(transform, Mapping) else transform
