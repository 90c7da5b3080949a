"""What the order of each epoch of a run was made from, so that it can be made again.

The position says this of the running epoch, see `fastload.loader.position`. Here it is kept when that epoch
is over: some hundred bytes an epoch. An epoch that was resumed with other ranks or another batch size has a
segment for each of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from fastload.loader.position import Progress
from fastload.order.mixture_sampler import MixtureSampler
from fastload.order.order import Order
from fastload.order.sampler import DistributedSampler

EpochRecord = dict[str, Any]
"""One epoch, as JSON.

"epoch": the loader's count. "base_seed": of the samples' randomness, where the loader has no seed of its own;
None: not known. "streamed": it was read as streams. "origin", "generators": as in a position. "segments": the
steps from "step" on had "batch_size", "replicas" and a sampler that stood at "sampler". "changes": of the
weights of a mixture. "check": of a checked order, how many batches were drawn, and the sum over them.
"""

_STATES_KEPT = 2  # of epochs whose order comes from a generator's or a sampler's state: kilobytes each


class History:
    """The epochs of one loader's run, over its resumes. Plain data, as the position is."""

    def __init__(self) -> None:
        self._epochs: list[EpochRecord] = []
        self._running: tuple[Progress, Order] | None = None

    def begin(self, loader: Any, progress: Progress) -> None:
        """An epoch begins, or goes on after a resume."""
        self._settle()
        order = Order(loader)
        record = next((one for one in self._epochs if one["epoch"] == progress.epoch), None)
        self._epochs = [one for one in self._epochs if one["epoch"] < progress.epoch]
        if record is None or not progress.batches:
            record = {"epoch": progress.epoch, "streamed": progress.unordered, "segments": []}
        go_on(loader, record, progress.place)
        record["base_seed"] = progress.base_seed
        self._epochs.append(record)
        self._running = (progress, order)

    def find(self, epoch: int) -> EpochRecord | None:
        """What is known of an epoch that has begun; None where nothing is."""
        self._settle()
        return next((copy.deepcopy(one) for one in self._epochs if one["epoch"] == epoch), None)

    def last(self) -> EpochRecord | None:
        """Of the epoch that began last."""
        self._settle()
        return copy.deepcopy(self._epochs[-1]) if self._epochs else None

    def repeats(self) -> bool:
        """Whether the last two epochs were one epoch of the sampler: nobody calls its `set_epoch`."""
        epochs = [one["segments"][0]["sampler"]["epoch"] for one in self._epochs[-2:]]
        return len(epochs) == 2 and epochs[0] == epochs[1]

    def state(self) -> dict[str, Any]:
        """As JSON, but for the states of samplers of the user's own."""
        self._settle()
        return {"epochs": copy.deepcopy(self._epochs)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up the history in a loader's state."""
        self._running = None
        self._epochs = copy.deepcopy(state["history"]["epochs"])

    def _settle(self) -> None:
        """Note what the running epoch's order was made from, once its first index is drawn."""
        if self._running is None:
            return
        (progress, order), record = self._running, self._epochs[-1]
        if record["streamed"]:
            return
        record["origin"] = progress.place["origin"]
        record["generators"] = progress.place["generators"] or {}
        if order.checked:
            record["check"] = list(progress.drawn)
        if order.mixture is not None:
            changes = dict(map(tuple, record.get("changes", [])))
            first = record["segments"][0]["sampler"]["state"]["drawn"]
            changes |= dict(order.mixture.changes_since(first))
            record["changes"] = sorted(changes.items())
        for older in self._epochs[:-_STATES_KEPT]:
            _forget_states(older)


def go_on(loader: Any, record: EpochRecord, place: Mapping[str, Any]) -> None:
    """Note in the record of an epoch that this loader reads it from a place on."""
    order, step = Order(loader), int(place["batches"])
    segment = segment_from(order, step, _place_of(order, place["sampler"]))
    earlier = [one for one in record["segments"] if one["step"] < step]
    if not earlier or _dealing(earlier[-1]) != _dealing(segment):
        earlier.append(segment)
    if order.mixture is not None and len(earlier) > 1 and _mixture(earlier[-1]) != _mixture(earlier[-2]):
        drawn = segment["sampler"]["state"]["drawn"]  # weights that were to be set later may not be set now
        before = [change for change in record.get("changes", []) if change[0] < drawn]
        record["changes"] = before + order.mixture.changes_since(drawn)
    record["segments"] = earlier


def _dealing(segment: Mapping[str, Any]) -> Any:
    """What makes the steps after a resume others than they would have been."""
    return segment["batch_size"], segment["replicas"], _mixture(segment)


def _mixture(segment: Mapping[str, Any]) -> Any:
    """The sources and the weights that a mixture was given; None where the order is not of a mixture."""
    state = segment["sampler"].get("state")
    if not isinstance(state, Mapping) or not {"sources", "given"} <= state.keys():
        return None
    return list(state["sources"]), state["given"]


def segment_from(order: Order, step: int, sampler: Mapping[str, Any]) -> dict[str, Any]:
    """The steps that a loader reads from this one on, while its sampler stands there."""
    return {
        "step": step,
        "batch_size": order.batch_size,
        "replicas": order.replicas,
        "sampler": sampler,
    }


def _forget_states(record: EpochRecord) -> None:
    """Keep no kilobytes of an epoch that lies far back: its order is not known any more."""
    origin = record.get("origin") or {}
    if record.get("generators") or origin.get("torch"):
        record |= {"origin": None, "generators": {}, "forgotten": True}
    for segment in record["segments"]:
        if segment["sampler"].get("state") is not None:
            segment["sampler"] |= {"state": None}
            record["forgotten"] = True


def _place_of(order: Order, sampler: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(order.stateful, DistributedSampler) and not isinstance(order.stateful, MixtureSampler):
        return _compact(sampler)
    return {"epoch": sampler["epoch"], "state": sampler["state"]}


def _compact(sampler: Mapping[str, Any]) -> dict[str, Any]:
    """The position of a `DistributedSampler`: what does not change in a run is left out."""
    state = sampler["state"]
    if not isinstance(state, Mapping) or not {"consumed", "nodes"} <= state.keys():
        return {"epoch": sampler["epoch"], "state": state}
    return {name: state[name] for name in ("epoch", "consumed", "nodes", "exchange")}
