"""fastload: mode "SOURCE MODE", SOURCE one of files, s3, tar, tfrecord, MODE that of the cache or none."""

import os

from _serve import beside, cache_folder, serve

from fastload import Cache, DataLoader, ImageFolder, RandomResizedCrop, TarDataset, TFRecordDataset


def dataset(job, source, cache):
    crop = RandomResizedCrop(job.size)
    if source == "files":
        return ImageFolder(job.folder, crop, cache=cache)
    access = {"endpoint_url": job.endpoint, "key": job.key, "secret": job.secret}
    if source == "s3":
        return ImageFolder(f"s3://{job.bucket}/", crop, cache=cache, storage_options=access)
    url = f"s3://{os.path.basename(beside(job, source))}/"
    options = {"transform": crop, "cache": cache, "storage_options": access, "index": False}
    if source == "tar":
        return TarDataset(url, **options)
    return TFRecordDataset(url, {"image": bytes, "label": int}, **options)


def start(job):
    source, mode = job.mode.split()

    def loader():
        cache = None if mode == "none" else Cache(cache_folder(job, mode), mode, short_side=300)
        data = dataset(job, source, cache)
        return DataLoader(
            data, job.batch, shuffle=True, num_workers=job.workers, persistent_workers=job.later
        )

    if job.later:
        running = loader()
        return lambda: (size(batch) for batch in running)
    return lambda: (size(batch) for batch in loader())


def size(batch):
    """Of a batch of shards' fields, or of images and labels."""
    return len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch[0])


if __name__ == "__main__":
    serve(start, "fastload", "torch")
