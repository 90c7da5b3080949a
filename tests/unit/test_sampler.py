"""DistributedSampler: torch's order, exact cover, epochs that advance, a position for any number of ranks."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fastload import DistributedSampler
from fastload.errors import ArgumentError
from tests.loaderdata import through_json

LENGTHS = (0, 1, 2, 7, 10, 31, 97)
WORLDS = (1, 2, 3, 4, 7)
_RANK_VARIABLES = (
    "RANK",
    "HOROVOD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "SLURM_PROCID",
    "GROUP_RANK",
    "SLURM_NODEID",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def ranks(length: int, world: int, **options: object) -> list[DistributedSampler]:
    return [DistributedSampler(range(length), world, rank, **options) for rank in range(world)]  # type: ignore[arg-type]


def order(length: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


# --- the rank


def test_rank_that_torch_distributed_tells_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own launcher tells the ranks when the fit begins. Samplers made before would read all."""
    before, given = DistributedSampler(range(10)), DistributedSampler(range(10), 1, 0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for begin in (before._start_epoch, lambda: list(before)):
        with pytest.raises(ArgumentError, match=r"rank 0 of 1, and this process is rank 1 of 2: make the"):
            begin()
    assert len(list(given)) == 10 and len(list(DistributedSampler(range(10)))) == 5


def test_rank_told_later_beside_a_given_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = DistributedSampler(range(10), num_replicas=2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ArgumentError, match="this process is rank 1 of 2"):
        list(before)


def test_group_of_one_beside_a_launcher_of_many_keeps_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    before = DistributedSampler(range(80), shuffle=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert list(before) == list(range(3, 80, 8))


# --- as torch's


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_order_is_torchs(shuffle: bool, drop_last: bool) -> None:
    for length, world in itertools.product(LENGTHS[1:], WORLDS):
        for rank in range(world):
            theirs = torch.utils.data.DistributedSampler(range(length), world, rank, shuffle, 3, drop_last)
            ours = DistributedSampler(range(length), world, rank, shuffle, 3, drop_last)
            assert isinstance(ours, torch.utils.data.DistributedSampler)
            assert (len(ours), ours.total_size) == (len(theirs), theirs.total_size)
            for epoch in (0, 5, 5, 2):
                theirs.set_epoch(epoch)
                ours.set_epoch(epoch)
                assert list(ours) == list(theirs)
                assert list(ours) == list(theirs), "set_epoch was called: the same epoch again"


# --- cover


@given(length=st.integers(0, 200), world=st.integers(1, 9), shuffle=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=100)
def test_eval_covers_exactly(length: int, world: int, shuffle: bool, seed: int) -> None:
    samplers = ranks(length, world, shuffle=shuffle, seed=seed, mode="eval")
    parts = [list(sampler) for sampler in samplers]
    assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
    assert sorted(itertools.chain(*parts)) == list(range(length))
    assert len({len(part) for part in parts}) <= 2
    assert [len(part) for part in parts] == sorted((len(part) for part in parts), reverse=True)


@given(length=st.integers(1, 200), world=st.integers(1, 9), drop_last=st.booleans())
@settings(max_examples=100)
def test_train_gives_equal_steps(length: int, world: int, drop_last: bool) -> None:
    parts = [list(sampler) for sampler in ranks(length, world, drop_last=drop_last)]
    counts = Counter(itertools.chain(*parts))
    assert len({len(part) for part in parts}) == 1
    if drop_last:
        assert set(counts.values()) <= {1} and length - len(counts) < world
    else:
        assert set(counts) == set(range(length))
        assert counts.total() - length < world


@pytest.mark.stress
def test_guard_removed_padding_counts_samples_twice() -> None:
    """Torch's rule, in place of exact cover."""
    counts = Counter(itertools.chain(*ranks(7, 3)))
    assert set(counts) == set(range(7)) and counts.total() == 9


# --- epochs


def test_epochs_advance_by_themselves() -> None:
    sampler = DistributedSampler(range(20), 1, 0)
    assert [list(sampler) for _ in range(4)] == [order(20, 0, epoch) for epoch in range(4)]


def test_an_epoch_that_is_left_early_counts() -> None:
    sampler = DistributedSampler(range(20), 1, 0)
    assert list(itertools.islice(sampler, 3)) == order(20, 0, 0)[:3]
    assert list(sampler) == order(20, 0, 1)


def test_an_iterator_that_gave_nothing_does_not_count() -> None:
    sampler = DistributedSampler(range(20), 1, 0)
    iter(sampler)
    iter(sampler)
    assert list(sampler) == order(20, 0, 0)


def test_set_epoch_takes_over() -> None:
    sampler = DistributedSampler(range(20), 1, 0)
    assert list(sampler) == order(20, 0, 0)
    for epoch in (0, 0, 7):
        sampler.set_epoch(epoch)
        assert list(sampler) == order(20, 0, epoch)
        assert list(sampler) == order(20, 0, epoch)
        assert sampler.epoch == epoch


def test_two_iterators_at_once() -> None:
    sampler = DistributedSampler(range(20), 1, 0)
    first, second = iter(sampler), iter(sampler)
    pairs = list(zip(first, second, strict=True))
    assert [a for a, _ in pairs] == order(20, 0, 0)
    assert [b for _, b in pairs] == order(20, 0, 1)
    assert list(sampler) == order(20, 0, 2)


# --- state


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("after", WORLDS)
@pytest.mark.parametrize("before", WORLDS)
def test_another_number_of_ranks_goes_on(before: int, after: int, mode: str) -> None:
    length = 41
    for steps in (0, 1, length // before // 2, length // before):
        first = ranks(length, before, mode=mode, seed=5)
        seen = [list(itertools.islice(iterators, steps)) for iterators in map(iter, first)]
        states = [sampler.state_dict() for sampler in first]
        if steps:
            assert all(state == states[0] for state in states), "the same dict on every rank"
        second = ranks(length, after, mode=mode, seed=5)
        for sampler in second:
            sampler.load_state_dict(through_json(states[0]))
            assert sampler.state_dict() == states[0]
        rest = [list(sampler) for sampler in second]
        counts = Counter(itertools.chain(*seen, *rest))
        assert set(counts) == set(range(length)), "nothing is lost"
        padding = counts.total() - length
        assert padding == (0 if mode == "eval" else -(length - steps * before) % after)
        if mode == "train":
            assert len({len(part) for part in rest}) == 1
        if before == after:
            whole = [list(sampler) for sampler in ranks(length, before, mode=mode, seed=5)]
            assert [a + b for a, b in zip(seen, rest, strict=True)] == whole
        following = [list(sampler) for sampler in second]
        fresh = ranks(length, after, mode=mode, seed=5)
        for sampler in fresh:
            sampler.set_epoch(1)
        assert following == [list(sampler) for sampler in fresh], "then the next epoch"


def test_state_at_the_end() -> None:
    sampler = DistributedSampler(range(5), 2, 0)
    iterator = iter(sampler)
    for _ in range(3):
        next(iterator)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["consumed"]) == (0, 5)
    assert next(iterator, None) is None
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["consumed"]) == (1, 0)


def test_set_epoch_after_loading() -> None:
    saved = DistributedSampler(range(20), 1, 0)
    saved.set_epoch(3)
    list(itertools.islice(saved, 12))
    state = saved.state_dict()
    for epoch, expected in [(3, order(20, 0, 3)[12:]), (None, order(20, 0, 3)[12:])]:
        sampler = DistributedSampler(range(20), 1, 0)
        sampler.load_state_dict(state)
        if epoch is not None:
            sampler.set_epoch(epoch)
        assert list(sampler) == expected
        assert list(sampler) == order(20, 0, 3), "set_epoch is in charge, as it was in the run that was saved"
    sampler.load_state_dict(state)
    with pytest.warns(UserWarning, match="drops the position"):
        sampler.set_epoch(4)
    sampler.set_epoch(3)
    assert list(sampler) == order(20, 0, 3)[12:], "as the warning says"
    sampler.load_state_dict(state)
    with pytest.warns(UserWarning, match="drops the position"):
        sampler.set_epoch(4)
    assert list(sampler) == order(20, 0, 4)
    sampler.set_epoch(3)
    assert list(sampler) == order(20, 0, 3), "an epoch has begun since"


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"length": 21}, {"shuffle": False}, {"version": 2}, {"extra": 0}, {"epoch": ...}],
    ids=lambda change: next(iter(change)),
)
def test_states_of_something_else(change: dict[str, object]) -> None:
    state = DistributedSampler(range(20), 1, 0).state_dict() | change
    state = {name: value for name, value in state.items() if value is not ...}
    with pytest.raises(ArgumentError, match=next(iter(change))):
        DistributedSampler(range(20), 1, 0).load_state_dict(state)


