"""fuse against torchvision's own pipelines: the same draws, boxes, values and distribution."""

from __future__ import annotations

import copy
import importlib
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from bench.peers.scripts.torchvision_on_cpu import torchvision
from fastload import (
    ByEpoch,
    Cache,
    DataLoader,
    File,
    ImageFolder,
    ObjectDataset,
    RandomResizedCrop,
    TableDataset,
    TarDataset,
    fuse,
)
from fastload.datasets.fingerprint import describe
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError
from fastload.images import decode_image, sample_seed
from fastload.images.rng import SampleRng
from tests.laws import far, kolmogorov
from tests.photos import pillow_jpeg, png, psnr, scene
from tests.sharddata import write

v1: Any = torchvision.transforms
v2: Any = importlib.import_module("torchvision.transforms.v2")
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SHAPES = [(161, 119), (97, 300), (500, 375), (40, 41), (30, 200)]


def normalized(of: Any) -> list[Any]:
    to_floats = [of.ToTensor()] if of is v1 else [of.ToImage(), of.ToDtype(torch.float32, scale=True)]
    return [*to_floats, of.Normalize(MEAN, STD)]


def both(make: Any) -> list[Any]:
    return [pytest.param(of.Compose(make(of)), id=name) for of, name in ((v1, "v1"), (v2, "v2"))]


