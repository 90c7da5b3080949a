"""AVIF and HEIC, files of boxes, and what WebP can hold: as Pillow's convert("RGB") makes them."""

from __future__ import annotations

import importlib
import struct
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, features

from fastload import Cache, CenterCrop, DataLoader, ImageFolder, ObjectDataset, TarDataset
from fastload.cli.doctor import check_formats
from fastload.errors import DecodeError
from fastload.formats.tar import TarWriter
from fastload.images import decode_image, decode_pil, heif
from fastload.images.decode import find_format, is_image
from tests.photos import oriented, psnr, scene

FOLDER = Path(__file__).parent.parent / "data" / "boxed"
SIZE = (48, 32)
FIRST, SECOND = scene(*SIZE), scene(*SIZE, 1)
AVIF = {k: (FOLDER / f"turned-{k}.avif").read_bytes() for k in range(1, 9)}

pillow_avif = pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
real_torchcodec = pytest.mark.skipif(
    heif.why_no_torchcodec() is not None, reason=str(heif.why_no_torchcodec())
)
needs_heic = pytest.mark.skipif(heif.why_no_heic() is not None, reason=str(heif.why_no_heic()))


def _decode_avif(source: bytes, *, mode: str) -> torch.Tensor:
    """As TorchCodec's: RGB or RGBA, channels first, turned; of the files in AVIF only."""
    assert mode == "UNCHANGED" and isinstance(source, bytes)
    orientation = next((k for k, data in AVIF.items() if data == source), None)
    if orientation is None:
        raise RuntimeError("avifDecoderParse failed: Truncated data")
    image = Image.fromarray(FIRST)
    image.info["exif"] = oriented(orientation).tobytes()
    turned = np.array(ImageOps.exif_transpose(image))
    return torch.from_numpy(turned).permute(2, 0, 1)


