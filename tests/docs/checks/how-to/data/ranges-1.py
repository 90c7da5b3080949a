import gzip
import struct
import zlib

import numpy as np

import fastload

store = fastload.open_store("s3://bucket")

members = []
for number in range(40):
    for kind in ("request", "response"):
        head = f"WARC/1.0\r\nWARC-Type: {kind}\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"
        members.append(gzip.compress(f"{head}<p>page {number}</p>\r\n\r\n".encode()))
store.write("crawl/part-0.warc.gz", b"".join(members))

# A TIFF of 3 x 2 tiles of 64 x 64 grey pixels.
tiles_of_file = [
    zlib.compress(np.full((64, 64), 10 * row + column, np.uint8).tobytes())
    for row in range(2)
    for column in range(3)
]
tags = [(256, 192), (257, 128), (258, 8), (259, 8), (262, 1), (277, 1), (322, 64), (323, 64)]
begin = 8 + 2 + 12 * (len(tags) + 2) + 4
data = begin + 2 * 4 * 6
starts = [data + sum(map(len, tiles_of_file[:n])) for n in range(6)]
entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags]
entries += [struct.pack("<HHII", 324, 4, 6, begin), struct.pack("<HHII", 325, 4, 6, begin + 24)]
body = struct.pack("<2sHI", b"II", 42, 8) + struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
body += struct.pack("<6I", *starts) + struct.pack("<6I", *map(len, tiles_of_file)) + b"".join(tiles_of_file)
store.write("scenes/north.tif", body)

# A shard of 8 chunks, of which one is empty.
shard, index = b"", b""
for number in range(8):
    chunk = gzip.compress(np.full((16, 16), number, "<f4").tobytes())
    index += (
        struct.pack("<QQ", 2**64 - 1, 2**64 - 1)
        if number == 5
        else struct.pack("<QQ", len(shard), len(chunk))
    )
    shard += b"" if number == 5 else chunk
store.write("field.zarr/c/0/0", shard + index + b"csum")

np.save("volume.npy", np.broadcast_to(np.arange(24, dtype=np.int16)[:, None, None], (24, 32, 32)))
store.write("volumes/0.npy", open("volume.npy", "rb").read())
