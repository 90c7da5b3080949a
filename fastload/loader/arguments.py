"""The arguments that torch does not check, and warnings of a loader that would be slow, empty or replaced."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch.utils.data
from torch.utils.data import IterableDataset

from fastload.checks import check_one_of, refuse_class, whole_seed
from fastload.datasets.views import check_dataset
from fastload.datasets.wrappers import inner_datasets, view_of
from fastload.errors import ArgumentError, address, user_level
from fastload.order.sampler import known_length


def check_arguments(
    dataset: Any,
    batch_size: Any,
    num_workers: Any,
    batch_transform: Any,
    on_error: Any,
    seed: Any,
    processes: Any,
) -> None:
    """Raise `ArgumentError` for fastload's own arguments."""
    check_dataset(dataset)
    check_one_of("on_error", on_error, ("raise", "repeat", "replace"))
    if on_error != "raise" and isinstance(dataset, IterableDataset) and view_of(dataset).streams() is None:
        raise ArgumentError(
            f"on_error={on_error!r}: an iterable dataset ends at its first error; use 'raise'"
        )
    if on_error == "replace" and known_length(dataset) is None and view_of(dataset).streams() is None:
        raise ArgumentError(
            f"on_error='replace' takes other samples of the dataset, and {type(dataset).__name__} has no "
            "length: give it a __len__, or use 'repeat'"
        )
    if isinstance(batch_size, str):
        raise ArgumentError(f"batch_size must be an int >= 1 or None, found the text {batch_size!r}")
    if isinstance(num_workers, str) and num_workers != "auto":
        raise ArgumentError(f"num_workers must be an int >= 0 or 'auto', found {num_workers!r}")
    refuse_class("batch_transform", batch_transform)
    if not (batch_transform is None or callable(batch_transform)):
        raise ArgumentError(f"batch_transform must be a function of a batch, found {batch_transform!r}")
    if seed is not None:
        whole_seed(seed)
    if not isinstance(processes, bool):
        raise ArgumentError(f"processes must be True or False, found {processes!r}")


def check_log(dataset: Any, sample_log: Any) -> None:
    if sample_log is None:
        return
    if not isinstance(sample_log, str | os.PathLike):
        raise ArgumentError(f"sample_log must be the path of a directory or None, found {sample_log!r}")
    if "://" in os.fsdecode(sample_log):
        raise ArgumentError(f"sample_log must be a directory of this machine, found {sample_log!r}")
    if isinstance(dataset, IterableDataset):
        raise ArgumentError(
            f"sample_log names samples by their index, and {type(dataset).__name__} is iterable: leave it out"
        )


def check_threads(dataset: Any, threads: Any) -> None:
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 0:
        raise ArgumentError(f"threads must be an int >= 0, found {threads!r}")
    if threads and isinstance(dataset, IterableDataset):
        raise ArgumentError(
            f"threads={threads} needs samples that have an index, and {type(dataset).__name__} is iterable: "
            "leave out threads, or make the dataset map-style"
        )


def warn_of_unprefetched(dataset: Any) -> None:
    """Warn of a dataset that wraps one of fastload's: only the wrapper knows the next samples."""
    lone = next((inner for inner in inner_datasets(dataset) if inner.asks is not None), None)
    if lone is not None:
        kind, holder = type(lone.dataset).__name__, type(lone.asks).__name__
        warnings.warn(
            f"{holder} asks the {kind} in its attribute {lone.where!r} for one sample at a "
            "time, so nothing is read ahead: from an object store this is several times slower. Give "
            f"{holder} a method prefetch(self, indices) that calls the prefetch of the "
            f"{kind}, or let threads=16 of the loader make several samples at a time. Nothing is needed with "
            f"fastload.map, Subset, ConcatDataset, StackDataset and a subclass of {kind}. "
            f"See {address('nothing-is-read-ahead')}",
            stacklevel=user_level(),
        )


def warn_of_an_empty_epoch(loader: torch.utils.data.DataLoader[Any]) -> None:
    """Warn if drop_last drops every batch. Torch does not, and training without a step looks fast."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return
    try:
        samples = len(loader.sampler)  # type: ignore[arg-type]
    except Exception:  # it has no length, or one that torch would not ask for here
        return
    if samples < loader.batch_size:
        warnings.warn(
            f"every epoch is empty: drop_last=True drops its only batch, as {samples:,} samples are fewer "
            f"than batch_size={loader.batch_size}",
            stacklevel=user_level(),
        )
