"""LitData's chunks: their index.json, the structure of a sample, and the values of its leaves.

    chunk    table of offsets (`formats.offset_table`) | samples; or frames of zstd, see `formats.inflate`
    sample   uint32 size of each leaf | the leaves, in the order of "data_format" in index.json

The formats of leaves are those of litdata 0.2.76 (litdata/streaming/serializers.py). Sizes inside a value are
compared with its bytes before anything is allocated.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from fastload.errors import DecodeError
from fastload.formats.inflate import FRAMED, FRAMED_HEAD, framed_size
from fastload.formats.nested import loads
from fastload.formats.packed import as_array, cut_list, pil_from_raw, unpickle
from fastload.formats.shard_index import Offsets

__all__ = [
    "LitIndex",
    "formats",
    "is_image",
    "opener",
    "parse_frames",
    "parse_index",
    "split_sample",
]

Open = Callable[[Any], Any]

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
    """What index.json says.

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
        names = _leaf_names(spec, len(leaves))
        tree = _tree(spec, iter(names))
    except DecodeError:
        raise
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        OverflowError,
        StopIteration,
        RecursionError,
    ) as error:
        raise DecodeError(f"not an index.json of LitData: {type(error).__name__} {error}") from None
    if any(count < 0 for count in chunks.values()):
        raise DecodeError("not an index.json of LitData: a chunk_size is negative")
    return LitIndex(chunks, level, names, leaves, tree)


def _leaf_names(spec: Any, count: int) -> list[str]:
    """The names of leaves: the path to each, "image" or "boxes.0"; of a sample that is one leaf, "sample"."""
    names = [".".join(path) or "sample" for path in _paths(spec, ())]
    if len(names) != count or len(set(names)) != count:
        raise ValueError(f"a structure of the leaves {names[:20]} for {count} formats")
    return names


_DICTS = ("builtins.dict", "collections.OrderedDict")
_SEQUENCES: dict[str, type] = {"builtins.list": list, "builtins.tuple": tuple}


def _paths(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if node["type"] is None:
        yield path
        return
    keys = json.loads(node["context"]) if node["type"] in _DICTS else range(len(node["children_spec"]))
    for key, child in zip(keys, node["children_spec"], strict=True):
        yield from _paths(child, (*path, str(key)))


def _tree(node: Any, names: Iterator[str]) -> Any:
    """The structure of names; None where a part of it is neither a dict, nor a list, nor a tuple."""
    if node["type"] is None:
        return next(names)
    parts = [_tree(child, names) for child in node["children_spec"]]
    if None in parts:
        return None
    if node["type"] in _DICTS:
        return dict(zip(json.loads(node["context"]), parts, strict=True))
    made = _SEQUENCES.get(node["type"])
    return None if made is None else made(parts)


def parse_frames(head: memoryview, count: int) -> Offsets:
    """The offset and size of each sample in what the frames inflate to.

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
    size = framed_size(count, 0)
    edges = np.frombuffer(head, "<u4", count + 1, FRAMED_HEAD.size).astype(np.uint64)
    assert len(head) == size
    if edges[0] != 0 or not (edges[1:] > edges[:-1]).all():
        raise DecodeError("the offsets of its samples do not grow: the chunk is damaged; copy it again")
    return np.stack([edges[:-1], edges[1:] - edges[:-1]], axis=1)


def split_sample(payload: memoryview, names: list[str]) -> dict[str, memoryview]:
    """The bytes of each leaf.

    Raises:
        DecodeError: the sizes do not fill the sample.
    """
    at = 4 * len(names)
    sizes = np.frombuffer(payload, "<u4", len(names)).tolist() if at <= len(payload) else []
    found = {}
    for name, size in zip(names, sizes, strict=False):
        found[name] = payload[at : at + size]
        at += size
    if at != len(payload) or len(found) != len(names):
        raise DecodeError(
            f"the sizes of its {len(names)} leaves add up to {at:,} bytes, but the sample has "
            f"{len(payload):,}: the chunk is damaged; copy it again"
        )
    return found


def opener(form: str, open_image: Open, *, unsafe: bool) -> Open | None:
    """What makes the value of a leaf's bytes, as litdata.StreamingDataset does; None: it is not opened.

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
        return partial(_open_images, open_image=open_image)
    if name == "pickle":
        return unpickle if unsafe else None
    if name in ("no_header_numpy", "no_header_tensor"):
        dtypes: Any = _NUMPY_DTYPES if name == "no_header_numpy" else _TORCH_DTYPES
        dtype = {str(number): dtype for number, dtype in dtypes.items()}.get(argument)
        return None if dtype is None else partial(_open_flat, dtype=dtype)
    return _OPENERS.get(name)


def is_image(form: str) -> bool:
    """Whether a leaf of this format is an encoded image."""
    name, _, argument = form.partition(":")
    return name in _IMAGES or argument in _IMAGES


def formats() -> list[str]:
    """The formats of leaves that are known."""
    return sorted({*_OPENERS, *_IMAGES, "jpeg_array", "no_header_numpy", "no_header_tensor"})


# --- values

_NUMPY_DTYPES = dict(
    enumerate(
        np.dtype(text)
        for text in (
            "i1",
            "<i2",
            "<i4",
            "<i8",
            "u1",
            "<u2",
            "<u4",
            "<u8",
            "<f2",
            "<f4",
            "<f8",
            "<c8",
            "<c16",
            "?",
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
    data = memoryview(value)
    kind, axes = struct.unpack_from("<II", data)
    shape = struct.unpack_from(f"<{axes}I", data, 8) if axes <= len(data) // 4 else ()
    return as_array(data[8 + 4 * axes :], _NUMPY_DTYPES[kind], shape)


def _open_tensor(value: Any) -> torch.Tensor:
    data = memoryview(value)
    kind, axes = struct.unpack_from(">II", data)
    shape = struct.unpack_from(f">{axes}I", data, 8) if axes <= len(data) // 4 else ()
    return _tensor(data[8 + 4 * axes :], _TORCH_DTYPES[kind], shape)


def _tensor(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    if count * dtype.itemsize != len(data):
        raise ValueError(f"shape {shape} of {dtype} needs other than its {len(data):,} bytes")
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _open_number(value: Any, *, form: str) -> Any:
    return struct.unpack(form, value)[0]


def _open_bool(value: Any) -> bool:
    return bool(value[0])


def _text(value: Any) -> str:
    return str(value, "utf-8")


def _open_images(value: Any, *, open_image: Open) -> list[Any]:
    return [open_image(one) for one in cut_list(value, 0)]


_OPENERS: dict[str, Open] = {
    "str": _text,
    "text": _text,
    "bool": _open_bool,
    "boolean": _open_bool,
    "int": partial(_open_number, form="<q"),
    "float": partial(_open_number, form="<d"),
    "bytes": bytes,
    "file": bytes,
    "pil": pil_from_raw,
    "numpy": _open_numpy,
    "tensor": _open_tensor,
    "json": loads,
}
