"""An epoch that is read as streams, in the trainer: which streams live, where each is, when it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from fastload.errors import ArgumentError, WorkerError
from fastload.rows import StreamDataset, as_streams
from fastload.sampler import ShardSampler
from fastload.streams.ranks import Ranks, can_meet
from fastload.streams.reader import TakeNext

__all__ = ["StreamEpoch", "Streams", "check_streams"]


class Streams:
    """How a loader's epochs are read: as streams until all ranks know where the samples are."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._numbered = False  # on all ranks, and for ever

    def begin(self, loader: Any, saved: Mapping[str, Any] | None) -> StreamEpoch | None:
        """The coming epoch as streams, or None where it goes by number like that of any map-style dataset.

        Args:
            loader: with its sampler already in that epoch.
            saved: what `StreamEpoch.state()` was, if that epoch is resumed.

        Raises:
            ArgumentError: the ranks' loaders are not alike, or the epoch cannot be read like that.
        """
        sampler, dataset = loader.sampler, as_streams(loader.dataset)
        if dataset is None or not isinstance(sampler, ShardSampler) or (self._numbered and saved is None):
            return None
        count = saved["count"] if saved is not None else max(1, loader.num_workers)
        if sampler.num_replicas == 1:
            streamed = saved is not None or dataset.must_stream()
        else:
            streamed, count = self._meet(dataset, sampler, count, saved)
        if not streamed:
            self._numbered = True
            return None
        sampler.check_streamable()
        return StreamEpoch(dataset, sampler, loader.batch_size or 1, count, self._ranks, saved)

    def _meet(
        self, dataset: StreamDataset, sampler: ShardSampler, count: int, saved: Mapping[str, Any] | None
    ) -> tuple[bool, int]:
        """(whether to stream, the number of streams), after the ranks have told each other what they know."""
        must = saved is not None or dataset.must_stream()
        if not must and not can_meet():
            return False, count  # numbered without learning, as it seems: there is nothing to agree on
        if self._ranks is None:
            self._ranks = Ranks(sampler.rank, sampler.num_replicas)
        tables = dataset.known_places()
        alike = {
            "epoch": sampler.epoch,
            "seed": sampler.seed,
            "shuffle": sampler.shuffle,
            "mode": sampler.mode,
            "resumed": saved is not None,
            # In "eval" some ranks have more than others.
            "batches": saved["batches"] if saved is not None and sampler.mode == "train" else 0,
        }
        summaries = self._ranks.meet(alike | {"must": must, "count": count, "known": sorted(tables)})
        for rank, summary in enumerate(summaries):
            for name, value in alike.items():
                if summary[name] != value:
                    raise ArgumentError(
                        f"the ranks do not begin the same epoch: {name} is {summary[name]!r} on rank {rank} "
                        f"and {value!r} on rank {sampler.rank}; make their loaders alike, call set_epoch() "
                        "and load_state_dict() on all of them, and iterate equally often"
                    )
        count = max(summary["count"] for summary in summaries)
        if not any(summary["must"] for summary in summaries):
            return False, count
        known = [set(summary["known"]) for summary in summaries]
        if saved is None and any(shards != known[0] for shards in known):
            learned = self._ranks.exchange(tables, known)
            if learned:
                dataset.learn_places(learned)
            return self._ranks.meet_again(dataset.must_stream()), count
        return True, count


