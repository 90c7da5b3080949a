"""The sample log: all that a loader hands out, whatever happens to the process, the disk or the file."""

from __future__ import annotations

import errno
import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastload import DataLoader, DistributedSampler
from fastload.errors import ArgumentError
from fastload.trace.sample_log import _STEP, LoggedStep, RunBegins, _framed, frames, header, log_name, rank_of
from tests.commands import command
from tests.loaderdata import Numbers

pytestmark = pytest.mark.usefixtures("no_leaks")


def loader_of(log: Path, count: int = 20, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(count), 4, sample_log=log, **options)


def said(log: Path, rank: int = 0) -> list[Any]:
    return [frame for _, frame in frames((log / log_name(rank)).read_bytes())]


def steps(log: Path, rank: int = 0) -> list[tuple[int, int, int, list[int]]]:
    """(run step, epoch, step, indices)."""
    return [
        (*frame[:3], frame.indices.tolist()) for frame in said(log, rank) if isinstance(frame, LoggedStep)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_log_has_every_row_of_every_step(tmp_path: Path, workers: int) -> None:
    loader = loader_of(tmp_path / "log", num_workers=workers)
    for _ in range(2):
        seen = [batch.tolist() for batch in loader]
    assert steps(tmp_path / "log") == [
        (5 * epoch + step, epoch, step, seen[step]) for epoch in range(2) for step in range(5)
    ]
    assert isinstance(said(tmp_path / "log")[0], RunBegins)
    assert loader.stats()["counters"]["log.bytes"] == (tmp_path / "log" / log_name(0)).stat().st_size


def test_log_of_a_rank_has_its_rank_and_part(tmp_path: Path) -> None:
    for rank in range(2):
        for _ in loader_of(tmp_path, sampler=DistributedSampler(Numbers(20), 2, rank, shuffle=False)):
            pass
        assert rank_of((tmp_path / log_name(rank)).read_bytes()) == rank
        assert said(tmp_path, rank)[0].world_size == 2
        indices = [index for one in steps(tmp_path, rank) for index in one[3]]
        assert sorted(indices) == list(range(rank, 20, 2))


def test_resume_says_where_the_run_goes_on(tmp_path: Path) -> None:
    loader = loader_of(tmp_path)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()  # writes what is buffered
    assert len(steps(tmp_path)) == 2
    next(batches), next(batches)
    again = loader_of(tmp_path)
    again.load_state_dict(state)
    del loader, batches
    assert len(list(again)) == 3
    assert [one.run_step for one in said(tmp_path) if isinstance(one, RunBegins)] == [0, 2]
    assert [one[0] for one in steps(tmp_path)] == [0, 1, 2, 3, 2, 3, 4]


def test_break_keeps_the_steps_before_it(tmp_path: Path) -> None:
    loader = loader_of(tmp_path)
    for _ in loader:
        break
    del loader
    assert len(steps(tmp_path)) == 1


def test_raised_step_has_no_rows(tmp_path: Path) -> None:
    def fails(index: int) -> int:
        if index == 5:
            raise ValueError("bad")
        return index

    loader = DataLoader(Numbers(12, fails), 4, sample_log=tmp_path)
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match="bad"):
        next(batches)
    assert list(next(batches)) == [8, 9, 10, 11]
    loader.state_dict()
    assert [one[3] for one in steps(tmp_path)] == [[0, 1, 2, 3], [], [8, 9, 10, 11]]


@pytest.mark.parametrize("zeros", [0, 4096])
@pytest.mark.parametrize("cut", [1, 30])
def test_torn_tail_is_not_read_and_the_log_goes_on_after_it(tmp_path: Path, cut: int, zeros: int) -> None:
    """A power cut may leave a file that is longer than what was written."""
    list(loader_of(tmp_path))
    path = tmp_path / log_name(0)
    whole = path.stat().st_size
    os.truncate(path, whole - cut)
    os.truncate(path, whole - cut + zeros)
    assert len(steps(tmp_path)) == 4
    list(loader_of(tmp_path))
    assert len(steps(tmp_path)) == 9


