# apt install ffmpeg
# pip install numpy==2.3.5 pillow-simd==12.1.1.post0 spdl==0.8.0 spdl-core==0.8.0 spdl-io==0.8.0
#     boto3==1.43.117 botocore==1.43.117 urllib3==2.8.0

"""Meta's SPDL, a pipeline of threads in one process: mode "files", or "s3" through boto3 in its threads.
Mode "memory" decodes by one core.

FFmpeg decodes the whole photo, and crops and scales it (with antialiasing); batches are channels last.
"""

import os
import random
import sys

sys.path.append(sys.path.pop(0))  # this file is called as the package is

import spdl.io
from peer_side import boto3_reader, crop_box, files, in_memory, keys, read_file, serve
from spdl.pipeline import PipelineBuilder


def start(job):
    if job.mode == "memory":
        return decoding(job)
    cores = len(os.sched_getaffinity(0))
    if job.mode == "files":
        samples, read, readers, decoders = files(job), read_file, 2, job.workers
    else:
        samples, read, readers, decoders = keys(job), boto3_reader(job, job.workers), job.workers, cores

    def fetch(item):
        return read(item[0]), item[1]

    def decode(item):
        return decode_photo(item[0], job.size), item[1]

    def epoch():
        pipeline = (
            PipelineBuilder()
            .add_source(iter(random.sample(samples, len(samples))))
            .pipe(fetch, concurrency=readers)
            .pipe(decode, concurrency=decoders)
            .aggregate(job.batch)
            .pipe(collate)
            .add_sink(2)
            .build(num_threads=readers + decoders + 1)
        )
        with pipeline.auto_stop():
            for images, _ in pipeline:
                yield len(images)

    return epoch


def decoding(job):
    photos = in_memory(job)

    def epoch():
        for first in range(0, len(photos), job.batch):
            images, _ = collate(
                [(decode_photo(data, job.size), label) for data, label in photos[first : first + job.batch]]
            )
            yield len(images)

    return epoch


def decode_photo(data, size):
    packets = spdl.io.demux_image(data)
    left, top, right, bottom = crop_box(packets.width, packets.height)
    steps = [
        f"crop={right - left}:{bottom - top}:{left}:{top}",
        f"scale={size}:{size}:flags=bilinear",
        *(["hflip"] if random.random() < 0.5 else []),
        "format=pix_fmts=rgb24",
    ]
    return spdl.io.decode_packets(packets, filter_desc=",".join(steps))


def collate(items):
    """(batch, channel, height, width) as a view of what lies channels last."""
    buffer = spdl.io.convert_frames([frames for frames, _ in items])
    return spdl.io.to_numpy(buffer).transpose(0, 3, 1, 2), [label for _, label in items]


if __name__ == "__main__":
    serve(start, "spdl", "boto3")
