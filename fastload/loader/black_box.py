"""The questions that a loader answers about its samples, and what can be left out of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import IterableDataset

from fastload.checks import whole_number
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError
from fastload.loader.context import LoaderContext
from fastload.loader.resume import NEEDS_INDEX, Place, orders_at, sources_of
from fastload.loader.samples_at import SampleAt, batch_at, find_step, samples_at
from fastload.order.exclusions import Segment
from fastload.order.order import segments_of
from fastload.order.sampler import indexed_length, known_length
from fastload.order.samplers import Samplers, is_stateful


class BlackBox:
    """The part of `fastload.DataLoader` that is asked about its samples.

    The order of an epoch and the randomness of a sample are functions of (seed, epoch, index), so that past
    and coming batches can be named and made again.
    """

    loader_context: LoaderContext
    dataset: Any

    def samples_at(
        self, step: int, epoch: int | None = None, *, rank: int | None = None, world_size: int | None = None
    ) -> list[SampleAt]:
        """The rows of a step, past or to come: index, key, label, crop and flip of each.

        Example::

            from fastload import DataLoader, ImageFolder, RandomResizedCrop

            dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224, flip=0.5))
            loader = DataLoader(dataset, batch_size=8, num_workers=2, seed=1)
            for sample in loader.samples_at(2):
                print(sample.row, sample.key, sample.label, sample.crop, sample.flip)

        The samples are read and made in this process, one after the other; the iteration does not move. A
        sample that cannot be made has its error in `error`.

        Known are the epochs that this run has begun, over all resumes, and the coming epochs of
        `fastload.DistributedSampler`, torch's DistributedSampler, of orders without shuffling, and of torch's
        samplers where the loader has a `seed`. Of epochs
        that torch's generator or a sampler's own state has ordered, the last two are known. Coming epochs are
        those where `set_epoch` goes on counting by one, or is called no more than before. The crop and flip
        of an epoch to come are None unless the loader has a `seed`; so are those of samples that draw from
        the process-wide generators.

        Args:
            step: a batch of the epoch, from 0.
            epoch: an iteration of the loader, from 0. None: the one that runs, or the next one.
            rank, world_size: those of another rank. With world_size, the epoch as that many ranks would read
                it from its beginning. Default: this rank.

        Raises:
            ArgumentError: there is no such step or rank; or what was asked for cannot be known, as of an
                iterable dataset, or of shards that were read as streams, or will be.
        """
        return samples_at(self, find_step(self, step, epoch, rank, world_size))

    def batch_at(
        self, step: int, epoch: int | None = None, *, rank: int | None = None, world_size: int | None = None
    ) -> Any:
        """The batch of a step, past or to come, bit for bit as it is handed out. The iteration does not move.

        Example::

            from fastload import DataLoader, ImageFolder, RandomResizedCrop

            dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224, flip=0.5))
            loader = DataLoader(dataset, batch_size=8, num_workers=2, seed=1)
            images, labels = loader.batch_at(2)

        It is made in this process, with the loader's `collate_fn`, `batch_transform` and device. The
        arguments are those of `samples_at`.

        Raises:
            ArgumentError: as `samples_at`; or the samples draw random numbers, and the loader has no `seed`.
        """
        return batch_at(self, find_step(self, step, epoch, rank, world_size))

    def digest(self) -> bytes:
        """32 bytes over all samples that this rank was handed out since its run began, over resumes.

        Example::

            print(loader.digest().hex())

        Each sample counts with its identity (key and version of its object; the shard, its version and the
        record's number; or else its index), its random numbers, its epoch and its step. The order within a
        step does not count. So the digest does not depend on workers, caches and processes, and as four
        64-bit numbers, little-endian, the digests of all ranks add up (modulo 2**64) to that of one rank
        with the same global batch. `fastload.prove` compares states and logs, and finds the difference.

        A run that goes on with other ranks: what the state of a rank counts is counted by the rank of the
        same number. With fewer ranks, the parts of those that are gone are missing from the sum.

        Raises:
            ArgumentError: the dataset is iterable, so that its samples have no index.
        """
        if isinstance(self.dataset, IterableDataset):
            raise ArgumentError(
                f"digest() needs samples that have an index, and {type(self.dataset).__name__} is iterable"
            )
        return self.loader_context.digest.value()

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
        place = self._place_to_change("skip")
        running = place.epoch
        chosen = running if epoch is None else whole_number("epoch", epoch, 0)
        if chosen < running:
            raise ArgumentError(f"epoch {chosen} is over: epoch {running} is the first that can be changed")
        numbers = sorted({whole_number("steps: a step", step, 0) for step in _as_list(steps)})
        if not numbers:
            return
        if chosen == running:
            late = [step for step in numbers if step < place.batches or step in place.ahead]
            if late:
                raise ArgumentError(
                    f"step {late[0]} of epoch {running} was handed out already: the next one is step "
                    f"{place.batches}; for another epoch pass epoch="
                )
        else:
            place = Place(chosen)
        exclusions = self.loader_context.exclusions
        samplers = Samplers.of(loader)
        segments = segments_of(orders_at(loader, place)) or [Segment(0, 0, samplers.per_step())]
        length = known_length(loader) if len(segments) == 1 and segments[0].step == 0 else None
        if length is not None and numbers[-1] >= length:
            raise ArgumentError(f"epoch {chosen} has the steps 0 to {length - 1}, found step {numbers[-1]}")
        exclusions.skip(chosen, segments[-1], numbers)

    def exclude(self, samples: str | int | SampleAt | Iterable[str | int | SampleAt]) -> None:
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
            samples: keys, as `dataset.key(index)` gives them, indices of the loader's dataset, and rows of
                `samples_at`, mixed. A key excludes all samples that have it.

        Raises:
            ArgumentError: there is no sample with a key or an index, or none would be left; or the samples
                have no index, as those of an iterable dataset, and of shards that are read as streams.
        """
        place = self._place_to_change("exclude")
        named = [one.index if isinstance(one, SampleAt) else one for one in _as_list(samples)]
        indices = _indices_of(self.dataset, named)
        self.loader_context.exclusions.exclude(
            sources_of(self.dataset), indices, place.epoch, place.batches, sorted(place.ahead)
        )

    def _place_to_change(self, what: str) -> Place:
        """Return the place from which on samples are left out.

        Raises:
            ArgumentError: samples have no index, or a dataset's state would be changed.
        """
        loader: Any = self
        dataset, position = loader.dataset, self.loader_context.position
        if isinstance(dataset, IterableDataset):
            raise ArgumentError(
                f"{what} needs samples that have an index, and {type(dataset).__name__} is iterable: leave "
                "the samples out in its __iter__, or make it map-style"
            )
        if position.reads_streams(loader):
            raise ArgumentError(f"{what} {NEEDS_INDEX}")
        place = position.place(loader)
        if place.sampler is not None and loader.num_workers and is_stateful(dataset):
            raise ArgumentError(
                f"{what} cannot be called within an epoch where workers make batches ahead and the dataset "
                "has a state, which those have changed: call it between two epochs, or use num_workers=0"
            )
        return place


def _as_list(given: Any) -> list[Any]:
    """One number, text or row of `samples_at`, or several."""
    if isinstance(given, str | bytes | SampleAt) or (
        hasattr(given, "__index__") and not getattr(given, "ndim", 0)
    ):
        return [given]
    try:
        return list(given)
    except TypeError:
        return [given]


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
            index = whole_number("samples: an index", sample, 0)
            if index >= length:
                raise ArgumentError(f"samples has the index {index}, and the dataset has {length:,} samples")
            indices.append(index)
    if not keys:
        return indices
    rows = view_of(dataset)
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
