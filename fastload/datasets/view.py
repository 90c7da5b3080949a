"""A read-only list that makes its items when they are read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn, TypeVar, overload

T = TypeVar("T")

_CHUNK = 4096
_WHOLE, _SHOWN = 20, 3  # items of a list whose text is whole; of each end of a longer one


class View(Sequence[T]):
    """Behaves as the list of its items, but cannot be changed; slices of it and sums with it are lists.

    Args:
        count: how many items there are.
        items: (start, stop) -> the list of these items.
        instead: advice for the error of those that try to change it.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, count: int, items: Callable[[int, int], list[T]], instead: str) -> None:
        self._count, self._items, self._instead = count, items, instead

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        places = range(self._count)[index]  # an IndexError of it is a list's, but for one word
        if isinstance(places, int):
            return self._items(places, places + 1)[0]
        if places.step == 1:
            return self._items(places.start, max(places.start, places.stop))
        return [self[place] for place in places]

    def __iter__(self) -> Iterator[T]:
        for start in range(0, self._count, _CHUNK):  # one by one takes ten times as long
            yield from self._items(start, min(start + _CHUNK, self._count))

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise TypeError(f"this list is made from the listing, and cannot be changed: {self._instead}")

    def __delitem__(self, index: object) -> NoReturn:
        self[index] = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, View | list):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self, *other] if isinstance(other, View | list) else NotImplemented

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        """Return the list's text, cut where it is long: of a million items it would be 40 MB."""
        if self._count <= _WHOLE:
            return repr(list(self))
        begin, end = (repr(self[part])[1:-1] for part in (slice(_SHOWN), slice(self._count - _SHOWN, None)))
        return f"[{begin}, ..., {end}] ({self._count:,} items)"
