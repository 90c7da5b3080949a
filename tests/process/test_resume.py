"""A loader that resumes gives what is left of its epoch, id for id.

Later epochs are those of the unbroken run where the script restores torch's generator, as with torch's.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import pickle
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import fastload
from fastload import DistributedSampler
from fastload.errors import ArgumentError
from fastload.order.position import Position
from fastload.order.state import State
from fastload.workers.processes import WorkerProcesses
from fastload.workers.slots import SlotMap
from tests.loaderdata import Gate, Numbers, identity, seed_all, through_json
from tests.shortform import short_form

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

N = 37


class Ids(Dataset[int]):
    def __init__(self, n: int = N) -> None:
        self.n = n
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Noise(Ids):
    """A sample is its id and a draw from each generator."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), random.random(), np.random.rand()


def loader(dataset: Any = None, **options: Any) -> fastload.DataLoader[Any]:
    options = {"batch_size": 5, "collate_fn": identity} | options
    if "batch_sampler" in options:
        del options["batch_size"]
    return fastload.DataLoader(Ids() if dataset is None else dataset, **options)


Make = Callable[..., fastload.DataLoader[Any]]
EPOCHS = 3


def unbroken(make: Make, **options: Any) -> list[list[Any]]:
    seed_all(7)
    run = make(**options)
    return [list(run) for _ in range(EPOCHS)]


def broken(
    make: Make, at: int | None, before: dict[str, Any], after: dict[str, Any], *, restores: bool = True
) -> list[list[Any]]:
    """Epoch 0; of epoch 1 `at` batches (None: not begun); then a loader in what could be a new process.

    Args:
        restores: the script restores torch's generator there.
    """
    seed_all(7)
    first = make(**before)
    epochs = [list(first)]
    seen: list[Any] = []
    if at is not None:
        iterator = iter(first)
        seen = list(itertools.islice(iterator, at))
        if len(seen) < at:
            epochs.append(seen)  # the end was reached
    state, generator = through_json(first.state_dict()), torch.get_rng_state()
    seed_all(1234)
    if restores:
        torch.set_rng_state(generator)
    here = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    second = make(**after)
    second.load_state_dict(state)
    assert second.state_dict() == state
    if len(epochs) == 1:
        epochs.append(seen + list(second))
        if seen:
            assert torch.equal(torch.get_rng_state(), here[0]), "the epoch that is resumed draws nothing"
    while len(epochs) < EPOCHS:
        epochs.append(list(second))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == here[1:]
    return epochs


class Reversed(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N - 1, -1, -1))

    def __len__(self) -> int:
        return N


class Shuffled(Reversed):
    """Draws from Python's and numpy's generators, and as soon as iter() is called."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(N))
        random.shuffle(order)
        np.random.shuffle(order)
        return iter(order)


class Lazy(Reversed):
    """Draws from the process's generators with every index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(N):
            yield (random.randrange(N) + int(np.random.randint(N)) + int(torch.randint(N, ()))) % N


class Counting(Sampler[int]):
    """torchdata's protocol: a position, and an order that only the state knows."""

    def __init__(self) -> None:
        self.passes = self.i = 0
        self.resume: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.i, self.resume = self.resume or 0, None
        while self.i < N:
            self.i += 1
            yield (self.i * 5 + self.passes) % N
        self.passes, self.i = self.passes + 1, 0

    def __len__(self) -> int:
        return N

    def state_dict(self) -> dict[str, int]:
        return {"i": self.i, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resume, self.passes, self.i = state["i"], state["passes"], state["i"]


class Ahead(BatchSampler):
    """A user's batch sampler that takes two batches at a time from a sampler with a state."""

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while pair := list(itertools.islice(indices, 10)):
            yield pair[:5]
            if pair[5:]:
                yield pair[5:]


class Backwards(DistributedSampler):
    """Takes all indices of its base at once; the state that it inherits then stands behind all of them."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[::-1])


class OwnEpoch(Reversed):
    """As torch's DistributedSampler: no state, but an epoch that somebody has to set."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Made anew for each loader, as a new process would.
ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffle": lambda: {"shuffle": True},
    "drop_last": lambda: {"shuffle": True, "drop_last": True},
    "no batches": lambda: {"shuffle": True, "batch_size": None, "collate_fn": int},
    "generator": lambda: {"shuffle": True, "generator": seeded()},
    "replacement": lambda: {"sampler": RandomSampler(Ids(), True, 50, generator=seeded())},
    "weighted": lambda: {"sampler": torch.utils.data.WeightedRandomSampler(list(range(1, N + 1)), 40)},
    "subset": lambda: {"sampler": torch.utils.data.SubsetRandomSampler(range(0, N, 2))},
    "two generators": lambda: {"sampler": RandomSampler(Ids(), generator=seeded(5)), "generator": seeded()},
    "batch_sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(Ids()), 4, True)},
    "list of batches": lambda: {"batch_sampler": [[1, 2], [3], [4, 5, 6], [7], [8], [9, 0]]},
    "custom": lambda: {"sampler": Reversed()},
    "custom, no batches": lambda: {"sampler": Reversed(), "batch_size": None, "collate_fn": int},
    "custom, state": lambda: {"sampler": Counting()},
    "distributed": lambda: {"sampler": DistributedSampler(range(N), 2, 1)},
    "distributed, no batches": lambda: {
        "sampler": DistributedSampler(range(N), 2, 1),
        "batch_size": None,
        "collate_fn": int,
    },
    "subclass that draws ahead": lambda: {"sampler": Backwards(range(N), 1, 0)},
    "custom batches": lambda: {"batch_sampler": Ahead(DistributedSampler(range(N), 1, 0), 5, False)},
}


def with_order(name: str) -> Make:
    return lambda **options: loader(**(ORDERS[name]() | options))


