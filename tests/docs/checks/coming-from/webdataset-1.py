from pathlib import Path

from fastload import open_store

Path("/data/shards").mkdir()
Path("/ssd/wds").mkdir()
for page in open_store("s3://bucket/shards").list():
    for found in page:
        body = open_store("s3://bucket/shards").read(found.key)
        Path("/data/shards").joinpath(found.key).write_bytes(bytes(body))
before, after = [], []
train_step = lambda images, labels: before.extend(labels.tolist())
