"""Batches of encoded images: which files travel encoded, and that nothing about a sample depends on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload.errors import DecodeError
from fastload.formats.jpeg import is_plain_jpeg
from fastload.gpu.decoding import Decoding
from fastload.images import CenterCrop, RandomResizedCrop
from fastload.images.encoded import EncodedBatch, EncodedImages, decode_by_kernel
from fastload.metrics.counters import BadSamples, Counters
from fastload.workers.slots import SlotMap, SlotPool
from tests.encodedimages import ordinary
from tests.photos import oriented, pillow_jpeg, png, scene, variants

PLAIN = {"444", "422", "420", "440", "411", "gray", "optimised", "quality 5", "with EXIF and ICC"}
PLAIN |= {"restarts by row", "restarts by block"}


def _encode(
    crop: RandomResizedCrop | CenterCrop, files: dict[str, bytes], seed: int = 0
) -> tuple[EncodedImages, np.ndarray]:
    """The batch, and the CPU path's batch of the same files and seeds."""
    names, images = list(files), list(files.values())
    seeds = [seed + k for k in range(len(images))]
    batch = EncodedBatch(crop, len(images), ordinary)
    assert batch.fill(range(len(images)), images, seeds, names) == []
    expected = np.empty((len(images), *crop.sample_shape), np.uint8)
    assert crop.fill(expected, images, seeds) == []
    return batch.finish(), expected


@pytest.mark.parametrize("name", list(variants()))
def test_which_jpegs_travel_encoded(name: str) -> None:
    assert is_plain_jpeg(variants()[name]) == (name in PLAIN)


def _frame(kind: int, precision: int = 8, factors: bytes = b"\x22\x11\x11", scan: int = 3) -> bytes:
    """Segments of a JPEG without content that matters to a header check."""
    parts = b"".join(bytes([k + 1, factors[k], 0]) for k in range(len(factors)))
    frame = bytes([precision, 0, 8, 0, 8, len(factors)]) + parts
    start = bytes([scan]) + b"\x01\x00" * scan + b"\x00\x3f\x00"
    return b"\xff\xd8" + b"".join(
        bytes([0xFF, marker]) + (len(body) + 2).to_bytes(2, "big") + body
        for marker, body in ((kind, frame), (0xDA, start))
    )


@pytest.mark.parametrize(
    ("data", "plain"),
    [
        (_frame(0xC0), True),
        (_frame(0xC1), True),
        (_frame(0xC0, factors=b"\x41\x11\x11"), True),
        (_frame(0xC0, factors=b"\x22", scan=1), True),
        (_frame(0xC2), False),  # progressive
        (_frame(0xC3), False),  # lossless
        (_frame(0xC9), False),  # arithmetic
        (_frame(0xC1, precision=12), False),
        (_frame(0xC0, factors=b"\x22\x21\x21"), False),  # chroma with factors of its own
        (_frame(0xC0, factors=b"\x42\x11\x11"), False),
        (_frame(0xC0, factors=b"\x22\x11\x11\x22", scan=4), False),  # CMYK
        (_frame(0xC0, scan=1), False),  # one scan for each component
        (b"", False),
        (b"\xff\xd8", False),
        (b"\xff\xd8\xff\xd9", False),
        (b"\x89PNG\r\n\x1a\n", False),
    ],
)
def test_header_check(data: bytes, plain: bool) -> None:
    assert is_plain_jpeg(data) is plain


@given(st.binary(max_size=64) | st.tuples(st.integers(2, 700), st.integers(0, 255)) | st.integers(0, 700))
@settings(max_examples=100)
def test_header_check_takes_any_bytes(change: bytes | tuple[int, int] | int) -> None:
    data = bytearray(variants()["420"])
    if isinstance(change, bytes):
        data = bytearray(b"\xff\xd8" + change)
    elif isinstance(change, int):
        data = data[:change]
    else:
        data[change[0]] = change[1]
    assert is_plain_jpeg(bytes(data)) in (True, False)


@pytest.mark.parametrize(
    "crop",
    [
        RandomResizedCrop(40, flip=0.5),
        CenterCrop(48, resize=55),
        CenterCrop(48),
        RandomResizedCrop((20, 30), channels_last=True, flip=0.5),
    ],
)
def test_kernel_decodes_the_same_pixels(crop: RandomResizedCrop | CenterCrop) -> None:
    """The same boxes, flips and pixels as the CPU path, through slots too."""
    files = variants() | {"png": png(Image.fromarray(scene(60, 50)))}
    encoded, expected = _encode(crop, files)
    pool = SlotPool(keep=2)
    packed, fds = pool.pack([encoded, torch.arange(len(files))])
    slots = SlotMap()
    slots.attach(packed, fds)
    arrived = slots.unpack(packed)[0]
    for batch in (encoded, arrived):
        assert batch.shape == expected.shape
        assert [batch.keys[row] for row in batch.encoded_rows] == [n for n in files if n in PLAIN]
        assert len(batch.pixels) == len(files) - len(PLAIN)
        images, bad = decode_by_kernel(batch, "raise")
        assert bad == []
        assert np.array_equal(images.numpy(), expected)


@pytest.mark.parametrize(
    "crop", [CenterCrop(200), CenterCrop((60, 200)), CenterCrop(70, resize=60, channels_last=True)]
)
def test_padded_images_travel_as_pixels(crop: CenterCrop) -> None:
    encoded, expected = _encode(crop, {"a": variants()["420"]})
    assert len(encoded.encoded_rows) == 0
    images, _ = decode_by_kernel(encoded, "raise")
    assert np.array_equal(images.numpy(), expected) and not expected.all()


