"""Ranges of the stages for `torch.profiler`, named "fastload.<stage>". Free while no profiler runs.

In the trainer's process: wait, unpack, sampler. In a worker, where a profiler was started there (from
`worker_init_fn`, say): whatever its counters time, as decode, cache and collate.
"""

from __future__ import annotations

import contextlib

import torch

from fastload.metrics import counters as stats
from fastload.metrics.torch_private import profiler_enabled

__all__ = ["stage"]

_NOTHING = contextlib.nullcontext()


def stage(name: str) -> contextlib.AbstractContextManager[object]:
    """A range for the block, where a profiler runs in this thread.

    Asked first, since `record_function` calls the dispatcher also when nobody listens.
    """
    return torch.profiler.record_function(f"fastload.{name}") if profiler_enabled() else _NOTHING


stats.profiler_range = stage
