"""Epochs of shards whose samples are not indexed yet: every sample once, resumed exactly, until they are."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import Subset, get_worker_info

import fastload
from fastload import ShardSampler
from fastload.errors import ArgumentError, WorkerError
from fastload.loader.stream_epoch import StreamEpoch
from tests.loaderdata import At, through_json
from tests.patience import PATIENCE
from tests.shortform import short_form
from tests.streamdata import RowShards, Shards, content

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.usefixtures("no_leaks"),
]

LENGTHS = [5, 9, 0, 2, 7, 1]
ALL = {(shard, ordinal) for shard, length in enumerate(LENGTHS) for ordinal in range(length)}
Sample = tuple[int, int]


def rows(batch: Any) -> list[Sample]:
    """The samples of a batch, each held against its content."""
    table = batch if isinstance(batch, torch.Tensor) else torch.stack(list(batch), dim=-1)
    found = [tuple(row) for row in table.reshape(-1, 3).tolist()]
    for shard, ordinal, digest in found:
        assert digest == content(shard, ordinal)
    return [(shard, ordinal) for shard, ordinal, _ in found]


def once(samples: list[Sample], wanted: set[Sample] = ALL) -> bool:
    return Counter(samples) == Counter(wanted)


def flat(batches: Any) -> list[Sample]:
    return list(itertools.chain.from_iterable(map(rows, batches)))


def streamed(loader: Any) -> bool:
    """Whether the epoch that began last is read as streams."""
    return "streams" in loader.state_dict()


# --- every sample once -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "workers", "persistent"), [(Shards, 0, False), (Shards, 3, False), (RowShards, 3, True)]
)
def test_numbered_after_the_first_epoch(
    kind: type[Shards], workers: int, persistent: bool, tmp_path: Path
) -> None:
    loader = fastload.DataLoader(
        kind(LENGTHS, tmp_path / "places"),
        batch_size=4,
        shuffle=True,
        num_workers=workers,
        persistent_workers=persistent,
    )
    for name in ("the loader", "its sampler"):
        with pytest.raises(TypeError, match="not indexed yet"):
            len(loader if name == "the loader" else loader.sampler)  # type: ignore[arg-type]
    iterator = iter(loader)
    assert streamed(loader)
    assert once(flat(iterator))
    orders = []
    for epoch in (1, 2):
        iterator = iter(loader)
        assert not streamed(loader)
        assert loader.state_dict()["sampler"]["epoch"] == epoch
        orders.append(flat(iterator))
        assert once(orders[-1])
    assert orders[0] != orders[1]
    assert len(loader) == 6 and loader.sampler.num_samples == 24 == loader.sampler.total_size  # type: ignore[attr-defined]
    # From then on it is a DistributedSampler, index for index.
    plain = fastload.DistributedSampler(loader.dataset, 1, 0)  # type: ignore[arg-type]
    plain.set_epoch(1)
    assert orders[0] == [loader.dataset.place(index) for index in plain]  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 3])
def test_drop_last_is_by_stream(workers: int) -> None:
    loader = fastload.DataLoader(RowShards(LENGTHS), batch_size=4, num_workers=workers, drop_last=True)
    streams = RowShards(LENGTHS).plan_streams(
        max(1, workers), seed=0, epoch=0, shuffle=False, rank=0, ranks=1
    )
    wanted = sum(sum(LENGTHS[shard] for shard in stream["shards"]) // 4 for stream in streams)
    batches = [rows(batch) for batch in loader]
    assert [len(batch) for batch in batches] == [4] * wanted
    assert max(Counter(itertools.chain(*batches)).values()) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_no_samples_at_all(workers: int) -> None:
    for lengths in ([], [0, 0, 0]):
        loader = fastload.DataLoader(RowShards([*lengths]), batch_size=4, num_workers=workers)
        if lengths:
            assert [list(loader), list(loader)] == [[], []]


@pytest.mark.parametrize("kind", [Shards, RowShards])
def test_out_of_order(kind: type[Shards]) -> None:
    loader = fastload.DataLoader(kind(LENGTHS), batch_size=2, shuffle=True, num_workers=3, in_order=False)
    assert once(flat(loader)) and once(flat(loader))


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_left_and_begun_again(workers: int, persistent: bool) -> None:
    loader = fastload.DataLoader(
        RowShards(LENGTHS),
        batch_size=2,
        shuffle=True,
        num_workers=workers,
        persistent_workers=persistent,
    )
    whole = fastload.DataLoader(RowShards(LENGTHS), batch_size=2, shuffle=True, num_workers=workers)
    wanted = [[rows(batch) for batch in whole] for _ in range(4)]
    for epoch, taken in enumerate((1, 3, 5)):  # an epoch that something was drawn from counts
        assert [rows(batch) for batch in itertools.islice(loader, taken)] == wanted[epoch][:taken]
    assert [rows(batch) for batch in loader] == wanted[3]


def test_an_iterator_at_its_end_stays_there() -> None:
    for workers in (0, 2):
        loader = fastload.DataLoader(RowShards(LENGTHS), batch_size=4, num_workers=workers)
        first = iter(loader)
        assert once(flat(first))
        second = iter(loader)
        next(second)
        assert list(first) == [] and list(first) == []
        assert loader.sampler.epoch == 1  # type: ignore[attr-defined]
        assert loader.state_dict()["sampler"]["state"]["epoch"] == 1


# --- resuming ----------------------------------------------------------------------------------------------


def make(workers: int, dataset: Any = None, **options: Any) -> fastload.DataLoader[Any]:
    dataset = RowShards(LENGTHS) if dataset is None else dataset
    return fastload.DataLoader(
        dataset, **{"batch_size": 3, "shuffle": True, "num_workers": workers} | options
    )


# Each number of workers before and after, and the batches until the state: -1 stands for all.
SOME_CHANGES = [(0, 2, 0), (1, 3, -1), (2, 1, 4), (3, 0, 4)]


@pytest.mark.parametrize(
    ("before", "after", "taken"),
    short_form(itertools.product(range(4), range(4), (0, 4, -1)), lambda *change: change in SOME_CHANGES),
)
def test_resumed_with_the_very_next_sample(before: int, after: int, taken: int) -> None:
    """Also with other numbers of workers: the streams are those of the epoch's start, and so is the order."""
    whole = [[rows(batch) for batch in loader] for loader in [make(before)] * 2]
    loader = make(before)
    assert len(list(loader)) == len(whole[0])
    iterator = iter(loader)
    seen = [rows(batch) for batch in itertools.islice(iterator, taken if taken >= 0 else len(whole[1]))]
    state = through_json(loader.state_dict())
    resumed = make(after)
    resumed.load_state_dict(state)
    assert through_json(resumed.state_dict()) == state
    iterator = iter(resumed)
    assert streamed(resumed)
    seen += [rows(batch) for batch in iterator]
    assert seen == whole[1]
    assert once(flat(resumed))
    assert resumed.sampler.epoch == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_is_prefetched_is_not_in_the_state(workers: int) -> None:
    loader = make(workers, prefetch_factor=4) if workers else make(workers)
    iterator = iter(loader)
    first = rows(next(iterator))
    state = loader.state_dict()
    rest = flat(iterator)
    resumed = make(workers)
    resumed.load_state_dict(state)
    assert flat(resumed) == rest and once(first + rest)


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("before", [0, 2])
def test_numbered_in_the_meantime(before: int, after: int, tmp_path: Path) -> None:
    """The epoch that was begun as streams is finished as streams; the next one goes by number."""
    loader = make(before, RowShards(LENGTHS, tmp_path / "places"))
    iterator = iter(loader)
    seen = flat(itertools.islice(iterator, 3))
    state = through_json(loader.state_dict())
    del iterator
    dataset = RowShards(LENGTHS, tmp_path / "places")
    for shard in range(len(LENGTHS)):
        dataset.keep(shard)
    assert not dataset.must_stream()
    resumed = make(after, dataset)
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    assert streamed(resumed)
    assert once(seen + flat(iterator))
    iterator = iter(resumed)
    assert not streamed(resumed)
    assert resumed.state_dict()["sampler"]["epoch"] == 1 and once(flat(iterator))


