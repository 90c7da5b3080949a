"""What a long listing shows: one line on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any

__all__ = ["ListingProgress"]

_QUIET_SECONDS = 2.0
_LOG_EVERY_SECONDS = 30.0
_log = logging.getLogger("fastload")


class ListingProgress:
    """Called with the number of objects listed so far; silent for the first 2 s."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._show_at = time.monotonic() + _QUIET_SECONDS
        self._live: Any = None

    def __enter__(self) -> ListingProgress:
        return self

    def __call__(self, listed: int) -> None:
        self._show(f"listing {self._url}: {listed:,} objects")

    def wait(self) -> None:
        """Called from time to time while another process lists the same."""
        self._show(f"listing {self._url}: waiting for another process, which lists it for this one too")

    def _show(self, text: str) -> None:
        now = time.monotonic()
        if now < self._show_at:
            return
        is_terminal = getattr(sys.stderr, "isatty", None)  # what scripts put in its place may lack it
        if is_terminal is None or not is_terminal():
            _log.info(text)
            self._show_at = now + _LOG_EVERY_SECONDS
            return
        self._show_at = now + 0.1
        self._line().update(text, refresh=True)

    def _line(self) -> Any:
        if self._live is None:
            from rich.live import Live

            from fastload.metrics.console import Console

            # No refresh thread: workers are forked right after this.
            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()
        return self._live

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
