# pip install torch==2.13.0 numpy==2.3.5 pillow-simd==12.1.1.post0 datasets==5.2.0 s3fs==2026.9.0

"""Hugging Face datasets over a Parquet file with images: shuffled in a buffer of 1,000 rows."""

import os
import random
import sys

sys.path.append(sys.path.pop(0))

import torch
from datasets import load_dataset
from peer_side import beside, decode, epochs, serve

SHUFFLE_BUFFER = 1000  # rows, its default


def start(job):
    name = os.path.basename(beside(job, "parquet"))
    access = {"key": job.key, "secret": job.secret, "endpoint_url": job.endpoint}
    url, options = f"s3://{name}/*.parquet", {"storage_options": access}
    if job.later:  # of a copy on the local disk
        url, options = f"{beside(job, 'parquet')}/*.parquet", {}
    rows = load_dataset("parquet", data_files=url, split="train", streaming=True, **options)

    def sample(row):
        return torch.from_numpy(decode(row["image"]["bytes"], job.size)), row["label"]

    def loader():
        shuffled = rows.shuffle(seed=random.getrandbits(30), buffer_size=SHUFFLE_BUFFER)
        return torch.utils.data.DataLoader(
            shuffled,
            job.batch,
            num_workers=job.workers,
            persistent_workers=job.later,
            collate_fn=lambda batch: torch.utils.data.default_collate([sample(row) for row in batch]),
        )

    return epochs(job, loader)


if __name__ == "__main__":
    serve(start, "datasets", "torch", "pillow-simd")
