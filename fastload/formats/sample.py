"""Samples as bytes, without pickle: the cache's form of a sample that is more than an object's bytes.

A value is one tag byte and its content; integers are little-endian. Arrays are padded to 64 bytes from the
start of the record, so that they can be used in place.

    N T F            None, True, False
    i  int64         int            I  u32 text     int beyond 64 bits, in hexadecimal
    d  float64       float          s  u32 utf-8    str           b  u64 bytes   bytes
    S  u32 utf-8     numpy.str_     B  u64 bytes    numpy.bytes_  v  u64 bytes   memoryview of bytes
    l t m  u32 n ..  list, tuple, dict (key, value, ...)
    a  dtype, shape, data           numpy array     g  same, scalar   numpy scalar     x  same   torch tensor

Text may have lone surrogates, like file names that are not UTF-8. Arrays and tensors are stored in C order.

A memoryview is loaded as a view of the record, so that the large values of a row are read without a copy.

Loading stays inside the record: a length that points outside it is an error, and no code is executed.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from fastload.errors import ArgumentError, DecodeError

Array = np.ndarray[Any, np.dtype[Any]]

_ALIGN = 64
_MAX_DEPTH = 64
_INT64, _FLOAT64 = struct.Struct("<q"), struct.Struct("<d")
_UINT32, _UINT64 = struct.Struct("<I"), struct.Struct("<Q")
# Other texts make numpy raise SyntaxError, or warn.
_LARGE_INT = re.compile(rb"-?0x[0-9a-f]+")
_NUMPY_DTYPE = re.compile(r"[<>|=][?bBiufcmMSUV]\d*(\[\d*[A-Za-z]+\])?", re.ASCII)
_TORCH_DTYPE = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)


class Drawn(NamedTuple):
    """An array that does not exist yet: `dump` makes it inside the record, and `load` gives a numpy array.

    Attributes:
        shape, dtype: of the array.
        draw: writes all values into an array of this shape and type.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    draw: Callable[[Array], None]


class _Record:
    """A record on the way: its pieces, put together when its size is known, so that each is copied once."""

    def __init__(self) -> None:
        self._size = 0
        self._pieces: list[bytearray | memoryview | Drawn] = [bytearray()]

    def __len__(self) -> int:
        return self._size

    def add(self, data: bytes) -> None:
        last = self._pieces[-1]
        if not isinstance(last, bytearray):
            last = bytearray()
            self._pieces.append(last)
        last += data
        self._size += len(data)

    def add_block(self, block: memoryview | Drawn) -> None:
        """Add the values of an array, which are not copied yet."""
        self._pieces.append(block)
        self._size += _nbytes(block)

    def whole(self) -> memoryview:
        """Return all of it, read-only."""
        memory = np.empty(self._size, np.uint8)
        at = 0
        for piece in self._pieces:
            end = at + _nbytes(piece)
            if isinstance(piece, Drawn):
                piece.draw(memory[at:end].view(piece.dtype).reshape(piece.shape))
            else:
                memory.data[at:end] = piece
            at = end
        return memory.data.toreadonly()


def dump(sample: Any) -> memoryview:
    """Return the sample as one record, in memory of its own.

    Raises:
        ArgumentError: a value is none of None, bool, int, float, str, bytes, memoryview, numpy array, torch
            tensor, `Drawn`, or list, tuple or dict of these. The message names the value's type and place.
        Exception: what `draw` of a `Drawn` raises.
    """
    out = _Record()
    _write(out, sample, "sample", 0)
    return out.whole()


def load(record: Any, *, readonly: bool = False) -> Any:
    """Return the sample of a record. Arrays and tensors are views of the record where its memory is writable.

    Args:
        readonly: numpy arrays are views also of read-only memory, and cannot be written to. Tensors have no
            read-only form and are copied.

    Raises:
        DecodeError: the record was not made by `dump`.
    """
    memory = memoryview(record).cast("B")
    try:
        value, end = _read(memory, 0, 0, readonly)
    except (struct.error, LookupError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise DecodeError(f"not a cached sample: {error}") from error  # RuntimeError: torch's, of odd shapes
    if end != memory.nbytes:
        raise DecodeError(f"not a cached sample: {memory.nbytes - end} bytes after its end")
    return value


def own_bytes(value: Any) -> Any:
    """Return a value with bytes of its own in place of a view, and of those within dicts."""
    if type(value) is dict:
        return {name: own_bytes(part) for name, part in value.items()}
    return bytes(value) if isinstance(value, memoryview) else value


def _write(out: _Record, value: Any, path: str, depth: int) -> None:
    write = _WRITERS.get(type(value))
    if write is None and isinstance(value, np.generic) and not isinstance(value, np.void | np.object_):
        write = _write_scalar
    if depth > _MAX_DEPTH:
        raise ArgumentError(f"{path} is nested deeper than {_MAX_DEPTH} levels, which the cache cannot keep")
    if write is None:
        raise ArgumentError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which the cache cannot keep: "
            "let the dataset return None, bool, int, float, str, bytes, numpy arrays, torch tensors, or "
            "lists, tuples and dicts of these"
        )
    write(out, value, path, depth)


