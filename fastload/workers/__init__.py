"""Worker processes: index batches in, filled slots out, and a watch on who is alive.

    trainer                                             worker (x num_workers)
    WorkerPool.submit ── Work(seq, index) ───────────▶  reads ahead for every index batch it knows,
                      ── consumed, released slots ──▶   makes at most `prefetch_factor` batches in advance
    WorkerPool.receive ◀─ Result(seq, slots, counters) ─ makes them in order

Each worker has a socket of its own, so an end-of-file names the one that died. The trainer's process runs no
thread. A worker watches the trainer through a pidfd and leaves when it is gone, whatever it is busy with.
"""
