"""TableDataset through a loader: epochs from S3 by a cache and workers, resumed in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastload import Cache, DataLoader, File, RandomResizedCrop, TableDataset
from fastload.cli.demo.s3_server import serve_s3
from tests.photos import pillow_jpeg, scene

N = 40


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    root = tmp_path / "bucket"
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True)
    for number in range(N // 2):
        pixels = scene(40, 32, number)
        (root / f"images/{number:03d}.jpg").write_bytes(pillow_jpeg(pixels))
        Image.fromarray(pixels[:, :, 0]).save(root / f"masks/{number:03d}.png")
    lines = [f"{number // 2:03d},{number},caption {number}" for number in range(N)]  # two rows an image
    (root / "rows.csv").write_text("\n".join(["id,number,caption", *lines]))
    return root


def mask_of(data: bytes, key: str) -> Any:
    from io import BytesIO

    return np.append(np.asarray(Image.open(BytesIO(data))).reshape(-1)[:8].astype(np.int64), int(key[6:9]))


@pytest.mark.usefixtures("no_leaks", "no_aws_settings")
def test_two_epochs_resumed_with_other_workers_give_each_row_exactly_once(
    bucket: Path, tmp_path: Path
) -> None:
    with serve_s3(bucket.parent) as server:
        options = server.options

        def loader(workers: int) -> DataLoader[Any]:
            dataset = TableDataset(
                "s3://bucket/rows.csv",
                {
                    "image": File("images/{id}.jpg"),
                    "mask": File("masks/{id}.png", decode=mask_of),
                    "n": "number",
                    "text": "caption",
                },
                url="s3://bucket",
                transform={"image": RandomResizedCrop(16, flip=0.5)},
                cache=Cache(tmp_path / "cache"),
                storage_options=options,
            )
            return DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers, seed=5)

        first, epochs = loader(2), []
        for _ in range(2):
            batches = list(first)
            for batch in batches:
                check(batch)
            epochs.append(numbers(batches))
        iterator = iter(first)
        taken = [next(iterator) for _ in range(4)]
        state = first.state_dict()
        del iterator
        resumed = loader(1)
        resumed.load_state_dict(state)
        rest = list(resumed)
    assert [sorted(epoch) for epoch in epochs] == [list(range(N))] * 2 and epochs[0] != epochs[1]
    assert sorted(numbers(taken + rest)) == list(range(N)) and len(numbers(taken)) == 16
    counters = first.stats()["counters"]
    assert counters["cache.hits"] > 0 and counters["get.samples"] <= 2 * N


def numbers(batches: list[Any]) -> list[int]:
    return [number for batch in batches for number in batch["n"].tolist()]


def check(batch: Any) -> None:
    """The values of each row belong together."""
    assert batch["image"].shape[1:] == (3, 16, 16)
    assert batch["text"] == [f"caption {number}" for number in batch["n"].tolist()]
    for number, mask in zip(batch["n"].tolist(), batch["mask"].tolist(), strict=True):
        assert mask == [*scene(40, 32, number // 2)[0, :8, 0].tolist(), number // 2]
