"""Epochs of a dataset whose samples are not numbered yet: read as streams, each by one process.

    trainer                                              worker, or the trainer itself
    StreamEpoch.work(stream) ── TakeNext(stream, n) ──▶  StreamReader.take: ids of the next n samples
                                                         BatchMaker(ids): as for any other batch
    StreamEpoch.handed_out  ◀── batch, state after it ──
         │ equal steps on all ranks: Ranks

The streams of an epoch are as many as the workers at its start, and are handed out in turn. They are what a
state holds, so the order of the samples stays what it was when they are dealt over other workers.
"""

from fastload.streams.epoch import StreamEpoch, Streams, check_streams
from fastload.streams.reader import StreamOver, StreamReader, TakeNext

__all__ = ["StreamEpoch", "StreamOver", "StreamReader", "Streams", "TakeNext", "check_streams"]
