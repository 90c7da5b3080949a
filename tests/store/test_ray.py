"""`warm --ray`, `convert --ray` and the trainer under Ray Train, on a Ray cluster of two
nodes: Ray's simulation, on this machine.

Each node has an address and a raylet of its own. They share the disk, and so a cache directory.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import fastload
from fastload import Cache, ImageFolder
from fastload.cli import cluster, warming
from tests.bucketdata import PHOTOS, Bucket
from tests.commands import run, start, store_words
from tests.patience import PATIENCE, interrupt_when, wait_until

EXAMPLE = Path(fastload.__file__).parents[1] / "examples" / "resnet50"
SMALL = 100_000  # bytes; Ray's max_direct_call_object_size is 102,400
OTHER = "127.0.0.2"  # the address of the second node

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def ray() -> Any:
    """Ray, which is imported where it is used: it takes 0.6 s."""
    return pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[train]'")


@pytest.fixture(scope="module")
def nodes(ray: Any) -> Iterator[Any]:
    """A cluster of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    small |= {
        "include_log_monitor": False,
        "no_monitor": True,
    }  # two processes of Python, which are not needed
    simulation = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        simulation.add_node(node_ip_address=OTHER, **small)
        yield simulation
    finally:
        ray.shutdown()
        simulation.shutdown()


@pytest.fixture
def photos(bucket: Bucket) -> Path:
    return bucket.root / "photos"


