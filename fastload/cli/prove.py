"""`fastload prove A B`: whether two runs were handed out the same data, and where they part.

The JSON document:

{"command": "prove", "settings": {"a", "b"}, "same", "why", "epoch", "step", "rank", "row"}

Exit code 0: the same data. 1: not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastload.cli.output import JsonOption, answering

_SIDE = "A saved state, a rank's sample log, or a directory of logs; with commas: one for each rank."


def prove(
    a: Annotated[str, typer.Argument(metavar="A", help=_SIDE)],
    b: Annotated[str, typer.Argument(metavar="B", help="The same, of the other run.")],
    as_json: JsonOption = False,
) -> None:
    """Compare what two runs were trained on, sample by sample.

    States are those of the loader's state_dict(), saved by torch.save or as JSON, also inside a bigger
    checkpoint. Logs are those of DataLoader(sample_log=DIR). The runs may have other numbers of ranks and
    workers, and other caches. Exit code 1: the data differs.
    """
    with answering(as_json) as output:
        from fastload.trace.prove import prove as compare  # torch takes 2 s to import

        proof = compare(_paths(a), _paths(b))
        output.console.print(proof.why, soft_wrap=True)
        settings = {"a": a, "b": b}
        output.document({"command": "prove", "settings": settings} | proof._asdict())
    if not proof:
        raise typer.Exit(1)


def _paths(side: str) -> str | list[str]:
    return side if Path(side).exists() else side.split(",")
