"""`fastload index URL`: index files beside shards that exist already, or their index in a cache.

The JSON document:

{"command": "index", "date", "machine": {...}, "versions": {...},
 "settings": {"url", "kind", "to", "cache", "again"},
 "shards" (all), "indexed" (now), "present" (before), "compressed" (they cannot have an index file), "failed",
 "left", "samples" (of the shards indexed now), "interrupted", "faults": [{"shard", "fault"}, ...],
 "read_bytes", "seconds", "megabytes_per_second"}

Exit code 1: a shard is damaged or cannot be read. 130: interrupted.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from fastload.cli.command_options import Anon, EndpointUrl, StorageOption, check_usable, storage_options
from fastload.cli.kinds import SHARDS, Kind, find_kind
from fastload.cli.measurement import Bars
from fastload.cli.output import JsonOption, Output, answering
from fastload.cli.shard_source import list_shards, open_shards
from fastload.errors import ArgumentError, DecodeError, NotFoundError
from fastload.metrics.units import format_size


def index(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="A prefix, a glob, braces or one shard: tar or TFRecord files."),
    ],
    to: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where index files are written.", show_default="beside the shards"),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write no files: keep the index in this cache, for its trainings."),
    ] = None,
    kind: Annotated[
        Kind, typer.Option("--from", help="The kind of the shards: tar or tfrecord.")
    ] = Kind.auto,
    again: Annotated[
        bool, typer.Option("--again", help="Index all shards, and overwrite index files.")
    ] = False,
    endpoint_url: EndpointUrl = None,
    anon: Anon = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Index shards that exist already, so that training shuffles them exactly from its first epoch on.

    Reads each shard once. The files are those of DALI's wds2idx and tfrecord2idx. After an interruption, run
    the same command again: shards that have an index are not read.
    """
    with answering(as_json) as output:
        if to is not None and cache is not None:
            raise ArgumentError("--to writes index files, and --cache writes none: leave one out")
        if again and cache is not None:
            raise ArgumentError("--again overwrites index files, and --cache writes none: leave one out")
        options = storage_options(storage_option, endpoint_url, anon)
        found = find_kind(url, options) if kind is Kind.auto else kind
        if found not in SHARDS:
            raise ArgumentError(
                f"url {url!r}: no shards there; --from tar or --from tfrecord reads other names"
            )
        if cache is not None:
            target: _Files | _Kept = _Kept(url, found, options, cache)
        else:
            target = _Files(url, found, options, to, again)
        try:
            document = _run(target, output)
        finally:
            target.close()
        document["settings"] = {
            "url": url,
            "kind": found.value,
            "to": to,
            "cache": None if cache is None else str(cache),
            "again": again,
        }
        _print_summary(document, output)
        output.document(document)
        if document["interrupted"]:
            raise typer.Exit(130)
        if document["faults"]:
            raise typer.Exit(1)


class _Files:
    """Index files beside the shards, or below `to`."""

    files = True

    def __init__(self, url: str, kind: Kind, options: dict[str, Any], to: str | None, again: bool) -> None:
        from fastload.store import open_store

        self.shards, self.form = list_shards(kind, url, cache=None, storage_options=options)
        self._store = self.shards.store if to is None else open_store(to, **options)
        self._beside, self._again = to is None, again
        names = Counter(self._name(shard) for shard in range(len(self.shards)))
        name, times = names.most_common(1)[0]
        if times > 1:
            raise ArgumentError(f"{times} of the shards would have the index file {name!r}: leave --to out")

    def present(self, shard: int) -> bool:
        """Whether a shard has an index. Raises `DecodeError` where a file of that name is none."""
        if self._again:
            return False
        try:
            body = bytes(self._store.read(self._name(shard)))
        except NotFoundError:
            return False
        try:
            self.form.index_files.parse(body, self.shards[shard].size)
        except DecodeError as error:
            raise DecodeError(
                f"{self._name(shard)!r} is not its index, and only --again overwrites it: {error.message}"
            ) from None
        return True

    def keep(self, found: Any) -> None:
        """Keep what was found in a shard."""
        self._store.write(self._name(found.number), found.file)

    def close(self) -> None:
        pass

    def _name(self, shard: int) -> str:
        from fastload.shards.catalog import index_name

        name = index_name(self.shards[shard].key)
        return name if self._beside else name.rpartition("/")[2]


class _Kept:
    """The index that a cache keeps for its trainings."""

    files = False

    def __init__(self, url: str, kind: Kind, options: dict[str, Any], cache: Path) -> None:
        import fastload

        kept = fastload.Cache(cache)
        check_usable(kept)
        _, self.form = list_shards(kind, url, cache=kept, storage_options=options)
        self._dataset = open_shards(kind, url, cache=kept, storage_options=options)
        if self._dataset.cache is None:
            raise ArgumentError(f"{url!r} cannot be cached: the warning above says why")
        self.shards = self._dataset.shards()

    def present(self, shard: int) -> bool:
        """Whether a shard has an index: there, or beside the shards."""
        return self._dataset.index_of(shard) is not None

    def keep(self, found: Any) -> None:
        """Keep what was found in a shard."""
        self._dataset.add_index(found.number, found.records)

    def close(self) -> None:
        self._dataset.close()


def _run(target: _Files | _Kept, output: Output) -> dict[str, Any]:
    """Index the shards that have no index yet."""
    from fastload.cli.measurement import describe_machine
    from fastload.shards.filling import Indexing

    shards = [target.shards[number] for number in range(len(target.shards))]
    indexing = Indexing(target.shards.store, target.form, target.present, files=target.files)
    outcomes, faults, samples, interrupted = Counter[str](), [], 0, False
    start = time.perf_counter()
    with Bars(output.console) as bars:
        bar = bars.add("indexing", len(shards))

        def show() -> None:
            rate = indexing.read / (time.perf_counter() - start) / 1e6
            bar.show(outcomes.total(), f"{format_size(indexing.read)}, {rate:,.1f} MB/s")

        try:
            for found in indexing.run(shards, show):
                if found.records is not None:
                    target.keep(found)
                    samples += len(found.records.offsets)
                if found.fault:
                    faults.append({"shard": shards[found.number].key, "fault": found.fault})
                outcomes[found.outcome] += 1
                show()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            indexing.close()
    seconds = max(time.perf_counter() - start, 1e-9)
    return {
        "command": "index",
        **describe_machine(),
        "shards": len(shards),
        **{name: outcomes[name] for name in ("indexed", "present", "compressed", "failed")},
        "left": len(shards) - outcomes.total(),
        "samples": samples,
        "interrupted": interrupted,
        "faults": faults,
        "read_bytes": indexing.read,
        "seconds": round(seconds, 3),
        "megabytes_per_second": round(indexing.read / seconds / 1e6, 2),
    }


def _print_summary(document: dict[str, Any], output: Output) -> None:
    console = output.console
    console.print(
        f"{document['indexed']:,} of {document['shards']:,} shards indexed, {document['samples']:,} samples; "
        f"{document['present']:,} had an index; {format_size(document['read_bytes'])} read in "
        f"{document['seconds']:.1f} s, {document['megabytes_per_second']:,.1f} MB/s",
        soft_wrap=True,
    )
    for fault in document["faults"]:
        console.print(f"  {fault['shard']}: {fault['fault']}", soft_wrap=True)
    if document["compressed"]:
        console.print(
            f"{document['compressed']:,} shards are compressed: an index file cannot point into them; "
            "--cache DIR indexes them for the trainings with that cache",
            soft_wrap=True,
        )
    if document["interrupted"]:
        console.print(f"interrupted, {document['left']:,} shards left: run the same command to resume")
