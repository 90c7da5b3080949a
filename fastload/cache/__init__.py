"""The cache on local disk: an LMDB index over append-only segments of self-verifying records.

    Cache.write ─▶ writer thread ─▶ segment (append) ─▶ index (LMDB)
    Cache.read  ◀─ verify ◀─ pread ◀─ segment ◀─ entry ◀─ index

`cache` is the class to use; `access` is what a process has open, and `directory` one opened directory.
`segment` holds the records, `index` the way from key to record, `writer` the thread that fills and the locks
on objects being read, `maintenance` the whole of a directory. `exchange` publishes a cache in `packs` and
pulls them, and `remote` does both during a run.

Names are loaded on first use: the command line knows the modes of `codecs` where there is no POSIX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastload.cache.cache import Cache, as_cache
    from fastload.cache.index import Digest
    from fastload.cache.maintenance import Report
    from fastload.cache.segment import Entry

__all__ = ["Cache", "Digest", "Entry", "Report", "as_cache"]

_HOME = {
    "Cache": "cache",
    "Digest": "index",
    "Entry": "segment",
    "Report": "maintenance",
    "as_cache": "cache",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
