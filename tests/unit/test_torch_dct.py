"""Records of cache mode "dct" by torch's operations, on a GPU where there is one, against the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image

from fastload import Cache, DataLoader, ImageFolder
from fastload.errors import ArgumentError, DecodeError
from fastload.gpu.decoders import TorchDctDecoder, exact_float32
from fastload.images import CenterCrop, RandomResizedCrop
from fastload.images.decode import has_records, to_dct
from fastload.images.encoded import EncodedImages, decode_by_kernel
from fastload.metrics.counters import Counters
from tests.encodedimages import encode, psnr
from tests.loaderdata import default
from tests.photos import pillow_jpeg, png, scene, variants

pytestmark = pytest.mark.skipif(not has_records(), reason="the kernel is not built: pip install -e .")

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
RECORDS = {kind: to_dct(data) for kind, data in variants().items()}


def decoder(on_error: str = "raise") -> TorchDctDecoder:
    return TorchDctDecoder(DEVICE, on_error, Counters(), [])


def check(encoded: EncodedImages, least: float) -> TorchDctDecoder:
    by_torch = decoder()
    images = by_torch.start(encoded)().cpu()
    expected, _ = decode_by_kernel(encoded, "raise")
    assert images.shape == expected.shape and images.dtype is torch.uint8 and images.is_contiguous()
    found = {key: psnr(images[row], expected[row]) for row, key in enumerate(encoded.keys)}
    assert min(found.values()) >= least, found
    return by_torch


@pytest.mark.parametrize("seed", [0, 100])
@pytest.mark.parametrize(
    ("crop", "least"),
    [
        (RandomResizedCrop(64, flip=0.5), 50),
        (CenterCrop(96, resize=110), 50),
        (CenterCrop((48, 96), resize=140), 50),
        (CenterCrop(64, resize=50, channels_last=True), 50),
        (
            RandomResizedCrop((20, 30), channels_last=True, flip=0.5),
            35,
        ),  # the kernel decodes at a smaller scale
    ],
)
def test_decoder_gives_the_images_of_the_kernel(
    crop: RandomResizedCrop | CenterCrop, least: float, seed: int
) -> None:
    kinds = {kind: data for kind, data in RECORDS.items() if kind not in RARE}
    assert check(encode(crop, kinds, seed), least).counters["decoder.fallbacks"] == 0


@contextmanager
def matmuls_of_low_precision() -> Iterator[None]:
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = cuda.fp32_precision, cpu.fp32_precision
    cuda.fp32_precision, cpu.fp32_precision = "tf32", "bf16"
    try:
        yield
    finally:
        now = cuda.fp32_precision, cpu.fp32_precision
        cuda.fp32_precision, cpu.fp32_precision = before
        assert now == ("tf32", "bf16"), "the training's choice was changed"


SWITCHES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast(DEVICE.type, torch.bfloat16),
    "default dtype bfloat16": lambda: default("bfloat16"),
    "default dtype float64": lambda: default("float64"),
    "inference mode": torch.inference_mode,
    "matmuls of low precision": matmuls_of_low_precision,
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_global_switches_of_torch_change_no_pixel(switch: str) -> None:
    encoded = encode(RandomResizedCrop(64, flip=0.5), {k: v for k, v in RECORDS.items() if k not in RARE})
    expected = decoder().start(encoded)()
    with SWITCHES[switch]():
        images = decoder().start(encoded)()
    assert torch.equal(images, expected)


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9 has one switch"
)
def test_precision_that_a_matmul_inherits_stays_inherited() -> None:
    """What the training chooses after the first batch has its effect."""
    matmuls = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"
        with exact_float32(DEVICE):
            assert [matmul.fp32_precision for matmul in matmuls] == ["ieee"] * 2
        torch.backends.fp32_precision = "ieee"
        assert [matmul.fp32_precision for matmul in matmuls] == ["ieee"] * 2
    finally:
        torch.backends.fp32_precision = before


RARE = ("cmyk", "ycck", "progressive cmyk", "stored as RGB", "411")


@pytest.mark.parametrize("kind", RARE)
def test_rare_kind_is_decoded_by_the_kernel(kind: str) -> None:
    by_torch = check(encode(RandomResizedCrop(32), {kind: RECORDS[kind], "420": RECORDS["420"]}), 99)
    assert by_torch.counters["decoder.fallbacks"] == 1


def test_image_that_is_no_record_is_decoded_by_the_worker() -> None:
    files = {"420": RECORDS["420"], "png": png(Image.fromarray(scene(50, 40))), "jpeg": variants()["420"]}
    encoded = encode(CenterCrop(32), files)
    assert encoded.pixel_rows.tolist() == [-1, 0, 1]
    assert check(encoded, 50).counters["decoder.fallbacks"] == 0


def test_batch_of_many_sizes_and_samplings_gives_the_images_of_the_kernel() -> None:
    sizes = [(17, 33), (16, 16), (65, 40), (31, 100), (120, 9)]
    files = {
        f"{width} x {height} {sampling}": to_dct(pillow_jpeg(scene(width, height), subsampling=sampling))
        for width, height in sizes
        for sampling in (0, 1, 2)
    }
    check(encode(RandomResizedCrop(24, scale=(0.5, 1)), files), 40)


def overwritten(record: bytes) -> bytes:
    half = len(record) // 2
    return record[:half] + b"\xff" * 40 + record[half + 40 :]


def cut_in_its_offsets(record: bytes) -> bytes:
    return record[: 20 + 3 * 128 + 8 + 3]


@pytest.mark.parametrize("damage", [overwritten, cut_in_its_offsets])
def test_damaged_record_in_a_batch_is_an_error_with_its_key(damage: Callable[[bytes], bytes]) -> None:
    files = {"good": RECORDS["420"], "bad": damage(RECORDS["420"])}
    with pytest.raises(DecodeError) as failure:
        decoder().start(encode(CenterCrop(100), files))()
    assert failure.value.key == "bad"


def test_loader_decodes_a_dct_cache_by_torch(tmp_path: Path) -> None:
    (tmp_path / "photos/a").mkdir(parents=True)
    for number in range(6):
        (tmp_path / f"photos/a/{number}.jpg").write_bytes(pillow_jpeg(scene(90, 70, number)))
    (tmp_path / "photos/a/6.png").write_bytes(png(Image.fromarray(scene(60, 60))))
    cache = Cache(tmp_path / "cache", "dct")
    dataset = ImageFolder(str(tmp_path / "photos"), CenterCrop(48, resize=56), cache=cache)
    (expected, labels), (images, again) = (
        next(iter(DataLoader(dataset, 7, decoder=name))) for name in ("cpu", "torch")
    )
    assert torch.equal(labels, again)
    assert min(psnr(image, other) for image, other in zip(images, expected, strict=True)) > 45


def test_torch_decoder_without_a_dct_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos/a").mkdir(parents=True)
    (tmp_path / "photos/a/0.jpg").write_bytes(pillow_jpeg(scene(90, 70)))
    dataset = ImageFolder(str(tmp_path / "photos"), CenterCrop(48), cache=Cache(tmp_path / "cache", "raw"))
    with pytest.raises(ArgumentError, match=r"decoder='torch' does not work.*use Cache\(path, 'dct'\)"):
        DataLoader(dataset, 1, decoder="torch")
