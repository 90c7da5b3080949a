"""fastload: mode "SOURCE MODE", SOURCE one of files, s3, tfrecord, MODE that of the cache or none.

SOURCE also table, pair, tar, parquet, mixture and what the scripts of others wrote: mds, litdata, beton.

First epochs without a cache share one dataset, listed at the start, as others' do; those that fill a cache
begin with an empty one, and so list the bucket within their time. "memory MODE" decodes what the cache would
keep, from memory, by one core and without a loader.
"""

import os
import random

import numpy as np
from peer_side import beside, cache_folder, epochs, in_memory, serve

from fastload import (
    BetonDataset,
    Cache,
    DataLoader,
    File,
    ImageFolder,
    LitDataset,
    MDSDataset,
    Mixture,
    ParquetDataset,
    RandomResizedCrop,
    TableDataset,
    TarDataset,
    TFRecordDataset,
)
from fastload.images import decode_resized, shrink
from fastload.images.decode import to_dct


def dataset(job, source, cache):
    crop = RandomResizedCrop(job.size, flip=0.5)
    if source == "files":
        return ImageFolder(job.folder, crop, cache=cache)
    access = {"endpoint_url": job.endpoint, "key": job.key, "secret": job.secret}
    options = {"cache": cache, "storage_options": access}
    if source == "s3":
        return ImageFolder(f"s3://{job.bucket}/", crop, **options)
    pairs = f"s3://{job.bucket}-pairs"
    if source == "table":
        fields = (File("image"), "label")
        return TableDataset(f"{pairs}/table.csv", fields, url=pairs, transform=crop, **options)
    if source == "pair":
        mask = RandomResizedCrop(job.size, flip=0.5, interpolation="nearest", channels=1)
        fields, crops = (File("image"), File("mask")), {"image": crop, "mask": mask}
        return TableDataset(f"{pairs}/table.csv", fields, url=pairs, transform=crops, **options)
    if source == "mixture":
        parts = [dataset(job, part, cache) for part in ("s3", "litdata", "mds")]
        return Mixture(parts, [1, 1, 1], num_samples=len(parts[0]))
    url = f"s3://{os.path.basename(beside(job, source))}"
    if source == "tar":
        return TarDataset(url, fields=("jpg", "cls"), transform=crop, index=False, **options)
    if source == "tfrecord":
        return TFRecordDataset(url, {"image": bytes, "label": int}, transform=crop, index=False, **options)
    reader = {"parquet": ParquetDataset, "mds": MDSDataset, "litdata": LitDataset}.get(source, BetonDataset)
    return reader(url, fields=("image", "label"), transform=crop, **options)


def start(job):
    source, mode = job.mode.split()
    if source == "memory":
        return decoding(job, mode)

    listed = dataset(job, source, None) if mode == "none" else None

    def loader():
        data = listed
        if data is None:
            data = dataset(job, source, Cache(cache_folder(job, mode), mode, short_side=300))
        return DataLoader(
            data, job.batch, shuffle=True, num_workers=job.workers, persistent_workers=job.later
        )

    return epochs(job, loader, size)


def decoding(job, mode):
    kept = {
        "raw": bytes,
        "dct": to_dct,
        "shrunk": lambda data: shrink(data, 300, 90),
        "decoded": lambda data: decode_resized(data, 300),
    }
    photos = [kept[mode](photo) for photo, _ in in_memory(job)]
    crop = RandomResizedCrop(job.size, flip=0.5)
    out = np.empty((job.batch, *crop.sample_shape), np.uint8)

    def epoch():
        random.shuffle(photos)
        for first in range(0, len(photos), job.batch):
            batch = photos[first : first + job.batch]
            failures = crop.fill(out[: len(batch)], batch, [random.getrandbits(64) for _ in batch])
            assert not failures, failures
            yield len(batch)

    return epoch


def size(batch):
    """Of a batch of shards' fields, or of images and labels."""
    return len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch[0])


if __name__ == "__main__":
    serve(start, "torch-fastload", "torch")
