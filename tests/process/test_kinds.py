"""Every kind of dataset keeps the same promises: those of `fastload.testing`, and more. See `tests.kinds`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch.utils.data import ConcatDataset, Subset

import fastload
from fastload import Cache, CenterCrop, DistributedSampler
from fastload.cli.demo.s3_server import serve_s3
from fastload.errors import ArgumentError
from fastload.testing import DatasetTests, IterableDatasetTests
from fastload.testing.promises import contents
from tests.kinds import BAD, COUNT, KINDS, Kind, number, numbers, photo, photo_or_damage
from tests.loaderdata import seed_all, through_json
from tests.shortform import short_form

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

Written = Callable[..., Path]
BATCH = 4
LOSSLESS = ("raw", "dct", "auto")
INDEXED = [kind for kind in KINDS if not kind.streamed]
AT_RANDOM = [kind for kind in INDEXED if kind.sources == 1]
ALONE = [kind for kind in KINDS if not kind.wraps and kind.rows_of_read]
SHARDED = [kind for kind in KINDS if kind.sharded]
WRAPPERS = [kind for kind in KINDS if kind.wraps and kind.transform is not None]
WITH_IMAGES = [kind for kind in ALONE if kind.transform is not None]
ALIKE = (  # another kind has their code: they are read from files, and most of their tests are `stress`
    *("objects", "objects, decode", "table, decode and text", "image and mask", "ranges, decode"),
    *("tfrecord, indexed", "parquet, filtered", "parquet, filtered columns", "table, columns"),
    *("mds", "documents", "cached", "wrapped"),
)
DAMAGED = [kind for kind in AT_RANDOM if kind.own_photos and kind.transform is not None]


def of(kinds: list[Kind], *, alike: bool = False) -> Any:
    """Each kind; those that have the code of another are `stress`, unless `alike`."""
    rows = short_form(kinds, lambda kind: alike or kind.name not in ALIKE)
    return pytest.mark.parametrize("kind", rows, ids=name_of)


def in_modes(kinds: list[Kind], *whole: str) -> Any:
    """Each kind in each mode that it takes: `whole` in all modes, others in "decoded", the rest is `stress`.

    "auto" is the mode of all tests that name none.
    """
    rows = short_form(
        ((kind, mode) for kind in kinds for mode in kind.modes),
        lambda kind, mode: mode == "decoded" or (mode != "auto" and kind.name in whole),
    )
    return pytest.mark.parametrize(("kind", "mode"), rows, ids=name_of)


def name_of(case: Any) -> Any:
    return case.folder if isinstance(case, Kind) else None


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """(kind, damaged) -> the folder with its objects, which are written once."""
    root = tmp_path_factory.mktemp("kinds")

    def write(kind: Kind, *, damaged: bool = False) -> Path:
        folder = root / ("damaged" if damaged else "whole") / kind.folder
        if not folder.exists():
            kind.write(folder, photo_or_damage if damaged else photo)
        return folder

    return write


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The storage options of a server whose bucket "bucket" has a kind of each sort."""
    root = tmp_path_factory.mktemp("s3")
    for kind in [kind for kind in KINDS if kind.name not in ALIKE]:
        kind.write(root / "bucket" / kind.folder, photo)
    with serve_s3(root) as server:
        yield dict(server.options)


@pytest.fixture(scope="module")
def uncached() -> dict[str, Any]:
    """The samples of each kind without a cache, which are made once."""
    return {}


def at_random(dataset: Any, workers: int = 0, **options: Any) -> Any:
    """A loader that reads by index, in the same shuffled order for every kind."""
    sampler = DistributedSampler(dataset, 1, 0, seed=1)
    return fastload.DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers, seed=3, **options)


def in_order(dataset: Any) -> list[Any]:
    """The batches of an epoch by index, unshuffled."""
    return list(fastload.DataLoader(dataset, BATCH, sampler=range(COUNT), seed=3))


def flat(batches: Any) -> list[int]:
    return [found for batch in batches for found in numbers(batch)]


# --- epochs