def test_bytes_are_laid_out_to_fit() -> None:
    """Exactly the bytes of the files; a row copied from another shares its file."""
    files = {"a": variants()["420"], "b": variants()["gray"], "c": variants()["progressive"]}
    batch = EncodedBatch(RandomResizedCrop(16, flip=0.5), 5, ordinary)
    assert batch.fill([0, 2, 4], list(files.values()), [1, 2, 3], list(files)) == []
    batch.copy_row(1, 0)
    batch.copy_row(3, 4)
    encoded = batch.finish()
    assert encoded.data.shape == (len(files["a"]) + len(files["b"]),)
    assert bytes(encoded.file(0)) == bytes(encoded.file(1)) == files["a"]
    assert bytes(encoded.file(2)) == files["b"]
    assert encoded.pixel_rows.tolist() == [-1, -1, -1, 0, 0]
    assert encoded.keys == ["a", "a", "b", "c", "c"]
    images, _ = decode_by_kernel(encoded, "raise")
    assert torch.equal(images[0], images[1]) and torch.equal(images[3], images[4])


def test_nothing_to_decode() -> None:
    """A batch without a single JPEG carries no bytes."""
    encoded, expected = _encode(RandomResizedCrop(16, flip=0.5), {"png": png(Image.fromarray(scene(60, 50)))})
    assert encoded.data.numel() == 0 and len(encoded.encoded_rows) == 0
    assert np.array_equal(decode_by_kernel(encoded, "raise")[0].numpy(), expected)


def test_bad_images_are_found_where_they_are_read() -> None:
    """Damaged headers, cut files, no images and too large ones: errors of `fill`, each with its position."""
    good = variants()["420"]
    images = [good, good[:-40], b"", b"<html>", good[:30], png(Image.fromarray(scene(9, 9)))[:50]]
    crop, smaller = RandomResizedCrop(16, flip=0.5), RandomResizedCrop(16, flip=0.5)
    crop._max_pixels, smaller._max_pixels = 161 * 119, 161 * 119 - 1
    batch = EncodedBatch(crop, len(images), ordinary)
    failures = batch.fill(range(len(images)), images, range(len(images)), "abcdef")
    assert [position for position, _ in failures] == [1, 2, 3, 4, 5]
    small = EncodedBatch(smaller, 1, ordinary)
    [(position, error)] = small.fill([0], [good], [0], ["a"])
    assert position == 0 and "max_pixels" in str(error)


def _damaged(data: bytes) -> bytes:
    """Good header and end, broken in the middle of the entropy-coded data."""
    middle = data.index(b"\xff\xda") + 40
    return data[:middle] + b"\xff\xc4" + data[middle + 2 :]


def test_on_error_where_no_decoder_can_decode() -> None:
    good = pillow_jpeg(scene(64, 48))
    crop = RandomResizedCrop(16, scale=(1, 1), flip=0.5)
    encoded, _ = _encode(crop, {"a": good, "b": good})
    spoilt = EncodedBatch(crop, 3, ordinary)
    assert spoilt.fill([0, 1, 2], [good, _damaged(good), good], [0, 1, 2], ["a", "bad.jpg", "c"]) == []
    encoded = spoilt.finish()
    assert len(encoded.encoded_rows) == 3  # its header says nothing of it
    with pytest.raises(DecodeError, match="bad") as caught:
        decode_by_kernel(encoded, "raise")
    assert caught.value.key == "bad.jpg"
    images, bad = decode_by_kernel(encoded, "repeat")
    assert [key for key, _ in bad] == ["bad.jpg"]
    assert any(torch.equal(images[1], images[row]) for row in (0, 2))
    alone = EncodedBatch(crop, 1, ordinary)
    alone.fill([0], [_damaged(good)], [0], ["bad.jpg"])
    with pytest.raises(DecodeError, match="bad"):
        decode_by_kernel(alone.finish(), "repeat")


class _Recorder(Decoding):
    """Decodes by the kernel, and records its calls."""

    started = 0

    def start(self, encoded: EncodedImages):
        self.started += 1
        return lambda: decode_by_kernel(encoded, "raise")[0]


def test_encoded_images_anywhere_in_a_batch() -> None:
    encoded, expected = _encode(RandomResizedCrop(16, flip=0.5), {"a": variants()["420"]})
    decoder = _Recorder("torch", None, on_error="raise", counters=Counters(), bad=BadSamples())
    labels = torch.tensor([3])
    started = decoder.begin([encoded, {"x": (encoded, labels)}, "text"])
    assert decoder.started == 1, "it occurs twice, and is decoded once"
    first, second, text = decoder.finish(started)
    assert np.array_equal(first.numpy(), expected) and np.array_equal(second["x"][0].numpy(), expected)
    assert second["x"][1] is labels and text == "text"


def test_exif_orientation_is_not_applied() -> None:
    """Like in the CPU path and in torchvision, the box follows from the stored size."""
    photo = pillow_jpeg(scene(80, 40), exif=oriented(6))
    encoded, _ = _encode(RandomResizedCrop(16, flip=0.5), {"a": photo})
    assert encoded.sizes.tolist() == [[80, 40]]
