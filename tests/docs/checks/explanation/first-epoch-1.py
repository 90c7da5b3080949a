assert counters["get.requests"] == len(dataset) == 24, counters
assert counters["get.ahead"] == 48, counters
assert counters["cache.hits"] == 24, counters
