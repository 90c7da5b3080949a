"""Where a loader is in its data, as a small dict, and how it goes on from there.

A state is a position: the epoch, what its order is made from, and how many batches were delivered. To resume
is to make the order again and to pass over those batches without reading their data.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import pickle
import warnings
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, IterDataPipe

from fastload.datasets.wrappers import substitutes, view_of
from fastload.errors import ArgumentError
from fastload.images.rng import digest
from fastload.loader.stream_epoch import StreamAgreement, check_streams
from fastload.order.budget_sampler import BudgetSampler
from fastload.order.exclusions import Filter, Reading
from fastload.order.order import EpochOrder, segments_of
from fastload.order.position import Position, continued
from fastload.order.sampler import known_length
from fastload.order.samplers import Origin, Samplers, SamplerState, draw_seed
from fastload.order.shard_sampler import ShardSampler
from fastload.order.state import VERSION, Coming, Identity, State, WorkerState
from fastload.trace.digest import find_part
from fastload.trace.identity import Contents, changes_since, check_identity
from fastload.trace.recipe import describe
from fastload.workers.reading import REPLACEMENTS
from fastload.workers.streams import load_dataset

_NEAREST = 64  # samples of which a substitute is chosen by chance


class Place(NamedTuple):
    """The batch that is delivered next.

    Attributes:
        epoch: that runs, was left early or is to be resumed; else the next one.
        batches, ahead, sampler: as in `Position`. `sampler` is None at the start of an epoch.
        order: from here on, of an epoch that is to be resumed; else None.
    """

    epoch: int
    batches: int = 0
    ahead: tuple[int, ...] = ()
    sampler: SamplerState | None = None
    order: EpochOrder | None = None


@dataclass(frozen=True)
class IterationStart:
    """How an iteration begins, as far as that is settled before torch draws anything.

    Attributes:
        resumed: the state of the epoch that goes on; None: it begins.
        workers: where each worker takes up the dataset; None where nothing is resumed.
        base_seed: of the workers; None: torch draws it.
        drawn: the run that was saved has drawn it, so that what torch draws is undone.
        origin: of the order, where a state has settled it.
    """

    resumed: State | None = None
    workers: list[WorkerState] | None = None
    base_seed: int | None = None
    drawn: bool = False
    origin: Origin | None = None

    @property
    def order_was_undone(self) -> bool:
        """Return whether the draws of `iter(sampler)` were undone too, so that it has to be called again."""
        return self.drawn and self.resumed is None

    @contextlib.contextmanager
    def seeding(self, loader: Any) -> Iterator[None]:
        """Stand around the constructor of torch's iterator, which draws the base seed."""
        samplers = Samplers.of(loader)
        # Ranks share the seed of a data pipe, and NCCL sends it from a device only.
        piped = isinstance(loader.dataset, IterDataPipe)
        on_host = contextlib.nullcontext() if piped else samplers.seeding()
        generators = samplers.generators() if self.drawn else {}
        with on_host, torch.random.fork_rng(devices=[], enabled=self.drawn):
            yield
        samplers.write_generators(generators)
        if piped and self.order_was_undone and loader.num_workers == 0:  # with workers, `_reset` draws it
            draw_seed(torch.default_generator if loader.generator is None else loader.generator)


