"""Who is the limit of an epoch, and what to change."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["limit", "verdict"]

# A consumer that waits for less than this part of its time has what it needs: the loader is not the limit.
_FREE = 0.03
_SPARE_CORES = 0.75  # from which on one worker more finds a core
_DROPPED = 0.1  # of the misses; from there on the cache is full
_SHORT_SECONDS, _FEW_BATCHES = 1.0, 3  # below these, starting and chance are most of what was measured
_BUSY_DEVICE = 0.1  # idle for less than this part, a device is busy

_STAGES = {
    "get": "the store: reading objects",
    "cache": "the disk under the cache: reading records",
    "decode": "decoding and transforming samples",
    "collate": "collating batches",
}


def limit(counters: Mapping[str, float]) -> str:
    """The stage that an epoch with these counters would be faster without.

    "" where nothing was loaded; "consumer" where it hardly waited; in the trainer's process "sampler", "copy"
    or "decoder"; else what the workers spent most of their time with: "get", "cache", "decode" or "collate".
    What was waited for the first batch of an epoch, while workers started, does not make it the loader's.
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


def verdict(
    counters: Mapping[str, float], gauges: Mapping[str, float] | None = None, *, live: bool = False
) -> str:
    """One sentence: who is the limit, and what to change. It begins with "too short to tell" where it is.

    Args:
        counters: of one epoch or several.
        gauges: of `Meter.gauges`; without them it is not known whether the node has cores to spare.
        live: the counters are of a moment of something longer, which is not too short to tell.
    """
    stage = limit(counters)
    if not stage:
        return "nothing was loaded yet"
    return ("" if live else _too_short(counters)) + _judge(stage, counters, gauges or {})


def _too_short(counters: Mapping[str, float]) -> str:
    """How a verdict on too little begins; "" where there was enough."""
    batches = counters.get("wait.batches", 0.0)
    seconds = counters.get("wait.seconds", 0.0) + counters.get("consumer.seconds", 0.0)
    if batches >= _FEW_BATCHES and seconds >= _SHORT_SECONDS:
        return ""
    many = f"{batches:,.0f} batches" if batches > 1 else "1 batch"
    return f"too short to tell ({many} in {seconds:.2f} s); so far, "


def _judge(stage: str, counters: Mapping[str, float], gauges: Mapping[str, float]) -> str:
    if stage == "consumer":
        return _consumer(counters)
    if stage == "sampler":
        return (
            "the sampler is the limit: the trainer's process draws indices for longer than it waits for "
            "batches; draw them at once (a permutation), not one by one"
        )
    if stage == "copy":
        return (
            "the copy to the device is the limit: send uint8 and normalise there (batch_transform), or send "
            "smaller images"
        )
    if stage == "decoder":
        return (
            "the device's decoder is the limit: use cache mode 'shrunk' (less to decode), or decode='cpu' "
            "with more workers"
        )
    busy = sum(counters.get(f"{name}.seconds", 0.0) for name in _STAGES)
    share = counters.get(f"{stage}.seconds", 0.0) / busy if busy else 1.0
    advice = {"get": _store, "cache": _disk}.get(stage, _cores)(counters, gauges, stage)
    return f"the slowest stage is {stage} ({share:.0%} of the workers' time), {_STAGES[stage]}: {advice}"


def _consumer(counters: Mapping[str, float]) -> str:
    text = "the consumer is the limit: the loader waited for it, and a faster loader would change nothing"
    watched = counters.get("device.seconds", 0.0)
    if not watched:
        return text
    idle = counters.get("device.idle.seconds", 0.0) / watched
    if idle < _BUSY_DEVICE:
        return f"the device is the limit (busy {1 - idle:.0%} of the time): nothing to change"
    return f"{text}; the device idles {idle:.0%} of the time all the same: look at the training step itself"


def _more_workers(gauges: Mapping[str, float]) -> str:
    """Advice to use idle cores, or "" where there are none or nothing is known of them."""
    idle = gauges.get("node.idle_cores", 0.0)
    if idle < _SPARE_CORES:
        return ""
    workers, cores = gauges.get("workers", 0), gauges["node.cores"]
    return f"more workers would help (num_workers={workers:.0f} now, {idle:.1f} of {cores:.0f} cores idle)"


def _store(counters: Mapping[str, float], gauges: Mapping[str, float], stage: str) -> str:
    hits, misses = counters.get("cache.hits", 0.0), counters.get("cache.misses", 0.0)
    if counters.get("get.alone", 0.0):
        return (
            "your dataset wraps a fastload dataset and asks for one sample at a time, so nothing is read "
            "ahead (a warning names it): move its work to transform=, collate_fn or a subclass's __getitem__"
        )
    if counters.get("cache.failures", 0.0) and not hits:
        first = "the cache fails (a warning says why): mend it, or every epoch reads the store; until then "
    elif not hits and not misses:
        first = "give the dataset a cache, and later epochs will not read the store; until then "
    elif counters.get("cache.dropped", 0.0) > _DROPPED * misses:
        first = "the cache keeps only a part: raise its size_limit or use mode 'shrunk'; beside that "
    else:
        first = "later epochs read the cache; until then "
    more = _more_workers(gauges)
    return f"{first}more connections (storage option max_requests) or a closer bucket" + (
        f", and {more}" if more else " would help"
    )


def _disk(counters: Mapping[str, float], gauges: Mapping[str, float], stage: str) -> str:
    return "a faster SSD, mode 'shrunk' (a ninth of the bytes of 'decoded') or more free memory would help"


def _cores(counters: Mapping[str, float], gauges: Mapping[str, float], stage: str) -> str:
    less = "a lighter collate_fn"
    if stage == "decode":
        less = "a cache in mode 'shrunk' or 'decoded', or decoding on the GPU"
    if not gauges:
        return f"more workers where cores are idle, else {less}, would help"
    more = _more_workers(gauges)
    return more or f"all {gauges['node.cores']:.0f} cores are busy; {less} would help"
