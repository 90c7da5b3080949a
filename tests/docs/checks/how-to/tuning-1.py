from fastload.metrics.bottleneck import find_bottleneck

workers = {"wait.batches": 10, "wait.seconds": 5, "consumer.seconds": 5}
assert find_bottleneck({}) == ""
assert find_bottleneck({"wait.batches": 10, "wait.seconds": 0.29, "consumer.seconds": 9.9}) == "consumer"
assert (
    find_bottleneck({"wait.batches": 10, "wait.seconds": 0.4, "consumer.seconds": 9.9, "get.seconds": 1})
    == "get"
)
for stage in ("get", "cache", "decode", "collate"):
    assert find_bottleneck(workers | {f"{stage}.seconds": 3}) == stage
for stage, name in (
    ("sampler", "sampler.seconds"),
    ("copy", "copy.wait_seconds"),
    ("decoder", "decoder.seconds"),
):
    assert find_bottleneck(workers | {name: 6}) == stage
