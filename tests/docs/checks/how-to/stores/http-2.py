counts = [sum(len(batch["cls"]) for batch in loader) for _ in range(2)]
assert counts == [32, 32] and len(dataset) == 32
before = loader.stats()["counters"].get("get.requests", 0)
for batch in loader:
    pass
assert loader.stats()["counters"].get("get.requests", 0) == before, "the cache was not used"
