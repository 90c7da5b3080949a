"""`Cache(remote=, push=)`: nodes take from each other what they have read; training survives its failures."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import torch
from torch.utils.data import BatchSampler

import fastload
from fastload import Cache, DataLoader, DistributedSampler, ImageFolder, RandomResizedCrop, open_store
from fastload.cache import remote as remote_module
from fastload.cache.directory import is_readonly
from fastload.cache.exchange import pull, push
from fastload.cache.remote import close_all, remote_of
from fastload.errors import ArgumentError
from tests.bucketdata import Bucket
from tests.cachedata import fill
from tests.commands import script as run_script
from tests.faultserver import LIST, Fault, FaultServer
from tests.forked import Forked
from tests.patience import PATIENCE, runs, wait_until

pytestmark = pytest.mark.usefixtures("no_aws_settings")

COUNT = 40
SIZE = 3000


@pytest.fixture(autouse=True)
def ended(no_leaks: None) -> Iterator[None]:
    """No test leaves a process that pulls or pushes."""
    yield
    close_all()


class ForkedJob(Forked):
    """A process that pulls or pushes, forked from one that has all modules."""

    def __init__(self, words: list[str], *, stdin: IO[bytes], stdout: IO[bytes], process_group: int) -> None:
        arguments = stdin.read(), f"/proc/{os.getpid()}/fd/{stdout.fileno()}"
        self._process = multiprocessing.get_context("forkserver").Process(target=do_job, args=arguments)
        self._process.start()
        self.terminate, self.kill = self._process.terminate, self._process.kill


def do_job(job: bytes, result: str) -> None:
    remote_module._end_with = lambda trainer: None  # its parent is the server of forks
    with io.TextIOWrapper(io.BytesIO(job)) as sys.stdin, Path(result).open("w") as answer:
        remote_module.main(answer)


@pytest.fixture
def jobs_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this process. That Python starts them: `test_second_node`, and tests of their ends."""
    monkeypatch.setattr(subprocess, "Popen", ForkedJob)


forks = pytest.mark.usefixtures("jobs_are_forked")


def packs_url(bucket: Bucket, tmp_path: Path) -> fastload.store.Store:
    return open_store(f"s3://packs/{tmp_path.name}", **bucket.options)


def pull_for(loader: DataLoader) -> None:
    """Let the pull of a loader's next epoch come to its end first."""
    loader._context.remote_caches.start_epoch(loader)
    for remote in remote_module._remotes.get().values():
        wait_until(lambda: not any(one.is_alive() for one in remote._threads), "the keys are made")  # noqa: B023
        if (pulling := remote._running.get("pull")) is not None:
            wait_until(lambda: pulling.process.poll() is not None, "the pull has ended")


class Node:
    """A node with a cache of its own, in this process."""

    def __init__(self, bucket: Bucket, path: Path, **options: Any) -> None:
        self.cache = Cache(path, "raw", **options)
        self.dataset = ImageFolder(
            "s3://photos", RandomResizedCrop(16), cache=self.cache, storage_options=bucket.options
        )

    def train(self, epochs: int = 1, *, pulled: bool = False, **options: Any) -> dict[str, float]:
        """The counters of some epochs, each of which sees each sample once."""
        loader = DataLoader(self.dataset, 8, **{"num_workers": 2, "shuffle": True} | options)
        if pulled:
            pull_for(loader)
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
    assert first.train(num_workers=0)["get.requests"] == COUNT
    first.end()
    second = Node(bucket, tmp_path / "second", remote=url)
    listed = bucket.proxy.counts()
    counters = second.train(pulled=True)
    assert counters["cache.hits"] == COUNT and not counters.get("get.requests")
    assert counters["cache.pulled"] == COUNT
    assert bucket.proxy.counts().object_gets - listed.object_gets <= 4, (
        "the index of one pack, and 4 MB of records"
    )


@forks
def test_what_is_published_later_comes_with_a_later_epoch(bucket: Bucket, tmp_path: Path) -> None:
    url = packs_url(bucket, tmp_path)
    node = Node(bucket, tmp_path / "second", remote=url)
    loader = DataLoader(torch.utils.data.Subset(node.dataset, range(10)), 5)
    iterator = iter(loader)
    other = Node(bucket, tmp_path / "other")
    other.train(num_workers=0)
    other.dataset.close()
    push(Cache(tmp_path / "other", "raw"), url)
    list(iterator)
    node.cache.clear()
    for _ in range(2):
        pull_for(loader)
        list(loader)
    assert loader.stats()["counters"]["cache.pulled"] == 10
    assert [node.dataset.contains(index) for index in range(COUNT)] == [True] * 10 + [False] * 30
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

    def train(self, *, pulled: bool = False, **options: Any) -> tuple[list[bytes], dict[str, float]]:
        loader = DataLoader(self.dataset, 4, collate_fn=list, **options)
        if pulled:
            pull_for(loader)
        return [sample for batch in loader for sample in batch], dict(loader.stats()["counters"])

    def end(self) -> None:
        self.dataset.close()
        close_all()


