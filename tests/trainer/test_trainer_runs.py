"""Whole runs of examples/resnet50/train.py on several gloo ranks: killed, asked to stop, resumed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.resnet50
from tests.patience import PATIENCE, wait_until
from tests.resnet50 import BATCH, QUICK, RESNET50, SAMPLES, Ranks, updates_seen
from tests.scripts import Scripts, serve_scripts

import train  # isort: skip
from extras.pictures import make_pictures  # isort: skip

UPDATES = SAMPLES // BATCH  # of an epoch


def told(directory: Path, *more: object) -> list[str]:
    """The arguments of a short run in a folder."""
    return [str(directory), "--out", str(directory / "out"), *QUICK, *map(str, more)]


class Finished:
    """An undisturbed run of QUICK."""

    def __init__(self, directory: Path, size: int) -> None:
        arguments = told(directory, "--mllog", directory / "mllog.txt", "--target", 2)
        assert Ranks(size, directory, arguments).wait() == [0] * size
        self.log = (directory / "mllog.txt").read_text().splitlines()
        self.updates = updates_seen(directory, size, BATCH // size // 6)
        self.state = torch.load(directory / "out" / "checkpoint.pt", weights_only=True)
        self.epochs = epochs_of(directory)


def epochs_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "out" / "epochs.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("unbroken"), 2)


def test_every_sample_once_an_epoch(unbroken: Finished) -> None:
    assert len(unbroken.updates) == 3 * UPDATES
    for epoch in range(3):
        updates = unbroken.updates[epoch * UPDATES : (epoch + 1) * UPDATES]
        assert sorted(chain(*updates)) == list(range(SAMPLES))
    assert unbroken.updates[:UPDATES] != unbroken.updates[UPDATES : 2 * UPDATES]


def test_the_report_of_each_epoch(unbroken: Finished) -> None:
    assert [line["epoch"] for line in unbroken.epochs] == [1, 2, 3]
    for line in unbroken.epochs:
        assert {"node", "GPUs", "batch/s", "batch size", "FPS", "utilisation", "limit"} <= set(line)
        assert (line["node"], line["GPUs"], line["batch size"]) == (1, 2, BATCH)
        assert line["FPS"] == pytest.approx(line["batch/s"] * BATCH, rel=0.01)
        assert 0 < line["utilisation"] <= 1
        assert line["communication"]["alone ms"] > 0
        assert 0 <= line["accuracy"] <= 1 and line["accuracy"] * 37 == pytest.approx(
            round(line["accuracy"] * 37)
        )
    assert unbroken.epochs[2]["loss"] < unbroken.epochs[0]["loss"]


def test_mlperfs_log_has_the_moments_of_the_run(unbroken: Finished) -> None:
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in unbroken.log]
    assert {frozenset(event) for event in events} == {
        frozenset(["namespace", "time_ms", "event_type", "key", "value", "metadata"])
    }
    times = [event["time_ms"] for event in events]
    assert times == sorted(times)
    values = {event["key"]: event["value"] for event in events}
    assert (values["submission_benchmark"], values["opt_name"]) == ("resnet", "sgd")
    assert (values["global_batch_size"], values["train_samples"], values["eval_samples"]) == (
        BATCH,
        SAMPLES,
        37,
    )
    assert values["sgd_opt_base_learning_rate"] == pytest.approx(2 * BATCH / 256)
    assert values["eval_accuracy"] == unbroken.epochs[-1]["accuracy"]
    intervals = [
        (event["key"], event["event_type"], event["metadata"].get("epoch_num"))
        for event in events
        if event["event_type"] != "POINT_IN_TIME"
    ]
    epochs = [
        [(f"{kind}_start", "INTERVAL_START", epoch), (f"{kind}_stop", "INTERVAL_END", epoch)]
        for epoch in (1, 2, 3)
        for kind in ("epoch", "eval")
    ]
    assert intervals == [
        ("init_start", "INTERVAL_START", None),
        ("init_stop", "INTERVAL_END", None),
        ("run_start", "INTERVAL_START", None),
        *chain(*epochs),
        ("run_stop", "INTERVAL_END", None),
    ]
    assert events[-1]["metadata"]["status"] == "aborted", "the target is not reached"


def test_another_batch_from_an_epoch_on(tmp_path: Path) -> None:
    """It is killed in the second epoch, whose passes have another size, and goes on."""
    arguments = told(tmp_path, "--epochs", 2, "--batch-size", 12, "--batch-by-epoch", "1:8")
    arguments += ["--checkpoint-steps", "3"]
    assert Ranks(1, tmp_path, arguments, (0, 13)).wait() == [-signal.SIGKILL]
    before = updates_seen(tmp_path, 1, 1)
    assert Ranks(1, tmp_path, arguments).wait() == [0]
    updates = before[:12] + updates_seen(tmp_path, 1, 1)
    assert [len(update) for update in updates] == [12] * 10 + [8] * 15
    assert sorted(chain(*updates[:10])) == sorted(chain(*updates[10:])) == list(range(SAMPLES))
    first, second = epochs_of(tmp_path)
    assert (first["batch size"], second["batch size"]) == (12, 8)
    # The warm-up is the first epoch, and the last update of the second has 14/15 of a cosine.
    assert first["learning rate"] == pytest.approx(2 * 12 / 256)
    assert second["learning rate"] == pytest.approx(2 * 8 / 256 * (1 + math.cos(math.pi * 14 / 15)) / 2)


# What the other launchers tell a rank: tests/unit/test_launcher.py.
@pytest.mark.parametrize(
    "launcher", ["srun", *(pytest.param(name, marks=pytest.mark.stress) for name in ("mpirun", "horovodrun"))]
)
def test_ranks_of_other_launchers_join_and_a_checkpoint_has_the_statistics_of_all(
    tmp_path: Path, launcher: str
) -> None:
    """Without evaluation too: the mean of what each rank has averaged over its own batches."""
    # Without a learning rate the first layer stays what it is.
    arguments = told(tmp_path, "--epochs", 1, "--no-eval", "--base-lr", 0)
    assert Ranks(2, tmp_path, arguments, launcher=launcher).wait() == [0, 0]
    assert [(line["node"], line["GPUs"]) for line in epochs_of(tmp_path)] == [(1, 2)]
    assert sorted(chain(*updates_seen(tmp_path, 2, 1))) == list(range(SAMPLES))
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["model"]
    points = tests.resnet50.Points(SAMPLES)
    means = []
    for path in sorted(tmp_path.glob("*.jsonl")):
        running = torch.zeros(16)
        for line in path.read_text().splitlines():
            inputs = torch.stack([points[index][0] for index in json.loads(line)])
            outputs = torch.nn.functional.linear(inputs, state["0.weight"], state["0.bias"])
            running = 0.9 * running + 0.1 * outputs.mean(0)
        means.append(running)
    assert len(means) == 2 and not torch.allclose(means[0], means[1], atol=1e-3)
    torch.testing.assert_close(state["1.running_mean"], (means[0] + means[1]) / 2, rtol=1e-4, atol=1e-5)


def resume(directory: Path, size: int) -> list[dict[str, Any]]:
    """Start the run in `directory` again, up to its end; its report of each epoch."""
    assert Ranks(size, directory, told(directory)).wait() == [0] * size
    return epochs_of(directory)


@pytest.mark.parametrize(
    ("killed", "ranks_after"),
    [
        ((1, 4), 2),
        ((0, UPDATES + 3), 1),
        pytest.param((1, 5), 3, marks=pytest.mark.stress),
        pytest.param((0, UPDATES + 7), 2, marks=pytest.mark.stress),
        pytest.param((1, 2 * UPDATES - 1), 2, marks=pytest.mark.stress),
    ],
)
def test_killed_and_resumed(
    unbroken: Finished, tmp_path: Path, killed: tuple[int, int], ranks_after: int
) -> None:
    """It continues with the sample after the checkpoint; on as many ranks, with equal numbers."""
    assert -signal.SIGKILL in Ranks(2, tmp_path, told(tmp_path, "--checkpoint-steps", 3), killed).wait()
    reached = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["number"]
    assert killed[1] - 3 <= reached <= killed[1]
    before = updates_seen(tmp_path, 2, 1)[:reached]
    epochs = resume(tmp_path, ranks_after)
    after = updates_seen(tmp_path, ranks_after, max(1, BATCH // ranks_after // 6))
    assert before + after == unbroken.updates

    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert [line["epoch"] for line in epochs] == [1, 2, 3]
    if ranks_after == 2:
        assert [line["loss"] for line in epochs] == [line["loss"] for line in unbroken.epochs]
        assert_same(state["model"], unbroken.state["model"])
        assert_same(state["optimizer"], unbroken.state["optimizer"])


def test_statistics_of_a_resumed_run_are_those_of_the_unbroken_one(tmp_path: Path) -> None:
    """Killed with fewer batches left in the epoch than batch norm's statistics take."""
    states = []
    for name, killed in (("whole", None), ("killed", (0, 2 * UPDATES + 17))):
        directory = tmp_path / name
        arguments = told(directory, "--epochs", 2, "--ema", 0.9, "--bn-batches", 5, "--checkpoint-steps", 2)
        if killed is not None:
            assert Ranks(1, directory, arguments, killed).wait() == [-signal.SIGKILL]
            number = torch.load(directory / "out" / "checkpoint.pt", weights_only=True)["number"]
            assert number == UPDATES + 8
        assert Ranks(1, directory, arguments).wait() == [0]
        states.append(torch.load(directory / "out" / "checkpoint.pt", weights_only=True))
    for key, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][key]), key
    assert_same(states[0]["ema"], states[1]["ema"])


