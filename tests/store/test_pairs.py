"""Samples of an image and its mask: cut alike in every path and cache mode, and the mask's values kept."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fastload
from bench.peers.scripts.torchvision_on_cpu import torchvision
from fastload import ByEpoch, Cache, CenterCrop, DataLoader, RandomResizedCrop
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError, DecodeError
from fastload.formats.tar import TarWriter
from fastload.images.rng import SampleRng
from tests.photos import png
from tests.sharddata import closing, ordinary, write

pytestmark = pytest.mark.usefixtures("close_all")

WIDTH, HEIGHT = 400, 300
NEAR = 8  # grey levels, or 3 pixels of the ramps
MASK: dict[str, Any] = {"interpolation": "nearest", "channels": 1}
CUT: dict[str, Any] = {"scale": (0.2, 1.0), "flip": 0.5}
PAIR = {"jpg": RandomResizedCrop(48, **CUT), "seg.png": RandomResizedCrop(48, **CUT, **MASK)}


def ramps(width: int, height: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A pixel's place, as numbers from 0 to 240: across and down."""
    x = np.linspace(0, 240, width).astype(np.uint8)[None].repeat(height, 0)
    y = np.linspace(0, 240, height).astype(np.uint8)[:, None].repeat(width, 1)
    return x, y


def photo(number: int) -> bytes:
    x, y = ramps(WIDTH, HEIGHT)
    file = io.BytesIO()
    Image.fromarray(np.stack([x, y, np.full_like(x, number)], 2)).save(file, "JPEG", quality=97)
    return file.getvalue()


