"""The main job, on a real S3 server: every object's bytes, exactly once an epoch, whatever happens."""

from __future__ import annotations

import multiprocessing
import random
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fastload import Cache, DataLoader, ImageFolder, ObjectDataset, RandomResizedCrop
from fastload.errors import ArgumentError, CacheError, FastloadError, NotFoundError
from tests.bucketdata import PHOTOS, Bucket, digest
from tests.forked import start_afresh
from tests.loaderdata import Stream
from tests.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("no_leaks")


def seen(loader: DataLoader[Any]) -> list[str]:
    return [name for batch in loader for name in batch]


@pytest.mark.parametrize(("num_workers", "shuffle"), [(0, False), (2, True)])
def test_every_object_once_and_bit_identical(
    bucket: Bucket, tmp_path: Path, num_workers: int, shuffle: bool
) -> None:
    place = {"cache": tmp_path / "cache", "storage_options": bucket.options}
    dataset = ObjectDataset("s3://photos", transform=digest, **place)  # type: ignore[arg-type]
    loader = DataLoader(dataset, 7, shuffle, num_workers=num_workers, collate_fn=list)
    expected = sorted(bucket.digests.values())
    for epoch in range(3):
        names = seen(loader)
        assert sorted(names) == expected
        in_order = [bucket.digests[dataset.key(i)] for i in range(len(dataset))]
        assert (names == in_order) is not shuffle
        assert loader.stats()["counters"]["get.requests"] == PHOTOS, f"epoch {epoch} read the store again"
    dataset.close()
    with closing(Cache(tmp_path / "cache")) as cache:
        report = cache.check()
    assert report.ok and report.entries == PHOTOS


@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.stress, id="guard_removed")])
def test_indices_that_are_tensors_are_read_ahead_too(
    bucket: Bucket, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As samplers of masks and permutations give them: a tensor's hash is its address."""
    if not guarded:
        monkeypatch.setattr("operator.index", lambda index: index)
    dataset = ObjectDataset("s3://photos", transform=digest, storage_options=bucket.options)
    order = torch.randperm(PHOTOS, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(dataset, 8, sampler=torch.utils.data.SubsetRandomSampler(order), collate_fn=list)
    assert sorted(seen(loader)) == sorted(bucket.digests.values())
    assert (dataset._outstanding() == 0) is guarded
    assert (loader.stats()["counters"]["get.requests"] == PHOTOS) is guarded
    dataset.close()


# --- bad input


def test_clear_errors_before_any_worker_starts(bucket: Bucket, tmp_path: Path) -> None:
    a_file = tmp_path / "file"
    a_file.write_text("x")
    wrong_key = {**bucket.options, "secret": "f" * 40}
    right = {"storage_options": bucket.options}
    nobody = {"storage_options": bucket.options | {"endpoint_url": "http://127.0.0.1:1"}}
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ArgumentError, "s4", "s4://photos", {}),
        (FastloadError, "missing-bucket", "s3://missing-bucket", right),
        (NotFoundError, "nothing", "s3://photos/nothing", right),
        (PermissionError, "credentials|refused", "s3://photos", {"storage_options": wrong_key}),
        (FastloadError, "127.0.0.1:1", "s3://x", nobody),
        (FastloadError, "no-such-dir", tmp_path / "no-such-dir", {}),
        (CacheError, "file", "s3://photos", {**right, "cache": a_file}),
        (ArgumentError, "is a mode", tmp_path, {"cache": "raw"}),
        (ArgumentError, "cache must be", tmp_path, {"cache": True}),
        (ArgumentError, "lies within", tmp_path, {"cache": tmp_path / "cache"}),
        (ArgumentError, "s3://BUCKET", "obs://photos", {}),
        (ArgumentError, "is it s3://", "photos/train", right),
    ]
    for kind, text, url, arguments in cases:
        start = time.monotonic()
        with pytest.raises(kind, match=text) as caught:
            ImageFolder(url, RandomResizedCrop(32), **arguments)
        assert time.monotonic() - start < 10
        assert "f" * 40 not in str(caught.value)
    with pytest.raises(ArgumentError, match="on_error"):
        DataLoader([1, 2], on_error="ignore")
    with pytest.raises(ArgumentError, match="iterable"):
        DataLoader(Stream(3), on_error="repeat")
    with pytest.raises(ArgumentError, match="'auto', found '2'"):
        DataLoader([1, 2], num_workers="2")


# --- death


def train(cache: Path, options: dict[str, Any], say: Connection) -> None:
    """Read all photos, and tell the size of each batch."""
    start_afresh()
    dataset = ObjectDataset("s3://photos", cache=cache, storage_options=options)
    say.send("start")
    for batch in DataLoader(dataset, 2, shuffle=True, num_workers=2, collate_fn=list):
        say.send(len(batch))


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.stress)])
def test_killed_at_random_moments_of_epoch_one(bucket: Bucket, tmp_path: Path, rounds: int) -> None:
    """kill -9 of the trainer: good entries are kept, no bad sample is served, nothing is left behind."""
    cache = tmp_path / "cache"
    rng = random.Random(rounds + 3)
    context = multiprocessing.get_context("forkserver")
    entries = 0
    for _ in range(rounds):
        said, say = context.Pipe(duplex=False)
        trainer = context.Process(target=train, args=(cache, bucket.options, say))
        trainer.start()
        say.close()
        for _ in range(1 + rng.randrange(PHOTOS // 2)):
            assert said.poll(PATIENCE) and said.recv()
        family = [*psutil.Process(trainer.pid).children(recursive=True)]
        trainer.kill()
        trainer.join()
        trainer.close()
        said.close()
        _, alive = psutil.wait_procs(family, timeout=PATIENCE)
        assert not alive, f"workers outlived the trainer: {alive}"
        with closing(Cache(cache)) as opened:
            report = opened.check()
        assert report.ok, report
        assert report.entries >= entries, "good entries were lost"
        entries = report.entries
    assert entries > 0
    dataset = ObjectDataset("s3://photos", transform=digest, cache=cache, storage_options=bucket.options)
    loader = DataLoader(dataset, 7, num_workers=2, collate_fn=list)
    assert sorted(seen(loader)) == sorted(bucket.digests.values())
    assert loader.stats()["counters"].get("get.requests", 0) == PHOTOS - entries
