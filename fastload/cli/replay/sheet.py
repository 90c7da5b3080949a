"""A contact sheet: the images of a step in a grid, each with its row, key and label; as HTML or PNG."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont

from fastload.cli.replay.pictures import Picture
from fastload.printable import printable

__all__ = ["Cell", "html_sheet", "png_sheet"]

_PAGE = 64  # images of a page
_LOSSLESS = 96  # pixels of a side, up to which an image of the HTML is a PNG; a larger one is a JPEG
_COLUMNS, _NARROWEST, _WIDEST, _LINE, _GAP = 8, 128, 256, 14, 8  # of the PNG, in pixels
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 24px; color: #1f2933; background: #fff }
nav a { margin-right: 12px }
section { display: grid; grid-template-columns: repeat(auto-fill, minmax(180px, 1fr)); gap: 16px;
          margin: 16px 0; content-visibility: auto; contain-intrinsic-size: auto 2400px }
figure { margin: 0 }
img { width: 100%; image-rendering: pixelated; background: #eee }
figcaption { overflow-wrap: anywhere; font-size: 12px }
.faint { color: #7b8794 }
@media (prefers-color-scheme: dark) { body { color: #e4e7eb; background: #1f2933 } img { background: #333 } }
"""


class Cell(NamedTuple):
    """One image of the sheet.

    Attributes:
        title: the row and the label.
        lines: what stands below it: the key, the crop.
    """

    picture: Picture
    title: str
    lines: tuple[str, ...]


def html_sheet(title: str, notes: Sequence[str], cells: Sequence[Cell]) -> str:
    """One file that needs no other, in sections of 64 images."""
    starts = range(0, len(cells), _PAGE)
    links = [f'<a href="#p{at}">{at + 1}-{min(at + _PAGE, len(cells))}</a>' for at in starts]
    sections = [
        f'<section id="p{at}">{"".join(map(_figure, cells[at : at + _PAGE]))}</section>' for at in starts
    ]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f"<title>{_escaped(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{_escaped(title)}</h1>",
            *(f'<p class="faint">{_escaped(note)}</p>' for note in notes),
            f"<nav>{''.join(links)}</nav>" if len(links) > 1 else "",
            *sections,
            "</body></html>\n",
        ]
    )


def _figure(cell: Cell) -> str:
    lines = "".join(f'<br><span class="faint">{_escaped(line)}</span>' for line in cell.lines)
    return (
        f'<figure><img loading="lazy" alt="{_escaped(cell.title)}" src="{_data_url(cell.picture)}">'
        f"<figcaption>{_escaped(cell.title)}{lines}</figcaption></figure>"
    )


def _escaped(text: str) -> str:
    return escape(printable(text))


def _data_url(picture: Picture) -> str:
    kind = "PNG" if max(picture.shape[:2]) <= _LOSSLESS else "JPEG"
    file = io.BytesIO()
    Image.fromarray(picture).save(file, kind, **({} if kind == "PNG" else {"quality": 92}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def png_sheet(title: str, notes: Sequence[str], cells: Sequence[Cell]) -> bytes:
    """One image: 8 columns, or more if there are more than 256 images."""
    columns = max(1, min(len(cells), max(_COLUMNS, math.isqrt(len(cells)))))
    side = max((max(cell.picture.shape[:2]) for cell in cells), default=_NARROWEST)
    side = min(_WIDEST, max(_NARROWEST, side))
    below = _LINE * (1 + max((len(cell.lines) for cell in cells), default=0))
    head = _LINE * (1 + len(notes)) + 2 * _GAP
    width = max(columns * (side + _GAP) + _GAP, 640)
    height = head + math.ceil(len(cells) / columns) * (side + below + _GAP) + _GAP
    sheet = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for line, text in enumerate((title, *notes)):
        _write(draw, font, (_GAP, _GAP + line * _LINE), text, width - 2 * _GAP)
    for number, cell in enumerate(cells):
        left = _GAP + number % columns * (side + _GAP)
        top = head + number // columns * (side + below + _GAP)
        image = Image.fromarray(cell.picture)
        times = side // max(image.size)
        if times > 1:
            image = image.resize((times * image.width, times * image.height), Image.Resampling.NEAREST)
        image.thumbnail((side, side))
        sheet.paste(image, (left, top))
        for line, text in enumerate((cell.title, *cell.lines)):
            _write(draw, font, (left, top + side + line * _LINE), text, side)
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def _write(draw: ImageDraw.ImageDraw, font: Any, at: tuple[int, int], text: str, width: int) -> None:
    """One line; of a long one its end, where the names of objects differ."""
    # The built-in font may have no other letters.
    plain = printable(text).encode("ascii", "backslashreplace").decode()
    fits = next((n for n in range(len(plain), 0, -1) if draw.textlength(_end(plain, n), font) <= width), 0)
    draw.text(at, _end(plain, fits), "black", font)


def _end(text: str, letters: int) -> str:
    return text if letters >= len(text) else f"..{text[len(text) - letters :]}"
