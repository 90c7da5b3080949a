import numpy as np

from fastload.cli.demo.photos import make_photo
from fastload.images import decode_image, decode_resized, shrink

photos = [make_photo(seed) for seed in range(20)]
sharp = [decode_resized(photo, 256).astype(float) for photo in photos]
for quality, mean, worst in [(90, 38.0, 33.2), (95, 40.0, 35.9)]:
    decibels = []
    for photo, image in zip(photos, sharp):
        noise = image - decode_image(shrink(photo, 256, quality))
        decibels.append(10 * np.log10(255**2 / np.mean(noise**2)))
    assert np.allclose((np.mean(decibels), min(decibels)), (mean, worst), atol=0.3), decibels
