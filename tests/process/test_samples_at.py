"""`samples_at` and `batch_at`: the samples of any step, past or to come, of any rank, after any resume."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

import fastload
from fastload import (
    ByEpoch,
    CenterCrop,
    DataLoader,
    DistributedSampler,
    ImageFolder,
    Mixture,
    MixtureSampler,
    RandomResizedCrop,
)
from fastload.errors import ArgumentError
from fastload.loader.samples_at import SampleAt
from tests.loaderdata import told
from tests.photos import pillow_jpeg, scene
from tests.sharddata import write
from tests.shortform import short_form

N = 41
CROP = RandomResizedCrop(16, flip=0.5)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {f"class{n % 3}/{n:03}.jpg": pillow_jpeg(scene(40 + n % 5, 30, n)) for n in range(N)}
    return Path(write(tmp_path_factory.mktemp("photos"), files))


@pytest.fixture
def folder(photos: Path, keep: Any) -> Any:
    def make(transform: Any = CROP, **options: Any) -> Any:
        return keep(ImageFolder(str(photos), transform, **options))

    return make


def run(loader: Any, epochs: int = 2, stop: int | None = None) -> dict[tuple[int, int], Any]:
    """(epoch, step) -> batch; `stop`: the steps of the last epoch, which is then left."""
    seen = {}
    first = loader.state_dict()["epoch"]
    for epoch in range(first, first + epochs):
        start = loader.state_dict()["batches"]
        for step, batch in enumerate(loader, start):
            seen[epoch, step] = told(batch)
            if stop is not None and epoch == first + epochs - 1 and step == stop - 1:
                break
    return seen


class Noisy(Dataset[torch.Tensor]):
    """Draws from the process-wide generators."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + random.random(), float(np.random.rand()), float(torch.rand(()))])


