"""The shards of a dataset: listed, or named by an index.json; and the files and heads with their indexes."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastload.cache import Cache
from fastload.cache.listings import Listings
from fastload.errors import ArgumentError, DecodeError, NotFoundError, StoreError
from fastload.formats.pieces import HEAD, Inflater, Offsets, is_compressed, too_large
from fastload.formats.tar import parse_wids
from fastload.shards.formats import FORMATS, IndexFiles, ShardFormat, format_of_index
from fastload.shards.index import RecordOffsets, ShardIndex, digest_of
from fastload.shards.names import INDEX_FILES, Named, check_name, is_index, listed_url, resolve
from fastload.shards.reader import Shard, naming, read_in_turn
from fastload.store import Store, open_store, with_budget
from fastload.store.failures import Wait, sleep
from fastload.store.listing import ListingQuery, Selection
from fastload.store.manifest import Manifest

_log = logging.getLogger("fastload")

_READS = 64  # at once, of index files and of first bytes of shards
_PIECE = 1 << 20  # bytes of a range of a compressed shard, of which only the beginning is wanted
_TAIL = 8 << 10  # bytes behind the last sample of an index file, where the shard should be over
_MOST_HEAD = 64 << 20  # bytes of the head of a compressed shard: a few bytes may inflate to any number
T = TypeVar("T")
_GLOB = re.compile(r"[*?\[\]{}]")


class ShardList:
    """Shards in the order in which they are named; those of a prefix or a glob in the order of their keys.

    Args:
        urls: see `shards.names`.
        form: of the shards; it knows them below a prefix by their names.
        cache, listing_max_age: where listings are kept, and how old one may be.
        storage_options: for `open_store`.
        files: each of `urls` is one file, whatever its name.

    Attributes:
        store: where the shards are.
        cacheable: whether a cache may keep their records.
        counts: shard -> number of samples, of the shards for which wids' index has one.

    Raises:
        ArgumentError, NotFoundError, AccessDeniedError, StoreError.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        form: ShardFormat,
        cache: Cache | None,
        listing_max_age: float | str,
        storage_options: dict[str, Any] | None,
        *,
        files: bool = False,
    ) -> None:
        self._compressed = form.compressed
        self._listings = Listings.of(cache, listing_max_age)
        self._options = with_budget(storage_options)
        names, counts = _through_index(urls, self._options)
        named = resolve(names, form, files=files)
        self.store, self._manifest = self._find(named)
        self.cacheable = not self._manifest.why_not_cached(self.store)
        keys = [self._manifest.key(number) for number in range(len(self._manifest))]
        self._rows = [number for number, key in enumerate(keys) if not is_index(key)]
        self._indexes = {key: number for number, key in enumerate(keys) if is_index(key)}
        if not self._rows:
            raise ArgumentError(f"{named.root!r}: only index files there, and none is {form.words}")
        if named.keys:
            position = {key: number for number, key in enumerate(named.keys)}
            self._rows.sort(key=lambda row: position[keys[row]])
        prefix = f"{named.root}/"
        by_key = {name.removeprefix(prefix): count for name, count in counts.items() if count is not None}
        self.counts = {
            shard: by_key[keys[row]] for shard, row in enumerate(self._rows) if keys[row] in by_key
        }

    @property
    def kept_in(self) -> Path | None:
        """The folder in which what is known of them is kept, if it is."""
        return self._listings.directory if self.cacheable else None

    def __fingerprint__(self) -> dict[str, Any]:
        """Return the shards, whether they were listed again or not: see `datasets.fingerprint`."""
        found = {
            name: value for name, value in vars(self).items() if name not in ("_listings", "_row_numbers")
        }
        found["_options"] = {name: value for name, value in self._options.items() if name != "budget"}
        return found

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, shard: int) -> Shard:
        row = self._rows[shard]
        key = self._manifest.key(row)
        return Shard(key, self._manifest.size(row), self._manifest.version(row), self._compressed)

    @functools.cached_property
    def digest(self) -> str:
        """A text that stands for the shards and their versions."""
        return digest_of("".join(repr(self[shard][:3]) for shard in range(len(self))))

    @functools.cached_property
    def digests(self) -> tuple[str, str]:
        """Short texts: (the keys of the shards in their order; these, and their versions)."""
        return digest_of("\0".join(self[shard].key for shard in range(len(self)))), self.digest

    def identities(self, shards: NDArray[np.int64]) -> NDArray[np.uint64]:
        """See `Manifest.identities`."""
        return self._manifest.identities(self._row_numbers[shards])

    @functools.cached_property
    def _row_numbers(self) -> NDArray[np.int64]:
        return np.array(self._rows, np.int64)

    def total_bytes(self) -> int:
        """Return the bytes of all shards together."""
        return sum(self[shard].size for shard in range(len(self)))

    def weights(self) -> list[int]:
        """Return weights of whole shards: their samples if wids' index has all counts, else their bytes."""
        if len(self.counts) == len(self):
            return [self.counts[shard] for shard in range(len(self))]
        return [self[shard].size for shard in range(len(self))]

    def indexes(
        self, index: str | os.PathLike[str] | bool | None, files: IndexFiles
    ) -> dict[int, RecordOffsets]:
        """Return shard -> the records in its index file, without compressed shards and those without one.

        Args:
            index: a URL below which the index files are; None: beside the shards, if there are any; False:
                do not look.
            files: how they are read.

        Raises:
            ArgumentError: `index` names files that do not belong to these shards.
        """
        if index is False:
            return {}
        store, manifest, rows = self.store, self._manifest, self._indexes
        if index is not None and index is not True:
            store = open_store(index, **self._options)
            manifest = self._list(store, Named(os.fspath(index), Selection(INDEX_FILES)))
            rows = {manifest.key(row): row for row in range(len(manifest))}
        beside = index is None or index is True
        found = {}
        for shard in range(len(self)):
            candidates = _index_names(self[shard].key, beside)
            found[shard] = next((rows[name] for name in candidates if name in rows), -1)
        plain = self._plain([shard for shard, row in found.items() if row >= 0])
        found = {shard: found[shard] for shard in plain}
        bodies = _read_all(
            store, [(manifest.key(row), manifest.version(row), manifest.size(row)) for row in found.values()]
        )

        def offsets_or_error(shard: int, body: bytes) -> Offsets | DecodeError:
            try:
                return self.records_in(shard, body, files)
            except DecodeError as error:
                return error

        with ThreadPoolExecutor(_READS) as pool:
            outcomes = list(pool.map(offsets_or_error, found, bodies))
        indexes = {}
        for (shard, row), outcome in zip(found.items(), outcomes, strict=True):
            if isinstance(outcome, DecodeError):
                text = f"index file {manifest.key(row)!r} of shard {self[shard].key!r}: {outcome.message}"
                if index is not None:
                    raise ArgumentError(text)
                _log.warning("%s; the file is not used", text)
            else:
                indexes[shard] = RecordOffsets(outcome, {}, compressed=False)
        if index not in (None, True) and not indexes:
            raise ArgumentError(f"index={index!r} holds no index file of any of the {len(self)} shards")
        return indexes

    def records_in(self, shard: int, body: bytes, files: IndexFiles) -> Offsets:
        """Return the records that an index file has of a shard.

        Raises:
            DecodeError: it is of another shard, or of an older, shorter one.
        """
        key, size, version, _ = self[shard]
        offsets = files.parse(body, size)
        end = int(offsets[-1].sum()) if len(offsets) else 0
        if end < size and self.store.has_ranges:  # without these, the tail would cost the whole shard
            tail = self.store.read_range(key, end, min(end + _TAIL, size), version)
            if not files.is_over(memoryview(tail), size - end):
                raise DecodeError(
                    f"the index ends at byte {end:,}, and more samples follow: the shard was written again "
                    "or appended to; write its index again"
                )
        return offsets

    def heads(self, shards: Sequence[int], most: int) -> list[bytes]:
        """Return the first `most` bytes of each of these shards, by one request each."""
        objects = [(self[shard].key, self[shard].version, self[shard].size) for shard in shards]
        return _read_all(self.store, objects, most)

    def _find(self, named: Named) -> tuple[Store, Manifest]:
        """Return the objects below a prefix; if there are none, the one file of that name."""
        store = open_store(named.root, **self._options)
        try:
            return store, self._list(store, named)
        except NotFoundError:
            if named.alone is None:
                raise
            try:
                store = open_store(named.alone.root, **self._options)
                return store, self._list(store, named.alone)
            except (ArgumentError, StoreError):
                pass
            raise

    def _plain(self, shards: list[int]) -> list[int]:
        """Return the shards that are not compressed: an index file counts the bytes of the plain file."""
        if self._compressed is not None:
            return [] if self._compressed else shards
        heads = self.heads(shards, HEAD)
        return [shard for shard, head in zip(shards, heads, strict=True) if not is_compressed(head)]

    def _list(self, store: Store, named: Named) -> Manifest:
        return self._listings.open(store, ListingQuery(selection=named.selection))


