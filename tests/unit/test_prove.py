"""`prove`: runs that saw the same data are the same, and of others it names where they part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload import DataLoader, DistributedSampler, prove
from fastload.errors import ArgumentError
from fastload.trace.sample_log import log_name
from tests.commands import command
from tests.loaderdata import Numbers

COUNT = 48


class Swapped(DistributedSampler):
    """Gives another sample at one place."""

    def __init__(self, *arguments: Any, at: int, epoch: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.swapped, self.wrong = at, epoch

    def __iter__(self) -> Any:
        for place, index in enumerate(super().__iter__()):
            yield (index + 1) % COUNT if (place, self.epoch) == (self.swapped, self.wrong) else index


class Run:
    """Both kinds of evidence of a run over all ranks.

    Args:
        stop: (epoch, step) after which it ends; None: after two epochs.
        wrong: (rank, epoch, place) of a sample that is another one.
    """

    def __init__(
        self,
        log: Path,
        ranks: int = 1,
        *,
        batch: int = 8,
        order: int = 1,
        stop: tuple[int, int] | None = None,
        wrong: tuple[int, int, int] | None = None,
    ) -> None:
        self.log, self.states = str(log), []
        data = Numbers(COUNT)
        for rank in range(ranks):
            sampler = DistributedSampler(data, ranks, rank, seed=order)
            if wrong is not None and wrong[0] == rank:
                sampler = Swapped(data, ranks, rank, seed=order, epoch=wrong[1], at=wrong[2])
            loader = DataLoader(data, batch // ranks, sampler=sampler, sample_log=log, seed=3)
            for epoch in range(2):
                for step, _ in enumerate(loader):
                    if (epoch, step) == stop:
                        break
                else:
                    continue
                break
            self.states.append(loader.state_dict())

    def sides(self) -> list[Any]:
        return [self.log, self.states]


@pytest.mark.parametrize(("rank", "epoch", "place"), [(0, 0, 0), (1, 0, 9), (1, 1, 23)])
def test_first_row_that_differs_is_named(tmp_path: Path, rank: int, epoch: int, place: int) -> None:
    right, wrong = Run(tmp_path / "a", 2), Run(tmp_path / "b", 2, wrong=(rank, epoch, place))
    proof = prove(right.log, wrong.log)
    assert not proof
    assert proof[:1] + proof[2:] == (False, epoch, place // 4, rank, place % 4)
    assert (
        f"step {place // 4} of epoch {epoch}" in proof.why and f"row {place % 4} of rank {rank}" in proof.why
    )
    among_states = prove(right.states, wrong.states)
    assert not among_states and among_states.epoch == epoch
    assert among_states.step == (place // 4 if epoch == 1 else None)  # of past epochs there is one sum
    assert prove(right.states[0], wrong.states[0]).same == (rank != 0)  # rank by rank


def test_other_order_differs_from_its_first_step(tmp_path: Path) -> None:
    one, other = Run(tmp_path / "a", stop=(0, 3)), Run(tmp_path / "b", 2, order=2, stop=(0, 4))
    for a in one.sides():
        for b in other.sides():
            proof = prove(a, b)
            assert not proof and (proof.epoch, proof.step) == (0, 0)


def test_step_of_another_place_is_recognized(tmp_path: Path) -> None:
    """The oldest bug of resumes: the run begins at its first step again."""
    order = [list(range(8 * step, 8 * step + 8)) for step in range(6)]
    for log, batches in {"a": order, "b": [*order[:3], *order[:3]]}.items():
        list(DataLoader(Numbers(COUNT), batch_sampler=batches, sample_log=tmp_path / log))
    proof = prove(tmp_path / "a", tmp_path / "b")
    assert (proof.epoch, proof.step, proof.rank, proof.row) == (0, 3, 0, 0)
    assert "sample 0 stands where a has sample 24. b's step is step 0 of epoch 0 of a" in proof.why


def test_shorter_side_is_the_same_as_far_as_it_goes(tmp_path: Path) -> None:
    whole, part = Run(tmp_path / "a"), Run(tmp_path / "b", 2, stop=(1, 2))
    for a in whole.sides():
        for b in part.sides():
            proof = prove(a, b)
            assert proof and "as far as both go, 9 steps; a goes on" in proof.why
    with pytest.raises(ArgumentError, match="cannot be compared"):
        prove(whole.states, Run(tmp_path / "c", stop=(0, 2)).states)
    assert prove(whole.log, Run(tmp_path / "d", stop=(0, 2)).states)


def test_other_global_batch_compares_whole_epochs(tmp_path: Path) -> None:
    small, big = Run(tmp_path / "a"), Run(tmp_path / "b", 2, batch=16)
    for a in small.sides():
        for b in big.sides():
            proof = prove(a, b)
            assert proof and "8 and 16 samples, so whole epochs are compared" in proof.why
    wrong = Run(tmp_path / "c", batch=16, wrong=(0, 1, 5))
    proof = prove(small.states, wrong.states)
    assert not proof and proof.epoch == 1
    with pytest.raises(ArgumentError, match="no whole epoch"):
        prove(small.log, Run(tmp_path / "d", batch=16, stop=(0, 1)).log)


def test_resume_that_makes_steps_again_counts_them_once(tmp_path: Path) -> None:
    def loader_of(ranks: int, rank: int) -> DataLoader[Any]:
        sampler = DistributedSampler(Numbers(COUNT), ranks, rank, seed=1)
        return DataLoader(Numbers(COUNT), 8 // ranks, sampler=sampler, sample_log=tmp_path / "b", seed=3)

    whole, states = Run(tmp_path / "a"), []
    for rank in range(4):
        loader = loader_of(4, rank)
        batches = iter(loader)
        next(batches), next(batches)
        states.append(loader.state_dict())
        next(batches), next(batches)  # lost, and made again
        del loader, batches
    for rank in range(2):  # on half of the ranks
        loader = loader_of(2, rank)
        loader.load_state_dict(states[rank])
        for _ in range(2):
            list(loader)
    assert prove(whole.log, tmp_path / "b").why == "the same data in all 12 steps"


def test_state_is_found_in_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path / "a", 2)
    torch.save({"model": {"w": torch.ones(2)}, "loaders": [{"train": run.states[0]}]}, tmp_path / "0.pt")
    (tmp_path / "1.json").write_text(json.dumps({"loader": run.states[1], "epoch": 2}))
    assert prove([tmp_path / "0.pt", str(tmp_path / "1.json")], run.log)
    assert prove({"ranks": run.states}, run.log)


def test_logs_of_ranks_are_given_one_by_one(tmp_path: Path) -> None:
    run = Run(tmp_path / "a", 2)
    assert prove([tmp_path / "a" / log_name(1), tmp_path / "a" / log_name(0)], run.log)


def test_evidence_that_proves_nothing_is_refused(tmp_path: Path) -> None:
    run, alone = Run(tmp_path / "a", 2), Run(tmp_path / "b")
    (tmp_path / "text").write_text("no state")
    (tmp_path / "empty").mkdir()
    torch.save({"hook": print}, tmp_path / "code.pt")
    fresh = DataLoader(Numbers(COUNT), 8).state_dict()
    cases = [
        (run.states[1], "a lacks ranks \\[0\\] of 2"),
        ([run.states[0], run.log], "mixes states and sample logs"),
        ([run.states[0], Run(tmp_path / "c", 2, order=2).states[0]], "two states of rank 0"),
        ([run.states[0], Run(tmp_path / "d", 2, stop=(0, 1)).states[1]], "states of different steps"),
        ([f"{run.log}/{log_name(0)}"] * 2, "several logs of one rank"),
        ({"train": alone.states[0], "val": alone.states[0]}, "several loaders"),
        ({}, "no state of a fastload.DataLoader"),
        (fresh, "has no step yet"),
        ([], "has no step yet"),
        (tmp_path / "text", "neither JSON nor"),
        (tmp_path / "code.pt", "could run code"),
        (tmp_path / "empty", "has no sample log"),
        (tmp_path / "absent", "cannot be read"),
        (7, "found int"),
        ({**fresh, "digest": {"rank": 0}}, "is damaged"),
        ({**fresh, "version": 1}, "a: the dict has version 1, this fastload reads version 2"),
        ({key: fresh[key] for key in fresh if key != "digest"}, "a: the dict lacks \\['digest'\\]"),
    ]
    for side, message in cases:
        with pytest.raises(ArgumentError, match=message):
            prove(side, alone.log)


@pytest.mark.parametrize(
    "epochs",
    [(64, 65), (65, 64), *(pytest.param(n, marks=pytest.mark.stress) for n in [(64, 63), (70, 129)])],
)
def test_other_global_batch_is_the_same_in_runs_of_many_epochs(epochs: tuple[int, int]) -> None:
    """A state then has sums of several epochs, and those of two runs begin at other epochs."""
    states = []
    for batch, number in zip((4, 2), epochs, strict=True):
        loader = DataLoader(Numbers(4), batch, seed=1)
        for _ in range(number):
            list(loader)
        states.append(loader.state_dict())
    proof = prove(*states)
    assert proof, proof.why


def test_log_without_its_beginning_is_refused(tmp_path: Path) -> None:
    whole, stopped = Run(tmp_path / "a"), Run(tmp_path / "b", stop=(0, 1))
    resumed = DataLoader(
        Numbers(COUNT),
        8,
        sampler=DistributedSampler(Numbers(COUNT), 1, 0, seed=1),
        seed=3,
        sample_log=tmp_path / "c",
    )
    resumed.load_state_dict(stopped.states[0])
    list(resumed)
    for side in whole.sides():
        with pytest.raises(ArgumentError, match="b is a log that begins at step 2 of its run"):
            prove(side, tmp_path / "c")
    assert prove(tmp_path / "c", tmp_path / "c")


def test_log_that_is_not_written_yet_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "a", 2)
    log = tmp_path / "b" / log_name(0)
    log.parent.mkdir()
    log.touch()
    for side in (log, log.parent):
        with pytest.raises(ArgumentError, match=r"b: .*the log is empty"):
            prove(run.log, side)


def test_command_answers_by_its_exit_code(tmp_path: Path) -> None:
    Run(tmp_path / "a"), Run(tmp_path / "b", 2), Run(tmp_path / "c", order=2)

    same = command("prove", tmp_path / "a", tmp_path / "b")
    assert (same.exit_code, same.stdout) == (0, "the same data in all 12 steps\n")
    ranks = ",".join(str(tmp_path / "b" / log_name(rank)) for rank in (0, 1))
    assert command("prove", tmp_path / "a", ranks).exit_code == 0
    longer = ranks.replace("/b/", "/b/.." * 500 + "/b/")  # no path may be as long as the whole list
    assert command("prove", tmp_path / "a", longer).exit_code == 0
    differs = command("prove", tmp_path / "a", tmp_path / "c", "--json")
    document = json.loads(differs.stdout.splitlines()[-1])
    assert differs.exit_code == 1
    assert (document["same"], document["epoch"], document["step"]) == (False, 0, 0)
    assert command("prove", tmp_path / "a", tmp_path / "absent").exit_code == 2


def test_logs_of_a_run_that_was_begun_anew_do_not_count(tmp_path: Path) -> None:
    Run(tmp_path / "a", 4, order=2)
    again, whole = Run(tmp_path / "a", 2), Run(tmp_path / "b")
    assert prove(again.log, whole.log)
    (tmp_path / "a" / log_name(3)).unlink()
    assert prove(again.log, whole.log)