@of(KINDS, alike=True)
def test_two_epochs_each_resumed_with_other_workers_have_each_sample_once(
    kind: Kind, s3: dict[str, Any], written: Written, tmp_path: Path
) -> None:
    """The first epoch fills the cache, the second reads it; both have the samples of an unbroken run."""
    wanted = Counter(dict.fromkeys(range(COUNT), kind.sources))

    def opened(workers: int, url: Any, **options: Any) -> Any:
        dataset = kind.make(url, **options)
        return fastload.DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, seed=3)

    def resumed(state: Any, workers: int) -> Any:
        cache = str(tmp_path / "cache")
        if kind.name in ALIKE:
            loader = opened(workers, written(kind), cache=cache)
        else:
            loader = opened(workers, f"s3://bucket/{kind.folder}", cache=cache, storage_options=s3)
        if state is not None:
            loader.load_state_dict(through_json(state))
        return loader

    unbroken = opened(0, written(kind))
    state, orders = None, []
    for workers, others in ((2, 0), (0, 1)):
        loader = resumed(state, workers)
        batches = iter(loader)
        begun = [next(batches), next(batches)]
        state = loader.state_dict()
        del batches
        loader = resumed(state, others)
        epoch = begun + list(loader)
        orders.append(flat(epoch))
        assert Counter(orders[-1]) == wanted
        if not kind.sharded:  # streams are dealt to the workers
            assert [contents(batch) for batch in epoch] == [contents(batch) for batch in unbroken]
        state = loader.state_dict()
    assert orders[0] != orders[1]
    counters = loader.stats()["counters"]
    left = kind.sources * COUNT - len(flat(begun))
    if kind.rows_of_read:
        assert counters["cache.hits"] >= left // kind.rows_of_read, "the second epoch reads the cache"
    assert not counters.get("get.samples")


@of(INDEXED)
def test_two_ranks_share_the_samples(kind: Kind, written: Written) -> None:
    seen: Counter[int] = Counter()
    for rank in range(2):
        dataset = kind.make(written(kind))
        new_sampler = fastload.MixtureSampler if kind.sources > 1 else DistributedSampler
        sampler: Any = new_sampler(dataset, 2, rank)
        seen.update(flat(fastload.DataLoader(dataset, BATCH, sampler=sampler)))
    assert seen == Counter(dict.fromkeys(range(COUNT), kind.sources))


@of(KINDS)
def test_seed_is_one_run_whatever_the_scripts_draw(kind: Kind, written: Written, tmp_path: Path) -> None:
    """With any number of workers, and out of a cache: but streams are dealt to the workers."""

    def run(entropy: int, workers: int = 0, seed: int = 1, epochs: int = 2, **options: Any) -> Any:
        dataset = kind.make(written(kind), **options)
        loader = fastload.DataLoader(
            dataset, BATCH, shuffle=True, seed=seed, num_workers=workers, persistent_workers=workers > 0
        )
        found = []
        for epoch in range(epochs):
            seed_all(entropy + epoch)
            found.append(([contents(batch) for batch in loader], loader.digest()))
        return found

    first, second = run(1)
    assert first[0] != second[0] and bytes(32) != first[1] != second[1]
    if kind.sharded:
        assert run(3) == [first, second]
    else:
        assert run(3, 2, cache=tmp_path / "cache") == [first, second]
    ((other, digest),) = run(5, seed=5, epochs=1)
    assert other != first[0] and digest != first[1]


@of([kind for kind in SHARDED if not kind.streamed])
def test_shards_by_index_are_one_run_for_any_number_of_workers(
    kind: Kind, written: Written, tmp_path: Path
) -> None:
    runs = []
    for workers, options in ((0, {}), (2, {"cache": tmp_path / "cache"})):
        dataset = kind.make(written(kind), **options)
        loader = at_random(dataset, workers, persistent_workers=workers > 0)
        epochs = [list(loader) for _ in range(2)]
        assert all(sorted(flat(epoch)) == list(range(COUNT)) for epoch in epochs)
        runs.append((contents(epochs), loader.digest()))
    assert runs[0] == runs[1] and runs[0][1] != bytes(32)
    loader = at_random(kind.make(written(kind)), 2)
    batches = iter(loader)
    begun = [next(batches), next(batches)]
    state = through_json(loader.state_dict())
    del batches
    loader = at_random(kind.make(written(kind)), 1)
    loader.load_state_dict(state)
    assert contents([begun + list(loader), list(loader)]) == runs[0][0], "resumed with other workers"


