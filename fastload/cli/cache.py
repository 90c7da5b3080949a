"""`fastload cache info|check|clear DIR`, `push DIR URL` and `pull URL DIR`: whole cache directories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from rich.progress import Progress

from fastload.checks import format_size
from fastload.cli.command_options import SizeLimit, StoreOptions
from fastload.cli.report import Lines, Output, Report, styled
from fastload.errors import NotFoundError, printable

app = typer.Typer(help="Inspect, verify, empty, publish or fetch a cache directory.", no_args_is_help=True)

_NO_CACHE = "no cache here: give the path of fastload.Cache"

Directory = Annotated[str, typer.Argument(metavar="DIR", help="The directory given to fastload.Cache.")]
PacksUrl = Annotated[
    str, typer.Argument(metavar="URL", help="A prefix for packs alone: s3://bucket/cache, a path, ...")
]


@contextmanager
def _progress(output: Output, name: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that moves a progress bar, which goes at the end of the block."""
    with Progress(console=output.console, transient=True) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _existing(directory: str) -> Any:
    """Return the cache in a directory. Raises `NotFoundError` where there is none."""
    import fastload

    cache = fastload.Cache(directory)
    if not cache.exists():
        raise NotFoundError(f"{directory}: {_NO_CACHE}", stage="cache")
    return cache


# --- info


@dataclass(kw_only=True)
class ListedSource:
    """A listing that a dataset keeps in the cache, which may have all, some or none of its objects."""

    url: Annotated[str, "of the listing; behind it the endpoint, if it has one"]
    objects: Annotated[int, "objects of the listing"]
    bytes: Annotated[int, "their size"]
    listed_at: Annotated[str, "when"]

    def __str__(self) -> str:
        return (
            f"  of {self.url}: {self.objects:,} objects, {format_size(self.bytes)}, listed {self.listed_at}"
        )


@dataclass(kw_only=True)
class InfoReport(Report):
    """What a cache directory holds."""

    command = "cache info"
    path: Annotated[str, "the directory"]
    format: Annotated[int, "the version of its format"]
    exists: Annotated[bool, "whether it is a cache"]
    entries: Annotated[int, "records"]
    bytes: Annotated[int, "bytes on disk, with headers"]
    segments: Annotated[int, "files of payloads"]
    index_bytes: Annotated[int, "size of its index"]
    disk_free: Annotated[int, "free bytes of its disk"]
    dct_share: Annotated[
        float | None,
        "share of the records that hold images as mode `dct` keeps them, estimated from 64 of them; null: "
        "there are none",
    ]
    sources: list[ListedSource]

    @property
    def exit_code(self) -> int:
        return 0 if self.exists else 1

    def text(self) -> Lines:
        if not self.exists:
            yield f"{self.path}: {_NO_CACHE}"
        else:
            yield (
                f"{self.path}: {self.entries:,} records, {format_size(self.bytes)} in {self.segments:,} "
                f"segments, index {format_size(self.index_bytes)}"
            )
        yield from map(str, self.sources)
        if self.entries:
            dct = f"about {self.dct_share:.0%}" if self.dct_share else "none"
            yield f"  {dct} of the records are of mode 'dct', which 'auto' reads too, as it reads 'raw'"
        yield f"free on its disk: {format_size(self.disk_free)}"


def info(directory: Directory) -> InfoReport:
    """Show the records, bytes, sources and free space of a cache. Exit code 1: no cache."""
    import fastload

    cache = fastload.Cache(directory)
    known = cache.info()
    # What the cache was opened with is ours, not the directory's: a cache of any mode can be looked at.
    del known["mode"], known["size_limit"]
    sources = _sources(cache) if known["exists"] else []
    return InfoReport(**known, dct_share=cache._dct_share(), sources=sources)


def _sources(cache: Any) -> list[ListedSource]:
    if cache._manifests is None or not cache._manifests.is_dir():
        return []
    from fastload.cache.listings import latest

    return [
        ListedSource(
            url=_url(listing.identity),
            objects=len(listing),
            bytes=listing.total_bytes,
            listed_at=listing.listed_at,
        )
        for listing in latest(cache._manifests)
    ]


def _url(identity: str) -> str:
    """Return the URL in a store's identity, and its endpoint behind it."""
    kind, separator, rest = identity.partition("|")
    if not separator:  # http
        return identity
    where, _, path = rest.partition("|")
    path = path.replace("|", "/", 1)
    url = path if kind == "file" else f"{kind}://{path}"
    return f"{url} at {where}" if where else url


# --- check


@dataclass(kw_only=True)
class CheckReport(Report):
    """The state of all records."""

    command = "cache check"
    path: Annotated[str, "the directory"]
    ok: Annotated[bool, "no bad entry is left"]
    entries: Annotated[int, "records verified"]
    bytes: Annotated[int, "their bytes"]
    bad_entries: Annotated[int, "entries whose record is missing or wrong"]
    orphaned_bytes: Annotated[int, "bytes that no entry points to, left by a killed process; no error"]
    foreign_files: Annotated[list[str], "files that fastload did not write; never touched"]
    dropped_entries: Annotated[int, "entries that `--fix` removed"]
    recovered_entries: Annotated[int, "entries that `--fix` found again"]
    freed_bytes: Annotated[int, "bytes that `--fix` freed"]

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def text(self) -> Lines:
        verdict = "clean" if self.ok else "not clean; to repair it, add --fix"
        yield styled(f"{self.path}: {verdict}", "green" if self.ok else "red")
        for name, value in asdict(self).items():
            if name not in ("path", "ok"):
                text = f"{value:,}" if isinstance(value, int) else ", ".join(value) or "none"
                yield f"  {name.replace('_', ' '):<18} {text}"


