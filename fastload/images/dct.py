"""Records of cache mode "dct": a JPEG without its Huffman codes, lossless.

Three quarters of the time of a JPEG decode go into Huffman codes. That work is the same in every epoch, so
the cache can keep its result: the quantised coefficients, in a form that vector instructions read
(`fastload/images/dct.h`). A record is one more encoded image: all functions of `fastload.images` take it
where they take a JPEG's bytes, and its pixels are the same to the bit at each scale and in each crop.
"""

from __future__ import annotations

from fastload.errors import DecodeError
from fastload.formats.dct_record import RECORD_MAGIC as MAGIC
from fastload.images.decode import MAX_PIXELS, find_format
from fastload.images.headers import jpeg_orientation
from fastload.images.kernel import Source, record_writer

__all__ = ["MAGIC", "available", "to_dct"]


def available() -> bool:
    """Whether this process reads and writes records: the compiled kernel does, its fallback does not."""
    return record_writer() is not None


def to_dct(data: Source) -> bytes:
    """The record of an image file, or the file's own bytes where there is none.

    There is none for formats other than JPEG, for damaged files, for a few rare kinds of JPEG (several scans
    with more than 10 blocks an MCU; progressive files without their last scans), and without the kernel.
    """
    write = record_writer()
    try:
        file, name = find_format(data)
        if name == "JPEG" and write is not None:
            return write(file, jpeg_orientation(file), MAX_PIXELS)
    except (DecodeError, ValueError):
        pass  # the decode says what is wrong with it
    return bytes(data)
