"""The samples of each rank, in order: arithmetic on an order that (seed, epoch, length) determine.

    order of the epoch    o0 o1 o2 o3 o4 o5 o6 o7 o8 ...        the same on every rank
    rank r of N           o[r], o[r + N], o[r + 2N], ...        so N ranks in step have read a prefix of it

The samples that all ranks have read are a prefix of the order, and a prefix has only a length. So any other
number of ranks can resume at a position. With `partition="node"` every node keeps to a share of its own:

    n nodes     base:  b0 b1 ... bn-1 │ bn bn+1 ...        position p belongs to node p mod n
    an epoch    order: each node's share shuffled inside, so position p is still node (p mod n)'s

The shares depend only on the dataset's length and the number of nodes. So the records that a run, or
`fastload warm`, has put on a node's SSD serve the next run, whatever its seed.
"""

from __future__ import annotations

import copy
import math
import operator
import warnings
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.utils.data

from fastload.checks import check_one_of, whole_seed
from fastload.distributed import find_launched, find_rank
from fastload.distributed.launcher import can_agree
from fastload.errors import ArgumentError
from fastload.order.permutations import node_order, node_shares

_VERSION = 1
_MODES = ("train", "eval")
_CHUNK = 16384  # indices that are Python ints at one time


@dataclass(frozen=True)
class Dealt:
    """Where a `DistributedSampler` stood: the samples that all ranks had read, and how its order is dealt."""

    consumed: int
    nodes: int
    exchange: float