def test_another_target_continues_a_run(tmp_path: Path) -> None:
    """The run that reached its target ends at once; with a higher one it goes on. Each has one run_stop."""
    log = tmp_path / "mllog.txt"
    for target, epochs, status in (("0", 1, "success"), ("0", 1, "success"), ("2", 3, "aborted")):
        assert Ranks(1, tmp_path, told(tmp_path, "--mllog", log, "--target", target)).wait() == [0]
        assert len(epochs_of(tmp_path)) == epochs
        events = [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]
        stops = [event["metadata"]["status"] for event in events if event["key"] == "run_stop"]
        assert stops == [status] and events[-1]["key"] == "run_stop"
        assert (json.loads((tmp_path / "out" / "summary.json").read_text())["time to target"] is None) == (
            target == "2"
        )


def assert_same(one: Any, other: Any) -> None:
    """Bit by bit, except batch norm's running statistics, which are averaged with every checkpoint."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            if not str(key).endswith(("running_mean", "running_var")):
                assert_same(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif torch.is_tensor(one):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_sigterm_to_one_rank_ends_all_with_a_checkpoint(unbroken: Finished, tmp_path: Path) -> None:
    ranks = Ranks(2, tmp_path, told(tmp_path, "--epochs", 1000))
    wait_until((tmp_path / "out" / "epochs.jsonl").exists, "an epoch has ended")
    os.kill(ranks.processes[1].pid, signal.SIGTERM)
    assert ranks.wait() == [0, 0]
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    first, second = (len(path.read_text().splitlines()) for path in sorted(tmp_path.glob("*.jsonl")))
    assert state["number"] == first == second  # both made the same number of updates, and all are kept


def test_another_batch_is_refused(unbroken: Finished, tmp_path: Path) -> None:
    """Other options: test_trainer_parts."""
    (tmp_path / "out").mkdir()
    torch.save(unbroken.state, tmp_path / "out" / "checkpoint.pt")
    assert unbroken.state["global_batch"] == BATCH
    assert Ranks(1, tmp_path, told(tmp_path, "--global-batch", 24)).wait() == [1]


@pytest.mark.stress  # torchrun in `make test`: test_trainer_demo; a death and SIGTERM: above
def test_torchrun_restarts_a_dead_rank_and_ends_at_sigterm(unbroken: Finished, tmp_path: Path) -> None:
    """After the death of a rank torchrun restarts all, and they continue. At SIGTERM they save, and end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", str(Path(tests.resnet50.__file__))]
    command += told(tmp_path, "--checkpoint-steps", 3, "--epochs", 100_000)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RESNET50.parents[1])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as job:
        try:
            wait_until((tmp_path / "out" / "epochs.jsonl").exists, "an epoch has ended")
            job.terminate()
            _, said = job.communicate(timeout=PATIENCE)
        finally:
            job.kill()
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    starts = sorted(tmp_path.glob("*-0.jsonl"))
    assert len(starts) == 2, said.decode()
    after = updates_seen(tmp_path, 2, 1)
    begun = state["number"] - len(after)  # the last start ended with the update that its checkpoint has
    assert begun in (0, 3)
    expected = unbroken.updates[begun:]
    assert len(after) >= UPDATES - begun and after[: len(expected)] == expected[: len(after)]


