# pip install setuptools<80 wheel numpy<2.3 numba torch opencv-python-headless pillow terminaltables
# pytorch_pfn_extras fastargs assertpy tqdm psutil pybind11 && --no-build-isolation --no-deps ffcv==1.0.2

"""FFCV over its own file of the same photos: `ffcv.py FOLDER BATCH SIZE WORKERS jpg|raw QUALITY MAX_SIDE`.

Needs OpenCV and TurboJPEG to build: apt install libopencv-dev libturbojpeg0-dev pkg-config.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

sys.path = [path for path in sys.path if Path(path) != Path(__file__).parent]  # this file is called ffcv too

from ffcv.fields import IntField, RGBImageField  # noqa: E402
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder  # noqa: E402
from ffcv.loader import Loader, OrderOption  # noqa: E402
from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage  # noqa: E402
from ffcv.writer import DatasetWriter  # noqa: E402


class Folder:
    def __init__(self, folder):
        names = sorted(path.name for path in Path(folder).iterdir())
        self.files = [(p, i) for i, name in enumerate(names) for p in sorted((Path(folder) / name).iterdir())]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        return np.asarray(Image.open(path).convert("RGB")), label


def main():
    folder, batch, size, workers, mode, quality, side = sys.argv[1:]
    dataset = Folder(folder)
    path = Path(folder).parent / f"{Path(folder).name}-{mode}-{quality}-{side}.beton"
    if not path.exists():
        image = RGBImageField(write_mode=mode, max_resolution=int(side), jpeg_quality=int(quality))
        unfinished = path.with_suffix(".part")
        writer = DatasetWriter(str(unfinished), {"image": image, "label": IntField()}, num_workers=2)
        writer.from_indexed_dataset(dataset)
        unfinished.rename(path)
    loader = Loader(
        str(path),
        batch_size=int(batch),
        num_workers=int(workers),
        order=OrderOption.RANDOM,
        os_cache=True,
        pipelines={
            "image": [
                RandomResizedCropRGBImageDecoder((int(size), int(size))),
                RandomHorizontalFlip(),
                ToTensor(),
                ToTorchImage(),
            ],
            "label": [IntDecoder(), ToTensor()],
        },
    )
    print(json.dumps({"version": "1.0.2", "bytes": path.stat().st_size / len(dataset)}), flush=True)
    for _ in sys.stdin:
        start, images = time.perf_counter(), 0
        for pixels, _ in loader:
            images += len(pixels)
        print(json.dumps({"rate": images / (time.perf_counter() - start)}), flush=True)


if __name__ == "__main__":
    main()
