import functools
import sys
import warnings
from pathlib import Path

import torch

from fastload import Cache, DataLoader, ImageFolder, ObjectDataset, TFRecordDataset, TarDataset

page = Path(PAGE).read_text()
crop = fastload.RandomResizedCrop(32)
data = ImageFolder("/data/train", crop)
normalize = fastload.Normalize((0.5,) * 3, (0.5,) * 3)
empty = Path("/ssd/owls/owl")
empty.mkdir(parents=True)


def first(dataset, **options):
    return next(iter(DataLoader(dataset, 8, **options)))


CASES = [
    (
        "refused access. Credentials tried: ",
        lambda: ImageFolder("s3://bucket/train", storage_options={"key": "a", "secret": "bbbbb"}),
    ),
    (
        "no answer at endpoint_url",
        lambda: ImageFolder("s3://bucket/train", storage_options={"endpoint_url": "http://127.0.0.1:9"}),
    ),
    ("bucket '", lambda: ImageFolder("s3://nobucket/train")),
    ("no objects there: check the prefix", lambda: ImageFolder("s3://bucket/trian")),
    ("no class directories: give the parent of class/file.jpg", lambda: ImageFolder("s3://bucket/train/cat")),
    ("no valid image for the classes '", lambda: ImageFolder("/ssd/owls")),
    ("Normalize takes batches", lambda: first(ImageFolder("/data/train", normalize))),
    ("default_collate: ", lambda: first(ImageFolder("/data/train"))),
    (
        ", but sample 1 ",
        lambda: first(
            ObjectDataset("/data/train", decode=lambda data: torch.zeros(len(data))), num_workers=1
        ),
    ),
    (
        "too many values to unpack",
        lambda: [1 for a, b in [first(TarDataset("s3://bucket/shards/", transform=crop))]],
    ),
    (
        "keys have no object",
        lambda: fastload.TableDataset(
            [{"image": "cat/0000"}], fastload.File("image"), url="s3://bucket/train"
        ),
    ),
    ("passes through its cache", lambda: first(ImageFolder("/data/train", crop, cache="/proc/cache"))),
    ("this dataset has no length yet", lambda: len(TarDataset("s3://bucket/shards/"))),
    (
        "state_dict was saved with length ",
        lambda: DataLoader(data).load_state_dict(DataLoader(ImageFolder("/data/val", crop)).state_dict()),
    ),
    (
        "which fastload cannot describe",
        lambda: ObjectDataset(
            "/data/train", decode=functools.partial(print, sys.stdout), cache=Cache("/ssd/c", "decoded")
        ),
    ),
]

for words, call in CASES:
    assert words in page, f"the page does not say {words!r}"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            call()
            raised = None
        except Exception as error:
            raised = error
    said = " | ".join([str(raised), *(str(one.message) for one in warned)])
    assert words in said, (words, said)
