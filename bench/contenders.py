"""Who takes part in which section of `python -m bench compare`, with which of its ways, and what differs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "AT_50",
    "COLD",
    "COLD_AT_20",
    "DECODE",
    "GROWING",
    "LATER",
    "OUTSIDE",
    "WITH_OWN_FILES",
    "Contender",
]

PILLOW = "Pillow-SIMD decodes the whole photo"


WHOLE = "FFmpeg decodes the whole photo"
THREADS = "threads, not processes"


@dataclass(frozen=True)
class Contender:
    """A way to read the photos.

    Attributes:
        script: `bench/peers/SCRIPT.py`; `mode` is that script's own.
        workers: the counts (of processes or threads) that are tried; the fastest takes part.
        differs: in what its work is not the same as ours, phrases with "; " between them.
    """

    name: str
    script: str
    mode: str = ""
    workers: tuple[int, ...] = (2,)
    differs: str = ""


# These make files of their own of the photos first, in each of their modes.
WITH_OWN_FILES = ("ffcv", "litdata", "mosaicml")
# The first epoch from S3. Where a round trip is waited for in each worker, more of them than cores help.
COLD = (
    Contender("fastload", "ours", "s3 none"),
    Contender("fastload, tar shards", "ours", "tar none", differs="250 photos a shard, shuffled in blocks"),
    Contender("torch + s3fs", "torch_s3", "s3fs", (8, 16), PILLOW),
    Contender("torch + boto3", "torch_s3", "boto3", (8, 16), PILLOW),
    Contender("s3torchconnector", "s3torchconnector", "", (8, 16), PILLOW),
    Contender("WebDataset", "webdataset", "", (2, 4), f"tar shards, shuffled within 1,000 photos; {PILLOW}"),
    Contender("LitData, chunks", "litdata", "chunks", (2, 4), f"its own chunks; {PILLOW}"),
    Contender("LitData, raw", "litdata", "raw", (2, 4), f"keeps the files on disk; {PILLOW}"),
    Contender("MosaicML Streaming", "mosaicml", "", (2, 4), f"its own shards (MDS); {PILLOW}"),
    Contender("SPDL + boto3", "spdl", "s3", (16, 32), f"{THREADS}; {WHOLE}"),
    Contender("Grain + boto3", "grain", "s3", (16, 32), f"{THREADS}; {PILLOW}"),
)
# At 20 ms only: what filling each kind of cache costs, and who waits for each photo and would take minutes.
COLD_AT_20 = (
    Contender("fastload, filling raw", "ours", "s3 raw"),
    Contender("fastload, filling shrunk", "ours", "s3 shrunk", differs="keeps 400x300 JPEGs, quality 90"),
    Contender("fastload, filling decoded", "ours", "s3 decoded", differs="keeps 400x300 pixels"),
    Contender("DALI (CPU operators)", "dali", "s3", differs="reads one photo after another"),
)
# Who takes part at 50 ms too. The others are slow, and what they do at 0, 20 and 100 ms says as much.
AT_50 = ("fastload", "fastload, tar shards", "WebDataset", "LitData, chunks")
LATER = {
    "raw": (
        Contender("fastload", "ours", "s3 raw"),
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
    "shrunk": (Contender("fastload", "ours", "memory shrunk", (1,)),),
    "decoded": (Contender("fastload", "ours", "memory decoded", (1,)),),
}
# With which the numbers of workers are compared.
GROWING = {
    "cold 20 ms": ("fastload", "WebDataset"),
    "later raw": ("fastload", "torchvision ImageFolder"),
}
# Who cannot take part in a section at all.
OUTSIDE = {
    ("tf.data", "cold"): "TensorFlow no longer has an S3 file system of its own",
    ("FFCV", "cold"): "it reads its own file from a local disk only",
}
