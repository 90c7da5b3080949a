"""fsspec's file system of `ftp://`, without its silent answers.

Where a server is busy, or refuses to list a folder, fsspec's says that there is no such file, or that the
folder is empty.
"""

from __future__ import annotations

import ftplib
import functools
from typing import Any

from fsspec.implementations.ftp import FTPFileSystem


class Ftp(FTPFileSystem):  # type: ignore[misc]
    """Raises ConnectionError where asking again may help, and PermissionError for a refused login."""

    def _connect(self) -> None:
        try:
            super()._connect()
        except ftplib.error_temp as error:
            raise ConnectionError(f"{error}") from None
        except ftplib.error_perm as error:
            raise PermissionError(f"{error}") from None
        self.ftp.getresp = functools.partial(_answer, self.ftp)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        entries = super().ls(path, detail, **options)
        kept = self.dircache.use_listings_cache
        if kept and not entries and self._strip_protocol(path) not in self.dircache:
            raise OSError(f"the server does not list the folder {path!r}: check your rights there")
        return entries


def _answer(ftp: ftplib.FTP) -> str:
    try:
        return type(ftp).getresp(ftp)
    except ftplib.error_temp as error:  # which fsspec would take for a missing file
        raise ConnectionError(f"{error}") from None