ORDERS: dict[str, Any] = {
    "shuffled": lambda n: {"shuffle": True},
    "in order": lambda n: {},
    "by a generator": lambda n: {"shuffle": True, "generator": torch.Generator().manual_seed(1)},
    "by a sampler's generator": lambda n: {
        "sampler": RandomSampler(range(n), generator=torch.Generator().manual_seed(1))
    },
    "weighted": lambda n: {"sampler": WeightedRandomSampler([1.0] * n, n)},
    "of a subset": lambda n: {"sampler": SubsetRandomSampler(range(3, n))},
    "one by one": lambda n: {"sampler": SequentialSampler(range(n)), "batch_size": None},
    "distributed": lambda n: {"sampler": DistributedSampler(range(n), 2, 1, seed=3)},
    "distributed by torch": lambda n: {"sampler": TorchDistributedSampler(range(n), 2, 1)},
    "batches of one's own": lambda n: {"batch_sampler": [[i, i + 1] for i in range(0, n - 1, 2)]},
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_batch_of_a_run_is_made_again(folder: Any, order: str) -> None:
    arguments = {"batch_size": 8} | ORDERS[order](N)
    if "batch_sampler" in arguments:
        del arguments["batch_size"]
    dataset = folder()
    loader = DataLoader(dataset, **arguments)
    seen = run(loader, epochs=2, stop=2)
    again = DataLoader(dataset, **arguments)
    again.load_state_dict(loader.state_dict())
    for asked in (loader, again):
        for (epoch, step), batch in random.Random(0).sample(sorted(seen.items(), key=lambda one: one[0]), 5):
            assert told(asked.batch_at(step, epoch)) == batch, (epoch, step)
            rows = asked.samples_at(step, epoch)
            labels = batch[1] if isinstance(batch[1], list) else [batch[1]]
            assert [row.label for row in rows] == labels


def test_asking_does_not_move_the_iteration(folder: Any) -> None:
    dataset = folder(ByEpoch({0: CROP, 1: CenterCrop(16)}))
    arguments: dict[str, Any] = {"sampler": DistributedSampler(range(N), 1, 0, seed=2), "seed": 5}
    alone = run(DataLoader(dataset, 8, **arguments))
    arguments["sampler"] = DistributedSampler(range(N), 1, 0, seed=2)
    loader = DataLoader(dataset, 8, **arguments)
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    for epoch in range(2):
        for step, batch in enumerate(loader):
            for other in (0, step, step + 1, 5):
                loader.samples_at(min(other, 5), 1 - epoch)
            assert told(loader.batch_at(5, 1)) == alone[1, 5]
            assert told(batch) == alone[epoch, step]
    assert torch.equal(torch.get_rng_state(), expected) or loader.generator is None


def test_the_coming_steps_are_known(folder: Any) -> None:
    sampler = DistributedSampler(range(N), 1, 0, seed=2)
    loader = DataLoader(folder(), 8, sampler=sampler, seed=5)
    rows = {(epoch, step): loader.samples_at(step, epoch) for epoch in range(3) for step in range(6)}
    made = {place: told(loader.batch_at(place[1], place[0])) for place in rows}
    for place, batch in run(loader, epochs=3).items():
        assert made[place] == batch and [one.label for one in rows[place]] == batch[1]
        assert rows[place] == loader.samples_at(place[1], place[0])


def test_crop_and_flip_are_those_of_the_batch(folder: Any, photos: Path) -> None:
    dataset = folder(RandomResizedCrop(16, flip=0.5))
    loader = DataLoader(dataset, 8, shuffle=True)
    (images, labels), *_ = run(loader, epochs=1).values()
    for row in loader.samples_at(0, 0):
        assert isinstance(row, SampleAt) and row.key is not None and row.crop is not None
        left, top, right, bottom = row.crop
        from PIL import Image

        cut = Image.open(photos / row.key).crop((int(left), int(top), int(right), int(bottom)))
        pixels = np.asarray(cut.resize((16, 16), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
        pixels = pixels[..., ::-1] if row.flip else pixels
        assert abs(pixels.astype(int) - np.array(images[row.row])).mean() < 6
        assert dataset.samples[row.index] == (row.key, row.label) == (row.key, int(labels[row.row]))


@pytest.mark.parametrize("number", short_form(range(27), lambda number: number == 0))
def test_random_steps_are_made_again_after_changes_of_ranks_workers_and_cache(
    folder: Any, tmp_path: Path, number: int
) -> None:
    """A run over several numbers of ranks; its batches are asked of the state of each rank at the end."""
    rng, modes = random.Random(number), [None, "raw", "dct"]
    seen: dict[tuple[int, int, int], Any] = {}
    states: list[Any] = [None]
    for _ in range(4):
        ranks, stop = rng.choice([1, 2, 3]), rng.randrange(1, 4)
        state, states = states[0], []
        for rank in range(ranks):
            loader = _loader(folder, tmp_path, rank, ranks, rng.choice([0, 0, 2]), rng.choice(modes))
            if state is not None:
                loader.load_state_dict(state)
            begun = loader.state_dict()["batches"]
            for (epoch, step), batch in run(loader, epochs=2, stop=begun + stop).items():
                seen[epoch, step, rank] = batch
            states.append(loader.state_dict())
        asked = {rank: _loader(folder, tmp_path, rank, ranks, 0, rng.choice(modes)) for rank in range(ranks)}
        for rank, loader in asked.items():
            loader.load_state_dict(states[rank])
        for (epoch, step, rank), batch in rng.sample(sorted(seen.items(), key=lambda one: one[0]), 10):
            made = asked[rank % ranks].batch_at(step, epoch, rank=rank)
            assert told(made) == batch, (number, epoch, step, rank)


def _loader(folder: Any, cache: Path, rank: int, ranks: int, workers: int, mode: Any) -> Any:
    kept = None if mode is None else fastload.Cache(cache / mode, mode)
    sampler = DistributedSampler(range(N), ranks, rank, seed=7)
    return DataLoader(folder(cache=kept), 4, sampler=sampler, num_workers=workers, seed=1)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_another_world_is_what_its_ranks_see(folder: Any, world_size: int) -> None:
    asked = DataLoader(folder(), 4, sampler=DistributedSampler(range(N), 3, 0, seed=7), seed=1)
    for rank in range(world_size):
        loader = DataLoader(
            folder(), 4, sampler=DistributedSampler(range(N), world_size, rank, seed=7), seed=1
        )
        for (epoch, step), batch in run(loader).items():
            made = asked.batch_at(step, epoch, rank=rank, world_size=world_size)
            assert told(made) == batch, (epoch, step, rank)


def test_a_mixture_is_known_past_changes_of_its_weights(folder: Any) -> None:
    def make(rank: int = 0, ranks: int = 1) -> Any:
        sources = {"a": folder(), "b": Subset(folder(), range(7)), "c": folder()}
        mixture = Mixture(sources, {"a": 0.5, "b": 0.3, "c": 0.2}, num_samples=60)
        sampler = MixtureSampler(mixture, ranks, rank, seed=3)
        return DataLoader(mixture, 5, sampler=sampler, seed=2)

    loader = make()
    seen = {}
    for epoch in range(2):
        for step, batch in enumerate(loader):
            seen[epoch, step] = told(batch)
            if step == 4 + epoch:
                loader.dataset.weights = {"a": 0.1, "b": 0.1 * (1 + epoch), "c": 0.5}
    again = make()
    again.load_state_dict(loader.state_dict())
    for asked in (loader, again):
        for (epoch, step), batch in seen.items():
            assert told(asked.batch_at(step, epoch)) == batch, (epoch, step)


def test_single_samples_of_a_mixture_are_made_again() -> None:
    mixture = Mixture([range(9), range(20, 29)], [1, 1])  # type: ignore[list-item]
    loader: Any = DataLoader(mixture, batch_size=None, shuffle=True, seed=1)
    assert list(loader) == [loader.batch_at(step, 0) for step in range(18)]


def test_a_mixture_resumed_with_other_weights_says_how_many_steps_it_has(folder: Any) -> None:
    def make(part: float) -> Any:
        mixture = Mixture({"a": folder(), "b": folder()}, {"a": part, "b": 1}, num_samples=60)
        return DataLoader(mixture, 5, sampler=MixtureSampler(mixture, seed=3))

    loader, again = make(1), make(7)
    next(iter(loader))
    again.load_state_dict(loader.state_dict())
    next(iter(again))
    with pytest.raises(ArgumentError, match="epoch 0 has no step 99 on this rank: it has 12 steps"):
        again.samples_at(99)


def test_own_datasets_with_a_seed_are_made_again_and_without_are_refused() -> None:
    sampler = DistributedSampler(range(20), 1, 0)
    loader = DataLoader(Noisy(), 4, sampler=sampler, seed=3, num_workers=2)
    for (epoch, step), batch in run(loader).items():
        assert told(loader.batch_at(step, epoch)) == batch
    loader = DataLoader(Noisy(), 4, shuffle=True)
    run(loader, epochs=1)
    with pytest.raises(ArgumentError, match="draw random numbers"):
        loader.batch_at(0, 0)
    assert [row.index for row in loader.samples_at(0, 0)] and loader.samples_at(0, 0)[0].crop is None


def test_a_bad_sample_is_named_in_its_row(folder: Any, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "bad.jpg").write_bytes(b"no image")
    (tmp_path / "x" / "good.jpg").write_bytes(next(photos.rglob("*.jpg")).read_bytes())
    loader = DataLoader(ImageFolder(str(tmp_path), CROP), 2)
    bad, good = loader.samples_at(0)
    assert bad.key == "x/bad.jpg" and "DecodeError" in bad.error and bad.crop is None
    assert good.key == "x/good.jpg" and not good.error


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def test_what_cannot_be_known_is_said(folder: Any) -> None:
    loader = DataLoader(folder(), 8, shuffle=True)
    sampled = DataLoader(folder(), 8, sampler=DistributedSampler(range(N), 2, 0), seed=1)
    for asked, arguments, words in [
        (loader, {"step": 0}, "draws its order then"),
        (loader, {"step": -1}, "step must be a whole number"),
        (loader, {"step": True}, "step must be a whole number"),
        (sampled, {"step": 99}, "no step 99"),
        (sampled, {"step": 0, "rank": 2}, "2 ranks, found rank 2"),
        (sampled, {"step": 0, "rank": 4, "world_size": 4}, "from 0 to 3"),
        (loader, {"step": 0, "epoch": "last"}, "epoch must be a whole number"),
        (DataLoader(Endless(), 2), {"step": 0}, "iterable dataset"),
        (DataLoader(folder(), 8), {"step": 0, "world_size": 2}, "DistributedSampler"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            asked.samples_at(**arguments)
    with pytest.raises(ArgumentError, match="seed="):
        DataLoader(folder(), 8).batch_at(0)
    assert DataLoader(folder(), 8).samples_at(0)[0].crop is None


@pytest.mark.parametrize("sampler", [[3, 1, 2], (3, 1, 2), range(3), np.arange(3), torch.arange(3)])
def test_the_first_epoch_of_indices_that_are_given_is_known(sampler: Any) -> None:
    loader: Any = DataLoader(range(4), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    assert [sample.index for sample in loader.samples_at(1)] == [sampler[2]]


def test_a_state_stays_small_over_many_epochs() -> None:
    sampler = DistributedSampler(range(8), 1, 0)
    loader = DataLoader(TensorDataset(torch.arange(8)), 4, sampler=sampler)
    run(loader, epochs=90)
    assert len(repr(loader.state_dict())) < 30_000
    assert loader.samples_at(1, 3)[0].index in range(8)


def test_orders_of_the_last_epochs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.order.position.ORDERS_KEPT", 5)
    loader = DataLoader(range(8), 4, sampler=DistributedSampler(range(8), 1, 0))  # type: ignore[arg-type]
    run(loader, epochs=9)
    assert len(loader.state_dict()["history"]) == 5
    assert loader.samples_at(1, 4)[0].index in range(8)
    with pytest.raises(ArgumentError, match=r"nothing is known of epoch 3: .* 10,000 others have begun"):
        loader.samples_at(1, 3)


def test_states_of_the_last_two_epochs_are_kept() -> None:
    """Those of torch's generator take kilobytes each."""
    loader = DataLoader(range(8), **({"batch_size": 4} | ORDERS["weighted"](8)))  # type: ignore[arg-type]
    run(loader, epochs=5)
    kept = ["forgotten" not in order for order in loader.state_dict()["history"]]
    assert kept == [False, False, False, True, True]
    with pytest.raises(ArgumentError, match=r"order of epoch 2 .* is kept for the last two epochs only"):
        loader.samples_at(0, 2)


@pytest.mark.parametrize("order", ["in order", "weighted"])
def test_iteration_costs_the_same_after_hundreds_of_others(order: str) -> None:
    loader = DataLoader(range(8), **({"batch_size": 4} | ORDERS[order](8)))  # type: ignore[arg-type]

    def calls() -> int:
        """Return how many functions of Python one more iteration calls."""
        events: list[str] = []
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            next(iter(loader))
        finally:
            sys.setprofile(None)
        return events.count("call")

    run(loader, epochs=3)
    before = calls()
    for _ in range(300):
        next(iter(loader))
    assert calls() < before + 100


def test_what_is_left_out_is_left_out_of_the_answers(folder: Any) -> None:
    def make(workers: int) -> Any:
        sampler = DistributedSampler(range(N), 1, 0, seed=2)
        return DataLoader(folder(), 8, sampler=sampler, seed=5, num_workers=workers)

    loader = make(2)
    before = loader.samples_at(3, 0)
    seen = {}
    for epoch in range(2):
        for batch in loader:
            step = loader.state_dict()["batches"] - 1
            seen[epoch, step] = told(batch)
            if (epoch, step) == (0, 1):
                loader.exclude([before[0].index, before[5].key])
                loader.skip(4)
    again = make(0)
    again.load_state_dict(loader.state_dict())
    for asked in (loader, again):
        assert asked.samples_at(4, 0) == [] and (0, 4) not in seen
        rows = asked.samples_at(3, 0)
        assert {one.row: one.replaces for one in rows if one.replaces is not None} == {
            0: before[0].index,
            5: before[5].index,
        }
        assert [one for one in rows if one.replaces is None] == [
            one for one in before if one.row not in (0, 5)
        ]
        for (epoch, step), batch in seen.items():
            assert told(asked.batch_at(step, epoch)) == batch, (epoch, step)
        with pytest.raises(ArgumentError, match="skipped"):
            asked.batch_at(4, 0)


class Shuffler:
    """Index batches in a random order, drawn from `numbers`."""

    def __init__(self, sampler: Any, numbers: random.Random | torch.Generator) -> None:
        self.sampler, self.numbers, self.batch_size = sampler, numbers, 4
        if isinstance(numbers, torch.Generator):
            self.generator = numbers

    def __len__(self) -> int:
        return -(-len(self.sampler) // 4)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        if isinstance(self.numbers, random.Random):
            self.numbers.shuffle(order)
        else:
            order = [order[at] for at in torch.randperm(len(order), generator=self.generator).tolist()]
        yield from (order[at : at + 4] for at in range(0, len(order), 4))


def _asked(sampler: Any, *, ask: bool) -> tuple[list[Any], list[Any]]:
    """(batches of two epochs, answers about their steps)"""
    loader: Any = DataLoader(TensorDataset(torch.arange(20)), batch_sampler=sampler, seed=1)
    batches, answers = [], []
    for _ in range(2):
        for step, (batch,) in enumerate(loader):
            batches.append(batch.tolist())
            if ask and step == 2:
                for other in range(5):
                    try:
                        answers.append(loader.batch_at(other)[0].tolist())
                    except ArgumentError as error:
                        answers.append(str(error))
    return batches, answers


@pytest.mark.parametrize("numbers", [random.Random, torch.Generator])
@pytest.mark.parametrize("inner", [SequentialSampler, DistributedSampler])
def test_batch_sampler_of_the_user_is_not_moved_and_gives_its_order_or_is_refused(
    numbers: Any, inner: Any
) -> None:
    def sampler() -> Shuffler:
        made = numbers(3) if numbers is random.Random else torch.Generator().manual_seed(3)
        return Shuffler(inner(range(20)), made)

    undisturbed, _ = _asked(sampler(), ask=False)
    batches, answers = _asked(sampler(), ask=True)

    assert batches == undisturbed
    if numbers is torch.Generator:
        assert answers == batches
    else:
        assert all("gives another order than in the run" in answer for answer in answers)


@pytest.mark.parametrize("owner", ["loader", "sampler"])
def test_generator_is_not_moved_before_the_first_batch(owner: str) -> None:
    def batches(*, ask: bool) -> list[Any]:
        data, generator = TensorDataset(torch.arange(20)), torch.Generator().manual_seed(3)
        order: dict[str, Any] = {"shuffle": True, "generator": generator}
        if owner == "sampler":
            order = {"sampler": RandomSampler(data, generator=generator)}
        loader: Any = DataLoader(data, batch_size=4, seed=1, **order)
        iterator = iter(loader)
        if ask:
            with pytest.raises(ArgumentError, match="draws its order with the first batch"):
                loader.batch_at(0)
        return [batch.tolist() for (batch,) in iterator]

    assert batches(ask=True) == batches(ask=False)


def test_coming_epochs_of_a_batch_sampler_of_the_user_are_refused() -> None:
    sampler: Any = Shuffler(SequentialSampler(range(20)), random.Random(3))
    loader: Any = DataLoader(TensorDataset(torch.arange(20)), batch_sampler=sampler, seed=1)

    with pytest.raises(ArgumentError, match="has not begun"):
        loader.batch_at(0)


class Twice(DistributedSampler):
    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            yield from (index, index)


def test_subclass_that_gives_other_samples_is_iterated_over() -> None:
    data = TensorDataset(torch.arange(20))
    loader: Any = DataLoader(data, batch_size=4, sampler=Twice(data, 1, 0), seed=1)
    batches = [batch.tolist() for (batch,) in loader]

    assert [loader.batch_at(step, 0)[0].tolist() for step in range(10)] == batches


class Own(torch.utils.data.Sampler[int]):
    """With a state of its own."""

    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        while self.given < 20:
            self.given += 1
            yield 7 * self.given % 20
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def test_sampler_with_a_state_is_known_after_a_resume_with_another_batch_size() -> None:
    data = TensorDataset(torch.arange(20))
    first: Any = DataLoader(data, batch_size=4, sampler=Own(), seed=1)
    iterator = iter(first)
    batches = [next(iterator)[0].tolist() for _ in range(2)]
    loader: Any = DataLoader(data, batch_size=3, sampler=Own(), seed=1)
    loader.load_state_dict(first.state_dict())
    batches += [batch.tolist() for (batch,) in loader]

    assert [loader.batch_at(step, 0)[0].tolist() for step in range(len(batches))] == batches


def _ranked(rank: int, world_size: int, batch_size: int, *, batched: bool = False) -> Any:
    data = TensorDataset(torch.arange(64))
    sampler = DistributedSampler(data, world_size, rank, seed=3)
    if batched:
        batches = torch.utils.data.BatchSampler(sampler, batch_size, False)
        return DataLoader(data, batch_sampler=batches, seed=1)
    return DataLoader(data, batch_size=batch_size, sampler=sampler, seed=1)


@pytest.mark.parametrize("batched", [False, True])
def test_another_world_has_the_exclusions_of_its_samples(batched: bool) -> None:
    whole = [row for step in range(8) for row in _ranked(0, 1, 8).batch_at(step)[0].tolist()]
    loader = _ranked(0, 2, 8, batched=batched)
    iterator = iter(loader)
    next(iterator), next(iterator)
    loader.exclude([*whole[16:20], *whole[40:44]])  # of samples 32 on

    other = [row for step in range(8) for row in loader.batch_at(step, rank=0, world_size=1)[0].tolist()]
    named = [one.index for step in range(8) for one in loader.samples_at(step, rank=0, world_size=1)]

    assert [at for at in range(64) if other[at] != whole[at]] == [40, 41, 42, 43]
    assert named == other


def test_asked_for_after_set_epoch_is_the_epoch_that_comes() -> None:
    first = _ranked(0, 1, 8)
    next(iter(first))
    loader = _ranked(0, 1, 8)
    loader.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="drops the position"):
        loader.sampler.set_epoch(5)

    coming = loader.batch_at(0)[0].tolist()

    assert coming == next(iter(loader))[0].tolist()


def test_steps_to_come_are_those_of_the_ranks_that_go_on() -> None:
    first = _ranked(0, 2, 8)
    iterator = iter(first)
    next(iterator), next(iterator)
    first.skip(3)  # samples 48 to 64, of which other steps have parts
    loader = _ranked(1, 3, 3)
    loader.load_state_dict(first.state_dict())

    before = [loader.batch_at(step)[0].tolist() for step in (2, 3)]
    found = [batch.tolist() for (batch,) in loader]
    state = loader.state_dict()
    loader = _ranked(1, 4, 2)
    loader.load_state_dict(state)

    assert before == found
    assert [loader.batch_at(step, 0)[0].tolist() for step in (2, 3)] == before


def test_epochs_to_come_repeat_where_nobody_calls_set_epoch() -> None:
    data = TensorDataset(torch.arange(20))
    loader: Any = DataLoader(data, batch_size=4, sampler=TorchDistributedSampler(data, 1, 0), seed=1)
    list(loader), list(loader)

    coming = loader.batch_at(0)[0].tolist()

    assert coming == next(iter(loader))[0].tolist()
