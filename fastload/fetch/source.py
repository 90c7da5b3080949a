"""How one sample is read: the questions of the prefetcher, and the answers where a sample is an object."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

from fastload.errors import ObjectChangedError
from fastload.fetch import limits
from fastload.fetch.limits import ReadSettings
from fastload.store import ObjectInfo, Store
from fastload.store.base import Buffer
from fastload.store.failures import Wait
from fastload.store.manifest import Manifest


class Source(Protocol):
    """Where samples come from, and how each is read. Called by several threads."""

    store: Store

    def name(self, index: int) -> str:
        """The sample in error messages."""

    def size(self, index: int) -> int:
        """Bytes that are read for the sample."""

    def cache_key(self, index: int) -> bytes:
        """The key under which the cache has it."""

    def ranges(self, index: int) -> list[tuple[int, int]]:
        """The ranges to read side by side; empty where the sample is read by one request."""

    def read(self, index: int, wait: Wait) -> Buffer:
        """The sample's bytes, by one request. `wait` as in `Store.read`."""

    def read_part(self, index: int, start: int, stop: int, wait: Wait) -> Buffer:
        """The bytes of one of its ranges."""

    def refresh(self, index: int, error: ObjectChangedError, wait: Wait) -> None:
        """Use the new version of an object from now on, or raise `error`: the listed one is gone."""


class ObjectSource:
    """A sample is an object.

    Args:
        store, manifest: what to read.
        key: (index, version or None for the listed one) -> cache key.
        on_change: what to do with an object that is no longer the listed one: "error", or "refresh", to ask
            for its new version and size and read that.
        settings: the size from which on an object is read in ranges. Default: `SETTINGS`.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        *,
        key: Callable[[int, str | None], bytes],
        on_change: str = "error",
        settings: ReadSettings | None = None,
    ) -> None:
        self.store = store
        self._manifest = manifest
        self._key = key
        self._on_change = on_change
        self._settings = settings or limits.SETTINGS
        self._fresh: dict[int, ObjectInfo] = {}  # objects that changed since they were listed

    def name(self, index: int) -> str:
        return self._manifest.key(index)

    def size(self, index: int) -> int:
        fresh = self._fresh.get(index)
        return self._manifest.size(index) if fresh is None else fresh.size

    def cache_key(self, index: int) -> bytes:
        return self._key(index, self._version(index))

    def ranges(self, index: int) -> list[tuple[int, int]]:
        size = self.size(index)
        if size < self._settings.large_object or not (self.store.native and self.store.has_ranges):
            return []
        return plan_ranges(size, self._settings.range_size)

    def read(self, index: int, wait: Wait) -> Buffer:
        return self.store.read(self.name(index), self._version(index), self.size(index), wait=wait)

    def read_part(self, index: int, start: int, stop: int, wait: Wait) -> Buffer:
        return self.store.read_range(self.name(index), start, stop, self._version(index), wait=wait)

    def refresh(self, index: int, error: ObjectChangedError, wait: Wait) -> None:
        if self._on_change != "refresh":
            raise error
        fresh = self.store.head(self.name(index), wait=wait)
        if not fresh.version:  # it could be cached under no name of its own
            raise error
        self._fresh[index] = fresh
        self._manifest.read_anew(index, fresh.version)

    def _version(self, index: int) -> str:
        fresh = self._fresh.get(index)
        return self._manifest.version(index) if fresh is None else fresh.version


def plan_ranges(size: int, piece: int) -> list[tuple[int, int]]:
    """Cover [0, size) with equal ranges [start, stop) of at most `piece` bytes, in order.

    Equal within a byte: a short last piece would leave its connection idle while the others still read. One
    range for an empty object.
    """
    count = max(1, -(-size // piece))
    edges = [size * number // count for number in range(count + 1)]
    return list(itertools.pairwise(edges))
