"""Four ranks of one node, as processes: what they share is divided, and none of them starves."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from fastload import DataLoader, DistributedSampler, ObjectDataset
from fastload.fetch.threads import process_share
from fastload.metrics.machine import Cores, usable_bytes
from fastload.store import open_store
from tests.faultserver import Fault, FaultServer
from tests.process.test_stream_ranks import on_ranks

RANKS, OF_RANK, SIZE = 4, 60, 10_000
KEYS = [f"{number:03d}.bin" for number in range(RANKS * OF_RANK)]
REQUESTS = 8  # of the node


def test_four_ranks_share_requests_memory_and_cores_and_none_starves() -> None:
    objects = {key: number.to_bytes(2, "big") * (SIZE // 2) for number, key in enumerate(KEYS)}
    with FaultServer(objects) as server:
        for key in KEYS:
            server.script(key, Fault(delay=0.04), repeat=True)

        def read_part(rank: int, ranks: int) -> Any:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update({name: str(value) for name, value in place.items()})
            options = server.options | {"max_requests": REQUESTS}
            dataset = ObjectDataset(
                "s3://bucket",
                decode=lambda body: int.from_bytes(bytes(body[-2:]), "big"),
                storage_options=options,
            )
            sampler = DistributedSampler(dataset, shuffle=False)
            loader = DataLoader(
                dataset,
                5,
                sampler=sampler,
                num_workers="auto",
                memory_limit="50%",
                multiprocessing_context="fork",
            )
            dist.barrier()
            found = [number for batch in loader for number in batch.tolist()]
            stats = loader.stats()
            return found, loader.num_workers, stats["memory"]["limit"], stats["counters"]["get.bytes"]

        found, workers, limits, read = zip(*on_ranks(RANKS, read_part), strict=True)

    assert found == tuple(list(range(rank, len(KEYS), RANKS)) for rank in range(RANKS))
    assert read == (OF_RANK * SIZE,) * RANKS
    assert server.most_at_once <= REQUESTS
    assert sum(limits) <= usable_bytes() / 2 and len(set(limits)) == 1
    assert sum(workers) <= max(RANKS, Cores().usable)
    # When the first rank has sent its last request, the others have had their share of the server.
    sent = Counter[int]()
    for request in server.requests:
        if request.key in KEYS:
            sent[KEYS.index(request.key) % RANKS] += 1
            if sent.most_common(1)[0][1] == OF_RANK:
                break
    assert min(sent[rank] for rank in range(RANKS)) >= OF_RANK / 3, sent


@pytest.mark.parametrize("ranks", [8, 64, 300])
def test_bytes_read_ahead_by_all_ranks_are_those_of_a_node(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    _, size = process_share(open_store("memory://shared"))
    assert ranks * size <= 4 << 30
