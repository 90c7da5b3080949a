"""The cache on local disk: an LMDB index over append-only segments of self-verifying records.

    Cache.write ─▶ writer thread ─▶ segment (append) ─▶ index (LMDB)
    Cache.read  ◀─ verify ◀─ pread ◀─ segment ◀─ entry ◀─ index

`record` is the layout of one record, `segment` the files of records, `index` the way from key to record,
`writer` the thread that fills, `directory` and `registry` what a process has open, `audit` the check of a
whole directory, and `cache` the class to use.
"""

from fastload.cache.audit import Report
from fastload.cache.cache import Cache, as_cache
from fastload.cache.record import Entry

__all__ = ["Cache", "Entry", "Report", "as_cache"]
