import io

import numpy as np
from PIL import Image

import fastload

bucket = fastload.open_store("s3://bucket")
for number in range(40):
    file = io.BytesIO()
    size = [(300, 300), (400, 310), (310, 400), (500, 280), (280, 500)][number % 5]
    Image.effect_noise(size, 50).save(file, "JPEG")
    bucket.write(f"pictures/{number:02d}.jpg", file.getvalue())
