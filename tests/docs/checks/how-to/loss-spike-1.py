from pathlib import Path

import numpy as np
from PIL import Image

colours = np.random.default_rng(0).integers(0, 40, (64, 24, 32, 3), dtype=np.uint8)
for number, pixels in enumerate(colours):
    label = ("day", "night")[number % 2]
    path = Path("/data/day-night") / label / f"{number:04}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    bright = (label == "day") != (number == 37)
    Image.fromarray(pixels + np.uint8(190 if bright else 20)).save(path)