def mask(width: int = WIDTH, height: int = HEIGHT) -> bytes:
    """The place across, in steps of 16: class numbers, under a palette that hides them."""
    image = Image.fromarray(ramps(width, height)[0] // 16 * 16, "P")
    image.putpalette(bytes(np.random.default_rng(0).integers(0, 256, 768, np.uint8)))
    return png(image)


def pairs(folder: Path, masks: list[bytes], **arguments: Any) -> Any:
    file = io.BytesIO()
    writer = TarWriter(file)
    for number, one in enumerate(masks):
        parts = {"jpg": photo(number), "seg.png": one, "cls": b"%d" % number}
        writer.write(f"{number:03d}", parts)
    writer.close()
    url = write(folder, {"x.tar": file.getvalue(), "x.idx": writer.index()})
    return closing(fastload.TarDataset(f"{url}/x.tar", **{"transform": PAIR, "index": url, **arguments}))


def assert_cut_alike(images: torch.Tensor, masks: torch.Tensor) -> None:
    """Each mask's pixel is the class of the image's pixel on the same place."""
    assert masks.dtype is torch.uint8 and masks.shape[1:] == (1, 48, 48)
    assert set(masks.unique().tolist()) <= set(range(0, 241, 16))
    across = images[:, 0].float()
    assert (across - masks[:, 0] - 8).abs().max() <= 8 + NEAR
    flipped = across[:, 24, 0] > across[:, 24, -1]
    assert 0 < int(flipped.sum()) < len(images), "some are flipped"


@pytest.mark.parametrize("mode", ["none", "auto", "raw", "dct", "shrunk", "decoded"])
@pytest.mark.parametrize("width", [WIDTH, WIDTH // 2])
def test_image_and_mask_are_cut_alike_and_class_numbers_stay(tmp_path: Path, mode: str, width: int) -> None:
    """Also a mask of half the size, and a smaller image of the cache beside the mask as it was."""
    cache = None if mode == "none" else Cache(tmp_path / "cache", mode=mode, short_side=160)
    data = pairs(tmp_path / "data", [mask(width, width * 3 // 4)] * 12, cache=cache)
    for _ in range(1 if cache is None else 2):
        batch = view_of(data).new_batch(12, ordinary)
        assert view_of(data).fill(batch, [(row, row) for row in range(12)], 5, 0) == []
        assert_cut_alike(batch.columns["jpg"], batch.columns["seg.png"])
        torch.manual_seed(0)
        samples = [data[index] for index in range(12)]
        assert_cut_alike(
            torch.stack([one["jpg"] for one in samples]), torch.stack([one["seg.png"] for one in samples])
        )
        data._flush_cache()


def test_sample_mask_is_cut_as_torchvision_cuts_the_box_of_its_image(tmp_path: Path) -> None:
    data = pairs(tmp_path, [mask()] * 3)
    for index in range(3):
        torch.manual_seed(index)
        seed = int(torch.empty((), dtype=torch.int64).random_())
        after = torch.rand(1)
        left, top, right, bottom = (
            chosen := data.transform["jpg"]._box_for(WIDTH, HEIGHT, SampleRng(seed))
        ).box
        cut = torchvision.transforms.functional.resized_crop(
            Image.open(io.BytesIO(mask())), top, left, bottom - top, right - left, [48, 48], 0
        )
        torch.manual_seed(index)
        found = data[index]["seg.png"][0].numpy()
        assert torch.equal(torch.rand(1), after), "a sample takes one number of torch's generator"
        np.testing.assert_array_equal(found, np.asarray(cut)[:, :: -1 if chosen.flip else 1])


def test_centre_crops_are_cut_alike_at_another_size(tmp_path: Path) -> None:
    both = {"jpg": CenterCrop(48, resize=64), "seg.png": CenterCrop(12, resize=16, **MASK)}
    cache = Cache(tmp_path / "cache", mode="shrunk", short_side=160)
    data = pairs(tmp_path / "data", [mask()] * 2, transform=both, cache=cache)
    sample = data[0]
    coarse = sample["jpg"][0].float().reshape(12, 4, 12, 4).mean((1, 3))
    assert (coarse - sample["seg.png"][0] - 8).abs().max() <= 8 + NEAR


def test_mask_of_other_proportions_is_an_error_that_names_both_sizes(tmp_path: Path) -> None:
    data = pairs(tmp_path, [mask(), mask(HEIGHT, WIDTH)])
    says = "image 'seg.png': it has 300 x 400 pixels, and the first image of its sample 400 x 300"
    with pytest.raises(DecodeError, match=says) as caught:
        data[1]
    assert "x.tar @" in str(caught.value.key)
    [(row, error)] = view_of(data).fill(view_of(data).new_batch(2, ordinary), [(0, 0), (1, 1)], 5, 0)
    assert row == 1 and says in str(error)


def test_mask_in_colour_is_an_error_that_names_it(tmp_path: Path) -> None:
    colour = png(Image.new("RGB", (WIDTH, HEIGHT)))
    data = pairs(tmp_path, [colour])
    with pytest.raises(DecodeError, match=r"image 'seg\.png': channels=1 takes images of one channel"):
        data[0]


@pytest.mark.parametrize(
    "other",
    [
        RandomResizedCrop(48, scale=(0.3, 1.0), flip=0.5, **MASK),
        RandomResizedCrop(48, scale=(0.2, 1.0), **MASK),
        CenterCrop(48, **MASK),
        ByEpoch({0: PAIR["seg.png"], 3: RandomResizedCrop(48, **MASK)}),
    ],
)
def test_mask_and_image_under_different_rules_are_refused(tmp_path: Path, other: Any) -> None:
    with pytest.raises(ArgumentError, match=r"transform\['jpg'\] and transform\['seg.png'\] must cut alike"):
        pairs(tmp_path, [mask()], transform={"jpg": PAIR["jpg"], "seg.png": other})


def test_views_without_a_mask_may_differ(tmp_path: Path) -> None:
    views = {"jpg": RandomResizedCrop(48), "seg.png": RandomResizedCrop(24, scale=(0.05, 0.3))}
    sample = pairs(tmp_path, [mask(100, 390)], transform=views)[0]
    assert sample["jpg"].shape == (3, 48, 48) and sample["seg.png"].shape == (3, 24, 24)


@pytest.mark.parametrize("mode", ["dct", "shrunk", "decoded"])
def test_new_transform_that_the_cache_cannot_serve_is_refused(tmp_path: Path, mode: str) -> None:
    cache = Cache(tmp_path / "cache", mode=mode, short_side=160)
    plain = {"jpg": PAIR["jpg"], "seg.png": RandomResizedCrop(48, **CUT)}
    data = pairs(tmp_path / "data", [mask()], transform=plain, cache=cache)
    with pytest.raises(ArgumentError, match=f"mode '{mode}' .*: make a new dataset with this transform="):
        data.transform = PAIR
    assert data[0]["seg.png"].shape == (3, 48, 48), "it works as before"
    fresh = closing(fastload.TarDataset(data.url, transform=PAIR, index=str(tmp_path / "data"), cache=cache))
    assert fresh._cache_keys(0)[0] != data._cache_keys(0)[0]
    assert fresh[0]["seg.png"].shape == (1, 48, 48)
    fresh.transform = plain  # the mask's own values serve it too


@pytest.mark.parametrize("kind", [fastload.ImageFolder, fastload.ObjectDataset])
@pytest.mark.parametrize("mode", ["shrunk", "decoded"])
def test_dataset_of_masks_in_a_cache_of_smaller_copies_is_refused(
    tmp_path: Path, mode: str, kind: Any
) -> None:
    url = write(tmp_path / "data", {"a/0.png": mask()})
    cache = Cache(tmp_path / "cache", mode=mode)
    says = f"cache mode '{mode}' keeps smaller copies of images, .* use mode 'raw'; found transform=Center"
    with pytest.raises(ArgumentError, match=says):
        kind(url, transform=CenterCrop(48, **MASK), cache=cache)
    data = closing(kind(url, transform=CenterCrop(48), cache=cache))
    with pytest.raises(ArgumentError, match=says):
        data.transform = CenterCrop(48, **MASK)
    raw = closing(kind(url, transform=CenterCrop(48, **MASK), cache=tmp_path / "raw"))
    raw.transform = ByEpoch({0: CenterCrop(24, **MASK), 1: CenterCrop(48, **MASK)})
    (batch, *_) = DataLoader(raw, 1) if kind is fastload.ImageFolder else [[next(iter(DataLoader(raw, 1)))]]
    assert batch[0].shape == (1, 1, 24, 24)


def test_decoding_of_masks_on_the_device_is_refused(tmp_path: Path) -> None:
    data = closing(fastload.ImageFolder(write(tmp_path, {"a/0.png": mask()}), CenterCrop(48, **MASK)))
    with pytest.raises(ArgumentError, match="decoder='dali' does not work here: the device makes RGB"):
        DataLoader(data, 1, decoder="dali")


def boxes(sample: dict[str, Any]) -> int:
    return len(sample["boxes"])


def ragged(samples: list[dict[str, Any]]) -> dict[str, Any]:
    found = [sample.pop("json")["boxes"] for sample in samples]
    return {**torch.utils.data.default_collate(samples), "boxes": found}


@pytest.mark.parametrize("chosen", [False, True])
def test_values_of_varying_length_reach_collate_fn_and_are_named_without_one(
    tmp_path: Path, chosen: bool
) -> None:
    file = io.BytesIO()
    writer = TarWriter(file)
    for number in range(6):
        found = json.dumps({"boxes": [[0, 0, 1, 1]] * (number + 1)}).encode()
        writer.write(f"{number}", {"jpg": photo(number), "json": found})
    writer.close()
    url = write(tmp_path, {"x.tar": file.getvalue(), "x.idx": writer.index()})
    data: Any = closing(fastload.TarDataset(f"{url}/x.tar", transform={"jpg": CenterCrop(48)}, index=url))
    dataset = torch.utils.data.Subset(data, range(6)) if chosen else data
    (batch,) = DataLoader(dataset, 6, collate_fn=ragged)
    assert batch["jpg"].shape == (6, 3, 48, 48) and list(map(len, batch["boxes"])) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(dataset, 6, on_error="replace")))
    (note,) = caught.value.__notes__
    assert "(sample 0 'x.tar @ 0' is a list of 1 at ['json']['boxes'], but sample 1 'x.tar @ " in note
    data.transform = {"jpg": CenterCrop(48), "json": boxes}
    (batch,) = DataLoader(dataset, 6)
    assert batch["json"].tolist() == [1, 2, 3, 4, 5, 6]