@pytest.mark.parametrize("size", [0, 8, 16, 4096])
def test_log_of_zeros_begins_anew(tmp_path: Path, size: int) -> None:
    path = tmp_path / log_name(0)
    path.write_bytes(bytes(size))
    list(loader_of(tmp_path))
    assert len(steps(tmp_path)) == 5


@pytest.mark.parametrize("byte", [20, 7], ids=["body", "size beyond the end"])
def test_damaged_log_is_named_and_stays(tmp_path: Path, byte: int) -> None:
    """`prove` found two logs equal as far as the damage in one of them, and said no more."""
    for name in ("whole", "damaged"):
        list(loader_of(tmp_path / name))
    path = tmp_path / "damaged" / log_name(0)
    content = bytearray(path.read_bytes())
    _, _, third, *_ = (at for at, _ in frames(content))
    content[third + byte] ^= 64
    path.write_bytes(content)
    result = command("prove", tmp_path / "whole", tmp_path / "damaged")
    assert result.exit_code == 2 and "is damaged at byte" in result.stderr
    with pytest.warns(UserWarning, match=f"is damaged at byte .* move {log_name(0)} away"):
        list(loader_of(tmp_path / "damaged"))
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content", [b"someone's file", b"fastsmpl\x09\0\0\0\0\0\0\0", b"fastsmpl\1\0\0\0\7\0\0\0"]
)
def test_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / log_name(0)).write_bytes(content)
    with pytest.raises(ArgumentError, match="cannot be continued"):
        list(loader_of(tmp_path))
    assert (tmp_path / log_name(0)).read_bytes() == content


@pytest.mark.parametrize("exists", [True, False])
def test_link_in_place_of_the_log_is_not_followed(tmp_path: Path, exists: bool) -> None:
    """Whoever else may write to the directory could choose a file of this user."""
    own = tmp_path / "own"
    if exists:
        list(loader_of(tmp_path / "before"))
        own.write_bytes((tmp_path / "before" / log_name(0)).read_bytes())
    before = own.read_bytes() if exists else None
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / log_name(0)).symlink_to(own)
    with pytest.warns(UserWarning, match="cannot be written"):
        assert len(list(loader_of(tmp_path / "log"))) == 5
    assert (own.read_bytes() if own.exists() else None) == before


def test_full_disk_ends_the_log_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fastload.trace.sample_log.os.write", full)
    with pytest.warns(UserWarning, match="ends here") as warned:
        for _ in range(2):
            assert len(list(loader)) == 5
            loader.state_dict()
    assert len(warned) == 1
    assert loader.stats()["counters"]["log.errors"] == 1
    assert loader.digest() != bytes(32)


def test_unwritable_place_ends_the_log_and_not_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    loader = loader_of(tmp_path / "file" / "log")
    with pytest.warns(UserWarning, match="cannot be written"):
        assert len(list(loader)) == 5
    assert loader.stats()["counters"]["log.errors"] == 1


def test_second_loader_on_one_log_ends_the_first_ones(tmp_path: Path) -> None:
    first, second = loader_of(tmp_path), loader_of(tmp_path)
    list(first), list(second)
    with pytest.warns(UserWarning, match="another loader writes"):
        list(first)
    assert len(steps(tmp_path)) == 10


def test_forked_child_leaves_the_log_to_its_parent(tmp_path: Path) -> None:
    """As one that writes checkpoints."""
    loader = loader_of(tmp_path)
    batches = iter(loader)
    next(batches)
    child = os.fork()
    if child == 0:
        try:
            next(batches)
            loader.state_dict()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert next(batches).tolist() == [4, 5, 6, 7]
    loader.state_dict()
    assert loader.stats()["counters"].get("log.errors", 0) == 0
    assert [step[0] for step in steps(tmp_path)] == [0, 1]


def test_loader_with_a_log_pickles(tmp_path: Path) -> None:
    loader = loader_of(tmp_path)
    list(loader)
    again = pickle.loads(pickle.dumps(loader))
    assert len(list(again)) == 5


def test_argument_that_is_no_path_is_refused() -> None:
    with pytest.raises(ArgumentError, match="path of a directory"):
        DataLoader(Numbers(4), sample_log=True)
    with pytest.raises(ArgumentError, match="directory of this machine"):
        DataLoader(Numbers(4), sample_log="s3://bucket/logs")


