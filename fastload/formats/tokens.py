"""Files of tokens, and indexes of the documents in them: what their bytes say.

    raw       nanoGPT's .bin, Megatron's .bin, OLMo's .npy (which are no .npy files)
    .npy      \\x93NUMPY, version, header with type and shape (numpy.lib.format)
    llm.c     256 int32, little-endian: magic, version, number of tokens, zeros (dev/data/data_common.py);
              also those of modded-nanogpt

The first bytes tell them apart, not the names.

An index of documents has numbers of tokens, from the beginning of its file:

    Megatron   "MMIDIDX" 0 0 | uint64 1 | uint8 type | uint64 sequences, documents + 1 | int32 tokens of each
               sequence | int64 byte of each | int64 first sequence of each document, and their number
    OLMo       gzip of lines "start,end,...", one for each document (Dolma's tokenizer)
    .npy       the tokens before the end of each document

The first bytes tell these apart too.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastload.errors import DecodeError

HEAD = 1024  # bytes that are enough
_NPY = b"\x93NUMPY"
_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_LLM_C: dict[bytes, np.dtype[Any]] = {
    struct.pack("<ii", 20240520, 1): np.dtype("<u2"),  # GPT-2
    struct.pack("<ii", 20240801, 7): np.dtype("<u4"),  # Llama 3
}
_LLM_C_SIZE = 1024


class TokenHeader(NamedTuple):
    """What a header says.

    Attributes:
        size: its bytes; the tokens follow.
        dtype: of a token.
        tokens: their number.
    """

    size: int
    dtype: np.dtype[Any]
    tokens: int


def is_token_type(dtype: np.dtype[Any]) -> bool:
    """Return whether all its values fit into int64, as samples have them."""
    return dtype.kind in "iu" and np.can_cast(dtype, np.int64)


def header_of(head: Any) -> TokenHeader | None:
    """Return the header of a file that begins with these bytes; None: it has none, and is raw.

    Args:
        head: the first 1024 bytes, or all of a smaller file.

    Raises:
        DecodeError: it begins as a .npy file, and is not one of integers in order; or it ends within the
            header of llm.c.
    """
    begin = bytes(head[:HEAD])
    if begin.startswith(_NPY):
        return _token_header(begin)
    dtype = _LLM_C.get(begin[:8])
    if dtype is None:
        return None
    if len(begin) < _LLM_C_SIZE:
        raise DecodeError("it begins as a file of llm.c, and ends within the header: upload the object again")
    return TokenHeader(_LLM_C_SIZE, dtype, int.from_bytes(begin[8:12], "little"))


def npy_header(file: BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return (shape, whether in Fortran order, type) of an array in numpy's format. Raises as numpy does."""
    version = np.lib.format.read_magic(file)
    if version not in _READERS:
        raise ValueError(f"its version is {version}, known are 1.0 and 2.0")
    return _READERS[version](file)


def _token_header(begin: bytes) -> TokenHeader:
    file = BytesIO(begin)
    try:
        shape, fortran, dtype = npy_header(file)
    except Exception as error:  # hostile bytes: what numpy's parser raises is not documented
        raise DecodeError(f"it begins as a .npy file, and its header cannot be read: {error}") from None
    if not is_token_type(dtype):
        raise DecodeError(
            f"it is a .npy file of type {dtype}, and tokens are integers that fit into int64: name other "
            "objects"
        )
    if fortran and len(shape) > 1:
        raise DecodeError(
            f"it is a .npy file of shape {shape} in Fortran order: save np.ascontiguousarray(tokens)"
        )
    return TokenHeader(file.tell(), dtype, math.prod(shape))


# --- documents

_MEGATRON = struct.Struct("<9sQBQQ")
_MEGATRON_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_AGAIN = "make the index again"


class DocumentBounds(NamedTuple):
    """The documents of a file of tokens: document i has the tokens starts[i] to stops[i].

    Attributes:
        dtype: of the tokens, if the index says it.
    """

    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    dtype: np.dtype[Any] | None = None


