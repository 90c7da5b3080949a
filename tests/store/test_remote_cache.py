"""`Cache(remote=, push=)`: nodes take from each other what they have read; training survives its failures."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload import Cache, DataLoader, DistributedSampler, ImageFolder, RandomResizedCrop, open_store
from fastload.cache import remote as remote_module
from fastload.cache.pull import pull
from fastload.cache.push import push
from fastload.cache.remote import close_all, remote_of
from fastload.errors import ArgumentError
from tests.bucketdata import Bucket
from tests.cachedata import fill
from tests.faultserver import Fault, FaultServer
from tests.patience import PATIENCE, wait_until

pytestmark = pytest.mark.usefixtures("no_aws_settings")

COUNT = 40
SIZE = 3000


@pytest.fixture(autouse=True)
def ended(no_leaks: None) -> Iterator[None]:
    """No test leaves a process that pulls or pushes."""
    yield
    close_all()


def packs_url(bucket: Bucket, tmp_path: Path) -> fastload.store.Store:
    return open_store(f"s3://packs/{tmp_path.name}", **bucket.options)


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer({}) as server:
        yield server


class Node:
    """A node with a cache of its own, in this process."""

    def __init__(self, bucket: Bucket, path: Path, **options: Any) -> None:
        self.cache = Cache(path, "raw", **options)
        self.dataset = ImageFolder(
            "s3://photos", RandomResizedCrop(16), cache=self.cache, storage_options=bucket.options
        )

    def train(self, epochs: int = 1, **options: Any) -> dict[str, float]:
        """The counters of some epochs, each of which sees each sample once."""
        loader = DataLoader(self.dataset, 8, **{"num_workers": 2, "shuffle": True} | options)
        for _ in range(epochs):
            labels = [label for _, labels in loader for label in labels.tolist()]
            assert Counter(labels) == Counter(self.dataset.targets)
        return dict(loader.stats()["counters"])

    def end(self) -> None:
        """As at the end of a script."""
        self.dataset.close()
        close_all()


def test_second_node_takes_from_the_first_and_asks_for_no_object(bucket: Bucket, tmp_path: Path) -> None:
    url = packs_url(bucket, tmp_path)
    first = Node(bucket, tmp_path / "first", remote=url, push=True)
    assert first.train()["get.requests"] == COUNT
    first.end()
    second = Node(bucket, tmp_path / "second", remote=url)
    listed = bucket.proxy.counts()
    counters = second.train()
    assert counters["cache.hits"] == COUNT and not counters.get("get.requests")
    assert counters["cache.pulled"] == COUNT
    assert bucket.proxy.counts().object_gets - listed.object_gets <= 3, (
        "the index and the records of one pack"
    )


def test_what_is_published_later_comes_with_a_later_epoch(bucket: Bucket, tmp_path: Path) -> None:
    url = packs_url(bucket, tmp_path)
    node = Node(bucket, tmp_path / "second", remote=url)
    loader = DataLoader(node.dataset, 8)
    iterator = iter(loader)
    other = Cache(tmp_path / "other")
    content = fill(other, 10)
    other.close()
    push(Cache(tmp_path / "other"), url)
    list(iterator)
    pulled = 0.0
    deadline = time.monotonic() + PATIENCE
    while pulled < 10 and time.monotonic() < deadline:
        list(loader)
        pulled = loader.stats()["counters"].get("cache.pulled", 0)
    assert pulled == 10
    assert all(node.cache.has(key) for key in content)
    node.end()
    node.cache.close()


class FaultyNode:
    """A node whose store follows a script: 20 objects under data/, packs under packs/."""

    def __init__(
        self, server: FaultServer, path: Path, url: str = "s3://bucket/data", **options: Any
    ) -> None:
        remote = open_store("s3://bucket/packs", **server.options)
        self.cache = Cache(path, "raw", remote=remote, **options)
        self.dataset = fastload.ObjectDataset(url, cache=self.cache, storage_options=server.options)

    def train(self, **options: Any) -> tuple[list[bytes], dict[str, float]]:
        loader = DataLoader(self.dataset, 4, collate_fn=list, **options)
        return [sample for batch in loader for sample in batch], dict(loader.stats()["counters"])

    def end(self) -> None:
        self.dataset.close()
        close_all()


def write_objects(server: FaultServer) -> list[bytes]:
    bodies = [bytes([number]) * SIZE for number in range(20)]
    server.objects |= {f"data/{number:02}.bin": body for number, body in enumerate(bodies)}
    return bodies


def publish(server: FaultServer, path: Path) -> None:
    node = FaultyNode(server, path, push=True)
    node.train()
    node.end()
    assert any(key.startswith("packs/") for key in server.objects)
    server.requests.clear()


def packs_of(server: FaultServer) -> dict[str, bytes]:
    return {key: body for key, body in server.objects.items() if key.startswith("packs/")}


def data_gets(server: FaultServer) -> list[str]:
    return [request.key for request in server.requests if request.key.startswith("data/")]


def test_changed_object_is_read_from_the_store(server: FaultServer, tmp_path: Path) -> None:
    bodies = write_objects(server)
    publish(server, tmp_path / "first")
    bodies[3] = server.objects["data/03.bin"] = b"another" * 500
    found, _ = FaultyNode(server, tmp_path / "second").train()
    assert found == bodies
    assert data_gets(server) == ["data/03.bin"]


def test_remote_that_refuses_costs_one_warning(server: FaultServer, tmp_path: Path) -> None:
    bodies = write_objects(server)
    publish(server, tmp_path / "first")
    for key in [key for key in server.objects if key.startswith("packs/")]:
        server.script(key, Fault(status=403, code="AccessDenied"), repeat=True)
    node = FaultyNode(server, tmp_path / "second", push=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found, _ = node.train()
        again, counters = node.train()
        node.end()
    assert found == again == bodies
    ours = [str(one.message) for one in warned if "trains on without" in str(one.message)]
    assert all("refused access" in text for text in ours)
    assert [text.split()[5] for text in ours] == ["pull", "push"]
    assert counters["cache.remote_failures"] >= 1


def test_foreign_objects_at_the_url_are_named_and_kept(server: FaultServer, tmp_path: Path) -> None:
    bodies = write_objects(server)
    server.objects["packs/cat.jpg"] = b"a photo"
    node = FaultyNode(server, tmp_path / "first", push=True)
    with pytest.warns(RuntimeWarning, match=r"'cat.jpg'.*no packs of a cache: give a prefix of its own"):
        assert node.train()[0] == bodies
        node.end()
    assert [key for key in server.objects if key.startswith("packs/")] == ["packs/cat.jpg"]


def test_training_of_other_data_does_not_publish_at_the_same_url(server: FaultServer, tmp_path: Path) -> None:
    bodies = write_objects(server)
    publish(server, tmp_path / "first")
    published = packs_of(server)
    others = [b"other" * 300 + bytes([number]) for number in range(12)]
    server.objects |= {f"other/{number:02}.bin": body for number, body in enumerate(others)}
    node = FaultyNode(server, tmp_path / "second", "s3://bucket/other", push=True)
    with pytest.warns(RuntimeWarning, match=r"records of '.*data.*this cache is of '.*other.*of its own"):
        assert node.train()[0] == others
        node.end()
    assert packs_of(server) == published
    assert node.cache.info()["entries"] == 12, "nor does it pull what it has no use for"
    node.cache.close()
    server.requests.clear()
    third = FaultyNode(server, tmp_path / "third")
    assert third.train()[0] == bodies and not data_gets(server)
    third.end()


def test_first_iteration_does_not_wait_for_a_long_pull(
    server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = write_objects(server)
    publish(server, tmp_path / "first")
    monkeypatch.setattr(remote_module, "PATIENCE", 0.1)
    for key in [key for key in server.objects if key.startswith("packs/")]:
        server.script(key, Fault(stall_after=100), repeat=True)
    node = FaultyNode(server, tmp_path / "second")
    found, counters = node.train()
    assert found == bodies
    assert counters["get.requests"] == 20
    remote = remote_of(node.cache)
    assert remote is not None
    os.kill(remote._running["pull"].process.pid, signal.SIGKILL)
    wait_until(lambda: remote._running["pull"].process.poll() is not None, "the pull has ended")
    with pytest.warns(RuntimeWarning, match="its process ended with status -9"):
        assert node.train()[0] == bodies
    node.end()


def test_other_rank_of_the_node_waits_for_the_first_ones_pull(
    server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = write_objects(server)
    publish(server, tmp_path / "first")
    leader = FaultyNode(server, tmp_path / "second")
    leading = iter(DataLoader(leader.dataset, 4))
    processes = remote_module._remotes.drop()  # the next ones are of another process
    assert processes is not None
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    other = FaultyNode(server, tmp_path / "second")
    found, counters = other.train()
    assert found == bodies and not data_gets(server)
    assert "cache.pulled" not in counters
    assert len(list(leading)) == 5
    remote_module._remotes.set(remote_module._remotes.get() | processes)
    other.dataset.close()
    leader.end()


def test_node_of_a_partition_pulls_its_share_and_leaves_its_disk_to_that(
    server: FaultServer, tmp_path: Path
) -> None:
    """The disk holds a share. Only the other node has published its own."""
    bodies = write_objects(server)
    first = FaultyNode(server, tmp_path / "first", push=True)
    options: dict[str, Any] = {"shuffle": True, "partition": "node", "num_nodes": 2}
    first.train(sampler=DistributedSampler(first.dataset, 2, 0, **options))
    first.end()
    node = FaultyNode(server, tmp_path / "second", size_limit=12 * SIZE, push=True)
    sampler = DistributedSampler(node.dataset, 2, 1, **options)
    found, counters = node.train(sampler=sampler)
    assert counters["get.requests"] == len(found) == 10 and not counters.get("cache.pulled")
    node.end()
    assert all(node.dataset.contains(index) for index in sampler)
    node.dataset.close()
    again = FaultyNode(server, tmp_path / "third", size_limit=12 * SIZE)
    found, counters = again.train(sampler=DistributedSampler(again.dataset, 2, 1, **options))
    assert counters["cache.pulled"] == counters["cache.hits"] == 10 and not counters.get("get.requests")
    assert set(found) < set(bodies)
    again.end()


def test_settled_packs_are_not_looked_at_again(server: FaultServer, tmp_path: Path) -> None:
    write_objects(server)
    publish(server, tmp_path / "first")
    store = open_store("s3://bucket/packs", **server.options)
    cache = Cache(tmp_path / "second")
    done = pull(cache, store)
    server.requests.clear()
    again = pull(cache, store, settled=done.settled)
    cache.close()
    assert {request.key for request in server.requests} == {"\0list"}
    assert (again.records, again.left, again.damaged) == (0, 0, {})


SCRIPT = """
import json, sys
from fastload import Cache, DataLoader, ObjectDataset, open_store
path, options = json.loads(sys.argv[1])
if __name__ == "__main__":
    cache = Cache(path, "raw", remote=open_store("s3://bucket/packs", **options), push=True)
    dataset = ObjectDataset("s3://bucket/data", cache=cache, storage_options=options)
    loader = DataLoader(dataset, 4, collate_fn=list, num_workers=2)
    assert sum(map(len, loader)) == 20
