"""fastload's own datasets, samplers and transforms keep the promises of `fastload.testing`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import fastload
from fastload import CenterCrop, File, RandomResizedCrop
from fastload.testing import DatasetTests, IterableDatasetTests, SamplerTests, TransformTests
from tests.photos import pillow_jpeg, scene
from tests.sharddata import shard, write

COUNT = 13
CROP = RandomResizedCrop(12, flip=0.5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, a damaged copy of their folder, and the same in shards and a Parquet file."""
    root = tmp_path_factory.mktemp("data")
    photos = [pillow_jpeg(scene(32 + k, 40 - k, k)) for k in range(COUNT)]
    for number, photo in enumerate(photos):
        for folder in ("photos", "damaged"):
            path = root / folder / ("a", "b")[number % 2] / f"{number:02d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"no photo" if folder == "damaged" and number in (4, 9) else photo)
    for kind in ("tar", "tfrecord"):
        first, objects = 0, {}
        for part, count in enumerate((6, 0, 7)):
            body, index = shard(kind, range(first, first + count))
            objects |= {f"{part}.{kind}": body}
            (root / f"{kind}-indexed").mkdir(exist_ok=True)
            (root / f"{kind}-indexed" / f"{part}.{kind}.idx").write_bytes(index)
            first += count
        write(root / kind, objects)
        write(root / f"{kind}-indexed", objects)
    (root / "tokens").mkdir()
    for part, first in enumerate((0, 90)):
        np.arange(first, first + 90, dtype=np.uint16).tofile(root / "tokens" / f"{part}.bin")
    (root / "parquet").mkdir()
    table = pa.table({"image": photos, "number": range(COUNT)})
    pq.write_table(table, root / "parquet" / "part.parquet", row_group_size=5)
    lines = [f"{('a', 'b')[n % 2]}/{n:02d}.jpg,{n}" for n in range(COUNT)]
    (root / "rows.csv").write_text("\n".join(["file,number", *lines]))
    return root


class OfDatasets(DatasetTests):
    start_methods: ClassVar[Any] = ("fork",)
    num_workers: ClassVar[Any] = (2,)
    root: Path

    @pytest.fixture(autouse=True)
    def _paths(self, data: Path, tmp_path: Path) -> None:
        self.root, self.cache = data, tmp_path / "cache"


class TestImageFolder(OfDatasets):
    """The fork server has everything imported already: it pickles as spawn does, and costs less."""

    random = True
    start_methods = ("fork", "forkserver")
    num_workers = (1, 2)

    def make(self) -> Any:
        return fastload.ImageFolder(self.root / "photos", CROP)

    def make_damaged(self) -> Any:
        return fastload.ImageFolder(self.root / "damaged", CROP), self.bad

    bad: ClassVar[list[int]] = [2, 11]  # in the order of the classes


class TestObjectDataset(OfDatasets):
    def make(self) -> Any:
        return fastload.ObjectDataset(self.root / "photos", decode=len, cache=self.cache)


class TestTarDataset(OfDatasets):
    random = True

    def make(self) -> Any:
        return fastload.TarDataset(self.root / "tar-indexed", transform={"jpg": CROP})

    def identify(self, sample: Any) -> Any:
        return sample["__key__"]


class TestTFRecordDataset(OfDatasets):
    random = True

    def make(self) -> Any:
        features = {"image": bytes, "label": int}
        return fastload.TFRecordDataset(self.root / "tfrecord-indexed", features, transform={"image": CROP})

    def identify(self, sample: Any) -> Any:
        return sample["label"]


class TestTableDataset(OfDatasets):
    random = True

    def make(self) -> Any:
        fields = {"image": File("file"), "number": "number"}
        table = self.root / "rows.csv"
        return fastload.TableDataset(table, fields, url=self.root / "photos", transform={"image": CROP})

    def identify(self, sample: Any) -> Any:
        return sample["number"]


class TestParquetDataset(OfDatasets):
    random = True

    def make(self) -> Any:
        filters = [("number", ">", 2)]
        crops = {"image": CROP}
        return fastload.ParquetDataset(
            self.root / "parquet", transform=crops, filters=filters, cache=self.cache
        )

    def identify(self, sample: Any) -> Any:
        return sample["number"]


class TestTokenDataset(OfDatasets):
    random = False

    def make(self) -> Any:
        return fastload.TokenDataset(self.root / "tokens", "uint16", 16, overlap=1)


class Squares(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < COUNT:
            raise IndexError(index)
        return {"number": index, "square": torch.tensor(index**2)}


class TestCached(OfDatasets):
    def make(self) -> Any:
        return fastload.cached(Squares(), self.cache, fingerprint="squares")

    def identify(self, sample: Any) -> Any:
        return sample["number"]


def doubled(sample: Any) -> Any:
    image, label = sample
    return image, 2 * label, torch.rand(())


class TestMap(OfDatasets):
    random = True

    def make(self) -> Any:
        return fastload.map(fastload.ImageFolder(self.root / "photos", CROP), doubled)


class TestMixture(OfDatasets):
    random = True
    test_order_does_not_change_a_sample = None  # a mixture has a sampler of its own ...
    test_loader_gives_the_samples_of_the_dataset = None  # ... whose order is not that of the indices

    def make(self) -> Any:
        photos = fastload.ImageFolder(self.root / "photos", CROP)
        numbers = fastload.ObjectDataset(self.root / "photos", decode=len)
        return fastload.Mixture({"photos": photos, "numbers": numbers}, [0.7, 0.3])


class StreamedShards(IterableDatasetTests):
    """Shards without an index."""

    start_methods = ("fork",)
    kind: str

    @pytest.fixture(autouse=True)
    def _paths(self, data: Path) -> None:
        self.root = data / self.kind


class TestTarStreams(StreamedShards):
    kind = "tar"

    def make(self) -> Any:
        return fastload.TarDataset(self.root, transform={"jpg": CROP})

    def identify(self, sample: Any) -> Any:
        return sample["__key__"]


class TestTFRecordStreams(StreamedShards):
    kind = "tfrecord"

    def make(self) -> Any:
        return fastload.TFRecordDataset(self.root, {"image": bytes, "label": int})


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
    def _paths(self, data: Path) -> None:
        self.root = data

    def make(self, rank: int, world_size: int) -> Any:
        dataset = fastload.TarDataset(self.root / "tar-indexed")
        return fastload.ShardSampler(dataset, world_size, rank)


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
