"""AVIF and HEIC, the image formats that are files of boxes (ISO/IEC 14496-12, 23008-12).

AVIF is opened by Pillow, or by TorchCodec where Pillow was built without it, as Pillow-SIMD mostly is. HEIC
is opened by pillow-heif. TorchCodec was rejected for HEIC: it decodes every image of a file before it tells
how many there are, and needs a libheif of the system, which pillow-heif brings along.

An AVIF's turn (irot, imir) is an EXIF orientation, as in Pillow, and is not applied. libheif applies a HEIC's
turn to the pixels, which then have none. Of several images the first one counts, in a HEIC the primary one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import __version__ as torch_version

from fastload.errors import DecodeError
from fastload.formats.jpeg import exif_of
from fastload.images.kernel import Pixels

if TYPE_CHECKING:
    from PIL.Image import Image


_AVIF = frozenset({b"avif", b"avis"})
_HEIC = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"})
# Images of any coding. An AVIF has to name its own brand too, a HEIC often does not.
_ANY = frozenset({b"mif1", b"msf1"})
_LONGEST_FTYP = 256  # 60 brands
_MOST_BOXES = 10_000
_DEEPEST = 4  # pictures composed of pictures that are composed themselves
_PADDED = 4  # the tiles of a picture reach over its edges: in one of a tile's size, to four times its pixels
# (irot: quarter turns to the left, imir: axis) -> the EXIF orientation that does the same.
_ORIENTATIONS = {
    (0, None): 1, (0, 0): 4, (0, 1): 2, (1, None): 8, (1, 0): 5, (1, 1): 7,
    (2, None): 3, (2, 0): 2, (2, 1): 4, (3, None): 6, (3, 0): 7, (3, 1): 5,
}  # fmt: skip


class _Header(NamedTuple):
    width: int  # of the largest image, before it is turned
    height: int
    orientation: int
    animated: bool


def sniff_boxes(data: memoryview) -> str | None:
    """Return "AVIF" or "HEIF", Pillow's name, by the brands of the first box; None for another file."""
    if bytes(data[4:8]) != b"ftyp":
        return None
    end = min(int.from_bytes(data[:4], "big"), len(data), _LONGEST_FTYP)
    brands = [bytes(data[at : at + 4]) for at in (8, *range(16, end - 3, 4))]
    for brand in brands:
        if brand in _AVIF or brand in _HEIC:
            return "AVIF" if brand in _AVIF else "HEIF"
    return "HEIF" if _ANY.intersection(brands) else None


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Refuse an image by its header, before its pixels are allocated.

    Raises:
        ValueError: it has too many.
    """
    if width * height > max_pixels:
        raise ValueError(
            f"{width} x {height} pixels are more than max_pixels={max_pixels}: "
            "resize the image before, or read it by a decode= of your own"
        )


def why_no_avif() -> str | None:
    """Return None where AVIF can be decoded; else the remedy."""
    why = None if _pillow_has_avif() else why_no_torchcodec()
    if why is None:
        return None
    return (
        f"this build of Pillow has no AVIF. {why}. Or: pip uninstall -y pillow-simd, then "
        "pip install --force-reinstall pillow"
    )


@functools.cache
def why_no_torchcodec() -> str | None:
    """Return None where TorchCodec can decode images; else the remedy. Asked once a process."""
    try:
        import torchcodec
        import torchcodec.decoders
    except ImportError as error:
        return f"TorchCodec is missing: pip install torchcodec ({error})"
    except (OSError, RuntimeError) as error:  # its libraries are of another build than torch
        why = error.__cause__ or error
        return f"TorchCodec does not load: {why}. Install the build for torch {torch_version}"
    if not hasattr(torchcodec.decoders, "decode_jpeg"):
        return f"TorchCodec {torchcodec.__version__} decodes no images: pip install 'torchcodec>=0.16'"
    return None


def why_no_heic() -> str | None:
    """Return None where HEIC can be decoded; else the remedy."""
    try:
        import pillow_heif  # noqa: F401
    except ImportError as error:
        return f"HEIC images need pillow-heif: pip install pillow-heif ({error})"
    return None


def open_avif(data: memoryview, max_pixels: int) -> Image:
    """Open an AVIF as a PIL image. TorchCodec's is decoded already, and RGB without alpha.

    Raises:
        DecodeError: TorchCodec would decode more than one image of it.
        Exception: of any type, on damaged bytes.
    """
    from PIL import Image

    if _pillow_has_avif():
        return Image.open(BytesIO(data), formats=["AVIF"])
    header = _read_header(data)
    check_size(header.width, header.height, max_pixels)
    if header.animated:
        raise DecodeError(
            "an animated AVIF, of which TorchCodec decodes all images at once: Pillow takes the first one: "
            "pip uninstall -y pillow-simd, then pip install --force-reinstall pillow"
        )
    from torchcodec.decoders import decode_avif

    # With mode="RGB" it would darken what is transparent. Pillow's convert("RGB") only leaves out the alpha.
    planes = decode_avif(bytes(data), mode="UNCHANGED")[:3]
    image = Image.fromarray(_turned_back(planes.permute(1, 2, 0).numpy(), header.orientation))
    if header.orientation != 1:
        image.info["exif"] = exif_of(header.orientation)
    return image


def open_heic(data: memoryview, max_pixels: int) -> Image:
    """Open and decode a HEIC as a PIL image. Pillow's own list of formats is not changed.

    Raises:
        Exception: of any type, on damaged bytes.
    """
    from pillow_heif import HeifImageFile

    image: Image = HeifImageFile(BytesIO(data))
    declared = image.size
    check_size(*declared, max_pixels)
    composed = _most_composed(data)
    if composed > _PADDED * max_pixels:
        raise ValueError(f"composed of {composed} pixels, more than {_PADDED} times max_pixels={max_pixels}")
    image.load()
    if image.size != declared:
        raise ValueError(f"decoded to {image.size}, its header says {declared}")
    return image


@functools.cache  # where it has none, each question searches the disk
def _pillow_has_avif() -> bool:
    from PIL import features

    return bool(features.check("avif"))


def _turned_back(pixels: Pixels, orientation: int) -> Pixels:
    """Return the pixels before an EXIF orientation was applied."""
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels if orientation < 5 else pixels.swapaxes(0, 1))


def _read_header(data: memoryview) -> _Header:
    """Read what the boxes of an AVIF say.

    Raises:
        ValueError: they say no size, for example because the file was cut.
    """
    sizes: list[tuple[int, int]] = []
    orientation, animated = 1, False
    for kind, body in _boxes(data):
        animated = animated or kind == b"moov"
        if kind == b"meta":
            meta = dict(_boxes(body[4:]))
            properties = dict(_boxes(meta.get(b"iprp", body[:0])))
            listed = list(_boxes(properties.get(b"ipco", body[:0])))
            sizes += [
                (int.from_bytes(part[4:8], "big"), int.from_bytes(part[8:12], "big"))
                for kind, part in listed
                if kind == b"ispe" and len(part) >= 12
            ]
            if any(kind in (b"irot", b"imir") for kind, _ in listed):
                item = _primary_item(meta.get(b"pitm", body[:0]))
                orientation = _orientation(listed, properties.get(b"ipma", body[:0]), item)
    if not sizes:
        raise ValueError("no size in its header: the file was cut, or is damaged")
    width, height = max(sizes, key=lambda size: size[0] * size[1])
    return _Header(width, height, orientation, animated)


def _most_composed(data: memoryview) -> int:
    """Return how many pixels are decoded for the one picture of a HEIC that takes the most.

    A picture may be composed of others (a grid, an overlay), of one of them a thousand times. libheif decodes
    each again, however small the whole is.

    Raises:
        ValueError: the boxes are ambiguous, or pictures are composed too deep.
    """
    meta = list(_boxes(_only(b"meta", list(_boxes(data)))[4:]))
    properties = list(_boxes(_only(b"iprp", meta)))
    listed = list(_boxes(_only(b"ipco", properties)))
    sizes, parts = dict[int, int](), dict[int, Counter[int]]()
    for kind, ipma in properties:
        for item, numbers in _associations(ipma) if kind == b"ipma" else ():
            for kind, body in (listed[number - 1] for number in numbers if 0 < number <= len(listed)):
                if kind == b"ispe":
                    width, height = int.from_bytes(body[4:8], "big"), int.from_bytes(body[8:12], "big")
                    sizes[item] = max(sizes.get(item, 0), width * height)
    iref = _only(b"iref", meta)
    width = 4 if len(iref) and iref[0] else 2
    for kind, body in _boxes(iref[4:]):
        if kind == b"dimg":
            item, *items = (
                int.from_bytes(body[at : at + width], "big")
                for at in (0, *range(width + 2, len(body) - width + 1, width))
            )
            parts.setdefault(item, Counter()).update(items)
    known: dict[int, int] = {}

    def composed(item: int, depth: int) -> int:
        if depth > _DEEPEST:
            raise ValueError(f"its pictures are composed of others more than {_DEEPEST} times over")
        if item not in known:
            of = parts.get(item, {}).items()
            known[item] = sum(times * composed(part, depth + 1) for part, times in of) or sizes.get(item, 0)
        return known[item]

    return max((composed(item, 0) for item in {*sizes, *parts}), default=0)


def _only(kind: bytes, boxes: list[tuple[bytes, memoryview]]) -> memoryview:
    """Return the body of the one box of a kind; of none, an empty one."""
    found = [body for other, body in boxes if other == kind]
    if len(found) > 1:
        raise ValueError(f"{len(found)} boxes {kind.decode()!r} in the place of one")
    return found[0] if found else memoryview(b"")


def _boxes(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Return (type, body) of the boxes beside each other, up to the first one that is damaged or cut.

    Raises:
        ValueError: there are more than any image has.
    """
    at = 0
    for _ in range(_MOST_BOXES):
        size, start = int.from_bytes(data[at : at + 4], "big"), at + 8
        if size == 1:
            size, start = int.from_bytes(data[at + 8 : at + 16], "big"), at + 16
        elif size == 0:
            size = len(data) - at
        if start > len(data) or size < start - at or at + size > len(data):
            return
        yield bytes(data[at + 4 : at + 8]), data[start : at + size]
        at += size
    raise ValueError(f"more than {_MOST_BOXES} boxes beside each other")  # a size may be behind them


