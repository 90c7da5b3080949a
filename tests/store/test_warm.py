"""`fastload warm`: what it has filled, training reads without a GET; resumable, and shared by nodes."""

from __future__ import annotations

import io
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload import (
    Cache,
    DataLoader,
    DistributedSampler,
    ImageFolder,
    ObjectDataset,
    RandomResizedCrop,
    TFRecordDataset,
)
from fastload.cli.demo.photos import make_dataset
from fastload.cli.demo.s3_server import delay_proxy
from fastload.cli.warming import share_of
from fastload.datasets.warm import Warmed
from fastload.errors import ArgumentError, CacheError
from fastload.formats.tfrecord import TFRecordWriter
from tests.bucketdata import PHOTOS, Bucket
from tests.commands import answer, command, document, run, start
from tests.patience import PATIENCE, wait_until
from tests.sharddata import write

Warm = Callable[..., tuple[int, dict[str, Any]]]

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture
def warm(bucket: Bucket) -> Warm:
    """(exit code, document) of the command, for the photos of the server."""
    return lambda cache, *more: bucket.run("warm", "s3://photos", "--cache", cache, "--num-workers", 2, *more)


def epoch(dataset: Any, **options: Any) -> int:
    return sum(len(batch[0]) for batch in DataLoader(dataset, 16, **options))


@pytest.mark.parametrize("mode", ["auto", "shrunk"])
def test_training_after_warm_makes_no_get(bucket: Bucket, warm: Warm, tmp_path: Path, mode: str) -> None:
    settings = ["--mode", mode, "--short-side", 128, "--quality", 80]
    code, document = warm(tmp_path / "cache", *settings)
    assert code == 0
    counts = [document[name] for name in ("objects", "stored", "skipped", "failed", "left")]
    assert counts == [PHOTOS, PHOTOS, 0, 0, 0]
    assert document["cache"]["entries"] == PHOTOS
    assert document["read_bytes"] > 50_000 * PHOTOS

    before = bucket.proxy.counts()
    cache = Cache(tmp_path / "cache", mode, short_side=128, quality=80)  # type: ignore[arg-type]
    asked = {"cache": cache, "storage_options": bucket.options}
    trained = ImageFolder("s3://photos", RandomResizedCrop(64), listing_max_age="1h", **asked)  # type: ignore[arg-type]
    assert epoch(trained, num_workers=2) == PHOTOS
    now = bucket.proxy.counts()
    assert (now.object_gets, now.listings) == (before.object_gets, before.listings), "not even a listing"
    assert epoch(ImageFolder("s3://photos", RandomResizedCrop(64), **asked)) == PHOTOS  # type: ignore[arg-type]
    now = bucket.proxy.counts()
    assert now.object_gets == before.object_gets and now.listings > before.listings

    # Another quality or side is another result, which the cache does not have.
    if mode == "shrunk":
        other = Cache(tmp_path / "cache", mode, short_side=64)  # type: ignore[arg-type]
        epoch(ImageFolder("s3://photos", RandomResizedCrop(64), cache=other, storage_options=bucket.options))
        assert bucket.gets() == now.object_gets + PHOTOS


def test_warm_reports_and_skips_a_bad_object(tmp_path: Path) -> None:
    make_dataset(tmp_path / "damaged", 6, 2)
    (tmp_path / "damaged" / "class_01" / "img_00001.jpg").write_bytes(b"<html>no such photo</html>")
    words = ["--cache", tmp_path / "cache", "--mode", "shrunk"]
    code, document = run("warm", tmp_path / "damaged", *words)
    assert code == 1
    assert (document["stored"], document["failed"], document["left"]) == (5, 1, 0)
    (failure,) = document["failures"]
    assert failure["key"] == "class_01/img_00001.jpg"
    assert "DecodeError" in failure["error"] and "HTML" in failure["error"]


