"""The cache's modes, end to end: one distribution in all epochs, whatever the images and whatever fails."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from fastload import Cache, CenterCrop, DataLoader, ImageFolder, ObjectDataset, RandomResizedCrop, TarDataset
from fastload.errors import ArgumentError, DecodeError
from fastload.images import decode_image, decode_resized, shrink
from tests.photos import pillow_jpeg, png, scene
from tests.sharddata import write
from tests.shortform import short_form

pytestmark = pytest.mark.usefixtures("no_leaks")  # all of them read local files
MODES = ["auto", "raw", "dct", "shrunk", "decoded"]
every_mode = pytest.mark.parametrize("mode", MODES)

FILES = {
    "a/landscape.jpg": lambda: pillow_jpeg(scene(200, 150)),
    "a/portrait.jpg": lambda: pillow_jpeg(scene(150, 200, 1)),
    "a/smaller than short_side.jpg": lambda: pillow_jpeg(scene(50, 40, 2)),
    "b/gray.jpg": lambda: pillow_jpeg(scene(200, 150, 3), "L"),
    "b/cmyk.jpg": lambda: pillow_jpeg(scene(200, 150, 4), "CMYK"),
    "b/small cmyk.jpg": lambda: pillow_jpeg(scene(60, 50, 5), "CMYK"),
    "b/progressive.jpg": lambda: pillow_jpeg(scene(200, 150, 6), progressive=True),
    "c/colour.png": lambda: png(Image.fromarray(scene(200, 150, 7))),
    "c/gray.png": lambda: png(Image.fromarray(scene(200, 150, 8)).convert("L")),
    "c/small.png": lambda: png(Image.fromarray(scene(33, 70, 9))),
    "c/transparent.png": lambda: png(Image.fromarray(scene(200, 150, 10)).convert("RGBA")),
    "c/strip.jpg": lambda: pillow_jpeg(scene(3, 200, 11)),
}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return Path(write(tmp_path / "photos", {name: make() for name, make in FILES.items()}))


@pytest.fixture
def folder(photos: Path, tmp_path: Path, keep: Callable[[Any], Any]) -> Callable[..., ImageFolder]:
    """Datasets over the photos, with a cache in one directory."""

    def make(mode: Any, transform: Any = None, **options: Any) -> Any:
        cache = Cache(tmp_path / "cache", mode, **{"short_side": 100, **options})
        return keep(ImageFolder(str(photos), transform or RandomResizedCrop(32, flip=0.5), cache=cache))

    return make


def run(dataset: Any, num_workers: int = 0, **options: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """One epoch with seed 1: all images in order, and the counters."""
    loader = DataLoader(dataset, 5, num_workers=num_workers, seed=1, **options)
    images = torch.cat([batch for batch, _ in loader])
    return images, loader.stats()["counters"]


# --- one distribution


@every_mode
def test_samples_are_made_from_the_result_that_the_mode_keeps(folder: Any, photos: Path, mode: str) -> None:
    """Evaluation's crop of every file, made by hand from what the mode is documented to keep; twice."""
    keep: dict[str, Callable[[bytes], Any]] = {
        "shrunk": lambda data: shrink(data, 100, 90),
        "decoded": lambda data: decode_resized(data, 100),
    }
    transform, expected = CenterCrop(32, resize=37), torch.empty(len(FILES), 3, 32, 32, dtype=torch.uint8)
    kept = [keep.get(mode, bytes)(path.read_bytes()) for path in sorted(photos.rglob("*.*"))]
    assert transform.fill(expected.numpy(), kept, [0] * len(FILES)) == []
    for requests in (len(FILES), 0):
        dataset = folder(mode, transform)
        images, counters = run(dataset)
        assert torch.equal(images, expected) and counters.get("get.requests", 0) == requests
        dataset.close()


# --- the key


