"""`python -m bench moxing`: what its rows read, and what its table says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.data import make_shards, photo_folder
from bench.measure import moxing
from bench.show import moxing_table
from fastload import Cache
from fastload.cli.demo.s3_server import serve_s3

IMAGES = 16


def test_images_and_records_are_decoded_and_bytes_are_not(tmp_path: Path) -> None:
    photos = photo_folder(IMAGES, moxing.QUALITY)
    shards = make_shards(photos, IMAGES, "tfrecord")
    with serve_s3(photos.parent) as server:
        made = moxing.makers(photos, shards, server.options)
        assert made["bytes"](None)[0].startswith(b"\xff\xd8")
        image, _ = made["images"](None)[0]
        batches = list(moxing.shuffled(made["tfrecord"](None)))
        for kind in ("images", "tfrecord"):
            moxing.over_a_full_cache(made[kind], tmp_path / kind, IMAGES, "decoded", moxing.HEIGHT)
            kept = Cache(tmp_path / kind, "decoded").info()["bytes"] / IMAGES
            assert kept == pytest.approx(moxing.WIDTH * moxing.HEIGHT * 3, rel=0.01)
    assert (image.shape, image.dtype) == ((3, moxing.SIZE, moxing.SIZE), torch.uint8)
    assert sum(len(batch["image"]) for batch in batches) == IMAGES
    assert batches[0]["image"].shape[1:] == image.shape and batches[0]["image"].dtype == torch.uint8


def test_shares_of_the_demand_are_those_of_the_row() -> None:
    rates = dict.fromkeys(("bytes, without", "bytes, raw", "images, without", "images, raw"), 750.0)
    rates |= {"images, decoded": 6200.0}
    rates |= {f"tfrecord, {mode}": 1500.0 for mode in ("without", "raw", "decoded")}
    document = {"rates": rates, "megabytes": dict.fromkeys(rates, 1.0)}
    rows = {tuple(row[:2]): row for row in moxing_table.cells(document)}
    columns = [heading.split(" takes")[0] for heading in moxing_table.headings()]
    assert rows["images", "decoded"][columns.index("8xP100")] == "0.50x / 4.13x"
    assert rows["images", "decoded"][columns.index("8xV100 FP16")] == "0.24x / 2.00x"
    assert rows["images", "raw"][columns.index("8xP100")] == "0.50x / 0.50x"
    assert rows["tfrecord", "decoded"][columns.index("H100")] == "0.84x / 0.84x"
    assert rows["tfrecord", "decoded"][columns.index("MoXing 2018, without")] == "139.06 MB/s"
