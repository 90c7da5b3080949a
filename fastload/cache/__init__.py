"""The cache on local disk: an LMDB index over append-only segments of self-verifying records.

    Cache.write ─▶ writer thread ─▶ segment (append) ─▶ index (LMDB)
    Cache.read  ◀─ verify ◀─ pread ◀─ segment ◀─ entry ◀─ index

`cache` is the class to use, with the digests of `keys`; `access` is a process's use of it, and `disk` what
it lies on. `segment` holds the records, `index` the way from key to record, `write_queue` and `writer` the
thread that fills, `inflight` the locks on objects being read. `directory` is one opened directory, `registry`
all that a process has open, `maintenance` the whole of one. `push` and `pull` publish a
cache in the objects of `pack`; `published` is what a URL has of them, and `remote` does both during a
training, in the processes of `remote_work`.
"""

from fastload.cache.cache import Cache, as_cache
from fastload.cache.keys import Digest
from fastload.cache.maintenance import Report
from fastload.cache.segment import Entry

__all__ = ["Cache", "Digest", "Entry", "Report", "as_cache"]
