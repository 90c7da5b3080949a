"""Makes the AVIF and HEIC files in tests/data/boxed, which pillow-simd cannot make.

    pip install pillow pillow-heif av
    PYTHONPATH=. python tests/data/make_boxed.py

The pictures are `scene` of tests/photos.py, so their pixels are known.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pillow_heif
from PIL import Image

from tests.photos import oriented, scene

FOLDER = Path(__file__).parent / "boxed"
WIDTH, HEIGHT = 48, 32


def save(name: str, image: Image.Image, kind: str, **options: Any) -> None:
    image.save(FOLDER / name, kind, **options)


def ten_bits(name: str, pixels: np.ndarray[Any, Any]) -> None:
    """An AVIF of 10 bits, by FFmpeg: Pillow writes 8."""
    with av.open(str(FOLDER / name), "w", format="avif") as file:
        stream = file.add_stream("libsvtav1", rate=Fraction(1), options={"crf": "8", "preset": "6"})
        stream.width, stream.height, stream.pix_fmt = pixels.shape[1], pixels.shape[0], "yuv420p10le"
        frame = av.VideoFrame.from_ndarray(pixels, "rgb24").reformat(format="yuv420p10le")
        for packet in [*stream.encode(frame), *stream.encode()]:
            file.mux(packet)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    pillow_heif.register_heif_opener()
    first, second = (Image.fromarray(scene(WIDTH, HEIGHT, seed)) for seed in (0, 1))
    alpha = first.convert("RGBA")
    alpha.putalpha(second.convert("L"))
    fine = {"quality": 90, "subsampling": "4:4:4"}
    for orientation in range(1, 9):
        save(f"turned-{orientation}.avif", first, "AVIF", exif=oriented(orientation), **fine)
    save("animated.avif", first, "AVIF", save_all=True, append_images=[second], duration=100, **fine)
    save("alpha.avif", alpha, "AVIF", **fine)
    ten_bits("ten-bits.avif", scene(96, 64))  # the encoder takes no smaller ones
    fine = {"quality": 90, "chroma": 444}
    for orientation in (1, 6):
        save(f"turned-{orientation}.heic", first, "HEIF", exif=oriented(orientation).tobytes(), **fine)
    save("second-of-two.heic", first, "HEIF", save_all=True, append_images=[second], primary_index=1, **fine)
    save("alpha.heic", alpha, "HEIF", **fine)
    wide = np.asarray(first, np.uint16) * 257
    heif = pillow_heif.from_bytes("RGB;16", (WIDTH, HEIGHT), wide.tobytes())
    heif.save(FOLDER / "ten-bits.heic", **fine)


if __name__ == "__main__":
    main()
