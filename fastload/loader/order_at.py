"""The index batch of any step of any epoch, on any rank: copies of the samplers make the order once more."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch.utils.data
from torch.utils.data import BatchSampler, SequentialSampler

from fastload.errors import ArgumentError
from fastload.loader.history import EpochRecord, segment_from
from fastload.order.mixture_sampler import MixtureSampler
from fastload.order.order import Order, check_of, is_stateful
from fastload.order.sampler import DistributedSampler
from fastload.workers.sample_threads import GeneratorStates

_NONE = object()
_KNOWN_BY_EPOCH = (
    *(DistributedSampler.__iter__, torch.utils.data.DistributedSampler.__iter__),
    *(SequentialSampler.__iter__, list.__iter__, tuple.__iter__),
)


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
        raise ArgumentError(order_of_streams(f"epoch {record['epoch']} was read"))
    if record.get("forgotten"):
        raise ArgumentError(
            f"the order of epoch {record['epoch']} was drawn from a generator or sampler whose state is kept "
            "for the last two epochs only: use fastload.DistributedSampler, whose orders are known for ever"
        )
    order, states = Order(loader), GeneratorStates()
    reader = None if order.mixture is None else loader.dataset.reader
    try:
        with order.drawing():
            _check_order(loader, order, record)
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


def order_of_streams(read: str) -> str:
    """The sentence that refuses to name a sample of an epoch which is `read` as streams."""
    return (
        f"{read} as streams, whose order is not known before: index the shards with `fastload index`, and "
        "later epochs are known by step"
    )


def ranks_at(record: EpochRecord, step: int) -> int | None:
    """How many ranks have read a step; None where no sampler deals to ranks."""
    segment = _segment_at(record["segments"], step)
    return None if segment is None else segment["replicas"]


def _segment_at(segments: list[dict[str, Any]], step: int) -> dict[str, Any] | None:
    return next((one for one in reversed(segments) if one["step"] <= step), None)


def _check_order(loader: Any, order: Order, record: EpochRecord) -> None:
    """Raise ArgumentError where the samplers cannot give the order of that epoch, or give another one."""
    if record.get("origin") is None and not (order.followed or _is_known_by_epoch(order)):
        raise ArgumentError(
            f"epoch {record['epoch']} has begun, and {order.kind} draws its order with the first batch: ask "
            "after that"
        )
    if not order.checked:
        return
    batches, check = record.get("check", (0, 0))
    made, _ = _from_step(loader, order, record, record["segments"][0]["step"], None, None)
    if check is None or check_of(itertools.islice(made, batches)) != check:
        raise ArgumentError(
            f"{order.kind} does not give the order of epoch {record['epoch']} once more: give the sampler a "
            "seed of its own for each epoch, or state_dict() and load_state_dict()"
        )


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
    segment = _segment_at(segments, step)
    if segment is None or (replicas is not None and segment["step"]):
        raise ArgumentError(
            f"epoch {record['epoch']} is known from step {record['segments'][0]['step']} on, where this run "
            "took it up"
        )
    if not isinstance(sampler, DistributedSampler):
        return _made_again(loader, order, record, segment, step, rank, replicas)
    jump = _is_known_by_epoch(order)  # so that each step takes a batch of samples in turn
    steps = step - (segment["step"] if order.followed else 0)
    moved, skipped = _dealt(sampler, record, segment, steps, rank, replicas, jump=jump)
    if outer is not sampler and type(outer) is BatchSampler:  # of a run that was resumed with another size
        return iter(BatchSampler(moved, segment["batch_size"], outer.drop_last)), skipped
    if outer is sampler:
        return iter(moved), skipped
    again = copy.copy(outer)
    again.sampler = None
    again = _copied(loader, order, again)
    again.sampler = moved
    _give_generators(order, record, [again])
    return iter(again), skipped


def _made_again(
    loader: Any,
    order: Order,
    record: EpochRecord,
    segment: dict[str, Any],
    step: int,
    rank: int | None,
    replicas: int | None,
) -> tuple[Iterator[Any], int]:
    """As `_from_step`, for samplers that have to be iterated over from where their state stands."""
    again = _again(loader, order, record, segment, rank, replicas)
    if type(again) is BatchSampler:  # of a run that was resumed with another size
        again = BatchSampler(again.sampler, segment["batch_size"], again.drop_last)
    return iter(again), step - (segment["step"] if order.followed else 0)


def _dealt(
    sampler: DistributedSampler,
    record: EpochRecord,
    segment: dict[str, Any],
    steps: int,
    rank: int | None,
    replicas: int | None,
    *,
    jump: bool,
) -> tuple[DistributedSampler, int]:
    """(a copy that stands `steps` after its segment begins, how many index batches lie between)"""
    place = segment["sampler"]
    ranks = replicas or segment["replicas"]
    own = sampler.rank if rank is None else rank
    if own >= ranks:
        raise ArgumentError(f"epoch {record['epoch']} was read by {ranks} ranks, found rank {own}")
    if isinstance(sampler, MixtureSampler):
        changes = record.get("changes", [])
        return sampler.at_state(place["state"], changes, rank=own, replicas=ranks), steps
    consumed = place["consumed"] + (steps * (segment["batch_size"] or 1) * ranks if jump else 0)
    # Another number of ranks may be on other nodes.
    dealt = None if replicas is not None and place["nodes"] != 1 else (place["nodes"], place["exchange"])
    moved = sampler.at(place["epoch"], consumed, rank=own, replicas=ranks, dealt=dealt)
    return moved, 0 if jump else steps


def _is_known_by_epoch(order: Order) -> bool:
    """Whether the order is a function of the epoch's number, by code of torch's or fastload's."""
    outer = order.index_sampler
    inner = getattr(outer, "sampler", None)
    makers = [getattr(type(part), "__iter__", None) for part in (outer, inner) if part is not None]
    return makers[-1] in _KNOWN_BY_EPOCH and makers[:-1] in ([], [BatchSampler.__iter__])


