"""The differences that the oracle knows by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.oracle.jobs import MADE_ANEW, streamed
from tests.oracle.judge import Difference
from tests.oracle.worlds import Job

Rule = Callable[[Job, Difference], Any]

# Differences from torch that are meant: name -> (a sentence of docs/explanation/differences.md, the rule)
MEANT: dict[str, tuple[str, Rule]] = {
    "samples with other members": (
        "Without `fields=`, all samples of a batch must have the same members under a fused transform.",
        lambda job, found: "extra" in job["quirks"] and "others in the batch" in found.text,
    ),
}
# Faults that are not mended yet.
KNOWN: dict[str, Rule] = {
    "a state forgets the order that comes": lambda job, found: (
        _resumed(found) and job["sampler"] == "shuffle" and _between(job) and not streamed(job)
    ),
    "samples_at after a state of other nodes": lambda job, found: (
        found.what.endswith("resumed") and job["sampler"] == "node" and job["restart"] == "other"
    ),
    "seed= does not seed the order": lambda job, found: found.what == "seed",
    "another order goes on in silence": lambda job, found: (
        _resumed(found) and job["restart"] == "other" and job["sampler"] in MADE_ANEW
    ),
    "samples_at of an epoch that will be streamed": lambda job, found: (
        found.what.startswith("samples_at before") and streamed(job)
    ),
    "samples_at after a mixture's weights changed": lambda job, found: (
        found.what.startswith("samples_at") and job["kind"] == "mixture" and job["restart"] == "other"
    ),
    "streams without a shuffle are out of order": lambda job, found: (
        streamed(job) and job["sampler"] == "sequential" and job["kind"] != "parquet"
    ),
    "a kept listing is used for ever": lambda job, found: found.what == "change" and job["cache"] != "none",
    "skip and exclude take samples that are read by index for streams": lambda job, found: (
        found.what == "crash" and "read as streams" in found.text
    ),
}


def _resumed(found: Difference) -> bool:
    return found.what in ("resume", "digest") or found.what.endswith("resumed")


def _between(job: Job) -> bool:
    """Whether the state is saved between epochs."""
    step = job["cut"][1]
    return step <= 0 or step > 2


def name_of(job: Job, difference: Difference) -> str:
    """The name of a difference that is known; "" for another one."""
    rules = {name: rule for name, (_, rule) in MEANT.items()} | KNOWN
    return next((name for name, rule in rules.items() if rule(job, difference)), "")
