"""The differences that the oracle knows by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.oracle.judge import Difference
from tests.oracle.worlds import Job

Rule = Callable[[Job, Difference], Any]

# Differences from torch that are meant: name -> (a sentence of docs/explanation/differences.md, the rule)
MEANT: dict[str, tuple[str, Rule]] = {
    "samples with other members": (
        "Without `fields=`, all samples of a batch must have the same members under a fused transform.",
        lambda job, found: (
            "extra" in job["quirks"]
            # Of a batch that has a bad sample too, the one that is found first is raised.
            and ("others in the batch" in found.text or found.text.endswith("ArgumentError, not DecodeError"))
        ),
    ),
}
# Faults that are not mended yet.
KNOWN: dict[str, Rule] = {}


def name_of(job: Job, difference: Difference) -> str:
    """The name of a difference that is known; "" for another one."""
    rules = {name: rule for name, (_, rule) in MEANT.items()} | KNOWN
    return next((name for name, rule in rules.items() if rule(job, difference)), "")
