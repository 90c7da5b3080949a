"""`fastload.watch` and the profiler's ranges: they show what happens, and leave nothing behind."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import fastload
from fastload import DataLoader
from fastload.errors import ArgumentError
from fastload.metrics.counters import stage
from tests.loaderdata import Gate, Numbers, Stream
from tests.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("no_leaks")
SOON = 1e-9  # seconds: look with every batch


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120)


def text(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("how", ["with", "for"])
def test_every_batch_once_and_a_view(num_workers: int, terminal: bool, how: str) -> None:
    loader = DataLoader(Numbers(30), 2, num_workers=num_workers)
    out = console(terminal=terminal)
    if how == "for":
        view = fastload.watch(loader, interval=SOON, console=out)
        assert len(view) == 15
        found = torch.cat(list(view))
    else:
        with fastload.watch(loader, interval=SOON, console=out):
            found = torch.cat(list(loader))
    assert found.tolist() == list(range(30))
    assert loader._context.meter.tick is None
    shown = text(out)
    assert "samples/s" in shown and "workers" in shown
    if not terminal:
        assert "\x1b" not in shown and all(line.startswith("fastload: ") for line in shown.splitlines())


def test_elsewhere_one_line_from_time_to_time() -> None:
    out = console(terminal=False)
    for _ in fastload.watch(DataLoader(Numbers(500)), console=out):
        pass
    assert text(out) == ""  # 10 s have not passed
    for _ in fastload.watch(DataLoader(Numbers(500)), console=out, interval=SOON):
        pass
    assert len(text(out).splitlines()) == 500


def test_rate_is_of_the_batches_that_were_handed_over() -> None:
    """Those that were made in the same interval may be none."""
    out = console(terminal=False)
    loader = DataLoader(Numbers(30), 2, num_workers=2, prefetch_factor=8)
    for _ in fastload.watch(loader, interval=SOON, console=out):
        time.sleep(0.01)
    assert not [line for line in text(out).splitlines() if line.startswith("fastload: 0 samples/s")]


def test_no_thread_and_no_cursor_left_hidden() -> None:
    out = console(terminal=True)
    before = threading.active_count()
    with fastload.watch(DataLoader(Numbers(8)), console=out, interval=SOON) as view:
        assert threading.active_count() == before
        assert view is not None
    assert text(out).count("\x1b[?25l") == text(out).count("\x1b[?25h")


@pytest.mark.parametrize("terminal", [True, False])
def test_broken_off_and_failed(terminal: bool) -> None:
    loader = DataLoader(Numbers(8, lambda i: 1 // (4 - i)), num_workers=1)
    out = console(terminal=terminal)
    for batch in fastload.watch(loader, console=out):
        assert batch is not None
        break
    assert loader._context.meter.tick is None
    with pytest.raises(ZeroDivisionError):
        list(fastload.watch(loader, console=out))
    assert loader._context.meter.tick is None


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "gone"), ValueError("closed file")])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_that_goes_away_stops_nothing(
    error: Exception, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr("sys.stderr", Gone())
    loader = DataLoader(Numbers(8))
    assert len(list(fastload.watch(loader, interval=SOON))) == 8


def test_a_wait_is_shown_before_it_ends(tmp_path: Path) -> None:
    """The first sample waits for a file, which is made once the view has said that it waits."""
    go = tmp_path / "go"

    class Seen(io.StringIO):
        def write(self, text: str) -> int:
            if "waiting for a batch" in text:
                go.touch()
            return super().write(text)

    loader = DataLoader(Numbers(4, Gate(go)), num_workers=1, timeout=PATIENCE)
    out = Console(file=Seen(), width=200)
    assert len(list(fastload.watch(loader, console=out, interval=0.1))) == 4


def test_arguments() -> None:
    with pytest.raises(ArgumentError, match=r"found torch\.utils\.data\.dataloader\.DataLoader"):
        fastload.watch(torch.utils.data.DataLoader(Numbers(4)))  # type: ignore[arg-type]
    loader = DataLoader(Numbers(4))
    with pytest.raises(ArgumentError, match="interval"):
        fastload.watch(loader, interval=0)
    with fastload.watch(loader), pytest.raises(ArgumentError, match="watched already"):
        list(fastload.watch(loader))
    assert len(list(fastload.watch(loader))) == 4


# --- the profiler


def ranges(work: Any) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        work()
    return {event.key for event in profiler.key_averages() if event.key.startswith("fastload.")}


@pytest.mark.filterwarnings("ignore::UserWarning:torch.profiler")
def test_ranges_in_the_trainer() -> None:
    found = ranges(lambda: list(DataLoader(Numbers(8), 2, num_workers=1)))
    assert {"fastload.wait", "fastload.unpack", "fastload.sampler"} <= found
    assert {"fastload.decode", "fastload.collate"} <= ranges(lambda: list(DataLoader(Numbers(8), 2)))


_profilers: list[Any] = []


def start_profiler(_: int) -> None:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.start()
    _profilers.append(profiler)


class Reports(Stream):
    """Says, as its last sample, which ranges the profiler of its worker has seen."""

    def __iter__(self) -> Any:
        yield 0
        yield 0
        profiler = _profilers.pop()
        profiler.stop()
        yield int(any(event.key == "fastload.decode" for event in profiler.key_averages()))


def test_ranges_in_a_worker() -> None:
    loader = DataLoader(Reports([]), None, num_workers=1, worker_init_fn=start_profiler)
    assert [int(value) for value in loader] == [0, 0, 1]


def test_without_a_profiler_there_is_no_range() -> None:
    assert stage("decode") is stage("get")
