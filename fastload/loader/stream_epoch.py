"""Epochs of a dataset that is not indexed yet: they are read as streams, each by one process.

    trainer                                              worker, or the trainer itself
    StreamEpoch.work(stream) ── TakeNext(stream, n) ──▶  StreamReader.take: ids of the next n samples
                                                         BatchMaker(ids): as for any other batch
    StreamEpoch.delivered   ◀── batch, state after it ──
         │ equal steps on all ranks: Ranks

An epoch has as many streams as there are workers at its start, and their batches are delivered in turn. A
state holds the streams, so the order of the samples stays the same with another number of workers.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from typing import Any

from fastload.datasets.views import StreamDataset
from fastload.datasets.wrappers import view_of
from fastload.distributed.agreement import Ranks
from fastload.distributed.launcher import can_agree
from fastload.errors import ArgumentError, WorkerError
from fastload.order.sampler import indexed_length
from fastload.order.shard_sampler import ShardSampler
from fastload.order.state import State, StreamState
from fastload.workers.streams import TakeNext

_Plan = list[dict[str, Any]]
_ATTEMPTS = 5  # an index comes in when a shard was read to its end: seldom while an epoch begins


class StreamAgreement:
    """How a loader's epochs are read: as streams, until all ranks have indexed the dataset."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._indexed = False  # on all ranks, and for ever

    def expected(self, loader: Any) -> bool:
        """Return whether an epoch that begins now would be read as streams, as far as this rank knows."""
        dataset = view_of(loader.dataset).streams()
        if dataset is None or self._indexed or not isinstance(loader.sampler, ShardSampler):
            return False
        return dataset.must_stream()

    def begin(self, loader: Any, dataset: StreamDataset, resumed: State | None) -> StreamEpoch | None:
        """Return the coming epoch as streams; None where it is read by index, as of any map-style dataset.

        Args:
            loader: with its sampler already in that epoch.
            dataset: which its view reads as streams.
            resumed: the loader's state, if that epoch is resumed.

        Raises:
            ArgumentError: the ranks' loaders are not alike, or the epoch cannot be read like that.
        """
        sampler, saved = loader.sampler, None if resumed is None else resumed.streams
        if not isinstance(sampler, ShardSampler):
            indexed_length(dataset)  # its `len()` may be a hint, by which torch's samplers give indices
            return None
        if self._indexed and saved is None:
            return None
        count = saved.count if saved is not None else max(1, loader.num_workers)
        if sampler.num_replicas == 1:
            streamed = saved is not None or dataset.must_stream()
            plan = _plan(dataset, sampler, count) if streamed and saved is None else []
        else:
            streamed, plan = self._agree(dataset, sampler, count, saved)
        if not streamed:
            self._indexed = True
            return None
        sampler._check_streamable(over=resumed is not None and saved is None and resumed.sampler.over)
        return StreamEpoch(dataset, sampler, loader.batch_size or 1, plan, self._ranks, saved)

    def _agree(
        self, dataset: StreamDataset, sampler: ShardSampler, count: int, saved: StreamState | None
    ) -> tuple[bool, _Plan]:
        """Return (whether to stream, this rank's streams): alike on all ranks, with disjoint streams."""
        for _ in range(_ATTEMPTS):
            known = self._compare(dataset, sampler, count, saved)
            if known is None:
                return False, []
            if saved is not None:
                return True, []
            count = known
            # Another process of this node may index a shard at any time, and the plan made then differs.
            before = _shared(dataset, sampler)
            plan = _plan(dataset, sampler, count)
            shared = _shared(dataset, sampler)
            assert self._ranks is not None
            answers = self._ranks.all_gather([dataset.must_stream(), shared if shared == before else None])
            if not any(must for must, _ in answers):
                return False, []
            if all(other == shared for _, other in answers):
                return True, plan
        raise WorkerError("the ranks do not agree on the streams of this epoch", stage="ranks")

    def _compare(
        self, dataset: StreamDataset, sampler: ShardSampler, count: int, saved: StreamState | None
    ) -> int | None:
        """Share the indexes of all ranks. Returns how many streams a rank has; None: no streams."""
        must = saved is not None or dataset.must_stream()
        if not must and not can_agree():
            return None  # the dataset was indexed from the start, it seems: there is nothing to agree on
        if self._ranks is None:
            self._ranks = Ranks(sampler.rank, sampler.num_replicas)
        tables = dataset.known_indexes()
        alike = {
            "epoch": sampler.epoch,
            "seed": sampler.seed,
            "shuffle": sampler.shuffle,
            "mode": sampler.mode,
            "resumed": saved is not None,
            # In mode "eval" some ranks have more batches than others.
            "batches": saved.batches if saved is not None and sampler.mode == "train" else 0,
        }
        summaries = self._ranks.begin_epoch(alike | {"must": must, "count": count, "known": sorted(tables)})
        for rank, summary in enumerate(summaries):
            for name, value in alike.items():
                if summary[name] != value:
                    raise ArgumentError(
                        f"the ranks do not begin the same epoch: {name} is {summary[name]!r} on rank {rank} "
                        f"and {value!r} on rank {sampler.rank}; make their loaders alike, call set_epoch() "
                        "and load_state_dict() on all of them, and iterate equally often"
                    )
        if not any(summary["must"] for summary in summaries):
            return None
        if saved is None:
            known = [set(summary["known"]) for summary in summaries]
            learned = self._ranks.exchange(tables, known)
            if learned:
                dataset.learn_indexes(learned)
        streams: int = max(summary["count"] for summary in summaries)
        return streams


