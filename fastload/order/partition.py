"""The samples that each node reads, where every node keeps to a share of its own.

    n nodes     base:  b0 b1 ... bn-1 │ bn bn+1 ...        position p belongs to node p mod n
    an epoch    order: each node's share shuffled inside, so position p is still node (p mod n)'s

The shares depend only on the dataset's length and the number of nodes. So the records that a run, or
`fastload warm`, has put on a node's SSD serve the next run, whatever its seed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastload.distributed import find_launched
from fastload.errors import ArgumentError


class RankPosition(NamedTuple):
    """A rank's position in the job: rank `local` of node `node` of `nodes`."""

    node: int
    local: int
    nodes: int


def find_position(rank: int, replicas: int, nodes: int | None) -> RankPosition:
    """The position of a rank: from `nodes`, neighbouring ranks then sharing one, or from the launcher.

    Raises:
        ArgumentError: no launcher tells it, or the nodes do not have equally many ranks.
    """
    position = _given(rank, replicas, nodes) if nodes is not None else _launched(rank, replicas)
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


def _given(rank: int, replicas: int, nodes: int) -> RankPosition:
    if not 1 <= nodes <= replicas:
        raise ArgumentError(f"num_nodes must be from 1 to the {replicas} ranks, found {nodes}")
    return RankPosition(*divmod(rank, max(1, replicas // nodes)), nodes)


def _launched(rank: int, replicas: int) -> RankPosition | None:
    for said in find_launched(rank, replicas):
        if said.node is not None and said.local is not None and said.nodes is not None:
            return RankPosition(said.node, said.local, said.nodes)
    return None


def node_shares(length: int, nodes: int) -> torch.Tensor:
    """The samples (int64, shape (length,)); those at positions k, k + nodes, ... are node k's.

    Each `nodes` neighbours of the listing go to different nodes, in random order. So every node gets its part
    of each class in a sorted listing, and of both kinds in one that alternates (left image, right image).
    """
    if nodes == 1:
        return torch.arange(length, device="cpu")
    generator = torch.Generator().manual_seed(0)
    rows, tail = divmod(length, nodes)
    # All with dtype and device: the defaults are the training script's, and may differ between runs.
    shares = torch.arange(length, device="cpu")
    if rows:  # `nodes` may come from a hostile state: even an empty array of so many columns takes memory
        within = torch.rand((rows, nodes), generator=generator, dtype=torch.float32, device="cpu")
        first = torch.arange(0, rows * nodes, nodes, device="cpu")[:, None]
        shares[: rows * nodes] = (within.argsort(dim=1, stable=True) + first).flatten()
    shares[rows * nodes :] = rows * nodes + _permutation(tail, generator)
    return shares


def node_order(length: int, nodes: int, exchange: float, seed: int) -> torch.Tensor:
    """The order of an epoch: position p is read by node p mod `nodes`.

    For one node this is `torch.randperm` with that seed.

    Args:
        exchange: the fraction of each node's samples that another node reads in this epoch. Each of them is
            swapped along a random ring, so every node gives and gets equally many.
    """
    generator = torch.Generator().manual_seed(seed)
    if nodes == 1:
        return _permutation(length, generator)
    order = node_shares(length, nodes)
    for node in range(min(nodes, length)):
        share = order[node::nodes]
        order[node::nodes] = share[_permutation(len(share), generator)]
    rows = length // nodes
    moving = _permutation(rows, generator)[: round(exchange * rows)]
    if len(moving):
        table = order[: rows * nodes].view(rows, nodes)
        shift = torch.randint(1, nodes, (len(moving), 1), generator=generator, device="cpu")
        table[moving] = table[moving].gather(1, (torch.arange(nodes, device="cpu") + shift) % nodes)
    return order


def _permutation(length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(length, generator=generator, device="cpu")
