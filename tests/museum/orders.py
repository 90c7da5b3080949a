"""Samplers: healthy ones, and beside each the faults that other projects had in such a sampler.

A fault changes as little as it can: mostly one method. Where a healthy sampler differs from fastload's own it
is because the fault needs it so.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from tests.museum.training import BATCH, SAMPLES

CHUNK = 10  # samples that are read at a time
AHEAD = 2  # batches that are drawn before they are asked for
BUFFER = 8  # samples in a shuffle buffer


def permutation(length: int, *seed: Any) -> list[int]:
    order = list(range(length))
    random.Random(repr(seed)).shuffle(order)
    return order


class Epochs(Sampler[int]):
    """Each epoch is a permutation, drawn from (seed, epoch), of which this rank takes every n-th sample.

    Its state is the number of samples that all ranks together have taken.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, length: int = SAMPLES) -> None:
        self.rank, self.num_replicas, self.length = rank, ranks, length
        self.part = rank  # whose samples this rank takes
        self.epoch = self.position = 0

    def order(self, epoch: int) -> list[int]:
        return permutation(self.length, "order", epoch)

    def __len__(self) -> int:
        return self.length // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        order = self.order(self.epoch)
        for place in range(self.position, self.length - self.num_replicas + 1, self.num_replicas):
            self.position = place + self.num_replicas
            yield order[place + self.part]
        self.end_epoch()

    def end_epoch(self) -> None:
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


# --- a resume


class SecondResumeAtZero(Epochs):
    """After a resume, a copy of the state is counted up, and the first one is saved."""

    saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return self.saved or super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.saved = {"epoch": 0, "position": 0}


class OtherPermutation(Epochs):
    """The state has the generator as it is when it is saved: behind the permutation of the epoch."""

    drawn = 0

    def order(self, epoch: int) -> list[int]:
        self.drawn += 1
        return super().order(self.drawn - 1)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.drawn = state["drawn"]


class FirstEpochsOrder(Epochs):
    """The rest of a resumed epoch is in the order of epoch 0: only the position comes back."""

    resumed: int | None = None

    def order(self, epoch: int) -> list[int]:
        return super().order(0 if epoch == self.resumed else epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.resumed = self.epoch


class SkippedInEachEpoch(Epochs):
    """The samples that the resumed epoch passed over are passed over in later epochs too."""

    skipped = 0

    def end_epoch(self) -> None:
        super().end_epoch()
        self.position = self.skipped

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.skipped = self.position


class EpochLost(Epochs):
    """A state from between two epochs says that the first of them is read to its end, once more."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.position == 0:
            self.epoch, self.position = self.epoch - 1, self.length


class Rewound(Epochs):
    """A resume goes back to the begin of the chunk that was being read."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.position -= self.position % CHUNK


class CountsDrawn(Epochs):
    """The state counts the samples that were drawn, which are ahead of those that were handed out."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {"position": min(self.length, state["position"] + AHEAD * BATCH)}


class Buffered(Epochs):
    """A shuffle buffer: the samples come in order, and leave it at random."""

    def __init__(self, rank: int = 0, ranks: int = 1, length: int = SAMPLES) -> None:
        super().__init__(rank, ranks, length)
        self.buffer: list[int] = []
        self.left = 0  # samples that have left the buffer in this epoch

    def __iter__(self) -> Iterator[int]:
        while self.position < self.length or self.buffer:
            while self.position < self.length and len(self.buffer) < BUFFER:
                self.buffer.append(self.position)
                self.position += 1
            pick = random.Random(repr((self.epoch, self.left))).randrange(len(self.buffer))
            self.left += 1
            yield self.buffer.pop(pick)
        self.end_epoch()

    def end_epoch(self) -> None:
        super().end_epoch()
        self.left = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"buffer": list(self.buffer), "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.buffer, self.left = list(state["buffer"]), state["left"]


class BufferLost(Buffered):
    """The samples in the buffer are no part of the state."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"buffer": []}


# --- ranks


class StepsOfOneRank(Epochs):
    """The state counts steps, and a step is taken for as many samples as all ranks of the new run read."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {"steps": state["position"] // (BATCH * self.num_replicas)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.position = state["steps"] * BATCH * self.num_replicas


class RankForgotten(Epochs):
    """After a restart the rank is not found, and every process takes itself for rank 0."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.part = 0


class Draws(Epochs):
    """Each sample is a draw, of which each rank has its own."""

    def order(self, epoch: int) -> list[int]:
        draw = random.Random(repr((epoch, self.part)))
        return [draw.randrange(self.length) for _ in range(self.length)]


class SameDraws(Draws):
    """All ranks draw with one seed."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.part = 0


class Even(Epochs):
    """Ten samples for three ranks and batches of two: the last ones are left out, on all ranks."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks, 10)

    def __iter__(self) -> Iterator[int]:
        whole = self.length - self.length % (2 * self.num_replicas)
        yield from self.order(self.epoch)[: self.last(whole)][self.rank :: self.num_replicas]
        self.end_epoch()

    def last(self, whole: int) -> int:
        return whole


class Uneven(Even):
    """Each rank leaves out its own last ones, so that one has more batches than the others."""

    def last(self, whole: int) -> int:
        return self.length


class SmallChunks(Epochs):
    """The last third of an epoch is in chunks of one sample, and a rank takes its share of each chunk."""

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            if self.rank == 0 or self.position <= self.length * 2 // 3:
                yield index


class Padded(Epochs):
    """21 samples for two ranks: the last row is padded with the first sample of the order."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks, 21)

    def __len__(self) -> int:
        return -(-self.length // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        order = self.order(self.epoch)
        yield from [*order, self.padding(order)][self.rank :: self.num_replicas]
        self.end_epoch()

    def padding(self, order: list[int]) -> int:
        return order[0]


class PaddedWithLast(Padded):
    """It is padded with a copy of the last sample."""

    def padding(self, order: list[int]) -> int:
        return order[-1]


# --- epochs and shards


class Shards(Epochs):
    """Each rank reads one shard: in each epoch from its first record on, and to its last."""

    def __iter__(self) -> Iterator[int]:
        whole = self.length // self.num_replicas
        for number in range(whole):
            self.position = (number + 1) * self.num_replicas
            yield self.record(self.epoch * whole + number, self.rank * whole, whole)
        self.end_epoch()

    def record(self, number: int, first: int, records: int) -> int:
        return first + number % records


class PastTheEnd(Shards):
    """Whoever reads a shard goes back to its begin at the end of the last shard, and not at its own."""

    def record(self, number: int, first: int, records: int) -> int:
        return first + number % (self.length - first)


class OneFurther(Shards):
    """From the third epoch on, each epoch begins one record later than the one before."""

    def record(self, number: int, first: int, records: int) -> int:
        return super().record(number + max(0, self.epoch - 1), first, records)


# --- whole batches


class Batches(Sampler[list[int]]):
    """Batches of `order`, in each epoch."""

    def __init__(self, rank: int = 0, ranks: int = 1, length: int = SAMPLES) -> None:
        self.length, self.epoch = length, 0

    def __len__(self) -> int:
        return self.length // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.batches(permutation(self.length, "order", self.epoch))
        self.epoch += 1

    def batches(self, order: list[int]) -> list[list[int]]:
        return [order[first : first + BATCH] for first in range(0, len(order) - BATCH + 1, BATCH)]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class CutByWorkers(Batches):
    """Two workers have a half each, and each leaves out its own last batch."""

    def batches(self, order: list[int]) -> list[list[int]]:
        half = len(order) // 2
        return super().batches(order[:half]) + super().batches(order[half:])


class StripedByWorkers(Batches):
    """Two workers have a half each, and give a batch in turn."""

    def batches(self, order: list[int]) -> list[list[int]]:
        whole = super().batches(order)
        half = len(whole) // 2
        return [one for pair in zip(whole[:half], whole[half:], strict=True) for one in pair]


class EachWorkerItsOwn(Batches):
    """Two workers live on into the second epoch, and each shuffles its own list of batches there."""

    def batches(self, order: list[int]) -> list[list[int]]:
        whole = super().batches(order)
        if self.epoch == 0:
            return whole
        lists = [permutation(len(whole), "worker", worker) for worker in range(2)]
        return [whole[lists[number % 2][number]] for number in range(len(whole))]


class TorchsOrder(torch.utils.data.DistributedSampler[int]):
    """torch's own sampler, which has to be told the epoch."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(range(SAMPLES), ranks, rank)  # type: ignore[arg-type]