FULLY = [
    *both(lambda of: [of.RandomResizedCrop(48), of.RandomHorizontalFlip(), *normalized(of)]),
    *both(lambda of: [of.Resize(60), of.CenterCrop(48), *normalized(of)]),
    *both(
        lambda of: [
            of.CenterCrop((50, 44)),
            of.RandomHorizontalFlip(),
            of.RandomVerticalFlip(),
            *normalized(of),
        ]
    ),
    *both(
        lambda of: [of.RandomHorizontalFlip(0.4), of.RandomResizedCrop((40, 32), (0.3, 0.9)), *normalized(of)]
    ),
    *both(
        lambda of: [
            of.RandomVerticalFlip(0.4),
            of.CenterCrop(45),
            of.RandomVerticalFlip(0.7),
            of.PILToTensor(),
        ]
    ),
    *both(
        lambda of: [of.Resize((33, 57)), of.RandomVerticalFlip(), *normalized(of), of.RandomHorizontalFlip()]
    ),
    *both(
        lambda of: [
            of.Resize((70, 60)),
            of.CenterCrop(50),
            of.PILToTensor(),
            of.ConvertImageDtype(torch.float16),
        ]
    ),
    pytest.param(
        v2.Compose(
            [
                v2.ToImage(),
                v2.ToDtype(torch.uint8, scale=True),
                v2.RandomResizedCrop(48, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
                v2.ToPureTensor(),
            ]
        ),
        id="v2 on tensors",
    ),
    pytest.param(
        torch.nn.Sequential(
            v1.RandomResizedCrop(32), v2.Compose([v1.PILToTensor(), v2.ToDtype(torch.float64)])
        ),
        id="nested",
    ),
]
PARTLY = [
    *both(
        lambda of: [of.RandomResizedCrop(48), of.RandomHorizontalFlip(), of.ColorJitter(0.4), *normalized(of)]
    ),
    *both(
        lambda of: [of.RandomResizedCrop(48), of.TrivialAugmentWide(), *normalized(of), of.RandomErasing(1)]
    ),
    *both(lambda of: [of.RandomResizedCrop(48), *normalized(of), of.RandomErasing(0.5)]),
    *both(lambda of: [of.Resize(64), of.RandomCrop(48), *normalized(of)]),
    *both(lambda of: [of.RandomResizedCrop(48), of.Lambda(lambda image: image.rotate(90)), of.PILToTensor()]),
    *both(lambda of: [of.RandomResizedCrop(48), of.CenterCrop(32), of.PILToTensor()]),
]


def assert_alike(ours: Any, theirs: Any, levels: float = 2) -> None:
    """Within two grey levels, and of one kind."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, Image.Image):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    ours, theirs = (torch.as_tensor(np.asarray(one)).double() for one in (ours, theirs))
    one_level = 1.0 if float(theirs.max()) > 3 else 1 / 255 / min(STD)
    assert float((ours - theirs).abs().max()) <= levels * one_level * 1.01


@pytest.mark.parametrize("compose", FULLY)
def test_same_seed_gives_torchvisions_sample(compose: Any) -> None:
    fused = fuse(compose)
    assert fused.kept == () and fused._fills_rows
    for seed, shape in enumerate(SHAPES * 2):
        pixels = scene(*shape)
        torch.manual_seed(seed)
        theirs = compose(Image.fromarray(pixels))
        after = torch.rand(1)
        for given in (png(Image.fromarray(pixels)), Image.fromarray(pixels), pixels):
            torch.manual_seed(seed)
            assert_alike(fused(given), theirs)
            assert torch.equal(torch.rand(1), after), "not a number more or less was drawn"


@pytest.mark.parametrize("compose", PARTLY)
def test_kept_steps_get_what_they_would_have_got(compose: Any) -> None:
    fused = fuse(compose)
    assert fused.kept and not fused._fills_rows
    for seed, shape in enumerate(SHAPES):
        image = Image.fromarray(scene(*shape))
        torch.manual_seed(seed)
        random.seed(seed)
        theirs = compose(image)
        torch.manual_seed(seed)
        random.seed(seed)
        ours = fused(png(image))
        assert type(ours) is type(theirs) and ours.shape == theirs.shape and ours.dtype == theirs.dtype
        distance = (ours.double() - theirs.double()).abs().mean()
        assert distance < (2 if ours.dtype is torch.uint8 else 2 / 255 / min(STD))


@pytest.mark.parametrize("of", [v1, v2])
@pytest.mark.parametrize(
    "floats",
    [
        normalized,
        lambda of: [
            of.PILToTensor(),
            of.ConvertImageDtype(torch.float32),
            of.Normalize(MEAN, STD, inplace=True),
        ],
        lambda of: [of.PILToTensor(), of.ConvertImageDtype(torch.float64)],
        lambda of: [of.PILToTensor(), of.ConvertImageDtype(torch.int32)],
        lambda of: [of.ToTensor()],
        lambda of: [of.ToTensor(), of.Normalize([0.5], [0.25])],
    ],
)
def test_values_are_torchvisions_to_the_bit(of: Any, floats: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # v2.ToTensor is deprecated
        compose = of.Compose([of.CenterCrop(48), *floats(of)])
    fused, pixels = fuse(compose), np.random.default_rng(0).integers(0, 256, (3, 60, 50, 3), np.uint8)
    rows = np.empty((3, *fused.sample_shape), compose(Image.fromarray(pixels[0])).numpy().dtype)
    assert fused.fill(rows, list(pixels), [0, 1, 2]) == []
    for image, row in zip(pixels, rows, strict=True):
        expected = compose(Image.fromarray(image))
        assert fused.dtype is expected.dtype
        assert torch.equal(torch.from_numpy(row), expected) and torch.equal(fused(image), expected)


def test_jpeg_is_decoded_as_the_fused_crops_do() -> None:
    compose = v1.Compose([v1.RandomResizedCrop(64, (0.3, 1)), v1.PILToTensor()])
    jpeg = pillow_jpeg(scene(300, 200), quality=97)
    for seed in range(4):
        torch.manual_seed(seed)
        theirs = compose(Image.fromarray(decode_image(jpeg)))
        torch.manual_seed(seed)
        assert psnr(fuse(compose)(jpeg).numpy(), theirs.numpy()) > 40


def test_rows_are_cut_and_flipped_by_torchvisions_law() -> None:
    steps = [v1.RandomHorizontalFlip(0.3), v1.RandomResizedCrop(8), v1.RandomVerticalFlip(0.6)]
    fused, draws, width, height = fuse(v1.Compose(steps)), 4000, 250, 200
    chosen = [fused._box_for(width, height, SampleRng(sample_seed(0, 0, index))) for index in range(draws)]
    ours = np.array([[*box, flip, turn] for box, flip, _, turn in chosen], float)
    torch.manual_seed(1)
    image, drawn = Image.new("RGB", (width, height)), []
    for _ in range(draws):
        flip = bool(torch.rand(1) < 0.3)
        top, left, rows, columns = v1.RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
        left = width - left - columns if flip else left
        drawn.append([left, top, left + columns, top + rows, flip, bool(torch.rand(1) < 0.6)])
    theirs = np.array(drawn, float)
    for column in range(6):
        assert kolmogorov(ours[:, column], theirs[:, column]) < far(draws)
    assert abs(np.corrcoef(ours[:, 4], ours[:, 5])[0, 1]) < 0.07, "each flip is drawn by itself"


def test_flip_before_a_crop_that_pads_stays_inside_the_image() -> None:
    """The box is the whole image there, and rounding must not lead beyond its edge on either side."""
    for width in range(20, 700, 7):
        for resized, cropped in ((30, 40), (224, 256), (100, 101)):
            flips = [v1.RandomHorizontalFlip(1.0), v1.RandomVerticalFlip(1.0)]
            steps = [*flips, v1.Resize((resized, resized)), v1.CenterCrop((16, cropped))]
            fused = fuse(v1.Compose([*steps, v1.PILToTensor()]))
            x0, y0, x1, y1 = fused._box_for(width, width, SampleRng(0)).box
            assert 0 <= x0 < x1 <= width and 0 <= y0 < y1 <= width, (width, resized, cropped)
    fused(pillow_jpeg(scene(538, 538)))


# ---------------------------------------------------------------- what is said


def test_it_says_what_is_fused_and_what_is_kept() -> None:
    compose = v1.Compose(
        [v1.RandomResizedCrop(8), v1.RandomHorizontalFlip(), v1.ColorJitter(0.4), v1.ToTensor()]
    )
    fused = fuse(compose)
    assert fused.fused == tuple(map(repr, compose.transforms[:2]))
    assert fused.kept == tuple(map(repr, compose.transforms[2:]))
    assert repr(fused).startswith("fuse(in the kernel: RandomResizedCrop(size=(8, 8)")
    assert "; kept as they are: ColorJitter(" in repr(fused)


class _Own(v1.CenterCrop):  # type: ignore[misc]
    pass


def _with_hook() -> Any:
    crop = v1.CenterCrop(8)
    crop.register_forward_hook(lambda module, args, output: output)
    return crop


BICUBIC = v1.InterpolationMode.BICUBIC


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (
            v1.ColorJitter(0.4),
            "step ColorJitter.* comes first, and it is none of the steps that can be fused",
        ),
        (
            v1.Compose([v1.ToTensor(), v1.CenterCrop(8)]),
            "ToTensor.. comes first, and it changes the values before",
        ),
        (v1.Compose([v1.RandomHorizontalFlip(), v1.PILToTensor()]), "it has no crop and no resize"),
        (v1.Compose([]), "it has no crop and no resize"),
        (
            v1.RandomResizedCrop(8, interpolation=BICUBIC),
            "interpolation is 'bicubic': only 'bilinear' can be",
        ),
        (v2.Resize(8, max_size=20), "max_size=20"),
        (v2.Compose([v2.ToImage(), v2.Resize(8, antialias=False)]), "resizes tensors without antialias=True"),
        (v2.RandomResizedCrop(8, (0.5, 2.0)), "scale is a share"),
        (v2.Resize(9999), "from 1 to 8192"),
        (_Own(8), "none of the steps"),
        (_with_hook(), "none of the steps"),
        (lambda image: image, "none of the steps"),
        (v1.Compose, "must be a torchvision transform such as a Compose, not <class"),
        ("crop", "must be a torchvision transform"),
        (RandomResizedCrop(8), "is fused already"),
    ],
)
def test_nothing_to_fuse_is_an_error_that_says_why(transform: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        fuse(transform)


def test_other_modes_and_tensors_go_through_the_plain_transform() -> None:
    compose = v2.Compose([v2.CenterCrop(8), v2.PILToTensor()])
    grey = Image.fromarray(scene(20, 20)[..., 0])
    assert torch.equal(fuse(compose)(grey), compose(grey)) and fuse(compose)(grey).shape == (1, 8, 8)
    tensor = torch.zeros(3, 20, 20, dtype=torch.uint8)
    assert fuse(v2.CenterCrop(8))(tensor).shape == (3, 8, 8)


def test_copies_pickles_and_fingerprints_are_equal() -> None:
    for compose in (FULLY[0].values[0], PARTLY[0].values[0]):
        fused: Any = fuse(compose)
        given = png(Image.fromarray(scene(90, 70)))
        results = []
        for one in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            torch.manual_seed(2)
            results.append(one(given))
            assert describe(one, "transform") == describe(fused, "transform")
        assert all(torch.equal(one, results[0]) for one in results)


# ---------------------------------------------------------------- in datasets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {f"c{n % 3}/{n:02d}.jpg": pillow_jpeg(scene(160, 120, n), quality=97) for n in range(24)}
    return Path(write(tmp_path_factory.mktemp("photos"), files))


@pytest.mark.parametrize("mode", ["auto", "shrunk", "decoded"])
@pytest.mark.parametrize("compose", [FULLY[1], PARTLY[4]])
def test_every_cache_mode_serves_it(folder: Path, tmp_path: Path, mode: str, compose: Any) -> None:
    fused = fuse(compose)
    data = ImageFolder(str(folder), fused, cache=Cache(tmp_path / "cache", mode=mode, short_side=100))
    for _ in range(2):
        for images, labels in DataLoader(data, 8, seed=1):
            assert images.shape == (8, 3, 48, 48) and images.dtype is torch.float32 and labels.shape == (8,)
        data._flush_cache()
    data.close()


def test_rows_equal_samples_of_the_plain_transform(folder: Path) -> None:
    compose = v2.Compose([v2.Resize(60), v2.CenterCrop(48), *normalized(v2)])
    fused, plain = (ImageFolder(str(folder), one) for one in (fuse(compose), compose))
    view = view_of(fused)
    rows = view.new_batch(24, lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    assert rows is not None and view.fill(rows, [(row, row) for row in range(24)], 0, 0) == []
    batch = view.finish_batch(rows)
    expected = default_collate([plain[index] for index in range(24)])
    assert type(batch[0]) is type(expected[0]) and torch.equal(batch[1], expected[1])
    assert (batch[0] - expected[0]).abs().mean() < 0.1, "JPEGs, decoded at half the size"
    assert type(fused[0][0]) is type(plain[0][0])
    fused.close()
    plain.close()


def test_collate_function_gets_samples_of_the_plain_transforms_type(folder: Path) -> None:
    compose = v2.Compose([v2.CenterCrop(16), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    data = ImageFolder(str(folder), fuse(compose))
    [image, label] = next(iter(DataLoader(data, 4, collate_fn=lambda samples: samples[1])))
    assert type(image) is type(data[1][0]) is torchvision.tv_tensors.Image and label == data[1][1]
    assert torch.equal(image, data[1][0])
    data.close()


def test_pil_image_in_another_mode_is_no_row_and_says_so() -> None:
    fused = fuse(v1.Compose([v1.CenterCrop(8), v1.ToTensor()]))
    grey = Image.fromarray(np.zeros((10, 10), np.uint8))
    [(_, error)] = fused.fill(np.empty((1, 3, 8, 8), np.float32), [grey], [0])
    assert "mode L cannot be a row of RGB" in error.message


def test_kept_steps_draw_what_they_draw_in_the_plain_pipeline(folder: Path) -> None:
    compose = v1.Compose([v1.RandomResizedCrop(48), v1.ColorJitter(0.5), v1.ToTensor(), v1.RandomErasing(1)])
    batches = []
    for transform in (fuse(compose), compose):
        torch.manual_seed(3)
        data = ImageFolder(str(folder), transform)
        batches.append(list(DataLoader(data, 8, shuffle=True, seed=4)))
        data.close()
    for ours, theirs in zip(*batches, strict=True):
        assert torch.equal(ours[1], theirs[1])
        assert (ours[0] - theirs[0]).abs().mean() < 0.02
        assert (
            torch.equal(ours[0] == 0, theirs[0] == 0)
            or ((ours[0] == 0) == (theirs[0] == 0)).float().mean() > 0.99
        )


def test_resize_of_a_strip_is_as_long_as_torchvisions() -> None:
    strip = Image.new("RGB", (40_000, 1), (9, 9, 9))
    assert fuse(v1.Resize(2))(strip).size == v1.Resize(2)(strip).size == (80_000, 2)


def _resized(compose: Any) -> None:
    compose.transforms[0].size = (32, 32)


def _made_random(compose: Any) -> None:
    compose.transforms[1].p = 0.9


def _cast(compose: Any) -> None:
    compose.transforms[3].dtype = torch.float64


def _replaced(compose: Any) -> None:
    compose.transforms[1] = v1.RandomVerticalFlip()


def _continued(compose: Any) -> None:
    compose.transforms.append(v1.RandomErasing(1))


@pytest.mark.parametrize("change", [_resized, _made_random, _cast, _replaced, _continued])
@pytest.mark.parametrize("fully", [True, False])
def test_a_change_of_the_steps_after_fuse_is_refused(folder: Path, change: Any, fully: bool) -> None:
    """torch would follow it. A kept step may change, as it is called."""
    kept = [] if fully else [v1.RandomGrayscale(1)]
    values = [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)]
    steps = [v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), *values]
    compose = v1.Compose([*steps, *kept])
    fused = fuse(compose)
    data = ImageFolder(str(folder), fused)
    copy.deepcopy(fused)(png(Image.fromarray(scene(90, 70))))
    for step in kept:
        step.p = 0.0
    next(iter(DataLoader(data, 8, num_workers=1)))
    said = fused.fused
    change(compose)
    assert fused.fused == said
    for workers in (0, 1):
        with pytest.raises(ArgumentError, match=r"changed after fuse\(\).* ByEpoch"):
            next(iter(DataLoader(data, 8, num_workers=workers)))
    with pytest.raises(ArgumentError, match="changed after fuse"):
        data[0]
    data.transform = fuse(compose)
    next(iter(DataLoader(data, 8)))
    data.close()


@pytest.mark.parametrize("of", [v1, v2])
@pytest.mark.parametrize("given", [np.array, torch.tensor, tuple])
def test_values_of_a_step_are_compared_and_not_how_they_are_printed(of: Any, given: Any) -> None:
    normalize = of.Normalize(given(MEAN), given(STD))
    fused, image = fuse(of.Compose([of.CenterCrop(8), *normalized(of)[:-1], normalize])), scene(20, 20)
    want = fused(image)
    torch.set_printoptions(precision=1)
    try:
        with np.printoptions(precision=1):
            assert torch.equal(fused(image), want)
    finally:
        torch.set_printoptions(profile="default")
    normalize.mean = given([0.485001, *MEAN[1:]])
    with pytest.raises(ArgumentError, match=r"changed after fuse"):
        fused(image)


def test_epochs_objects_and_device_decoding(folder: Path) -> None:
    first, second = (fuse(v1.Compose([v1.CenterCrop(size), v1.ToTensor()])) for size in (24, 32))
    data: Any = ObjectDataset(str(folder / "c0"), transform=ByEpoch({0: first, 1: second}))
    loader = DataLoader(data, 8)
    assert [next(iter(loader)).shape[-1] for _ in range(2)] == [24, 32]
    partly = fuse(v1.Compose([v1.CenterCrop(24), v1.RandomGrayscale(), v1.PILToTensor()]))
    data.transform = partly
    assert next(iter(DataLoader(data, 8))).shape == (8, 3, 24, 24)
    data.close()
    images = ImageFolder(str(folder), first)
    with pytest.raises(
        ArgumentError, match=r"the device makes RGB .* Normalize as batch_transform=; found tran"
    ):
        DataLoader(images, 8, decoder="dali")


def test_fused_image_and_mask_are_cut_alike_with_and_without_kept_steps(tmp_path: Path) -> None:
    import io

    from fastload.formats.tar import TarWriter

    x = np.linspace(0, 240, 200).astype(np.uint8)[None].repeat(150, 0)
    file = io.BytesIO()
    writer = TarWriter(file)
    for number in range(8):
        photo = pillow_jpeg(np.repeat(x[..., None], 3, 2), quality=97)
        writer.write(f"{number}", {"jpg": photo, "png": png(Image.fromarray(x))})
    writer.close()
    (tmp_path / "x.tar").write_bytes(file.getvalue())
    (tmp_path / "x.idx").write_bytes(writer.index())
    mask = RandomResizedCrop(32, flip=0.5, interpolation="nearest", channels=1)
    for kept in ([], [v1.RandomPosterize(8, 1)]):
        image = fuse(
            v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), *kept, v1.PILToTensor()])
        )
        data = TarDataset(str(tmp_path / "x.tar"), transform={"jpg": image, "png": mask}, index=str(tmp_path))
        (batch,) = DataLoader(data, 8, seed=1)
        assert (batch["jpg"].float().mean(1) - batch["png"][:, 0]).abs().max() <= 8
        data.close()
    with pytest.raises(ArgumentError, match="must cut alike"):
        data.transform = {"jpg": fuse(v1.RandomResizedCrop(32)), "png": mask}


def test_image_and_mask_are_cut_alike_while_other_threads_draw(tmp_path: Path) -> None:
    x = np.tile(np.arange(200, dtype=np.uint8), (150, 1))
    (tmp_path / "image.png").write_bytes(png(Image.fromarray(np.repeat(x[..., None], 3, 2))))
    (tmp_path / "mask.png").write_bytes(png(Image.fromarray(x)))
    steps = [v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.RandomPosterize(8, 1), v1.PILToTensor()]
    mask = RandomResizedCrop(32, flip=0.5, interpolation="nearest", channels=1)
    data = TableDataset(
        {"image": ["image.png"] * 160, "mask": ["mask.png"] * 160},
        (File("image"), File("mask")),
        url=tmp_path,
        transform={"image": fuse(v1.Compose(steps)), "mask": mask},
    )
    for images, masks in DataLoader(data, 32, threads=4):
        assert (images[:, 0].float() - masks[:, 0]).abs().max() <= 8
    data.close()
