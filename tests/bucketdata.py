"""A real S3 server with photos, behind a proxy that counts requests, for tests of published caches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload.cli.demo.photos import make_dataset
from fastload.cli.demo.s3_server import delay_proxy, serve_s3
from tests.commands import command


class Bucket:
    """The server: bucket `photos` has 40 images of two classes, `packs` takes what is published.

    Attributes:
        proxy: counts the requests.
    """

    def __init__(self, proxy: Any, server: Any, root: Path) -> None:
        self.proxy = proxy
        self.root = root
        self.options = {"endpoint_url": proxy.url, "key": server.key, "secret": server.secret}

    def words(self, *words: object) -> list[str]:
        pairs = [f"{name}={value}" for name, value in self.options.items()]
        return [*map(str, words), "--json", *(word for pair in pairs for word in ("--storage-option", pair))]

    def run(self, *words: object) -> tuple[int, dict[str, Any]]:
        done = command(*self.words("cache", *words))
        assert done.stdout, done.output
        return done.exit_code, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    root = tmp_path_factory.mktemp("s3")
    make_dataset(root / "photos", 40, 2)
    (root / "packs").mkdir()
    with serve_s3(root, read_only=False) as server, delay_proxy(server.endpoint_url, 0.001) as proxy:
        yield Bucket(proxy, server, root)