def document_bounds(body: bytes, most: int) -> DocumentBounds:
    """Return what an index of documents says.

    Args:
        body: all of its bytes.
        most: bytes that a compressed index may have.

    Raises:
        DecodeError: it is no such index, or was cut.
    """
    if body.startswith(_MEGATRON_MAGIC):
        return _megatron(body)
    if body.startswith(b"\x1f\x8b"):
        return _lines(body, most)
    if body.startswith(_NPY):
        return _ends(body)
    raise DecodeError(
        "it begins as none of the known indexes: Megatron's .idx, OLMo's .csv.gz, and int64 in numpy's format"
    )


def _megatron(body: bytes) -> DocumentBounds:
    if len(body) < _MEGATRON.size:
        raise DecodeError(f"it ends within the header of a Megatron index: {_AGAIN}")
    _, version, code, sequences, edges = _MEGATRON.unpack_from(body)
    if version != 1 or code not in _MEGATRON_TYPES:
        raise DecodeError(f"it is a Megatron index of version {version} and type {code}, known is version 1")
    wanted = _MEGATRON.size + 12 * sequences + 8 * edges  # and perhaps one byte of a mode for each sequence
    if len(body) not in (wanted, wanted + sequences):
        raise DecodeError(
            f"it has {len(body):,} bytes, and the {sequences:,} sequences and {edges:,} edges of its header "
            f"take {wanted:,}: {_AGAIN}"
        )
    dtype, place = np.dtype(_MEGATRON_TYPES[code]), _MEGATRON.size
    lengths = np.frombuffer(body, "<i4", sequences, place).astype(np.int64)
    pointers = np.frombuffer(body, "<i8", sequences, place + 4 * sequences)
    documents = np.frombuffer(body, "<i8", edges, place + 12 * sequences)
    stops = np.cumsum(lengths)
    starts = stops - lengths
    if (lengths < 0).any() or (pointers != starts * dtype.itemsize).any():
        raise DecodeError(f"the sequences of the Megatron index do not lie end to end: {_AGAIN}")
    ordered = not edges or (
        documents[0] == 0 and documents[-1] == sequences and (np.diff(documents) >= 0).all()
    )
    if not ordered:
        raise DecodeError(
            f"the documents of the Megatron index are not all of its sequences, in order: {_AGAIN}"
        )
    tokens = np.concatenate([[0], stops])[documents]
    return DocumentBounds(tokens[:-1], tokens[1:], dtype)


def _lines(body: bytes, most: int) -> DocumentBounds:
    try:
        with gzip.GzipFile(fileobj=BytesIO(body)) as file:
            text = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DecodeError(f"it begins as gzip, and cannot be inflated ({error}): {_AGAIN}") from None
    if len(text) > most:
        raise DecodeError(
            f"it would be more than max_inflated={most:,} bytes inflated: if it is sound, give a larger "
            "storage_options={'max_inflated': ...}"
        )
    bounds = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            start, stop, *_ = line.split(b",", 2)
            bounds.append((int(start), int(stop)))
        except ValueError:
            raise DecodeError(
                f"its line {number} does not begin with two numbers, start and end: {_AGAIN}"
            ) from None
    try:
        starts, stops = np.array(bounds, np.int64).reshape(-1, 2).T
    except OverflowError:
        raise DecodeError(f"it has numbers of more than 64 bits: {_AGAIN}") from None
    return DocumentBounds(starts, stops)


def _ends(body: bytes) -> DocumentBounds:
    header = _token_header(body[:HEAD])
    if len(body) != header.size + header.tokens * header.dtype.itemsize:
        raise DecodeError(f"it has {len(body):,} bytes, and its header says otherwise: {_AGAIN}")
    stops = np.frombuffer(body, header.dtype, header.tokens, header.size).astype(np.int64)
    return DocumentBounds(np.concatenate([[0], stops])[:-1], stops)