class LoaderPosition:
    """The position of one loader, over all its iterations.

    Attributes:
        epoch: of the next iteration.
        start: of the iteration that starts, while it does.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.start = IterationStart()
        self._position: Position | None = None  # of the iteration that began last
        self._loaded: State | None = None  # waits for the next iteration
        self._loaded_epoch: int | None = None  # of the sampler, right after it was loaded
        self._streams = StreamAgreement()
        self._contents: Contents | None = None  # of this epoch, once a state is asked for
        # With persistent workers a run draws one base seed for all its epochs, as torch's does. One that
        # resumes it keeps that seed, with or without such workers, or its samples would be others.
        self._one_seed: int | None = None
        self._coming: Coming | None = None  # what the next iteration draws, once a state has said so

    def replay(self, epoch: int, base_seed: int) -> None:
        """Let the next iteration have the samples' randomness of that epoch."""
        self.epoch, self._one_seed = epoch, base_seed

    # --- called when an iteration starts

    @contextlib.contextmanager
    def starting(self, loader: Any) -> Iterator[IterationStart]:
        """Stand around `iter(loader)`: give what it begins with, as `start` too."""
        samplers, saved = Samplers.of(loader), self._loaded
        before = None if saved is None else samplers.state()
        self._loaded = None
        try:
            self.start = self._taken_up(loader, saved)
            yield self.start
        except BaseException:
            self._loaded = saved
            if before is not None:  # whoever tries again draws what was drawn meanwhile
                self._position = None
                samplers.load(before)
            raise
        finally:
            self.start = IterationStart()

    def _taken_up(self, loader: Any, saved: State | None) -> IterationStart:
        samplers, resumed, workers = Samplers.of(loader), None, None
        if saved is not None and self._is_dropped(samplers, saved):
            if saved.streams is not None:
                warnings.warn(
                    f"set_epoch({samplers.epoch}) drops the position that was loaded, {saved.batches} "
                    f"batches into epoch {self._loaded_epoch}: call set_epoch({self._loaded_epoch}) to "
                    "resume there",
                    stacklevel=6,
                )
            self.epoch = saved.epoch + 1  # which starts from its beginning
        elif saved is not None:
            self.epoch = saved.epoch
            self._one_seed = saved.base_seed if saved.one_seed else None
            workers = self._workers_of(loader, saved)
            if saved.begun:
                resumed = saved
            else:
                self._coming = saved.coming
                samplers.write_generators(saved.generators)
        coming = self._coming if resumed is None else resumed.coming
        seeds = [None if resumed is None else resumed.base_seed, self._one_seed]
        seeds += [None if coming is None else coming.base_seed]
        base_seed = next((seed for seed in seeds if seed is not None), None)
        drawn = resumed is not None or self._one_seed is not None
        return IterationStart(resumed, workers, base_seed, drawn, None if coming is None else coming.origin)

    def _is_dropped(self, samplers: Samplers, saved: State) -> bool:
        """Return whether `set_epoch` has named another epoch since the middle of one was loaded."""
        return saved.begun and samplers.epoch != self._loaded_epoch

    def _workers_of(self, loader: Any, saved: State) -> list[WorkerState] | None:
        """Return where each worker takes up the dataset; without workers, that is done."""
        workers, count = copy.deepcopy(saved.workers), max(1, loader.num_workers)
        if workers is None:
            return None
        if len(workers) != count:
            workers = [copy.deepcopy(workers[0]) for _ in range(count)]  # they are alike, see `_check`
        if loader.num_workers == 0:
            load_dataset(loader.dataset, workers[0])
        return workers

    def begin(self, loader: Any, previous: Position | None = None) -> Position:
        """Return the position of the iteration that starts, just before `iter(sampler)`.

        Args:
            previous: of the iteration that the same workers did before.
        """
        samplers, start = Samplers.of(loader), self.start
        samplers.start_epoch()
        self._contents = None
        streamed = view_of(loader.dataset).streams()
        streams = None if streamed is None else self._streams.begin(loader, streamed, start.resumed)
        workers = copy.deepcopy(start.workers)
        if workers is None:
            states = [worker.state for worker in previous.workers] if previous is not None else []
            states += [None] * (max(1, loader.num_workers) - len(states))
            workers = [WorkerState(0, False, True, state) for state in states]
        position = Position(
            samplers,
            self.epoch,
            _is_iterable(loader),
            workers,
            loader._context.counters,
            streams,
            start.origin,
            start.resumed,
            seeded_late=loader.num_workers == 0,
        )
        self.epoch += 1
        self._position = position
        return position

    def started(self, position: Position, base_seed: int, made: Iterator[Any]) -> Iterator[Any]:
        """Return the index batches, where torch has drawn the base seed and made the sampler's iterator."""
        self._coming = None
        return position.begin(base_seed, made)

    # --- where the loader is

    def place(self, loader: Any) -> Place:
        """Return the batch that is delivered next, as far as an epoch has begun."""
        saved, position = self._loaded, self._position
        if saved is not None:
            samplers = Samplers.of(loader)
            if not saved.begun:
                return Place(saved.epoch)
            if self._is_dropped(samplers, saved):
                return Place(saved.epoch + 1)
            order = EpochOrder.begun(
                samplers, saved.epoch, saved.batches, saved.sampler, base_seed=saved.base_seed
            )
            return Place(saved.epoch, saved.batches, tuple(saved.ahead), saved.sampler, order)
        if position is not None and not position.finished:
            return Place(position.epoch, position.batches, tuple(position.ahead), position.sampler)
        return Place(self.epoch)

    def reads_streams(self, loader: Any) -> bool:
        """Return whether the epoch that runs, or the next one, is read as streams."""
        position = self._position
        if position is not None and not position.finished and self._loaded is None:
            return position.streams is not None
        loaded = self._loaded is not None and self._loaded.streams is not None
        return loaded or self._streams.expected(loader)

    # --- the state

    def state(self, loader: Any) -> State:
        """Return the state, without what is not about the position."""
        samplers, saved = Samplers.of(loader), self._loaded
        if saved is not None and not self._is_dropped(samplers, saved):
            sampler = saved.sampler if samplers.epoch == self._loaded_epoch else samplers.state()
            return replace(saved, sampler=samplers.with_changes(sampler))
        state = _description(loader, samplers)
        if self._position is not None and not self._position.finished:
            self._position.write(state)
        else:
            state.epoch = self.epoch if saved is None else saved.epoch + 1
            self._write_between(loader, samplers, state)
        stateless = all(worker.state is None for worker in state.workers or [])
        if stateless and not (_is_iterable(loader) and state.batches):
            state.workers = None
        state.sampler = samplers.with_changes(state.sampler)
        state.one_seed = self._one_seed is not None or is_persistent(loader)
        state.samples = self._identify(loader)
        state.recipe = describe(loader)
        return state

    def _write_between(self, loader: Any, samplers: Samplers, state: State) -> None:
        """Write into a state what is about the iteration to come."""
        last, persistent = self._position, is_persistent(loader)
        state.base_seed = last.base_seed if last is not None and persistent else self._one_seed
        if not isinstance(loader.dataset, IterDataPipe):  # which draws one more seed
            if self._coming is None:
                self._coming = self._draw_ahead(loader, samplers, state)
            state.coming = self._coming
        if last is not None:
            if samplers.epoch == last.sampler.epoch:  # else set_epoch was called since
                state.sampler = last.sampler
            if loader.num_workers == 0 or persistent:
                state.workers = [WorkerState(0, False, True, worker.state) for worker in last.workers]

    def _draw_ahead(self, loader: Any, samplers: Samplers, state: State) -> Coming:
        """Return what the coming iteration draws from torch's generator: settled now, and not drawn yet.

        So the run that goes on and the one that resumes have the same epoch, whatever their scripts draw
        before it begins.
        """
        drawing, base_seed = torch.default_generator.clone_state(), None
        if state.base_seed is None:
            own = loader.generator
            base_seed = draw_seed(drawing if own is None else own.clone_state())
        return Coming(base_seed, samplers.origin(state.epoch, drawing))

    def _identify(self, loader: Any) -> Identity:
        if self._contents is None:
            self._contents = Contents()
        return self._contents.identify(loader)

    def load(self, loader: Any, state: State) -> None:
        """Take up a state.

        Raises:
            ArgumentError: this loader cannot go on from it.
        """
        samplers = Samplers.of(loader)
        _check(loader, samplers, state)
        _check_rank(loader, samplers, state)
        check_identity(loader, self._identify(loader), state)
        samplers.load(state.sampler)
        if samplers.dealer is not None:
            # With the sources, weights and nodes of this run.
            own = samplers.dealer.state_dict()
            state = replace(state, sampler=replace(state.sampler, state=own))
        self._loaded, self._loaded_epoch = state, samplers.epoch
        self._position = self._one_seed = self._coming = None


