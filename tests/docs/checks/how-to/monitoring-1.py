from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

text = urlopen(f"http://127.0.0.1:{server.server_port}/metrics").read().decode()
found = {
    (sample.name, sample.labels.get("loader"), sample.labels.get("stage")): sample.value
    for family in text_string_to_metric_families(text)
    for sample in family.samples
}
assert found["fastload_wait_batches_total", "train", None] == 2 * 3, found
assert found["fastload_wait_batches_total", "val", None] == 2 * 1
assert (
    found["fastload_get_requests_total", "train", None]
    == found["fastload_cache_hits_total", "train", None]
    == 24
)
stages = [key for key in found if key[:2] == ("fastload_bottleneck", "train")]
assert sum(found[key] for key in stages) == 1 and len(stages) == 8
