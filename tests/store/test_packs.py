"""A cache that is published in packs: what is pushed is pulled, whole and once, whatever fails in between."""

from __future__ import annotations

import multiprocessing
import random
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import xxhash

from fastload import Cache, DataLoader, ImageFolder, RandomResizedCrop, open_store
from fastload.cache import exchange
from fastload.cache.exchange import pull, push
from fastload.cache.packs import Pack, pack_name
from fastload.cli.demo.photos import make_dataset
from fastload.errors import AccessDeniedError, CacheError, NotFoundError, StoreError
from fastload.store import Store, failures
from tests.bucketdata import PHOTOS, Bucket
from tests.cachedata import fill, flip, segments
from tests.faultserver import Fault, FaultServer
from tests.patience import PATIENCE, wait_until
from tests.smallpacks import exchange_in_small_packs

pytestmark = pytest.mark.usefixtures("no_leaks", "no_aws_settings")

COUNT = 200
SIZE = 3000

Start = Callable[[str, Path, str], BaseProcess]


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of 33 records, and ranges of ten; beside a training, of four."""
    monkeypatch.setattr(exchange, "PACK_BYTES", 33 * SIZE)
    monkeypatch.setattr(exchange, "ALONE", exchange.Pace(8, 10 * SIZE))
    monkeypatch.setattr(exchange, "BESIDE_TRAINING", exchange.Pace(3, 4 * SIZE))


class Nodes:
    """Nodes that publish at one URL. The first one has its cache where `open_cache` opens one by default."""

    def __init__(self, server: FaultServer, open_cache: Callable[..., Cache], path: Path) -> None:
        self._server, self._open_cache, self._path = server, open_cache, path

    def store(self) -> Store:
        return open_store("s3://bucket/packs", **self._server.options)

    def cache(self, name: str = "cache", **options: Any) -> Cache:
        return self._open_cache(self._path / name, **options)

    def publish(self, count: int = COUNT, size: int = SIZE) -> dict[bytes, bytes]:
        """The records of the first node, which it has pushed."""
        content = fill(self.cache(), count, size)
        push(self.cache(), self.store())
        return content

    def pull(self, name: str = "other", **options: Any) -> exchange.Pulled:
        return pull(self.cache(name), self.store(), **options)


@pytest.fixture
def nodes(server: FaultServer, open_cache: Callable[..., Cache], tmp_path: Path) -> Nodes:
    return Nodes(server, open_cache, tmp_path)


def packs(server: FaultServer) -> dict[str, Pack]:
    """The packs of the server, each of which must be whole."""
    found = {}
    for key, body in server.objects.items():
        name = key.removeprefix("packs/")
        tail = int(name.partition("-")[2].removesuffix(".pack"))
        found[key] = Pack(name, "", len(body), body[-tail:])
    return found


def holds(cache: Cache, content: dict[bytes, bytes]) -> bool:
    """Whether a cache holds exactly these records."""
    same = all(cache.read(key) == payload for key, payload in content.items())
    return same and cache.info()["entries"] == len(content)


def test_pull_of_pushed_cache_holds_the_same_records(server: FaultServer, nodes: Nodes) -> None:
    content = fill(nodes.cache(), COUNT)
    done = push(nodes.cache(), nodes.store())
    assert (done.records, done.bytes, done.present) == (COUNT, COUNT * SIZE, 0)
    assert done.packs == len(server.objects) > 5
    keys = [record.key for pack in packs(server).values() for record in pack]
    assert sorted(keys) == sorted(content), "each record once"

    server.requests.clear()
    pulled = nodes.pull()
    assert (pulled.records, pulled.bytes, pulled.present, pulled.left) == (COUNT, COUNT * SIZE, 0, 0)
    assert holds(nodes.cache("other"), content)
    assert len(server.requests) < COUNT / 4
    assert nodes.cache("other").check().ok
    server.requests.clear()
    assert nodes.pull(settled=pulled.settled).records == 0
    assert {request.key for request in server.requests} == {"\0list"}, "they are not looked at again"


def test_nodes_that_write_the_same_pack_at_once_need_no_conditional_writes(
    server: FaultServer, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes that both saw an empty URL: the later write has the name and the bytes of the earlier one."""
    monkeypatch.setattr(exchange.random, "randrange", lambda stop: 0)
    content = fill(nodes.cache(), 30)
    fill(nodes.cache("other"), 30)
    push(nodes.cache(), nodes.store())
    before = dict(server.objects)
    server.objects.clear()
    push(nodes.cache("other"), nodes.store())
    assert server.objects == before
    conditions = {"if-none-match", "if-match"}
    assert not any(conditions & request.headers.keys() for request in server.requests if request.body)
    nodes.pull("third")
    assert holds(nodes.cache("third"), content)