def _through_index(urls: Any, options: dict[str, Any]) -> tuple[Any, dict[str, int | None]]:
    """Return the shards in wids' index, with their counts, if `urls` is such a file; else `urls`."""
    if not isinstance(urls, str | os.PathLike) or not os.fspath(urls).endswith(".json"):
        return urls, {}
    directory, _, name = os.fspath(urls).rpartition("/")
    store = open_store(directory or ".", **options)
    (body,) = _read_all(store, [(name, None, None)])
    try:
        listed = parse_wids(body)
    except DecodeError as error:
        raise ArgumentError(f"url {os.fspath(urls)!r}: {error.message}") from None
    full = {listed_url(url, directory): count for url, count in listed}
    return list(full), full


def index_name(shard: str) -> str:
    """Return the name that wds2idx gives the index of a shard: "train-000.idx" of "train-000.tar".

    A shard that is named in another way ("part-00000-of-00012") has ".idx" behind its whole name: without its
    ending it could be that of another shard.
    """
    stem, dot, ending = shard.rpartition(".")
    known = any(form.index_files is not None and ending in form.endings for form in FORMATS.values())
    return f"{stem if dot and known else shard}.idx"


def _index_names(key: str, beside: bool) -> list[str]:
    """Return the names that tools give to the index file of a shard."""
    base = key if beside else key.rpartition("/")[2]
    stem = base.rpartition(".")[0] if "." in base.rpartition("/")[2] else base
    return [f"{base}.idx", f"{stem}.idx", f"{base}.index", f"{stem}.index"]


