"""The private names of torch that fastload uses. Every one is imported here, and nowhere else.

The module stands in the lowest room, since rooms from `metrics` to `loader` need one name or another.

| name | why it is needed | what breaks if torch moves it |
|---|---|---|
| `TorchIterator` | `LoaderIterator` derives from it, see there | every loader |
| `IterableFetcher` | makes batches of iterable datasets by torch's own rules | iterable datasets |
| `is_fetched_by_torch` | tells torch's loader over a dataset of fastload's | one warning |
| `shard_data_pipe` | splits torch's data pipes by rank and worker | data pipes with workers |
| `pin_memory` | pins batches of any structure, as torch does | `pin_memory=True` |
| `numpy_seed`, `set_worker_info` | workers draw what torch's workers draw | workers |
| `handle_dead_workers_signals` | SIGBUS in a worker names shared memory | one error text |
| `collate_tensors`, `collate_map` | tensors are stacked into a batch slot | one more copy of each batch |
| `is_collate_function` | an entry of the user's in that map is obeyed | rows are made one by one |
| `is_exiting` | at exit nothing may be ended that is half gone | tracebacks at exit |
| `profiler_enabled` | a range costs nothing while no profiler runs | microseconds per batch |
| `default_store` | ranks agree through torch.distributed's store | several ranks that read streams |
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
import torch.utils.data
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.utils.data import _utils
from torch.utils.data._utils import collate, signal_handling, worker
from torch.utils.data._utils import pin_memory as _pin_memory
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter, _sharding_worker_init_fn

from fastload.metrics import counters

IterableFetcher = _IterableDatasetFetcher
TorchIterator = _BaseDataLoaderIter
collate_map: dict[Any, Any] = collate.default_collate_fn_map
collate_tensors: Any = collate.collate_tensor_fn
handle_dead_workers_signals: Any = signal_handling._set_worker_signal_handlers  # type: ignore[attr-defined]
numpy_seed: Any = worker._generate_state
shard_data_pipe: Any = _sharding_worker_init_fn


def is_collate_function(function: Any) -> bool:
    """Return whether it is one of those that torch has put into `collate_map`."""
    return function is not None and vars(collate).get(getattr(function, "__name__", "")) is function


def pin_memory(batch: Any, device: str | None) -> Any:
    """Return the batch with its tensors in pinned memory."""
    return _pin_memory.pin_memory(batch, device)  # type: ignore[no-untyped-call]


def set_worker_info(worker_id: int, workers: int, seed: int, dataset: Any) -> None:
    """Set what `torch.utils.data.get_worker_info()` returns in this process from now on."""
    worker._worker_info = worker.WorkerInfo(id=worker_id, num_workers=workers, seed=seed, dataset=dataset)


def is_fetched_by_torch() -> bool:
    """Return whether a loader of torch's asks for the sample that this thread makes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _MapDatasetFetcher.fetch.__code__:
        frame = frame.f_back
    return frame is not None


def is_exiting() -> bool:
    """Return whether the interpreter ends: modules and threads may be gone."""
    return _utils is None or bool(_utils.python_exit_status)


def default_store() -> Any:
    """Return the key-value store of torch.distributed."""
    return torch.distributed.distributed_c10d._get_default_store()


counters.profiler_enabled = _profiler_enabled  # without torch, counters make no ranges
