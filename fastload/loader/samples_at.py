"""The samples of a step, and how each is cut: the samples are made once more, and say it themselves."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from fastload.checks import whole_number
from fastload.datasets.views import current_reader
from fastload.datasets.wrappers import fastload_datasets, start_epoch, view_of
from fastload.errors import ArgumentError
from fastload.images.crop import CropBox, noted_boxes
from fastload.images.rng import SampleSeeds
from fastload.loader.context import LoaderContext
from fastload.loader.resume import NEEDS_INDEX, Place, is_persistent, orders_at, reading_of, sources_of
from fastload.order.exclusions import Exclusions, Filter, Samples, Segment
from fastload.order.order import EpochOrder, order_at, segments_of
from fastload.order.position import ORDERS_KEPT
from fastload.order.sampler import indexed_length, known_length
from fastload.order.samplers import Samplers, is_stateful
from fastload.workers.sample_threads import GeneratorStates


class SampleAt(NamedTuple):
    """One row of a batch.

    Attributes:
        row: of the batch.
        index: of the sample in the loader's dataset.
        key: of its object; None where the dataset has no keys.
        label: the whole number beside the image in a sample (image, label), or a dict's "label", "target" or
            "cls"; None where there is none.
        crop: (left, top, right, bottom) of what is resized to the result, in pixels of the image as the cache
            keeps it (all modes but "shrunk" and "decoded": of the original). None where no fused transform
            cuts the sample, or the randomness of its epoch is not known yet.
        flip: whether the result is flipped from left to right. None as for crop.
        replaces: the excluded sample in whose place this one stands, else None.
        error: why the sample cannot be made, else "".
    """

    row: int
    index: Any
    key: str | None
    label: int | None
    crop: tuple[float, float, float, float] | None
    flip: bool | None
    replaces: Any = None
    error: str = ""


class Step(NamedTuple):
    """A step of an epoch on one rank.

    Attributes:
        number: of the step.
        index: its index batch, after exclusion; None: the step is skipped.
        replaces: row -> the excluded sample in whose place another one stands.
        seed: of the samples' randomness; None: it is drawn when the epoch begins.
        epoch: the loader's count.
        excluded: the samples that were excluded then, as ranges.
    """

    number: int
    index: Any
    replaces: Mapping[int, Any]
    seed: int | None
    epoch: int
    excluded: Samples


def find_step(loader: Any, step: int, epoch: int | None, rank: int | None, world_size: int | None) -> Step:
    """Return the samples of a step.

    Raises:
        ArgumentError: an argument is wrong, or that step cannot be known.
    """
    step, epoch, rank, world_size = _checked(loader, step, epoch, rank, world_size)
    context, samplers = loader._context, Samplers.of(loader)
    place = context.position.place(loader)
    running, begun = place.epoch, place.sampler is not None
    epoch = running if epoch is None else epoch
    orders = orders_at(loader, place) if epoch == running else context.history.find(epoch)
    if epoch > running:
        orders = []
    if not orders and epoch < running:
        raise ArgumentError(
            f"nothing is known of epoch {epoch}: this loader, or the state that it loaded, was made later, "
            f"or {ORDERS_KEPT:,} others have begun since"
        )
    if not orders:
        if context.position.reads_streams(loader):
            raise ArgumentError(_order_of_streams(f"epoch {epoch} will be read, as far as is known now,"))
        coming = running + begun
        orders = [context.history.coming(samplers, epoch, coming, persistent=is_persistent(loader))]
    if orders[0].streamed:
        raise ArgumentError(_order_of_streams(f"epoch {epoch} was read"))
    order = order_at(orders, samplers, step, rank, world_size)
    index = _index_at(loader, samplers, order, step, rank, world_size)
    seed = loader.seed if loader.seed is not None else order.base_seed
    per_step = None if world_size is None else samplers.per_step(world_size)
    reading = reading_of(loader, seed or 0, epoch, orders, rank, world_size or order.replicas)
    chosen = Filter(context.exclusions, reading, step, per_step)
    if not chosen:
        return Step(step, index, {}, seed, epoch, chosen.samples)
    if seed is None:
        raise ArgumentError(
            f"epoch {epoch} has not begun, and which samples stand in for excluded ones is drawn then: give "
            "the DataLoader a seed="
        )
    edited = chosen(step, index)
    if edited is None:
        return Step(step, None, {}, seed, epoch, chosen.samples)
    replaces = {row: before for row, (_, before) in edited.replaced.items()}
    return Step(step, edited.index, replaces, seed, epoch, chosen.samples)


def _index_at(
    loader: Any, samplers: Samplers, order: EpochOrder, step: int, rank: int | None, world_size: int | None
) -> Any:
    """Return the index batch of a step; a bare index where the loader has batch_size=None."""
    with GeneratorStates() as states:
        with samplers.drawing():
            index = order.batch_at(samplers, loader.dataset, step, rank, world_size)
        drew = states.changed()
    if drew:
        raise ArgumentError(
            f"{samplers.names} draws from the process-wide generators, so its order cannot be recreated: "
            "give it a generator or a seed of its own"
        )
    return index


def _order_of_streams(read: str) -> str:
    """Return the sentence that refuses to name a sample of an epoch which is `read` as streams."""
    return (
        f"{read} as streams, whose order is not known before: index the shards with `fastload index`, and "
        "later epochs are known by step"
    )


def _sample_at(loader: Any, step: Step, row: int, index: Any) -> SampleAt:
    """Return the sample as it is made in that epoch."""
    rows, seed, epoch = view_of(loader.dataset), step.seed or 0, step.epoch
    rows.ask_alone()  # a `__getitems__` may return its samples in any form
    seeds = contextlib.nullcontext() if loader.seed is None else SampleSeeds()
    boxes: list[tuple[CropBox, bool]] = []
    sample, key, error = None, None, ""
    try:
        key = rows.key(index)
        with noted_boxes(boxes), seeds:
            if isinstance(seeds, SampleSeeds):
                seeds.start_epoch(seed, epoch)
                seeds.set(index)
            sample = rows.prepare([index], seed, epoch)[0]()
    except Exception as caught:  # the table of a bad step must come out, with the bad sample in it
        error = f"{type(caught).__name__}: {caught}"
    # Without a seed, what is drawn from the process-wide generators is not what the training had.
    known = [box for box, own in boxes if loader.seed is not None or (own and rows.writes())]
    crop, flip = (known[0].box, known[0].flip) if known and step.seed is not None else (None, None)
    return SampleAt(row, index, key, _label(sample), crop, flip, step.replaces.get(row), error)


def _label(sample: Any) -> int | None:
    """Return the label of a sample, by the usual forms."""
    if isinstance(sample, Mapping):
        label = next((sample[name] for name in ("label", "target", "cls") if name in sample), None)
    else:
        label = sample[1] if isinstance(sample, (tuple, list)) and len(sample) == 2 else None
    if isinstance(label, torch.Tensor) and label.numel() == 1 and not label.is_floating_point():
        return int(label.item())
    return int(label) if isinstance(label, numbers.Integral) else None


@contextlib.contextmanager
def _as_in(loader: Any, step: Step) -> Iterator[GeneratorStates]:
    """Put the datasets into that epoch, and afterwards the process-wide generators back.

    What is read inside does not count as read ahead.
    """
    datasets = fastload_datasets(loader.dataset)
    running = loader._context.position.place(loader).epoch
    token = current_reader.set(object())
    try:
        with GeneratorStates() as states:
            start_epoch(datasets, step.epoch)
            yield states
    finally:
        start_epoch(datasets, running)
        current_reader.reset(token)


def _checked(
    loader: Any, step: Any, epoch: Any, rank: Any, world_size: Any
) -> tuple[int, int | None, int | None, int | None]:
    if isinstance(loader.dataset, IterableDataset):
        raise ArgumentError("an iterable dataset has no index: which samples a step has is not known")
    step = whole_number("step", step, 0)
    epoch, rank, world_size = (
        None if value is None else whole_number(name, value, 0)
        for name, value in (("epoch", epoch), ("rank", rank), ("world_size", world_size))
    )
    if world_size is not None and not 0 <= (0 if rank is None else rank) < world_size:
        raise ArgumentError(f"rank must be from 0 to {world_size - 1}, found {rank!r}")
    return step, epoch, rank, world_size


class Inspection:
    """The part of `fastload.DataLoader` that is asked about its samples.

    The order of an epoch and the randomness of a sample are functions of (seed, epoch, index), so that past
    and coming batches can be named and recreated.
    """

    _context: LoaderContext
    dataset: Any

    def samples_at(
        self, step: int, epoch: int | None = None, *, rank: int | None = None, world_size: int | None = None
    ) -> list[SampleAt]:
        """Return the rows of a step, past or to come: index, key, label, crop and flip of each.

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
        chosen = find_step(self, step, epoch, rank, world_size)
        if chosen.index is None:
            return []
        loader: Any = self
        indices = list(chosen.index) if loader.batch_sampler is not None else [chosen.index]
        with _as_in(self, chosen):
            return [_sample_at(self, chosen, row, index) for row, index in enumerate(indices)]

    def batch_at(
        self, step: int, epoch: int | None = None, *, rank: int | None = None, world_size: int | None = None
    ) -> Any:
        """Return the batch of a step, past or to come, bit for bit as it is delivered. The iteration stays.

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
        loader: Any = self
        chosen = find_step(self, step, epoch, rank, world_size)
        if chosen.index is None:
            raise ArgumentError("that step is skipped: it has no batch")
        if chosen.seed is None:
            raise ArgumentError(
                f"epoch {chosen.epoch} has not begun, and its randomness is drawn then: give the DataLoader "
                "a seed="
            )
        again = loader._loader_of_one(chosen.index)
        again._context.position.replay(chosen.epoch, chosen.seed)
        again._context.exclusions = Exclusions(chosen.excluded)
        with _as_in(self, chosen) as states:
            (batch,) = again
            drew = loader.seed is None and states.changed()
        if drew:
            raise ArgumentError(
                "the samples, collate_fn or batch_transform draw random numbers that depend on what was "
                "drawn before: give the DataLoader a seed=, and draw none in batch_transform"
            )
        return batch

    def digest(self) -> bytes:
        """Return 32 bytes over all samples that this rank got since its run began, over resumes.

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
        return self._context.digest.value()

    def skip(self, steps: int | Iterable[int], epoch: int | None = None) -> None:
        """Skip the batches of these steps; all other batches keep their step and their samples.

        Example::

            from fastload import DataLoader, ImageFolder, RandomResizedCrop

            dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224))
            loader = DataLoader(dataset, batch_size=8, shuffle=True, seed=1)
            loader.skip(range(1, 3))  # of the epoch that comes: its batches 0, 3, 4 and so on are delivered

        Call it with the same steps on all ranks. What is skipped is part of the state, as a range of the
        epoch's samples. So the same samples stay away when a run continues with another number of ranks or
        another batch size. If only a part of a batch was skipped, other samples take the place of that part,
        as in `exclude`.

        Args:
            steps: numbers of batches of an epoch, from 0: one, a range, or any of them.
            epoch: counts the iterations of the loader, from 0. None: the one that runs, was left early or is
                to be resumed; else the next one.

        Raises:
            ArgumentError: a step was delivered already, or the epoch has no such step; or the samples have
                no index, as those of an iterable dataset, and of shards that are read as streams; or the
                dataset has no length.
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
                    f"step {late[0]} of epoch {running} was delivered already: the next one is step "
                    f"{place.batches}; for another epoch pass epoch="
                )
        else:
            place = Place(chosen)
        exclusions = self._context.exclusions
        samplers = Samplers.of(loader)
        segments = segments_of(orders_at(loader, place)) or [Segment(0, 0, samplers.per_step())]
        length = known_length(loader) if len(segments) == 1 and segments[0].step == 0 else None
        if length is not None and numbers[-1] >= length:
            raise ArgumentError(f"epoch {chosen} has the steps 0 to {length - 1}, found step {numbers[-1]}")
        exclusions.skip(chosen, segments[-1], numbers)

    def exclude(self, samples: str | int | SampleAt | Iterable[str | int | SampleAt]) -> None:
        """Leave these samples out of all batches from the next one on, in all epochs.

        Example::

            from fastload import DataLoader, ImageFolder, RandomResizedCrop

            dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224))
            loader = DataLoader(dataset, batch_size=8, shuffle=True, seed=1)
            loader.exclude(["cat/0002.jpg", 5])

        Another sample takes the place of an excluded one, the same in every run with this seed. All other
        samples keep their batch, row and augmentation. The substitute may be any sample of the dataset (of a
        `Mixture`, any of the same source). To hold samples back from training, give the loader a `Subset`.

        Call it with the same samples on all ranks, at the same step. What is excluded is part of the state;
        `load_state_dict` replaces it by what the state has.

        Args:
            samples: keys, as `dataset.key(index)` gives them, indices of the loader's dataset, and rows of
                `samples_at`, mixed. A key excludes all samples that have it.

        Raises:
            ArgumentError: there is no sample with a key or an index, or none would be left; or the samples
                have no index, as those of an iterable dataset, and of shards that are read as streams; or
                the dataset has no length.
        """
        place = self._place_to_change("exclude")
        named = [sample.index if isinstance(sample, SampleAt) else sample for sample in _as_list(samples)]
        indices = _indices_of(self.dataset, named)
        self._context.exclusions.exclude(
            sources_of(self.dataset), indices, place.epoch, place.batches, sorted(place.ahead)
        )

    def _place_to_change(self, what: str) -> Place:
        """Return the place from which on samples are left out.

        Raises:
            ArgumentError: samples have no index, the dataset has no length, or its state would be changed.
        """
        loader: Any = self
        dataset, position = loader.dataset, self._context.position
        if isinstance(dataset, IterableDataset):
            raise ArgumentError(
                f"{what} needs samples that have an index, and {type(dataset).__name__} is iterable: leave "
                "the samples out in its __iter__, or make it map-style"
            )
        if position.reads_streams(loader):
            raise ArgumentError(f"{what} {NEEDS_INDEX}")
        if known_length(dataset) is None:
            raise ArgumentError(
                f"{what} puts other samples in the place of those that are left out, and "
                f"{type(dataset).__name__} has no length: give it a __len__"
            )
        place = position.place(loader)
        if place.sampler is not None and loader.num_workers and is_stateful(dataset):
            raise ArgumentError(
                f"{what} cannot be called within an epoch where workers make batches ahead and the dataset "
                "has a state, which those have changed: call it between two epochs, or use num_workers=0"
            )
        return place


def _as_list(samples: Any) -> list[Any]:
    """Return one number, text or row of `samples_at`, or several."""
    if isinstance(samples, str | bytes | SampleAt) or (
        hasattr(samples, "__index__") and not getattr(samples, "ndim", 0)
    ):
        return [samples]
    try:
        return list(samples)
    except TypeError:
        return [samples]


def _indices_of(dataset: Any, samples: list[Any]) -> list[int]:
    """Return the indices of samples by key or index.

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
    by_key = rows.find(keys)
    if by_key is None:
        by_key = {}
        for index in range(length):
            key = rows.key(index)
            if key is not None and key in keys:
                by_key.setdefault(key, []).append(index)
    missing = sorted(keys - by_key.keys())
    if missing:
        example = rows.key(0) if length else None
        why = (
            "its samples have no keys: pass indices"
            if example is None
            else f"check it against dataset.key(index), which is relative to the URL, such as {example!r}"
        )
        raise ArgumentError(f"samples has the key {missing[0]!r}, which no sample of the dataset has: {why}")
    return indices + [index for positions in by_key.values() for index in positions]