def test_a_state_of_the_wrong_type() -> None:
    with pytest.raises(ArgumentError, match="found list"):
        DistributedSampler(range(20), 1, 0).load_state_dict([])  # type: ignore[arg-type]


class Run(RuleBasedStateMachine):
    """Ranks in step that are stopped, saved and restored with other numbers, against the order as a list."""

    length = 23

    @initialize(world=st.sampled_from(WORLDS), seed=st.integers(0, 9), shuffle=st.booleans())
    def start(self, world: int, seed: int, shuffle: bool) -> None:
        self.options = {"seed": seed, "shuffle": shuffle, "mode": "eval"}
        self.epoch = 0
        self.seen: list[int] = []
        self.own_epochs = True
        self.samplers = ranks(self.length, world, **self.options)
        self.iterators: list[Iterator[int]] | None = None

    def expected(self) -> list[int]:
        seed = int(self.options["seed"])  # type: ignore[call-overload]
        return order(self.length, seed, self.epoch) if self.options["shuffle"] else list(range(self.length))

    @rule(steps=st.integers(1, 6))
    def draw(self, steps: int) -> None:
        if self.iterators is None:
            self.iterators = [iter(sampler) for sampler in self.samplers]
        for _ in range(steps):
            left = self.length - len(self.seen)
            drawn = [next(iterator, None) for iterator in self.iterators[: min(left, len(self.iterators))]]
            self.seen += [index for index in drawn if index is not None]
            assert self.seen == self.expected()[: len(self.seen)]

    @precondition(lambda self: self.iterators is not None)
    @rule()
    def finish(self) -> None:
        assert self.iterators is not None
        rest = list(itertools.chain(*self.iterators))
        assert sorted(self.seen + rest) == list(range(self.length))
        self._next_epoch()

    @precondition(lambda self: self.iterators is not None and self.seen)
    @rule()
    def leave(self) -> None:
        assert self.iterators is not None
        for iterator in self.iterators:
            next(iterator, None)  # every rank has begun
        self._next_epoch()

    def _next_epoch(self) -> None:
        self.iterators, self.seen = None, []
        self.epoch += self.own_epochs

    @precondition(lambda self: self.iterators is None and not self.seen)
    @rule(epoch=st.integers(0, 5))
    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(epoch)
        self.epoch, self.own_epochs = epoch, False

    @rule(world=st.sampled_from(WORLDS))
    def restore(self, world: int) -> None:
        if self.iterators is None:
            for sampler in self.samplers:
                sampler._start_epoch()
        state = through_json(self.samplers[0].state_dict())
        self.samplers = ranks(self.length, world, **self.options)
        for sampler in self.samplers:
            sampler.load_state_dict(state)
        self.iterators = None


