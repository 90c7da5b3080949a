"""Training on tokens from S3: through workers and a cache, stopped in the middle, each sample once."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastload import DataLoader, DistributedSampler, TokenDataset
from fastload.cli.demo.s3_server import serve_s3

pytestmark = pytest.mark.usefixtures("no_leaks")

# The first token of each sample is its number; objects end within samples.
BLOCK = 16
SAMPLES = 150
TOKENS = np.tile(np.arange(SAMPLES, dtype=np.uint16)[:, None], (1, BLOCK)).ravel()
CUTS = [1000, 1007, 2000]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    root = tmp_path_factory.mktemp("s3")
    (root / "corpus").mkdir()
    for number, tokens in enumerate(np.split(TOKENS, CUTS)):
        tokens.tofile(root / "corpus" / f"{number:03d}.bin")
    with serve_s3(root) as server:
        yield {"endpoint_url": server.endpoint_url, "key": server.key, "secret": server.secret}


def dataset(bucket: dict[str, Any], cache: Path | None = None) -> TokenDataset:
    return TokenDataset("s3://corpus", "uint16", BLOCK, cache=cache, storage_options=bucket)


def numbers(batches: Any) -> list[int]:
    found: list[int] = []
    for batch in batches:
        assert batch.dtype == torch.int64 and bool((batch == batch[:, :1]).all())
        found += batch[:, 0].tolist()
    return found


def test_two_epochs_resume_with_other_workers_and_give_every_sample_once(
    bucket: dict[str, Any], tmp_path: Path
) -> None:
    first = dataset(bucket, tmp_path / "cache")
    run = DataLoader(first, 8, shuffle=True, num_workers=2, seed=5)
    whole = numbers(run)
    assert sorted(whole) == list(range(SAMPLES)) and whole != sorted(whole)
    iterator = iter(run)
    begun = numbers(next(iterator) for _ in range(7))
    state = json.loads(json.dumps(run.state_dict()))
    del iterator
    first.close()

    second = dataset(bucket, tmp_path / "cache")
    resumed = DataLoader(second, 8, shuffle=True, num_workers=1, seed=5)
    resumed.load_state_dict(state)
    rest = numbers(resumed)
    assert sorted(begun + rest) == list(range(SAMPLES))
    assert resumed.stats()["counters"].get("get.requests", 0) == 0  # the first epoch has filled the cache
    second.close()


def test_two_ranks_share_every_sample_once(bucket: dict[str, Any]) -> None:
    seen: Counter[int] = Counter()
    for rank in range(2):
        part = pickle.loads(pickle.dumps(dataset(bucket)))
        sampler = DistributedSampler(part, num_replicas=2, rank=rank, seed=1)
        seen.update(numbers(DataLoader(part, 8, sampler=sampler)))
        part.close()
    assert sorted(seen.elements()) == list(range(SAMPLES))
