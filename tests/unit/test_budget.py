"""Batches by a budget, beside an oracle that makes them slowly: one sample, one batch, one rank at a time."""

from __future__ import annotations

import itertools
import math
import pickle
import random
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from fastload import BudgetSampler, DataLoader
from fastload.errors import ArgumentError
from fastload.order.budget_batches import best_fit
from tests.loaderdata import identity, through_json

CASES, PARTS = 10_000, 30  # `make test` runs two parts
N = 90
SIZES = np.random.default_rng(4).integers(1, 100, N)


# --- the oracle


def permuted(count: int, generator: torch.Generator | None) -> list[int]:
    if generator is None:
        return list(range(count))
    return torch.randperm(count, generator=generator, dtype=torch.int32).tolist()


def oracle_classes(sizes: list[Any], buckets: list[Any], budget: float, tolerance: float) -> list[set[int]]:
    """The samples of each class, by bucket and by size."""
    classes = []
    for bucket in sorted(set(buckets)):
        left = {index for index, own in enumerate(buckets) if own == bucket}
        of_bucket = []
        while left:
            largest = max(sizes[index] for index in left)
            least = (1 - tolerance) * largest
            fits = how_many(budget, largest)
            once_more = min(how_many(budget, least), len(left)) if least else len(left)
            edge = budget / once_more if once_more > fits else 0
            members = {index for index in left if sizes[index] >= least and sizes[index] > edge}
            of_bucket.append(members)
            left -= members
        classes += of_bucket[::-1]
    return classes


def how_many(budget: float, size: float) -> int:
    return next(count for count in itertools.count(1) if (count + 1) * size > budget)


