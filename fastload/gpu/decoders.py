"""The base of the decoders in the trainer's process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from fastload.images.encoded import EncodedImages, decode_by_kernel
from fastload.metrics.counters import BadSamples, Counters


class ImageDecoder(ABC):
    """Turns `EncodedImages` into pixels. Used by one thread of the trainer's process.

    On a GPU, `start` and the function it returns are called with the device prefetcher's stream as torch's
    current one, and the tensor is valid for work in that stream's order. `EncodedImages` may be released at
    any time (their slot then returns to its worker): the decoder keeps those that it still reads.

    Args:
        device: "cuda" with an index, or "cpu"; where the pixels are wanted.
        on_error: as the loader's.
        counters: gets decoder.* and bad.samples, see `fastload.metrics.counters`.
        bad: gets the images that cannot be decoded.
    """

    def __init__(self, device: torch.device, on_error: str, counters: Counters, bad: BadSamples) -> None:
        self._device = device
        self._on_error = on_error
        self.counters, self.bad = counters, bad

    @abstractmethod
    def start(self, encoded: EncodedImages) -> Callable[[], torch.Tensor]:
        """Begin to decode. The returned function waits for the result; call it at most once.

        The result is uint8, of `encoded.shape`, on the decoder's device. Waiting raises DecodeError, with the
        sample's key, for an image that no decoder can decode, where `on_error` is "raise". Batches may be
        started ahead; waiting for them in the order of their start is fastest.
        """

    def rest(self) -> None:  # noqa: B027 - nothing to release
        """Release device memory where no batch is being decoded: this epoch may have been the last."""

    def close(self) -> None:  # noqa: B027 - nothing to release
        """Release threads and device memory. Results not waited for by then are lost."""

    def decode_by_kernel(self, encoded: EncodedImages) -> tuple[torch.Tensor, int]:
        """Return (pixels on the device, number of bad images), by the CPU kernel in this process.

        Raises:
            DecodeError: a bad image, where `on_error` does not cover it.
        """
        images, bad = decode_by_kernel(encoded, self._on_error)
        self.note_bad(bad)
        return images.to(self._device), len(bad)

    def note_bad(self, bad: list[tuple[str, str]]) -> None:
        """Count and keep (key, error) of bad images."""
        self.bad.extend(bad)
        self.counters.add("bad.samples", len(bad))
