"""`fastload try SCRIPT.py`: the user's own script with torch's loader and with fastload's, side by side."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

from fastload.cli.report import Lines, MeasuredReport, Output, dimmed, figures, styled
from fastload.cli.script import FAILED, MEASURE, OFF
from fastload.errors import ArgumentError

_SECONDS_TO_THE_FIRST_LOADER = 600.0
# An interrupt that comes in a finalizer, or while a process forks, is lost: Python only prints it.
_INTERRUPTS, _SECONDS_TO_END = 4, 15.0  # after each
_SECONDS_AGAIN = 10.0  # of the run that tells whether the script has an order
_LAST_LINES = 15
_FEWEST_BATCHES = 4  # of each loader, for a rate
_WAITS = 0.05  # the script waits for its loader from this share on


@dataclass(kw_only=True)
class Settings:
    """The script, and the time of each run."""

    script: Path
    arguments: Annotated[list[str], "arguments of the script"]
    seconds: float


@dataclass(kw_only=True)
class ScriptRun:
    log: Annotated[Path, "the file with the script's output"]
    ended: Annotated[
        str, '`"itself"`, `"interrupted"` after the time, or `"killed"` where that did not end it'
    ]
    exit_code: Annotated[int | None, "of a script that ended by itself, else null"]
    failure: Annotated[str | None, "the last lines of its output, where the script failed"]


@dataclass(kw_only=True)
class Delivered:
    """What one loader delivered in one run."""

    batches: Annotated[int, "number of batches"]
    samples: Annotated[int, "number of samples in them"]
    samples_per_second: Annotated[float, "rate of the script, after the batches that were made ahead"]
    first_batch_seconds: Annotated[float | None, "time from `iter()` to the first batch, or null"]
    waited: Annotated[float, "share of that time in which the script waited for the loader"]


@dataclass(kw_only=True)
class TriedLoader:
    """A loader of the script, or several that are alike."""

    dataset: Annotated[str, "class of its dataset"]
    length: Annotated[int | None, "samples of the dataset, or null"]
    batch_size: Annotated[int | None, "its batch size, or null"]
    num_workers: Annotated[int, "its workers"]
    torch: Delivered | None
    fastload: Delivered | None
    ratio: Annotated[
        float | None, "rate with fastload divided by that with torch; null: too few batches for a rate"
    ]
    same_order: Annotated[
        bool | None, "whether the leading batches have the same indices; null: not comparable"
    ]
    same_integers: Annotated[
        bool | None, "whether they have the same labels and other integers; null: likewise"
    ]
    comparison: Annotated[str, "the same in one sentence"]
    verdict: Annotated[str | None, "the bottleneck with fastload, in one sentence, or null"]


@dataclass(kw_only=True)
class TryReport(MeasuredReport):
    """A script with torch's loader and with fastload's."""

    command = "try"
    settings: Settings
    torch: ScriptRun
    fastload: ScriptRun
    loaders: list[TriedLoader]
    changes: Annotated[list[str], "the lines to change in the script"]

    @property
    def exit_code(self) -> int:
        differs = any(False in (loader.same_order, loader.same_integers) for loader in self.loaders)
        return int(differs or any(run.failure is not None for run in (self.torch, self.fastload)))

    def text(self) -> Lines:
        """Yield a table for each loader, what is to change, and how a run failed."""
        for loader in self.loaders:
            yield from _describe(loader)
        for name, run in (("torch", self.torch), ("fastload", self.fastload)):
            if run.failure is not None:
                end = "and was killed" if run.exit_code is None else f"exit code {run.exit_code}"
                yield styled(f"the script failed with {name}'s loader, {end}:", "bold red")
                yield from (f"  {line}" for line in run.failure.splitlines())
            elif run.ended == "killed":
                yield f"the script with {name}'s loader did not end after Ctrl-C, and was killed"
        if not self.fastload.failure:
            yield styled(f"to change in {self.settings.script.name}:", "bold")
            yield from (f"  {line}" for line in self.changes)
        yield dimmed(
            "fastload ran first, so torch found local files in memory already. The script's output: "
            f"{self.fastload.log}, {self.torch.log}"
        )


def _describe(loader: TriedLoader) -> Lines:
    sides = (loader.torch, loader.fastload)
    length = "" if loader.length is None else f"{loader.length:,} samples, "
    size = "" if loader.batch_size is None else f"batches of {loader.batch_size:,}, "
    table = figures(f"{loader.dataset}: {length}{size}{loader.num_workers} workers", "torch", "fastload")
    rows: dict[str, Callable[[Delivered], str]] = {
        "samples/s": lambda side: f"{side.samples_per_second:,.0f}",
        "first batch": lambda side: (
            "" if side.first_batch_seconds is None else f"{side.first_batch_seconds:.2f} s"
        ),
        "waited for the loader": lambda side: f"{side.waited:.0%}",
        "batches": lambda side: f"{side.batches:,}",
    }
    for name, cell in rows.items():
        table.add_row(name, *("-" if side is None else cell(side) for side in sides))
    yield table
    if None in sides:
        pass
    elif loader.ratio is None:
        yield f"fewer than {_FEWEST_BATCHES} batches are too few for a rate: give more --seconds"
    elif all(side is not None and side.waited < _WAITS for side in sides):
        yield "the script waits for neither loader: both rates are those of its own work"
    else:
        yield styled(
            f"the script reads {loader.ratio:.2f} times as many samples a second with fastload", "bold"
        )
    yield loader.comparison
    if loader.verdict is not None:
        yield f"with fastload, {loader.verdict}"


def try_script(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py", help="Your own training script.")],
    output: Output,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments: all that stands behind it.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="N", min=1, help="Time of each run, from its first loader on.")
    ] = 60,
) -> TryReport:
    """Run your own script with torch's loader and with fastload's, and compare them.

    Each run is a process of its own, which is interrupted after the time, as by Ctrl-C. Options of this
    command stand before SCRIPT.py. The script does what it always does, twice: it also writes its files and
    checkpoints. Exit code 1: the script fails, or gets other samples from fastload's loader.
    """
    if not script.is_file():
        raise ArgumentError(f"there is no script {str(script)!r}: give the path of a Python file")
    command = [str(script), *(arguments or [])]
    folder = Path(tempfile.mkdtemp(prefix="fastload-try-"))

    def run(name: str, limit: float) -> tuple[ScriptRun, list[dict[str, Any]]]:
        log = folder / f"{name}.log"
        output.console.print(f"{script.name}, {name}, {limit:g} s; its output: {log}", soft_wrap=True)
        return _run(command, log, off=name != "fastload", seconds=limit)

    ours, read = run("fastload", seconds)
    theirs, expected = run("torch", seconds)
    if not (read or expected or ours.failure or theirs.failure):
        raise ArgumentError(
            f"{script.name} read from no torch.utils.data.DataLoader: give the script that trains, and the "
            f"arguments with which it trains; its output: {theirs.log}"
        )
    again: list[dict[str, Any]] = []
    nothing: dict[str, Any] = {}
    if any(False in _equal(*pair) for pair in zip_longest(expected, read, fillvalue=nothing)):
        _, again = run("torch again", min(seconds, _SECONDS_AGAIN))
    loaders = [
        _tried(*sides)
        for sides in zip_longest(expected, read, again, fillvalue=nothing)
        if sides[0] or sides[1]
    ]
    return TryReport(
        settings=Settings(script=script, arguments=command[1:], seconds=seconds),
        torch=theirs,
        fastload=ours,
        loaders=loaders,
        changes=_changes(script, {loader.dataset for loader in loaders}),
    )


def _run(
    command: list[str], log: Path, *, off: bool, seconds: float
) -> tuple[ScriptRun, list[dict[str, Any]]]:
    """Run the script with one loader. Returns also what its loaders delivered."""
    with tempfile.TemporaryDirectory() as directory, log.open("wb") as stdout:
        environment = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", **os.environ, OFF: str(int(off))}
        environment[MEASURE] = directory
        script = subprocess.Popen(
            [sys.executable, "-m", "fastload", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended, code = "killed", None
        try:
            interrupted = not _wait(script, Path(directory), seconds)
            for _ in range(_INTERRUPTS):
                if interrupted:
                    os.killpg(script.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = script.wait(_SECONDS_TO_END)
                    ended, code = ("interrupted", None) if interrupted else ("itself", code)
                    break
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)  # its workers too
            script.wait()
        # Its own threads may keep a script from ending after its error.
        failed = bool(code) or (not interrupted and (Path(directory) / FAILED).exists())
        lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if failed else []
        measured = [json.loads(path.read_text()) for path in Path(directory).glob("*.json")]
    result = ScriptRun(log=log, ended=ended, exit_code=code, failure="\n".join(lines) if failed else None)
    return result, max(measured, key=lambda loaders: sum(one["batches"] for one in loaders), default=[])


def _wait(script: subprocess.Popen[bytes], directory: Path, seconds: float) -> bool:
    """Wait for the script's end, at most `seconds` after its first loader began. Returns whether it ends."""
    end, reading = time.monotonic() + _SECONDS_TO_THE_FIRST_LOADER, False
    while script.poll() is None and not (directory / FAILED).exists():
        if not reading and any(directory.glob("*.json")):
            end, reading = time.monotonic() + seconds, True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _equal(torch: dict[str, Any], fastload: dict[str, Any]) -> tuple[bool | None, bool | None]:
    """Whether (the order, the integers) of the batches that both have are equal; None: there are none."""

    def equal(name: str) -> bool | None:
        pairs = list(zip(torch.get(name, []), fastload.get(name, []), strict=False))
        return all(a == b for a, b in pairs) if pairs else None

    return equal("order"), equal("integers")


