assert len(dataset) == 156 and dataset.tokens == 10_000 and loss < 4, loss
counters = loader.stats()["counters"]
assert counters["get.requests"] <= 156, counters  # in both epochs
dataset.close()
