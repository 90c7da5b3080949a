"""`fastload replay STATE --step N`: what a step of a run was made of, from its checkpoint alone."""

from __future__ import annotations

import importlib.util
import io
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from fastload.cli.command_options import StoreOptions
from fastload.cli.report import Lines, Report, styled
from fastload.errors import ArgumentError, FastloadError, printable

_MOST_RANKS = 65_536  # of which a table is shown


@dataclass(kw_only=True)
class Settings:
    """What was asked for."""

    state: Path
    at: str | None
    rank: str | None
    world_size: int | None
    loader: str | None
    data: str | None


@dataclass(kw_only=True)
class ReplayedSample:
    """One row of the step."""

    rank: Annotated[int, "rank that read the sample"]
    row: Annotated[int, "its place in the batch of that rank"]
    index: Annotated[int | str | None, "the sample in the loader's dataset"]
    key: Annotated[str | None, "name of its object; null: it has none, or the data could not be read"]
    label: Annotated[int | None, "its label, or null"]
    crop: Annotated[
        tuple[float, ...] | None, "`[left, top, right, bottom]` in pixels of the image; null: not known"
    ]
    flip: Annotated[bool | None, "whether it was flipped; null: not known"]
    replaces: Annotated[int | str | None, "the excluded sample in whose place this one stood, or null"]
    error: Annotated[str, 'why the sample cannot be made, or `""`']


@dataclass(kw_only=True)
class ReplayReport(Report):
    """What a step was made of."""

    command = "replay"
    settings: Settings
    epoch: Annotated[int, "an iteration of the loader, from 0"]
    step: Annotated[int, "a batch of it, from 0"]
    ranks: Annotated[list[int], "the ranks that are shown"]
    samples: list[ReplayedSample]
    missing: Annotated[str | None, "why keys and images cannot be told, or null"]
    notes: Annotated[list[str], "what may be unlike the run, in sentences"]
    html: Annotated[Path | None, "the path of the file that was written, or null"]
    png: Annotated[Path | None, "the path of the file that was written, or null"]
    tensors: Annotated[Path | None, "the path of the file that was written, or null"]

    def text(self) -> Lines:
        yield styled(_title(self.epoch, self.step, self.settings.rank), "bold")
        yield from self.notes
        for rank in self.ranks:
            if len(self.ranks) > 1:
                yield f"rank {rank}"
            samples = [sample for sample in self.samples if sample.rank == rank]
            if not samples:
                yield "this step is skipped: it has no batch"
            yield from _lines(samples)


def _title(epoch: int, step: int, rank: str | None) -> str:
    return f"epoch {epoch}, step {step}" + ("" if rank is None else f", rank {rank}")


def _lines(samples: Sequence[ReplayedSample]) -> list[str]:
    """Return columns that are as wide as their longest cell; those without contents are left out."""
    columns = [field.name for field in fields(ReplayedSample) if field.name != "rank"]
    cells = [{name: _text(getattr(sample, name)) for name in columns} for sample in samples]
    names = [name for name in columns if any(row[name] for row in cells)]
    widths = {name: max(len(name), *(len(row[name]) for row in cells)) for name in names}
    rows = [{name: name for name in names}, *cells] if cells else []
    return ["  ".join(row[name].ljust(widths[name]) for name in names).rstrip() for row in rows]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, str):
        return printable(value or "")
    return f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())


def _describe(part: _Part, sample: Any) -> ReplayedSample:
    plain = sample._asdict()
    for name in ("index", "replaces"):  # of a sampler of the user's own it may be anything
        if not isinstance(plain[name], int | str | None):
            plain[name] = repr(plain[name])
    return ReplayedSample(rank=part.number or 0, **plain)


class _Part(NamedTuple):
    """The step on one rank; `number` is None where the run has one rank."""

    number: int | None
    samples: list[Any]


class _Made(NamedTuple):
    """The loader, and what is unlike the run's: see `fastload.trace.recipe.Restored`."""

    loader: Any
    missing: str | None = None
    no_images: str | None = None
    no_batch: str | None = None
    notes: Sequence[str] = ()
    own: bool = False

    def reading(self) -> AbstractContextManager[None]:
        """Return the context in which the loader is used: an error of the user's own says what it is."""
        from fastload.order.state import reading_state

        return nullcontext() if self.own else reading_state()


class _Step(NamedTuple):
    """The step on the ranks that have samples of it. A batch is made for each file that was asked for."""

    made: _Made
    parts: list[_Part]
    step: int
    epoch: int
    world_size: int | None

    def batch(self, part: _Part) -> Any:
        with self.made.reading():
            return self.made.loader.batch_at(
                self.step, self.epoch, rank=part.number, world_size=self.world_size
            )

    def check(self, options: str, why: str | None) -> None:
        """Refuse options for which there is no batch; `why` it cannot be made, or None."""
        if self.made.missing is not None:
            raise ArgumentError(f"{options}: {self.made.missing}")
        if why is not None:
            raise ArgumentError(
                f"{options}: the state does not say how the batch was made ({why}): pass --loader "
                "FILE.py:FUNCTION, a function that makes the loader"
            )
        if not self.parts:
            raise ArgumentError(f"{options}: that step was skipped, and has no batch")