def points(epoch: list[Any]) -> list[int | None]:
    """Not begun, before the first batch, in the middle, after the last batch, at the end."""
    return [None, 0, 1, len(epoch) // 2, len(epoch), len(epoch) + 1]


# Others have one in the short form that is like them; and test_orders has all orders at one point.
LIKE_OTHERS = ("drop_last", "weighted", "subset", "custom", "custom, no batches", "distributed, no batches")


@pytest.mark.parametrize("name", short_form(ORDERS, lambda name: name not in LIKE_OTHERS))
def test_any_order_at_any_point(name: str) -> None:
    expected = unbroken(with_order(name))
    for at in points(expected[1]):
        assert broken(with_order(name), at, {}, {}) == expected, f"saved at {at}"
    for at in (None, 1, len(expected[1])):
        epochs = broken(with_order(name), at, {}, {}, restores=False)
        if at:
            assert epochs[:2] == expected[:2], f"saved at {at}, torch's generator elsewhere"
        assert [len(epoch) for epoch in epochs] == [len(epoch) for epoch in expected]


# Each number of workers before and after, and each of the `points`. The other changes are in the long form.
SOME_CHANGES: dict[bool, dict[tuple[int, int], int]] = {
    False: {(0, 2): 2, (1, 3): 4, (2, 1): 3, (3, 0): 0},
    True: {(0, 1): 5, (1, 2): 3, (2, 0): 0, (3, 3): 1},
}


@pytest.mark.parametrize(
    ("before", "after", "persistent"),
    short_form(
        itertools.product(range(4), range(4), (False, True)),
        lambda before, after, persistent: (before, after) in SOME_CHANGES[persistent],
    ),
)
def test_another_number_of_workers(before: int, after: int, persistent: bool) -> None:
    make = with_order("shuffle")
    options = [{"num_workers": n, "persistent_workers": persistent and n > 0} for n in (before, after)]
    expected = unbroken(make, **options[0])
    where = points(expected[1])
    some = SOME_CHANGES[persistent].get((before, after))
    for at in where if some is None else [where[some]]:
        epochs = broken(make, at, options[0], options[1])
        # Persistent workers draw one base seed for all epochs, others one for each: later orders differ.
        alike = 2 if options[1]["persistent_workers"] and not options[0]["persistent_workers"] else EPOCHS
        assert epochs[:alike] == expected[:alike], f"saved at {at}"


def test_randomness_of_samples() -> None:
    def make(**options: Any) -> fastload.DataLoader[Any]:
        return loader(Noise(), shuffle=True, seed=11, **options)

    expected = unbroken(make, num_workers=2)
    assert len({sample[1] for epoch in expected for batch in epoch for sample in batch}) == EPOCHS * N
    for at, after in ((None, 3), (3, 0)):
        assert broken(make, at, {"num_workers": 2}, {"num_workers": after}) == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampler", [Lazy, Shuffled])
def test_custom_sampler_that_gives_another_order_is_refused(sampler: Any, workers: int) -> None:
    """It draws from generators that are nobody's to restore: rather an error than other samples."""
    seed_all(7)
    run = loader(sampler=sampler(), num_workers=workers)
    list(itertools.islice(run, 3))
    state = through_json(run.state_dict())
    seed_all(8)
    resumed = loader(sampler=sampler())
    resumed.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"another order than in the run that was saved.*state_dict"):
            iter(resumed)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampler", [Lazy, Shuffled])
def test_custom_sampler_that_is_seeded_for_each_epoch_goes_on(sampler: Any, workers: int) -> None:
    seed_all(7)
    whole = list(loader(sampler=sampler(), num_workers=workers))
    seed_all(7)
    run = loader(sampler=sampler(), num_workers=workers)
    seen = list(itertools.islice(run, 3))
    state = through_json(run.state_dict())
    resumed = loader(sampler=sampler(), num_workers=workers)
    resumed.load_state_dict(state)
    seed_all(7)
    if sampler is Lazy:
        torch.randint(2**31, ())  # as the base seed, which is not drawn again
    assert seen + list(resumed) == whole


class Bulk(Ids):
    """Reads a batch as a whole: torch's pattern of batch_size=None and a sampler of batches."""

    def __getitem__(self, index: Any) -> Any:
        return list(index)


@pytest.mark.parametrize("kind", [RandomSampler, lambda data: DistributedSampler(data, 2, 1)])
def test_batches_that_the_dataset_reads_as_a_whole(kind: Any) -> None:
    def make() -> fastload.DataLoader[Any]:
        sampler: Any = BatchSampler(kind(Bulk()), 4, drop_last=False)
        return loader(Bulk(), batch_size=None, sampler=sampler, seed=1)

    run = make()
    iterator = iter(run)
    seen = [next(iterator), next(iterator)]
    state = through_json(run.state_dict())
    epoch = seen + list(iterator)
    resumed = make()
    resumed.load_state_dict(state)
    assert list(resumed) == epoch[2:]
    assert [run.batch_at(step, 0) for step in range(len(epoch))] == epoch


def test_saving_what_was_resumed() -> None:
    """A break after every batch, each in what could be a new process."""
    make = with_order("shuffle")
    expected = unbroken(make)
    torch.manual_seed(7)
    run, seen = make(), []
    for at in range(len(expected[0])):
        seen.append(next(iter(run)))
        if at == 0:
            generator = torch.get_rng_state()
        state = through_json(run.state_dict())
        torch.manual_seed(at)
        run = make()
        run.load_state_dict(state)
    assert seen == expected[0]
    assert list(run) == []
    torch.set_rng_state(generator)
    assert [list(run) for _ in range(EPOCHS - 1)] == expected[1:]


def test_what_was_handed_out_is_not_read_again() -> None:
    run = loader(shuffle=True)
    list(itertools.islice(run, 4))
    resumed = loader(shuffle=True)
    resumed.load_state_dict(run.state_dict())
    rest = list(resumed)
    assert sorted(resumed.dataset.read) == sorted(itertools.chain(*rest))  # type: ignore[attr-defined]


def seen_in_both(workers: int) -> Counter[int]:
    """Of a run that is broken after two batches, and of the one that resumes it."""
    run = loader(shuffle=True, num_workers=workers, prefetch_factor=3 if workers else None)
    iterator = iter(run)
    seen = list(itertools.islice(iterator, 2))
    state = run.state_dict()
    del iterator
    resumed = loader(shuffle=True)
    resumed.load_state_dict(state)
    return Counter(itertools.chain(*seen, *resumed))


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_batches_are_not_seen(workers: int) -> None:
    assert seen_in_both(workers) == Counter(range(N))


