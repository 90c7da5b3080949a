for images, labels in loader:
    pass
counters = loader.stats()["counters"]
assert counters.get("cache.hits", 0) + counters.get("cache.misses", 0) == 24, counters
