"""Which JPEGs every decoder reads, and in the same way: told from their headers, in a few microseconds.

ITU-T T.81 for the segments (B.2) and frame types (table B.1), T.872 for Adobe's APP14.
"""

from __future__ import annotations

from typing import Any

__all__ = ["is_plain_jpeg"]

_SOF0, _SOF1, _SOS, _EOI, _APP0, _APP14 = 0xC0, 0xC1, 0xDA, 0xD9, 0xE0, 0xEE
# All other frame types: progressive, lossless, hierarchical, arithmetic-coded. (C4, C8 and CC are no frames.)
_OTHER_FRAMES = frozenset(range(0xC2, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Sampling factors (horizontal << 4 | vertical) of luma over chroma's 0x11: 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1.
_LUMA_FACTORS = frozenset({0x11, 0x21, 0x22, 0x12, 0x41})


def is_plain_jpeg(data: Any) -> bool:
    """Whether this is a JPEG that hardware and GPU decoders take and that has one reading.

    Sequential, Huffman-coded, 8 bits, one scan, and grayscale or YCbCr in a common subsampling. Not: CMYK,
    RGB, arithmetic, lossless, 12 bits; and not progressive, which hardware engines refuse, and whose Huffman
    codes a GPU's software decoder leaves to the CPU of the trainer's process.

    Args:
        data: the file, in anything with the buffer protocol. It may be any bytes at all.
    """
    view = memoryview(data).cast("B")
    if bytes(view[:2]) != b"\xff\xd8":
        return False
    at, jfif, adobe, components = 2, False, -1, b""
    while at + 4 <= len(view) and view[at] == 0xFF:
        marker = view[at + 1]
        if marker == 0xFF:  # fill
            at += 1
            continue
        length = view[at + 2] << 8 | view[at + 3]
        body = view[at + 4 : at + 2 + length]
        if length < 2 or len(body) != length - 2 or marker in _OTHER_FRAMES or marker == _EOI:
            return False
        if marker in (_SOF0, _SOF1):
            components = _components(bytes(body))
        elif marker == _APP0:
            jfif = jfif or bytes(body[:5]) == b"JFIF\0"
        elif marker == _APP14 and bytes(body[:5]) == b"Adobe" and len(body) >= 12:
            adobe = body[11]
        elif marker == _SOS:
            all_in_one_scan = len(body) > 0 and body[0] * 3 == len(components)
            return all_in_one_scan and (len(components) == 3 or _is_ycbcr(components, jfif, adobe))
        at += 2 + length
    return False


def _components(frame: bytes) -> bytes:
    """(id, factors, table) of each component of a frame header that is 8 bits deep; nothing if it is not."""
    count = frame[5] if len(frame) > 5 else 0
    whole = frame[0] == 8 and len(frame) == 6 + 3 * count and count in (1, 3) if frame else False
    return frame[6:] if whole else b""


def _is_ycbcr(components: bytes, jfif: bool, adobe: int) -> bool:
    """Three components that are luma and chroma, by the rules of libjpeg, in a common subsampling."""
    rgb = adobe == 0 if not jfif and adobe >= 0 else not jfif and components[::3] == b"RGB"
    return not rgb and components[1] in _LUMA_FACTORS and components[4] == components[7] == 0x11
