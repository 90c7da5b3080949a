"""The pinned values: one line a case in pins.json, and in words how others differ from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("pins.json")
ADVICE = (
    "If this change is meant, say it in CHANGELOG.md and write the pins again: python -m tests.pins --write"
)


def read_pins() -> dict[str, Any]:
    """Return what is pinned: case -> part -> value."""
    return dict(json.loads(_FILE.read_text()))


def write_pins(found: dict[str, Any]) -> None:
    """Write the pins, one line a case."""
    lines = [f"{json.dumps(name)}: {json.dumps(parts)}" for name, parts in found.items()]
    _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def differences(name: str, pinned: Any, found: Any) -> Iterator[str]:
    """Say of each part of a case how it differs from what is pinned."""
    if isinstance(pinned, dict) and isinstance(found, dict):
        for part in {**pinned, **found}:
            yield from differences(f"{name}: {part}", pinned.get(part), found.get(part))
    elif pinned != found:
        yield f"{name}: pinned is {pinned!r}, found {found!r}"
