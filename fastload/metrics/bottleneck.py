"""The bottleneck of an epoch, and what to change."""

from __future__ import annotations

from collections.abc import Mapping

from fastload.metrics.counters import FEW_BAD

# A consumer that waits for less than this part of its time is the bottleneck itself.
_FREE = 0.03
_SPARE_CORES = 0.75  # idle cores from which on one more worker pays
_DROPPED = 0.1  # of the misses; with more dropped records the cache counts as full
_SHORT_SECONDS, _FEW_BATCHES = 1.0, 3  # below these, the start and chance dominate the measurement
_BUSY_DEVICE = 0.1  # idle for less than this part, a device is busy

_STAGES = {
    "get": "reading objects from the store",
    "cache": "reading records from the disk of the cache",
    "decode": "decoding and transforming samples",
    "collate": "collating batches",
}
_IN_TRAINER = {
    "sampler": "the sampler is the bottleneck: the trainer's process draws indices for longer than it waits "
    "for batches; draw them all at once (a permutation), not one by one",
    "copy": "the copy to the device is the bottleneck: send uint8 and normalise there (batch_transform), or "
    "send smaller images",
    "decoder": "the device's decoder is the bottleneck: use cache mode 'shrunk' (less to decode), or "
    "decoder='cpu' with more workers",
}
# What `find_bottleneck` may answer, beside "".
BOTTLENECKS = ("consumer", *_STAGES, *_IN_TRAINER)


def find_bottleneck(counters: Mapping[str, float]) -> str:
    """Return the stage that bounds the speed of an epoch with these counters.

    "" where nothing was loaded; "consumer" where the consumer hardly waited; "sampler", "copy" or "decoder"
    in the trainer's process; else the stage that took most of the workers' time: "get", "cache", "decode" or
    "collate". The wait for the first batch of an epoch, while workers start, does not count.
    """
    seconds = {name: counters.get(f"{name}.seconds", 0.0) for name in (*_STAGES, "sampler", "consumer")}
    batches = counters.get("wait.batches", 0.0)
    if not batches:
        return ""
    whole = counters.get("wait.seconds", 0.0)
    wait = whole if batches == 1 else max(0.0, whole - counters.get("wait.first_seconds", 0.0))
    here = {
        "sampler": seconds["sampler"],
        "copy": counters.get("copy.wait_seconds", 0.0),
        "decoder": counters.get("decoder.seconds", 0.0),
    }
    stall = wait + sum(here.values())
    if stall <= _FREE * (stall + seconds["consumer"]):
        return "consumer"
    longest = max(here, key=lambda name: here[name])
    if here[longest] > whole:  # the start too: of an epoch of a few batches it is most
        return longest
    return max(_STAGES, key=lambda name: seconds[name])


def explain_bottleneck(
    counters: Mapping[str, float], gauges: Mapping[str, float] | None = None, *, live: bool = False
) -> str:
    """Return one sentence on the bottleneck and on what to change.

    It begins with "too short to tell" where the counters are of less than a second or of 1 or 2 batches.

    Args:
        counters: of one epoch or several.
        gauges: of `Meter.gauges`; they tell whether the node has cores to spare.
        live: the counters are a moment of a longer run, which is never too short to tell.
    """
    stage = find_bottleneck(counters)
    if not stage:
        return "nothing was loaded yet"
    first = "" if live else _too_short(counters)
    return first + _explain(stage, counters, gauges or {}) + _given_up(counters)


def _given_up(counters: Mapping[str, float]) -> str:
    """Return the end of the sentence where `on_error` changed more than a few samples."""
    bad = counters.get("bad.samples", 0.0)
    return f"; {bad:,.0f} bad samples were replaced: see stats()['bad']" if bad > FEW_BAD else ""


