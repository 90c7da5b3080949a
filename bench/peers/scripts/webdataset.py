"""WebDataset over tar shards, which curl fetches from presigned URLs, in its own pipeline and loader.

It shuffles within 1,000 samples of a worker's shards. Epochs after others read its `cache_dir`. It needs no
environment of its own: the package is small, and the project has it.
"""

import glob
import os
import sys

sys.path.append(sys.path.pop(0))  # this file is called as the package is

import torch
import webdataset
from peer_side import beside, cache_folder, decode, epochs, s3_client, serve

SHUFFLE_BUFFER = 1000  # samples, as in its examples


def shards(job):
    """Commands that write the shards to stdout."""
    client, folder = s3_client(job), beside(job, "tar")
    for path in sorted(glob.glob(f"{folder}/*.tar")):
        key = {"Bucket": os.path.basename(folder), "Key": os.path.basename(path)}
        url = client.generate_presigned_url("get_object", Params=key, ExpiresIn=7 * 86400)
        yield f"pipe:curl -s -f '{url}'"


def name_of(command):
    """Of a shard in the cache; without what signs its URL."""
    return os.path.basename(command.split("?")[0])


def start(job):
    urls = list(shards(job))
    cache = {"cache_dir": cache_folder(job, "shards"), "url_to_name": name_of} if job.later else {}

    def image(data):
        return torch.from_numpy(decode(data, job.size))

    dataset = (
        webdataset.WebDataset(urls, shardshuffle=len(urls), empty_check=False, **cache)
        .shuffle(SHUFFLE_BUFFER)
        .to_tuple("jpg", "cls")
        .map_tuple(image, int)
        .batched(job.batch)
    )

    def loader():
        return webdataset.WebLoader(
            dataset, batch_size=None, num_workers=job.workers, persistent_workers=job.later
        )

    return epochs(job, loader)


if __name__ == "__main__":
    serve(start, "webdataset", "torch", "pillow-simd")