def test_push_again_writes_only_what_is_new(server: FaultServer, nodes: Nodes) -> None:
    nodes.publish(50)
    before = dict(server.objects)
    assert push(nodes.cache(), nodes.store()).packs == 0
    assert server.objects == before
    content = fill(nodes.cache(), 60)
    done = push(nodes.cache(), nodes.store())
    assert (done.records, done.present) == (10, 50)
    nodes.pull()
    assert holds(nodes.cache("other"), content)


def test_pull_reads_only_what_the_cache_lacks(server: FaultServer, nodes: Nodes) -> None:
    content = nodes.publish()
    other = nodes.cache("other")
    fill(other, COUNT - 20)
    pulled = pull(other, nodes.store())
    assert (pulled.present, pulled.records, pulled.bytes) == (COUNT - 20, 20, 20 * SIZE)
    assert holds(other, content)
    before = len(server.requests)
    assert pull(other, nodes.store()).bytes == 0
    assert all(request.key == "\0list" or "range" in request.headers for request in server.requests[before:])


def test_two_nodes_with_the_same_records_publish_each_once(server: FaultServer, nodes: Nodes) -> None:
    fill(nodes.cache(), COUNT)
    fill(nodes.cache("other"), COUNT)
    push(nodes.cache(), nodes.store())
    assert push(nodes.cache("other"), nodes.store()).records == 0
    assert sum(len(pack) for pack in packs(server).values()) == COUNT


def test_record_that_changed_on_disk_is_not_published(nodes: Nodes, tmp_path: Path) -> None:
    content = fill(nodes.cache(), 50)
    flip(segments(tmp_path / "cache")[0], 100)
    done = push(nodes.cache(), nodes.store())
    assert (done.records, done.bad_entries) == (49, 1)
    nodes.pull()
    found = [key for key in content if nodes.cache("other").read(key) is not None]
    assert len(found) == 49


def test_record_that_changed_in_the_store_is_left_out(server: FaultServer, nodes: Nodes) -> None:
    content = nodes.publish(50)
    name, body = next((key, body) for key, body in server.objects.items() if len(body) > 33 * SIZE)
    server.objects[name] = b"\xff" * 10 + body[10:]
    other = nodes.cache("other")
    pulled = pull(other, nodes.store())
    assert (pulled.records, pulled.left) == (49, 1)
    assert pulled.damaged == {name.removeprefix("packs/"): "is damaged: a record differs from its checksum"}
    assert sum(other.read(key) == payload for key, payload in content.items()) == 49


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda body: body[:1000],
    "index": lambda body: body[:-100] + b"\0" + body[-99:],
    "magic": lambda body: body[:-24] + b"XXXX" + body[-20:],
    "version": lambda body: body[:-20] + b"\x09\0" + body[-18:],
    "empty": lambda body: b"",
    "longer": lambda body: b"x" + body,
}


def test_damaged_packs_are_named_and_the_others_are_pulled(server: FaultServer, nodes: Nodes) -> None:
    content = nodes.publish(33 * 9)
    whole = packs(server)
    damaged = dict(zip(sorted(whole, key=lambda name: -len(whole[name])), DAMAGES, strict=False))
    for name, damage in damaged.items():
        body = server.objects[name]
        server.objects[name] = DAMAGES[damage](body)
        assert server.objects[name] != body
    pulled = nodes.pull()
    assert {f"packs/{name}" for name in pulled.damaged} == damaged.keys()
    assert pulled.records == len(content) - sum(len(whole[name]) for name in damaged) > 50
    # The owner's next push publishes them again, under the same name or another.
    push(nodes.cache(), nodes.store())
    nodes.pull()
    assert holds(nodes.cache("other"), content)


def _hostile(index: bytes, payload: bytes = b"") -> dict[str, bytes]:
    """A pack whose index has the right checksum and the right name, whatever it says."""
    trailer = struct.pack("<4sHHQQ", b"FLPK", 1, 0, len(index), xxhash.xxh3_64_intdigest(index))
    return {f"packs/{pack_name(index + trailer)}": payload + index + trailer}