def _read_all(
    store: Store, objects: Sequence[tuple[str, str | None, int | None]], most: int | None = None
) -> list[bytes]:
    """Return the bytes of small objects (key, version, size); with `most`, the first `most` of each."""

    def read(one: tuple[str, str | None, int | None]) -> bytes:
        key, version, size = one
        if most is None or size is None or size <= most:
            return bytes(store.read(key, version, size))
        return bytes(store.read_range(key, 0, most, version))

    with ThreadPoolExecutor(store.reading.at_once(_READS)) as pool:
        return list(pool.map(read, objects))


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
        with naming(shard.key):
            records = read_index(shards.store, shard, sleep)
            largest = int(records.offsets[:, 1].max(initial=0)) if records.compressed else 0
            if largest > most:
                raise DecodeError(too_large("a sample", largest, most))
            return records

    add = index.add_and_keep if index.kept else index.add
    with ThreadPoolExecutor(shards.store.reading.at_once(_READS)) as pool:
        for number, records in zip(missing, pool.map(read, missing), strict=True):
            add(number, records)


def read_head(store: Store, shard: Shard, size: int, wait: Wait, *, compressed: bool = False) -> memoryview:
    """Return the first bytes of a shard; inflated, where it is compressed.

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
    root: str, entries: Mapping[Any, T], form: ShardFormat, *how_listed: Any
) -> tuple[ShardList, dict[str, T]]:
    """Return the shards that an index.json lists, in its order, and their entries there by key.

    Args:
        entries: name of a file -> what index.json says of it.
        how_listed: as of `ShardList`.
    """
    if not entries:
        raise ArgumentError(f"{root!r}: index.json lists no shards")
    if _GLOB.search(root):
        raise ArgumentError(f"url {root!r} has one of * ? [ ] {{ }}: give the folder a name without these")
    urls = [f"{root}/{check_name(name, root)}" for name in entries]
    shards = ShardList(urls, form, *how_listed, files=True)
    return shards, {shards[number].key: entry for number, entry in enumerate(entries.values())}