"""


def test_cache_that_only_pulls_does_not_keep_another_one_there_from_publishing(
    server: FaultServer, tmp_path: Path
) -> None:
    write_objects(server)
    pulling = FaultyNode(server, tmp_path / "first")
    pulling.train()
    pulling.dataset.close()
    pushing = FaultyNode(server, tmp_path / "first", push=True)
    next(iter(DataLoader(pushing.dataset, 4, collate_fn=list)))
    pushing.end()
    assert any(key.startswith("packs/") for key in server.objects)


def test_training_goes_on_where_no_process_can_be_started(
    server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = write_objects(server)
    node = FaultyNode(server, tmp_path / "first", push=True)

    def refuse(name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched, pytest.warns(RuntimeWarning, match="Too many open files"):
        patched.setattr(remote_module, "memory_file", refuse)
        assert node.train()[0] == bodies
    node.end()


def test_processes_take_modules_from_where_the_script_does(
    server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_objects(server)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "of_script.py").write_text("from fastload import Cache\nclass Own(Cache): pass")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    kind: Any = importlib.import_module("of_script").Own
    (tmp_path / "packs").mkdir()
    cache = kind(tmp_path / "cache", "raw", remote=tmp_path / "packs", push=True)
    dataset = fastload.ObjectDataset("s3://bucket/data", cache=cache, storage_options=server.options)
    list(DataLoader(dataset, 4, collate_fn=list))
    dataset.close()
    close_all()
    assert list((tmp_path / "packs").glob("*.pack"))


def users_of(path: Path) -> list[int]:
    """The processes that have the cache's directory open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            links = [str(one.readlink()) for one in (process / "fd").iterdir()]
            if any(link.startswith(f"{path}/") for link in links):
                found.append(int(process.name))
    return found


