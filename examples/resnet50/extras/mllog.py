"""MLPerf's log of a run: the lines of its package mlperf-logging, checked with its compliance checker.

The time of MLPerf runs from run_start to run_stop. That of train.py, the column "time to target", begins with
init_start, so it has the start of ranks, loader and network too.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

__all__ = ["MlLog"]


class MlLog:
    """Writes lines ":::MLLOG {...}" into a file; for rank 0. A resumed run adds to the file.

    Args:
        path: of the file.
        run: of train.py, before its first update.
        eval_samples: samples of the evaluation.
    """

    def __init__(self, path: Path, run: Any, eval_samples: int) -> None:
        self._resumed = run.progress.number > 0
        self._ended = False  # run_stop is in the file
        if self._resumed:
            self._continue(path, run.over)
            return
        self._file = path.open("w")
        self("init_start", at=run.clock.begun)
        self("cache_clear", False)
        self._submission()
        batch, args = run.batches[0], run.args
        self("seed", args.seed)
        self("global_batch_size", batch.of_all)
        self("gradient_accumulation_steps", batch.passes)
        self("train_samples", run.samples)
        self("eval_samples", eval_samples)
        self._optimizer(run)
        self("init_stop")

    def _continue(self, path: Path, over: bool) -> None:
        """Open the file of a resumed run. One that goes on after its end (another target) ends again."""
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if '"key": "run_stop"' not in line]
        self._ended = over and len(kept) < len(lines)
        if len(kept) < len(lines) and not over:
            path.write_text("".join(kept))
        self._file = path.open("a")

    def _submission(self) -> None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
        self("submission_benchmark", "resnet")
        self("submission_division", "open")
        self("submission_org", "none: a run of fastload's trainer")
        self("submission_platform", device or platform.machine())
        self("submission_status", "research")

    def _optimizer(self, run: Any) -> None:
        args, schedule, batch = run.args, run.schedule, run.batches[0]
        if "optimizer" not in args:
            self("opt_name", type(run.step.optimizer).__name__.lower())
            return
        peak = args.base_lr * batch.of_all / 256
        self("opt_name", args.optimizer)
        # The names of the two optimizers differ in these, too: opt_... and lars_opt_...
        prefix = {"sgd": "sgd_opt", "lars": "lars_opt"}[args.optimizer]
        warmup = {"sgd": "opt", "lars": "lars_opt"}[args.optimizer]
        self(f"{prefix}_base_learning_rate", peak)
        self(f"{prefix}_end_learning_rate", peak * schedule.at(schedule.total))
        self(f"{prefix}_learning_rate_decay_steps", schedule.total - schedule.warmup)
        if args.decay == "polynomial":
            self(f"{prefix}_learning_rate_decay_poly_power", args.power)
        self(f"{warmup}_learning_rate_warmup_epochs", args.warmup)
        self(f"{prefix}_momentum", args.momentum)
        self(f"{prefix}_weight_decay", args.weight_decay)
        if args.optimizer == "lars":
            self("lars_epsilon", 0.0)

    def __call__(self, key: str, value: Any = None, at: float | None = None, **metadata: Any) -> None:
        """A line, now or `at` that time; `key`: "..._start" and "..._stop" are the ends of an interval."""
        if (self._resumed and key == "run_start") or self._ended:
            return
        kinds = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
        event = {
            "namespace": "",
            "time_ms": int((time.time() if at is None else at) * 1000),
            "event_type": kinds.get(key.rpartition("_")[2], "POINT_IN_TIME"),
            "key": key,
            "value": value,
            "metadata": {"file": "train.py", "lineno": 0, **metadata},
        }
        print(":::MLLOG", json.dumps(event), file=self._file, flush=True)
