# pip install nvidia-dali-cuda130==2.4.0

"""NVIDIA DALI's CPU operators over the same files: `dali.py FOLDER BATCH SIZE THREADS`."""

import json
import sys
import time

import nvidia.dali as dali
from nvidia.dali import fn, pipeline_def, types


@pipeline_def
def pipeline(folder, size):
    encoded, labels = fn.readers.file(file_root=folder, random_shuffle=True, name="files")
    images = fn.decoders.image_random_crop(
        encoded, device="cpu", random_area=(0.08, 1.0), random_aspect_ratio=(3 / 4, 4 / 3), num_attempts=10
    )
    images = fn.resize(images, size=(size, size), interp_type=types.INTERP_LINEAR)
    images = fn.flip(images, horizontal=fn.random.coin_flip(probability=0.5))
    return fn.transpose(images, perm=(2, 0, 1)), labels


def main():
    folder, batch, size, threads = sys.argv[1], *map(int, sys.argv[2:])
    pipe = pipeline(
        folder, size, batch_size=batch, num_threads=threads, device_id=None, prefetch_queue_depth=2, seed=1
    )
    pipe.build()
    count = pipe.epoch_size("files")
    print(json.dumps({"version": dali.__version__, "images": count}), flush=True)
    for _ in sys.stdin:
        start, images = time.perf_counter(), 0
        while images < count:
            pipe.run()
            images += batch
        print(json.dumps({"rate": images / (time.perf_counter() - start)}), flush=True)


if __name__ == "__main__":
    main()
