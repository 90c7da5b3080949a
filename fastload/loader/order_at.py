"""The index batch of any step of any epoch, on any rank: copies of the samplers make the order once more."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch.utils.data
from torch.utils.data import BatchSampler, SequentialSampler

from fastload.distributed.mixture_sampler import MixtureSampler
from fastload.distributed.sampler import DistributedSampler
from fastload.errors import ArgumentError
from fastload.loader.history import EpochRecord
from fastload.loader.position import Order, write_generator
from fastload.workers.turns import GeneratorStates

__all__ = ["index_batch_at", "record_to_come"]

_NONE = object()


def index_batch_at(
    loader: Any, record: EpochRecord, step: int, rank: int | None, replicas: int | None
) -> Any:
    """The index batch of a step; a bare index where the loader has batch_size=None.

    Args:
        rank, replicas: None: those of the run. With them, the whole epoch is dealt to that many ranks.

    Raises:
        ArgumentError: the epoch has no such step, or its order cannot be made again.
    """
    if record["streamed"]:
        raise ArgumentError(
            f"epoch {record['epoch']} was read as streams, whose order is not known before: index the shards "
            "with `fastload index`, and later epochs are known by step"
        )
    if record.get("forgotten"):
        raise ArgumentError(
            f"the order of epoch {record['epoch']} was drawn from a generator or sampler whose state is kept "
            "for the last two epochs only: use fastload.DistributedSampler, whose orders are known for ever"
        )
    order, states = Order(loader), GeneratorStates()
    reader = None if order.mixture is None else loader.dataset.reader
    try:
        with order.drawing():
            index_batches, skipped = _from_step(loader, order, record, step, rank, replicas)
            index = next(itertools.islice(index_batches, skipped, None), _NONE)
        drew = states.changed()
    finally:
        states.restore()
        if order.mixture is not None:
            loader.dataset.reader = reader
    if drew:
        raise ArgumentError(
            f"{order.kind} draws from the process-wide generators, so its order cannot be made again: give "
            "it a generator or a seed of its own"
        )
    if index is _NONE:
        raise ArgumentError(f"epoch {record['epoch']} has no step {step} on this rank")
    return index


def _from_step(
    loader: Any, order: Order, record: EpochRecord, step: int, rank: int | None, replicas: int | None
) -> tuple[Iterator[Any], int]:
    """(index batches, how many of them come before the step)"""
    outer = order.index_sampler
    inner = getattr(outer, "sampler", None)
    sampler = outer if inner is None else inner
    dealt = isinstance(sampler, torch.utils.data.DistributedSampler)
    if replicas is not None and replicas != 1 and not dealt:
        raise ArgumentError(
            f"world_size={replicas}: the order comes from {order.kind}, which deals to one rank; use "
            "fastload.DistributedSampler"
        )
    if rank and replicas is None and not dealt:
        raise ArgumentError(f"rank={rank}: the order comes from {order.kind}, which deals to one rank")
    segments = record["segments"][:1] if replicas is not None else record["segments"]
    segment = next((one for one in reversed(segments) if one["step"] <= step), None)
    if segment is None or (replicas is not None and segment["step"]):
        raise ArgumentError(
            f"epoch {record['epoch']} is known from step {record['segments'][0]['step']} on: the state was "
            "saved by an older version of fastload"
        )
    if not isinstance(sampler, DistributedSampler):
        again = _with_sampler(outer, _again(order, sampler, record, segment, rank, replicas))
        return iter(again), step
    moved, skipped = _dealt(sampler, record, segment, step, rank, replicas, jump=_is_plain(outer))
    if outer is not sampler and type(outer) is BatchSampler:  # of a run that was resumed with another size
        return iter(BatchSampler(moved, segment["batch_size"], outer.drop_last)), skipped
    return iter(_with_sampler(outer, moved)), skipped


def _dealt(
    sampler: DistributedSampler,
    record: EpochRecord,
    segment: dict[str, Any],
    step: int,
    rank: int | None,
    replicas: int | None,
    *,
    jump: bool,
) -> tuple[DistributedSampler, int]:
    """(a copy that stands before the step, how many index batches lie between)"""
    place, steps = segment["sampler"], step - segment["step"]
    ranks = replicas or segment["replicas"]
    own = sampler.rank if rank is None else rank
    if own >= ranks:
        raise ArgumentError(f"step {step} was read by {ranks} ranks, found rank {own}")
    if isinstance(sampler, MixtureSampler):
        changes = record.get("changes", [])
        return sampler.at_state(place["state"], changes, rank=own, replicas=ranks), steps
    consumed = place["consumed"] + (steps * (segment["batch_size"] or 1) * ranks if jump else 0)
    # Another number of ranks may be on other nodes.
    dealt = None if replicas is not None and place["nodes"] != 1 else (place["nodes"], place["exchange"])
    moved = sampler.at(place["epoch"], consumed, rank=own, replicas=ranks, dealt=dealt)
    return moved, 0 if jump else steps


def _is_plain(outer: Any) -> bool:
    """Whether each step takes a batch of samples in turn, so that one can jump to any."""
    return isinstance(outer, DistributedSampler) or type(outer) is BatchSampler


def _with_sampler(outer: Any, sampler: Any) -> Any:
    if getattr(outer, "sampler", None) is None:
        return sampler
    again = copy.copy(outer)
    again.sampler = sampler
    return again


def _again(
    order: Order,
    sampler: Any,
    record: EpochRecord,
    segment: dict[str, Any],
    rank: int | None,
    replicas: int | None,
) -> Any:
    """The sampler of an epoch, such that iterating over it gives its order once more."""
    origin = record.get("origin")
    if origin is not None and (origin["seed"] is not None or origin["torch"] is not None):
        again = order.from_origin(origin)
        return getattr(again, "sampler", again) if again is not sampler else again
    again = copy.copy(sampler) if type(sampler).__module__.startswith("torch.utils.data") else None
    if again is None:
        try:
            again = copy.deepcopy(sampler)
        except Exception as error:
            raise ArgumentError(
                f"{order.kind} cannot be copied, so its order cannot be made again ({error})"
            ) from error
    for name, state in (record.get("generators") or {}).items():
        generator = torch.Generator()
        write_generator(generator, state)
        if name != "batch_sampler" and getattr(again, "generator", None) is not None:
            again.generator = generator
    if isinstance(again, torch.utils.data.DistributedSampler):
        own, ranks = sampler.rank if rank is None else rank, replicas or sampler.num_replicas
        if own >= ranks:
            raise ArgumentError(f"epoch {record['epoch']} was read by {ranks} ranks, found rank {own}")
        _deal(again, own, ranks)
    place = segment["sampler"]
    if place["state"] is not None and hasattr(again, "load_state_dict"):
        again.load_state_dict(copy.deepcopy(place["state"]))
    if place["epoch"] is not None and hasattr(again, "set_epoch"):
        again.set_epoch(place["epoch"])
    return again


def _deal(sampler: Any, rank: int, replicas: int) -> None:
    """Make torch's own sampler one of another rank."""
    length = len(sampler.dataset)
    sampler.rank, sampler.num_replicas = rank, replicas
    if sampler.drop_last and length % replicas:
        sampler.num_samples = math.ceil((length - replicas) / replicas)
    else:
        sampler.num_samples = math.ceil(length / replicas)
    sampler.total_size = sampler.num_samples * replicas


