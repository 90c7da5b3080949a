from fastload import Cache

warmed = TarDataset(
    "s3://bucket/shards/*.tar",
    fields=("jpg;jpeg;png;webp", "cls"),
    transform=RandomResizedCrop(64),
    cache=Cache("/ssd/warm", "shrunk"),
)
loader = DataLoader(warmed, batch_size=8, num_workers=2)
assert sum(len(labels) for _, labels in loader) == 32
assert not loader.stats()["counters"].get("get.requests"), loader.stats()["counters"]
