"""One order: a state says which comes next, a resume never goes on with another one, a seed has one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import fastload
from fastload import DistributedSampler, File, ImageFolder, Mixture, TableDataset
from fastload.errors import ArgumentError
from tests.loaderdata import identity, seed_all, through_json
from tests.process.test_resume import ORDERS, Ids, Noise, loader, seeded, with_order
from tests.process.test_samples_at import folder, photos
from tests.sharddata import dataset as shard_dataset
from tests.sharddata import shard, shards, write
from tests.shortform import short_form

__all__ = ["folder", "photos"]

pytestmark = [pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")]

N = 37


# --- a state says which order comes next ------------------------------------------------------------------


def mixture() -> Any:
    return Mixture({"a": Ids(12), "b": Ids(20)}, [1, 3], num_samples=24)


MADE: dict[str, Callable[[], Any]] = {
    **{name: with_order(name) for name in ORDERS},
    "mixture": lambda: loader(mixture(), shuffle=True),
    "noise of workers": lambda: loader(Noise(), shuffle=True, num_workers=2),
    "persistent worker": lambda: loader(shuffle=True, num_workers=1, persistent_workers=True),
    "a generator and noise": lambda: loader(Noise(), shuffle=True, generator=seeded(), num_workers=1),
}


def fresh(run: Any) -> None:
    """A loader that was never iterated over."""


def ended(run: Any) -> None:
    """At the end of an epoch."""
    list(run)


def begun(run: Any) -> Any:
    """Before the first batch of the second epoch."""
    list(run)
    return iter(run)


# The short form has all moments of an order of each sort, and the last one of all orders.
SORTS = ("shuffle", "custom, state", "mixture", "noise of workers")
each_at_each_moment = pytest.mark.parametrize(
    ("name", "moment"),
    short_form(
        itertools.product(MADE, (fresh, ended, begun)),
        lambda name, moment: moment == begun or name in SORTS,
    ),
)


@each_at_each_moment
def test_state_says_what_comes_next_whatever_the_scripts_draw_after_it(name: str, moment: Any) -> None:
    seed_all(7)
    run = MADE[name]()
    iterator = moment(run)
    state = through_json(run.state_dict())
    seed_all(8)
    assert through_json(run.state_dict()) == state
    following = list(run if iterator is None else iterator)
    seed_all(9)
    resumed = MADE[name]()
    resumed.load_state_dict(state)
    seed_all(10)
    assert list(resumed) == following


@each_at_each_moment
def test_asking_for_a_state_changes_nothing(name: str, moment: Any) -> None:
    def epochs(*, asks: bool) -> Any:
        seed_all(7)
        run = MADE[name]()
        iterator = moment(run)
        if asks:
            run.state_dict()
        following = list(run if iterator is None else iterator)
        return following, list(run), torch.get_rng_state().tolist(), random.getstate()

    assert epochs(asks=True) == epochs(asks=False)


@pytest.mark.parametrize("moment", [fresh, ended])
def test_state_of_shards_says_what_comes_next(moment: Any, tmp_path: Path) -> None:
    write(tmp_path, shards("tar"))

    def made() -> Any:
        data = shard_dataset("tar", str(tmp_path / "*.tar"), fields="cls")
        return fastload.DataLoader(data, 16, shuffle=True, collate_fn=identity)

    run = made()
    moment(run)
    state = through_json(run.state_dict())
    following = list(run)
    resumed = made()
    resumed.load_state_dict(state)
    assert list(resumed) == following


# --- no resume with another order in silence --------------------------------------------------------------


class Pairs(Ids):
    def __getitem__(self, index: Any) -> int:
        if isinstance(index, Opaque):
            return index.number
        return int(index if isinstance(index, int | str | torch.Tensor) else index[0])


class Opaque:
    """An index whose text says nothing about it."""

    def __init__(self, number: int) -> None:
        self.number = number


class Given(Sampler[Any]):
    """Of a user: gives what it holds, and nothing tells which order that is."""

    def __init__(self, indices: list[Any]) -> None:
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._indices)


def chosen(number: int) -> list[int]:
    return random.Random(number).sample(range(N), N)


def batches_of(indices: list[int]) -> list[list[int]]:
    return [indices[at : at + 5] for at in range(0, N, 5)]


# number of an order -> arguments of the loader
CHOSEN: dict[str, Callable[[int], dict[str, Any]]] = {
    "list": lambda n: {"sampler": chosen(n)},
    "tuple": lambda n: {"sampler": tuple(chosen(n))},
    "list of batches": lambda n: {"batch_sampler": batches_of(chosen(n))},
    "BatchSampler of a list": lambda n: {"batch_sampler": BatchSampler(chosen(n), 5, False)},
    "SubsetRandomSampler": lambda n: {"sampler": SubsetRandomSampler(chosen(n)[:30])},
    "SubsetRandomSampler of a tensor": lambda n: {"sampler": SubsetRandomSampler(torch.tensor(chosen(n)))},
    "RandomSampler": lambda n: {"sampler": RandomSampler(Ids(), replacement=n == 1)},
    "torch's DistributedSampler": lambda n: {
        "sampler": torch.utils.data.DistributedSampler(Ids(), 1, 0, seed=n)
    },
    "WeightedRandomSampler": lambda n: {"sampler": WeightedRandomSampler(np.arange(1, N + 1) ** n, 30)},
    "Subset": lambda n: {"dataset": Subset(Ids(), chosen(n)[:30]), "shuffle": True},
    "Subset in a Concat in a Subset": lambda n: {
        "dataset": Subset(ConcatDataset([Ids(), Subset(Ids(), chosen(n)[:20])]), range(50)),
        "shuffle": True,
    },
    "Subset in a map": lambda n: {"dataset": fastload.map(Subset(Ids(), chosen(n)), str)},
    "Subset in a mixture": lambda n: {
        "dataset": Mixture({"a": Subset(Ids(), chosen(n)), "b": Ids()}, [1, 1])
    },
}
# The same, of samplers that nothing is known about before they are iterated over.
UNKNOWN: dict[str, Callable[[int], dict[str, Any]]] = {
    "generator": lambda n: {"sampler": (index for index in chosen(n))},
    "own": lambda n: {"sampler": Given(chosen(n))},
    "own of (index, scale)": lambda n: {"sampler": Given([(i, i / 8) for i in chosen(n)])},
    "own of texts": lambda n: {"sampler": Given([str(i) for i in chosen(n)])},
    "own of batches of tensors": lambda n: {
        "batch_sampler": Given([torch.tensor(indices) for indices in batches_of(chosen(n))])
    },
    "own of single pairs": lambda n: {
        "sampler": Given([(i, {"scale": i / 8}) for i in chosen(n)]),
        "batch_size": None,
        "collate_fn": identity,
    },
}


def at_work(options: dict[str, Any]) -> Any:
    return loader(**({"dataset": Pairs()} | options))


def state_after(options: dict[str, Any], batches: int | None) -> Any:
    run = at_work(options)
    if batches is None:
        return through_json(run.state_dict()), []
    iterator = iter(run)
    seen = list(itertools.islice(iterator, batches))
    return through_json(run.state_dict()), seen + list(iterator)


@pytest.mark.parametrize("batches", [None, 0, 2])
@pytest.mark.parametrize("name", CHOSEN)
def test_what_a_sampler_or_subset_holds_is_compared(name: str, batches: int | None) -> None:
    state, whole = state_after(CHOSEN[name](1), batches)
    with pytest.raises(ArgumentError, match=r"the samples would differ|other indices than in the run"):
        at_work(CHOSEN[name](2)).load_state_dict(state)
    resumed = at_work(CHOSEN[name](1))
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert batches is None or rest == whole[batches:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_was_handed_out_is_compared_whatever_the_indices_are(name: str, workers: int) -> None:
    state, whole = state_after(UNKNOWN[name](1) | {"num_workers": workers}, 2)
    resumed = at_work(UNKNOWN[name](2))
    resumed.load_state_dict(state)
    with pytest.raises(ArgumentError, match="gives another order than in the run that was saved"):
        list(resumed)
    resumed = at_work(UNKNOWN[name](1))
    resumed.load_state_dict(state)
    assert list(resumed) == whole[2:]
    if name != "generator":  # which is drawn from by whoever makes the order once more
        with pytest.raises(ArgumentError, match="gives another order than in the run"):
            other = at_work(UNKNOWN[name](2))
            other.load_state_dict(state)
            other.samples_at(0)


def test_indices_that_nothing_tells_apart_are_refused_within_an_epoch() -> None:
    options = {"sampler": Given([Opaque(number) for number in range(N)])}
    state, _ = state_after(options, 2)
    resumed = at_work(options)
    resumed.load_state_dict(state)
    with pytest.raises(ArgumentError, match=r"cannot be compared.*__repr__"):
        list(resumed)
    state, _ = state_after(options, None)
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 8


# --- a state of other samples -----------------------------------------------------------------------------


def state_of(data: Any) -> Any:
    run = fastload.DataLoader(data, 4)
    next(iter(run))
    return through_json(run.state_dict())


def test_samples_with_other_keys_are_refused_and_a_new_place_is_named(photos: Path, tmp_path: Path) -> None:
    crop = fastload.CenterCrop(8)
    state = state_of(ImageFolder(str(photos), crop))
    for where in ("moved", "renamed"):
        (tmp_path / where).mkdir()
        for number, file in enumerate(sorted(photos.glob("*/*.jpg"))):
            name = f"{where}-{number:03}.jpg" if where == "renamed" else file.name
            target = tmp_path / where / file.parent.name / name
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(file.read_bytes())
    with pytest.raises(ArgumentError, match=r"other keys than in the run.*its place may have changed"):
        fastload.DataLoader(ImageFolder(str(tmp_path / "renamed"), crop), 4).load_state_dict(state)
    resumed = fastload.DataLoader(ImageFolder(str(tmp_path / "moved"), crop), 4)
    with pytest.warns(UserWarning, match=rf"were read from .*{photos}.*now read from .*moved"):
        resumed.load_state_dict(state)
    assert len(list(resumed)) == 10
    with pytest.warns(UserWarning, match=r"had size=\[8, 8\], and has now size=\[9, 9\]"):
        fastload.DataLoader(ImageFolder(str(photos), fastload.CenterCrop(9)), 4).load_state_dict(state)
    rows = {"file": sorted(str(file.relative_to(photos)) for file in photos.glob("*/*.jpg"))}
    for order in (rows["file"], rows["file"][::-1]):
        table = TableDataset({"file": order}, {"x": File("file")}, url=str(photos), transform={"x": crop})
        if order == rows["file"]:
            with pytest.warns(UserWarning, match="a ImageFolder, and this loader has a TableDataset"):
                fastload.DataLoader(table, 4).load_state_dict(state)
        else:
            with pytest.raises(ArgumentError, match="other keys"):
                fastload.DataLoader(table, 4).load_state_dict(state)


# --- one order for a seed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": RandomSampler(Ids())},
        {"sampler": RandomSampler(Ids(), replacement=True)},
        {"sampler": SubsetRandomSampler(range(9, 30))},
        {"sampler": WeightedRandomSampler(range(1, N + 1), 30)},
        {"batch_sampler": BatchSampler(RandomSampler(Ids()), 4, True)},
        {"shuffle": True, "batch_size": None, "collate_fn": int},
    ],
    ids=["shuffle", "random", "replacement", "subset", "weighted", "batch_sampler", "single"],
)
def test_torchs_samplers_draw_from_the_seed_and_leave_torchs_generator_alone(options: dict[str, Any]) -> None:
    def epochs(entropy: int) -> list[Any]:
        seed_all(entropy)
        run = loader(seed=3, **options)
        made = []
        for _ in range(3):
            iterator = iter(run)
            before = torch.get_rng_state()
            made.append(list(iterator))
            assert torch.equal(torch.get_rng_state(), before)
        return made

    expected = epochs(1)
    assert epochs(2) == expected and expected[0] != expected[1] != expected[2]
    asked = loader(seed=3, **options)
    if options.get("batch_size", 0) is not None:
        for epoch, step in ((0, 0), (2, 3)):  # known before any of them has begun
            assert [row.index for row in asked.samples_at(step, epoch)] == expected[epoch][step]
    # The rest of an epoch, and all later ones, are those of the run that was saved.
    run = loader(seed=3, **options)
    list(run)
    head = list(itertools.islice(run, 2))
    resumed = loader(seed=3, **options)
    resumed.load_state_dict(through_json(run.state_dict()))
    assert [head + list(resumed), list(resumed)] == expected[1:]


def test_seed_has_the_order_of_the_distributed_sampler_on_one_rank() -> None:
    one, other = loader(shuffle=True, seed=4), loader(sampler=DistributedSampler(range(N), 1, 0, seed=4))
    assert [list(one), list(one)] == [list(other), list(other)]


def test_generator_that_was_given_orders_in_place_of_the_seed() -> None:
    def torchs(**options: Any) -> Any:
        return torch.utils.data.DataLoader(Ids(), 5, collate_fn=identity, **options)

    assert list(loader(shuffle=True, seed=1, generator=seeded(5))) == list(
        torchs(shuffle=True, generator=seeded(5))
    )
    seed_all(3)
    ours = [list(run) for run in [loader(shuffle=True)] for _ in range(2)]
    seed_all(3)
    assert ours == [list(run) for run in [torchs(shuffle=True)] for _ in range(2)]


# --- samples_at never names other samples than those that are handed out ----------------------------------


def test_samples_of_a_state_of_batch_0_on_other_nodes_are_those_handed_out() -> None:
    def made(ranks: int, nodes: int) -> Any:
        sampler = DistributedSampler(range(8), ranks, 0, seed=3, partition="node", num_nodes=nodes)
        return loader(Ids(8), batch_size=2, sampler=sampler, seed=1)

    saved = made(2, 2)
    iter(saved)
    state = through_json(saved.state_dict())
    run = made(1, 1)
    run.load_state_dict(state)
    handed_out = list(run)
    assert [[row.index for row in run.samples_at(step, 0)] for step in range(4)] == handed_out
    again = made(1, 1)
    again.load_state_dict(through_json(run.state_dict()))
    assert [again.batch_at(step, 0) for step in range(4)] == handed_out


@pytest.mark.parametrize(
    ("names", "weights"), [("ab", [7, 1]), ("abc", [1, 1, 1]), ("b", [1]), ("ba", [1, 1]), ("ab", [1, 1])]
)
@pytest.mark.parametrize("pending", [False, True])
def test_samples_of_a_mixture_that_goes_on_with_other_weights_are_those_handed_out(
    names: str, weights: list[int], pending: bool
) -> None:
    def made(names: str, weights: list[int]) -> Any:
        sources = {name: TensorDataset(torch.arange(20) + 100 * "abc".index(name)) for name in names}
        return fastload.DataLoader(Mixture(sources, weights, num_samples=24), 4, seed=1, shuffle=True)

    saved = made("ab", [1, 1])
    iterator = iter(saved)
    head = [next(iterator)[0].tolist() for _ in range(2)]
    if pending:
        saved.dataset.weights = {"a": 0.1, "b": 0.9}
    run = made(names, weights)
    run.load_state_dict(through_json(saved.state_dict()))
    rest = [batch.tolist() for (batch,) in run]
    for asked in (run, made(names, weights)):
        if asked is not run:
            asked.load_state_dict(through_json(run.state_dict()))
        told = [[int(run.dataset[row.index][0]) for row in asked.samples_at(step, 0)] for step in range(2, 6)]
        assert told == rest
        if names == "ab":
            assert [[int(run.dataset[r.index][0]) for r in asked.samples_at(s, 0)] for s in (0, 1)] == head
        else:
            with pytest.raises(ArgumentError, match="the mixture had the sources"):
                asked.samples_at(0, 0)


# --- streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "advice"),
    [("parquet", "records are in no cache here.*warm"), ("tar", "not indexed here.*index files")],
)
def test_state_within_an_indexed_epoch_is_refused_where_it_would_be_streamed(
    kind: str, advice: str, batches: int, tmp_path: Path
) -> None:
    """After its last batch too, where the sampler stands before the next epoch."""
    url = write(tmp_path / kind, {f"a.{kind}": shard(kind, range(11))[0]})

    def made(cache: str) -> Any:
        data = shard_dataset(kind, url, cache=str(tmp_path / cache))
        return fastload.DataLoader(data, 4, shuffle=True, collate_fn=identity)

    run = made("full")
    list(run)
    iterator = iter(run)
    list(itertools.islice(iterator, batches))
    resumed = made("empty")
    resumed.load_state_dict(through_json(run.state_dict()))
    with pytest.raises(ArgumentError, match=f"an epoch of an indexed dataset, and .*{advice}"):
        list(resumed)


@pytest.mark.parametrize("change", [{"shuffle_buffer": 80}, {"fields": "label", "shuffle_buffer": "2KB"}])
def test_block_of_a_stream_is_refused_where_it_would_have_other_records(
    change: dict[str, Any], tmp_path: Path
) -> None:
    kind = "parquet" if "fields" in change else "tar"
    url = write(tmp_path / kind, {name: body for name, body in shards(kind).items() if body})
    options: dict[str, Any] = {"fields": ("label", "name")} if kind == "parquet" else {"decode": {"jpg": len}}
    options["shuffle_buffer"] = change["shuffle_buffer"] if kind == "parquet" else 40

    def made(**others: Any) -> Any:
        data = shard_dataset(kind, url, **(options | others))
        return fastload.DataLoader(data, 10, shuffle=True, collate_fn=identity)

    run = made()
    iterator = iter(run)
    list(itertools.islice(iterator, 11))
    state = through_json(run.state_dict())
    with pytest.raises(ArgumentError, match="another shuffle_buffer, or other fields of Parquet"):
        made(**change).load_state_dict(state)
    resumed = made()
    resumed.load_state_dict(state)
    assert list(resumed) == list(iterator)
