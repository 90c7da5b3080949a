"""MDS, the shards of MosaicML Streaming, as a dataset."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fastload.cache import Cache, as_cache
from fastload.datasets.sample_fields import Shape
from fastload.errors import ArgumentError, DecodeError, shorten_errors
from fastload.formats.mds import (
    IMAGES,
    MDSShard,
    encodings,
    opener,
    parse_shard,
    parse_table,
    split_values,
    table_size,
)
from fastload.formats.values import as_pil
from fastload.images.decode import Oriented, decode_pil
from fastload.shards.catalog import index_shards, list_shards, read_head, read_json
from fastload.shards.dataset import ShardDataset
from fastload.shards.epoch_streams import StreamOptions
from fastload.shards.formats import MDS
from fastload.shards.index import RecordOffsets
from fastload.shards.names import check_name
from fastload.shards.reader import Shard
from fastload.shards.record_fields import Column, ColumnFields, check_decode
from fastload.store import Store, with_budget
from fastload.store.failures import Wait


def _read_index(listed: dict[str, MDSShard], store: Store, shard: Shard, wait: Wait) -> RecordOffsets:
    """See `index_shards`. `listed`: the shards in index.json, by their keys."""
    entry = listed[shard.key]
    if shard.size != entry.bytes:
        raise DecodeError(
            f"the file has {shard.size:,} bytes, and index.json says {entry.bytes:,}: it was cut or "
            "replaced; copy it again, and leave listing_max_age= out if the listing is older"
        )
    head = read_head(store, shard, table_size(entry.samples), wait, compressed=entry.compressed)
    offsets = parse_table(head, entry.samples, entry.raw_bytes)
    return RecordOffsets(offsets, {}, entry.compressed)


class MDSDataset(ShardDataset):
    """The samples of MDS, the shards of MosaicML Streaming, read where they lie and without its library.

    A sample is a dict of the columns, with the values that `streaming.StreamingDataset` gives: str, bytes,
    int, numpy scalars and arrays, JSON, lists, and `PIL.Image` for jpeg and png, in the mode that the file
    has. `pkl` is refused unless `unsafe`. Shards may be compressed by zstd, gz or bz2.

    Example::

        from fastload import DataLoader, MDSDataset, RandomResizedCrop

        dataset = MDSDataset(
            "s3://bucket/mds",
            fields=("image", "label"),
            transform=RandomResizedCrop(224, flip=0.5),
            cache="/ssd/cache",
        )
        for images, labels in DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8):
            ...  # uint8 (256, 3, 224, 224), int64 (256,)

    Shards have their own index, so `len()` and `[]` work from the start. The constructor reads index.json and
    the head of every shard, and a cache keeps what it found. The shuffle is exact, with one exception: where
    samples are smaller than 32 KiB on average, or shards are compressed, epochs are streamed as those of
    `TarDataset` until the cache has all samples. The sizes in index.json are checked, its hashes are not.

    Args:
        url: the folder with index.json: of one split, or of a merged index. Any fsspec URL or path.
        fields: the columns and the structure of a sample: ("image", "label"), {"x": "image"}, "image". None:
            a dict of all columns.
        decode: a dict {column: function of its bytes} in place of the decoder of its encoding; or a function
            from the dict of all columns' bytes to the sample. Deterministic.
        transform: a fused transform, which takes the one column of type jpeg or png, or else the one of type
            bytes; a dict {name in the sample: function or fused transform}; or any callable on the sample.
        cycle_length, shuffle_buffer: of epochs that are streamed: see `TarDataset`.
        cache, storage_options, listing_max_age: see `TarDataset`.
        unsafe: unpickle columns of encoding pkl. A pickle can run any code of the author of the shards.

    Raises:
        ArgumentError: an encoding that is not known, a column that does not exist, an index.json of another
            kind.
        DecodeError: a shard was cut, or is not MDS; its name is in the error.
        NotFoundError, AccessDeniedError, StoreError.
    """

    @shorten_errors
    def __init__(
        self,
        url: str | os.PathLike[str],
        fields: Any = None,
        *,
        decode: Mapping[str, Callable[[bytes], Any]] | Callable[[dict[str, Any]], Any] | None = None,
        transform: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = None,
        cycle_length: int = 32,
        shuffle_buffer: int | str = "64MB",
        cache: Cache | str | os.PathLike[str] | None = None,
        unsafe: bool = False,
        storage_options: dict[str, Any] | None = None,
        listing_max_age: float | str = 0,
    ) -> None:
        shape = None if fields is None else Shape(fields)
        check_decode(fields, decode)
        kept_in = as_cache(cache)
        options = with_budget(storage_options)
        root, told = read_json(url, MDS, options)
        found = _shards(root, told["shards"])
        columns = next(iter(found.values())).columns
        opened = {
            column.name: Column(
                column.encoding,
                opener(column.encoding, unsafe=unsafe),
                image=column.encoding.partition(":")[0] in IMAGES,
                may_be_image=column.encoding == "bytes",
            )
            for column in columns
        }
        shards, listed = list_shards(root, found, MDS, kept_in, listing_max_age, options)
        split = functools.partial(split_values, sizes=[(column.name, column.size) for column in columns])
        super().__init__(
            url,
            MDS,
            shards,
            ColumnFields(opened, split, _open_image, shape, decode, transform, encodings(), opens_files=True),
            decode=decode,
            transform=transform,
            streams=StreamOptions.of(cycle_length, shuffle_buffer),
            cache=kept_in,
            read_index=functools.partial(index_shards, functools.partial(_read_index, listed)),
        )


def _shards(root: str, entries: list[Any]) -> dict[str, MDSShard]:
    """Return the entries of index.json, by the names of their files.

    Raises:
        ArgumentError: one of them is not read, or has other columns than the first.
    """
    found: dict[str, MDSShard] = {}
    for number, entry in enumerate(entries):
        try:
            shard = parse_shard(entry)
        except DecodeError as error:
            raise ArgumentError(f"{root!r}: shard {number} of index.json: {error.message}") from None
        found[check_name(shard.name, root)] = shard
        if shard.columns != next(iter(found.values())).columns:
            raise ArgumentError(
                f"{root!r}: shard {shard.name!r} has other columns than the first one: read them as two "
                "datasets"
            )
    if len(found) < len(entries) or not found:
        raise ArgumentError(f"{root!r}: index.json lists no shards, or one twice: write it again")
    return found


def _open_image(value: Any) -> Any:
    """Return an encoded image in the mode that it has; pixels of the cache in RGB."""
    return decode_pil(value) if isinstance(value, np.ndarray | Oriented) else as_pil(value)
