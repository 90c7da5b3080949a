"""The first bytes of a JPEG, read in a few microseconds: its kind, its orientation, and how caches keep it.

    a record of mode "dct"       no Huffman codes: `fastload/images/dct.h`
    a file with its row index    the index of its rows, then the file: `fastload/images/rows.h`

ITU-T T.81 for the segments (B.2) and frame types (table B.1), T.872 for Adobe's APP14, Exif 2.32 for APP1.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any

# The last byte is the version. At 5 follows the EXIF orientation, at 7 the number of components.
DCT_MAGIC = b"\x89DCT\x01"
# The last byte is the version. At 6 follows the number of entries.
ROWS_MAGIC = b"\x89ROW\x01"
_HEAD, _ENTRY = 8, 10


def is_dct(data: Any) -> bool:
    """Return whether bytes, in anything with the buffer protocol, are a record of mode "dct"."""
    view = memoryview(data).cast("B")
    return len(view) > 7 and view[:5] == DCT_MAGIC


def is_record(data: Any) -> bool:
    """Return whether bytes, in anything with the buffer protocol, begin like a record of either kind."""
    return bytes(memoryview(data).cast("B")[:5]) in (DCT_MAGIC, ROWS_MAGIC)


def without_rows(data: memoryview) -> memoryview:
    """Return a file without the index of its rows; itself where it has none."""
    index = used_index(data)
    return data if index is None else data[len(index) :]


def index_size(rows: int) -> int:
    """Return the bytes of an index."""
    return _HEAD + _ENTRY * rows


def used_index(data: memoryview) -> memoryview | None:
    """Return the index with which bytes begin, if they do."""
    if len(data) < _HEAD or data[:5] != ROWS_MAGIC:
        return None
    return data[: index_size(data[6] | data[7] << 8)]


_SOF0, _SOF1, _SOS, _EOI = 0xC0, 0xC1, 0xDA, 0xD9
_JUNK, _SCAN = 0, -1  # in the place of a marker: bytes between two segments, and all that follows the header
_APP0, _APP1, _APP14 = 0xE0, 0xE1, 0xEE
# All other frame types: progressive, lossless, hierarchical, arithmetic-coded. (C4, C8 and CC are no frames.)
_OTHER_FRAMES = frozenset(range(0xC2, 0xD0)) - {0xC4, 0xC8, 0xCC}
# TEM and the restarts have no segment.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_ORIENTATION = 0x0112
_TYPES = {1: "B", 3: "H", 4: "I"}  # TIFF's BYTE, SHORT, LONG
# Sampling factors (horizontal << 4 | vertical) of luma over chroma's 0x11: 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1.
_LUMA_FACTORS = frozenset({0x11, 0x21, 0x22, 0x12, 0x41})


def is_plain_jpeg(data: Any) -> bool:
    """Return whether hardware and GPU decoders take this JPEG, and every decoder reads it in the same way.

    True for sequential, Huffman-coded, 8 bits, one scan, grayscale or YCbCr in a common subsampling. False
    for CMYK, RGB, arithmetic, lossless, 12 bits, progressive. Hardware engines refuse progressive files; a
    GPU's software decoder leaves their Huffman codes to the CPU of the trainer's process.

    Args:
        data: the file, in anything with the buffer protocol. Any bytes are allowed.
    """
    view = memoryview(data).cast("B")
    jfif, adobe, components = False, -1, b""
    for marker, body in _segments(view):
        if marker in _OTHER_FRAMES or marker in (_EOI, _JUNK):
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
    return False


def jpeg_components(data: Any) -> int:
    """Return the number of components of a JPEG or a record: 1 is grey. 0 where the header is damaged."""
    view = without_rows(memoryview(data).cast("B"))
    if is_dct(view):
        return view[7]
    for marker, body in _segments(view):
        if marker in (_SOF0, _SOF1) or marker in _OTHER_FRAMES:
            return body[5] if len(body) > 5 else 0
    return 0


def jpeg_orientation(data: Any) -> int:
    """Return the orientation of a JPEG, 1 to 8, as Pillow's `exif_transpose` does: of EXIF, or else of XMP.

    1 where there is none, or it cannot be read. A record has that of its JPEG.
    """
    view = without_rows(memoryview(data).cast("B"))
    if is_dct(view):
        return view[5] if 1 <= view[5] <= 8 else 1
    exif, xmp = list[bytes](), b""
    for marker, body in _segments(view):
        if marker == _APP1 and bytes(body[: len(_EXIF)]) == _EXIF:
            exif.append(bytes(body[len(_EXIF) :]))  # a second segment continues the first
        elif marker == _APP1 and bytes(body[: len(_XMP)]) == _XMP:
            xmp = bytes(body[len(_XMP) :])
    found = _tiff_orientation(b"".join(exif))
    if found is None:
        match = re.search(rb'tiff:Orientation(?:="|>)([0-9])', xmp)
        found = int(match[1]) if match else 1
    return found if 1 <= found <= 8 else 1


def has_end(data: Any) -> bool:
    """Return whether an end marker follows the header of a JPEG. Bytes after it are ignored."""
    view = memoryview(data).cast("B")
    if bytes(view[-2:]) == b"\xff\xd9":
        return True
    return any(marker == _SCAN and b"\xff\xd9" in bytes(body) for marker, body in _segments(view))


def exif_of(orientation: int) -> bytes:
    """Return EXIF data with an orientation and nothing else."""
    entry = struct.pack(">HHIHH", _ORIENTATION, 3, 1, orientation, 0)
    return _EXIF + b"MM\0*" + struct.pack(">IH", 8, 1) + entry + bytes(4)


def with_orientation(jpeg: bytes, orientation: int) -> bytes:
    """Add an orientation to a JPEG without EXIF data."""
    at = 4 + int.from_bytes(jpeg[4:6], "big") if jpeg[2:4] == b"\xff\xe0" else 2  # after JFIF's segment
    exif = exif_of(orientation)
    return jpeg[:at] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + jpeg[at:]


def _segments(view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Return (marker, body) of the segments of a JPEG's header, up to one that is cut; then its _SCAN.

    libjpeg and Pillow pass over bytes between them, and so does this: these are _JUNK, without a body.
    """
    at = 2 if bytes(view[:2]) == b"\xff\xd8" else len(view)
    while match := _MARKER.search(view, at):
        start = match.end() + 2
        length = int.from_bytes(view[start - 2 : start], "big")
        if length < 2 or bytes(view[at : match.start()]).strip(b"\xff"):  # more FF belong to the marker
            yield _JUNK, view[:0]
        marker, at = view[start - 3], start + max(0, length - 2)
        if at > len(view):
            return
        yield marker, view[start:at]
        if marker == _SOS:
            yield _SCAN, view[at:]
            return


