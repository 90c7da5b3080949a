"""JPEGs with an index of their rows: the same pixels, made by any crop, and refused where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fastload import RandomResizedCrop
from fastload.errors import DecodeError
from fastload.formats.jpeg import jpeg_components, jpeg_orientation, used_index, without_rows
from fastload.images import decode_image
from fastload.images import kernel as native
from fastload.images.decode import Unindexed, with_rows
from tests.photos import LIMIT, Pixels, oriented, pillow_jpeg, rare_files, scene, variants
from tests.photos import kernel_decode as decode

kernel: Any = native.kernel
pytestmark = pytest.mark.skipif(
    not getattr(kernel, "HUFFMAN", 0), reason="the kernel is not built, or its libjpeg decodes Huffman codes"
)
FILES = {**variants(), **rare_files()} if kernel else {}


def index_of(data: bytes) -> bytes | None:
    return native.row_index(data, LIMIT)


if kernel:
    kernel._set_huffman(True)  # of small files too
INDEXED = [kind for kind, data in FILES.items() if index_of(data) is not None]


def crop(data: Any, box: tuple[float, ...], size: int = 24, *, room: bytearray | None = None) -> Pixels:
    out = np.empty((1, 3, size, size), np.uint8)
    item = (0, data, *box, False) if room is None else (0, data, *box, False, room)
    assert kernel.crop_resize(out, [item], False, True, LIMIT, True) == []
    return out


def boxes(width: int, height: int, count: int, seed: int = 0) -> Iterator[tuple[float, ...]]:
    """The whole image, its last pixel, and boxes at random."""
    yield 0, 0, width, height
    yield width - 1, height - 1, width, height
    rng = np.random.default_rng(seed)
    for _ in range(count):
        x0, y0 = rng.uniform(0, width - 0.5), rng.uniform(0, height - 0.5)
        yield x0, y0, rng.uniform(x0 + 0.5, width), rng.uniform(y0 + 0.5, height)


def test_files_of_one_scan_with_huffman_codes_have_an_index() -> None:
    without = set(FILES) - set(INDEXED)
    assert {"420", "444", "gray", "restarts by block", "optimised"} <= set(INDEXED)
    plain = {kind for kind in without if "progressive" not in kind and "arithmetic" not in kind}
    assert plain == {"cmyk", "ycck", "three-scans", "unfinished"}
    for kind in without:
        assert with_rows(FILES[kind]) is FILES[kind]


def test_a_file_that_is_not_taken_for_a_jpeg_has_no_index() -> None:
    """libjpeg would read it, but without an index nobody asks libjpeg."""
    file = FILES["420"][:2] + b"\x7b" + FILES["420"][3:]
    assert with_rows(file) is file


@pytest.mark.parametrize("kind", INDEXED)
def test_crops_have_the_same_pixels_with_an_index(kind: str) -> None:
    data = FILES[kind]
    indexed = with_rows(data)
    assert len(indexed) - len(data) == 8 + 10 * (indexed[6] | indexed[7] << 8)
    width, height = kernel.jpeg_size(indexed, LIMIT, True)
    for denominator in (1, 2, 4, 8):
        assert np.array_equal(decode(indexed, denominator), decode(data, denominator))
    for box in boxes(width, height, 20):
        assert np.array_equal(crop(indexed, box), crop(data, box)), box


@pytest.mark.parametrize("kind", INDEXED)
def test_each_crop_makes_the_same_index_on_the_way(kind: str) -> None:
    data, index = FILES[kind], index_of(FILES[kind])
    assert index is not None
    width, height = kernel.jpeg_size(data, LIMIT, True)
    for size in (1, 24, 200):  # at several scales of the decode
        for box in boxes(width, height, 8, size):
            room = bytearray(len(index) + 30)
            pixels = crop(data, box, size, room=room)
            assert used_index(memoryview(room)) == index, (size, box)
            assert np.array_equal(pixels, crop(data, box, size))


def test_index_is_not_made_without_room_for_it() -> None:
    index = index_of(FILES["420"])
    assert index is not None
    room = bytearray(len(index) - 1)
    crop(FILES["420"], (0, 0, 9, 9), room=room)
    assert not any(room)


def test_damage_below_a_crop_harms_the_index_alone() -> None:
    data = bytearray(FILES["420"])
    data[-60:-2] = bytes(58)
    room = bytearray(400)
    assert np.array_equal(crop(bytes(data), (0, 0, 20, 20), room=room), crop(FILES["420"], (0, 0, 20, 20)))
    assert used_index(memoryview(room)) is None and index_of(bytes(data)) is None


def test_a_file_with_an_index_has_the_header_of_the_file() -> None:
    data = pillow_jpeg(scene(90, 60), exif=oriented(6))
    indexed = memoryview(with_rows(data))
    assert indexed != data and without_rows(indexed) == data
    assert jpeg_orientation(indexed) == 6 and jpeg_components(indexed) == 3
    assert np.array_equal(decode_image(indexed), decode_image(data))
    assert with_rows(indexed) is indexed


# --- an index is input


def refused(data: bytes, box: tuple[float, ...]) -> bool:
    out = np.empty((1, 3, 24, 24), np.uint8)
    return bool(kernel.crop_resize(out, [(0, data, *box, False)], False, True, LIMIT, True))


def test_an_index_for_another_number_of_rows_is_not_used() -> None:
    data, low = FILES["420"], (0.0, 90.0, 40.0, 119.0)
    for number in (0, 1, 7, 9):  # 119 rows of pixels are 8 of MCUs
        index = b"\x89ROW\x01\0" + number.to_bytes(2, "little") + b"\xff" * (10 * number)
        assert np.array_equal(crop(index + data, low), crop(data, low))


def test_a_place_beyond_the_data_is_refused_and_the_file_decoded_without_the_index() -> None:
    data, low = FILES["420"], (0.0, 90.0, 40.0, 119.0)
    index = index_of(data)
    assert index is not None
    for place in (8 * len(data), 0xFFFFFFFF):
        wrong = bytearray(index)
        for row in range(index[6]):
            wrong[8 + 10 * row : 12 + 10 * row] = place.to_bytes(4, "little")
        assert np.array_equal(crop(bytes(wrong) + data, low), crop(data, low))


@pytest.mark.parametrize("kind", ["420", "restarts by block", "gray"])
def test_any_index_gives_pixels_or_those_of_the_file(kind: str) -> None:
    """Pixels that nobody can tell from right ones, where a wrong index fits; never an error or a crash."""
    rng = np.random.default_rng(1)
    data, index = FILES[kind], index_of(FILES[kind])
    assert index is not None
    for _ in range(300):
        wrong = bytearray(index)
        wrong[8:] = rng.integers(0, 256, len(wrong) - 8, dtype=np.uint8).tobytes()
        for row in range(index[6]):  # half of them within the data
            if rng.integers(2):
                wrong[8 + 10 * row : 12 + 10 * row] = int(rng.integers(8 * len(data))).to_bytes(4, "little")
        assert not refused(bytes(wrong) + data, (0, 60, 100, 110))


@pytest.mark.parametrize("cut", [5, 7, 8, 30])
def test_an_index_that_is_cut_is_an_error_in_words(cut: int) -> None:
    indexed = with_rows(FILES["420"])
    with pytest.raises(DecodeError, match=r"index of the rows|Not a JPEG|Premature end"):
        decode_image(bytes(indexed[:cut]))


# --- on its way into a cache


def test_index_is_that_of_the_first_crop_or_read_through_the_file() -> None:
    data = FILES["420"]
    file = Unindexed.of(data)
    assert bytes(file) == data and file.index() == index_of(data)
    crop(data, (0, 0, 9, 9), room=file.index_room(119))
    assert file.index() == index_of(data)
    assert Unindexed.of(b"no image").index() == b""


def test_a_file_that_begins_with_an_index_itself_is_kept_as_it_is() -> None:
    """Behind a second index it would be no JPEG."""
    photo = FILES["420"]
    head = b"\x89ROW\x01\0"
    for data in (head + b"\0\0" + photo, head + b"\1\0" + bytes(10) + photo, with_rows(photo)):
        file = Unindexed.of(data)
        assert RandomResizedCrop(32).fill(np.empty((1, 3, 32, 32), np.uint8), [file], [0]) == []
        assert file.index() == b"" and np.array_equal(decode_image(data), decode_image(photo))


def test_file_is_written_once_and_given_up_where_nobody_keeps_it() -> None:
    said: list[str] = []
    for keeps in (2, 0):
        file = Unindexed.of(FILES["420"])
        file.bind(lambda one: said.append("kept"), lambda: said.append("given up"))
        view = file[10:]  # has no part in it
        for _ in range(keeps):
            file.keep()
        del view, file
    assert said == ["kept", "given up"]


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.stress)])
def test_random_files_have_the_same_pixels_with_an_index(count: int) -> None:
    rng = np.random.default_rng(count)
    for number in range(count):
        width, height = (int(rng.integers(1, 260)) for _ in range(2))
        options: dict[str, Any] = {"quality": int(rng.integers(1, 101)), "optimize": bool(rng.integers(2))}
        if number % 3:
            restarts = {"restart_marker_blocks": int(rng.integers(1, 20))}
            options |= restarts if number % 3 == 1 else {"restart_marker_rows": 1}
        mode = "L" if number % 5 == 0 else "RGB"
        if mode == "RGB":
            options["subsampling"] = int(rng.integers(3))
        data = pillow_jpeg(scene(width, height, int(rng.integers(50))), mode, **options)
        index = index_of(data)
        assert index is not None, number
        for box in boxes(width, height, 3, number):
            room = bytearray(len(index))
            assert np.array_equal(crop(index + data, box), crop(data, box, room=room)), (number, box)
            assert room == index, (number, box)