def _plan(dataset: StreamDataset, sampler: ShardSampler, count: int, rank: int | None = None) -> _Plan:
    """Return the streams of a rank; None: of this one."""
    return dataset.plan_streams(
        count,
        seed=sampler.seed,
        epoch=sampler.epoch,
        shuffle=sampler.shuffle,
        rank=sampler.rank if rank is None else rank,
        ranks=sampler.num_replicas,
    )


def _shared(dataset: StreamDataset, sampler: ShardSampler) -> str:
    """Return a digest of the parts that the plans of all ranks must share."""
    plan = dataset.plan_streams(
        1, seed=sampler.seed, epoch=sampler.epoch, shuffle=sampler.shuffle, rank=0, ranks=1
    )
    return hashlib.blake2b(json.dumps(plan, sort_keys=True).encode(), digest_size=8).hexdigest()


class StreamEpoch:
    """One epoch.

    Batches are delivered from the live streams in turn. In mode "train" all ranks do equally many steps: a
    rank whose streams are over begins another lap, which repeats its streams, or those of the next rank if
    its own are empty. Laps end when every rank has finished its own streams.

    Args:
        dataset, sampler: of the loader.
        size: samples per batch.
        plan: this rank's streams, where none are resumed.
        ranks: None where there is one.
        saved: `state()` of the epoch that is resumed.

    Attributes:
        live: the streams that are not over, as far as is known here; the next one to deliver comes first.
        lap: 0 while this rank's own samples are read for the first time.
    """

    def __init__(
        self,
        dataset: StreamDataset,
        sampler: ShardSampler,
        size: int,
        plan: _Plan,
        ranks: Ranks | None,
        saved: StreamState | None = None,
    ) -> None:
        self._dataset = dataset
        self._sampler = sampler
        self._size = size
        self._ranks = ranks if sampler.mode == "train" else None
        self.batches = 0  # delivered
        self.lap = 0
        self._source = sampler.rank  # whose streams they are
        self._in_lap = 0  # batches
        self._empty = 0  # laps without a batch, the last ones
        if saved is None:
            self._first, self._count = plan, len(plan)
            self._put(list(enumerate(plan)))
            return
        self.batches, self.lap = saved.batches, saved.lap
        self._source, self._in_lap, self._empty = saved.source, saved.in_lap, saved.empty
        self._first, self._count = saved.first, saved.count
        self._put(saved.streams)
        if self._ranks is not None and self.lap:
            self._ranks.publish_total(self.batches)  # or fewer: nobody asks about those any more

    def _put(self, streams: Any) -> None:
        self._states: dict[int, dict[str, Any]] = dict(streams)
        self.live = deque(self._states)
        self._unopened = set(self._states)

    def work(self, stream: int) -> TakeNext:
        """Return the next batch of a stream, for the process that reads it: always the same one."""
        self._sampler._note_begun()
        start = self._states[stream] if stream in self._unopened else None
        self._unopened.discard(stream)
        return TakeNext(stream, self._size, start)

    def goes_on(self, ready: int) -> bool:
        """Return whether one more batch is to be delivered. Where that needs a lap, `live` is full again.

        Args:
            ready: how many batches of this lap are at hand; 0: all its streams are over.
        """
        if self._ranks is None:
            return ready > 0
        if self.lap == 0:
            if ready:
                self._ranks.publish_progress(self.batches + ready)
                return True
            self._ranks.publish_total(self.batches)
        if not self._ranks.any_has_more(self.batches):
            return False
        if not ready:
            self._next_lap(self._ranks.ranks)
        return True

    def _next_lap(self, ranks: int) -> None:
        self._empty = 0 if self._in_lap else self._empty + 1
        if self._empty > ranks:
            raise WorkerError("no rank has a batch to repeat, although one had batches before", stage="ranks")
        if self._empty:
            self._source = (self._source + 1) % ranks
        self.lap, self._in_lap = self.lap + 1, 0
        # A new plan could differ, now that more shards are indexed.
        plan = self._first
        if self._source != self._sampler.rank:
            plan = _plan(self._dataset, self._sampler, self._count, self._source)
        self._put(list(enumerate(plan)))

    def delivered(self, stream: int, state: dict[str, Any] | None) -> None:
        """Note that a batch of a stream reached the user, or an error in its place (`state` is None)."""
        self.batches += 1
        self._in_lap += 1
        if state is not None:
            self._states[stream] = state
        self.live.remove(stream)
        self.live.append(stream)

    def lost(self, stream: int) -> None:
        """Note that the process that read a stream has closed it: its next work opens it again."""
        self._unopened.add(stream)

    def ended(self, stream: int) -> None:
        """Note that a stream is over."""
        self.live.remove(stream)

    def state(self) -> StreamState:
        """Return the positions of all streams after the last delivered batch."""
        return StreamState(
            rank=self._sampler.rank,
            ranks=self._sampler.num_replicas,
            count=self._count,
            batches=self.batches,
            lap=self.lap,
            source=self._source,
            in_lap=self._in_lap,
            empty=self._empty,
            first=self._first if self._ranks is not None else [],
            streams=[(stream, self._states[stream]) for stream in self.live],
        )


def check_streams(loader: Any, saved: StreamState | None) -> None:
    """Raise ArgumentError unless `loader` can take up these streams."""
    if saved is None:
        return
    sampler = loader.sampler
    if not isinstance(sampler, ShardSampler) or view_of(loader.dataset).streams() is None:
        raise ArgumentError(
            "state_dict was saved in the middle of an epoch that was read as streams: resume with the same "
            "dataset and with the loader's own sampler or a fastload.ShardSampler"
        )
    own = {"ranks": sampler.num_replicas, "rank": sampler.rank}
    for name, value in own.items():
        if getattr(saved, name) != value:
            raise ArgumentError(
                f"state_dict was saved with {name} {getattr(saved, name)!r} in the middle of an epoch "
                f"that was read as streams, this sampler has {value!r}: let each rank load the state that it "
                "saved, with the same number of ranks, or resume from a state at the end of an epoch"
            )
