# pip install torch==2.13.0 numpy==2.3.5 pillow-simd==12.1.1.post0 s3torchconnector==1.5.0
#     s3torchconnectorclient==1.5.0

"""Amazon's S3 connector for PyTorch: its map-style dataset under torch's DataLoader, listed at the start."""

import os
import sys

sys.path.append(sys.path.pop(0))  # this file is called as the package is

import torch
from peer_side import decode, epochs, serve, sign_in, torch_loader
from s3torchconnector import S3ClientConfig, S3MapDataset, S3ReaderConstructor


def start(job):
    sign_in(job)
    classes = {name: label for label, name in enumerate(sorted(os.listdir(job.folder)))}

    def sample(reader):
        return torch.from_numpy(decode(reader.read(), job.size)), classes[reader.key.split("/")[-2]]

    dataset = S3MapDataset.from_prefix(
        f"s3://{job.bucket}/",
        region="us-east-1",
        endpoint=job.endpoint,
        transform=sample,
        s3client_config=S3ClientConfig(force_path_style=True),
        reader_constructor=S3ReaderConstructor.sequential(),
    )
    len(dataset)  # lists the bucket
    return epochs(job, lambda: torch_loader(dataset, job))


if __name__ == "__main__":
    serve(start, "s3torchconnector", "torch", "pillow-simd")
