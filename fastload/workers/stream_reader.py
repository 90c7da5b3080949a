"""The streams of samples that one process reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fastload.datasets.protocols import SampleStream
from fastload.datasets.wrappers import as_streams

__all__ = ["StreamOver", "StreamReader", "TakeNext"]


class StreamOver(Exception):
    """A stream has no more. Not StopIteration, which a dataset may raise by mistake."""


class TakeNext(NamedTuple):
    """In place of an index batch: the next `n` samples of a stream."""

    stream: int
    n: int
    start: dict[str, Any] | None  # with the first batch of the stream: the state to open it with


class StreamReader:
    """Opens streams on request, and takes sample ids from them.

    Args:
        dataset: any; streams are requested only of a `StreamDataset`.
        auto_collation: False where an "index batch" is one id (`batch_size=None`).
        drop_last: a stream ends before a last batch that is not full.
        cancel: called with ids that were taken and will not be used, as an index batch.
    """

    def __init__(
        self, dataset: Any, *, auto_collation: bool, drop_last: bool, cancel: Callable[[Any], None]
    ) -> None:
        self._dataset = as_streams(dataset)
        self._auto_collation = auto_collation
        self._drop_last = drop_last
        self._cancel = cancel
        self._open: dict[int, SampleStream] = {}

    def start_epoch(self, *, streamed: bool) -> None:
        """Close the streams of the previous epoch."""
        self.close()
        if not streamed and self._dataset is not None:
            self._dataset.must_stream()  # reads the shard indexes that other processes have completed

    def take(self, work: TakeNext) -> tuple[Any, dict[str, Any]]:
        """The index batch of the next samples, and the stream's state after them.

        Raises:
            StreamOver: the stream is over.
            Exception: any that the stream raises; it is over then.
        """
        assert self._dataset is not None
        if work.start is not None:
            if work.stream in self._open:  # Ctrl-C came after `take`, so it is opened once more
                self._open.pop(work.stream).close()
            self._open[work.stream] = self._dataset.open_stream(work.start)
        stream = self._open.pop(work.stream, None)
        if stream is None:
            raise StreamOver
        try:
            ids = stream.take(work.n)
            state = stream.state()
        except BaseException as error:
            stream.close()
            if isinstance(error, StopIteration):
                raise RuntimeError("a stream of the dataset raised StopIteration") from error
            raise
        if not ids or (self._drop_last and len(ids) < work.n):
            if ids:
                self._cancel(ids)
            stream.close()
            raise StreamOver
        self._open[work.stream] = stream
        return (ids if self._auto_collation else ids[0]), state

    def close(self) -> None:
        """Close all open streams."""
        while self._open:
            self._open.popitem()[1].close()
