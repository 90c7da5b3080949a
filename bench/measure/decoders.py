"""How fast each decoder of `DataLoader(decoder=...)` is by itself: encoded batches in memory to pixels.

    python -m bench decoders [--device cuda] [--batch 256] [--rounds 20]

Without workers, store or cache, the rate is the decoder's own limit. The end-to-end rates of `python -m bench
gpu_check` beside it show the cost of everything else.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

import torch

import fastload
from fastload.datasets.wrappers import view_of
from fastload.gpu.decoding import Decoding
from fastload.images.encoded import EncodedImages
from fastload.metrics.counters import Counters

CHOICES = ("dali", "torch")


def encoded_batch(choice: str, photos: int, batch: int, cache: str) -> Any:
    """The first batch of the bench's photos as workers would send it to this decoder."""
    from bench.data import photo_folder

    mode = "dct" if choice == "torch" else "raw"
    dataset: Any = fastload.ImageFolder(
        str(photo_folder(photos, 95)),
        fastload.RandomResizedCrop(224, flip=0.5),
        cache=fastload.Cache(f"{cache}/{mode}", mode),
    )

    def allocate(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=torch.cuda.is_available())

    view: Any = view_of(dataset)
    parts = view.new_encoded_batch(batch, allocate)
    dataset.prefetch(range(batch))
    failures = view.fill(parts, [(row, row) for row in range(batch)], 0, 0)
    assert not failures, failures
    dataset.close()
    return view.finish_batch(parts)[0]


def decode_rate(choice: Any, device: str, encoded: Any, rounds: int) -> dict[str, Any]:
    """{"images_per_s": ...} of one decoder, the best of three; {"skipped": why} where it cannot be had."""
    counters, bad = Counters(), list[tuple[str, str]]()
    try:
        decoding = Decoding(choice, torch.device(device), on_error="raise", counters=counters, bad=bad)
        decoding.start(encoded)()
    except (fastload.errors.FastloadError, RuntimeError, ImportError) as error:
        return {"skipped": str(error)}
    rates = [_rate(decoding, encoded, rounds) for _ in range(3)]
    decoding.close()
    return {"images_per_s": max(rates), "all": rates, "fallbacks": counters["decoder.fallbacks"]}


def _rate(decoding: Decoding, encoded: EncodedImages, rounds: int) -> float:
    """Images per second, for one batch decoded `rounds` times, two at a time."""
    start = time.perf_counter()
    before = decoding.start(encoded)
    for _ in range(rounds - 1):
        result = decoding.start(encoded)
        before()
        before = result
    images = before()
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
    return rounds * len(encoded) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fastload-bench-decoders-") as cache:
        for choice in CHOICES:
            encoded = encoded_batch(choice, args.batch, args.batch, cache)
            print(choice, json.dumps(decode_rate(choice, args.device, encoded, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
