"""`fastload prove A B`: whether two runs got the same data, and where they differ."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import typer

from fastload.cli.report import Lines, Report

_SIDE = "A saved state, a rank's sample log, or a directory of logs; with commas: one for each rank."


@dataclass(kw_only=True)
class Settings:
    """The two runs."""

    a: str
    b: str


@dataclass(kw_only=True)
class ProveReport(Report):
    """Whether two runs got the same data."""

    command = "prove"
    settings: Settings
    same: Annotated[bool, "whether no step that both have differs"]
    why: Annotated[str, "the answer in one sentence"]
    epoch: Annotated[int | None, "the first epoch that differs, or null"]
    step: Annotated[int | None, "the first step that differs, or null"]
    rank: Annotated[int | None, "rank of the first row that differs, from logs only, or null"]
    row: Annotated[int | None, "the first row that differs, from logs only, or null"]

    @property
    def exit_code(self) -> int:
        return 0 if self.same else 1

    def text(self) -> Lines:
        yield self.why


def prove(
    a: Annotated[str, typer.Argument(metavar="A", help=_SIDE)],
    b: Annotated[str, typer.Argument(metavar="B", help="The same, of the other run.")],
) -> ProveReport:
    """Compare what two runs were trained on, sample by sample.

    States are those of the loader's state_dict(), saved by torch.save or as JSON, also inside a bigger
    checkpoint. Logs are those of DataLoader(sample_log=DIR). The runs may have other numbers of ranks and
    workers, and other caches. Exit code 1: the data differs.
    """
    from fastload.trace.prove import prove as compare  # torch takes 2 s to import

    return ProveReport(settings=Settings(a=a, b=b), **compare(_paths(a), _paths(b))._asdict())


def _paths(side: str) -> str | list[str]:
    # Path.exists raises OSError for a list that is longer than a path may be.
    return side if os.path.exists(side) else side.split(",")  # noqa: PTH110
