"""A store, listed: the objects that a dataset takes of it, in their order, with their labels.

    list_objects ─▶ pages of a listing ─▶ filter ─▶ columns ─▶ Manifest
                 ─▶ given keys: a request for each, or a listing where there are many ─▶ columns ─▶ Manifest

A request for each key takes less time where keys are few. A page of a listing has 1,000 of them.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from fastload.errors import ArgumentError, NotFoundError
from fastload.store.base import ObjectInfo, Page, Store
from fastload.store.local import LocalStore
from fastload.store.manifest import Columns, Manifest
from fastload.store.node import SharedFile

_log = logging.getLogger("fastload")

# The extensions that torchvision's ImageFolder takes, in any case.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


# ending -> (kind, the dataset that reads it), for the error when shards are given to an ImageFolder
_SHARDS = {
    (".tar", ".tar.gz", ".tgz"): ("tar", "TarDataset"),
    (".tfrecord", ".tfrecords", ".tfrec", ".tfrecord.gz", ".tfrecords.gz"): ("TFRecord", "TFRecordDataset"),
    (".mds", ".mds.zstd", ".mds.gz"): ("MDS", "MDSDataset"),
    (".beton",): ("FFCV", "BetonDataset"),
    (".parquet", ".pq"): ("Parquet", "ParquetDataset"),
}
_AT_ONCE = 64  # requests for keys
_FEW = 1000  # keys that are looked up one by one
_NAMED = 10  # names in a message
_FORGOTTEN = (".jpg", ".jpeg", ".png")  # extensions that a table of names may leave out
_QUIET_SECONDS = 2.0
_LOG_EVERY_SECONDS = 30.0


class Selection(NamedTuple):
    """Which objects of a listing to take.

    pattern: a regular expression; keys that match it as a whole are taken.
    required: keys that are taken and must be there, by name.
    heads: ask for the required ones one by one, where a store cannot list (http).
    wanted: the kind of these objects and the way to read others, for the error where there is none.
    """

    pattern: str
    required: tuple[str, ...] = ()
    heads: bool = False
    wanted: str = "of the kind that is read here"


class Keys(NamedTuple):
    """The keys of a manifest, in its order.

    keys: relative to the store's URL; one may be there twice.
    folders: with labels, let all folders below the URL be classes. Otherwise, those of the keys.
    """

    keys: Sequence[str]
    folders: bool = True

    def digest(self) -> str:
        """Return a text that other keys do not have."""
        digest = blake2b(f"{len(self.keys)} {self.folders}".encode(), digest_size=16)
        for key in self.keys:
            digest.update(b"\0" + key.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def as_keys(keys: Any) -> list[str]:
    """Return the argument `keys=` of a dataset: a list, tuple, numpy or Arrow array, or a column of a data
    frame.

    Raises:
        ArgumentError: it is none of these, it is empty, or something in it is no text.
    """
    to_list = next((name for name in ("to_pylist", "tolist", "to_list") if hasattr(keys, name)), None)
    values = keys if to_list is None else getattr(keys, to_list)()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):  # a set has no order
        raise ArgumentError(f"keys must be a sequence of keys, such as ['a.jpg', 'b.jpg'], found {keys!r}")
    wrong = next(((position, key) for position, key in enumerate(values) if not isinstance(key, str)), None)
    if wrong is not None:
        raise ArgumentError(f"keys must be text, found {wrong[1]!r} at position {wrong[0]:,}")
    if not values:
        raise ArgumentError("keys is empty: leave it out to take all objects below the url")
    return list(values)


class ListingQuery(NamedTuple):
    """What a dataset takes of a store.

    labels: as torchvision's ImageFolder: a class is a folder directly below the URL, with images or without,
        only images count, ordered by class, then directory, then file name. Else the order is that of the
        keys.
    classes: with labels, the names that the folders may have; None: every folder is a class.
    allow_empty: with labels, a class may be without images.
    selection: the objects to take; None: all.
    keys: take these objects, in this order; `selection` is not for them.
    """

    labels: bool = False
    classes: Sequence[str] | None = None
    allow_empty: bool = False
    selection: Selection | None = None
    keys: Keys | None = None

    def name(self) -> str:
        """Return a text that queries for other objects or in another order do not have."""
        if self.keys is not None:
            return f"{'labels-' if self.labels else ''}{self.keys.digest()}"
        if self.selection is not None:
            return blake2b(repr(self.selection).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        return "labels" if self.labels else "all"

    def check_classes(self, url: str, manifest: Manifest) -> None:
        """Compare the folders that were listed with the classes that are wanted.

        Raises:
            ArgumentError: a folder is not among `classes`.
            NotFoundError: a class has no image.
        """
        if manifest.labels is None or manifest.classes is None:
            return
        folders, classes = manifest.classes, self.classes
        others = sorted(set(folders) - set(classes)) if classes is not None else []
        if others:
            raise ArgumentError(
                f"{url!r}: classes= does not name the folders {_some(others)}. Add them to classes=, or move "
                "them out of url"
            )
        full = {folders[label] for label in np.unique(manifest.labels).tolist()}
        empty = [name for name in (folders if classes is None else classes) if name not in full]
        if empty and not self.allow_empty:
            raise NotFoundError(
                f"{url!r}: no valid image for the classes {_some(empty)}. Supported extensions: "
                f"{', '.join(IMAGE_EXTENSIONS)}. Add images, remove the folders, or keep these as classes "
                "without samples: allow_empty=True",
                stage="list",
            )


EVERYTHING = ListingQuery()


def list_objects(
    store: Store, query: ListingQuery = EVERYTHING, progress: Callable[[int], None] = lambda listed: None
) -> Manifest:
    """List a store into memory.

    Args:
        progress: called with the number of objects listed so far.

    Raises:
        ArgumentError, NotFoundError, AccessDeniedError, StoreError: within 10 s if the store does not answer,
            refuses access, there is nothing to read, or its folders are not the classes wanted.
    """
    if query.keys is not None:
        columns = _look_up(store, query.keys, query.labels, progress)
    else:
        columns = _choose(store, query, progress)
    write = partial(columns.write, identity=store.identity)
    manifest = Manifest(SharedFile.written("fastload-manifest", write))
    store.reached = True
    query.check_classes(store.url, manifest)
    return manifest


def _choose(store: Store, query: ListingQuery, progress: Callable[[int], None]) -> Columns:
    """List the objects that a query chooses, in their order."""
    selection = query.selection
    chosen = _Filter(query)
    columns = Columns(labels=query.labels)
    for page in _required(store, selection) if selection and selection.heads else store.list():
        columns.add(chosen.select(page, len(columns.sizes)))
        progress(chosen.listed)
    if query.labels:
        chosen.folders.update(store.folders())
    chosen.check(store.url, len(columns.sizes), local=isinstance(store, LocalStore))
    columns.number_classes(chosen.folders)
    columns.arrange()
    return columns


def has_listing(store: Store) -> bool:
    """Return whether it can list its objects, which an http server cannot."""
    return not store.url.lower().startswith(("http://", "https://"))


class _Filter:
    """Selects objects from the pages of a listing, and explains a listing without any."""

    def __init__(self, query: ListingQuery) -> None:
        selection = query.selection
        self.listed = 0
        self.folders: set[str] = set()  # directly below the URL, with images or without
        self._labels, self._selection = query.labels, selection
        self._pattern = None if selection is None else re.compile(selection.pattern, re.DOTALL)
        self._required = frozenset(() if selection is None else selection.required)
        self._missing = set(self._required)
        self._example = ""  # the first key listed
        self._shards = dict.fromkeys(_SHARDS, 0)

    def select(self, page: Page, taken: int) -> Page:
        """Return the selected objects of a page. `taken`: the number of objects selected before."""
        self.listed += len(page)
        self._example = self._example or next((info.key for info in page), "")
        if self._labels:
            if not taken:  # once there is an image, it is an image folder
                for endings in _SHARDS:
                    self._shards[endings] += sum(info.key.lower().endswith(endings) for info in page)
            page = [info for info in page if "/" in info.key]
            self.folders.update(info.key.partition("/")[0] for info in page)
            page = [info for info in page if info.key.lower().endswith(IMAGE_EXTENSIONS)]
        if self._pattern is not None:
            wanted, match = self._required, self._pattern.fullmatch
            page = [info for info in page if info.key in wanted or match(info.key)]
            self._missing.difference_update(info.key for info in page)
        return page

    def check(self, url: str, taken: int, *, local: bool = False) -> None:
        """Raise `NotFoundError` where there is nothing to read. `taken`: the number of objects selected."""
        if not self.listed and not self.folders and local:
            why = "this directory holds no files: check the path"
        elif not self.listed and not self.folders:
            why = "no objects there: check the prefix (it ends at a '/'), and that the upload is complete"
        elif self._labels and not taken and any(self._shards.values()):
            endings, count = max(self._shards.items(), key=lambda item: item[1])
            name, reader = _SHARDS[endings]
            why = (
                f"{count:,} {name} shards there, and no class/file.jpg: fastload.{reader} reads them; "
                "ImageFolder reads image folders"
            )
        elif self._labels and self.folders:
            return
        elif self._labels:
            why = (
                f"{self.listed:,} objects there, but no class directories: give the parent of "
                "class/file.jpg; labels in a table are for fastload.TableDataset, other objects for "
                "fastload.ObjectDataset (fastload warm --from objects)"
            )
        elif self._missing:
            some = _some(sorted(self._missing))
            why = (
                f"{len(self._missing):,} of the named objects do not exist: {some}; check the numbers in "
                "braces, and that the upload is complete"
            )
        elif not taken and self._selection is not None:
            first = f"{self.listed:,} objects there (the first is {self._example!r})"
            why = f"{first}, but none is {self._selection.wanted}"
        else:
            return
        raise NotFoundError(f"{url!r}: {why}", stage="list")


def _look_up(store: Store, keys: Keys, labels: bool, progress: Callable[[int], None]) -> Columns:
    """Look up objects by their keys, each by a request, or all in a listing.

    Raises:
        NotFoundError: there are keys without an object.
        ArgumentError: with labels, a key lies in no folder.
    """
    wanted = dict.fromkeys(keys.keys)  # in order, each once
    if labels:
        bare = next((key for key in wanted if "/" not in key), None)
        if bare is not None:
            raise ArgumentError(f"the key {bare!r} lies in no class folder: keys are 'class/name.jpg'")
    infos_by_key: dict[str, ObjectInfo] = {}
    if len(wanted) > _FEW and has_listing(store):
        infos: Iterator[ObjectInfo | None] = (info for page in store.list() for info in page)
    else:
        infos = _heads(store, wanted)
    for seen, info in enumerate(infos, 1):
        if info is not None and info.key in wanted:
            infos_by_key[info.key] = info
        if seen % 1000 == 0:
            progress(seen)
        if len(infos_by_key) == len(wanted):
            break
    if len(infos_by_key) < len(wanted):
        _refuse(store, [key for key in wanted if key not in infos_by_key], len(wanted))
    columns = Columns(labels=labels)
    columns.add([infos_by_key[key] for key in keys.keys])
    if labels:
        folders = {key.partition("/")[0] for key in wanted}
        columns.number_classes(folders | store.folders() if keys.folders and has_listing(store) else folders)
    return columns


def _required(store: Store, selection: Selection) -> Iterator[Page]:
    """Yield the required objects of a selection, in one page."""
    yield [info for info in _heads(store, selection.required) if info is not None]


def _heads(store: Store, keys: Iterable[str]) -> Iterator[ObjectInfo | None]:
    """Yield the answer to a request for each key; None where there is no object."""
    names = list(keys)
    yield from (_head(store, key) for key in names[:1])  # alone: a store that is down is asked once
    pool = ThreadPoolExecutor(store.reading.at_once(_AT_ONCE))
    try:
        yield from pool.map(lambda key: _head(store, key), names[1:])
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
    plain = posixpath.normpath(first.strip().replace("\\", "/")).lstrip("/")
    forgotten = [first + end for end in _FORGOTTEN if _head(store, first + end) is not None]
    if "://" in first and not first.startswith(root):
        why = f"they are relative to the url, and {first!r} is not below it"
    elif first.startswith(root):
        why = f"they are relative to the url: {first.removeprefix(root)!r} instead of {first!r}"
    elif plain != first and _head(store, plain) is not None:
        why = f"there is {plain!r}: write keys as the store has them, with '/' inside and none before them"
    elif forgotten:
        end = forgotten[0].removeprefix(first)
        why = (
            f"there is {forgotten[0]!r}: a key has its extension, which File('{{column}}{end}') adds to a "
            "column"
        )
    else:
        why = "check the url, to which they are relative, and that the upload is complete"
    raise NotFoundError(
        f"{store.url!r}: {len(missing):,} of {count:,} keys have no object: {_some(missing)}; {why}",
        stage="list",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_NAMED])) + (", ..." if len(names) > _NAMED else "")


class ListingProgress:
    """Called with the number of objects listed so far; silent for the first 2 s."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._show_at = time.monotonic() + _QUIET_SECONDS
        self._live: Any = None

    def __enter__(self) -> ListingProgress:
        return self

    def __call__(self, listed: int) -> None:
        self._show(f"listing {self._url}: {listed:,} objects")

    def wait(self) -> None:
        """Show that another process lists the same; called from time to time."""
        self._show(f"listing {self._url}: waiting for another process, which lists it for this one too")

    def _show(self, text: str) -> None:
        now = time.monotonic()
        if now < self._show_at:
            return
        is_terminal = getattr(sys.stderr, "isatty", None)  # what scripts put in its place may lack it
        if is_terminal is None or not is_terminal():
            _log.info(text)
            self._show_at = now + _LOG_EVERY_SECONDS
            return
        self._show_at = now + 0.1
        self._line().update(text, refresh=True)

    def _line(self) -> Any:
        if self._live is None:
            from rich.live import Live

            from fastload.metrics.watch import Console

            # No refresh thread: workers are forked right after this.
            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()
        return self._live

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
