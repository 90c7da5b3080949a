"""Ranges of the stages for `torch.profiler`, named "fastload.<stage>". Free while no profiler runs.

In the trainer's process: wait, unpack, sampler. In a worker with a profiler of its own (started from
`worker_init_fn`, say): the stages that its counters time, such as decode, cache and collate.
"""

from __future__ import annotations

import contextlib

import torch

from fastload.metrics import counters
from fastload.metrics.torch_private import profiler_enabled

__all__ = ["stage"]

_NOTHING = contextlib.nullcontext()


def stage(name: str) -> contextlib.AbstractContextManager[object]:
    """A range for the block, where a profiler runs in this thread.

    The profiler is asked first, because `record_function` calls the dispatcher even without one.
    """
    return torch.profiler.record_function(f"fastload.{name}") if profiler_enabled() else _NOTHING


counters.profiler_range = stage