def test_a_state_by_number_needs_numbers(tmp_path: Path) -> None:
    dataset = RowShards(LENGTHS, tmp_path / "places")
    for shard in range(len(LENGTHS)):
        dataset.keep(shard)
    loader = make(0, dataset)
    next(iter(loader))
    middle = loader.state_dict()
    elsewhere = make(0)
    elsewhere.load_state_dict(middle)
    with pytest.raises(ArgumentError, match=r"3 samples into an epoch of an indexed dataset.*index files"):
        iter(elsewhere)
    list(loader)
    elsewhere.load_state_dict(loader.state_dict())  # between epochs
    iterator = iter(elsewhere)
    assert streamed(elsewhere) and elsewhere.sampler.epoch == 2  # type: ignore[attr-defined]
    assert once(flat(iterator))


def test_set_epoch() -> None:
    orders = []
    for _ in range(2):
        loader = make(0)
        loader.sampler.set_epoch(7)  # type: ignore[attr-defined]
        orders += [flat(loader), flat(loader)]  # only set_epoch changes it from then on
    assert orders.count(orders[0]) == 4
    loader.sampler.set_epoch(8)  # type: ignore[attr-defined]
    assert flat(loader) != orders[0]

    next(iter(loader))
    state = loader.state_dict()
    resumed = make(0)
    resumed.load_state_dict(state)
    resumed.sampler.set_epoch(8)  # type: ignore[attr-defined]
    assert len(flat(resumed)) == len(ALL) - 3
    resumed.load_state_dict(state)
    resumed.sampler.set_epoch(9)  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match=r"set_epoch\(9\) drops the position that was loaded, 1 batches"):
        assert once(flat(resumed))