def test_object_that_changed_is_kept_as_the_version_that_was_read(tmp_path: Path) -> None:
    url = write(tmp_path / "data", {"a": b"old"})
    options = {"cache": Cache(tmp_path / "cache", "raw")}
    listed_before = ObjectDataset(url, on_change="refresh", **options)  # type: ignore[arg-type]
    write(tmp_path / "data", {"a": b"newer"})
    assert list(listed_before.warm([0])) == [Warmed(0, "stored", 5)]
    listed_now = ObjectDataset(url, **options)  # type: ignore[arg-type]
    assert (listed_before.contains(0), listed_now.contains(0)) == (False, True)
    assert bytes(listed_now[0]) == b"newer"
    listed_now.close()
    listed_before.close()


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.stress), 2])
def test_full_cache_ends_the_warming(bucket: Bucket, warm: Warm, tmp_path: Path, workers: int) -> None:
    before, limited = bucket.gets(), ["--size-limit", "1500KB", "--num-workers", workers]
    code, document = warm(tmp_path, *limited)
    assert (code, document["full"]) == (0, True)
    assert document["stored"] + document["left"] == PHOTOS and 0 < document["stored"] < PHOTOS / 2
    assert document["cache"]["bytes"] <= 1_500_000
    entries = document["cache"]["entries"]
    assert entries == document["stored"], "also what was dropped at the last moment is left"
    assert bucket.gets() - before <= PHOTOS
    again = warm(tmp_path, *limited)[1]
    assert (again["skipped"], again["full"]) == (document["stored"], True)
    assert again["stored"] + again["left"] == document["left"], "a smaller object may have found room"


def test_warm_after_ctrl_c_keeps_its_records(bucket: Bucket, tmp_path: Path) -> None:
    # Behind a slow line, so that there is an end to interrupt.
    with delay_proxy(bucket.server.endpoint_url, 0.25) as proxy:
        slow = Bucket(proxy, bucket.server, bucket.root)
        words = ["warm", "s3://photos", "--cache", tmp_path, "--num-workers", 2]
        with start(*slow.words(*words), "--storage-option", "max_requests=4") as running:
            wait_until(lambda: slow.gets() >= 10 or running.poll() is not None, "it reads")
            assert running.poll() is None, running.communicate()
            os.killpg(running.pid, signal.SIGINT)
            out, err = running.communicate(timeout=PATIENCE)
        assert running.returncode == 130, err
        assert "Traceback" not in err and "run the same command" in err
        found = document(out)
        kept = found["cache"]["entries"]
        assert found["interrupted"] and 0 < kept < PHOTOS
        proxy.set_round_trip(0.001)
        _, rest = slow.run(*words, "--num-workers", 0)
        assert (rest["skipped"], rest["stored"]) == (kept, PHOTOS - kept)