def _records(*lengths: int) -> bytes:
    return b"".join(struct.pack("<16sIQ", bytes([at]) * 16, length, 0) for at, length in enumerate(lengths))


HOSTILE: dict[str, dict[str, bytes]] = {
    "deep JSON": _hostile(b"[" * 60_000 + b"\n"),
    "deep objects": _hostile(b'{"a":' * 10_000 + b"\n"),
    "no line": _hostile(b"x" * 100_000),
    "a long line": _hostile(b'{"sources": ["' + b"x" * 100_000 + b'"]}\n'),
    "sources of another type": _hostile(b'{"sources": 3}\n'),
    "a list for the head": _hostile(b"[1, 2]\n"),
    "a number of many digits": _hostile(b'{"sources": [%s]}\n' % (b"9" * 5000)),
    "text that is no text": _hostile(b'{"sources": "\xff"}\n'),
    "half a record": _hostile(b'{"sources": []}\n' + _records(3)[:-1], b"abc"),
    "records longer than the object": _hostile(b'{"sources": []}\n' + _records(3, 1 << 31), b"abc"),
    "records shorter than the object": _hostile(b'{"sources": []}\n' + _records(1), b"abc"),
    "an index of 4 GB": {f"packs/{'0' * 32}-4294967296.pack": b"x" * 100},
    "an index that is cut": {f"packs/{'0' * 32}-1000.pack": b"x" * 100},
    "the name of another index": {f"packs/{'0' * 32}-{len(body)}.pack": body
        for body in _hostile(b'{"sources": []}\n').values()},
}  # fmt: skip


def test_hostile_packs_are_named_and_the_others_are_pulled(server: FaultServer, nodes: Nodes) -> None:
    content = nodes.publish(40)
    for objects in HOSTILE.values():
        server.objects |= objects
    named = {f"packs/{name}" for name in nodes.pull().damaged}
    assert [kind for kind, objects in HOSTILE.items() if objects.keys() - named] == []
    assert len(named) == len(HOSTILE), "and no other one"
    assert holds(nodes.cache("other"), content)


def test_index_of_4_gb_is_not_read(server: FaultServer, nodes: Nodes) -> None:
    """Its name alone promised it, and eight were read at once."""
    server.objects |= {f"packs/{at:032}-4294967296.pack": b"x" * 100 for at in range(8)}
    assert len(pull(nodes.cache(), nodes.store()).damaged) == 8
    assert not [request for request in server.requests if request.key.endswith(".pack")]


