"""What the tests of stores share: both clients of S3, an object, and a look at a listing."""

from __future__ import annotations

from typing import Any

import pytest

from fastload.store import ObjectInfo, Store

CLIENTS: list[dict[str, Any]] = [{}, {"client": "s3fs"}]
clients = pytest.mark.parametrize("client", CLIENTS, ids=["obstore", "s3fs"])
BODY = bytes(range(256)) * 800  # 204,800 bytes
CANARY = "canarySECRETcanary0123456789"


def listed(store: Store) -> dict[str, ObjectInfo]:
    """All objects, by key."""
    infos = [info for page in store.list() for info in page]
    found = {info.key: info for info in infos}
    assert len(found) == len(infos), "a key was listed twice"
    return found


def sizes(store: Store) -> dict[str, int]:
    return {key: info.size for key, info in listed(store).items()}
