"""`fields=` of TarDataset and TFRecordDataset: tuples, alternatives and optional members."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import fastload
from fastload import Cache, RandomResizedCrop
from fastload.datasets.fingerprint import describe
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError, DecodeError
from fastload.formats.tar import TarWriter
from fastload.formats.tfrecord import TFRecordWriter, encode_example
from fastload.shards.record_fields import Leaf
from tests.sharddata import CROP, closing, jpeg, ordinary, write
from tests.sharddata import close_all as close_all

pytestmark = pytest.mark.usefixtures("close_all")

IMAGES = "jpg;jpeg;png;webp"
NAMES = ["jpg", "jpeg", "png"]  # of the images, in turn
COUNT = 24


def tar(members_of: Any, count: int = COUNT) -> dict[str, bytes]:
    file = io.BytesIO()
    writer = TarWriter(file)
    for number in range(count):
        writer.write(f"{number:03d}", members_of(number))
    writer.close()
    return {"x.tar": file.getvalue(), "x.idx": writer.index()}


def mixed(number: int) -> dict[str, bytes]:
    """Images under three extensions, a broken member beside each, and `json` in every third sample."""
    found = {NAMES[number % 3]: jpeg(number), "cls": b"%d" % number, "npy": b"broken", "pkl": b"a pickle"}
    return found | ({"json": json.dumps({"n": number}).encode()} if number % 3 == 0 else {})


def examples(count: int = COUNT) -> dict[str, bytes]:
    file = io.BytesIO()
    writer = TFRecordWriter(file)
    for number in range(count):
        found: dict[str, Any] = {NAMES[number % 3]: jpeg(number), "label": number}
        writer.write(encode_example(found | ({"text": f"n{number}"} if number % 3 == 0 else {})))
    writer.close()
    return {"x.tfrecord": file.getvalue(), "x.idx": writer.index()}


def opened(tmp_path: Path, objects: dict[str, bytes], **arguments: Any) -> Any:
    """The dataset of these shards, which are written by the first call."""
    folder = tmp_path / "shards"
    url = str(folder) if folder.exists() else write(folder, objects)
    return closing(fastload.TarDataset(url, **arguments))


def rows(data: Any, numbers: Any) -> Any:
    """A batch, filled as a loader fills it."""
    numbers = list(numbers)
    batch = view_of(data).new_batch(len(numbers), ordinary)
    failures = view_of(data).fill(batch, list(enumerate(numbers)), 5, 0)
    if failures:
        raise failures[0][1]
    return view_of(data).finish_batch(batch)


# --- samples and batches


def test_tuple_of_alternatives_batches_with_a_fused_transform_and_opens_nothing_else(tmp_path: Path) -> None:
    data = opened(tmp_path, tar(mixed), fields=(IMAGES, "cls"), transform=CROP)
    images, labels = rows(data, range(COUNT))
    assert images.shape == (COUNT, 3, 24, 24) and labels.tolist() == list(range(COUNT))
    image, label = data[4]
    assert image.shape == (3, 24, 24) and label == 4


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ("cls", 3),
        (("cls",), (3,)),
        ({"y": "cls", "id": "__key__"}, {"y": 3, "id": "003"}),
        (("__key__", {"meta": "json?"}), ("003", {"meta": {"n": 3}})),
        (["cls", "cls"], (3, 3)),
        (("none;txt?", "json;cls"), (None, {"n": 3})),
        (("txt;json", "cls"), ({"n": 3}, 3)),
    ],
)
def test_sample_has_the_structure_of_fields(fields: Any, found: Any, tmp_path: Path) -> None:
    assert opened(tmp_path, tar(mixed), fields=fields)[3] == found


def test_decoder_of_an_extension_goes_with_fields(tmp_path: Path) -> None:
    decode = {"cls": lambda content: int(content) + 100, "png": len}
    data = opened(tmp_path, tar(mixed), fields=("cls", "png?"), decode=decode)
    assert (data[2], data[3]) == ((102, len(jpeg(2))), (103, None))


def test_sample_without_a_fused_transform_has_the_image_opened(tmp_path: Path) -> None:
    image, label = opened(tmp_path, tar(mixed), fields=(IMAGES, "cls"))[2]
    assert image.size == fastload.images.decode.decode_pil(jpeg(2)).size and label == 2


@pytest.mark.parametrize("numbers", [range(COUNT), [0, 3], [1, 2]], ids=["some", "all", "none"])
@pytest.mark.parametrize("transform", [None, CROP, {"jpg": CROP, "json": lambda found: found["n"]}])
def test_column_of_an_optional_member_is_a_list_whatever_is_in_it(
    numbers: Any, transform: Any, tmp_path: Path
) -> None:
    fields = (IMAGES, "cls", "json?") if transform is not None else ("cls", "json?")
    data = opened(tmp_path, tar(mixed), fields=fields, transform=transform)
    *_, labels, found = rows(data, numbers)
    wanted = [({"n": n} if not isinstance(transform, dict) else n) if n % 3 == 0 else None for n in numbers]
    assert torch.equal(labels, torch.tensor(list(numbers))) and type(found) is tuple and list(found) == wanted


def test_optional_members_without_a_fused_transform_collate_the_others_as_torch_does(tmp_path: Path) -> None:
    def members(number: int) -> dict[str, bytes]:
        lists = {"a.json": b"[1, 2.5]", "b.json": b'{"n": [1]}', "txt": b"t"}
        return lists | ({"json": b"{}"} if number else {})

    data = opened(tmp_path, tar(members, 4), fields=("a.json", "b.json", "txt", "json?"))
    *found, optional = rows(data, range(4))
    *wanted, _ = default_collate([(*data[n][:3], 0) for n in range(4)])
    assert repr(found) == repr(wanted) and optional == (None, {}, {}, {})


def test_optional_image_is_none_or_what_the_function_of_the_transform_makes(tmp_path: Path) -> None:
    def members(number: int) -> dict[str, bytes]:
        return {"jpg": jpeg(number)} | ({"seg.png": jpeg(number)} if number % 2 else {})

    both = {"jpg": CROP, "seg.png": lambda image: image.size[0]}
    data = opened(tmp_path, tar(members), fields=("jpg", "seg.png?"), transform=both)
    _, masks = rows(data, range(4))
    assert [mask is None for mask in masks] == [True, False, True, False]


def test_features_of_examples_have_the_same_fields(tmp_path: Path) -> None:
    url = write(tmp_path / "shards", examples())
    fields = ("jpg;jpeg;png:bytes", "label:int", "text:str?")
    data = closing(fastload.TFRecordDataset(url, fields, transform=CROP))
    images, labels, texts = rows(data, range(COUNT))
    assert images.shape == (COUNT, 3, 24, 24) and labels.tolist() == list(range(COUNT))
    assert list(texts) == [f"n{n}" if n % 3 == 0 else None for n in range(COUNT)]
    assert data[1][1:] == (1, None)
    named = {"x": "jpg;jpeg;png:bytes", "y": "label:int"}
    data = closing(fastload.TFRecordDataset(url, named, transform={"x": CROP}))
    assert rows(data, range(5))["x"].shape == (5, 3, 24, 24)


@pytest.mark.parametrize("mode", ["raw", "decoded"])
def test_cache_keeps_the_chosen_members_and_gives_the_same_samples(mode: Any, tmp_path: Path) -> None:
    fields = (IMAGES, "cls", "json;txt?")
    plain = opened(tmp_path, tar(mixed), fields=("cls", "json;txt?"))
    crop = RandomResizedCrop(16, flip=0.5)

    def cached() -> Any:
        cache = Cache(tmp_path / "cache", mode, short_side=32)
        return opened(tmp_path, tar(mixed), fields=fields, transform=crop, cache=cache)

    data = cached()
    first = rows(data, range(COUNT))
    data._flush_cache()
    second = rows(cached(), range(COUNT))
    assert torch.equal(first[0], second[0]) and first[1].tolist() == second[1].tolist() == list(range(COUNT))
    assert list(first[2]) == list(second[2]) == [plain[n][1] for n in range(COUNT)]
    other = opened(
        tmp_path, tar(mixed), fields=("cls",), cache=Cache(tmp_path / "cache", mode, short_side=32)
    )
    assert other.contains(0) == (mode == "raw"), (
        "other fields are another record, but for the bytes themselves"
    )


# --- through the loader


def test_collate_fn_gets_samples_with_none(tmp_path: Path) -> None:
    data = opened(tmp_path, tar(mixed), fields=(IMAGES, "json?"), transform=CROP)
    found = next(iter(fastload.DataLoader(data, 4, collate_fn=list)))
    assert [one[1] for one in found] == [{"n": 0}, None, None, {"n": 3}]


def test_dataset_with_fields_is_pickled_and_described(tmp_path: Path) -> None:
    data = opened(tmp_path, tar(mixed), fields=({"x": IMAGES}, "cls", "json?"), transform={"x": CROP})
    again = closing(pickle.loads(pickle.dumps(data)))
    assert again[3][1:] == (3, {"n": 3}) and again[4][1:] == (4, None)
    other = opened(tmp_path, tar(mixed), fields=({"x": IMAGES}, "json?", "cls"), transform={"x": CROP})
    assert describe(data, "d") == describe(again, "d") != describe(other, "d")


# --- what is wrong


def test_sample_without_a_required_member_names_it_and_what_to_write(tmp_path: Path) -> None:
    data = opened(tmp_path, tar(mixed), fields=("jpg;png", "cls"), transform=CROP)
    assert rows(data, [0, 2, 3])[1].tolist() == [0, 2, 3]
    with pytest.raises(
        DecodeError, match=r"sample '001' has no jpg or png.* it has jpeg, cls, npy, pkl"
    ) as caught:
        data[1]
    assert "'jpg;png?'" in str(caught.value) and "x.tar @ " in str(caught.value.key)
    loader = fastload.DataLoader(data, 4, on_error="repeat")
    assert sum(len(labels) for _, labels in loader) == COUNT
    assert len(loader.stats()["bad"]) == COUNT // 3


def test_example_without_a_required_feature_names_all_that_it_has(tmp_path: Path) -> None:
    url = write(tmp_path / "shards", examples())
    data = closing(fastload.TFRecordDataset(url, ("jpg:bytes", "label:int")))
    with pytest.raises(DecodeError, match=r"the record has no jpg, .* it has jpeg, label"):
        data[1]


@pytest.mark.parametrize("text", ["", ";", "jpg;;png", "jpg;jpg", "js?on", "?", "a?;b"])
def test_leaf_that_is_no_leaf_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="fields= has the leaf"):
        Leaf.parse(text)


def test_transform_that_is_set_later_is_checked_too(tmp_path: Path) -> None:
    data = opened(tmp_path, tar(mixed), fields=(IMAGES, "cls"))
    with pytest.raises(ArgumentError, match="transform names 'png'"):
        data.transform = {"png": CROP}
    data.transform = lambda sample: sample[1] + 100
    assert data[5] == 105
