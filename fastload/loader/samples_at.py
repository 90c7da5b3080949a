"""The samples of a step, and how each is cut: the samples are made once more, and say it themselves."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from fastload.checks import whole_number
from fastload.datasets.views import current_reader
from fastload.datasets.wrappers import fastload_datasets, start_epoch, view_of
from fastload.errors import ArgumentError
from fastload.images.crop import CropBox, noted_boxes
from fastload.images.rng import SampleSeeds
from fastload.loader.resume import orders_at, reading_of
from fastload.order.exclusions import Exclusions, Filter, Samples
from fastload.order.order import EpochOrder, order_at
from fastload.order.samplers import Samplers
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
    """The samples of a step.

    Raises:
        ArgumentError: an argument is wrong, or that step cannot be known.
    """
    step, epoch, rank, world_size = _checked(loader, step, epoch, rank, world_size)
    context, samplers = loader.loader_context, Samplers.of(loader)
    place = context.position.place(loader)
    running, begun = place.epoch, place.sampler is not None
    epoch = running if epoch is None else epoch
    orders = orders_at(loader, place) if epoch == running else context.history.find(epoch)
    if epoch > running:
        orders = []
    if not orders and epoch < running:
        raise ArgumentError(
            f"nothing is known of epoch {epoch}: this loader, or the state that it loaded, was made later"
        )
    if not orders:
        if context.position.reads_streams(loader):
            raise ArgumentError(_order_of_streams(f"epoch {epoch} will be read, as far as is known now,"))
        persistent = loader.persistent_workers and loader.num_workers > 0
        orders = [context.history.coming(samplers, epoch, running + begun, persistent=persistent)]
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
    states, mixed = GeneratorStates(), samplers.mixture is not None
    reader = loader.dataset.reader if mixed else None
    try:
        with samplers.drawing():
            index = order.batch_at(samplers, loader.dataset, step, rank, world_size)
        drew = states.changed()
    finally:
        states.restore()
        if mixed:
            loader.dataset.reader = reader
    if drew:
        raise ArgumentError(
            f"{samplers.names} draws from the process-wide generators, so its order cannot be made again: "
            "give it a generator or a seed of its own"
        )
    return index


def _order_of_streams(read: str) -> str:
    """Return the sentence that refuses to name a sample of an epoch which is `read` as streams."""
    return (
        f"{read} as streams, whose order is not known before: index the shards with `fastload index`, and "
        "later epochs are known by step"
    )


def samples_at(loader: Any, found: Step) -> list[SampleAt]:
    """The rows of a step. Its samples are read and made in this process, one after the other."""
    if found.index is None:
        return []
    indices = list(found.index) if loader.batch_sampler is not None else [found.index]
    states = GeneratorStates()
    try:
        with _as_in(loader, found):
            rows = [_sample_at(loader, found, index) for index in indices]
    finally:
        states.restore()
    return [one._replace(row=row, replaces=found.replaces.get(row)) for row, one in enumerate(rows)]


def _sample_at(loader: Any, found: Step, index: Any) -> SampleAt:
    """The sample as it is made in that epoch; its row is left open."""
    rows, seed, epoch = view_of(loader.dataset), found.seed or 0, found.epoch
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
    crop, flip = (known[0].box, known[0].flip) if known and found.seed is not None else (None, None)
    return SampleAt(0, index, key, _label(sample), crop, flip, None, error)


def _label(sample: Any) -> int | None:
    """The label of a sample, by the usual forms."""
    if isinstance(sample, Mapping):
        label = next((sample[name] for name in ("label", "target", "cls") if name in sample), None)
    else:
        label = sample[1] if isinstance(sample, (tuple, list)) and len(sample) == 2 else None
    if isinstance(label, torch.Tensor) and label.numel() == 1 and not label.is_floating_point():
        return int(label.item())
    return int(label) if isinstance(label, numbers.Integral) else None


def batch_at(loader: Any, found: Step) -> Any:
    """The batch of a step, made in this process by a loader of one batch.

    Raises:
        ArgumentError: the step is skipped, or random numbers of its samples are not known.
    """
    if found.index is None:
        raise ArgumentError("that step is skipped: it has no batch")
    if found.seed is None:
        raise ArgumentError(
            f"epoch {found.epoch} has not begun, and its randomness is drawn then: give the DataLoader a "
            "seed="
        )
    again = loader.replay_loader(found.index)
    again.loader_context.position.replay(found.epoch, found.seed)
    again.loader_context.exclusions = Exclusions(found.excluded)
    states = GeneratorStates()
    try:
        with _as_in(loader, found):
            (batch,) = again
        drew = loader.seed is None and states.changed()
    finally:
        states.restore()
    if drew:
        raise ArgumentError(
            "the samples, collate_fn or batch_transform draw random numbers that depend on what was drawn "
            "before: give the DataLoader a seed=, and draw none in batch_transform"
        )
    return batch


@contextlib.contextmanager
def _as_in(loader: Any, found: Step) -> Iterator[None]:
    """Inside, the datasets are in that epoch, and what is read does not count as read ahead."""
    datasets = fastload_datasets(loader.dataset)
    running, _ = loader.loader_context.position.running(loader)
    token = current_reader.set(object())
    start_epoch(datasets, found.epoch)
    try:
        yield
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