def _put_torchcodec(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchcodec", "torchcodec.decoders"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["torchcodec.decoders"]).update(decode_avif=_decode_avif, decode_jpeg=None)
    vars(sys.modules["torchcodec"]).update(decoders=sys.modules["torchcodec.decoders"])
    heif.why_no_torchcodec.cache_clear()


@pytest.fixture(
    params=[
        pytest.param("Pillow", marks=pillow_avif),
        pytest.param("TorchCodec", marks=real_torchcodec),
        "TorchCodec's stand-in",
    ]
)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Decodes AVIF."""
    if request.param != "Pillow":
        monkeypatch.setattr(heif, "_pillow_has_avif", lambda: False)
    if request.param == "TorchCodec's stand-in":
        _put_torchcodec(monkeypatch)
    yield request.param
    monkeypatch.undo()
    heif.why_no_torchcodec.cache_clear()


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No library decodes AVIF or HEIC."""
    monkeypatch.setattr(heif, "_pillow_has_avif", lambda: False)
    for name in ("torchcodec", "pillow_heif"):
        monkeypatch.setitem(sys.modules, name, None)
    heif.why_no_torchcodec.cache_clear()
    yield
    monkeypatch.undo()
    heif.why_no_torchcodec.cache_clear()


def read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def with_box(data: bytes, kind: bytes, at: int, value: bytes) -> bytes:
    """With other bytes at a place in the body of the first box of this type."""
    start = data.index(kind) + 4 + at
    return data[:start] + value + data[start + len(value) :]


# --- pixels


@pytest.mark.parametrize("orientation", AVIF)
def test_avif_is_its_picture_not_turned_and_keeps_its_orientation(library: str, orientation: int) -> None:
    data = AVIF[orientation]
    pixels = decode_image(data)
    assert pixels.shape == FIRST.shape and psnr(pixels, FIRST) > 35
    image = decode_pil(data)
    assert image.getexif().get(0x0112, 1) == orientation
    assert ImageOps.exif_transpose(image).size == (SIZE if orientation < 5 else SIZE[::-1])
    if library == "Pillow":
        np.testing.assert_array_equal(pixels, np.asarray(Image.open(BytesIO(data)).convert("RGB")))


def test_avif_of_ten_bits_or_with_alpha_is_its_picture(library: str) -> None:
    if library == "TorchCodec's stand-in":
        pytest.skip("it knows the files of AVIF only")
    assert psnr(decode_image(read("alpha.avif")), FIRST) > 35
    assert psnr(decode_image(read("ten-bits.avif")), scene(96, 64)) > 33


def test_animated_avif_is_its_first_picture_or_an_error_of_torchcodec(library: str) -> None:
    """TorchCodec would decode all of them, without a limit."""
    data = read("animated.avif")
    if library == "Pillow":
        assert psnr(decode_image(data), FIRST) > 35
    else:
        with pytest.raises(DecodeError, match=r"animated AVIF.*pip uninstall -y pillow-simd"):
            decode_image(data)


@pytest.mark.parametrize("number", AVIF)
def test_torchcodecs_pixels_equal_pillows(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Where both are installed: nothing tells who decoded, but a rounding of the last bits."""
    if heif.why_no_torchcodec() is not None or not features.check("avif"):
        pytest.skip("needs both")
    expected = decode_image(AVIF[number])
    monkeypatch.setattr(heif, "_pillow_has_avif", lambda: False)
    assert np.abs(decode_image(AVIF[number]).astype(int) - expected).max() <= 2


@needs_heic
@pytest.mark.parametrize("name", ["turned-1", "turned-6", "second-of-two", "alpha", "ten-bits"])
def test_heic_is_its_primary_picture_upright(name: str) -> None:
    data = read(f"{name}.heic")
    expected = SECOND if name == "second-of-two" else FIRST
    if name == "turned-6":
        expected = np.rot90(FIRST, -1)
    pixels = decode_image(data)
    assert pixels.shape == expected.shape and psnr(pixels, expected) > 40
    assert decode_pil(data).getexif().get(0x0112, 1) == 1
    opened = importlib.import_module("pillow_heif").HeifImageFile(BytesIO(data))
    np.testing.assert_array_equal(pixels, np.asarray(opened.convert("RGB")))
    assert "HEIF" not in Image.OPEN, "Pillow opens what it opened before"


@pytest.mark.skipif(not features.check("webp"), reason="this Pillow has no WebP")
def test_webp_with_alpha_animation_and_orientation_is_its_first_picture() -> None:
    first, second = Image.fromarray(FIRST), Image.fromarray(SECOND)
    alpha = first.convert("RGBA")
    alpha.putalpha(second.convert("L"))
    for image, options in (
        (alpha, {"exact": True}),
        (first, {"save_all": True, "append_images": [second]}),
        (first, {"exif": oriented(6)}),
    ):
        file = BytesIO()
        image.save(file, "WEBP", lossless=True, **options)
        np.testing.assert_array_equal(decode_image(file.getvalue()), FIRST)
    assert decode_pil(file.getvalue()).getexif()[0x0112] == 6


# --- datasets and caches


@pytest.mark.parametrize("mode", ["raw", "shrunk", "decoded"])
def test_avif_in_every_cache_mode(library: str, mode: str, tmp_path: Path) -> None:
    """Tar members, and in a folder of images the keys that it is given."""
    root = tmp_path / "photos" / "a"
    root.mkdir(parents=True)
    (root / "0.avif").write_bytes(AVIF[6])
    (root / "1").write_bytes(AVIF[1])
    shard = tmp_path / "0.tar"
    with shard.open("wb") as file:
        writer = TarWriter(file)
        writer.write("0", {"avif": AVIF[6]})
        writer.close()

    def sets() -> list[Any]:
        cache = Cache(tmp_path / mode, mode, short_side=16)
        return [
            ImageFolder(str(root.parent), _upright, keys=["a/0.avif", "a/1"], cache=cache),
            TarDataset(str(shard), fields=("avif",), transform={"avif": _upright}, cache=cache),
        ]

    turned, plain = _upright(decode_pil(AVIF[6])), _upright(decode_pil(AVIF[1]))
    for _ in range(2):  # made anew, and from the cache
        for dataset in sets():
            with closing(dataset):
                samples = list(DataLoader(dataset, None))
                for (image, *_), expected in zip(samples, (turned, plain), strict=False):
                    assert psnr(image.numpy(), expected) > 22
                assert len(samples) == (2 if isinstance(dataset, ImageFolder) else 1)
                dataset._flush_cache()


def _upright(image: Image.Image) -> np.ndarray[Any, Any]:
    return np.array(ImageOps.exif_transpose(image).resize((16, 16)))


def test_objects_go_by_their_content_not_their_name(library: str, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name, orientation in (("0.jpg", 3), ("1", 1)):
        (tmp_path / "photos" / name).write_bytes(AVIF[orientation])
    cache = Cache(tmp_path / "cache", "decoded", short_side=32)
    crop = CenterCrop((32, 48), channels_last=True)
    for _ in range(2):  # made anew, and from the cache
        with closing(ObjectDataset(str(tmp_path / "photos"), transform=crop, cache=cache)) as dataset:
            for image in (dataset[0], dataset[1]):
                assert psnr(image.numpy(), FIRST) > 25
            dataset._flush_cache()


@needs_heic
@pytest.mark.parametrize("mode", ["raw", "shrunk", "decoded"])
def test_heic_in_every_cache_mode(mode: str, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "0.heic").write_bytes(read("turned-6.heic"))
    cache = Cache(tmp_path / mode, mode, short_side=32)
    crop = CenterCrop((48, 32), channels_last=True)
    for _ in range(2):  # made anew, and from the cache
        with closing(ObjectDataset(str(tmp_path / "photos"), transform=crop, cache=cache)) as dataset:
            assert psnr(dataset[0].numpy(), np.rot90(FIRST, -1)) > 25
            dataset._flush_cache()


def test_avif_under_a_fused_transform_is_cut_like_its_pixels(library: str) -> None:
    crop = CenterCrop(20, resize=24)
    out = np.empty((2, *crop.sample_shape), np.uint8)
    assert crop.fill(out, [AVIF[3], decode_image(AVIF[3])], [0, 0]) == []
    np.testing.assert_array_equal(out[0], out[1])


# --- what is bad


def test_libraries_that_are_missing_are_named(nothing: None) -> None:
    with pytest.raises(
        DecodeError,
        match=r"has no AVIF\. TorchCodec is missing: .*Or: pip uninstall -y pillow-simd",
    ):
        decode_image(AVIF[1])
    with pytest.raises(DecodeError, match="HEIC images need pillow-heif: pip install pillow-heif"):
        decode_image(read("turned-1.heic"))


def test_doctor_says_which_formats_can_be_decoded_and_what_the_others_need(
    nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = check_formats()
    assert check.state == "ok" and check.found.startswith("JPEG, PNG, GIF")
    assert check.found.endswith("AVIF, HEIC") and "; not " in check.found
    assert "this build of Pillow has no AVIF" in check.advice
    assert "HEIC images need pillow-heif" in check.advice
    monkeypatch.setattr("fastload.images.decode.why_not", lambda name: None)
    check = check_formats()
    assert (check.found, check.advice) == ("JPEG, PNG, GIF, BMP, TIFF, PPM, WebP, AVIF, HEIC", "")


def _ftyp(*brands: bytes, size: int | None = None) -> bytes:
    body = b"".join([brands[0], bytes(4), *brands[1:]])
    return (8 + len(body) if size is None else size).to_bytes(4, "big") + b"ftyp" + body


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (_ftyp(b"avif", b"mif1", b"miaf"), "AVIF"),
        (_ftyp(b"avis", b"msf1", b"avif"), "AVIF"),
        (_ftyp(b"mif1", b"avif"), "AVIF"),
        (_ftyp(b"mif1", b"heic"), "HEIF"),
        (_ftyp(b"heix", b"mif1"), "HEIF"),
        (_ftyp(b"hevc", b"msf1"), "HEIF"),
        (_ftyp(b"msf1"), "HEIF"),
        (_ftyp(b"isom", b"avc1", b"mp42"), None),  # a video
        (_ftyp(b"qt  "), None),
        (_ftyp(b"isom", b"avif", size=16), None),  # behind the end of the box
        (_ftyp(b"avif", size=0), "AVIF"),
        (_ftyp(b"isom", *[b"mp42"] * 1000, b"avif"), None),
        (b"\0\0\0\x14ftyp", None),
        (b"\0\0\0\x14ftypav", None),
    ],
)
def test_formats_are_found_by_their_brands(data: bytes, name: str | None) -> None:
    assert is_image(data) == (name is not None)
    if name is None:
        with pytest.raises(DecodeError, match="not a JPEG, PNG, WebP, AVIF, HEIC, GIF"):
            decode_image(data)
    else:
        assert find_format(data)[1] == name


def test_huge_sizes_are_refused_before_anything_is_decoded(library: str) -> None:
    """Whatever the largest of several images says."""
    huge = with_box(AVIF[1], b"ispe", 4, (20_000).to_bytes(4, "big") * 2)
    with pytest.raises(
        DecodeError, match="20000 x 20000 pixels are more" if library != "Pillow" else "AVIF: "
    ):
        decode_image(huge)
    assert decode_image(AVIF[1], max_pixels=48 * 32).shape == FIRST.shape
    with pytest.raises(DecodeError, match="48 x 32 pixels are more than max_pixels=1535"):
        decode_image(AVIF[1], max_pixels=48 * 32 - 1)


@needs_heic
def test_heic_that_is_larger_than_it_says_is_refused() -> None:
    data = read("turned-1.heic")
    with pytest.raises(DecodeError, match="48 x 32 pixels are more than max_pixels=1535"):
        decode_image(data, max_pixels=48 * 32 - 1)
    for side in (8, 60_000):
        with pytest.raises(DecodeError, match="HEIF: "):
            decode_image(with_box(data, b"ispe", 4, side.to_bytes(4, "big") * 2))


def _box(kind: bytes, *body: bytes) -> bytes:
    content = b"".join(body)
    return struct.pack(">I", 8 + len(content)) + kind + content


def _grid(side: int, rows: int, columns: int, tile: int, levels: int = 1) -> bytes:
    """A HEIC of `side` pixels: `rows` x `columns` times the next item, down to the last one, the tile."""
    one = dict(heif._boxes(memoryview(read("turned-1.heic"))))
    meta = dict(heif._boxes(one[b"meta"][4:]))
    coding = dict(heif._boxes(dict(heif._boxes(meta[b"iprp"]))[b"ipco"]))[b"hvcC"]
    last, grid = levels + 1, struct.pack(">BBBBHH", 0, 0, rows - 1, columns - 1, side, side)
    grids, version = range(1, last), bytes(4)
    names = [(item, b"hvc1" if item == last else b"grid") for item in range(1, last + 1)]
    infos = [_box(b"infe", b"\2\0\0\0", struct.pack(">HH", item, 0), kind, b"\0") for item, kind in names]
    parts = [
        _box(b"dimg", struct.pack(">HH", item, rows * columns), struct.pack(">H", item + 1) * rows * columns)
        for item in grids
    ]
    sizes = [_box(b"ispe", version, struct.pack(">II", length, length)) for length in (side, tile)]
    of_grids = [struct.pack(">HBB", item, 1, 1) for item in grids]
    properties = _box(
        b"iprp",
        _box(b"ipco", *sizes, _box(b"hvcC", coding)),
        _box(b"ipma", version, struct.pack(">I", last), *of_grids, struct.pack(">HBBB", last, 2, 2, 0x83)),
    )

    def head(start: int) -> bytes:
        places = [struct.pack(">HHHHII", item, 1, 0, 1, 0, len(grid)) for item in grids]
        places.append(struct.pack(">HHHHII", last, 0, 0, 1, start, len(one[b"mdat"])))
        return _box(b"ftyp", b"heic", version, b"mif1heic") + _box(
            b"meta",
            version,
            _box(b"hdlr", version, version, b"pict", bytes(13)),
            _box(b"pitm", version, b"\0\1"),
            _box(b"iloc", b"\1\0\0\0\x44\0", struct.pack(">H", last), *places),
            _box(b"iinf", version, struct.pack(">H", last), *infos),
            _box(b"iref", version, *parts),
            properties,
            _box(b"idat", grid),
        )

    return head(len(head(0)) + 8) + _box(b"mdat", one[b"mdat"])


@needs_heic
@pytest.mark.parametrize(
    ("hostile", "says"),
    [
        (_grid(64, 10, 10, 8_000), "composed of 6400000000 pixels, more than 4 times max_pixels=1000000"),
        (_grid(64, 16, 16, 64, levels=3), "composed of 68719476736 pixels"),
        (_grid(64, 2, 2, 64, levels=9), "composed of others more than 4 times over"),
    ],
    ids=["tiles larger than the whole", "grids of grids", "grids of grids of grids"],
)
def test_heic_is_refused_by_what_it_is_composed_of(hostile: bytes, says: str) -> None:
    """16 KB kept a core for a minute: each tile is decoded, however small the picture is."""
    with pytest.raises(DecodeError, match=says):
        decode_image(hostile, max_pixels=1_000_000)


@pytest.mark.parametrize("name", ["turned-6.avif", "turned-6.heic"])
def test_cut_boxes_are_an_error_wherever_they_end(library: str, name: str) -> None:
    if name.endswith("heic") and heif.why_no_heic() is not None:
        pytest.skip(str(heif.why_no_heic()))
    data = read(name)
    for end in range(0, len(data) - 1, 61):
        with pytest.raises(DecodeError):
            decode_image(data[:end])


@pytest.mark.parametrize("name", ["turned-6.avif", "turned-6.heic", "animated.avif"])
def test_flipped_bytes_end_in_an_error_or_an_image(library: str, name: str) -> None:
    if name.endswith("heic") and heif.why_no_heic() is not None:
        pytest.skip(str(heif.why_no_heic()))
    rng, data = np.random.default_rng(0), read(name)
    for _ in range(60):
        damaged = bytearray(data)
        for at in rng.integers(0, min(len(data), 400), 2):  # the boxes
            damaged[at] = int(rng.integers(256))
        with suppress(DecodeError):
            assert decode_image(bytes(damaged), max_pixels=1 << 20).ndim == 3


def test_boxes_without_end_cost_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of empty boxes, sizes beyond 64 bits, an association of four billion items."""
    _put_torchcodec(monkeypatch)
    monkeypatch.setattr(heif, "_pillow_has_avif", lambda: False)
    empty = (8).to_bytes(4, "big") + b"free"
    head = _ftyp(b"avif")
    endless = (1).to_bytes(4, "big") + b"meta" + b"\xff" * 8
    many = with_box(AVIF[6], b"ipma", 4, b"\xff" * 4)
    for data in (head + empty * 2_000_000, head + endless, many):
        with pytest.raises(
            DecodeError, match=r"no size in its header|more than 10000 boxes|avifDecoderParse"
        ):
            decode_image(data)
    heif.why_no_torchcodec.cache_clear()
