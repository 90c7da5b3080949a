"""A prefix, listed: takes the pages of a store, puts the objects in order, writes a manifest's bytes.

    header | table | key offsets | sizes | labels | version offsets | keys | versions | facts (JSON)

All numbers are little-endian; sections begin at multiples of 8. Keys and versions are UTF-8, one after the
other, and their offsets are uint64 of count + 1. Labels may be of length 0. The header holds a checksum
(xxh3, 64 bits) of all that follows.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from fastload.errors import NotFoundError
from fastload.store.base import ObjectInfo, Page, Store
from fastload.store.local import LocalStore

_log = logging.getLogger("fastload")

MAGIC = b"fastload"
FORMAT = 2  # 2: classes are all folders, also those without images
SECTIONS = ("key_offsets", "sizes", "labels", "version_offsets", "keys", "versions", "facts")
# magic, format, size of both headers, checksum of all that follows
HEADER = struct.Struct("<8sIIQ")
# count, then offset and length of each section
TABLE = struct.Struct("<Q" + "QQ" * len(SECTIONS))

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
_HEADS = 32  # at once
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


def write_listing(
    store: Store,
    descriptor: int,
    *,
    images_only: bool,
    labels: bool,
    selection: Selection | None,
    progress: Callable[[int], None],
) -> None:
    """List `store` and write the manifest's bytes to an empty file.

    Args:
        store: the store to list.
        descriptor: the file, open for writing.
        images_only: leave out keys without an image extension.
        labels: torchvision's ImageFolder: a class is a folder directly below the URL, with images or without,
            only images count, ordered by class, then directory, then file name. Else the order is that of the
            keys.
        selection: the objects to take; None: all.
        progress: called with the number of objects listed so far, after every page.

    Raises:
        NotFoundError: nothing to read below the URL.
        StoreError: the listing failed.
    """
    chosen = _Filter(images_only=images_only or labels, labels=labels, selection=selection)
    columns = Columns(labels=labels)
    for page in _heads(store, selection.required) if selection and selection.heads else store.list():
        columns.add(chosen.select(page, len(columns.sizes)))
        progress(chosen.listed)
    if labels:
        chosen.folders.update(store.folders())
    chosen.check(store.url, len(columns.sizes), local=isinstance(store, LocalStore))
    columns.number_classes(chosen.folders)
    columns.arrange()
    write_manifest(descriptor, columns, store)


def has_listing(store: Store) -> bool:
    """Whether it can list its objects, which an http server cannot."""
    return not store.url.lower().startswith(("http://", "https://"))


class _Filter:
    """Selects objects from the pages of a listing, and explains a listing without any."""

    def __init__(self, *, images_only: bool, labels: bool, selection: Selection | None) -> None:
        self.listed = 0
        self.folders: set[str] = set()  # directly below the URL, with images or without
        self._images_only, self._labels, self._selection = images_only, labels, selection
        self._pattern = None if selection is None else re.compile(selection.pattern, re.DOTALL)
        self._required = frozenset(() if selection is None else selection.required)
        self._missing = set(self._required)
        self._example = ""  # the first key listed
        self._shards = dict.fromkeys(_SHARDS, 0)

    def select(self, page: Page, taken: int) -> Page:
        """The selected objects of a page. `taken`: the number of objects selected before."""
        self.listed += len(page)
        self._example = self._example or next((info.key for info in page), "")
        if self._labels:
            if not taken:  # once there is an image, it is an image folder
                for endings in _SHARDS:
                    self._shards[endings] += sum(info.key.lower().endswith(endings) for info in page)
            page = [info for info in page if "/" in info.key]
            self.folders.update(info.key.partition("/")[0] for info in page)
        if self._pattern is not None:
            wanted, match = self._required, self._pattern.fullmatch
            page = [info for info in page if info.key in wanted or match(info.key)]
            self._missing.difference_update(info.key for info in page)
        if self._images_only:
            page = [info for info in page if info.key.lower().endswith(IMAGE_EXTENSIONS)]
        return page

    def check(self, url: str, taken: int, *, local: bool = False) -> None:
        """Raise `NotFoundError` where there is nothing to read. `taken`: the number of objects selected."""
        known = ", ".join(IMAGE_EXTENSIONS)
        if not self.listed and not self.folders and local:
            why = "this directory holds no files: check the path"
        elif not self.listed and not self.folders:
            why = "no objects there: check the prefix (it ends at a '/'), and that the upload is complete"
        elif self._labels and not taken and any(self._shards.values()):
            endings, count = max(self._shards.items(), key=lambda item: item[1])
            kind, reader = _SHARDS[endings]
            why = (
                f"{count:,} {kind} shards there, and no class/file.jpg: fastload.{reader} reads them; "
                "ImageFolder reads image folders"
            )
        elif self._labels and self.folders:
            return
        elif self._labels:
            why = (
                f"{self.listed:,} objects there, but no class directories: give the parent of "
                "class/file.jpg; labels in a table are for fastload.TableDataset, other objects for "
                "fastload.ObjectDataset (fastload warm --objects)"
            )
        elif self._missing:
            some = sorted(self._missing)
            names = ", ".join(map(repr, some[:10])) + (", ..." if len(some) > 10 else "")
            why = f"{len(some):,} of the named objects do not exist: {names}"
        elif not taken and self._selection is not None:
            first = f"{self.listed:,} objects there (the first is {self._example!r})"
            why = f"{first}, but none is {self._selection.wanted}"
        elif not taken:
            why = f"{self.listed:,} objects there, but none is an image. Supported extensions: {known}"
        else:
            return
        raise NotFoundError(f"{url!r}: {why}", stage="list")


class Columns:
    """Listed objects as flat arrays, which take the memory of the names and numbers alone."""

    def __init__(self, *, labels: bool) -> None:
        self.keys, self.versions = bytearray(), bytearray()
        self.key_lengths, self.version_lengths = array("Q"), array("Q")
        self.sizes, self.labels = array("q"), array("q")
        self.classes: list[str] = []  # in order of appearance, until arranged
        self.labelled = labels
        self._class_of: dict[str, int] = {}
        self._ordered, self._last = True, b""

    def add(self, page: Page) -> None:
        """Append the objects of a page."""
        keys = [info.key.encode("utf-8", "surrogateescape") for info in page]
        versions = [info.version.encode() for info in page]
        self.keys += b"".join(keys)
        self.versions += b"".join(versions)
        self.key_lengths.extend(map(len, keys))
        self.version_lengths.extend(map(len, versions))
        self.sizes.extend(info.size for info in page)
        if self.labelled:
            self.labels.extend(self._label(info.key) for info in page)
        for rank in map(self._rank, keys):
            self._ordered = self._ordered and self._last <= rank
            self._last = rank

    def number_classes(self, folders: set[str]) -> None:
        """Number the classes, which are these folders, by name."""
        names = sorted(folders)
        if names != self.classes:
            position = {name: index for index, name in enumerate(names)}
            renumber = np.array([position[name] for name in self.classes], dtype=np.int64)
            self.labels = array("q", renumber[np.frombuffer(self.labels, dtype=np.int64)].tobytes())
            self.classes = names

    def arrange(self) -> None:
        """Put the rows in order unless they came so."""
        if self._ordered:
            return
        keys = _split(self.keys, self.key_lengths)
        ranks = [self._rank(key) for key in keys]
        order = sorted(range(len(keys)), key=ranks.__getitem__)
        del ranks
        versions = _split(self.versions, self.version_lengths)
        self.keys = bytearray().join(keys[i] for i in order)
        self.versions = bytearray().join(versions[i] for i in order)
        for name in ("key_lengths", "version_lengths", "sizes", *(["labels"] if self.labelled else [])):
            old = getattr(self, name)
            setattr(self, name, array(old.typecode, (old[i] for i in order)))

    def _label(self, key: str) -> int:
        name = key.partition("/")[0]
        label = self._class_of.setdefault(name, len(self.classes))
        if label == len(self.classes):
            self.classes.append(name)
        return label

    def _rank(self, key: bytes) -> bytes:
        """The sort key of a row. UTF-8 sorts as the strings do; 0 comes before every character."""
        if not self.labelled:
            return key
        directory, _, name = key.rpartition(b"/")
        return b"\0".join((key.partition(b"/")[0], directory, name))


def _heads(store: Store, keys: tuple[str, ...]) -> Iterator[Page]:
    def head(key: str) -> ObjectInfo | None:
        try:
            return store.head(key)
        except NotFoundError:
            return None

    with ThreadPoolExecutor(_HEADS) as pool:
        yield [info for info in pool.map(head, keys) if info is not None]


def _split(joined: bytearray, lengths: array[int]) -> list[bytes]:
    stops = list(accumulate(lengths, initial=0))
    return [bytes(joined[start:stop]) for start, stop in pairwise(stops)]


def write_manifest(descriptor: int, columns: Columns, store: Store) -> None:
    """Write the manifest's bytes of these objects of `store` to an empty file, open for writing."""
    facts = {
        "identity": store.identity,
        "classes": columns.classes if columns.labelled else None,
        "listed_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    parts: dict[str, Any] = {
        "key_offsets": _offsets(columns.key_lengths),
        "sizes": columns.sizes,
        "labels": columns.labels,
        "version_offsets": _offsets(columns.version_lengths),
        "keys": columns.keys,
        "versions": columns.versions,
        "facts": json.dumps(facts).encode(),
    }
    pieces: list[memoryview] = []
    table: list[int] = []
    position = HEADER.size + TABLE.size
    for name in SECTIONS:
        data = memoryview(parts[name]).cast("B")
        padding = bytes(-data.nbytes % 8)
        table += [position, data.nbytes]
        pieces += [data, memoryview(padding)]
        position += data.nbytes + len(padding)
    pieces.insert(0, memoryview(TABLE.pack(len(columns.sizes), *table)))
    checksum = xxhash.xxh3_64()
    for piece in pieces:
        checksum.update(piece)
    header = HEADER.pack(MAGIC, FORMAT, HEADER.size + TABLE.size, checksum.intdigest())
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(header)
        file.writelines(pieces)


def _offsets(lengths: array[int]) -> npt.NDArray[np.uint64]:
    offsets = np.zeros(len(lengths) + 1, dtype=np.uint64)
    np.cumsum(np.frombuffer(lengths, dtype=np.uint64), out=offsets[1:])
    return offsets


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
        """Called from time to time while another process lists the same."""
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

            from fastload.metrics.console import Console

            # No refresh thread: workers are forked right after this.
            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()
        return self._live

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
