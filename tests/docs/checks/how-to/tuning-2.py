STAGES = {"consumer", "sampler", "copy", "decoder", "get", "cache", "decode", "collate"}
assert loader.stats()["limit"] in STAGES
