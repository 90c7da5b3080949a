"""Parts of large objects: `File(range=)` beside a torch dataset with ranged reads of boto3 and of s3fs.

`python -m bench ranges [--parts 1600] [--repeats 5] [--quick]`. Parts of 64 KB of objects of 25 MB,
on an S3 server 20 ms away that runs on the same cores; 2 workers; batches of 32; no cache. All contenders
take turns, and each starts its workers anew. In order, neighbours of a batch come by one request.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import fastload
from bench.command import begin, finish, make_parser
from bench.data import ROUND_TRIP, WORKERS, WORKPLACE
from fastload.cli.demo.s3_server import delay_proxy, serve_s3

PART, PER_OBJECT, BATCH = 64 << 10, 400, 32
OURS, IN_ORDER, BOTO3, S3FS = "fastload, shuffled", "fastload, in order", "torch + boto3", "torch + s3fs"

Row = dict[str, Any]


class Ranges(Dataset[bytes]):
    """As everybody writes it: a client in each worker, and a request for each sample."""

    def __init__(self, rows: list[Row], bucket: str, access: dict[str, str], client: str) -> None:
        self.rows, self.bucket, self.access, self.client = rows, bucket, access, client
        self._read: Callable[[str, int, int], bytes] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> bytes:
        self._read = self._read or (self._boto3() if self.client == BOTO3 else self._s3fs())
        row = self.rows[index]
        return self._read(row["key"], row["start"], row["stop"])

    def _boto3(self) -> Callable[[str, int, int], bytes]:
        from bench.peers.scripts.peer_side import s3_client

        client = s3_client(SimpleNamespace(**self.access), 10)

        def read(key: str, start: int, stop: int) -> bytes:
            answer = client.get_object(Bucket=self.bucket, Key=key, Range=f"bytes={start}-{stop - 1}")
            return answer["Body"].read()  # type: ignore[no-any-return]

        return read

    def _s3fs(self) -> Callable[[str, int, int], bytes]:
        import s3fs

        access = self.access
        fs = s3fs.S3FileSystem(
            endpoint_url=access["endpoint"], key=access["key"], secret=access["secret"], max_concurrency=1
        )
        return lambda key, start, stop: fs.cat_file(f"{self.bucket}/{key}", start=start, end=stop)  # type: ignore[no-any-return]


def count_bytes(samples: list[Any]) -> int:
    return sum(map(len, samples))


def rows_of(parts: int) -> list[Row]:
    """Where the parts lie, in objects below `.bench` that are made once."""
    folder = WORKPLACE / "packs"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(-(-parts // PER_OBJECT)):
        path = folder / f"{number:03d}.bin"
        if not path.exists():
            path.write_bytes(random.Random(number).randbytes(PART * PER_OBJECT))
    return [
        {"key": f"{n // PER_OBJECT:03d}.bin", "start": (at := n % PER_OBJECT * PART), "stop": at + PART}
        for n in range(parts)
    ]


def contenders(rows: list[Row], access: dict[str, str]) -> dict[str, Any]:
    """name -> a new loader."""
    options = {"endpoint_url": access["endpoint"], "key": access["key"], "secret": access["secret"]}
    same = {"batch_size": BATCH, "num_workers": WORKERS, "collate_fn": count_bytes}

    def ours() -> Any:
        file = fastload.File("key", range=("start", "stop"))
        return fastload.TableDataset(rows, file, url="s3://packs", storage_options=options)

    return {
        OURS: lambda: fastload.DataLoader(ours(), shuffle=True, **same),
        IN_ORDER: lambda: fastload.DataLoader(ours(), **same),
        BOTO3: lambda: DataLoader(Ranges(rows, "packs", access, BOTO3), shuffle=True, **same),
        S3FS: lambda: DataLoader(Ranges(rows, "packs", access, S3FS), shuffle=True, **same),
    }


def rate(loader: Any, parts: int) -> float:
    begin = time.perf_counter()
    assert sum(loader) == parts * PART
    return parts / (time.perf_counter() - begin)


def main() -> None:
    parser = make_parser(__doc__, results=True)
    parser.add_argument("--parts", type=int, default=1600)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two turns")
    given = parser.parse_args()
    torch.set_num_threads(1)
    document = begin("ranges")
    rows = rows_of(given.parts)
    rates: dict[str, list[float]] = {}
    requests: dict[str, float] = {}
    with serve_s3(WORKPLACE) as server, delay_proxy(server.endpoint_url, ROUND_TRIP) as proxy:
        access = {"endpoint": proxy.url, "key": server.key, "secret": server.secret}
        turns = list(contenders(rows, access).items())
        for turn in range(2 if given.quick else given.repeats):
            for name, make in turns if turn % 2 == 0 else reversed(turns):
                loader = make()
                rates.setdefault(name, []).append(rate(loader, given.parts))
                if isinstance(loader, fastload.DataLoader):
                    requests[name] = loader.stats()["counters"]["store.gets"]
    finish(document | {"parts": given.parts, "rates": rates, "requests": requests}, given.results)
