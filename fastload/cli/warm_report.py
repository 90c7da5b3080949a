"""The report of `fastload warm`: what was warmed, and what became of each sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastload.checks import format_size, parse_size
from fastload.cli.command_options import CacheOptions, check_usable
from fastload.cli.data_source import OBJECTS, SourceOptions, find_kind, open_dataset
from fastload.cli.plan.prices import Cost, Prices
from fastload.cli.report import Lines, MeasuredReport
from fastload.errors import ArgumentError


@dataclass(kw_only=True)
class Settings:
    """What was warmed, and how."""

    url: str
    kind: Annotated[str | None, "as given or found"]
    cache: str
    mode: Annotated[str, "as given or found"]
    short_side: int
    quality: int
    size_limit: Annotated[int | None, "as given in bytes, or null"]
    num_workers: Annotated[int | None, "as given or found; null with `--ray`: the CPUs of each node"]
    share: Annotated[tuple[int, int], "[share of this node, number of shares]"]
    ray: Annotated[str | None, "address of the Ray cluster, or null"] = None


@dataclass(frozen=True)
class Target:
    """What is warmed, and the cache of it: each node opens its own."""

    url: str
    cache: str
    cached: CacheOptions
    source: SourceOptions
    storage_options: dict[str, Any]

    def __repr__(self) -> str:
        """Leave out the options, which may be secrets."""
        return f"Target({self.url!r}, cache={self.cache!r})"

    def settings(
        self, url: str, kind: str, num_workers: int | None, share: tuple[int, int], ray: str | None = None
    ) -> Settings:
        """Return what the report says of it."""
        cached = self.cached
        return Settings(
            url=url,
            kind=kind,
            cache=self.cache,
            mode=str(cached.mode),
            short_side=cached.short_side,
            quality=cached.quality,
            size_limit=None if cached.size_limit is None else parse_size(cached.size_limit),
            num_workers=num_workers,
            share=share,
            ray=ray,
        )

    def anywhere(self) -> Target:
        """Return the same for processes in other directories: without relative paths."""
        from fastload.cache.cache import absolute
        from fastload.store import open_store
        from fastload.store.local import LocalStore

        store = open_store(self.url, **self.storage_options)
        url = store.address if isinstance(store, LocalStore) else self.url
        files = self.source.files
        if files is not None and "://" not in files:
            files = absolute(files)
        return replace(self, url=url, cache=absolute(self.cache), source=replace(self.source, files=files))

    def open(self, listing_max_age: float | str) -> tuple[Any, str]:
        """Return (the dataset over the listed objects, the kind of the data)."""
        import fastload

        kept = self.cached.open(self.cache)
        check_usable(kept)
        kind = find_kind(self.url, self.storage_options, self.source.kind)
        fields = self.source.fields or ""
        if kind == "tfrecord" and not fields and kept._codec.wants_images:
            raise ArgumentError(
                f"mode {str(self.cached.mode)!r} keeps the fields of a record: pass those of your script, "
                "as in --fields image:bytes,label:int"
            )
        if kind == "tfrecord" and fields.count(":bytes") > 1:
            raise ArgumentError(
                "--fields has several of type bytes, and your transform says which is the image: "
                "let its first epoch fill the cache"
            )
        # Records that a cache can only keep of images are for transforms that decode them.
        crop = kept._codec.wants_images and kept._codec.lossless and kind in (OBJECTS, "tfrecord")
        dataset = open_dataset(
            self.url,
            kind,
            self.source,
            transform=fastload.CenterCrop(224) if crop else None,
            cache=kept,
            storage_options=self.storage_options,
            listing_max_age=listing_max_age,
        )
        if dataset.cache is None:
            raise ArgumentError(f"{self.url!r} cannot be cached: the warning above says why")
        return dataset, kind


@dataclass(kw_only=True)
class Held:
    """What a cache directory holds."""

    entries: Annotated[int, "entries of the directory now"] = 0
    bytes: Annotated[int, "bytes of the directory now"] = 0


@dataclass(kw_only=True)
class Failure:
    """A sample that cannot be read or decoded."""

    key: Annotated[str, "its object"]
    error: Annotated[str, "why"]


@dataclass(kw_only=True)
class Counts:
    """What became of the samples of a share, or of a slice of one."""

    objects: Annotated[int, "objects in this share; of shards, their samples"] = 0
    stored: Annotated[int, "kept now"] = 0
    skipped: Annotated[int, "in the cache already"] = 0
    failed: Annotated[int, "could not be read or decoded"] = 0
    too_large: Annotated[int, "larger than a record may be, or than the space left"] = 0
    left: Annotated[
        int | None, "not in the cache: training reads them from the store. Null: the shards are not indexed"
    ] = 0
    read_bytes: Annotated[int, "bytes from the store; of compressed shards as they are there"] = 0
    requests: Annotated[int, "GETs, repeated ones included"] = 0
    cache: Held = field(default_factory=Held)

    def add(self, other: Counts) -> None:
        """Add the counts of another node."""
        for name in ("objects", "stored", "skipped", "failed", "too_large", "read_bytes", "requests"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.left = None if self.left is None or other.left is None else self.left + other.left
        self.cache.entries += other.cache.entries
        self.cache.bytes += other.cache.bytes


@dataclass(kw_only=True)
class Filled(Counts):
    """What one run of the workers did."""

    full: Annotated[bool, "whether the cache takes no more"] = False
    interrupted: Annotated[bool, "whether Ctrl-C ended it"] = False
    failures: Annotated[list[Failure], "the first ten"] = field(default_factory=list)
    seconds: Annotated[float, "time of this run"] = 0.0


@dataclass(kw_only=True)
class NodeCounts(Counts):
    """A node of a cluster, and its share."""

    address: Annotated[str, "address of the node"]
    share: Annotated[tuple[int, int], "[its share, number of shares]"]
    lost: Annotated[str | None, "why the node is gone, else null"]


@dataclass(kw_only=True)
class Quote:
    """What is left to read, before it is read."""

    objects: Annotated[int, "samples that the cache lacks; or shards, where these are streamed"]
    requests: Annotated[
        int,
        "GETs for them, without repeats; of streamed shards an estimate: what is missing, in ranges of up to "
        "8 MiB",
    ]
    read_bytes: Annotated[int, "bytes of them"]
    cost: Annotated[Cost | None, "money for that; null where no price is known"]


@dataclass(kw_only=True)
class WarmReport(Filled, MeasuredReport):
    """What the cache has now. With `--ray` the numbers are the sums of all nodes."""

    command = "warm"
    settings: Settings
    listing_seconds: Annotated[float, "time of the listing"]
    objects_per_second: Annotated[float, "samples that were read a second"]
    megabytes_per_second: Annotated[float, "bytes that were read a second"]
    quote: Annotated[Quote, "what was left to read before the run"]
    cost: Annotated[Cost | None, "money for what was read; null where no price is known"]
    prices: Annotated[Prices | None, "null where they are not known"]
    redone: Annotated[
        int | None,
        "with `--ray`: slices that were done again because their process was lost; what it had read is not "
        "in the other numbers",
    ] = None
    nodes: Annotated[list[NodeCounts] | None, "with `--ray`: the nodes"] = None

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return 130
        return 1 if self.failed or any(node.lost for node in self.nodes or ()) else 0

    def text(self) -> Lines:
        yield (
            f"{self.stored:,} stored ({format_size(self.read_bytes)} read), {self.skipped:,} present, "
            f"{self.failed:,} failed in {self.seconds:.1f} s: {self.objects_per_second:,.0f} objects/s, "
            f"{self.megabytes_per_second:,.1f} MB/s"
        )
        if self.prices is not None and self.cost is not None:
            requests, egress = self.cost.words(self.prices.currency)
            yield (
                f"{self.requests:,} GETs cost {requests}, their egress {egress}; prices by "
                f"{self.prices.source}; egress is often free within a region"
            )
        of_nodes = "" if self.nodes is None else f" of {len(self.nodes)} nodes"
        yield (
            f"{self.settings.cache}{of_nodes} holds {self.cache.entries:,} records, "
            f"{format_size(self.cache.bytes)}"
        )
        if self.redone:
            yield f"{self.redone:,} slices were done again: what they read before is not among these numbers"
        for node in self.nodes or ():
            if node.lost:
                yield (
                    f"node {node.address} is gone, and its share {node.share[0]}/{node.share[1]} with it "
                    f"({node.lost}): run the same command when it is back"
                )
        yield from self._unkept()

    def _unkept(self) -> Iterator[str]:
        for failure in self.failures:
            yield f"  {failure.key}: {failure.error}"
        if self.failed > len(self.failures):
            yield f"  and {self.failed - len(self.failures):,} more"
        if self.too_large and not self.full:
            yield (
                f"too large for the cache: {self.too_large:,} objects (above 1 GiB, or above the rest of "
                "--size-limit); training reads them from the store"
            )
        left = "the other" if self.left is None else f"{self.left:,}"
        if self.nodes is not None and self.interrupted and self.left is not None:
            left = f"at most {left}"
            yield "these numbers are without the slices that were ended; what they stored is kept"
        if self.full:
            yield f"the cache is full: training will read {left} objects from the store"
        if self.interrupted:
            yield f"interrupted, {left} objects left: run the same command to resume"


def report_of(
    filled: Filled, settings: Settings, quote: Quote, prices: Prices | None, **more: Any
) -> WarmReport:
    """Return the report of a run over a share, or over all nodes."""
    seconds = max(filled.seconds, 1e-9)
    return WarmReport(
        settings=settings,
        quote=quote,
        prices=prices,
        cost=None if prices is None else prices.bill(filled.requests, filled.read_bytes),
        objects_per_second=round((filled.stored + filled.failed) / seconds, 1),
        megabytes_per_second=round(filled.read_bytes / seconds / 1e6, 2),
        **vars(filled),
        **more,
    )
