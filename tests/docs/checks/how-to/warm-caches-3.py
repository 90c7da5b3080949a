from fastload import TFRecordDataset

records = TFRecordDataset(
    "s3://bucket/shards/*.tfrecord",
    {"image": bytes, "label": int},
    transform=RandomResizedCrop(224),
    cache=cache,
)
loader = DataLoader(records, batch_size=8, num_workers=2)
assert sum(len(batch["label"]) for batch in loader) == 32
assert not loader.stats()["counters"].get("get.requests"), loader.stats()["counters"]