def _primary_item(pitm: memoryview) -> int:
    wide = len(pitm) > 0 and pitm[0] > 0
    return int.from_bytes(pitm[4 : 8 if wide else 6], "big")


def _orientation(listed: list[tuple[bytes, memoryview]], ipma: memoryview, item: int) -> int:
    """Return the orientation by the properties of one item."""
    angle, axis = 0, None
    for number in next((numbers for other, numbers in _associations(ipma) if other == item), []):
        kind, body = listed[number - 1] if 0 < number <= len(listed) else (b"", ipma[:0])
        if kind == b"irot" and len(body):
            angle = body[0] & 3
        elif kind == b"imir" and len(body):
            axis = body[0] & 1
    return _ORIENTATIONS[angle, axis]


def _associations(ipma: memoryview) -> Iterator[tuple[int, list[int]]]:
    """Return (item, the numbers, from 1, of the properties that belong to it)"""
    if len(ipma) < 8:
        return
    id_size, wide = (4 if ipma[0] else 2), ipma[3] & 1
    at, width = 8, 2 if wide else 1
    while at + id_size < len(ipma):
        item, start = int.from_bytes(ipma[at : at + id_size], "big"), at + id_size + 1
        at = start + width * ipma[start - 1]
        numbers = (int.from_bytes(ipma[k : k + width], "big") for k in range(start, at, width))
        yield item, [number & (0x7FFF if wide else 0x7F) for number in numbers]
