"""Files of tokens: integers of one type, one after the other, behind a header or without one.

    raw       nanoGPT's .bin, Megatron's .bin, OLMo's .npy (which are no .npy files)
    .npy      \\x93NUMPY, version, header with type and shape (numpy.lib.format)
    llm.c     256 int32, little-endian: magic, version, number of tokens, zeros (dev/data/data_common.py);
              also those of modded-nanogpt

The first bytes tell them apart, not the names.
"""

from __future__ import annotations

import math
import struct
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np

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
        return _npy_header(begin)
    dtype = _LLM_C.get(begin[:8])
    if dtype is None:
        return None
    if len(begin) < _LLM_C_SIZE:
        raise DecodeError("it begins as a file of llm.c, and ends within the header: upload the object again")
    return TokenHeader(_LLM_C_SIZE, dtype, int.from_bytes(begin[8:12], "little"))


def _npy_header(begin: bytes) -> TokenHeader:
    file = BytesIO(begin)
    try:
        version = np.lib.format.read_magic(file)
        if version not in _READERS:
            raise ValueError(f"its version is {version}, known are 1.0 and 2.0")
        shape, fortran, dtype = _READERS[version](file)
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
