"""Train another network on other data: two functions, and all options of train.py. Here: spectra.

    torchrun --nproc-per-node 2 examples/resnet50/your_own.py s3://bucket/spectra --cache /ssd --epochs 5

The URL holds train/ and eval/, one object per sample: the class, of ten, then 256 values, all as
little-endian floats.
"""

import numpy as np
from torch import nn

import train
from fastload import ObjectDataset


def spectrum(data: bytes) -> tuple[np.ndarray, int]:
    values = np.frombuffer(data, "<f4")
    return values[1:], int(values[0])


def input_fn(args, mode):
    return ObjectDataset(f"{args.url}/{mode}", spectrum, cache=args.cache)


def model_fn(args, dataset):
    return train.Task(nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)))


if __name__ == "__main__":
    train.run(input_fn, model_fn)