@dataclass(frozen=True)
class StepOptions:
    """The step of a run."""

    step: Annotated[int, typer.Option(metavar="N", help="A batch of the epoch, from 0.")]
    epoch: Annotated[
        int | None,
        typer.Option(
            metavar="E",
            help="An iteration of the loader, from 0.",
            show_default="the one that ran when the state was saved, or the next",
        ),
    ] = None
    rank: Annotated[
        str | None, typer.Option(metavar="R", help="The rank, or 'all'; needed where the run had several.")
    ] = None
    world_size: Annotated[
        int | None,
        typer.Option(
            metavar="W", help="Deal the whole epoch to this number of ranks.", show_default="as in the run"
        ),
    ] = None


@dataclass(frozen=True)
class LoaderOptions:
    """The loader of the run."""

    at: Annotated[
        str | None, typer.Option(metavar="PLACE", help="Which loader, if the checkpoint has several.")
    ] = None
    loader: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Your function that makes the loader. The file is run, then this, without arguments.",
            show_default="made from the state",
        ),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where the data is now.", show_default="where it was"),
    ] = None


@dataclass(frozen=True)
class FileOptions:
    """The files that are written."""

    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the images to a page of HTML.")] = (
        None
    )
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the images to one PNG.")] = None
    tensors: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the batch to a file for torch.load.")
    ] = None


def replay(
    state: Annotated[
        Path,
        typer.Argument(
            metavar="STATE", help="A loader's state, by torch.save or as JSON; or a checkpoint that has it."
        ),
    ],
    store: StoreOptions,
    wanted: StepOptions,
    source: LoaderOptions,
    files: FileOptions,
) -> ReplayReport:
    """Show the rows, images and tensors of any step of a run, from a checkpoint."""
    from fastload.order.state import read_state

    saved = read_state(state, source.at)
    settings = Settings(state=state, rank=wanted.rank, world_size=wanted.world_size, **vars(source))
    made = _make(saved, source, store.parse())
    try:
        return _replay(made, saved, wanted, files, settings)
    finally:
        getattr(made.loader.dataset, "close", lambda: None)()


def _replay(
    made: _Made, saved: Mapping[str, Any], wanted: StepOptions, files: FileOptions, settings: Settings
) -> ReplayReport:
    """Find the samples of the step, and write the files that are asked for."""
    from fastload.order.state import parse_state

    step, world_size = wanted.step, wanted.world_size
    with made.reading():
        with warnings.catch_warnings(action="ignore"):  # of what is unlike the run, the notes tell
            made.loader.load_state_dict(saved)
        known = parse_state(saved, "the state")
        epoch = known.epoch if wanted.epoch is None else wanted.epoch
        parts = [
            _Part(number, made.loader.samples_at(step, epoch, rank=number, world_size=world_size))
            for number in _ranks(wanted.rank, world_size, known.replicas_at(epoch, step))
        ]
    notes = [*made.notes, *([made.missing] if made.missing else [])]
    there = _Step(made, [part for part in parts if part.samples], step, epoch, world_size)
    if files.html is not None or files.png is not None:
        _write_sheets(there, files, _title(epoch, step, wanted.rank), notes)
    if files.tensors is not None:
        _write_tensors(there, files.tensors)
    return ReplayReport(
        settings=settings,
        epoch=epoch,
        step=step,
        samples=[_describe(part, sample) for part in parts for sample in part.samples],
        missing=made.missing,
        notes=notes,
        **vars(files),
        ranks=[part.number or 0 for part in parts],
    )


def _make(saved: Mapping[str, Any], source: LoaderOptions, options: Mapping[str, Any]) -> _Made:
    """Return the loader that the user's function makes, or the one that the state describes."""
    import fastload
    from fastload.order.state import reading_state
    from fastload.trace.recipe import restore

    if source.loader is not None:
        if source.data is not None or options:
            raise ArgumentError(
                "--loader makes its own dataset: leave out --data and the options of the store"
            )
        return _Made(run_loader(source.loader), own=True)
    restored = restore(saved, url=source.data, storage_options=options)
    with reading_state():
        return _Made(fastload.DataLoader(**restored.arguments), *restored[1:])


