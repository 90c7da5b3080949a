"""LitData's chunks: their index.json, the structure of a sample, and the values of its leaves.

    chunk    table of offsets (`formats.mds`) | samples; or frames of zstd, see `formats.pieces`
    sample   uint32 size of each leaf | the leaves, in the order of "data_format" in index.json

The formats of leaves are those of litdata 0.2.76 (litdata/streaming/serializers.py). Sizes inside a value are
compared with its bytes before anything is allocated.

A nested value, such as a list or dict of texts and numbers, is a tag of one byte and a content:

    0  u32 size, JSON                       5   u32 n, n x (text, value)        dict
    1  u32 n, n x text                      6   u32 n, u32 keys, the keys, n x keys x (tag, content): records
    2  u32 n, n x int64                     7   text     8  int64    9  float64    10  bool    11  None
    3  u32 n, n x float64                   in records: 16 None, 17 text, 18 int64, 19 float64, 20 bool
    4  u32 n, n x bool                      any other tag: the whole value is JSON, as older versions wrote it

A text is u32 size, UTF-8. Numbers are little-endian. A count is never larger than the bytes that are left.
"""

from __future__ import annotations

import json
import struct
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from fastload.errors import DecodeError
from fastload.formats.pieces import FRAMED, FRAMED_HEAD, Offsets
from fastload.formats.values import Open, as_array, as_text, check_size, open_list, pil_from_raw, unpickle

_IMAGES = ("jpeg", "image")

# Items of a sample in LitData's other layouts -> the dataset that reads them here.
_LOADERS = {
    "TokensLoader": "they are tokens: read them with fastload.TokenDataset",
    "ParquetLoader": "they are Parquet files: read them with fastload.ParquetDataset",
}


class LitIndex(NamedTuple):
    """index.json: {name of a chunk: its number of samples}, and what its config says of all.

    compression: "", "chunk" (the whole file), "batch" (several samples a frame) or "sample" (each by itself).
    names, formats: of the leaves.
    tree: the structure of a sample, with the leaves' names as leaves: a dict, list or tuple, or one name.
        None where it is of a type that is not made here.
    """

    chunks: dict[Any, int]
    compression: str
    names: list[str]
    formats: list[str]
    tree: Any


def parse_index(told: dict[str, Any]) -> LitIndex:
    """Return what index.json says.

    Raises:
        DecodeError: it is no such file, or its chunks are of a kind that is not read.
    """
    try:
        config = told["config"]
        loader, kinds = config.get("item_loader") or "PyTreeLoader", config["data_format"]
        if loader != "PyTreeLoader":
            advice = _LOADERS.get(loader, "write them with litdata.optimize and its own item loader")
            raise DecodeError(f"the chunks are of LitData's {loader}; {advice}")
        if config.get("encryption"):
            raise DecodeError("the chunks are encrypted, which is not read: write them without encryption=")
        compression = config.get("compression") or ""
        if compression and compression.partition(":")[0] != "zstd":
            raise DecodeError(
                f"chunks compressed by {compression!r} are not read: write them with 'zstd' or None"
            )
        level = (config.get("compression_level") or "chunk") if compression else ""
        if level not in ("", "chunk", "batch", "sample"):
            raise DecodeError(f"compression_level {level!r} is not known")
        chunks = {chunk["filename"]: int(chunk["chunk_size"]) for chunk in told["chunks"]}
        if not isinstance(kinds, list) or not kinds or len(chunks) != len(told["chunks"]):
            raise DecodeError("index.json names no leaves (data_format), or a chunk twice: write it again")
        leaves = [str(kind) for kind in kinds]
        spec = json.loads(config["data_spec"])[1]
        names: list[str] = []
        tree = _tree(spec, (), names)
        if len(names) != len(leaves) or len(set(names)) < len(names):
            raise ValueError(f"a structure of the leaves {names[:20]} for {len(leaves)} formats")
    except DecodeError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise DecodeError(f"not an index.json of LitData: {type(error).__name__} {error}") from None
    if any(count < 0 for count in chunks.values()):
        raise DecodeError("not an index.json of LitData: a chunk_size is negative")
    return LitIndex(chunks, level, names, leaves, tree)


_DICTS = ("builtins.dict", "collections.OrderedDict")
_SEQUENCES: dict[str, type] = {"builtins.list": list, "builtins.tuple": tuple}


