"""The common part of the peers' scripts. Plain Python: their environments have no fastload.

    python SCRIPT JOB

JOB is one JSON document: {
  "folder"    class folders of photos on the local disk
  "bucket", "endpoint", "key", "secret"    the same photos on an S3 server
  "batch", "size", "workers", "mode"    batches of `batch` crops of `size` pixels; `mode` is the script's own
  "later"     false: every epoch is a first one, with new workers and empty caches; true: one after others
  "scratch"   a directory of the script's own
}

The script prints {"versions": {...}} when it is ready. For each line of stdin, {"seconds": at most}, it runs
an epoch and prints {"images", "seconds", "first_batch"}: both times count from the start of the epoch, the
start of its workers included. With {"prepare": true} in the job it instead makes its own files beside the
photos, prints {"bytes", "seconds"} and ends.
"""

import io
import json
import math
import os
import random
import shutil
import sys
import time
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
from PIL import Image


def serve(start, *packages, prepare=None):
    """Run the job of the command line.

    Args:
        start: job -> a function of no arguments that yields, in an epoch, the number of images of each batch.
        packages: the names for the report of versions.
        prepare: job -> the bytes of the files that it made.
    """
    job = SimpleNamespace(**{"prepare": False, **json.loads(sys.argv[1])})
    if job.prepare:
        begin = time.perf_counter()
        size = prepare(job)
        return answer(bytes=size, seconds=time.perf_counter() - begin)
    epoch = start(job)
    answer(versions={name: version(name) for name in packages})
    for line in sys.stdin:
        answer(**run(epoch, json.loads(line)["seconds"], job.workers))


def run(epoch, at_most, workers):
    """One epoch, or its part of `at_most` seconds up to the end of a round with one batch of each worker.

    Within a round, batches that are nearly ready would not count.
    """
    begin, first, images = time.perf_counter(), None, 0
    batches = iter(epoch())
    for done, count in enumerate(batches, 1):
        first = first or time.perf_counter() - begin
        images += count
        if time.perf_counter() - begin > at_most and done % workers == 0:
            break
    took = time.perf_counter() - begin
    if hasattr(batches, "close"):
        batches.close()
    return {"images": images, "seconds": took, "first_batch": first}


def answer(**document):
    print(json.dumps(document), flush=True)


def epochs(job, make, count=lambda batch: len(batch[0])):
    """For `start`, from make() -> a loader: one for all later epochs, a new one for each first one."""
    running = make() if job.later else None
    return lambda: map(count, make() if running is None else running)


def torch_loader(dataset, job):
    """torch's DataLoader over a map-style dataset."""
    import torch

    return torch.utils.data.DataLoader(
        dataset, job.batch, shuffle=True, num_workers=job.workers, persistent_workers=job.later
    )


def sign_in(job, **more):
    """Set the variables of S3 clients that take no arguments."""
    os.environ.update(
        AWS_ENDPOINT_URL=job.endpoint,
        AWS_ACCESS_KEY_ID=job.key,
        AWS_SECRET_ACCESS_KEY=job.secret,
        AWS_DEFAULT_REGION="us-east-1",
        **more,
    )


def files(job):
    """(path, label) of every photo, in the order of the names."""
    names = sorted(os.listdir(job.folder))
    return [
        (os.path.join(job.folder, name, file), label)
        for label, name in enumerate(names)
        for file in sorted(os.listdir(os.path.join(job.folder, name)))
    ]


def in_memory(job):
    """(bytes, label) of 256 of the photos, or of all where there are fewer."""
    chosen = random.Random(0).sample(files(job), min(256, len(files(job))))
    return [(read_file(path), label) for path, label in chosen]


def keys(job):
    """(key in the bucket, label) of every photo."""
    return [(os.path.relpath(path, job.folder), label) for path, label in files(job)]


def beside(job, suffix):
    """The place of a script's own form of the photos; its base name is a bucket on the S3 server."""
    return f"{job.folder}-{suffix}"


def made(target, make):
    """The bytes of `target`, a file or a folder, which make(target) writes as a whole unless it exists."""
    if not os.path.exists(target):
        unfinished = target + ".part"
        shutil.rmtree(unfinished, ignore_errors=True)
        make(unfinished)
        os.rename(unfinished, target)
    if os.path.isfile(target):
        return os.path.getsize(target)
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(target) for name in names)


def cache_folder(job, name):
    """A directory for a cache of the peer, emptied before each first epoch."""
    path = os.path.join(job.scratch, name)
    if not job.later:
        shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path, exist_ok=True)
    return path


def s3_client(job, connections=10):
    """boto3's client."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=job.endpoint,
        aws_access_key_id=job.key,
        aws_secret_access_key=job.secret,
        region_name="us-east-1",
        config=Config(max_pool_connections=connections, signature_version="s3v4"),
    )


def boto3_reader(job, connections=10):
    """key -> bytes of an object of the bucket."""
    client = s3_client(job, connections)
    return lambda key: client.get_object(Bucket=job.bucket, Key=key)["Body"].read()


def s3fs_reader(job):
    import s3fs

    # One request: by default it reads in parts, and asks for the size of an object first.
    fs = s3fs.S3FileSystem(endpoint_url=job.endpoint, key=job.key, secret=job.secret, max_concurrency=1)
    return lambda key: fs.cat_file(f"{job.bucket}/{key}")


def read_file(path):
    with open(path, "rb") as file:
        return file.read()


def decode(data, size):
    """JPEG -> RandomResizedCrop(size) and a random flip by Pillow, uint8 (3, size, size)."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image = image.resize((size, size), Image.BILINEAR, box=crop_box(*image.size))
    pixels = np.asarray(image)
    if random.random() < 0.5:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def crop_box(width, height):
    """(left, top, right, bottom), drawn as torchvision's RandomResizedCrop draws it."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    side_w, side_h = min(width, height * 4 / 3), min(height, width * 4 / 3)
    left, top = (width - side_w) / 2, (height - side_h) / 2
    return left, top, left + side_w, top + side_h
