import io
from itertools import accumulate

import numpy as np
from PIL import Image

import fastload

store = fastload.open_store("s3://bucket")


def jpeg(number):
    file = io.BytesIO()
    Image.fromarray(np.full((72, 96, 3), number, np.uint8)).save(file, "JPEG")
    return file.getvalue()


episodes = []
for name in ("one", "two"):
    steps = np.repeat(np.arange(40, dtype=np.float32)[:, None], 7, 1)
    store.write(f"robot/{name}/states.bin", steps.tobytes())
    store.write(f"robot/{name}/actions.bin", steps.tobytes())
    photos = [jpeg(number) for number in range(40)]
    store.write(f"robot/{name}/camera.bin", b"".join(photos))
    episodes.append((name, 40, [0, *accumulate(map(len, photos))]))
