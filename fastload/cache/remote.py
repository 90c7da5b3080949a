"""`Cache(remote=URL)`: a node pulls what others have published, and with `push=True` publishes what it fills.

    trainer ── job, pickled ──▶ stdin   a process: pull or push   stdout ── result, JSON ──▶ trainer

The first rank of a node starts the processes. They may be killed at any moment, as `pull` and `push` may be.

A process, because a thread of the trainer would take the GIL from the training loop. It is not forked, for
the clients of a store do not survive that. Rejected: the work as a duty of the loader's workers, which would
hold up their batches. It needs a process group of its own, no torch, and about 40 MB, and has the lowest
priority. Its input and output are files in memory: a pipe of 64 KB would make one side wait.

Training begins at once: objects are read while records come, and the pull leaves out what that has brought.
Rejected: to wait for a pull that is short. Nothing is decoded meanwhile, so the epoch ends later. To pull in
the order of the epoch: with photos of 115 KB, half of all ranges of 8 MB have one of the first 1 % of the
samples, and 97 % have one of the first 5 %. To read single records out of the packs: that is a request each.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import util as mp_util
from typing import IO, NamedTuple

from fastload.cache.cache import Cache
from fastload.cache.directory import PULLING, PUSHING, is_readonly
from fastload.cache.exchange import Pulled, Pushed, pull, push
from fastload.cache.packs import sources_of
from fastload.errors import CacheError, FastloadError, NotFoundError, address, warn
from fastload.metrics.counters import Counters
from fastload.metrics.machine import memory_file
from fastload.store import Store
from fastload.store.client_process import keep_clients_here
from fastload.store.node import ProcessLocal

_END_SECONDS = 1.0  # for a process to end by itself: a request that stalls does not
_SAY_SECONDS = 2.0  # of a wait at the end of the script, after which a line says what for
_SLICE = 256  # keys that are made at once
_REST_SECONDS = 0.006
# `-c` puts the working directory first, and lacks what the script has added.
# The cores are the trainer's from the first import on: where all are busy, no epoch waits for the network.
# What modules of the script print goes to stderr: stdout is for the result alone.
_WORK = (
    "import os, sys; os.nice(19); sys.path[:] = {path!r}; result = os.fdopen(os.dup(1), 'w'); os.dup2(2, 1); "
    "from fastload.cache.remote import main; main(result)"
)

Keys = Callable[[], Iterable[bytes]]


class _Wanted:
    """The records that one loader wants.

    Attributes:
        keys: theirs, one behind the other.
        settled: packs that have nothing more of them.
    """

    def __init__(self) -> None:
        self.keys = b""
        self.settled: list[str] = []


class _Running(NamedTuple):
    """A process, the file that it writes its result to, and what it pulls."""

    process: subprocess.Popen[bytes]
    result: IO[bytes]
    wanted: _Wanted


class Remote:
    """The processes of this trainer that pull and push for one cache.

    A failure of theirs is counted, and the first one of a pull and of a push is warned of.

    Args:
        cache: the cache.
        store: its `remote`.

    Attributes:
        pushes: whether a cache with this directory and URL has `push=True`.
    """

    def __init__(self, cache: Cache, store: Store) -> None:
        self._cache = copy.copy(cache)  # not opened, nor kept open
        self._store = store
        self._lock = threading.RLock()  # for the threads that make keys
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._readers = weakref.WeakKeyDictionary[object, _Wanted]()
        self._waiting: list[_Wanted] = []  # to be pulled
        self._pushed = -1  # records that the cache had at the last push
        self._running: dict[str, _Running] = {}
        self._warned: set[str] = set()
        self._leads = False  # or another rank of the node does
        self.pushes = cache.push
        self._counts = Counters()

    def pull(self, reader: object, keys: Keys) -> None:
        """Pull what was published since the last pull, in the background.

        Args:
            reader: the loader, or what stands for it.
            keys: makes the keys of its records; called in a thread. Where there are none, it is called again.
        """
        with self._lock:
            self._leads = True
            self._collect("pull")
            wanted = self._readers.get(reader)
            if wanted is None:
                wanted = self._readers[reader] = _Wanted()
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                work = partial(self._make_keys, reader, wanted, keys)
                self._threads.append(threading.Thread(target=work, name="fastload-keys", daemon=True))
                self._threads[-1].start()
            elif wanted.keys and wanted not in self._waiting:
                self._waiting.append(wanted)
                self._start_pull()

    def _make_keys(self, reader: object, wanted: _Wanted, keys: Keys) -> None:
        """Make the keys of a reader, 7 us each, in slices between which the training gets the GIL."""
        made = bytearray()
        for number, some in enumerate(keys()):
            made += some
            if number % _SLICE == _SLICE - 1 and self._closing.wait(_REST_SECONDS):
                return
        with self._lock:
            wanted.keys = bytes(made)
            if made:
                self._waiting.append(wanted)
                self._start_pull()
            else:  # as of shards that are not indexed yet
                self._readers.pop(reader, None)

    def _start_pull(self) -> None:
        """Begin the next pull that waits, where none runs."""
        if self._waiting and "pull" not in self._running and not self._closing.is_set():
            self._start("pull", self._waiting.pop(0))

    def push(self) -> None:
        """Publish what is not published yet, in the background. Does nothing while a push is running."""
        with self._lock:
            self._collect("push")
            if "push" not in self._running:
                self._start("push", _Wanted())

    def add_counts(self, counters: Counters) -> None:
        """Add what ended processes have done."""
        with self._lock:
            self._collect("pull")
            self._collect("push")
            counters.merge(self._counts.drain())

    def close(self) -> None:
        """Stop pulling. Publish what is left, with a line in the log where that takes a while."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        try:
            self._end("pull")
            if self.pushes and self._leads:
                self._await_push()
                self.push()
                self._await_push()
        finally:
            self._end("push")

    def _await_push(self) -> None:
        """Wait for a push to end, as it does: requests to the store have deadlines."""
        if (running := self._running.get("push")) is not None:
            try:
                running.process.wait(_SAY_SECONDS)
            except subprocess.TimeoutExpired:
                if "close" not in self._warned:
                    self._warned.add("close")
                    logging.getLogger("fastload").warning(
                        f"publishing the cache {self._cache.path} at {self._store.url}; Ctrl-C stops that"
                    )
                running.process.wait()
            self._collect("push")

    def _end(self, task: str) -> None:
        """End a process that still runs."""
        running = self._running.pop(task, None)
        if running is None:
            return
        running.process.terminate()
        try:
            running.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()
        running.result.close()

    def _start(self, task: str, wanted: _Wanted) -> None:
        if is_readonly(self._cache.path):
            self._warn(task, "it is read-only")
            return
        with contextlib.ExitStack() as undone:
            # Python passes over what is no text there, such as a Path, whose words are no code.
            path = [place for place in sys.path if isinstance(place, str)]
            try:
                result = undone.enter_context(_open_memory("fastload-result"))
                job = pickle.dumps(
                    Job(task, self._cache, wanted.keys, wanted.settled, self._pushed, os.getpid())
                )
                with _open_memory("fastload-job") as file:
                    file.write(job)
                    file.seek(0)
                    process = subprocess.Popen(
                        [sys.executable, "-c", _WORK.format(path=path)],
                        stdin=file,
                        stdout=result,
                        # Ctrl-C is for the trainer, which ends it. In a session of its own the kernel would
                        # give it as much of the cores as the trainer, whatever its priority: sched(7).
                        process_group=0,
                    )
            except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
                self._warn(task, f"no process could be started: {error}")
            else:
                undone.pop_all()
                self._running[task] = _Running(process, result, wanted)

    def _collect(self, task: str) -> None:
        """Take the result of a process that has ended."""
        running = self._running.get(task)
        if running is None or running.process.poll() is None:
            return
        del self._running[task]
        with running.result as file:
            file.seek(0)
            text = file.read()
        try:
            result = json.loads(text)
        except ValueError:
            self._warn(task, f"its process ended with status {running.process.returncode}")
            return
        if result["error"]:
            self._warn(task, result["error"])
        if task == "pull":
            running.wanted.settled = result["settled"]
            self._counts.add("cache.pulled", result["records"])
            self._start_pull()
        elif not result["error"]:
            self._pushed = result["entries"]
            self._counts.add("cache.pushed", result["records"])

    def _warn(self, task: str, text: str) -> None:
        """Count a failure, and warn of the first one of a task."""
        self._counts.add("cache.remote_failures")
        if task in self._warned:
            return
        self._warned.add(task)
        message = (
            f"fastload trains on without the {task} of its cache {self._cache.path}: {text}. "
            f"See {address('cache-remote')}"
        )
        warn(message)


