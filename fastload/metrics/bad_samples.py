"""The samples that `on_error` skipped or replaced, and the warning where they are many."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from fastload.errors import address
from fastload.printable import warn

__all__ = ["FEW", "BadSamples"]

FEW = 5  # of an epoch; more of them are seldom damage
_KEPT = 1000


class BadSamples:
    """The last samples of a loader that could not be read or decoded, and that `on_error` covered.

    The first epoch that has more than a few of them is warned of: a transform or `decode` that fails for a
    part of the data would else train on the rest without a word.

    Attributes:
        last: (key, error) of the last ones.
    """

    def __init__(self) -> None:
        self.last: deque[tuple[str, str]] = deque(maxlen=_KEPT)
        self._of_epoch = 0
        self._warned = False

    def start_epoch(self) -> None:
        self._of_epoch = 0

    def extend(self, found: Iterable[tuple[str, str]]) -> None:
        """Keep (key, error) of more of them."""
        for one in found:
            self.last.append(one)
            self._of_epoch += 1
        if self._of_epoch > FEW and not self._warned:
            self._warned = True
            key, error = self.last[-1]
            first_line = error.partition("\n")[0]
            warn(
                f"fastload skipped or replaced {self._of_epoch:,} samples of this epoch so far, and goes on. "
                f"The last one is {key}: {first_line}. See {address('bad-samples')}",
                stacklevel=2,
            )
