"""The table of all that is pinned: a dataset, a loader over it, and which parts are measured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, WeightedRandomSampler
from torch.utils.data import DistributedSampler as TorchDistributedSampler

import fastload
from fastload import (
    BetonDataset,
    ByEpoch,
    CenterCrop,
    DistributedSampler,
    File,
    ImageFolder,
    LitDataset,
    MDSDataset,
    Mixture,
    MixtureSampler,
    ObjectDataset,
    ParquetDataset,
    RandomResizedCrop,
    ShardSampler,
    TableDataset,
    TarDataset,
    TFRecordDataset,
    TokenDataset,
)
from tests.pins.objects import COUNT, PHOTOS, ROOT

CROP = RandomResizedCrop(16, scale=(0.3, 1.0), flip=0.5)
ALL_MODES = ("raw", "dct", "auto", "shrunk", "decoded")
LOSSLESS = ("raw", "dct", "auto")
_EVERY = ("keys", "digest", "rows", "batches", "order", "start", "middle", "end")
_OF_A_MODE = ("keys", "digest", "rows", "batches", "order")  # a cache is no part of a state
_OF_A_TRANSFORM = ("items", "rows", "batches", "start")
_OF_AN_ORDER = ("digest", "order", "start", "middle", "end")

Make = Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """What is measured under one name.

    Attributes:
        make: cache -> dataset.
        mode: of the cache; None: there is none.
        loader: arguments of the loader; one that is a function is called with the dataset.
        parts: of the measurement.
        touch: called with the loader after the first batch.
    """

    make: Make
    mode: Any = None
    loader: dict[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = _EVERY
    touch: Callable[[Any], None] | None = None


def length_and_end(data: bytes) -> torch.Tensor:
    """Return the length and the last byte of an object: a `decode` that needs no decoder."""
    return torch.tensor([len(data), data[-1]])


length_and_end.__fingerprint__ = "pins"  # type: ignore[attr-defined]


def negative(sample: tuple[Any, int]) -> tuple[Any, int]:
    """Return the negative of an image: a function for `fastload.map`."""
    return 255 - sample[0], sample[1]


def noisy(sample: tuple[Any, int]) -> tuple[Any, int]:
    """Add a random number of torch to an image: what the user draws in a sample."""
    return sample[0].int() + int(torch.randint(1000, ())), sample[1]


def _folder(cache: Any = None, transform: Any = CROP, **options: Any) -> Any:
    return ImageFolder(f"{ROOT}/folder", transform, cache=cache, **options)


def _cached(cache: Any = None) -> Any:
    samples = _folder()
    samples.__fingerprint__ = "pins"
    return samples if cache is None else fastload.cached(samples, cache)


def _rows() -> list[dict[str, Any]]:
    masked = {"masked": PHOTOS[0], "mask": "mask.png"}
    return [{"photo": PHOTOS[n % len(PHOTOS)], "number": n} | masked for n in range(COUNT)]


def _table(fields: Any, cache: Any = None, **options: Any) -> Any:
    if fields != "number":
        options |= {"url": f"{ROOT}/photos", "cache": cache}
    return TableDataset(_rows(), fields, **options)


def _numbers(count: int = 23, first: int = 0) -> Any:
    return TableDataset(
        {"x": [n / 2 for n in range(count)], "n": list(range(first, first + count))}, ("x", "n")
    )


def _shards(kind: type, name: str, fields: Any, cache: Any = None, **options: Any) -> Any:
    if kind is TFRecordDataset:
        fields = ("image:bytes", "label:int")
    if kind in (TarDataset, TFRecordDataset, ParquetDataset):
        options |= {"cycle_length": 2, "shuffle_buffer": 4}
    return kind(
        f"{ROOT}/{name}", fields=fields, cache=cache, transform=options.pop("transform", CROP), **options
    )


_PAIR = ("image", "label")
_IN_TAR = ("jpg;png", "cls")
_MASKED = RandomResizedCrop(16, scale=(0.3, 1.0), flip=0.5, interpolation="nearest", channels=1)

# Name -> (cache -> dataset, the cache modes that it has).
KINDS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "ImageFolder": (_folder, ALL_MODES),
    "ImageFolder, keys and classes": (
        lambda cache: _folder(cache, keys=["07/1.jpg", "02/2.jpg", "07/1.jpg"], classes=["07", "02"]),
        ("dct",),
    ),
    "ObjectDataset": (lambda cache: ObjectDataset(f"{ROOT}/photos", transform=CROP, cache=cache), ALL_MODES),
    "ObjectDataset, decode": (
        lambda cache: ObjectDataset(f"{ROOT}/photos", decode=length_and_end, cache=cache),
        ("raw", "auto", "decoded"),
    ),
    "TableDataset": (
        lambda cache: _table((File("photo"), "number"), cache, transform=CROP),
        ALL_MODES,
    ),
    "TableDataset, two images and a decode": (
        lambda cache: _table(
            {
                "image": File("photo"),
                "label": "number",
                "other": File("{photo}"),
                "size": File("photo", decode=length_and_end),
            },
            cache,
            transform={"image": CROP, "other": CROP},
        ),
        ("raw", "dct", "auto", "decoded"),
    ),
    "TableDataset, mask": (
        lambda cache: _table(
            {"image": File("masked"), "label": "number", "mask": File("mask")},
            cache,
            transform={"image": CROP, "mask": _MASKED},
        ),
        LOSSLESS,
    ),
    "TarDataset": (lambda cache: _shards(TarDataset, "tar", _IN_TAR, cache), ALL_MODES),
    "TFRecordDataset": (lambda cache: _shards(TFRecordDataset, "tfrecord", _PAIR, cache), ALL_MODES),
    "ParquetDataset": (lambda cache: _shards(ParquetDataset, "parquet", _PAIR, cache), ALL_MODES),
    "MDSDataset": (lambda cache: _shards(MDSDataset, "mds-gz", _PAIR, cache), ALL_MODES),
    "LitDataset": (lambda cache: _shards(LitDataset, "lit-photos", _PAIR, cache), ALL_MODES),
    "BetonDataset": (lambda cache: _shards(BetonDataset, "beton/numbered.beton", None, cache), ALL_MODES),
    "TokenDataset": (
        lambda cache: TokenDataset(f"{ROOT}/tokens", "uint16", 8, overlap=1, cache=cache),
        ("raw", "auto"),
    ),
    "map": (lambda cache: fastload.map(_folder(cache), negative), ALL_MODES),
    "Subset": (lambda cache: Subset(_folder(cache), [9, 1, 4, 7, 7, 2]), ("dct",)),
    "ConcatDataset": (
        lambda cache: ConcatDataset([_folder(cache), Subset(_folder(cache), [3, 5])]),
        ("dct",),
    ),
    "StackDataset": (
        lambda cache: StackDataset(_table(File("photo"), cache, transform=CROP), _table("number")),
        ("dct",),
    ),
    "Mixture": (
        lambda cache: Mixture(
            {"a": _folder(cache), "b": _folder(cache, CenterCrop(16))}, {"a": 0.7, "b": 0.3}
        ),
        ("dct",),
    ),
    "cached": (
        _cached,
        ("raw", "auto", "decoded"),
    ),
}


def _fused() -> Any:
    from bench.peers.scripts.torchvision_on_cpu import torchvision

    steps = torchvision.transforms
    return fastload.fuse(
        steps.Compose(
            [
                steps.RandomResizedCrop(16),
                steps.RandomHorizontalFlip(),
                steps.RandomVerticalFlip(0.25),
                steps.ToTensor(),
                steps.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
            ]
        )
    )


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "RandomResizedCrop": lambda: RandomResizedCrop(16),
    "RandomResizedCrop, scale": lambda: RandomResizedCrop(16, scale=(0.5, 0.6)),
    "RandomResizedCrop, ratio": lambda: RandomResizedCrop((12, 20), ratio=(2, 3)),
    "RandomResizedCrop, flip 0.5": lambda: RandomResizedCrop(16, flip=0.5),
    "RandomResizedCrop, flip 1": lambda: RandomResizedCrop(16, flip=1),
    "RandomResizedCrop, nearest": lambda: RandomResizedCrop(16, interpolation="nearest"),
    "RandomResizedCrop, channels_last": lambda: RandomResizedCrop(16, channels_last=True),
    "RandomResizedCrop, larger": lambda: RandomResizedCrop(56),
    "CenterCrop": lambda: CenterCrop(16),
    "CenterCrop, padded": lambda: CenterCrop((40, 44)),
    "CenterCrop, resize": lambda: CenterCrop(16, resize=20),
    "CenterCrop, resize to a pair": lambda: CenterCrop(16, resize=(18, 24)),
    "CenterCrop, resize, nearest": lambda: CenterCrop(16, resize=20, interpolation="nearest"),
    "fuse": _fused,
    "ByEpoch": lambda: ByEpoch({0: RandomResizedCrop(12), 1: CenterCrop(16)}),
}


def _masks(transform: Any) -> Any:
    return ObjectDataset(f"{ROOT}/photos", transform=transform, keys=["mask.png"] * 3)


def _dealt(kind: Any, rank: int, ranks: int = 2, **options: Any) -> dict[str, Any]:
    return {"sampler": lambda dataset: kind(dataset, ranks, rank, **options), "seed": 7}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


ORDERS: dict[str, dict[str, Any]] = {
    "in sequence": {},
    "shuffle": {"shuffle": True},
    "shuffle, seed": {"shuffle": True, "seed": 7},
    "shuffle, drop_last": {"shuffle": True, "seed": 7, "drop_last": True},
    "shuffle, generator": {"shuffle": True, "generator": lambda dataset: _generator()},
    "batch_size=None": {"batch_size": None, "shuffle": True, "seed": 7},
    "RandomSampler, replacement": {
        "sampler": lambda dataset: torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=14),
        "seed": 7,
    },
    "WeightedRandomSampler": {
        "sampler": lambda dataset: WeightedRandomSampler(range(1, 24), 12, generator=_generator())
    },
    "SubsetRandomSampler": {
        "sampler": lambda dataset: torch.utils.data.SubsetRandomSampler(range(3, 17)),
        "seed": 7,
    },
    "batch_sampler": {"batch_sampler": lambda dataset: [[1, 2, 3], [22], [5, 4]], "batch_size": 1},
    "DistributedSampler 0/2": _dealt(DistributedSampler, 0, seed=3),
    "DistributedSampler 1/2": _dealt(DistributedSampler, 1, seed=3),
    "DistributedSampler 1/2, drop_last": _dealt(DistributedSampler, 1, seed=3, drop_last=True),
    "DistributedSampler 0/2, eval": _dealt(DistributedSampler, 0, mode="eval", shuffle=False),
    "DistributedSampler 1/2, eval": _dealt(DistributedSampler, 1, mode="eval", shuffle=False),
    "DistributedSampler 1/4, by node": _dealt(
        DistributedSampler, 1, 4, seed=3, partition="node", num_nodes=2, exchange=0.25
    ),
    "torch's DistributedSampler 1/2": _dealt(TorchDistributedSampler, 1, seed=3),
}


STORES: dict[str, dict[str, Any]] = {
    "s3://bucket/a/b": {"endpoint_url": "https://s3.example.com:9000", "key": "name", "secret": "word"},
    "gs://bucket/a": {},
    "az://box/a": {"account_name": "name", "account_key": "d29yZA=="},
    "https://example.com/a": {},
    "file:///pins/a": {},
    "memory://pins/a": {},
}


def _mixed(weights: Any = (0.6, 0.3, 0.1)) -> Mixture:
    sources = {"a": _numbers(11), "b": _numbers(5, 100), "c": _numbers(7, 200)}
    given = weights if callable(weights) else dict(zip(sources, weights, strict=True))
    return Mixture(sources, given, num_samples=20)


def _by_epoch(epoch: int) -> list[float]:
    return [1, 1, 1] if epoch == 0 else [0, 2, 1]


def _leave_out(loader: Any) -> None:
    loader.exclude([1, 2, 3, 19])
    loader.skip([2])
    loader.skip([0], epoch=1)


def _cases() -> Iterable[tuple[str, Case]]:
    usual = {"shuffle": True, "seed": 7}
    for name, (make, modes) in KINDS.items():
        yield name, Case(make, None, usual)
        for mode in modes:
            yield f"{name}: {mode}", Case(make, mode, usual, _OF_A_MODE)
    for name in ("ImageFolder", "TarDataset", "Mixture"):
        yield f"whole state of a loader over {name}", Case(KINDS[name][0], None, usual, ("whole",))
    for url, options in STORES.items():
        make = functools.partial(_store, url, options)
        yield f"store: {url}", Case(make, parts=("identity",))
    for name, transform in TRANSFORMS.items():
        make = functools.partial(_transformed, transform)
        yield f"transform: {name}", Case(make, None, {"seed": 7, "batch_size": 6}, _OF_A_TRANSFORM)
    for name, transform in {"RandomResizedCrop": _MASKED, "CenterCrop": CenterCrop(16, resize=20)}.items():
        make = functools.partial(_of_masks, transform)
        yield f"mask: {name}", Case(make, None, {"seed": 7}, _OF_A_TRANSFORM)
    yield (
        "what the user draws",
        Case(lambda cache: fastload.map(_folder(), noisy), None, usual, _OF_A_TRANSFORM),
    )
    for name, arguments in ORDERS.items():
        yield f"order: {name}", Case(lambda cache: _numbers(), None, arguments, _OF_AN_ORDER)
    yield "order: exclude and skip", Case(lambda cache: _numbers(), None, usual, _OF_AN_ORDER, _leave_out)
    for rank in (0, 1):
        for name, weights in {"": (0.6, 0.3, 0.1), ", weights by epoch": _by_epoch}.items():
            dealt = _dealt(MixtureSampler, rank, seed=3)
            make = functools.partial(_mixture, weights)
            yield f"order: MixtureSampler {rank}/2{name}", Case(make, None, dealt, _OF_AN_ORDER)
        dealt, shards = (
            _dealt(ShardSampler, rank, seed=3),
            functools.partial(_shards, BetonDataset, "beton/numbered.beton", None),
        )
        yield f"order: ShardSampler {rank}/2", Case(shards, None, dealt, _OF_AN_ORDER)
    streams = functools.partial(_shards, TarDataset, "tar", _IN_TAR)
    yield "order: streams in sequence", Case(streams, None, {"seed": 7}, _OF_AN_ORDER)
    for kind, name, fields in ((TarDataset, "tar", _IN_TAR), (TFRecordDataset, "tfrecord", _PAIR)):
        streams = functools.partial(_shards, kind, name, fields)
        yield f"order: streams of ranks 0/2 and 1/2, {kind.__name__}", Case(streams, None, {}, ("streams",))


def _store(url: str, options: dict[str, Any], cache: Any) -> Any:
    return fastload.open_store(url, **options)


def _transformed(transform: Callable[[], Any], cache: Any) -> Any:
    return _folder(cache, transform())


def _of_masks(transform: Any, cache: Any) -> Any:
    return _masks(transform)


def _mixture(weights: Any, cache: Any) -> Any:
    return _mixed(weights)


CASES = dict(_cases())