def _write_int(out: _Record, value: int, path: str, depth: int) -> None:
    if -(2**63) <= value < 2**63:
        out.add(struct.pack("<cq", b"i", value))
    else:
        text = hex(value).encode()  # decimal is limited to 4,300 digits
        out.add(struct.pack("<cI", b"I", len(text)) + text)


def _write_text(out: _Record, value: str, path: str, depth: int) -> None:
    data = value.encode("utf-8", "surrogatepass")
    out.add(struct.pack("<cI", b"s" if type(value) is str else b"S", len(data)) + data)


def _write_bytes(out: _Record, value: bytes, path: str, depth: int) -> None:
    out.add(struct.pack("<cQ", b"b" if type(value) is bytes else b"B", len(value)) + value)


def _write_view(out: _Record, value: memoryview, path: str, depth: int) -> None:
    out.add(struct.pack("<cQ", b"v", value.nbytes))
    out.add_block(value.cast("B"))


def _write_sequence(out: _Record, value: list[Any] | tuple[Any, ...], path: str, depth: int) -> None:
    out.add(struct.pack("<cI", b"l" if type(value) is list else b"t", len(value)))
    for position, item in enumerate(value):
        _write(out, item, f"{path}[{position}]", depth + 1)


def _write_dict(out: _Record, value: dict[Any, Any], path: str, depth: int) -> None:
    out.add(struct.pack("<cI", b"m", len(value)))
    for key, item in value.items():
        _write(out, key, f"a key of {path}", depth + 1)
        _write(out, item, f"{path}[{key!r}]", depth + 1)


def _write_array(out: _Record, value: Array, path: str, depth: int, tag: bytes = b"a") -> None:
    if value.dtype.hasobject or value.dtype.kind in "VT":
        raise ArgumentError(f"{path} is an array of dtype {value.dtype}, which only pickle could store")
    data = np.ascontiguousarray(value).reshape(-1)  # as bytes: not every dtype has a buffer
    block = data.view(np.uint8).data if data.nbytes else memoryview(b"")
    _write_block(out, tag, value.dtype.str, value.shape, block)


def _write_drawn(out: _Record, value: Drawn, path: str, depth: int) -> None:
    _write_block(out, b"a", value.dtype.str, value.shape, value)


def _write_scalar(out: _Record, value: np.generic, path: str, depth: int) -> None:
    _write_array(out, np.asarray(value), path, depth, b"g")


