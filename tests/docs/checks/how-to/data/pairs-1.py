import io, json, pathlib, tarfile
import numpy as np
import pytest
from PIL import Image

pathlib.Path("/data/pairs").mkdir(parents=True)
table = []
with tarfile.open("/data/pairs/00.tar", "w") as tar:
    for number in range(8):
        numbers = np.zeros((80, 100), np.uint8)
        numbers[20:50, 30:70] = 20
        boxes = json.dumps({"boxes": [[0.3, 0.25, 0.7, 0.6]] * (1 + number % 3)}).encode()
        parts = {"json": boxes}
        for name, picture, kind in (
            ("jpg", Image.fromarray(numbers).convert("RGB"), "JPEG"),
            ("png", Image.fromarray(numbers), "PNG"),
        ):
            content = io.BytesIO()
            picture.save(content, kind)
            parts[name] = content.getvalue()
        for name, content in parts.items():
            entry = tarfile.TarInfo(f"{number:04d}.{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
