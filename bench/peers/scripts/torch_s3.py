"""torch's DataLoader over an S3 client in `__getitem__`, one client a worker: mode "s3fs" or "boto3"."""

import torch
from peer_side import boto3_reader, decode, epochs, keys, s3fs_reader, serve, torch_loader


class Bucket(torch.utils.data.Dataset):
    def __init__(self, job):
        self.job, self.keys, self.read = job, keys(job), None

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        self.read = self.read or {"s3fs": s3fs_reader, "boto3": boto3_reader}[self.job.mode](self.job)
        key, label = self.keys[index]
        return torch.from_numpy(decode(self.read(key), self.job.size)), label


def start(job):
    dataset = Bucket(job)
    return epochs(job, lambda: torch_loader(dataset, job))


if __name__ == "__main__":
    serve(start, "torch", "s3fs", "boto3", "pillow-simd")
