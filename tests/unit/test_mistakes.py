"""Mistakes of newcomers: each message says what to write, and its traceback shows the line that made it."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

import fastload
from fastload import (
    CenterCrop,
    DataLoader,
    File,
    ImageFolder,
    Normalize,
    ParquetDataset,
    RandomResizedCrop,
    TableDataset,
    TarDataset,
)
from fastload.errors import PACKAGE, ArgumentError, DecodeError, FastloadError, NotFoundError
from tests.kinds import photo, write_parquet, write_tar

FIELDS = (File("image"), "label")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two photos, one of them cut, a Parquet file, a tar, and three tables."""
    root = tmp_path_factory.mktemp("mistakes")
    (root / "photos" / "cat").mkdir(parents=True)
    (root / "photos" / "cat" / "0.jpg").write_bytes(photo(0))
    (root / "photos" / "cat" / "1.jpg").write_bytes(photo(1)[:200])
    write_parquet(root / "parquet", photo)
    write_tar(root / "tar", photo)
    (root / "headless.csv").write_text("cat/0.jpg,1\ncat/1.jpg,0\n")
    (root / "spaced.csv").write_text("image, label\ncat/0.jpg, 1\n")
    return root


def table(root: Path, key: str) -> Any:
    return TableDataset([{"image": key, "label": 1}], FIELDS, url=root / "photos")


class Darker(CenterCrop):
    def __call__(self, image: Any) -> Any:
        return super().__call__(image) // 2