def is_persistent(loader: Any) -> bool:
    """Return whether its workers stay between its epochs, so that they keep their seed."""
    return bool(loader.persistent_workers and loader.num_workers > 0)


def _is_iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _description(loader: Any, samplers: Samplers) -> State:
    """Return a state with what has to be alike in the loader that resumes, or is compared in `_check`."""
    iterable = _is_iterable(loader)
    return State(
        version=VERSION,
        dataset="iterable" if iterable else "map-style",
        length=None if iterable else known_length(loader.dataset),
        samplers=samplers.names,
        sampler_length=None if iterable else known_length(samplers.index_sampler),
        num_replicas=samplers.replicas,
        batch_size=samplers.batch_size,
        num_workers=loader.num_workers,
        seed=loader.seed,
        sampler=samplers.state(),
        generators=samplers.generators(),
        digest=loader._context.digest.state(),
    )


def _check(loader: Any, samplers: Samplers, saved: State) -> None:
    """Raise ArgumentError unless `loader` can go on from `saved`."""
    own = _description(loader, samplers)
    names = ["dataset", "length", "samplers", "seed"]
    workers = saved.workers or []
    if own.dataset == "map-style":
        if saved.begun and (saved.ahead or not samplers.tracks_state):
            names += ["batch_size", "sampler_length", "num_replicas"]
            own.sampler_length = samplers.length_in(saved.sampler.epoch)
            if isinstance(samplers.index_sampler, BudgetSampler):  # its state has all that makes its length
                names.remove("sampler_length")
    elif any(worker.state is None and worker.batches for worker in workers):
        names += ["batch_size"]
    # As bytes, since users' states may hold tensors, which have no single answer to `==`.
    alike = len({pickle.dumps(worker.state) for worker in workers}) == 1
    if workers and not (alike and own.dataset == "map-style"):
        names += ["num_workers"]
    for name in names:
        before, now = getattr(saved, name), getattr(own, name)
        not_indexed = isinstance(loader.sampler, ShardSampler) and None in (before, now)
        free = not_indexed or not (samplers.dealer is None or samplers.dealer._by_epoch)
        if before != now and not (name == "length" and free):
            since = changes_since(loader, saved) if name == "length" else ""
            raise ArgumentError(
                f"state_dict was saved with {name} {before!r}, this loader has {now!r}{since}: "
                f"{_ADVICE[name]}"
            )
    if saved.ahead and samplers.dealer is not None:
        before, now = samplers.dealer._deal(saved.sampler.state), samplers.dealer._deal()
        if before is not None and now is not None and not before.consumed and before != now:
            raise ArgumentError(
                f"state_dict was saved before the first batch, with later ones delivered, and this sampler "
                f"has num_nodes={now.nodes} and exchange={now.exchange}: {_SAME_ORDER}; resume with the same "
                "num_nodes and exchange"
            )
    check_streams(loader, saved.streams)
    if saved.generators.keys() != own.generators.keys():
        raise ArgumentError(
            f"state_dict has generators of {sorted(saved.generators)}, this loader was given those of "
            f"{sorted(own.generators)}: pass `generator` in the same places as in the saved run"
        )