class StreamEpoch:
    """One epoch.

    Batches are handed out from the live streams in turn. Where all ranks have to do equally many steps (mode
    "train"), a rank whose streams are over begins another lap: its streams from their start, and if these are
    empty those of the next rank, until every rank is through its own.

    Args:
        dataset, sampler: of the loader.
        size: samples per batch.
        count: how many streams this rank has.
        ranks: None where there is one.
        saved: `state()` of the epoch that is resumed.

    Attributes:
        live: the streams that are not over, as far as is known here, in the order in which they are handed
            out next.
        lap: 0 while they are this rank's own samples.
    """

    def __init__(
        self,
        dataset: StreamDataset,
        sampler: ShardSampler,
        size: int,
        count: int,
        ranks: Ranks | None,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self._dataset = dataset
        self._sampler = sampler
        self._size = size
        self._count = count
        self._ranks = ranks if sampler.mode == "train" else None
        self.batches = 0  # handed out
        self.lap = 0
        self._source = sampler.rank  # whose streams they are
        self._in_lap = 0  # batches
        self._empty = 0  # laps without a batch, the last ones
        if saved is None:
            self._plan()
            return
        self.batches, self.lap = saved["batches"], saved["lap"]
        self._source, self._in_lap, self._empty = saved["source"], saved["in_lap"], saved["empty"]
        self._put(saved["streams"])
        if self._ranks is not None and self.lap:
            self._ranks.ended(self.batches)  # or fewer: nobody asks about those any more

    def _plan(self) -> None:
        sampler = self._sampler
        states = self._dataset.plan_streams(
            self._count,
            seed=sampler.seed,
            epoch=sampler.epoch,
            shuffle=sampler.shuffle,
            rank=self._source,
            ranks=sampler.num_replicas,
        )
        self._put(list(enumerate(states)))

    def _put(self, streams: Any) -> None:
        self._states: dict[int, dict[str, Any]] = dict(streams)
        self.live = deque(self._states)
        self._unopened = set(self._states)

    def work(self, stream: int) -> TakeNext:
        """The next batch of a stream, for the process that reads it: always the same one, in this order."""
        self._sampler.begin()
        start = self._states[stream] if stream in self._unopened else None
        self._unopened.discard(stream)
        return TakeNext(stream, self._size, start)

    def goes_on(self, ready: int) -> bool:
        """Whether one more batch is to be handed out. Where that needs another lap, `live` is full again.

        Args:
            ready: how many batches of this lap are at hand; 0: all its streams are over.
        """
        if self._ranks is None:
            return ready > 0
        if self.lap == 0:
            if ready:
                self._ranks.have(self.batches + ready)
                return True
            self._ranks.ended(self.batches)
        if not self._ranks.any_beyond(self.batches):
            return False
        if not ready:
            self._next_lap(self._ranks.ranks)
        return True

    def _next_lap(self, ranks: int) -> None:
        self._empty = 0 if self._in_lap else self._empty + 1
        if self._empty > ranks:
            raise WorkerError("no rank's streams give a batch to repeat, and yet one did", stage="ranks")
        if self._empty:
            self._source = (self._source + 1) % ranks
        self.lap, self._in_lap = self.lap + 1, 0
        self._plan()

    def handed_out(self, stream: int, state: dict[str, Any] | None) -> None:
        """A batch of a stream reached the user, or an error in its place (state None: the stream's own)."""
        self.batches += 1
        self._in_lap += 1
        if state is not None:
            self._states[stream] = state
        self.live.remove(stream)
        self.live.append(stream)

    def lost(self, stream: int) -> None:
        """The process that read a stream has let go of it: its next work opens it again."""
        self._unopened.add(stream)

    def ended(self, stream: int) -> None:
        """A stream is over."""
        self.live.remove(stream)

    def state(self) -> dict[str, Any]:
        """Where all streams are after what was handed out. JSON."""
        return {
            "rank": self._sampler.rank,
            "ranks": self._sampler.num_replicas,
            "count": self._count,
            "batches": self.batches,
            "lap": self.lap,
            "source": self._source,
            "in_lap": self._in_lap,
            "empty": self._empty,
            "streams": [[stream, self._states[stream]] for stream in self.live],
        }


def check_streams(loader: Any, saved: Mapping[str, Any] | None) -> None:
    """Raise ArgumentError unless `loader` can take up these streams."""
    if saved is None:
        return
    sampler = loader.sampler
    if not isinstance(sampler, ShardSampler) or as_streams(loader.dataset) is None:
        raise ArgumentError(
            "state_dict was saved in the middle of an epoch that was read as streams: resume with the same "
            "dataset and with the loader's own sampler or a fastload.ShardSampler"
        )
    for name, own in (("ranks", sampler.num_replicas), ("rank", sampler.rank)):
        if saved[name] != own:
            raise ArgumentError(
                f"state_dict was saved with {name} {saved[name]!r} in the middle of an epoch that was read "
                f"as streams, this sampler has {own!r}: let each rank load the state that it has saved, "
                "with as many ranks, or resume from a state at the end of an epoch"
            )
