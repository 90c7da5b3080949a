"""Shards that carry their own index: their heads, and the index.json that lists them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastload.cache.listings import Listings
from fastload.errors import ArgumentError, DecodeError, NotFoundError
from fastload.formats.compression import Inflater
from fastload.formats.pieces import too_large
from fastload.shards.catalog import ShardList
from fastload.shards.formats import ShardFormat, format_of_index
from fastload.shards.index import RecordOffsets, ShardIndex
from fastload.shards.reader import Shard, read_in_turn
from fastload.store import Store, open_store
from fastload.store.failures import Wait, sleep

_READS = 64  # at once
_PIECE = 1 << 20  # bytes of a range of a compressed shard, of which only the beginning is wanted
_MOST_HEAD = 64 << 20  # bytes of the head of a compressed shard: a few bytes may inflate to any number
_GLOB = re.compile(r"[*?\[\]{}]")


def index_shards(
    read_index: Callable[[Store, Shard, Wait], RecordOffsets], shards: ShardList, index: ShardIndex
) -> None:
    """Index the shards that are not indexed yet, many at a time, and keep what was read.

    Args:
        read_index: (store, shard, wait) -> the records of a shard, out of the shard itself; `wait` as in
            `Store.read`. A DecodeError says that it is no shard of this format.

    Raises:
        DecodeError: a shard is not of the kind that is read, or was cut; its key is in the error.
    """
    missing = [number for number in range(len(shards)) if index.get(number) is None]
    most = shards.store.reading.max_inflated

    def read(number: int) -> RecordOffsets:
        shard = shards[number]
        try:
            records = read_index(shards.store, shard, sleep)
            largest = int(records.offsets[:, 1].max(initial=0)) if records.compressed else 0
            if largest > most:
                raise DecodeError(too_large("a sample", largest, most))
            return records
        except DecodeError as error:
            error.key = shard.key
            raise

    add = index.add_and_keep if index.kept else index.add
    with ThreadPoolExecutor(_READS) as pool:
        for number, records in zip(missing, pool.map(read, missing), strict=True):
            add(number, records)


def read_head(store: Store, shard: Shard, size: int, wait: Wait, *, compressed: bool = False) -> memoryview:
    """The first bytes of a shard; inflated, where it is compressed.

    Raises:
        DecodeError: it has fewer.
    """
    if not compressed:
        if size > shard.size:
            raise DecodeError(
                f"the file has {shard.size:,} bytes, less than its head of {size:,}: it was cut"
            )
        return memoryview(store.read_range(shard.key, 0, size, shard.version, wait=wait))
    if size > _MOST_HEAD:
        raise DecodeError(
            f"the head of the compressed file would have {size:,} bytes, more than {_MOST_HEAD:,}: write the "
            "dataset with smaller shards"
        )
    ranges = ((start, min(start + _PIECE, shard.size)) for start in range(0, shard.size, _PIECE))
    inflate, head = Inflater(read_in_turn(store, shard, ranges, wait)), bytearray()
    while len(head) < size:
        piece = inflate()
        if piece is None:
            raise DecodeError(f"the file inflates to less than its head of {size:,} bytes: it was cut")
        head += piece[: size - len(head)]
    return memoryview(head).toreadonly()


def read_json(
    url: str | os.PathLike[str], form: ShardFormat, storage_options: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return (the folder, the contents of its index.json).

    Args:
        url: the folder, or index.json in it.
        form: of the shards that it lists.

    Raises:
        ArgumentError: there is none, or it is of another writer.
    """
    if not isinstance(url, str | os.PathLike):
        raise ArgumentError(
            f"url must be one folder with an index.json, found {url!r}: make a dataset of each"
        )
    text = os.fspath(url)
    folder, slash, name = text.rpartition("/")
    root = (folder or slash or ".") if name == "index.json" else text.rstrip("/") or "/"
    store = open_store(root, **storage_options)
    try:
        body = bytes(store.read("index.json"))
    except NotFoundError as error:
        raise NotFoundError(
            f"url {text!r} has no index.json, which lists the shards: give fastload.{form.dataset} the "
            "folder that its writer wrote, with a split's name where there are splits",
            key="index.json",
        ) from error
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{text!r}: index.json is no JSON ({error}): write it again") from None
    if not isinstance(document, dict) or not isinstance(document.get(form.listed_in), list):
        other = format_of_index(document)
        hint = "it is of another kind"
        if other is not None:
            hint = f"it is of {other.writer}: read it with fastload.{other.dataset}"
        raise ArgumentError(f"{text!r}: index.json has no list {form.listed_in!r}; {hint}")
    return root, document


def list_shards(
    root: str, names: list[str], form: ShardFormat, listings: Listings, *, storage_options: dict[str, Any]
) -> ShardList:
    """Return the shards that an index.json lists, in its order."""
    if not names:
        raise ArgumentError(f"{root!r}: index.json lists no shards")
    if _GLOB.search(root):
        raise ArgumentError(f"url {root!r} has one of * ? [ ] {{ }}: give the folder a name without these")
    return ShardList(
        [f"{root}/{name}" for name in names],
        form,
        compression="",  # the index of each says whether it is
        listings=listings,
        storage_options=storage_options,
        in_order=True,
    )
