"""The fields of tar samples and Examples, transforms by field, and the columns of their batches."""

from __future__ import annotations

import io
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

import fastload
from fastload import Cache, RandomResizedCrop
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError, DecodeError
from fastload.formats.tar import TarWriter
from tests.sharddata import (
    CROP,
    closing,
    jpeg,
    ordinary,
    read,
    shards,
    write,
)

pytestmark = pytest.mark.usefixtures("close_all")


# --- Fields ------------------------------------------------------------------------------------------------


def tar_of(*samples: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    writer = TarWriter(file)
    for number, members in enumerate(samples):
        writer.write(f"{number:03d}", members)
    writer.close()
    return file.getvalue()


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def only(tmp_path: Path, members: dict[str, bytes], **arguments: Any) -> Any:
    data = closing(fastload.TarDataset(write(tmp_path, {"x.tar": tar_of(members)}), **arguments))
    (one,) = ids_of(data)
    return data[one]


def ids_of(data: Any) -> list[int]:
    """The samples of a shard, in order."""
    streams = data._streams()
    (state,) = streams.plan_streams(1, seed=0, epoch=0, shuffle=False, rank=0, ranks=1)
    stream = streams.open_stream(state)
    found: list[int] = stream.take(9)
    stream.close()
    return found


def test_members_are_opened_by_their_extension(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    sample = only(
        tmp_path,
        {
            "jpg": jpeg(1),
            "seg.png": jpeg(2),
            "cls": b" 12\n",
            "id": b"-3",
            "json": b'{"a": [1, 2.5]}',
            "txt": "grün".encode(),
            "npy": npy(array),
            "f.npy": npy(np.asfortranarray(array)),
            "bin": b"\0\1",
        },
    )
    assert next(iter(sample)) == "__key__" and sample["__key__"] == "000"
    assert sample["jpg"].size == (48, 36) and sample["seg.png"].size == (56, 40)
    assert (sample["cls"], sample["id"], sample["txt"], sample["bin"]) == (12, -3, "grün", b"\0\1")
    assert sample["json"] == {"a": [1, 2.5]}
    assert np.array_equal(sample["npy"], array) and np.array_equal(sample["f.npy"], array)


def test_a_member_that_is_called_like_the_key(tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match="member '__key__'"):
        only(tmp_path, {"jpg": jpeg(1), "__key__": b"x"})


@pytest.mark.parametrize("name", ["pyd", "pkl", "pickle", "pth", "pt"])
def test_pickles_are_refused_unless_opted_in(name: str, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    with pytest.raises(DecodeError, match="unsafe=True"):
        only(tmp_path, {name: pickle.dumps(Bomb())})
    with pytest.raises(DecodeError, match="pickle"):
        only(tmp_path, {"npy": npy(np.array([Bomb()], dtype=object), allow_pickle=True)})
    assert not (tmp_path / "ran").exists()
    assert only(tmp_path, {name: b"7"}, decode={name: int})[name] == 7
    if name in ("pth", "pt"):
        file = io.BytesIO()
        torch.save({"a": 1}, file)
        content = file.getvalue()
    else:
        content = pickle.dumps({"a": 1})
    assert only(tmp_path, {name: content}, unsafe=True)[name] == {"a": 1}


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"cls": b"seven"}, "cls"),
        ({"cls": b"1" * 5000}, "5000 bytes"),
        ({"json": b"{"}, "json"),
        ({"json": b"[" * 100_000}, "json"),
        ({"txt": b"\xff"}, "txt"),
        ({"npy": b"\x93NUMPY"}, "npy"),
        ({"npy": npy(np.zeros(3))[:-1]}, "other bytes"),
        ({"npy": npy(np.zeros(3)).replace(b"(3,)", b"(9999999999,)")}, "npy"),
        ({"jpg": b"\xff\xd8\xffnot one"}, "decode"),
    ],
)
def test_members_that_are_not_what_they_say(members: dict[str, bytes], says: str, tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match=says) as caught:
        only(tmp_path, members)
    assert caught.value.key is not None and "x.tar" in str(caught.value.key)


