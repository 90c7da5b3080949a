"""Where torch's DataLoader hangs, loses samples or hides the cause; and what is left behind: nothing."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pty
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import default_collate

from fastload import ByEpoch, DataLoader, ObjectDataset
from fastload.errors import WorkerError
from fastload.store.node import SharedFile
from fastload.workers import processes
from fastload.workers.slots import SlotMap, SlotPool
from tests.loaderdata import (
    At,
    FormatsItself,
    HoldsLambda,
    HoldsTensor,
    Numbers,
    TwoArguments,
    identity,
    numbered,
    picture,
)
from tests.patience import PATIENCE, runs, wait_until
from tests.scripts import Script, Scripts, serve_scripts

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    with serve_scripts() as scripts:
        yield scripts


def wait_for_the_end(processes: list[psutil.Process]) -> None:
    """Whether all processes are gone, or dead and not yet collected by the fork server that started them."""
    wait_until(lambda: not any(map(runs, processes)), "all workers have ended")


# --- samples and errors ------------------------------------------------------------------------------------


def test_an_unpicklable_sample_raises() -> None:
    loader = DataLoader(Numbers(4, lambda i: lambda: i), num_workers=1, collate_fn=identity)
    start = time.monotonic()
    # Python 3.13 says "Can't get local object"; those before it, "Can't pickle local object".
    wanted = r"(?s)pickle.*DataLoader worker process 0|DataLoader.*(pickle|local object)"
    with pytest.raises(Exception, match=wanted):
        next(iter(loader))
    assert time.monotonic() - start < 10
    not_a_leaf = Numbers(4, lambda i: torch.zeros(3, requires_grad=True) * 2)
    with pytest.raises(RuntimeError, match="non-leaf"):
        next(iter(DataLoader(not_a_leaf, num_workers=1, collate_fn=identity)))


@pytest.mark.parametrize("collate", [default_collate, identity])
def test_conjugate_and_negated_tensors_keep_their_values(collate: Any) -> None:
    """torch's pickle loses the marks."""
    dataset = Numbers(2, lambda i: (torch.full((3,), i + 2j).conj(), torch.full((3,), i + 2j).conj().imag))
    (batch,) = DataLoader(dataset, batch_size=2, num_workers=1, collate_fn=collate)
    conjugate, negated = (
        batch if collate is default_collate else (torch.stack(x) for x in zip(*batch, strict=True))
    )
    assert conjugate[:, 0].tolist() == [-2j, 1 - 2j] and negated[:, 0].tolist() == [-2, -2]


def test_epoch_left_before_its_first_batch(tmp_path: Path) -> None:
    """Results of the previous epoch are still on their way, as many as a worker may make in advance."""

    def make(index: int) -> int:
        (tmp_path / str(index)).touch()
        return index

    loader = DataLoader(Numbers(20, make), num_workers=1, persistent_workers=True, timeout=PATIENCE)
    worker = psutil.Process(iter(loader)._workers[0].pid)
    wait_until(
        lambda: (tmp_path / "1").exists() and worker.status() == psutil.STATUS_SLEEPING, "it has made two"
    )
    assert not (tmp_path / "2").exists()
    assert len(list(loader)) == 20


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_sampler(workers: int) -> None:
    class Fails:
        def __iter__(self) -> Iterator[int]:
            raise ValueError("no order")

    with pytest.raises(ValueError, match="no order"):
        list(DataLoader(Numbers(4), sampler=Fails(), num_workers=workers))


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_iteration_is_an_error(workers: int) -> None:
    def stop(index: Any) -> Any:
        raise StopIteration

    for options in ({}, {"batch_size": None}):
        with pytest.raises(RuntimeError, match="raised StopIteration for sample 0"):
            list(DataLoader(Numbers(4, stop), num_workers=workers, **options))
    with pytest.raises(RuntimeError, match="raised StopIteration for batch"):
        list(DataLoader(Numbers(4), num_workers=workers, collate_fn=stop))