class DistributedSampler(torch.utils.data.DistributedSampler[int]):
    """This rank's part of the samples: a drop-in for `torch.utils.data.DistributedSampler`.

    Example::

        from fastload import DataLoader, DistributedSampler, ImageFolder, RandomResizedCrop

        dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224), cache="/ssd/cache")
        sampler = DistributedSampler(dataset, seed=1)  # rank and world size: from the launcher
        loader = DataLoader(dataset, batch_size=256, sampler=sampler, num_workers=8)
        for epoch in range(2):
            for images, labels in loader:
                ...

    With the same arguments and `set_epoch` calls, mode "train" yields what torch's yields, index for index.
    Beyond that:

    * `mode="eval"` covers the dataset exactly: no index is repeated or dropped, so the first
      `len(dataset) % num_replicas` ranks get one more than the others, and `len()` differs by rank. Combine
      results by sums and counts, with no collective operation per batch: the longer ranks would wait in it.
    * Without `set_epoch`, every iteration is the next epoch. An iterator counts once something was drawn from
      it, and all ranks have to iterate equally often. After your first call of `set_epoch`, the epoch no
      longer advances by itself, as in torch: call it before every epoch.
    * `state_dict()` has the position as a number of samples over all ranks. Any number of ranks may load it,
      with any batch size. No sample is lost or repeated, except for the padding (`drop_last`: truncation) at
      the end of the epoch; padding repeats the epoch's first samples. Save it when all ranks have drawn
      equally many samples (at the end of "eval", where the first ranks have one more: on rank 0).
    * `partition="node"` lets each node keep to a share of its own: the same samples in every epoch, shuffled
      among themselves. Its SSD then holds 1 / num_nodes of the data, and the cluster reads the store once.
      The shares depend on the dataset's length and num_nodes only, and `fastload warm` uses the same.
      The price: the batches of a node are drawn from that node's samples. Nguyen et al., "Why Globally
      Re-shuffle?" (IPDPS 2022), report that exchanging a part of the samples each epoch kept the accuracy of
      the global shuffle up to 2,048 GPUs. `exchange` does that: in each epoch, another random fraction of
      every node's samples is read by another node. With 0.1 the cluster reads the store once, plus a tenth of
      an epoch in each later epoch, or less where the caches have space for these samples too.

    Args:
        dataset: anything with a length.
        num_replicas, rank: by default from torch.distributed if it is initialized, else from the launcher
            (torchrun, Horovod, Open MPI, Ray Train, MPICH, SLURM: in this order), else 1 and 0. Where
            torch.distributed is initialized later and gives others, the next iteration is an error.
        shuffle: order by a permutation drawn from seed + epoch; else by index.
        seed: the same on all ranks.
        drop_last: "train" only: cut the order to a multiple of num_replicas, where it is otherwise padded.
        mode: "train" (every rank gets equally many, padded or cut) or "eval" (exact cover).
        partition: None, or "node".
        exchange: with "node", 0 to 1.
        num_nodes: with "node": the number of nodes, with equally many neighbouring ranks on each. Default:
            from torchrun, Horovod, Ray Train or SLURM.

    Raises:
        ArgumentError: a rank outside of its world, an unknown mode or partition, drop_last with "eval", or
            nodes with unequally many ranks.
    """

    _by_epoch: ClassVar[bool] = True  # the order is a function of the epoch's number and the dataset's length
    _compared: ClassVar[tuple[str, ...]] = ("version", "seed", "shuffle", "length")  # entries of a state
    _delivered: Mapping[str, Any] | None = None  # the state there, while a loader says so: it draws ahead

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        mode: str = "train",
        partition: str | None = None,
        exchange: float = 0.0,
        num_nodes: int | None = None,
    ) -> None:
        _check_partition(partition, exchange, num_nodes, shuffle)
        check_one_of("mode", mode, _MODES)
        if mode == "eval" and drop_last:
            raise ArgumentError("drop_last=True contradicts mode='eval', which drops nothing: leave it out")
        # What was found and not given: the rank, the number of ranks. Later it is compared.
        self._found = (rank is None, num_replicas is None)
        if num_replicas is None or rank is None:
            found_rank, found_replicas = find_rank()
            num_replicas = found_replicas if num_replicas is None else num_replicas
            rank = found_rank if rank is None else rank
        num_replicas, rank = operator.index(num_replicas), operator.index(rank)
        if num_replicas < 1:
            raise ArgumentError(f"num_replicas must be at least 1, found {num_replicas}")
        if not 0 <= rank < num_replicas:
            raise ArgumentError(
                f"Invalid rank {rank}, rank should be in the interval [0, {num_replicas - 1}]: "
                "pass both rank and num_replicas, or neither"
            )
        indexed_length(dataset)
        seed = whole_seed(seed)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.mode = mode
        self.exchange = float(exchange)
        by_node = partition == "node"
        self._place = find_position(rank, num_replicas, num_nodes) if by_node else RankPosition(0, rank, 1)
        # This rank reads the samples `_column`, `_column + num_replicas`, ... of the order of all ranks.
        self._column = self._place.column
        self._dealt = (self._parts(), exchange)  # the nodes and the exchange of the order of self.epoch
        if mode == "eval":
            self.num_samples = self._share(0)
            self.total_size = len(dataset)
        self._advances = True  # until the first set_epoch
        self._begun = False  # something was drawn in self.epoch
        self._start: int | None = None  # where the next iteration starts, once that is settled
        self._resumable: tuple[int, int, tuple[int, float]] | None = None  # epoch, start, dealt, as loaded
        # The position once all of `_drawing` is drawn, and what is left of the indices that come next.
        self._end: tuple[int, int] = (0, 0)
        self._drawing: Iterator[int] = iter(())

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that an epoch begins when something is drawn: torch's loader calls iter() twice.
        self._start_epoch()
        epoch, start = self.epoch, self._start
        assert start is not None
        self._note_begun()
        yield from self._draw(epoch, start)
        if self._position[0] == epoch and self._start is None:
            self._start_epoch()

    def _note_begun(self) -> None:
        """Note that an epoch has begun: without `set_epoch`, the next iteration is the next epoch."""
        self._start, self._begun, self._resumable = None, True, None

    def _draw(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield what this rank reads of an epoch, and keep `_position`."""
        length, replicas = indexed_length(self.dataset), self.num_replicas
        first = start + self._column
        last = first + self._share(start) * replicas
        nodes, exchange = self._dealt
        order = self._order(epoch, nodes, exchange) if first < last else None
        whole = max(1, length - length % nodes)  # padding comes from the same node's first samples
        for chunk in range(first, last, _CHUNK * replicas):
            places = range(chunk, min(chunk + _CHUNK * replicas, last), replicas)
            inside = places[: max(0, -(-(length - chunk) // replicas))]
            padding = [place % whole for place in places[len(inside) :]]
            if order is None:
                drawn = [*inside, *padding]
            else:
                drawn = order[inside.start : inside.stop : replicas].tolist() + order[padding].tolist()
            # What is left of `drawn` tells the position: to note it for each index takes longer than to draw.
            self._position = (epoch, chunk - self._column + replicas * len(drawn))
            self._drawing = iter(drawn)
            yield from self._drawing

    @property
    def _position(self) -> tuple[int, int]:
        """Epoch, and samples consumed on all ranks."""
        epoch, consumed = self._end
        return epoch, consumed - self.num_replicas * operator.length_hint(self._drawing)

    @_position.setter
    def _position(self, position: tuple[int, int]) -> None:
        self._end, self._drawing = position, iter(())

    def __repr__(self) -> str:
        length = known_length(self.dataset)
        samples = "shards that are not indexed" if length is None else f"{length:,} samples"
        return (
            f"{type(self).__name__}({samples}, num_replicas={self.num_replicas}, rank={self.rank}, "
            f"shuffle={self.shuffle}, seed={self.seed})"
        )

    def __len__(self) -> int:
        """Return samples of this rank in a whole epoch."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. A loaded position is kept if it is in this epoch."""
        epoch = operator.index(epoch)  # numpy's numbers would make states that JSON does not know
        if self._resumable is not None and epoch == self._resumable[0]:  # perhaps after another one
            _, self._start, self._dealt = self._resumable
        elif self._start is None or epoch != self.epoch:
            if self._start and self._start < (self._length() or math.inf):
                warnings.warn(
                    f"set_epoch({epoch}) drops the position that was loaded, {self._start} samples into "
                    f"epoch {self.epoch}: call set_epoch({self.epoch}) to resume there",
                    stacklevel=2,
                )
            self._start = 0
            self._dealt = (self._parts(), self.exchange)
        self.epoch = epoch
        self._advances = False
        self._position = (epoch, self._start)

    def _start_epoch(self) -> None:
        """Fix the epoch of the next iteration before the first draw. A repeated call changes nothing.

        Raises:
            ArgumentError: the rank was found before torch.distributed was initialized, and is another one.
        """
        self._check_found()
        if self._start is not None:
            return
        if self._begun and self._advances:
            self.epoch += 1
        self._begun = False
        self._start = 0
        self._dealt = (self._parts(), self.exchange)
        self._position = (self.epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch and the samples that all ranks together have consumed in it, as plain numbers."""
        epoch, consumed = self._position
        length = self._length()
        return {
            "version": _VERSION,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": length,
            "epoch": epoch,
            "consumed": consumed if length is None else min(consumed, length),
            "advances": self._advances,
            "nodes": self._dealt[0],
            "exchange": self._dealt[1],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume: the next iteration continues there. The numbers of ranks and nodes may differ.

        An epoch that was begun on another number of nodes is finished in its own order, as no node's share.

        Raises:
            ArgumentError: it is no state of this class, or of another seed, shuffle or dataset length.
        """
        self._check_state(state_dict)
        self._stand_at(int(state_dict["epoch"]), int(state_dict["consumed"]))
        self._advances = bool(state_dict["advances"])
        dealt = self._deal(state_dict if self._start else None)
        self._dealt = (self._parts(), self.exchange) if dealt is None else (dealt.nodes, dealt.exchange)
        self._resumable = (self.epoch, int(state_dict["consumed"]), self._dealt)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ArgumentError unless this sampler can go on from a state."""
        if not isinstance(state, Mapping):
            raise ArgumentError(f"state_dict must be a dict, found {type(state).__name__}")
        own = self.state_dict()
        if own.keys() != state.keys():
            raise ArgumentError(
                f"state_dict has the entries {sorted(state)}, expected {sorted(own)}: "
                f"load what state_dict() of a fastload.{type(self).__name__} returned"
            )
        for name in [name for name in self._compared if name in own]:
            if state[name] != own[name] and not (name == "length" and self._was_not_indexed(state)):
                raise ArgumentError(
                    f"state_dict was saved with {name} {state[name]!r}, this sampler has {own[name]!r}: "
                    "make it with the arguments and the dataset of the saved run"
                )

    def _stand_at(self, epoch: int, consumed: int) -> None:
        self.epoch, self._start, self._begun, self._resumable = epoch, consumed, False, None
        self._position = (epoch, consumed)

    # --- for a loader

    def _rewind(self) -> bool:
        """Let what was drawn and not delivered be drawn again, where the next epoch begins with that."""
        return False

    def _with_changes(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an earlier state, with what was decided since about the samples after it."""
        return state

    def _deal(self, state: Mapping[str, Any] | None = None) -> Dealt | None:
        """Return all that the order depends on in a state (None: of an epoch that begins) beside the epoch.

        None: it depends on more.
        """
        if not self._by_epoch:
            return None
        if state is None:
            return Dealt(0, self._parts(), self.exchange)
        return Dealt(state["consumed"], int(state["nodes"]), float(state["exchange"]))

    def _epoch_in(self, state: Mapping[str, Any]) -> int:
        return int(state["epoch"])

    def _at_state(self, state: Mapping[str, Any], *, rank: int, replicas: int) -> Self:
        """Return a copy that stands at a state, whatever was decided since."""
        dealt = (state["nodes"], state["exchange"])
        return self._at(state["epoch"], state["consumed"], rank=rank, replicas=replicas, dealt=dealt)

    def _at(
        self, epoch: int, consumed: int, *, rank: int, replicas: int, dealt: tuple[int, float] | None = None
    ) -> Self:
        """Return a copy that stands elsewhere: the samples of a rank there, and of any number of ranks.

        Args:
            epoch, consumed: the place, as in a state.
            dealt: (nodes, exchange) of the order of that epoch; None: as this sampler deals it.

        Raises:
            ArgumentError: the nodes do not have equally many ranks.
        """
        again = copy.copy(self)
        again.rank, again.num_replicas, again._found = rank, replicas, (False, False)
        if (rank, replicas) != (self.rank, self.num_replicas):
            nodes = self._place.nodes
            again._place = RankPosition(0, rank, 1) if nodes == 1 else find_position(rank, replicas, nodes)
            again._column = again._place.column
        again._dealt = dealt or (again._parts(), again.exchange)
        again._stand_at(epoch, consumed)
        return again

    def _check_found(self) -> None:
        """Check the rank again, which a launcher may tell by torch.distributed only: each would read all."""
        if not any(self._found) or not can_agree():
            return
        rank, replicas = find_rank()
        if replicas == 1:  # a group of one says nothing about the other ranks, which a launcher named
            return
        rank_was_found, replicas_were_found = self._found
        if (rank_was_found and rank != self.rank) or (replicas_were_found and replicas != self.num_replicas):
            raise ArgumentError(
                f"the sampler was made for rank {self.rank} of {self.num_replicas}, and this process is rank "
                f"{rank} of {replicas}: make the sampler and its loader after init_process_group() (with "
                "Lightning in train_dataloader()), or pass num_replicas and rank"
            )

    def _length(self) -> int | None:
        """Return the length of the dataset; None: it has none, which only a `ShardSampler` accepts."""
        return indexed_length(self.dataset)

    def _was_not_indexed(self, state_dict: Mapping[str, Any]) -> bool:
        return False

    def _parts(self) -> int:
        """Return into how many parts the samples of an epoch are dealt before they are shuffled."""
        return self._place.nodes

    def _order(self, epoch: int, nodes: int, exchange: float) -> torch.Tensor | None:
        """Return the samples in the order of an epoch; None: by index."""
        length = len(self.dataset)  # type: ignore[arg-type]
        if self.shuffle:
            return node_order(length, nodes, exchange, self._seed_of(epoch))
        return None if nodes == 1 else node_shares(length, nodes)

    def _seed_of(self, epoch: int) -> int:
        """Return the seed of the order of an epoch; torch takes none from 2**64 on."""
        return (self.seed + epoch) % (1 << 64)

    def _share(self, start: int) -> int:
        """Return the number of samples of this rank from `start` on."""
        left = max(0, len(self.dataset) - start)  # type: ignore[arg-type]
        if self.mode == "eval":
            return max(0, -(-(left - self._column) // self.num_replicas))
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)


def indexed_length(dataset: Any) -> int:
    """Return the number of samples that can be asked for by index. `len()` of shards may be a hint instead.

    It is the result of the dataset's `_indexed_length`, if it has this method.

    Raises:
        TypeError: the samples are not indexed yet.
    """
    counted = getattr(dataset, "_indexed_length", None)
    return len(dataset) if counted is None else int(counted())


def known_length(thing: Any) -> int | None:
    """Return `indexed_length` of a dataset, or `len` of a sampler or loader; None where it has none."""
    try:
        return indexed_length(thing)
    except (TypeError, NotImplementedError):
        return None


def _check_partition(partition: str | None, exchange: float, num_nodes: int | None, shuffle: bool) -> None:
    if partition not in (None, "node"):
        raise ArgumentError(f"partition must be None or 'node', found {partition!r}")
    if not 0 <= exchange <= 1:
        raise ArgumentError(f"exchange must be from 0 to 1, found {exchange!r}")
    if partition is None and (exchange or num_nodes is not None):
        raise ArgumentError("exchange and num_nodes go with partition='node': add it, or leave them out")
    if exchange and not shuffle:
        raise ArgumentError("exchange moves random samples, which shuffle=False forbids: leave one out")


# --- the share of each node


class RankPosition(NamedTuple):
    """A rank's position in the job: rank `local` of node `node` of `nodes`."""

    node: int
    local: int
    nodes: int

    @property
    def column(self) -> int:
        """Return the column of the rank in a row of one sample for each rank."""
        return self.local * self.nodes + self.node


def find_position(rank: int, replicas: int, nodes: int | None) -> RankPosition:
    """Return the position of a rank: from `nodes`, neighbouring ranks then sharing one, or from the launcher.

    Raises:
        ArgumentError: no launcher tells it, or the nodes do not have equally many ranks.
    """
    position = _by_number(rank, replicas, nodes) if nodes is not None else _launched(rank, replicas)
    if position is None and replicas > 1:
        raise ArgumentError(
            f"partition='node' with {replicas} ranks: no launcher (torchrun, Horovod, Ray Train, srun) tells "
            f"the node of rank {rank}; pass num_nodes"
        )
    position = position or RankPosition(0, 0, 1)
    per_node, left = divmod(replicas, position.nodes)
    if left or not (0 <= position.node < position.nodes and 0 <= position.local < per_node):
        raise ArgumentError(
            f"partition='node' needs equally many ranks on every node, found {replicas} ranks on "
            f"{position.nodes} nodes; this rank is number {position.local} of node {position.node}"
        )
    return position


def _by_number(rank: int, replicas: int, nodes: int) -> RankPosition:
    if not 1 <= nodes <= replicas:
        raise ArgumentError(f"num_nodes must be from 1 to the {replicas} ranks, found {nodes}")
    return RankPosition(*divmod(rank, replicas // nodes), nodes)


def _launched(rank: int, replicas: int) -> RankPosition | None:
    for said in find_launched(rank, replicas):
        if said.node is not None and said.local is not None and said.nodes is not None:
            return RankPosition(said.node, said.local, said.nodes)
    return None
