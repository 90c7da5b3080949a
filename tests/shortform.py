"""Tables of many cases: `make test` runs the short form of a table, and `make stress` the rest of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def stress(*cases: Any) -> list[Any]:
    """Cases of `parametrize` that only `make stress` runs: breadth, which rarely finds a fault."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.stress)
        for case in cases
    ]


def short_form(cases: Iterable[Any], is_short: Callable[..., bool]) -> list[Any]:
    """The cases of a table; those for which `is_short(*case)` does not hold are marked as `stress`."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found += [case] if is_short(*values) else stress(case)
    return found
