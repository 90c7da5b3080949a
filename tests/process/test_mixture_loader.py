"""Mixtures through the loader: every sample once a pass, whatever the workers, ranks, epochs and resumes."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import simplejpeg
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, ConcatDataset, DistributedSampler, RandomSampler, Subset

import fastload
from fastload import (
    Cache,
    DataLoader,
    ImageFolder,
    Mixture,
    MixtureSampler,
    RandomResizedCrop,
    TarDataset,
    cached,
)
from fastload.distributed.agreement import Ranks
from fastload.errors import ArgumentError
from fastload.order import mixture_sampler
from tests.loaderdata import Numbers, Stream, identity
from tests.photos import scene
from tests.sharddata import dataset as shard_dataset
from tests.sharddata import shards, write

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

Sample = tuple[str, int]
LENGTHS = {"web": 23, "own": 7, "rare": 5, "new": 11, "bad": 9}
WEIGHTS = {"web": 0.6, "own": 0.3, "rare": 0.1}


def named(name: str, index: int) -> Sample:
    return name, index


def noisy(name: str, index: int) -> Any:
    return name, index, torch.rand(()).item()


def mixture(make: Any = named, weights: Any = None, **options: Any) -> Mixture:
    sources = {
        name: Numbers(length, partial(make, name)) for name, length in LENGTHS.items() if name in WEIGHTS
    }
    return Mixture(sources, WEIGHTS if weights is None else weights, **options)


def loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        dataset, **({"batch_size": 5, "shuffle": True, "seed": 3, "collate_fn": identity} | options)
    )


def in_passes(samples: list[Any]) -> dict[str, int]:
    """Samples of each source; each has given every sample once in each of its passes."""
    found = defaultdict(list)
    for name, index, *_ in samples:
        found[name].append(index)
    for name, indices in found.items():
        for start in range(0, len(indices), LENGTHS[name]):
            one_pass = indices[start : start + LENGTHS[name]]
            assert len(set(one_pass)) == len(one_pass)
    return {name: len(indices) for name, indices in found.items()}


# --- epochs, workers, resumed runs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> a folder of one class, whose images all differ."""
    found = {}
    for number, name in enumerate(WEIGHTS):
        found[name] = str(tmp_path_factory.mktemp(name))
        (Path(found[name]) / "class").mkdir()
        for index in range(LENGTHS[name]):
            pixels = scene(40, 30, seed=10 * number + index)
            (Path(found[name]) / "class" / f"{index:02}.jpg").write_bytes(simplejpeg.encode_jpeg(pixels))
    return found


def images(folders: dict[str, str], cache: Path) -> Mixture:
    crop = RandomResizedCrop(8)
    sources = {name: ImageFolder(url, crop, cache=Cache(cache / name)) for name, url in folders.items()}
    return Mixture(sources, WEIGHTS)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_three_epochs_come_once_a_pass_in_the_given_proportions(workers: int) -> None:
    data = mixture(num_samples=40)
    one = loader(data, num_workers=workers)
    assert len(one) == 8
    samples = [sample for _ in range(3) for batch in one for sample in batch]
    assert in_passes(samples) == {"web": 72, "own": 36, "rare": 12}
    ledger = data.ledger()
    assert {name: read.samples for name, read in ledger.items()} == {"web": 72, "own": 36, "rare": 12}
    assert ledger["own"].epochs == 36 / 7 and ledger["own"].remaining == 6 and ledger["own"].share == 0.3
    assert str(ledger).splitlines() == [
        "source  weight  samples   share  epochs  remaining",
        "web     0.6000       72  0.6000    3.13         20",
        "own     0.3000       36  0.3000    5.14          6",
        "rare    0.1000       12  0.1000    2.40          3",
    ]


def test_ledger_counts_what_was_handed_out_and_not_what_was_read_ahead() -> None:
    data = mixture(num_samples=100)
    assert sum(read.samples for read in data.ledger().values()) == 0
    one = loader(data, num_workers=2, prefetch_factor=4)
    batches = iter(one)
    for number in range(1, 7):
        next(batches)
        assert sum(read.samples for read in data.ledger().values()) == 5 * number
    state = one.state_dict()
    again = mixture(num_samples=100)
    loader(again).load_state_dict(state)
    assert again.ledger() == data.ledger()


@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_that_is_left_early_loses_and_repeats_no_sample(workers: int) -> None:
    one = loader(mixture(num_samples=60), num_workers=workers)
    samples = [sample for batch in itertools.islice(one, 3) for sample in batch]
    for batch in one:
        samples += batch
    assert in_passes(samples) == {"web": 45, "own": 23, "rare": 7}