def test_shards_of_warm_are_disjoint_and_complete(bucket: Bucket, warm: Warm, tmp_path: Path) -> None:
    """Each of 2 nodes warms its share; in training its 2 ranks then read the store for nothing."""
    before = bucket.gets()
    for node in range(2):
        _, document = warm(tmp_path / str(node), "--share", f"{node}/2", "--num-workers", 0)
        assert (document["objects"], document["settings"]["share"]) == (PHOTOS // 2, [node, 2])
    assert bucket.gets() == before + PHOTOS
    for node in range(2):
        options = bucket.options
        dataset = ImageFolder(
            "s3://photos", RandomResizedCrop(64), cache=str(tmp_path / str(node)), storage_options=options
        )
        for rank in (2 * node, 2 * node + 1):
            sampler = DistributedSampler(dataset, 4, rank, partition="node", num_nodes=2, seed=5)
            assert epoch(dataset, sampler=sampler) == PHOTOS // 4
    assert bucket.gets() == before + PHOTOS


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_ranks_of_launchers_share_the_work(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = range(61)
    parts = []
    for rank in range(6):
        node, local = divmod(rank, 3)
        names = {"RANK": rank, "WORLD_SIZE": 6, "GROUP_RANK": node, "LOCAL_RANK": local}
        names |= {"LOCAL_WORLD_SIZE": 3}
        if launcher == "srun":
            names = {"SLURM_PROCID": rank, "SLURM_NTASKS": 6}
            names |= {"SLURM_NODEID": node, "SLURM_LOCALID": local, "SLURM_NNODES": 2}
        for name, value in names.items():
            monkeypatch.setenv(name, str(value))
        samples, found = share_of(dataset, None)
        assert found == (rank, 6)
        parts.append(set(samples.tolist()))
    assert sorted(itertools.chain(*parts)) == list(dataset)
    for node in range(2):
        assert set().union(*parts[3 * node : 3 * node + 3]) == set(share_of(dataset, (node, 2))[0].tolist())


def test_launcher_without_node_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ArgumentError, match="give --share I/N"):
        share_of(range(10), None)


@pytest.mark.parametrize("share", ["2/2", "1", "a/b", "-1/2", "/"])
def test_invalid_share_is_refused(share: str, tmp_path: Path) -> None:
    refused = answer("warm", "s3://x", "--cache", tmp_path, f"--share={share}", code=2)
    assert "give I/N" in refused["error"]["message"]


# --- ObjectDataset.warm, in this process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(write(tmp_path / "data", {f"{i:02}": bytes([i]) * 50_000 for i in range(40)}))


def test_warm_sees_what_has_changed_unless_told_of_an_age(folder: Path, tmp_path: Path) -> None:
    words = ["warm", folder, "--cache", tmp_path / "c", "--from", "objects", "--num-workers", 0]

    def counts(*more: str) -> list[int]:
        found = answer(*words, *more)
        return [found[name] for name in ("objects", "stored", "skipped")]

    assert counts() == [40, 40, 0]
    (folder / "00").write_bytes(b"other bytes")
    (folder / "01").unlink()
    (folder / "more").write_bytes(b"a new object")
    assert counts("--listing-max-age", "12h") == [40, 0, 40]
    assert counts() == [40, 2, 38]
    refused = answer(*words, "--listing-max-age", "1w", code=2)
    assert "listing_max_age='1w'" in refused["error"]["message"]


def test_warming_waits_for_a_full_queue(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.cache.writer.QUEUE_BYTES", 100_000)
    dataset = ObjectDataset(str(folder), cache=tmp_path / "cache")
    assert list(dataset.warm(range(40))) == [Warmed(i, "stored", 50_000) for i in range(40)]
    dataset.close()
    assert list(dataset.warm(range(40))) == [Warmed(i, "present") for i in range(40)]
    dataset.close()
    # Training does not wait, and drops records with the same queue.
    dataset = ObjectDataset(str(folder), cache=tmp_path / "other")
    for i in range(40):
        assert dataset[i] == bytes([i]) * 50_000
    dataset._flush_cache()
    assert dataset.counters["cache.dropped"] > 0
    dataset.close()


def outcomes_of(dataset: ObjectDataset, count: int) -> list[str]:
    found: dict[int, str] = {}
    for warmed in dataset.warm(range(count)):
        found[warmed.sample] = warmed.outcome
    return [found[sample] for sample in sorted(found)]


@pytest.mark.parametrize("mode", ["raw", "decoded"])
def test_object_too_large_for_a_record_is_skipped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """One above 1 GiB, for which a smaller limit stands here. Mode "decoded" finds out by reading it."""
    monkeypatch.setattr("fastload.cache.cache.MAX_PAYLOAD", 60_000)
    (folder / "01").write_bytes(b"x" * 60_001)
    dataset = ObjectDataset(str(folder), decode=bytes, cache=Cache(tmp_path / "cache", mode))
    assert outcomes_of(dataset, 40) == ["stored", "too large", *["stored"] * 38]
    assert dataset.cache is not None and dataset.cache.info()["entries"] == 39
    assert outcomes_of(dataset, 40) == ["present", "too large", *["present"] * 38]
    assert dataset.cache._lock_inflight(dataset._cache_keys(1)[0]), "its in-flight lock was given back"
    dataset.close()
    dataset.cache.close()


@pytest.mark.parametrize("mode", ["raw", "decoded"])
def test_object_too_large_for_the_free_space_is_skipped(folder: Path, tmp_path: Path, mode: Any) -> None:
    """The ones after it go on until an average one does not fit: then the cache is full."""
    (folder / "05").write_bytes(b"x" * 400_000)
    (folder / "06").write_bytes(b"x" * 900_000)
    cache = Cache(tmp_path / "cache", mode, size_limit=1_020_000)
    dataset = ObjectDataset(str(folder), decode=bytes, cache=cache)
    found = outcomes_of(dataset, 40)
    # 600 KB are left for the small ones, of 50,080 bytes: five are there before, seven come after.
    assert found[:20] == [*["stored"] * 6, "too large", *["stored"] * 7, *found[14:20]]
    assert found[-1] == "full" and set(found[14:-1]) <= {"too large"} and len(found) < 20
    assert cache.info()["entries"] == 13
    dataset.close()
    cache.close()


def test_warm_continues_after_a_first_object_beyond_the_limit(folder: Path, tmp_path: Path) -> None:
    (folder / "00").write_bytes(b"x" * 900_000)
    cache = Cache(tmp_path / "cache", "decoded", size_limit="300KB")
    dataset = ObjectDataset(str(folder), decode=bytes, cache=cache)
    found = outcomes_of(dataset, 40)
    assert found[0] == "too large" and found.count("stored") == 5 and found[-1] == "full"
    dataset.close()
    cache.close()


def test_warm_counts_objects_that_are_too_large(folder: Path, tmp_path: Path) -> None:
    (folder / "05").write_bytes(b"x" * 5_000_000)
    words = ["--cache", tmp_path / "cache", "--from", "objects", "--num-workers", 0, "--size-limit", "4MB"]
    done = command("warm", folder, *words)
    assert done.exit_code == 0, done.output
    assert "too large for the cache: 1 objects" in done.output and "is full" not in done.output
    found = answer("warm", folder, *words)
    counts = [found[name] for name in ("objects", "stored", "skipped", "failed", "too_large", "left")]
    assert counts == [40, 0, 39, 0, 1, 1] and found["full"] is False


def test_missing_object_is_an_outcome(folder: Path, tmp_path: Path) -> None:
    dataset = ObjectDataset(str(folder), cache=tmp_path / "cache")
    (folder / "07").unlink()
    outcomes = list(dataset.warm(range(40)))
    assert [warmed.sample for warmed in outcomes if warmed.outcome != "stored"] == [7]
    assert "NotFoundError" in outcomes[7].error
    (folder / "07").write_bytes(b"x")
    assert dataset.cache._lock_inflight(dataset._cache_keys(7)[0]), "its in-flight lock was given back"
    dataset.close()


def refuses_one(data: bytes) -> bytes:
    if data[:1] == b"\1":
        raise KeyError("label")
    return data


def test_object_that_decode_refuses_is_an_outcome(folder: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", "decoded")
    dataset = ObjectDataset(str(folder), decode=refuses_one, cache=cache)
    outcomes = list(dataset.warm(range(3)))
    assert [warmed.outcome for warmed in outcomes] == ["stored", "failed", "stored"]
    assert outcomes[1].error == "KeyError: 'label'"
    assert cache._lock_inflight(dataset._cache_keys(1)[0]), "its in-flight lock was given back"
    dataset.close()
    cache.close()


def test_record_that_decode_refuses_is_an_outcome(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", "decoded")
    writer = TFRecordWriter(file := io.BytesIO())
    for number in range(3):
        writer.write(bytes([number]) * 9)
    url = write(tmp_path / "data", {"a.tfrecord": file.getvalue()})
    dataset = TFRecordDataset(url, decode=refuses_one, cache=cache)
    outcomes = list(dataset._warm_shards([0]))
    assert sorted(warmed.outcome for warmed in outcomes) == ["failed", "stored", "stored"]
    assert [warmed.error for warmed in outcomes if warmed.error] == ["KeyError: 'label'"]
    dataset.close()
    cache.close()


def test_closing_the_iterator_keeps_stored_records(folder: Path, tmp_path: Path) -> None:
    dataset = ObjectDataset(str(folder), cache=tmp_path / "cache")
    outcomes = dataset.warm(range(40))
    assert [next(outcomes).outcome for _ in range(10)] == ["stored"] * 10
    outcomes.close()  # type: ignore[attr-defined]
    assert dataset.cache.info()["entries"] == 10
    assert all(dataset.cache._lock_inflight(dataset._cache_keys(i)[0]) for i in range(10, 40))
    dataset.close()


def test_broken_cache_is_an_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastload.cache.writer.Writer._check_disk", full)
    dataset = ObjectDataset(str(folder), cache=tmp_path / "cache")
    with (
        pytest.warns(RuntimeWarning, match="No space left"),
        pytest.raises(CacheError, match="takes no more"),
    ):
        list(itertools.chain.from_iterable(dataset.warm(range(40)) for _ in range(2)))
    dataset.close()


def test_warming_without_a_cache_is_an_error(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="cache="):
        ObjectDataset(str(folder)).warm([0])
