"""The contenders of each section of `python -m bench compare`, their settings, and how their work differs."""

from __future__ import annotations

from dataclasses import dataclass

PILLOW = "Pillow-SIMD decodes the whole photo"
WHOLE = "FFmpeg decodes the whole photo"
THREADS = "threads, not processes"
LISTS = "lists the bucket within its time, which the others did before"  # it begins with an empty cache


@dataclass(frozen=True)
class Contender:
    """A way to read the photos.

    Attributes:
        script: `bench/peers/scripts/SCRIPT.py`; `mode` is that script's own.
        workers: the numbers of processes or threads to try; the fastest takes part.
        differs: how its work differs from ours, in phrases separated by "; ".
        latencies: the round trips, in ms, at which it takes part in first epochs; empty: all.
    """

    name: str
    script: str
    mode: str = ""
    workers: tuple[int, ...] = (2,)
    differs: str = ""
    latencies: tuple[int, ...] = ()

    def is_away(self, latency: int) -> bool:
        return bool(self.latencies) and latency not in self.latencies


# These first make files of their own from the photos, in each of their modes.
WITH_OWN_FILES = ("ffcv", "litdata", "mosaicml")
# The rate of slow contenders at 50 ms lies between those at 20 and 100 ms.
NOT_50 = (0, 20, 100)
# The first epoch from S3. More workers than cores help where each worker waits for its round trips.
# At 20 ms only: the cost of filling each kind of cache, and contenders that wait for every single photo.
COLD = (
    Contender("fastload", "ours", "s3 none"),
    Contender("fastload, tar shards", "ours", "tar none", differs="250 photos per shard, shuffled in blocks"),
    Contender("torch + s3fs", "torch_s3", "s3fs", (8, 16), PILLOW, NOT_50),
    Contender("torch + boto3", "torch_s3", "boto3", (8, 16), PILLOW, NOT_50),
    Contender("s3torchconnector", "s3torchconnector", "", (8, 16), PILLOW, NOT_50),
    Contender("WebDataset", "webdataset", "", (2, 4), f"tar shards, shuffled within 1,000 photos; {PILLOW}"),
    Contender("LitData, chunks", "litdata", "chunks", (2, 4), f"its own chunks; {PILLOW}"),
    Contender("LitData, raw", "litdata", "raw", (2, 4), f"keeps the files on disk; {PILLOW}", NOT_50),
    Contender("MosaicML Streaming", "mosaicml", "", (2, 4), f"its own shards (MDS); {PILLOW}", NOT_50),
    Contender("SPDL + boto3", "spdl", "s3", (16, 32), f"{THREADS}; {WHOLE}", NOT_50),
    Contender("Grain + boto3", "grain", "s3", (16, 32), f"{THREADS}; {PILLOW}", NOT_50),
    Contender("fastload, default cache", "ours", "s3 auto", (2,), LISTS, (20,)),
    Contender("fastload, filling raw", "ours", "s3 raw", (2,), LISTS, (20,)),
    Contender("fastload, filling dct", "ours", "s3 dct", (2,), LISTS, (20,)),
    Contender("fastload, filling shrunk", "ours", "s3 shrunk", (2,), f"{LISTS}; keeps 400x300 JPEGs", (20,)),
    Contender(
        "fastload, filling decoded", "ours", "s3 decoded", (2,), f"{LISTS}; keeps 400x300 pixels", (20,)
    ),
    Contender("DALI (CPU operators)", "dali", "s3", (2,), "reads one photo after another", (20,)),
)
LATER = {
    "raw": (
        Contender("fastload", "ours", "s3 raw"),
        Contender("fastload, default cache", "ours", "s3 auto"),
        Contender("torchvision ImageFolder", "torch_files", "", (2, 4), PILLOW),
        Contender("WebDataset", "webdataset", "", (2, 4), f"shuffled within 1,000 photos; {PILLOW}"),
        Contender("LitData, chunks", "litdata", "chunks", (2, 4), f"its own chunks; {PILLOW}"),
        Contender("LitData, raw", "litdata", "raw", (2, 4), PILLOW),
        Contender("MosaicML Streaming", "mosaicml", "", (2, 4), f"its own shards (MDS); {PILLOW}"),
        Contender("FFCV, jpg", "ffcv", "jpg 97 9999", differs="its own file; decodes the whole photo"),
        Contender("DALI (CPU operators)", "dali", "files", (2, 4)),
        Contender("SPDL", "spdl", "files", (2, 4), f"{THREADS}; {WHOLE}"),
        Contender("Grain", "grain", "files", (2, 4), f"{THREADS}; {PILLOW}"),
        Contender("tf.data", "tfdata", "files", (2, 4), "scales without antialiasing"),
    ),
    "dct": (
        Contender("fastload", "ours", "s3 dct"),
        Contender("LitData, raw", "litdata", "raw", (2, 4), PILLOW),
        Contender("FFCV, jpg", "ffcv", "jpg 97 9999", differs="its own file; decodes the whole photo"),
    ),
    "shrunk": (
        Contender("fastload", "ours", "s3 shrunk"),
        Contender("FFCV, jpg", "ffcv", "jpg 90 400", differs="its own file; decodes the whole photo"),
    ),
    "decoded": (
        Contender("fastload", "ours", "s3 decoded"),
        Contender("FFCV, raw", "ffcv", "raw 90 400", differs="its own file"),
    ),
}
# From memory, by one core, without a loader.
DECODE = {
    "raw": (
        Contender("fastload", "ours", "memory raw", (1,)),
        Contender("Pillow-SIMD", "pillow", "", (1,), PILLOW),
        Contender("DALI (CPU operators)", "dali", "memory", (1,)),
        Contender("SPDL", "spdl", "memory", (1,), WHOLE),
        Contender("tf.data", "tfdata", "memory", (1,), "scales without antialiasing"),
    ),
    "dct": (Contender("fastload", "ours", "memory dct", (1,)),),
    "shrunk": (Contender("fastload", "ours", "memory shrunk", (1,)),),
    "decoded": (Contender("fastload", "ours", "memory decoded", (1,)),),
}
# The contenders whose numbers of workers are compared.
GROWING = {
    "cold 20 ms": ("fastload", "torch + boto3", "WebDataset"),
    "later raw": ("fastload", "torchvision ImageFolder"),
}
# Those of both kinds of epochs that also run beside other load, and with other photos.
HEADLINE = {
    "first epoch": tuple(
        contender
        for contender in COLD
        if contender.name in ("fastload", "fastload, default cache", "torch + boto3", "WebDataset")
    ),
    "later epochs": tuple(
        contender
        for contender in LATER["raw"]
        if contender.name in ("fastload", "fastload, default cache", "torchvision ImageFolder", "tf.data")
    ),
}
# Contenders that cannot take part in a section.
OUTSIDE = {
    ("tf.data", "cold"): "TensorFlow no longer has an S3 file system of its own",
    ("FFCV", "cold"): "it reads its own file from a local disk only",
}