def _check_rank(loader: Any, samplers: Samplers, saved: State) -> None:
    """Raise ArgumentError for a state of another rank, where each rank draws an order of its own."""
    rank, _ = find_part(loader)
    known = saved.begun or saved.digest.steps  # before that no digest has its rank
    if known and rank != saved.digest.rank and samplers.drawn and samplers.replicas is None:
        raise ArgumentError(
            f"state_dict was saved on rank {saved.digest.rank}, this is rank {rank}, and each rank draws an "
            f"order of its own from its {samplers.names[-1]}, so both would read the same samples: let each "
            "rank load the state that it saved; with a fastload.DistributedSampler, or with seed= and no "
            "generator, one state serves all ranks"
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
    loader: Any,
    seed: int,
    epoch: int,
    orders: list[EpochOrder],
    rank: int | None = None,
    replicas: int | None = None,
) -> Reading:
    """Return how a rank reads an epoch; by default the loader's."""
    samplers, dataset = Samplers.of(loader), loader.dataset
    sampler, column = samplers.dealer, samplers.rank if rank is None else rank
    if sampler is not None:
        own, ranks = sampler.rank if rank is None else rank, replicas or sampler.num_replicas
        number = next((order.sampler.epoch for order in orders), None)
        sampler = sampler._at(sampler.epoch if number is None else number, 0, rank=own, replicas=ranks)
        column = sampler._column
    budgeted = sampler if isinstance(sampler, BudgetSampler) else None
    return Reading(
        epoch,
        functools.partial(sources_of, dataset),
        lambda index: view_of(dataset).position(index, len(dataset)),
        functools.partial(substitutes, dataset, seed, epoch),
        None if budgeted is None else functools.partial(_substitute_of_size, budgeted, seed, epoch),
        REPLACEMENTS if loader.on_error == "replace" else 0,
        loader.batch_sampler is not None,
        column,
        0 if budgeted is not None else replicas or samplers.replicas or 1,
        None if sampler is None else sampler._length(),
        segments_of(orders),
    )


def _substitute_of_size(
    sampler: BudgetSampler, seed: int, epoch: int, index: int, excluded: Container[int]
) -> int:
    """Return the sample that stands in the place of an excluded one, so that its batch keeps to the budget.

    It is a function of (seed, epoch, index), and of `excluded` only in that those samples are passed over.

    Raises:
        ArgumentError: all samples that are no larger are excluded.
    """
    smaller = sampler._similar(index)
    nearest = smaller[-_NEAREST:]
    choices = (nearest[digest(seed, epoch, index, attempt) % len(nearest)] for attempt in range(_NEAREST))
    for other in itertools.chain(choices, reversed(smaller)):
        if other not in excluded:
            return int(other)
    raise ArgumentError(
        f"sample {index} is excluded, and so are all others of its bucket up to its size of "
        f"{sampler.sizes[index]}, so that none can stand in: make the sampler without them"
    )


def orders_at(loader: Any, place: Place) -> list[EpochOrder]:
    """Return the orders of an epoch that has begun or is resumed, with the one from this place on."""
    if place.sampler is None:
        return []
    orders: list[EpochOrder] = loader._context.history.find(place.epoch)
    if place.order is None:
        return orders
    return continued(orders, place.order)  # others may go on than those so far


def filter_of(loader: Any, position: Position, seed: int) -> Filter | None:
    """Return what is left out of an iteration that begins; None where its samples have no index.

    Raises:
        ArgumentError: something is left out, and the samples of this epoch have no index.
    """
    context, epoch = loader._context, position.epoch
    if not position.unordered:
        reading = reading_of(loader, seed, epoch, context.history.find(epoch))
        return Filter(context.exclusions, reading, position.batches)
    if context.exclusions.samples_at(epoch, position.batches) or context.exclusions.skipped(epoch):
        raise ArgumentError(f"samples are excluded or steps are skipped, which {NEEDS_INDEX}")
    return None
