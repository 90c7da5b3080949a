"""Every shape of data from S3: two epochs through the cache by workers, and a resumed one, each sample once.

A photo of one colour tells its number, and so does the label beside it: a sample that is mixed up shows.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fastload
from fastload import (
    BetonDataset,
    CenterCrop,
    File,
    LitDataset,
    MDSDataset,
    Mixture,
    ParquetDataset,
    TableDataset,
    TarDataset,
)
from fastload.cli.demo.s3_server import serve_s3
from fastload.formats.tar import TarWriter

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

FORMATS = Path(__file__).parents[1] / "data" / "formats"  # see tests/data/make_formats.py
COUNT, BATCH = 24, 4
CROP = CenterCrop(16)
MASK = CenterCrop(16, interpolation="nearest", channels=1)

Make = Callable[[Any], Any]


def photo(number: int) -> bytes:
    return encoded(np.full((24, 32, 3), 8 * number + 4, np.uint8), "JPEG")


def mask(number: int) -> bytes:
    return encoded(np.full((24, 32), number, np.uint8), "PNG")


def encoded(pixels: Any, form: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def numbers(photos: torch.Tensor) -> list[int]:
    """The numbers that a batch of photos, or of masks, tells."""
    values = photos[:, 0, 8, 8]
    return (values // 8 if photos.shape[1] == 3 else values).tolist()  # type: ignore[no-any-return]


def write_objects(root: Path) -> None:
    for folder, suffix, content in (("photos", "jpg", photo), ("masks", "png", mask)):
        (root / folder).mkdir()
        for number in range(COUNT):
            (root / folder / f"{number:03d}.{suffix}").write_bytes(content(number))
    with (root / "table.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("image", "mask", "label"))
        rows.writerows([f"photos/{n:03d}.jpg", f"masks/{n:03d}.png", n] for n in range(COUNT))


def write_tars(root: Path) -> None:
    (root / "tar").mkdir()
    for shard in range(4):
        with (root / "tar" / f"{shard}.tar").open("wb") as file:
            tar = TarWriter(file)
            for number in range(6 * shard, 6 * shard + 6):
                members = {
                    "jpg": photo(number),
                    "txt": f"photo {number}".encode(),
                    "json": b'{"n": %d}' % number,
                }
                tar.write(f"{number:03d}", members)
            tar.close()


def write_parquet(root: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (root / "parquet").mkdir()
    rows = [{"image": {"bytes": photo(n), "path": f"{n}.jpg"}, "label": n} for n in range(COUNT)]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, root / "parquet" / "rows.parquet", row_group_size=5)


def copy_formats(root: Path) -> None:
    """What MosaicML Streaming, LitData and FFCV wrote of the same photos."""
    for name in ("mds-numbered", "lit-numbered"):
        shutil.copytree(FORMATS / name, root / name)
    (root / "beton").mkdir()
    packed = (FORMATS / "numbered.beton.gz").read_bytes()
    (root / "beton" / "photos.beton").write_bytes(gzip.decompress(packed))


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The storage options of a server with the bucket "bucket"."""
    root = tmp_path_factory.mktemp("s3")
    bucket = root / "bucket"
    bucket.mkdir()
    for write in (write_objects, write_tars, write_parquet, copy_formats):
        write(bucket)
    with serve_s3(root) as server:
        yield dict(server.options)


def table(cache: Any, options: dict[str, Any]) -> Any:
    """Labels from a CSV file that lies in the bucket."""
    return TableDataset(
        "s3://bucket/table.csv",
        (File("image"), "label"),
        url="s3://bucket",
        transform=CROP,
        cache=cache,
        storage_options=options,
    )


def pair(cache: Any, options: dict[str, Any]) -> Any:
    """A photo and its mask."""
    return TableDataset(
        "s3://bucket/table.csv",
        (File("image"), File("mask")),
        url="s3://bucket",
        transform={"image": CROP, "mask": MASK},
        cache=cache,
        storage_options=options,
    )


def tar(cache: Any, options: dict[str, Any]) -> Any:
    """A photo, a caption and a document."""
    return TarDataset(
        "s3://bucket/tar",
        fields=("jpg", "txt", "json"),
        transform=CROP,
        cache=cache,
        storage_options=options,
    )


def parquet(cache: Any, options: dict[str, Any]) -> Any:
    """Images in a column, as Hugging Face keeps them."""
    return ParquetDataset(
        "s3://bucket/parquet",
        fields=("image", "label"),
        transform=CROP,
        cache=cache,
        storage_options=options,
    )


def mds(cache: Any, options: dict[str, Any]) -> Any:
    return MDSDataset(
        "s3://bucket/mds-numbered", ("image", "label"), transform=CROP, cache=cache, storage_options=options
    )


def lit(cache: Any, options: dict[str, Any]) -> Any:
    return LitDataset("s3://bucket/lit-numbered", transform=CROP, cache=cache, storage_options=options)


def beton(cache: Any, options: dict[str, Any]) -> Any:
    return BetonDataset("s3://bucket/beton", transform=CROP, cache=cache, storage_options=options)


def mixture(cache: Any, options: dict[str, Any]) -> Any:
    """All samples of three, in equal parts."""
    return Mixture([shape(cache, options) for shape in (table, parquet, mds)], [1, 1, 1])


def samples(loader: Any) -> Iterator[list[int]]:
    """The samples of each batch, as numbers; every part of a sample has to tell the same one."""
    for photos, *others in loader:
        told = numbers(photos)
        for other in others:
            assert told == said(other)
        yield told


def flat(batches: Iterator[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def said(column: Any) -> list[int]:
    if isinstance(column, dict):
        return column["n"].tolist()  # type: ignore[no-any-return]
    if isinstance(column, torch.Tensor):
        return column.tolist() if column.ndim == 1 else numbers(column)
    return [int(text.rpartition(" ")[2]) for text in column]


def loader_of(dataset: Any, workers: int) -> Any:
    return fastload.DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, seed=3)


SHAPES = [table, pair, tar, parquet, mds, lit, beton, mixture]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_shape_two_epochs_each_resumed_with_other_workers_each_sample_once(
    shape: Callable[[Any, Any], Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """The first epoch reads S3 and fills the cache; the second reads the cache."""
    sources = 3 if shape is mixture else 1
    wanted = Counter(dict.fromkeys(range(COUNT), sources))

    def resumed(state: dict[str, Any] | None, workers: int) -> Any:
        loader = loader_of(shape(str(tmp_path / "cache"), options), workers)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    state = None
    for workers, others in ((2, 3), (3, 1)):
        loader = resumed(state, workers)
        batches = samples(loader)
        seen = next(batches) + next(batches)
        loader = resumed(loader.state_dict(), others)
        assert Counter(seen + flat(samples(loader))) == wanted
        state = loader.state_dict()
    hits = loader.stats()["counters"]["cache.hits"]
    assert hits >= sources * COUNT - len(seen), "the second epoch reads the cache"
