"""The listings that a cache keeps: made once for each job, and again by the next one.

    Listings.open ─▶ this job's listing ─▶ or a kept one that is young enough ─▶ or a new one, then kept

A record beside the listings, `<name>.listings`, says when each was made and which jobs use it. Of each name
a few are kept, each under a digest of what it holds, so that a state of an older one can be compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastload.cache.cache import Cache
from fastload.errors import ArgumentError, CacheError, FastloadError, StoreError, address, user_level
from fastload.store.base import Store
from fastload.store.listing import EVERYTHING, ListingProgress, ListingQuery, list_objects
from fastload.store.manifest import Manifest
from fastload.store.node import open_kept, open_lock, save_kept

if TYPE_CHECKING:
    from fastload.distributed.launcher import Job


_log = logging.getLogger("fastload")

_KEPT = 4  # listings of one name
_JOBS = 16  # whose listing is remembered
_POLL_SECONDS = 0.05
_CHANGING_SECONDS = 10.0

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)\s*", re.IGNORECASE | re.ASCII)


class Listings:
    """What a dataset lists, and where that is kept.

    Attributes:
        directory: the folder in which listings are kept, or None.

    Args:
        directory: where listings are kept; None: nowhere.
        max_age: how old a kept listing may be that is used in place of a new one: seconds, or text such as
            "12h". 0: every job lists again.

    Raises:
        ArgumentError: `max_age` is neither.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, max_age: float | str = 0) -> None:
        self._max_age = parse_duration(max_age, "listing_max_age")
        self.directory = None if directory is None else Path(directory)

    @classmethod
    def of(cls, cache: Cache | None, max_age: float | str) -> Listings:
        """Return those of a dataset with this cache."""
        parse_duration(max_age, "listing_max_age")  # before a warning about the folder
        return cls(None if cache is None else cache._manifests, max_age)

    def __fingerprint__(self) -> tuple[()]:
        """Return nothing: no sample depends on where a listing comes from: see `datasets.fingerprint`."""
        return ()

    def open(self, store: Store, query: ListingQuery = EVERYTHING) -> Manifest:
        """Return the objects of a store: those that this job has listed, a kept listing, or a new one.

        A listing that cannot tell an old object from a new one, or its place from another, is not kept, and
        a warning says so. After 2 s a listing shows its progress on stderr, or logs it.

        Args:
            store: what to list.
            query: which objects of it.

        Raises:
            ArgumentError, NotFoundError, AccessDeniedError, StoreError: within 10 s if the store does not
                answer, refuses access, there is nothing to read, or its folders are not the classes wanted;
                or if another node of the job has listed other objects.
        """

        from fastload.distributed.launcher import find_job  # imports torch, which a pull does without

        def usable(manifest: Manifest) -> bool:
            try:
                query.check_classes(store.url, manifest)
            except FastloadError:  # of an older listing; the store of today decides
                return False
            return True

        with ListingProgress(store.url) as progress:
            if self.directory is None or store.unidentified:
                manifest = list_objects(store, query, progress)
                _may_keep(manifest, store)
                return manifest
            name = f"{blake2b(store.identity.encode(), digest_size=16).hexdigest()}-{query.name()}"
            shelf = _Shelf(self.directory, name, store)
            job = find_job()
            if job is None and not self._max_age:
                return shelf.keep(list_objects(store, query, progress), None)
            with shelf.listing_alone(progress):
                kept = shelf.find(job, self._max_age, usable)
                manifest = shelf.keep(list_objects(store, query, progress), job) if kept is None else kept
        if job is not None:
            digest = _digest(manifest)
            if job.first(f"listing/{name}", digest) != digest:
                raise StoreError(
                    f"{store.url!r}: another node of this job has listed other objects than this one: they "
                    "changed meanwhile, or only one of the nodes uses a kept listing (listing_max_age=); "
                    "start the job again",
                    stage="list",
                )
        return manifest

    def holding(self, keys: str, versions: str) -> Manifest | None:
        """Return the kept listing with these `Manifest.digests`, of any age."""
        if self.directory is None:
            return None
        path = next(self.directory.glob(f"*.{keys}{versions}.manifest"), None)
        return None if path is None else Manifest.load(path)


def latest(directory: Path) -> list[Manifest]:
    """Return the newest kept listing of each name."""
    manifests = []
    for record in sorted(directory.glob("*.listings")):
        kept = _read(record)["listings"]
        path = directory / f"{record.stem}.{kept[-1]['digest']}.manifest" if kept else None
        manifest = None if path is None else Manifest.load(path)
        manifests += [] if manifest is None else [manifest]
    return manifests