@pytest.mark.parametrize("indices", [[], [0, 5], [-(2**31), 2**31 - 1], [2**31, -1], [7 << 32 | 3]])
def test_step_reads_back_as_it_was_written(indices: list[int]) -> None:
    fingerprints = np.arange(len(indices), dtype=np.uint64) + np.uint64(2**64 - 3)
    step = LoggedStep(2**40, 3, 2**31, np.array(indices, np.int64), fingerprints)
    (read,) = [frame for _, frame in frames(bytes(16) + step.dump())]
    assert read[:3] == step[:3]
    assert read.indices.tolist() == indices
    assert read.fingerprints.tolist() == fingerprints.tolist()


RUN = {"run_step": 0, "time": 1.0, "world_size": 1}
ROW = np.array([1], "<i4").tobytes() + np.array([7], "<u8").tobytes()


def run_frame(**entries: Any) -> bytes:
    return _framed(b"R", json.dumps({**RUN, **entries}).encode())


def step_frame(width: int = 4, count: int = 1, body: bytes = ROW, run_step: int = 0) -> bytes:
    return _framed(b"S", _STEP.pack(run_step, 0, 0, count, width) + body)


def prove_logs(path: Path, content: bytes) -> Any:
    path.mkdir(exist_ok=True)
    (path / log_name(0)).write_bytes(content)
    return command("prove", path, path)


@pytest.mark.parametrize(
    "log",
    [
        *[run_frame() + step_frame(width) for width in (0, 1, 2, 3, 5, 16, 2**32 - 1)],
        *[run_frame() + step_frame(count=count) for count in (0, 2, 9, 2**32 - 1)],
        *[run_frame() + step_frame(run_step=number) for number in (2**63, 2**64 - 1)],
        run_frame() + step_frame(body=b""),
        run_frame() + step_frame(body=ROW + b"x"),
        run_frame() + _framed(b"S", b"short"),
        run_frame() + _framed(b"Q", b""),
        *[
            _framed(b"R", body)
            for body in (b"[" * 100_000, b"[" * 350, b"{", b"[]", b"3", b"\xff", b"9" * 390)
        ],
        *[_framed(b"R", json.dumps(body).encode()) for body in ({"x": 1}, RUN | {"x": 1}, {"run_step": 0})],
        *[run_frame(world_size=value) for value in ("x", 0, True, 2**31)],
        *[run_frame(run_step=value) for value in (-1, 1.5, 2**63)],
        *[run_frame(time=value) for value in (None, float("nan"), 10**300)],
        *[
            pytest.param(run_frame(**{name: value}), marks=pytest.mark.stress)
            for name, values in {
                "world_size": (-1, 1.5, None, []),
                "run_step": ("x", True, None, {}),
                "time": ("x", -1, float("inf"), [1]),
            }.items()
            for value in values
        ],
    ],
)
def test_hostile_log_ends_prove_in_one_line(tmp_path: Path, log: bytes) -> None:
    result = prove_logs(tmp_path / "log", header(0) + log)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    assert ".samples': the sample log has" in result.stderr and len(result.stderr) < 1000


def test_log_of_a_rank_that_its_run_has_not_is_refused(tmp_path: Path) -> None:
    result = prove_logs(tmp_path, header(7) + run_frame() + step_frame())
    assert result.exit_code == 2 and "7, and its run has 1 ranks" in result.stderr


def test_missing_ranks_of_a_false_number_are_not_listed_all(tmp_path: Path) -> None:
    prove_logs(tmp_path / "a", header(0) + run_frame(world_size=2**31 - 1) + step_frame())
    prove_logs(tmp_path / "b", header(0) + run_frame() + step_frame())
    result = command("prove", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 2 and "lacks ranks [1, 2, 3, 4, 5, 6, 7, 8] and others of" in result.stderr


def test_log_of_many_resumes_is_read_in_linear_time(tmp_path: Path) -> None:
    """A run that resumed 10,000 times at its first step: only what follows the last time counts."""
    began = time.process_time()
    result = prove_logs(tmp_path, header(0) + (run_frame() + step_frame()) * 10_000)
    assert result.exit_code == 0 and "in the only step" in result.stdout
    assert time.process_time() - began < 8  # by comparing each with each: minutes