@pytest.mark.stress
@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_batches_guard_removed_are_lost(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what is drawn counts instead of what is handed out."""

    def write(self: Position, state: State) -> None:
        original(self, state)
        state.batches += len(self._due)

    original = Position.write
    monkeypatch.setattr(Position, "write", write)
    assert (seen_in_both(workers) == Counter(range(N))) == (workers == 0)


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize("then", [2, 0])
def test_out_of_order(then: int, followed: bool, tmp_path: Path) -> None:
    def make(workers: int) -> fastload.DataLoader[Any]:
        sampler = DistributedSampler(range(N), 1, 0, shuffle=False) if followed else None
        return loader(
            Numbers(N, Gate(tmp_path / "gate")), in_order=False, num_workers=workers, sampler=sampler
        )

    run = make(2)
    iterator = iter(run)
    seen = list(itertools.islice(iterator, 4))
    state = through_json(run.state_dict())
    (tmp_path / "gate").touch()
    del iterator
    assert (state["batches"], state["ahead"]) == (0, sorted(batch[0] // 5 for batch in seen))
    for count in (1, 2, None) if then else (2, 1, None):
        run = make(then)
        run.load_state_dict(state)
        iterator = iter(run)
        seen += list(itertools.islice(iterator, count))
        state = through_json(run.state_dict())
        del iterator
    assert sorted(itertools.chain(*seen)) == list(range(N))


class Bad(Ids):
    def __getitem__(self, index: int) -> int:
        if index == 12:
            raise ValueError("sample 12 is bad")
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_raised_is_behind_us(workers: int) -> None:
    run = loader(Bad(), num_workers=workers)
    iterator = iter(run)
    seen = list(itertools.islice(iterator, 2))
    with pytest.raises(ValueError, match="sample 12"):
        next(iterator)
    resumed = loader(Bad())
    resumed.load_state_dict(through_json(run.state_dict()))
    assert sorted(itertools.chain(*seen, *resumed)) == [*range(10), *range(15, N)]


def test_interrupted_just_after_a_batch_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The iterator goes on with the batch after it, as torch's does."""
    run = loader()
    bad = run._context.bad
    monkeypatch.setattr(bad, "extend", at_call(2, bad.extend, KeyboardInterrupt))
    iterator = iter(run)
    seen = [next(iterator)]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [*itertools.chain(*seen, *iterator)] == [*range(5), *range(10, N)]


def make_photos(root: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (N, 24, 24, 3), np.uint8)
    (root / "class").mkdir()
    for number, image in enumerate(pixels):
        (root / "class" / f"{number:03}.jpg").write_bytes(simplejpeg.encode_jpeg(image))


def digests(run: Any) -> list[tuple[int, int]]:
    return [(len(images), hash(images.numpy().tobytes())) for images, _ in run]


def at_call(number: int, function: Callable[..., Any], error: type[BaseException]) -> Callable[..., Any]:
    calls = itertools.count(1)

    def called(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise error
        return function(*arguments, **options)

    return called


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, ValueError, pytest.param(SystemExit, marks=pytest.mark.stress)]
)
@pytest.mark.parametrize("where", ["unpack", "batch_transform", "pin_memory"])
def test_interrupted_while_a_batch_is_handed_over(
    where: str, error: type[BaseException], goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or a handler of SIGTERM that raises: who resumes gets the batch. An error is behind us."""
    transform = at_call(3, identity, error) if where == "batch_transform" else None
    if where == "unpack":
        monkeypatch.setattr(SlotMap, "unpack", at_call(3, SlotMap.unpack, error))
    if where == "pin_memory":
        pinned = at_call(3, lambda batch, device: batch, error)
        monkeypatch.setattr("torch.utils.data._utils.pin_memory.pin_memory", pinned)
    run = loader(num_workers=2, batch_transform=transform)
    iterator = iter(run)
    if where == "pin_memory":
        iterator._delivery._pin = lambda batch: pinned(batch, "")
    seen = list(itertools.islice(iterator, 2))
    with pytest.raises(error):
        next(iterator)
    if goes_on:
        seen.append(next(iterator))
        assert seen[-1][0] == 15
    state = through_json(run.state_dict())
    del iterator
    resumed = loader()
    resumed.load_state_dict(state)
    lost = range(10, 15) if error is ValueError else ()
    assert Counter(itertools.chain(*seen, *resumed)) == Counter(set(range(N)) - set(lost))


# --- another number of ranks


@pytest.mark.parametrize(
    ("before", "after"),
    short_form(itertools.product(range(1, 5), range(1, 5)), lambda before, after: (before + after) % 2),
)
def test_another_number_of_ranks(before: int, after: int) -> None:
    def world(size: int, batch_size: int) -> list[fastload.DataLoader[Any]]:
        samplers = [DistributedSampler(range(N), size, rank, mode="eval") for rank in range(size)]
        return [loader(sampler=sampler, batch_size=batch_size) for sampler in samplers]

    steps = N // (4 * before)
    for at in (0, steps // 2, steps, None):
        first = world(before, 4)
        parts = [list(itertools.islice(run, at)) for run in first]
        state = through_json(first[0].state_dict())
        second = world(after, 3)
        for run in second:
            run.load_state_dict(state)
        rest = [] if at is None else [list(run) for run in second]
        assert sorted(itertools.chain(*itertools.chain(*parts, *rest))) == list(range(N))
        following = [list(run) for run in second]
        assert sorted(itertools.chain(*itertools.chain(*following))) == list(range(N))
        expected = DistributedSampler(range(N), after, 0, mode="eval")
        expected.set_epoch(1)
        assert list(itertools.chain(*following[0])) == list(expected)


def test_ranks_of_torchs_sampler_cannot_change() -> None:
    def make(ranks: int) -> fastload.DataLoader[Any]:
        return loader(sampler=torch.utils.data.DistributedSampler(range(N), ranks, 0))  # type: ignore[arg-type]

    run = make(2)
    list(itertools.islice(run, 2))
    with pytest.raises(ArgumentError, match=r"sampler_length 4.*has 3.*fastload.DistributedSampler"):
        make(3).load_state_dict(run.state_dict())


@pytest.mark.parametrize("kind", [torch.utils.data.DistributedSampler, DistributedSampler, Backwards])
def test_set_epoch(kind: Any) -> None:
    def make() -> tuple[Any, fastload.DataLoader[Any]]:
        sampler = kind(range(N), 2, 0)
        return sampler, loader(sampler=sampler)

    sampler, run = make()
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected.append(list(run))
    sampler, run = make()
    sampler.set_epoch(1)
    seen = list(itertools.islice(run, 2))
    state = through_json(run.state_dict())
    for calls in ([], [1]):
        sampler, run = make()
        run.load_state_dict(state)
        for epoch in calls:
            sampler.set_epoch(epoch)
        assert seen + list(run) == expected[1]
        sampler.set_epoch(2)
        assert list(run) == expected[2]
    sampler, run = make()
    run.load_state_dict(state)
    if kind is not DistributedSampler:
        sampler.set_epoch(2)
    else:
        with pytest.warns(UserWarning, match="drops the position"):
            sampler.set_epoch(2)
    assert list(run) == expected[2], "another epoch starts at its beginning"
    sampler, run = make()
    run.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it drops the position
        sampler.set_epoch(2)
    sampler.set_epoch(1)
    assert seen + list(run) == expected[1], "in the loaded epoch, it goes on where it was"


@pytest.mark.filterwarnings("ignore:set_epoch.4. drops the position")
@pytest.mark.parametrize("at", [None, 2])
@pytest.mark.parametrize("kind", [torch.utils.data.DistributedSampler, DistributedSampler])
def test_state_knows_the_epoch_that_was_set_last(kind: Any, at: int | None) -> None:
    """After an epoch, and after a state of its end or its middle was loaded."""

    def make(state: Any) -> fastload.DataLoader[Any]:
        run = loader(sampler=kind(range(N), 2, 0))
        run.load_state_dict(through_json(state))
        return run

    run = loader(sampler=kind(range(N), 2, 0))
    run.sampler.set_epoch(3)  # type: ignore[attr-defined]
    list(itertools.islice(run, at))
    for follower in [make(run.state_dict()), *([run] if at is None else [])]:
        follower.sampler.set_epoch(4)  # type: ignore[attr-defined]
        resumed = make(follower.state_dict())
        expected = DistributedSampler(range(N), 2, 0)
        expected.set_epoch(4)
        batches = list(resumed)
        assert batches == list(follower) and list(itertools.chain(*batches)) == list(expected)
        assert resumed.state_dict()["epoch"] == 2


PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
LOADERS: list[tuple[dict[str, Any], dict[str, Any], int | None]] = [
    ({}, {}, 2),
    ({"num_workers": 2}, {"num_workers": 1}, 2),
    (PERSISTENT, PERSISTENT, None),
    (PERSISTENT, {}, None),
]


# The short form has each loader with one of the samplers.
@pytest.mark.parametrize(
    ("kind", "loaders"),
    short_form(
        itertools.product((DistributedSampler, torch.utils.data.DistributedSampler), LOADERS),
        lambda kind, loaders: (kind is DistributedSampler) == (LOADERS.index(loaders) % 2 == 0),
    ),
)
def test_set_epoch_for_the_epoch_to_come(kind: Any, loaders: Any, tmp_path: Path) -> None:
    """The usual loop of several ranks, saved between two epochs or within one: the same crops."""
    before, after, at = loaders
    make_photos(tmp_path)

    def make(options: dict[str, Any]) -> tuple[Any, fastload.DataLoader[Any]]:
        dataset = fastload.ImageFolder(tmp_path.as_uri(), fastload.RandomResizedCrop(16, flip=0.5))
        sampler = kind(dataset, 2, 1)
        return sampler, fastload.DataLoader(
            dataset, batch_size=5, sampler=sampler, generator=seeded(), **options
        )

    def train(sampler: Any, run: Any, epochs: Any, last: int | None = None) -> list[Any]:
        found = []
        for epoch in epochs:
            sampler.set_epoch(epoch)
            found.append(digests(itertools.islice(run, last if epoch == epochs[-1] else None)))
        return found

    expected = train(*make(before), range(4))
    sampler, run = make(before)
    seen = train(sampler, run, range(2) if at is None else range(3), at)
    state = through_json(run.state_dict())
    torch.manual_seed(1234)
    sampler, resumed = make(after)
    resumed.load_state_dict(state)
    rest = train(sampler, resumed, range(2, 4))
    if at is not None:
        rest[0] = seen.pop() + rest[0]
    assert seen + rest == expected


@pytest.mark.parametrize("options", [{}, PERSISTENT], ids=str)
@pytest.mark.parametrize("kind", [torch.utils.data.DistributedSampler, DistributedSampler])
def test_set_epoch_and_a_dataset_with_a_state(kind: Any, options: dict[str, Any]) -> None:
    def make() -> tuple[Any, fastload.DataLoader[Any]]:
        sampler = kind(range(N), 2, 1)
        return sampler, loader(Remembering(), sampler=sampler, **options)

    def train(sampler: Any, run: Any, epochs: Any) -> list[Any]:
        found = []
        for epoch in epochs:
            sampler.set_epoch(epoch)
            found.append(list(run))
        return found

    expected = train(*make(), range(4))
    sampler, run = make()
    seen = train(sampler, run, range(2))
    state = through_json(run.state_dict())
    del run
    sampler, resumed = make()
    resumed.load_state_dict(state)
    assert seen + train(sampler, resumed, range(2, 4)) == expected


def test_a_sampler_of_ones_own_with_an_epoch() -> None:
    sampler = OwnEpoch()
    sampler.set_epoch(4)
    run = loader(sampler=sampler)
    expected = list(run)
    seen = list(itertools.islice(run, 3))
    resumed = loader(sampler=OwnEpoch())
    resumed.load_state_dict(through_json(run.state_dict()))
    assert seen + list(resumed) == expected


class Dynamic(OwnEpoch):
    """Batches whose number differs by epoch, as of batch samplers by duration."""

    def __len__(self) -> int:
        return 5 + self.epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(N).tensor_split(len(self)))


@pytest.mark.parametrize("epoch", [1, 3])
def test_length_that_depends_on_the_epoch_is_compared_in_that_epoch(epoch: int) -> None:
    run = loader(batch_sampler=Dynamic())
    run.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
    iterator = iter(run)
    next(iterator)
    resumed = loader(batch_sampler=Dynamic())
    resumed.load_state_dict(through_json(run.state_dict()))
    assert list(resumed) == list(iterator)


@pytest.mark.parametrize("shuffle", [True, False])
def test_whole_numbers_of_numpy_are_as_good_as_pythons(shuffle: bool) -> None:
    """In the state too, which goes through JSON here."""

    def make() -> tuple[Any, fastload.DataLoader[Any]]:
        sampler: Any = DistributedSampler(range(N), np.int64(2), np.int64(1), shuffle, seed=np.int64(5))  # type: ignore[arg-type]
        sampler.set_epoch(np.int64(3))
        return sampler, loader(sampler=sampler)

    _, run = make()
    iterator = iter(run)
    next(iterator)
    state, rest = through_json(run.state_dict()), list(iterator)
    sampler, resumed = make()
    resumed.load_state_dict(state)
    sampler.set_epoch(np.int64(3))
    assert list(resumed) == rest and resumed.state_dict()["epoch"] == 1


@pytest.mark.parametrize("seed", [-(1 << 63), (1 << 64) - 1])
@pytest.mark.parametrize("sampler", [False, True])
def test_largest_seeds_of_torch_are_taken(sampler: bool, seed: int) -> None:
    def make() -> fastload.DataLoader[Any]:
        order = {"sampler": DistributedSampler(range(N), 1, 0, seed=seed)} if sampler else {"shuffle": True}
        return loader(seed=seed, **order)

    run = make()
    list(run)
    iterator = iter(run)
    next(iterator)
    resumed = make()
    resumed.load_state_dict(through_json(run.state_dict()))
    assert list(resumed) == list(iterator)


# --- a state of another rank


class OfTheRank(Reversed):
    """Deals by rank, and has no state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(N)[int(os.environ["RANK"]) :: 2])


