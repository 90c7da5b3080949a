"""Writing: an object is there whole or not at all, faults are retried, errors name key and next step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec.implementations.local
import pytest

from fastload.cli.demo.s3_server import S3Server
from fastload.errors import AccessDeniedError, ArgumentError, NotFoundError, StoreError
from fastload.store import Store, failures, open_store
from fastload.store import object_store as native
from tests.commands import script
from tests.faultserver import Fault, FaultServer
from tests.patience import PATIENCE
from tests.storedata import BODY, CLIENTS, clients, sizes

KINDS = ["obstore", "s3fs", "path", "memory"]


def opened(kind: str, s3: S3Server, tmp_path: Path) -> Store:
    if kind == "path":
        return open_store(tmp_path / "new" / "directory")
    if kind == "memory":
        return open_store(f"memory://{tmp_path.name}")
    extra = {"client": "s3fs"} if kind == "s3fs" else {}
    return open_store(f"s3://bucket/{tmp_path.name}-{kind}", **s3.options, **extra)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read(kind: str, s3: S3Server, tmp_path: Path) -> None:
    store = opened(kind, s3, tmp_path)
    bodies = {"a b.bin": BODY, "deep/er/empty": b"", "deep/large": BODY * 60, "ü%#?+": b"x"}
    for number, (key, body) in enumerate(bodies.items()):
        (tmp_path / f"source{number}").write_bytes(body)
        forms = (body, memoryview(body), tmp_path / f"source{number}")
        store.write(key, forms[number % 3])
    store.write("a b.bin", b"in its place")
    bodies["a b.bin"] = b"in its place"
    assert sizes(opened(kind, s3, tmp_path)) == {key: len(body) for key, body in bodies.items()}
    for key, body in bodies.items():
        assert bytes(store.read(key, None, len(body))) == body


@pytest.mark.parametrize("kind", ["path", "memory"])
def test_a_key_stays_below_its_root(kind: str, s3: S3Server, tmp_path: Path) -> None:
    store = opened(kind, s3, tmp_path)
    for key in ["../up", "/etc/x", "a/../../x", "", ".", "a//b"]:
        with pytest.raises(NotFoundError):
            store.write(key, b"x")
    assert not list(tmp_path.rglob("*"))


# --- Faults -----------------------------------------------------------------------------------------------


def by_pairs(faults: Mapping[str, Any], size: int) -> Any:
    """Each fault with each client and, as a whole and in parts, by one of them."""
    cases = [
        pytest.param(
            name,
            (size, 10 << 20)[parts],
            CLIENTS[(at + parts) % 2],
            id=f"{name}-{('whole', 'in parts')[parts]}",
        )
        for at, name in enumerate(faults)
        for parts in range(2)
    ]
    return pytest.mark.parametrize(("name", "size", "client"), cases)


RECOVERED = {
    "500": [Fault(status=500)],
    "503": [Fault(status=503, code="SlowDown")] * 2,
    "an answer lost": [Fault(lost=True)],
    # An error in the end: the start of an upload in parts, carried out so late, would undo that of the retry.
    "no answer": [Fault(delay=3.5, status=500)],
}


@by_pairs(RECOVERED, len(BODY))
def test_faults_that_retries_help(
    name: str, size: int, client: dict[str, Any], server: FaultServer, impatient: None, tmp_path: Path
) -> None:
    body = (BODY * (size // len(BODY) + 1))[:size]
    (tmp_path / "source").write_bytes(body)
    server.script("key", *RECOVERED[name])
    store = open_store("s3://bucket", **server.options, **client)
    store.write("first", b"")
    store.write("key", tmp_path / "source")
    assert server.objects == {"first": b"", "key": body} and not server.parts


REFUSED = {
    "403": (Fault(status=403, code="AccessDenied"), AccessDeniedError, "refused"),
    "no bucket": (Fault(status=404, code="NoSuchBucket"), NotFoundError, "bucket 'bucket' does not exist"),
    "503 for ever": (Fault(status=503, code="SlowDown"), StoreError, "attempts|SlowDown|503|scripted"),
    "no answer": (Fault(lost=True), StoreError, "key"),
}


@by_pairs(REFUSED, 1000)
def test_faults_that_are_errors(
    name: str,
    size: int,
    client: dict[str, Any],
    server: FaultServer,
    gives_up: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault, expected, words = REFUSED[name]
    monkeypatch.setattr(failures, "CONTACT_SECONDS", 1.0)
    monkeypatch.setattr(native, "_FIRST_WRITE", timedelta(seconds=1))
    store = open_store("s3://bucket", **server.options, **client)
    server.script("key", fault, repeat=True)
    with pytest.raises(expected, match=words) as caught:
        store.write("key", bytes(size))
    assert (caught.value.key, caught.value.stage) == ("key", "put")
    if fault.status:  # a lost answer leaves open whether the object was taken
        assert not server.objects
    assert server.options["secret"] not in str(caught.value)


@clients
def test_a_store_that_takes_nothing_is_soon_said(
    client: dict[str, Any], server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the patience of a real store, which what was written before would be waited for with."""
    monkeypatch.setattr(native, "_FIRST_WRITE", timedelta(seconds=1))
    monkeypatch.setattr(failures, "CONTACT_SECONDS", 2)
    server.script("key", Fault(status=500), repeat=True)
    with pytest.raises(StoreError, match="key"):
        open_store("s3://bucket", **server.options, **client).write("key", b"body")
    assert server.count("key") < 1000


