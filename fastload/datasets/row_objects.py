"""The objects of a table's rows, numbered: row by row, in a row by its files, of a file by its list.

    row 0: clip [0, 900) of a.mp4, and 2 images ─▶ 0 | 1 2         edges 0 1 3
    row 1: clip [900, 1800), and 1 image        ─▶ 3 | 4                 4 5

Such a number is what the prefetcher reads, and the place of its object in the manifest. Edges and ranges
lie in memory that all workers share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.datasets.sample_files import File
from fastload.errors import ArgumentError
from fastload.images.rng import mix_all
from fastload.store.manifest import Manifest
from fastload.store.node import SharedFile

Numbers = NDArray[np.int64]


class FileForm(NamedTuple):
    """The form of one file of a sample: a list of objects or one, ranges of them or whole ones."""

    is_list: bool
    is_range: bool


class Place(NamedTuple):
    """Where the table names an object: the row, the file among those of a sample, the place in its list."""

    row: int
    file: int
    position: int


class RowObjects:
    """Which objects a row has, and which bytes of them. Immutable; copies and workers share it.

    Args:
        rows: their number.
        forms: of the files of a sample.
        edges: shape (rows * files + 1,), where the objects of each file of each row begin; None: one each.
        parts: shape (2, n), the starts and stops of all; 0 for whole objects. None: all are whole.
    """

    def __init__(
        self,
        rows: int,
        forms: Sequence[FileForm],
        edges: Numbers | None = None,
        parts: Numbers | None = None,
    ) -> None:
        held = [each.ravel() for each in (edges, parts) if each is not None]
        file = None
        if held:
            file = SharedFile.of("fastload-objects", np.concatenate(held).astype(np.int64).tobytes())
        self.__setstate__((rows, tuple(forms), file))

    def __setstate__(self, state: tuple[int, tuple[FileForm, ...], SharedFile | None]) -> None:
        self._state = state
        self._rows, self.forms, file = state
        self._files = len(self.forms)
        numbers = np.zeros(0, np.int64) if file is None else np.frombuffer(file.map, np.int64)
        edges = self._rows * self._files + 1 if any(form.is_list for form in self.forms) else 0
        self._edges: Numbers | None = numbers[:edges] if edges else None
        has_parts = any(form.is_range for form in self.forms)
        self._parts: Numbers | None = numbers[edges:].reshape(2, -1) if has_parts else None

    def __getstate__(self) -> Any:
        return self._state

    def __len__(self) -> int:
        return self._rows * self._files if self._edges is None else int(self._edges[-1])

    def of_row(self, row: int) -> range:
        """Return the objects of a row, in the order of the files."""
        return range(self._first(row, 0), self._first(row + 1, 0))

    def of_file(self, row: int, file: int) -> range:
        """Return the objects of one file of a row."""
        return range(self._first(row, file), self._first(row, file + 1))

    def place(self, item: int) -> Place:
        """Return where the table names an object."""
        slot = item
        if self._edges is not None:
            slot = int(np.searchsorted(self._edges, item, "right")) - 1
        row, file = divmod(slot, self._files)
        return Place(row, file, item - self._first(row, file))

    def range_of(self, item: int) -> tuple[int, int] | None:
        """Return the bytes (start, stop) of an object that are read; None: all."""
        if self._parts is None:
            return None
        start, stop = self._parts[:, item].tolist()
        return (start, stop) if stop else None

    def mix(self, numbers: NDArray[np.uint64], rows: Numbers, manifest: Manifest) -> None:
        """Mix into `numbers`, one for each row, that of its objects: key, version and range of each."""
        edges = self._edges
        firsts = rows * self._files if edges is None else edges[rows * self._files]
        stops = firsts + self._files if edges is None else edges[(rows + 1) * self._files]
        for position in range(int((stops - firsts).max(initial=0))):
            has = firsts + position < stops
            items = firsts[has] + position
            some = numbers[has]
            mix_all(some)
            some += manifest.identities(items)
            if self._parts is not None:
                for edge in self._parts[:, items]:
                    mix_all(some)
                    some += edge.view(np.uint64)
            numbers[has] = some

    def count_distinct(self, keys: Sequence[str]) -> int:
        """Return how many different reads there are of these objects, given their keys."""
        return len(set(keys) if self._parts is None else set(zip(keys, *self._parts.tolist(), strict=True)))

    def sizes(self, manifest: Manifest) -> Numbers:
        """Return the bytes that are read of each object."""
        if self._parts is None:
            return manifest.sizes
        starts, stops = self._parts
        return np.where(stops > 0, stops - starts, manifest.sizes)

    def check_ends(self, files: Sequence[File], manifest: Manifest) -> None:
        """Compare the ranges with the sizes that were listed.

        Raises:
            ArgumentError: a range ends behind its object.
        """
        if self._parts is None:
            return
        beyond = self._parts[1] > manifest.sizes
        if beyond.any():
            item = int(beyond.argmax())
            row, file, _ = self.place(item)
            start, stop = self._parts[:, item].tolist()
            raise ArgumentError(
                f"row {row:,} of the table: {files[file].range_text} is the bytes [{start:,}, {stop:,}) of "
                f"{manifest.key(item)!r}, which has {manifest.size(item):,}: make the index again, from the "
                "objects that are there now"
            )

    def _first(self, row: int, file: int) -> int:
        slot = row * self._files + file
        return slot if self._edges is None else int(self._edges[slot])

    def __fingerprint__(self) -> Any:
        _, forms, file = self._state
        return forms, b"" if file is None else bytes(file.map)

    def __deepcopy__(self, memo: dict[int, Any]) -> RowObjects:
        return self
