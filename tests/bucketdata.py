"""A real S3 server with photos, behind a proxy that counts requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fastload.cli.demo.photos import make_dataset
from fastload.cli.demo.s3_server import Proxy, S3Server, delay_proxy, serve_s3
from tests.commands import run, store_words

PHOTOS = 40


class Bucket:
    """The server. Its folders are buckets, and `options` lead to it through the proxy, which counts.

    Attributes:
        digests: of the photos, by key.
    """

    def __init__(self, proxy: Proxy, server: S3Server, root: Path) -> None:
        self.proxy, self.server, self.root = proxy, server, root
        self.options = server.options | {"endpoint_url": proxy.url}
        photos = root / "photos"
        self.digests = {
            str(path.relative_to(photos)): digest(path.read_bytes()) for path in photos.rglob("*.jpg")
        }

    def gets(self) -> int:
        return self.proxy.counts().object_gets

    def words(self, *words: object) -> list[str]:
        """A command, with the options that lead to the server."""
        return [*map(str, words), *store_words(self.options), "--json"]

    def run(self, *words: object) -> tuple[int, dict[str, Any]]:
        """(exit code, document) of a command."""
        return run(*words, *store_words(self.options))


def digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def serve_photos(
    root: Path, count: int, round_trip: float = 0.001, *, folder: str = "photos", read_only: bool = True
) -> Iterator[Bucket]:
    """A server with so many photos of two classes in s3://photos, a round trip away."""
    make_dataset(root / folder, count, 2)
    with serve_s3(root, read_only=read_only) as server, delay_proxy(server.endpoint_url, round_trip) as proxy:
        yield Bucket(proxy, server, root)


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """With buckets that are written to: "packs", and "bucket"."""
    root = tmp_path_factory.mktemp("s3")
    for name in ("packs", "bucket"):
        (root / name).mkdir()
    with serve_photos(root, PHOTOS, read_only=False) as served:
        yield served


@pytest.fixture(scope="session")
def demo_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `PHOTOS` photos of four classes, which no test changes."""
    folder = tmp_path_factory.mktemp("photos")
    make_dataset(folder, PHOTOS, classes=4)
    return folder