ERRORS: list[tuple[Exception, type[Exception]]] = [
    (ValueError("plain"), ValueError),
    (KeyError("key"), KeyError),
    (KeyError(5), KeyError),
    (OSError(2, "gone", "file.jpg"), FileNotFoundError),
    (UnicodeDecodeError("ascii", b"\xff", 0, 1, "bad"), UnicodeDecodeError),
    (TwoArguments(4, "two"), TwoArguments),
    (json.JSONDecodeError("no value", "{", 1), json.JSONDecodeError),  # keeps one text of three arguments
    (FormatsItself(4, "text"), RuntimeError),  # its constructor cannot be called with what it keeps
    (HoldsLambda("hook"), HoldsLambda),
    (HoldsTensor("box"), HoldsTensor),
    (ValueError("not finite", torch.zeros(2)), ValueError),
    (KeyError(torch.tensor(5)), KeyError),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=lambda value: repr(value))
def test_the_original_exception(error: Exception, expected: type[Exception]) -> None:
    dataset = Numbers(4, At(3, "raise", error))
    with pytest.raises(expected) as caught:
        list(DataLoader(dataset, num_workers=1))
    assert type(caught.value) is expected
    text = f"{caught.value}\n{caught.value.__cause__}"
    assert "in DataLoader worker process 0" in text and "Original Traceback" in text
    assert "_raise" in text and "(sample 3)" in text
    if isinstance(error, TwoArguments):
        assert vars(caught.value) == vars(error) and caught.value.args == error.args


class Local:
    """Can be sent, but not received: the trainer lacks its module."""

    def __reduce__(self) -> Any:
        return _explode, (os.getpid(),)


def _explode(home: int) -> Any:
    if os.getpid() != home:
        raise RuntimeError("cannot be rebuilt here")
    return Local()


def test_a_batch_that_cannot_be_received_loses_no_other() -> None:
    dataset = Numbers(6, lambda i: Local() if i == 2 else i)
    iterator = iter(DataLoader(dataset, batch_size=None, num_workers=2, collate_fn=identity))
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(RuntimeError, match="cannot be rebuilt here"):
        next(iterator)
    assert list(iterator) == [3, 4, 5]


# --- death -------------------------------------------------------------------------------------------------

DEATHS = [
    (At(3, "kill"), r"pid (\d+)\) is killed by signal: Killed \(SIGKILL\)"),
    (At(3, "segfault"), r"pid (\d+)\) is killed by signal: Segmentation fault \(SIGSEGV\)"),
    (At(3, "exit", 3), r"pid\(s\) (\d+)\) exited unexpectedly \(exit code 3\)"),
    (At(3, "_exit", 0), r"pid\(s\) (\d+)\) exited unexpectedly \(exit code 0\)"),
]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(("deed", "text"), DEATHS, ids=lambda value: getattr(value, "deed", ""))
def test_a_dead_worker_is_reported(deed: At, text: str, in_order: bool) -> None:
    iterator = iter(DataLoader(Numbers(40, deed), num_workers=2, in_order=in_order))
    pids = [process.pid for process in iterator._workers]
    with pytest.raises(WorkerError, match=text) as caught:
        list(iterator)
    assert int(re.search(text, str(caught.value)).group(1)) == pids[1]  # type: ignore[union-attr]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(WorkerError, match="ended by an earlier error"):
        next(iterator)


def _sleepy() -> Any:
    return iter(DataLoader(Numbers(8, At(1, "sleep", 60)), num_workers=2, prefetch_factor=1))


def _time_to_report(iterator: Any) -> float:
    """Seconds from the death of a worker to its report, while the trainer waits for it."""
    assert next(iterator) is not None
    victim = iterator._workers[1]
    killed_at = []

    def kill() -> None:
        os.kill(victim.pid, signal.SIGKILL)
        killed_at.append(time.monotonic())

    timer = threading.Timer(0.1, kill)
    timer.start()
    with pytest.raises(WorkerError, match="SIGKILL"):
        next(iterator)
    reported_at = time.monotonic()
    timer.join()
    return reported_at - killed_at[0]


