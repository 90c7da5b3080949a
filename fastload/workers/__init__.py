"""Worker processes: index batches in, filled slots out, and a watch on the other side's life.

    trainer                                             worker (x num_workers)
    Workers.submit  ── Work(seq, index) ────────────▶  prefetches every index batch that it knows,
                      ── consumed, released slots ──▶   makes at most `prefetch_factor` batches in advance
    Workers.receive ◀─ Result(seq, slots, counters) ─── makes them in order

Where the kernel makes all samples there is one worker process, and `num_workers` threads of the kernel in it
share the rows of each batch.

Each worker has its own socket, so an end-of-file names the worker that died. The trainer's process runs no
thread. A worker watches the trainer through a pidfd and ends with it, also in the middle of a batch.

Start reading at `batch.BatchMaker.make_batch`, which names the steps of a batch, and `worker`, which sends
it.
"""
