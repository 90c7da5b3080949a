"""The objects that the pinned datasets read: fixed bytes in memory, with fixed versions.

Everything lies in fsspec's `memory://`, so that no path, inode or time of this machine enters a key. The
photos, TFRecord and Parquet are those of `tests/data/make_pins.py`; MDS, LitData and Beton are those of
`tests/data/make_formats.py`; tar files and tokens are plain enough to be made here.
"""

from __future__ import annotations

import functools
import gzip
import io
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import fsspec
import numpy as np

ROOT = "memory://pins"
_DATA = Path(__file__).parents[1] / "data"
_WRITTEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
PHOTOS = ["0.jpg", "1.jpg", "2.jpg", "3.jpg", "4.png", "5.png"]
COUNT = 12  # samples; photo number % 6 is that of a sample


def photo(number: int) -> bytes:
    """Return the photo of a sample."""
    return (_DATA / "pins" / PHOTOS[number % len(PHOTOS)]).read_bytes()


@functools.cache
def write_objects() -> None:
    """Write all objects into memory."""
    files = {f"photos/{name}": (_DATA / "pins" / name).read_bytes() for name in [*PHOTOS, "mask.png"]}
    for number in range(COUNT):  # a class of its own for each sample, so that the label says which one it is
        name = PHOTOS[number % len(PHOTOS)]
        files[f"folder/{number:02d}/{name}"] = photo(number)
    for shard, numbers in enumerate((range(5), range(5, 8), range(8, 12))):
        files[f"tar/{shard}.tar"] = _tar(numbers)
        for kind in ("tfrecord", "parquet"):
            files[f"{kind}/{shard}.{kind}"] = (_DATA / f"pins/{shard}.{kind}").read_bytes()
    for kind in ("mds-gz", "lit-photos"):
        files |= {f"{kind}/{path.name}": path.read_bytes() for path in (_DATA / "formats" / kind).iterdir()}
    files["beton/numbered.beton"] = gzip.decompress((_DATA / "formats/numbered.beton.gz").read_bytes())
    tokens = np.arange(70, dtype="<u2")
    files |= {"tokens/0.bin": tokens[:31].tobytes(), "tokens/1.bin": tokens[31:].tobytes()}
    memory = fsspec.filesystem("memory")
    for name, body in files.items():
        memory.pipe_file(f"/pins/{name}", body)
        file = memory.store[f"/pins/{name}"]
        file.created = file.modified = _WRITTEN


def _tar(numbers: range) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number in numbers:
            end = PHOTOS[number % len(PHOTOS)].partition(".")[2]
            for name, body in ((end, photo(number)), ("cls", str(number).encode())):
                member = tarfile.TarInfo(f"{number:02d}.{name}")  # of time 0, and of no user
                member.size = len(body)
                archive.addfile(member, io.BytesIO(body))
    return file.getvalue()