def write_objects(server: FaultServer) -> list[bytes]:
    bodies = [bytes([number]) * SIZE for number in range(20)]
    server.objects |= {f"data/{number:02}.bin": body for number, body in enumerate(bodies)}
    return bodies


def publish(
    server: FaultServer, path: Path, *folders: str, samples: Iterable[int] = range(20)
) -> list[bytes]:
    """The bodies of data/, of which a first node has pushed samples, and other folders, in this process."""
    bodies = write_objects(server)
    store = open_store("s3://bucket/packs", **server.options)
    with contextlib.closing(Cache(path, "raw")) as cache:
        for folder in ("data", *folders):
            dataset = fastload.ObjectDataset(
                f"s3://bucket/{folder}", cache=cache, storage_options=server.options
            )
            list(dataset.warm(samples if folder == "data" else range(len(dataset))))
            dataset.close()
        push(cache, store)
    assert packs_of(server)
    server.requests.clear()
    return bodies


def packs_of(server: FaultServer) -> dict[str, bytes]:
    return {key: body for key, body in server.objects.items() if key.startswith("packs/")}


def data_gets(server: FaultServer) -> list[str]:
    return [request.key for request in server.requests if request.key.startswith("data/")]


@forks
def test_changed_object_is_read_from_the_store(server: FaultServer, tmp_path: Path) -> None:
    bodies = publish(server, tmp_path / "first")
    bodies[3] = server.objects["data/03.bin"] = b"another" * 500
    found, _ = FaultyNode(server, tmp_path / "second").train(pulled=True)
    assert found == bodies
    assert data_gets(server) == ["data/03.bin"]


