"""Make garbage collection and forks cheap for a process that has imported much."""

from __future__ import annotations

import ctypes
import gc
import linecache
import sys
from pathlib import Path

import torch

_HUGE = 2 << 20  # bytes of a huge page
_MADV_COLLAPSE = 25
# Modules that are on the stack where a worker starts.
_CALLERS = ("fastload.", "tests.", "multiprocessing.", "torch.utils.data.", "_pytest.", "pluggy.")


def settle() -> None:
    """Make garbage collection and forks cheap for a process that has imported all test modules.

    With torch, one garbage collection takes 0.1 to 0.4 s: what is there now is exempt from it. A fork copies
    the page table: 50 ms of CPU for 420 MiB in small pages, 12 ms in huge ones.
    """
    _read_sources()
    if "torch._dynamo" in sys.modules:
        torch.manual_seed(torch.initial_seed())  # its first call makes a wrapper, 2 ms in each worker
    gc.collect()
    gc.freeze()
    _use_huge_pages()


def _read_sources() -> None:
    """Keep the sources that each worker would read, for 2 ms: `torch.manual_seed` formats the stack there."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_CALLERS) and getattr(module, "__file__", None):
            linecache.getlines(module.__file__)


def _use_huge_pages() -> None:
    """Collapse the heap into huge pages, where Linux can (6.1 or later): else all stays as it is."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    for line in maps.read_text().splitlines():
        addresses, access, *_, path = [*line.split(maxsplit=5), ""][:6]
        if access == "rw-p" and path in ("", "[heap]"):
            start, end = (int(address, 16) // _HUGE for address in addresses.split("-"))
            for page in range(start + 1, end):
                madvise(ctypes.c_void_p(page * _HUGE), ctypes.c_size_t(_HUGE), _MADV_COLLAPSE)