@of(SHARDED)
def test_streams_without_a_shuffle_have_the_order_of_the_samples(kind: Kind, written: Written) -> None:
    dataset = kind.make(written(kind))
    for workers in (0, 1):
        loader = fastload.DataLoader(dataset, BATCH, num_workers=workers)
        assert flat(loader) == flat(loader) == list(range(COUNT))
        loader = fastload.DataLoader(dataset, 2, num_workers=workers)
        head = flat(itertools.islice(loader, 2))
        resumed = fastload.DataLoader(dataset, 2, num_workers=1 - workers)
        resumed.load_state_dict(through_json(loader.state_dict()))
        assert head + flat(resumed) == list(range(COUNT))


@of(SHARDED)
def test_resumed_streams_go_on_with_the_same_pixels(kind: Kind, written: Written) -> None:
    def make() -> Any:
        workers = 2 if kind.streamed else 0
        dataset = kind.make(written(kind))
        return fastload.DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, seed=3)

    whole = [contents(batch) for batch in make()]
    loader, resumed = make(), make()
    head = [contents(batch) for batch in itertools.islice(loader, 2)]
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert head + [contents(batch) for batch in resumed] == whole


# --- which samples, and which not


@of(AT_RANDOM)
def test_samples_at_and_batch_at_are_what_is_handed_out(kind: Kind, written: Written) -> None:
    dataset = kind.make(written(kind))
    loader = at_random(dataset)
    batches = list(loader)
    for step in (0, 3):
        rows = loader.samples_at(step, 0)
        assert [number(dataset[row.index]) for row in rows] == numbers(batches[step])
        assert not any(row.error for row in rows)
        assert all((row.crop is None) == (kind.transform is None) for row in rows)
        labels = numbers(batches[step])
        assert all(row.label in (None, label) for row, label in zip(rows, labels, strict=True))
        if not kind.wraps:
            assert [row.key for row in rows] == [dataset.key(row.index) for row in rows]
        assert contents(loader.batch_at(step, 0)) == contents(batches[step])


@of(SHARDED)
def test_samples_of_an_epoch_that_will_be_streamed_are_not_named(kind: Kind, written: Written) -> None:
    made = kind.make(written(kind))
    for dataset, shuffle in itertools.product((made, fastload.map(made, _as_it_is)), (True, False)):
        loader = fastload.DataLoader(dataset, BATCH, shuffle=shuffle, seed=1)
        for epoch in (0, 1):
            for ask, later in itertools.product((loader.samples_at, loader.batch_at), (0, 1)):
                with pytest.raises(ArgumentError, match="as streams"):
                    ask(0, epoch + later)
            list(loader)
        if kind.streamed:
            with pytest.raises(ArgumentError, match="these shards are read as streams: index them"):
                loader.skip(1)


@of(AT_RANDOM)
def test_excluded_samples_and_skipped_steps_stay_away_and_all_else_keeps_its_place(
    kind: Kind, written: Written
) -> None:
    whole = flat(at_random(kind.make(written(kind))))
    dataset = kind.make(written(kind))
    loader = at_random(dataset)
    gone = {number(dataset[index]) for index in (2, 11)}
    loader.exclude([2, 11 if kind.wraps else dataset.key(11)])
    loader.skip([1])
    if not kind.wraps:
        with pytest.raises(ArgumentError, match="no sample of the dataset has: check"):
            loader.exclude("other @ 3")
    left = flat(loader)
    kept = whole[:BATCH] + whole[2 * BATCH :]
    assert len(left) == len(kept) and not gone & set(left)
    assert all(now == then for now, then in zip(left, kept, strict=True) if then not in gone)


@of(AT_RANDOM)
def test_override_of_getitem_is_obeyed(kind: Kind, written: Written) -> None:
    """Inside wrappers of torch too. In workers: test_overrides."""
    if kind.wraps:
        pytest.skip("its own class is torch's")
    dataset = kind.make(written(kind))
    base = type(dataset)
    own = {"__getitem__": lambda self, index: {"number": 1000 + number(base.__getitem__(self, index))}}
    dataset.__class__ = type("Own", (base,), own)
    wrapped = ConcatDataset([Subset(dataset, range(COUNT))])
    for each in (dataset, wrapped):
        found = [n for batch in at_random(each) for n in batch["number"].tolist()]
        assert sorted(found) == list(range(1000, 1000 + COUNT))


