"""What a state says about its loader, so that `fastload replay` can make the loader again.

    describe(loader) ─▶ the state's "made_from": JSON, no secrets ─▶ restore(state) ─▶ arguments of a loader

Only what fastload made by itself can be described: an ImageFolder or ObjectDataset with fused crops, and
samplers of torch and fastload. Of all else the state has the reason, {"why": sentence}. Pickling the dataset
was rejected: a checkpoint would then run code, and hold the credentials of the store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, default_collate

from fastload.cache import Cache
from fastload.datasets.image_folder import ImageFolder
from fastload.datasets.objects import ObjectDataset
from fastload.datasets.store_dataset import override_of
from fastload.errors import ArgumentError, FastloadError
from fastload.gpu.normalize import Normalize
from fastload.images.by_epoch import ByEpoch
from fastload.images.transforms import CenterCrop, RandomResizedCrop
from fastload.order.sampler import DistributedSampler
from fastload.order.state import OWN_LOADER, State, parse_state, reading_state
from fastload.store.open import options_from_file

_MOST_MISSING = 1 << 28  # samples whose order is made without their data: a false number takes any memory
_CLASSES_KEPT = 1000  # characters of class names that are not those of the listing

_CROPS: dict[str, Any] = {"RandomResizedCrop": RandomResizedCrop, "CenterCrop": CenterCrop}
_SHARED = ("interpolation", "channels", "channels_last", "max_pixels", "strict")
_ARGUMENTS = {
    "RandomResizedCrop": ("scale", "ratio", "flip", *_SHARED),
    "CenterCrop": ("resize", *_SHARED),
}
_DATASETS: dict[str, Any] = {"ImageFolder": ImageFolder, "ObjectDataset": ObjectDataset}
_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler, torch.utils.data.DistributedSampler)
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_LAYOUTS = ("contiguous_format", "channels_last", "preserve_format")

_Json = dict[str, Any]


class Restored(NamedTuple):
    """The arguments of a loader that stands for the one of a state.

    Attributes:
        arguments: of `fastload.DataLoader`. Its dataset has the right length, and no samples where `missing`
            says so.
        missing: why the samples cannot be read, so that only their indices are known; or None.
        no_images: why a batch cannot be made of them; or None.
        no_batch: why it would not be the batch that was handed out; or None.
        notes: what may be unlike the run, in sentences.
    """

    arguments: dict[str, Any]
    missing: str | None
    no_images: str | None
    no_batch: str | None
    notes: list[str]


def describe(loader: Any) -> _Json:
    """The entry "made_from" of the loader's state: the same on every rank."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or loader.batch_size is None:
        return {"why": "its batches come from batch_sampler=, or it has none"}
    why, notes = _unlike(loader)
    return {
        "dataset": _dataset(loader.dataset),
        "sampler": _sampler(loader.sampler, loader.dataset, loader.generator),
        "drop_last": loader.drop_last,
        "on_error": loader.on_error,
        "generator": loader.generator is not None,
        "batch_transform": _normalize(loader.batch_transform),
        "no_images": why,
        "notes": notes,
    }


