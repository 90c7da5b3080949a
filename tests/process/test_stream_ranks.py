"""Several ranks read an epoch as streams: equal steps, exact cover, and one mind about what is numbered.

The ranks are processes with gloo and a TCP store, as in a trainer.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload import ShardSampler
from fastload.distributed import agreement
from fastload.distributed.agreement import Ranks
from fastload.errors import ArgumentError, WorkerError
from tests.loaderdata import through_json
from tests.patience import PATIENCE
from tests.process.test_streams import Sample, rows, streamed
from tests.shortform import short_form
from tests.streamdata import RowShards

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.usefixtures("no_leaks"),
]

LENGTHS = [5, 23, 0, 2, 7, 1]
ALL = {(shard, ordinal) for shard, length in enumerate(LENGTHS) for ordinal in range(length)}


def on_ranks(ranks: int, work: Callable[[int, int], Any]) -> list[Any]:
    """What `work(rank, ranks)` returns in each of `ranks` processes of one process group."""
    context = multiprocessing.get_context("fork")
    processes, pipes = [], []
    port = 0
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(work, rank, ranks, port, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
        port = port or ours.recv()
    results: list[Any] = [None] * ranks
    waited_for = dict(zip(pipes, range(ranks), strict=True))
    try:
        while waited_for:
            ready = multiprocessing.connection.wait(list(waited_for), timeout=PATIENCE)
            assert ready, f"ranks {sorted(waited_for.values())} do not end"
            for pipe in ready:
                results[waited_for.pop(pipe)], error = pipe.recv()  # type: ignore[arg-type, union-attr]
                if error is not None:  # the others would wait for it
                    raise error
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(PATIENCE)
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            pipe.close()
            process.kill()
            process.join()
            process.close()
    return results


def _rank(work: Callable[[int, int], Any], rank: int, ranks: int, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        pipe.send((work(rank, ranks), None))
    except BaseException as error:
        pipe.send((None, error))
    pipe.recv()  # the store lives in rank 0
    dist.destroy_process_group()


class Slow:
    """Some ranks are slower than others, and not always the same ones."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, shard: int, ordinal: int) -> None:
        time.sleep((7 * ordinal + 3 * self.rank + shard) % 5 / 1000)


def epoch(
    loader: fastload.DataLoader[Any], ranks: int, *, lockstep: bool, steps: int | None = None
) -> list[list[Sample]]:
    """The batches of an epoch; with an all_reduce after each, as in DistributedDataParallel."""
    batches = []
    for batch in loader:
        batches.append(rows(batch))
        if lockstep:
            ones = torch.ones(())
            dist.all_reduce(ones)
            assert ones == ranks
        if len(batches) == steps:
            break
    return batches


def own(rank: int, ranks: int, streams: int, lengths: list[int], epoch: int = 0) -> list[set[Sample]]:
    """The samples of each stream."""
    plans = RowShards(lengths).plan_streams(
        streams, seed=0, epoch=epoch, shuffle=True, rank=rank, ranks=ranks
    )
    return [
        {(shard, ordinal) for shard in plan["shards"] for ordinal in range(lengths[shard])} for plan in plans
    ]


