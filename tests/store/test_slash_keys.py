"""Keys that end in a slash, which obstore lists without it: each object once, or an error with its name."""

from __future__ import annotations

from typing import Any

import pytest

from fastload.errors import NotFoundError, StoreError
from fastload.store import open_store
from fastload.store.base import ObjectInfo
from fastload.store.workarounds import SlashKeys
from tests.faultserver import LIST, FaultServer
from tests.storedata import clients, sizes

MARKERS: dict[str, tuple[dict[str, bytes], dict[str, int]]] = {
    "beside an object": ({"p/": b"", "p": b"four"}, {"p": 4}),
    "beside an object and before others": (
        {"p": b"four", "p-1": b"1", "p/": b"", "p/x": b"1"},
        {"p": 4, "p-1": 1, "p/x": 1},
    ),
    "beside an empty object": ({"p/": b"", "p": b""}, {"p": 0}),
    "of a directory": ({"p/": b"", "p/x": b"1"}, {"p/x": 1}),
    "of an empty directory": ({"p/": b"", "q": b"1"}, {"q": 1}),
    "of directories in one another": (
        {"p/": b"", "p/q/": b"", "p/q/r/": b"", "p/q/r/x": b""},
        {"p/q/r/x": 0},
    ),
    "of the prefix itself": ({"": b"", "q": b"1"}, {"q": 1}),
    "none": ({"p": b"", "p.x": b"", "q/p": b""}, {"p": 0, "p.x": 0, "q/p": 0}),
}


@clients
@pytest.mark.parametrize("page_size", [1000, 1])
def test_an_empty_key_with_a_slash_is_no_sample_and_hides_none(
    page_size: int, client: dict[str, Any]
) -> None:
    """All cases lie in one bucket, each in a folder of its own."""
    objects = {f"pre/{name}/{key}": body for name, (some, _) in MARKERS.items() for key, body in some.items()}
    expected = {f"{name}/{key}": size for name, (_, some) in MARKERS.items() for key, size in some.items()}
    with FaultServer(objects | {"pre/": b""}, page_size=page_size) as server:
        store = open_store("s3://bucket/pre", **server.options, **client)
        assert sizes(store) == expected
        for key, size in expected.items():
            assert bytes(store.read(key, server.etag(f"pre/{key}"), size)) == objects[f"pre/{key}"]


FULL: dict[str, dict[str, bytes]] = {
    "alone": {"p/": b"abc", "q.jpg": b"1"},
    "beside an object": {"p/": b"abc", "p": b"four", "q.jpg": b"1"},
    "beside an equal object": {"p/": b"abc", "p": b"abc"},
    "beside an empty object": {"p/": b"abc", "p": b""},
    "with keys below it": {"p/": b"abc", "p/x.jpg": b"1"},
    "with keys below it and between": {"p.1": b"1", "p/": b"abc", "p/x.jpg": b"1"},
}


# Both sizes of a page, in turn.
PAGED = [
    pytest.param(name, size, marks=[pytest.mark.stress] * ((at + size) % 2))
    for at, name in enumerate(FULL)
    for size in (1000, 1)
]


@pytest.mark.parametrize(("name", "page_size"), PAGED)
def test_a_key_with_a_slash_and_content_ends_the_listing_by_name(name: str, page_size: int) -> None:
    with FaultServer({f"pre/{key}": body for key, body in FULL[name].items()}, page_size=page_size) as server:
        store = open_store("s3://bucket/pre", **server.options)
        with pytest.raises(StoreError, match=r"'p/' ends in a slash.*client='s3fs'") as caught:
            sizes(store)
        assert caught.value.stage == "list" and caught.value.key == "p/"
        everything = open_store("s3://bucket/pre", **server.options, client="s3fs")
        assert sizes(everything)["p/"] == 3 and everything.read("p/") == b"abc"


def test_an_object_above_others_of_its_name_is_listed() -> None:
    with FaultServer({"p": b"1", "p/x.jpg": b"2", "p/y": b"", "p/y/z.jpg": b"3"}) as server:
        store = open_store("s3://bucket", **server.options)
        assert sizes(store) == {"p": 1, "p/x.jpg": 1, "p/y": 0, "p/y/z.jpg": 1}


def test_many_empty_objects_are_told_from_markers_by_pages_of_names() -> None:
    objects = {f"d/{i:04d}": b"" for i in range(1200)} | {f"d/{i:04d}.dir/": b"" for i in range(100)}
    with FaultServer(objects) as server:
        store = open_store("s3://bucket", **server.options)
        assert sizes(store) == {key: 0 for key in objects if not key.endswith("/")}
        assert not [request for request in server.requests if request.method == "HEAD"]
        assert server.count(LIST) == 1 + 2 + 2  # the contact, the listing, and the directory by names


@pytest.mark.parametrize("extension", ["", ".jpg"])
def test_many_objects_cost_no_request_beside_the_pages(extension: str) -> None:
    with FaultServer({f"{i:04d}{extension}": b"x" for i in range(1500)}) as server:
        assert len(sizes(open_store("s3://bucket", **server.options))) == 1500
        assert len(server.requests) == server.count(LIST) == 3


def test_a_key_with_a_slash_among_many_without_extensions_is_named_when_it_is_read() -> None:
    with FaultServer({f"{i:04d}": b"x" for i in range(99)} | {"9999/": b"abc"}) as server:
        store = open_store("s3://bucket", **server.options)
        assert sizes(store)["9999"] == 3
        with pytest.raises(
            NotFoundError, match=r"'9999'.*its key ends in a slash \(client='s3fs' can read it\)"
        ):
            store.read("9999")


def test_an_object_deleted_while_it_was_listed_is_no_key_with_a_slash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FaultServer({"bare": b"1", "x.jpg": b"1"}) as server:
        store = open_store("s3://bucket", **server.options)
        rest = SlashKeys.rest

        def deleted_before(slashes: SlashKeys) -> list[ObjectInfo]:
            del server.objects["bare"]
            return rest(slashes)

        monkeypatch.setattr(SlashKeys, "rest", deleted_before)
        assert sizes(store) == {"bare": 1, "x.jpg": 1}
