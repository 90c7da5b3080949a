"""The decoder of a loader's images: its workers, or a decoder in the trainer's process.

    decode="cpu"             the workers; there is no `Decoding`
    decode="dali", "nvjpeg"  workers send encoded images, and that decoder turns them into pixels
    decode="torch"           as these, for the records of a cache in mode "dct"
    decode="auto"            the first batch is decoded by each of them and timed; the fastest is kept

The choice changes neither the samples of a batch nor their crops. Pixels differ a little between decoders:
tests/unit/test_dali.py says how little.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from fastload.datasets.wrappers import as_encoded_rows
from fastload.errors import ArgumentError, DecodeError, FastloadError, refuse_class
from fastload.gpu.dali import Dali, DaliDecoder, why_no_dali
from fastload.gpu.decoders import (
    BadSamples,
    ImageDecoder,
    KernelDecoder,
    finish_decoding,
    start_decoding,
)
from fastload.gpu.nvjpeg import NvJpegDecoder, why_no_nvjpeg
from fastload.gpu.torch_dct import TorchDctDecoder
from fastload.images.encoded import EncodedImages
from fastload.metrics.cores import usable_cores
from fastload.metrics.counters import Counters

__all__ = ["Decoding", "check_decode", "measure_decoder"]

_log = logging.getLogger("fastload")

_CHOICES = ("cpu", "dali", "nvjpeg", "torch", "auto")
_PERIOD = 64  # batches after which "auto" tries again: the first one may have no image to decode
_CLEARLY = 1.05  # how much faster than the workers a decoder must be: workers are the simpler way


def check_decode(decode: Any, dataset: Any, device: torch.device | None, default_batches: bool) -> None:
    """Check the argument `decode` of a loader.

    Args:
        default_batches: torch's default_collate makes batches of `batch_size` samples.

    Raises:
        ArgumentError: the value is invalid, or does not fit the other arguments.
    """
    refuse_class("decode", decode)
    if not isinstance(decode, Dali) and decode not in _CHOICES:
        raise ArgumentError(f"decode must be one of {_CHOICES} or a fastload.Dali, found {decode!r}")
    if decode == "cpu":
        return
    rows = as_encoded_rows(dataset)
    if rows is None:
        why: str | None = (
            "the dataset has to be fastload's ImageFolder or ObjectDataset (or a Subset of one); "
            f"found {type(dataset).__name__}"
        )
    elif not default_batches:
        why = "it needs batches by torch's default_collate: leave out collate_fn and batch_size=None"
    else:
        why = rows.why_not_encoded("dali" if isinstance(decode, Dali) else decode)
    if why is None:
        name = "dali" if isinstance(decode, Dali) else decode
        why = _missing(device or torch.device("cpu")).get(name)
    if why is not None:
        raise ArgumentError(f"decode={decode!r} does not work here: {why}")


def measure_decoder(decoder: ImageDecoder | Decoding, encoded: EncodedImages, rounds: int = 2) -> float:
    """Images per second of a decoder, for one batch decoded `rounds` times, two at a time.

    Call it twice and ignore the first result: a decoder sets itself up with its first batch.
    """
    start = time.perf_counter()
    before = decoder.start(encoded)
    for _ in range(rounds - 1):
        result = decoder.start(encoded)
        before()
        before = result
    images = before()
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
    return rounds * len(encoded) / (time.perf_counter() - start)


class Decoding:
    """The decoding of one loader in the trainer's process. Lives as long as the loader; used by one thread.

    Args:
        decode: checked by `check_decode`; not "cpu".
        device: of the pixels; None is the CPU.
        workers: processes that decode on the CPU; 0: this one.
        on_error, counters, bad: the loader's.
    """

    def __init__(
        self,
        decode: str | Dali,
        device: torch.device | None,
        *,
        workers: int,
        on_error: str,
        counters: Counters,
        bad: BadSamples,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._options = decode if isinstance(decode, Dali) else Dali()
        self._on_error = on_error
        self._counters, self._bad = counters, bad
        self._workers = workers
        self._asked = 0  # batches, until "auto" has chosen
        self._decoder: ImageDecoder | None = None
        self._choosing = decode == "auto"
        self._stats: dict[str, Any] = {"decoder": "dali" if decode is self._options else decode}
        if self._choosing:
            self._stats = {"decoder": "cpu", "why": "no batch yet on which decoders could be compared"}

    def next_encoded(self) -> bool:
        """Whether workers should send the next batch encoded."""
        if not self._choosing:
            return bool(self._stats["decoder"] != "cpu")
        self._asked += 1
        return self._asked % _PERIOD == 1

    def begin(self, batch: Any) -> Any:
        """Begin to decode the `EncodedImages` in a batch; pass the result to `finish`."""
        return start_decoding(batch, self.start)

    def finish(self, batch: Any) -> Any:
        """The batch of `begin` with pixels. Waits for them.

        Raises:
            DecodeError: an image that no decoder can decode, where `on_error` is "raise".
        """
        return finish_decoding(batch)

    def start(self, encoded: EncodedImages) -> Callable[[], torch.Tensor]:
        """As `ImageDecoder.start`, by the chosen decoder.

        Raises:
            FastloadError: the decoder is not available.
        """
        if self._choosing and len(encoded.encoded_rows):
            self._choose(encoded)
        if self._decoder is None:
            self._decoder = self._new(self._stats["decoder"], self._counters, self._bad)
        return self._decoder.start(encoded)

    def stats(self) -> dict[str, Any]:
        """The value of `DataLoader.stats()["decode"]`.

        "decoder": the one in use. "library": through which nvJPEG decodes, once it does. After a comparison
        also "why", a sentence; "rates", images per second of each way; "missing", the reasons why others were
        not compared.
        """
        decoder = self._decoder
        return self._stats | ({"library": decoder.library} if isinstance(decoder, NvJpegDecoder) else {})

    def close(self) -> None:
        """Release the decoder's threads and memory. Another batch makes a new decoder."""
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None

    def _new(self, name: str, counters: Counters, bad: BadSamples) -> ImageDecoder:
        if name == "cpu":
            return KernelDecoder(self._device, self._on_error, counters, bad)
        if name == "torch":
            return TorchDctDecoder(self._device, self._on_error, counters, bad)
        why = _missing(self._device)[name]
        if why is not None:
            raise FastloadError(f"decode={name!r} cannot start: {why}", stage="decode")
        try:
            device = torch.empty(0, device=self._device).device  # "cuda" with its index
            if name == "dali":
                return DaliDecoder(device, self._on_error, counters, bad, self._options)
            return NvJpegDecoder(device, self._on_error, counters, bad)
        except (ImportError, OSError, RuntimeError) as error:
            raise FastloadError(f"decode={name!r} cannot start: {error}", stage="decode") from error

    def _choose(self, encoded: EncodedImages) -> None:
        """Keep the decoder that is fastest on this batch. A batch with a bad image chooses nothing."""
        missing: dict[str, str] = {}
        try:
            rates = {"cpu": self._rate("cpu", encoded)}
        except DecodeError:  # the batch that is handed out will say so
            return
        for name in _missing(self._device):
            try:
                rates[name] = self._rate(name, encoded)
            except Exception as error:  # no failure of a decoder on trial may end the training
                missing[name] = str(error) or type(error).__name__
        best = max(rates, key=lambda name: rates[name])
        if rates[best] < _CLEARLY * rates["cpu"]:
            best = "cpu"
        shown = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
        why = f"images/s of one batch, {self._workers} workers: {shown}; {best} is kept"
        self._choosing = False
        self._stats = {"decoder": best, "why": why, "rates": rates, "missing": missing}
        self.close()  # the kernel's, which decoded batches before this one
        _log.info("decode='auto': %s", why)

    def _rate(self, name: str, encoded: EncodedImages) -> float:
        """Images per second that a loader with this decoder could make of batches like this one."""
        decoder = self._new(name, Counters(), [])  # of its own: the batch is counted when it is handed out
        try:
            measure_decoder(decoder, encoded)
            rate = measure_decoder(decoder, encoded)
        finally:
            decoder.close()
        # What workers do in both cases: headers, crops, and images that only the CPU decodes.
        before, decoding = encoded.seconds / len(encoded), 1 / rate
        if not self._workers:
            return 1 / (before + decoding)
        workers = min(self._workers, usable_cores())
        if name == "cpu":
            return workers / (before + decoding)
        return 1 / max(before / workers, decoding)


def _missing(device: torch.device) -> dict[str, str | None]:
    """Decoder -> why it cannot be used on this device, or None."""
    return {"dali": why_no_dali(), "nvjpeg": why_no_nvjpeg(device)}
