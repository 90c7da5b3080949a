"""ImageFolder holds to torchvision's: classes, order, labels, target_transform, folders without images."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from bench.peers.scripts.torchvision_on_cpu import torchvision
from fastload import CenterCrop, DataLoader, ImageFolder, RandomResizedCrop
from fastload.datasets.objects import ReadOnlyList
from fastload.errors import ArgumentError, NotFoundError
from fastload.gpu.dali import why_no_dali
from tests.faultserver import LIST, FaultServer
from tests.photos import pillow_jpeg, scene
from tests.shortform import short_form

CROP = CenterCrop((16, 16), resize=20)
FILES = [
    "Zebra/1.jpg",
    "ant/10.JPG",
    "ant/2.jpeg",
    "ant/deep/er/3.png.jpg",
    "ant/deep-2/1.jpg",
    "ant/notes.txt",
    "bee/b.jpg",
    "bee/é.jpg",
    "top.jpg",
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for number, name in enumerate(FILES):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        body = pillow_jpeg(scene(40, 32, number)) if name.lower().endswith(("jpg", "jpeg")) else b"text"
        (root / name).write_bytes(body)
    return root


@pytest.fixture
def folder(tree: Path, no_leaks: None, keep: Callable[[Any], Any]) -> Callable[..., ImageFolder]:
    return lambda *arguments, **options: keep(ImageFolder(str(tree), *arguments, **options))  # type: ignore[no-any-return]


def theirs(root: Path, **arguments: Any) -> Any:
    return torchvision.datasets.ImageFolder(str(root), **arguments)


def below(root: Path, samples: Any) -> list[tuple[str, int]]:
    return [(str(Path(path).relative_to(root)), label) for path, label in samples]


def alike(ours: ImageFolder, other: Any, root: Path) -> None:
    assert ours.classes == other.classes and ours.class_to_idx == other.class_to_idx
    assert ours.samples == below(root, other.samples) == ours.imgs
    assert ours.targets == other.targets and len(ours) == len(other)


# --- classes


def test_classes_samples_and_targets_are_torchvisions(tree: Path, folder: Any) -> None:
    ours, other = folder(target_transform=str), theirs(tree, target_transform=str)
    alike(ours, other, tree)
    for index in range(len(ours)):
        assert np.array_equal(ours[index][0], other[index][0]) and ours[index][1] == other[index][1]


def test_a_link_to_nothing_is_a_sample_whose_read_fails_as_in_torchvision(tree: Path, folder: Any) -> None:
    (tree / "bee" / "a.jpg").symlink_to(tree / "not mounted" / "a.jpg")
    ours, other = folder(), theirs(tree)
    alike(ours, other, tree)
    index = next(index for index, (path, _) in enumerate(ours.samples) if path == "bee/a.jpg")
    with pytest.raises(FileNotFoundError):
        other[index]
    with pytest.raises(NotFoundError, match="link to a file that is not there"):
        ours[index]


def empty(root: Path, how: str) -> None:
    path = root / {"directory": "cat", "nested": "cat/inner/most", "others": "cat"}[how]
    path.mkdir(parents=True)
    if how == "others":
        (path / "readme.md").write_text("no image")


@pytest.mark.parametrize("how", ["directory", "nested", "others"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_class_without_images_is_an_error_or_a_class_as_in_torchvision(
    how: str, cached: bool, tree: Path, folder: Any, tmp_path: Path
) -> None:
    options = {"cache": tmp_path / "cache"} if cached else {}
    before = folder(**options)  # a listing that is kept
    assert before.classes == ["Zebra", "ant", "bee"]
    empty(tree, how)
    with pytest.raises(FileNotFoundError, match="cat"):
        theirs(tree)
    with pytest.raises(
        NotFoundError, match=r"no valid image for the classes 'cat'\..*\.webp.*allow_empty=True"
    ):
        folder(**options)
    ours, other = folder(allow_empty=True, **options), theirs(tree, allow_empty=True)
    alike(ours, other, tree)
    assert ours.classes == ["Zebra", "ant", "bee", "cat"]
    if cached:
        options["listing_max_age"] = "1d"
        alike(folder(allow_empty=True, **options), other, tree)  # from the listing that was kept
        with pytest.raises(NotFoundError, match="'cat'"):
            folder(**options)
        (tree / "cat/1.jpg").write_bytes(b"")
        assert folder(**options).classes == ["Zebra", "ant", "bee", "cat"], "the old listing decides"


def test_only_folders_without_images(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "dog").mkdir()
    with pytest.raises(NotFoundError, match="no valid image for the classes 'cat', 'dog'"):
        ImageFolder(str(tmp_path))
    alike(ImageFolder(str(tmp_path), allow_empty=True), theirs(tmp_path, allow_empty=True), tmp_path)


@pytest.mark.parametrize("client", ["", "s3fs"])
@pytest.mark.parametrize("marker", ["train/cat/", "train/cat/inner/", "train/cat/notes.txt"])
def test_a_folder_without_images_in_a_bucket(client: str, marker: str) -> None:
    objects = {f"train/{name}/{k}.jpg": b"x" for name in ("ant", "dog") for k in range(3)}
    with FaultServer({**objects, "train/": b"", marker: b""}, page_size=2) as server:
        options = {**server.options, **({"client": client} if client else {})}
        with pytest.raises(NotFoundError, match="no valid image for the classes 'cat'"):
            ImageFolder("s3://bucket/train", storage_options=options)
        dataset = ImageFolder("s3://bucket/train", allow_empty=True, storage_options=options)
        assert dataset.class_to_idx == {"ant": 0, "cat": 1, "dog": 2} and dataset.targets == [0] * 3 + [2] * 3
        del server.objects[marker]
        assert ImageFolder("s3://bucket/train", storage_options=options).classes == ["ant", "dog"]
        assert server.count(LIST) > 0


def test_a_folder_without_images_in_a_file_system_of_fsspec() -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/folders/train/ant/1.jpg", b"x")
    files.makedirs("/folders/train/cat")
    with pytest.raises(NotFoundError, match="'cat'"):
        ImageFolder("memory://folders/train")
    assert ImageFolder("memory://folders/train", allow_empty=True).class_to_idx == {"ant": 0, "cat": 1}


def test_classes_that_are_given_number_the_labels(tree: Path, folder: Any, tmp_path: Path) -> None:
    names = ["bee", "owl", "Zebra", "ant"]
    for options in ({}, {"cache": tmp_path / "cache"}, {"cache": tmp_path / "cache"}):
        ours = folder(CROP, classes=names, allow_empty=True, **options)
        assert ours.classes == names and ours.class_to_idx == {name: k for k, name in enumerate(names)}
        assert ours.samples == [(key, names.index(key.partition("/")[0])) for key, _ in folder().samples]
        assert ours.targets == [label for _, label in ours.samples] == [ours[k][1] for k in range(len(ours))]
        for workers in (0, 2):
            labels = torch.cat([labels for _, labels in DataLoader(ours, 3, num_workers=workers)])
            assert labels.dtype == torch.int64 and labels.tolist() == ours.targets
    again = pickle.loads(pickle.dumps(ours))
    assert again.targets == ours.targets and again.classes == names


@pytest.mark.parametrize(
    ("classes", "error", "words"),
    [
        (["ant", "bee"], ArgumentError, r"classes= does not name the folders 'Zebra'\. Add them"),
        (["ant", "bee", "Zebra", "owl"], NotFoundError, r"no valid image for the classes 'owl'.*allow_empty"),
        ("ant", ArgumentError, "must be a list of different class names.*found 'ant'"),
        (["ant", "ant"], ArgumentError, "must be a list of different"),
        ([], ArgumentError, "must be a list of different"),
        ([0, 1], ArgumentError, "must be a list of different"),
        ({"ant": 2, "bee": 0}, ArgumentError, "in the order of their indices, found {'ant'"),
        ({"ant", "bee", "Zebra"}, ArgumentError, "must be a list of different"),
    ],
)
def test_classes_that_do_not_fit_are_refused(classes: Any, error: Any, words: str, folder: Any) -> None:
    with pytest.raises(error, match=words):
        folder(classes=classes)


def test_a_listing_that_does_not_fit_the_classes_is_made_again(
    tree: Path, folder: Any, tmp_path: Path
) -> None:
    (tree / "owl").mkdir()
    (tree / "owl/1.jpg").write_bytes(b"")
    cache = tmp_path / "cache"
    assert "owl" in folder(cache=cache).classes
    names = ["Zebra", "bee", "ant"]
    with pytest.raises(ArgumentError, match="'owl'"):
        folder(classes=names, cache=cache)
    (tree / "owl/1.jpg").unlink()
    (tree / "owl").rmdir()
    assert folder(classes=names, cache=cache).classes == names


# --- target_transform


def plain(image: Any) -> torch.Tensor:
    return CROP(image)


def pair(label: int) -> Any:
    return {"name": f"class {label}", "one hot": torch.eye(3)[label], "parts": (label, label / 2)}


def flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: flat(part) for name, part in value.items()}
    return [flat(part) for part in value] if isinstance(value, list | tuple) else value


def mixed(label: int) -> Any:
    return label if label else 0.5


@pytest.mark.parametrize(
    ("target", "transform", "workers"),
    [
        *((made, CROP, 0) for made in (lambda k: k + 5, float, str, bool, np.float32, lambda k: (k,))),
        *((pair, CROP, 2), (pair, plain, 0), (str, plain, 0)),
    ],
)
def test_target_transform_makes_the_targets_as_in_torchvision(
    target: Any, transform: Any, workers: int, tree: Path, folder: Any
) -> None:
    ours, other = folder(transform, target), theirs(tree, transform=plain, target_transform=target)
    assert ours.targets == other.targets and ours.samples == below(tree, other.samples)
    assert [flat(ours[k][1]) for k in range(len(ours))] == [flat(other[k][1]) for k in range(len(other))]
    expected = [flat(targets) for _, targets in torch.utils.data.DataLoader(other, 3)]
    assert [flat(targets) for _, targets in DataLoader(ours, 3, num_workers=workers)] == expected
    order = [5, 0, 3]
    expected = [flat(targets) for _, targets in torch.utils.data.DataLoader(Subset(other, order), 2)]
    assert [flat(targets) for _, targets in DataLoader(Subset(ours, order), 2)] == expected
    samples = list(DataLoader(ours, 4, num_workers=workers, collate_fn=list))
    assert [flat(label) for batch in samples for _, label in batch] == [flat(target(k)) for k in ours.targets]
    single = [flat(label) for _, label in DataLoader(ours, None, num_workers=workers)]
    assert single == [flat(label) for _, label in torch.utils.data.DataLoader(other, None)]


def test_target_transform_set_later_is_obeyed(folder: Any) -> None:
    dataset = folder(CROP)
    loader = DataLoader(dataset, 7)
    assert next(iter(loader))[1].tolist() == dataset.targets
    dataset.target_transform = str
    assert next(iter(loader))[1] == tuple(str(label) for label in dataset.targets)  # as torch collates texts
    dataset.target_transform = None
    assert next(iter(loader))[1].tolist() == dataset.targets


def test_targets_of_several_types_are_collated_together(folder: Any) -> None:
    images, targets = next(iter(DataLoader(folder(CROP, mixed, classes=["ant", "bee", "Zebra"]), 7)))
    assert images.shape == (7, 3, 16, 16) and sorted(targets.tolist()) == [0.5, 0.5, 0.5, 0.5, 1, 1, 2]


DECODERS = [
    pytest.param("dali", marks=pytest.mark.skipif(why_no_dali() is not None, reason=str(why_no_dali())))
]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("target", "workers"), [(str, 0), (pair, 2)])
def test_target_transform_where_the_device_decodes(
    target: Any, workers: int, decoder: str, folder: Any
) -> None:
    dataset = folder(CROP, target)
    batches = list(DataLoader(dataset, 3, num_workers=workers, decoder=decoder))
    expected = list(DataLoader(dataset, 3))
    assert [images.shape for images, _ in batches] == [images.shape for images, _ in expected]
    assert [flat(targets) for _, targets in batches] == [flat(targets) for _, targets in expected]


def refused(label: int) -> int:
    if label == 1:
        raise LookupError("no such class")
    return label


@pytest.mark.parametrize(
    ("transform", "workers"),
    short_form(
        itertools.product((CROP, plain), (0, 2)), lambda made, workers: (made is CROP) == bool(workers)
    ),
)
def test_a_target_transform_that_raises_is_a_bad_sample(transform: Any, workers: int, folder: Any) -> None:
    dataset = folder(transform, refused)
    with pytest.raises(LookupError, match="no such class"):
        list(DataLoader(dataset, 7, num_workers=workers))
    loader = DataLoader(dataset, 7, num_workers=workers, on_error="repeat")
    ((_, targets),) = loader
    bad = dataset.targets.count(1)
    assert set(targets.tolist()) == {0, 2} and loader.stats()["counters"]["bad.samples"] == bad


def noise(label: int) -> float:
    return label + torch.rand(1).item() / 4 + random.random() / 4


def test_a_random_target_transform_is_a_function_of_seed_epoch_and_index(folder: Any) -> None:
    dataset = folder(RandomResizedCrop(16), noise)
    runs = []
    for workers, size in ((0, 2), (2, 3)):
        loader = DataLoader(dataset, size, num_workers=workers, seed=4)
        runs.append([torch.cat([targets for _, targets in loader]).tolist() for _ in range(2)])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1] and len(set(runs[0][0])) == 7


# --- what torchvision's class has beside


def test_the_text_of_a_million_samples_is_a_line() -> None:
    view = ReadOnlyList(1_000_000, lambda start, stop: list(range(start, stop)), "")
    assert repr(view) == "[0, 1, 2, ..., 999997, 999998, 999999] (1,000,000 items)"


def test_samples_and_targets_answer_as_lists(tree: Path, folder: Any) -> None:
    ours, other = folder(), theirs(tree)
    for view, other_list in ((ours.samples, below(tree, other.samples)), (ours.targets, other.targets)):
        assert len(view) == len(other_list) and list(view) == other_list and repr(view) == repr(other_list)
        for part in (0, -1, slice(2, 5), slice(None, None, -2), slice(90, 99)):
            assert view[part] == other_list[part] and type(view[part]) is type(other_list[part])
        assert (
            view == other_list and other_list == view and view != other_list[1:] and view != tuple(other_list)
        )
        assert view + other_list == other_list + view == view + view == other_list * 2
        assert view.index(other_list[3]) == other_list.index(other_list[3]) and other_list[2] in view
        assert list(reversed(view)) == other_list[::-1] and view.count(other_list[0]) == other_list.count(
            view[0]
        )
        for index in (7, -8):
            with pytest.raises(IndexError):
                view[index]
        with pytest.raises(TypeError, match="Subset"):
            view[0] = other_list[0]
        with pytest.raises(TypeError, match="Subset"):
            del view[0]
        assert pickle.loads(pickle.dumps(view)) == view
    assert np.asarray(ours.targets).tolist() == torch.tensor(ours.targets).tolist() == other.targets


def test_samples_are_not_made_when_they_are_asked_for_one_by_one(tree: Path, folder: Any) -> None:
    dataset = folder()
    asked: list[tuple[int, int]] = []
    keys = dataset.listing().keys
    dataset.listing().keys = lambda *span: asked.append(span) or keys(*span)
    assert dataset.samples[4][0] == dataset.key(4)
    assert asked == [(4, 5)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("samples", "torch.utils.data.Subset"),
        ("imgs", "torch.utils.data.Subset"),
        ("targets", "target_transform="),
        ("classes", "classes="),
        ("class_to_idx", "classes="),
        ("loader", "transform="),
        ("is_valid_file", "Subset"),
    ],
)
def test_what_torchvision_lets_be_set_says_what_to_do(name: str, words: str, folder: Any) -> None:
    dataset = folder()
    with pytest.raises(ArgumentError, match=rf"{name} of ImageFolder cannot be set: .*{words}"):
        setattr(dataset, name, [])


@pytest.mark.parametrize(
    "name", ["find_classes", "make_dataset", "loader", "is_valid_file", "samples", "classes"]
)
def test_hooks_of_torchvision_are_refused_in_a_subclass(name: str, tree: Path) -> None:
    hooked = type("Hooked", (ImageFolder,), {name: lambda self, *arguments: None})
    with pytest.raises(ArgumentError, match=rf"Hooked\.{name} is not supported: "):
        hooked(str(tree))
