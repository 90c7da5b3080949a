"""Writes tests/data/pins, the photos and shards whose keys, order and pixels `tests/pins` pins.

    python -m tests.data.make_pins

Four JPEGs (4:2:0, 4:4:4, progressive, grey), two PNGs in colour, and a mask of class numbers, all smaller
than 50 pixels; and twelve records of these photos in three TFRecord and three Parquet files. The tests read
the files as they are: an encoder of another version makes other bytes of them, and so other pins.
"""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fastload.formats.tfrecord import TFRecordWriter, encode_example
from tests.photos import pillow_jpeg, png, scene

FOLDER = Path(__file__).parent / "pins"
COUNTS = (5, 3, 4)  # records of each shard


def photos() -> dict[str, bytes]:
    """Name of a file -> its bytes."""
    return {
        "0.jpg": pillow_jpeg(scene(48, 36, 1), quality=75),
        "1.jpg": pillow_jpeg(scene(33, 41, 2), quality=80, subsampling=0),
        "2.jpg": pillow_jpeg(scene(40, 40, 3), quality=75, progressive=True),
        "3.jpg": pillow_jpeg(scene(45, 30, 4), "L", quality=75),
        "4.png": png(Image.fromarray(scene(28, 24, 5)), optimize=True),
        "5.png": png(Image.fromarray(scene(24, 31, 6)), optimize=True),
        "mask.png": png(Image.fromarray(scene(48, 36, 1)[:, :, 0] // 40), optimize=True),
    }


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    images = photos()
    for name, body in images.items():
        (FOLDER / name).write_bytes(body)
    names, first = sorted(set(images) - {"mask.png"}), 0
    for shard, count in enumerate(COUNTS):
        rows = [
            {"image": images[names[number % len(names)]], "label": number}
            for number in range(first, first + count)
        ]
        file = io.BytesIO()
        writer = TFRecordWriter(file)
        for row in rows:
            writer.write(encode_example(row))
        writer.close()
        (FOLDER / f"{shard}.tfrecord").write_bytes(file.getvalue())
        pq.write_table(
            pa.Table.from_pylist(rows), FOLDER / f"{shard}.parquet", row_group_size=3, write_statistics=False
        )
        first += count


if __name__ == "__main__":
    main()