def _tried(torch: dict[str, Any], fastload: dict[str, Any], again: dict[str, Any]) -> TriedLoader:
    """Return the comparison of a loader.

    Args:
        again: a second run with torch's, where the first two differ.
    """
    about = torch or fastload
    order, integers = _equal(torch, fastload)
    if False in (order, integers) and False in _equal(torch, again):
        order = integers = None
        comparison = (
            "order and labels cannot be compared: with torch's loader too, each run has others. Seed the "
            "order, for example with torch.manual_seed(0) where the script begins, or in the loader with "
            "generator=torch.Generator().manual_seed(0)"
        )
    elif False in (order, integers):
        what = "order of the samples" if order is False else "sequence of the labels"
        comparison = f"the {what} differs from torch's: please report it, with the script"
    elif order is None and integers is None:
        comparison = "order and labels are not compared: no batch of both runs has indices or integers"
    else:
        same = {"order": "the order"} if order else {}
        same |= {"integers": "the labels"} if integers else {}
        count = min(len(side[name]) for side in (torch, fastload) for name in same)
        comparison = f"{' and '.join(same.values())} of the first {count} batches: the same with both"
    rates = [
        side["samples_per_second"] if side and side["batches"] >= _FEWEST_BATCHES else 0.0
        for side in (torch, fastload)
    ]
    return TriedLoader(
        dataset=about["dataset"].rpartition(".")[2],
        length=about["length"],
        batch_size=about["batch_size"],
        num_workers=about["num_workers"],
        torch=_delivered(torch),
        fastload=_delivered(fastload),
        ratio=round(rates[1] / rates[0], 3) if all(rates) else None,
        same_order=order,
        same_integers=integers,
        comparison=comparison,
        verdict=fastload.get("verdict"),
    )


