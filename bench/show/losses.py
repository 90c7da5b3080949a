"""Where fastload loses: every case in which the median of another contender is better than ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.show.figures import MAIN, cases, find, is_ours, median, number, ours_of, rows_of, short_size

Document = dict[str, Any]

PLACES = {
    "cold": "first epoch",
    "later": "later epochs",
    "load": "beside other load",
    "photographs": "smaller photos",
    "decode": "decode only",
    "handover": "hand-over",
}
# What no other loader does, if none is better in that kind of figure.
NEVER = {
    "Rate": "has a higher rate",
    "First batch": "has its first batch sooner",
    "CPU": "uses less CPU time",
    "Requests": "makes fewer requests",
    "Memory": "takes less memory",
}
# Of a row: (what is compared, its key, what it is divided by, its unit). More is better for rates only.
COSTS = (
    ("First batch", "first_batch_seconds", 1, "s"),
    ("CPU", "cpu_seconds_per_1000", 1, "s per 1,000 images"),
    ("Requests", "store_requests_per_image", 1, "GETs per image"),
    ("Memory", "pss_bytes", 1e6, "MB"),
)


@dataclass(frozen=True)
class Loss:
    """A contender was better than fastload.

    Attributes:
        what: "Rate", "First batch", "CPU", "Requests", "Memory", "Start".
        place: the section, in words; `case` the case of it.
        theirs, ours: medians.
        turns: in how many turns it was ahead, and of how many; None where there was one figure only.
        kin: (name, median) of the best other form of fastload, where it is ahead of `theirs`.
    """

    what: str
    place: str
    case: str
    contender: str
    theirs: float
    ours: float
    unit: str
    turns: tuple[int, int] | None = None
    kin: tuple[str, float] | None = None

    @property
    def ratio(self) -> float:
        return max(self.theirs, self.ours) / max(1e-9, min(self.theirs, self.ours))


def losses(document: Document) -> list[Loss]:
    """All of them, in the order of the document's sections."""
    found = []
    for section, place in PLACES.items():
        for case in cases(document, section):
            rows = rows_of(document, section, case)
            found += _among(
                rows, "Rate", "rates", 1, "samples/s" if section == "handover" else "images/s", place, case
            )
            for what, key, divisor, unit in COSTS:
                found += _among(rows, what, key, divisor, unit, place, case)
    return found + list(_growing(document))


def _growing(document: Document) -> Iterator[Loss]:
    """The same for more workers, more objects and larger objects."""
    growth = document["growth"]
    for case, count in sorted({(entry["case"], entry["workers"]) for entry in growth["workers"]}):
        rows = [entry for entry in growth["workers"] if (entry["case"], entry["workers"]) == (case, count)]
        words = f"{count} worker{'s' * (count > 1)}"
        yield from _among(rows, "Rate", "rates", 1, "images/s", f"growth, {case}", words)
    for count in sorted({entry["objects"] for entry in growth["objects"]}):
        rows = [entry for entry in growth["objects"] if entry["objects"] == count]
        at = ("growth", f"{count:,} objects")
        yield from _among(rows, "Start", "start_seconds", 1, "s", *at)
        yield from _among(rows, "Second start", "again_seconds", 1, "s", *at)
        yield from _among(rows, "Memory", "pss_bytes", 1e6, "MB", *at)
    for size in sorted({entry["object_bytes"] for entry in growth["sizes"]}):
        rows = [entry for entry in growth["sizes"] if entry["object_bytes"] == size]
        at = ("growth", f"objects of {short_size(size)}")
        yield from _among(rows, "Rate", "bytes_per_second", 1e6, "MB/s", *at)