def oracle_padded(sizes: list[Any], buckets: list[Any], options: dict[str, Any]) -> list[list[int]]:
    budget, together = options["budget"], options["together"]
    generator = torch.Generator().manual_seed(options["seed"]) if options["shuffle"] else None
    order = permuted(len(sizes), generator)
    by_class = []
    for members in oracle_classes(sizes, buckets, budget, options["tolerance"]):
        fits = how_many(budget, max(sizes[index] for index in members))
        own = [index for index in order if index in members]
        batches = [own[at : at + fits] for at in range(0, len(own), fits)]
        if options["drop_last"] and len(batches[-1]) < fits:
            batches.pop()
        by_class.append(batches)
    if together == 1:
        batches = [batch for batches in by_class for batch in batches]
        if generator is None:
            return sorted(batches, key=lambda batch: batch[0])
        return [batches[number] for number in permuted(len(batches), generator)]
    whole = [len(batches) // together * together for batches in by_class]
    listed = [batch for batches, end in zip(by_class, whole, strict=True) for batch in batches[:end]]
    listed += [batch for batches, end in zip(by_class, whole, strict=True) for batch in batches[end:]]
    count = len(listed) // together
    groups = [listed[at * together : (at + 1) * together] for at in range(count)]
    if generator is None:
        groups.sort(key=lambda group: min(batch[0] for batch in group))
    else:
        groups = [groups[number] for number in permuted(count, generator)]
    return [batch for group in groups for batch in group] + listed[count * together :]


def oracle_spaces(sizes: list[int], budget: int) -> list[int]:
    """The space that is left in each batch, by best fit of one size after the other."""
    spaces: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [space for space in spaces if space >= size]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append((min(fitting) if fitting else budget) - size)
    return sorted(spaces)


# --- random cases


def case(number: int) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Sizes, buckets and the sampler's arguments."""
    rng = random.Random(number)
    pack, count = rng.random() < 0.4, rng.randint(1, 30)
    largest = rng.choice([3, 20, 200])
    whole = pack or rng.random() < 0.6
    sizes = [rng.randint(1, largest) if whole else rng.uniform(0.1, largest) for _ in range(count)]
    budget = max(sizes) * rng.choice([1, 1, 1.5, 3, 10])
    budget = math.ceil(budget) if pack or rng.random() < 0.5 else budget
    options = {
        "budget": max(budget, max(sizes)),
        "pack": pack,
        "tolerance": rng.choice([0, 0.1, 0.1, 0.5, 1]),
        "together": 1 if pack else rng.choice([1, 1, 2, 3]),
        "shuffle": rng.random() < 0.8,
        "seed": rng.randrange(100),
        "drop_last": rng.random() < 0.3,
    }
    buckets = [rng.choice("abc") for _ in sizes] if rng.random() < 0.4 else ["" for _ in sizes]
    return sizes, buckets, options


def check_case(number: int) -> None:
    sizes, buckets, options = case(number)
    rng = random.Random(-1 - number)
    given = {**options, "by": None if not buckets[0] else buckets}
    batches = list(BudgetSampler(sizes, **given, num_replicas=1, rank=0))
    budget, tolerance = options["budget"], options["tolerance"]
    if options["pack"]:
        for bucket in set(buckets):
            own = [batch for batch in batches if buckets[batch[0]] == bucket]
            left = sorted(budget - sum(sizes[index] for index in batch) for batch in own)
            inside = [size for size, name in zip(sizes, buckets, strict=True) if name == bucket]
            assert left == oracle_spaces(inside, budget)
    else:
        assert batches == oracle_padded(sizes, buckets, options)
    for batch in batches:
        held = [sizes[index] for index in batch]
        assert (sum(held) if options["pack"] else max(held) * len(held)) <= budget
        assert options["pack"] or min(held) >= (1 - tolerance) * max(held)
        assert len({buckets[index] for index in batch}) == 1
    indices = sorted(index for batch in batches for index in batch)
    if options["pack"] or not options["drop_last"]:
        assert indices == list(range(len(sizes)))
    assert len(indices) == len(set(indices))

    if number % 4 == 0:
        check_ranks(sizes, given, batches, rng)


def check_ranks(
    sizes: list[Any], given: dict[str, Any], batches: list[list[int]], rng: random.Random
) -> None:
    """Each of them gets every so manieth batch, also where others have read the first steps."""
    drop_last = given["drop_last"]

    def ranks(count: int) -> list[BudgetSampler]:
        return [BudgetSampler(sizes, **given, num_replicas=count, rank=rank) for rank in range(count)]

    first, second = rng.randint(1, 4), rng.randint(1, 4)
    parts = [list(sampler) for sampler in ranks(first)]
    assert dealt(parts) == expected(batches, first, drop_last)
    plan = ranks(first)[0].plan()
    assert (plan.steps, plan.batches, plan.samples) == (len(parts[0]), len(batches), sum(map(len, batches)))
    # Some steps on some ranks, and the rest on others.
    if not parts[0]:
        return
    step = rng.randrange(len(parts[0]))
    begun = rng.choice(ranks(first))
    iterator = iter(begun)
    for _ in range(step):
        next(iterator)
    state = through_json(begun.state_dict())
    others = ranks(second)
    for sampler in others:
        sampler.load_state_dict(state)
    rest = dealt([list(sampler) for sampler in others])
    assert rest == expected(batches, second, drop_last, step * first)


def dealt(parts: list[list[list[int]]]) -> list[list[int]]:
    """The batches of all ranks, in turn; all ranks have equally many."""
    return [batch for row in zip(*parts, strict=True) for batch in row]


def expected(batches: list[Any], ranks: int, drop_last: bool, first: int = 0) -> list[Any]:
    rest = batches[first:]
    if drop_last:
        return rest[: len(rest) // ranks * ranks]
    padded = batches * (ranks + 1)
    return padded[first : first + math.ceil(len(rest) / ranks) * ranks]


@pytest.mark.parametrize(
    "part", [0, 1, *(pytest.param(n, marks=pytest.mark.stress) for n in range(2, PARTS))]
)
def test_batches_are_those_of_the_oracle_on_any_ranks(part: int) -> None:
    for number in range(part, CASES, PARTS):
        try:
            check_case(number)
        except Exception as error:
            error.add_note(f"case {number}: {case(number)}")
            raise


def test_many_sizes_are_packed_as_by_one_after_the_other() -> None:
    rng = np.random.default_rng(2)
    for sizes in (rng.integers(1, 200, 3000), rng.integers(40, 60, 2000), rng.lognormal(2, 1, 2000)):
        falling = -np.sort(-sizes.clip(1, 200).astype(np.int64))
        numbers, count = best_fit(falling, 200)
        sums = np.bincount(numbers, weights=falling, minlength=count)
        assert sorted(200 - sums) == oracle_spaces(falling.tolist(), 200)


# --- what it says before


def test_plan_says_steps_and_padding() -> None:
    sampler = BudgetSampler([4, 4, 8, 8, 8, 6], budget=16, tolerance=0.5, num_replicas=2, rank=0)
    # 8 and 8, 8 and 6: to 8, and 4 and 4, since four of them would fit
    assert sampler.plan() == (2, 3, 6, pytest.approx(1 - 38 / 40))
    assert len(sampler) == 2
    packed = BudgetSampler([9, 5, 4, 3], budget=12, pack=True, num_replicas=1, rank=0)
    assert packed.plan() == (2, 2, 4, pytest.approx(1 - 21 / 24))


def test_padded_epochs_have_equally_many_steps() -> None:
    sampler = BudgetSampler(SIZES, budget=400, num_replicas=3, rank=1)
    plans = [sampler.plan(epoch) for epoch in range(5)]
    assert {plan.steps for plan in plans} == {len(sampler)}
    assert max(plan.padding for plan in plans) < 0.1
    epochs = [list(sampler) for _ in plans]
    assert len({str(epoch) for epoch in epochs}) == 5


def test_packs_differ_from_epoch_to_epoch() -> None:
    sizes = np.random.default_rng(3).permutation(np.arange(1, 8001))  # no size comes twice
    sampler = BudgetSampler(sizes, budget=8000, pack=True, num_replicas=1, rank=0)
    first, second = ({tuple(sorted(batch)) for batch in sampler if len(batch) > 1} for _ in range(2))
    assert len(first & second) < 0.1 * len(first)  # all of them in one window


def test_batch_holds_n_of_the_size_that_is_the_budget_through_n() -> None:
    """Seven times what was rounded is more than the budget."""
    budget = next(budget for budget in range(1000, 9000) if 7 * (budget / 7) > budget)
    sizes = np.maximum(np.random.default_rng(5).integers(1, 2 * budget // 7, 700), budget / 7)
    counts = [len(batch) for batch in BudgetSampler(sizes, budget, num_replicas=1, rank=0)]
    assert max(counts) == 7 and counts.count(1) < 10


def test_ranks_have_similar_batches_in_each_step() -> None:
    options = {"budget": 300, "by": SIZES % 3, "together": 4, "seed": 1}
    parts = [list(BudgetSampler(SIZES, **options, num_replicas=4, rank=rank)) for rank in range(4)]
    alike = [len({SIZES[batch[0]] % 3 for batch in row}) == 1 for row in zip(*parts, strict=True)]
    assert sum(alike) >= len(alike) - 3


@pytest.mark.parametrize(
    "sizes",
    [SIZES.tolist(), torch.tensor(SIZES), pa.chunked_array([SIZES[:10], SIZES[10:]]), SIZES.astype(np.uint8)],
)
def test_sizes_are_any_sequence_of_numbers(sizes: Any) -> None:
    sampler = BudgetSampler(sizes, budget=200, num_replicas=1, rank=0)
    state = BudgetSampler(SIZES, budget=200, num_replicas=1, rank=0).state_dict()
    sampler.load_state_dict(state)
    assert list(sampler) == list(BudgetSampler(SIZES, budget=200, num_replicas=1, rank=0))


def test_sampler_pickles_without_what_it_has_made() -> None:
    sampler = BudgetSampler(np.ones(100_000), budget=10, num_replicas=1, rank=0)
    before, expected = len(pickle.dumps(sampler)), sampler.plan()
    assert len(pickle.dumps(sampler)) == before
    assert pickle.loads(pickle.dumps(sampler)).plan() == expected


# --- bad input


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ([1, 0, 2], {}, "sizes[1] is 0, and a size must be above 0: leave such samples out"),
        ([1, 2, -3, 0], {}, "sizes[2] is -3, and 1 more like it, and a size must be above 0"),
        ([1.0, float("nan")], {}, "sizes[1] is nan, and a size must be a finite number"),
        ([1.0, float("inf")], {}, "sizes[1] is inf, and a size must be a finite number"),
        ([1, 11, 12], {}, "sizes[1] is 11, more than budget=10, and 1 more like it: give a larger budget"),
        ([1, 2.5], {"pack": True}, "sizes[1] is 2.5, and a size must be a whole number with pack=True"),
        ([1, None, 2], {}, "sizes must be numbers, found None at sizes[1]"),
        ([1, "a"], {}, "sizes must be numbers, found"),
        ([True, False], {}, "sizes must be numbers, found"),
        ([[1, 2]], {}, "found an array of shape (1, 2)"),
        ([[1], [2, 3]], {}, "sizes must be one number for each sample"),
        ([], {}, "found an array of shape (0,)"),
        ([1, 2], {"by": [0]}, "by has the shape (1,), and sizes has 2 samples"),
        ([1, 2], {"by": [0.5, 1.0]}, "by must be whole numbers or texts, found values of type float64"),
        ([1, 2], {"budget": 0}, "budget must be a number above 0, found 0"),
        ([1, 2], {"budget": "10"}, "budget must be a number above 0, found '10'"),
        ([1, 2], {"budget": float("nan")}, "budget must be a number above 0, found nan"),
        ([1, 2], {"budget": 2.5, "pack": True}, "budget must be a whole number with pack=True, found 2.5"),
        ([1, 2], {"tolerance": 1.5}, "tolerance must be from 0 to 1, found 1.5"),
        ([1, 2], {"together": 0}, "together must be a whole number >= 1, found 0"),
        ([1, 2], {"together": 2, "pack": True}, "together goes with padded batches"),
        ([1, 2], {"num_replicas": 2, "rank": 2}, "Invalid rank 2"),
    ],
)
def test_bad_input_is_named(sizes: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        BudgetSampler(sizes, **{"budget": 10, "num_replicas": 1, "rank": 0, **options})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 300}, "saved with budget 200, this sampler has 300"),
        ({"tolerance": 0.2}, "saved with tolerance 0.1"),
        ({"seed": 1}, "saved with seed 0"),
        ({"sizes": SIZES[::-1]}, "saved with sizes "),
        ({"by": SIZES % 2}, "saved with by "),
        ({"drop_last": True}, "saved with drop_last False"),
        ({"together": 2}, "saved with together 1"),
        ({"pack": True}, "saved with pack False"),
    ],
)
def test_state_of_another_sampler_is_refused(change: dict[str, Any], message: str) -> None:
    options = {"sizes": SIZES, "budget": 200, "num_replicas": 1, "rank": 0}
    state = BudgetSampler(**options).state_dict()
    with pytest.raises(ArgumentError) as error:
        BudgetSampler(**{**options, **change}).load_state_dict(state)
    assert message in str(error.value)


