"""The decoder of a loader's images: its workers, or a decoder in the trainer's process.

    decode="cpu"             the workers; there is no `Decoding`
    decode="dali", "nvjpeg"  workers send encoded images, and that decoder turns them into pixels
    decode="auto"            the first batches are decoded in both ways and timed; the fastest way is kept

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
from fastload.errors import ArgumentError, FastloadError, refuse_class
from fastload.gpu.dali import Dali, DaliDecoder, why_no_dali
from fastload.gpu.decoders import (
    BadSamples,
    ImageDecoder,
    KernelDecoder,
    finish_decoding,
    start_decoding,
)
from fastload.gpu.nvjpeg import NvJpegDecoder, why_no_nvjpeg
from fastload.images.encoded import EncodedImages
from fastload.metrics.counters import Counters

__all__ = ["Decoding", "check_decode", "measure_decoder"]

_log = logging.getLogger("fastload")

_CHOICES = ("cpu", "dali", "nvjpeg", "auto")
_TRIED = 3  # batches of each kind
_PERIOD = 64  # batches after which "auto" tries again, until it has seen enough
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
        why = rows.why_not_encoded()
    if why is None and decode != "auto":
        name = "dali" if isinstance(decode, Dali) else decode
        why = _missing(device or torch.device("cpu"))[name]
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
        self._asked = 0  # batches, of both kinds
        self._decoder: ImageDecoder | None = None
        self._comparison: _Comparison | None = None
        self._stats: dict[str, Any] = {"decoder": "dali" if decode is self._options else decode}
        if decode == "auto":
            self._comparison = _Comparison(workers, counters)
            self._stats = {"decoder": "cpu", "why": "not enough batches yet to compare"}

    def next_encoded(self) -> bool:
        """Whether workers should send the next batch encoded."""
        if self._comparison is None:
            return bool(self._stats["decoder"] != "cpu")
        place = self._asked % _PERIOD
        self._asked += 1
        return _TRIED <= place < 2 * _TRIED

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
        """As `ImageDecoder.start`, by the chosen decoder; until "auto" has chosen, by each of them in turn.

        Raises:
            FastloadError: the decoder is not available.
        """
        if self._comparison is not None:
            return self._compare(self._comparison, encoded)
        if self._decoder is None:
            # A batch may still come encoded where "cpu" was chosen meanwhile.
            name = self._stats["decoder"]
            self._decoder = self._kernel() if name == "cpu" else self._new(name)
        return self._decoder.start(encoded)

    def stats(self) -> dict[str, Any]:
        """The value of `DataLoader.stats()["decode"]`.

        "decoder": the one in use. After a comparison also "why", a sentence; "rates", images per second of
        each way; "missing", the reasons why others were not compared.
        """
        return dict(self._stats)

    def close(self) -> None:
        """Release the decoder's threads and memory. Another batch makes a new decoder."""
        if self._comparison is not None:
            self._comparison.close()
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None

    def _new(self, name: str) -> ImageDecoder:
        why = _missing(self._device)[name]
        if why is not None:
            raise FastloadError(f"decode={name!r} cannot start: {why}", stage="decode")
        try:
            device = torch.empty(0, device=self._device).device  # "cuda" with its index
            if name == "dali":
                return DaliDecoder(device, self._on_error, self._counters, self._bad, self._options)
            return NvJpegDecoder(device, self._on_error, self._counters, self._bad)
        except (ImportError, OSError, RuntimeError) as error:
            raise FastloadError(f"decode={name!r} cannot start: {error}", stage="decode") from error

    def _compare(self, comparison: _Comparison, encoded: EncodedImages) -> Callable[[], torch.Tensor]:
        if not comparison.seen:
            for name, why in _missing(self._device).items():
                comparison.add(name, why, self._new)
        best = comparison.time(encoded)
        if comparison.over:
            self._comparison = None
            self._stats = comparison.result()
            self._decoder = comparison.keep(self._stats["decoder"])
            _log.info("decode='auto': %s", self._stats["why"])
        return (best or self._kernel()).start(encoded)

    def _kernel(self) -> KernelDecoder:
        return KernelDecoder(self._device, self._on_error, self._counters, self._bad)


class _Comparison:
    """Times decoders on the batches that come encoded, and workers by their counters."""

    def __init__(self, workers: int, counters: Counters) -> None:
        self.seen = 0
        self._workers, self._counters = workers, counters
        self._decoders: dict[str, ImageDecoder] = {}
        self._seconds: dict[str, float] = {}
        self._missing: dict[str, str] = {}
        self._images, self._encoding = 0, 0.0  # of the batches that came encoded; what they cost the workers

    @property
    def over(self) -> bool:
        return self.seen >= _TRIED and self._counters["decode.samples"] > self._images

    def add(self, name: str, why_not: str | None, new: Callable[[str], ImageDecoder]) -> None:
        """Compare this decoder too, or note why it is missing."""
        try:
            if why_not is None:
                self._decoders[name] = new(name)
        except FastloadError as error:
            why_not = str(error)
        if why_not is not None:
            self._missing[name] = why_not

    def time(self, encoded: EncodedImages) -> ImageDecoder | None:
        """Time every decoder on a batch. Returns the fastest so far; None where there is none."""
        self.seen += 1
        self._images += len(encoded)
        self._encoding += encoded.seconds
        for name, decoder in list(self._decoders.items()):
            counters, bad = decoder.counters, decoder.bad
            decoder.counters, decoder.bad = Counters(), []  # a batch counts only once
            try:
                if name not in self._seconds:
                    decoder.start(encoded)()
                seconds = len(encoded) / measure_decoder(decoder, encoded)
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            except FastloadError:
                pass  # a bad image: the batch that is handed out will say so
            except Exception as error:  # no failure of a decoder on trial may end the training
                self._missing[name] = f"{type(error).__name__}: {error}"
                self._decoders.pop(name).close()
                self._seconds.pop(name, None)
            finally:
                decoder.counters, decoder.bad = counters, bad
        return min(
            self._decoders.items(), key=lambda item: self._seconds.get(item[0], 0), default=("", None)
        )[1]

    def result(self) -> dict[str, Any]:
        """The value of `Decoding.stats` from now on."""
        made = max(1, self._workers)
        pixels = self._counters["decode.samples"] - self._images
        rates = {"cpu": made * pixels / max(1e-9, self._counters["decode.seconds"] - self._encoding)}
        encoding = self._encoding / self._images / made  # seconds per image, all workers together
        for name in self._decoders:
            decoding = self._seconds.get(name, 0.0) / self._images
            # Workers run in parallel to this process; without any, the two times add up.
            rates[name] = 1 / max(1e-9, max(encoding, decoding) if self._workers else encoding + decoding)
        best = max(rates, key=lambda name: rates[name])
        if rates[best] < _CLEARLY * rates["cpu"]:
            best = "cpu"
        shown = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
        why = f"images/s over {_TRIED} batches each, {self._workers} workers: {shown}; {best} is kept"
        return {"decoder": best, "why": why, "rates": rates, "missing": self._missing}

    def keep(self, name: str) -> ImageDecoder | None:
        """The decoder of that name; the others are closed."""
        kept = self._decoders.pop(name, None)
        self.close()
        return kept

    def close(self) -> None:
        for decoder in self._decoders.values():
            decoder.close()
        self._decoders.clear()


def _missing(device: torch.device) -> dict[str, str | None]:
    """Decoder -> why it cannot be used on this device, or None."""
    return {"dali": why_no_dali(), "nvjpeg": why_no_nvjpeg(device)}
