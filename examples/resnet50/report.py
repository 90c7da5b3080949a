"""The report of a run: a line per epoch in MoXing's columns, utilisation, MLPerf's clock, a chart.

Files in the run's directory: `epochs.jsonl`, one JSON object per epoch; `summary.json` and `chart.png` at the
end; TensorBoard's files with --tensorboard.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoint import replace
from ranks import Ranks
from step import Ceiling

__all__ = ["Clock", "Meter", "Report", "limit", "utilisation"]

ENOUGH = 0.99  # utilisation from which on the device is the limit


def utilisation(samples: float, rate: float, seconds: float) -> float:
    """MLPerf Storage's accelerator utilisation, 0 to 1: total compute time / total running time.

    Args:
        samples: of one accelerator, without its first step.
        rate: its samples/s on data that is already on the device.
        seconds: from the end of the first step to the end of the last one.
    """
    return min(1.0, samples / rate / seconds) if seconds > 0 else 0.0


class Meter:
    """Times one epoch of one rank.

    Args:
        synchronize: waits for the device, and returns the time at which it was done.

    Attributes:
        waited: seconds without a batch, of all steps but the first, which is in `first_wait`.
    """

    def __init__(self, synchronize: Any) -> None:
        self._synchronize = synchronize
        self.steps = self.samples = 0
        self.waited = self.first_wait = self._outside = 0.0
        self._begun = time.perf_counter()
        self._first_end = self._last_end = self._begun
        self._first_samples = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block that fetches a batch."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        if self.steps:
            self.waited += seconds
        else:
            self.first_wait += seconds

    @contextmanager
    def outside(self) -> Iterator[None]:
        """A block that is not training, such as a checkpoint."""
        self._synchronize()
        start = time.perf_counter()
        yield
        self._outside += time.perf_counter() - start

    def step(self, samples: int) -> None:
        """An update of `samples` samples was handed to the device."""
        self.steps += 1
        self.samples += samples
        if self.steps == 1:
            self._first_end, self._first_samples = self._synchronize(), samples

    def end(self) -> None:
        self._last_end = self._synchronize()

    @property
    def seconds(self) -> float:
        """Seconds of training, from the first request for data."""
        return self._last_end - self._begun - self._outside

    @property
    def after_first(self) -> tuple[int, float]:
        """(samples, seconds) without the first step."""
        return self.samples - self._first_samples, self._last_end - self._first_end - self._outside


class Clock:
    """MLPerf's clock: from run_start, the first access to data, to run_final, when the target is reached.

    It is wall time, and part of the checkpoint, so it also counts the time in which a run is down.
    """

    def __init__(self, target: float | None) -> None:
        self.target = target
        self.run_start: float | None = None
        self.run_final: float | None = None

    def start(self) -> None:
        self.run_start = time.time() if self.run_start is None else self.run_start

    def evaluated(self, accuracy: float) -> bool:
        """Whether the target is reached."""
        reached = self.target is not None and accuracy >= self.target
        if reached and self.run_final is None:
            self.run_final = time.time()
        return reached

    @property
    def time_to_accuracy(self) -> float | None:
        """Seconds; None before the target is reached."""
        if self.run_start is None or self.run_final is None:
            return None
        return self.run_final - self.run_start

    def state_dict(self) -> dict[str, Any]:
        return {"run_start": self.run_start, "run_final": self.run_final}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_start, self.run_final = state["run_start"], state["run_final"]


class Report:
    """The output of a run: rank 0 prints and writes; the other ranks only take part in the sums.

    Args:
        directory: of the run, or None.
        ranks: this rank and the others.
        tensorboard: write TensorBoard's files too; needs the package tensorboard.
    """

    def __init__(self, directory: Path | None, ranks: Ranks, tensorboard: bool = False) -> None:
        self.epochs: list[dict[str, Any]] = []
        self._directory = directory
        self._ranks = ranks
        self._board: Any = None
        if tensorboard and ranks.first and directory is not None:
            self._board = _summary_writer(directory)

    def say(self, text: str) -> None:
        if self._ranks.first:
            print(text, flush=True)

    def epoch(
        self, number: int, meter: Meter, ceiling: Ceiling, batch: int, stats: dict[str, Any], **more: Any
    ) -> None:
        """Combine one epoch over all ranks, and show it.

        Args:
            number: counted from 1.
            meter: of this rank.
            ceiling: measured with this epoch's resolution, on this rank.
            batch: samples of one update, all ranks together.
            stats: of the loader, for the limit.
            more: further entries, such as the loss.
        """
        ranks = self._ranks
        samples, seconds = meter.after_first
        used = utilisation(samples, ceiling.rate, seconds)
        total, waited, summed, steady = ranks.sums(
            meter.samples, meter.waited, used, samples / seconds if seconds > 0 else 0.0
        )
        longest, first_wait = ranks.maxima(meter.seconds, meter.first_wait)
        rate = total / longest
        alone = ranks.sums(ceiling.alone)[0] / ranks.size
        later_steps = max(1, meter.steps - 1) * ranks.size
        line = {
            "epoch": number,
            "node": ranks.nodes,
            "GPUs": ranks.size,
            "batch/s": round(rate / batch, 3),
            "batch size": batch,
            "FPS": round(rate, 1),
            "speedup": round(rate / alone, 3),
            "dist_speedup": round(rate / alone / ranks.size, 3),
            "FPS per GPU": round(rate / ranks.size, 1),
            "FPS after the first step": round(steady, 1),
            "ceiling per GPU": round(ceiling.rate, 1),
            "utilisation": round(summed / ranks.size, 4),
            "data wait per step": round(waited / later_steps, 6),
            "first batch": round(first_wait, 3),
            "seconds": round(longest, 3),
            "communication": _communication(ceiling) if ranks.size > 1 else None,
            "limit": limit(summed / ranks.size, waited / ranks.size / max(seconds, 1e-9), stats),
            **more,
        }
        self.epochs.append(line)
        self.write()
        if ranks.first:
            self._show(line)

    def _show(self, line: dict[str, Any]) -> None:
        columns = ["epoch", "node", "GPUs", "batch/s", "batch size", "FPS", "speedup", "dist_speedup"]
        if line is self.epochs[0] or len(self.epochs) == 1:
            print(
                "  ".join(f"{name:>10}" for name in columns)
                + "  utilisation   data wait       loss   accuracy"
            )
        accuracy = line.get("accuracy")
        print(
            "  ".join(f"{line[name]:>10}" for name in columns)
            + f"  {line['utilisation']:>11.2%}  {line['data wait per step'] * 1000:>7.2f} ms"
            + f"  {line.get('loss') or 0:>9.4f}  {'' if accuracy is None else format(accuracy, '>9.2%')}",
            flush=True,
        )
        if self._board is not None:
            for name, value in line.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name.replace(" ", "_"), value, line["epoch"])
            self._board.flush()

    def write(self) -> None:
        """Write all epochs so far to one file; an epoch that is repeated after a resume is in it once."""
        if self._ranks.first and self._directory is not None:
            text = "".join(json.dumps(line) + "\n" for line in self.epochs)
            replace(self._directory / "epochs.jsonl", lambda file: file.write(text.encode()))

    def finish(self, clock: Clock) -> dict[str, Any]:
        """The run in a few numbers; epoch 1, which fills the cache, apart from the others."""
        later = self.epochs[1:]
        summary = {
            "epochs": len(self.epochs),
            "accuracy": max((line["accuracy"] for line in self.epochs if line.get("accuracy")), default=None),
            "target": clock.target,
            "time to accuracy": clock.time_to_accuracy,
            "utilisation of epoch 1": self.epochs[0]["utilisation"] if self.epochs else None,
            "utilisation of later epochs": _mean([line["utilisation"] for line in later]),
            "FPS of epoch 1": self.epochs[0]["FPS"] if self.epochs else None,
            "FPS of later epochs": _mean([line["FPS"] for line in later]),
            "limit": self.epochs[-1]["limit"] if self.epochs else None,
        }
        if self._ranks.first and self._directory is not None:
            text = json.dumps(summary, indent=2) + "\n"
            replace(self._directory / "summary.json", lambda file: file.write(text.encode()))
            self.draw(self._directory / "chart.png")
        self.say(json.dumps(summary))
        return summary

    def draw(self, path: Path) -> None:
        """Write the chart, where the package that draws it is installed."""
        try:
            import vl_convert
        except ImportError:
            self.say("no chart: it needs vl-convert-python; type: pip install 'fastload[demo]'")
            return
        path.write_bytes(vl_convert.vegalite_to_png(chart(self.epochs), scale=2))


def limit(used: float, waited: float, stats: dict[str, Any]) -> str:
    """The limit of the run.

    Args:
        used: utilisation.
        waited: the share of time without a batch.
        stats: of the loader, with its own limit.
    """
    if used >= ENOUGH:
        return "the device"
    # The loader's own limit is the consumer where only the first batch of an epoch was late.
    if waited >= (1 - used) / 2 and stats.get("limit") != "consumer":
        return f"the loader: {stats['verdict']}"
    return f"this process and its cores: it waited for data in only {waited:.1%} of the time"


def _communication(ceiling: Ceiling) -> dict[str, Any]:
    """The all-reduce of one update: the time that it adds, its time alone, and the hidden share of that."""
    return {
        "exposed ms": round(ceiling.exposed * 1000, 3),
        "alone ms": round(ceiling.bare * 1000, 3),
        "overlap": None if ceiling.overlap is None else round(ceiling.overlap, 3),
    }


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _summary_writer(directory: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SystemExit(
            "--tensorboard needs the package tensorboard: pip install tensorboard, or omit the option"
        ) from error
    return SummaryWriter(str(directory / "tensorboard"))


def chart(epochs: list[dict[str, Any]]) -> dict[str, Any]:
    """The chart in Vega-Lite: images/s under their ceiling, and the accuracy."""
    x = {"field": "epoch", "type": "ordinal", "axis": {"labelAngle": 0, "title": "epoch"}}
    ceiling = [{"epoch": line["epoch"], "rate": line["ceiling per GPU"] * line["GPUs"]} for line in epochs]
    rates = {
        "width": 420,
        "height": 240,
        "title": "images/s (line: the ceiling, without a loader)",
        "layer": [
            {
                "data": {"values": [{"epoch": line["epoch"], "rate": line["FPS"]} for line in epochs]},
                "mark": {"type": "bar", "color": "#4c8bf5", "cornerRadiusEnd": 3},
                "encoding": {"x": x, "y": {"field": "rate", "type": "quantitative", "title": None}},
            },
            {
                "data": {"values": ceiling},
                "mark": {"type": "line", "color": "#7b8794", "strokeDash": [5, 4], "point": True},
                "encoding": {"x": x, "y": {"field": "rate", "type": "quantitative", "title": None}},
            },
        ],
    }
    measured = [line for line in epochs if line.get("accuracy") is not None]
    accuracy = {
        "width": 420,
        "height": 240,
        "title": "accuracy",
        "data": {"values": [{"epoch": line["epoch"], "accuracy": line["accuracy"]} for line in measured]},
        "mark": {"type": "line", "color": "#12a150", "point": True},
        "encoding": {
            "x": x,
            "y": {"field": "accuracy", "type": "quantitative", "scale": {"domain": [0, 1]}, "title": None},
        },
    }
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "background": "white",
        "padding": 20,
        "hconcat": [rates, accuracy] if measured else [rates],
    }