def test_other_ranks_in_the_middle() -> None:
    loader = make(0)
    next(iter(loader))
    state = loader.state_dict()
    other = make(0, shuffle=None, sampler=ShardSampler(RowShards(LENGTHS), 2, 0))
    with pytest.raises(ArgumentError, match=r"ranks 1 in the middle of.*has 2: let each rank load"):
        other.load_state_dict(state)
    state["streams"] |= {"ranks": 2, "rank": 1}
    with pytest.raises(ArgumentError, match=r"rank 1 in the middle of.*has 0: let each rank load"):
        other.load_state_dict(state)
    with pytest.raises(ArgumentError, match="length None"):
        fastload.DataLoader(range(24), shuffle=True).load_state_dict(state)  # type: ignore[arg-type]
    list(loader)
    other.load_state_dict(loader.state_dict())


def test_the_samples_randomness_does_not_depend_on_the_workers() -> None:
    """An epoch that is resumed as streams draws for a sample what the unbroken one would have drawn."""
    draws = []
    for workers in (0, 2):
        dataset = Shards(LENGTHS)
        loader = fastload.DataLoader(Noise(dataset), batch_size=None, num_workers=workers, seed=3)
        draws.append(sorted(map(tuple, loader)))
    assert draws[0] == draws[1] and len({noise for *_, noise in draws[0]}) == len(ALL)


class Noise(Shards):
    def __init__(self, inner: Shards) -> None:
        super().__init__(inner.lengths)

    def __getitem__(self, index: int) -> Any:
        shard, ordinal, _ = super().__getitem__(index)
        return shard, ordinal, torch.rand(()).item()


# --- what goes wrong ---------------------------------------------------------------------------------------


class Bad:
    def __init__(self, *samples: Sample, error: type[BaseException] = ValueError, times: int = 1000) -> None:
        self.samples = samples
        self.error = error
        self.times = times

    def __call__(self, shard: int, ordinal: int) -> None:
        if (shard, ordinal) in self.samples and self.times > 0:
            self.times -= 1
            raise self.error(f"{shard}/{ordinal} is bad")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Shards, RowShards])