def _among(
    rows: list[Document], what: str, key: str, divisor: float, unit: str, place: str, case: str
) -> Iterator[Loss]:
    """Who is better than ours by the figures under `key`, or only than ours that fills the default cache."""
    ours = ours_of(rows)
    if ours is None or ours[key] is None:
        return
    yield from _better_than(ours, rows, what, key, divisor, unit, place, case)
    cached = find(rows, "fastload, default cache")
    if cached is not None and cached[key] is not None:
        found = _better_than(cached, rows, what, key, divisor, unit, place, f"{case}, default cache")
        sign, mine = 1 if what == "Rate" else -1, median(ours[key]) / divisor
        yield from (loss for loss in found if sign * loss.theirs <= sign * mine)


def _better_than(
    ours: Document,
    rows: list[Document],
    what: str,
    key: str,
    divisor: float,
    unit: str,
    place: str,
    case: str,
) -> Iterator[Loss]:
    sign = 1 if what == "Rate" else -1
    others = [row for row in rows if is_ours(row["contender"]) and row is not ours and row[key] is not None]
    best = max(others, key=lambda row: sign * median(row[key]), default=None)
    for row in rows:
        name = row["contender"]
        if is_ours(name) or name.startswith("bare ") or row[key] is None:  # a bare loop is a limit
            continue
        theirs, mine = median(row[key]), median(ours[key])
        if sign * theirs <= sign * mine:
            continue
        ahead = best is not None and sign * median(best[key]) > sign * theirs
        kin = (best["contender"], median(best[key]) / divisor) if ahead else None
        turns = _turns(row[key], ours[key], sign)
        yield Loss(what, place, case, row["contender"], theirs / divisor, mine / divisor, unit, turns, kin)


def _turns(theirs: Any, ours: Any, sign: int) -> tuple[int, int] | None:
    if not isinstance(theirs, list) or not isinstance(ours, list) or len(theirs) != len(ours):
        return None
    return sum(sign * a > sign * b for a, b in zip(theirs, ours, strict=True)), len(ours)


def paragraph(document: Document) -> str:
    """One item for each kind of figure in which others are ahead."""
    found = losses(document)
    kinds = ["Rate", "First batch", "CPU", "Requests", "Memory", "Start", "Second start"]
    lost = [kind for kind in kinds if any(loss.what == kind for loss in found)]
    if not lost:
        return "No other loader is better in any of these figures."
    lines = ["Medians of the other loaders against those of *fastload*:", ""]
    if never := [words for kind, words in NEVER.items() if kind not in lost]:
        lines.append(f"* No other loader {_either(never)}.")
    for kind in lost:
        its = [loss for loss in found if loss.what == kind]
        for place, unit in dict.fromkeys((loss.place, loss.unit) for loss in its):
            here = [loss for loss in its if (loss.place, loss.unit) == (place, unit)]
            lines.append(f"* {kind}, {place} ({unit}): {_contenders(here)}.")
    return "\n".join(lines)


def _either(words: list[str]) -> str:
    """a, b or c."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _contenders(found: list[Loss]) -> str:
    """For each contender the case of 20 ms, or else the worst, in figures, and the names of the others."""
    words = []
    for name in dict.fromkeys(loss.contender for loss in found):
        its = [loss for loss in found if loss.contender == name]
        shown = next((loss for loss in its if loss.case == MAIN), max(its, key=lambda loss: loss.ratio))
        others = [loss.case for loss in its if loss is not shown]
        words.append(
            f"{name} {number(shown.theirs)} against {number(shown.ours)} ({_details(shown, others)})"
        )
    return "; ".join(words)


def _details(loss: Loss, others: list[str]) -> str:
    """The case; that it was not so in every turn; other cases; that another form of ours is ahead."""
    text = loss.case
    if loss.turns is not None and loss.turns[0] < loss.turns[1]:
        text += f", ahead in {loss.turns[0]} of {loss.turns[1]} rounds"
    if others:
        text += f"; also {', '.join(others)}"
    if loss.kin is not None:
        text += f"; *{loss.kin[0]}* {number(loss.kin[1])}"
    return text