@pytest.mark.parametrize("rate", ["1e9", pytest.param("400", marks=pytest.mark.stress)])
def test_simulated_devices(tmp_path: Path, rate: str) -> None:
    """The rate of a device is the ceiling; the limit of an infinitely fast one is the loader."""
    assert Ranks(1, tmp_path, told(tmp_path, "--simulate-gpu-rate", rate)).wait() == [0]
    epochs = epochs_of(tmp_path)
    assert epochs[-1]["FPS after the first step"] <= float(rate) * 1.01
    assert epochs[-1]["ceiling per GPU"] == float(rate)
    # In epochs this short, other work on the machine may be the limit of some.
    assert rate != "1e9" or any(line["limit"].startswith("the loader: ") for line in epochs)


def test_synthetic_data_is_one_batch(tmp_path: Path) -> None:
    assert Ranks(1, tmp_path, told(tmp_path, "--synthetic", "--epochs", 2)).wait() == [0]
    updates = updates_seen(tmp_path, 1, 2)
    assert len(updates) == 2 * UPDATES and len({tuple(update) for update in updates}) == 1
    assert not (tmp_path / "out" / "checkpoint.pt").exists()


@pytest.mark.stress  # the exchange alone, resumed on real ranks: test_dgc
@pytest.mark.parametrize(
    "options",
    [["--communication", "dgc"], ["--communication", "fp16", "--optimizer", "lars"]],
    ids=["dgc", "fp16"],
)
def test_resumed_with_compression(tmp_path: Path, options: list[str]) -> None:
    """The checkpoint has the compression's state of each rank."""
    states = []
    for name, killed in (("whole", None), ("killed", (1, UPDATES + 4))):
        directory = tmp_path / name
        arguments = told(directory, *options, "--checkpoint-steps", 3, "--epochs", 2)
        if killed is not None:
            assert -signal.SIGKILL in Ranks(2, directory, arguments, killed).wait()
        assert Ranks(2, directory, arguments).wait() == [0, 0]
        states.append(torch.load(directory / "out" / "checkpoint.pt", weights_only=True))
        assert epochs_of(directory)[-1]["communication MB"] > 0
    assert_same(states[0]["model"], states[1]["model"])
    if "dgc" in options:
        assert [len(state["communication"]) for state in states] == [2, 2]


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    with serve_scripts("import torch._dynamo, torch.utils.data") as scripts:  # dynamo: of the first optimizer
        yield scripts


