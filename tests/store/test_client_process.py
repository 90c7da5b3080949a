"""The process that holds a store's client for a trainer: its answers, its end, what the trainer may do."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastload import ImageFolder
from fastload.errors import NotFoundError, StoreError, StoreTimeoutError
from fastload.store import client_process
from fastload.store.client_process import ClientProcess
from fastload.testing import read_tests
from tests.faultserver import FaultServer
from tests.forked import Forked
from tests.patience import PATIENCE, runs, wait_until
from tests.photos import pillow_jpeg, scene

pytestmark = pytest.mark.usefixtures("no_leaks")
PR_SET_CHILD_SUBREAPER = 36
PHOTOS = {f"{name}/{number}.jpg": pillow_jpeg(scene(40, 30, number)) for name in "ab" for number in range(8)}


class Target:
    """What a client process works with; its methods are called there."""

    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: Any) -> Any:
        return value

    def fail(self, error: Exception) -> None:
        raise error

    def die(self, flag: str = "") -> str:
        """Killed, every time, or the first time."""
        if not flag or not Path(flag).exists():
            if flag:
                Path(flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    def wait_for(self, path: str, here: str = os.devnull) -> str:
        Path(here).touch()
        while not Path(path).exists():
            time.sleep(0.005)
        return "came"

    def count(self) -> Iterator[int]:
        yield from range(5)
        raise NotFoundError("no more", key="five")

    def stall(self) -> Iterator[int]:
        yield 1
        time.sleep(600)

    def content(self, file: Path, tail: str | None) -> bytes:
        return file.read_bytes() + (tail or "").encode()

    def panic(self) -> None:
        raise BaseException("panicked")

    def descriptors(self) -> list[str]:
        names = [int(fd.name) for fd in Path("/proc/self/fd").iterdir()]  # that of this listing is gone then
        links = [Path(f"/proc/self/fd/{name}") for name in names if name > 2]
        return [str(link.readlink()) for link in links if link.is_symlink()]


def gone(pid: int) -> bool:
    try:
        return not runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def stopped(pid: int) -> bool:
    """Whether all its threads are: a signal to stop reaches them one after the other."""
    states = [
        stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return set(states) == {"T"}


# --- What it answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, True, 7, b"", b"x", bytes(range(256)) * 40_000, {"a": [1, "ü"]}])
def test_call_any_value_comes_back_equal(value: Any) -> None:
    assert ClientProcess().call(Target(), "echo", value) == value


def test_call_from_many_threads_each_gets_its_own_answer() -> None:
    process, target = ClientProcess(), Target()
    bodies = [bytes([number % 251]) * (number * 997) for number in range(300)]
    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(lambda body: process.call(target, "echo", body), bodies)) == bodies
        pids = set(pool.map(lambda _: process.call(target, "pid"), bodies))
    assert len(pids) == 1 and os.getpid() not in pids


def test_call_that_raises_the_error_keeps_type_key_and_retry() -> None:
    error = StoreError("slow down", key="a/b")
    error.retry = "slower"
    with pytest.raises(StoreError, match="slow down") as caught:
        ClientProcess().call(Target(), "fail", error)
    assert caught.value.key == "a/b" and caught.value.retry == "slower"


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("fail", [ZeroDivisionError("x")], r"(?s)client process of the store failed.*ZeroDivisionError"),
        ("die", [], "was killed during this request; memory may have run out"),  # and so was the next one
    ],
)
def test_call_that_breaks_is_an_error_in_words(method: str, arguments: list[Any], words: str) -> None:
    with pytest.raises(StoreError, match=words):
        ClientProcess().call(Target(), method, *arguments)


def test_call_that_panics_is_an_error_and_leaves_other_requests_alone(tmp_path: Path) -> None:
    process, target = ClientProcess(), Target()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(process.call, target, "wait_for", str(tmp_path / "flag"))
        pid = process.call(target, "pid")
        with pytest.raises(StoreError, match=r"(?s)client process of the store failed.*panicked"):
            process.call(target, "panic")
        (tmp_path / "flag").touch()
        assert other.result(PATIENCE) == "came"
    assert process.call(target, "pid") == pid


def test_path_argument_is_the_callers_file_whatever_its_name_means_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, target = ClientProcess(), Target()
    process.call(target, "pid")
    (tmp_path / "file").write_bytes(b"mine")
    monkeypatch.chdir(tmp_path)
    assert process.call(target, "content", Path("file"), "!") == b"mine!"
    with (tmp_path / "file").open("rb") as file:
        (tmp_path / "file").unlink()
        assert process.call(target, "content", Path(f"/proc/self/fd/{file.fileno()}"), None) == b"mine"
    assert not [name for name in process.call(target, "descriptors") if "file" in name]


def test_iterate_gives_the_items_then_the_error() -> None:
    items = ClientProcess().iterate(Target(), "count")
    assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(NotFoundError, match="no more"):
        next(items)


def test_iterate_left_half_way_the_next_call_gets_its_own_answer() -> None:
    process, target = ClientProcess(), Target()
    items = process.iterate(target, "count")
    assert next(items) == 0
    items.close()  # type: ignore[attr-defined]
    assert process.call(target, "echo", "mine") == "mine"


def test_iterate_that_never_goes_on_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_process, "_SILENT_SECONDS", 0.05)
    monkeypatch.setattr(client_process, "_ITEM_SECONDS", 0.3)
    items = ClientProcess().iterate(Target(), "stall")
    assert next(items) == 1
    with pytest.raises(StoreTimeoutError, match="the listing made no progress"):
        next(items)


def test_call_interrupted_the_next_one_gets_its_own_answer(tmp_path: Path) -> None:
    process, target = ClientProcess(), Target()
    process.call(target, "pid")
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        process.call(target, "wait_for", str(tmp_path / "flag"))
    timer.join()
    (tmp_path / "flag").touch()
    assert process.call(target, "echo", "mine") == "mine"


# --- When it ends -------------------------------------------------------------------------------------------


def test_client_killed_at_a_request_another_one_answers(tmp_path: Path) -> None:
    assert ClientProcess().call(Target(), "die", str(tmp_path / "flag")) == "alive"


def test_client_killed_between_requests_another_one_answers() -> None:
    process, target = ClientProcess(), Target()
    first = process.call(target, "pid")
    os.kill(first, signal.SIGKILL)
    assert process.call(target, "pid") != first


def test_client_ends_with_its_owner() -> None:
    process = ClientProcess()
    pid = process.call(Target(), "pid")
    del process
    gc.collect()
    wait_until(lambda: gone(pid), "the client has ended")


def test_client_without_requests_ends_and_the_next_request_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_process, "IDLE_SECONDS", 1.0)
    monkeypatch.setattr(client_process, "_LOOK_SECONDS", 0.05)
    process, target = ClientProcess(), Target()
    for _ in range(3):
        pid = process.call(target, "pid")
        wait_until(lambda pid=pid: gone(pid), "the client has ended")


def test_client_that_ended_is_waited_for_before_the_next_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a container whose init waits for no orphans fills with zombies."""
    monkeypatch.setattr(client_process, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(client_process, "_LOOK_SECONDS", 0.05)
    become_subreaper = ctypes.CDLL(None).prctl
    assert become_subreaper(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        process, target = ClientProcess(), Target()
        pids = []
        for _ in range(3):
            pids.append(process.call(target, "pid"))
            wait_until(lambda: gone(pids[-1]), "the client has ended")
        assert process.call(target, "echo", 1) == 1
        # Threads of the last one may have been ending when it was waited for.
        assert not {child.pid for child in psutil.Process().children()} & set(pids[:-1])
    finally:
        assert become_subreaper(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


@pytest.mark.parametrize(
    "short", [{"IDLE_SECONDS": 1.0, "_LOOK_SECONDS": 0.05}, {"_SILENT_SECONDS": 0.5}], ids=["idle", "silent"]
)
def test_client_that_works_long_is_waited_for(
    short: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not idle, and not silent."""
    for name, seconds in short.items():
        monkeypatch.setattr(client_process, name, seconds)
    process, target = ClientProcess(), Target()
    threading.Timer(2.0, (tmp_path / "flag").touch).start()
    assert process.call(target, "wait_for", str(tmp_path / "flag")) == "came"


def _train(say: Any) -> None:
    process = ClientProcess()
    say.send(process.call(Target(), "pid"))
    time.sleep(600)


def test_new_process_of_an_earlier_store_is_no_leak() -> None:
    """A thread that an earlier test had left asked again, and a leak check found two sockets."""
    earlier, target = ClientProcess(), Target()
    earlier.call(target, "pid")
    before = read_tests.held()["descriptors"]
    with contextlib.suppress(StoreError):
        earlier.call(target, "die")
    with Path(os.devnull).open(), Path(os.devnull).open():  # the new sockets get other numbers
        assert earlier.call(target, "pid")
    assert read_tests.held()["descriptors"] == before
    another = ClientProcess()
    assert another.call(target, "pid")
    assert read_tests.held()["descriptors"] - before == {("client process", id(another))}


def test_trainer_killed_its_client_ends() -> None:
    said, say = multiprocessing.Pipe(duplex=False)
    trainer = multiprocessing.get_context("fork").Process(target=_train, args=(say,))
    trainer.start()
    say.close()
    with said:
        assert said.poll(PATIENCE)
        pid = said.recv()
    trainer.kill()
    trainer.join()
    trainer.close()
    wait_until(lambda: gone(pid), "the client has ended")


def test_client_survives_ctrl_c_in_the_terminal() -> None:
    process, target = ClientProcess(), Target()
    pid = process.call(target, "pid")
    os.kill(pid, signal.SIGINT)
    assert process.call(target, "pid") == pid


def test_client_runs_no_signal_handler_of_the_trainer(tmp_path: Path) -> None:
    """A scheduler signals all processes of a job: two that write the same checkpoint would spoil it."""
    before = signal.signal(signal.SIGUSR1, lambda *_: (tmp_path / str(os.getpid())).touch())
    try:
        process, target = ClientProcess(), Target()
        pid = process.call(target, "pid")
        os.kill(pid, signal.SIGUSR1)
        assert process.call(target, "wait_for", "/") == "came" and process.call(target, "pid") == pid
        assert not list(tmp_path.iterdir())
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_client_that_is_stopped_is_an_error_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_process, "_SILENT_SECONDS", 0.5)
    process, target = ClientProcess(), Target()
    pid = process.call(target, "pid")
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: stopped(pid), "the client is stopped")
    try:
        with pytest.raises(StoreTimeoutError, match="has not answered for"):
            process.call(target, "echo", 1)
        assert process.call(target, "pid") != pid
    finally:
        os.kill(pid, signal.SIGKILL)


def test_client_that_cannot_be_forked_is_an_error_that_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(StoreError, match=r"can be started: .*temporarily unavailable") as caught:
        ClientProcess().call(Target(), "pid")
    assert caught.value.retry == "later"


def test_client_that_gets_no_more_threads_refuses_and_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, served = threading.Thread.start, []

    def start_two(thread: threading.Thread) -> None:
        if getattr(thread._target, "__name__", "") == "serve":  # type: ignore[attr-defined]
            served.append(thread)  # in the client
            if len(served) > 2:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    monkeypatch.setattr(client_process, "_SILENT_SECONDS", 0.2)  # then it is asked whether it lives
    process, target = ClientProcess(), Target()
    with ThreadPoolExecutor(2) as pool:
        pid = process.call(target, "pid")
        flag, begun = tmp_path / "flag", [tmp_path / "1", tmp_path / "2"]
        waiting = [pool.submit(process.call, target, "wait_for", str(flag), str(path)) for path in begun]
        wait_until(lambda: all(path.exists() for path in begun), "both threads are busy")
        with pytest.raises(StoreError, match="can't start new thread; raise the limit") as caught:
            process.call(target, "echo", b"x" * 10_000_000)
        assert caught.value.retry == "later"
        time.sleep(0.5)
        flag.touch()
        assert [request.result(PATIENCE) for request in waiting] == ["came", "came"]
    assert process.call(target, "pid") == pid


# --- What its parent may do ---------------------------------------------------------------------------------


def test_pipe_of_the_parent_ends_when_the_parent_closes_it() -> None:
    read, write = os.pipe()
    process, target = ClientProcess(), Target()
    assert not [name for name in process.call(target, "descriptors") if name.startswith("pipe:")]
    os.close(write)
    assert os.read(read, 1) == b""
    os.close(read)


def test_forked_child_has_a_client_process_of_its_own() -> None:
    process, target = ClientProcess(), Target()
    ours = process.call(target, "pid")
    child = os.fork()
    if child == 0:
        theirs = process.call(target, "pid")
        os._exit(0 if theirs not in (ours, os.getpid()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert process.call(target, "pid") == ours


def test_without_free_descriptors_the_error_names_the_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(StoreError, match="ulimit -n") as caught:
            ClientProcess().call(Target(), "pid")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert caught.value.retry == "later"


SCRIPT = """
import sys, warnings, torch, fastload
warnings.simplefilter("error")
sys.modules.pop("obstore", None)  # the server of forks has it
from fastload.errors import FastloadError
options = {"key": "k" * 8, "secret": "s" * 8, "endpoint_url": sys.argv[1], "client": sys.argv[2]}
options = {name: value for name, value in options.items() if value}
dataset = fastload.ImageFolder("s3://bucket", lambda image: image.size[0], storage_options=options)
print("first", dataset[0])
loaders = {"fastload": fastload.DataLoader, "torch": torch.utils.data.DataLoader}
for name, number in [(name, number) for name in sys.argv[3:] for number in (0, 2)]:
    batches = list(loaders[name](dataset, batch_size=4, num_workers=number))
    print(name, number, sum(len(labels) for _, labels in batches), {int(w) for ws, _ in batches for w in ws})
print(sorted({"obstore", "s3fs"} & set(sys.modules)))
"""


# Each loader comes first once, right after the sample that is read in the trainer.
@pytest.mark.parametrize(
    ("client", "loaders"),
    [("", ["fastload", "torch"]), pytest.param("s3fs", ["torch", "fastload"], marks=pytest.mark.stress)],
    ids=str,
)
def test_sample_read_first_workers_start_as_torchs_without_guard_or_pickling(
    client: str, loaders: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with (
        FaultServer(PHOTOS) as server,
        (tmp_path / "out").open("w") as out,
        (tmp_path / "err").open("w") as err,
    ):
        words = [sys.executable, str(script), server.endpoint_url, client, *loaders]
        done = Forked(words, env=os.environ, stdout=out, stderr=err)
        said, errors = done.communicate(PATIENCE)
    assert done.returncode == 0, errors
    epochs = [f"{loader} {number} 16 {{40}}" for loader in loaders for number in (0, 2)]
    assert said.splitlines() == ["first (40, 0)", *epochs, "[]"]


def test_client_killed_while_an_epoch_is_read_in_the_trainer_every_sample_comes(tmp_path: Path) -> None:
    import fastload

    with FaultServer(PHOTOS) as server:
        dataset = ImageFolder("s3://bucket", lambda image: image.size[0], storage_options=server.options)
        for _ in range(2):  # one kill an epoch: a request that is killed twice is an error
            labels: list[int] = []
            for batch, (_, found) in enumerate(fastload.DataLoader(dataset, batch_size=2)):
                labels += found.tolist()
                if batch == 1:
                    pid = dataset._store._attempt("_pid")
                    os.kill(pid, signal.SIGKILL)
                    wait_until(
                        lambda pid=pid: dataset._store._attempt("_pid") != pid,
                        "another client has taken over",
                    )
            assert sorted(labels) == [0] * 8 + [1] * 8


@pytest.fixture(autouse=True)
def _clients_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is: a client that ended by itself is replaced, and nothing is seen of that."""
    monkeypatch.setattr(client_process, "IDLE_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def _stores_tell_their_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.store.base.Store._pid", lambda _: os.getpid(), raising=False)
