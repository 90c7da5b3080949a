"""Batches by a budget from S3 through the cache: other ranks and workers go on, with each sample once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.nn.utils.rnn import pad_sequence

from fastload import BudgetSampler, DataLoader, PackTokens, TokenDataset
from fastload.cli.demo.s3_server import serve_s3
from tests.loaderdata import Gate, Numbers, identity, through_json

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

COUNT, BUDGET = 150, 64
LENGTHS = np.random.default_rng(6).integers(1, 40, COUNT)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The storage options of a server. All tokens of document n of its corpus are n + 1."""
    folder = tmp_path_factory.mktemp("s3") / "bucket"
    folder.mkdir()
    for file, documents in enumerate(np.array_split(np.arange(COUNT), 3)):
        lengths = LENGTHS[documents]
        np.repeat(documents + 1, lengths).astype("<u2").tofile(folder / f"{file}.bin")
        with (folder / f"{file}.ends").open("wb") as index:
            np.save(index, np.cumsum(lengths))
    with serve_s3(folder.parent) as server:
        yield dict(server.options)


def padded(documents: Any) -> Any:
    return pad_sequence(documents, batch_first=True)


class Run:
    """The ranks of a job, one after the other."""

    def __init__(self, ranks: int, workers: int, pack: bool, state: Any, cache: Path, s3: Any) -> None:
        dataset = TokenDataset(
            "s3://bucket", "<u2", BUDGET, documents=".ends", cache=cache, storage_options=s3
        )
        collate: Any = PackTokens(BUDGET) if pack else padded
        self.loaders = []
        for rank in range(ranks):
            sampler = BudgetSampler(
                dataset.sizes, BUDGET, pack=pack, tolerance=0.3, num_replicas=ranks, rank=rank, seed=1
            )
            loader = DataLoader(
                dataset, batch_sampler=sampler, collate_fn=collate, num_workers=workers, seed=3
            )
            if state is not None:
                loader.load_state_dict(through_json(state))
            self.loaders.append(loader)

    def read(self, steps: int | None = None) -> list[list[list[int]]]:
        """The documents of each batch: of each rank in turn."""
        parts = []
        for loader in self.loaders:
            batches, part = iter(loader), []
            while steps is None or len(part) < steps:
                batch = next(batches, None)
                if batch is None:
                    break
                part.append(told(batch))
            parts.append(part)
        return [batch for row in zip(*parts, strict=True) for batch in row]


def told(batch: Any) -> list[int]:
    """The documents in a batch, each of which has to be whole."""
    if isinstance(batch, dict):
        assert batch["tokens"].shape == (BUDGET,)
        rows = batch["tokens"].split(batch["seq_lens"].tolist())
    else:
        assert batch.numel() <= BUDGET
        rows = list(batch)
    found = []
    for row in rows:
        tokens = row[row > 0].tolist()
        if tokens:
            assert set(tokens) == {tokens[0]} and len(tokens) == LENGTHS[tokens[0] - 1]
            found.append(tokens[0] - 1)
    return found


@pytest.mark.parametrize("pack", [pytest.param(False, marks=pytest.mark.stress), True])
def test_other_ranks_and_workers_go_on_with_each_sample_once(
    pack: bool, s3: dict[str, Any], tmp_path: Path
) -> None:
    unbroken = Run(1, 0, pack, None, tmp_path / "other", s3)
    state = None
    for ranks, workers, others, their_workers in ((2, 1, 3, 0), (3, 0, 1, 2)):
        order = unbroken.read()
        assert Counter(document for batch in order for document in batch) == Counter(range(COUNT))
        begun = Run(ranks, workers, pack, state, tmp_path / "cache", s3)
        read = begun.read(5)
        assert read == order[: 5 * ranks]
        run = Run(others, their_workers, pack, begun.loaders[-1].state_dict(), tmp_path / "cache", s3)
        rest = run.read()
        left = order[5 * ranks :]
        assert rest[: len(left)] == left
        assert rest[len(left) :] == order[: -len(left) % others], "the first batches fill the last step"
        state = run.loaders[0].state_dict()
    counters = run.loaders[0].stats()["counters"]
    assert counters["cache.hits"] and not counters.get("get.samples"), "the second epoch reads the cache"


def test_state_of_packed_batches_out_of_order_fits_an_epoch_of_another_length(tmp_path: Path) -> None:
    sizes = np.random.default_rng(6).integers(20, 45, 2_100)  # enough for several windows

    def make(epoch: int = 0) -> BudgetSampler:
        sampler = BudgetSampler(sizes, budget=100, pack=True, num_replicas=1, rank=0, seed=2)
        sampler.set_epoch(epoch)
        return sampler

    def run(sampler: BudgetSampler, make_sample: Any, **options: Any) -> Any:
        return DataLoader(
            Numbers(len(sizes), make_sample), batch_sampler=sampler, collate_fn=identity, **options
        )

    epoch = next(epoch for epoch in range(1, 20) if len(make(epoch)) != len(make()))
    first, gate = next(iter(make(epoch)))[0], Gate(tmp_path / "gate")
    saved = run(make(epoch), lambda index: gate(index - first) + first, num_workers=2, in_order=False)
    iterator = iter(saved)
    seen = list(itertools.islice(iterator, 2))
    state = through_json(saved.state_dict())
    (tmp_path / "gate").touch()
    del iterator
    assert state["ahead"] and not state["batches"]
    resumed = run(make(), int)
    resumed.load_state_dict(state)
    assert Counter(itertools.chain(*seen, *resumed)) == Counter(range(len(sizes)))
