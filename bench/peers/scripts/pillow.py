"""Pillow-SIMD decodes, crops and resizes photos in memory, by one core and without a loader, as do all peers
whose samples are made by Pillow (torchvision, WebDataset, LitData, MosaicML, Grain)."""

import numpy as np
from peer_side import decode, in_memory, serve


def start(job):
    photos = in_memory(job)
    out = np.empty((job.batch, 3, job.size, job.size), np.uint8)

    def epoch():
        for first in range(0, len(photos), job.batch):
            batch = photos[first : first + job.batch]
            for place, (data, _) in zip(out, batch, strict=False):
                place[:] = decode(data, job.size)
            yield len(batch)

    return epoch


if __name__ == "__main__":
    serve(start, "pillow-simd")