def test_bad_samples(kind: type[Shards], workers: int) -> None:
    bad = [(1, 3), (4, 0)]
    for on_error in ("repeat", "replace"):  # no other sample can be asked for, so both repeat a row
        dataset = kind(LENGTHS, deed=Bad(*bad))
        loader = fastload.DataLoader(dataset, batch_size=4, num_workers=workers, on_error=on_error)
        samples = flat(loader)
        assert len(samples) == len(ALL) and set(samples) == ALL - set(bad)
        assert loader.stats()["counters"]["bad.samples"] == 2
        assert "is bad" in loader.stats()["bad"][0][1]
    loader = fastload.DataLoader(kind(LENGTHS, deed=Bad(*bad)), batch_size=4, num_workers=workers)
    samples, errors = survivors(iter(loader))
    assert errors == 2  # each is a batch that counts as handed out
    assert once(samples, ALL - (ALL - set(samples))) and len(ALL - set(samples)) <= 8


def survivors(iterator: Iterator[Any]) -> tuple[list[Sample], int]:
    samples: list[Sample] = []
    errors = 0
    while True:
        try:
            samples += rows(next(iterator))
        except StopIteration:
            return samples, errors
        except ValueError as error:
            assert "is bad" in str(error)
            errors += 1


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stream_that_fails(workers: int) -> None:
    """The error is raised once, the other streams go on, and a state from then on asks for the rest again."""
    dataset = RowShards(LENGTHS, take_deed=Bad((4, 2)))
    loader = fastload.DataLoader(dataset, batch_size=3, num_workers=workers)
    iterator = iter(loader)
    seen: list[Sample] = []
    with pytest.raises(ValueError, match="4/2 is bad"):
        for batch in iterator:
            seen += rows(batch)
    state = loader.state_dict()
    rest, errors = survivors(iterator)
    assert errors == 0 and max(Counter(seen + rest).values()) == 1
    assert set(seen + rest) < ALL and bool(rest) == (workers > 1)
    resumed = fastload.DataLoader(RowShards(LENGTHS), batch_size=3, num_workers=workers)
    resumed.load_state_dict(state)
    assert once(seen + flat(resumed))


def test_a_stream_that_raises_stop_iteration() -> None:
    for workers in (0, 1):
        dataset = RowShards(LENGTHS, take_deed=Bad((1, 3), error=StopIteration))
        with pytest.raises(RuntimeError, match="stream of the dataset raised StopIteration"):
            list(fastload.DataLoader(dataset, num_workers=workers))


def test_interrupted_while_taking() -> None:
    dataset = RowShards(LENGTHS, take_deed=Bad((1, 3), error=KeyboardInterrupt, times=1))
    iterator = iter(fastload.DataLoader(dataset, batch_size=4))
    seen: list[Sample] = []
    with pytest.raises(KeyboardInterrupt):
        for batch in iterator:
            seen += rows(batch)
    assert once(seen + flat(iterator))


class Deed(At):
    def __call__(self, shard: int, ordinal: int) -> None:  # type: ignore[override]
        super().__call__(shard << 32 | ordinal)


def test_a_killed_worker() -> None:
    dataset = RowShards(LENGTHS, deed=Deed(1 << 32 | 3, "kill"))
    loader = fastload.DataLoader(dataset, batch_size=2, num_workers=2)
    seen: list[Sample] = []
    start = time.monotonic()
    with pytest.raises(WorkerError, match="SIGKILL"):
        for batch in loader:
            seen += rows(batch)
    assert time.monotonic() - start < PATIENCE
    resumed = fastload.DataLoader(RowShards(LENGTHS), batch_size=2)
    resumed.load_state_dict(loader.state_dict())
    assert once(seen + flat(resumed))


def test_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.workers.processes._SHUTDOWN_GRACE", 0.1)
    dataset = RowShards(LENGTHS, take_deed=Deed(1 << 32 | 3, "sleep", 60))
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        list(fastload.DataLoader(dataset, num_workers=1, timeout=1))


