"""LitData's chunks as a dataset."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fastload.cache import Cache, as_cache
from fastload.datasets.sample_fields import Shape, map_leaves
from fastload.errors import ArgumentError, DecodeError, shorten_errors
from fastload.formats.litdata import (
    formats,
    is_image,
    opener,
    parse_frames,
    parse_index,
)
from fastload.formats.mds import parse_table, split_values, table_size
from fastload.formats.pieces import framed_size, too_large, zstd
from fastload.images.decode import decode_pil
from fastload.shards.catalog import index_shards, list_shards, read_head, read_json
from fastload.shards.dataset import ShardDataset
from fastload.shards.epoch_streams import StreamOptions
from fastload.shards.formats import LITDATA
from fastload.shards.index import RecordOffsets
from fastload.shards.reader import Shard
from fastload.shards.record_fields import Column, ColumnFields, check_decode
from fastload.store import Store, with_budget
from fastload.store.failures import Wait

_ARROW = b"LDARW01\0"


def _read_index(
    counts: dict[str, int], compression: str, store: Store, shard: Shard, wait: Wait
) -> RecordOffsets:
    """See `index_shards`. `counts`: key -> samples. `compression`: see `LitIndex`."""
    count = counts[shard.key]
    if compression == "batch":
        head = read_head(store, shard, framed_size(count, 0), wait)
        return RecordOffsets(parse_frames(head, count), {}, compressed=True)
    whole = compression == "chunk"
    head = read_head(store, shard, table_size(count), wait, compressed=whole)
    if not whole and _ends_with_arrow(store, shard, head, wait):
        raise DecodeError(
            "the chunk has its samples as rows of Arrow, as newer LitData writes dicts of nothing but "
            "bytes, texts, numbers and lists: write samples as tuples, or as Parquet for "
            "fastload.ParquetDataset"
        )
    return RecordOffsets(parse_table(head, count, None if whole else shard.size), {}, compressed=whole)


class _Tree(Shape):
    """The structure that the samples were written with: dicts, lists and tuples of leaves, or one leaf."""

    def __init__(self, tree: Any) -> None:
        self.leaves = {}
        map_leaves(tree, lambda name: self.leaves.setdefault(name, name))
        self._structure = tree


class LitDataset(ShardDataset):
    """The samples of LitData's chunks, which `litdata.optimize` writes, read where they lie and without
    LitData.

    A sample has the structure and the values that `litdata.StreamingDataset` gives: a dict, list or tuple, or
    one value; images of type jpeg and image are uint8 tensors (3, H, W). The leaves are named by their path,
    "image" or "boxes.0". `pickle` is refused unless `unsafe`. Compression by zstd is read at all three
    levels.

    Example::

        from fastload import DataLoader, LitDataset, RandomResizedCrop

        dataset = LitDataset(
            "s3://bucket/lit",
            fields=("image", "label"),
            transform=RandomResizedCrop(224, flip=0.5),
            cache="/ssd/cache",
        )
        for images, labels in DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8):
            ...  # uint8 (256, 3, 224, 224), int64 (256,)

    Chunks have their own index: `len()`, `[]` and the shuffle are as those of `MDSDataset`.

    Refused in words: chunks of tokens (`TokenDataset` reads them), encrypted chunks, and chunks whose samples
    are rows of Arrow, as newer LitData writes dicts of nothing but bytes, texts, numbers and lists.

    Args:
        url: the folder of index.json. Any fsspec URL or path.
        fields: the leaves and the structure of a sample: ("image", "label"), {"x": "image"}, "image". None:
            the structure that was written.
        decode: a dict {leaf: function of its bytes} in place of the decoder of its format; or a function
            from the dict of all leaves' bytes to the sample. Deterministic.
        transform: a fused transform, which takes the one leaf that is an image, or else the one of type bytes
            or file; a dict {leaf: function or fused transform}; or any callable on the sample.
        cycle_length, shuffle_buffer: of epochs that are streamed: see `TarDataset`.
        cache, storage_options, listing_max_age: see `TarDataset`.
        unsafe: unpickle leaves of format pickle. A pickle can run any code of the author of the chunks.

    Raises:
        ArgumentError: a format of leaves that is not known, chunks that are not read, an index.json of
            another kind.
        DecodeError: a chunk was cut, or is not one of LitData; its name is in the error.
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
        check_decode(fields, decode)
        kept_in = as_cache(cache)
        options = with_budget(storage_options)
        root, found = read_json(url, LITDATA, options)
        try:
            told = parse_index(found)
        except DecodeError as error:
            raise ArgumentError(f"{root!r}: {error.message}") from None
        if told.compression:
            zstd()  # missing, it would be an error of each sample
        if fields is None and told.tree is None:
            raise ArgumentError(
                f"{root!r}: its samples have a structure of other than dicts, lists and tuples: name their "
                f"leaves in fields=, of {', '.join(told.names)}"
            )
        shape = _Tree(told.tree) if fields is None else Shape(fields)
        columns = {
            name: Column(
                form,
                opener(form, rgb_tensor, unsafe=unsafe),
                image=is_image(form),
                may_be_image=form.partition(":")[0] in ("bytes", "file"),
            )
            for name, form in zip(told.names, told.formats, strict=True)
        }
        shards, counts = list_shards(root, told.chunks, LITDATA, kept_in, listing_max_age, options)
        form = LITDATA
        if told.compression == "sample":
            unwrap = functools.partial(_inflate, most=shards.store.reading.max_inflated)
            form = dataclasses.replace(LITDATA, unwrap=unwrap)
        split = functools.partial(split_values, sizes=[(name, None) for name in told.names])
        super().__init__(
            url,
            form,
            shards,
            ColumnFields(columns, split, rgb_tensor, shape, decode, transform, formats()),
            decode=decode,
            transform=transform,
            streams=StreamOptions.of(cycle_length, shuffle_buffer),
            cache=kept_in,
            read_index=functools.partial(
                index_shards, functools.partial(_read_index, counts, told.compression)
            ),
        )


def rgb_tensor(value: Any) -> torch.Tensor:
    """Return an encoded image, or pixels, as a uint8 tensor (3, H, W), its EXIF orientation applied."""
    pixels = np.asarray(decode_pil(value, exif=True))
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _ends_with_arrow(store: Store, shard: Shard, head: memoryview, wait: Wait) -> bool:
    """Return whether the samples lie in a table of Arrow at the end. Read its mark only where it may be."""
    if int.from_bytes(head[-4:], "little") == shard.size:
        return False
    end = store.read_range(shard.key, max(0, shard.size - 8), shard.size, shard.version, wait=wait)
    return bytes(end) == _ARROW


def _inflate(record: memoryview, most: int) -> memoryview:
    """Return the one zstd frame of a sample, of at most `most` bytes inflated."""
    module = zstd()
    try:
        frame = module.ZstdDecompressor()
        inflated = frame.decompress(record, most)
    except (module.ZstdError, OSError, ValueError, EOFError) as error:
        raise DecodeError(f"the sample cannot be decompressed: {error}") from None
    if not frame.eof and len(inflated) == most:
        raise DecodeError(too_large("a sample", most + 1, most))
    return memoryview(inflated)
