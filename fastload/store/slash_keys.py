"""Keys that end in a slash, in the listings of a client that takes the slash away.

obstore lists "name/" as "name", and cannot read it. An empty "name/" is a directory marker and no sample; one
with content is an error that names the key. An entry listed as "name" is

* the key "name/", if "name" was listed before: keys come in order, and "name" comes before "name/";
* in doubt, if it is empty, if keys "name/..." are listed too, or if it is one of few keys without extension;
* otherwise the object "name". A "name/" with content among many keys without extension is found when read.

Entries in doubt are checked by a HEAD each, or, if a directory has many, by a listing of the directory with a
delimiter, 1,000 names a request. With HEADs alone, a million empty objects would cost a million requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastload.errors import StoreError
from fastload.store.base import ObjectInfo, Page

_THREADS = 16
_FEW = 64  # HEADs that are always made; and keys without an extension that are asked for
_PAGE = 1000


class SlashKeys:
    """Takes the keys that end in a slash out of one listing.

    Args:
        client: -> obstore's client of the prefix that is listed.
    """

    def __init__(self, client: Callable[[], Any]) -> None:
        self._client = client
        self._listed = 0
        self._open: list[ObjectInfo] = []  # what was listed last, each key a beginning of the next one's
        self._empty: dict[str, ObjectInfo] = {}
        self._in_doubt: set[str] = set()  # with content
        self._bare: set[str] | None = set()  # with content and without extension; None: there are many

    def without(self, page: Page) -> Page:
        """The objects of a page that are certain.

        Raises:
            StoreError: a key that ends in a slash has content.
        """
        self._listed += len(page)
        return [info for info in page if self._certain(info)]

    def rest(self) -> Page:
        """At the end of the listing: the empty objects among what was in doubt.

        Raises:
            StoreError: as `without`.
        """
        doubtful = self._in_doubt | (self._bare or set())
        sizes = self._ask({*self._empty, *doubtful})
        for key in sorted(doubtful - sizes.keys()):
            if self._is_there(key):  # else it was deleted meanwhile
                raise _refused(f"{key}/")
        return [info for key, info in self._empty.items() if sizes.get(key) == 0]

    def _certain(self, info: ObjectInfo) -> bool:
        key, size, _ = info
        opened = self._open
        while opened and not key.startswith(opened[-1].key):
            opened.pop()
        again = not key or (bool(opened) and opened[-1].key == key)  # "" is the prefix with its slash
        if again and size:
            raise _refused(f"{key}/")
        if again:
            return False
        self._in_doubt.update(one.key for one in opened if one.size and key[len(one.key)] == "/")
        opened.append(info)
        if not size:
            self._empty.setdefault(key, info)
        elif self._bare is not None and "." not in key.rpartition("/")[2]:
            self._bare.add(key)
            if len(self._bare) > _FEW:
                self._bare = None
        return size > 0

    def _ask(self, keys: Iterable[str]) -> dict[str, int]:
        """Key -> size, of those that are there without a slash."""
        by_parent: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            by_parent[key.rpartition("/")[0]].append(key)
        heads: list[str] = []
        found: dict[str, int] = {}
        for parent, inside in by_parent.items():
            # A directory has no more pages than the listing had. Sixteen HEADs go at once, pages do not.
            if len(inside) <= max(_FEW, _THREADS * self._listed // _PAGE):
                heads += inside
            else:
                found |= self._directory(parent)
        with ThreadPoolExecutor(_THREADS) as pool:
            sizes = zip(heads, pool.map(self._size, heads), strict=True)
            return found | {key: size for key, size in sizes if size is not None}

    def _size(self, key: str) -> int | None:
        import obstore

        try:
            return int(obstore.head(self._client(), key)["size"])
        except FileNotFoundError:
            return None

    def _is_there(self, key: str) -> bool:
        """Whether there is the object "key/": the first one below that prefix."""
        import obstore

        for page in obstore.list(self._client(), prefix=key, chunk_size=1):
            return any(entry["path"] == key for entry in page)
        return False

    def _directory(self, path: str) -> dict[str, int]:
        import obstore

        answer = obstore.list_with_delimiter(self._client(), path or None)
        return {entry["path"]: entry["size"] for entry in answer["objects"]}


def _refused(key: str) -> StoreError:
    return StoreError(
        f"the key {key!r} ends in a slash and is not empty; obstore cannot read such a key. Pass "
        "client='s3fs' (s3:// only), or rename or delete the object",
        stage="list",
        key=key,
    )
