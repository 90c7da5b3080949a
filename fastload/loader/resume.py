"""Where a loader is in its data, as a small dict, and how it goes on from there.

A state is a position: the epoch, the origin of its order (a seed, or the state of a sampler or generator),
and how many batches were handed out. To resume is to make the order again and to pass over those batches
without reading their data.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, IterDataPipe

from fastload.datasets.substitutes import substitutes
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError
from fastload.loader.position import Progress
from fastload.loader.stream_epoch import Streams, check_streams
from fastload.order.exclusions import Filter, Reading
from fastload.order.order import Order, draw_seed
from fastload.order.sampler import DistributedSampler, ShardSampler, indexed_length, known_length
from fastload.order.state import VERSION, check_state
from fastload.trace.identity import Contents, changes_since, check_identity
from fastload.workers.on_error import REPLACEMENTS
from fastload.workers.sources import load_dataset

_BEGINNING: dict[str, Any] = {"batches": 0, "ahead": [], "sampler": None}  # of an epoch


class LoaderState:
    """The position of one loader, over all its iterations.

    An iterator calls `begin` and `started` when an epoch starts; what they resume is known from `starting`
    only, which is around both.
    """

    def __init__(self) -> None:
        self.epoch = 0  # of the next iteration
        self._progress: Progress | None = None  # of the iteration that began last
        self._loaded: dict[str, Any] | None = None  # waits for the next iteration
        self._loaded_epoch: int | None = None  # of the sampler, right after it was loaded
        self._streams = Streams()
        self._contents = Contents()
        # With persistent workers a run draws one base seed for all its epochs, as torch's does. One that
        # resumes it keeps that seed, with or without such workers, or its samples would be others.
        self._one_seed: int | None = None
        # What the next iteration draws from torch's generator, once a state has said so: "base_seed" (None:
        # it stays as it is) and "origin" of its order. The script may draw meanwhile.
        self._coming: dict[str, Any] | None = None
        # While an iteration starts:
        self._workers: list[dict[str, Any]] | None = None  # where the dataset is to be taken up
        self._again: dict[str, Any] | None = None  # the position in the epoch that is resumed

    def running(self, loader: Any) -> tuple[int, bool]:
        """(the epoch that runs, True), or (the next one, False)."""
        epoch, place = self.place(loader)
        return epoch, place is not _BEGINNING

    def replay(self, epoch: int, base_seed: int) -> None:
        """Let the next iteration have the samples' randomness of that epoch."""
        self.epoch, self._one_seed = epoch, base_seed

    # --- called when an iteration starts

    @contextlib.contextmanager
    def starting(self, loader: Any) -> Iterator[list[dict[str, Any]] | None]:
        """Around `iter(loader)`. Gives where the dataset is to be taken up, see `Progress`."""
        saved, self._loaded = self._loaded, None
        order = Order(loader)
        another_epoch = saved is not None and order.epoch != self._loaded_epoch  # by set_epoch, since
        if saved is not None and another_epoch and saved["begun"]:
            self._leave(order, saved)  # that epoch starts from its beginning
        elif saved is not None:
            self._resume(loader, order, saved)
        try:
            yield self._workers
        except BaseException:
            self._loaded = saved
            raise
        finally:
            self._workers = self._again = None

    def _leave(self, order: Order, saved: Mapping[str, Any]) -> None:
        if "streams" in saved:
            warnings.warn(
                f"set_epoch({order.epoch}) drops the position that was loaded, {saved['batches']} "
                f"batches into epoch {self._loaded_epoch}: call set_epoch({self._loaded_epoch}) to resume "
                "there",
                stacklevel=6,
            )
        self.epoch, self._coming = saved["epoch"] + 1, None

    def _resume(self, loader: Any, order: Order, saved: dict[str, Any]) -> None:
        self.epoch = saved["epoch"]
        self._one_seed = saved["base_seed"] if saved["one_seed"] else None
        count = max(1, loader.num_workers)
        workers = copy.deepcopy(saved["workers"])
        if workers is not None and len(workers) != count:
            workers = [copy.deepcopy(workers[0]) for _ in range(count)]  # they are alike, see `_check`
        self._workers = workers
        if loader.num_workers == 0 and workers is not None:
            load_dataset(loader.dataset, workers[0])
        if saved["begun"]:
            self._again = saved
        else:
            self._coming = copy.deepcopy(saved["coming"])
            order.write_generators(saved["generators"])

    def worker_positions(self) -> list[dict[str, Any]] | None:
        """Where each worker takes up the dataset; None where nothing is resumed."""
        return self._workers

    @contextlib.contextmanager
    def seeding(self, loader: Any) -> Iterator[None]:
        """Around the constructor of torch's iterator, which draws the base seed.

        Where the run that was saved had drawn it before, the generators stay where they are.
        """
        order = Order(loader)
        on_host = contextlib.nullcontext() if _is_iterable(loader) else order.seeding()
        drawn = self._again is not None or self._one_seed is not None
        generators = order.generators() if drawn else {}
        with on_host, torch.random.fork_rng(devices=[], enabled=drawn):
            yield
        if drawn:
            order.write_generators(generators)

    @property
    def order_was_undone(self) -> bool:
        """`seeding` has undone all draws, those of `iter(sampler)` too, which has to be called again."""
        return self._again is None and self._one_seed is not None

    def base_seed(self, drawn: int) -> int:
        """The base seed of the iteration that starts, where torch has drawn `drawn`."""
        if self._again is not None:
            return int(self._again["base_seed"])
        settled = None if self._coming is None else self._coming["base_seed"]
        return next((seed for seed in (self._one_seed, settled) if seed is not None), drawn)

    def begin(self, loader: Any, previous: Progress | None = None) -> Progress:
        """Just before `iter(sampler)`. `previous` is what the same workers did before."""
        order = Order(loader)
        order.start_epoch()
        self._contents.forget()
        streams = self._streams.begin(loader, self._again)
        workers = copy.deepcopy(self._workers)
        if workers is None:
            states = [worker["state"] for worker in previous.workers] if previous is not None else []
            states += [None] * (max(1, loader.num_workers) - len(states))
            workers = [_untouched(state) for state in states]
        origin = None if self._coming is None else self._coming["origin"]
        progress = Progress(order, self.epoch, _is_iterable(loader), workers, streams, origin)
        if self._again is not None:
            progress.resume(self._again)
        self.epoch += 1
        self._progress = progress
        return progress

    def started(self, progress: Progress, base_seed: int, index_batches: Iterator[Any]) -> Iterator[Any]:
        """torch has drawn the base seed and made the sampler's iterator. Returns the rest of the order."""
        progress.base_seed, self._coming = base_seed, None
        if self._again is not None:
            index_batches = progress.order_again(index_batches)
        return index_batches if progress.unordered else progress.watch(index_batches)

    # --- where the loader is

    def place(self, loader: Any) -> tuple[int, Mapping[str, Any]]:
        """(epoch, place in it) of the batch that is handed out next, as far as an epoch has begun.

        That is the epoch which runs, was left early or is to be resumed; else the next one, from its start.
        """
        saved, progress = self._loaded, self._progress
        if saved is not None:
            if not saved["begun"]:
                return saved["epoch"], _BEGINNING
            if Order(loader).epoch != self._loaded_epoch:
                return saved["epoch"] + 1, _BEGINNING
            return saved["epoch"], saved
        if progress is not None and not progress.finished:
            return progress.epoch, progress.place
        return self.epoch, _BEGINNING

    def reads_streams(self, loader: Any) -> bool:
        """Whether the epoch that runs, or the next one, is read as streams."""
        progress = self._progress
        if progress is not None and not progress.finished and self._loaded is None:
            return progress.streams is not None
        return self._streams.expected(loader) or "streams" in (self._loaded or {})

    # --- the state

    def state_dict(self, loader: Any) -> dict[str, Any]:
        order = Order(loader)
        if self._loaded is not None:
            return copy.deepcopy(self._loaded | {"sampler": order.with_changes(self._loaded["sampler"])})
        if self._progress is not None and not self._progress.finished:
            position = self._progress.position()
        else:
            position = self._between(loader, order)
        stateless = all(worker["state"] is None for worker in position["workers"])
        if stateless and not (_is_iterable(loader) and position["batches"]):
            position["workers"] = None
        position["sampler"] = order.with_changes(position["sampler"])
        position["one_seed"] = self._one_seed is not None or _is_persistent(loader)
        position["samples"] = self._contents.identify(loader)
        return copy.deepcopy(_description(loader, order) | position)

    def _settle_coming(self, loader: Any, order: Order, *, base_seed_known: bool) -> dict[str, Any]:
        """What the coming iteration draws from torch's generator: from now on settled, and not drawn yet.

        So the run that goes on and the one that resumes have the same epoch, whatever their scripts draw
        before it begins.
        """
        if self._coming is None:
            drawing, base_seed = torch.default_generator.clone_state(), None
            if not base_seed_known:
                own = loader.generator
                base_seed = draw_seed(drawing if own is None else own.clone_state())
            self._coming = {"base_seed": base_seed, "origin": order.origin(self.epoch, drawing)}
        return self._coming

    def _between(self, loader: Any, order: Order) -> dict[str, Any]:
        """The part of a state that is about the iteration to come."""
        last = self._progress
        base_seed = last.base_seed if last is not None and _is_persistent(loader) else self._one_seed
        coming = None
        if not isinstance(loader.dataset, IterDataPipe):  # which draws one more seed
            coming = self._settle_coming(loader, order, base_seed_known=base_seed is not None)
        kept = last is not None and (loader.num_workers == 0 or _is_persistent(loader))
        return {
            "begun": False,
            "epoch": self.epoch,
            "batches": 0,
            "ahead": [],
            "origin": None,
            "check": 0,
            "next_worker": 0,
            "base_seed": base_seed,  # None: the next iteration draws one
            "coming": coming,
            "generators": order.generators(),
            "sampler": last.place["sampler"] if last is not None else order.sampler_state(),
            "workers": [_untouched(worker["state"]) for worker in last.workers] if kept and last else [],
        }

    def load_state_dict(self, loader: Any, state_dict: Any) -> Mapping[str, Any]:
        """Take up a state. Returns it."""
        order = Order(loader)
        state = check_state(state_dict, "state_dict")
        _check_seeds(state)
        _check(loader, order, state)
        check_identity(loader, self._contents.identify(loader), state)
        order.load_sampler_state(state["sampler"])
        self._loaded = copy.deepcopy(dict(state))
        if isinstance(order.stateful, DistributedSampler):  # with the sources, weights and nodes of this run
            self._loaded["sampler"]["state"] = order.stateful.state_dict()
        self._loaded_epoch = order.epoch
        self._progress = self._one_seed = self._coming = None
        return state


