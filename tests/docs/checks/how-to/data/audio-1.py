import io

import numpy as np
import soundfile

import fastload

generator = np.random.default_rng(0)
bucket = fastload.open_store("s3://bucket")


def put(name, seconds):
    noise = 0.1 * generator.normal(size=int(16_000 * seconds))
    file = io.BytesIO()
    soundfile.write(file, noise, 16_000, format=name.rpartition(".")[2].upper())
    bucket.write(name, file.getvalue())
    return noise


for number in range(40):
    put(f"speech/{number:02d}.flac", 0.2 + 0.02 * number)
lecture = put("lectures/monday.wav", 90)
