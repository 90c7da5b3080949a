"""The number of a record: the same in every epoch, process and run."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["RecordId"]

_ORDINAL_BITS = 32
_ORDINAL_MASK = (1 << _ORDINAL_BITS) - 1


class RecordId(NamedTuple):
    """Record `ordinal` of shard `shard`; packed, the integer `shard << 32 | ordinal`, a sample's index."""

    shard: int
    ordinal: int

    def pack(self) -> int:
        """The id as one integer."""
        return self.shard << _ORDINAL_BITS | self.ordinal

    @classmethod
    def unpack(cls, record: int) -> RecordId:
        """The id that `pack` made an integer of. The shard of a negative integer is negative."""
        return cls(record >> _ORDINAL_BITS, record & _ORDINAL_MASK)
