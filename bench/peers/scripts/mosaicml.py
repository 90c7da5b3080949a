# pip install torch==2.13.0 numpy==2.1.3 pillow-simd==12.1.1.post0 boto3==1.43.117 Brotli==1.2.1
#     catalogue==2.0.10 filelock==4.2.11 python-snappy==0.7.3 tqdm==4.70.1 transformers==4.57.6
#     xxhash==3.8.2 zstd==1.5.7.2
# pip install --no-deps mosaicml-streaming==0.13.0 torchvision==0.28.0

"""MosaicML Streaming over its own shards (MDS), made beforehand, which it keeps on the local disk.

Its S3 client, with the connection that fetched the index, is inherited by all forked workers. Over http
workers then failed on wrong data, or waited 60 s, its read timeout; so it is dropped before the fork.
"""

import itertools
import os
import sys

sys.path.append(sys.path.pop(0))

import torch
import torchvision_on_cpu  # noqa: F401
from peer_side import beside, cache_folder, decode, epochs, files, made, read_file, serve, sign_in
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

SHARD = 16 << 20


def prepare(job):
    return made(beside(job, "mds"), lambda target: write(job, target))


def write(job, target):
    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=target, columns=columns, size_limit=SHARD) as writer:
        for path, label in files(job):
            writer.write({"image": read_file(path), "label": label})


class Photos(StreamingDataset):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return torch.from_numpy(decode(sample["image"], self.image_size)), sample["label"]


def start(job):
    sign_in(job, S3_ENDPOINT_URL=job.endpoint)
    number = itertools.count()  # it refuses a directory that another dataset of this process had

    def loader():
        dataset = Photos(
            remote=f"s3://{os.path.basename(beside(job, 'mds'))}",
            local=os.path.join(cache_folder(job, "mds"), str(next(number))),
            shuffle=True,
            shuffle_seed=int.from_bytes(os.urandom(3), "little"),
            batch_size=job.batch,
        )
        dataset.image_size = job.size
        for stream in dataset.streams:
            stream._downloader.clean_up()
        return StreamingDataLoader(
            dataset, batch_size=job.batch, num_workers=job.workers, persistent_workers=job.later
        )

    return epochs(job, loader)


if __name__ == "__main__":
    serve(start, "mosaicml-streaming", "torch", "pillow-simd", prepare=prepare)
