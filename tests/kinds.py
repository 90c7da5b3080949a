"""One table of all kinds of datasets, for the promises that every kind keeps: `tests/process/test_kinds.py`.

Each kind has the same samples. A photo tells its number by its blue, and what stands beside it tells it too,
so that a sample that is mixed up shows. A new kind of dataset is a new row of `KINDS`.
"""

from __future__ import annotations

import csv
import functools
import gzip
import io
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

import fastload
from fastload import File, RandomResizedCrop
from fastload.formats.tar import TarWriter
from fastload.formats.tfrecord import TFRecordWriter, encode_example

COUNT = 24
SHARDS = [range(9), range(9, 9), range(9, 20), range(20, COUNT)]  # the samples of each shard
BAD = (5, 17)  # the samples that `Kind.write` spoils, if it is told to
FORMATS = Path(__file__).parent / "data" / "formats"  # see tests/data/make_formats.py
CROP = RandomResizedCrop(16, scale=(0.5, 1.0), flip=0.5)
MASK = RandomResizedCrop(16, scale=(0.5, 1.0), flip=0.5, interpolation="nearest", channels=1)
BLOCK = 16  # tokens of a sample
MODES = ("raw", "dct", "auto", "shrunk", "decoded")

Photo = Callable[[int], bytes]


@functools.cache
def photo(number: int) -> bytes:
    """A JPEG whose red and green differ from pixel to pixel, and whose blue tells its number."""
    across, down = np.meshgrid(np.linspace(0, 255, 32), np.linspace(0, 255, 24))
    pixels = np.stack([across, down, np.full_like(down, 8 * number + 4)], 2).astype(np.uint8)
    return encoded(pixels, "JPEG", quality=100, subsampling=0)


def photo_or_damage(number: int) -> bytes:
    return b"no photo" if number in BAD else photo(number)


def mask(number: int) -> bytes:
    return encoded(np.full((24, 32), number, np.uint8), "PNG")


