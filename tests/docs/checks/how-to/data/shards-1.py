import io

from fastload import open_store
from fastload.formats.tar import TarWriter

jpeg = bytes(open_store("s3://bucket/train").read("cat/0000.jpg"))
tar = io.BytesIO()
writer = TarWriter(tar)
for number in range(8):
    caption = {"txt": f"photo {number}".encode()} if number % 2 else {}
    writer.write(f"{number:03d}", {"jpg": jpeg, **caption})
writer.close()
open_store("s3://bucket/captioned").write("captions-000.tar", tar.getvalue())
