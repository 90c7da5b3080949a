"""The kernel's own Huffman decoder: pixels, records and errors are libjpeg's, whatever the file is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ImageFile

from fastload import DataLoader, ImageFolder, RandomResizedCrop
from fastload.images import kernel as native
from tests.photos import LIMIT, Pixels, pillow_jpeg, rare_files, scene, variants
from tests.photos import kernel_decode as decode

kernel: Any = native.kernel
pytestmark = pytest.mark.skipif(
    not getattr(kernel, "HUFFMAN", 0), reason="the kernel is not built, or its libjpeg decodes Huffman codes"
)

KINDS = {**variants(), **rare_files()} if kernel else {}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def small_files_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 1 << 24)  # Pillow cannot write noise with less
    kernel._set_huffman(True)
    kernel.take_by_libjpeg()
    yield
    kernel._set_huffman(True)


def crop(data: bytes, box: tuple[float, ...]) -> Pixels:
    out = np.empty((1, 3, 32, 32), np.uint8)
    assert kernel.crop_resize(out, [(0, data, *box, False)], False, True, LIMIT, True) == []
    return out


def outcome(make: Any, *arguments: Any) -> bytes | str:
    """What a call returns, or the text of its error."""
    try:
        found = make(*arguments)
    except ValueError as error:
        return str(error)
    return found if isinstance(found, bytes) else found.tobytes()


def by_libjpeg(make: Any, *arguments: Any) -> bytes | str:
    kernel._set_huffman(False)
    try:
        return outcome(make, *arguments)
    finally:
        kernel._set_huffman(True)
        kernel.take_by_libjpeg()


def check(data: bytes, rng: np.random.Generator, name: object) -> None:
    """Whole at each scale, in crops, and as a record."""
    width, height = kernel.jpeg_size(data, LIMIT, False)
    for denominator in (1, 2, 4, 8):
        assert outcome(decode, data, denominator) == by_libjpeg(decode, data, denominator), name
    for _ in range(4):
        x0, y0 = rng.uniform(0, width - 0.5), rng.uniform(0, height - 0.5)
        box = (x0, y0, rng.uniform(x0 + 0.5, width), rng.uniform(y0 + 0.5, height))
        assert outcome(crop, data, box) == by_libjpeg(crop, data, box), (name, box)
    assert outcome(kernel.dct_record, data, 1, LIMIT) == by_libjpeg(kernel.dct_record, data, 1, LIMIT), name


@every_kind
def test_pixels_and_records_are_those_of_libjpegs_decoder(kind: str) -> None:
    check(KINDS[kind], np.random.default_rng(3), kind)


@pytest.mark.parametrize(
    ("width", "height"),
    [(1, 1), (1, 17), (8, 8), (15, 33), (1, 65_500), pytest.param(65_500, 1, marks=pytest.mark.stress)],
)
def test_extreme_shapes(width: int, height: int) -> None:
    for kind, data in variants(width, height).items():
        check(data, np.random.default_rng(4), kind)


def made(rng: np.random.Generator) -> bytes:
    """A JPEG of any content, quality, sampling, tables and restart markers."""
    width, height = (int(rng.integers(1, 260)) for _ in range(2))
    content = int(rng.integers(4))
    if content == 0:
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    elif content == 1:
        pixels = np.full((height, width, 3), rng.integers(0, 256, 3), np.uint8)
    elif content == 2:  # the largest numbers, at each end of a block
        pixels = (rng.integers(0, 2, (height, width, 1)) * 255).repeat(3, 2).astype(np.uint8)
    else:
        pixels = scene(width, height, int(rng.integers(50)))
    mode = str(rng.choice(["RGB", "RGB", "RGB", "L", "CMYK"]))
    options: dict[str, Any] = {"quality": int(rng.integers(1, 101)), "optimize": bool(rng.integers(2))}
    if mode == "RGB":
        options["subsampling"] = int(rng.integers(3))
    match int(rng.integers(3)):
        case 0:
            options["restart_marker_blocks"] = int(rng.integers(1, 20))
        case 1:
            options["restart_marker_rows"] = int(rng.integers(1, 4))
    return pillow_jpeg(pixels, mode, **options)


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.stress)])
def test_random_files(count: int) -> None:
    rng = np.random.default_rng(count)
    for number in range(count):
        data = made(rng)
        check(data, rng, number)
        assert kernel.take_by_libjpeg() == 0, f"file {number} was not decoded by the kernel's own decoder"


def test_damaged_files_have_the_pixels_and_errors_of_libjpegs_decoder() -> None:
    rng = np.random.default_rng(6)
    data = {kind: KINDS[kind] for kind in ("420", "444", "gray", "restarts by block", "optimised")}
    told = set()
    for kind, sound in data.items():
        scan = sound.index(b"\xff\xda")
        for _ in range(60):
            bad = bytearray(sound)
            for _ in range(int(rng.integers(1, 4))):
                bad[int(rng.integers(scan + 14, len(bad) - 2))] = int(
                    rng.choice([0, 0xFF, rng.integers(256)])
                )
            for strict in (True, False):
                found = outcome(decode, bytes(bad), 1, strict)
                assert found == by_libjpeg(decode, bytes(bad), 1, strict), kind
                told.add(found if isinstance(found, str) else "")
    assert len(told) > 3, "errors of several kinds"


@pytest.mark.parametrize("kind", ["progressive", "arithmetic"])
def test_other_codes_are_libjpegs_and_counted(kind: str) -> None:
    decode(KINDS[kind])
    assert kernel.take_by_libjpeg() == 1
    assert kernel.take_by_libjpeg() == 0


def test_a_symbol_with_two_codes_is_libjpegs() -> None:
    """No encoder writes it. Which code it was could not be told from the symbol."""
    data = bytearray(KINDS["444"])
    table = data.index(b"\xff\xc4\x00\xb5\x10") + 5 + 16  # the symbols of AC table 0
    data[table + 100] = data[table + 101]
    assert outcome(decode, bytes(data)) == by_libjpeg(decode, bytes(data))
    outcome(decode, bytes(data))
    assert kernel.take_by_libjpeg() == 1


def test_threads_keep_tables_of_their_own() -> None:
    """Of files with tables that differ from image to image."""
    files = [pillow_jpeg(scene(120, 90, seed), quality=30 + seed, optimize=True) for seed in range(12)]
    expected = [by_libjpeg(decode, data) for data in files]
    wrong: list[int] = []

    def work(first: int) -> None:
        for at in range(first, first + 60):
            if outcome(decode, files[at % 12]) != expected[at % 12]:
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stats_count_the_images_of_libjpeg(tmp_path: Path, num_workers: int) -> None:
    folder = tmp_path / "class"
    folder.mkdir()
    for number in range(8):
        kind = "progressive" if number < 3 else "420"
        (folder / f"{number}.jpg").write_bytes(KINDS[kind])
    loader = DataLoader(ImageFolder(str(tmp_path), RandomResizedCrop(32)), 4, num_workers=num_workers)
    assert sum(len(images) for images, _ in loader) == 8
    assert loader.stats()["counters"]["decode.by_libjpeg"] == 3
    assert torch.is_tensor(next(iter(loader))[0])
