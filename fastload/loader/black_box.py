"""The questions that a loader answers about its samples, and what can be left out of them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch.utils.data import IterableDataset

from fastload.datasets.wrappers import see
from fastload.distributed.sampler import indexed_length
from fastload.errors import ArgumentError
from fastload.loader.context import LoaderContext
from fastload.loader.revision import enter
from fastload.workers.dataset_state import is_stateful

__all__ = ["BlackBox"]


class BlackBox:
    """The part of `fastload.DataLoader` that is asked about its samples.

    The order of an epoch and the randomness of a sample are functions of (seed, epoch, index), so that past
    and coming batches can be named and made again.
    """

    loader_context: LoaderContext

    def skip(self, steps: int | Iterable[int], epoch: int | None = None) -> None:
        """Hand out the batches of these steps no more; all other batches keep their step and their samples.

        Example::

            from fastload import DataLoader, ImageFolder, RandomResizedCrop

            dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224))
            loader = DataLoader(dataset, batch_size=8, shuffle=True, seed=1)
            loader.skip(range(1, 3))  # of the epoch that comes: its batches 0, 3, 4 and so on are handed out

        Call it with the same steps on all ranks. What is skipped is part of the state, as a range of the
        epoch's samples. So the same samples stay away where a run goes on with another number of ranks or
        another batch size. A batch of which only a part was skipped is then handed out, with other samples in
        the place of those, as in `exclude`.

        Args:
            steps: numbers of batches of an epoch, from 0: one, a range, or any of them.
            epoch: counts the iterations of the loader, from 0. None: the one that runs, was left early or is
                to be resumed; else the next one.

        Raises:
            ArgumentError: a step was handed out already, or the epoch has no such step; or the samples have
                no index, as those of an iterable dataset, and of shards that are read as streams.
        """
        loader: Any = self
        self._check_left_out("skip")
        context = self.loader_context
        running, place = context.position.place(loader)
        chosen = running if epoch is None else _whole("epoch", epoch)
        if chosen < running:
            raise ArgumentError(f"epoch {chosen} is over: epoch {running} is the first that can be changed")
        numbers = sorted({_whole("steps", step) for step in (_as_list(steps))})
        if not numbers:
            return
        if chosen == running:
            late = [step for step in numbers if step < place["batches"] or step in place["ahead"]]
            if late:
                raise ArgumentError(
                    f"step {late[0]} of epoch {running} was handed out already: the next one is step "
                    f"{place['batches']}; for another epoch pass epoch="
                )
        else:
            place = {"batches": 0, "ahead": [], "sampler": None}
        enter(loader, context.left_out, chosen, place)
        length = context.left_out.steps(chosen, _length(loader))
        if length is not None and numbers[-1] >= length:
            raise ArgumentError(f"epoch {chosen} has the steps 0 to {length - 1}, found step {numbers[-1]}")
        context.left_out.skip(chosen, numbers)

    def exclude(self, samples: str | int | Iterable[str | int]) -> None:
        """Use these samples no more, from the next batch on that is handed out, in all epochs.

        Example::

            from fastload import DataLoader, ImageFolder, RandomResizedCrop

            dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224))
            loader = DataLoader(dataset, batch_size=8, shuffle=True, seed=1)
            loader.exclude(["cat/0002.jpg", 5])

        In the place of an excluded sample stands another one, which `on_error="replace"` would take too: the
        same one in every run with this seed, with augmentation of its own. All other samples keep their
        batch, row and augmentation. The other one may be any sample of the dataset (of a `Mixture`, any of
        the same source), so to hold samples back from training give the loader a `Subset`.

        Batches that were made ahead and have such a sample are discarded, and made again when they are due.
        Call it with the same samples on all ranks, at the same step. What is excluded is part of the state;
        `load_state_dict` replaces it by what the state has.

        Args:
            samples: keys, as `dataset.key(index)` gives them, and indices of the loader's dataset, mixed. A
                key excludes all samples that have it.

        Raises:
            ArgumentError: there is no sample with a key or an index, or none would be left; or the samples
                have no index, as those of an iterable dataset, and of shards that are read as streams.
        """
        loader: Any = self
        self._check_left_out("exclude")
        context = self.loader_context
        epoch, place = context.position.place(loader)
        indices = _indices_of(loader.dataset, _as_list(samples))
        context.left_out.exclude(loader.dataset, indices, epoch, place["batches"], sorted(place["ahead"]))

    def _check_left_out(self, what: str) -> None:
        """Raise ArgumentError where samples have no index, or a dataset's state would be changed."""
        loader: Any = self
        dataset = loader.dataset
        if isinstance(dataset, IterableDataset):
            raise ArgumentError(
                f"{what} needs samples that have an index, and {type(dataset).__name__} is iterable: leave "
                "the samples out in its __iter__, or make it map-style"
            )
        if self.loader_context.position.reads_streams(loader):
            raise ArgumentError(
                f"{what} needs samples that have an index, and these shards are read as streams: index them "
                "first with `fastload index URL`, or read them once through a cache"
            )
        running = self.loader_context.position.place(loader)[1]["sampler"] is not None
        if running and loader.num_workers and is_stateful(dataset):
            raise ArgumentError(
                f"{what} cannot be called within an epoch where workers make batches ahead and the dataset "
                "has a state, which those have changed: call it between two epochs, or use num_workers=0"
            )


def _as_list(given: Any) -> list[Any]:
    """One number or text, or several."""
    if isinstance(given, str | bytes) or (hasattr(given, "__index__") and not getattr(given, "ndim", 0)):
        return [given]
    try:
        return list(given)
    except TypeError:
        return [given]


def _whole(name: str, value: Any) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ArgumentError(f"{name} must be a whole number >= 0, or several, found {value!r}")
    return number


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _indices_of(dataset: Any, samples: list[Any]) -> list[int]:
    """The indices of samples by key or index.

    Raises:
        ArgumentError: there is none for one of them.
    """
    keys = {sample for sample in samples if isinstance(sample, str)}
    length = indexed_length(dataset)
    indices = []
    for sample in samples:
        if not isinstance(sample, str):
            index = _whole("samples: an index", sample)
            if index >= length:
                raise ArgumentError(f"samples has the index {index}, and the dataset has {length:,} samples")
            indices.append(index)
    if not keys:
        return indices
    rows = see(dataset)
    found = rows.find(keys)
    if found is None:
        found = {}
        for index in range(length):
            key = rows.key(index)
            if key is not None and key in keys:
                found.setdefault(key, []).append(index)
    missing = sorted(keys - found.keys())
    if missing:
        has_keys = length > 0 and rows.key(0) is not None
        why = "check it against dataset.key(index)" if has_keys else "its samples have no keys: pass indices"
        raise ArgumentError(f"samples has the key {missing[0]!r}, which no sample of the dataset has: {why}")
    return indices + [index for ats in found.values() for index in ats]
