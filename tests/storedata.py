"""What the tests of stores share: both clients of S3, objects, and a look at a listing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fastload.store import ObjectInfo, Store

CLIENTS: list[dict[str, Any]] = [{}, {"client": "s3fs"}]
clients = pytest.mark.parametrize("client", CLIENTS, ids=["obstore", "s3fs"])
BODY = bytes(range(256)) * 800  # 204,800 bytes
CANARY = "canarySECRETcanary0123456789"


def write(folder: Path, objects: Mapping[str, bytes]) -> str:
    """Write objects as files, by key; the path of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for key, body in objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(body)
    return str(folder)


def listed(store: Store) -> dict[str, ObjectInfo]:
    """All objects, by key."""
    infos = [info for page in store.list() for info in page]
    found = {info.key: info for info in infos}
    assert len(found) == len(infos), "a key was listed twice"
    return found


def sizes(store: Store) -> dict[str, int]:
    return {key: info.size for key, info in listed(store).items()}
