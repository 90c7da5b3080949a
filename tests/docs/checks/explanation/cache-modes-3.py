from fastload import ObjectDataset


def decode(data):
    return np.frombuffer(data, np.float32).copy()


before = ObjectDataset("s3://bucket/spectra", decode=decode, cache=Cache("/ssd/cache", "decoded"))


def decode(data):
    return np.log1p(np.frombuffer(data, np.float32))


after = ObjectDataset("s3://bucket/spectra", decode=decode, cache=Cache("/ssd/cache", "decoded"))
# The records of `after` have other keys: those of `before` are not read by mistake.
assert before._cache_keys(0) != after._cache_keys(0)
raw = [
    ObjectDataset("s3://bucket/spectra", decode=one, cache="/ssd/cache")._cache_keys(0)
    for one in (decode, None)
]
assert raw[0] == raw[1]
