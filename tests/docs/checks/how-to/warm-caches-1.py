for images, labels in loader:
    pass
counters = loader.stats()["counters"]
assert counters["cache.hits"] == 24 and not counters.get("get.requests"), counters