def record_to_come(loader: Any, epoch: int, coming: int, last: EpochRecord | None) -> EpochRecord:
    """The record of an epoch that has not begun, where that is known already.

    Args:
        coming: the loader's number of the next epoch.
        last: the epoch that began last.

    Raises:
        ArgumentError: its order or its randomness is drawn when it begins.
    """
    order = Order(loader)
    outer = order.index_sampler
    sampler = getattr(outer, "sampler", outer)
    known = isinstance(sampler, torch.utils.data.DistributedSampler | SequentialSampler | list | tuple)
    if not known or isinstance(sampler, MixtureSampler):
        raise ArgumentError(
            f"epoch {epoch} has not begun, and {type(sampler).__qualname__} draws its order then: give an "
            "epoch that has begun, or use fastload.DistributedSampler, which gives all epochs by their number"
        )
    sampler_epoch = order.epoch
    if sampler_epoch is not None:
        before = None if last is None else last["segments"][-1]["sampler"]["epoch"]
        if before is None or (epoch == coming and sampler_epoch != before):
            sampler_epoch += epoch - coming
        elif last is not None:
            sampler_epoch = before + epoch - last["epoch"]
    place: dict[str, Any] = {"epoch": sampler_epoch, "state": None}
    if isinstance(sampler, DistributedSampler):
        place = {"epoch": sampler_epoch, "consumed": 0, "nodes": sampler.place.nodes}
        place["exchange"] = sampler.exchange
    segment = {
        "step": 0,
        "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        "replicas": order.replicas,
        "sampler": place,
    }
    persistent = loader.persistent_workers and loader.num_workers > 0
    seed = last["base_seed"] if last is not None and persistent else None
    return {"epoch": epoch, "streamed": False, "segments": [segment], "base_seed": seed}