def _tree(node: Any, path: tuple[str, ...], names: list[str]) -> Any:
    """Return the structure of the names of leaves, which are added to `names`.

    A name is the path of its leaf, "image" or "boxes.0"; "sample" where it is one leaf. None: a part of the
    structure is neither a dict, nor a list, nor a tuple.
    """
    if node["type"] is None:
        names.append(".".join(path) or "sample")
        return names[-1]
    children, is_dict = node["children_spec"], node["type"] in _DICTS
    keys = json.loads(node["context"]) if is_dict else range(len(children))
    parts = [_tree(child, (*path, str(key)), names) for key, child in zip(keys, children, strict=True)]
    if None in parts:
        return None
    if is_dict:
        return dict(zip(keys, parts, strict=True))
    made = _SEQUENCES.get(node["type"])
    return None if made is None else made(parts)


def parse_frames(head: memoryview, count: int) -> Offsets:
    """Return the offset and size of each sample in what the frames inflate to.

    Args:
        head: the first `framed_size(count, 0)` bytes of the chunk.
        count: of samples, as index.json says.

    Raises:
        DecodeError: it is no such chunk.
    """
    magic, version, _, found, _, _ = FRAMED_HEAD.unpack_from(head)
    if magic != FRAMED or version != 1 or found != count:
        raise DecodeError(
            "the chunk is not one of zstd frames with the samples that index.json says: it is of another "
            "kind or of another dataset; copy it again"
        )
    edges = np.frombuffer(head, "<u4", count + 1, FRAMED_HEAD.size).astype(np.uint64)
    if edges[0] != 0 or not (edges[1:] > edges[:-1]).all():
        raise DecodeError("the offsets of its samples do not grow: the chunk is damaged; copy it again")
    return np.stack([edges[:-1], edges[1:] - edges[:-1]], axis=1)


def opener(form: str, open_image: Open, *, unsafe: bool) -> Open | None:
    """Return a function of a leaf's bytes, as litdata.StreamingDataset has it; None: it is not opened.

    Args:
        form: of the leaf in "data_format", such as "jpeg", "file:jpeg" or "no_header_numpy:9".
        open_image: makes the value of an encoded image.
        unsafe: unpickle "pickle".
    """
    name, _, argument = form.partition(":")
    if argument in _OPENERS or argument in (*_IMAGES, "jpeg_array", "pickle"):  # in LitData too
        name = argument
    if name in _IMAGES:
        return open_image
    if name == "jpeg_array":
        return partial(open_list, open_one=open_image, start=0)
    if name == "pickle":
        return unpickle if unsafe else None
    if name in ("no_header_numpy", "no_header_tensor"):
        dtypes: Any = _NUMPY_DTYPES if name == "no_header_numpy" else _TORCH_DTYPES
        dtype = {str(number): dtype for number, dtype in dtypes.items()}.get(argument)
        return None if dtype is None else partial(_open_flat, dtype=dtype)
    return _OPENERS.get(name)


def is_image(form: str) -> bool:
    """Return whether a leaf of this format is an encoded image."""
    name, _, argument = form.partition(":")
    return name in _IMAGES or argument in _IMAGES


def formats() -> list[str]:
    """Return the formats of leaves that are known."""
    return sorted({*_OPENERS, *_IMAGES, "jpeg_array", "no_header_numpy", "no_header_tensor"})


# --- values

_NUMPY_DTYPES = dict(
    enumerate(
        map(
            np.dtype,
            ["i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16", "?"],
        )
    )
)
_TORCH_DTYPES = dict(
    enumerate(
        (
            torch.float32, torch.float32, torch.float64, torch.float64, torch.complex64, torch.complex64,
            torch.complex128, torch.complex128, torch.float16, torch.float16, torch.bfloat16, torch.uint8,
            torch.int8, torch.int16, torch.int16, torch.int32, torch.int32, torch.int64, torch.int64,
            torch.bool, torch.uint16,
        )
    )
)  # fmt: skip


