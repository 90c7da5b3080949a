"""What a state says about its loader, so that `fastload replay` can make the loader again.

    describe(loader) ─▶ the state's "recipe": JSON, no secrets ─▶ restore(state) ─▶ arguments of a loader

Only what fastload made by itself can be described: its datasets by their public arguments, with fused
crops, and samplers of torch and fastload. Of all else the state has the reason, {"why": sentence}. Pickling
the dataset was rejected: a checkpoint would then run code, and hold the credentials of the store.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, default_collate

import fastload
from fastload.cache import Cache
from fastload.datasets.sample_files import File
from fastload.datasets.store_dataset import StoreDataset, arguments_of, override_of
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError, FastloadError
from fastload.gpu.normalize import Normalize
from fastload.images.transforms import ByEpoch, CenterCrop, RandomResizedCrop
from fastload.order.sampler import DistributedSampler, indexed_length, known_length
from fastload.order.shard_sampler import ShardSampler
from fastload.order.state import (
    OWN_LOADER,
    DatasetRecipe,
    Recipe,
    SamplerRecipe,
    State,
    Unknown,
    parse_state,
    reading_state,
)
from fastload.shards.formats import FORMATS
from fastload.store.failures import public_url
from fastload.store.open import checked_options, open_store, options_from_state

_MOST_MISSING = 1 << 28  # samples whose order is made without their data: a false number takes any memory
_CLASSES_KEPT = 1000  # characters of class names that are not those of the listing

_CROPS: dict[str, Any] = {"RandomResizedCrop": RandomResizedCrop, "CenterCrop": CenterCrop}
_SHARED = ("interpolation", "channels", "channels_last", "strict")
_ARGUMENTS = {
    "RandomResizedCrop": ("scale", "ratio", "flip", *_SHARED),
    "CenterCrop": ("resize", *_SHARED),
}
_DATASETS = {"ImageFolder", "ObjectDataset", "TableDataset", *(form.dataset for form in FORMATS.values())}
# Arguments that a state does not have, or has in another place; and those that no state may set.
_LEFT_OUT = frozenset(
    {"url", "keys", "decode", "target_transform", "cache", "storage_options"}
    | {"listing_max_age", "allow_empty", "num_samples"}
)
_REFUSED = _LEFT_OUT | {"unsafe"}
_TYPES: dict[str, type] = {"bytes": bytes, "int": int, "float": float, "str": str}
_SAMPLERS = (
    *(SequentialSampler, RandomSampler, DistributedSampler, ShardSampler),
    torch.utils.data.DistributedSampler,
)
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
        no_batch: why it would not be the batch that was delivered; or None.
        notes: what may be unlike the run, in sentences.
    """

    arguments: dict[str, Any]
    missing: str | None
    no_images: str | None
    no_batch: str | None
    notes: list[str]