def _write_tensor(out: _Record, value: torch.Tensor, path: str, depth: int) -> None:
    plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
    if not plain or value.requires_grad:
        raise ArgumentError(
            f"{path} is a {value.layout} tensor on {value.device} (requires_grad={value.requires_grad}): the "
            "cache keeps plain CPU tensors; convert it in the dataset"
        )
    try:
        data = bytes_of(value)
        shape = tuple(value.shape)
    except (RuntimeError, TypeError, NotImplementedError) as error:  # such as nested tensors
        raise ArgumentError(f"{path} is a tensor whose bytes the cache cannot keep: {error}") from error
    _write_block(out, b"x", str(value.dtype).removeprefix("torch."), shape, data)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the values of a plain CPU tensor in C order, torch's lazy conjugation and negation applied.

    Raises:
        RuntimeError, TypeError, NotImplementedError: it has no plain storage, for example a nested tensor.
    """
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    # A single value may have any stride and count as contiguous.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data


def _write_block(
    out: _Record, tag: bytes, dtype: str, shape: tuple[int, ...], data: memoryview | Drawn
) -> None:
    name = dtype.encode()
    out.add(struct.pack(f"<cBB{len(name)}s{len(shape)}Q", tag, len(name), len(shape), name, *shape))
    out.add(b"\0" * (-len(out) % _ALIGN))
    out.add_block(data)


def _nbytes(piece: bytearray | memoryview | Drawn) -> int:
    return math.prod(piece.shape) * piece.dtype.itemsize if isinstance(piece, Drawn) else len(piece)


_Writer = Callable[[_Record, Any, str, int], None]
_WRITERS: dict[type, _Writer] = {
    type(None): lambda out, value, path, depth: out.add(b"N"),
    bool: lambda out, value, path, depth: out.add(b"T" if value else b"F"),
    int: _write_int,
    float: lambda out, value, path, depth: out.add(struct.pack("<cd", b"d", value)),
    str: _write_text,
    bytes: _write_bytes,
    np.str_: _write_text,  # as an array it would lose zeros at its end
    np.bytes_: _write_bytes,
    memoryview: _write_view,
    list: _write_sequence,
    tuple: _write_sequence,
    dict: _write_dict,
    np.ndarray: _write_array,
    torch.Tensor: _write_tensor,
    Drawn: _write_drawn,
}


def _read(memory: memoryview, at: int, depth: int, readonly: bool) -> tuple[Any, int]:
    tag, at = chr(memory[at]), at + 1
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH}")
    if tag in "NTF":
        return {"N": None, "T": True, "F": False}[tag], at
    if tag in "id":
        return (_INT64 if tag == "i" else _FLOAT64).unpack_from(memory, at)[0], at + 8
    if tag in "IsbvSB":
        return _read_bytes(memory, at, tag)
    if tag in "ltm":
        return _read_container(memory, at, tag, depth, readonly)
    if tag in "agx":
        return _read_block(memory, at, tag, readonly)
    raise ValueError(f"unknown tag {tag!r} at byte {at - 1}")


def _read_bytes(memory: memoryview, at: int, tag: str) -> tuple[Any, int]:
    form = _UINT64 if tag in "bBv" else _UINT32
    (size,) = form.unpack_from(memory, at)
    at += form.size
    if size > memory.nbytes - at:
        raise ValueError(f"{size} bytes at byte {at} of {memory.nbytes}")
    if tag == "v":
        return memory[at : at + size], at + size
    data = bytes(memory[at : at + size])
    if tag == "I":
        if not _LARGE_INT.fullmatch(data):
            raise ValueError(f"{data[:20]!r} is no hexadecimal number")
        return int(data, 16), at + size
    value: Any = data if tag in "bB" else data.decode("utf-8", "surrogatepass")
    if tag in "SB":
        value = np.str_(value) if tag == "S" else np.bytes_(value)
    return value, at + size


def _read_container(memory: memoryview, at: int, tag: str, depth: int, readonly: bool) -> tuple[Any, int]:
    (count,) = _UINT32.unpack_from(memory, at)
    at += 4
    items = []
    for _ in range(count * (2 if tag == "m" else 1)):
        item, at = _read(memory, at, depth + 1, readonly)
        items.append(item)
    if tag == "m":
        return dict(zip(items[::2], items[1::2], strict=True)), at
    return (items if tag == "l" else tuple(items)), at


def _read_block(memory: memoryview, at: int, tag: str, readonly: bool) -> tuple[Any, int]:
    name_size, ndim = memory[at], memory[at + 1]
    name = bytes(memory[at + 2 : at + 2 + name_size]).decode()
    at += 2 + name_size
    shape = struct.unpack_from(f"<{ndim}Q", memory, at)
    at = -(-(at + 8 * ndim) // _ALIGN) * _ALIGN
    if not (_TORCH_DTYPE if tag == "x" else _NUMPY_DTYPE).fullmatch(name):
        raise ValueError(f"dtype {name!r}")
    dtype: Any = getattr(torch, name, None) if tag == "x" else np.dtype(name)
    kind: Any = torch.dtype if tag == "x" else np.dtype
    if not isinstance(dtype, kind) or getattr(dtype, "hasobject", False):
        raise ValueError(f"dtype {name!r}")
    size = math.prod(shape) * dtype.itemsize
    if size > memory.nbytes - at:
        raise ValueError(f"an array of {size} bytes at byte {at} of {memory.nbytes}")
    data: Array = np.frombuffer(memory, np.uint8, size, at)
    usable = data.flags.writeable or (readonly and tag == "a")
    if not usable or (dtype.itemsize > 1 and data.ctypes.data % dtype.itemsize):
        data = data.copy()
    value: Any
    if tag == "x" and size:
        value = torch.from_numpy(data).view(dtype).reshape(shape)
    elif tag == "x":
        value = torch.empty(shape, dtype=dtype, device="cpu")
    else:
        value = data.view(dtype).reshape(shape)[() if tag == "g" else ...]
    return value, at + size
