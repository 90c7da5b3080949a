"""`fastload convert SRC DST --to tar|tfrecord`: shards of an image folder, of objects, or of other shards."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastload.checks import format_size, parse_size
from fastload.cli.cluster import Cluster, RayOption, refuse_limits
from fastload.cli.command_options import StoreOptions, parse_pairs
from fastload.cli.convert.sample_forms import FORMS
from fastload.cli.data_source import AUTO, KindOption
from fastload.cli.report import Bars, Fault, Lines, MeasuredReport, Output
from fastload.errors import ArgumentError

_RENAMES = 10  # shown


if TYPE_CHECKING:
    To = str
else:  # for Typer, which knows the choices of an option by its type
    To = StrEnum("To", list(FORMS))


@dataclass(kw_only=True)
class Settings:
    """What was converted, and how."""

    source: str
    destination: str
    from_: Annotated[str, "as given or found"]
    name: Annotated[str, "as given or found"]
    to: str
    shard_size: Annotated[int, "as given, in bytes"]
    shuffle: int | None
    ray: Annotated[str | None, "address of the Ray cluster, or null"] = None


@dataclass(kw_only=True)
class ConvertReport(MeasuredReport):
    """The shards that were written."""

    command = "convert"
    settings: Settings
    samples: Annotated[int, "samples in whole shards"]
    bytes: Annotated[int, "size of whole shards"]
    shards: Annotated[int, "whole shards"]
    renamed: Annotated[int, "samples whose key in the tar is not that of the source"]
    renames: Annotated[dict[str, str], "the first of them: key in the source, key in the tar"]
    kept: Annotated[int, "shards of an earlier run"]
    complete: Annotated[bool, "whether all is written and verified"]
    interrupted: Annotated[bool, "whether Ctrl-C ended it"]
    faults: Annotated[list[Fault], "shards that do not contain what was written"]
    read_bytes: Annotated[int, "bytes of the samples that were written in this run"]
    seconds: Annotated[float, "time of writing"]
    verify_seconds: Annotated[float, "time of reading all shards again"]
    samples_per_second: Annotated[float, "rate of writing"]
    megabytes_per_second: Annotated[float, "rate of writing"]
    redone: Annotated[
        int | None, "with `--ray`: shards whose process was lost, and which were done again"
    ] = None

    @property
    def exit_code(self) -> int:
        return 130 if self.interrupted else 1 if self.faults else 0

    def text(self) -> Lines:
        yield (
            f"{self.samples:,} samples in {self.shards:,} {self.settings.to} shards, "
            f"{format_size(self.bytes)}, {self.kept:,} of them from an earlier run; "
            f"{self.samples_per_second:,.0f} samples/s, {self.megabytes_per_second:,.1f} MB/s"
        )
        if self.renamed:
            shown = [f"{key!r} is {renamed!r}" for key, renamed in self.renames.items()]
            shown += ["..."] * (self.renamed > len(shown))
            yield (
                f"{self.renamed:,} samples have another key in the tar, which WebDataset can read and any "
                f"program can extract: {', '.join(shown)}"
            )
        for fault in self.faults:
            yield f"  {fault.shard} {fault.fault}"
        if self.faults:
            yield "run the same command again: it rewrites the first of these shards and all later ones"
        elif self.interrupted:
            yield "interrupted: run the same command to resume"
        else:
            yield f"read again in {self.verify_seconds:.1f} s: all shards contain what was written"


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="s3://bucket/prefix, gs://, a path, ...")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="URL or path of the new shards.")],
    store: StoreOptions,
    output: Output,
    to: Annotated[To, typer.Option("--to", help="WebDataset tars, or TFRecord files of tf.train.Example.")],
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Approximate size of a shard.")] = "256MB",
    shuffle: Annotated[
        int | None,
        typer.Option(
            metavar="SEED",
            min=0,
            help="Put samples into a random order: exact for objects; shards are mixed 16 at a time, "
            "and the samples of each new shard are shuffled.",
        ),
    ] = None,
    kind: KindOption = AUTO,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Files are NAME-000000.tar, ...", show_default="SRC's last part"),
    ] = None,
    dst_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A --storage-option for DST. The options above are for SRC."),
    ] = None,
    ray: RayOption = None,
) -> ConvertReport:
    """Write shards with indexes, and read them again to verify them. After an interruption, run it again.

    Labels are class indexes; NAME.json in DST has the class names. DST never shows a partial file.
    Files of other programs are not overwritten. A file becomes KEY.jpg and KEY.cls in a tar, or the features
    image (bytes), label (int) and key (bytes) of an Example; other files keep their extension as name.
    """
    from fastload.cli.convert.source import open_source

    options, stored = store.parse(), parse_pairs(dst_option)
    size, called = parse_size(shard_size, "--shard-size"), _name(name, source)
    wanted = {"name": called, "to": str(to), "shard_size": size, "shuffle": shuffle}
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(contextlib.closing(open_source(source, kind, options, size, shuffle)))
        cluster = None
        if ray is not None:
            refuse_limits({**options, **stored})
            if opened.shards is None:
                raise ArgumentError(
                    f"--ray and {opened.kind} shards in {opened.url!r}: where a new shard begins is known "
                    "only after the one before it was read; run the command without --ray"
                )
            cluster = stack.enter_context(Cluster(ray))
        return _run(opened, destination, stored, wanted, cluster, output)


def _name(name: str | None, source: str) -> str:
    """Return NAME as it was given, or the last part of the source with other characters replaced."""
    if name is not None:
        if not re.fullmatch(r"[\w.-]+", name):
            raise ArgumentError(f"--name {name!r}: give letters, digits, '_', '-' and '.' only")
        return name
    last = source.rstrip("/").rpartition("/")[2].partition("?")[0]
    return re.sub(r"[^\w.-]", "_", last.removeprefix(".")) or "data"


def _run(
    source: Any,
    destination: str,
    options: dict[str, Any],
    wanted: dict[str, Any],
    cluster: Cluster | None,
    output: Output,
) -> ConvertReport:
    """Write the missing shards, then read all of them again."""
    from fastload.cli.convert.shard_set import ShardSet
    from fastload.cli.convert.writing import Writing
    from fastload.store import open_store

    store = open_store(destination, **options)
    if f"{store.identity}/".startswith(f"{source.identity.rstrip('/')}/"):
        raise ArgumentError(
            f"{store.url!r} lies within the source {source.url!r}; choose another destination"
        )
    form = FORMS[wanted["to"]]
    form = form.copied if source.kind == wanted["to"] else form
    settings = {**wanted, "from": source.kind, "source": source.identity, "fingerprint": source.fingerprint}
    shards = ShardSet(store, wanted["name"], form, source.shards, settings, source.classes)
    kept, start = len(shards.shards), time.perf_counter()
    where = f"{source.kind} {source.url}, {format_size(source.total_bytes)}"
    there = f"; {kept:,} shards of an earlier run are kept" if kept else ""
    output.console.print(f"{where} -> {store.url}{there}", soft_wrap=True)
    interrupted, faults, verify_seconds = False, list[Fault](), 0.0
    with Bars(output.console) as bars:
        writing = Writing(source, shards, cluster, bars)
        try:
            writing.run()
            seconds = time.perf_counter() - start
            faults = writing.verify()
            verify_seconds = time.perf_counter() - start - seconds
        except KeyboardInterrupt:
            interrupted, seconds = True, time.perf_counter() - start
    bad = {fault.shard for fault in faults}
    whole = next((i for i, shard in enumerate(shards.shards) if shard.name in bad), len(shards.shards))
    shards.keep(whole, complete=not interrupted and not faults)
    renames = itertools.chain.from_iterable(shard.renames.items() for shard in shards.shards)
    return ConvertReport(
        settings=Settings(
            source=source.url,
            destination=store.url,
            from_=source.kind,
            **wanted,
            ray=None if cluster is None else cluster.address,
        ),
        samples=sum(shard.samples for shard in shards.shards),
        bytes=sum(shard.bytes for shard in shards.shards),
        shards=len(shards.shards),
        renamed=sum(shard.renamed for shard in shards.shards),
        renames=dict(itertools.islice(renames, _RENAMES)),
        kept=kept,
        complete=shards.complete,
        interrupted=interrupted,
        faults=faults,
        read_bytes=writing.written.bytes,
        seconds=round(seconds, 3),
        verify_seconds=round(verify_seconds, 3),
        samples_per_second=round(writing.written.samples / seconds, 1),
        megabytes_per_second=round(writing.written.bytes / seconds / 1e6, 2),
        redone=None if cluster is None else cluster.redone,
    )
