"""Decoding on a GPU: the same images as the CPU path, bad ones too, and memory that is never used twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastload import CenterCrop, DataLoader, ImageFolder, RandomResizedCrop
from fastload.errors import DecodeError
from fastload.gpu.dali import why_no_dali
from tests.encodedimages import psnr, undecodable
from tests.photos import pillow_jpeg, scene, variants

every_decoder = pytest.mark.parametrize(
    "decoder",
    [
        pytest.param("dali", marks=pytest.mark.skipif(why_no_dali() is not None, reason=str(why_no_dali()))),
    ],
)
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]

COUNT = 48
BAD = "b/05.jpg"
# The inverse DCT and chroma of nvJPEG, which DALI uses, differ from libjpeg-turbo's in the last bits.
LEAST = 32.0


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    files = list(variants(161, 119).values())
    for k in range(COUNT):
        path = tmp_path / "photos" / "abc"[k // 16] / f"{k % 16:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[k] if k < len(files) else pillow_jpeg(scene(300 + k, 240, k)))
    return tmp_path / "photos"


@pytest.fixture(params=[RandomResizedCrop(64, flip=0.5), CenterCrop(64, resize=73)], ids=["random", "center"])
def dataset(photos: Path, request: pytest.FixtureRequest) -> Iterator[ImageFolder]:
    made = ImageFolder(str(photos), request.param)
    yield made
    made.close()


@every_decoder
def test_the_same_epochs(dataset: ImageFolder, decoder: str) -> None:
    ours = DataLoader(dataset, 8, num_workers=2, seed=1, device="cuda", decoder=decoder)
    theirs = DataLoader(dataset, 8, seed=1)
    for _ in range(2):
        for (images, labels), (expected, wanted) in zip(ours, theirs, strict=True):
            assert images.is_cuda and images.dtype is torch.uint8 and images.shape == expected.shape
            assert labels.tolist() == wanted.tolist()
            pairs = zip(images.cpu(), expected, strict=True)
            assert min(psnr(image, other) for image, other in pairs) > LEAST
    assert ours.stats()["counters"].get("decoder.fallbacks", 0) == 0


@every_decoder
def test_a_bad_image_is_raised_and_the_rest_is_whole(photos: Path, decoder: str) -> None:
    (photos / BAD).write_bytes(undecodable(pillow_jpeg(scene(300, 240))))
    dataset = ImageFolder(str(photos), CenterCrop(64, resize=73))
    iterator = iter(DataLoader(dataset, 8, num_workers=2, device="cuda", decoder=decoder))
    seen, errors = 0, []
    while True:
        try:
            seen += len(next(iterator)[1])
        except StopIteration:
            break
        except DecodeError as error:
            errors.append(error.key)
    assert errors == [BAD] and seen == COUNT - 8
    loader = DataLoader(dataset, 8, num_workers=2, device="cuda", decoder=decoder, on_error="repeat")
    assert sum(len(labels) for _, labels in loader) == COUNT
    assert [key for key, _ in loader.stats()["bad"]] == [BAD]
    dataset.close()


@every_decoder
def test_images_are_not_overwritten_while_the_device_reads_them(dataset: ImageFolder, decoder: str) -> None:
    """The consumer's stream is far behind, and drops each batch at once: their memory must wait for it."""
    loader = DataLoader(dataset, 4, num_workers=2, seed=1, device="cuda", decoder=decoder)
    expected = [images.double().sum((1, 2, 3)).tolist() for images, _ in loader]
    matrix = torch.randn(4096, 4096, device="cuda")
    again = DataLoader(dataset, 4, num_workers=2, seed=1, device="cuda", decoder=decoder)
    sums = []
    for images, _ in again:
        for _ in range(10):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        sums.append(images.double().sum((1, 2, 3)))
        del images
    assert [part.tolist() for part in sums] == expected
