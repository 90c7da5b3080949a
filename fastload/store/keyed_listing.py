"""The objects of given keys, in the order of these: looked up one by one, or in a listing of the prefix.

A request for each key takes less time where keys are few. A page of a listing has 1,000 of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, NamedTuple

from fastload.errors import ArgumentError, NotFoundError
from fastload.store.base import ObjectInfo, Store
from fastload.store.listing import Columns, has_listing, write_manifest

_FEW = 1000  # keys that are looked up one by one
_AT_ONCE = 64
_SHOWN = 5  # keys in a message
_FORGOTTEN = (".jpg", ".jpeg", ".png")  # extensions that a table of names may leave out


class Keys(NamedTuple):
    """The keys of a manifest, in its order.

    keys: relative to the store's URL; one may be there twice.
    folders: with labels, let all folders below the URL be classes. Otherwise, those of the keys.
    """

    keys: Sequence[str]
    folders: bool = True

    def digest(self) -> str:
        """A text that other keys do not have."""
        digest = blake2b(f"{len(self.keys)} {self.folders}".encode(), digest_size=16)
        for key in self.keys:
            digest.update(b"\0" + key.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def as_keys(keys: Any) -> list[str]:
    """The argument `keys=` of a dataset: a list, tuple, numpy or Arrow array, or a column of a data frame.

    Raises:
        ArgumentError: it is none of these, it is empty, or something in it is no text.
    """
    to_list = next((name for name in ("to_pylist", "tolist", "to_list") if hasattr(keys, name)), None)
    found = keys if to_list is None else getattr(keys, to_list)()
    if isinstance(found, str | bytes) or not isinstance(found, Sequence):  # a set has no order
        raise ArgumentError(f"keys must be a sequence of keys, such as ['a.jpg', 'b.jpg'], found {keys!r}")
    wrong = next(((at, key) for at, key in enumerate(found) if not isinstance(key, str)), None)
    if wrong is not None:
        raise ArgumentError(f"keys must be text, found {wrong[1]!r} at position {wrong[0]:,}")
    if not found:
        raise ArgumentError("keys is empty: leave it out to take all objects below the url")
    return list(found)


def write_keys(
    store: Store, descriptor: int, keys: Keys, *, labels: bool, progress: Callable[[int], None]
) -> None:
    """Look up these keys and write the manifest's bytes to an empty file.

    Args:
        store: where they are.
        descriptor: the file, open for writing.
        labels: a class is a folder directly below the URL, as for `write_listing`.
        progress: called with the number of objects seen so far, from time to time.

    Raises:
        NotFoundError: there are keys without an object.
        ArgumentError: with labels, a key lies in no folder.
        StoreError: the store failed.
    """
    wanted = dict.fromkeys(keys.keys)  # in order, each once
    if labels:
        bare = next((key for key in wanted if "/" not in key), None)
        if bare is not None:
            raise ArgumentError(f"the key {bare!r} lies in no class folder: keys are 'class/name.jpg'")
    found: dict[str, ObjectInfo] = {}
    listed = len(wanted) > _FEW and has_listing(store)
    for seen, info in enumerate(_all(store) if listed else _looked_up(store, wanted), 1):
        if info is not None and info.key in wanted:
            found[info.key] = info
        if seen % 1000 == 0:
            progress(seen)
        if len(found) == len(wanted):
            break
    if len(found) < len(wanted):
        _refuse(store, [key for key in wanted if key not in found], len(wanted))
    columns = Columns(labels=labels)
    columns.add([found[key] for key in keys.keys])
    if labels:
        folders = {key.partition("/")[0] for key in wanted}
        columns.number_classes(folders | store.folders() if keys.folders and has_listing(store) else folders)
    write_manifest(descriptor, columns, store)


def _all(store: Store) -> Iterator[ObjectInfo]:
    for page in store.list():
        yield from page


def _looked_up(store: Store, keys: Iterable[str]) -> Iterator[ObjectInfo | None]:
    """What a request for each key finds."""
    first, *rest = keys
    yield _head(store, first)  # alone: a store that is down is asked once
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        yield from pool.map(lambda key: _head(store, key), rest)
    finally:
        pool.shutdown(cancel_futures=True)


def _head(store: Store, key: str) -> ObjectInfo | None:
    try:
        return store.head(key)
    except NotFoundError:
        return None


def _refuse(store: Store, missing: list[str], count: int) -> None:
    """Raise the error for keys without an object, with the likely reason."""
    if len(missing) == count and has_listing(store):
        next(store.list(), None)  # a bucket or directory that does not exist is an error of its own
    first, root = missing[0], store.url.rstrip("/") + "/"
    forgotten = [first + end for end in _FORGOTTEN if _head(store, first + end) is not None]
    if "://" in first and not first.startswith(root):
        why = f"they are relative to the url, and {first!r} is not below it"
    elif first.startswith(root):
        why = f"they are relative to the url: {first.removeprefix(root)!r} instead of {first!r}"
    elif forgotten:
        end = forgotten[0].removeprefix(first)
        why = (
            f"there is {forgotten[0]!r}: a key has its extension, which File('{{column}}{end}') adds to a "
            "column"
        )
    else:
        why = "check the url, to which they are relative, and that the upload is complete"
    names = ", ".join(map(repr, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
    raise NotFoundError(
        f"{store.url!r}: {len(missing):,} of {count:,} keys have no object: {names}; {why}", stage="list"
    )