@of(AT_RANDOM)
def test_wrappers_give_the_samples_of_their_indices_and_read_them_ahead(kind: Kind, written: Written) -> None:
    dataset = kind.make(written(kind))
    direct = [number(dataset[index]) for index in range(COUNT)]
    chosen = [20, 3, 3, 7, 11, 0]
    wrapped: Any = ConcatDataset([Subset(fastload.map(dataset, _as_it_is), chosen), dataset])
    loader = fastload.DataLoader(wrapped, BATCH)
    assert flat(loader) == [direct[index] for index in [*chosen, *range(COUNT)]]


def _as_it_is(sample: Any) -> Any:
    return sample


# --- the cache


@of(ALONE)
def test_warming_keeps_every_sample_and_training_then_reads_no_object(
    kind: Kind, written: Written, tmp_path: Path
) -> None:
    def opened() -> Any:
        return kind.make(written(kind), cache=tmp_path / "cache")

    dataset = opened()
    assert kind.streamed or not dataset.contains(0)
    if hasattr(dataset, "_warm_shards"):
        outcomes = [warmed.outcome for warmed in dataset._warm_shards(range(len(dataset.shards())))]
    else:
        assert dataset._left_to_warm(range(COUNT)).requests
        outcomes = [warmed.outcome for warmed in dataset.warm(range(COUNT))]
        assert dataset._left_to_warm(range(COUNT)) == (0, 0, 0)
    assert set(outcomes) == {"stored"} and len(outcomes) >= COUNT // kind.rows_of_read
    dataset.close()
    dataset = opened()
    assert all(dataset.contains(index) for index in range(COUNT))
    loader = at_random(dataset, 1)
    assert sorted(flat(loader)) == list(range(COUNT))
    counters = loader.stats()["counters"]
    assert counters["cache.hits"] >= COUNT // kind.rows_of_read and not counters.get("get.samples")
    loader = fastload.DataLoader(dataset, BATCH, shuffle=True, seed=3)  # by index, also of shards
    made, batches = contents(loader.batch_at(2)), list(loader)
    assert made == contents(batches[2])


@in_modes(WITH_IMAGES, "folder", "tar")
def test_every_cache_mode_gives_the_same_samples_from_the_store_and_from_the_cache(
    kind: Kind, mode: Any, written: Written, uncached: dict[str, Any], tmp_path: Path
) -> None:
    def opened() -> Any:
        found = kind.make(written(kind), cache=Cache(tmp_path / "cache", mode, short_side=24))
        if kind.streamed:
            list(found._warm_shards(range(len(found.shards()))))
        return found

    first = opened()
    from_store = in_order(first)
    first._flush_cache()
    first.close()
    second = opened()
    from_cache = in_order(second)
    assert all(second.contains(index) for index in range(COUNT))
    assert contents(from_cache) == contents(from_store)
    assert sorted(flat(from_cache)) == list(range(COUNT))
    if mode in LOSSLESS and not kind.streamed:
        if kind.name not in uncached:
            uncached[kind.name] = contents(in_order(kind.make(written(kind))))
        assert contents(from_cache) == uncached[kind.name]


@in_modes(WRAPPERS, "mixture")
def test_every_cache_mode_gives_the_same_samples_through_wrappers(
    kind: Kind, mode: Any, written: Written, tmp_path: Path
) -> None:
    def epoch(cache: Any) -> tuple[list[Any], dict[str, float]]:
        dataset = kind.make(written(kind), cache=cache)
        loader = fastload.DataLoader(dataset, BATCH, shuffle=True, seed=3)
        batches = [contents(batch) for batch in loader]
        return batches, loader.stats()["counters"]

    cache = Cache(tmp_path / "cache", mode, short_side=24)
    from_store, _ = epoch(cache)
    assert cache.flush(30)
    from_cache, counters = epoch(cache)
    cache.close()
    assert from_cache == from_store
    assert counters["cache.hits"] >= kind.sources * COUNT and not counters.get("get.samples")
    if mode in LOSSLESS:
        assert epoch(None)[0] == from_cache


# --- transforms, damage


