"""FFCV's .beton files as a dataset."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fastload.cache import Cache, as_cache
from fastload.datasets.sample_fields import Shape
from fastload.errors import DecodeError, shorten_errors
from fastload.formats.beton import (
    HEADER,
    BetonField,
    BetonHeader,
    BetonRecords,
    opener,
    parse_fields,
    parse_header,
    parts_of,
    row_type,
)
from fastload.images.decode import decode_image
from fastload.shards.catalog import ShardList, index_shards, read_head
from fastload.shards.dataset import ShardDataset
from fastload.shards.formats import BETON
from fastload.shards.index import RecordOffsets
from fastload.shards.reader import Shard, naming, read_in_turn
from fastload.shards.record_fields import Column, ColumnFields, check_decode
from fastload.store import Store
from fastload.store.failures import Wait, sleep

_PIECE = 8 << 20  # bytes of a request for the tables


def _read_index(expected: list[BetonField], store: Store, shard: Shard, wait: Wait) -> RecordOffsets:
    """See `index_shards`. `expected`: the fields of the first file, which all others must have."""
    header, fields = read_fields(store, shard, wait)
    if fields != expected:
        raise DecodeError(
            f"the fields are {_text(fields)}, and the first file has {_text(expected)}: read them as "
            "two datasets"
        )
    row_bytes = row_type(fields).itemsize
    end = header.rows + header.samples * row_bytes
    if end > header.allocation:
        raise DecodeError(
            f"the file would have {header.samples:,} samples, more than fit into it: it is damaged"
        )
    rows = _read(store, shard, header.rows, end, wait)
    allocated = _read(store, shard, header.allocation, shard.size, wait)
    heads = np.frombuffer(rows, np.uint8).reshape(-1, row_bytes)
    offsets = parts_of(header, row_bytes, memoryview(allocated))
    return RecordOffsets(offsets, {}, compressed=False, heads=heads)


class BetonDataset(ShardDataset):
    """The samples of FFCV's .beton files, read where they lie and without FFCV.

    A sample is a tuple of the fields in their order: int, float, bytes, JSON, numpy arrays (NDArrayField),
    tensors (TorchTensorField), and images, written as JPEGs or raw, as uint8 arrays (H, W, 3). A file of the
    author's own field classes is refused.

    Example::

        from fastload import BetonDataset, DataLoader, RandomResizedCrop

        dataset = BetonDataset(
            "/data/train.beton", fields=("jpg", "int"), transform=RandomResizedCrop(224, flip=0.5)
        )
        for images, labels in DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8):
            ...  # uint8 (256, 3, 224, 224), int64 (256,)

    It is a map-style dataset: `len()`, `[]`, an exact shuffle. Samples have the numbers that FFCV gives them.
    The constructor reads the tables of each file, 60 to 100 bytes per sample, and a cache keeps them. A
    sample is one ranged read. Files are never streamed, because samples do not lie in the order of their
    numbers.

    Args:
        url: a file, a prefix, a glob or a list of these: any fsspec URL or path.
        fields: the fields and the structure of a sample: ("image", "label"), {"x": "image"}, "image". None: a
            tuple of all fields.
        decode: a dict {field: function of its bytes} in place of the decoder of its kind; or a function from
            the dict of all fields to the sample, with bytes for JPEGs and arrays for raw images.
            Deterministic.
        transform: a fused transform, which takes the one image of a sample; a dict {field: function or fused
            transform}; or any callable on the sample.
        cache, storage_options, listing_max_age: see `TarDataset`.

    Raises:
        ArgumentError: a field that does not exist, or a transform that does not say which image it takes.
        DecodeError: a file is not a .beton, or was cut; its name is in the error.
        NotFoundError, AccessDeniedError, StoreError.
    """

    @shorten_errors
    def __init__(
        self,
        url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        fields: Any = None,
        *,
        decode: Mapping[str, Callable[[Any], Any]] | Callable[[dict[str, Any]], Any] | None = None,
        transform: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = None,
        cache: Cache | str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        listing_max_age: float | str = 0,
    ) -> None:
        check_decode(fields, decode)
        kept_in = as_cache(cache)
        shards = ShardList(url, BETON, kept_in, listing_max_age, storage_options)
        with naming(shards[0].key):
            _, found = read_fields(shards.store, shards[0], sleep)
        shape = Shape(tuple(field.name for field in found) if fields is None else fields)
        columns = {
            field.name: Column(field.kind, opener(field), image=field.kind == "image") for field in found
        }
        super().__init__(
            url,
            BETON,
            shards,
            ColumnFields(columns, BetonRecords(found), _open_image, shape, decode, transform, []),
            decode=decode,
            transform=transform,
            cache=kept_in,
            read_index=functools.partial(index_shards, functools.partial(_read_index, found)),
        )


def read_fields(store: Store, shard: Shard, wait: Wait) -> tuple[BetonHeader, list[BetonField]]:
    """Return the header of a file, and its fields.

    Raises:
        DecodeError: it is no .beton, or was cut.
    """
    header = parse_header(read_head(store, shard, min(512, shard.size), wait), shard.size)
    return header, parse_fields(read_head(store, shard, header.rows, wait)[HEADER:])


def _read(store: Store, shard: Shard, start: int, stop: int, wait: Wait) -> bytes:
    """Return the bytes [start, stop) of a file, request by request."""
    ranges = ((edge, min(edge + _PIECE, stop)) for edge in range(start, stop, _PIECE))
    return b"".join(iter(read_in_turn(store, shard, ranges, wait), None))


def _text(fields: list[BetonField]) -> str:
    return ", ".join(f"{field.name} ({field.kind})" for field in fields)


def _open_image(value: Any) -> Any:
    """Return a JPEG, or pixels, as an array (H, W, 3) of its own memory."""
    return np.array(decode_image(value))