@forks
def test_remote_that_refuses_costs_one_warning(server: FaultServer, tmp_path: Path) -> None:
    bodies = publish(server, tmp_path / "first")
    for key in packs_of(server):
        server.script(key, Fault(status=403, code="AccessDenied"), repeat=True)
    node = FaultyNode(server, tmp_path / "second", push=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found, counters = node.train(pulled=True)
        again, _ = node.train()
        node.end()
    assert found == again == bodies
    ours = [str(one.message) for one in warned if "trains on without" in str(one.message)]
    assert all("refused access" in text for text in ours)
    assert [text.split()[5] for text in ours] == ["pull", "push"]
    assert counters["cache.remote_failures"] >= 1


@forks
def test_training_of_other_data_does_not_publish_at_the_same_url(server: FaultServer, tmp_path: Path) -> None:
    publish(server, tmp_path / "first")
    published = packs_of(server)
    others = [b"other" * 300 + bytes([number]) for number in range(12)]
    server.objects |= {f"other/{number:02}.bin": body for number, body in enumerate(others)}
    node = FaultyNode(server, tmp_path / "second", "s3://bucket/other", push=True)
    with pytest.warns(RuntimeWarning, match=r"records of '.*data.*this cache is of '.*other.*of its own"):
        assert node.train(pulled=True)[0] == others
        node.end()
    assert packs_of(server) == published
    assert node.cache.info()["entries"] == 12, "nor does it pull what it has no use for"
    node.cache.close()


def test_epoch_does_not_wait_for_a_pull(server: FaultServer, tmp_path: Path) -> None:
    bodies = publish(server, tmp_path / "first")
    for key in packs_of(server):
        server.script(key, Fault(stall_after=100), repeat=True)
    node = FaultyNode(server, tmp_path / "second")
    found, counters = node.train()
    assert found == bodies
    assert counters["get.requests"] == 20
    remote = remote_of(node.cache)
    assert remote is not None
    wait_until(lambda: "pull" in remote._running, "the pull has begun")
    os.kill(remote._running["pull"].process.pid, signal.SIGKILL)
    wait_until(lambda: remote._running["pull"].process.poll() is not None, "the pull has ended")
    with pytest.warns(RuntimeWarning, match="its process ended with status -9"):
        assert node.train()[0] == bodies
    node.end()


@forks
def test_first_rank_of_a_node_pulls_for_all_of_them(
    server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = publish(server, tmp_path / "first")
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    other = FaultyNode(server, tmp_path / "second")
    found, counters = other.train(pulled=True)
    assert found == bodies and "cache.pulled" not in counters
    assert set(data_gets(server)) == {request.key for request in server.requests} - {LIST}
    other.dataset.close()


@forks
def test_loader_pulls_what_it_may_read_and_nothing_else(server: FaultServer, tmp_path: Path) -> None:
    """Training on one of two nodes, then validation with the same cache and URL."""
    server.objects |= {f"held-out/{number}.bin": b"v%d" % number * 500 for number in range(6)}
    bodies = publish(server, tmp_path / "first", "held-out")
    node = FaultyNode(server, tmp_path / "second")
    data, place = node.dataset, {"cache": node.cache, "storage_options": server.options}
    held_out = fastload.ObjectDataset("s3://bucket/held-out", **place)
    share, other = (DistributedSampler(data, 4, node, partition="node", num_nodes=4) for node in (1, 2))
    subset = torch.utils.data.Subset(data, [3, 5])
    both = torch.utils.data.ConcatDataset([subset, held_out])
    expected = set[int]()
    for loader, reads in (
        (DataLoader(both, 2, collate_fn=list, sampler=[0]), (3, 5)),
        (DataLoader(data, 2, collate_fn=list, sampler=torch.utils.data.SubsetRandomSampler([7, 9])), (7, 9)),
        (DataLoader(data, 2, collate_fn=list, sampler=share), tuple(share)),
        (DataLoader(data, collate_fn=list, batch_sampler=BatchSampler(other, 2, False)), tuple(other)),
        (DataLoader(fastload.map(data, bytes), 2, collate_fn=list), range(20)),
    ):
        pull_for(loader)
        remote_of(node.cache)._collect("pull")  # type: ignore[union-attr]
        expected |= set(reads)
        assert {index for index in range(20) if data.contains(index)} == expected
        assert all(held_out.contains(index) for index in range(6))
    assert not data_gets(server)
    assert FaultyNode(server, tmp_path / "second").train()[0] == bodies
    held_out.close()
    node.end()


def test_process_that_pulls_imports_no_torch_and_has_the_lowest_priority() -> None:
    """Its 2 s of all cores would be the training's."""
    code = "lambda result: print(os.nice(0), 'torch' in sys.modules, file=result)"
    work = remote_module._WORK.format(path=sys.path)
    code = f"sys.modules['fastload.cache.remote'].main = {code}"
    assert run_script(f"import os, sys, fastload.cache.remote; {code}; {work}").split() == ["19", "False"]


def test_read_only_cache_starts_no_process(
    server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = publish(server, tmp_path / "first")
    monkeypatch.setattr(remote_module, "is_readonly", lambda path: True)  # tests may run as root
    monkeypatch.setattr(remote_module.subprocess, "Popen", None)
    node = FaultyNode(server, tmp_path / "second")
    with pytest.warns(RuntimeWarning, match="trains on without the pull .*: it is read-only"):
        assert node.train(pulled=True)[0] == bodies
    assert node.train()[0] == bodies
    monkeypatch.undo()
    node.end()


def test_cache_counts_as_read_only_where_it_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_readonly(str(tmp_path / "absent"))
    with contextlib.closing(Cache(tmp_path)) as cache:
        fill(cache, 1)
    assert not is_readonly(str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert is_readonly(str(tmp_path))


@forks
def test_node_of_a_partition_pulls_its_share_and_leaves_its_disk_to_that(
    server: FaultServer, tmp_path: Path
) -> None:
    """The disk holds a share. Only the other node has published its own."""
    options: dict[str, Any] = {"shuffle": True, "partition": "node", "num_nodes": 2}
    bodies = publish(server, tmp_path / "first", samples=DistributedSampler(range(20), 2, 0, **options))
    node = FaultyNode(server, tmp_path / "second", size_limit=12 * SIZE, push=True)
    sampler = DistributedSampler(node.dataset, 2, 1, **options)
    found, counters = node.train(sampler=sampler)
    assert counters["get.requests"] == len(found) == 10 and not counters.get("cache.pulled")
    node.end()
    assert all(node.dataset.contains(index) for index in sampler)
    node.dataset.close()
    again = FaultyNode(server, tmp_path / "third", size_limit=12 * SIZE)
    found, counters = again.train(pulled=True, sampler=DistributedSampler(again.dataset, 2, 1, **options))
    assert counters["cache.pulled"] == counters["cache.hits"] == 10 and not counters.get("get.requests")
    assert set(found) < set(bodies)
    again.end()


SCRIPT = """
import json, sys
from fastload import Cache, open_store
from fastload.cache.remote import remote_of
path, options = json.loads(sys.argv[1])
cache = Cache(path, "raw", remote=open_store("s3://bucket/packs", **options), push=True)
remote_of(cache).pull(Cache, list)  # as if a loader read with it
for number in range(20):
    cache.write(cache.key(str(number)), b"x" * 3000)
"""
TRAINING = """
import json, sys
from fastload import Cache, DataLoader, ObjectDataset, open_store
path, options = json.loads(sys.argv[1])
if __name__ == "__main__":
    cache = Cache(path, "raw", remote=open_store("s3://bucket/packs", **options), push=True)
    dataset = ObjectDataset("s3://bucket/data", cache=cache, storage_options=options)
    loader = DataLoader(dataset, 4, collate_fn=list, num_workers=2)
    assert sum(map(len, loader)) == 20
"""


@forks
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
    assert packs_of(server)


@forks
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
    (tmp_path / "lib" / "of_script.py").write_text(
        "import os; from fastload import Cache\nclass Own(Cache): pass\nprint('1'); os.system('echo 2')"
    )
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # a path that is no text is none for Python
    kind: Any = importlib.import_module("of_script").Own
    (tmp_path / "packs").mkdir()
    cache = kind(tmp_path / "cache", "raw", remote=tmp_path / "packs", push=True)
    dataset = fastload.ObjectDataset("s3://bucket/data", cache=cache, storage_options=server.options)
    list(DataLoader(dataset, 4, collate_fn=list))
    dataset.close()
    close_all()
    assert list((tmp_path / "packs").glob("*.pack"))


def test_provider_of_the_script_itself_is_an_error_in_words(tmp_path: Path) -> None:
    """Another process cannot import it."""
    code = """
import sys, warnings
from fastload import Cache, open_store
from fastload.cache.remote import close_all, remote_of
def credentials(): return {"access_key_id": "k" * 16, "secret_access_key": "s" * 16, "expires_at": None}
store = open_store("s3://bucket/packs", endpoint_url="http://127.0.0.1:9", credential_provider=credentials)
cache = Cache(sys.argv[1], "raw", remote=store, push=True)
remote_of(cache).pull(Cache, list)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    close_all()
print(*(one.message for one in warned))
"""
    assert "define it in a module" in run_script(code, tmp_path / "cache")


def pulls_of(trainer: int) -> list[psutil.Process]:
    """The processes of a trainer that pull or push."""
    found = []
    for process in psutil.Process(trainer).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            found += [process] * any("cache.remote import" in word for word in process.cmdline())
    return found


@pytest.mark.parametrize(
    "code", [SCRIPT, pytest.param(TRAINING, marks=pytest.mark.stress)], ids=["cache", "loader"]
)
def test_script_publishes_before_it_ends(code: str, server: FaultServer, tmp_path: Path) -> None:
    write_objects(server)
    run_script(code, json.dumps([str(tmp_path / "first"), server.options]))
    with contextlib.closing(Cache(tmp_path / "second")) as cache:
        assert pull(cache, open_store("s3://bucket/packs", **server.options)).records == 20


def loader_of(options: dict[str, str], path: str) -> DataLoader:
    cache = Cache(path, "raw", remote=open_store("s3://bucket/packs", **options), push=True)
    dataset = fastload.ObjectDataset("s3://bucket/data", cache=cache, storage_options=options)
    return DataLoader(dataset, 4, collate_fn=list)


def train_and_stop(options: dict[str, str], path: str) -> None:
    next(iter(loader_of(options, path)))


def train_and_wait(options: dict[str, str], path: str, say: Connection) -> None:
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
    assert packs_of(server)


def test_killed_trainer_leaves_no_process(server: FaultServer, tmp_path: Path) -> None:
    publish(server, tmp_path / "first")
    for key in packs_of(server):
        server.script(key, Fault(stall_after=100), repeat=True)
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=train_and_wait, args=(server.options, str(tmp_path / "second"), sender))
    process.start()
    sender.close()
    with receiver:
        assert receiver.recv() == 20
    assert process.pid is not None
    pulling = wait_until(lambda: pulls_of(process.pid), "its pull runs")  # type: ignore[arg-type]
    process.kill()
    process.join()
    process.close()
    wait_until(lambda: not any(map(runs, pulling)), "its processes have ended")
    cache = Cache(tmp_path / "second")
    assert cache.check().ok and cache.info()["entries"] == 20
    cache.close()


def test_push_without_remote_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="push=True publishes records at remote=, and that is None"):
        Cache(tmp_path, push=True)
    with pytest.raises(ArgumentError, match="unknown"):
        Cache(tmp_path, remote="nowhere://bucket")
