"""Objects of one size after another: bytes per second of loaders that decode nothing.

All read random objects of a folder, different ones each time, over a round trip of 20 ms, with 2 workers that
run already. Each reads about as many as it can in a second. obstore alone, in two processes with 32 threads
each, is the limit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.data import ROUND_TRIP, WORKERS, WORKPLACE
from bench.measure.bare import reading_objects

OURS, S3FS, BOTO3, BARE = "fastload", "torch + s3fs", "torch + boto3", "bare parallel GET"
FOLDER_BYTES = 200 << 20  # of all objects of one size, at most
FOLDER_OBJECTS = 4000
BATCH, BATCH_BYTES = 16, 8 << 20  # at most
EPOCH_SECONDS = 1.0

Reader = Callable[[int], float]  # number of random objects to read -> seconds


def sizes(byte_counts: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each size and contender; all take turns."""
    from fastload.cli.demo.s3_server import delay_proxy, serve_s3

    folders = {size: object_folder(size) for size in byte_counts}
    rows = []
    with serve_s3(WORKPLACE) as server, delay_proxy(server.endpoint_url, ROUND_TRIP) as proxy:
        access = {"endpoint": proxy.url, "key": server.key, "secret": server.secret}
        for size, folder in folders.items():
            with readers(folder, size, access) as at:
                rows += rates(at, size, len(list(folder.glob("*/*"))), repeats)
    return rows


def object_folder(size: int) -> Path:
    """Objects of `size` random bytes below `.bench`, made once."""
    folder = WORKPLACE / f"bytes-{size}"
    if not folder.exists():
        unfinished = folder.with_suffix(".part")
        (unfinished / "all").mkdir(parents=True, exist_ok=True)
        for i in range(min(FOLDER_OBJECTS, FOLDER_BYTES // size)):
            (unfinished / "all" / f"{i:05d}.bin").write_bytes(random.Random(i).randbytes(size))
        unfinished.rename(folder)
    return folder


def rates(at: dict[str, Reader], size: int, most: int, repeats: int) -> list[dict[str, Any]]:
    """Bytes per second of each reader, in turns, after two epochs that determine its number of objects."""
    step = 2 * batch_of(size)  # so that both workers have equally many batches
    counts = {}
    for name, read in at.items():
        read(step)  # starts workers and clients
        per_second = step / read(step)
        counts[name] = min(most // step, max(1, round(per_second * EPOCH_SECONDS / step))) * step
    found: dict[str, list[float]] = {name: [] for name in at}
    for turn in range(repeats):
        names = list(at)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(round(size * counts[name] / at[name](counts[name])))
    return [
        {"contender": name, "object_bytes": size, "bytes_per_second": made} for name, made in found.items()
    ]


@contextmanager
def readers(folder: Path, size: int, access: dict[str, str]) -> Iterator[dict[str, Reader]]:
    """The contenders; their workers end with the block."""
    from torch.utils.data import DataLoader

    import fastload

    batch = batch_of(size)
    keys = [f"{path.parent.name}/{path.name}" for path in sorted(folder.glob("*/*"))]
    options = {"endpoint_url": access["endpoint"], "key": access["key"], "secret": access["secret"]}
    ours = fastload.ObjectDataset(f"s3://{folder.name}/", storage_options=options)
    found = {OURS: epochs(fastload.DataLoader, ours, batch)}
    for name in (BOTO3, S3FS):
        job = SimpleNamespace(**access, bucket=folder.name, contender=name)
        found[name] = epochs(DataLoader, Bytes(job, keys), batch)
    with reading_objects(folder.name, options, keys) as bare:
        yield found | {BARE: bare}


class RandomSubset:
    """A sampler of `count` of the objects, different ones each time."""

    def __init__(self, most: int) -> None:
        self.most = self.count = most

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self.most), self.count))


def epochs(loader_class: Any, dataset: Any, batch: int) -> Reader:
    sampler = RandomSubset(len(dataset))
    loader = loader_class(
        dataset, batch, sampler=sampler, num_workers=WORKERS, collate_fn=count_bytes, persistent_workers=True
    )

    def read(count: int) -> float:
        sampler.count = count
        begin = time.perf_counter()
        assert sum(loader) > 0
        return time.perf_counter() - begin

    return read


def count_bytes(samples: Sequence[Any]) -> int:
    return sum(map(len, samples))


def batch_of(size: int) -> int:
    return max(1, min(BATCH, BATCH_BYTES // size))


class Bytes:
    """A map-style dataset of the bytes of objects, by a client of each worker's own."""

    def __init__(self, job: SimpleNamespace, keys: Sequence[Any]) -> None:
        self.job, self.keys = job, keys
        self._read: Callable[[str], bytes] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Any:
        return self.read(self.keys[index])

    def read(self, key: str) -> bytes:
        if self._read is None:
            from bench.peers.scripts.peer_side import boto3_reader, s3fs_reader

            self._read = s3fs_reader(self.job) if self.job.contender == S3FS else boto3_reader(self.job)
        return self._read(key)
