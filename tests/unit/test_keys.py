"""`keys=`: the samples of a dataset by the keys of their objects; and `decode` functions that get the key."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastload import Cache, CenterCrop, DataLoader, ImageFolder, ObjectDataset
from fastload.errors import ArgumentError, NotFoundError
from fastload.store import listing
from fastload.store.base import Page
from fastload.store.local import LocalStore
from tests.photos import pillow_jpeg, scene

KEYS = ["b/2.jpg", "a/1.jpg", "b/2.jpg", "c/3.jpg"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for folder in "abcd":
        (root / folder).mkdir(parents=True)
        for number in range(4):
            (root / folder / f"{number}.jpg").write_bytes(
                pillow_jpeg(scene(24, 20, 10 * number + ord(folder)))
            )
    return root


@pytest.fixture(params=["requests", "listing"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both ways in which objects are found."""
    if request.param == "listing":
        monkeypatch.setattr(listing, "_FEW", 0)
    return request.param


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "given", [list, tuple, np.array, pa.array, lambda keys: pa.chunked_array([keys[:2], keys[2:]])]
)
def test_keys_of_any_sequence_keep_their_order_and_may_repeat(tree: Path, given: Any) -> None:
    dataset = ObjectDataset(str(tree), keys=given(KEYS))
    assert [dataset.key(index) for index in range(len(dataset))] == KEYS
    assert [dataset[index] for index in range(4)] == [(tree / key).read_bytes() for key in KEYS]
    assert dataset.listing().sizes.tolist() == [(tree / key).stat().st_size for key in KEYS]
    dataset.close()


@pytest.mark.usefixtures("way")
def test_objects_with_and_without_keys_share_their_cache_records(tree: Path, tmp_path: Path) -> None:
    every = ObjectDataset(str(tree), cache=Cache(tmp_path / "cache"))
    chosen = ObjectDataset(str(tree), keys=KEYS, cache=every.cache)
    number = [every.key(index) for index in range(len(every))].index(KEYS[0])
    assert chosen._cache_keys(0)[0] == chosen._cache_keys(2)[0] == every._cache_keys(number)[0]
    assert every[number] and every.cache is not None and every.cache.flush()
    assert chosen.contains(2) and not chosen.contains(1)
    chosen.close()
    every.close()


def test_kept_manifest_is_of_these_keys_in_this_order(tree: Path, tmp_path: Path) -> None:
    for keys in (KEYS, KEYS[::-1], KEYS[:2], KEYS):
        dataset = ObjectDataset(str(tree), keys=keys, cache=tmp_path / "cache")
        assert [dataset.key(index) for index in range(len(dataset))] == keys
        dataset.close()
    assert len(list((tmp_path / "cache").rglob("*.manifest"))) == 3


@pytest.mark.usefixtures("way")
def test_labels_of_keys_are_those_of_the_whole_folder(tree: Path) -> None:
    whole, some = ImageFolder(str(tree)), ImageFolder(str(tree), keys=KEYS[:2])
    assert some.classes == whole.classes == ["a", "b", "c", "d"]
    assert list(some.samples) == [("b/2.jpg", 1), ("a/1.jpg", 0)]
    named = ImageFolder(str(tree), keys=KEYS[:2], classes=["b", "a"])
    assert list(named.targets) == [0, 1]
    for dataset in (whole, some, named):
        dataset.close()