def check(
    directory: Directory,
    output: Output,
    fix: Annotated[
        bool, typer.Option("--fix", help="Remove damaged entries, and files of dead processes.")
    ] = False,
) -> CheckReport:
    """Verify the checksum of every record. Exit code 1: damaged entries remain."""
    cache = _existing(directory)
    with _progress(output, "verifying") as progress:
        return CheckReport(path=directory, **cache.check(fix, progress=progress).as_dict())


# --- clear


@dataclass(kw_only=True)
class ClearReport(Report):
    """What was deleted."""

    command = "cache clear"
    path: Annotated[str, "the directory"]
    bytes_freed: Annotated[int, "bytes of the records that were deleted"]
    done: Annotated[bool, "false: the answer was no"] = True
    exists: Annotated[bool, "whether it was a cache"] = True

    @property
    def exit_code(self) -> int:
        return 0 if self.done else 1

    def text(self) -> Lines:
        if not self.done:
            yield "nothing deleted"
        elif self.exists:
            yield f"{self.path}: freed {format_size(self.bytes_freed)}"
        else:
            yield f"{self.path}: no cache here, nothing to delete"


def clear(
    directory: Directory,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without a question.")] = False,
) -> ClearReport:
    """Delete all records. Files that fastload did not write stay."""
    import fastload

    cache = fastload.Cache(directory)
    held = cache.info()
    question = f"Delete {held['entries']:,} records ({format_size(held['bytes'])}) in {directory}?"
    done = yes or not held["entries"] or typer.confirm(printable(question), err=True)
    freed = cache.clear() if done else 0
    return ClearReport(path=directory, bytes_freed=freed, done=done, exists=held["exists"])


# --- push and pull


@dataclass(kw_only=True)
class PushReport(Report):
    """What was published."""

    command = "cache push"
    path: Annotated[str, "the directory"]
    url: Annotated[str, "where its records are published"]
    records: Annotated[int, "records published now"]
    bytes: Annotated[int, "bytes of their payloads"]
    packs: Annotated[int, "objects written"]
    present: Annotated[int, "records that were published already"]
    bad_entries: Annotated[int, "records that are damaged on this disk, and were left out"]

    @property
    def exit_code(self) -> int:
        return 1 if self.bad_entries else 0

    def text(self) -> Lines:
        yield (
            f"{self.url}: {self.records:,} records ({format_size(self.bytes)}) published in {self.packs:,} "
            f"packs, {self.present:,} were there"
        )
        if self.bad_entries:
            yield (f"  {self.bad_entries:,} damaged records were left out: run fastload cache check --fix")


def push(directory: Directory, url: PacksUrl, stored: StoreOptions, output: Output) -> PushReport:
    """Publish the records of a cache below a URL, in objects of about 256 MB, for other nodes to pull.

    Training may go on meanwhile, and other nodes may push to the same URL: each record is published once, but
    for a race of two nodes. After an interruption, run the same command again.
    """
    import fastload
    from fastload.cache.exchange import push as publish  # which needs POSIX

    store = fastload.open_store(url, **stored.parse())
    with closing(_existing(directory)) as cache, _progress(output, "pushing") as progress:
        done = publish(cache, store, lambda now, total: progress(now.records + now.present, total))
    return PushReport(path=directory, url=store.url, **vars(done))


@dataclass(kw_only=True)
class PackFault:
    pack: Annotated[str, "a pack with something wrong"]
    fault: Annotated[str, "what is wrong with it"]


@dataclass(kw_only=True)
class PullReport(Report):
    """What was fetched."""

    command = "cache pull"
    path: Annotated[str, "the directory"]
    url: Annotated[str, "where its records came from"]
    records: Annotated[int, "records put into the cache now"]
    bytes: Annotated[int, "bytes of their payloads"]
    packs: Annotated[int, "packs at the URL"]
    present: Annotated[int, "records that the cache had already"]
    left: Annotated[int, "published records that the cache still lacks: it is full, or they are damaged"]
    faults: list[PackFault] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 1 if self.faults else 0

    def text(self) -> Lines:
        yield (
            f"{self.path}: {self.records:,} records ({format_size(self.bytes)}) pulled, {self.present:,} "
            f"were there, {self.left:,} do not fit or are damaged"
        )
        for fault in self.faults:
            yield f"  {fault.pack} {fault.fault}"


def pull(
    url: PacksUrl,
    directory: Directory,
    stored: StoreOptions,
    output: Output,
    size_limit: SizeLimit = None,
) -> PullReport:
    """Put the published records that a cache lacks into it, before or during a run.

    After an interruption, run the same command again: what is in the cache is not read again. Exit code 1: a
    pack is damaged; the records of all others are in the cache.
    """
    import fastload
    from fastload.cache.exchange import pull as fetch

    store = fastload.open_store(url, **stored.parse())
    cache = fastload.Cache(directory, size_limit=size_limit)
    with closing(cache), _progress(output, "pulling") as progress:
        done = asdict(fetch(cache, store, progress))
    del done["settled"]
    faults = [PackFault(pack=name, fault=fault) for name, fault in done.pop("damaged").items()]
    return PullReport(path=directory, url=store.url, **done, faults=faults)