def _open_flat(value: Any, *, dtype: Any) -> Any:
    data = memoryview(value)
    if isinstance(dtype, torch.dtype):
        return _tensor(data, dtype, (len(data) // dtype.itemsize,))
    return as_array(data, dtype, (len(data) // dtype.itemsize,))


def _open_numpy(value: Any) -> Any:
    dtype, shape, data = _split_array(value, "<")
    return as_array(data, _NUMPY_DTYPES[dtype], shape)


def _open_tensor(value: Any) -> torch.Tensor:
    newer = int.from_bytes(value[:4], "big") in _TORCH_DTYPES  # older versions wrote little-endian numbers
    dtype, shape, data = _split_array(value, ">" if newer else "<")
    return _tensor(data, _TORCH_DTYPES[dtype], shape)


def _split_array(value: Any, order: str) -> tuple[int, tuple[int, ...], memoryview]:
    """Split uint32 dtype | uint32 axes | uint32 size of each | values into dtype, shape, values."""
    data = memoryview(value)
    dtype, axes = struct.unpack_from(f"{order}II", data)
    shape = struct.unpack_from(f"{order}{axes}I", data, 8) if axes <= len(data) // 4 else ()
    return dtype, shape, data[8 + 4 * axes :]


def _tensor(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    check_size(data, dtype, shape)
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _open_number(value: Any, *, form: str) -> Any:
    return struct.unpack(form, value)[0]


def _open_bool(value: Any) -> bool:
    return bool(value[0])


_MOST_DEPTH = 64
_UINT32, _INT64, _FLOAT64 = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")
_ARRAYS = {2: "<i8", 3: "<f8", 4: "?"}
_PLAIN = {16: 11, 17: 7, 18: 8, 19: 9, 20: 10}  # tags in records -> the same elsewhere


def _open_nested(value: Any) -> Any:
    """Return a nested value. One that is damaged raises ValueError, IndexError or struct.error."""
    data = bytes(value)
    if not data or data[0] > 11:
        return json.loads(data)
    found, _ = _read(data, 0, 0)
    return found


def _read(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    if depth > _MOST_DEPTH:
        raise ValueError(f"nested deeper than {_MOST_DEPTH}")
    tag, at = data[at], at + 1
    if tag in _ARRAYS:
        count, at = _count(data, at)
        dtype = np.dtype(_ARRAYS[tag])
        return np.frombuffer(data, dtype, count, at).tolist(), at + count * dtype.itemsize
    if tag == 0:
        size, at = _count(data, at)
        return json.loads(data[at : at + size]), at + size
    if tag == 1:
        count, at = _count(data, at)
        texts = []
        for _ in range(count):
            text, at = _sized_text(data, at)
            texts.append(text)
        return texts, at
    if tag == 5:
        count, at = _count(data, at)
        found: dict[str, Any] = {}
        for _ in range(count):
            key, at = _sized_text(data, at)
            found[key], at = _read(data, at, depth + 1)
        return found, at
    return _records(data, at) if tag == 6 else _scalar(data, tag, at)


def _records(data: bytes, at: int) -> tuple[list[dict[str, Any]], int]:
    count, at = _count(data, at)
    width, at = _count(data, at)
    keys = []
    for _ in range(width):
        key, at = _sized_text(data, at)
        keys.append(key)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        row = {}
        for key in keys:
            row[key], at = _scalar(data, _PLAIN.get(data[at], -1), at + 1)
        rows.append(row)
    return rows, at


def _scalar(data: bytes, tag: int, at: int) -> tuple[Any, int]:
    if tag == 7:
        return _sized_text(data, at)
    if tag in (8, 9):
        return (_INT64 if tag == 8 else _FLOAT64).unpack_from(data, at)[0], at + 8
    if tag == 10:
        return bool(data[at]), at + 1
    if tag == 11:
        return None, at
    raise ValueError(f"unknown tag before byte {at}")


def _sized_text(data: bytes, at: int) -> tuple[str, int]:
    size, at = _count(data, at)
    return data[at : at + size].decode(), at + size


def _count(data: bytes, at: int) -> tuple[int, int]:
    (count,) = _UINT32.unpack_from(data, at)
    if count > len(data) - at - 4:
        raise ValueError(f"a count of {count:,} in {len(data) - at:,} bytes")
    return count, at + 4


_OPENERS: dict[str, Open] = {
    "str": as_text,
    "text": as_text,
    "bool": _open_bool,
    "boolean": _open_bool,
    "int": partial(_open_number, form="<q"),
    "float": partial(_open_number, form="<d"),
    "bytes": bytes,
    "file": bytes,
    "pil": pil_from_raw,
    "numpy": _open_numpy,
    "tensor": _open_tensor,
    "json": _open_nested,
}
