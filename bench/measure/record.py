"""The unfinished document of a comparison: each part is measured once, and then kept on disk."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from bench.data import ROOT, WORKPLACE
from bench.measure.parts import PARTS, QUICK_PARTS
from bench.measure.sections import Turns

UNFINISHED = WORKPLACE / "compare-unfinished.json"


@dataclass(frozen=True)
class Scale:
    """The amount of measurement."""

    images: int = 2000
    repeats: int = 3
    latencies: tuple[int, ...] = (0, 20, 50, 100)  # ms
    # At most, an epoch. Where it is cut, samples that were read and prepared ahead count as CPU time and not
    # as images: cut after 5 s, the epochs that fill a cache lost up to a sixth of their images.
    seconds: float = 10.0
    tried: bool = True  # whether peers are installed and numbers of workers tried
    objects: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
    object_bytes: tuple[int, ...] = (10 << 10, 100 << 10, 1 << 20, 10 << 20)
    parts: tuple[tuple[str, ...], ...] = PARTS  # the words of their commands
    quick: bool = False


QUICK = Scale(400, 2, (20,), 3.0, False, (1_000, 10_000), (10 << 10, 1 << 20), QUICK_PARTS, True)


class Record:
    """The measurements so far.

    Args:
        resumed: take over the parts of an interrupted run of the same commit and scale.
        step: called with the name of the current work; with (name, True) when a part is finished.
    """

    def __init__(self, scale: Scale, resumed: bool, step: Callable[..., None]) -> None:
        self.scale, self.step = scale, step
        self._about = json.loads(json.dumps({"commit": commit(), "scale": asdict(scale)}))
        self.parts: dict[str, Any] = {}
        if resumed and UNFINISHED.exists():
            kept = json.loads(UNFINISHED.read_text())
            if kept["about"] == self._about:
                self.parts = kept["parts"]
        self.contenders: list[dict[str, Any]] = self.parts.setdefault("contenders", [])
        self.unavailable: list[dict[str, str]] = self.parts.setdefault("unavailable", [])

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """The part of that name; measured now unless it is there."""
        if name not in self.parts:
            self.parts[name] = measure()
            self.step(f"done: {name}", True)
            UNFINISHED.write_text(json.dumps({"about": self._about, "parts": self.parts}))
        return self.parts[name]

    def finish(self) -> None:
        """To be called when the document is written: nothing is left to resume."""
        UNFINISHED.unlink(missing_ok=True)

    def miss(self, name: str, section: str, reason: str) -> None:
        """A contender does not take part in a section."""
        entry = {"name": name, "section": section, "reason": reason}
        if entry not in self.unavailable:
            self.unavailable.append(entry)

    def rows(self, section: str, case: str, turns: Turns) -> dict[str, Any]:
        """{"rows", "limits"} of one case, as in the document."""
        for name, reason in turns.failed.items():
            self.miss(name, section, reason)
        for entrant in turns.entrants:
            contender = entrant.contender
            self.enter(contender.name, contender.script, entrant.peer.versions, contender.differs)
        limit = turns.first_limit()
        bounds = [
            {"section": section, "case": case, "name": name, "rates": rates, "unit": "images/s"}
            for name, rates in turns.limits.items()
        ]
        return {"rows": [entrant.row(section, case, limit) for entrant in turns.entrants], "limits": bounds}

    def enter(self, name: str, script: str, versions: dict[str, str], differs: str = "") -> None:
        """A contender took part."""
        entry = {"name": name, "script": script, "versions": versions, "differs": differs}
        if entry not in self.contenders:
            self.contenders.append(entry)

    def bare_row(self, script: str, **measured: Any) -> dict[str, Any]:
        """A row for a measurement that is no whole epoch: only rates, in this process."""
        self.enter(measured["contender"], script, {})
        empty = ("first_batch_seconds", "start_seconds", "cpu_seconds_per_1000", "store_bytes_per_image")
        return dict.fromkeys((*empty, "store_requests_per_image", "pss_bytes", "workers")) | measured


def commit() -> str:
    """The commit of these sources, with a + if they differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")