Call = Callable[[Path], Any]
MISTAKES: dict[str, tuple[Call, type[Exception], str]] = {
    "an option of the store as an argument": (
        lambda root: ImageFolder(root / "photos", endpoint_url="http://host"),  # type: ignore[call-arg]
        TypeError,
        "ImageFolder() has no argument 'endpoint_url': it has url, transform, target_transform, keys, "
        "classes, allow_empty, cache, storage_options, listing_max_age, on_change. An option of the store is "
        "written as storage_options={'endpoint_url': ...}",
    ),
    "a secret as an argument": (
        lambda root: ImageFolder(root / "photos", secret="hush"),  # type: ignore[call-arg]
        TypeError,
        "storage_options={'secret': ...}",
    ),
    "torchvision's name of the url": (
        lambda root: ImageFolder(root=root / "photos"),  # type: ignore[call-arg]
        TypeError,
        "ImageFolder() has no argument 'root': it is called 'url' here, which may be a path too",
    ),
    "another loader's name of an argument": (
        lambda root: DataLoader([1], workers=8),  # type: ignore[call-arg, arg-type]
        TypeError,
        "DataLoader() has no argument 'workers': did you mean 'num_workers'",
    ),
    "an argument by position": (
        lambda root: CenterCrop(224, 256),  # type: ignore[misc]
        TypeError,
        "CenterCrop() takes size by position, and 2 values were given: name the others (resize=, ",
    ),
    "a transform by position": (
        lambda root: TarDataset(root / "tar", ("jpg",), CenterCrop(8)),  # type: ignore[misc]
        TypeError,
        "TarDataset() takes url, fields by position, and 3 values were given: name the others (decode=, ",
    ),
    "no fields": (
        lambda root: TableDataset(root / "spaced.csv", url=root),  # type: ignore[call-arg]
        TypeError,
        "TableDataset() needs fields: write TableDataset(table, fields)",
    ),
    "a list of transforms": (
        lambda root: ImageFolder(root / "photos", [CenterCrop(8), CenterCrop(8)]),  # type: ignore[arg-type]
        ArgumentError,
        "found a list of 2: join them, as in torchvision.transforms.v2.Compose([...])",
    ),
    "a size of two numbers": (
        lambda root: RandomResizedCrop(224, 192),  # type: ignore[arg-type]
        ArgumentError,
        "as in RandomResizedCrop((224, 192))",
    ),
    "means of 0 to 255": (
        lambda root: Normalize([123.7, 116.3, 103.5], [58.4, 57.1, 57.4]),
        ArgumentError,
        "mean and std are of values from 0 to 1: divide both by 255",
    ),
    "the path of a state": (
        lambda root: DataLoader(range(4)).load_state_dict("run.pt"),  # type: ignore[arg-type]
        ArgumentError,
        "found 'run.pt': read it by torch.load first",
    ),
    "a hash as a seed": (
        lambda root: DataLoader(range(4), seed=1 << 64),  # type: ignore[arg-type]
        ArgumentError,
        "from -2**63 to 2**64 - 1, as torch's seeds are, found 18446744073709551616: take a larger one",
    ),
    "a seed of a sampler that is none": (
        lambda root: fastload.DistributedSampler(range(4), 1, 0, seed=True),
        ArgumentError,
        "seed must be a whole number",
    ),
    "a step past the end": (
        lambda root: DataLoader(range(20), 8, seed=1).samples_at(99),  # type: ignore[arg-type]
        ArgumentError,
        "epoch 0 has no step 99 on this rank: it has 3 steps, from 0 on",
    ),
    "a loader of torch": (
        lambda root: fastload.watch(torch.utils.data.DataLoader([1])),  # type: ignore[arg-type]
        ArgumentError,
        "it takes torch's arguments, so import that one instead",
    ),
    "the length of shards": (
        lambda root: len(TarDataset(root / "tar")),
        TypeError,
        "give index files (index=), which `fastload index` writes; or give it a cache, with which the first "
        "epoch builds the index. num_samples= gives it a length until then",
    ),
    "a column of Parquet": (
        lambda root: ParquetDataset(root / "parquet", ("image", "lable")),
        ArgumentError,
        "did you mean 'label'?",
    ),
    "a size as a transform": (
        lambda root: ImageFolder(root / "photos", 224),  # type: ignore[arg-type]
        ArgumentError,
        "transform must be callable or None, as RandomResizedCrop(224) is; found 224",
    ),
    "a crop with a call of its own": (
        lambda root: ImageFolder(root / "photos", fastload.ByEpoch({0: CenterCrop(8), 1: Darker(8)})),
        ArgumentError,
        "transform= has a Darker, and batches would be made without Darker.__call__: give a function that "
        "calls the crop, or the crop itself and fastload.map(dataset, function)",
    ),
    "a URL as a key": (
        lambda root: DataLoader(ImageFolder(root / "photos", CenterCrop(8))).exclude([f"{root}/cat/0.jpg"]),
        ArgumentError,
        "check it against dataset.key(index), which is relative to the URL, such as 'cat/0.jpg'",
    ),
    "shards that do not exist": (
        lambda root: TarDataset(f"{root}/tar/{{0..9}}.tar"),
        NotFoundError,
        "check the numbers in braces, and that the upload is complete",
    ),
    "a table without a header": (
        lambda root: TableDataset(root / "headless.csv", FIELDS, url=root / "photos"),
        ArgumentError,
        "the first line has to be the names of the columns, and these look like values",
    ),
    "a header with spaces": (
        lambda root: TableDataset(root / "spaced.csv", FIELDS, url=root / "photos"),
        ArgumentError,
        "remove the spaces around ' label' in its first line",
    ),
    "an index of several": (
        lambda root: ImageFolder(root / "photos")[:4],  # type: ignore[index]
        TypeError,
        "For several samples take torch.utils.data.Subset(dataset, indices)",
    ),
    "a key as an index": (
        lambda root: TarDataset(root / "tar")["0.jpg"],  # type: ignore[index]
        TypeError,
        "found '0.jpg'. For several samples take torch.utils.data.Subset(dataset, indices); "
        "dataset.find(keys) gives the indices of keys",
    ),
    "a sample that is appended": (
        lambda root: ImageFolder(root / "photos").samples.append(("x", 1)),  # type: ignore[attr-defined]
        AttributeError,
        "has no append(): choose samples with torch.utils.data.Subset(dataset, indices)",
    ),
    "a name of torchvision": (
        lambda root: fastload.Resize,
        AttributeError,
        "module 'fastload' has no attribute 'Resize': datasets and loaders take those of torch(vision) too",
    ),
    "a name in other letters": (
        lambda root: fastload.Dataloader,
        AttributeError,
        "did you mean 'DataLoader'",
    ),
    **{
        f"the key {key}": (
            lambda root, key=key: table(root, key),  # type: ignore[misc]
            NotFoundError,
            "there is 'cat/0.jpg': write keys as the store has them, with '/' inside and none before them",
        )
        for key in ("/cat/0.jpg", "./cat/0.jpg", "cat\\0.jpg")
    },
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_message_says_what_to_write(mistake: str, root: Path) -> None:
    call, kind, words = MISTAKES[mistake]
    with pytest.raises(kind, match=re.escape(words)) as caught:
        call(root)
    assert "hush" not in str(caught.value)


def frames_of(call: Callable[[], Any]) -> list[str]:
    """Return the files in the traceback of the error that a call raises."""
    with pytest.raises(FastloadError) as caught:
        call()
    assert caught.value.__cause__ is None
    return [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]


@pytest.mark.parametrize(
    "call",
    [
        lambda root: ImageFolder(root / "absent"),
        lambda root: TableDataset(root / "spaced.csv", FIELDS, url=root),
        lambda root: DataLoader([1], on_error="ignore"),
        lambda root: fastload.open_store("s3://bucket", region_name="eu-west-1"),
        lambda root: fastload.Cache("s3://bucket/cache"),
        lambda root: ParquetDataset(root / "parquet", ("image", "lable")),
    ],
)
def test_traceback_shows_the_line_of_the_user(call: Call, root: Path) -> None:
    files = frames_of(lambda: call(root))
    assert files[-1] == __file__ and not any(file.startswith(PACKAGE) for file in files)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_traceback_of_a_bad_sample_shows_no_worker(num_workers: int, root: Path) -> None:
    loader = DataLoader(ImageFolder(root / "photos", CenterCrop(8)), 2, num_workers=num_workers)
    files = frames_of(lambda: list(loader))
    assert not any(file.startswith(PACKAGE) for file in files)


def crop_of_no_image(image: Any) -> Any:
    return CenterCrop(8)(b"<html>")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_traceback_shows_the_code_of_the_user(num_workers: int, root: Path) -> None:
    loader = DataLoader(ImageFolder(root / "photos", crop_of_no_image), 1, num_workers=num_workers)
    with pytest.raises(DecodeError, match="HTML") as caught:
        list(loader)
    assert "in crop_of_no_image" in "".join(traceback.format_exception(caught.value))


def test_traceback_shows_a_script_beside_the_package(root: Path) -> None:
    script = f"{PACKAGE.rstrip(os.sep)}_train.py"
    names: dict[str, Any] = {"crop": CenterCrop(8)}
    exec(compile("def broken(image): return crop(b'<html>')", script, "exec"), names)
    loader = DataLoader(ImageFolder(root / "photos", names["broken"]), 1)
    with pytest.raises(DecodeError, match="HTML") as caught:
        list(loader)
    assert script in [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]


@pytest.mark.parametrize(
    ("on_error", "words"), [("replace", "the 16 that it was to replace"), ("repeat", "all of its batch")]
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_message_says_that_substitutes_are_bad_too(
    on_error: str, words: str, num_workers: int, root: Path
) -> None:
    images = ImageFolder(root / "photos", crop_of_no_image)
    with pytest.raises(DecodeError, match=f"on_error='{on_error}' ends here: {words} are bad too"):
        list(DataLoader(images, 2, num_workers=num_workers, on_error=on_error))


def test_a_type_error_from_inside_is_not_explained() -> None:
    class Images(ImageFolder):
        def __init__(self) -> None:
            super().__init__("absent", len(3))  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        Images()
