"""Samplers and transforms of fastload keep the promises of `fastload.testing`; datasets: `test_kinds`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import fastload
from fastload import CenterCrop, RandomResizedCrop
from fastload.testing import SamplerTests, TransformTests
from tests.kinds import COUNT, photo, write_tar

# --- samplers


class TestDistributedSampler(SamplerTests):
    length = 29
    cover = "padded"

    def make(self, rank: int, world_size: int) -> Any:
        return fastload.DistributedSampler(range(self.length), world_size, rank, seed=5)


class TestDistributedSamplerThatDropsTheLast(SamplerTests):
    length = 29
    cover = "cut"

    def make(self, rank: int, world_size: int) -> Any:
        return fastload.DistributedSampler(range(self.length), world_size, rank, drop_last=True)


class TestDistributedSamplerForEvaluation(SamplerTests):
    length = 29

    def make(self, rank: int, world_size: int) -> Any:
        return fastload.DistributedSampler(range(self.length), world_size, rank, mode="eval")


class TestDistributedSamplerByNode(SamplerTests):
    length = 32
    world_sizes = (1, 2, 4)
    cover = "padded"

    def make(self, rank: int, world_size: int) -> Any:
        nodes = min(2, world_size)
        return fastload.DistributedSampler(
            range(self.length), world_size, rank, partition="node", exchange=0.25, num_nodes=nodes
        )


class TestShardSampler(SamplerTests):
    length = COUNT
    cover = "padded"

    @pytest.fixture(autouse=True)
    def _shards(self, tmp_path: Path) -> None:
        self.shards = tmp_path / "shards"
        write_tar(self.shards, photo, index=True)

    def make(self, rank: int, world_size: int) -> Any:
        dataset = fastload.TarDataset(self.shards)
        return fastload.ShardSampler(dataset, world_size, rank)


class TestBudgetSampler(SamplerTests):
    length = 40
    world_sizes = (1,)  # where several ranks read whole batches twice, or leave them out
    options: ClassVar[dict[str, Any]] = {"tolerance": 0.3, "together": 2}

    def make(self, rank: int, world_size: int) -> Any:
        sizes = [1 + index % 7 for index in range(self.length)]
        return fastload.BudgetSampler(
            sizes, budget=15, num_replicas=world_size, rank=rank, seed=4, **self.options
        )


class TestBudgetSamplerThatPacks(TestBudgetSampler):
    options: ClassVar[dict[str, Any]] = {"pack": True}


class TestMixtureSampler(SamplerTests):
    length = 40
    cover = "any"
    test_set_epoch_gives_the_order_of_that_epoch = None  # an epoch goes on where the last one ended
    test_indices_are_those_of_the_dataset = None  # an index has the pass over its source too
    test_state_resumes_with_the_next_index = None

    def make(self, rank: int, world_size: int) -> Any:
        mixture = fastload.Mixture([list(range(30)), list(range(10))], [0.6, 0.4])
        return fastload.MixtureSampler(mixture, world_size, rank)


# --- transforms


class TestRandomResizedCrop(TransformTests):
    out = "uint8", (3, 20, 16)
    random = True
    start_methods = ("fork",)

    def make(self) -> Any:
        return RandomResizedCrop((20, 16), flip=0.5)


class TestCenterCrop(TransformTests):
    out = "uint8", (3, 24, 24)
    random = False
    start_methods = ("fork",)

    def make(self) -> Any:
        return CenterCrop(24, resize=30)


class TestNormalize(TransformTests):
    out = "bfloat16", (2, 3, 8, 8)
    random = False
    start_methods = ("fork",)

    def make(self) -> Any:
        return fastload.Normalize([0.5] * 3, [0.2] * 3, dtype=torch.bfloat16, channels_last=True)

    def inputs(self) -> Any:
        return [torch.full((2, 8, 8, 3), value, dtype=torch.uint8) for value in (0, 100, 255)]
