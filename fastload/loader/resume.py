"""Where a loader is in its data, as a small dict, and how it takes up from there.

The permutation is never kept. A state has what the order was made from (the sampler's own state, or the
states of the random generators just before it drew) and how many batches were handed out. To resume is to
make the order again and to pass over those batches without reading their data.
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from fastload.distributed.sampler import ShardSampler
from fastload.errors import ArgumentError
from fastload.loader.generators import Lender, digest, read_globals
from fastload.loader.progress import Order, Progress
from fastload.loader.stream_epoch import Streams, check_streams
from fastload.workers.dataset_state import load_dataset

__all__ = ["LoaderState"]

_VERSION = 1
_END = object()


class LoaderState:
    """The position of one loader, over all its iterations."""

    def __init__(self) -> None:
        self.epoch = 0  # of the next iteration
        self._progress: Progress | None = None  # of the iteration that began last
        self._loaded: dict[str, Any] | None = None  # waits for the next iteration
        self._loaded_epoch: int | None = None  # of the sampler, right after it was loaded
        self._streams = Streams()
        self._lender: Lender | None = None  # of a loader that was resumed with torch's generator elsewhere
        # Whether the run draws one base seed for all its epochs, as torch does with persistent workers. A
        # loader that resumes goes on like that, with or without them, or its later orders would be others.
        self._one_seed: bool | None = None
        # While an iteration starts:
        self._workers: list[dict[str, Any]] | None = None  # where the dataset is to be taken up
        self._again: dict[str, Any] | None = (
            None  # from what the order is to be made, if not as torch has just done
        )
        self._lent: Lender | None = None

    # --- hooks of the iterators, in the order in which they are called

    @contextlib.contextmanager
    def starting(self, loader: Any) -> Iterator[list[dict[str, Any]] | None]:
        """Around `iter(loader)`. Gives where the dataset is to be taken up, see `Progress`."""
        saved, self._loaded = self._loaded, None
        order = Order(loader)
        another_epoch = saved is not None and order.epoch != self._loaded_epoch  # by set_epoch, since
        if saved is not None and another_epoch and saved["begun"]:  # that one starts from its beginning
            if "streams" in saved:
                warnings.warn(
                    f"set_epoch({order.epoch}) drops the position that was loaded, {saved['batches']} "
                    f"batches into epoch {self._loaded_epoch}: call set_epoch with that one to resume there",
                    stacklevel=5,
                )
            self.epoch = saved["epoch"] + 1
            lender = None
        elif saved is not None:
            if another_epoch:  # it was saved between two epochs, and the one to come is named only now
                saved = saved | {"sampler": order.sampler_state()}
            lender = self._resume(loader, order, saved)
        else:
            lender = self._lender
        self._lent = lender
        try:
            with lender or contextlib.nullcontext():
                if self._draws_one_seed(loader) and not _is_persistent(loader) and self._progress is not None:
                    self._again = self._between(loader, order) | {"sampler": order.sampler_state()}
                yield self._workers
        except BaseException:
            self._loaded = saved
            raise
        finally:
            self._workers = self._again = self._lent = None

    def _resume(self, loader: Any, order: Order, saved: dict[str, Any]) -> Lender | None:
        self.epoch = saved["epoch"]
        self._one_seed = saved["one_seed"]
        count = max(1, loader.num_workers)
        workers = copy.deepcopy(saved["workers"])
        if workers is not None and len(workers) != count:
            workers = [copy.deepcopy(workers[0]) for _ in range(count)]  # they are alike, see `_check`
        self._workers = workers
        if loader.num_workers == 0 and workers is not None:
            load_dataset(loader.dataset, workers[0])  # not while generators are lent: it may set them
        restored = saved["global"] == digest(read_globals(order.globals))
        # Where the sampler had not begun to draw, its first draw is yet to come for the generators as well.
        states = {name: saved["generators"][name] for name in order.globals}
        lender = Lender(states, stays=restored and not saved["drawn"])
        self._lender = None if restored else lender
        if saved["base_seed"] is None:
            order.write_generators(saved["generators"], own_only=True)
            return self._lender
        self._again = saved
        return lender

    def worker_positions(self) -> list[dict[str, Any]] | None:
        """Where each worker takes up the dataset; None where nothing is resumed."""
        return self._workers

    def base_seed(self, drawn: int) -> int:
        """The base seed of the iteration that starts, where torch has drawn `drawn`."""
        return drawn if self._again is None else int(self._again["base_seed"])

    def begin(self, loader: Any, *, late_seed: bool, previous: Progress | None = None) -> Progress:
        """Just before `iter(sampler)`. `previous` is what the same workers did before."""
        order = Order(loader)
        order.start_epoch()
        streams = self._streams.begin(loader, (self._again or {}).get("streams"))
        workers = copy.deepcopy(self._workers)
        if workers is None:
            states = [worker["state"] for worker in previous.workers] if previous is not None else []
            states += [None] * (max(1, loader.num_workers) - len(states))
            workers = [_untouched(state) for state in states]
        base_seed = None
        if previous is not None and not self._draws_one_seed(loader):
            with order.seeding():
                drawn = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            base_seed = int(drawn.item())
        progress = Progress(order, self.epoch, _is_iterable(loader), late_seed, workers, streams)
        progress.base_seed = base_seed
        if self._again is not None:
            progress.resume(self._again)
        self.epoch += 1
        self._progress = progress
        return progress

    def seeding(self, loader: Any) -> contextlib.AbstractContextManager[Any]:
        """Around the constructor of torch's iterator, which draws the base seed."""
        return contextlib.nullcontext() if _is_iterable(loader) else Order(loader).seeding()

    def started(
        self, loader: Any, drawn: int, index_batches: Iterator[Any], progress: Progress
    ) -> tuple[int, Iterator[Any]]:
        """torch has drawn the base seed and made the sampler's iterator. Returns what to use for them."""
        if progress.base_seed is None:
            progress.base_seed = drawn
        if self._again is not None:
            index_batches = progress.order_again(loader.generator)
        if progress.unordered:
            return progress.base_seed, index_batches
        batches = Order(loader).drawn(index_batches)
        if self._lent is not None and not progress.sampler_followed:
            # Where the process-wide generators were restored, they stand behind what was drawn until then.
            lent = math.inf if self._lender is not None else progress.drawn - progress.batches
            batches = _drawn_from(self._lent, batches, min(lent, 1) if progress.drawn_at_once else lent)
        return progress.base_seed, progress.watch(batches)

    def _draws_one_seed(self, loader: Any) -> bool:
        return _is_persistent(loader) if self._one_seed is None else self._one_seed

    # --- the state

    def state_dict(self, loader: Any) -> dict[str, Any]:
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        order = Order(loader)
        if self._progress is not None and not self._progress.finished:
            position = self._progress.position()
        else:
            position = self._between(loader, order)
        stateless = all(worker["state"] is None for worker in position["workers"])
        if stateless and not (_is_iterable(loader) and position["batches"]):
            position["workers"] = None
        position["one_seed"] = self._draws_one_seed(loader)
        position["global"] = None if self._lender is not None else digest(read_globals(order.globals))
        return copy.deepcopy(_description(loader, order) | position)

    def _between(self, loader: Any, order: Order) -> dict[str, Any]:
        """The part of a state that is about the iteration to come."""
        last = self._progress
        generators = order.read_generators()
        if self._lender is not None:
            generators |= self._lender.states
        kept = last is not None and (loader.num_workers == 0 or _is_persistent(loader))
        return {
            "begun": False,
            "epoch": self.epoch,
            "batches": 0,
            "ahead": [],
            "drawn": 0,
            "next_worker": 0,
            "late_seed": False,
            # None: the next iteration draws one.
            "base_seed": last.base_seed if last is not None and self._draws_one_seed(loader) else None,
            "generators": generators,
            "sampler": last.sampler if last is not None else order.sampler_state(),
            "workers": [_untouched(worker["state"]) for worker in last.workers] if kept and last else [],
        }

    def load_state_dict(self, loader: Any, state_dict: Mapping[str, Any]) -> None:
        order = Order(loader)
        _check(loader, order, state_dict)
        order.load_sampler_state(state_dict["sampler"])
        self._loaded = copy.deepcopy(dict(state_dict))
        self._loaded_epoch = order.epoch
        self._progress = self._lender = self._one_seed = None


