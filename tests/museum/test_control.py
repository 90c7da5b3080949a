"""The control of the museum: no healthy change of a run is reported as other data.

Each run is compared with one in a single process, in its logs and in its states. The trainer's own notes are
compared too: they say that the change is healthy.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload import Cache, DistributedSampler
from tests.museum import samples
from tests.museum.loaders import make_loader
from tests.museum.training import Leg, Numbered, Plan, Run, Stop, first_difference, replaced, train

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

GLOBAL = 8  # samples of a step over all ranks: 3 steps an epoch
FORK = {"multiprocessing_context": "fork"}


def of_images(cache: Any = None, **options: Any) -> Callable[[Leg], Any]:
    """Photos with crops and flips, shuffled, and dealt to ranks."""

    def loader(leg: Leg) -> Any:
        dataset = samples.images(samples.write_images(leg.data), cache=cache and cache())
        return shuffled(leg, dataset, **options)

    return loader


def shuffled(leg: Leg, dataset: Any, **options: Any) -> Any:
    sampler = DistributedSampler(dataset, leg.ranks, leg.rank, seed=2)
    workers = options.pop("workers", None)  # of each leg
    if workers is not None:
        options |= {"num_workers": workers[leg.number]} | (FORK if workers[leg.number] else {})
    return make_loader(leg, dataset, GLOBAL // leg.ranks, sampler=sampler, **options)


def of_numbers(**options: Any) -> Callable[[Leg], Any]:
    """Samples that draw their own random numbers."""
    return lambda leg: shuffled(leg, Numbered(), **options)


def of_shards(**options: Any) -> Callable[[Leg], Any]:
    def loader(leg: Leg) -> Any:
        return shuffled(leg, samples.shards(samples.write_shards(leg.data)), **options)

    return loader


def of_sources(**options: Any) -> Callable[[Leg], Any]:
    def loader(leg: Leg) -> Any:
        own = samples.mixture()
        sampler = fastload.MixtureSampler(own, leg.ranks, leg.rank, seed=1)
        return make_loader(leg, own, GLOBAL // leg.ranks, sampler=sampler, **options)

    return loader


KINDS: dict[str, Callable[..., Callable[[Leg], Any]]] = {
    "images": of_images,
    "numbers": of_numbers,
    "shards": of_shards,
    "sources": of_sources,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Kind -> a run in one process, without a cache."""

    @functools.cache
    def of(kind: str) -> Run:
        return train(Plan(KINDS[kind]()), tmp_path_factory.mktemp(kind))

    return of


def check_same(one: Run, other: Run, *, in_order: bool = True) -> None:
    assert not in_order or first_difference(one, other) is None
    proof = fastload.prove(one.log, other.log)
    assert proof, proof.why
    proof = fastload.prove(one.states, other.states + other.left)
    assert proof, proof.why


# --- one change at a time

RESUMES = {
    "resumed": (Stop(0, 1),),
    "resumed between epochs": (Stop(1, 0),),
    "resumed twice": (Stop(0, 1), Stop(1, 2)),
    "resumed twice at one step": (Stop(0, 2), Stop(0, 2)),
    "resumed with 2 ranks": (Stop(0, 2, ranks=2),),
    "resumed with 4 ranks, then with 1": (Stop(0, 1, ranks=4), Stop(1, 1, ranks=1)),
}


@pytest.mark.parametrize("stops", RESUMES.values(), ids=RESUMES)
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_is_the_same(
    kind: str, stops: Any, reference: Callable[[str], Run], tmp_path: Path
) -> None:
    check_same(reference(kind), train(Plan(KINDS[kind](), stops=stops), tmp_path))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_other_number_of_ranks_is_the_same(
    kind: str, ranks: int, reference: Callable[[str], Run], tmp_path: Path
) -> None:
    check_same(reference(kind), train(Plan(KINDS[kind](), ranks=ranks), tmp_path))