def _too_short(counters: Mapping[str, float]) -> str:
    """Return the beginning of the sentence where too little was measured; "" where it was enough."""
    batches = counters.get("wait.batches", 0.0)
    seconds = counters.get("wait.seconds", 0.0) + counters.get("consumer.seconds", 0.0)
    if batches >= _FEW_BATCHES and seconds >= _SHORT_SECONDS:
        return ""
    many = f"{batches:,.0f} batches" if batches > 1 else "1 batch"
    return f"too short to tell ({many} in {seconds:.2f} s); so far, "


def _explain(stage: str, counters: Mapping[str, float], gauges: Mapping[str, float]) -> str:
    if stage == "consumer":
        return _consumer(counters)
    if stage in _IN_TRAINER:
        return _IN_TRAINER[stage]
    busy = sum(counters.get(f"{name}.seconds", 0.0) for name in _STAGES)
    share = counters.get(f"{stage}.seconds", 0.0) / busy if busy else 1.0
    if stage == "get":
        advice = _store(counters, gauges)
    elif stage == "cache":
        advice = (
            "a faster SSD, more free memory or mode 'shrunk' (an eighth of the bytes of 'decoded', lossy) "
            "would help"
        )
    else:
        advice = _cores(stage, gauges)
    return f"the slowest stage is {stage} ({_STAGES[stage]}, {share:.0%} of the workers' time): {advice}"


def _consumer(counters: Mapping[str, float]) -> str:
    text = "the training step is the bottleneck: the loader waited for it; a faster one would change nothing"
    watched = counters.get("device.seconds", 0.0)
    if not watched:
        return text
    idle = counters.get("device.idle.seconds", 0.0) / watched
    if idle < _BUSY_DEVICE:
        return f"the device is the bottleneck (busy {1 - idle:.0%} of the time): nothing to change"
    return f"{text}; yet the device idles {idle:.0%} of the time: look at the training step itself"


def _more_workers(gauges: Mapping[str, float]) -> str:
    """Return advice to use idle cores; "" where there are none or their number is unknown."""
    idle = gauges.get("node.idle_cores", 0.0)
    if idle < _SPARE_CORES:
        return ""
    workers, cores = gauges.get("workers", 0), gauges["node.cores"]
    return f"more workers would help (num_workers={workers:.0f} now, {idle:.1f} of {cores:.0f} cores idle)"


def _store(counters: Mapping[str, float], gauges: Mapping[str, float]) -> str:
    hits, misses = counters.get("cache.hits", 0.0), counters.get("cache.misses", 0.0)
    if counters.get("get.alone", 0.0):
        return (
            "your dataset wraps a fastload dataset and asks for one sample at a time, so nothing is read "
            "ahead (a warning names it): use fastload.map, give it a prefetch(indices), or use threads="
        )
    if counters.get("cache.failures", 0.0) and not hits:
        first = "the cache fails (a warning says why): repair it, or every epoch reads the store; until then "
    elif not hits and not misses:
        first = "give the dataset a cache, and later epochs will not read the store; until then "
    elif counters.get("cache.dropped", 0.0) > _DROPPED * misses:
        first = "the cache keeps only a part: raise size_limit or use mode 'shrunk' (lossy); in addition, "
    else:
        first = "later epochs read the cache; until then "
    more = _more_workers(gauges)
    return f"{first}more connections (storage option max_requests) or a closer bucket" + (
        f", and {more}" if more else " would help"
    )


def _cores(stage: str, gauges: Mapping[str, float]) -> str:
    less = "a cheaper collate_fn (if it is your own) or smaller samples (uint8, not float)"
    if stage == "decode":
        less = (
            "a fused transform (fastload.fuse) in place of your own, a cache in mode 'dct' (no pixel "
            "changes) or in mode 'shrunk' or 'decoded' (lossy)"
        )
    if not gauges:
        return f"more workers (if cores are idle), or {less}, would help"
    more = _more_workers(gauges)
    return more or f"all {gauges['node.cores']:.0f} cores are busy; {less} would help"
