loader = DataLoader(dataset, batch_size=256, num_workers=2)
for images, labels in loader:
    pass
counters = loader.stats()["counters"]
assert counters["cache.hits"] == 24 and not counters.get("get.requests"), counters