def _ranks(rank: str | None, given: int | None, found: int | None) -> list[int | None]:
    """Return the ranks that are shown; [None]: the only one."""
    world = found if given is None else given
    if rank is None:
        if world is not None and world > 1:
            raise ArgumentError(f"{world} ranks read that step: give --rank 0 to {world - 1}, or --rank all")
        return [None]
    if rank != "all" and not rank.isdecimal():
        raise ArgumentError(f"--rank must be a number from 0 on, or 'all', found {rank!r}")
    if world is None:
        if rank in ("0", "all"):
            return [None]
        raise ArgumentError(
            f"--rank {rank}: the samples of that step were not dealt to ranks: leave out --rank, or give "
            "--world-size too if the sampler deals them"
        )
    if rank == "all":
        if world > _MOST_RANKS:
            raise ArgumentError(f"--rank all: the step has {world:,} ranks: give one of them")
        return list(range(world))
    if int(rank) >= world:
        raise ArgumentError(f"--rank must be below the {world} ranks of that step, found {rank}")
    return [int(rank)]


# --- the loader of `--loader`


def run_loader(place: str) -> Any:
    """Run FUNCTION of FILE.py, and return the loader that it returns. Modules beside the file are found.

    Raises:
        ArgumentError: there is no such file or function; it raised; it returned something else.
    """
    import fastload

    file, colon, name = place.rpartition(":")
    path = Path(file)
    if not colon or not name.isidentifier() or path.suffix != ".py":
        raise ArgumentError(f"--loader {place!r}: write FILE.py:FUNCTION, as in train.py:make_loader")
    if not path.is_file():
        raise ArgumentError(f"--loader {place!r}: there is no file {file!r}")
    function = getattr(_module(path, place), name, None)
    if not callable(function):
        raise ArgumentError(f"--loader {place!r}: {file} has no function {name!r}")
    loader = _run(function, path, place)
    if not isinstance(loader, fastload.DataLoader):
        raise ArgumentError(
            f"--loader {place!r}: {name}() has to return a fastload.DataLoader, and returned a "
            f"{type(loader).__name__}"
        )
    return loader


def _module(path: Path, place: str) -> Any:
    """Import the file as a module of its own name: `if __name__ == "__main__"` does not run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.absolute()))
    sys.modules[path.stem] = module  # where pickle looks for its classes
    _run(lambda: spec.loader.exec_module(module), path, place)
    return module


def _run(function: Any, path: Path, place: str) -> Any:
    try:
        return function()
    except FastloadError:
        raise
    except Exception as error:
        lines = [line for line in traceback.extract_tb(error.__traceback__) if Path(line.filename) == path]
        where = f" in line {lines[-1].lineno}" if lines else ""
        raise ArgumentError(f"--loader {place!r} raised{where}: {type(error).__name__}: {error}") from error


# --- the files


def _write_sheets(step: _Step, files: FileOptions, title: str, notes: Sequence[str]) -> None:
    """Write the images before `batch_transform`: after a Normalize they are no pictures any more."""
    from fastload.cli.sheet import Cell, html_sheet, pictures_of, png_sheet

    step.check("--html and --png", step.made.no_images)
    loader = step.made.loader
    transform, loader.batch_transform = loader.batch_transform, None
    cells, any_scaled = list[Cell](), False
    for part in step.parts:
        pictures, scaled = pictures_of(step.batch(part), len(part.samples))
        any_scaled = any_scaled or scaled
        before = f"rank {part.number}, " if len(step.parts) > 1 else ""
        for picture, sample in zip(pictures, part.samples, strict=True):
            cells.append(Cell(picture, before + _caption(sample), _below(sample)))
    loader.batch_transform = transform
    if any_scaled:
        notes = [*notes, "Each image is shown scaled from its smallest to its largest value."]
    if files.html is not None:
        _write("--html", files.html, html_sheet(title, notes, cells).encode("utf-8", "backslashreplace"))
    if files.png is not None:
        _write("--png", files.png, png_sheet(title, notes, cells))


def _write_tensors(step: _Step, path: Path) -> None:
    import torch

    from fastload.cli.sheet import plain

    step.check("--tensors", step.made.no_batch)
    ranks = [part.number or 0 for part in step.parts]
    batches = [plain(step.batch(part)) for part in step.parts]
    file = io.BytesIO()
    torch.save({"epoch": step.epoch, "step": step.step, "ranks": ranks, "batches": batches}, file)
    _write("--tensors", path, file.getvalue())


def _caption(sample: Any) -> str:
    label = "" if sample.label is None else f", label {sample.label}"
    return f"row {sample.row}{label}" + (", replaced" if sample.replaces is not None else "")


def _below(sample: Any) -> tuple[str, ...]:
    key = f"index {sample.index}" if sample.key is None else str(sample.key)
    crop = (
        () if sample.crop is None else (f"crop {_text(sample.crop)}" + (", flipped" if sample.flip else ""),)
    )
    return (key, *crop, *((sample.error,) if sample.error else ()))


def _write(option: str, path: Path, content: bytes) -> None:
    from fastload.store.node import whole_file

    try:
        with whole_file(path, mode=0o644) as file:
            file.write(content)
    except OSError as error:
        raise ArgumentError(f"{option} {str(path)!r} cannot be written: {error.strerror or error}") from None