def test_loader_refuses_sizes_of_another_dataset() -> None:
    sampler = BudgetSampler(SIZES, budget=200)
    with pytest.raises(ArgumentError, match="has 90 sizes, and the dataset has 89 samples"):
        DataLoader(range(89), batch_sampler=sampler)
    with pytest.raises(ArgumentError, match="pass it as batch_sampler="):
        DataLoader(range(N), sampler=sampler)


@pytest.mark.parametrize(
    ("pack", "on_error", "kept"),
    [(False, "replace", "'raise' or 'repeat'"), (True, "replace", "'raise'"), (True, "repeat", "'raise'")],
)
def test_loader_refuses_an_on_error_that_may_break_the_budget(pack: bool, on_error: str, kept: str) -> None:
    with pytest.raises(ArgumentError, match=f"on_error='{on_error}' may put a larger sample.*use {kept},"):
        loader(pack=pack, on_error=on_error)
    assert list(loader(pack=pack, on_error="raise" if pack else "repeat"))


def test_state_has_no_number_of_numpy() -> None:
    sampler = BudgetSampler(SIZES, budget=np.int64(200), tolerance=np.float32(0.5), num_replicas=1, rank=0)
    assert through_json(sampler.state_dict()) == sampler.state_dict()


# --- in a loader