def test_drop_last_loses_no_sample_over_epochs() -> None:
    data = mixture(num_samples=33)
    one = loader(data, drop_last=True, num_workers=2)
    samples = [sample for _ in range(4) for batch in one for sample in batch]
    assert len(samples) == 4 * 30
    assert in_passes(samples) == {"web": 72, "own": 36, "rare": 12}
    assert sum(read.samples for read in data.ledger().values()) == 120


def test_state_between_epochs_of_drop_last_resumes_the_unbroken_run() -> None:
    one = loader(mixture(num_samples=33), drop_last=True)
    list(one)
    again = loader(mixture(num_samples=33), drop_last=True, num_workers=2)
    again.load_state_dict(one.state_dict())
    assert list(again) == list(one)


def test_ranks_read_disjoint_parts_and_another_number_of_ranks_goes_on() -> None:
    def ranks(count: int) -> list[DataLoader[Any]]:
        made = []
        for rank in range(count):
            data = mixture(num_samples=48)
            sampler = MixtureSampler(data, count, rank, seed=3)
            made.append(loader(data, shuffle=None, sampler=sampler, batch_size=4))
        return made

    def in_turn(batches: tuple[list[Any], ...]) -> list[Any]:
        return [sample for row in zip(*batches, strict=True) for sample in row]

    whole = ranks(1)[0]
    alone = [sample for _ in range(2) for batch in whole for sample in batch]
    two, three = ranks(2), ranks(3)
    begun = [iter(one) for one in two]
    samples = [sample for _ in range(3) for sample in in_turn(tuple(next(one) for one in begun))]
    states = [one.state_dict() for one in two]
    assert states[0]["sampler"] == states[1]["sampler"]
    for one in three:
        one.load_state_dict(states[0])
    for _ in range(2):
        for batches in zip(*three, strict=True):
            samples += in_turn(batches)
    assert samples == alone


# --- random numbers


@pytest.mark.parametrize("workers", [0, 2])
def test_repeated_sample_and_equal_positions_have_other_random_numbers(workers: int) -> None:
    samples = [
        sample for batch in loader(mixture(noisy, num_samples=100), num_workers=workers) for sample in batch
    ]
    assert len({noise for *_, noise in samples}) == 100
    again = [sample for batch in loader(mixture(noisy, num_samples=100)) for sample in batch]
    assert samples == again