class _Shelf:
    """The kept listings of one name, which stands for a store and what was taken of it.

    Args:
        directory: the folder of all names.
    """

    def __init__(self, directory: Path, name: str, store: Store) -> None:
        self._directory, self._name, self._store = directory, name, store
        self._record = directory / f"{name}.listings"

    def find(self, job: Job | None, max_age: float, usable: Callable[[Manifest], bool]) -> Manifest | None:
        """Return the listing of this job, or the newest one if it is young enough; noted as the job's."""
        manifest = None
        try:
            with self._changing() as record:
                manifest = self._find(record, job, max_age, usable)
        except OSError as error:  # it could not be noted: other ranks find it in the same way
            self._warn(error)
        return manifest

    def _find(
        self, record: dict[str, Any], job: Job | None, max_age: float, usable: Callable[[Manifest], bool]
    ) -> Manifest | None:
        now = time.time()
        of_job = next((entry for entry in reversed(record["jobs"]) if job and _is_of(job, entry)), None)
        newest = record["listings"][-1] if record["listings"] else None
        if of_job is not None:
            digest, why = of_job["listing"], "this job has made it"
        elif newest is not None and 0 <= now - newest["at"] <= max_age:
            digest, why = newest["digest"], f"listing_max_age={max_age:g} s"
        else:
            return None
        manifest = Manifest.load(self._path(digest), self._store.identity)
        if manifest is None or not usable(manifest):
            return None
        if job is not None:
            _note(record, job, digest)
        _log.info("%s: the listing of %s is used: %s", self._store.url, manifest.listed_at, why)
        return manifest

    def keep(self, manifest: Manifest, job: Job | None) -> Manifest:
        """Keep a new listing as that of a job, and remove the oldest; the listing itself."""
        if not _may_keep(manifest, self._store):
            return manifest
        try:
            digest = _digest(manifest)
            with self._changing() as record:
                manifest.save(self._path(digest))
                others = [listing for listing in record["listings"] if listing["digest"] != digest]
                record["listings"] = [*others, {"digest": digest, "at": time.time()}][-_KEPT:]
                if job is not None:
                    _note(record, job, digest)
                kept = {self._path(listing["digest"]) for listing in record["listings"]}
                for path in self._directory.glob(f"{self._name}.*.manifest"):
                    if path not in kept:
                        path.unlink(missing_ok=True)
        except OSError as error:
            self._warn(error)
        return manifest

    def _warn(self, error: OSError) -> None:
        warnings.warn(
            f"the listing cannot be kept in {str(self._directory)!r}: {error}", stacklevel=user_level()
        )

    @contextlib.contextmanager
    def listing_alone(self, progress: ListingProgress) -> Iterator[None]:
        """Wait while another process lists this; then no other one does. Ctrl-C ends the wait.

        Where the file system has no locks, or the folder is another's, nobody waits.
        """
        lock = self._lock(f"{self._name}.lock")
        try:
            _take(lock, math.inf, progress.wait)
            yield
        finally:
            if lock is not None:
                os.close(lock)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """Open the record; it is written if the block has changed it."""
        lock = self._lock("listings.lock")
        try:
            # Another process has it while it writes a small file; unless it was stopped just then.
            _take(lock, _CHANGING_SECONDS)
            record = _read(self._record)
            before = json.dumps(record)
            yield record
            after = json.dumps(record)
            if after != before:
                save_kept(self._record, after.encode())
        finally:
            if lock is not None:
                os.close(lock)

    def _lock(self, name: str) -> int | None:
        try:
            return open_lock(self._directory / name)
        except OSError:
            return None

    def _path(self, digest: str) -> Path:
        return self._directory / f"{self._name}.{digest}.manifest"


def _take(lock: int | None, seconds: float, wait: Callable[[], None] = lambda: None) -> None:
    """Wait for a lock, at most so long; not at all where the file system has none. Calls `wait` meanwhile."""
    deadline = time.monotonic() + seconds
    while lock is not None and time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            wait()
            time.sleep(_POLL_SECONDS)
        except OSError:
            return


def _is_of(job: Job, entry: dict[str, Any]) -> bool:
    """Return whether an entry of a record is of this rank's job, and not of an earlier one so named.

    Each rank of a job is one process, and the ranks live at the same time, unless all were started again.
    """
    from fastload.distributed.launcher import is_alive

    if entry["word"] != job.word:
        return False
    if job.restarts > entry["restarts"]:
        return True
    return entry["ranks"].get(str(job.rank), job.process) == job.process and any(
        map(is_alive, entry["ranks"].values())
    )


def _note(record: dict[str, Any], job: Job, digest: str) -> None:
    """Note that this rank uses a listing."""
    entries = record["jobs"]
    entry = next((known for known in entries if known["listing"] == digest and _is_of(job, known)), None)
    if entry is None:
        entry = {"word": job.word, "restarts": job.restarts, "listing": digest, "ranks": {}}
        record["jobs"] = [*entries, entry][-_JOBS:]
    if job.restarts > entry["restarts"]:
        entry |= {"restarts": job.restarts, "ranks": {}}
    entry["ranks"][str(job.rank)] = job.process


def _read(path: Path) -> dict[str, Any]:
    """Return a record; an empty one if there is none, or if it is damaged or another's."""
    empty: dict[str, Any] = {"listings": [], "jobs": []}
    try:
        with os.fdopen(open_kept(path), "rb") as file:
            record = json.loads(file.read())
        shape = all(type(entry["digest"]) is str and entry["at"] >= 0 for entry in record["listings"])
        shape &= all({"word", "restarts", "listing", "ranks"} <= entry.keys() for entry in record["jobs"])
        return record if shape else empty
    except CacheError as error:
        _log.warning(
            "the record of kept listings is not used, and the url is listed again: %s", error.message
        )
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        _log.warning(
            "the record of kept listings %s is damaged, and the url is listed again: %s", path, error
        )
    return empty


def _may_keep(manifest: Manifest, store: Store) -> bool:
    """Return whether changes of its objects can be told; a warning says why not."""
    why = manifest.why_not_cached(store)
    if why:
        warnings.warn(f"{store.url!r}: {why}. See {address('nothing-is-cached')}", stacklevel=user_level())
    return not why


def _digest(manifest: Manifest) -> str:
    return "".join(manifest.digests)


def parse_duration(value: float | str, name: str) -> float:
    """Return seconds, from a number or text such as "30m", "12h" or "7d"; text without a unit is seconds."""
    seconds = math.nan
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        seconds = float(match[1]) * _SECONDS[match[2].lower() or "s"] if match else math.nan
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise ArgumentError(f'{name}={value!r}; give seconds, or text such as "30m", "12h" or "7d"')
    return seconds