def loader(ranks: int = 1, rank: int = 0, *, pack: bool = False, **options: Any) -> Any:
    sampler = BudgetSampler(SIZES, budget=200, pack=pack, num_replicas=ranks, rank=rank, seed=2)
    return DataLoader(range(N), batch_sampler=sampler, collate_fn=identity, seed=5, **options)


def rows(run: Any, step: int, **options: Any) -> list[int]:
    return [sample.index for sample in run.samples_at(step, **options)]


@pytest.mark.parametrize("pack", [False, True])
def test_steps_are_known_before_and_after_on_any_ranks(pack: bool) -> None:
    run = loader(3, 1, pack=pack)
    first = list(loader(pack=pack))
    assert rows(run, 2, epoch=0) == first[2 * 3 + 1]
    assert rows(run, 5, epoch=0, rank=0, world_size=1) == first[5]
    assert rows(run, 2, rank=0, epoch=0) == first[6]
    whole = loader(pack=pack)
    list(whole)
    second = list(whole)
    assert rows(whole, 4, epoch=0) == first[4] and rows(whole, 4, epoch=1) == second[4] != first[4]
    assert rows(whole, 1, epoch=2) == list(whole)[1]
    assert whole.batch_at(3, epoch=1) == second[3]


@pytest.mark.parametrize("pack", [False, True])
def test_excluded_samples_are_replaced_within_the_budget(pack: bool) -> None:
    before, run = list(loader(pack=pack)), loader(pack=pack)
    out = {batch[0] for batch in before[::2]}
    run.exclude(out)
    after = list(run)
    assert not out & {index for batch in after for index in batch}
    for own, other in zip(before, after, strict=True):
        for index, substitute in zip(own, other, strict=True):
            assert (index == substitute) == (index not in out)
            assert SIZES[substitute] <= SIZES[index]
    assert rows(run, 0, epoch=0) == after[0]


