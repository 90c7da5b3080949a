"""What every decoder of the device offers, and batches whose images are being decoded by one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from fastload.images.encoded import EncodedImages
from fastload.metrics.counters import Counters

__all__ = ["BadSamples", "ImageDecoder", "finish_decoding", "start_decoding"]


class BadSamples(Protocol):
    """Takes (key, error) of images that nobody could decode: a list or deque."""

    def extend(self, images: Iterable[tuple[str, str]], /) -> None: ...


class ImageDecoder(Protocol):
    """What turns `EncodedImages` into pixels. Used by one thread of the trainer's process.

    On a GPU, `start` and what it returns are called with the feed's stream as torch's current one, and the
    tensor is good for work in that stream's order. `EncodedImages` may be let go of at any time (their slot
    then returns to its worker): the decoder keeps what it still reads.
    """

    counters: Counters  # gets decoder.* and bad.samples, see `fastload.metrics.counters`
    bad: BadSamples

    def start(self, encoded: EncodedImages) -> Callable[[], torch.Tensor]:
        """Begin to decode; the function returned waits for the result and may be called once, or never.

        The result is uint8, of `encoded.shape`, on the decoder's device. Waiting raises DecodeError, with the
        sample's key, for an image that nobody can decode, where `on_error` is "raise". Batches may be started
        ahead, and are best taken in the order in which they were started.
        """

    def close(self) -> None:
        """Let go of threads and device memory. Results not taken by then are lost."""


def start_decoding(batch: Any, start: Callable[[EncodedImages], Callable[[], torch.Tensor]]) -> Any:
    """Begin to decode every `EncodedImages` in a batch: itself, or in a list, tuple or dict.

    Args:
        start: `ImageDecoder.start`.

    Returns:
        The batch for `finish_decoding`; one without encoded images is the batch itself.
    """
    return _map(batch, EncodedImages, lambda encoded: _Started(start(encoded)))


def finish_decoding(batch: Any) -> Any:
    """Wait for what `start_decoding` began: the batch with pixels."""
    return _map(batch, _Started, lambda part: part.result())


class _Started:
    """The place of images that are being decoded."""

    def __init__(self, result: Callable[[], torch.Tensor]) -> None:
        self.result = result


def _map(batch: Any, kind: type[Any], function: Callable[[Any], Any]) -> Any:
    if isinstance(batch, kind):
        return function(batch)
    if type(batch) in (list, tuple):
        parts = [_map(part, kind, function) for part in batch]
        return batch if all(map(operator.is_, parts, batch)) else type(batch)(parts)
    if type(batch) is dict:
        items = {name: _map(part, kind, function) for name, part in batch.items()}
        return batch if all(items[name] is batch[name] for name in items) else items
    return batch
