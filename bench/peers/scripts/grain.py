# pip install numpy==2.3.5 pillow-simd==12.1.1.post0 grain==0.2.18 array-record==0.8.6 protobuf==7.36.2
#     boto3==1.43.117 botocore==1.43.117 urllib3==2.8.0

"""Grain, Google's loader for JAX, by its threads: mode "files", or "s3" through boto3 in them.

It runs without its worker processes: they restart for each epoch, which made it slower on two cores.
"""

import random
import sys

sys.path.append(sys.path.pop(0))  # this file is called as the package is

import grain.python as grain
from peer_side import boto3_reader, decode, files, keys, read_file, serve


class Photos(grain.RandomAccessDataSource):
    def __init__(self, job):
        self.size = job.size
        if job.mode == "files":
            self.samples, self.read = files(job), read_file
        else:
            self.samples, self.read = keys(job), boto3_reader(job, job.workers)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        name, label = self.samples[index]
        return {"image": decode(self.read(name), self.size), "label": label}


def start(job):
    source = Photos(job)
    threads = grain.ReadOptions(num_threads=job.workers)

    def epoch():
        shuffled = grain.MapDataset.source(source).shuffle(seed=random.getrandbits(30))
        for batch in shuffled.to_iter_dataset(threads).batch(job.batch):
            yield len(batch["image"])

    return epoch


if __name__ == "__main__":
    serve(start, "grain", "boto3")
