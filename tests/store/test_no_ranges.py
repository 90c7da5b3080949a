"""A server that answers a range with the whole object: bytes grow with the data, not with its square."""

from __future__ import annotations

import functools
import io
import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload import Cache, DataLoader, open_store
from fastload.cache.exchange import pull, push
from fastload.cache.remote import close_all
from fastload.cli.demo.s3_server import delay_proxy
from fastload.errors import NotFoundError, StoreError
from fastload.formats.tar import TarWriter
from fastload.store import Store
from fastload.store.workarounds import Answer, OnePass
from tests.bucketdata import PHOTOS, Bucket
from tests.cachedata import fill
from tests.faultserver import Fault, FaultServer
from tests.sharddata import parquet

pytestmark = pytest.mark.usefixtures("no_leaks", "no_aws_settings")

MIB = 1 << 20


@functools.cache
def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.fixture
def server(server: FaultServer) -> FaultServer:
    server.honours_ranges = False
    return server


def read_file(server: FaultServer) -> None:
    store = open_store("s3://bucket/data", **server.options)
    for key, body in server.objects.items():
        with store.open(key.removeprefix("data/")) as file:
            assert b"".join(iter(lambda: file.read(MIB), b"")) == body


def pieces_of(body: bytes) -> list[bytes]:
    return [body[number * len(body) // 16 : (number + 1) * len(body) // 16] for number in range(16)]


def tar_of(body: bytes) -> bytes:
    file = io.BytesIO()
    writer = TarWriter(file)
    for number, piece in enumerate(pieces_of(body)):
        writer.write(f"{number:02}", {"bin": piece})
    writer.close()
    return file.getvalue()


def table_of(body: bytes) -> bytes:
    return parquet({"blob": pieces_of(body)}, 1, compression="none")


@pytest.mark.parametrize(
    ("kind", "make", "samples", "workers"),
    [
        (fastload.ObjectDataset, bytes, 2, 0),
        (fastload.ObjectDataset, bytes, 2, 1),
        (None, bytes, 0, 0),
        (fastload.TarDataset, tar_of, 32, 1),
        (fastload.ParquetDataset, table_of, 32, 0),
    ],
    ids=["objects", "objects by a worker", "open", "shards", "parquet"],
)
def test_bytes_grow_with_the_data(
    server: FaultServer,
    kind: Any,
    make: Callable[[bytes], bytes],
    samples: int,
    workers: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.objects = {f"data/{n}": make(content(size * MIB)) for n, size in enumerate((32, 12))}
    if kind is None:
        read_file(server)
    else:
        url = f"s3://bucket/data{'/*' * (make is not bytes)}"
        dataset = kind(url, storage_options=server.options)
        found = [
            one for batch in DataLoader(dataset, 1, collate_fn=list, num_workers=workers) for one in batch
        ]
        assert len(found) == samples and (make is not bytes or found == list(server.objects.values()))
        dataset.close()
    size = sum(map(len, server.objects.values()))
    # A footer lies at the end: to count the rows, and to read them. Sockets' buffers take the rest.
    assert server.bytes_sent < (3.6 if make is table_of else 1.6) * size
    said = re.findall(r"answers a range with the whole object", caplog.text)
    assert len(said) <= 1


def test_pull_reads_a_pack_once_for_its_index_and_once_for_its_records(
    server: FaultServer, tmp_path: Path
) -> None:
    first, other = Cache(tmp_path / "first"), Cache(tmp_path / "other")
    fill(first, 160, 300 << 10)
    store = open_store("s3://bucket/packs", **server.options)
    push(first, store)
    size = sum(map(len, server.objects.values()))
    assert pull(other, store, beside_training=True).records == 160
    assert server.bytes_sent < 2.6 * size
    first.close()
    other.close()


def test_pull_beside_a_training_from_a_real_server_without_ranges(bucket: Bucket, tmp_path: Path) -> None:
    size = sum(file.stat().st_size for file in (bucket.root / "photos").rglob("*.jpg"))
    with delay_proxy(bucket.server.endpoint_url, 0.001, corrects_ranges=False) as proxy:
        place = bucket.server.options | {"endpoint_url": proxy.url}
        for name in ("first", "second"):
            remote = open_store(f"s3://packs/{tmp_path.name}", **place)
            cache = Cache(tmp_path / name, "raw", remote=remote, push=name == "first")
            data = fastload.ObjectDataset("s3://photos", cache=cache, storage_options=place)
            before = proxy.counts()
            loader = DataLoader(data, 8, collate_fn=list, num_workers=2)
            assert sum(map(len, loader)) == PHOTOS
            counters = loader.stats()["counters"]
            assert counters.get("cache.hits", 0) + counters["cache.misses"] == PHOTOS
            data.close()
            close_all()
        after = proxy.counts()
    # Each photo once, and the pack at most twice from its beginning.
    assert after.bytes_down - before.bytes_down < 3.5 * size
    assert after.object_gets - before.object_gets < PHOTOS + 15


def test_store_learns_it_from_one_range_and_says_it_once(
    server: FaultServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.objects = {"data/a": content(1000)}
    store = open_store("s3://bucket/data", **server.options)
    again = open_store("s3://bucket/data", **server.options)
    assert store.has_ranges
    for one in (store, again):
        assert [bytes(one.read_range("a", at, at + 10)) for at in (0, 50, 20)] == [
            content(1000)[at : at + 10] for at in (0, 50, 20)
        ]
        assert not one.has_ranges
    assert caplog.text.count("the server answers a range with the whole object") == 1
    with pytest.raises(NotFoundError, match="past the object's"):
        store.read_range("a", 990, 1001)
    assert ranged(store, server) == 0, "it is not asked for again"
    server.honours_ranges = True
    with FaultServer({"data/a": content(1000)}) as sound:
        good = open_store("s3://bucket/data", **sound.options)
        assert bytes(good.read_range("a", 3, 9)) == content(1000)[3:9] and good.has_ranges


def test_s3fs_says_it_in_words(server: FaultServer) -> None:
    server.objects = {"data/a": content(1000)}
    store = open_store("s3://bucket/data", **server.options, client="s3fs")
    assert bytes(store.read_range("a", 0, 1000)) == bytes(store.read("a")) == content(1000)
    with pytest.raises(StoreError, match=r"a range with the whole object.*: leave client= out") as caught:
        store.read_range("a", 5, 10)
    assert type(caught.value) is StoreError, "the object has not changed"


def ranged(store: Store, server: FaultServer) -> int:
    server.requests.clear()
    store.read_range("a", 5, 6)
    return sum("range" in request.headers for request in server.requests)


@pytest.mark.parametrize("fault", [Fault(cut_after=700_000), Fault(reset_after=700_000), Fault(status=503)])
def test_answer_that_breaks_off_is_asked_for_again(server: FaultServer, fault: Fault) -> None:
    body = server.objects["data/a"] = content(2 * MIB)
    store = open_store("s3://bucket/data", **server.options)
    version = store.head("a").version
    store.read_range("a", 0, 1)
    server.script("data/a", fault, None)
    found = [bytes(store.read_range("a", at, at + MIB // 2, version)) for at in range(0, 2 * MIB, MIB // 2)]
    assert b"".join(found) == body


def test_another_version_is_refused(server: FaultServer) -> None:
    server.objects["data/a"] = content(1000)
    store = open_store("s3://bucket/data", **server.options)
    version = store.head("a").version
    assert bytes(store.read_range("a", 0, 10)) == content(1000)[:10]
    server.objects["data/a"] = content(1001)
    assert bytes(store.read_range("a", 5, 10)) == content(1001)[5:10]
    with pytest.raises(fastload.errors.ObjectChangedError):
        store.read_range("a", 0, 10, version)


def test_ranges_nearly_in_order_cost_one_request() -> None:
    body, asked = content(100_000), list[Any]()

    def request(key: str, version: str | None) -> Answer:
        asked.append((key, version))
        return Answer(len(body), iter([body[at : at + 777] for at in range(0, len(body), 777)]))

    passes = OnePass(request)
    edges = list(range(0, len(body), 5_000))
    order = edges[:]
    for at in range(0, len(order) - 1, 2):
        order[at], order[at + 1] = order[at + 1], order[at]
    for start in order[:-1]:
        stop = start + 5_000
        assert passes.read("a", "v", start, stop) == (body[start:stop], len(body))
    assert len(asked) == 1
    assert passes.read("a", "v", 10, 20)[0] == body[10:20] and len(asked) == 2


def test_range_of_an_object_without_a_version_keeps_nothing_of_what_lies_before_it() -> None:
    size, piece = 256 << 20, 1 << 20
    passes = OnePass(lambda key, version: Answer(size, (bytes(piece) for _ in range(size // piece))))
    tracemalloc.start()
    try:
        assert passes.read("a", None, size - 5, size) == (bytes(5), size)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