def _open_memory(name: str) -> IO[bytes]:
    return os.fdopen(memory_file(name), "r+b")


def _new_remotes() -> dict[tuple[str, str], Remote]:
    # atexit would not run in a multiprocessing child. The priority is below that of the cache directories:
    # they write out first, so that the last push finds all records.
    mp_util.Finalize(None, close_all, exitpriority=0)
    return {}


_remotes = ProcessLocal(_new_remotes)  # by directory and URL


def remote_of(cache: Cache) -> Remote:
    """Return this process's `Remote` for a cache with `remote=`."""
    assert cache.remote is not None
    remotes, key = _remotes.get(), (cache.path, cache.remote.url)
    if key not in remotes:
        remotes[key] = Remote(cache, cache.remote)
    remote = remotes[key]
    remote.pushes |= cache.push
    return remote


def close_all() -> None:
    """End what this process has begun, as `Remote.close` does."""
    remotes = _remotes.get()
    while remotes:
        remotes.popitem()[1].close()


_TRAINER_SECONDS = 0.5  # between two looks whether the trainer lives


class Job(NamedTuple):
    """What the process is started for.

    Args:
        task: "pull" or "push".
        cache: with its `remote`.
        only: the keys of the records that are pulled, one behind the other.
        settled: names of packs that are not looked at again.
        entries: of the cache at the last push. While it has no more, there is nothing to push.
        trainer: the process that waits for it.
    """

    task: str
    cache: Cache
    only: bytes
    settled: list[str]
    entries: int
    trainer: int


