"""What is left out: the rows that are named change, and nothing else, whatever was made ahead."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, RandomSampler, Subset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

import fastload
from fastload import DistributedSampler, Mixture, MixtureSampler, ObjectDataset
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError
from fastload.loader.resume import reading_of
from fastload.order.exclusions import Filter
from tests.loaderdata import Numbers, Stream, identity, through_json
from tests.patience import wait_until

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

N = 43
SIZE = 4
STEPS = -(-N // SIZE)
Batch = list[tuple[int, float]]
Loader = fastload.DataLoader[Any]


def noisy(index: int) -> tuple[int, float]:
    """A sample, and what stands for its augmentation."""
    return index, torch.rand(()).item()


def loader(dataset: Any = None, **options: Any) -> Loader:
    options = {"batch_size": SIZE, "shuffle": True, "seed": 5, "collate_fn": identity} | options
    if options.get("sampler") is not None or options.get("batch_sampler") is not None:
        del options["shuffle"]
    if options.get("batch_sampler") is not None:
        del options["batch_size"]
    return fastload.DataLoader(Numbers(N, noisy) if dataset is None else dataset, **options)


def run(one: Loader, epochs: int = 2) -> list[list[Any]]:
    return [list(one) for _ in range(epochs)]


def undisturbed(epochs: int = 2, **options: Any) -> list[list[Any]]:
    torch.manual_seed(1)
    return run(loader(**options), epochs)


def begun(**options: Any) -> Loader:
    """A loader whose epochs are those of `undisturbed`."""
    torch.manual_seed(1)
    return loader(**options)


def check(found: Batch, expected: Batch, excluded: set[int]) -> int:
    """Only the rows of excluded samples differ. Returns how many."""
    assert len(found) == len(expected)
    for (index, noise), (old, old_noise) in zip(found, expected, strict=True):
        assert index not in excluded
        if old in excluded:
            assert noise != old_noise, "a substitute has its own augmentation"
        else:
            assert (index, noise) == (old, old_noise)
    return sum(old in excluded for old, _ in expected)


WORKERS = [0, 2]


# --- exclude


@pytest.mark.parametrize("workers", WORKERS)
def test_exclude_in_the_middle_changes_the_named_rows_from_the_next_batch_on(workers: int) -> None:
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    expected = undisturbed(**options)
    excluded = {expected[0][4][1][0], expected[0][9][0][0], expected[0][1][0][0], expected[0][0][2][0]}
    one = begun(**options)
    changed = 0
    for epoch in range(2):
        for step, batch in enumerate(one):
            changed += check(batch, expected[epoch][step], excluded if (epoch, step) > (0, 3) else set())
            if (epoch, step) == (0, 3):
                one.exclude(excluded)
        assert step == STEPS - 1
    assert changed == 6
    assert one.stats()["counters"]["left_out.samples"] == 6


def test_exclude_gives_the_same_batches_with_any_number_of_workers() -> None:
    found = []
    for workers in (0, 2, 3):
        one = begun(num_workers=workers)
        batches = []
        for batch in one:
            batches.append(batch)
            if len(batches) == 3:
                one.exclude(range(10, 20))
        found.append(batches)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("workers", WORKERS)
def test_exclude_and_skip_survive_two_resumes_in_an_epoch(workers: int) -> None:
    expected = undisturbed(num_workers=0)
    excluded = {expected[0][6][0][0], expected[0][10][1][0], expected[0][2][0][0]}
    one = begun(num_workers=workers)
    found: list[Any] = []
    iterator = iter(one)
    found += itertools.islice(iterator, 3)
    one.exclude(excluded)
    one.skip([5, 7])
    for number in (2, 2):
        found += itertools.islice(iterator, number)
        state = through_json(one.state_dict())
        torch.manual_seed(1)
        one = loader(num_workers=2 - workers)
        one.load_state_dict(state)
        assert one.state_dict() == state
        iterator = iter(one)
    found += iterator
    steps = [step for step in range(STEPS) if step not in (5, 7)]
    assert len(found) == len(steps)
    for step, batch in zip(steps, found, strict=True):
        check(batch, expected[0][step], excluded if step > 2 else set())
    assert len(list(one)) == STEPS  # the next epoch is whole
    assert not excluded & {index for batch in one for index, _ in batch}


def test_excluded_substitute_is_replaced_by_the_next_one_in_flight_too() -> None:
    expected = undisturbed(num_workers=2)
    row = expected[0][8][0][0]
    torch.manual_seed(1)
    first = loader(num_workers=2)
    first.exclude(row)
    stand_in = list(first)[8][0][0]
    one = begun(num_workers=2)
    batches = []
    for step, batch in enumerate(one):
        batches.append(batch)
        if step == 1:
            one.exclude(row)
        if step == 4:
            one.exclude(stand_in)
    assert batches[8][0][0] not in (row, stand_in)
    later = {index for batch in batches[5:] for index, _ in batch}
    assert not later & {row, stand_in}


@pytest.mark.parametrize("workers", WORKERS)
def test_bad_samples_are_not_replaced_by_excluded_ones(workers: int, tmp_path: Path) -> None:
    def make(index: int) -> int:
        (made / str(index)).touch()
        if index % 3 == 0:
            raise ValueError("bad")
        return index

    made = tmp_path
    options = {"dataset": Numbers(N, make), "on_error": "replace", "num_workers": workers}
    expected = undisturbed(1, **options)[0]
    plain = undisturbed(1, dataset=Numbers(N))[0]
    # What stands in for bad samples of steps 4 and 5, which are made ahead.
    excluded = set(expected[4] + expected[5]) - set(plain[4] + plain[5])
    assert excluded
    made = tmp_path / "again"
    made.mkdir()
    one = begun(**options)
    found = []
    for step, batch in enumerate(one):
        found.append(batch)
        if step == 2:
            if workers:
                wait_until(
                    lambda: all((made / str(index)).exists() for index in expected[5]), "step 5 is made"
                )
            one.exclude(excluded)
    assert found[:3] == expected[:3]
    for batch in found[3:]:
        assert not excluded & set(batch)
    assert len(found) == STEPS


def test_batches_out_of_order_obey_the_rules_too() -> None:
    expected = undisturbed(1, num_workers=2)[0]
    where = {batch[0]: step for step, batch in enumerate(expected)}
    excluded = {batch[1][0] for batch in expected}
    one = begun(num_workers=2, in_order=False)
    iterator = iter(one)
    early = list(itertools.islice(iterator, 3))
    one.exclude(excluded)
    one.skip([STEPS - 1])
    late = list(iterator)
    assert sorted(where[batch[0]] for batch in early + late) == list(range(STEPS - 1))
    assert all(batch in expected for batch in early)
    assert sum(check(batch, expected[where[batch[0]]], excluded) for batch in late) == STEPS - 1 - 3


@pytest.mark.parametrize("workers", WORKERS)
def test_device_path_hands_out_no_batch_that_was_started_before_the_rules_changed(workers: int) -> None:
    options = {"collate_fn": None, "device": "cpu", "batch_transform": torch.neg, "num_workers": workers}
    expected = undisturbed(1, dataset=Numbers(N), **options)[0]
    one = begun(dataset=Numbers(N), **options)
    found = []
    for batch in one:
        found.append(batch.tolist())
        if len(found) == 2:
            one.exclude(-expected[2][0])
            one.exclude(-expected[3][0])
            one.skip(4)
    assert len(found) == STEPS - 1
    for step, batch in zip([*range(4), *range(5, STEPS)], found, strict=True):
        old = expected[step].tolist()
        assert [a == b for a, b in zip(batch, old, strict=True)] == [
            step not in (2, 3) or row > 0 for row in range(len(old))
        ]


def test_every_kind_of_dataset_and_sampler_takes_exclusions() -> None:
    numbers = Numbers(N)
    whole = [
        loader(numbers, batch_size=None, collate_fn=None),
        loader(Subset(numbers, range(N)), sampler=RandomSampler(numbers)),
        loader(ConcatDataset([Numbers(20), Numbers(N - 20, partial(int.__add__, 20))])),
        loader(numbers, batch_sampler=BatchSampler(RandomSampler(numbers), SIZE, False)),
        loader(numbers, batch_sampler=Sizes()),
    ]
    for one in whole:
        one.exclude(torch.tensor([3, 25]))
        found = [index for batch in one for index in (batch if isinstance(batch, list) else [batch])]
        assert len(found) == N
        assert set(found) == set(range(N)) - {3, 25}


class Sizes:
    """Batches of 1, 2, 3, ... samples, as tensors."""

    def __iter__(self) -> Iterator[Any]:
        at = 0
        for size in itertools.count(1):
            if at >= N:
                return
            yield torch.arange(at, min(at + size, N))
            at += size


def test_keys_are_found_in_objects_and_what_wraps_them(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number:02}").write_bytes(bytes([number]))
    dataset = ObjectDataset(str(tmp_path), decode=first)
    one = loader(dataset)
    one.exclude(["03", "07", 9])
    assert set(itertools.chain(*one)) == set(range(12)) - {3, 7, 9}
    subset = loader(Subset(dataset, [5, 7, 3, 7]))
    subset.exclude("07")
    assert set(itertools.chain(*subset)) == {3, 5}
    joined = loader(ConcatDataset([dataset, dataset]))
    joined.exclude(dataset.key(number) for number in range(6))
    assert set(itertools.chain(*joined)) == set(range(6, 12))
    mapped = loader(fastload.map(dataset, bin))
    mapped.exclude("11")
    assert "0b1011" not in set(itertools.chain(*mapped))
    with pytest.raises(ArgumentError, match="'nothing', which no sample of the dataset has: check"):
        one.exclude(["03", "nothing"])


def test_key_is_found_among_others_like_it_and_where_it_stands_twice(tmp_path: Path) -> None:
    names = ["a", "é", "aa", *(f"{one}/the same end of twenty-four bytes" for one in "xyz"), "z" * 90]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    objects = ObjectDataset(str(tmp_path), keys=[*names, "a"])
    assert view_of(objects).find({"a", "b", names[4], "é"}) == {"a": [0, 7], names[4]: [4], "é": [1]}


def first(payload: bytes) -> int:
    return payload[0]


# --- skip


@pytest.mark.parametrize("workers", WORKERS)
def test_skipped_steps_are_not_handed_out_and_others_stay(workers: int) -> None:
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    expected = undisturbed(3, **options)
    one = begun(**options)
    one.skip([0, 6])
    one.skip(range(2, 4), epoch=1)
    found: list[list[Any]] = []
    for _ in range(3):
        found.append([])
        for batch in one:
            found[-1].append(batch)
            if len(found) == 1 and len(found[0]) == 2:  # steps 1 and 2
                one.skip([3, 4, STEPS - 1])
                assert one.state_dict()["batches"] == 3
            if len(found) == 3 and len(found[2]) == 1:
                one.skip(range(1, STEPS))
    assert found[0] == [expected[0][step] for step in (1, 2, 5, 7, 8, 9)]
    assert found[1] == [expected[1][step] for step in range(STEPS) if step not in (2, 3)]
    assert found[2] == expected[2][:1]
    assert one.stats()["counters"]["left_out.steps"] == 5 + 2 + STEPS - 1


def test_epoch_of_which_all_is_skipped_ends_at_once_and_the_next_one_is_whole() -> None:
    expected = undisturbed(2)
    one = begun()
    one.skip(range(STEPS))
    assert list(one) == []
    assert not one.state_dict()["begun"]
    assert list(one) == expected[1]


# --- other numbers of ranks, and batch sizes


class Ranks:
    """Loaders of all ranks, in step."""

    def __init__(self, ranks: int, size: int, state: Any = None, length: int = 120, **options: Any) -> None:
        self.loaders = []
        for rank in range(ranks):
            data = Numbers(length, noisy)
            sampler = DistributedSampler(data, ranks, rank, seed=3)
            self.loaders.append(loader(data, sampler=sampler, batch_size=size, **options))
            if state is not None:
                self.loaders[-1].load_state_dict(state)
        self.iterators = [iter(one) for one in self.loaders]
        self.size = size

    def take(self, steps: int | None = None) -> list[tuple[int, float]]:
        """The samples of the next steps, in the order of the epoch."""
        found: list[Any] = []
        for step in itertools.count():
            if step == steps:
                return found
            batches = [next(iterator, None) for iterator in self.iterators]
            if batches[0] is None:
                assert not any(batches)
                return found
            found += itertools.chain(*zip(*batches, strict=True))
        return found

    def both(self, what: str, *arguments: Any) -> None:
        for one in self.loaders:
            getattr(one, what)(*arguments)

    def state(self) -> Any:
        states = [through_json(one.state_dict()) for one in self.loaders]
        assert all(state["exclusions"] == states[0]["exclusions"] for state in states)
        return states[0]


@pytest.mark.parametrize("workers", WORKERS)
def test_skip_and_exclude_hold_for_other_numbers_of_ranks_and_batch_sizes(workers: int) -> None:
    order = Ranks(1, 10).take()
    ranks = Ranks(2, 5, num_workers=workers)
    excluded = {order[45][0], order[75][0], order[100][0], order[12][0]}
    found = ranks.take(3)
    ranks.both("exclude", excluded)
    ranks.both("skip", [4, 7, 8])  # samples 40 to 50 and 70 to 90
    assert ranks.take(1) == order[30:40]
    exclusions = ranks.loaders[0]._context.exclusions
    assert [bool(exclusions.samples_at(0, step)) for step in (2, 3)] == [False, True]
    # Steps of 8 samples: that of 24 was handed out before, that of 32 was not.
    reading = reading_of(ranks.loaders[0], 0, 0, ranks.loaders[0]._context.history.find(0))
    assert [bool(Filter(exclusions, reading, step, 8).samples) for step in (3, 4)] == [False, True]
    ranks = Ranks(1, 8, ranks.state(), num_workers=workers)
    # steps of 8 from sample 40 on: 40 to 48 is skipped, of 48 to 56 the samples 48 and 49 were
    batch = ranks.take(1)
    assert batch[2:] == order[50:56]
    assert not {index for index, _ in order[48:50]} & {index for index, _ in batch[:2]}
    assert ranks.loaders[0].state_dict()["batches"] == 6
    ranks.both("skip", [7])  # 64 to 72
    assert ranks.take(1) == order[56:64]
    ranks = Ranks(4, 2, ranks.state(), num_workers=workers)
    # 64 to 88 is skipped, and of 88 to 96 the samples 88 and 89
    batch = ranks.take(1)
    assert batch[2:] == order[90:96]
    rest = ranks.take()
    assert [a == b for a, b in zip(rest, order[96:], strict=True)] == [
        index not in excluded for index, _ in order[96:]
    ]
    assert len(found) == 30


def test_skipped_samples_of_torchs_sampler_stay_away_on_each_other_rank() -> None:
    data = Numbers(32)

    def on(rank: int, ranks: int, size: int) -> Any:
        sampler = TorchDistributedSampler(data, ranks, rank, shuffle=False)
        return loader(data, sampler=sampler, batch_size=size)

    one = on(0, 1, 8)
    list(one)
    one.skip(1, epoch=1)  # samples 8 to 16
    for rank in range(2):
        other = on(rank, 2, 3)
        other.load_state_dict(one.state_dict())
        found = [index for batch in other for index in batch]
        assert [at for at, index in enumerate(found) if index != 2 * at + rank] == [4, 5, 6, 7]


def test_last_step_that_is_not_full_stays_skipped_with_fewer_ranks() -> None:
    order = Ranks(1, 10, length=90).take()
    ranks = Ranks(1, 10, length=90)
    assert ranks.take(4) == order[:40]
    ranks.both("skip", [8])
    ranks = Ranks(4, 10, ranks.state(), length=90)
    assert ranks.take() == order[40:80]


def test_mixture_keeps_exclusions_in_every_pass_and_with_other_ranks_and_sources() -> None:
    def mixture(*names: str) -> Mixture:
        lengths = {"a": 11, "b": 5, "new": 3}
        sources = {name: Numbers(lengths[name], partial(named, name)) for name in names}
        return Mixture(sources, dict.fromkeys(names, 1), num_samples=60)

    def of(data: Mixture, rank: int, ranks: int, state: Any = None) -> Loader:
        sampler = MixtureSampler(data, ranks, rank, seed=2)
        one = loader(data, sampler=sampler, batch_size=6 // ranks)
        if state is not None:
            one.load_state_dict(state)
        return one

    plain = list(itertools.chain(*of(mixture("a", "b"), 0, 1)))
    one = of(mixture("a", "b"), 0, 1)
    one.exclude([2, 11 + 4])  # "a" 2 and "b" 4
    one.skip(3)
    iterator = iter(one)
    found = list(itertools.islice(iterator, 2))
    state = through_json(one.state_dict())
    found = list(itertools.chain(*found, *iterator))
    expected = plain[:18] + plain[24:]
    assert [a == b for a, b in zip(found, expected, strict=True)] == [
        sample[:2] not in (("a", 2), ("b", 4)) for sample in expected
    ]
    assert all(a[0] == b[0] for a, b in zip(found, expected, strict=True)), "a substitute is of its source"
    halves = [list(of(mixture("a", "b"), rank, 2, state)) for rank in range(2)]
    rest = [pair for both in zip(*halves, strict=True) for rows in zip(*both, strict=True) for pair in rows]
    assert rest == found[12:]
    others = of(mixture("new", "a", "b"), 0, 1, state)
    seen = {sample[:2] for _ in range(3) for batch in others for sample in batch}
    assert not seen & {("a", 2), ("b", 4)}
    assert len(seen) == 19 - 2
    with pytest.raises(ArgumentError, match=r"all 5 samples of source 'b'.*weight 0"):
        one.exclude(range(11, 16))


def named(name: str, index: int) -> tuple[str, int, float]:
    return name, index, torch.rand(()).item()


# --- states, and errors


def test_loaded_state_replaces_the_rules_and_says_what_is_lost() -> None:
    state = through_json(loader().state_dict())
    assert state["exclusions"] == {}
    one = loader()
    one.exclude(3)
    with pytest.warns(UserWarning, match=r"1 excluded samples are not in the state.*exclude\(\) after it"):
        one.load_state_dict(state)
    assert 3 in {index for batch in one for index, _ in batch}
    state["exclusions"] = {"excluded": [{"from": 1}], "skipped": []}
    with pytest.raises(ArgumentError, match="is damaged"):
        one.load_state_dict(state)


def test_state_is_loaded_whole_where_the_warning_of_lost_rules_is_an_error() -> None:
    saved = loader()
    next(iter(saved))
    one = loader()
    one.exclude(3)
    with pytest.raises(UserWarning, match="excluded samples are not in the state"):
        one.load_state_dict(saved.state_dict())
    assert one.state_dict() == saved.state_dict()


def test_state_of_many_skipped_steps_and_samples_is_small() -> None:
    one = loader(Numbers(100_000))
    one.exclude(range(1_000, 50_000))
    one.skip(range(100, 20_000))
    assert len(json.dumps(one.state_dict()["exclusions"])) < 200


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda one: one.exclude(N), f"the index {N}, and the dataset has {N} samples"),
        (lambda one: one.exclude([1, -1]), "found -1"),
        (lambda one: one.exclude(2.5), "found 2.5"),
        (lambda one: one.exclude(b"a"), "found b'a'"),
        (lambda one: one.exclude("a.jpg"), "'a.jpg', which no .* have no keys: pass indices"),
        (lambda one: one.exclude(range(N)), f"all {N} samples, so that none"),
        (lambda one: one.skip(-1), "found -1"),
        (lambda one: one.skip(["a"]), "found 'a'"),
        (lambda one: one.skip(STEPS), f"steps 0 to {STEPS - 1}, found step {STEPS}"),
        (lambda one: one.skip([1, 5]), "step 1 of epoch 1 was delivered already: the next one is step 2"),
        (lambda one: one.skip(5, epoch=0), "epoch 0 is over: epoch 1"),
        (lambda one: one.skip(5, epoch=-2), "epoch must be .* found -2"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(call: Any, message: str) -> None:
    expected = undisturbed(2)
    one = begun()
    assert list(one) == expected[0]
    iterator = iter(one)
    found = list(itertools.islice(iterator, 2))
    with pytest.raises(ArgumentError, match=message):
        call(one)
    assert found + list(iterator) == expected[1]


def test_samples_without_an_index_are_refused_with_advice() -> None:
    with pytest.raises(ArgumentError, match="Stream is iterable"):
        fastload.DataLoader(Stream([3])).exclude(1)
    one = loader({"a": 1, "b": 2}, sampler=["a", "b"], batch_size=1)
    one.exclude(1)
    with pytest.raises(ArgumentError, match="a whole number, and the sampler gives 'a'"):
        list(one)


def test_dataset_with_a_state_takes_rules_between_epochs_only_where_workers_run_ahead() -> None:
    one = loader(Counting(N), num_workers=1)
    iterator = iter(one)
    next(iterator)
    with pytest.raises(ArgumentError, match="exclude cannot be called within an epoch where workers"):
        one.exclude(1)
    list(iterator)
    one.exclude(1)
    assert 1 not in set(itertools.chain(*one))


class Counting(Numbers):
    """Has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass
