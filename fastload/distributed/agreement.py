"""What the ranks of a job tell each other while an epoch is read as streams.

They meet when it begins, and say how far each is before it hands out a batch. All of it goes through the
key-value store that torch.distributed keeps for its own start-up. Collective operations were rejected: they
would mingle with the trainer's on its process groups, and a rank that is at its end waits in none.

Steps are equal. Before a rank hands out its own batch k it has posted that it has more than k batches, and
as soon as it has no more it posts how many they were. At its end it goes on, with repeated samples, while
another rank has posted more than k, and ends once all have posted that they have not.

No rank waits for ever. Let all ranks have handed out batch k - 1. Each either has a batch k of its own, and
posts that without asking anyone, or is at its end and has posted it. So every question about k is answered by
a rank that waits for nobody, and as answers are facts (a total is above k or it is not) all ranks come to the
same end, even if each finds out at another time.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore

from fastload.errors import ArgumentError, WorkerError
from fastload.metrics.torch_private import default_store

__all__ = ["Ranks", "can_meet"]

_PATIENCE = 1800.0  # seconds that a rank may be behind, as long as gloo's collectives wait for one
_PAUSES = (0.001, 0.05)  # seconds between two looks at the store, from the first to the later ones
_PIECE = 1 << 20  # the store takes values up to 8 MiB
_loaders = itertools.count()  # that have met, in this process; one loader has one number on all ranks


def can_meet() -> bool:
    """Whether the ranks of this job can tell each other anything."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class Ranks:
    """The ranks that share the epochs of one loader.

    Args:
        rank, ranks: this one, of so many.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self._others = [*range(rank + 1, ranks), *range(rank)]
        self._corner = ""  # of the store, for this loader in this start of the job
        self._meetings = 0
        self._store: Any = None
        self._posted: list[str] = []  # keys
        self._had = 0
        self._seen: dict[int, tuple[int, bool]] = {}  # rank -> (batches it has at least, whether that is all)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_store": None, "_posted": []}  # a store does not pickle

    def meet(self, summary: dict[str, Any]) -> list[dict[str, Any]]:
        """Wait until every rank has begun its next epoch; their summaries, by rank.

        Raises:
            ArgumentError: torch.distributed is not initialized. WorkerError: a rank did not come.
        """
        root = _store()
        if not self._corner:
            self._corner = _corner(PrefixStore(f"fastload/{next(_loaders)}", root), self.rank, self.ranks)
        before, posted, self._posted = self._store, self._posted, []
        self._meetings += 1
        self._store = PrefixStore(f"fastload/{self._corner}/{self._meetings}", root)
        self._had, self._seen = 0, dict.fromkeys(self._others, (0, False))
        self._set(f"at/{self.rank}", b"0 0")
        self._post(f"summary/{self.rank}", json.dumps(summary).encode())
        summaries = [
            json.loads(self._wait(rank, "summary", "to begin the epoch")) for rank in range(self.ranks)
        ]
        for key in posted:  # whoever has come here has left the epoch before
            before.delete_key(key)
        return summaries

    def exchange(self, tables: Mapping[int, bytes], known: Sequence[set[int]]) -> dict[int, bytes]:
        """Send what other ranks lack, and get what this one lacks. `meet_again` has to follow.

        Args:
            tables: shard -> bytes, of this rank.
            known: the shards of each rank, `tables`' keys among them.
        """
        everywhere = set.intersection(*known)
        first: dict[int, int] = {}
        for rank in reversed(range(self.ranks)):
            first |= dict.fromkeys(known[rank] - everywhere, rank)
        for shard in (shard for shard, rank in first.items() if rank == self.rank):
            self._post(f"table/{shard}", tables[shard])
        mine = known[self.rank]
        return {
            shard: self._wait(rank, f"table/{shard}", "to send its places", by_rank=False)
            for shard, rank in first.items()
            if shard not in mine
        }

    def meet_again(self, answer: Any) -> list[Any]:
        """What every rank answers. What `exchange` has posted is taken out of the store."""
        self._post(f"answer/{self.rank}", json.dumps(answer).encode())
        answers = [json.loads(self._wait(rank, "answer", "to take in places")) for rank in range(self.ranks)]
        for key in [key for key in self._posted if key.startswith("table/")]:
            self._store.delete_key(key)
            self._posted.remove(key)
        return answers

    def have(self, batches: int) -> None:
        """This rank has at least so many batches of its own."""
        if batches > self._had:
            self._had = batches
            self._store.set(f"at/{self.rank}", b"%d 0" % batches)

    def ended(self, batches: int) -> None:
        """This rank has so many, and no more."""
        self._store.set(f"at/{self.rank}", b"%d 1" % batches)

    def any_beyond(self, batches: int) -> bool:
        """Whether another rank has more than so many batches; waits until it is certain.

        Raises:
            WorkerError: a rank does not say.
        """
        clock = _Clock()
        while True:
            for rank in self._others:
                count, over = self._seen[rank]
                if count <= batches and not over:
                    posted = self._store.get(f"at/{rank}").split()
                    count, over = self._seen[rank] = int(posted[0]), posted[1] == b"1"
                if count > batches:
                    return True
            silent = [rank for rank, (_, over) in self._seen.items() if not over]
            if not silent:
                return False
            clock.tick(silent[0], f"to say whether it has batch {batches}")

    def _post(self, key: str, value: bytes) -> None:
        """For values of any size; readers find all of it once they find its number of pieces."""
        pieces = [value[start : start + _PIECE] for start in range(0, max(1, len(value)), _PIECE)]
        for number, piece in enumerate(pieces):
            self._set(f"{key}/{number}", piece)
        self._set(key, b"%d" % len(pieces))

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)
        self._posted.append(key)

    def _wait(self, rank: int, key: str, what: str, *, by_rank: bool = True) -> bytes:
        key = f"{key}/{rank}" if by_rank else key
        clock = _Clock()
        # The store's own wait would hold its lock, which torch's watchdogs need, and be deaf to Ctrl-C.
        while not self._store.check([key]):
            clock.tick(rank, what)
        pieces = int(self._store.get(key))
        return b"".join(self._store.get(f"{key}/{number}") for number in range(pieces))


class _Clock:
    """Between two looks at the store."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._pause = _PAUSES[0]

    def tick(self, rank: int, what: str) -> None:
        if time.monotonic() - self._start > _PATIENCE:
            raise WorkerError(
                f"waited {_PATIENCE:.0f} s for rank {rank} {what}: either it has died, or the ranks do not "
                "iterate over their loaders equally often, in the same order and as far",
                stage="ranks",
            )
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _PAUSES[1])