def check_padding(
    batches: list[list[list[Sample]]], ranks: int, streams: int, lengths: list[int], size: int
) -> None:
    """Equal steps, every sample once; then each rank's first batches again, the next one's if it has none."""
    mine = [own(rank, ranks, streams, lengths) for rank in range(ranks)]
    counts = [sum(-(-len(stream) // size) for stream in rank) for rank in mine]
    assert [len(rank) for rank in batches] == [max(counts)] * ranks
    for rank in range(ranks):
        first = batches[rank][: counts[rank]]
        assert Counter(chain(*first)) == Counter(set().union(*mine[rank]))
        sources = (other % ranks for other in range(rank, rank + ranks) if counts[other % ranks])
        source = next(sources, rank)
        padding = batches[rank][counts[rank] :]
        again = batches[source][: counts[source]] * (1 + max(counts))
        assert padding == again[: len(padding)]


def train(rank: int, ranks: int, *, lengths: list[int], workers: int, lockstep: bool) -> Any:
    dataset = RowShards(lengths, deed=Slow(rank))
    loader = fastload.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
    batches = [epoch(loader, ranks, lockstep=lockstep) for _ in range(2)]
    dist.barrier()
    return batches[0]


# The short form has each number of ranks and all lengths twice or more, with and without lockstep.
JOBS, SHARDS = [(2, 0), (2, 2), (3, 1)], [LENGTHS, [30, 1], [9], [0, 0, 0]]


def _is_short(job: tuple[int, int], lengths: list[int], lockstep: bool) -> bool:
    number = JOBS.index(job) + SHARDS.index(lengths)
    return lockstep == (number % 2 == 0) and number % 3 < 2


@pytest.mark.parametrize(
    ("job", "lengths", "lockstep"),
    short_form(itertools.product(JOBS, SHARDS, (True, False)), _is_short),
    ids=str,
)
def test_equal_steps(job: tuple[int, int], lengths: list[int], lockstep: bool) -> None:
    ranks, workers = job
    batches = on_ranks(ranks, partial(train, lengths=lengths, workers=workers, lockstep=lockstep))
    check_padding(batches, ranks, max(1, workers), lengths, 4)


def evaluate(rank: int, ranks: int, *, workers: int) -> Any:
    dataset = RowShards(LENGTHS, deed=Slow(rank))
    sampler = ShardSampler(dataset, shuffle=False, mode="eval")
    loader = fastload.DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=workers)
    return list(chain(*epoch(loader, ranks, lockstep=False)))


@pytest.mark.parametrize("workers", [0, 2])
def test_exact_cover(workers: int) -> None:
    samples = on_ranks(3, partial(evaluate, workers=workers))
    assert Counter(chain(*samples)) == Counter(ALL)


# --- places learned by one rank are known to all -----------------------------------------------------------


def learn(rank: int, ranks: int, *, directory: Path, workers: int, leave: bool) -> Any:
    dataset = RowShards(LENGTHS, directory / str(rank))  # each on a node of its own
    loader = fastload.DataLoader(
        dataset, batch_size=4, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    first = epoch(loader, ranks, lockstep=True, steps=2 if leave else None)
    kinds = [streamed(loader)]
    batches = []
    for _ in range(2):
        iterator = iter(loader)
        kinds.append(streamed(loader))
        batches.append([rows(batch) for batch in iterator])
        dist.barrier()
    del iterator
    return kinds, first, batches, len(list((directory / str(rank)).iterdir()))


@pytest.mark.parametrize("workers", [0, 1])
def test_places_are_exchanged(workers: int, tmp_path: Path) -> None:
    results = on_ranks(2, partial(learn, directory=tmp_path, workers=workers, leave=False))
    for kinds, _, batches, places in results:
        assert kinds == [False, False, False] and places == len(LENGTHS)
        assert [len(rank) for rank in batches] == [5, 5]
    for number in range(2):
        samples = [list(chain(*batches[number])) for _, _, batches, _ in results]
        assert [len(rank) for rank in samples] == [19, 19] and Counter(chain(*samples)) == Counter(ALL)


@pytest.mark.parametrize("workers", [0, 1])
def test_all_ranks_stream_until_all_is_known(workers: int, tmp_path: Path) -> None:
    results = on_ranks(2, partial(learn, directory=tmp_path, workers=workers, leave=True))
    for kinds, _, batches, places in results:
        assert kinds == [True, True, False] and places == len(LENGTHS)
        assert len(batches[0]) == len(results[0][2][0])
    assert Counter(chain(*(sample for _, _, batches, _ in results for sample in batches[1]))) == Counter(ALL)


def exchange(rank: int, ranks: int) -> Any:
    tables = [{0: b"", 1: bytes(range(256)) * 40_000}, {1: bytes(range(256)) * 40_000, 2: b"\0\xff"}, {}]
    meeting = Ranks(rank, ranks)
    meeting.begin_epoch({})
    got = meeting.exchange(tables[rank], [set(table) for table in tables])
    answer = meeting.all_gather(rank)
    dist.barrier()
    assert not meeting._store.check(["table/1"]) and not meeting._store.check(["table/1/0"])
    before = meeting._store
    assert [summary["n"] for summary in meeting.begin_epoch({"n": rank})] == [0, 1, 2]
    dist.barrier()
    left = [before.check([f"{key}/{rank}"]) for key in ("at", "summary", "answer")]
    dist.barrier()
    return (
        got == {**tables[0], **tables[1]} or {**tables[0], **tables[1]} == {**got, **tables[rank]},
        answer,
        left,
    )


def test_tables_of_any_size_and_a_clean_store() -> None:
    assert on_ranks(3, exchange) == [(True, [0, 1, 2], [False] * 3)] * 3


class Learning(RowShards):
    """While an epoch begins, this rank comes to know more, and its plans change with it: so many times."""

    def __init__(self, changes: int) -> None:
        super().__init__(LENGTHS)
        self.changes = changes

    def plan_streams(self, count: int, **options: Any) -> list[dict[str, Any]]:
        states = super().plan_streams(count, **options)
        self.changes -= 1
        return [state | {"known": max(0, self.changes // 2)} for state in states]


def plan(rank: int, ranks: int, *, changes: int) -> Any:
    dataset = Learning(changes if rank == 1 else 0)
    loader = fastload.DataLoader(dataset, batch_size=4, shuffle=True)
    batches = epoch(loader, ranks, lockstep=True)
    dist.barrier()
    return batches


def test_plans_fit_together() -> None:
    check_padding(on_ranks(2, partial(plan, changes=7)), 2, 1, LENGTHS, 4)
    with pytest.raises(WorkerError, match="do not agree on the streams"):
        on_ranks(2, partial(plan, changes=1000))


# --- resuming, disagreeing ---------------------------------------------------------------------------------


def resume(rank: int, ranks: int, *, points: Iterable[int], before: int, after: int) -> Any:
    def make(workers: int) -> fastload.DataLoader[Any]:
        return fastload.DataLoader(RowShards([30, 5, 2]), batch_size=4, shuffle=True, num_workers=workers)

    whole = epoch(make(before), ranks, lockstep=True)
    found = []
    for steps in points:
        first = make(before)
        seen = epoch(first, ranks, lockstep=True, steps=steps)
        state = through_json(first.state_dict())
        second = make(after)
        second.load_state_dict(state)
        seen += epoch(second, ranks, lockstep=True)
        rest = epoch(second, ranks, lockstep=True)
        dist.barrier()
        found.append((whole == seen, len(rest), state["streams"]["lap"]))
    return found


@pytest.mark.parametrize(("before", "after"), [(2, 1), (0, 2)])
def test_resumed_among_ranks(before: int, after: int) -> None:
    """Before and while one rank repeats its first samples."""
    results = on_ranks(2, partial(resume, points=(1, 4, 6), before=before, after=after))
    laps = set()
    for at_point in zip(*results, strict=True):
        assert [same for same, _, _ in at_point] == [True, True]
        assert len({length for _, length, _ in at_point}) == 1
        laps |= {lap for _, _, lap in at_point}
    assert 0 in laps and max(laps) > 0


def disagree(rank: int, ranks: int) -> str:
    loader = fastload.DataLoader(RowShards(LENGTHS), batch_size=4, shuffle=True, num_workers=0)
    loader.sampler.set_epoch(rank)  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match="do not begin the same epoch: epoch is") as caught:
        iter(loader)
    dist.barrier()
    return str(caught.value)


def test_ranks_that_disagree() -> None:
    for text in on_ranks(2, disagree):
        assert "set_epoch" in text and "on rank 0" in text


def other_workers(rank: int, ranks: int) -> Any:
    loader = fastload.DataLoader(RowShards(LENGTHS), batch_size=4, shuffle=True, num_workers=rank)
    batches = epoch(loader, ranks, lockstep=True)
    dist.barrier()
    return batches


def test_ranks_with_unequally_many_workers() -> None:
    """All have as many streams as the one with most workers."""
    batches = on_ranks(3, other_workers)
    check_padding(batches, 3, 2, LENGTHS, 4)


def absent(rank: int, ranks: int) -> str:
    if rank == 1:
        return "absent"
    loader = fastload.DataLoader(RowShards(LENGTHS), batch_size=4)
    with pytest.raises(WorkerError, match=r"\[ranks\] waited 1 s for rank 1 to begin the epoch") as caught:
        iter(loader)
    return str(caught.value)


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.distributed.agreement.PATIENCE_SECONDS", 1.0)
    text, _ = on_ranks(2, absent)
    assert "equally often" in text


def both_first(rank: int, ranks: int) -> str:
    with pytest.raises((ArgumentError, WorkerError)) as caught:
        Ranks(0, 2).begin_epoch({})
    return str(caught.value)


def test_two_processes_of_one_rank_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of tensor parallelism. The one that came first waits for rank 1 in vain."""
    monkeypatch.setattr("fastload.distributed.agreement.PATIENCE_SECONDS", 0.1)
    told, waited = sorted(on_ranks(2, both_first), key=lambda text: "waited" in text)
    assert "of torch.distributed are both rank 0 of 2" in told and "fastload index" in told
    assert "rank 1 to begin the epoch" in waited


def leaves(rank: int, ranks: int) -> int:
    loader = fastload.DataLoader(RowShards([1, 30]), batch_size=2)
    if rank == 1:
        return len(epoch(loader, ranks, lockstep=False, steps=3))
    with pytest.raises(WorkerError, match=r"waited 1 s for rank 1 to say whether it has batch 3"):
        epoch(loader, ranks, lockstep=False)
    return 3


def test_a_rank_that_leaves_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.distributed.agreement.PATIENCE_SECONDS", 1.0)
    assert on_ranks(2, leaves) == [3, 3]


# --- mutation twins ----------------------------------------------------------------------------------------


def test_saying_so_before_handing_out_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is at its end would wait for one that waits for it in all_reduce."""
    monkeypatch.setattr("fastload.distributed.agreement.PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(Ranks, "publish_progress", lambda self, batches: None)
    with pytest.raises((WorkerError, RuntimeError)):
        on_ranks(2, partial(train, lengths=[30, 1], workers=0, lockstep=True))


def test_asking_at_the_end_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "any_has_more", lambda self, batches: False)
    batches = on_ranks(2, partial(train, lengths=[30, 1], workers=0, lockstep=False))
    with pytest.raises(AssertionError):
        check_padding(batches, 2, 1, [30, 1], 4)


def _start_of_a_job(store: dist.HashStore, epoch: int) -> list[list[dict[str, int]]]:
    """What three ranks, of new processes, know of each other; they come one after the other."""
    ranks = [Ranks(rank, 3, root=store, number=0) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        met = [threads.submit(rank.begin_epoch, {"epoch": epoch}) for rank in ranks]
        return [summaries.result(PATIENCE) for summaries in met]


def test_a_restart_in_the_same_store() -> None:
    """As torchrun does it: the store still holds the keys of the ranks that died."""
    store = dist.HashStore()
    for epoch in (0, 5, 5, 2):
        assert _start_of_a_job(store, epoch) == [[{"epoch": epoch}] * 3] * 3


@pytest.mark.stress
def test_guard_removed_without_a_new_namespace_a_restart_meets_the_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(agreement, "agree_on_namespace", lambda *arguments: "one for all starts")
    _start_of_a_job(store, 0)
    ours = Ranks(0, 3, root=store, number=0)
    assert ours.begin_epoch({"epoch": 5}) == [{"epoch": 5}, {"epoch": 0}, {"epoch": 0}]