def test_one_part_that_fails_is_sent_again_alone(server: FaultServer, impatient: None) -> None:
    server.script("key", None, None, Fault(status=500))
    open_store("s3://bucket", **server.options).write("key", bytes(20 << 20))
    assert len(server.objects["key"]) == 20 << 20
    assert [request.method for request in server.requests].count("PUT") == 3 + 1


def test_renamed_where_renaming_is_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's local file system stands for sftp, smb, hdfs: what is being written has another name."""
    from fastload.store.fsspec import FsspecStore

    seen: list[set[str]] = []
    mv = fsspec.implementations.local.LocalFileSystem.mv

    def watched(fs: Any, source: str, target: str, **options: Any) -> None:
        assert len([*tmp_path.rglob("*.part")]) == 1
        seen.append(set(sizes(store)))
        mv(fs, source, target, **options)

    monkeypatch.setattr(fsspec.implementations.local.LocalFileSystem, "mv", watched)
    (tmp_path / "source").write_bytes(BODY)
    store = FsspecStore(f"local://{tmp_path}", "local", {})
    store.write("key", tmp_path / "source")
    store.write("deep/key", BODY)
    assert (tmp_path / "key").read_bytes() == (tmp_path / "deep" / "key").read_bytes() == BODY
    assert seen == [{"source"}, {"source", "key"}], "what is being written is no object"
    assert sorted(path.name for path in tmp_path.rglob("*.part")) == []


def test_http_is_not_written(server: FaultServer) -> None:
    with pytest.raises(ArgumentError, match="as s3://"):
        open_store(f"{server.endpoint_url}/bucket").write("key", b"x")
    assert not server.requests


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory(tmp_path: Path) -> None:
    (tmp_path / "fixed").mkdir(mode=0o500)
    with pytest.raises(AccessDeniedError, match="refused"):
        open_store(tmp_path / "fixed").write("key", b"x")


def test_the_destination_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    for store, key in ((open_store(tmp_path / "file"), "key"), (open_store(tmp_path), "file/key")):
        with pytest.raises(StoreError) as caught:
            store.write(key, b"x")
        assert caught.value.key == key
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "no part is left"


# --- Whole or not at all ----------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from fastload.store import fsspec as fs, local, open_store
class Killed:  # a body that kills us in its middle
    def __enter__(self): return self
    def __exit__(self, *why): pass
    def read(self, size, left=[3]):
        left[0] -= 1
        if not left[0]: os.kill(os.getpid(), signal.SIGKILL)
        return bytes(size)
class Body(type(Path())):
    def open(self, mode): return Killed()
open_store(sys.argv[1]).write("key", Body("x"))
"""


def test_a_kill_in_the_middle_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"as it was")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=PATIENCE)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "key").read_bytes() == b"as it was"
    (part,) = [path for path in tmp_path.iterdir() if path.name != "key"]
    assert part.name.startswith(".") and part.name.endswith(".part"), "a listing by *.tar passes it over"
    assert sizes(open_store(tmp_path)) == {"key": 9}, "and so does ours"


@pytest.mark.parametrize("kind", ["path", "memory"])
def test_a_failure_in_the_middle_leaves_nothing(kind: str, s3: S3Server, tmp_path: Path) -> None:
    class Broken(type(Path())):  # type: ignore[misc]
        def open(self, mode: str) -> Any:
            raise OSError(5, "Input/output error")

    store = opened(kind, s3, tmp_path)
    with pytest.raises(StoreError, match="Input/output"):
        store.write("key", Broken("x"))
    assert not sizes(store)


def test_a_large_file_needs_little_memory(s3: S3Server) -> None:
    """In a process of its own, whose peak nobody else raises."""
    code = """if True:
        import resource, sys, tempfile
        from pathlib import Path
        from fastload.store import open_store
        store = open_store('s3://bucket', key=sys.argv[1], secret=sys.argv[2], endpoint_url=sys.argv[3])
        store.write('warm', b'x')
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with tempfile.TemporaryFile() as file:
            file.truncate(128 << 20)
            store.write('large', Path(f'/proc/self/fd/{file.fileno()}'))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    said = script(code, s3.key, s3.secret, s3.endpoint_url)
    assert open_store("s3://bucket", **s3.options).head("large").size == 128 << 20
    assert int(said) < 64 << 10, "KiB: some parts, not the file"
