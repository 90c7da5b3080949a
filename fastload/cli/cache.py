"""`fastload cache info|check|clear DIR`, `push DIR URL` and `pull URL DIR`: whole cache directories."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from fastload.cli.command_options import Anon, EndpointUrl, StorageOption, storage_options
from fastload.cli.output import JsonOption, answering
from fastload.errors import NotFoundError
from fastload.metrics.units import format_size
from fastload.printable import printable

app = typer.Typer(help="Inspect, verify, empty, publish or fetch a cache directory.", no_args_is_help=True)

_NO_CACHE = "no cache here: give the path of fastload.Cache"

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory given to fastload.Cache.")]
PacksUrl = Annotated[
    str, typer.Argument(metavar="URL", help="A prefix for packs alone: s3://bucket/cache, a path, ...")
]


def info(directory: Directory, as_json: JsonOption = False) -> None:
    """Show the entries, bytes, sources and free space of a cache. Exit code 1: no cache."""
    import fastload

    with answering(as_json) as output:
        cache = fastload.Cache(directory)
        found = cache.info()
        sources = _sources(cache) if found["exists"] else []
        if not found["exists"]:
            output.console.print(f"{directory}: {_NO_CACHE}", soft_wrap=True)
        else:
            output.console.print(
                f"{directory}: {found['entries']:,} entries, {format_size(found['bytes'])} "
                f"in {found['segments']:,} segments, index {format_size(found['index_bytes'])}",
                soft_wrap=True,
            )
        for source in sources:
            text = (
                f"{source['objects']:,} objects, {format_size(source['bytes'])}, listed {source['listed_at']}"
            )
            output.console.print(f"  of {source['url']}: {text}", soft_wrap=True)
        share = cache.dct_share()
        if found["entries"]:
            dct = "none" if not share else f"about {share:.0%}"
            output.console.print(
                f"  modes: {dct} of the entries hold images as mode 'dct' keeps them; the others' are not "
                "recorded, and a dataset finds only the records of its own cache mode",
                soft_wrap=True,
            )
        output.console.print(f"free on its disk: {format_size(found['disk_free'])}")
        # What the cache was opened with is ours, not the directory's: a cache of any mode can be looked at.
        known = {key: value for key, value in found.items() if key not in ("mode", "size_limit")}
        output.document({**known, "dct_share": share, "sources": sources})
        if not found["exists"]:
            raise typer.Exit(1)


def _sources(cache: Any) -> list[dict[str, Any]]:
    """The listings of the datasets of this cache, which may have all, some or none of their objects."""
    if cache.manifests is None or not cache.manifests.is_dir():
        return []
    from fastload.cache.listings import latest

    return [
        {"url": _url(one.identity), "objects": len(one), "bytes": one.total_bytes, "listed_at": one.listed_at}
        for one in latest(cache.manifests)
    ]


def _url(identity: str) -> str:
    """The URL in a store's identity, and its endpoint behind it."""
    kind, separator, rest = identity.partition("|")
    if not separator:  # http
        return identity
    where, _, path = rest.partition("|")
    path = path.replace("|", "/", 1)
    url = path if kind == "file" else f"{kind}://{path}"
    return f"{url} at {where}" if where else url


