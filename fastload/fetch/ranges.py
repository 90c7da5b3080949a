"""Ranges of objects as samples. Neighbours are read by one request.

a.bin  [0, 64K) [64K, 128K) [130K, 194K)   ...   [9M, 9M + 64K)
       └───────── one request ─────────┘         another one
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload.fetch.reads import ObjectSource
from fastload.store import Store
from fastload.store.base import Buffer
from fastload.store.failures import Wait
from fastload.store.manifest import Manifest

# Bytes between two ranges that are read and dropped, so that both come by one request.
_GAP = 16 << 10
# Bytes of one request for several samples. Longer ones would only hold back the first of them: what is
# transferred side by side is faster.
_GROUP = 1 << 20
_MARK = " @ "  # in the name of a record, between its object and its offset


def record_name(key: str, offset: int | None) -> str:
    """Return the name of a record that lies in an object from `offset` on; None: it is the whole object."""
    return key if offset is None else f"{key}{_MARK}{offset}"


def split_name(name: str) -> tuple[str, int | None]:
    """Return (key, offset) of what `record_name` gave; the key alone, where it is not of that form."""
    key, mark, offset = name.rpartition(_MARK)
    return (key, int(offset)) if mark and offset.isdecimal() else (name, None)


class RangeSource(ObjectSource):
    """A sample is an object, or a range of one.

    Args:
        store, manifest, key: as of `ObjectSource`.
        range_of: index -> (start, stop), or None for a whole object.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        *,
        key: Callable[[int, str | None], bytes],
        range_of: Callable[[int], tuple[int, int] | None],
    ) -> None:
        super().__init__(store, manifest, key=key)
        self._range_of = range_of

    def size(self, index: int) -> int:
        part = self._range_of(index)
        return super().size(index) if part is None else part[1] - part[0]

    def read(self, index: int, wait: Wait) -> Buffer:
        part = self._range_of(index)
        return super().read(index, wait) if part is None else self._read(index, *part, wait)

    def read_part(self, index: int, start: int, stop: int, wait: Wait) -> Buffer:
        part = self._range_of(index)
        first = 0 if part is None else part[0]
        return self._read(index, first + start, first + stop, wait)

    def groups(self, indices: list[int]) -> list[list[int]]:
        """Return the samples in groups of ranges that lie together in their object."""
        groups = [[index] for index in indices if self._range_of(index) is None]
        parts = [(self.name(index), *part, index) for index in indices if (part := self._range_of(index))]
        key, first, last = "", 0, -1  # of the group that is being made
        for name, start, stop, index in sorted(parts):
            end = max(last, stop)
            if last >= 0 and name == key and start - last <= _GAP and end - first <= _GROUP:
                groups[-1].append(index)
                last = end
            else:
                groups.append([index])
                key, first, last = name, start, stop
        place = {index: number for number, index in enumerate(indices)}
        for group in groups:
            group.sort(key=place.__getitem__)
        return sorted(groups, key=lambda group: place[group[0]])

    def read_group(self, indices: list[int], wait: Wait) -> list[Buffer]:
        parts: list[Any] = [self._range_of(index) for index in indices]
        first, last = min(start for start, _ in parts), max(stop for _, stop in parts)
        body = memoryview(self._read(indices[0], first, last, wait)).toreadonly()
        return [body[start - first : stop - first] for start, stop in parts]

    def _read(self, index: int, start: int, stop: int, wait: Wait) -> Buffer:
        return self.store.read_range(self.name(index), start, stop, self._version(index), wait=wait)