class _Result(NamedTuple):
    """What the trainer is told.

    Args:
        records: that were pulled or published.
        settled, entries: see `Job`.
        error: why the work is not complete, or "".
    """

    records: int = 0
    settled: list[str] = []  # noqa: RUF012 (never changed)
    entries: int = 0
    error: str = ""


def main(answer: IO[str]) -> None:
    """Do one job from stdin, and write its result."""
    try:
        job: Job = pickle.load(sys.stdin.buffer)
    except (AttributeError, ImportError) as error:  # what the store was given is of the script itself
        why = f"{error}: define it in a module, not in the script: another process has to import it"
        answer.write(json.dumps(_Result(error=why)._asdict()))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=_end_with, args=(job.trainer,), daemon=True).start()
    keep_clients_here()
    try:
        result = _pull(job) if job.task == "pull" else _push(job)
    except (FastloadError, OSError) as error:
        result = _Result(settled=job.settled, error=str(error))
    finally:
        job.cache.close()
    answer.write(json.dumps(result._asdict()))


def _end_with(trainer: int) -> None:
    """End this process once the trainer is gone, however that ended."""
    while os.getppid() == trainer:
        time.sleep(_TRAINER_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_SECONDS)
    os._exit(1)


def _pull(job: Job) -> _Result:
    store = job.cache.remote
    assert store is not None
    with _alone(job.cache, PULLING):
        try:
            sources = sources_of(job.cache)
            done = pull(
                job.cache, store, only=job.only, settled=job.settled, sources=sources, beside_training=True
            )
        except NotFoundError:  # nobody has published yet
            done = Pulled()
    faults = [f"{name} {fault}" for name, fault in done.damaged.items()]
    return _Result(done.records, [*job.settled, *done.settled], error="; ".join(faults[:1]))


def _push(job: Job) -> _Result:
    store = job.cache.remote
    assert store is not None
    with _alone(job.cache, PUSHING):
        entries = job.cache._open_or_raise().index.count()
        done = push(job.cache, store) if entries != job.entries else Pushed()
        return _Result(done.records, entries=entries)


@contextlib.contextmanager
def _alone(cache: Cache, name: str) -> Iterator[None]:
    """Wait for other trainers that do the same here: they lock the file of this name."""
    directory = cache._open_or_raise()
    if directory.readonly:
        raise CacheError(f"cache {cache.path} {directory.readonly}")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=directory.root_fd)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # the kernel frees it with the process that has it
        yield
    finally:
        os.close(descriptor)
