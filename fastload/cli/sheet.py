"""The files of `fastload replay`: the images as a sheet of HTML or PNG, the batch for torch.load."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from fastload.errors import ArgumentError, printable
from fastload.gpu.tree import tree_leaves

Picture = np.ndarray[Any, np.dtype[np.uint8]]  # (H, W, 3)

_CHANNELS = (1, 3)

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
    """Return one file that needs no other, in sections of 64 images."""
    starts = range(0, len(cells), _PAGE)
    links = [f'<a href="#p{start}">{start + 1}-{min(start + _PAGE, len(cells))}</a>' for start in starts]
    sections = [
        f'<section id="p{start}">{"".join(map(_figure, cells[start : start + _PAGE]))}</section>'
        for start in starts
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
    """Return one image: 8 columns, or more if there are more than 256 images."""
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
        _write_line(draw, font, (_GAP, _GAP + line * _LINE), text, width - 2 * _GAP)
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
            _write_line(draw, font, (left, top + side + line * _LINE), text, side)
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def _write_line(draw: ImageDraw.ImageDraw, font: Any, place: tuple[int, int], text: str, width: int) -> None:
    """Draw one line; of a long one its end, where the names of objects differ."""
    # The built-in font may have no other letters.
    plain = printable(text).encode("ascii", "backslashreplace").decode()
    fits = next((n for n in range(len(plain), 0, -1) if draw.textlength(_end(plain, n), font) <= width), 0)
    draw.text(place, _end(plain, fits), "black", font)


def _end(text: str, letters: int) -> str:
    return text if letters >= len(text) else f"..{text[len(text) - letters :]}"


def pictures_of(batch: Any, rows: int) -> tuple[list[Picture], bool]:
    """Return (one picture for each row, whether values were scaled so that they can be seen).

    The images are the first tensor of the batch that has `rows` images with one or three channels, first or
    last. Floats are taken as they are where all are from 0 to 1; else each image is scaled from its smallest
    to its largest value.

    Raises:
        ArgumentError: the batch has no images.
    """
    leaves = list(tree_leaves(batch))
    images = next((leaf for leaf in leaves if _is_images(leaf, rows)), None)
    if images is None:
        shapes = ", ".join(f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" for leaf in leaves)
        raise ArgumentError(
            f"the batch has no images for --html and --png; its tensors are: {shapes or 'none'}. Leave these "
            "options out: the table and --tensors take any batch"
        )
    values = images.detach().cpu()
    if values.shape[1] in _CHANNELS:
        values = values.movedim(1, -1)
    scaled = values.dtype != torch.uint8 and not bool(((values >= 0) & (values <= 1)).all())
    return [_picture(image, scaled) for image in values], scaled


def _is_images(leaf: torch.Tensor, rows: int) -> bool:
    fits = leaf.ndim == 4 and leaf.shape[0] == rows and min(leaf.shape) > 0
    return fits and bool({leaf.shape[1], leaf.shape[-1]} & set(_CHANNELS)) and not leaf.is_complex()


def _picture(values: torch.Tensor, scaled: bool) -> Picture:
    if values.dtype != torch.uint8:
        values = values.double().nan_to_num()
        if scaled:
            low, high = values.min(), values.max()
            values = (values - low) / (high - low).clamp(min=1e-12)
        values = (values * 255).round().clamp(0, 255).to(torch.uint8)
    picture: Picture = values.expand(-1, -1, 3).contiguous().numpy()
    return picture


def plain(value: Any, where: str = "batch") -> Any:
    """Return the same values: tensors on the CPU, dicts, lists, texts and numbers. Others are not kept.

    Raises:
        ArgumentError: something in it is none of these; the message names the place.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()  # a slice would be saved with all of its memory
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, np.ndarray | np.generic) and np.asarray(value).dtype.kind in "biuf":
        return torch.from_numpy(np.array(value))
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name), f"{where}.{name}") for name in names}
    raise ArgumentError(
        f"--tensors: {where} is a {type(value).__module__}.{type(value).__qualname__}, and the file takes "
        "tensors, arrays, texts and numbers only: leave --tensors out, and call loader.batch_at() in Python"
    )


def _key(key: Any, where: str) -> Any:
    if type(key) in (bool, int, float, str):
        return key
    raise ArgumentError(f"--tensors: {where} has the key {key!r}, and the file takes texts and numbers only")
