"""DataLoader(decoder=...): who decodes changes who decodes, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, TensorDataset

import fastload
from fastload import (
    Cache,
    CenterCrop,
    Dali,
    DataLoader,
    ImageFolder,
    ObjectDataset,
    RandomResizedCrop,
)
from fastload.errors import ArgumentError, DecodeError
from fastload.gpu.dali import why_no_dali
from tests.encodedimages import psnr, undecodable
from tests.photos import oriented, pillow_jpeg, png, scene
from tests.sharddata import write

pytestmark = pytest.mark.usefixtures("no_leaks")  # all of them read local files

needs_dali = pytest.mark.skipif(why_no_dali() is not None, reason=str(why_no_dali()))
every_decoder = pytest.mark.parametrize("decoder", [pytest.param("dali", marks=needs_dali)])
every_workers = pytest.mark.parametrize("num_workers", [0, 2])

COUNT = 24
BAD, HIDDEN = "b/05.jpg", "c/04.jpg"


@functools.cache
def _photo(k: int) -> bytes:
    pixels = scene(120 + k, 90, k)
    if k % 8 == 3:
        return pillow_jpeg(pixels, progressive=True)
    return png(Image.fromarray(pixels)) if k % 8 == 6 else pillow_jpeg(pixels)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    names = [f"{'abc'[k // 8]}/{k % 8:02}.{'png' if k % 8 == 6 else 'jpg'}" for k in range(COUNT)]
    return Path(write(tmp_path / "photos", {name: _photo(k) for k, name in enumerate(names)}))


@pytest.fixture
def folder(photos: Path, keep: Callable[[Any], Any]) -> Callable[..., ImageFolder]:
    def make(transform: Any = None, **options: Any) -> Any:
        return keep(ImageFolder(str(photos), transform or RandomResizedCrop(32, flip=0.5), **options))

    return make


def _epoch(loader: DataLoader[Any]) -> tuple[torch.Tensor, list[int]]:
    """All images and all labels of an epoch."""
    batches = list(loader)
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches]).tolist()


def _alike(images: torch.Tensor, others: torch.Tensor, least: float = 33) -> bool:
    """The same pictures, crops and flips, in the same order; scaled decoding stays above this."""
    return min(psnr(a, b) for a, b in zip(images, others, strict=True)) > least


@every_decoder
@pytest.mark.parametrize(("device", "num_workers"), [("cpu", 0), (None, 2)])
def test_the_same_epochs(folder: Any, decoder: str, num_workers: int, device: str | None) -> None:
    """Two epochs, shuffled: the images of the CPU path, in its order, with its crops, flips and labels."""
    dataset = folder()

    def loader(decoder: str) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(
            dataset,
            5,
            shuffle=True,
            generator=generator,
            num_workers=num_workers,
            seed=1,
            device=device,
            decoder=decoder,
        )

    ours, theirs = loader(decoder), loader("cpu")
    for _ in range(2):
        (images, labels), (expected, wanted) = _epoch(ours), _epoch(theirs)
        assert labels == wanted and images.shape == expected.shape
        assert _alike(images, expected)
    counters = ours.stats()["counters"]
    assert counters["decoder.batches"] == 10
    assert counters["decoder.samples"] == 2 * COUNT * 6 / 8  # two of eight are PNG and progressive
    assert counters["collate.samples"] == 2 * COUNT
    assert ours.stats()["decode"] == {"decoder": decoder}
    assert (
        theirs.stats()["decode"] == {"decoder": "cpu"} and "decoder.batches" not in theirs.stats()["counters"]
    )


@every_decoder
@pytest.mark.parametrize("mode", ["auto", pytest.param("raw", marks=pytest.mark.stress), "shrunk"])
def test_through_the_cache(folder: Any, tmp_path: Path, decoder: str, mode: str) -> None:
    dataset = folder(CenterCrop(48, resize=55), cache=Cache(tmp_path / "cache", mode, short_side=60))
    ours, theirs = (
        DataLoader(dataset, 8, num_workers=2, decoder=each, persistent_workers=True)
        for each in (decoder, "cpu")
    )
    for _ in range(2):
        assert _alike(_epoch(ours)[0], _epoch(theirs)[0])
    assert ours.stats()["counters"]["cache.hits"] >= COUNT


@every_decoder
def test_with_a_batch_transform_and_channels_last(folder: Any, decoder: str) -> None:
    """The transform gets pixels; Normalize runs on the decoder's device."""
    dataset = folder(RandomResizedCrop(32, channels_last=True, flip=0.5))
    normalize = fastload.Normalize((0.5,) * 3, (0.25,) * 3, channels_last=True)

    def transform(batch: Any) -> Any:
        images, labels = batch
        assert images.shape[1:] == (32, 32, 3)
        return normalize(images), labels

    results = [
        _epoch(DataLoader(dataset, 6, num_workers=2, seed=1, decoder=each, batch_transform=transform))[0]
        for each in (decoder, "cpu")
    ]
    assert results[0].shape == (COUNT, 3, 32, 32) and results[0].dtype is torch.float32
    assert float((results[0] - results[1]).abs().mean()) < 0.1