def test_small_records_are_pushed_in_packs_whose_index_is_read(
    server: FaultServer, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MOST_RECORDS", 7)
    content = fill(nodes.cache(), 40)
    assert push(nodes.cache(), nodes.store()).packs >= 6
    assert max(map(len, packs(server).values())) == 7
    nodes.pull()
    assert holds(nodes.cache("other"), content)


def test_pack_deleted_during_the_pull_is_named(server: FaultServer, nodes: Nodes) -> None:
    nodes.publish(33)
    (name,) = server.objects
    server.script(name, None, Fault(status=404, code="NoSuchKey"), repeat=True)
    pulled = nodes.pull()
    assert (pulled.records, pulled.left, list(pulled.damaged)) == (0, 33, [name.removeprefix("packs/")])


def test_faults_that_pass_lose_nothing(server: FaultServer, nodes: Nodes) -> None:
    content = fill(nodes.cache(), 66)
    server.script("\0list", Fault(status=503, code="SlowDown"), None)
    push(nodes.cache(), nodes.store())
    for name in server.objects:
        server.script(
            name, Fault(status=503, code="SlowDown"), Fault(cut_after=50), Fault(reset_after=70), None
        )
    pulled = nodes.pull()
    assert (pulled.records, pulled.damaged) == (66, {})
    assert holds(nodes.cache("other"), content)


def pack_ranges(server: FaultServer) -> list[tuple[int, int]]:
    """The [start, stop) of all ranges of packs that were asked for, but for their indices."""
    return [span for key, body in server.objects.items() for span in server.spans(key) if span[1] < len(body)]


def test_training_may_read_what_a_pull_has_on_its_way(nodes: Nodes) -> None:
    """Who holds a lock holds up the training, for as long as a range of dozens of records takes."""
    content = nodes.publish(33)
    other = nodes.cache("other")
    gate = threading.Event()
    store = nodes.store()
    real, asked = store.read_range, list[str]()

    def wait_at_the_gate(key: str, *arguments: Any, **options: Any) -> Any:
        body = real(key, *arguments, **options)
        asked.append(key)
        if len(asked) > 1:  # the first one is the index
            assert gate.wait(PATIENCE)
        return body

    store.read_range = wait_at_the_gate  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(pull, other, store)
        try:
            wait_until(lambda: len(asked) > 1, "records are on their way")
            for key in content:
                assert other._lock_inflight(key)
                other._unlock_inflight(key)
        finally:
            gate.set()
        assert pulling.result(PATIENCE).records == 33


def test_pull_leaves_out_what_training_has_brought_since_it_began(
    server: FaultServer, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training brings every second record, while the first ranges are on their way."""
    size = 300 << 10  # larger than what is read in vain
    monkeypatch.setattr(exchange, "PACK_BYTES", 40 * size)
    monkeypatch.setattr(exchange, "BESIDE_TRAINING", exchange.Pace(3, 2 * size))
    content = nodes.publish(32, size)
    other, store = nodes.cache("other"), nodes.store()
    real, came = store.read_range, threading.Event()

    def read_range(key: str, start: int, stop: int, *arguments: Any, **options: Any) -> Any:
        index = stop == len(server.objects[f"packs/{key}"])
        if not index and not came.is_set():
            for record in list(content)[::2]:
                other.write(record, content[record], PATIENCE)
            assert other.flush(PATIENCE)
            came.set()
        return real(key, start, stop, *arguments, **options)

    store.read_range = read_range  # type: ignore[method-assign]
    done = pull(other, store, beside_training=True)
    assert holds(other, content)
    # Half of them, and half of what was on its way already.
    assert 16 <= done.records <= 16 + 3
    assert sum(stop - start for start, stop in pack_ranges(server)) <= (16 + 3) * size


def test_pull_beside_training_has_few_bytes_in_flight(server: FaultServer, nodes: Nodes) -> None:
    nodes.publish()
    for name in server.objects:
        server.script(name, None, Fault(delay=0.02), repeat=True)
    # One more than are asked for: the server counts an answer until its thread has ended.
    for place, options, most in (("one", {"beside_training": True}, 4), ("two", {}, 9)):
        server.most_at_once = 0
        server.requests.clear()
        store = nodes.store()
        assert pull(nodes.cache(place), store, **options).records == COUNT
        longest = max(stop - start for start, stop in pack_ranges(server))
        assert longest == (4 if options else 10) * SIZE
        assert server.most_at_once <= most


def test_memory_of_a_pull_is_bounded_by_one_large_record(nodes: Nodes) -> None:
    """Requests for eight records of 96 MB, the largest of which are 1 GB, were in flight."""
    large = 100 * SIZE
    nodes.publish(20, large)
    store, lock = nodes.store(), threading.Lock()
    real, held, most = store.read_range, [0], [0]

    def read_range(key: str, start: int, stop: int, *arguments: Any, **options: Any) -> Any:
        with lock:
            held[0] += stop - start
            most[0] = max(most[0], held[0])
        try:
            return real(key, start, stop, *arguments, **options)
        finally:
            with lock:
                held[0] -= stop - start

    store.read_range = read_range  # type: ignore[method-assign]
    assert pull(nodes.cache("other"), store).records == 20
    assert most[0] <= large + 7 * 10 * SIZE


def test_full_cache_ends_the_pull_and_reads_nothing_in_vain(server: FaultServer, nodes: Nodes) -> None:
    content = nodes.publish()
    other = nodes.cache("other", size_limit=50 * SIZE)
    done = pull(other, nodes.store())
    assert 30 < done.records < 50 and done.left == COUNT - done.records
    assert sum(other.read(key) == payload for key, payload in content.items()) == done.records
    assert len(done.settled) == done.packs, "there is no room for more of them"
    server.requests.clear()
    pull(other, nodes.store(), settled=done.settled)
    assert {request.key for request in server.requests} == {"\0list"}
    server.requests.clear()
    pull(other, nodes.store())
    assert not pack_ranges(server), "the indices alone"


def test_failed_request_ends_the_pull(server: FaultServer, nodes: Nodes) -> None:
    nodes.publish(66)
    first, second = server.objects
    server.script(first, None, Fault(status=403, code="AccessDenied"), repeat=True)
    server.script(second, None, Fault(status=503, code="SlowDown"), repeat=True)
    other = nodes.cache("other")
    began = time.monotonic()
    with pytest.raises(AccessDeniedError):
        pull(other, nodes.store())
    assert time.monotonic() - began < PATIENCE / 2, "the other requests are not tried for three minutes"


# -- refused in words


def test_push_beside_foreign_objects_is_refused(server: FaultServer, nodes: Nodes) -> None:
    fill(nodes.cache(), 5)
    server.objects["packs/cat.jpg"] = b"a photo"
    with pytest.raises(CacheError, match=r"'cat.jpg'.*no packs of a cache: give a prefix of its own"):
        push(nodes.cache(), nodes.store())
    assert list(server.objects) == ["packs/cat.jpg"]


def test_push_of_other_data_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_dataset(tmp_path / name, 4, 2)
        cache = Cache(tmp_path / f"cache-{name}")
        dataset = ImageFolder(str(tmp_path / name), RandomResizedCrop(8), cache=cache)
        list(DataLoader(dataset, 2))
        dataset.close()
    store = open_store(tmp_path / "packs")
    push(Cache(tmp_path / "cache-one"), store)
    before = sorted((tmp_path / "packs").iterdir())
    with pytest.raises(CacheError, match=r"holds records of '.*one'.*this cache is of '.*two'"):
        push(Cache(tmp_path / "cache-two"), store)
    assert sorted((tmp_path / "packs").iterdir()) == before


def test_pull_from_where_no_packs_are_says_so(server: FaultServer, nodes: Nodes, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no packs of a cache: fastload cache push writes them"):
        pull(nodes.cache(), nodes.store())
    server.objects["packs/cat.jpg"] = b"a photo"
    with pytest.raises(NotFoundError, match=r"but 'cat.jpg': fastload cache push"):
        pull(nodes.cache(), nodes.store())
    with pytest.raises(NotFoundError, match="does not exist"):
        pull(nodes.cache(), open_store(tmp_path / "absent"))


def test_refused_write_is_the_stores_error(
    server: FaultServer, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "CONTACT_SECONDS", 0.3)
    fill(nodes.cache(), 5)
    store = nodes.store()
    list(store.list())
    server.token = "another"
    with pytest.raises(StoreError) as caught:
        push(nodes.cache(), store)
    assert isinstance(caught.value, AccessDeniedError | StoreError) and "another" not in str(caught.value)
    assert not server.objects


# -- the command line, on a real S3 server


def epoch(bucket: Bucket, cache: Path) -> dict[str, float]:
    dataset = ImageFolder(
        "s3://photos", RandomResizedCrop(16), cache=Cache(cache), storage_options=bucket.options
    )
    loader = DataLoader(dataset, 8, num_workers=2)
    assert sum(len(images) for images, _ in loader) == PHOTOS == 40
    dataset.close()
    return dict(loader.stats()["counters"])


def test_second_node_trains_from_packs_without_a_get(bucket: Bucket, tmp_path: Path) -> None:
    epoch(bucket, tmp_path / "first")
    code, document = bucket.run("cache", "push", tmp_path / "first", "s3://packs/run")
    assert (code, document["records"]) == (0, 40)
    code, document = bucket.run("cache", "pull", "s3://packs/run", tmp_path / "second")
    assert (code, document["records"], document["left"], document["faults"]) == (0, 40, 0, [])
    counters = epoch(bucket, tmp_path / "second")
    assert counters["cache.hits"] == 40 and not counters.get("get.requests")


@pytest.fixture
def start(bucket: Bucket) -> Iterator[Start]:
    """Starts processes that push or pull, in small packs and ranges, between a cache and a URL."""
    context, started = multiprocessing.get_context("forkserver"), list[BaseProcess]()

    def begin(command: str, cache: Path, url: str) -> BaseProcess:
        started.append(
            context.Process(target=exchange_in_small_packs, args=(command, cache, url, bucket.options))
        )
        started[-1].start()
        return started[-1]

    yield begin
    for process in started:
        process.kill()  # a test that failed leaves some
        process.join()
        process.close()


def exit_codes(*processes: BaseProcess) -> list[int | None]:
    for process in processes:
        process.join(PATIENCE)
    return [process.exitcode for process in processes]


def test_nodes_that_push_side_by_side_publish_all_records(
    bucket: Bucket, start: Start, tmp_path: Path
) -> None:
    content: dict[bytes, bytes] = {}
    for name, count in (("one", 80), ("two", 120), ("three", 120)):
        cache = Cache(tmp_path / name)
        content |= fill(cache, count, 30_000)
        cache.close()
    url = "s3://packs/side-by-side"
    assert exit_codes(*[start("push", tmp_path / name, url) for name in ("one", "two", "three")]) == [0, 0, 0]
    code, document = bucket.run("cache", "pull", url, tmp_path / "empty")
    assert (code, document["records"], document["left"]) == (0, 120, 0)
    assert document["bytes"] == 120 * 30_000, "what was published twice is pulled once"
    cache = Cache(tmp_path / "empty")
    assert holds(cache, content)
    cache.close()


def test_training_beside_a_pull_sees_every_sample(bucket: Bucket, start: Start, tmp_path: Path) -> None:
    epoch(bucket, tmp_path / "first")
    url = "s3://packs/beside"
    assert bucket.run("cache", "push", tmp_path / "first", url)[0] == 0
    pulling = start("pull", tmp_path / "second", url)
    epoch(bucket, tmp_path / "second")
    assert exit_codes(pulling) == [0]
    counters = epoch(bucket, tmp_path / "second")
    assert counters["cache.hits"] == 40 and not counters.get("get.requests")
    cache = Cache(tmp_path / "second")
    assert cache.check().ok and cache.info()["entries"] == 40
    cache.close()


def test_two_pulls_into_one_directory_hold_each_record_once(
    bucket: Bucket, start: Start, tmp_path: Path
) -> None:
    content = fill(Cache(tmp_path / "first"), 120, 30_000)
    Cache(tmp_path / "first").close()
    url = "s3://packs/two-pulls"
    assert bucket.run("cache", "push", tmp_path / "first", url)[0] == 0
    assert exit_codes(*[start("pull", tmp_path / "second", url) for _ in range(2)]) == [0, 0]
    cache = Cache(tmp_path / "second")
    assert holds(cache, content)
    cache.close()


def test_commands_without_a_cache_or_packs_say_so(bucket: Bucket, tmp_path: Path) -> None:
    code, document = bucket.run("cache", "push", tmp_path / "absent", "s3://packs/none")
    assert code == 1 and "no cache here" in document["error"]["message"]
    code, document = bucket.run("cache", "pull", "s3://packs/none", tmp_path / "absent")
    assert code == 1 and "no packs of a cache" in document["error"]["message"]
    assert not (tmp_path / "absent").exists()


def written(folder: Path) -> int:
    """Bytes of the files in a folder; the server renames those that it has received."""
    sizes = 0
    for file in folder.glob("*") if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            sizes += file.stat().st_size
    return sizes


@pytest.mark.parametrize("victim", ["push", "pull"])
def test_killed_at_any_moment_then_run_again_has_each_record_once(
    bucket: Bucket, start: Start, tmp_path: Path, victim: str
) -> None:
    trains = Cache(tmp_path / "first")  # has the directory open all the time
    content = fill(trains, 200, 30_000)
    url = f"s3://packs/killed-{victim}"
    pushing, pulling = ["push", tmp_path / "first", url], ["pull", url, tmp_path / "second"]
    cache_of = {"push": tmp_path / "first", "pull": tmp_path / "second"}
    if victim == "pull":
        assert bucket.run("cache", *pushing)[0] == 0
    draw = random.Random(victim)
    pushed, pulled = bucket.root / "packs" / "killed-push", tmp_path / "second" / "v1" / "segments"
    way = pushed if victim == "push" else pulled
    for _ in range(2):
        target = written(way) + draw.randrange(1, 1_500_000)
        process = start(victim, cache_of[victim], url)
        wait_until(lambda: written(way) >= target or not process.is_alive(), "it writes")  # noqa: B023
        process.kill()
        assert exit_codes(process) == [-signal.SIGKILL]
        assert not list(tmp_path.glob("*/v1/.*.part")), "nothing piles up while others use the cache"
    assert bucket.run("cache", *pushing)[0] == 0
    code, document = bucket.run("cache", *pulling)
    assert (code, document["left"], document["records"] + document["present"]) == (0, 0, 200)
    cache = Cache(tmp_path / "second")
    assert holds(cache, content)
    cache.close()
    trains.close()
