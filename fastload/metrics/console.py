"""The console of commands and views: it shows text as it is, and no character of it has an effect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment
from rich.text import Text

from fastload.printable import printable


class Console(rich.console.Console):
    """Rich's console, for text that others may have chosen: keys, names of shards, a state's notes.

    A character that is not printable appears as its escape, in tables and progress bars too, so a text is one
    line. Markup is understood only where `markup=True` says so, emoji codes never.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text of `text`: all that is printed as a str, and the cells and titles of tables."""
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render anything, and of a `Text` only what is printable: a progress bar makes its own."""
        if isinstance(renderable, Text):
            shown = printable(renderable.plain, keep="\n")
            if shown != renderable.plain:
                renderable = Text(shown, renderable.style, end=renderable.end)  # without styles of its parts
        return super().render(renderable, options)