@every_decoder
@every_workers
def test_objects_and_subsets(photos: Path, decoder: str, num_workers: int) -> None:
    dataset = ObjectDataset(str(photos), transform=CenterCrop(32, resize=37))
    subset = Subset(dataset, range(0, COUNT, 3))
    for ours, loaded in ((dataset, COUNT), (subset, COUNT // 3)):
        images = torch.cat(list(DataLoader(ours, 4, num_workers=num_workers, decoder=decoder)))
        expected = torch.cat(list(DataLoader(ours, 4, num_workers=num_workers)))
        assert len(images) == loaded and _alike(images, expected)
    dataset.close()


# --- what is bad


@pytest.fixture
def spoilt(photos: Path) -> Path:
    """One image with damage after a good header, and one without a header."""
    (photos / BAD).write_bytes(undecodable(_photo(13)))
    (photos / HIDDEN).write_bytes(b"<html>no such key</html>")
    return photos


@every_decoder
@pytest.mark.parametrize(
    ("on_error", "num_workers"),
    [("repeat", 2), ("replace", 0), pytest.param("replace", 2, marks=pytest.mark.stress)],
)
def test_bad_images_are_replaced(
    folder: Any, spoilt: Path, decoder: str, num_workers: int, on_error: str
) -> None:
    """Every batch is full, no other sample changes, and both are named."""
    dataset = folder()
    loader = DataLoader(dataset, 6, num_workers=num_workers, seed=1, decoder=decoder, on_error=on_error)
    images, labels = _epoch(loader)
    theirs = DataLoader(dataset, 6, num_workers=num_workers, seed=1, on_error=on_error)
    expected, _ = _epoch(theirs)
    bad = [dataset.samples.index((key, label)) for key, label in ((BAD, 1), (HIDDEN, 2))]
    good = [row for row in range(COUNT) if row not in bad]
    assert _alike(images[good], expected[good])
    assert len(labels) == COUNT
    assert sorted(key for key, _ in loader.stats()["bad"]) == [BAD, HIDDEN]
    assert loader.stats()["counters"]["bad.samples"] == 2


@every_decoder
@every_workers
def test_bad_images_are_raised(folder: Any, spoilt: Path, decoder: str, num_workers: int) -> None:
    """Each with its batch and its key; the batches around them and the next epoch are complete."""
    dataset = folder()
    loader = DataLoader(dataset, 6, num_workers=num_workers, seed=1, decoder=decoder)
    reference = DataLoader(dataset, 6, num_workers=0, seed=1, on_error="repeat")
    for _ in range(2):
        expected, iterator, keys = list(reference), iter(loader), []
        for number in range(4):
            try:
                images, _ = next(iterator)
                assert _alike(images, expected[number][0])
            except DecodeError as error:
                keys.append((number, error.key))
        assert keys == [(2, BAD), (3, HIDDEN)]
        with pytest.raises(StopIteration):
            next(iterator)


# --- where it does not go


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"decoder": "gpu"}, "decoder must be one of"),
        ({"decoder": None}, "decoder must be one of"),
        ({"decoder": "dali", "collate_fn": list}, "leave out collate_fn"),
        ({"decoder": "dali", "batch_size": None}, "and batch_size=None"),
    ],
)
def test_arguments(folder: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        DataLoader(folder(), **arguments)


@pytest.mark.parametrize("decoder", ["dali", "torch"])
def test_datasets_without_encoded_images(folder: Any, photos: Path, tmp_path: Path, decoder: str) -> None:
    """Refused at once, with the reason, before a worker starts."""
    cases = [
        (TensorDataset(torch.zeros(3)), "TensorDataset"),
        (folder(transform=_picture), "RandomResizedCrop or CenterCrop"),
        (folder(cache=Cache(tmp_path / "c", "decoded")), "mode 'decoded' keeps pixels"),
        (ObjectDataset(str(photos)), "RandomResizedCrop or CenterCrop"),
        (
            ObjectDataset(str(photos), decode=bytes, transform=CenterCrop(8, resize=9)),
            "decode=<class 'bytes'>",
        ),
        (
            folder(transform=fastload.ByEpoch({0: CenterCrop(8, resize=9), 2: _picture})),
            "RandomResizedCrop or",
        ),
    ]
    for dataset, text in cases:
        with pytest.raises(ArgumentError, match=text):
            DataLoader(dataset, 4, decoder=decoder)


def _picture(image: Any) -> Any:
    return image


def test_a_decoder_that_is_not_installed(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fastload.gpu.decoding.why_no_dali", lambda: "NVIDIA DALI is not installed: pip install x"
    )
    for decoder in ("dali", Dali()):
        with pytest.raises(ArgumentError, match="pip install x"):
            DataLoader(folder(), 4, decoder=decoder)


@needs_dali
def test_dali_with_settings(folder: Any) -> None:
    loader = DataLoader(folder(), 5, num_workers=2, seed=1, decoder=Dali(threads=1, queue_depth=3))
    assert _alike(_epoch(loader)[0], _epoch(DataLoader(folder(), 5, seed=1))[0])
    assert loader.stats()["decode"] == {"decoder": "dali"}


@needs_dali
def test_progressive_resolution(folder: Any) -> None:
    """Another size from the second epoch on, with the same workers and the same decoder."""
    dataset = folder(
        fastload.ByEpoch({0: RandomResizedCrop(16, flip=0.5), 1: RandomResizedCrop(40, flip=0.5)})
    )
    loader = DataLoader(dataset, 5, num_workers=2, persistent_workers=True, decoder="dali")
    assert [_epoch(loader)[0].shape[-1] for _ in range(3)] == [16, 40, 40]


@every_decoder
def test_resumed_in_the_middle(folder: Any, decoder: str) -> None:
    """Batches that were started but not handed out come again."""

    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(
            folder(), 4, shuffle=True, generator=generator, num_workers=2, seed=1, decoder=decoder
        )

    whole = list(loader())
    first = loader()
    iterator = iter(first)
    begun = [next(iterator) for _ in range(2)]
    state = first.state_dict()
    del iterator
    second = loader()
    second.load_state_dict(state)
    batches = begun + list(second)
    assert [labels.tolist() for _, labels in batches] == [labels.tolist() for _, labels in whole]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(batches, whole, strict=True))


@every_decoder
def test_epochs_that_are_broken_off(folder: Any, decoder: str) -> None:
    """Two iterators over one loader, and some never finished: results stay with their batches."""
    dataset = folder(CenterCrop(32, resize=37))
    loader = DataLoader(dataset, 4, num_workers=2, decoder=decoder)
    reference = [images for images, _ in DataLoader(dataset, 4)]
    for taken in range(3):
        iterator = iter(loader)
        for images in reference[:taken]:
            assert _alike(next(iterator)[0], images)
        del iterator
    one = iter(loader)
    two = iter(loader)
    for _ in reference:
        assert next(one)[1].tolist() == next(two)[1].tolist()


@needs_dali
def test_exif_is_not_applied(tmp_path: Path) -> None:
    """No decoder applies it: torchvision's loader does not, and the crops would differ."""
    (tmp_path / "a.jpg").write_bytes(pillow_jpeg(scene(120, 60), exif=oriented(6), quality=95))
    dataset = ObjectDataset(str(tmp_path), transform=CenterCrop(48, resize=55))
    [expected] = DataLoader(dataset, 1)
    [images] = DataLoader(dataset, 1, decoder="dali")
    assert _alike(images, expected, 45)
    dataset.close()
