from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIMD: str
LIBJPEG_TURBO: str
RECORDS: int
HUFFMAN: int

def jpeg_size(data: Any, max_pixels: int, strict: bool) -> tuple[int, int]: ...
def decode(data: Any, out: NDArray[np.uint8], denominator: int, max_pixels: int, strict: bool) -> None: ...
def crop_resize(
    out: NDArray[np.uint8],
    items: Sequence[
        tuple[int, Any, float, float, float, float, bool]
        | tuple[int, Any, float, float, float, float, bool, bytearray]
    ],
    channels_last: bool,
    clamp: bool,
    max_pixels: int,
    strict: bool,
) -> list[tuple[int, str]]: ...
def take_by_libjpeg() -> int: ...
def row_index(jpeg: Any, max_pixels: int) -> bytes: ...
def dct_record(jpeg: Any, orientation: int, max_pixels: int) -> bytes: ...