@pytest.mark.parametrize("ranks", [2, 4])
def test_evaluation_with_uneven_ranks_is_the_same(ranks: int, tmp_path: Path) -> None:
    """17 samples: the last step has one, which only rank 0 gets."""

    def loader(leg: Leg) -> Any:
        dataset = Numbered(17)
        sampler = DistributedSampler(dataset, leg.ranks, leg.rank, mode="eval")
        return make_loader(leg, dataset, GLOBAL // leg.ranks, sampler=sampler)

    check_same(train(Plan(loader), tmp_path / "one"), train(Plan(loader, ranks=ranks), tmp_path / "other"))


OPTIONS = {
    "1 worker": {"num_workers": 1} | FORK,
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True} | FORK,
    "in_order": {"num_workers": 2, "in_order": False} | FORK,
    "prefetch_factor": {"num_workers": 2, "prefetch_factor": 5} | FORK,
    "on_error": {"on_error": "replace"},
    "threads": {"threads": 2},
    "device": {"device": "cpu"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_other_way_to_make_batches_is_the_same(
    options: Any, reference: Callable[[str], Run], tmp_path: Path
) -> None:
    check_same(
        reference("images"),
        train(Plan(of_images(**options)), tmp_path),
        in_order=options.get("in_order", True),
    )


@pytest.mark.parametrize("mode", ["raw", "dct"])
def test_cache_that_fills_and_then_is_full_is_the_same(
    mode: str, reference: Callable[[str], Run], tmp_path: Path
) -> None:
    plan = Plan(of_images(cache=lambda: Cache(tmp_path / "cache", mode=mode)))

    check_same(reference("images"), train(plan, tmp_path / "cold"))
    check_same(reference("images"), train(plan, tmp_path / "warm"))


def test_workers_ranks_and_cache_changed_by_a_resume_is_the_same(
    reference: Callable[[str], Run], tmp_path: Path
) -> None:
    cached = of_images(cache=lambda: Cache(tmp_path / "cache", mode="raw"), workers=[0, 2, 1])

    run = train(Plan(cached, ranks=2, stops=(Stop(0, 2, ranks=4), Stop(1, 1, ranks=1))), tmp_path)

    check_same(reference("images"), run)


def test_torchs_own_shuffle_resumed_with_other_workers_is_the_same(tmp_path: Path) -> None:
    def loader(leg: Leg) -> Any:
        workers = {"num_workers": 1} | FORK if leg.number == 1 else {}
        generator = torch.Generator().manual_seed(3)
        return make_loader(leg, Numbered(), shuffle=True, generator=generator, **workers)

    run = train(Plan(loader, stops=(Stop(0, 2), Stop(1, 3))), tmp_path / "other")

    check_same(train(Plan(loader), tmp_path / "one"), run)


def test_run_without_a_seed_is_the_same_with_workers(tmp_path: Path) -> None:
    one = train(Plan(of_images(seed=None)), tmp_path / "one")

    check_same(one, train(Plan(of_images(seed=None, num_workers=2, **FORK)), tmp_path / "other"))


def test_one_rank_of_two_is_compared_with_the_same_rank(tmp_path: Path) -> None:
    one = train(Plan(of_numbers(), ranks=2), tmp_path / "one")
    other = train(Plan(of_numbers(), ranks=2, stops=(Stop(0, 2),)), tmp_path / "other")

    for rank in range(2):
        name = f"rank-{rank:05}.samples"
        assert fastload.prove(one.log / name, other.log / name)
        assert fastload.prove(one.states[rank], other.states[rank])


def test_state_at_each_stop_is_the_same_as_the_log_so_far(
    reference: Callable[[str], Run], tmp_path: Path
) -> None:
    run = train(Plan(of_numbers(), ranks=2, stops=(Stop(0, 2), Stop(1, 1))), tmp_path)

    for _, states in run.at_stops:
        proof = fastload.prove(reference("numbers").log, states)
        assert proof, proof.why


def test_steps_that_a_resume_makes_again_count_once(tmp_path: Path) -> None:
    """A job that is killed had gone on for some steps after its last state."""
    unbroken = train(Plan(of_numbers()), tmp_path / "unbroken")
    log = tmp_path / "killed"
    loader = of_numbers()(Leg(0, 0, 1, log))
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    next(batches)
    del batches, loader

    resumed = of_numbers()(Leg(1, 0, 1, log))
    resumed.load_state_dict(state)
    for _ in range(2):
        list(resumed)

    assert fastload.prove(unbroken.log, log)
    assert fastload.prove(unbroken.states, resumed.state_dict())


# --- all at once

MATRIX = [
    (kind, ranks, workers, persistent, stop)
    for kind, ranks, workers, persistent, stop in itertools.product(
        KINDS, (1, 2, 4), (0, 1, 2), (False, True), [(0, 1), (0, 2), (1, 0), (1, 1), None]
    )
    if workers or not persistent
]


@pytest.mark.stress
@pytest.mark.parametrize(("kind", "ranks", "workers", "persistent", "stop"), MATRIX, ids=lambda one: str(one))
def test_topology_is_not_reported(
    kind: str,
    ranks: int,
    workers: int,
    persistent: bool,
    stop: Any,
    reference: Callable[[str], Run],
    tmp_path: Path,
) -> None:
    options = {"num_workers": workers, "persistent_workers": persistent} | (FORK if workers else {})
    after = random.Random(repr((kind, ranks, workers, stop))).choice([1, 2, 4])
    stops = () if stop is None else (Stop(*stop, ranks=after),)

    check_same(reference(kind), train(Plan(KINDS[kind](**options), ranks=ranks, stops=stops), tmp_path))


@pytest.mark.stress
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", KINDS)
def test_start_method_is_not_reported(
    kind: str, method: str, reference: Callable[[str], Run], tmp_path: Path
) -> None:
    options = {"num_workers": 2, "multiprocessing_context": method}

    check_same(reference(kind), train(Plan(KINDS[kind](**options)), tmp_path))


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(40))
def test_histories_are_not_reported(seed: int, reference: Callable[[str], Run], tmp_path: Path) -> None:
    """Random stops, ranks, workers and caches."""
    draw = random.Random(seed)
    places = sorted(draw.sample([(epoch, step) for epoch in range(2) for step in range(3)][1:], 3))
    stops = tuple(Stop(*place, ranks=draw.choice([1, 2, 4])) for place in places)
    mode = draw.choice([None, "raw", "dct"])
    cache = mode and (lambda: Cache(tmp_path / "cache", mode=mode))
    plan = Plan(of_images(cache=cache, workers=[draw.choice([0, 0, 1, 2]) for _ in range(4)]))

    check_same(
        reference("images"), train(replaced(plan, ranks=draw.choice([1, 2, 4]), stops=stops), tmp_path)
    )