@of([kind for kind in WITH_IMAGES if not kind.streamed and not isinstance(kind.transform, dict)])
def test_transform_that_is_set_later_is_used(kind: Kind, written: Written) -> None:
    dataset = kind.make(written(kind))
    loader = at_random(dataset)
    for transform, shape in ((dataset.transform, (16, 16)), (CenterCrop((9, 7)), (9, 7))):
        dataset.transform = transform
        assert shape_of(next(iter(loader))) == (BATCH, 3, *shape)
    assert shape_of(dataset[0]) == (3, 9, 7)


def shape_of(batch: Any) -> Any:
    """The shape of its images."""
    return next(part for _, part in contents(batch) if len(getattr(part, "shape", ())) > 2).shape


@of(DAMAGED, alike=True)
def test_damaged_sample_is_named(kind: Kind, written: Written) -> None:
    dataset = kind.make(written(kind, damaged=True))
    with pytest.raises(fastload.errors.DecodeError) as caught:
        list(fastload.DataLoader(dataset, BATCH, sampler=range(COUNT), num_workers=1))
    key = caught.value.key
    assert key and f"decode {key!r}" in str(caught.value)
    with pytest.raises(fastload.errors.DecodeError) as direct:
        dataset[BAD[0]]
    assert direct.value.key == key
    if kind.wraps:
        assert f"{BAD[0]:02d}" in key
    else:  # "KEY (images[0] of row 5)" where a field is a list
        assert key.partition(" (")[0] == dataset.key(BAD[0])


@of([kind for kind in KINDS if kind.own_photos and kind.streamed])
@pytest.mark.parametrize("on_error", ["repeat", "replace"])
def test_damaged_samples_of_a_stream_are_replaced_and_counted(
    kind: Kind, on_error: Any, written: Written
) -> None:
    dataset = kind.make(written(kind, damaged=True))
    loader: Any = fastload.DataLoader(dataset, BATCH, shuffle=True, num_workers=2, seed=3, on_error=on_error)
    seen = flat(loader)
    assert len(seen) == COUNT and set(seen) == set(range(COUNT)) - set(BAD)
    assert loader.stats()["counters"]["bad.samples"] == len(BAD)


# --- the promises of fastload.testing


class OfKinds(DatasetTests):
    num_workers: ClassVar[Any] = (2,)
    start_methods: ClassVar[Any] = ("fork",)  # of a folder, others: test_kernel_workers
    kind: Kind
    test_start_methods_give_the_same_samples = None
    # The tests above look closer at these: runs of one seed and shards by index have workers, the two epochs
    # are resumed and have each sample once, and an error names the sample that is damaged.
    test_same_seed_gives_the_same_samples = None
    test_workers_give_the_same_samples = None
    test_state_resumes_in_workers = None
    test_state_resumes_with_the_next_sample = None
    test_epoch_has_every_sample_once = None
    test_bad_sample_raises_its_error_in_every_process = None

    @pytest.fixture(autouse=True)
    def _kind(self, kind: Kind, written: Written) -> None:
        self.kind, self.written = kind, written
        self.random = kind.own_photos and kind.transform is not None  # type: ignore[misc]

    def make(self) -> Any:
        return self.kind.make(self.written(self.kind))

    def make_damaged(self) -> Any:
        if self.kind not in DAMAGED:
            return None
        return self.kind.make(self.written(self.kind, damaged=True)), BAD


@of(AT_RANDOM)
class TestKind(OfKinds):
    def identify(self, sample: Any) -> Any:
        return number(sample)


@of([kind for kind in KINDS if kind.sources > 1])
class TestMixture(OfKinds):
    test_order_does_not_change_a_sample = None  # a mixture has a sampler of its own ...
    test_loader_gives_the_samples_of_the_dataset = None  # ... whose order is not that of the indices


@of([kind for kind in KINDS if kind.streamed])
class TestStreams(IterableDatasetTests):
    start_methods: ClassVar[Any] = ("fork",)

    @pytest.fixture(autouse=True)
    def _kind(self, kind: Kind, written: Written) -> None:
        self.kind, self.written = kind, written

    def make(self) -> Any:
        return self.kind.make(self.written(self.kind))

    def identify(self, sample: Any) -> Any:
        return number(sample)