@pytest.mark.parametrize(
    ("mode", "change", "refills"),
    [
        ("shrunk", {"short_side": 60}, True),
        ("shrunk", {"quality": 50}, True),
        ("decoded", {"short_side": 60}, True),
        ("decoded", {"quality": 50}, False),
        ("raw", {"short_side": 60, "quality": 50}, False),
    ],
)
def test_parameters_are_part_of_the_key(folder: Any, mode: str, change: Any, refills: bool) -> None:
    """Changed ones fill the cache anew, and leave the records of the others as they are."""
    before, _ = run(folder(mode))
    after, counters = run(folder(mode, **change))
    assert counters.get("get.requests", 0) == (len(FILES) if refills else 0)
    assert torch.equal(before, after) is not refills
    again, counters = run(folder(mode))
    assert torch.equal(again, before) and counters.get("get.requests", 0) == 0


@pytest.mark.stress
def test_guard_removed_a_smaller_image_is_served_under_another_short_side(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters are not in the key."""
    key = Cache.key
    monkeypatch.setattr(Cache, "key", lambda self, *parts, codec: key(Cache(self.path, "decoded"), *parts))
    before, _ = run(folder("decoded"))
    after, counters = run(folder("decoded", short_side=60))
    assert torch.equal(before, after) and counters.get("get.requests", 0) == 0


def test_modes_share_a_directory(folder: Any) -> None:
    """Each fills it once, but "auto": that goes on with what "raw" or "dct" left."""
    results = [[run(folder(mode)) for mode in MODES if mode != "auto"] for _ in range(2)]
    for (first, filling), (second, later) in zip(*results, strict=True):
        assert torch.equal(first, second)
        assert filling["get.requests"] == len(FILES) and later.get("get.requests", 0) == 0
    images, counters = run(folder("auto"))
    assert torch.equal(images, results[0][0][0]) and counters.get("get.requests", 0) == 0


# --- transforms of one's own


@every_mode
def test_pil_transforms_get_the_cached_pixels(folder: Any, photos: Path, mode: str) -> None:
    def to_tensor(image: Any) -> torch.Tensor:
        assert isinstance(image, Image.Image) and image.mode == "RGB"
        return torch.from_numpy(np.array(image))

    paths = sorted(photos.rglob("*.*"))
    for _ in range(2):
        dataset = folder(mode, to_tensor)
        for index, path in enumerate(paths):
            data = path.read_bytes()
            expected = {
                "shrunk": lambda data: np.asarray(Image.open(BytesIO(shrink(data, 100, 90))).convert("RGB")),
                "decoded": lambda data: decode_resized(data, 100),
            }.get(mode, decode_image)(data)
            image, label = dataset[index]
            assert image.shape == expected.shape and label == "abc".index(path.parent.name)
            assert np.abs(image.numpy().astype(int) - expected).max() <= 2
        dataset.close()


def test_object_dataset_keeps_what_the_users_decode_returns(photos: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def decode(data: bytes) -> dict[str, Any]:
        with calls.open("ab") as file:
            file.write(b".")
        return {"size": len(data), "head": (np.frombuffer(data[:6], np.uint8), [data[:2]])}

    def transform(sample: dict[str, Any]) -> Any:
        assert type(sample["head"]) is tuple
        return sample

    cache = Cache(tmp_path / "cache", "decoded")
    dataset = ObjectDataset(str(photos), decode=decode, transform=transform, cache=cache)
    for num_workers in (2, 0, 2):
        batches = list(DataLoader(dataset, 4, num_workers=num_workers, collate_fn=lambda samples: samples))
        for sample, path in zip((s for b in batches for s in b), sorted(photos.rglob("*.*")), strict=True):
            assert sample["size"] == path.stat().st_size
            assert sample["head"][0].tobytes() == path.read_bytes()[:6]
            assert sample["head"][1] == [path.read_bytes()[:2]]
        assert calls.stat().st_size == len(FILES), "decode ran again"
    dataset.close()
    with pytest.raises(ArgumentError, match="does not work with decode"):
        ObjectDataset(str(photos), decode=decode, cache=Cache(tmp_path / "cache", "shrunk"))


# --- when it does not fit, when it is bad


@every_mode
def test_beyond_size_limit_samples_have_the_same_pixels(folder: Any, mode: str) -> None:
    whole, _ = run(folder(mode))
    folder(mode).cache.clear()
    part = folder(mode, size_limit=60_000)
    kept = 0
    for _ in range(2):
        images, counters = run(part)
        assert torch.equal(images, whole)
        assert counters["get.requests"] == len(FILES) - kept
        kept = part.cache.info()["entries"]
        assert 0 < kept < len(FILES)


# The short form has each damage in "auto" and in one more mode.
DAMAGES = {"cut": "decoded", "cut and small": "shrunk", "garbage": "dct", "empty": "raw"}


@pytest.mark.parametrize(
    ("mode", "damage"),
    short_form(itertools.product(MODES, DAMAGES), lambda mode, damage: mode in ("auto", DAMAGES[damage])),
)
def test_bad_images_in_every_mode(folder: Any, photos: Path, mode: str, damage: str) -> None:
    num_workers = int(damage == "cut")
    name = "a/smaller than short_side.jpg" if damage == "cut and small" else "a/landscape.jpg"
    victim = photos / name
    data = victim.read_bytes()
    victim.write_bytes({"garbage": b"no image" * 99, "empty": b""}.get(damage, data[: len(data) * 3 // 4]))
    for epoch in range(2):
        with pytest.raises(DecodeError, match=name):
            run(folder(mode), num_workers)
        for policy in ("repeat", "replace"):
            dataset = folder(mode)
            loader = DataLoader(dataset, 5, num_workers=num_workers, seed=1, on_error=policy)
            assert sum(len(images) for images, _ in loader) == len(FILES)
            assert [key for key, _ in loader.stats()["bad"]] == [name], (epoch, policy)
            dataset.close()


@every_mode
def test_a_cut_jpeg_is_served_with_strict_false_or_that_is_refused(tmp_path: Path, mode: str) -> None:
    cut = FILES["a/landscape.jpg"]()
    url = write(tmp_path / "photos", {"a/cut.jpg": cut[: len(cut) // 2]})
    lenient = RandomResizedCrop(8, strict=False)
    options: dict[str, Any] = {"cache": Cache(tmp_path / "cache", mode)}
    if mode in ("shrunk", "decoded"):
        for make in (ImageFolder, TarDataset):
            with pytest.raises(ArgumentError, match=rf"'{mode}' .*strict=False has no effect: .*'auto'"):
                make(url, transform=lenient, **options)
        return
    with contextlib.closing(ImageFolder(url, lenient, **options)) as dataset:
        assert dataset[0][0].shape == (3, 8, 8)
        dataset.transform = RandomResizedCrop(8)
        with pytest.raises(DecodeError, match="premature end"):
            dataset[0]


# --- memory


@pytest.mark.parametrize("mode", short_form(("raw", "dct", "decoded"), lambda mode: mode != "dct"))
def test_memory_of_a_worker_is_flat(photos: Path, folder: Any, tmp_path: Path, mode: str) -> None:
    """Within 200 MB of its start plus its slots, and no more at the end of the last epoch than early on."""

    def started(worker_id: int) -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))

    dataset = torch.utils.data.Subset(
        folder(mode, RandomResizedCrop(224, flip=0.5)), [*range(len(FILES))] * 40
    )
    loader = DataLoader(
        dataset, 16, shuffle=True, num_workers=1, persistent_workers=True, worker_init_fn=started
    )
    slots = 6 * 16 * 3 * 224 * 224
    own: list[int] = []
    for _ in range(3):
        for _ in loader:
            memory = psutil.Process(int((tmp_path / "pid").read_text())).memory_info()
            own.append(memory.rss - memory.shared)
    epoch = len(own) // 3
    assert max(own) < own[0] + slots + (200 << 20)
    assert max(own[-epoch:]) < max(own[:epoch]) + (16 << 20), "grows with every epoch"
