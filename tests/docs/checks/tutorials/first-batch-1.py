assert reads[0] == {"get.requests": 96, "cache.hits": 0}, reads
assert reads[1] == {"get.requests": 0, "cache.hits": 96}, reads
assert loader.stats()["verdict"].startswith("too short to tell")