def describe(loader: Any) -> Recipe | Unknown:
    """Return how a loader was made: the same on every rank."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or loader.batch_size is None:
        return Unknown("its batches come from batch_sampler=, or it has none")
    why, notes = _unlike(loader)
    return Recipe(
        dataset=_dataset(loader.dataset),
        sampler=_sampler(loader.sampler, loader.dataset, loader.generator),
        drop_last=loader.drop_last,
        on_error=loader.on_error,
        generator=loader.generator is not None,
        batch_transform=_normalize(loader.batch_transform),
        no_images=why,
        notes=notes,
    )


def restore(
    state: Mapping[str, Any], *, url: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> Restored:
    """Return the arguments of the loader that this state is of.

    Args:
        url: where the data is now, if not where it was.
        storage_options: beside those in the state, such as credentials.

    Raises:
        ArgumentError: the state does not say how the order of its samples is made.
    """
    saved = parse_state(state, "the state", OWN_LOADER)
    with reading_state("the state's entry recipe"):
        return _restored(saved, saved.recipe, url, storage_options or {})


def _restored(state: State, made: Recipe | Unknown, url: str | None, options: Mapping[str, Any]) -> Restored:
    sampler = made if isinstance(made, Unknown) else made.sampler
    if isinstance(sampler, Unknown):
        raise ArgumentError(f"the state does not say how its order is made ({sampler.why}): {OWN_LOADER}")
    assert isinstance(made, Recipe)
    notes = list(made.notes)
    if state.length is None:
        raise ArgumentError(
            "the state is of shards that were not indexed, whose samples have no numbers: index them with "
            f"`fastload index`, or {OWN_LOADER}"
        )
    dataset, missing = _open_dataset(made.dataset, state.length, url, options, notes)
    if missing is not None and len(dataset) > _MOST_MISSING:
        raise ArgumentError(f"the state says that there are {len(dataset):,} samples, and {missing}")
    generator = torch.Generator() if made.generator else None
    arguments = {
        "dataset": dataset,
        "batch_size": state.batch_size,
        "sampler": _new_sampler(sampler, dataset, state.num_replicas, generator),
        "drop_last": made.drop_last,
        "generator": generator,
        "batch_transform": _new_normalize(made.batch_transform),
        "on_error": made.on_error,
        "seed": state.seed,
    }
    own = "its batch_transform= is a function of your script" if made.batch_transform == {} else None
    return Restored(arguments, missing, made.no_images, made.no_images or own, notes)


# --- what a state has


def _unlike(loader: Any) -> tuple[str | None, list[str]]:
    """Return (why the batch cannot be recreated, or None; what may be unlike in it)."""
    dataset, notes = loader.dataset, []
    whys = [
        (type(loader).__module__ != "fastload.loader.dataloader", f"it is a {type(loader).__qualname__}"),
        (loader.collate_fn is not default_collate, "its collate_fn= is a function of your script"),
        (_given_decode(dataset) is not None, "its dataset has a decode= of your script"),
        (
            getattr(dataset, "target_transform", None) is not None,
            "its dataset has a target_transform= of your script",
        ),
        (
            not _is_described(getattr(dataset, "transform", None)),
            "its dataset's transform= is neither RandomResizedCrop, CenterCrop nor ByEpoch of these",
        ),
    ]
    if loader.decoder != "cpu":
        notes.append("the run decoded on a device: pixels here are the CPU's, and may differ a little")
    cache = getattr(dataset, "cache", None)
    if isinstance(cache, Cache) and not cache._codec.lossless:
        notes.append(f"the run's cache kept smaller images (mode {cache.mode!r}): pixels here are finer")
    if getattr(dataset, "target_transform", None) is not None:
        notes.append("labels here are the class indices, which the run's target_transform= gets")
    return next((why for holds, why in whys if holds), None), notes


def _dataset(dataset: Any) -> DatasetRecipe | Unknown:
    """Return how a dataset was made: its class, place and public arguments; or why that cannot be known."""
    kind = type(dataset)
    if kind.__name__ not in _DATASETS or kind is not getattr(fastload, kind.__name__):
        return Unknown(f"its dataset is a {kind.__qualname__}")
    if override_of(dataset) is not None:
        return Unknown(f"its samples are made by {override_of(dataset)}")
    given = arguments_of(dataset)
    if given.get("keys") is not None:
        return Unknown("its dataset was given keys=, which the state does not contain")
    arguments, why = _arguments(dataset, given)
    if why is not None:
        return Unknown(why)
    urls = [str(url) for url in given["url"]] if isinstance(given.get("url"), list | tuple) else None
    where = urls[0] if urls else str(given.get("url", "") or given.get("table"))
    store = open_store(where, **checked_options(given.get("storage_options")))
    options, withheld = store.public_options()
    if store.url != where and "://" in where:
        withheld = [*withheld, "user or query of the url"]
    keys, versions = view_of(dataset).listed() or (None, None)
    url = list(map(_address, urls)) if urls else store.address if given.get("url") else ""
    return DatasetRecipe(kind.__name__, url, options, withheld, arguments, keys, versions)


def _address(url: Any) -> str:
    """Return a URL without secrets, or a path that holds in any directory."""
    text = os.fspath(url)  # TypeError: a table in memory, or an ellipsis
    return public_url(text) if "://" in text else str(Path(text).absolute())


def _given_decode(dataset: Any) -> Any:
    """Return the function, or functions of single fields, that the user has given to open samples."""
    given = arguments_of(dataset) if isinstance(dataset, StoreDataset) else {}
    return getattr(dataset, "decode", None) or given.get("decode")


def _is_described(value: Any) -> bool:
    try:
        _written(value)
    except TypeError:
        return False
    return True


def _arguments(dataset: Any, given: Mapping[str, Any]) -> tuple[_Json, str | None]:
    """Return (the arguments that a state may have, None), or ({}, why that is not all of them)."""
    arguments, kind = {}, type(dataset)
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in _LEFT_OUT or name not in {*given, "transform"}:
            continue
        value = getattr(dataset, name, None) if name == "transform" else given[name]
        if name == "classes" and value is not None:
            if dataset.classes == dataset.listing().classes:
                continue
            if len(json.dumps(list(value))) > _CLASSES_KEPT:
                return {}, f"its dataset was given {len(value)} names as classes=, too many for a state"
        if value is None or value is parameter.default:
            continue
        if name == "unsafe" or (name == "index" and not isinstance(value, bool)):
            return {}, f"its dataset was given {name}={value!r}, which only you may say"
        if name == "transform" and _given_decode(dataset) is not None:
            continue  # of what `decode` gives
        try:
            arguments[name] = _written(_address(value) if name == "table" else value)
        except TypeError:
            if name != "transform":
                return {}, f"its dataset was given a {name}= that a state does not contain"
    return arguments, None


def _written(value: Any) -> Any:
    """Return an argument as JSON: a list, or a dict with the name of what it is.

    Raises:
        TypeError: it cannot be described.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_written(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_written(item) for item in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _written(item) for key, item in value.items()}}
    if isinstance(value, type) and value in _TYPES.values():
        return {"type": value.__name__}
    if type(value) is File and value.decode is None:
        return {"File": value.column if value.range is None else [value.column, *value.range]}
    if isinstance(value, np.dtype | type) and np.dtype(value).kind in "iuf":
        return {"dtype": np.dtype(value).str}
    described = _transform(value)
    if described is None:
        raise TypeError
    return {"transform": described}