DRAWN = ["shuffle", "generator", "replacement", "weighted", "subset"]
FOR_ALL_RANKS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "seed": lambda: {"shuffle": True, "seed": 1},
    "list of batches": ORDERS["list of batches"],
    "custom": ORDERS["custom"],
}


def state_of_rank_0(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a run saves within an epoch; from then on this process is rank 1."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    run = loader(**options)
    next(iter(run))
    monkeypatch.setenv("RANK", "1")
    return through_json(run.state_dict())


@pytest.mark.parametrize("name", DRAWN)
def test_order_that_a_rank_drew_is_refused_on_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of_rank_0(ORDERS[name](), monkeypatch)
    resumed = loader(**ORDERS[name]())
    with pytest.raises(ArgumentError, match=r"saved on rank 0, this is rank 1.*each rank load the state"):
        resumed.load_state_dict(state)
    monkeypatch.setenv("RANK", "0")
    resumed.load_state_dict(state)


@pytest.mark.parametrize("name", FOR_ALL_RANKS)
def test_order_that_all_ranks_have_alike_is_resumed_on_each(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of_rank_0(FOR_ALL_RANKS[name](), monkeypatch)
    resumed = loader(**FOR_ALL_RANKS[name]())
    resumed.load_state_dict(state)
    assert list(resumed) == list(loader(**FOR_ALL_RANKS[name]()))[1:]


def test_sampler_that_deals_by_rank_is_told_whose_state_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of_rank_0({"sampler": OfTheRank()}, monkeypatch)
    resumed = loader(sampler=OfTheRank())
    resumed.load_state_dict(state)
    with pytest.raises(ArgumentError, match="each rank's own, load the state that this rank has saved"):
        iter(resumed)


# --- datasets with a state of their own


class Stream(IterableDataset[Any]):
    """Each worker has its part; the state is in the dataset, and counts passes."""

    def __init__(self, sizes: tuple[int, ...] = (20, 0, 11)) -> None:
        self.sizes = sizes
        self.i = self.passes = 0
        self.resume: int | None = None

    def part(self) -> range:
        info = get_worker_info()
        if info is None:
            return range(sum(self.sizes))
        start = sum(self.sizes[: info.id])
        return range(start, start + self.sizes[info.id])

    def __iter__(self) -> Iterator[Any]:
        self.i, self.resume = self.resume or 0, None
        for index in self.part()[self.i :]:
            self.i += 1
            yield index, self.passes
        self.i, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, int]:
        return {"i": self.i, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resume, self.passes, self.i = state["i"], state["passes"], state["i"]


class Cursor:
    def __init__(self, part: range) -> None:
        self.part, self.i = part, 0

    def __iter__(self) -> Cursor:
        return self

    def __next__(self) -> tuple[int, float]:
        if self.i == len(self.part):
            raise StopIteration
        self.i += 1
        return self.part[self.i - 1], torch.rand(()).item()

    def state_dict(self) -> dict[str, Any]:
        return {"i": self.i, "generator": torch.get_rng_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.i = state["i"]
        torch.set_rng_state(torch.tensor(state["generator"], dtype=torch.uint8))


class Cursors(Stream):
    """The state is in the iterator, and has the worker's random generator."""

    def __iter__(self) -> Iterator[Any]:
        return Cursor(self.part())  # type: ignore[return-value]

    state_dict = load_state_dict = None  # type: ignore[assignment]


class Plain(Stream):
    """No state at all."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(index, 0) for index in self.part()])

    state_dict = load_state_dict = None  # type: ignore[assignment]


@pytest.mark.parametrize(("batch_size", "workers"), [(4, 0), (None, 0), (4, 3)])
@pytest.mark.parametrize("kind", [Stream, Cursors, Plain])
def test_iterable(kind: type[Stream], batch_size: int | None, workers: int) -> None:
    def make() -> fastload.DataLoader[Any]:
        return loader(kind(), batch_size=batch_size, num_workers=workers)

    torch.manual_seed(7)
    run = make()
    batches, states = [], []
    iterator = iter(run)
    states.append(copy.deepcopy(run.state_dict()))
    for batch in iterator:
        batches.append(batch)
        states.append(copy.deepcopy(run.state_dict()))
    following = list(run)
    step = 4 if workers else 1 if batch_size else 5  # a start of three processes each; a state of a generator
    for state in [*states[:-1:step], states[-1]]:
        torch.manual_seed(1)
        resumed = make()
        resumed.load_state_dict(through_json(state))
        assert list(resumed) == batches[state["batches"] :]
        if kind is not Cursors and (not workers or state is states[step]):
            assert list(resumed) == following


def test_iterable_with_persistent_workers() -> None:
    def make() -> fastload.DataLoader[Any]:
        return loader(Stream((20, 11)), num_workers=2, persistent_workers=True)

    run = make()
    epochs = [list(run) for _ in range(3)]
    assert {passes for batch in epochs[2] for _, passes in batch} == {2}
    for at in (None, 0, 3):
        run = make()
        list(run)
        iterator = iter(run) if at is not None else None
        seen = list(itertools.islice(iterator, at)) if iterator is not None else []
        state = through_json(run.state_dict())
        del run, iterator
        resumed = make()
        resumed.load_state_dict(state)
        assert seen + list(resumed) == epochs[1], f"saved at {at}"
        assert list(resumed) == epochs[2]


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {}), ({"num_workers": 2, "persistent_workers": True}, {"num_workers": 2})],
    ids=["inline", "workers"],
)
@pytest.mark.parametrize("epoch", [0, 1])
def test_shuffled_data_pipe(before: dict[str, Any], after: dict[str, Any], epoch: int) -> None:
    def make(options: dict[str, Any]) -> fastload.DataLoader[Any]:
        pipe = IterableWrapper(list(range(N))).shuffle().sharding_filter()
        return loader(pipe, shuffle=True, **options)

    torch.manual_seed(7)
    run = make(before)
    for _ in range(epoch):
        list(run)
    iterator = iter(run)
    next(iterator)
    state, generator = through_json(run.state_dict()), torch.get_rng_state()
    rest, later = list(iterator), list(run)
    torch.set_rng_state(generator)
    resumed = make(after)
    resumed.load_state_dict(state)
    assert list(resumed) == rest
    assert torch.equal(torch.get_rng_state(), generator), "the epoch that is resumed draws nothing"
    assert list(resumed) == later


@pytest.mark.parametrize("own", [False, True], ids=["", "own generator"])
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str
)
def test_shuffled_data_pipe_resumed_between_epochs(options: dict[str, Any], own: bool) -> None:
    def make(seed: int) -> fastload.DataLoader[Any]:
        pipe = IterableWrapper(list(range(N))).shuffle().sharding_filter()
        generator = torch.Generator().manual_seed(seed) if own else None
        return loader(pipe, shuffle=True, generator=generator, **options)

    torch.manual_seed(7)
    run = make(1)
    list(run)
    state, generator = through_json(run.state_dict()), torch.get_rng_state()
    later, at_the_end = [list(run) for _ in range(3)], torch.get_rng_state()
    torch.set_rng_state(generator)
    resumed = make(2)
    resumed.load_state_dict(state)
    assert [list(resumed) for _ in range(3)] == later
    assert torch.equal(torch.get_rng_state(), at_the_end)


def test_data_pipe_resumed_without_persistent_workers_shuffles_each_epoch() -> None:
    def make(**options: Any) -> fastload.DataLoader[Any]:
        return loader(IterableWrapper(list(range(N))).shuffle(), shuffle=True, **options)

    run = make(num_workers=1, persistent_workers=True)
    list(run)
    resumed = make()
    resumed.load_state_dict(run.state_dict())
    assert list(resumed) != list(resumed)


class Mixed(Plain):
    """Its order is drawn from Python's generator."""

    def __iter__(self) -> Iterator[Any]:
        samples = list(super().__iter__())
        random.shuffle(samples)
        return iter(samples)


@pytest.mark.parametrize(
    ("kind", "workers", "epoch", "warned"),
    [
        (Mixed, 0, 0, True),
        (Mixed, 2, 1, True),
        (Mixed, 2, 0, False),
        (Plain, 0, 1, False),
        (Plain, 2, 1, False),
    ],
)
def test_iterable_whose_order_no_state_knows(
    kind: type[Plain], workers: int, epoch: int, warned: bool
) -> None:
    def make() -> fastload.DataLoader[Any]:
        return loader(kind((17, 14)), num_workers=workers, persistent_workers=workers > 0)

    run = make()
    for _ in range(epoch):
        list(run)
    iterator = iter(run)
    next(iterator)
    resumed = make()
    resumed.load_state_dict(run.state_dict())
    # A warning is an error in these tests, in the workers too.
    message = "Mixed draws from the process-wide generators"
    with pytest.raises(UserWarning, match=message) if warned else contextlib.nullcontext():
        assert list(resumed) == list(iterator)


class Remembering(Ids):
    """Map-style, with a state that every sample changes."""

    total = 0

    def __getitem__(self, index: int) -> Any:
        self.total += index
        return index, self.total

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total = state["total"]


@pytest.mark.parametrize("workers", [0, 2])
def test_map_style_with_a_state(workers: int) -> None:
    run = loader(Remembering(), num_workers=workers)
    expected = list(run)
    run = loader(Remembering(), num_workers=workers)
    iterator = iter(run)
    seen = list(itertools.islice(iterator, 3))
    state = through_json(run.state_dict())
    del iterator
    resumed = loader(Remembering(), num_workers=workers)
    resumed.load_state_dict(state)
    assert seen + list(resumed) == expected
    if workers:
        with pytest.raises(ArgumentError, match=r"num_workers 2.*has 3.*as many workers"):
            loader(Remembering(), num_workers=3).load_state_dict(state)


class Refusing(Remembering):
    """Says that it cannot read one of the batches, before any of its samples is made."""

    def prefetch(self, indices: list[int]) -> None:
        if 12 in indices:
            raise OSError("sample 12 cannot be read")


def test_batch_that_is_not_begun_leaves_the_datasets_state() -> None:
    run = loader(Refusing(), num_workers=1)
    iterator = iter(run)
    next(iterator), next(iterator)
    with pytest.raises(OSError, match="sample 12"):
        next(iterator)
    state, rest = through_json(run.state_dict()), list(iterator)
    resumed = loader(Refusing(), num_workers=1)
    resumed.load_state_dict(state)
    assert list(resumed) == rest


class Live(Remembering):
    """Its state is the dict that it goes on changing."""

    def state_dict(self) -> Any:
        return self.__dict__

    def load_state_dict(self, state: Any) -> None:
        self.__dict__.update(state)


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [
        # They had read ahead when the user left, which moved their generators: only they know how far.
        (lambda: Cursors((20, 11)), 2),
        # A worker that sent its state later than it asked for it sent that after its first batch.
        (Live, 1),
    ],
)
def test_persistent_workers_that_ran_on_after_a_break(dataset: Any, workers: int) -> None:
    def make() -> fastload.DataLoader[Any]:
        return loader(dataset(), num_workers=workers, persistent_workers=True)

    run = make()
    assert len(list(itertools.islice(run, 1))) == 1
    iterator = iter(run)
    state = through_json(run.state_dict())
    expected = list(iterator)
    resumed = make()
    resumed.load_state_dict(state)
    assert list(resumed) == expected


class Unsent(Remembering):
    def __init__(self, total: Callable[[], Any]) -> None:
        super().__init__()
        self.made = total

    def state_dict(self) -> Any:
        return {"total": self.made() if self.total else 0}


def refuse() -> int:
    raise ValueError("the total is not known")


@pytest.mark.parametrize(
    ("total", "text"), [(refuse, "the total is not known"), (lambda: refuse.__code__, "cannot be pickled")]
)
def test_state_that_a_worker_cannot_send_is_an_error(total: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"(?s)DataLoader worker process 0.*{text}"):
        list(loader(Unsent(total), num_workers=1))


# --- the state itself


def test_small_and_plain_for_a_million_samples() -> None:
    run = loader(Ids(1_000_000), shuffle=True, batch_size=256)
    list(itertools.islice(run, 3))
    assert len(json.dumps(run.state_dict())) < 2000
    for name in ORDERS:
        run = with_order(name)()
        next(iter(run))
        state = run.state_dict()
        assert len(json.dumps(state)) < 20_000
        assert state == through_json(state), "no tuples, no keys that are not strings"


def test_a_loader_still_pickles() -> None:
    run = loader(shuffle=True)
    list(itertools.islice(run, 3))
    other = pickle.loads(pickle.dumps(run))
    assert other.state_dict() == run.state_dict()


def test_a_resume_that_fails_can_be_tried_again() -> None:
    run = loader(num_workers=1)
    list(itertools.islice(run, 3))
    resumed = loader(num_workers=1, multiprocessing_context="fork")
    resumed.load_state_dict(run.state_dict())
    resumed.prefetch_factor = None
    with pytest.raises(AssertionError):
        iter(resumed)
    resumed.prefetch_factor = 2
    assert list(resumed) == list(loader())[3:]


class Reluctant(Remembering):
    """Its state is loaded at the second try."""

    tries = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.tries += 1
        if self.tries == 1:
            raise OSError("the state is away")
        super().load_state_dict(state)


def test_state_that_a_dataset_refuses_once_can_be_tried_again() -> None:
    run = loader(Reluctant())
    iterator = iter(run)
    next(iterator)
    resumed = loader(Reluctant())
    resumed.load_state_dict(run.state_dict())
    with pytest.raises(OSError, match="away"):
        iter(resumed)
    assert list(resumed) == list(iterator)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    ("kind", "is_set"),
    [
        (DistributedSampler, False),
        (DistributedSampler, True),
        (Backwards, False),
        (torch.utils.data.DistributedSampler, True),
    ],
)
def test_resume_that_is_interrupted_after_indices_were_drawn_can_be_tried_again(
    kind: Any, is_set: bool, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> fastload.DataLoader[Any]:
        return loader(sampler=kind(range(N), 2, 0), num_workers=1)

    run = make()
    list(run)
    if is_set:
        run.sampler.set_epoch(1)  # type: ignore[attr-defined]
    state, iterator = run.state_dict(), iter(run)
    if at:
        list(itertools.islice(iterator, at))
        state = run.state_dict()
    rest = list(iterator)
    resumed = make()
    resumed.load_state_dict(through_json(state))
    if is_set:
        resumed.sampler.set_epoch(1)  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcesses, "submit", at_call(2, WorkerProcesses.submit, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            iter(resumed)
    assert list(resumed) == rest


class Flaky(Plain):
    """Its store fails once."""

    fails = False

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if self.fails:
                self.fails = False
                raise OSError("the store is away")
            yield sample


def test_a_resume_that_fails_while_it_passes_over_samples_can_be_tried_again() -> None:
    run = loader(Flaky())
    iterator = iter(run)
    next(iterator)
    resumed = loader(Flaky())
    resumed.load_state_dict(run.state_dict())
    resumed.dataset.fails = True  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="away"):
        iter(resumed)
    assert list(resumed) == list(iterator)


class Cracked(Plain):
    """One of its records is bad."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if sample[0] == 12:
                raise ValueError("record 12")
            yield sample


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_that_raised_goes_on_as_it_did(workers: int) -> None:
    def rest(iterator: Iterator[Any]) -> list[Any]:
        batches: list[Any] = []
        while len(batches) < 10:
            try:
                batches += [next(iterator, None)]
            except ValueError:
                batches += ["error"]
        return batches

    run = loader(Cracked((17, 14)), num_workers=workers)
    iterator = iter(run)
    with pytest.raises(ValueError, match="record 12"):
        list(iterator)
    resumed = loader(Cracked((17, 14)), num_workers=workers)
    resumed.load_state_dict(through_json(run.state_dict()))
    assert rest(iter(resumed)) == rest(iterator)


@pytest.mark.parametrize(
    ("saved", "other", "message"),
    [
        ({}, {"dataset": Ids(38)}, r"length 37, this loader has 38"),
        ({}, {"dataset": Plain()}, r"dataset 'map-style', this loader has 'iterable'"),
        ({}, {"batch_size": 6}, r"batch_size 5, this loader has 6"),
        ({}, {"shuffle": True}, r"'SequentialSampler'\], this loader has \['BatchSampler', 'RandomSampler'"),
        ({"seed": 1}, {"seed": 2}, r"seed 1, this loader has 2"),
        (
            {"generator": seeded()},
            {},
            r"generators of \['loader'\], this loader was given those of \[\]",
        ),
        (
            {"dataset": Stream(), "num_workers": 3},
            {"dataset": Stream(), "num_workers": 2},
            r"num_workers 3.*has 2",
        ),
        ({"dataset": Plain()}, {"dataset": Plain(), "batch_size": 6}, r"batch_size 5, this loader has 6"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_states_that_do_not_fit(saved: dict[str, Any], other: dict[str, Any], message: str) -> None:
    run = loader(**saved)
    list(itertools.islice(run, 2))
    resumed = loader(**other)
    with pytest.raises(ArgumentError, match=message):
        resumed.load_state_dict(run.state_dict())
    assert resumed.state_dict()["batches"] == 0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([], "must be a dict, found list"),
        ({}, "version None"),
        ({"version": 99}, "version 99"),
        ({"version": 1}, "version 1"),
        ({"version": 2}, "lacks .*batches"),
    ],
    ids=str,
)
def test_no_states_at_all(state: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        loader().load_state_dict(state)


@pytest.mark.parametrize("seed", [{}, "1", 1.5, True, -1, 1 << 63, None], ids=repr)
def test_seeds_that_torch_does_not_draw_are_refused(seed: Any) -> None:
    run = loader()
    between = run.state_dict()
    next(iter(run))
    states = [run.state_dict() | {"base_seed": seed}]
    if seed is not None:
        states += [between | {"base_seed": seed}]
        states += [between | {"coming": between["coming"] | {"base_seed": seed}}]
    for state in states:
        with pytest.raises(ArgumentError, match="state_dict is damaged, or a newer fastload wrote it"):
            loader().load_state_dict(state)


def test_state_with_a_damaged_digest_is_refused_and_changes_nothing() -> None:
    run = loader()
    next(iter(run))
    state = through_json(run.state_dict())
    state["digest"]["sums"][0] = "none"
    resumed = loader()
    with pytest.raises(ArgumentError, match="state_dict is damaged, or a newer fastload wrote it"):
        resumed.load_state_dict(state)
    assert list(resumed) == list(loader())


# --- samplers that draw all their order in iter() ---------------------------------------------------------


class Eager(Sampler[list[int]]):
    """A batch sampler without a state that draws its whole order at once."""

    batch_size = 3

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        drawn = torch.randperm(12, generator=self.generator)
        return iter(drawn.view(-1, 3).tolist())


def eager(seed: int, num_workers: int, *, own: bool = True, persistent: bool = False) -> Any:
    generator = torch.Generator().manual_seed(seed) if own else None
    return fastload.DataLoader(
        Ids(12),
        batch_sampler=Eager(generator),
        num_workers=num_workers,
        persistent_workers=persistent,
        collate_fn=identity,
    )


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("taken", [0, 2])
def test_eager_sampler_with_its_own_generator_resumes_in_the_same_order(num_workers: int, taken: int) -> None:
    loader = eager(1, num_workers)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    state = loader.state_dict()
    rest = [list(batches), list(loader)]
    resumed = eager(2, num_workers)
    resumed.load_state_dict(state)
    assert [list(resumed), list(resumed)] == rest


class CountsItself(Eager):
    """Has another order in each epoch, which it counts as soon as iter() is called."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        self.generator = None
        drawn = torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch))
        self.epoch += 1
        return iter(drawn.view(-1, 3).tolist())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_eager_sampler_that_counts_epochs_goes_on_counting(num_workers: int) -> None:
    def make() -> fastload.DataLoader[Any]:
        return loader(Ids(12), batch_sampler=CountsItself(None), num_workers=num_workers)

    run = make()
    list(run)
    batches = iter(run)
    next(batches)
    state = through_json(run.state_dict())
    resumed = make()
    resumed.load_state_dict(state)
    assert [list(resumed), list(resumed)] == [list(batches), list(run)]


