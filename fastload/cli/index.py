"""`fastload index URL`: index files beside shards that exist already, or their index in a cache."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from fastload.checks import format_size
from fastload.cli.command_options import StoreOptions, check_usable
from fastload.cli.data_source import (
    AUTO,
    INDEXABLE,
    KindOption,
    SourceOptions,
    find_kind,
    list_shards,
    open_dataset,
)
from fastload.cli.report import Bars, Fault, Lines, MeasuredReport, Output
from fastload.errors import ArgumentError, DecodeError, NotFoundError
from fastload.shards.formats import FORMATS


@dataclass(kw_only=True)
class Settings:
    """What was indexed, and where the index is."""

    url: str
    kind: Annotated[str, "as given or found"]
    to: str | None
    cache: str | None
    refresh: bool


@dataclass(kw_only=True)
class IndexReport(MeasuredReport):
    """The shards that have an index now."""

    command = "index"
    settings: Settings
    shards: Annotated[int, "shards below the URL: the sum of the next five"]
    indexed: Annotated[int, "indexed now"]
    present: Annotated[int, "they had an index"]
    compressed: Annotated[int, "they cannot have an index file"]
    failed: Annotated[int, "damaged, or cannot be read: they have no index"]
    left: Annotated[int, "not reached, because of Ctrl-C"]
    samples: Annotated[int, "samples of the shards that were indexed now"]
    interrupted: Annotated[bool, "whether Ctrl-C ended it"]
    faults: Annotated[list[Fault], "with `--cache` a damaged shard is indexed without its damaged records"]
    read_bytes: Annotated[int, "bytes read in this run"]
    seconds: Annotated[float, "time of this run"]
    megabytes_per_second: Annotated[float, "rate of this run"]

    @property
    def exit_code(self) -> int:
        return 130 if self.interrupted else 1 if self.faults else 0

    def text(self) -> Lines:
        yield (
            f"{self.indexed:,} of {self.shards:,} shards indexed, {self.samples:,} samples; "
            f"{self.present:,} had an index; {format_size(self.read_bytes)} read in "
            f"{self.seconds:.1f} s, {self.megabytes_per_second:,.1f} MB/s"
        )
        settings = self.settings
        yield f"index in {settings.cache or settings.to or f'{settings.url}, beside the shards'}"
        for fault in self.faults:
            yield f"  {fault.shard}: {fault.fault}"
        if self.compressed:
            yield (
                f"{self.compressed:,} shards are compressed: an index file cannot point into them; "
                "--cache DIR indexes them for the trainings with that cache"
            )
        if self.interrupted:
            yield f"interrupted, {self.left:,} shards left: run the same command to resume"


def index(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="A prefix, a glob, braces or one shard: tar or TFRecord files."),
    ],
    store: StoreOptions,
    output: Output,
    to: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where index files are written.", show_default="beside the shards"),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write no files: keep the index in this cache, for its trainings."),
    ] = None,
    kind: KindOption = AUTO,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Index all shards, and overwrite index files.")
    ] = False,
) -> IndexReport:
    """Index shards that exist already, so that training shuffles them exactly from its first epoch on.

    Reads each shard once. The files are those of DALI's wds2idx and tfrecord2idx. After an interruption, run
    the same command again: shards that have an index are not read.
    """
    if to is not None and cache is not None:
        raise ArgumentError("--to writes index files, and --cache writes none: leave one out")
    if refresh and cache is not None:
        raise ArgumentError("--refresh overwrites index files, and --cache writes none: leave one out")
    options = store.parse()
    known = find_kind(url, options, kind)
    if known not in INDEXABLE:
        raise ArgumentError(f"url {url!r}: no shards there; --from tar or --from tfrecord reads other names")
    if cache is not None:
        target: _Files | _Kept = _Kept(url, known, options, cache)
    else:
        target = _Files(url, known, options, to, refresh)
    with closing(target):
        return _run(target, Settings(url=url, kind=known, to=to, cache=cache, refresh=refresh), output)


class _Files:
    """Index files beside the shards, or below `to`."""

    files = True

    def __init__(self, url: str, kind: str, options: dict[str, Any], to: str | None, refresh: bool) -> None:
        from fastload.store import open_store

        self.shards = list_shards(kind, url, cache=None, storage_options=options)
        self.form: Any = FORMATS[kind]
        self._store = self.shards.store if to is None else open_store(to, **options)
        self._beside, self._refresh = to is None, refresh
        names = Counter(self._name(shard) for shard in range(len(self.shards)))
        name, times = names.most_common(1)[0]
        if times > 1:
            raise ArgumentError(f"{times} of the shards would have the index file {name!r}: leave --to out")

    def present(self, shard: int) -> bool:
        """Return whether a shard has an index. Raises `DecodeError` where a file of that name is none."""
        if self._refresh:
            return False
        try:
            body = bytes(self._store.read(self._name(shard)))
        except NotFoundError:
            return False
        try:
            self.shards.records_in(shard, body, self.form.index_files)
        except DecodeError as error:
            raise DecodeError(
                f"{self._name(shard)!r} is not its index, and only --refresh overwrites it: {error.message}"
            ) from None
        return True

    def keep(self, shard: Any) -> None:
        self._store.write(self._name(shard.number), shard.file)

    def close(self) -> None:
        pass

    def _name(self, shard: int) -> str:
        from fastload.shards.catalog import index_name

        name = index_name(self.shards[shard].key)
        return name if self._beside else name.rpartition("/")[2]


class _Kept:
    """The index that a cache keeps for its trainings."""

    files = False

    def __init__(self, url: str, kind: str, options: dict[str, Any], cache: str) -> None:
        import fastload

        kept = fastload.Cache(cache)
        check_usable(kept)
        self._dataset = open_dataset(url, kind, SourceOptions(), cache=kept, storage_options=options)
        self.form = FORMATS[kind]
        if self._dataset.cache is None:
            raise ArgumentError(f"{url!r} cannot be cached: the warning above says why")
        self.shards = self._dataset.shards()

    def present(self, shard: int) -> bool:
        """Return whether a shard has an index: there, or beside the shards."""
        return self._dataset._index.get(shard) is not None

    def keep(self, shard: Any) -> None:
        self._dataset._index.add_and_keep(shard.number, shard.records)

    def close(self) -> None:
        self._dataset.close()


def _run(target: _Files | _Kept, settings: Settings, output: Output) -> IndexReport:
    """Index the shards that have no index yet."""
    from fastload.shards.filling import Indexing

    shards = [target.shards[number] for number in range(len(target.shards))]
    indexing = Indexing(target.shards.store, target.form, target.present, files=target.files)
    outcomes, faults, samples, interrupted = Counter[str](), [], 0, False
    with Bars(output.console) as bars:
        bar = bars.add("indexing", len(shards))

        def show() -> None:
            bar.show_rates(outcomes.total(), "shards", outcomes.total(), indexing.read)

        try:
            for shard in indexing.run(shards, show):
                if shard.records is not None:
                    target.keep(shard)
                    samples += len(shard.records.offsets)
                if shard.fault:
                    faults.append(Fault(shard=shards[shard.number].key, fault=shard.fault))
                outcomes[shard.outcome] += 1
                show()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            indexing.close()
    seconds = bar.seconds()
    return IndexReport(
        settings=settings,
        shards=len(shards),
        indexed=outcomes["indexed"],
        present=outcomes["present"],
        compressed=outcomes["compressed"],
        failed=outcomes["failed"],
        left=len(shards) - outcomes.total(),
        samples=samples,
        interrupted=interrupted,
        faults=faults,
        read_bytes=indexing.read,
        seconds=round(seconds, 3),
        megabytes_per_second=round(indexing.read / seconds / 1e6, 2),
    )