def _parsed(value: Any) -> Any:
    """Return the argument that `_written` gave; a state may have anything in its place.

    Raises:
        ValueError: it gave no such thing.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_parsed(item) for item in value]
    ((name, content),) = value.items()
    if name == "tuple":
        return tuple(map(_parsed, content))
    if name == "dict":
        return {str(key): _parsed(item) for key, item in content.items()}
    if name == "type":
        return _TYPES[content]
    if name == "File" and isinstance(content, str | list):
        column, *edges = [content] if isinstance(content, str) else content
        return File(column, range=tuple(edges) if edges else None)
    if name == "dtype" and re.fullmatch(r"[<>|][iuf][1248]", content):
        return np.dtype(content)
    if name == "transform":
        return _new_transform(content)
    raise ValueError(f"an argument that is a {name!r}")


def _transform(transform: Any) -> _Json | None:
    """Return it as JSON; None: it cannot be described."""
    if type(transform) is ByEpoch:
        each = {str(epoch): _transform(one) for epoch, one in transform.transforms.items()}
        return None if None in each.values() else {"kind": "ByEpoch", "transforms": each}
    kind = type(transform).__name__
    if type(transform) is not _CROPS.get(kind):
        return None
    values = {name: getattr(transform, name) for name in _ARGUMENTS[kind]}
    values = {name: list(one) if isinstance(one, tuple) else one for name, one in values.items()}
    return {"kind": kind, "size": [transform.height, transform.width], **values}


def _sampler(sampler: Any, dataset: Any, drawing: Any) -> SamplerRecipe | Unknown:
    kind = type(sampler)
    if kind not in _SAMPLERS:
        return Unknown(f"its sampler is a {kind.__qualname__}")
    source: Any = sampler.dataset if hasattr(sampler, "dataset") else sampler.data_source
    if source is not dataset and known_length(source) != known_length(dataset):
        return Unknown(f"its {kind.__qualname__} is of another dataset")
    if kind is SequentialSampler:
        return SamplerRecipe("SequentialSampler")
    if kind is RandomSampler:
        own = sampler.generator is not None and sampler.generator is not drawing
        generator = "own" if own else "none" if sampler.generator is None else "loader's"
        return SamplerRecipe(
            "RandomSampler",
            replacement=sampler.replacement,
            num_samples=sampler.num_samples,
            generator=generator,
        )
    dealt: _Json = {"shuffle": sampler.shuffle, "seed": sampler.seed, "drop_last": sampler.drop_last}
    if kind is ShardSampler:
        return SamplerRecipe("ShardSampler", **dealt, mode=sampler.mode)
    if kind is DistributedSampler:
        dealt |= {"mode": sampler.mode, "nodes": sampler._place.nodes, "exchange": sampler.exchange}
    return SamplerRecipe(f"{kind.__module__.partition('.')[0]}.DistributedSampler", **dealt)


def _normalize(transform: Any) -> _Json | None:
    """Return it as JSON. None: there is none. {}: it cannot be described."""
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
    made: DatasetRecipe | Unknown,
    length: int,
    url: str | None,
    options: Mapping[str, Any],
    notes: list[str],
) -> tuple[Any, str | None]:
    """Return (dataset, why it has no samples)."""
    if isinstance(made, Unknown):
        return range(length), f"{made.why}: {OWN_LOADER}"
    if made.class_ not in _DATASETS:
        raise ValueError(f"the dataset {made.class_!r}")
    where, kind = made.url if url is None else url, getattr(fastload, made.class_)
    arguments = {name: _parsed(value) for name, value in made.arguments.items()}
    refused = sorted((arguments.keys() & _REFUSED) | (arguments.keys() - inspect.signature(kind).parameters))
    if refused:
        raise ValueError(f"the argument {refused[0]!r}")
    places = [arguments["table"]] if "table" in arguments else []
    if url is None:
        places += where if isinstance(where, list) else [where]
    checked = [options_from_state(place, made.options, options) for place in places if place != ""]
    options = checked[0] if checked else options
    if made.class_ == "ImageFolder":
        arguments["allow_empty"] = True
    try:
        dataset = kind(url=where, storage_options=dict(options) or None, **arguments)
        known = indexed_length(dataset)
    except (FastloadError, TypeError) as error:
        held = made.withheld
        hint = (
            f" (a state does not keep {', '.join(held)}: pass --storage-option)"
            if held and not options
            else ""
        )
        return range(length), f"the data cannot be read{hint}: {error}"
    keys, versions = view_of(dataset).listed() or (None, None)
    if known != length:
        return range(length), (
            f"{where!r} has {known:,} samples, and the run had {length:,}: pass --data URL if the "
            "data has moved, or --loader FILE.py:FUNCTION"
        )
    if None not in (keys, made.keys) and keys != made.keys:
        return range(length), (
            f"{where!r} has as many objects as in the run, with other names: pass --data URL if the data has "
            "moved, or --loader FILE.py:FUNCTION"
        )
    if None not in (versions, made.versions) and versions != made.versions:
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
    made: SamplerRecipe, dataset: Any, replicas: int | None, generator: torch.Generator | None
) -> Any:
    """Return the sampler of rank 0."""
    if made.kind == "SequentialSampler":
        return SequentialSampler(dataset)
    if made.kind == "RandomSampler":
        drawing = {"own": torch.Generator(), "loader's": generator, "none": None}[str(made.generator)]
        return RandomSampler(dataset, made.replacement, made.num_samples, drawing)
    dealt = {"shuffle": made.shuffle, "seed": made.seed, "drop_last": made.drop_last}
    if made.kind.startswith("torch."):
        return torch.utils.data.DistributedSampler(dataset, replicas, 0, **dealt)
    dealt |= {"mode": made.mode}
    if made.kind == "ShardSampler":
        return ShardSampler(dataset, replicas, 0, **dealt)
    assert made.nodes is not None
    if made.nodes > 1:
        dealt |= {"partition": "node", "num_nodes": made.nodes, "exchange": made.exchange}
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
        [float(value) for value in made["mean"]],
        [float(value) for value in made["std"]],
        dtype=getattr(torch, dtype),
        channels_last=made["channels_last"],
        memory_format=None if layout is None else getattr(torch, layout),
    )
