"""TFRecord files as a dataset."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastload.cache import Cache, as_cache
from fastload.cache.listings import Listings
from fastload.datasets.fields import Fields
from fastload.errors import ArgumentError
from fastload.formats.tfrecord import Spec, check_spec
from fastload.images.crop import is_fused
from fastload.shards.catalog import ShardList
from fastload.shards.dataset import ShardDataset
from fastload.shards.epoch_streams import StreamOptions
from fastload.shards.formats import TFRECORD
from fastload.shards.record_fields import ChosenFields, ExampleFields, Leaf, shape_of


class TFRecordDataset(ShardDataset):
    """The records of TFRecord files, read without TensorFlow; both CRCs of every record are checked.

    Example::

        from fastload import DataLoader, RandomResizedCrop, TFRecordDataset

        dataset = TFRecordDataset(
            "s3://bucket/shards/train-*.tfrecord",
            {"image": bytes, "label": int},
            fields=("image", "label"),
            transform=RandomResizedCrop(224, flip=0.5),
            cache="/ssd/cache",
        )
        for images, labels in DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8):
            images, labels  # uint8 (256, 3, 224, 224), int64 (256,)

    Once its shards are indexed, it is a map-style dataset with random access and an exact shuffle. The index
    comes from index files, or is made in the first epoch and kept in the cache. Until then `[]` raises
    TypeError, `len()` is the hint `num_samples` or raises too, and `fastload.DataLoader` reads it as streams:
    `cycle_length` files at once per rank, read ahead in large ranges, shuffled in blocks; without a shuffle
    one after the other, so that one worker, or none, gives the order of the files. The same loop reads both.

    With index files and no cache it is read at random too, unless records are smaller than 32 KiB on average
    or files are compressed: then every epoch is streamed. A damaged record is an error with file and offset,
    or counted under `on_error`. A damaged length ends its file, as one bad record.

    Args:
        url: a prefix, one file, `{000..099}`, a glob, a list of these: any fsspec URL or path.
        features: name -> bytes, str, int, float for one value, or a list of one of these such as [int] for
            any number. The sample is then a dict of bytes, str, int and float, of lists, and of numpy arrays
            (int64, float32). None: records are no Examples; a sample is the bytes of its record.
        decode: function from the bytes, or from the dict of features, to the sample. Deterministic.
        transform: a fused transform, which takes the one feature of type bytes as an image (the sample then
            has a uint8 tensor in its place); a dict {feature: function or fused transform}; or any callable
            on the sample. Fused transforms write their images straight into the batch.
        fields: the structure of a sample: a tuple, a dict, nested or not, or one leaf. A leaf is the name of
            a feature; or alternatives, of which the first that a record has counts ("image;image/encoded").
            "box?" may be absent: the value is None then, and its column in a batch always a list. In
            `transform={...}` a leaf has the name of its key in a dict, else of its first alternative. None: a
            dict of the features.
        num_samples: a hint for `len()` while the files are not indexed, for schedules and progress bars.
        cycle_length: files open at once, by all workers of a rank together.
        block_length: records taken from each file in turn.
        shuffle_buffer: size of a shuffled block per worker: records as int, or bytes as text ("64MB").
        fingerprint: text that identifies `decode` in the keys of cache mode "decoded", so that another
            `decode` gets other keys. Default: a description of all that `decode` holds (its code, arguments,
            closure, attributes, the globals it uses).
        cache: a `Cache`, or a directory for one in mode "auto"; filled during the first epoch.
        index: the URL of the index files of tfrecord2idx; None: beside the shards, if there are any; False:
            use none.
        compression: of all files: "gzip", "zlib" or "" (none); None: by the first bytes of each file.
        storage_options: for `open_store`.
        listing_max_age: how old a listing that the cache keeps may be, to be used in place of a new one: text
            such as "12h" or "7d", or seconds. 0: every job lists again; its ranks share that listing.

    Raises:
        ArgumentError, NotFoundError, AccessDeniedError, StoreError: within 10 s, before any worker starts.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        features: Spec | None = None,
        decode: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = None,
        *,
        fields: Any = None,
        num_samples: int | None = None,
        cycle_length: int = 32,
        block_length: int = 1,
        shuffle_buffer: int | str = "64MB",
        fingerprint: str | None = None,
        cache: Cache | str | os.PathLike[str] | None = None,
        index: str | os.PathLike[str] | bool | None = None,
        compression: str | None = None,
        storage_options: dict[str, Any] | None = None,
        listing_max_age: float | str = 0,
    ) -> None:
        known = _fields(features, fields, decode, transform)
        kept_in = as_cache(cache)
        super().__init__(
            url,
            TFRECORD,
            functools.partial(
                ShardList,
                url,
                TFRECORD,
                compression=compression,
                listings=Listings.of(kept_in, listing_max_age),
                storage_options=storage_options or {},
            ),
            known,
            decode=decode,
            transform=transform,
            shape=known.shape if isinstance(known, ChosenFields) else None,
            num_samples=num_samples,
            streams=StreamOptions.of(cycle_length, block_length, shuffle_buffer),
            fingerprint=fingerprint,
            cache=kept_in,
            index=index,
        )


def _fields(features: Spec | None, chosen: Any, decode: Any, transform: Any) -> Fields | None:
    """The fields of a record; `chosen`: the user's `fields=`."""
    parts = transform.items() if isinstance(transform, Mapping) else []
    fused = [name for name, part in parts if is_fused(part)]
    if chosen is None:
        return None if features is None else ExampleFields(features, fused or None)
    if features is None:
        raise ArgumentError("fields= names features: pass features= too, a dict of their names and types")
    if decode is not None:
        raise ArgumentError("fields= and decode= both say what a sample is: leave one out")
    check_spec(features)
    leaves = {name: Leaf.parse(text).names for name, text in shape_of(chosen).leaves.items()}
    wanted = {feature: features.get(feature) for names in leaves.values() for feature in names}
    for feature, kind in wanted.items():
        if kind is None:
            raise ArgumentError(f"fields= names {feature!r}, and features= has {', '.join(features)}")
    if fused:
        images = [feature for name in fused for feature in leaves.get(name, ())]
    else:  # the one leaf that is bytes
        encoded = [names for names in leaves.values() if all(wanted[one] is bytes for one in names)]
        images = list(encoded[0]) if len(encoded) == 1 else []
    return ChosenFields(ExampleFields(wanted, images, lacking=True), chosen)
