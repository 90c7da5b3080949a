"""A cache directory as one process uses it: opened at first use, and passed by where it fails."""

from __future__ import annotations

import lmdb

from fastload.cache.directory import DAMAGED, Directory
from fastload.cache.registry import abandon, acquire, release
from fastload.errors import CacheError, address
from fastload.metrics.counters import Counters
from fastload.printable import warn
from fastload.store.process import speaks

__all__ = ["Access"]

_FLUSH_SECONDS = 60.0


class Access:
    """The access of one process to one cache directory. Threads may share it.

    Args:
        path: of the cache.

    Attributes:
        counters: the counters "cache.*" of this process.
    """

    def __init__(self, path: str) -> None:
        self.counters = Counters()
        self._path = path
        self._directory: Directory | None = None
        self._tried = False
        self._warned = False
        self._writer_failed = False
        self._disk_full = False

    def __del__(self) -> None:
        abandon(self._directory, self)

    def open(self) -> Directory | None:
        """The directory; None where it cannot be used, which is reported once."""
        if not self._tried:
            try:
                self._directory = acquire(self._path, self)
            except (OSError, lmdb.Error) as error:
                # All workers of a loader find the same: one of them says it.
                self._warned |= not speaks()
                self.report(error)
            self._tried = True
        return self._directory

    @property
    def is_open(self) -> bool:
        return self._directory is not None

    @property
    def has_failed(self) -> bool:
        """Whether the directory cannot be opened, or not be written any more."""
        return self._writer_failed or (self._tried and self._directory is None)

    def open_or_raise(self) -> Directory:
        """The directory, with all that was written before in it.

        Raises:
            CacheError: it cannot be opened.
        """
        if self._directory is None:
            try:
                self._directory = acquire(self._path, self)
            except (OSError, lmdb.Error) as error:
                if isinstance(error, CacheError):
                    raise
                raise CacheError(f"cache {self._path} cannot be used: {error}") from error
            self._tried = True
        if self._directory.writer is not None:
            self._directory.writer.flush(_FLUSH_SECONDS)
        return self._directory

    def is_writable(self, directory: Directory) -> bool:
        """Whether this process can write; if not, the reason is reported once."""
        if directory.writer is None:
            self._report_writer(
                CacheError(
                    f"cache {self._path} {directory.readonly}: its records are read, and none are added"
                )
            )
        elif directory.writer.error is not None:
            self._report_writer(directory.writer.error)
        elif directory.writer.full is not None:
            self._report_full(directory.writer.full)
            return False
        return not self._writer_failed

    def flush(self, timeout: float) -> bool:
        """See `Cache.flush`."""
        directory = self._directory
        if directory is None or directory.writer is None:
            return not self._tried
        return directory.writer.flush(timeout) and self.is_writable(directory)

    def close(self) -> None:
        """Write out, sync the index, let go of the directory. The next `open` opens it again."""
        directory, self._directory, self._tried = self._directory, None, False
        if directory is None:
            return
        try:
            release(directory, self)
        except (OSError, lmdb.Error) as error:
            self.report(error)
        if directory.writer is not None and directory.writer.error is not None:
            self._report_writer(directory.writer.error)

    def report(self, error: BaseException) -> None:
        """Count a failure, and warn of the first one."""
        self.counters.add("cache.failures")
        if isinstance(error, DAMAGED) and self._directory is not None:
            self._directory.mark_damaged()
        if self._warned:
            return
        self._warned = True
        text = (
            f"fastload passes through its cache {self._path}: {error}. See {address('cache-passes-through')}"
        )
        warn(text, stacklevel=5)

    def _report_full(self, error: BaseException) -> None:
        """Warn once of a disk that is full for now; other failures are still warned of."""
        if not self._disk_full:
            self._disk_full = True
            self.counters.add("cache.failures")
            warn(
                f"fastload passes through its cache {self._path}: {error}. "
                f"It is filled again when there is room. See {address('cache-passes-through')}",
                stacklevel=5,
            )

    def _report_writer(self, error: BaseException) -> None:
        if not self._writer_failed:
            self._writer_failed = True
            self.report(error)