def test_excluding_all_that_are_as_small_is_an_error_that_says_so() -> None:
    run = loader()
    run.exclude(np.flatnonzero(np.sort(SIZES)[3] >= SIZES).tolist())
    with pytest.raises(ArgumentError, match="so that none can stand in: make the sampler without them"):
        list(run)


@pytest.mark.parametrize("pack", [False, True])
def test_skipped_batches_stay_away_on_other_ranks(pack: bool) -> None:
    order = list(loader(pack=pack))
    run = loader(2, 0, pack=pack)
    run.skip([1, 2])  # batches 2 to 5
    state = run.state_dict()
    assert list(run) == [order[at] for at in range(0, len(order), 2) if at not in (2, 4)]
    parts = []
    for rank in range(3):
        other = loader(3, rank, pack=pack)
        other.load_state_dict(state)
        parts.append(list(other))
    # Of the first step, batch 2 is skipped, and other samples are in its place; the second step is skipped.
    assert [part[0] for part in parts[:2]] == order[:2]
    assert parts[2][0] != order[2] and len(parts[2][0]) == len(order[2])
    assert dealt([part[1:] for part in parts])[: len(order) - 6] == order[6:]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_digests_of_ranks_do_not_depend_on_workers_and_resume(pack: bool, workers: int) -> None:
    def digest_of(*, resumed: bool, workers: int) -> bytes:
        run = loader(2, 1, pack=pack, num_workers=workers)
        if resumed:
            iterator = iter(run)
            for _ in range(3):
                next(iterator)
            state = through_json(run.state_dict())
            run = loader(2, 1, pack=pack, num_workers=0 if workers else 1)
            run.load_state_dict(state)
        list(run)
        list(run)
        return run.digest()  # type: ignore[no-any-return]

    assert digest_of(resumed=True, workers=workers) == digest_of(resumed=False, workers=0)


def test_each_epoch_is_the_next_without_set_epoch() -> None:
    run = loader()
    epochs = [list(run) for _ in range(2)]
    again = loader()
    again.batch_sampler.set_epoch(1)
    assert list(again) == epochs[1] != epochs[0]
    assert Counter(itertools.chain(*epochs[1])) == Counter(range(N))
