# pip install torch==2.13.0 numpy==2.3.5 pillow-simd==12.1.1.post0 obstore==0.12.1 boto3==1.43.117
#     s3fs==2026.9.0 filelock==4.2.11 lightning-utilities==0.15.3 requests==2.34.2 zstd==1.5.7.2
#     tifffile==2026.3.3
# pip install --no-deps litdata==0.2.76 torchvision==0.28.0

"""LitData: mode "chunks" streams its own format, made beforehand; "raw" reads the photos and keeps the files.

Chunks come in any order, and photos are shuffled within a chunk. The list of the raw photos is made at the
start, in a file that is not put into the bucket.
"""

import os
import random
import sys

sys.path.append(sys.path.pop(0))  # this file is called as the package is

import litdata
import torch
import torchvision_on_cpu  # noqa: F401
from litdata.raw import StreamingRawDataset
from litdata.raw.indexer import FileIndexer
from litdata.streaming import downloader
from peer_side import (
    beside,
    cache_folder,
    decode,
    epochs,
    files,
    made,
    read_file,
    serve,
    sign_in,
    torch_loader,
)

CHUNK = "16MB"


def prepare(job):
    """Its documentation asks for shuffled samples where the source is in an order, here that of classes."""
    samples = files(job)
    random.Random(0).shuffle(samples)
    return made(
        beside(job, "litdata"),
        lambda target: litdata.optimize(
            read, samples, target, chunk_bytes=CHUNK, num_workers=os.cpu_count(), verbose=False
        ),
    )


def read(sample):
    path, label = sample
    return {"image": read_file(path), "label": label}


class Index(FileIndexer):
    def _upload_to_cloud(self, *_):
        raise PermissionError("the bucket is read-only")


class Raw(StreamingRawDataset):
    def __getitems__(self, indices):
        names = [self.items[index].path.split("/")[-2] for index in indices]
        photos = zip(super().__getitems__(indices), names, strict=True)
        return [(torch.from_numpy(decode(data, self.size)), self.classes[name]) for data, name in photos]


def start(job):
    sign_in(job)
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"  # it has no option for a server without TLS
    return epochs(job, {"chunks": chunks, "raw": raw}[job.mode](job))


def chunks(job):
    def sample(item):
        return torch.from_numpy(decode(item["image"], job.size)), item["label"]

    def loader():
        dataset = litdata.StreamingDataset(
            f"s3://{os.path.basename(beside(job, 'litdata'))}/",
            cache_dir=cache_folder(job, "chunks"),
            shuffle=True,
            max_cache_size="100GB",
            transform=sample,
            seed=random.getrandbits(30),
        )
        return litdata.StreamingDataLoader(
            dataset, batch_size=job.batch, num_workers=job.workers, persistent_workers=job.later
        )

    return loader


def raw(job):
    dataset = Raw(
        f"s3://{job.bucket}/", cache_dir=cache_folder(job, "raw"), cache_files=True, indexer=Index()
    )
    dataset.size = job.size
    dataset.classes = {name: label for label, name in enumerate(sorted(os.listdir(job.folder)))}

    def loader():
        cache_folder(job, "raw")
        return torch_loader(dataset, job)

    return loader


if __name__ == "__main__":
    serve(start, "litdata", "torch", "obstore", "pillow-simd", prepare=prepare)