def test_your_own_network_and_data(scripts: Scripts, tmp_path: Path) -> None:
    """your_own.py: other data and another network, with the rest of the trainer."""
    generator = np.random.default_rng(0)
    for mode, count in (("train", 200), ("eval", 50)):
        for number in range(count):
            label = number % 10
            values = generator.normal(0, 1, 256) + 3 * (np.arange(256) // 25 == label)
            path = tmp_path / mode / f"{number}.bin"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(np.concatenate([[label], values]).astype("<f4").tobytes())
    command = [RESNET50 / "your_own.py", tmp_path, "--cache", tmp_path / "cache"]
    command += ["--epochs", "4", "--batch-size", "20", "--warmup", "1", "--num-workers", "1"]
    command += ["--out", tmp_path / "out", "--target", "0.9"]
    [done] = scripts.run_files((command, {}))
    assert done.returncode == 0, done.stderr
    last = epochs_of(tmp_path)[-1]
    assert last["accuracy"] >= 0.9 and last["time to target"] > 0
    assert last["accuracy"] <= last["top-5"] <= 1 and 0.1 < last["confidence"] < 1


FILES = ["train.py", "step.py", "model.py", "optim.py", "ranks.py", "options.py"]


def test_six_files_are_a_trainer(scripts: Scripts, tmp_path: Path) -> None:
    """Copied without extras/, they train; and then begin with these weights, for fewer classes."""
    for name in FILES:
        shutil.copy(RESNET50 / name, tmp_path / name)
    make_pictures(tmp_path / "all" / "train", 64, 0)
    make_pictures(tmp_path / "all" / "val", 16, 64)
    for shape in ("disc", "ring", "square"):
        for part in ("train", "val"):
            shutil.copytree(tmp_path / "all" / part / shape, tmp_path / "some" / part / shape)
    options = ["--model", "small", "--resolution", "32", "--batch-size", "8", "--epochs", "1"]
    options += ["--num-workers", "1"]
    runs = [("all", "--out", tmp_path / "out"), ("some", "--init-from", tmp_path / "out" / "checkpoint.pt")]
    runs += [("all", "--simulate-gpu-rate", "100")]
    alone, finetuned, simulated = scripts.run_files(
        *(([tmp_path / "train.py", tmp_path / url, *options, *more], {}) for url, *more in runs)
    )
    assert [alone.returncode, finetuned.returncode] == [0, 0], alone.stderr + finetuned.stderr
    [line] = epochs_of(tmp_path)
    assert line["FPS"] > 0 and 0 <= line["accuracy"] <= line["top-5"] <= 1 and "utilisation" not in line
    assert "new: classifier.weight (3, 64), classifier.bias (3,)" in finetuned.stdout
    assert simulated.returncode == 2
    assert "--simulate-gpu-rate needs the folder extras/ beside train.py" in simulated.stderr


def test_bad_samples_of_an_epoch_are_those_of_this_epoch(tmp_path: Path) -> None:
    make_pictures(tmp_path / "train", 24, 0)
    for path in sorted((tmp_path / "train").rglob("*.jpg"))[:2]:
        path.write_bytes(b"damaged")
    options = ["--model", "small", "--resolution", "32", "--batch-size", "6", "--epochs", "3", "--no-eval"]
    options += ["--num-workers", "0", "--ceiling-steps", "0", "--device", "cpu", "--warmup", "0"]
    words = [str(tmp_path), "--out", str(tmp_path / "out"), *options]
    train.run(train.images, train.resnet, add_options=train.options, arguments=words)
    assert [line["bad samples"] for line in epochs_of(tmp_path)] == [2, 2, 2]


def test_the_page_to_start_from(scripts: Scripts, tmp_path: Path) -> None:
    """examples/train.py trains alone, and refuses to be one of several ranks that have not joined."""
    make_pictures(tmp_path / "train", 64, 0)
    script = [RESNET50.parent / "train.py", tmp_path / "train", "--epochs", "1"]
    script += ["--batch-size", "16", "--num-workers", "1", "--checkpoint", tmp_path / "run.pt"]
    alone, ranked = scripts.run_files((script, {}), (script, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}))
    assert alone.returncode == 0, alone.stderr
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    assert (saved["epoch"], saved["step"]) == (1, 0)
    assert ranked.returncode == 1
    assert "one of several ranks: start them with torchrun" in ranked.stderr
