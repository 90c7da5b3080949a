"""Train another network on other data: three functions, and the options of train.py. Here: spectra.

    torchrun --nproc-per-node 2 examples/resnet50/your_own.py s3://bucket/spectra --cache /ssd --epochs 5

The URL holds train/ and eval/, one object per sample: the class, of ten, then 256 values, all as
little-endian floats. The options of images and of the built-in optimizers do not exist here.
"""

import numpy as np
import torch
from torch import nn

import train
from fastload import ObjectDataset
from step import top1, top5


def spectrum(data: bytes) -> tuple[np.ndarray, int]:
    values = np.frombuffer(data, "<f4")
    return values[1:], int(values[0])


def input_fn(args, mode):
    return ObjectDataset(f"{args.url}/{mode}", decode=spectrum, cache=args.cache)


def model_fn(args, dataset):
    network = nn.Sequential(nn.Linear(256, args.width), nn.ReLU(), nn.Linear(args.width, 10))
    return train.Task(network, metrics={"accuracy": top1, "top-5": top5, "confidence": confidence})


def confidence(outputs, targets):
    """What to log beside the loss: the sum over a batch, of which the report shows the mean."""
    return outputs.softmax(1).amax(1).sum()


def optimizer_fn(module, args):
    """--warmup and --decay are factors of this rate."""
    return torch.optim.AdamW(module.parameters(), lr=0.003)


def options(parser):
    parser.add_argument("--width", type=int, default=64, help="of the hidden layer")


if __name__ == "__main__":
    train.run(input_fn, model_fn, optimizer_fn, add_options=options)