def test_transforms_by_field(tmp_path: Path) -> None:
    objects = {"x.tar": tar_of(*({"jpg": jpeg(i), "seg.png": jpeg(i), "cls": b"%d" % i} for i in range(20)))}
    both = {"jpg": CROP, "seg.png": RandomResizedCrop(24, flip=0.5), "cls": lambda label: label + 100}
    data = closing(fastload.TarDataset(write(tmp_path, objects), transform=both))
    ((_, batch), *_) = read(data, workers=1, shuffle=False)
    assert batch["cls"].tolist() == list(range(100, 116))
    assert torch.equal(batch["jpg"], batch["seg.png"]), "drawn with the same seed: a mask is cut as its image"
    with pytest.raises(DecodeError, match=r"takes one image, and sample '0\d\d' has jpg"):
        read(closing(fastload.TarDataset(str(tmp_path), transform=CROP)), workers=1)
    with pytest.raises(DecodeError, match="has no 'png'"):
        read(closing(fastload.TarDataset(str(tmp_path), transform={"png": CROP})), workers=1)
    with pytest.raises(ArgumentError, match="pass fields="):
        fastload.TFRecordDataset(write(tmp_path / "t", shards("tfrecord")), transform=CROP)
    with pytest.raises(ArgumentError, match="write fields="):
        fastload.TFRecordDataset(str(tmp_path / "t"), {"image": str}, transform={"image": CROP})


def test_sample_without_the_image_is_bad(tmp_path: Path) -> None:
    complete = {"jpg": jpeg(0), "cls": b"0"}
    url = write(tmp_path, {"x.tar": tar_of(complete, {"cls": b"2"}, complete)})
    loader = fastload.DataLoader(closing(fastload.TarDataset(url, transform=CROP)), 3, on_error="repeat")
    assert [batch["cls"].tolist() for batch in loader] == [[0, 0, 0]]
    ((_, error),) = loader.stats()["bad"]
    assert "takes one image, and sample '001' has none" in error and "x.tar @" in error


def test_records_that_are_no_examples(tmp_path: Path) -> None:
    url = write(tmp_path / "shards", shards("tfrecord", index=True))
    whole = closing(fastload.TFRecordDataset(url))
    assert isinstance(whole[0], bytes)
    size = closing(fastload.TFRecordDataset(url, decode=len, transform=lambda n: -n))
    assert size[0] == -len(whole[0])
    kept = closing(fastload.TFRecordDataset(url, decode=len, cache=Cache(tmp_path / "c", "decoded")))
    assert kept[0] == len(whole[0])
    for mode in ("shrunk", "decoded"):
        with pytest.raises(ArgumentError, match="cache mode"):
            fastload.TFRecordDataset(url, cache=Cache(tmp_path / "c", mode))  # type: ignore[arg-type]


def test_tensorflows_own_files() -> None:
    folder = Path(__file__).parents[1] / "data"
    features = {"image": bytes, "label": int, "key": str, "counts": [int], "words": [bytes]}
    for end in ("", ".gz", ".zlib"):
        data = closing(fastload.TFRecordDataset(f"{folder}/tensorflow.tfrecord{end}", features))
        found = [sample for _, samples in read(data, workers=1, shuffle=False) for sample in samples]
        assert [sample["key"] for sample in found] == [f"class_{n % 3}/ä {n}" for n in range(12)]
        assert found[3]["counts"].tolist() == [-(2**63), -3, 0, 127, 128, 2**63 - 1]


# --- Values that differ from sample to sample -------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(
        x == y if isinstance(x, str | bytes) else same(x, y) for x, y in zip(a, b, strict=True)
    )


def rows_of(tmp_path: Path, values: list[Any], transform: Any, **options: Any) -> Any:
    """The batches of a tar with an image and a JSON value a sample, or the error that is raised."""
    samples = [
        {"jpg": jpeg(at), "json": json.dumps({"id": at, "x": value}).encode()}
        for at, value in enumerate(values)
    ]
    url = write(tmp_path, {"x.tar": tar_of(*samples)})
    data = closing(fastload.TarDataset(url, transform=transform))
    loader = fastload.DataLoader(data, len(values), **options)
    try:
        (batch,) = loader
    except Exception as error:
        assert not loader.stats()["counters"]["bad.samples"]
        return type(error), " ".join([str(error), *getattr(error, "__notes__", [])])
    return batch["json"]


POLICIES: list[dict[str, Any]] = [{}, {"on_error": "repeat"}, {"on_error": "replace"}]


BY_A_WORKER = {"on_error": "replace", "num_workers": 1}
COLUMNS = {
    "numbers": [1, 1.5, 2, 0.5],
    "a float first": [1.5, 1, 2, 3],
    "a bool first": [True, 2, 3, False],
    "a bool": [1, True, 2, 3],
    "lists": [[1, 2], [1.5, 2], [3, 4], [5, 6]],
    "texts": ["a", "b", "c", "d"],
    "dictionaries": [{"a": number, "b": [number / 2, "x"]} for number in range(4)],
}
NO_COLUMNS: list[list[Any]] = [
    [[], [1], [1, 2], []],
    [{"a": 1}, {"b": 1}, {"a": 1}, {}],
    [1, None, 2, 3],
    [None] * 4,
    [1, "a", 2, 3],
]