def _drawn_from(lender: Lender, index_batches: Iterator[Any], count: float) -> Iterator[Any]:
    """The same, the first `count` drawn while the generators are lent."""
    while count > 0:
        with lender:
            index = next(index_batches, _END)
        if index is _END:
            return
        yield index
        count -= 1
    yield from index_batches


def _untouched(state: Any) -> dict[str, Any]:
    return {"batches": 0, "ended": False, "fresh": True, "state": state}


def _is_persistent(loader: Any) -> bool:
    return bool(loader.persistent_workers and loader.num_workers > 0)


def _is_iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def _description(loader: Any, order: Order) -> dict[str, Any]:
    """What has to be alike in the loader that resumes, or is compared in `_check`."""
    iterable = _is_iterable(loader)
    return {
        "version": _VERSION,
        "dataset": "iterable" if iterable else "map-style",
        "length": None if iterable else _length(loader.dataset),
        "samplers": order.kind,
        "sampler_length": None if iterable else _length(order.index_sampler),
        "num_replicas": order.replicas,
        "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        "num_workers": loader.num_workers,
        "seed": loader.seed,
    }


def _check(loader: Any, order: Order, saved: Mapping[str, Any]) -> None:
    """Raise ArgumentError unless `loader` can go on from `saved`."""
    if not isinstance(saved, Mapping):
        raise ArgumentError(f"state_dict must be a dict, found {type(saved).__name__}")
    if saved.get("version") != _VERSION:
        raise ArgumentError(
            f"state_dict has version {saved.get('version')!r}, this fastload reads version {_VERSION}: "
            "load what state_dict() of a fastload.DataLoader returned"
        )
    own = _description(loader, order)
    missing = sorted((own.keys() | _POSITION) - saved.keys())
    if missing:
        raise ArgumentError(f"state_dict lacks {missing}: load it whole, as state_dict() returned it")
    names = ["dataset", "length", "samplers", "seed"]
    workers = saved["workers"] or []
    if own["dataset"] == "map-style":
        if saved["ahead"] or not order.followed:
            names += ["batch_size", "sampler_length", "num_replicas"] if saved["begun"] else []
    elif any(worker["state"] is None and worker["batches"] for worker in workers):
        names += ["batch_size"]
    # As bytes, since users' states may hold tensors, which have no single answer to `==`.
    alike = len({pickle.dumps(worker["state"]) for worker in workers}) == 1
    if workers and not (alike and own["dataset"] == "map-style"):
        names += ["num_workers"]
    for name in names:
        unnumbered = isinstance(loader.sampler, ShardSampler) and None in (saved[name], own[name])
        if saved[name] != own[name] and not (name == "length" and unnumbered):
            raise ArgumentError(
                f"state_dict was saved with {name} {saved[name]!r}, this loader has {own[name]!r}: "
                f"{_ADVICE[name]}"
            )
    check_streams(loader, saved.get("streams"))
    if saved["generators"].keys() != order.read_generators().keys():
        raise ArgumentError(
            f"state_dict has the generators {sorted(saved['generators'])}, this loader draws from "
            f"{sorted(order.read_generators())}: pass `generator` where the saved loader had it, only there"
        )


_POSITION = {
    *("begun", "epoch", "batches", "ahead", "drawn", "next_worker", "late_seed", "base_seed", "one_seed"),
    *("generators", "global", "sampler", "workers"),
}
_SAME_ORDER = "the order of the samples would be another one"
_ADVICE = {
    "dataset": "resume with the dataset of the run that was saved",
    "length": f"{_SAME_ORDER}; resume with the same dataset",
    "samplers": f"{_SAME_ORDER}; resume with the same shuffle, sampler and batch_sampler",
    "seed": "the samples' randomness would be another one; resume with the same seed",
    "batch_size": "resume with the same batch_size, or with fastload.DistributedSampler, which can change it",
    "sampler_length": f"{_SAME_ORDER}; fastload.DistributedSampler can resume with other numbers of ranks",
    "num_replicas": f"{_SAME_ORDER}; fastload.DistributedSampler can resume with other numbers of ranks",
    "num_workers": "its dataset keeps a state in each worker; resume with as many workers",
}