def restore(
    state: Mapping[str, Any], *, url: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> Restored:
    """The arguments of the loader that this state is of.

    Args:
        url: where the data is now, if not where it was.
        storage_options: beside those in the state, such as credentials.

    Raises:
        ArgumentError: the state does not say how the order of its samples is made.
    """
    saved = parse_state(state, "the state", OWN_LOADER)
    with reading_state("the state's entry made_from"):
        return _restored(saved, saved.made_from, url, storage_options or {})


def _restored(state: State, made: Mapping[str, Any], url: str | None, options: Mapping[str, Any]) -> Restored:
    why = made.get("why") or made["sampler"].get("why")
    if why is not None:
        raise ArgumentError(
            f"the state does not say how its order is made ({why}): pass --loader FILE.py:FUNCTION, a "
            "function that makes the loader"
        )
    notes = list(made["notes"])
    texts = [why for why in (made["no_images"], made["dataset"].get("why")) if why is not None]
    if not all(isinstance(text, str) for text in (*notes, *texts, *made["dataset"].get("withheld", ()))):
        raise ValueError("a reason that is no text")
    if state.length is None:
        raise ValueError("no length")
    dataset, missing = _open_dataset(made["dataset"], state.length, url, options, notes)
    if missing is not None and len(dataset) > _MOST_MISSING:
        raise ArgumentError(f"the state says that there are {len(dataset):,} samples, and {missing}")
    generator = torch.Generator() if made["generator"] else None
    arguments = {
        "dataset": dataset,
        "batch_size": state.batch_size,
        "sampler": _new_sampler(made["sampler"], dataset, state.num_replicas, generator),
        "drop_last": made["drop_last"],
        "generator": generator,
        "batch_transform": _new_normalize(made["batch_transform"]),
        "on_error": made["on_error"],
        "seed": state.seed,
    }
    no_images = made["no_images"]
    own = "its batch_transform= is a function of the training" if made["batch_transform"] == {} else None
    return Restored(arguments, missing, no_images, no_images or own, notes)


# --- what a state has


def _unlike(loader: Any) -> tuple[str | None, list[str]]:
    """(why the batch cannot be made again, or None; what may be unlike in it)."""
    dataset, notes = loader.dataset, []
    whys = [
        (type(loader).__module__ != "fastload.loader.dataloader", f"it is a {type(loader).__qualname__}"),
        (loader.collate_fn is not default_collate, "its collate_fn= is a function of the training"),
        (getattr(dataset, "decode", None) is not None, "its dataset has a decode= of the training"),
        (
            getattr(dataset, "target_transform", None) is not None,
            "its dataset has a target_transform= of the training",
        ),
        (
            getattr(dataset, "transform", None) is not None and _transform(dataset.transform) is None,
            "its dataset's transform= is neither RandomResizedCrop, CenterCrop nor ByEpoch of these",
        ),
    ]
    if loader.decode != "cpu":
        notes.append("the run decoded on a device: pixels here are the CPU's, and may differ a little")
    cache = getattr(dataset, "cache", None)
    if isinstance(cache, Cache) and not cache.codec.lossless:
        notes.append(f"the run's cache kept smaller images (mode {cache.mode!r}): pixels here are finer")
    if getattr(dataset, "target_transform", None) is not None:
        notes.append("labels here are the class indices, which the run's target_transform= gets")
    return next((why for holds, why in whys if holds), None), notes


def _dataset(dataset: Any) -> _Json:
    kind = type(dataset)
    if kind not in _DATASETS.values():
        return {"why": f"its dataset is a {kind.__qualname__}"}
    if override_of(dataset) is not None:
        return {"why": f"its samples are made by {override_of(dataset)}"}
    if dataset.keys_given:
        return {"why": "its dataset was given keys=, which the state does not contain"}
    listing, store = dataset.listing(), dataset.store()
    classes = dataset.classes if kind is ImageFolder else None
    if classes == listing.classes:
        classes = None
    elif classes is not None and len(json.dumps(classes)) > _CLASSES_KEPT:
        return {"why": f"its dataset was given {len(classes)} names as classes=, too many for a state"}
    options, withheld = store.public_options()
    if store.url != dataset.url and "://" in str(dataset.url):
        withheld = [*withheld, "user or query of the url"]
    keys, versions = listing.digests
    return {
        "class": kind.__name__,
        "url": store.address,
        "options": options,
        "withheld": withheld,
        "classes": classes,
        "on_change": dataset.on_change,
        "transform": None if dataset.decode is not None else _transform(dataset.transform),
        "keys": keys,
        "versions": versions,
    }


def _transform(transform: Any) -> _Json | None:
    """None: it cannot be described."""
    if type(transform) is ByEpoch:
        each = {str(epoch): _transform(one) for epoch, one in transform.transforms.items()}
        return None if None in each.values() else {"kind": "ByEpoch", "transforms": each}
    kind = type(transform).__name__
    if type(transform) is not _CROPS.get(kind):
        return None
    values = {name: getattr(transform, name) for name in _ARGUMENTS[kind]}
    values = {name: list(one) if isinstance(one, tuple) else one for name, one in values.items()}
    return {"kind": kind, "size": [transform.height, transform.width], **values}


def _sampler(sampler: Any, dataset: Any, drawing: Any) -> _Json:
    kind = type(sampler)
    if kind not in _SAMPLERS:
        return {"why": f"its sampler is a {kind.__qualname__}"}
    source: Any = sampler.dataset if hasattr(sampler, "dataset") else sampler.data_source
    if len(source) != len(dataset):
        return {"why": f"its {kind.__qualname__} is of another dataset"}
    if kind is SequentialSampler:
        return {"kind": "SequentialSampler"}
    if kind is RandomSampler:
        own = sampler.generator is not None and sampler.generator is not drawing
        return {
            "kind": "RandomSampler",
            "replacement": sampler.replacement,
            "num_samples": sampler.num_samples,
            "generator": "own" if own else "none" if sampler.generator is None else "loader's",
        }
    dealt = {"shuffle": sampler.shuffle, "seed": sampler.seed, "drop_last": sampler.drop_last}
    if kind is DistributedSampler:
        dealt |= {"mode": sampler.mode, "nodes": sampler.place.nodes, "exchange": sampler.exchange}
    return {"kind": f"{kind.__module__.partition('.')[0]}.DistributedSampler", **dealt}


def _normalize(transform: Any) -> _Json | None:
    """None: there is none. {}: it cannot be described."""
    if transform is None:
        return None
    if type(transform) is not Normalize:
        return {}
    layout = transform.memory_format
    return {
        "mean": list(transform.mean),
        "std": list(transform.std),
        "dtype": str(transform.dtype).removeprefix("torch."),
        "channels_last": transform.channels_last,
        "memory_format": None if layout is None else str(layout).removeprefix("torch."),
    }


# --- and back


def _open_dataset(
    made: Mapping[str, Any], length: int, url: str | None, options: Mapping[str, Any], notes: list[str]
) -> tuple[Any, str | None]:
    """(dataset, why it has no samples)."""
    if "why" in made:
        return range(
            length
        ), f"{made['why']}: pass --loader FILE.py:FUNCTION, a function that makes the loader"
    if url is None:
        options = options_from_file(made["url"], made["options"], options, "the state")
    arguments = {
        "transform": _new_transform(made["transform"]),
        "on_change": made["on_change"],
        "storage_options": dict(options),
    }
    if made["class"] == "ImageFolder":
        arguments |= {"classes": made["classes"], "allow_empty": True}
    where = made["url"] if url is None else url
    try:
        dataset = _DATASETS[made["class"]](where, **arguments)
    except FastloadError as error:
        held = made["withheld"]
        hint = (
            f" (a state does not keep {', '.join(held)}: pass --storage-option)"
            if held and not options
            else ""
        )
        return range(length), f"the data cannot be read{hint}: {error}"
    keys, versions = dataset.listing().digests
    if len(dataset) != length:
        return range(length), (
            f"{where!r} has {len(dataset):,} samples, and the run had {length:,}: pass --data URL if the "
            "data has moved, or --loader FILE.py:FUNCTION"
        )
    if keys != made["keys"]:
        return range(length), (
            f"{where!r} has as many objects as in the run, with other names: pass --data URL if the data has "
            "moved, or --loader FILE.py:FUNCTION"
        )
    if versions != made["versions"]:
        notes.append("objects were written again or copied since the state was saved: pixels may differ")
    return dataset, None


def _new_transform(made: Mapping[str, Any] | None) -> Any:
    if made is None:
        return None
    if made["kind"] == "ByEpoch":
        return ByEpoch({int(epoch): _new_transform(one) for epoch, one in made["transforms"].items()})
    values = {name: made[name] for name in _ARGUMENTS[made["kind"]]}
    return _CROPS[made["kind"]](made["size"], **values)


def _new_sampler(
    made: Mapping[str, Any], dataset: Any, replicas: int | None, generator: torch.Generator | None
) -> Any:
    """The sampler of rank 0."""
    if made["kind"] == "SequentialSampler":
        return SequentialSampler(dataset)
    if made["kind"] == "RandomSampler":
        drawing = {"own": torch.Generator(), "loader's": generator, "none": None}[made["generator"]]
        return RandomSampler(dataset, made["replacement"], made["num_samples"], drawing)
    dealt = {name: made[name] for name in ("shuffle", "seed", "drop_last")}
    if made["kind"].startswith("torch."):
        return torch.utils.data.DistributedSampler(dataset, replicas, 0, **dealt)
    dealt |= {"mode": made["mode"]}
    if made["nodes"] > 1:
        dealt |= {"partition": "node", "num_nodes": made["nodes"], "exchange": made["exchange"]}
    return DistributedSampler(dataset, replicas, 0, **dealt)


def _new_normalize(made: Mapping[str, Any] | None) -> Normalize | None:
    if not made:
        return None
    dtype, layout = made["dtype"], made["memory_format"]
    if dtype not in _DTYPES or layout not in (None, *_LAYOUTS):
        raise ArgumentError(
            f"the state has Normalize of {dtype!r} and {layout!r}, which this fastload does not know"
        )
    return Normalize(
        _floats(made["mean"]),
        _floats(made["std"]),
        dtype=getattr(torch, dtype),
        channels_last=made["channels_last"],
        memory_format=None if layout is None else getattr(torch, layout),
    )


def _floats(values: Sequence[Any]) -> list[float]:
    return [float(value) for value in values]
