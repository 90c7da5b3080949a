"""The process that `remote` starts: one pull or push, tied to its trainer.

It needs a process group of its own, no torch, and about 40 MB. It has the lowest priority.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from fastload.cache.cache import Cache
from fastload.cache.directory import PULLING, PUSHING
from fastload.cache.published import sources_of
from fastload.cache.pull import Pulled, pull
from fastload.cache.push import Pushed, push
from fastload.errors import CacheError, FastloadError, NotFoundError
from fastload.store.client_process import keep_clients_here

__all__ = ["Job", "main"]

_TRAINER_SECONDS = 0.5  # between two looks whether the trainer lives
_END_SECONDS = 1.0  # for this process to end by itself: a request that stalls does not


class Job(NamedTuple):
    """What the process is started for.

    Args:
        kind: "pull" or "push".
        cache: with its `remote`.
        only: the keys of the records that are pulled, one behind the other.
        settled: names of packs that are not looked at again.
        entries: of the cache at the last push. While it has no more, there is nothing to push.
        trainer: the process that waits for it.
    """

    kind: str
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


def main() -> None:
    """Do one job from stdin, and write its result to stdout."""
    job: Job = pickle.load(sys.stdin.buffer)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=_end_with, args=(job.trainer,), daemon=True).start()
    keep_clients_here()
    try:
        result = _pull(job) if job.kind == "pull" else _push(job)
    except (FastloadError, OSError) as error:
        result = _Result(settled=job.settled, error=str(error))
    finally:
        job.cache.close()
    sys.stdout.write(json.dumps(result._asdict()))


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
        entries = job.cache.open_or_raise().index.count()
        done = push(job.cache, store) if entries != job.entries else Pushed()
        return _Result(done.records, entries=entries)


@contextlib.contextmanager
def _alone(cache: Cache, name: str) -> Iterator[None]:
    """Wait for other trainers that do the same here: they lock the file of this name."""
    directory = cache.open_or_raise()
    if directory.readonly:
        raise CacheError(f"cache {cache.path} {directory.readonly}")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=directory.root_fd)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # the kernel frees it with the process that has it
        yield
    finally:
        os.close(descriptor)
