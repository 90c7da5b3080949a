from pathlib import Path

from fastload import open_store

Path("/data/shards").mkdir()
Path("/ssd/wds").mkdir()
store = open_store("s3://bucket/shards")
for page in store.list():
    for found in page:
        Path("/data/shards").joinpath(found.key).write_bytes(bytes(store.read(found.key)))
before, after = [], []
train_step = lambda images, labels: before.extend(labels.tolist())
