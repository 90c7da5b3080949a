"""`fastload demo`: its photos, its server, its round trip, and that nothing of it outlives the command."""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import random
import signal
import socket
import socketserver
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import fastload
from fastload.cli.demo import s3_server
from fastload.cli.demo.delay_proxy import RequestReader
from fastload.cli.demo.photos import make_dataset, make_photo
from fastload.cli.demo.s3_server import Proxy, S3Server, delay_proxy, find_rclone, serve_s3
from fastload.errors import StoreError
from tests.commands import command, start
from tests.forked import Forked
from tests.patience import PATIENCE, runs, wait_until
from tests.storedata import write

# --- photos


def test_photo_is_a_jpeg_of_the_given_size() -> None:
    image = Image.open(io.BytesIO(make_photo(7, 375, 500)))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (375, 500))
    assert image.layer[0][1:3] == (2, 2), "not 4:2:0"  # type: ignore[attr-defined]


def test_photo_depends_only_on_its_seed() -> None:
    assert make_photo(3) == make_photo(3)
    assert len({make_photo(seed, 64, 48) for seed in range(50)}) == 50


def test_photos_have_the_size_of_real_photos() -> None:
    sizes = [len(make_photo(seed)) for seed in range(40)]
    assert 100_000 < statistics.mean(sizes) < 120_000
    assert max(sizes) > 1.6 * min(sizes)


def test_dataset_is_made_once(tmp_path: Path) -> None:
    total = make_dataset(tmp_path, 12, classes=4)
    files = sorted(tmp_path.glob("class_0[0-3]/img_000[01]?.jpg"))
    contents = [file.read_bytes() for file in files]
    assert len(files) == len(set(contents)) == 12
    assert total == sum(map(len, contents))

    # As after a kill: one photo not there, another half written.
    files[5].unlink()
    (files[6].with_suffix(".part")).write_bytes(b"half")
    kept = files[0].stat().st_mtime_ns
    seen: list[tuple[int, int]] = []
    assert make_dataset(tmp_path, 12, classes=4, progress=lambda *done: seen.append(done)) == total
    assert [file.read_bytes() for file in files] == contents
    assert files[0].stat().st_mtime_ns == kept
    assert seen[-1] == (12, 12)


# --- the proxy


class Tally:
    """Counts in a dict instead of shared memory."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, counter: str, amount: int = 1) -> None:
        self.counts[counter] = self.counts.get(counter, 0) + amount


REQUESTS = {
    "object_gets": b"GET /bucket/class_00/img.jpg HTTP/1.1\r\nHost: x\r\n\r\n",
    "listings": b"GET /bucket?list-type=2&prefix=a%2Fb HTTP/1.1\r\nHost: x\r\n\r\n",
    "other_requests": b"PUT /b/key HTTP/1.1\r\nContent-Length: 26\r\n\r\nGET /b/no HTTP/1.1\r\n\r\nabcd",
}


@given(st.lists(st.sampled_from(sorted(REQUESTS)), max_size=12), st.integers(1, 40), st.randoms())
def test_proxy_counts_requests_in_any_chunks(kinds: list[str], longest: int, cut: random.Random) -> None:
    stream = b"".join(REQUESTS[kind] for kind in kinds)
    tally = Tally()
    reader = RequestReader(tally)  # type: ignore[arg-type]
    while stream:
        length = cut.randint(1, longest)
        reader.feed(stream[:length])
        stream = stream[length:]
    assert tally.counts == {kind: kinds.count(kind) for kind in set(kinds)}


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(65536):
            self.request.sendall(data)


@contextmanager
def echo_behind(round_trip: float) -> Iterator[tuple[str, int]]:
    """The address of a proxy before a server that sends back what it gets."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        with delay_proxy(f"http://127.0.0.1:{server.server_address[1]}", round_trip) as proxy:
            yield "127.0.0.1", int(proxy.url.rpartition(":")[2])
        server.shutdown()


def round_trips(address: tuple[str, int], count: int) -> list[float]:
    """Seconds until the answer to each of `count` small messages on one connection, in their order.

    Each from the answer before it, and the first from before the connection was made: what this process
    loses to others makes it longer, never shorter.
    """
    start = time.perf_counter()
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = []
        # HTTP, since the proxy reads requests; the echo does not mind.
        request = b"GET /b/k HTTP/1.1\r\n\r\n"
        for _ in range(count):
            connection.sendall(request)
            received = b""
            while len(received) < len(request):
                received += connection.recv(1000)
            now = time.perf_counter()
            seconds.append(now - start)
            start = now
        return seconds


def test_proxy_delays_each_round_trip() -> None:
    with echo_behind(0.03) as address:
        first, *others = round_trips(address, 12)
    assert min(others) >= 0.03
    assert sorted(others)[2] < 0.05
    assert first > 0.055, "a new connection costs a round trip more"


def test_proxy_without_delay_adds_none() -> None:
    with echo_behind(0) as address:
        assert sorted(round_trips(address, 12))[2] < 0.01


