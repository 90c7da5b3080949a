assert loader.stats()["counters"]["bad.samples"] == 1
((key, error),) = loader.stats()["bad"]
assert key == "cat/0002.jpg" and "this is HTML or XML" in error, error
assert len(labels) == 24
