"""Fixtures of the tests with a store."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest

from fastload.cli.demo.s3_server import S3Server
from fastload.store import failures
from fastload.store import object_store as native
from tests.bucketdata import Bucket
from tests.faultserver import FaultServer
from tests.sharddata import close_all, kind, small_pieces  # noqa: F401 - fixtures


@pytest.fixture(scope="session", autouse=True)
def s3fs_is_imported() -> None:
    """Clients are forks of this process: each that uses s3fs would import it, which takes 0.5 s."""
    with suppress(ImportError):
        importlib.import_module("s3fs")


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[FaultServer]:
    """A scripted server with the objects that the module of the test names OBJECTS."""
    with FaultServer(getattr(request.module, "OBJECTS", {})) as running:
        yield running


@pytest.fixture(scope="session")
def s3(bucket: Bucket) -> S3Server:
    """A real server, without the proxy that counts."""
    return bucket.server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent server is left after seconds, and asked again at once."""
    monkeypatch.setattr(failures, "READ_POLICY", failures.RetryPolicy(budget=60, first=0.01, longest=0.5))
    client = {"connect_timeout": "3s", "read_timeout": "3s", "timeout": "30s"}
    backoff = {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(seconds=1), "base": 2}
    few = {"max_retries": 3, "retry_timeout": timedelta(seconds=60), "backoff": backoff}
    for name in ("_LISTER", "_WRITER"):
        monkeypatch.setattr(native, name, {"client": client, "retry": few})
    monkeypatch.setattr(native, "_READER", {**native._READER, "client": client})
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 3)


@pytest.fixture
def gives_up(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds, not minutes, until it is enough."""
    monkeypatch.setattr(failures, "READ_POLICY", failures.RetryPolicy(budget=1, first=0.01, longest=0.5))
