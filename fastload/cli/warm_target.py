"""What `fastload warm` fills, so that every node of a cluster opens the same."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastload.cli.kinds import SHARDS, Kind, find_kind
from fastload.cli.shard_source import open_shards
from fastload.cli.store_options import CacheMode
from fastload.errors import ArgumentError, CacheError

__all__ = ["Target", "check_usable"]


class Target(NamedTuple):
    """What is warmed, and the cache of it: each node opens its own."""

    url: str
    cache: str
    mode: CacheMode
    size_limit: str | None
    short_side: int
    quality: int
    objects: bool
    fields: str | None
    features: str | None
    storage_options: dict[str, Any]

    def __repr__(self) -> str:
        """Leave out the options, which may be secrets."""
        return f"Target({self.url!r}, cache={self.cache!r})"

    def anywhere(self) -> Target:
        """The same for processes in other directories: without relative paths."""
        from fastload.cache.checks import absolute
        from fastload.store import open_store
        from fastload.store.local import LocalStore

        store = open_store(self.url, **self.storage_options)
        url = store.address if isinstance(store, LocalStore) else self.url
        return self._replace(url=url, cache=absolute(self.cache))

    def open(self, listing_max_age: float | str) -> tuple[Any, Kind]:
        """The dataset over the listed objects, and the kind of the data."""
        import fastload

        kept = fastload.Cache(
            self.cache,
            self.mode.value,
            size_limit=self.size_limit,
            short_side=self.short_side,
            quality=self.quality,
        )
        check_usable(kept)
        kind = Kind.objects if self.objects else find_kind(self.url, self.storage_options)
        arguments: dict[str, Any] = {
            "cache": kept,
            "storage_options": self.storage_options,
            "listing_max_age": listing_max_age,
        }
        as_training: dict[str, Any] = {}
        if self.mode is CacheMode.dct:  # its records are for transforms that decode them
            as_training["transform"] = fastload.CenterCrop(224)
        dataset: Any
        if kind in SHARDS:
            if kind is Kind.tfrecord:
                arguments |= as_training
            dataset = open_shards(kind, self.url, self.fields, self.features, **arguments)
        elif self.fields is not None or self.features is not None:
            raise ArgumentError(f"--fields and --features are for shards, and {self.url!r} holds none")
        else:
            kind = Kind.objects if self.objects else Kind.folder
            if self.objects:
                arguments |= as_training
            dataset = (fastload.ObjectDataset if self.objects else fastload.ImageFolder)(
                self.url, **arguments
            )
        if dataset.cache is None:
            raise ArgumentError(f"{dataset.url!r} cannot be cached: the warning above says why")
        return dataset, kind


def check_usable(cache: Any) -> None:
    """Check the cache before any listing. Unlike training, this command cannot continue without it."""
    try:
        cache.open_or_raise()
    except OSError as error:
        if isinstance(error, CacheError):
            raise
        raise CacheError(f"cache {cache.path} cannot be used: {error}") from error
    finally:
        cache.close()
