"""NVIDIA DALI's CPU operators: mode "files", "s3", or "memory".

It decodes only the crop's part of a photo. From S3 it reads one photo after another. The last batch of an
epoch is filled up from the next epoch.
"""

import math
import random

import numpy as np
from nvidia.dali import fn, pipeline_def, types
from peer_side import files, in_memory, keys, serve, sign_in

AHEAD = 2  # batches, as by default


@pipeline_def
def pipeline(samples, size):
    # shuffle_after_epoch: the whole list, where random_shuffle shuffles within 1,024 photos that it has read.
    names, labels = zip(*samples, strict=True)
    encoded, labels = fn.readers.file(
        files=list(names), labels=list(labels), shuffle_after_epoch=True, name="files"
    )
    return crops(encoded, size), labels


@pipeline_def
def from_memory(samples, size):
    photos = [np.frombuffer(data, np.uint8) for data, _ in samples]
    encoded = fn.external_source(
        lambda sample: photos[sample.idx_in_epoch % len(photos)], batch=False, dtype=types.UINT8
    )
    return crops(encoded, size), encoded


def crops(encoded, size):
    images = fn.decoders.image_random_crop(
        encoded, device="cpu", random_area=(0.08, 1.0), random_aspect_ratio=(3 / 4, 4 / 3), num_attempts=10
    )
    images = fn.resize(images, size=(size, size), interp_type=types.INTERP_LINEAR)
    images = fn.flip(images, horizontal=fn.random.coin_flip(probability=0.5))
    return fn.transpose(images, perm=(2, 0, 1))


def start(job):
    sign_in(job)
    if job.mode == "memory":
        make, samples = from_memory, in_memory(job)
    elif job.mode == "files":
        make, samples = pipeline, files(job)
    else:
        make, samples = pipeline, [(f"s3://{job.bucket}/{key}", label) for key, label in keys(job)]
    running = Running(job, make, samples) if job.later else None
    return lambda: (running or Running(job, make, samples)).epoch()


class Running:
    """A pipeline that works ahead as with `pipe.run()`, but only to the end of an epoch."""

    def __init__(self, job, make, samples):
        options = {"batch_size": job.batch, "num_threads": job.workers, "prefetch_queue_depth": AHEAD}
        self.pipe = make(random.sample(samples, len(samples)), job.size, device_id=None, **options)
        self.batches = math.ceil(len(samples) / job.batch)
        self.scheduled, self.is_new = 0, True

    def schedule(self):
        """One more batch; a new pipeline begins with AHEAD of them."""
        self.pipe.schedule_run()
        self.scheduled += AHEAD if self.is_new else 1
        self.is_new = False

    def epoch(self):
        try:
            for left in range(self.batches, 0, -1):
                while self.scheduled < min(AHEAD, left):
                    self.schedule()
                self.scheduled -= 1
                images, _ = self.pipe.outputs()
                yield len(images)
        finally:
            for _ in range(self.scheduled):  # of an epoch that was cut short
                self.pipe.outputs()
            self.scheduled = 0


if __name__ == "__main__":
    serve(start, "nvidia-dali-cuda130")