Run.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestRun = Run.TestCase


def test_a_million_samples_are_no_list() -> None:
    sampler = DistributedSampler(range(1_000_000), 1, 0)
    tracemalloc.start()
    try:
        assert len(list(itertools.islice(sampler, 10_000))) == 10_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2e6  # a list of a million ints would have 8 MB and more


# --- who we are


def test_group_of_torch_comes_before_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        sampler = DistributedSampler(range(10))
    finally:
        dist.destroy_process_group()
    assert (sampler.rank, sampler.num_replicas) == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 2, "rank": 2}, r"Invalid rank 2, rank should be in the interval \[0, 1\]"),
        ({"num_replicas": 2, "rank": -1}, "Invalid rank -1"),
        ({"num_replicas": 0, "rank": 0}, "num_replicas must be at least 1, found 0"),
        ({"mode": "test"}, "mode must be one of .*'test'"),
        ({"mode": "eval", "drop_last": True}, "drop_last=True contradicts mode='eval'"),
        ({"partition": "rank"}, "partition must be None or 'node', found 'rank'"),
        ({"exchange": 0.1}, "add it, or leave them out"),
        ({"num_nodes": 1}, "add it, or leave them out"),
        ({"partition": "node", "exchange": 1.5}, "exchange must be from 0 to 1, found 1.5"),
        ({"partition": "node", "exchange": 0.5, "shuffle": False}, "leave one out"),
        ({"partition": "node", "num_replicas": 4, "rank": 0}, "pass num_nodes"),
        (
            {"partition": "node", "num_replicas": 4, "rank": 0, "num_nodes": 3},
            "equally many ranks on every node",
        ),
        (
            {"partition": "node", "num_replicas": 4, "rank": 0, "num_nodes": 5},
            "from 1 to the 4 ranks, found 5",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DistributedSampler(range(10), **options)  # type: ignore[arg-type]


# --- every node keeps to its own share

nodes_and_ranks = st.tuples(st.integers(1, 5), st.integers(1, 3))
lengths = st.integers(1, 200)


def by_node(nodes: int, per_node: int, length: int, **options: object) -> list[list[DistributedSampler]]:
    """The samplers of each node's ranks."""
    samplers = ranks(length, nodes * per_node, partition="node", num_nodes=nodes, **options)
    return [samplers[node * per_node : (node + 1) * per_node] for node in range(nodes)]


def draw(samplers: list[list[DistributedSampler]]) -> list[Counter[int]]:
    """One epoch: what each node reads, and how often."""
    return [Counter(itertools.chain(*node)) for node in samplers]


@given(shape=nodes_and_ranks, length=lengths, mode=st.sampled_from(["train", "eval"]), seed=st.integers(0, 9))
@settings(max_examples=60)
def test_a_node_keeps_its_share(shape: tuple[int, int], length: int, mode: str, seed: int) -> None:
    nodes, per_node = shape
    samplers = by_node(nodes, per_node, length, mode=mode, seed=seed)
    first, *others = [draw(samplers) for _ in range(3)]
    for epoch in (first, *others):
        assert set().union(*epoch) == set(range(length)), "nothing is left out"
        counts = sum(epoch, Counter())
        steps = {sum(node.values()) for node in epoch}
        if mode == "eval":
            assert counts.total() == length
        else:
            assert counts.total() == -(-length // (nodes * per_node)) * nodes * per_node
            assert len(steps) == 1, "equal steps"
    if length >= nodes:
        assert all([set(node) for node in epoch] == [set(node) for node in first] for epoch in others)
        assert sum(len(set(node)) for node in first) == length, "no sample is of two nodes"
        sizes = [len(set(node)) for node in first]
        assert max(sizes) - min(sizes) <= 1


def test_a_node_shuffles_its_share() -> None:
    (node, _) = by_node(2, 1, 100)
    epochs = [list(node[0]) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])


def test_shares_do_not_depend_on_seed_ranks_or_order() -> None:
    """A cache that was filled by one run, or by `fastload warm`, serves another."""
    options = [{"seed": 3}, {"shuffle": False}, {"mode": "eval"}]
    shares = [[set(node) for node in draw(by_node(3, 2, 98, **option))] for option in options]
    shares += [[set(node) for node in draw(by_node(3, per_node, 98))] for per_node in (1, 4)]
    assert all(share == shares[0] for share in shares)


def test_shares_are_alike_in_a_listing_with_structure() -> None:
    """Sorted by class, and alternating: every node gets some of all."""
    for node in draw(by_node(2, 1, 4000)):
        for part in (range(1000), range(3000, 4000), range(0, 4000, 2)):
            assert 0.45 < len(set(node) & set(part)) / len(part) < 0.55


@given(shape=nodes_and_ranks, length=lengths, exchange=st.floats(0, 1), seed=st.integers(0, 9))
@settings(max_examples=60)
def test_exchange_moves_a_fraction(shape: tuple[int, int], length: int, exchange: float, seed: int) -> None:
    nodes, per_node = shape
    home = [set(node) for node in draw(by_node(nodes, per_node, length, mode="eval"))]
    samplers = by_node(nodes, per_node, length, mode="eval", exchange=exchange, seed=seed)
    away = []
    for _ in range(2):
        epoch = draw(samplers)
        assert sum(epoch, Counter()) == Counter(range(length)), "exactly once"
        rows = length // nodes
        moved = [set(node) - own for node, own in zip(epoch, home, strict=True)]
        expected = round(exchange * rows) if nodes > 1 else 0
        assert [len(node) for node in moved] == [expected] * nodes, "each node gets as many as it gives"
        away.append(moved)
    if 10 < len(away[0][0]) < length // nodes // 2 and nodes > 1:
        assert away[0] != away[1], "drawn anew each epoch"


@given(
    before=st.sampled_from([(1, 2), (2, 1), (2, 2), (3, 1)]),
    after=st.sampled_from([(1, 2), (2, 1), (2, 2), (4, 1)]),
    steps=st.integers(0, 12),
    exchange=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=60)
def test_another_number_of_nodes_goes_on(
    before: tuple[int, int], after: tuple[int, int], steps: int, exchange: float
) -> None:
    length, options = 41, {"mode": "eval", "seed": 5, "exchange": exchange}
    first = list(itertools.chain(*by_node(*before, length, **options)))
    seen = [list(itertools.islice(iterator, steps)) for iterator in map(iter, first)]
    states = [sampler.state_dict() for sampler in first if steps]
    state = states[0] if steps else first[0].state_dict()
    second = by_node(*after, length, **options)
    for sampler in itertools.chain(*second):
        sampler.load_state_dict(through_json(state))
    rest = draw(second)
    if state["epoch"] == 0:
        assert sum(rest, Counter(itertools.chain(*seen))) == Counter(range(length))
        fresh = by_node(*after, length, **options)
        for sampler in itertools.chain(*fresh):
            sampler.set_epoch(1)
        assert draw(second) == draw(fresh), "the next epoch is dealt to the new nodes"


@pytest.mark.parametrize("task", [("0", "1"), ("0", "2")], ids=["a script", "a daemon on each node"])
def test_what_slurm_said_of_another_process_is_not_believed(
    task: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun and mp.spawn under SLURM: ranks inherit the place of the one process that SLURM started."""
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_NNODES")
    for name, value in zip(names, (*task, "0", "0", "2"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match="pass num_nodes"):
        DistributedSampler(range(80), 8, 3, partition="node")
    assert DistributedSampler(range(80), 8, 3, partition="node", num_nodes=2)._place == (0, 3, 2)


def test_one_rank_is_one_node() -> None:
    assert list(DistributedSampler(range(20), partition="node")) == order(20, 0, 0)
