"""Growth over the hours, by the log of the resident trainer; and its chart."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.show.charts import Colours, Specification, write_both

# How much more the last third may hold than the second one: the first third fills allocators and caches.
ALLOWED = {"memory": 15.0, "descriptors": 2, "threads": 1, "processes": 1, "shared": 2, "files": 4}
FEW = 20  # epochs; a median of fewer says little
WARM_UP = 0.15  # hours; a soak that lasted less than four times this long tells nothing

Lines = list[dict[str, Any]]


def growth(lines: Lines) -> dict[str, float]:
    """Name -> median of the last third less that of the second one; empty where the soak was too short.

    Memory: the larger difference of the epochs with the client's process, and of those without.
    """
    hours = lines[-1]["hours"] if lines else 0.0
    if hours < 4 * WARM_UP:
        return {}
    thirds: list[Lines] = [[], [], []]
    for line in lines:
        thirds[min(int(3 * line["hours"] / hours), 2)].append(line)
    _, second, last = thirds
    found = {name: median(last, name) - median(second, name) for name in ALLOWED}
    of_memory: list[float] = []
    for alive in {line["alive"] for line in lines}:
        before, after = ([line for line in third if line["alive"] == alive] for third in (second, last))
        if min(len(before), len(after)) >= FEW:
            of_memory.append(median(after, "memory") - median(before, "memory"))
    return found | {"memory": max(of_memory, default=0.0)}


def grown(lines: Lines) -> list[str]:
    """Return each growth above its limit, in words."""
    return [
        f"{name} grew by {value:.1f} (allowed: {ALLOWED[name]})"
        for name, value in growth(lines).items()
        if value > ALLOWED[name]
    ]


def median(lines: Lines, name: str) -> float:
    return statistics.median(line[name] for line in lines)


def draw(lines: Lines, path: Path) -> list[Path]:
    """Write the chart of memory and rate over time, for light and for dark pages."""

    def panel(name: str, title: str, colours: Colours) -> Specification:
        points = [{"hours": line["hours"], "value": line[name]} for line in lines]
        axis = {"type": "quantitative"}
        return {
            "width": 620,
            "height": 150,
            "data": {"values": points},
            "mark": {"type": "point", "filled": True, "size": 12, "color": colours.ours},
            "encoding": {
                "x": {"field": "hours", "title": "hours", **axis},
                "y": {"field": "value", "title": title, **axis, "scale": {"zero": True}},
            },
        }

    def specification(colours: Colours) -> Specification:
        panels = {"memory": "memory, MB", "descriptors": "open files", "rate": "images/s"}
        return {"vconcat": [panel(name, title, colours) for name, title in panels.items()]}

    return write_both(specification, path)