def _tiff_orientation(exif: bytes) -> int | None:
    """Return the orientation in the first directory of EXIF data, which is TIFF; None without one.

    As in Pillow, a doubled header counts once, and of two orientations the last one.
    """
    head = 0
    while exif.startswith(_EXIF, head):
        head += len(_EXIF)
    orientation: int | None = None
    tiff = exif[head:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return None
    (start,) = struct.unpack_from(order + "I", tiff, 4)
    if start + 2 > len(tiff):
        return None
    (entries,) = struct.unpack_from(order + "H", tiff, start)
    for at in range(start + 2, min(start + 2 + 12 * entries, len(tiff) - 11), 12):
        tag, kind, count = struct.unpack_from(order + "HHI", tiff, at)
        if tag == _ORIENTATION and kind in _TYPES and count == 1:
            orientation = int(struct.unpack_from(order + _TYPES[kind], tiff, at + 8)[0])
    return orientation


def _components(frame: bytes) -> bytes:
    """Return (id, factors, table) of each component, from a frame header of 8 bits; empty for others."""
    count = frame[5] if len(frame) > 5 else 0
    whole = frame[0] == 8 and len(frame) == 6 + 3 * count and count in (1, 3) if frame else False
    return frame[6:] if whole else b""


def _is_ycbcr(components: bytes, jfif: bool, adobe: int) -> bool:
    """Return whether three components are luma and chroma, by libjpeg's rules, in a common subsampling."""
    rgb = adobe == 0 if not jfif and adobe >= 0 else not jfif and components[::3] == b"RGB"
    return not rgb and components[1] in _LUMA_FACTORS and components[4] == components[7] == 0x11
