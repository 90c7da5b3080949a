from collections.abc import Sequence
from typing import Any, Literal

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
def set_threads(count: int) -> int: ...
def begin_rows(
    out: NDArray[np.uint8],
    places: NDArray[np.void],
    rows: NDArray[np.int64],
    seeds: NDArray[np.uint64],
    law: tuple[Literal["random"], float, float, float, float, float] | tuple[Literal["centre"], float, float],
    pixels: bool,
    channels_last: bool,
    clamp: bool,
    max_pixels: int,
    strict: bool,
    owner: object,
) -> Any: ...
def finish_rows(job: Any) -> tuple[list[tuple[int, str]], float, float]: ...
def read_ahead(places: NDArray[np.void]) -> None: ...
def take_by_libjpeg() -> int: ...
def row_index(jpeg: Any, max_pixels: int) -> bytes: ...
def dct_record(jpeg: Any, orientation: int, max_pixels: int) -> bytes: ...
