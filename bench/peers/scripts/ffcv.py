# apt install libopencv-dev libturbojpeg0-dev pkg-config
# pip install setuptools==79.0.1 wheel==0.45.1 numpy==2.2.6 torch==2.13.0 pillow-simd==12.1.1.post0
#     numba==0.61.2 llvmlite==0.44.0 opencv-python-headless==4.12.0.88 terminaltables==3.1.10
#     pytorch-pfn-extras==0.8.3 fastargs==1.2.0 assertpy==1.1 tqdm==4.67.1 psutil==7.2.2 pybind11==3.0.1
# pip install --no-build-isolation --no-deps ffcv==1.0.2

"""FFCV over its own file on the local disk, made from the photos: mode "jpg|raw QUALITY MAX_SIDE".

It decodes the whole photo, by the fast DCT, and scales by OpenCV's INTER_AREA. Its first epoch compiles.
"""

import os
import sys

sys.path.append(sys.path.pop(0))  # this file is called as the package is

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from peer_side import beside, files, made, serve
from PIL import Image


class Photos:
    def __init__(self, job):
        self.files = files(job)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        return np.asarray(Image.open(path).convert("RGB")), label


def prepare(job):
    mode, quality, side = job.mode.split()
    fields = {
        "image": RGBImageField(write_mode=mode, max_resolution=int(side), jpeg_quality=int(quality)),
        "label": IntField(),
    }

    def write(path):
        DatasetWriter(path, fields, num_workers=2).from_indexed_dataset(Photos(job))

    return made(target(job), write)


def target(job):
    return beside(job, "-".join(job.mode.split()) + ".beton")


def start(job):
    loader = Loader(
        target(job),
        batch_size=job.batch,
        num_workers=min(job.workers, len(os.sched_getaffinity(0))),  # it refuses more
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={
            "image": [
                RandomResizedCropRGBImageDecoder((job.size, job.size)),
                RandomHorizontalFlip(),
                ToTensor(),
                ToTorchImage(),
            ],
            "label": [IntDecoder(), ToTensor()],
        },
    )
    return lambda: (len(images) for images, _ in loader)


if __name__ == "__main__":
    serve(start, "ffcv", "torch", prepare=prepare)
