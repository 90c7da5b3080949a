"""A list whose items are made when they are asked for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeVar, overload

__all__ = ["View"]

T = TypeVar("T")


class View(Sequence[T]):
    """Answers as the list of its items would, and cannot be changed; slices of it and sums with it are lists.

    Args:
        count: how many items there are.
        item: the item at a position from 0 on.
        instead: what to do instead of changing it.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, count: int, item: Callable[[int], T], instead: str) -> None:
        self._count, self._item, self._instead = count, item, instead

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        places = range(self._count)[index]  # an IndexError of it is a list's, but for one word
        return [self._item(place) for place in places] if isinstance(places, range) else self._item(places)

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
        return repr(list(self))
