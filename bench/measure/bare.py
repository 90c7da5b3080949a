"""obstore alone, without a loader: the limit of what this machine reads from its S3 server.

Two processes read; none decodes, and none keeps what it read.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.data import WORKERS

__all__ = ["THREADS", "bucket_store", "read_objects", "read_shards", "reading_objects"]

THREADS = 32  # in each process that reads whole objects
PIECE = 8 << 20

Options = dict[str, str]  # endpoint_url, key, secret


def bucket_store(name: str, options: Options) -> Any:
    """obstore's client of a bucket."""
    from obstore.store import S3Store

    return S3Store(
        name,
        endpoint=options["endpoint_url"],
        access_key_id=options["key"],
        secret_access_key=options["secret"],
        client_options={"allow_http": True},
    )


def read_objects(bucket: str, options: Options, keys: Sequence[str]) -> float:
    """Seconds to read all objects, in random order, by threads that take keys from one list."""
    shuffled = random.sample(keys, len(keys))
    return _side_by_side(_objects, bucket, options, [shuffled[i::WORKERS] for i in range(WORKERS)])


def read_shards(bucket: str, options: Options, shards: Sequence[Path]) -> float:
    """Seconds to read all shards; each process reads its own piece by piece, from start to end."""
    return _side_by_side(_shards, bucket, options, [shards[i::WORKERS] for i in range(WORKERS)])


def _side_by_side(
    read: Callable[[str, Options, Any], None], bucket: str, options: Options, parts: Sequence[Any]
) -> float:
    """Seconds of `read` with each part, in a process of its own, their start included."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=read, args=(bucket, options, part)) for part in parts]
    start = time.perf_counter()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("the bare loop failed")
    return time.perf_counter() - start


def _objects(bucket: str, options: Options, keys: list[str]) -> None:
    import obstore

    store, remaining, lock = bucket_store(bucket, options), iter(keys), threading.Lock()

    def read() -> None:
        while True:
            with lock:
                key = next(remaining, None)
            if key is None:
                return
            if not len(obstore.get(store, key).bytes()):
                os._exit(1)

    threads = [threading.Thread(target=read) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _shards(bucket: str, options: Options, shards: list[Path]) -> None:
    import obstore

    store = bucket_store(bucket, options)
    for shard in shards:
        size = shard.stat().st_size
        for start in range(0, size, PIECE):
            if not len(obstore.get_range(store, shard.name, start=start, end=min(start + PIECE, size))):
                os._exit(1)


@contextmanager
def reading_objects(bucket: str, options: Options, keys: Sequence[str]) -> Iterator[Callable[[int], float]]:
    """A function: number of random objects to read -> seconds. Its processes run already."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(WORKERS)]
    processes = [
        context.Process(target=_answer, args=(bucket, options, theirs), daemon=True) for _, theirs in pipes
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()

    def read(count: int) -> float:
        chosen = random.sample(keys, count)
        begin = time.perf_counter()
        for i, (ours, _) in enumerate(pipes):
            ours.send(chosen[i::WORKERS])
        assert all(ours.recv() for ours, _ in pipes)
        return time.perf_counter() - begin

    try:
        yield read
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _answer(bucket: str, options: Options, pipe: Any) -> None:
    """For each list of keys: read the objects, and answer with their bytes."""
    import obstore

    store = bucket_store(bucket, options)
    with ThreadPoolExecutor(THREADS) as pool:
        while True:
            pipe.send(sum(pool.map(lambda key: len(obstore.get(store, key).bytes()), pipe.recv())))
