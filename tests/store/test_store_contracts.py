"""Every kind of store keeps the promises of `fastload.testing`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import fastload
from fastload.store import Store
from fastload.testing import StoreTests
from tests.faultserver import FaultServer

pytestmark = pytest.mark.usefixtures("no_aws_settings")


class OfStores(StoreTests):
    """Each on a folder of its own, and with an object beside the prefix."""

    keys = (*StoreTests.keys, "日本/x&y=z;.png", "e\u0301.txt", "x" * 200)
    url = ""
    options: Any = {}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.bucket = tmp_path
        (tmp_path / "prefix-trap.bin").write_bytes(b"not below pre/")

    def make(self) -> Store:
        return fastload.open_store(self.url.format(bucket=self.bucket), **self.options)

    def put(self, key: str, body: bytes) -> None:
        path = self.bucket / "pre" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)

    def test_listing_ends_at_the_prefix(self) -> None:
        self.put("a.bin", b"")
        assert [info.key for page in self.make().list() for info in page if "trap" in info.key] == []


class TestPath(OfStores):
    """By path and by URL in turn: both lead to the same store."""

    @pytest.fixture(autouse=True)
    def _spellings(self) -> None:
        self.urls = itertools.cycle(["{bucket}/pre", "file://{bucket}/pre/"])

    def make(self) -> Store:
        self.url = next(self.urls)
        return super().make()


class TestMemory(OfStores):
    url = "memory://pre"

    @pytest.fixture(autouse=True)
    def _empty(self) -> Iterator[None]:
        fsspec.filesystem("memory").pipe("/prefix-trap.bin", b"not below pre/")
        yield
        fsspec.filesystem("memory").rm("/pre", recursive=True)
        fsspec.filesystem("memory").rm("/prefix-trap.bin")

    def put(self, key: str, body: bytes) -> None:
        fsspec.filesystem("memory").pipe(f"/pre/{key}", body)


class TestObstore(OfStores):
    url = "s3://bucket/pre"

    @pytest.fixture(autouse=True)
    def _bucket(self) -> Iterator[None]:
        with FaultServer({"prefix-trap.bin": b"not below pre/"}) as self.server:
            self.options = {**self.server.options, **type(self).options}
            yield

    def put(self, key: str, body: bytes) -> None:
        self.server.objects[f"pre/{key}"] = body


class TestS3fs(TestObstore):
    options: Any = {"client": "s3fs"}  # noqa: RUF012
