"""The decoder of a loader's images: its workers, or a decoder in the trainer's process.

    decoder="cpu"    the workers; there is no `Decoding`
    decoder="dali"   workers send encoded images, and DALI turns them into pixels
    decoder="torch"  as these, for the records of a cache in mode "dct"

The choice changes neither the samples of a batch nor their crops. Pixels differ a little between decoders:
tests/unit/test_dali.py says how little. Two ways were rejected. nvJPEG by torchvision or TorchCodec takes
the nearest chroma sample, which no other decoder does. A trial that times the decoders in the trainer's
process cannot survive one that ends it by a signal, as nvImageCodec did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fastload.checks import refuse_class
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError, FastloadError
from fastload.gpu.dali import Dali, DaliDecoder, why_no_dali
from fastload.gpu.decoders import ImageDecoder, TorchDctDecoder
from fastload.gpu.tree import tree_map
from fastload.images.encoded import EncodedImages
from fastload.metrics.counters import BadSamples, Counters

_CHOICES = ("cpu", "dali", "torch")


def check_decoder(decoder: Any, dataset: Any, device: torch.device | None, default_batches: bool) -> None:
    """Check the argument `decoder` of a loader.

    Args:
        default_batches: torch's default_collate makes batches of `batch_size` samples.

    Raises:
        ArgumentError: the value is invalid, or does not fit the other arguments.
    """
    refuse_class("decoder", decoder)
    if not isinstance(decoder, Dali) and decoder not in _CHOICES:
        raise ArgumentError(f"decoder must be one of {_CHOICES} or a fastload.Dali, found {decoder!r}")
    if decoder == "cpu":
        return
    rows = view_of(dataset).encoded()
    if rows is None:
        why: str | None = (
            "the dataset has to be fastload's ImageFolder or ObjectDataset (or a Subset of one); "
            f"found {type(dataset).__name__}"
        )
    elif not default_batches:
        why = "it needs batches by torch's default_collate: leave out collate_fn and batch_size=None"
    else:
        why = rows.why_not_encoded("dali" if isinstance(decoder, Dali) else decoder)
    if why is None and decoder != "torch":
        why = why_no_dali()
    if why is not None:
        raise ArgumentError(f"decoder={decoder!r} does not work here: {why}")


class _Started:
    """Stands in a batch for images that are being decoded."""

    def __init__(self, result: Callable[[], torch.Tensor]) -> None:
        self.result = result


class Decoding:
    """The decoding of one loader in the trainer's process. Lives as long as the loader; used by one thread.

    Args:
        decoder: checked by `check_decoder`; not "cpu".
        device: of the pixels; None is the CPU.
        on_error, counters, bad: the loader's.
    """

    def __init__(
        self,
        decoder: str | Dali,
        device: torch.device | None,
        *,
        on_error: str,
        counters: Counters,
        bad: BadSamples,
    ) -> None:
        self._wanted = device or torch.device("cpu")
        self._options = decoder if isinstance(decoder, Dali) else Dali()
        self._name = "dali" if isinstance(decoder, Dali) else decoder
        self._on_error = on_error
        self._counters, self._bad = counters, bad
        self._decoder: ImageDecoder | None = None

    @functools.cached_property
    def device(self) -> torch.device:
        """The device of the pixels, with an index. It stays if another one becomes current later."""
        return torch.empty(0, device=self._wanted).device

    def begin(self, batch: Any) -> Any:
        """Begin to decode the `EncodedImages` in a batch; pass the result to `finish`."""
        return tree_map(batch, lambda encoded: _Started(self.start(encoded)), EncodedImages)

    def finish(self, batch: Any) -> Any:
        """Return the batch of `begin` with pixels. Waits for them.

        Raises:
            DecodeError: an image that no decoder can decode, where `on_error` is "raise".
        """
        return tree_map(batch, lambda started: started.result(), _Started)

    def start(self, encoded: EncodedImages) -> Callable[[], torch.Tensor]:
        """Begin to decode, as `ImageDecoder.start`.

        Raises:
            FastloadError: the decoder is not available.
        """
        if self._decoder is None:
            self._decoder = self._new()
        return self._decoder.start(encoded)

    def stats(self) -> dict[str, Any]:
        """Return the value of `DataLoader.stats()["decode"]`."""
        return {"decoder": self._name}

    def rest(self) -> None:
        """Release the decoder's device memory between epochs, where no iterator has a batch in it.

        Else the pipeline of an evaluation keeps gigabytes from the run that goes on.
        """
        if self._decoder is not None:
            self._decoder.rest()

    def close(self) -> None:
        """Release the decoder's threads and memory. Another batch makes a new decoder."""
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None

    def _new(self) -> ImageDecoder:
        try:
            if self._name == "torch":
                return TorchDctDecoder(self.device, self._on_error, self._counters, self._bad)
            return DaliDecoder(self.device, self._on_error, self._counters, self._bad, self._options)
        except (ImportError, OSError, RuntimeError) as error:
            raise FastloadError(f"decoder={self._name!r} cannot start: {error}", stage="decode") from error
