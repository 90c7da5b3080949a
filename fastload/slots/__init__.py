"""Batch slots: memory shared by a worker and the trainer's process, written once and used again.

    worker                                        trainer
    SlotPool.allocate ─ memfd, mapped once ──────▶ SlotMap: the same pages, mapped once
        ▲  pack(batch): tensors lie in slots,          │ unpack: tensors that view the slot
        │  the rest of the structure is pickled        │
        └── slot id, when the last view has died ◀─────┘ weakref.finalize on the lease

A slot is an anonymous memory file: no name in /dev/shm to leak, no limit of 64 MB in a container, and neither
side keeps a descriptor once it has mapped it. The pages stay mapped while the slot is in use, so a batch
costs one memcpy and no page faults; torch's way, a fresh shared-memory file per batch, costs both.

A fork of the trainer by its user sees the batches that live then in the same pages: their slots are given up
instead of used again, so that its batches stay as they are.

Slots never grow: a batch that does not fit takes a second one, and the next slot is made as large as the
largest batch so far. Growing in place was rejected, since tensors already handed out would have to move.
"""

from fastload.slots.map import SlotMap, forking_a_worker
from fastload.slots.memory import Pin
from fastload.slots.packing import PackedBatch
from fastload.slots.pool import SlotPool

__all__ = ["PackedBatch", "Pin", "SlotMap", "SlotPool", "forking_a_worker"]
