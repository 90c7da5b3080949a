"""fastload: a drop-in torch DataLoader over object stores, with a first-epoch cache on local SSD.

from fastload import DataLoader, ImageFolder
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastload import errors as errors
    from fastload import testing as testing
    from fastload.cache import Cache
    from fastload.datasets.columns import Jagged
    from fastload.datasets.mixture import Mixture
    from fastload.datasets.objects import ImageFolder, ObjectDataset
    from fastload.datasets.packed import PackTokens
    from fastload.datasets.sample_files import File
    from fastload.datasets.table import TableDataset
    from fastload.datasets.wrappers import cached, map
    from fastload.gpu.dali import Dali
    from fastload.gpu.normalize import Normalize
    from fastload.images.fuse import fuse
    from fastload.images.transforms import ByEpoch, CenterCrop, RandomResizedCrop
    from fastload.loader.dataloader import DataLoader
    from fastload.metrics.watch import watch
    from fastload.order.budget_sampler import BudgetSampler
    from fastload.order.mixture_sampler import MixtureSampler
    from fastload.order.sampler import DistributedSampler
    from fastload.order.shard_sampler import ShardSampler
    from fastload.shards.beton import BetonDataset
    from fastload.shards.litdata import LitDataset
    from fastload.shards.mds import MDSDataset
    from fastload.shards.parquet import ParquetDataset
    from fastload.shards.tar import TarDataset
    from fastload.shards.tfrecord import TFRecordDataset
    from fastload.shards.tokens import TokenDataset
    from fastload.store import open_store
    from fastload.trace.prove import prove

# name -> module. Loaded on first use: torch takes 2 s to import, and `fastload cache info` or a listing
# child needs none of it.
_HOME = {
    "BetonDataset": "fastload.shards.beton",
    "BudgetSampler": "fastload.order.budget_sampler",
    "ByEpoch": "fastload.images.transforms",
    "Cache": "fastload.cache",
    "CenterCrop": "fastload.images.transforms",
    "Dali": "fastload.gpu.dali",
    "DataLoader": "fastload.loader.dataloader",
    "DistributedSampler": "fastload.order.sampler",
    "File": "fastload.datasets.sample_files",
    "ImageFolder": "fastload.datasets.objects",
    "Jagged": "fastload.datasets.columns",
    "LitDataset": "fastload.shards.litdata",
    "MDSDataset": "fastload.shards.mds",
    "Mixture": "fastload.datasets.mixture",
    "MixtureSampler": "fastload.order.mixture_sampler",
    "Normalize": "fastload.gpu.normalize",
    "ObjectDataset": "fastload.datasets.objects",
    "PackTokens": "fastload.datasets.packed",
    "ParquetDataset": "fastload.shards.parquet",
    "RandomResizedCrop": "fastload.images.transforms",
    "ShardSampler": "fastload.order.shard_sampler",
    "TFRecordDataset": "fastload.shards.tfrecord",
    "TableDataset": "fastload.datasets.table",
    "TarDataset": "fastload.shards.tar",
    "TokenDataset": "fastload.shards.tokens",
    "cached": "fastload.datasets.wrappers",
    "fuse": "fastload.images.fuse",
    "map": "fastload.datasets.wrappers",
    "open_store": "fastload.store",
    "prove": "fastload.trace.prove",
    "watch": "fastload.metrics.watch",
}

_MODULES = ("errors", "testing")  # as attributes, without an import of their own

__all__ = [
    "BetonDataset",
    "BudgetSampler",
    "ByEpoch",
    "Cache",
    "CenterCrop",
    "Dali",
    "DataLoader",
    "DistributedSampler",
    "File",
    "ImageFolder",
    "Jagged",
    "LitDataset",
    "MDSDataset",
    "Mixture",
    "MixtureSampler",
    "Normalize",
    "ObjectDataset",
    "PackTokens",
    "ParquetDataset",
    "RandomResizedCrop",
    "ShardSampler",
    "TFRecordDataset",
    "TableDataset",
    "TarDataset",
    "TokenDataset",
    "__version__",
    "cached",
    "fuse",
    "map",
    "open_store",
    "prove",
    "watch",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fastload.{name}")
    if name not in _HOME:
        import difflib  # not before: it would slow every import

        near = difflib.get_close_matches(name, __all__, 1)
        instead = (
            f"did you mean {near[0]!r}" if near else "datasets and loaders take those of torch(vision) too"
        )
        raise AttributeError(f"module 'fastload' has no attribute {name!r}: {instead}")
    from fastload.metrics.machine import importable, need_linux

    if not importable(name):
        need_linux()
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
