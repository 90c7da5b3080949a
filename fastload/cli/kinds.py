"""What lies at a URL: images in one folder per class, other objects, or shards of a kind."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a source is."""

    auto = "auto"
    folder = "folder"
    objects = "objects"
    tar = "tar"
    tfrecord = "tfrecord"


SHARDS = (Kind.tar, Kind.tfrecord)


def find_kind(url: str, options: dict[str, Any]) -> Kind:
    """The kind of what is at `url`: by its name, where that names shards, else by the first keys below it.

    Raises:
        ArgumentError, StoreError: as a dataset's.
    """
    from fastload.shards.urls import expand_braces
    from fastload.store import open_store

    url = next(expand_braces(url))
    last = url.rpartition("/")[2]
    if last.endswith(".json"):  # wids
        return Kind.tar
    named = _shards_of([last])
    if named is not None:
        return named
    store = open_store(re.split(r"/[^/]*[*?\[]", url)[0], **options)
    return guess_kind([info.key for info in next(store.list(), [])])


def guess_kind(keys: list[str]) -> Kind:
    """The kind of objects with these keys. Images in folders count before shards that lie beside them."""
    from fastload.store.listing import IMAGE_EXTENSIONS

    images = [key for key in keys if key.lower().endswith(IMAGE_EXTENSIONS)]
    if images and all("/" in key for key in images):
        return Kind.folder
    return _shards_of(keys) or Kind.objects


def _shards_of(keys: list[str]) -> Kind | None:
    from fastload.shards.formats import format_of

    form = format_of(key.lower() for key in keys)
    return None if form is None or form.name not in SHARDS else Kind(form.name)