def check(
    directory: Directory,
    fix: Annotated[
        bool, typer.Option("--fix", help="Remove damaged entries, and files of dead processes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Verify the checksum of every record. Exit code 1: damaged entries remain."""
    import fastload

    with answering(as_json) as output:
        if not fastload.Cache(directory).info()["exists"]:
            raise NotFoundError(f"{directory}: {_NO_CACHE}", stage="cache")
        with Progress(console=output.console, transient=True) as progress:
            task = progress.add_task("verifying", total=None)
            report = fastload.Cache(directory).check(
                fix, progress=lambda done, total: progress.update(task, completed=done, total=total)
            )
        verdict = "clean" if report.ok else "not clean; to repair it, add --fix"
        output.console.print(f"{directory}: {verdict}", style="green" if report.ok else "red")
        for name, value in report.as_dict().items():
            if name != "ok":
                text = f"{value:,}" if isinstance(value, int) else ", ".join(value) or "none"
                output.console.print(f"  {name.replace('_', ' '):<18} {text}")
        output.document(report.as_dict())
        if not report.ok:
            raise typer.Exit(1)


def clear(
    directory: Directory,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without a question.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete all records. Files that fastload did not write stay."""
    import fastload

    with answering(as_json) as output:
        cache = fastload.Cache(directory)
        found = cache.info()
        question = f"Delete {found['entries']:,} entries ({format_size(found['bytes'])}) in {directory}?"
        if found["entries"] and not yes and not typer.confirm(printable(question), err=True):
            output.console.print("nothing deleted")
            output.document({"path": str(directory), "bytes_freed": 0})
            raise typer.Exit(1)
        freed = cache.clear()
        done = f"freed {format_size(freed)}" if found["exists"] else "no cache here, nothing to delete"
        output.console.print(f"{directory}: {done}", soft_wrap=True)
        output.document({"path": str(directory), "bytes_freed": freed})


def push(
    directory: Directory,
    url: PacksUrl,
    endpoint_url: EndpointUrl = None,
    anon: Anon = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Publish the records of a cache at a URL, in packs of about 256 MB, for other nodes to pull.

    Training may go on meanwhile, and other nodes may push to the same URL: each record is published once, but
    for a race of two nodes. After an interruption, run the same command again.
    """
    import fastload
    from fastload.cache.exchange import Pushed
    from fastload.cache.exchange import push as publish

    with answering(as_json) as output:
        store = fastload.open_store(url, **storage_options(storage_option, endpoint_url, anon))
        cache = fastload.Cache(directory)
        if not cache.exists():
            raise NotFoundError(f"{directory}: {_NO_CACHE}", stage="cache")
        with Progress(console=output.console, transient=True) as progress:
            task = progress.add_task("pushing", total=None)

            def show(done: Pushed, total: int) -> None:
                progress.update(task, completed=done.records + done.present, total=total)

            try:
                done = publish(cache, store, show)
            finally:
                cache.close()
        output.console.print(
            f"{store.url}: {done.records:,} records ({format_size(done.bytes)}) published in {done.packs:,} "
            f"packs, {done.present:,} were there",
            soft_wrap=True,
        )
        if done.bad_entries:
            output.console.print(
                f"  {done.bad_entries:,} damaged records were left out: run fastload cache check --fix",
                soft_wrap=True,
            )
        output.document({"path": str(directory), "url": store.url, **dataclasses.asdict(done)})
        if done.bad_entries:
            raise typer.Exit(1)


def pull(
    url: PacksUrl,
    directory: Directory,
    size_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes of the cache, such as 500GB.", show_default="the free disk"),
    ] = None,
    endpoint_url: EndpointUrl = None,
    anon: Anon = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put the published records that a cache lacks into it, before or during a training.

    After an interruption, run the same command again: what is in the cache is not read again. Exit code 1: a
    pack is damaged; the records of all others are in the cache.
    """
    import fastload
    from fastload.cache.exchange import pull as fetch

    with answering(as_json) as output:
        store = fastload.open_store(url, **storage_options(storage_option, endpoint_url, anon))
        cache = fastload.Cache(directory, size_limit=size_limit)
        with Progress(console=output.console, transient=True) as progress:
            task = progress.add_task("pulling", total=None)
            try:
                done = fetch(cache, store, lambda now, all_: progress.update(task, completed=now, total=all_))
            finally:
                cache.close()
        output.console.print(
            f"{directory}: {done.records:,} records ({format_size(done.bytes)}) pulled, {done.present:,} "
            f"were there, {done.left:,} do not fit or are damaged",
            soft_wrap=True,
        )
        for name, fault in done.damaged.items():
            output.console.print(f"  {name} {fault}", soft_wrap=True)
        faults = [{"pack": name, "fault": fault} for name, fault in done.damaged.items()]
        counts = dataclasses.asdict(done)
        del counts["damaged"], counts["settled"]
        output.document({"path": str(directory), "url": store.url, **counts, "faults": faults})
        if done.damaged:
            raise typer.Exit(1)