@pytest.mark.parametrize("prefetch", [1, 2])
def test_more_streams_than_workers(prefetch: int) -> None:
    """Streams that end early do not fill the places of those that their worker has to go on with."""
    loader = make(3, RowShards([40, 1, 1]), batch_size=1, shuffle=False)
    iterator = iter(loader)
    seen = flat(itertools.islice(iterator, 2))
    resumed = make(
        1, RowShards([40, 1, 1]), batch_size=1, shuffle=False, prefetch_factor=prefetch, timeout=PATIENCE
    )
    resumed.load_state_dict(loader.state_dict())
    assert len(seen + flat(resumed)) == 42


# --- where numbers are needed ------------------------------------------------------------------------------


def test_who_needs_numbers() -> None:
    dataset = RowShards(LENGTHS)
    with pytest.raises(ArgumentError, match=r"Subset chooses samples by index: .*not indexed yet"):
        fastload.DataLoader(Subset(dataset, [1, 2]))
    with pytest.raises(ArgumentError, match=r"Subset chooses samples by index: .*not indexed yet"):
        fastload.DataLoader(Subset(Subset(dataset, [1, 2]), [0]), num_workers=1)
    for options in ({"sampler": torch.utils.data.SequentialSampler(dataset)}, {"batch_sampler": [[0, 1]]}):
        with pytest.raises(TypeError, match="not indexed yet"):
            list(fastload.DataLoader(dataset, **options))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="not indexed yet"):
            list(fastload.DataLoader(dataset, num_workers=1, **options))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not indexed yet"):
        fastload.DistributedSampler(dataset, 1, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not indexed yet"):
        list(torch.utils.data.DataLoader(dataset))
    with pytest.raises(TypeError, match="not indexed yet"):
        list(ShardSampler(dataset, 1, 0))


def test_ranks_without_torch_distributed(tmp_path: Path) -> None:
    dataset = RowShards(LENGTHS, tmp_path / "places")
    loader = fastload.DataLoader(dataset, batch_size=4, sampler=ShardSampler(dataset, 2, 1))
    with pytest.raises(ArgumentError, match=r"call init_process_group\(\) before iterating, or give.*index"):
        iter(loader)
    for shard in range(len(LENGTHS)):
        dataset.keep(shard)
    assert len(flat(loader)) == 12  # numbered: nothing to agree on


def test_the_sampler_is_one_of_torchs() -> None:
    """So Lightning, for one, leaves it in place and calls set_epoch."""
    sampler = make(0).sampler
    assert isinstance(sampler, torch.utils.data.DistributedSampler)
    with pytest.raises(AttributeError, match="'ShardSampler' object has no attribute 'nonsense'"):
        sampler.nonsense  # noqa: B018
    user = torch.utils.data.SequentialSampler(range(3))
    assert fastload.DataLoader(RowShards(LENGTHS), sampler=user).sampler is user


def test_workers_know_who_they_are() -> None:
    """One stream for each worker, none shared."""
    dataset = Who(LENGTHS)
    loader = fastload.DataLoader(dataset, batch_size=None, num_workers=3)
    owners: dict[int, set[int]] = {}
    for shard, worker in loader:
        owners.setdefault(shard, set()).add(worker)
    assert all(len(workers) == 1 for workers in owners.values()) and len(set().union(*owners.values())) == 3


class Who(Shards):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return super().__getitem__(index)[0], info.id


# --- mutation twins: each guard, taken out, is missed ------------------------------------------------------


def test_states_of_what_was_handed_out_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(self: StreamEpoch, stream: int, state: Any) -> None:
        taken(self, stream, None)

    taken = StreamEpoch.delivered
    monkeypatch.setattr(StreamEpoch, "delivered", forgets)
    with pytest.raises(AssertionError):
        test_what_is_prefetched_is_not_in_the_state(1)


def test_looking_again_for_places_matters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "fastload.workers.streams.StreamReader.start_epoch", lambda self, streamed: self.close()
    )
    with pytest.raises(TypeError, match="not indexed yet"):
        test_numbered_after_the_first_epoch(RowShards, 1, True, tmp_path)