def _again(
    loader: Any,
    order: Order,
    record: EpochRecord,
    segment: dict[str, Any],
    rank: int | None,
    replicas: int | None,
) -> Any:
    """The index sampler of an epoch, such that iterating over it gives its order once more."""
    origin = record.get("origin")
    if origin is not None and (origin["seed"] is not None or origin["torch"] is not None):
        return order.from_origin(origin)
    outer = order.index_sampler
    again = _copied(loader, order, outer)
    inner = getattr(again, "sampler", None)
    if inner is not None and inner is getattr(outer, "sampler", None):
        inner = again.sampler = _copied(loader, order, inner)
    parts = [again] if inner is None else [again, inner]
    _give_generators(order, record, parts)
    place, last = segment["sampler"], parts[-1]
    if isinstance(last, torch.utils.data.DistributedSampler):
        own, ranks = last.rank if rank is None else rank, replicas or last.num_replicas
        if own >= ranks:
            raise ArgumentError(f"epoch {record['epoch']} was read by {ranks} ranks, found rank {own}")
        _deal(last, own, ranks)
    stateful = next((part for part in parts if is_stateful(part)), None)
    if place["state"] is not None and stateful is not None:
        stateful.load_state_dict(copy.deepcopy(place["state"]))
    with_epoch: Any = next((part for part in parts if hasattr(part, "set_epoch")), None)
    if place["epoch"] is not None and with_epoch is not None:
        with_epoch.set_epoch(place["epoch"])
    return again


def _give_generators(order: Order, record: EpochRecord, parts: list[Any]) -> None:
    """Let copies of the samplers, the outer one first, draw as in that epoch."""
    for part, generator in zip(parts, order.generators_again(record.get("generators") or {}), strict=False):
        if generator is not None:
            part.generator = generator


def _copied(loader: Any, order: Order, sampler: Any) -> Any:
    """A copy of a sampler that shares no state with it; the dataset in it stays the same one."""
    if type(sampler).__module__.startswith("torch.utils.data"):  # its indices and weights do not change
        return copy.copy(sampler)
    try:
        return copy.deepcopy(sampler, {id(loader.dataset): loader.dataset})
    except Exception as error:
        raise ArgumentError(
            f"{order.kind} cannot be copied, so its order cannot be made again ({error})"
        ) from error


def _deal(sampler: Any, rank: int, replicas: int) -> None:
    """Make torch's own sampler one of another rank."""
    length = len(sampler.dataset)
    sampler.rank, sampler.num_replicas = rank, replicas
    if sampler.drop_last and length % replicas:
        sampler.num_samples = math.ceil((length - replicas) / replicas)
    else:
        sampler.num_samples = math.ceil(length / replicas)
    sampler.total_size = sampler.num_samples * replicas


def record_to_come(
    loader: Any, epoch: int, coming: int, last: EpochRecord | None, *, repeats: bool
) -> EpochRecord:
    """The record of an epoch that has not begun, where that is known already.

    Args:
        coming: the loader's number of the next epoch.
        last: the epoch that began last.
        repeats: nobody calls `set_epoch`, so that all epochs have one order.

    Raises:
        ArgumentError: its order or its randomness is drawn when it begins.
    """
    order = Order(loader)
    outer = order.index_sampler
    sampler = getattr(outer, "sampler", outer)
    if not (order.seeded or _is_known_by_epoch(order)):
        raise ArgumentError(
            f"epoch {epoch} has not begun, and {type(sampler).__qualname__} draws its order then: give an "
            "epoch that has begun; or give the DataLoader a seed=, or use fastload.DistributedSampler, where "
            "the order of an epoch is known by its number"
        )
    sampler_epoch = order.epoch
    if sampler_epoch is not None:
        before = None if last is None else last["segments"][-1]["sampler"]["epoch"]
        if before is None or (epoch == coming and sampler_epoch != before):
            sampler_epoch += 0 if repeats else epoch - coming
        elif last is not None:
            sampler_epoch = before + (0 if repeats else epoch - last["epoch"])
    place: dict[str, Any] = {"epoch": sampler_epoch, "state": None}
    if isinstance(sampler, DistributedSampler):
        place = {"epoch": sampler_epoch, "consumed": 0, "nodes": sampler.place.nodes}
        place["exchange"] = sampler.exchange
    persistent = loader.persistent_workers and loader.num_workers > 0
    seed = last["base_seed"] if last is not None and persistent else None
    origin = order.origin(epoch) if order.seeded else None
    segments = [segment_from(order, 0, place)]
    return {"epoch": epoch, "streamed": False, "segments": segments, "base_seed": seed, "origin": origin}
