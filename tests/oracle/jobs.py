"""Random jobs: what is loaded, and how. A job is a dict of features; what is not there has its default."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.oracle.worlds import KINDS, PLAIN, UNEVEN, Job

# feature -> its simplest value, to which a failing job is shrunk
DEFAULTS: Job = {
    "kind": "plain",  # of the data, see `worlds.KINDS`
    "n": 8,
    "values": [],  # of a sample, beside its number; see `worlds.VALUES`
    "salt": 0,  # phase of all that differs from sample to sample
    "transform": "none",  # of the images
    "mask": False,  # beside each image, under the same crop
    "shape": "dict",  # or "tuple": of a sample
    "source": "list",  # of a table
    "quirks": [],  # "extra" members of shards, or lists of several lengths; an "index" file of shards
    "filter": None,  # of Parquet
    "bulk": False,  # the dataset has `__getitems__`
    "bad": [],  # numbers of samples that cannot be made
    "wrap": "none",
    "sampler": "sequential",
    "batch_size": 4,
    "collate": "default",  # or "list": a collate_fn of the user's
    "drop_last": False,
    "workers": 0,
    "on_error": "raise",
    "seed": None,
    "cache": "none",
    "epochs": 1,
    "cut": None,  # [epoch, step] where a state is saved and a fresh loader goes on; step -1: after the end
    "begun": False,  # a state of step 0 is saved after `iter`, not before
    "restart": "same",  # "other": the sampler of the fresh loader is made with other arguments
    "resume_workers": 0,
    "exclude": [],
    "skip": [],
    "ask": False,  # `samples_at` and `batch_at`: before, during and after
    "change": "none",  # of the bucket, between two runs
    "draw": 0,  # the seed of torch, Python and numpy
}
SAMPLERS = [
    "sequential", "shuffle", "generator", "replacement", "subset", "weighted", "list", "own", "pairs",
    "batches", "batch-sampler", "distributed", "torch-distributed", "eval", "node",
]  # fmt: skip
MADE_ANEW = ("subset", "weighted", "list", "own", "pairs", "batches", "node")  # may differ after a restart
FIXED = ("sequential", "generator", "replacement", "eval", "list", "own", "pairs", "batches", "batch-sampler")


def random_job(number: int, seed: int = 0, kind: str | None = None) -> Job:
    """The job of a number, with data of a given kind or of any."""
    rng = random.Random(f"{seed} {number}")
    chance = lambda share: rng.random() < share  # noqa: E731
    kind = kind or rng.choice(list(KINDS))
    form = KINDS[kind]
    job: Job = {
        "kind": kind,
        "n": rng.randint(8, 24),
        "salt": rng.randrange(100),
        "draw": rng.randrange(1000),
    }
    job["values"] = rng.sample(form.values, min(len(form.values), rng.choice([0, 1, 1, 2, 3])))
    if chance(0.5):  # most jobs have batches, not errors of collation
        job["values"] = [name for name in job["values"] if name not in UNEVEN or name == "mixed"]
    job |= {"transform": rng.choice(form.transforms), "shape": rng.choice(["dict", "tuple"])}
    job |= {"source": rng.choice(["list", "arrow", "csv", "json", "parquet"]), "bulk": chance(0.3)}
    job["quirks"] = [quirk for quirk in ("extra", "index") if chance(0.25)]
    if chance(0.3):
        value = rng.randrange(5) / 10
        operator = rng.choice(["=", "in", "not in", "<", ">="])
        job["filter"] = ["x", operator, [value] if operator.endswith("in") else value]
    if chance(0.3):
        job["bad"] = sorted(rng.sample(range(job["n"]), rng.choice([1, 1, 2, 3])))
    if chance(0.3):
        job["wrap"] = rng.choice(["subset", "concat", "stack", "map", "nested", "split"])
    job["sampler"] = rng.choice(["sequential", "shuffle", *SAMPLERS])
    job["batch_size"] = rng.choice([1, 2, 3, 4, 5, 8, 100, None])
    job["drop_last"], job["collate"] = chance(0.2), "list" if chance(0.2) else "default"
    job["workers"] = rng.choice([1, 2]) if chance(0.04) else 0
    job["resume_workers"] = rng.choice([1, 2]) if chance(0.03) else 0
    job["on_error"] = rng.choice(["raise", "raise", "repeat", "replace"])
    job["seed"] = rng.choice([None, None, 1])
    job["cache"] = rng.choice(["none", "none", "raw", "auto", "dct"])
    job["epochs"] = rng.choice([1, 1, 2])
    if chance(0.6):
        job["cut"] = [rng.randrange(job["epochs"]), rng.choice([0, 0, 1, 2, 3, 9, -1])]
        job["begun"] = chance(0.5)
    job["restart"] = "other" if chance(0.3) else "same"
    if chance(0.15):
        job["exclude"] = sorted(rng.sample(range(job["n"] // 2), 2))
    if chance(0.1):
        job["skip"] = sorted(rng.sample(range(3), rng.choice([1, 2])))
    job["ask"] = chance(0.4)
    if chance(0.3):
        job["change"] = rng.choice(["add", "delete", "replace", "class"])
    job["mask"] = chance(0.4)
    return settled(job)


def settled(job: Job) -> Job:
    """The job without what its other features rule out."""
    job = DEFAULTS | job
    kind, form = job["kind"], KINDS[job["kind"]]

    def default(*names: str) -> None:
        job.update({name: DEFAULTS[name] for name in names})

    job["values"] = [name for name in job["values"] if name in form.values]
    if job["transform"] not in form.transforms:
        job["transform"] = form.transforms[0]
    photos = job["transform"] != "none"
    if kind == "tokens" or (kind == "objects" and photos):
        default("values")
    if kind not in ("table", "tar") or job["transform"] not in ("center", "drawn"):
        default("mask")
    if kind != "table":
        default("source")
    if job["source"] == "csv":
        job["values"] = [
            name for name in job["values"] if name in ("int", "float", "bool", "text", "big", "mixed")
        ]
    if kind not in ("table", "tar", "parts"):
        default("shape")
    elif kind == "tar" and job["shape"] == "tuple":
        default("quirks")
    quirk = {"tar": "extra", "tfrecord": "index", "parts": "extra"}.get(kind)
    job["quirks"] = [one for one in job["quirks"] if one == quirk]
    indexed = form.indexed or "index" in job["quirks"]
    if kind != "parquet":
        default("filter")
    if kind not in ("plain", "cached", "iterable"):
        default("bulk")
    if kind in ("mixture", "tokens", "iterable") or (
        kind not in ("plain", "cached", "objects", "parts") and not photos
    ):
        default("bad")
    if kind in ("iterable", "mixture") or not indexed:
        default("wrap")
        job["sampler"] = "shuffle" if job["sampler"] in ("shuffle", "generator") else "sequential"
    if kind == "iterable":
        default("sampler", "on_error", "exclude", "skip", "ask")
        job["resume_workers"] = job["workers"]
    if job["sampler"] == "pairs" and (kind not in ("plain", "cached") or job["wrap"] != "none"):
        default("sampler")
    if kind == "cached" and job["sampler"] == "pairs":
        default("sampler")
    if job["sampler"] in ("batches", "batch-sampler") and job["batch_size"] is None:
        default("batch_size")
    if job["batch_size"] is None:
        default("drop_last")
    if not (kind in ("folder", "objects", "table") and photos) and not (
        form.streams or kind in ("cached", "tokens", "parts")
    ):
        default("cache")
    if kind in ("cached", "tokens") and job["cache"] != "none":
        job["cache"] = "raw"
    if form.streams and job["cache"] == "dct":
        job["cache"] = "auto"
    if not photos and job["cache"] == "dct":
        job["cache"] = "raw"
    if kind not in ("folder", "objects"):
        default("change")
    if streamed(job) or kind == "mixture":
        default("exclude", "skip")
    if job["sampler"] == "pairs" or job["wrap"] != "none" or job["filter"]:
        default("exclude")
    if job["cut"] is None:
        default("begun", "restart", "resume_workers")
    else:
        epoch, step = job["cut"]
        job["epochs"] = max(job["epochs"], epoch + 1 + (step < 0))
        if step != 0:
            default("begun")
    if job["sampler"] not in MADE_ANEW and kind != "mixture":
        default("restart")
    return job


def streamed(job: Job) -> bool:
    """Whether an epoch may be read as streams: the samples are small."""
    return (
        KINDS[job["kind"]].streams
        and job["sampler"] in ("sequential", "shuffle")
        and job["wrap"] in ("none", "map")
    )


def told(job: Job) -> Job:
    """What of a job is not the default."""
    return {name: value for name, value in job.items() if value != DEFAULTS[name]}


def simpler(job: Job) -> Iterator[Job]:
    """Jobs with one feature less."""
    for name, value in told(job).items():
        for less in (DEFAULTS[name], *_less(name, value)):
            found = settled(job | {name: less})
            if found != job:
                yield found


def _less(name: str, value: Any) -> list[Any]:
    if isinstance(value, list) and name not in ("cut", "filter"):
        return [[*value[:at], *value[at + 1 :]] for at in range(len(value))]
    if name == "cut":
        return [[0, value[1]], [value[0], 0]]
    if name in ("n", "salt"):
        return sorted({value // 2, value - 1})
    return []


def shrink(job: Job, fails: Callable[[Job], bool], most: int = 150) -> Job:
    """A job with fewer features that fails too: drops one after the other, as long as that helps."""
    for _ in range(most):
        smaller = next((one for one in simpler(job) if weight(one) < weight(job) and fails(one)), None)
        if smaller is None:
            return job
        job = smaller
    return job


def weight(job: Job) -> int:
    return sum(10 + (len(value) if isinstance(value, list) else 0) for value in told(job).values()) + (
        job["n"] + job["salt"] % 100 + len([name for name in job["values"] if name not in PLAIN])
    )
