import io
import json

import numpy as np
from PIL import Image

import bench.peers.scripts.torchvision_on_cpu
import fastload

bucket = fastload.open_store("s3://bucket")
lines = []
for number in range(24):
    mask = np.zeros((260, 320), np.uint8)
    mask[40:200, 60:260] = 7
    file = io.BytesIO()
    Image.fromarray(mask).save(file, "PNG")
    bucket.write(f"masks/{number:04d}.png", file.getvalue())
    key = f"{('cat', 'dog')[number % 2]}/{number:04d}.jpg"
    boxes = [[60.0, 40.0, 260.0, 200.0]] * (number % 3)
    lines.append(
        json.dumps({"image": key, "mask": f"{number:04d}.png", "boxes": boxes, "labels": [7] * len(boxes)})
    )
bucket.write("boxes.jsonl", "\n".join(lines).encode())
