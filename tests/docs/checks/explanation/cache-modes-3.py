assert before._cache_keys(0) != after._cache_keys(0)
raw = [
    ObjectDataset("s3://bucket/spectra", decode=one, cache="/ssd/cache")._cache_keys(0)
    for one in (decode, None)
]
assert raw[0] == raw[1]
