"""fastload: mode "SOURCE MODE", SOURCE one of files, s3, tar, tfrecord, MODE that of the cache or none.

SOURCE mds, litdata or NAME.beton: what their own scripts wrote, on the S3 server in a first epoch, else on
the local disk.

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
    ImageFolder,
    LitDataset,
    MDSDataset,
    RandomResizedCrop,
    TarDataset,
    TFRecordDataset,
)
from fastload.images import decode_resized, shrink


def dataset(job, source, cache):
    crop = RandomResizedCrop(job.size, flip=0.5)
    if source == "files":
        return ImageFolder(job.folder, crop, cache=cache)
    access = {"endpoint_url": job.endpoint, "key": job.key, "secret": job.secret}
    if source == "s3":
        return ImageFolder(f"s3://{job.bucket}/", crop, cache=cache, storage_options=access)
    if source in ("mds", "litdata") or source.endswith(".beton"):
        reader = {"mds": MDSDataset, "litdata": LitDataset}.get(source, BetonDataset)
        place = beside(job, source)
        options = {"fields": ("image", "label"), "transform": crop, "cache": cache}
        if job.later:
            return reader(place, **options)
        return reader(f"s3://{os.path.basename(place)}", storage_options=access, **options)
    url = f"s3://{os.path.basename(beside(job, source))}/"
    options = {"transform": crop, "cache": cache, "storage_options": access, "index": False}
    if source == "tar":
        return TarDataset(url, **options)
    return TFRecordDataset(url, {"image": bytes, "label": int}, **options)


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
    serve(start, "fastload", "torch")
