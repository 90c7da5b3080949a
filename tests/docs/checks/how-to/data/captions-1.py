import io, json, tarfile
from pathlib import Path

import fastload

images = fastload.open_store("s3://bucket/train")
photos = [bytes(images.read(info.key)) for page in images.list() for info in page]
Path("/data/captions").mkdir()
for shard in range(2):
    with tarfile.open(f"/data/captions/{shard:02d}.tar", "w") as tar:
        for number, photo in list(enumerate(photos))[shard::2]:
            several = [f"a photo of number {number}", f"number {number}", f"{number} it is"]
            facts = json.dumps({"captions": several, "width": 320}).encode()
            for end, content in (("jpg", photo), ("txt", several[0].encode()), ("json", facts)):
                entry = tarfile.TarInfo(f"{number:04d}.{end}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
