import numpy as np

from fastload.cli.demo.photos import make_photo
from fastload.images import decode_image, decode_resized, shrink

for quality, mean, worst in [(90, 38.0, 33.2), (95, 40.0, 35.9)]:
    decibels = []
    for photo in map(make_photo, range(20)):
        noise = decode_resized(photo, 256).astype(float) - decode_image(shrink(photo, 256, quality))
        decibels.append(10 * np.log10(255**2 / np.mean(noise**2)))
    assert np.allclose((np.mean(decibels), min(decibels)), (mean, worst), atol=0.3), decibels
