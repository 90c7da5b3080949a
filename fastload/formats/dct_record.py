"""How records of cache mode "dct" are recognised. `fastload/images/dct.h` describes them.

Apart from `fastload.images`, so that a command that looks into a cache starts without torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["RECORD_MAGIC", "is_record"]

# The last byte is the version. At 5 follows the EXIF orientation, at 7 the number of components.
RECORD_MAGIC = b"\x89DCT\x01"


def is_record(data: Any) -> bool:
    """Whether bytes, in anything with the buffer protocol, are a record."""
    view = memoryview(data).cast("B")
    return len(view) > 7 and view[:5] == RECORD_MAGIC