def test_batches_of_keys_equal_those_of_a_subset(tree: Path) -> None:
    crop = CenterCrop(16)
    whole, some = ImageFolder(str(tree), crop), ImageFolder(str(tree), crop, keys=KEYS)
    [(images, labels)] = DataLoader(some, batch_size=4)
    places = {key: index for index, (key, _) in enumerate(whole.samples)}
    for image, label, key in zip(images, labels, KEYS, strict=True):
        assert (image == whole[places[key]][0]).all() and label == whole[places[key]][1]
    whole.close()
    some.close()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["a/1.jpg", "x", "y"], r"2 of 3 keys have no object: 'x', 'y'; check the url"),
        (
            ["a/1", "b/2"],
            r"2 of 2 keys have no object: 'a/1', 'b/2'; there is 'a/1.jpg'.*File\('{column}.jpg'\)",
        ),
        (["a/1.jpg", "{tree}/a/1.jpg"], r"relative to the url: 'a/1.jpg' instead of"),
        (["s3://other/1.jpg"], r"relative to the url, and 's3://other/1.jpg' is not below it"),
        ([f"{n}" for n in range(12)], r"12 of 12 keys .*: '0', .*'8', '9', \.\.\.;"),
    ],
)
def test_keys_without_an_object_are_named(tree: Path, keys: list[str], message: str) -> None:
    with pytest.raises(NotFoundError, match=message):
        ObjectDataset(str(tree), keys=[key.format(tree=tree) for key in keys])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("a/1.jpg", "keys must be a sequence"),
        ({"a/1.jpg"}, "keys must be a sequence"),
        ([], "keys is empty"),
        (["a/1.jpg", 2], "keys must be text, found 2 at position 1"),
        (["a/1.jpg", None], "keys must be text, found None"),
    ],
)
def test_keys_that_are_no_sequence_of_texts_are_refused(tree: Path, keys: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ObjectDataset(str(tree), keys=keys)


def test_url_that_does_not_exist_is_named_instead_of_its_keys(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        ObjectDataset(str(tmp_path / "absent"), keys=["a.jpg"])


def test_key_without_a_class_folder_is_refused(tree: Path) -> None:
    with pytest.raises(ArgumentError, match=r"'top.jpg' lies in no class folder"):
        ImageFolder(str(tree), keys=["top.jpg"])


def test_listing_ends_when_all_keys_were_seen(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = LocalStore._list

    def one_page(store: LocalStore) -> Iterator[Page]:
        yield next(iter(pages(store)))
        raise AssertionError("asked for more than it needs")

    monkeypatch.setattr(listing, "_FEW", 0)
    monkeypatch.setattr(LocalStore, "_list", one_page)
    ObjectDataset(str(tree), keys=KEYS).close()


# --- decode


class Method:
    def __call__(self, data: bytes, key: str) -> Any:
        return key, len(data)


def keyed(data: bytes, *, key: str) -> Any:
    return key, len(data)


def bound(data: bytes, prefix: str, key: str) -> Any:
    return prefix + key, len(data)


@pytest.mark.parametrize("mode", ["raw", "decoded"])
@pytest.mark.parametrize("decode", [keyed, Method(), functools.partial(bound, prefix="")])
def test_decode_with_a_parameter_key_gets_the_key(tree: Path, tmp_path: Path, decode: Any, mode: Any) -> None:
    dataset = ObjectDataset(str(tree), decode=decode, cache=Cache(tmp_path / "cache", mode))
    for _ in range(2):  # prepared, then from the cache
        assert dataset[1] == ("a/1.jpg", (tree / "a/1.jpg").stat().st_size)
        assert dataset.cache is not None and dataset.cache.flush()
    [(names, _)] = DataLoader(dataset, batch_size=16)
    assert list(names) == [dataset.key(index) for index in range(16)]
    dataset.close()


def test_decoded_records_of_equal_objects_are_kept_by_key(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    for name in "ab":
        (root / name).write_bytes(b"same")
    dataset = ObjectDataset(str(root), decode=keyed, cache=Cache(tmp_path / "cache", "decoded"))
    for _ in range(2):
        assert [dataset[0], dataset[1]] == [("a", 4), ("b", 4)]
        dataset._flush_cache()
    dataset.close()


@pytest.mark.parametrize(
    "decode", [len, bytes, lambda data, key="mine": key, functools.partial(keyed, key="mine")]
)
def test_decode_without_a_key_is_called_as_ever(tree: Path, decode: Any) -> None:
    dataset = ObjectDataset(str(tree), decode=decode)
    expected = decode((tree / "a/0.jpg").read_bytes())
    assert dataset[0] == expected
    dataset.close()
