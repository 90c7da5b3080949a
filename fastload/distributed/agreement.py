"""What the ranks of a job tell each other, through the key-value store that torch.distributed keeps.

`Ranks` keeps them together while an epoch is read as streams: they agree on the epoch when it begins, and
publish their progress before each batch. Collective operations were rejected: they would interleave with the
trainer's collectives, and a finished rank would not take part.

All ranks take equally many steps. Before a rank delivers its own batch k, it publishes that it has more than
k batches. Once it has no more, it publishes its total. It then goes on with repeated samples while another
rank has published more than k, and ends once all have published a total of at most k.

No deadlock: let all ranks have delivered batch k - 1. Then each rank either has a batch k of its own, and
publishes that without waiting, or it has published its total. So every question about k has an answer that
waits for no rank, and published answers never change: all ranks reach the same decision, if not at one time.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed

from fastload.distributed.launcher import can_agree
from fastload.errors import ArgumentError, WorkerError
from fastload.metrics.torch_private import default_store

PATIENCE_SECONDS = 1800.0  # that a rank may be behind; gloo's collectives wait as long
_PAUSES = (0.001, 0.05)  # seconds between two polls of the store: the first pause, and the longest
_PIECE = 1 << 20  # the store takes values up to 8 MiB
_numbers = itertools.count()  # of the loaders of this process; one loader has one number on all ranks


def _prefixed(prefix: str, store: Any) -> Any:
    from torch.distributed.distributed_c10d import PrefixStore  # some builds of torch have no such module

    return PrefixStore(prefix, store)


class Ranks:
    """The ranks that share the epochs of one loader.

    Args:
        rank: this one.
        ranks: how many there are.
        root: the key-value store; None: that of torch.distributed.
        number: of the loader, the same on all ranks; None: the next one in this process.
    """

    def __init__(self, rank: int, ranks: int, *, root: Any = None, number: int | None = None) -> None:
        self.rank = rank
        self.ranks = ranks
        self._root = root
        self._number = number
        self._others = [*range(rank + 1, ranks), *range(rank)]
        self._namespace = ""  # in the store, for this loader in this start of the job
        self._epochs = 0
        self._store: Any = None
        self._posted: list[str] = []  # keys
        self._published = 0
        self._seen: dict[int, tuple[int, bool]] = {}  # rank -> (batches it has at least, whether that is all)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_root": None, "_store": None, "_posted": []}  # a store does not pickle

    def begin_epoch(self, summary: dict[str, Any], what: str = "to begin the epoch") -> list[dict[str, Any]]:
        """Wait until every rank has begun its next epoch, or does `what`; their summaries, by rank.

        Raises:
            ArgumentError: torch.distributed is not initialized, or two of its processes are one rank.
            WorkerError: a rank did not begin the epoch in time.
        """
        root = _default_store() if self._root is None else self._root
        if not self._namespace:
            number = next(_numbers) if self._number is None else self._number
            store = _prefixed(f"fastload/{number}", root)
            if self._root is None:
                _check_alone(store, self.rank, self.ranks)
            self._namespace = agree_on_namespace(store, self.rank, self.ranks)
        before, posted, self._posted = self._store, self._posted, []
        self._epochs += 1
        self._store = _prefixed(f"fastload/{self._namespace}/{self._epochs}", root)
        self._published, self._seen = 0, dict.fromkeys(self._others, (0, False))
        self._set(f"at/{self.rank}", b"0 0")
        self._post(f"summary/{self.rank}", json.dumps(summary).encode())
        summaries = [json.loads(self._wait(rank, "summary", what)) for rank in range(self.ranks)]
        for key in posted:  # every rank has now left the epoch before
            before.delete_key(key)
        return summaries

    def exchange(self, tables: Mapping[int, bytes], known: Sequence[set[int]]) -> dict[int, bytes]:
        """Send the tables that other ranks lack, and get those that this one lacks. `all_gather` must follow.

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
            shard: self._wait(rank, f"table/{shard}", "to send its record offsets", by_rank=False)
            for shard, rank in first.items()
            if shard not in mine
        }

    def all_gather(self, answer: Any) -> list[Any]:
        """Return the answers of all ranks. Remove from the store the tables that `exchange` has sent."""
        self._post(f"answer/{self.rank}", json.dumps(answer).encode())
        answers = [
            json.loads(self._wait(rank, "answer", "to take over record offsets"))
            for rank in range(self.ranks)
        ]
        for key in [key for key in self._posted if key.startswith("table/")]:
            self._store.delete_key(key)
            self._posted.remove(key)
        return answers

    def publish_progress(self, batches: int) -> None:
        """Tell the others that this rank has at least this many batches of its own."""
        if batches > self._published:
            self._published = batches
            self._store.set(f"at/{self.rank}", b"%d 0" % batches)

    def publish_total(self, batches: int) -> None:
        """Tell the others that this rank has this many batches, and no more."""
        self._store.set(f"at/{self.rank}", b"%d 1" % batches)

    def any_has_more(self, batches: int) -> bool:
        """Return whether another rank has more batches than this. Waits until that is certain.

        Raises:
            WorkerError: a rank did not publish its progress in time.
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
        """Set a value of any size. The number of its pieces comes last, so readers never see a part of it."""
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
        # The store's own wait would hold its lock, which torch's watchdogs need, and ignore Ctrl-C.
        while not self._store.check([key]):
            clock.tick(rank, what)
        pieces = int(self._store.get(key))
        return b"".join(self._store.get(f"{key}/{number}") for number in range(pieces))


class _Clock:
    """Pauses between two polls of the store, and gives up when a rank takes too long."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._pause = _PAUSES[0]

    def tick(self, rank: int, what: str) -> None:
        if time.monotonic() - self._start > PATIENCE_SECONDS:
            raise WorkerError(
                f"waited {PATIENCE_SECONDS:.0f} s for rank {rank} {what}: that rank has died, or the ranks "
                "do not iterate over their loaders equally often, in the same order and to the same batch",
                stage="ranks",
            )
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _PAUSES[1])


def _check_alone(store: Any, rank: int, ranks: int) -> None:
    """Raise ArgumentError where another process is this rank too: the ranks would wait for the wrong one."""
    process = str(torch.distributed.get_rank())
    first = store.compare_set(f"process/{rank}", "", process).decode()
    if first != process:
        raise ArgumentError(
            f"processes {first} and {process} of torch.distributed are both rank {rank} of {ranks}, and only "
            "one process can read the streams of a rank: index the shards with `fastload index URL`, and "
            "pass fastload.DistributedSampler with this rank and num_replicas"
        )


def agree_on_namespace(store: Any, rank: int, ranks: int) -> str:
    """Return a name that all ranks of this start of the job have in common, and no earlier start.

    torchrun may keep one store over its restarts, which still holds keys written by ranks that died. So each
    rank writes a random word, and rank 0 answers under that word with the name.
    """
    mine, clock = uuid.uuid4().hex, _Clock()
    if rank:
        store.set(f"hello/{rank}", mine)
        while not store.check([f"welcome/{mine}"]):
            clock.tick(0, "to begin the epoch")
        name = str(store.get(f"welcome/{mine}").decode())
        store.set(f"joined/{name}/{rank}", b"1")
        return name
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


def _default_store() -> Any:
    """Return the key-value store of torch.distributed, for which there is no public name."""
    if not can_agree():
        raise ArgumentError(
            "the samples are not indexed yet, so the ranks must agree on the shards of each rank, and "
            "torch.distributed is not initialized: call init_process_group() before iterating, or give the "
            "dataset index files"
        )
    return default_store()