@pytest.mark.parametrize("round_trip", [0, 0.01])
def test_proxy_passes_content_unchanged(round_trip: float) -> None:
    """More than socket buffers hold, so that reading pauses too; many connections at once."""

    def send_and_receive(seed: int) -> tuple[str, str]:
        body = random.Random(seed).randbytes(3_000_000)
        sent = b"PUT /b/k HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        with socket.create_connection(address) as connection:
            sender = threading.Thread(target=connection.sendall, args=(sent,))
            sender.start()
            received = bytearray()
            while len(received) < len(sent):
                received += connection.recv(1 << 20)
            sender.join()
        return hashlib.sha256(sent).hexdigest(), hashlib.sha256(received).hexdigest()

    with echo_behind(round_trip) as address, ThreadPoolExecutor(6) as pool:
        for sent, received in pool.map(send_and_receive, range(6)):
            assert sent == received


def test_proxy_closes_the_other_side_of_a_closed_connection() -> None:
    with echo_behind(0.01) as address, socket.create_connection(address) as connection:
        connection.sendall(b"GET /b/k HTTP/1.1\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(PATIENCE)
        while connection.recv(1000):
            pass


# --- server and proxy


BODIES = {f"x/{i}": random.Random(i).randbytes(10_000 + i) for i in range(40)}
Served = tuple[S3Server, Proxy, Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Small objects in bucket "b", and a boto3 client that reads them through the proxy."""
    import boto3  # here, as it takes 0.6 s
    from botocore.config import Config

    root = tmp_path_factory.mktemp("s3")
    write(root / "b", BODIES)
    with serve_s3(root) as server, delay_proxy(server.endpoint_url, 0.002) as proxy:
        client = boto3.client(
            "s3",
            endpoint_url=proxy.url,
            aws_access_key_id=server.key,
            aws_secret_access_key=server.secret,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, max_pool_connections=8),
        )
        yield server, proxy, client
        client.close()


def test_proxy_changes_its_round_trip(served: Served) -> None:
    _, proxy, client = served
    before = proxy.counts().other_requests
    client.head_object(Bucket="b", Key="x/1")  # the connection is there
    for seconds in (0.08, 0.15):
        proxy.set_round_trip(seconds)
        began = time.perf_counter()
        client.head_object(Bucket="b", Key="x/1")
        assert time.perf_counter() - began >= seconds
    counted = proxy.counts().other_requests
    proxy.set_round_trip(0.002)
    assert proxy.counts().other_requests == counted == before + 3


def test_proxy_counts_gets_exactly(served: Served) -> None:
    _, proxy, client = served
    start = proxy.counts()
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket="b")["Contents"]]
    before = proxy.counts()
    assert (before.object_gets, before.listings) == (start.object_gets, start.listings + 1)
    with ThreadPoolExecutor(8) as pool:
        bodies = list(pool.map(lambda key: client.get_object(Bucket="b", Key=key)["Body"].read(), keys))
    assert dict(zip(keys, bodies, strict=True)) == BODIES
    client.head_object(Bucket="b", Key=keys[0])
    after = proxy.counts()
    assert after.object_gets - before.object_gets == len(keys) == 40
    assert (after.listings, after.other_requests) == (before.listings, before.other_requests + 1)
    assert after.bytes_down - before.bytes_down > sum(map(len, bodies))


def test_proxy_corrects_the_status_of_ranges(served: Served) -> None:
    """What rclone sends under status 200 is 206 behind the proxy, and a whole object stays 200."""
    server, proxy, client = served
    body = BODIES["x/7"]
    for _ in range(2):
        answer = client.get_object(Bucket="b", Key="x/7", Range="bytes=10-29")
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206
        assert answer["Body"].read() == body[10:30]
        answer = client.get_object(Bucket="b", Key="x/7")
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
        assert answer["Body"].read() == body
    store = fastload.open_store("s3://b", **{**server.options, "endpoint_url": proxy.url})
    before = proxy.counts()
    assert bytes(store.read_range("x/7", 10, 30)) == body[10:30]
    after = proxy.counts()
    assert after.object_gets == before.object_gets + 1, "one request, no second one for the whole object"
    assert after.bytes_down - before.bytes_down < 2000


def test_server_and_proxy_end_with_their_block(tmp_path: Path, no_leaks: None) -> None:
    before = set(psutil.Process().children())
    with (
        pytest.raises(ZeroDivisionError),
        serve_s3(tmp_path) as server,
        delay_proxy(server.endpoint_url, 0.001),
    ):
        assert len(set(psutil.Process().children()) - before) == 2
        raise ZeroDivisionError
    assert set(psutil.Process().children()) <= before


def test_server_that_cannot_start_raises_with_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rclone = tmp_path / "rclone"
    rclone.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    rclone.chmod(0o755)
    monkeypatch.setattr("fastload.cli.demo.s3_server.find_rclone", lambda: rclone)
    with pytest.raises(StoreError, match="no such luck"), serve_s3(tmp_path):
        pass


# --- the command; as a real process, where that is interrupted or killed

IMAGES = 66  # a batch for each of two workers


def family(process: Forked) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def described(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def servers(process: Forked) -> list[psutil.Process]:
    """rclone and the proxy of a demo, once both run."""
    found = [child for child in family(process) if _is_server(described(child))]
    return found if len(found) == 2 else []


def _is_server(words: str) -> bool:
    return words.startswith(str(find_rclone())) or ("_proxy.py" in words and "os.execv" not in words)


def measuring(process: Forked) -> list[psutil.Process]:
    """All processes of a demo, once its workers read from the server."""
    found = family(process)
    started = servers(process)
    workers = [child for child in found if child not in started]
    return found if started and len(workers) >= 2 and all(map(_is_connected, workers)) else []


def once_measuring(process: Forked, directory: Path) -> list[psutil.Process]:
    """The same. A look at the processes is dear: the first one comes once all photos are made."""
    photos = directory / "data" / "s3" / f"photos-{IMAGES}"
    wait_until(lambda: len([*photos.glob("*/*.jpg")]) == IMAGES, "its photos are made")
    return wait_until(lambda: measuring(process), "it measures")


def _is_connected(process: psutil.Process) -> bool:
    try:
        return any(connection.raddr for connection in process.net_connections())
    except psutil.Error:
        return False


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(map(runs, processes))


def test_demo_measures_and_leaves_only_its_chart(tmp_path: Path) -> None:
    done = command("demo", "--dir", tmp_path / "demo", "--images", IMAGES, "--latency-ms", 2, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    document = json.loads(done.stdout)
    first, second = document["fastload"]["epoch_1"], document["fastload"]["epoch_2"]
    assert (first["images"], second["images"]) == (IMAGES, IMAGES)
    assert (first["gets"], second["gets"]) == (IMAGES, 0)
    assert document["torch_s3fs"]["images"] == document["torch_s3fs"]["gets"] == IMAGES
    assert document["ratio"]["epoch_2"] > 1
    assert document["needed"] == {"8xP100": 1500, "8xV100": 3100}
    assert first["megabytes_per_second"] > 0 and first["verdict"] and first["counters"]
    assert {"date", "machine", "versions", "settings"} <= set(document)

    for heading in ("torch + s3fs", "1,500", "3,100", "GETs seen", "slowest stage"):
        assert heading in done.stderr
    chart = Path(document["chart"])
    with Image.open(chart) as image:
        assert image.size[0] > 1000
    assert [path for path in (tmp_path / "demo").rglob("*") if path.is_file()] == [chart]


def test_demo_deletes_no_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").touch()
    done = command("demo", "--dir", tmp_path, "--images", 4)
    assert done.exit_code == 2
    assert "--dir" in done.stderr and "Traceback" not in done.output
    assert (tmp_path / "data" / "precious").exists()


@contextmanager
def demo(directory: Path, latency_ms: int) -> Iterator[tuple[Forked, list[psutil.Process]]]:
    """The command in a process of its own, and all its processes, once it measures."""
    words = ["demo", "--dir", directory, "--images", IMAGES, "--latency-ms", latency_ms, "--json"]
    with start(*words) as process:
        yield process, once_measuring(process, directory)


def test_demo_after_ctrl_c_is_quiet_and_leaves_nothing(tmp_path: Path) -> None:
    with demo(tmp_path / "demo", 300) as (process, everyone):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: workers get it too
        out, err = process.communicate(PATIENCE)
    assert (process.returncode, out) == (130, "") and "Traceback" not in err
    wait_until(lambda: all_gone(everyone), "all processes have ended")
    assert not (tmp_path / "demo" / "data").exists()


def test_demo_after_kill_9_leaves_no_server(tmp_path: Path) -> None:
    with demo(tmp_path / "demo", 80) as (process, everyone):
        left = servers(process)
        os.kill(process.pid, signal.SIGKILL)
        try:
            wait_until(lambda: all_gone(left), "server and proxy have ended")
        finally:
            # torch's workers ask only every 5 seconds whether their parent lives: no need to wait for them.
            for worker in everyone:
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
            process.wait(PATIENCE)


def sleep_tethered(tether: str, say: Connection) -> None:
    s3_server.TETHER = tether
    with s3_server.tethered(["/bin/sleep", "60"]) as child:
        say.send(child.process.pid)
        time.sleep(60)


@pytest.mark.parametrize(
    "tethered", [True, pytest.param(False, marks=pytest.mark.stress)], ids=["tethered", "guard_removed"]
)
def test_child_ends_with_its_killed_parent(tethered: bool) -> None:
    """Guard removed: without the request to the kernel, the child of a killed parent lives on."""
    plain = "import os, sys\nos.execv(sys.argv[2], sys.argv[2:])\n"
    context = multiprocessing.get_context("fork")
    said, say = context.Pipe(duplex=False)
    words = (s3_server.TETHER if tethered else plain, say)
    parent = context.Process(target=sleep_tethered, args=words)
    parent.start()
    with said, say:
        assert said.poll(PATIENCE)
        child = psutil.Process(said.recv())
    wait_until(lambda: "sleep" in described(child), "the child sleeps")
    parent.kill()
    parent.join()
    parent.close()
    try:
        if tethered:
            wait_until(lambda: all_gone([child]), "the child has ended")
        else:
            with pytest.raises(psutil.TimeoutExpired):
                child.wait(0.5)
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()