def test_a_death_is_reported_at_once() -> None:
    # A loaded machine may be late, but not three times. Without a report of its own it is late every time.
    assert any(_time_to_report(_sleepy()) < 1 for _ in range(3))


def test_death_of_a_worker_that_has_not_read_all_its_work_is_reported() -> None:
    told, tell = os.pipe()

    def die(worker_id: int) -> None:
        os.read(told, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    loader = DataLoader(Numbers(4_000), num_workers=1, prefetch_factor=2_000, worker_init_fn=die)
    iterator = iter(loader)  # more work than fits the socket
    os.write(tell, b"x")
    with pytest.raises(WorkerError, match="SIGKILL"):
        next(iterator)
    os.close(told)
    os.close(tell)


@pytest.fixture
def no_end_of_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another process holds the workers' ends of their sockets, so their deaths cause no end-of-file."""
    from fastload.workers.protocol import Channel

    kept: list[Any] = []
    pair = Channel.pair.__func__  # type: ignore[attr-defined]

    def leaky(cls: Any) -> Any:
        ours, theirs = pair(cls)
        kept.append(theirs._socket.dup())
        return ours, theirs

    monkeypatch.setattr(Channel, "pair", classmethod(leaky))
    yield
    for sock in kept:
        sock.close()


def test_a_death_is_reported_without_end_of_file(no_end_of_file: None) -> None:
    assert any(_time_to_report(_sleepy()) < 2 for _ in range(3))


@pytest.mark.stress
def test_death_with_guards_removed_is_not_reported(
    no_end_of_file: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.workers.processes._SHUTDOWN_GRACE", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr("multiprocessing.process.BaseProcess.is_alive", lambda self: True)
        with pytest.raises(RuntimeError, match="timed out after 2 seconds"):
            list(DataLoader(Numbers(8, At(3, "kill")), num_workers=2, timeout=2))


def test_sockets_that_are_collected_before_their_loader_are_closed_without_a_warning(no_leaks: None) -> None:
    """As where an error's traceback holds the loader: garbage in a circle ends in any order."""
    from fastload.workers.protocol import Channel

    ends = list(Channel.pair())
    ends[0].__dict__["circle"] = ends
    del ends
    gc.collect()


def test_timeout_names_the_samples(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(str(number))
    dataset = ObjectDataset(tmp_path, transform=lambda text: At(2, "sleep", 60)(int(text)))
    loader = DataLoader(dataset, 2, num_workers=1, timeout=1)
    with pytest.raises(RuntimeError, match="timed out after 1 seconds") as caught:
        list(loader)
    assert "waited for step 1: sample 2 '2.txt', sample 3 '3.txt'. " in caught.value.__notes__[0]


def test_persistent_workers_start_again_after_a_death() -> None:
    loader = DataLoader(Numbers(8), num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerError):
        list(iterator)
    assert [int(batch) for batch in loader] == list(range(8))


_ENDLESS = """
    import os, signal, sys, time
    import torch
    from fastload import DataLoader
    from tests.loaderdata import At, Numbers

    loader = DataLoader(Numbers(10**6, At(40, "sleep", 600)), num_workers=2,
                        multiprocessing_context=sys.argv[1] if len(sys.argv) > 1 else None)
    if __name__ == "__main__":
        iterator = iter(loader)
        next(iterator)
        print(*[process.pid for process in iterator._workers], flush=True)
        for batch in iterator:
            pass
"""


def _workers_of(trainer: Script) -> list[psutil.Process]:
    return [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]


@pytest.mark.parametrize(
    "signal_number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.stress)]
)
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_end_with_their_trainer(
    context: str, signal_number: int, scripts: Scripts, tmp_path: Path
) -> None:
    trainer = scripts.start(_ENDLESS, context, path=tmp_path / "train.py")  # forkserver needs a file
    workers = _workers_of(trainer)
    start = time.monotonic()
    os.kill(trainer.pid, signal_number)
    wait_for_the_end(workers)
    assert time.monotonic() - start < 10  # a tenth of a second where nothing else runs
    trainer.communicate()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(times: int, scripts: Scripts) -> None:
    """From a terminal: the whole process group gets it."""
    master, slave = pty.openpty()
    trainer = scripts.start(_ENDLESS, stdin=slave)
    workers = _workers_of(trainer)
    for _ in range(times):
        os.killpg(trainer.pid, signal.SIGINT)
    _, err = trainer.communicate()
    assert trainer.returncode == -signal.SIGINT
    # The second Ctrl-C may find the trainer ending its workers; no worker says anything.
    # It may also find torch's clean-up at exit, which prints "KeyboardInterrupt: ".
    ends = ("KeyboardInterrupt", "KeyboardInterrupt:")[:times]
    assert 1 <= err.count("Traceback") <= times and err.rstrip().endswith(ends)
    assert "Process-" not in err
    wait_for_the_end(workers)
    os.close(master)
    os.close(slave)


# --- memory ------------------------------------------------------------------------------------------------


def test_every_batch_held_and_then_freed() -> None:
    count = 1100  # more than the descriptors that a process has by default
    loader = DataLoader(Numbers(count, numbered), batch_size=1, num_workers=2, persistent_workers=True)
    before = _slot_bytes()
    batches = list(loader)
    assert len(batches) == count and all(int(batch[0, -1]) == i for i, batch in enumerate(batches))
    assert _slot_bytes() - before > 88_000_000
    del batches
    for batch in loader:  # the messages of another epoch take the memory back to the workers
        del batch
    assert _slot_bytes() - before < 44_000_000


def _slot_bytes() -> int:
    """The slots that this process and its workers have mapped or hold a descriptor of, each counted once.

    Not `Shmem:` of /proc/meminfo: whatever else runs on the machine is part of that.
    """
    sizes: dict[int, int] = {}  # by inode
    for pid in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, _, _, _, inode, *name = line.split()
            if name and name[0] == "/memfd:fastload":
                start, end = (int(address, 16) for address in span.split("-"))
                sizes[int(inode)] = end - start
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if str(fd.readlink()).startswith("/memfd:fastload "):
                    sizes[fd.stat().st_ino] = fd.stat().st_size
    return sum(sizes.values())


def test_slots_are_used_again() -> None:
    loader = DataLoader(Numbers(300, picture), batch_size=4, num_workers=1)
    addresses = {batch.data_ptr() for batch in loader}
    assert len(addresses) <= 6


def test_worker_whose_fork_stops_is_forked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CPython's issue 112275 stops one in Python 3.11 before 3.11.10."""

    def stop_once(*arguments: Any) -> None:
        if not (tmp_path / "stopped").exists():
            (tmp_path / "stopped").touch()
            threading.Event().wait()
        run(*arguments)

    run = processes._tell_and_run
    monkeypatch.setattr(processes, "_FORK_MAY_STOP", True)
    monkeypatch.setattr(processes, "_FORK_PATIENCE", 0.5)
    monkeypatch.setattr(processes, "_tell_and_run", stop_once)
    batches = list(DataLoader(Numbers(4), 1, num_workers=2, multiprocessing_context="fork"))
    assert (tmp_path / "stopped").exists() and [int(batch) for batch in batches] == [0, 1, 2, 3]


def test_exhausted_iterator_holds_no_slots() -> None:
    before = _slot_bytes()
    iterator = iter(DataLoader(Numbers(8, numbered), batch_size=4, num_workers=1))
    *_, batch = iterator
    assert _slot_bytes() > before and batch[:, -1].tolist() == [4, 5, 6, 7]  # that of the live batch
    del batch, _
    assert _slot_bytes() <= before
    assert next(iterator, None) is None


def test_a_slow_consumer_keeps_memory_bounded() -> None:
    iterator = iter(DataLoader(Numbers(200, picture), batch_size=4, num_workers=2, prefetch_factor=2))
    for _ in range(3):
        next(iterator)
    pool = iterator._engine
    for _ in range(50):  # as long as workers still send, they would show it
        pool._poll(0.01)
    made = sum(worker.consumed for worker in pool._workers) + 4
    mapped = sum(len(worker.slots._memory) for worker in pool._workers)
    assert mapped <= made + 2


class _Keeps:
    """A collate_fn that keeps its first batch."""

    kept: Any = None

    def __call__(self, samples: list[Any]) -> Any:
        batch = default_collate(samples)
        if self.kept is None:
            self.kept = batch
        return batch, self.kept.sum()


@pytest.mark.parametrize("size", [100, 50_000])
def test_a_tensor_that_the_worker_keeps_is_not_overwritten(size: int) -> None:
    dataset = Numbers(40, lambda i: torch.full((size,), float(i)))
    for i, (batch, of_first) in enumerate(DataLoader(dataset, num_workers=1, collate_fn=_Keeps())):
        assert float(batch[0, 0]) == i and float(of_first) == 0


def _slot_of_the_next_batch(pool: SlotPool) -> tuple[int, int]:
    """(address of a tensor kept after its batch came back, address of the next batch)."""
    kept = pool.allocate((50_000,), torch.float32)
    packed, descriptors = pool.pack(kept)
    for descriptor in descriptors:
        os.close(descriptor)
    pool.release(packed.slots[0])
    following = pool.allocate((50_000,), torch.float32).data_ptr()
    pool.abandon()
    return kept.data_ptr(), following


def test_a_slot_that_still_has_a_tensor_is_not_used_again() -> None:
    kept, following = _slot_of_the_next_batch(SlotPool(keep=2))
    assert kept != following


@pytest.mark.stress
def test_slot_with_guard_removed_is_overwritten() -> None:
    class Careless(SlotPool):
        def _take(self, nbytes: int) -> Any:
            for slot in self._free:
                slot.alive = lambda: None
            return super()._take(nbytes)

    kept, following = _slot_of_the_next_batch(Careless(keep=2))
    assert kept == following


def test_slots_of_a_batch_that_outgrows_them() -> None:
    dataset = Numbers(30, lambda i: [torch.full((20_000 * (1 + i % 7),), n) for n in range(1 + i % 5)])
    for i, batch in enumerate(DataLoader(dataset, batch_size=None, num_workers=1, collate_fn=identity)):
        assert [int(tensor[-1]) for tensor in batch] == list(range(1 + i % 5))


def test_many_large_tensors_take_few_descriptors() -> None:
    pool, slots = SlotPool(keep=4), SlotMap()
    packed, fds = pool.pack([torch.ones(300_000) for _ in range(200)])
    assert len(fds) < 12
    slots.attach(packed, fds)
    assert len(slots.unpack(packed)) == 200


def test_megabytes_of_python_objects() -> None:
    dataset = Numbers(4, lambda i: (bytes([i]) * 20_000_000, "ä" * 1_000_000))
    for i, (data, text) in enumerate(
        DataLoader(dataset, batch_size=None, num_workers=2, collate_fn=identity)
    ):
        assert data == bytes([i]) * 20_000_000 and len(text) == 1_000_000


def test_a_hundred_thousand_indices_a_batch() -> None:
    batches = list(DataLoader(Numbers(200_000), batch_size=100_000, num_workers=2))
    assert torch.equal(torch.cat(batches), torch.arange(200_000))


@pytest.mark.root
def test_small_dev_shm(scripts: Scripts) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root for a mount of its own")
    body = """
        import ctypes, subprocess, sys, warnings
        import torch
        from fastload import DataLoader
        from tests.loaderdata import Numbers

        new_namespace = 0x20000
        if ctypes.CDLL(None).unshare(new_namespace):
            sys.exit("no mounts here")
        for words in ("--make-rprivate /", "-t tmpfs -o size=8m tmpfs /dev/shm"):
            if subprocess.run(["mount", *words.split()]).returncode:
                sys.exit("no mounts here")

        def large(i):
            return torch.nn.Parameter(torch.full((500_000,), float(i))), torch.ones(500_000).to_sparse()

        warnings.simplefilter("ignore")  # torch's, of sparse tensors
        loader = DataLoader(Numbers(8, large), batch_size=4, num_workers=2, collate_fn=list)
        print(sum(int(a[0]) + b.sum().item() for batch in loader for a, b in batch))
    """
    code, out, err = scripts.run(body)
    if err.endswith("no mounts here\n"):
        pytest.skip(err)
    assert (code, err, float(out)) == (0, "", 28 + 8 * 500_000)


# --- lifetimes ---------------------------------------------------------------------------------------------


def _nested(index: int) -> list[int]:
    return [int(batch) + index for batch in DataLoader(Numbers(3))]


def test_loaders_inside_loaders() -> None:
    inner = Numbers(4, _nested)
    assert [[int(x) for x in batch] for batch in DataLoader(inner, num_workers=2)][3] == [3, 4, 5]
    outer = DataLoader(Numbers(3), num_workers=1)
    pairs = [(int(a), int(b)) for a in outer for b in DataLoader(Numbers(2), num_workers=1)]
    assert pairs == [(a, b) for a in range(3) for b in range(2)]


def test_several_iterators_at_once() -> None:
    loader = DataLoader(Numbers(6, picture), num_workers=2)
    first, second = iter(loader), iter(loader)
    held = [next(first), next(second), next(first)]
    assert len(list(first)) == 4 and len(list(second)) == 5 and len(held) == 3


def test_leaving_early() -> None:
    for _ in range(3):
        batch = next(iter(DataLoader(Numbers(100, picture), num_workers=2)))
    assert batch.sum() == 3 * 160 * 160  # still there, its workers gone


def test_an_error_in_the_training_step() -> None:
    def train() -> None:
        for _ in DataLoader(Numbers(100, picture), num_workers=2):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    gc.collect()
    assert not multiprocessing.active_children()


def test_persistent_workers_end_with_their_loader() -> None:
    loader = DataLoader(Numbers(8), num_workers=2, persistent_workers=True)
    next(iter(loader))
    gc.disable()
    try:
        del loader
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


def test_interrupted_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook: the next epoch works, with persistent workers too."""
    monkeypatch.setattr("fastload.workers.processes._SHUTDOWN_GRACE", 0.1)
    nap = Numbers(4, At(2, "sleep", 60))
    loader = DataLoader(nap, num_workers=1, persistent_workers=True)
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        list(loader)
    timer.join()
    nap.make = int
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]


def test_message_that_ctrl_c_leaves_in_the_outbox_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is released twice would be the memory of two batches."""
    numbers = Numbers(24, lambda i: torch.full((25_000,), i))
    loader = DataLoader(numbers, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)  # and the next message carries its slot
    sendmsg = socket.socket.sendmsg

    def send_and_interrupt(self: socket.socket, *arguments: Any) -> None:
        sendmsg(self, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(socket.socket, "sendmsg", send_and_interrupt)
        next(iterator)
    for _ in range(2):
        held = list(loader)
        assert [int(batch[0, 0]) for batch in held] == list(range(24))


def test_interpreter_exit_with_a_live_iterator(scripts: Scripts) -> None:
    body = """
        from fastload import DataLoader
        from tests.loaderdata import Numbers, picture
        held = {"batches": []}
        held["self"] = held  # a cycle
        for persistent in (False, True):
            iterator = iter(DataLoader(Numbers(100, picture), num_workers=2, persistent_workers=persistent))
            held["batches"].append(next(iterator))
            held[persistent] = iterator
        print("done")
    """
    assert scripts.run(body) == (0, "done\n", "")


def test_without_main_guard_and_with_lambdas(scripts: Scripts) -> None:
    body = """
        import torch
        from fastload import DataLoader
        class Local:
            def __len__(self): return 6
            def __getitem__(self, i): return (lambda x: torch.tensor(x))(i)
        loader = DataLoader(
            Local(), 2, num_workers=2, collate_fn=lambda samples: sum(samples), worker_init_fn=lambda i: None
        )
        for batch in loader:
            print(int(batch))
    """
    assert scripts.run(body) == (0, "1\n5\n9\n", "")


def test_missing_main_guard_is_explained(scripts: Scripts, tmp_path: Path) -> None:
    body = """
        from fastload import DataLoader
        from tests.loaderdata import Numbers
        print(list(DataLoader(Numbers(4), num_workers=1, multiprocessing_context='forkserver')))
    """
    code, _, err = scripts.run(body, path=tmp_path / "train.py")
    assert code == 1
    assert 'put its code under `if __name__ == "__main__":`' in err


_PRELOADING = """
    import multiprocessing, sys
    from fastload import DataLoader
    from tests.loaderdata import Imported, identity

    if __name__ == "__main__":
        if sys.argv[1:]:
            multiprocessing.set_forkserver_preload(sys.argv[1:])
        for _ in range(2):
            loader = DataLoader(
                Imported(["json.tool", "fastload.datasets.objects"]),
                num_workers=1,
                collate_fn=identity,
                multiprocessing_context="forkserver",
            )
            print(*[found for batch in loader for found in batch])
"""


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        pytest.param([], "False True", marks=pytest.mark.stress),
        (["no.such.module", "json.tool"], "True True"),
    ],
)
def test_modules_that_the_user_preloads_are_preloaded_beside_ours(
    chosen: list[str], found: str, scripts: Scripts, tmp_path: Path
) -> None:
    _, out, err = scripts.run(_PRELOADING, *chosen, path=tmp_path / "train.py")
    assert out.splitlines() == [found, found], err


def test_dataset_of_more_files_than_a_message_to_the_fork_server_holds() -> None:
    """As of a `ConcatDataset` of 130 prefixes of a bucket: each has its listing and what it may ask for."""

    def file_of(number: int) -> SharedFile:
        return SharedFile.written("file", lambda descriptor: os.write(descriptor, b"%d" % number))

    files = [file_of(number) for number in range(260)]
    numbers = Numbers(260, files.__getitem__)
    loader = DataLoader(numbers, batch_size=None, num_workers=1, multiprocessing_context="forkserver")
    try:
        assert [int(file.map[:]) for file in loader] == list(range(260))
    finally:
        resource_sharer.stop()


def test_a_fork_of_the_user_while_a_loader_lives() -> None:
    iterator = iter(DataLoader(Numbers(40), num_workers=2))
    assert int(next(iterator)) == 0
    child = os.fork()
    if child == 0:
        del iterator
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [int(batch) for batch in iterator] == list(range(1, 40))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, bytes(int(batch) for batch in DataLoader(Numbers(4), num_workers=1)))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == bytes(range(4))
    os.close(read)
    os.close(write)


def _slots_of(iterator: Any) -> set[int]:
    """Those that the trainer has mapped, of its only worker."""
    return set(iterator._engine._workers[0].slots._memory)


def test_batch_that_a_forked_child_sees_does_not_change() -> None:
    """Like in torch: the child shares the memory of a batch, and no other batch uses it."""
    iterator = iter(DataLoader(Numbers(64, numbered), 2, num_workers=1))
    batch, kept = next(iterator), next(iterator)
    told, tell = os.pipe()
    answer, answered = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.read(told, 1)  # until the trainer closes its end
        os.write(answered, bytes(int(part[0]) for part in (*batch, *kept)))
        os._exit(0)
    os.close(told)
    slots = _slots_of(iterator)
    del batch
    for first in range(2, 31):
        assert next(iterator)[:, 0].tolist() == [2 * first, 2 * first + 1]
    assert len(slots - _slots_of(iterator)) == 1, "what nobody here looks at any more is not kept"
    os.close(tell)
    assert os.read(answer, 10) == bytes([0, 1, 2, 3])
    assert os.waitpid(child, 0)[1] == 0
    assert kept[:, 0].tolist() == [2, 3]
    os.close(answer)
    os.close(answered)


def test_batches_of_another_loader_that_a_workers_dataset_holds_do_not_change() -> None:
    """As in torch: the worker has those that its dataset held at the fork, whatever the trainer lets go."""
    first = iter(DataLoader(Numbers(64, numbered), 2, num_workers=1, multiprocessing_context="fork"))
    held = [next(first) for _ in range(6)]
    wanted = [batch.clone() for batch in held]
    holder = Numbers(6, held.__getitem__)
    second = iter(
        DataLoader(holder, batch_size=None, num_workers=1, prefetch_factor=1, multiprocessing_context="fork")
    )
    got = [next(second)]
    held.clear()
    for number in range(6, 32):
        assert next(first)[:, 0].tolist() == [2 * number, 2 * number + 1]
    got += second
    assert all(map(torch.equal, got, wanted))


def test_a_loader_in_a_thread() -> None:
    batches: list[Any] = []
    thread = threading.Thread(target=lambda: batches.extend(DataLoader(Numbers(20, numbered), num_workers=2)))
    thread.start()
    thread.join(PATIENCE)
    assert [int(batch[0, 0]) for batch in batches] == list(range(20))


def _count_held() -> tuple[int, int, int]:
    me = psutil.Process()
    return me.num_fds(), me.num_threads(), me.memory_info().rss


@pytest.mark.parametrize(
    ("workers", "loaders"),
    [(0, 100), (1, 12), pytest.param(1, 1000, marks=[pytest.mark.stress, pytest.mark.timeout(400)])],
)
def test_many_loaders_leave_nothing(workers: int, loaders: int) -> None:
    def use(times: int) -> None:
        for _ in range(times):
            assert len(list(DataLoader(Numbers(4, numbered), num_workers=workers))) == 4

    use(loaders // 4)
    gc.collect()
    fds, threads, memory = _count_held()
    use(loaders)
    gc.collect()
    after = _count_held()
    assert after[:2] == (fds, threads) and after[2] - memory < 20_000_000


def test_few_descriptors_are_explained(scripts: Scripts) -> None:
    body = """
        import os, resource
        from fastload import DataLoader
        from tests.loaderdata import Numbers, numbered
        iterator = iter(DataLoader(Numbers(100, numbered), num_workers=1))
        next(iterator)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        kept = []
        try:
            while True:
                os.dup(0)
        except OSError:
            pass
        try:
            for batch in iterator:
                kept.append(batch)
        except OSError as error:
            print(error)
    """
    code, out, err = scripts.run(body)
    assert (code, err) == (0, "") and "ulimit -n" in out


class _Owned:
    """An object that only its own process may take apart; in a cycle, so that the collector finds it."""

    def __init__(self, marker: Path) -> None:
        self.me, self.marker, self.pid = self, marker, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            self.marker.touch()


@pytest.mark.parametrize("guarded", [True, False])
def test_a_worker_leaves_the_trainers_garbage_alone(
    guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not guarded:
        monkeypatch.setattr(gc, "freeze", lambda: None)
    gc.disable()
    try:
        _Owned(tmp_path / "collected in a worker")
        list(DataLoader(Numbers(4), num_workers=1, worker_init_fn=lambda _: gc.collect()))
    finally:
        gc.enable()
    gc.collect()
    assert list(tmp_path.iterdir()) == ([] if guarded else [tmp_path / "collected in a worker"])


class FailsToStart(ByEpoch):
    """A transform whose epoch 1 cannot start."""

    def start_epoch(self, epoch: int) -> None:
        if epoch == 1:
            raise OSError("of epoch 1")


def test_error_at_the_start_of_an_epoch_is_of_that_epoch_only(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_bytes(name.encode())
    dataset = ObjectDataset(str(tmp_path), transform=FailsToStart({0: bytes}))
    loader: Any = DataLoader(dataset, 2, num_workers=1, persistent_workers=True, collate_fn=list)
    first = list(loader)
    with pytest.raises(OSError, match="of epoch 1"):
        list(loader)
    assert list(loader) == first