class Spy:
    """What a run gave to Ray: shared values, which may be spilled to a disk, and tasks."""

    def __init__(self, ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ray = ray
        self.shared, self.tasks = list[bytes](), list[cluster.Task]()
        share, start = cluster.Cluster.share, cluster.Cluster._start

        def spy_on_shared(found: cluster.Cluster, value: Any) -> Any:
            self.shared.append(ray.cloudpickle.dumps(value))
            return share(found, value)

        def spy_on_tasks(found: cluster.Cluster, flight: Any) -> None:
            self.tasks.append(flight.task)
            start(found, flight)

        monkeypatch.setattr(cluster.Cluster, "share", spy_on_shared)
        monkeypatch.setattr(cluster.Cluster, "_start", spy_on_tasks)

    def check(self, secret: str) -> None:
        """The secret is in no value that Ray may write to a disk: arguments below `SMALL` stay in memory."""
        assert not any(secret.encode() in value for value in self.shared)
        arguments = [argument for task in self.tasks for argument in task.arguments]
        inline = [argument for argument in arguments if not isinstance(argument, self.ray.ObjectRef)]
        holding = [value for value in map(self.ray.cloudpickle.dumps, inline) if secret.encode() in value]
        assert holding and max(map(len, holding)) < SMALL
        assert not any(secret in repr(task) for task in self.tasks)
        for file in Path("/tmp/ray/session_latest/").rglob("*"):
            assert not file.is_file() or secret.encode() not in file.read_bytes()


def test_each_node_warms_its_own_share_and_shows_no_secret(
    ray: Any, nodes: Any, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(ray, monkeypatch)
    words = ["warm", "s3://photos", "--cache", tmp_path / "ssd", "--mode", "raw", "--ray", nodes.address]
    code, document = bucket.run(*words)
    assert code == 0, document
    assert document["settings"]["ray"] == nodes.address
    assert (document["stored"], document["left"], document["redone"]) == (PHOTOS, 0, 0)
    addresses = [node["address"] for node in document["nodes"]]
    assert addresses == sorted(addresses) and OTHER in addresses
    assert [node["share"] for node in document["nodes"]] == [[0, 2], [1, 2]]
    assert [node["stored"] for node in document["nodes"]] == [PHOTOS // 2] * 2
    spy.check(bucket.server.secret)


def test_task_runs_on_its_node(ray: Any, nodes: Any) -> None:
    with cluster.Cluster(nodes.address) as found:
        lanes = [
            iter([cluster.Task(ray.util.get_node_ip_address, (), node.address, node=node)])
            for node in found.nodes
        ]
        assert {task.name: address for task, address in found.run(lanes)} == {
            node.address: node.address for node in found.nodes
        }


@pytest.mark.stress
def test_slices_that_wait_for_cpus_are_named(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "WAIT_SECONDS", 0.5)
    with cluster.Cluster(nodes.address) as found:
        tasks = [cluster.Task(time.sleep, (2,), f"slice {number}", node=found.nodes[0]) for number in (1, 2)]
        with pytest.warns(UserWarning, match="for CPUs that other work of the cluster holds.*slice"):
            ended = [task.name for task, _ in found.run([iter([task]) for task in tasks])]
    assert sorted(ended) == ["slice 1", "slice 2"]


def kill_one(title: str, killed: list[int]) -> threading.Thread:
    """Kill the first process that runs the task `title`: in the middle of it, for it is stopped before."""

    def hit() -> bool:
        for process in running(title):
            with suppress(psutil.Error):
                process.suspend()
                if "".join(process.cmdline()[:1]).startswith(title):
                    process.kill()
                    killed.append(process.pid)
                    return True
                process.resume()  # its task had ended
        return False

    thread = threading.Thread(target=wait_until, args=(hit, f"a process runs {title}"), daemon=True)
    thread.start()
    return thread


@pytest.mark.stress  # in short: a task of a killed process, in test_convert_writes_the_shards_of_one_machine
def test_slice_of_a_killed_process_is_done_again(nodes: Any, photos: Path, tmp_path: Path) -> None:
    killed: list[int] = []
    thread = kill_one("ray::_fill_slice", killed)
    code, document = run("warm", photos, "--cache", tmp_path, "--mode", "raw", "--ray", nodes.address)
    thread.join(PATIENCE)
    assert killed and code == 0, document
    assert document["redone"] >= 1
    assert (document["left"], document["objects"], document["failed"]) == (0, PHOTOS, 0)
    dataset = ImageFolder(str(photos), cache=Cache(tmp_path, "raw"))
    assert all(dataset.contains(index) for index in range(PHOTOS)), "all are in the cache"


@pytest.mark.stress  # on one machine: test_warm.py
def test_ctrl_c_ends_the_slices_and_the_same_command_resumes(
    nodes: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "SLICE", 6)
    arguments = ["warm", photos, "--cache", tmp_path, "--mode", "raw", "--ray", nodes.address]
    thread = interrupt_when(lambda: Cache(tmp_path).info()["entries"] >= 2)
    code, document = run(*arguments)
    thread.join(PATIENCE)
    assert (code, document["interrupted"]) == (130, True), document
    wait_until(lambda: not running("ray::_fill_slice"), "the tasks have ended")
    there = Cache(tmp_path).info()["entries"]
    assert document["stored"] <= there < PHOTOS and document["left"] == PHOTOS - document["stored"]
    code, document = run(*arguments)
    assert (code, document["left"], document["interrupted"]) == (0, 0, False), document
    assert (document["skipped"], document["stored"]) == (there, PHOTOS - there), "nothing is read again"


def running(title: str) -> list[psutil.Process]:
    """The processes that run the task `title`, of this process's cluster."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "".join(process.cmdline()[:1]).startswith(title):
                found.append(process)
    return found


SHARDS = ["--to", "tar", "--shard-size", "500KB", "--shuffle", 3, "--name", "p"]


@pytest.fixture(scope="module")
def alone(bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The shards that one machine writes."""
    made = tmp_path_factory.mktemp("alone")
    assert bucket.run("convert", "s3://photos", made, *SHARDS)[0] == 0
    return files(made)


def test_convert_writes_the_shards_of_one_machine_and_shows_no_secret(
    ray: Any,
    nodes: Any,
    bucket: Bucket,
    alone: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a process that is killed: its shard is done again, and no byte differs."""
    spy, killed = Spy(ray, monkeypatch), list[int]()
    out = f"s3://packs/{tmp_path.name}"
    words = ["convert", "s3://photos", out, *SHARDS, *store_words(bucket.options, "--dst-option")]
    thread = kill_one("ray::_write_shard", killed)
    code, document = bucket.run(*words, "--ray", nodes.address)
    thread.join(PATIENCE)
    assert killed and code == 0, document
    assert document["complete"] and document["redone"] >= 1
    assert files(bucket.root / "packs" / tmp_path.name) == alone
    assert spy.shared
    spy.check(bucket.server.secret)
    code, document = bucket.run(*words)
    assert (code, document["kept"]) == (0, document["shards"]), "one machine goes on where the cluster was"


@pytest.mark.stress  # on one machine: test_convert.py
def test_convert_goes_on_after_ctrl_c(
    nodes: Any, bucket: Bucket, alone: dict[str, bytes], tmp_path: Path
) -> None:
    words = ["convert", "s3://photos", tmp_path, *SHARDS, "--ray", nodes.address]
    thread = interrupt_when(lambda: any(tmp_path.glob("p-*.tar")))
    code, document = bucket.run(*words)
    thread.join(PATIENCE)
    assert (code, document["interrupted"], document["complete"]) == (130, True, False), document
    wait_until(lambda: not running("ray::_write_shard"), "the tasks have ended")
    assert not [path for path in tmp_path.iterdir() if path.name[0] == "."], "no temporary file is left"
    assert set(files(tmp_path)) <= set(alone), "tasks that were at work may have finished their shards"
    code, again = bucket.run(*words)
    assert (code, again["kept"], again["complete"]) == (0, document["shards"], True), again
    assert files(tmp_path) == alone


def test_convert_of_shards_is_refused_on_a_cluster(nodes: Any, photos: Path, tmp_path: Path) -> None:
    run("convert", photos, tmp_path / "tars", "--to", "tar")
    code, document = run(
        "convert", tmp_path / "tars", tmp_path / "out", "--to", "tar", "--ray", nodes.address
    )
    assert code == 2
    assert "run the command without --ray" in document["error"]["message"]


def files(directory: Path) -> dict[str, bytes]:
    """Without the temporary file of a writer that was killed."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name[0] != "."}


@pytest.mark.parametrize("name", ["ray.__version__", "fastload.__version__"])
def test_other_version_is_refused(
    name: str, ray: Any, nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ray.__version__ if name.startswith("ray") else fastload.__version__
    monkeypatch.setattr(name, "9.9.9")
    code, document = run("warm", tmp_path, "--cache", tmp_path / "ssd", "--ray", nodes.address)
    message = document["error"]["message"]
    assert code == 2 and "9.9.9" in message and there in message and "install" in message
    assert not (tmp_path / "ssd").exists()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:1", "nothing answers there"),
        ("ray://127.0.0.1:1", "ray job submit"),
        *[(address, "give HOST:PORT") for address in ("h:x", "127.0.0.1", "LOCAL")],
    ],
)
def test_address_without_a_cluster_is_refused_at_once(address: str, says: str, tmp_path: Path) -> None:
    code, document = run("warm", tmp_path, "--cache", tmp_path / "ssd", "--ray", address)
    assert code == 2 and says in document["error"]["message"]


@pytest.mark.stress
def test_server_that_is_not_ray_is_refused_in_two_minutes(tmp_path: Path) -> None:
    """In a process of its own, for Ray reads how often it tries when it is imported."""
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with start("warm", tmp_path, "--cache", tmp_path / "ssd", "--ray", address) as running:
            _, err = running.communicate(timeout=120)
    assert running.returncode == 2 and "no Ray cluster let this process in" in err, err


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "epochs.jsonl").read_text().splitlines()]


@pytest.mark.stress
def test_trainer_goes_on_exactly_after_a_killed_worker(nodes: Any, photos: Path, tmp_path: Path) -> None:
    """A rank on each node. One is killed after a checkpoint; Ray starts both again, and no sample is lost.

    Each epoch's loss is, to the last bit, that of an unbroken run under torchrun.
    """
    made = tmp_path / "set" / "train"
    made.parent.mkdir()
    made.symlink_to(photos)
    options = ["--epochs", "1", "--no-eval", "--batch-size", "4", "--resolution", "32", "--num-workers", "1"]
    options += ["--checkpoint-steps", "2", "--ceiling-steps", "0", "--model", "resnet18", str(made.parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1])}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    torchrun += [str(EXAMPLE / "train.py"), "--out", str(tmp_path / "unbroken"), *options]
    subprocess.run(torchrun, env=environment, check=True, timeout=PATIENCE, capture_output=True)

    command = [sys.executable, str(EXAMPLE / "ray_train.py"), "--ranks", "2", "--cpus", "1", "--cpu", "--"]
    command += [*options, "--cache", str(tmp_path / "ssd"), "--out", str(tmp_path / "out")]
    environment |= {"RAY_ADDRESS": nodes.address, "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
    # Each of these is an actor: a process that imports Ray Train.
    environment |= {f"RAY_TRAIN_{name}": "0" for name in ("ENABLE_PREEMPTION_WATCHER", "METRICS_ENABLED")}
    environment |= {"RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0"}
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path) as job,
    ):
        try:
            wait_until(lambda: (tmp_path / "out" / "checkpoint.pt").exists() or job.poll(), "a checkpoint")
            kill_one("ray::RayTrainWorker", killed := list[int]()).join(PATIENCE)
            assert not (tmp_path / "out" / "epochs.jsonl").exists(), "in the middle of the epoch"
            code = job.wait(PATIENCE)
        finally:
            job.kill()
    assert killed and code == 0, (tmp_path / "log").read_text()[-3000:]
    assert losses(tmp_path / "out") == losses(tmp_path / "unbroken")
    reported = json.loads((tmp_path / "out" / "epochs.jsonl").read_text().splitlines()[-1])
    assert (reported["node"], reported["GPUs"]) == (2, 2)


@pytest.mark.stress
def test_share_of_a_lost_node_is_named_and_resumed(
    nodes: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test, for it changes the cluster. The other node's share is complete."""
    monkeypatch.setattr(warming, "SLICE", 6)
    arguments = ["warm", photos, "--cache", tmp_path, "--mode", "raw", "--ray", nodes.address]
    (lost,) = nodes.worker_nodes

    def remove() -> None:
        wait_until(lambda: Cache(tmp_path).info()["entries"] >= 4, "the warming has begun")
        nodes.remove_node(lost, allow_graceful=False)

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    code, document = run(*arguments)
    thread.join(PATIENCE)
    assert code == 1, document
    gone = {node["address"]: node for node in document["nodes"] if node["lost"]}
    assert list(gone) == [OTHER] and gone[OTHER]["left"] > 0
    assert document["left"] == gone[OTHER]["left"]

    nodes.add_node(node_ip_address=OTHER, num_cpus=1, object_store_memory=80 << 20)
    code, document = run(*arguments)
    assert code == 0, document
    assert (document["left"], document["objects"]) == (0, PHOTOS)
    assert document["stored"] < PHOTOS, "what was stored is not read again"
