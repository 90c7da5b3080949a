"""obstore alone, without a loader: the limit of what this machine reads from its S3 server.

Two processes read, and none keeps what it read. Only `decode_objects` decodes.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.data import BATCH, WORKERS
from fastload import RandomResizedCrop
from fastload.workers import worker

THREADS = 32  # in each process that reads whole objects

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


def decode_objects(bucket: str, options: Options, keys: Sequence[str], crop: RandomResizedCrop) -> float:
    """Seconds to read all objects likewise, and to decode and crop them by the kernel as they arrive."""
    shuffled = random.sample(keys, len(keys))
    work = functools.partial(_objects_decoded, crop)
    return _side_by_side(work, bucket, options, [shuffled[i::WORKERS] for i in range(WORKERS)])


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
    for thread in _readers(bucket, options, keys, lambda body: None):
        thread.join()


def _objects_decoded(crop: RandomResizedCrop, bucket: str, options: Options, keys: list[str]) -> None:
    worker._keep_freed_memory()  # as our workers do
    bodies: queue.SimpleQueue[Any] = queue.SimpleQueue()
    _readers(bucket, options, keys, bodies.put)
    out = np.empty((BATCH, *crop.sample_shape), np.uint8)
    for start in range(0, len(keys), BATCH):
        batch = [bodies.get() for _ in keys[start : start + BATCH]]
        if crop.fill(out[: len(batch)], batch, [random.getrandbits(64) for _ in batch]):
            os._exit(1)


def _readers(
    bucket: str, options: Options, keys: list[str], arrived: Callable[[Any], None]
) -> list[threading.Thread]:
    """The running threads that read all keys and call `arrived` with each body."""
    import obstore

    store, remaining, lock = bucket_store(bucket, options), iter(keys), threading.Lock()

    def read() -> None:
        while True:
            with lock:
                key = next(remaining, None)
            if key is None:
                return
            body = obstore.get(store, key).bytes()
            if not len(body):
                os._exit(1)
            arrived(body)

    threads = [threading.Thread(target=read) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


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