@pytest.mark.parametrize("options", [*POLICIES, BY_A_WORKER])
def test_values_are_the_columns_that_torch_makes(options: dict[str, Any], tmp_path: Path) -> None:
    samples = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
    batch = rows_of(tmp_path, samples, CROP, **options)
    assert batch["id"].tolist() == [0, 1, 2, 3]
    for name, values in COLUMNS.items():
        assert same(batch["x"][name], default_collate(values)), (name, batch["x"])


@pytest.mark.parametrize(
    ("values", "options"),
    [
        *[(values, POLICIES[at % 3]) for at, values in enumerate(NO_COLUMNS)],
        *[(NO_COLUMNS[0], options) for options in (*POLICIES[1:], BY_A_WORKER)],
    ],
)
def test_values_that_make_no_batch_are_no_bad_samples(
    values: list[Any], options: dict[str, Any], tmp_path: Path
) -> None:
    kind, told = rows_of(tmp_path, values, CROP, **options)
    with pytest.raises(kind):
        default_collate(values)
    assert kind is not DecodeError
    if values[1:] != values[:-1]:
        for words in ("sample 0 'x.tar @ 0'", "sample 1 'x.tar @", "['json']['x']"):
            assert words in told


# --- What is said ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["raise", "repeat", "replace"])
@pytest.mark.parametrize(
    ("members", "says"),
    [
        (({"jpg": b""}, {"jpg": b"", "txt": b"t"}), "sample '001' has txt, which others in the batch lack"),
        (({"jpg": b"", "txt": b"t"}, {"jpg": b""}), "sample '001' lacks txt, which others in the batch have"),
        (
            ({"jpg": b""}, {"jpeg": b""}),
            "sample '001' lacks jpg, which others in the batch have and has jpeg",
        ),
    ],
)
def test_samples_with_other_members_are_no_bad_samples(
    members: tuple[dict[str, bytes], ...], says: str, on_error: str, tmp_path: Path
) -> None:
    samples = [{end: body or jpeg(at) for end, body in one.items()} for at, one in enumerate(members)]
    url = write(tmp_path, {"x.tar": tar_of(*samples)})
    loader = fastload.DataLoader(closing(fastload.TarDataset(url, transform=CROP)), 2, on_error=on_error)
    with pytest.raises(ArgumentError, match=re.escape(says)) as caught:
        list(loader)
    assert "function of the whole sample" in str(caught.value)
    assert not loader.stats()["counters"]["bad.samples"]
    note = caught.value.__notes__[-1]
    assert "sample 0 'x.tar @ 0'" in note and "sample 1 'x.tar @" in note


def test_own_collate_fn_gets_samples_with_other_members(tmp_path: Path) -> None:
    url = write(
        tmp_path, {"x.tar": tar_of({"jpg": jpeg(0)}, {"jpeg": jpeg(1), "txt": b"t"}, {"jpg": jpeg(2)})}
    )
    data = closing(fastload.TarDataset(url, transform=CROP))
    (samples,) = fastload.DataLoader(data, 3, collate_fn=list, on_error="replace")
    names = [["__key__", "jpg"], ["__key__", "jpeg", "txt"], ["__key__", "jpg"]]
    assert [list(one) for one in samples] == names
    assert {one[ends[1]].shape for one, ends in zip(samples, names, strict=True)} == {(3, 24, 24)}


def failures_of(url: str, transform: Any) -> list[str]:
    data = closing(fastload.TarDataset(url, transform=transform))
    todo = list(enumerate(ids_of(data)))
    return [str(error) for _, error in view_of(data).fill(view_of(data).new_batch(9, ordinary), todo, 0, 0)]


@pytest.mark.parametrize(("mode", "warned"), [("P", True), ("L", True), ("RGB", False)])
def test_png_that_may_be_a_mask_under_a_fused_transform_is_warned_of(
    mode: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = io.BytesIO()
    Image.new(mode, (48, 36)).save(file, "png")
    sample = {"jpg": jpeg(0), "png": file.getvalue()}
    url = write(tmp_path, {"x.tar": tar_of(sample, sample)})
    assert failures_of(url, {"jpg": CROP, "png": CROP}) == []
    said = [text for text in caplog.messages if "If it is a mask" in text]
    advice = "give it interpolation='nearest' and channels=1"
    assert len(said) == warned and all(advice in text for text in said)
    assert failures_of(url, {"jpg": CROP, "png": lambda image: image.size[0]}) == []
    assert len([text for text in caplog.messages if "If it is a mask" in text]) == warned