def _delivered(side: dict[str, Any]) -> Delivered | None:
    return Delivered(**{field.name: side[field.name] for field in fields(Delivered)}) if side else None


def _changes(script: Path, datasets: set[str]) -> list[str]:
    """Return the lines to write: the import of the loader, and the dataset that reads a store."""
    imports, uses, folders = set[int](), set[int](), set[int]()
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError):  # the script's own run says so
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and "DataLoader" in (alias.name for alias in node.names):
            imports.add(node.lineno)
        elif isinstance(node, ast.Attribute) and node.attr == "DataLoader":
            uses.add(node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "ImageFolder":
            folders.add(node.lineno)
    if imports:
        loader = f"{_places(imports)}: from fastload import DataLoader"
    elif uses:
        loader = f"{_places(uses)}: fastload.DataLoader, with `import fastload` above"
    else:
        loader = f"no line, as a framework makes the loaders: start it by python -m fastload {script.name}"
    dataset = "your dataset stays as it is; fastload's datasets read a bucket, and cache what they read"
    if folders and "ImageFolder" in datasets:
        folder = 'fastload.ImageFolder("s3://bucket/train", transform, cache="/ssd/cache")'
        dataset = f"{_places(folders)}: {folder}"
    return [loader, dataset]


def _places(lines: set[int]) -> str:
    return f"line {', '.join(map(str, sorted(lines)))}"