class Drawing(Reversed):
    """Draws with every index from a generator, which may be the loader's too."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        for _ in range(N):
            yield int(torch.randint(N, (), generator=self.generator))


@pytest.mark.parametrize("workers", [(0, 2, 2), (2, 0, 0), (0, 0, 2)], ids=str)
def test_lazy_sampler_of_the_loaders_generator_is_resumed_twice(workers: tuple[int, int, int]) -> None:
    def make(num_workers: int) -> fastload.DataLoader[Any]:
        generator = seeded()
        return loader(sampler=Drawing(generator), generator=generator, num_workers=num_workers)

    whole, seen, state = list(make(workers[0])), [], None
    for number, num_workers in enumerate(workers):
        run = make(num_workers)
        if state is not None:
            run.load_state_dict(state)
        iterator = iter(run)
        seen += list(itertools.islice(iterator, 2 if number < 2 else None))
        if number < 2:
            assert run.batch_at(2 * number + 1) == seen[-1]
        state = through_json(run.state_dict())
        del iterator
    assert seen == whole


@pytest.mark.parametrize("own", [True, False])
def test_state_of_persistent_workers_resumed_without_workers_shuffles_each_epoch(own: bool) -> None:
    loader = eager(1, 1, own=own, persistent=True)
    list(loader)
    resumed = eager(1, 0, own=own)
    resumed.load_state_dict(loader.state_dict())
    epochs = [str(list(resumed)) for _ in range(3)]
    assert len(set(epochs)) == 3


def test_iterator_that_a_subclass_wraps_is_returned() -> None:
    class Wrapping(fastload.DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return map(str, super()._get_iterator())

    assert list(Wrapping(Ids(3), collate_fn=identity)) == ["[0]", "[1]", "[2]"]
    run = Wrapping(Plain(), 5, collate_fn=identity)
    iterator = iter(run)
    next(iterator)
    resumed = Wrapping(Plain(), 5, collate_fn=identity)
    resumed.load_state_dict(run.state_dict())
    assert list(resumed) == list(iterator)
