"""The order of reads: one queue ("line") for each iteration, and one budget of bytes for all of them.

    training     [17][18][19] ...    its reads hold all of the budget, and it is paused
    validation   [301][302] ...      waits for 301: its line comes first, and has its own share of the budget

With a single queue, the reads announced by a paused iteration would block those of the other iteration, whose
samples would then be read one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from fastload.fetch.read import Part, Read

__all__ = ["Line", "Lines"]


class Line:
    """The parts that one reader announced and that are not begun, and the bytes of those that are."""

    def __init__(self) -> None:
        self.parts: deque[Part] = deque()
        self.held = 0


class Lines:
    """The lines of a window. Its lock is held by whoever calls this.

    Attributes:
        held: the bytes of all reads that were begun and not taken.
    """

    def __init__(self) -> None:
        self.held = 0
        self._lines: dict[object, Line] = {}
        self._order: list[Line] = []  # who waited last comes first

    def __len__(self) -> int:
        return sum(len(line.parts) for line in self._order)

    def clear(self) -> None:
        for line in self._order:
            line.parts.clear()

    def add(self, parts: Iterable[Part], reader: object) -> None:
        """Put parts of new reads at the end of a reader's line."""
        line = self._lines.get(reader)
        for part in parts:
            if line is None:
                line = self._lines[reader] = Line()
                self._order.append(line)
            part.read.line = line
            line.parts.append(part)

    def again(self, part: Part, *, first: bool = False) -> None:
        """Put back a part of a read that was begun: at the end of its line, or before all others."""
        line = self._line(part.read)
        if first:
            line.parts.appendleft(part)
            self._put_first(line)
        else:
            line.parts.append(part)
            if line not in self._order:  # reads without a byte hold no place in it
                self._order.append(line)

    def advance(self, read: Read) -> bool:
        """Let the parts of a read be next, and after them what else is in its line. False: it has none."""
        if read.line is None:
            return False
        line = self._line(read)
        parts = [part for part in line.parts if part.read is read]
        if parts:
            others = [part for part in line.parts if part.read is not read]
            line.parts = deque(parts + others)
            self._put_first(line)
        return bool(parts)

    def is_next(self, read: Read) -> bool:
        """Whether its parts stand before all others."""
        return bool(self._order and (parts := self._order[0].parts)) and parts[0].read is read

    def hold(self, read: Read) -> None:
        """It was begun: its bytes count."""
        self.held += read.size
        self._line(read).held += read.size

    def let_go(self, read: Read) -> None:
        self.held -= read.size
        self._line(read).held -= read.size

    def startable(self, most_bytes: int) -> Line | None:
        """The line whose first part may be read now; None where all have to wait for bytes to be taken."""
        for line in list(self._order):
            parts = line.parts
            while parts and _is_over(parts[0].read):
                parts.popleft()
            if parts and self._may_start(line, parts[0].read, most_bytes):
                return line
            if not parts and not line.held:
                self._order.remove(line)
                self._lines = {reader: other for reader, other in self._lines.items() if other is not line}
        return None

    def _may_start(self, line: Line, read: Read, most_bytes: int) -> bool:
        # A read that is waited for ignores the budget: the reads that hold it may be taken only after it.
        if read.started or read.awaited or self.held == 0 or self.held + read.size <= most_bytes:
            return True
        # Another iteration may hold the budget and never take its reads, so each line has its own share.
        alone = len(self._order) == 1
        return not alone and (line.held == 0 or line.held + read.size <= most_bytes // len(self._order))

    def _line(self, read: Read) -> Line:
        line = read.line
        assert isinstance(line, Line)
        return line

    def _put_first(self, line: Line) -> None:
        if line in self._order:
            self._order.remove(line)
        self._order.insert(0, line)


def _is_over(read: Read) -> bool:
    """It failed in another part, or was cancelled before it was begun."""
    return read.done or (read.wanted <= 0 and not read.started)
