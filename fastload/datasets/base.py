"""The base of all datasets of a store: attributes that may be set again, and the check of functions."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.utils.data import Dataset

from fastload.errors import ArgumentError, refuse_class

__all__ = ["StoreDataset", "check_function"]


class StoreDataset(Dataset[Any]):
    """A dataset whose transforms may be set at any time. Reads and cache keys depend on its other arguments.

    Attributes:
        settled: attributes that are set once, by the constructor.
        computed: attributes that are never set -> what to do instead.
    """

    settled: ClassVar[frozenset[str]] = frozenset({"url", "decode", "cache", "on_change"})
    computed: ClassVar[dict[str, str]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.computed:
            raise ArgumentError(f"{name} of {type(self).__name__} cannot be set: {self.computed[name]}")
        if name in self.settled and name in self.__dict__:
            raise ArgumentError(
                f"{name} of {type(self).__name__} cannot be set again: reads and cache keys depend on it. "
                f"To change it, make a new dataset with {name}="
            )
        super().__setattr__(name, value)


def check_function(name: str, value: Any) -> None:
    """An argument that is a function or None.

    Raises:
        ArgumentError: it cannot be called, or is a class where one of its instances is meant.
    """
    refuse_class(name, value)
    if value is not None and not callable(value):
        raise ArgumentError(f"{name} must be callable or None, found {value!r}")