def encoded(pixels: Any, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def put(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)


# --- what a sample, or a batch, tells


def numbers(batch: Any) -> list[int]:
    """The numbers of a batch; every part of it that has numbers has to tell the same ones."""
    told = [found for part in _parts(batch) if (found := _told(part)) is not None]
    assert told and all(found == told[0] for found in told), told
    return told[0]


def number(sample: Any) -> int:
    """The number of one sample."""
    (found,) = numbers(torch.utils.data.default_collate([sample]))
    return found


def _parts(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        lists = [value if isinstance(value, list) else [value] for value in batch.values()]
        texts = [isinstance(value[0], str) for value in lists]
        return [
            part for value, text in zip(lists, texts, strict=True) for part in ([value] if text else value)
        ]
    return list(batch) if isinstance(batch, tuple | list) and not isinstance(batch[0], str) else [batch]


def _told(column: Any) -> list[int] | None:
    if isinstance(column, torch.Tensor) and column.ndim == 4:
        middle = column[:, -1, 8, 8]
        return (middle // 8 if column.shape[1] == 3 else middle).tolist()  # type: ignore[no-any-return]
    if isinstance(column, torch.Tensor):
        if column.is_floating_point():  # drawn, see `with_noise`
            return None
        return (column if column.ndim == 1 else column[:, 0]).tolist()  # type: ignore[no-any-return]
    if isinstance(column, dict):
        return _told(column["n"])
    return [int(text.rpartition(" ")[2]) for text in column]


# --- writing


def write_nothing(folder: Path, photo: Photo) -> None:
    folder.mkdir(parents=True)


def write_folder(folder: Path, photo: Photo) -> None:
    """A class for each photo, so that the label tells it."""
    for n in range(COUNT):
        put(folder / f"class_{n:02d}" / "photo.jpg", photo(n))


def write_objects(folder: Path, photo: Photo) -> None:
    for n in range(COUNT):
        put(folder / f"{n:02d}.jpg", photo(n))


def write_table(folder: Path, photo: Photo) -> None:
    for n in range(COUNT):
        put(folder / "photos" / f"{n}.jpg", photo(n))
        put(folder / "masks" / f"{n}.png", mask(n))
    with (folder / "table.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, ("image", "mask", "label", "caption"))
        rows.writeheader()
        rows.writerows(rows_of_table())


def rows_of_table() -> list[Any]:
    return [
        {"image": f"photos/{n}.jpg", "mask": f"masks/{n}.png", "label": n, "caption": f"photo {n}"}
        for n in range(COUNT)
    ]


def write_packs(folder: Path, photo: Photo) -> None:
    """The photos one behind the other in two objects, each between other bytes; and where they lie."""
    for pack, part in enumerate(_PACKS):
        put(folder / f"{pack}.bin", b"".join(b"before" + photo(n) for n in part) + b"behind")
    put(folder / "table.jsonl", b"\n".join(json.dumps(row).encode() for row in rows_of_packs(photo)))


_PACKS = range(9), range(9, COUNT)


def rows_of_packs(photo: Photo = photo) -> list[Any]:
    rows = []
    for pack, part in enumerate(_PACKS):
        stop = 0
        for n in part:
            start = stop + len(b"before")
            stop = start + len(photo(n))
            rows.append({"pack": f"{pack}.bin", "start": start, "stop": stop, "label": n})
    return rows


def write_lists(folder: Path, photo: Photo) -> None:
    """Two photos a sample, and two parts of an object with its number."""
    for row in rows_of_lists():
        for key in row["images"]:
            put(folder / key, photo(row["label"]))
    put(folder / "numbers.bin", b"".join(b"%02d" % (n % 50) for n in range(100)))


def rows_of_lists() -> list[Any]:
    return [
        {
            "images": [f"{part}/{n}.jpg" for part in ("first", "second")],
            "numbers": "numbers.bin",
            "starts": [2 * n, 2 * n + 100],
            "stops": [2 * n + 2, 2 * n + 102],
            "label": n,
        }
        for n in range(COUNT)
    ]


def write_tar(folder: Path, photo: Photo, *, index: bool = False) -> None:
    for shard, samples in enumerate(SHARDS):
        file = io.BytesIO()
        writer = TarWriter(file)
        for n in samples:
            parts = {"jpg": photo(n), "txt": b"photo %d" % n, "json": b'{"n": %d}' % n}
            writer.write(f"{n:03d}", parts)
        _put_shard(folder / f"{shard}.tar", file, writer, index)


def write_tfrecord(folder: Path, photo: Photo, *, index: bool = False) -> None:
    for shard, samples in enumerate(SHARDS):
        file = io.BytesIO()
        writer = TFRecordWriter(file)
        for n in samples:
            writer.write(encode_example({"image": photo(n), "label": n, "text": f"photo {n}"}))
        _put_shard(folder / f"{shard}.tfrecord", file, writer, index)


def _put_shard(path: Path, file: io.BytesIO, writer: Any, index: bool) -> None:
    writer.close()
    put(path, file.getvalue())
    if index:
        put(path.with_name(f"{path.name}.idx"), writer.index())


def write_parquet(folder: Path, photo: Photo, *, more: bool = False) -> None:
    """Images in a column, as Hugging Face keeps them; with `more`, rows of other samples are among them."""
    folder.mkdir(parents=True)
    rows = [{"image": {"bytes": photo(n), "path": f"{n}.jpg"}, "label": n} for n in range(COUNT)]
    for at in (20, 9, 8, 0) if more else ():
        rows.insert(at, rows[at] | {"label": 100 + at})
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=5)


def write_columns(folder: Path, photo: Photo, *, more: bool = False) -> None:
    """Rows of numbers and texts, in two files; with `more`, rows of other samples are among them."""
    folder.mkdir(parents=True)
    for file, some in (("rows", range(COUNT)),) if not more else (("a", range(9)), ("b", range(9, COUNT))):
        labels = [label for n in some for label in ((n, 100 + n) if more and n % 4 == 0 else (n,))]
        pq.write_table(columns_of(labels), folder / f"{file}.parquet", row_group_size=5)


def columns_of(labels: Iterable[int]) -> pa.Table:
    pairs = pa.array([[n, 7] for n in labels], pa.list_(pa.int32(), 2))
    return pa.table({"label": list(labels), "text": [f"photo {n}" for n in labels], "pair": pairs})


def write_mds_gz(folder: Path, photo: Photo) -> None:
    """The shards of MosaicML Streaming, compressed as its option `compression="gz"` has it."""
    index = json.loads((FORMATS / "mds-numbered" / "index.json").read_text())
    for shard in index["shards"]:
        name = shard["raw_data"]["basename"]
        packed = gzip.compress((FORMATS / "mds-numbered" / name).read_bytes())
        put(folder / f"{name}.gz", packed)
        shard["compression"] = "gz"
        shard["zip_data"] = {"basename": f"{name}.gz", "bytes": len(packed), "hashes": {}}
    put(folder / "index.json", json.dumps(index).encode())


def write_beton(folder: Path, photo: Photo) -> None:
    put(folder / "photos.beton", gzip.decompress((FORMATS / "numbered.beton.gz").read_bytes()))


def copy_format(name: str) -> Callable[[Path, Photo], None]:
    """What the library of a format wrote of the same photos."""
    return lambda folder, photo: (shutil.copytree(FORMATS / name, folder), None)[1]


def write_tokens(folder: Path, photo: Photo) -> None:
    """The first token of a sample is its number; an object ends within a sample."""
    tokens = np.append(np.repeat(np.arange(COUNT, dtype=np.uint16), BLOCK), np.uint16(0))
    for file, part in enumerate(np.split(tokens, [7, 200])):
        put(folder / f"{file}.bin", part.tobytes())


def write_documents(folder: Path, photo: Photo) -> None:
    """The same, and no object ends within a sample."""
    tokens = np.repeat(np.arange(COUNT, dtype=np.uint16), BLOCK)
    for file, part in enumerate(np.split(tokens, [9 * BLOCK, 20 * BLOCK])):
        put(folder / f"{file}.bin", part.tobytes())
        ends = io.BytesIO()
        np.save(ends, np.arange(BLOCK, len(part) + 1, BLOCK))
        put(folder / f"{file}.ends", ends.getvalue())


# --- opening


class Numbered(Dataset[Any]):
    """A dataset of the user's own."""

    def __init__(self) -> None:
        self.__fingerprint__ = "numbered"

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        if not -COUNT <= index < COUNT:
            raise IndexError(index)
        return {"label": index % COUNT, "text": f"photo {index % COUNT}"}


def cached(url: str, cache: Any = None, **options: Any) -> Any:
    return fastload.cached(Numbered(), cache or f"{url}-cache")


def half_and_half(url: str, **options: Any) -> Any:
    """A folder through the wrappers of torch and fastload."""
    opened = fastload.ImageFolder(url, **options)
    first = Subset(fastload.map(StackDataset(opened, range(COUNT)), unstacked), range(10))
    return ConcatDataset([first, fastload.map(Subset(opened, range(10, COUNT)), with_noise)])


def unstacked(sample: Any) -> Any:
    return with_noise(sample[0])


def with_noise(sample: Any) -> Any:
    """A function of the user's that draws a random number."""
    return *sample, torch.rand(())


def mixture(url: str, **options: Any) -> Any:
    """All samples of two folders, in equal parts."""
    opened = [fastload.ImageFolder(url, **options) for _ in range(2)]
    return fastload.Mixture(opened, [1, 1])


def table(url: str, fields: Any, **options: Any) -> Any:
    return fastload.TableDataset(f"{url}/table.csv", fields, url=url, **options)


def table_of_lines(url: str, fields: Any, **options: Any) -> Any:
    return fastload.TableDataset(f"{url}/table.jsonl", fields, url=url, **options)


def table_in_memory(url: str, fields: Any, rows: Callable[[], list[Any]], **options: Any) -> Any:
    return fastload.TableDataset(rows(), fields, url=url, **options)


def photo_number(data: bytes) -> int:
    return int(np.asarray(Image.open(io.BytesIO(data)))[8, 8, 2]) // 8


def mask_number(data: bytes) -> int:
    return int(np.asarray(Image.open(io.BytesIO(data)))[0, 0])


@dataclass(frozen=True)
class Kind:
    """A kind of dataset.

    Attributes:
        name: of the kind; its objects lie in `folder`.
        write: (folder, photo of a number) -> None; writes the objects of `COUNT` samples.
        open: (URL of the folder, options of the dataset) -> the dataset.
        transform: of its images; None: it has none.
        own_photos: they are those of the function that `write` gets, which can be damaged.
        streamed: no sample has an index until the shards were read.
        sharded: an epoch that asks for no index is read as streams.
        sources: how often an epoch has each sample.
        wraps: other datasets, so that it has no keys and no cache of its own.
        rows_of_read: samples that are read together, at most; 0: nothing is read, the data are in memory.
        modes: of a cache that it takes.
    """

    name: str
    write: Callable[[Path, Photo], None]
    open: Callable[..., Any]
    transform: Any = CROP
    own_photos: bool = True
    streamed: bool = False
    sharded: bool = False
    sources: int = 1
    wraps: bool = False
    rows_of_read: int = 1
    modes: tuple[str, ...] = MODES

    @property
    def folder(self) -> str:
        return self.name.replace(", ", "-").replace(" ", "-")

    def make(self, url: Any, **options: Any) -> Any:
        """Open the dataset; without `transform=`, it gets the kind's own."""
        if self.transform is not None:
            options = {"transform": self.transform, **options}
        return self.open(str(url), **options)


def columns_in_memory(url: str, **options: Any) -> Any:
    return fastload.TableDataset(columns_of(range(COUNT)), _COLUMNS, batches="columns")


_COLUMNS = {"label": "label", "text": "text", "pair": "pair"}
_PAIR = {"image": CROP, "mask": MASK}
_IN_TABLE = {"image": File("photos/{label}.jpg"), "number": File("mask", decode=mask_number)}
_IN_TAR = ("jpg", "txt", "json")
_IN_PACK = (File("pack", range=("start", "stop")), "label")
_IN_LISTS = {
    "images": File("images"),
    "numbers": File("numbers", range=("starts", "stops"), decode=int),
    "label": "label",
}
_FEATURES = {"image": bytes, "label": int, "text": str}
_NUMBERED = ("image", "label")

KINDS = [
    Kind("folder", write_folder, fastload.ImageFolder),
    Kind("objects", write_objects, fastload.ObjectDataset),
    Kind(
        "objects, decode",
        write_objects,
        functools.partial(fastload.ObjectDataset, decode=photo_number),
        transform=None,
        own_photos=False,
    ),
    Kind("table", write_table, functools.partial(table, fields=(File("image"), "label"))),
    Kind(
        "table, decode and text",
        write_table,
        functools.partial(table_in_memory, fields={**_IN_TABLE, "text": "caption"}, rows=rows_of_table),
        transform={"image": CROP},
        modes=("raw", "dct", "auto", "decoded"),  # a function reads the whole object
    ),
    Kind(
        "image and mask",
        write_table,
        functools.partial(
            table_in_memory, fields={"image": File("image"), "mask": File("mask")}, rows=rows_of_table
        ),
        transform=_PAIR,
    ),
    Kind("ranges", write_packs, functools.partial(table_of_lines, fields=_IN_PACK)),
    Kind(
        "ranges, decode",
        write_packs,
        functools.partial(
            table_in_memory,
            fields=File("pack", range=("start", "stop"), decode=photo_number),
            rows=rows_of_packs,
        ),
        transform=None,
        own_photos=False,
        modes=("raw", "dct", "auto", "decoded"),
    ),
    Kind(
        "lists",
        write_lists,
        functools.partial(table_in_memory, fields=_IN_LISTS, rows=rows_of_lists),
        transform={"images": CROP},
        modes=("raw", "dct", "auto", "decoded"),
    ),
    Kind(
        "tar", write_tar, functools.partial(fastload.TarDataset, fields=_IN_TAR), streamed=True, sharded=True
    ),
    Kind(
        "tar, indexed",
        functools.partial(write_tar, index=True),
        functools.partial(fastload.TarDataset, fields=_IN_TAR),
        sharded=True,
    ),
    Kind(
        "tfrecord",
        write_tfrecord,
        functools.partial(fastload.TFRecordDataset, fields=_FEATURES),
        transform={"image": CROP},
        streamed=True,
        sharded=True,
    ),
    Kind(
        "tfrecord, indexed",
        functools.partial(write_tfrecord, index=True),
        functools.partial(fastload.TFRecordDataset, fields=_FEATURES),
        transform={"image": CROP},
        sharded=True,
    ),
    Kind(
        "parquet",
        write_parquet,
        functools.partial(fastload.ParquetDataset, fields=_NUMBERED),
        sharded=True,
    ),
    Kind(
        "parquet, filtered",
        functools.partial(write_parquet, more=True),
        functools.partial(fastload.ParquetDataset, fields=_NUMBERED, filters=[("label", "<", 100)]),
        sharded=True,
    ),
    Kind(
        "parquet, columns",
        write_columns,
        functools.partial(fastload.ParquetDataset, batches="columns"),
        transform=None,
        own_photos=False,
        rows_of_read=5,
    ),
    Kind(
        "parquet, filtered columns",
        functools.partial(write_columns, more=True),
        functools.partial(fastload.ParquetDataset, batches="columns", filters=[("label", "<", 100)]),
        transform=None,
        own_photos=False,
        rows_of_read=5,
    ),
    Kind(
        "table, columns", write_nothing, columns_in_memory, transform=None, own_photos=False, rows_of_read=0
    ),
    Kind(
        "mds",
        copy_format("mds-numbered"),
        functools.partial(fastload.MDSDataset, fields=_NUMBERED),
        own_photos=False,
        sharded=True,
    ),
    Kind(
        "mds, gzip",
        write_mds_gz,
        functools.partial(fastload.MDSDataset, fields=_NUMBERED),
        own_photos=False,
        sharded=True,
    ),
    Kind("litdata", copy_format("lit-numbered"), fastload.LitDataset, own_photos=False, sharded=True),
    Kind("beton", write_beton, fastload.BetonDataset, own_photos=False),
    Kind(
        "tokens",
        write_tokens,
        functools.partial(fastload.TokenDataset, dtype="uint16", block=BLOCK, overlap=1),
        transform=None,
        own_photos=False,
    ),
    Kind(
        "documents",
        write_documents,
        functools.partial(fastload.TokenDataset, dtype="uint16", block=BLOCK, documents=".ends"),
        transform=None,
        own_photos=False,
    ),
    Kind("cached", write_nothing, cached, transform=None, wraps=True),
    Kind("wrapped", write_folder, half_and_half, wraps=True),
    Kind("mixture", write_folder, mixture, sources=2, wraps=True),
]
