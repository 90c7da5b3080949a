"""A subclass that makes its samples itself is obeyed, as by torch's loader, and read ahead all the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import fastload
from fastload import Cache, CenterCrop, DataLoader, ImageFolder, ObjectDataset, RandomResizedCrop, TarDataset
from fastload.datasets.store_dataset import override_of
from fastload.errors import ArgumentError, NotFoundError
from fastload.gpu.dali import why_no_dali
from fastload.shards.dataset import ShardStreams
from tests.faultserver import Fault, FaultServer
from tests.loaderdata import identity, told
from tests.photos import pillow_jpeg, scene
from tests.sharddata import IMAGE, LABEL, TOTAL, shards, write
from tests.shortform import short_form

COUNT = 24
FUSED = CenterCrop((16, 16), resize=20)


def plain(image: Any) -> torch.Tensor:
    """A transform that is not fused: of a PIL image, or of a file's bytes."""
    return FUSED(image)


class OwnItems(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, label + 100, self.key(index)


class OwnLists(ImageFolder):
    """Samples say how many were asked for at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(image, label + 100, len(indices)) for image, label in (self[index] for index in indices)]


class Mixin(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, label + 100, "mixed in"


class OwnByMixin(Mixin, ImageFolder):
    pass


class OwnObjects(ObjectDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), index + 100, self.key(index)


class OwnTar(TarDataset):
    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return sample[IMAGE["tar"]], sample[LABEL["tar"]] + 100


class OwnTarLists(TarDataset):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(sample["jpg"], sample["cls"] + 100) for sample in map(self.__getitem__, indices)]


SHARDS: dict[str, Any] = {"tar": OwnTar, "tar, lists": OwnTarLists}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {f"{'abc'[k // 8]}/{k % 8:02}.jpg": pillow_jpeg(scene(40 + k, 36, k)) for k in range(COUNT)}
    return Path(write(tmp_path_factory.mktemp("photos"), files))


@pytest.fixture
def opened(no_leaks: None, keep: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return keep


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of any size are worth a request each, where index files name their places."""
    monkeypatch.setattr("fastload.shards.dataset.SMALL_RECORD", 0)


LOADERS: dict[str, dict[str, Any]] = {
    "batches": {"batch_size": 5},
    "samples": {"batch_size": None},
    "own collate_fn": {"batch_size": 5, "collate_fn": identity},
    "shuffled": {"batch_size": 5, "shuffle": True},
}


@pytest.mark.parametrize(
    ("kind", "transform"),
    short_form(
        itertools.product((OwnItems, OwnLists, OwnByMixin, OwnObjects), (FUSED, plain)),
        lambda kind, transform: transform is FUSED or kind is OwnItems,
    ),
)
def test_a_subclass_with_samples_of_its_own_is_obeyed_as_by_torch(
    kind: Any, transform: Any, photos: Path, opened: Any
) -> None:
    """By workers: where samples are bad."""
    dataset = opened(kind(str(photos), transform=transform))
    chosen = Subset(Subset(dataset, range(1, COUNT)), range(0, 20, 2))
    for name, arguments in LOADERS.items():
        for data in (dataset, chosen):
            batches = []
            for loader in (torch.utils.data.DataLoader, DataLoader):
                torch.manual_seed(3)
                batches.append(told(list(loader(data, **arguments))))
            assert batches[0] == batches[1], name


COLLATED: dict[Any, Callable[..., Any]] = {
    int: lambda batch, *, collate_fn_map=None: torch.tensor(batch, dtype=torch.int32),
    torch.Tensor: lambda batch, *, collate_fn_map=None: torch.stack(batch).half(),
}


@pytest.mark.parametrize("kind", COLLATED)
@pytest.mark.parametrize("workers", [0, 2])
def test_function_in_the_map_of_default_collate_is_obeyed_as_by_torch(
    kind: Any, workers: int, photos: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(default_collate_fn_map, kind, COLLATED[kind])
    dataset = opened(ImageFolder(str(photos), FUSED))
    theirs, ours = torch.utils.data.DataLoader(dataset, 5), DataLoader(dataset, 5, num_workers=workers)
    for (images, labels), expected in zip(ours, theirs, strict=True):
        assert [images.dtype, labels.dtype] == [column.dtype for column in expected]
        assert told([images, labels]) == told(expected)


@pytest.mark.parametrize(
    ("kind", "policy", "workers"),
    short_form(
        itertools.product((OwnItems, OwnLists), ("repeat", "replace"), (0, 2)),
        lambda kind, policy, workers: (policy == "repeat") == bool(workers),
    ),
)
def test_a_subclass_is_obeyed_where_samples_are_bad(
    kind: Any, policy: str, workers: int, photos: Path, tmp_path: Path, opened: Any
) -> None:
    for path in photos.rglob("*.jpg"):
        copy = tmp_path / path.relative_to(photos)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (tmp_path / "b/02.jpg").write_bytes(b"<html>")
    dataset = opened(kind(str(tmp_path), FUSED))
    loader = DataLoader(dataset, 6, num_workers=workers, on_error=policy)
    batches = list(loader)
    good = [row for row in range(COUNT) if row != 10]
    labels = torch.cat([batch[1] for batch in batches])
    assert labels[good].tolist() == [dataset.targets[row] + 100 for row in good] and labels[10] >= 100
    if kind is OwnLists:
        assert [batch[2].tolist() for batch in batches] == [[6] * 6, [1] * 6, [6] * 6, [6] * 6]
    assert {key for key, _ in loader.stats()["bad"]} == {"b/02.jpg"}
    with pytest.raises(fastload.errors.DecodeError, match=r"b/02\.jpg"):
        list(DataLoader(dataset, 6, num_workers=workers))


def test_getitems_with_a_seed_is_asked_for_one_sample_at_a_time(photos: Path, opened: Any) -> None:
    """What is random in a sample does not depend on the others in its batch."""

    class Noisy(ImageFolder):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(random.random(), torch.rand(1).item(), len(indices)) for _ in indices]

    dataset = opened(Noisy(str(photos), FUSED))
    runs = []
    for workers, size in ((0, 4), (2, 6)):
        batches = list(DataLoader(dataset, size, num_workers=workers, seed=5))
        runs.append([torch.cat(column).tolist() for column in zip(*batches, strict=True)])
    assert runs[0] == runs[1] and runs[0][2] == [1] * COUNT and len(set(runs[0][1])) == COUNT


@pytest.mark.parametrize(
    ("kind", "transform", "index", "workers"),
    short_form(
        itertools.product(SHARDS, (RandomResizedCrop(16), None), (False, True), (0, 2)),
        lambda kind, transform, index, workers: (
            ((kind == "tar") == bool(transform)) == bool(workers) and not (index and workers)
        ),
    ),
)
def test_a_subclass_of_shards_is_obeyed(
    kind: str, transform: Any, index: bool, workers: int, tmp_path: Path, opened: Any, large: None
) -> None:
    url = write(tmp_path, shards("tar", index=index))
    dataset = opened(SHARDS[kind](url, transform=transform))
    assert dataset._streams().must_stream() is not index
    collate = identity if transform is None else default_collate
    loader = DataLoader(dataset, 16, shuffle=True, num_workers=workers, collate_fn=collate)
    for _ in range(2):
        batches = list(loader)
        rows = [
            row for batch in batches for row in (batch if transform is None else zip(*batch, strict=True))
        ]
        assert sorted(int(label) for _, label in rows) == [number + 100 for number in range(TOTAL)]
    assert loader.stats()["counters"]["get.ahead"] == 2 * TOTAL, "the streams' samples were read again"
    if "lists" not in kind:  # torch asks `__getitem__` for single samples
        single = DataLoader(dataset, batch_size=None, num_workers=workers)
        assert sorted(int(sample[1]) for sample in single) == [number + 100 for number in range(TOTAL)]


# --- which classes keep the rows


class Shorter(ImageFolder):
    def __len__(self) -> int:
        return 10


def test_a_subclass_without_samples_of_its_own_keeps_the_rows(photos: Path, opened: Any) -> None:
    """Rows are drawn from (seed, epoch, index), samples by `__getitem__` from torch's generator."""
    crop = RandomResizedCrop(16)
    ours, base = opened(Shorter(str(photos), crop)), opened(ImageFolder(str(photos), crop))
    expected = list(DataLoader(Subset(base, range(len(ours))), 5, seed=1))
    assert override_of(ours) is None
    assert told(list(DataLoader(ours, 5, seed=1))) == told(expected)


def test_methods_put_into_the_class_or_the_object_later_are_obeyed(
    photos: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened(ImageFolder(str(photos), FUSED))
    dataset.__getitems__ = lambda indices: [(7, len(indices)) for _ in indices]
    assert told(next(iter(DataLoader(dataset, 3)))) == [[7] * 3, [3] * 3]
    del dataset.__getitems__
    assert len(told(next(iter(DataLoader(dataset, 3))))[0][0]) == 3  # channels
    original = ImageFolder.__getitem__
    monkeypatch.setattr(ImageFolder, "__getitem__", lambda self, index: original(self, index)[1] + 100)
    assert told(next(iter(DataLoader(dataset, 3)))) == [100] * 3
    monkeypatch.undo()
    monkeypatch.setattr(ImageFolder, "__getitems__", lambda self, indices: list(indices), raising=False)
    assert told(next(iter(DataLoader(dataset, 3)))) == [0, 1, 2]


@pytest.mark.parametrize("decoder", ["dali", "torch"])
@pytest.mark.parametrize("kind", [OwnItems, OwnLists, OwnObjects])
def test_decoding_on_the_device_is_refused_for_samples_of_its_own(
    kind: Any, decoder: str, photos: Path, opened: Any
) -> None:
    dataset = opened(kind(str(photos), transform=FUSED))
    name = "__getitems__" if kind is OwnLists else "__getitem__"
    for data in (dataset, Subset(dataset, range(3))):
        with pytest.raises(ArgumentError, match=rf"{kind.__name__}\.{name}, in the workers: .*decoder='cpu'"):
            DataLoader(data, 4, decoder=decoder)


# --- reading ahead


@pytest.mark.parametrize("kind", [OwnItems, OwnLists, OwnObjects])
def test_a_subclass_is_read_ahead(kind: Any, photos: Path) -> None:
    objects = {str(path.relative_to(photos)): path.read_bytes() for path in photos.rglob("*.jpg")}
    with FaultServer(objects) as server:
        for key in objects:
            server.script(key, Fault(delay=0.2), repeat=True)
        dataset = kind("s3://bucket", transform=FUSED, storage_options=server.options)
        loader = DataLoader(dataset, 4)
        assert len(list(loader)) == COUNT / 4
        counters = loader.stats()["counters"]
        dataset.close()
        assert counters["get.ahead"] == counters["get.requests"] == COUNT
        assert server.most_at_once >= 4, "one read after the other"


def test_a_sample_that_is_drawn_twice_is_read_once(photos: Path, opened: Any) -> None:
    dataset = opened(OwnItems(str(photos), FUSED))
    order = [index for index in range(COUNT) for _ in range(3)]
    loader = DataLoader(dataset, 4, sampler=order)
    assert torch.cat([labels for _, labels, _ in loader]).tolist() == [
        dataset.targets[index] + 100 for index in order
    ]
    assert loader.stats()["counters"]["get.requests"] == COUNT


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_ahead_for_samples_of_its_own_lasts_the_epoch(
    workers: int, photos: Path, opened: Any
) -> None:
    dataset = opened(OwnItems(str(photos), FUSED))
    order = [index for _ in range(30) for index in range(COUNT)]
    loader = DataLoader(dataset, 8, sampler=order, num_workers=workers)
    assert len(list(loader)) == len(order) / 8
    assert loader.stats()["counters"]["get.ahead"] == len(order)


class Twice(ImageFolder):
    """Another length, and indices that the dataset below does not have."""

    def __len__(self) -> int:
        return 2 * super().__len__()

    def __getitem__(self, index: Any) -> Any:
        index, more = index if isinstance(index, tuple) else (index, 0)
        return super().__getitem__(index % COUNT)[1] + more


@pytest.mark.parametrize("workers", [0, 1])
def test_indices_of_a_subclass_may_be_its_own(workers: int, photos: Path, opened: Any) -> None:
    dataset = opened(Twice(str(photos), FUSED))
    labels = ImageFolder(str(photos)).targets
    assert torch.cat(list(DataLoader(dataset, 8, num_workers=workers))).tolist() == [*labels, *labels]
    pairs = [(index, 10) for index in range(COUNT)]
    found = torch.cat(list(DataLoader(dataset, 8, sampler=pairs, num_workers=workers))).tolist()
    assert found == [label + 10 for label in labels]


class EveryOther(TarDataset):
    def __len__(self) -> int:
        return super().__len__() // 2

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(2 * index)["cls"]


def test_length_of_a_subclass_of_indexed_shards_may_be_its_own(tmp_path: Path, opened: Any) -> None:
    url, cache = write(tmp_path / "shards", shards("tar")), str(tmp_path / "cache")
    everything = opened(TarDataset(url, transform=FUSED, cache=cache))
    assert len(list(DataLoader(everything, 8))) > 0  # indexed from here on
    dataset = opened(EveryOther(url, transform=FUSED, cache=cache))
    expected = [int(everything[2 * index]["cls"]) for index in range(TOTAL // 2)]
    assert torch.cat(list(DataLoader(dataset, 8))).tolist() == expected


def test_index_that_was_refused_leaves_a_persistent_worker_alive(photos: Path, opened: Any) -> None:
    dataset = opened(ImageFolder(str(photos), FUSED))
    order = list(range(COUNT))
    loader = DataLoader(dataset, 4, sampler=order, num_workers=1, persistent_workers=True)
    order[6] = 1000
    with pytest.raises(IndexError, match="1000"):
        list(loader)
    order[6] = 6
    assert len(list(loader)) == COUNT / 4


@pytest.mark.parametrize("workers", [0, 1])
def test_objects_without_decode_are_bytes_wherever_they_are_read(workers: int, photos: Path) -> None:
    objects = {str(path.relative_to(photos)): path.read_bytes() for path in photos.rglob("*.jpg")}
    with FaultServer(objects) as server:
        dataset = ObjectDataset("s3://bucket", storage_options=server.options)
        assert type(dataset[0]) is bytes
        loader = DataLoader(dataset, 4, num_workers=workers, collate_fn=identity)
        assert [body for batch in loader for body in batch] == [objects[key] for key in sorted(objects)]
        assert all(type(body) is bytes for batch in loader for body in batch)
        dataset.close()


class KeysAlone(ObjectDataset):
    def __getitem__(self, index: int) -> Any:
        return self.key(index)


def test_what_is_read_ahead_and_not_asked_for_is_let_go_of_and_not_read_for_ever(
    tmp_path: Path, opened: Any
) -> None:
    for number in range(1500):
        (tmp_path / f"{number:04}").write_bytes(b"x" * 1000)
    dataset = opened(KeysAlone(str(tmp_path)))
    loader = DataLoader(Subset(dataset, range(1500)), 10)
    assert [key for batch in loader for key in batch] == [f"{number:04}" for number in range(1500)]
    assert loader.stats()["counters"].get("get.requests", 0) <= 256 + 10 + 256 + 10
    assert dataset._outstanding() == 0, "what was not asked for is kept"


class TarKeysAlone(TarDataset):
    def __getitem__(self, index: int) -> Any:
        return self.key(index)


def test_records_of_streams_that_are_not_asked_for_are_let_go_of(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened(TarKeysAlone(write(tmp_path, shards("tar")), transform=RandomResizedCrop(16)))
    ids: list[int] = []
    open_stream = ShardStreams.open_stream

    def noted(streams: ShardStreams, state: Any) -> Any:
        stream = open_stream(streams, state)
        take = stream.take
        stream.take = lambda n: ids.extend(found := take(n)) or found
        return stream

    monkeypatch.setattr(ShardStreams, "open_stream", noted)
    assert len([key for batch in DataLoader(dataset, 16) for key in batch]) == len(ids) == TOTAL
    assert dataset._outstanding() == 0, "what was not asked for is kept"


# --- attributes that are set later


@pytest.mark.parametrize("name", ["decode", "cache", "url", "on_change"])
def test_attributes_that_decide_what_is_read_cannot_be_set_again(
    name: str, photos: Path, tmp_path: Path, opened: Any
) -> None:
    datasets = [ImageFolder(str(photos)), TarDataset(write(tmp_path, shards("tar")))]
    for dataset in datasets[: 1 if name == "on_change" else 2]:
        with pytest.raises(ArgumentError, match=rf"{name} of \w+ cannot be set again.*make a new dataset"):
            setattr(opened(dataset), name, len)


@pytest.mark.skipif(why_no_dali() is not None, reason=str(why_no_dali()))
@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_that_is_set_later_and_cannot_be_decoded_on_the_device_is_refused(
    workers: int, photos: Path, opened: Any
) -> None:
    dataset = opened(ImageFolder(str(photos), FUSED))
    loader = DataLoader(dataset, 4, num_workers=workers, decoder="dali")
    dataset.transform = plain
    with pytest.raises(ArgumentError, match=r"decoder= of the loader does not work.*transform=<function"):
        list(loader)


# --- classes in place of instances


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda url: DataLoader(ImageFolder), r"dataset is the class ImageFolder: .*ImageFolder\(\.\.\.\)"),
        (
            lambda url: DataLoader("s3://b/train"),
            r"make a dataset of it first, as in ImageFolder\('s3://b/train'",
        ),
        (lambda url: ImageFolder(url, storage_options="http://x"), "storage_options must be a dict"),
        (lambda url: DataLoader(TensorDataset), "dataset is the class TensorDataset"),
        (lambda url: fastload.cached(ImageFolder, url), "dataset is the class ImageFolder"),
    ],
)
def test_a_class_in_place_of_a_dataset_is_refused(make: Any, words: str, photos: Path) -> None:
    with pytest.raises(ArgumentError, match=words):
        make(str(photos))


def test_a_wrapper_obeys_a_subclass(photos: Path, tmp_path: Path, opened: Any) -> None:
    kept = fastload.cached(opened(OwnItems(str(photos), FUSED)), Cache(tmp_path / "cache", "decoded"))
    for _ in range(2):
        labels = torch.cat([labels for _, labels, _ in DataLoader(kept, 5)])
        assert labels.tolist() == [100] * 8 + [101] * 8 + [102] * 8
    kept.close()
    with pytest.raises(NotFoundError):
        OwnItems(str(tmp_path / "nothing"))