def test_indexed_shards_whose_records_repeat_within_a_batch_give_each_once_a_pass(tmp_path: Path) -> None:
    url = write(tmp_path, shards("tar", index=True))
    with contextlib.closing(shard_dataset("tar", url, transform=RandomResizedCrop(8))) as source:
        data = Mixture({"tar": source}, [1], num_samples=2 * len(source))
        one = DataLoader(data, batch_size=len(source) + 27, shuffle=True, num_workers=1)
        found = list(one)
        labels = torch.cat([batch["cls"] for batch in found]).tolist()
        crops = torch.cat([batch["jpg"] for batch in found]).flatten(1)
    assert sorted(labels[: len(labels) // 2]) == sorted(labels[len(labels) // 2 :])
    assert len(crops.unique(dim=0)) > len(labels) * 0.9


# --- weights


def test_weights_by_epoch_hold_in_that_epoch() -> None:
    data = mixture(weights=lambda epoch: [1, 0, 0] if epoch % 2 else [0, 1, 1], num_samples=20)
    one = loader(data)
    counts = [Counter(name for batch in one for name, _ in batch) for _ in range(3)]
    assert counts == [{"own": 10, "rare": 10}, {"web": 20}, {"own": 10, "rare": 10}]


def test_weights_set_while_running_begin_after_what_is_drawn_ahead_and_resume_so() -> None:
    def run(workers: int, state: Any = None, batches: int = 20) -> tuple[list[Any], Any, Mixture]:
        data = mixture(num_samples=100)
        one = loader(data, num_workers=workers)
        samples = []
        if state is not None:
            one.load_state_dict(state)
        for number, batch in enumerate(one, 1):
            samples.append(batch)
            if state is None and number == 4:
                data.weights = {"web": 0, "own": 0, "rare": 1}
            if number == batches:
                return samples, one.state_dict(), data
        return samples, one.state_dict(), data

    whole, _, data = run(2)
    rare = [number for number, batch in enumerate(whole, 1) if {name for name, _ in batch} == {"rare"}]
    assert rare == list(range(4 + 2 * 2 + 1, 21))
    assert data.weights == {"web": 0.0, "own": 0.0, "rare": 1.0} and data.ledger()["rare"].weight == 1
    begun, state, _ = run(2, batches=6)
    rest, _, data = run(3, state)
    assert begun + rest == whole, "the weights that were set before batch 9 are lost in a state of batch 6"
    assert data.weights == {"web": 0.0, "own": 0.0, "rare": 1.0}


def test_run_that_is_resumed_with_other_sources_keeps_the_passes_of_the_others() -> None:
    one = loader(mixture(num_samples=40))
    begun = [next(batches) for batches in [iter(one)] for _ in range(4)]
    sources = {name: Numbers(LENGTHS[name], partial(named, name)) for name in ("new", "web")}
    data = Mixture(sources, [1, 1], num_samples=40)
    again = loader(data, num_workers=2)
    again.load_state_dict(one.state_dict())
    rest = [sample for _ in range(2) for batch in again for sample in batch]
    assert len(rest) == 20 + 40 and sum(name == "new" for name, _ in rest) == 30
    in_passes([sample for batch in begun for sample in batch if sample[0] == "web"] + [*rest])
    assert data.ledger()["web"].samples == 12 + 30 and data.ledger()["new"].samples == 30


def in_threads(store: Any, weights: list[list[float]], drawn: list[int]) -> list[Any]:
    """Each of two ranks sets weights after it has drawn its number of samples."""
    found: list[Any] = [None, None]

    def rank(number: int) -> None:
        data = mixture(num_samples=100)
        sampler = MixtureSampler(data, 2, number)
        sampler._ranks = Ranks(number, 2, root=store, number=0)
        order = iter(sampler)
        before = [next(order) for _ in range(drawn[number])]
        try:
            data.weights = weights[number]
            found[number] = before + list(order)
        except ArgumentError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(mixture_sampler, "can_agree", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    return dist.HashStore()


def test_ranks_that_have_drawn_differently_begin_with_new_weights_at_the_same_sample(store: Any) -> None:
    found = in_threads(store, [[0, 0, 1]] * 2, [4, 9])
    together = [index for row in zip(*found, strict=True) for index in row]
    rare = [index % (1 << 40) >= 30 for index in together]
    assert all(rare[18:]) and sum(rare[:18]) <= 2


def test_ranks_that_set_different_weights_are_told(store: Any) -> None:
    found = in_threads(store, [[0, 0, 1], [0, 1, 1]], [4, 4])
    assert "rank 1 sets other weights than rank 0" in found[0]
    assert "rank 0 sets other weights than rank 1" in found[1]


# --- errors


def broken(index: int) -> Sample:
    if index % 3 == 0:
        raise ValueError("cut")
    return "bad", index


def test_bad_sample_is_replaced_by_one_of_its_source_and_named_by_it() -> None:
    data = Mixture({"web": Numbers(20, partial(named, "web")), "bad": Numbers(9, broken)}, [1, 1])
    samples = [sample for batch in loader(data, on_error="replace", num_workers=2) for sample in batch]
    assert sum(name == "bad" for name, _ in samples) == 14
    with pytest.raises(ValueError, match="cut") as told:
        list(loader(data))
    assert "of source 'bad'" in str(told.value.__notes__)


@pytest.mark.parametrize(
    ("sources", "weights", "message"),
    [
        ({}, [], "datasets is empty"),
        (Numbers(3), [1], "must be a dict of names and datasets, or a list, found Numbers"),
        ({1: Numbers(3)}, [1], "the name of a source must be a str, found 1"),
        ({"a": Numbers(0)}, [1], "source 'a' is empty: leave it out"),
        ({"a": Stream([3])}, [1], "source 'a' must be a map-style dataset"),
        ({"a": mixture()}, [1], "source 'a' is itself a Mixture"),
        ({"a": Numbers(3)}, [1, 2], "weights has 2 weights for 1 sources"),
        ({"a": Numbers(3)}, {"b": 1}, r"missing \['a'\], and no source has the names \['b'\]"),
        ({"a": Numbers(3), "b": Numbers(3)}, [0, 0.0], "weights are all 0"),
        ({"a": Numbers(3), "b": Numbers(3)}, [1, -0.5], "the weight of source 'b' must be >= 0, found -0.5"),
        ({"a": Numbers(3), "b": Numbers(3)}, [1, float("nan")], "source 'b' must be a finite number >= 0"),
        ({"a": Numbers(3), "b": Numbers(3)}, [1, float("inf")], "source 'b' must be a finite number >= 0"),
        ({"a": Numbers(3), "b": Numbers(3)}, [1, "2"], "source 'b' must be a finite number >= 0, found '2'"),
        ({"a": Numbers(3)}, 1.0, "weights must be a list or dict of numbers, or a function"),
        ({"a": Numbers(3)}, lambda epoch: [1, 2], r"weights\(0\) has 2 weights for 1 sources"),
    ],
)
def test_bad_arguments_are_refused_with_the_source_and_the_next_step(
    sources: Any, weights: Any, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        Mixture(sources, weights)


@pytest.mark.parametrize("samples", [0, -1, 2.5, True])
def test_num_samples_that_is_no_whole_number_is_refused(samples: Any) -> None:
    with pytest.raises(ArgumentError, match="num_samples must be a whole number >= 1"):
        mixture(num_samples=samples)


def test_source_that_is_not_indexed_yet_is_refused_with_the_way_to_index_it(tmp_path: Path) -> None:
    url = write(tmp_path, shards("tar"))
    told = pytest.raises(ArgumentError, match=r"source 'tar' has no length yet.*fastload index URL")
    with contextlib.closing(shard_dataset("tar", url)) as source, told:
        Mixture({"tar": source}, [1])
    with contextlib.closing(TarDataset(url, num_samples=7)) as hinted:
        for source in (hinted, fastload.map(hinted, len)):
            with pytest.raises(ArgumentError, match=r"source 'tar' has no length yet.*fastload index URL"):
                Mixture({"tar": source}, [1])


class Pairs(BatchSampler):
    """One of the user's own, which takes more than it gives."""

    def __iter__(self) -> Any:
        indices = list(self.sampler)
        yield from ([first, second] for first, second in zip(indices[::2], indices[1::2], strict=True))


def test_batch_sampler_of_the_users_own_goes_on_in_the_next_epoch_and_resumes() -> None:
    def made() -> DataLoader[Any]:
        data = mixture(num_samples=20)
        sampler = Pairs(MixtureSampler(data, 1, 0), 2, False)
        return DataLoader(data, batch_sampler=sampler, collate_fn=identity)

    one, again = made(), made()
    whole = [batch for _ in range(3) for batch in one]
    assert in_passes([sample for batch in whole for sample in batch]) == {"web": 36, "own": 18, "rare": 6}
    begun = [*again, *itertools.islice(again, 4)]
    state, again = again.state_dict(), made()
    again.load_state_dict(state)
    assert [*begun, *again, *again] == whole


def test_what_would_not_use_the_weights_is_refused() -> None:
    data = mixture()
    with pytest.raises(ArgumentError, match="DistributedSampler does not use the weights of a Mixture"):
        DataLoader(data, sampler=DistributedSampler(data, 1, 0))
    with pytest.raises(ArgumentError, match="RandomSampler does not use the weights of a Mixture"):
        DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 5, False))
    for wrapped in (
        Subset(data, [0, 1]),
        ConcatDataset([data, data]),
        fastload.map(data, identity),
        cached(data, "/nowhere/cache"),
    ):
        with pytest.raises(ArgumentError, match=f"a {type(wrapped).__name__} of a Mixture"):
            DataLoader(wrapped)
    with pytest.raises(ArgumentError, match=r"mixture must be a fastload\.Mixture, found range"):
        MixtureSampler(range(3))


def test_function_of_the_epoch_cannot_be_set_while_the_mixture_is_read() -> None:
    data = mixture()
    data.weights = lambda epoch: [1, 1, 1]
    next(iter(loader(data)))
    with pytest.raises(ArgumentError, match="cannot be set to a function of the epoch while"):
        data.weights = lambda epoch: [1, 1, 1]


def test_state_with_another_length_of_a_source_is_refused() -> None:
    one = loader(mixture())
    other = Mixture({"web": Numbers(24)}, [1])
    with pytest.raises(ArgumentError, match="source 'web' had 23 samples in the saved run, and has 24 now"):
        loader(other).load_state_dict(one.state_dict())


def test_mixture_as_a_concatenation_ends_after_its_samples() -> None:
    data = mixture()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [data[index] for index in range(len(data))] == list(data)
    assert data[-1] == ("rare", 4) and data[(5 << 40) + 23] == ("own", 0)
    with pytest.raises(IndexError):
        data[(5 << 40) + 35]
