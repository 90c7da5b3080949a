"""`python -m bench moxing`: what its rows read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.data import make_shards, photo_folder
from bench.measure import moxing
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
