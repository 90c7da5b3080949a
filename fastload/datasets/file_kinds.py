"""What a file is by the extension of its name, and how each kind is opened.

jpg, png, webp, avif, heic, ...   an encoded image, which stays encoded
cls, cls2, index, inx, id        int
json, jsn                        the JSON value
txt, text, transcript            str
npy                              array; one of Python objects is refused
pyd, pkl, pickle, pth, pt        a pickle, which can run any code
any other                        bytes
"""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np

from fastload.errors import DecodeError

IMAGES = ("jpg", "jpeg", "png", "webp", "avif", "heic", "heif", "ppm", "pgm", "bmp", "gif", "tif", "tiff")
PICKLES = ("pyd", "pkl", "pickle", "pth", "pt")


def extension_of(name: str) -> str:
    """What follows the last dot of a name, or all of a name without a dot."""
    return name.rpartition(".")[2]


def has_opener(extension: str) -> bool:
    """Whether files with this extension are neither images nor plain bytes."""
    return extension in _OPENERS


def open_file(extension: str, value: Any, what: str) -> Any:
    """The content of a file that is no image. Whether a pickle may be read is for the caller to decide.

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


def _open_text(value: Any) -> str:
    return str(value, "utf-8")


def _open_int(value: Any) -> int:
    if len(value) > 32:
        raise ValueError(f"{len(value)} bytes for a class number")
    return int(bytes(value))


def _open_json(value: Any) -> Any:
    return json.loads(bytes(value))


def _open_npy(value: Any) -> Any:
    """An array. Its size is checked against the bytes at hand before it is allocated."""
    file = BytesIO(value)
    version = np.lib.format.read_magic(file)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read_header is None:
        raise ValueError(f"npy version {version}")
    shape, fortran, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which only pickle could read")
    count = int(np.prod(shape, dtype=object)) if shape else 1
    if not 0 <= count * dtype.itemsize <= len(value) - file.tell():
        raise ValueError(f"shape {shape} needs other bytes than the file has")
    array = np.frombuffer(value, dtype, count, file.tell()).copy()
    return array.reshape(shape, order="F" if fortran else "C")


def _unpickle(value: Any) -> Any:
    import pickle

    return pickle.loads(value)


def _load_torch(value: Any) -> Any:
    import torch

    return torch.load(BytesIO(value), weights_only=False)


_OPENERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), _open_int),
    **dict.fromkeys(("json", "jsn"), _open_json),
    **dict.fromkeys(("txt", "text", "transcript"), _open_text),
    "npy": _open_npy,
    **dict.fromkeys(("pyd", "pkl", "pickle"), _unpickle),
    **dict.fromkeys(("pth", "pt"), _load_torch),
}
