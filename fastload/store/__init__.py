"""One URL of an object store: list, head, read, read_range, write.

s3, gs, az and http(s) go through obstore, directories through the system, all else through fsspec.
"""

from fastload.store.base import ObjectInfo, Reading, Store
from fastload.store.client_process import clients_live_here
from fastload.store.open import open_store, with_budget

__all__ = ["ObjectInfo", "Reading", "Store", "clients_live_here", "open_store", "with_budget"]