def _corner(store: Any, rank: int, ranks: int) -> str:
    """A name that all ranks of this start agree on.

    torchrun may keep one store over its restarts, with all that ranks which have died had said in it. So each
    rank says a word that nobody can have said before, and is answered under it.
    """
    mine, clock = uuid.uuid4().hex, _Clock()
    if rank:
        store.set(f"hello/{rank}", mine)
        while not store.check([f"welcome/{mine}"]):
            clock.tick(0, "to begin the epoch")
        corner = str(store.get(f"welcome/{mine}").decode())
        store.set(f"joined/{corner}/{rank}", b"1")
        return corner
    waiting = set(range(1, ranks))
    while waiting:
        for other in sorted(waiting):
            if store.check([f"joined/{mine}/{other}"]):
                waiting.remove(other)
            elif store.check([f"hello/{other}"]):
                store.set(f"welcome/{store.get(f'hello/{other}').decode()}", mine)
        if waiting:
            clock.tick(min(waiting), "to begin the epoch")
    return mine


def _store() -> Any:
    """The key-value store of torch.distributed, for which there is no public name."""
    if not can_meet():
        raise ArgumentError(
            "several ranks have to agree how to read an epoch whose samples are not numbered yet, and "
            "torch.distributed is not initialized: call init_process_group() before iterating, or give the "
            "dataset index files"
        )
    return default_store()
