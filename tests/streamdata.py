"""A dataset of shards in memory, whose samples are numbered once all shards were read."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from fastload.datasets.views import Allocate, PlainView, RowErrors, RowRequests
from fastload.metrics.counters import Counters


def content(shard: int, ordinal: int) -> int:
    digest = hashlib.blake2b(f"{shard}/{ordinal}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


class Shards(Dataset[Any]):
    """Samples (shard, ordinal, content), `lengths[shard]` of each.

    Args:
        places: a directory where the lengths of shards are kept, one file for each that was read through.
            None: they are never learned.
        deed: called with (shard, ordinal) before a sample is made; may raise, or worse.
        take_deed: the same, before its id is handed out.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        places: Path | None = None,
        deed: Callable[[int, int], None] | None = None,
        take_deed: Callable[[int, int], None] | None = None,
    ) -> None:
        self.lengths = list(lengths)
        self.places = places
        self.deed = deed
        self.take_deed = take_deed
        self._known: dict[int, int] = {}
        self._held: dict[
            int, tuple[int, int]
        ] = {}  # ids handed out by a stream of this process, not used yet
        if places is not None:
            places.mkdir(exist_ok=True)

    @property
    def _numbered(self) -> bool:
        return len(self._known) == len(self.lengths)

    def __len__(self) -> int:
        if not self._numbered:
            raise TypeError("the samples of these shards are not indexed yet")
        return sum(self._known.values())

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        shard, ordinal = self.place(index)
        if self.deed is not None:
            self.deed(shard, ordinal)
        return shard, ordinal, content(shard, ordinal)

    def place(self, index: int) -> tuple[int, int]:
        if index in self._held:
            return self._held.pop(index)
        assert index < 1 << 32, f"{index} was not handed out here"
        if not self._numbered:
            raise TypeError("the samples of these shards are not indexed yet")
        starts = list(itertools.accumulate((self._known[k] for k in range(len(self.lengths))), initial=0))
        shard = next(k for k in range(len(self.lengths)) if starts[k] <= index < starts[k + 1])
        return shard, index - starts[shard]

    # --- StreamDataset

    def must_stream(self) -> bool:
        if not self._numbered and self.places is not None:
            found = {int(path.name): int(path.read_text() or -1) for path in self.places.iterdir()}
            self._known |= {shard: length for shard, length in found.items() if length >= 0}
        return not self._numbered

    def plan_streams(
        self, count: int, *, seed: int, epoch: int, shuffle: bool, rank: int, ranks: int
    ) -> list[dict[str, Any]]:
        shards = list(range(len(self.lengths)))
        if shuffle:
            random.Random(f"{seed} {epoch}").shuffle(shards)
        return [
            {
                "shards": shards[rank + ranks * stream :: ranks * count],
                "at": 0,
                "key": f"{seed} {epoch} {shuffle}",
            }
            for stream in range(count)
        ]

    def open_stream(self, state: dict[str, Any]) -> _Stream:
        return _Stream(self, state)

    def known_indexes(self) -> dict[int, bytes]:
        return {shard: b"%d" % length for shard, length in self._known.items()}

    def learn_indexes(self, indexes: Mapping[int, bytes]) -> None:
        for shard, length in indexes.items():
            self._known[shard] = int(length)
            self.keep(shard)

    def keep(self, shard: int) -> None:
        if self.places is not None:
            partial = self.places.parent / f"partial {self.places.name} {shard} {id(self)}"
            partial.write_text(str(self.lengths[shard]))
            partial.rename(self.places / str(shard))


class _Stream:
    def __init__(self, dataset: Shards, state: dict[str, Any]) -> None:
        self._dataset = dataset
        self._state = dict(state)
        self._open = True

    def take(self, n: int) -> list[int]:
        assert self._open
        ids: list[int] = []
        state, dataset = self._state, self._dataset
        while state["shards"] and len(ids) < n:
            shard = state["shards"][0]
            order = list(range(dataset.lengths[shard]))
            if state["key"].endswith("True"):
                random.Random(f"{state['key']} {shard}").shuffle(order)
            for ordinal in order[state["at"] : state["at"] + n - len(ids)]:
                if dataset.take_deed is not None:
                    dataset.take_deed(shard, ordinal)
                ids.append(shard << 32 | ordinal)
                dataset._held[ids[-1]] = shard, ordinal
                state["at"] += 1
            if state["at"] == len(order):
                dataset.keep(shard)
                state = self._state = state | {"shards": state["shards"][1:], "at": 0}
        return ids

    def state(self) -> dict[str, Any]:
        return dict(self._state)

    def close(self) -> None:
        self._open = False


class RowShards(Shards):
    """The same, written into rows: a batch is an int64 tensor of shape (n, 3)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.counters = Counters()

    def _view(self) -> RowShardsView:
        return RowShardsView(self)


class RowShardsView(PlainView):
    reads_ahead = True

    def leaves(self) -> Iterator[RowShards]:
        yield self.dataset

    def writes(self) -> bool:
        return True

    def prefetch(self, indices: Iterable[int]) -> None:
        for index in indices:
            if not self.dataset._numbered:
                raise TypeError(f"sample {index} of these shards is not indexed yet")

    def cancel(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.dataset._held.pop(index, None)

    def new_batch(self, n: int, allocate: Allocate) -> torch.Tensor:
        return allocate((n, 3), torch.int64)

    def fill(self, batch: torch.Tensor, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        failures: RowErrors = []
        for row, index in todo:
            try:
                batch[row] = torch.tensor(self.dataset[index])
            except Exception as error:
                failures.append((row, error))
        return failures

    def sample(self, batch: torch.Tensor, row: int) -> torch.Tensor:
        return batch[row]

    def copy_row(self, batch: torch.Tensor, target: int, source: int) -> None:
        batch[target] = batch[source]