def _untouched(state: Any) -> dict[str, Any]:
    return {"batches": 0, "ended": False, "fresh": True, "state": state}


def _is_persistent(loader: Any) -> bool:
    return bool(loader.persistent_workers and loader.num_workers > 0)


def _is_iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _description(loader: Any, order: Order) -> dict[str, Any]:
    """What has to be alike in the loader that resumes, or is compared in `_check`."""
    iterable = _is_iterable(loader)
    return {
        "version": VERSION,
        "dataset": "iterable" if iterable else "map-style",
        "length": None if iterable else known_length(loader.dataset),
        "samplers": order.kind,
        "sampler_length": None if iterable else known_length(order.index_sampler),
        "num_replicas": order.replicas,
        "batch_size": order.batch_size,
        "num_workers": loader.num_workers,
        "seed": loader.seed,
    }


def _check_seeds(saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless the seeds are such as torch draws: the next iteration hands them to it."""
    coming = None if saved["coming"] is None else saved["coming"]["base_seed"]
    drawn = [seed for seed in (saved["base_seed"], coming) if seed is not None]
    if saved["begun"] and saved["base_seed"] is None:
        raise ValueError("no seed of an epoch that has begun")
    for seed in drawn:
        if type(seed) is not int or not 0 <= seed < 1 << 63:
            raise ValueError(f"the seed {seed!r}")


def _check(loader: Any, order: Order, saved: Mapping[str, Any]) -> None:
    """Raise ArgumentError unless `loader` can go on from `saved`."""
    own = _description(loader, order)
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
        not_indexed = isinstance(loader.sampler, ShardSampler) and None in (saved[name], own[name])
        free = not_indexed or order.mixture is not None  # which compares each source
        if saved[name] != own[name] and not (name == "length" and free):
            since = changes_since(loader, saved) if name == "length" else ""
            raise ArgumentError(
                f"state_dict was saved with {name} {saved[name]!r}, this loader has {own[name]!r}{since}: "
                f"{_ADVICE[name]}"
            )
    sampler = order.stateful
    if saved["ahead"] and isinstance(sampler, DistributedSampler):
        dealt = {"nodes": sampler.place.nodes, "exchange": sampler.exchange}
        before = saved["sampler"]["state"]
        if not before["consumed"] and any(before[name] != value for name, value in dealt.items()):
            raise ArgumentError(
                f"state_dict was saved before the first batch, with later ones handed out, and this sampler "
                f"has {dealt}: {_SAME_ORDER}; resume with the same num_nodes and exchange"
            )
    check_streams(loader, saved.get("streams"))
    if saved["generators"].keys() != order.generators().keys():
        raise ArgumentError(
            f"state_dict has generators of {sorted(saved['generators'])}, this loader was given those of "
            f"{sorted(order.generators())}: pass `generator` in the same places as in the saved run"
        )


_SAME_ORDER = "the order of the samples would differ"
_ADVICE = {
    "dataset": "resume with the dataset of the saved run",
    "length": f"{_SAME_ORDER}; resume with the same dataset",
    "samplers": f"{_SAME_ORDER}; resume with the same shuffle, sampler and batch_sampler",
    "seed": "the samples' randomness would differ; resume with the same seed",
    "batch_size": "resume with the same batch_size, or with fastload.DistributedSampler, which can change it",
    "sampler_length": f"{_SAME_ORDER}; fastload.DistributedSampler can resume with other numbers of ranks",
    "num_replicas": f"{_SAME_ORDER}; fastload.DistributedSampler can resume with other numbers of ranks",
    "num_workers": "its dataset keeps a state in each worker; resume with as many workers",
}


# --- exclusions

NEEDS_INDEX = (
    "needs samples that have an index, and these shards are read as streams: index them first with "
    "`fastload index URL`, or read them once through a cache"
)


def sources_of(dataset: Any) -> dict[str, int]:
    """Return source of a mixture, else "" -> its number of samples."""
    return view_of(dataset).lengths(len(dataset))


def reading_of(
    loader: Any, seed: int, epoch: int, rank: int | None = None, replicas: int | None = None
) -> Reading:
    """Return how a rank reads an epoch; by default the loader's."""
    order, dataset = Order(loader), loader.dataset
    sampler, samples = order.stateful, None
    if isinstance(sampler, DistributedSampler):
        samples = dataset.num_samples if order.mixture is not None else indexed_length(sampler.dataset)
        if rank is not None or replicas is not None:
            own = sampler.rank if rank is None else rank
            sampler = sampler.at(0, 0, rank=own, replicas=replicas or sampler.num_replicas)
    view, length = view_of(dataset), len(dataset)
    return Reading(
        epoch,
        sources_of(dataset),
        functools.partial(view.position, length=length),
        functools.partial(substitutes, dataset, seed, epoch),
        REPLACEMENTS if loader.on_error == "replace" else 0,
        loader.batch_sampler is not None,
        getattr(sampler, "column", order.rank if rank is None else rank),
        replicas or order.replicas or 1,
        samples,
    )


def samples_per_step(loader: Any, replicas: int) -> int:
    """Return the samples of a step over all ranks. 1 where batches have no fixed size, see `Segment`."""
    size = 1 if loader.batch_sampler is None else Order(loader).batch_size
    return size * replicas if isinstance(size, int) else 1


def enter(loader: Any, epoch: int, place: Mapping[str, Any]) -> None:
    """Note how many samples over all ranks a step has from this place of an epoch on."""
    order = Order(loader)
    sampler = place["sampler"] or {}
    known = isinstance(order.stateful, DistributedSampler) and sampler.get("state") and place["batches"]
    loader.loader_context.exclusions.enter(
        epoch,
        place["batches"],
        samples_per_step(loader, order.replicas or 1),
        int(sampler["state"]["consumed"]) if known else None,
    )


def filter_of(loader: Any, progress: Progress, seed: int) -> Filter | None:
    """Return what is left out of an iteration that begins; None where its samples have no index.

    Raises:
        ArgumentError: something is left out, and the samples of this epoch have no index.
    """
    exclusions, epoch, step = loader.loader_context.exclusions, progress.epoch, progress.batches
    if not progress.unordered:
        exclusions.leave(epoch)
        enter(loader, epoch, progress.place)
        return Filter(exclusions, reading_of(loader, seed, epoch), step)
    if exclusions.samples_at(epoch, step) or exclusions.epoch(epoch).skipped:
        raise ArgumentError(f"samples are excluded or steps are skipped, which {NEEDS_INDEX}")
    return None