def test_script_publishes_before_it_ends(server: FaultServer, tmp_path: Path) -> None:
    bodies = write_objects(server)
    arguments = json.dumps([str(tmp_path / "first"), server.options])
    subprocess.run([sys.executable, "-c", SCRIPT, arguments], check=True, timeout=PATIENCE)
    server.requests.clear()
    assert FaultyNode(server, tmp_path / "second").train()[0] == bodies
    assert not data_gets(server)


def loader_of(options: dict[str, str], path: str) -> DataLoader:
    cache = Cache(path, "raw", remote=open_store("s3://bucket/packs", **options), push=True)
    dataset = fastload.ObjectDataset("s3://bucket/data", cache=cache, storage_options=options)
    return DataLoader(dataset, 4, collate_fn=list)


def train_and_stop(options: dict[str, str], path: str) -> None:
    next(iter(loader_of(options, path)))


def train_and_wait(options: dict[str, str], path: str, say: Connection) -> None:
    remote_module.PATIENCE = 0.2
    say.send(sum(map(len, loader_of(options, path))))
    time.sleep(PATIENCE)


def test_trainer_in_a_multiprocessing_child_publishes_before_it_ends(
    server: FaultServer, tmp_path: Path
) -> None:
    write_objects(server)
    context = multiprocessing.get_context("forkserver")  # its children run no atexit
    process = context.Process(target=train_and_stop, args=(server.options, str(tmp_path / "first")))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0
    process.close()
    assert any(key.startswith("packs/") for key in server.objects)


def test_killed_trainer_leaves_no_process(server: FaultServer, tmp_path: Path) -> None:
    write_objects(server)
    publish(server, tmp_path / "first")
    for key in [key for key in server.objects if key.startswith("packs/")]:
        server.script(key, Fault(stall_after=100), repeat=True)
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=train_and_wait, args=(server.options, str(tmp_path / "second"), sender))
    process.start()
    sender.close()
    with receiver:
        assert receiver.recv() == 20
    wait_until(lambda: len(users_of(tmp_path / "second")) == 2, "its pull runs")
    process.kill()
    process.join()
    process.close()
    wait_until(lambda: not users_of(tmp_path / "second"), "its processes have ended")
    cache = Cache(tmp_path / "second")
    assert cache.check().ok and cache.info()["entries"] == 20
    cache.close()


def test_push_without_remote_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="push=True publishes records at remote=, and that is None"):
        Cache(tmp_path, push=True)
    with pytest.raises(ArgumentError, match="unknown"):
        Cache(tmp_path, remote="nowhere://bucket")
