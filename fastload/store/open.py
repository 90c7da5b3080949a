"""`open_store`: the store class for a URL; and the places that a file names, such as a state or a table.

Such a file may be somebody else's, so it may name no more than this:

    protocol    one of `PROTOCOLS`: no file system that writes files, runs commands or leads to another one
    options     those of `public_options`: none of them sends a secret or a file anywhere
    server      the environment's or the user's own, never the file's

Everything else has to come from the user.
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from fastload.checks import parse_size, whole_number
from fastload.errors import ArgumentError, shorten_errors
from fastload.formats.pieces import MAX_INFLATED
from fastload.metrics.machine import need_linux
from fastload.store.base import Reading, Store
from fastload.store.budget import Limits, RequestBudget
from fastload.store.failures import public_url, redacted
from fastload.store.local import LocalStore
from fastload.store.object_store import NATIVE_PROTOCOLS, NativeStore
from fastload.store.options import check_host_part, endpoint_in, public_options, without_endpoint

# fsspec's chains: "simplecache::s3://...", "zip://*.jpg::s3://...", "zip://inner::archive.zip"
_CHAIN = re.compile(
    r"^[a-z0-9_+.-]+::|::[a-z0-9_+.-]+://|^(?:zip|tar|libarchive|reference|dir)://.*::", re.IGNORECASE
)
# Pages that people copy from their browser.
_CONSOLE = re.compile(
    r"https?://(?:[^/]*\.)?console\.(?P<of>aws\.amazon|cloud\.google)\.[^/]+/"
    r"(?:s3/(?:buckets|object)|storage/browser)/(?P<key>[^?#;]+)"
)
_PARAMETER = re.compile(r";[^/]*=")
_CACHING = ("simplecache", "filecache", "blockcache", "cached")


@shorten_errors
def open_store(
    url: str | os.PathLike[str], *, budget: RequestBudget | None = None, **storage_options: Any
) -> Store:
    """Open `url`. The first request, and the first thread or process, starts with the first call.

    Example::

        import fastload

        store = fastload.open_store("s3://bucket/train", region="us-east-1", max_requests=256)
        for page in store.list():
            for info in page:
                data = store.read(info.key, info.version)  # of that version, or ObjectChangedError

    Args:
        url: `s3://bucket/prefix`, `gs://`, `az://`, `http(s)://base`, `file://`, `memory://`, a path, or a
            URL of any other protocol that fsspec knows. Keys are relative to it.
        budget: the requests and limits of a dataset that opens several stores, in place of `max_gets` and
            `max_egress`.
        storage_options: s3fs's names (key, secret, token, anon, profile, endpoint_url, region,
            client_kwargs) or obstore's; `client="s3fs"` reads `s3://` by s3fs. Other protocols take what
            their file system takes.

            s3:// by obstore also takes `credential_provider`, a function (picklable) that returns a dict with
            access_key_id, secret_access_key, token and expires_at (a datetime with time zone). It is called
            again before they expire, and when the store refuses them.

            All protocols take `max_requests`, the largest number of requests in flight from this node, for
            all ranks and workers together (default: found by measuring, at most 1,024), and `hedge=True`: a
            read that takes longer than 95 % of the reads is requested a second time, for at most 3 % of them.

            `max_inflated` (a number, or text such as "2GB"; default 512 MiB) is the most that a record of a
            compressed shard, a row group or a table may become in memory. What would become more is a
            `DecodeError`, before the memory is taken.

            `max_gets` and `max_egress` limit what is asked of the store as long as it is open, by all
            processes of one trainer: GETs and HEADs, and bytes (a number, or text such as "50GB"). The
            request that would pass a limit is not made; it raises `LimitError`. Repeated requests count, and
            what a cache has does not. A dataset has one limit for all URLs that it opens, and each rank has
            its own.

    Raises:
        ArgumentError: an unknown scheme or option, a malformed URL, or a missing package.
    """
    if not isinstance(url, str | os.PathLike) or isinstance(os.fspath(url), bytes):
        raise ArgumentError(
            f"url must be one URL or path, a str or pathlib.Path, found {redacted(reprlib.repr(url))}. "
            "For several, make one dataset each and join them with torch.utils.data.ConcatDataset; only "
            "datasets of shards take a list"
        )
    if budget is not None and not isinstance(budget, RequestBudget):
        raise ArgumentError(
            f"budget must be a RequestBudget, found {budget!r}: limit requests by the storage options "
            "max_gets and max_egress"
        )
    budget = budget or take_budget(storage_options)
    return _open(os.fspath(url), storage_options, _take_reading(storage_options, budget))


def _take_reading(options: dict[str, Any], budget: RequestBudget) -> Reading:
    """Take the options that are for the loader out of `options`."""
    most, hedge = options.pop("max_requests", None), options.pop("hedge", False)
    inflated = parse_size(options.pop("max_inflated", MAX_INFLATED), "storage option max_inflated")
    if most is not None:
        most = whole_number("storage option max_requests", most)
    if not isinstance(hedge, bool):
        raise ArgumentError(f"storage option hedge must be True or False, found {hedge!r}")
    return Reading(most, hedge, inflated, budget)


def checked_options(storage_options: Any) -> dict[str, Any]:
    """Return a copy of the `storage_options` of a dataset.

    Raises:
        ArgumentError: they are no dict.
    """
    if storage_options is None:
        return {}
    if not isinstance(storage_options, Mapping):
        raise ArgumentError(
            "storage_options must be a dict, as in {'endpoint_url': 'http://localhost:9000'}, found "
            f"{redacted(reprlib.repr(storage_options))}"
        )
    return dict(storage_options)


def with_budget(options: dict[str, Any] | None) -> dict[str, Any]:
    """Return options for `open_store` with which all stores that a dataset opens have one budget."""
    copy = checked_options(options)
    budget = copy.pop("budget", None) or take_budget(copy)
    return {**copy, "budget": budget}


def take_budget(options: dict[str, Any]) -> RequestBudget:
    """Take the limits out of `options`, and return a budget with them."""
    gets, egress = options.pop("max_gets", None), options.pop("max_egress", None)
    if gets is not None:
        gets = whole_number("storage option max_gets", gets)
    size = None if egress is None else parse_size(egress, "storage option max_egress")
    return RequestBudget(Limits(gets, size))


def _open(url: str, storage_options: dict[str, Any], reading: Reading) -> Store:
    protocol, separator, rest = url.partition("://")
    protocol = protocol.lower()
    if _CHAIN.search(url):
        raise ArgumentError(_chained(url))
    if not separator or protocol in ("file", "local"):
        return _open_local(url, rest if separator else url, storage_options, reading)
    _refuse_console(url)
    _refuse_query(url, protocol)
    need_linux()

    client = storage_options.get("client")
    if client is not None and (client != "s3fs" or NATIVE_PROTOCOLS.get(protocol) != "s3"):
        raise ArgumentError(f"storage option client={client!r}: only 's3fs' is known, and only for s3://")
    if client == "s3fs":
        return _open_s3fs(url, storage_options, reading)
    if protocol in NATIVE_PROTOCOLS:
        return NativeStore(url, storage_options, reading)
    return _open_fsspec(url, protocol, storage_options, reading)


def _refuse_console(url: str) -> None:
    """Raise `ArgumentError` for a page of a cloud's console."""
    if page := _CONSOLE.match(url):
        meant = ("s3://" if page["of"].startswith("aws") else "gs://") + page["key"].rstrip("/")
        raise ArgumentError(f"url {public_url(url)!r} is a page of the console: give {meant!r}")


def _refuse_query(url: str, protocol: str) -> None:
    """Raise `ArgumentError` for what often holds a token, and would be a part of keys and of the identity."""
    heads = protocol in ("http", "https")
    if "?" in url or (heads and ("#" in url or _PARAMETER.search(url))):
        raise ArgumentError(
            f"url {public_url(url)!r} is a base for keys: it takes no query, no fragment and no parameters. "
            "Pass a token as a storage option"
        )


def _chained(url: str) -> str:
    """Return the error for a chain of file systems, which fastload does not read."""
    first, _, inner = url.partition("::")
    if first in _CACHING and not _CHAIN.search(inner):
        return (
            f"url {redacted(url)!r} chains file systems: give {redacted(inner)!r} alone. In place of "
            f"{first!r}, cache=DIRECTORY keeps the objects that were read"
        )
    return (
        f"url {redacted(url)!r} chains file systems, which fastload does not read: unpack the archive into a "
        "bucket or directory and give the url of that"
    )


def _open_local(url: str, path: str, options: dict[str, Any], reading: Reading) -> Store:
    if options:
        bucket = "" if "://" in url or url.startswith(("/", ".", "~")) else f" (is it s3://{url}?)"
        raise ArgumentError(
            f"storage options {sorted(options)} given, but directory {url!r} takes none{bucket}"
        )
    if not path:
        raise ArgumentError(f"url {url!r} is empty: give a directory or a URL such as s3://bucket/prefix")
    if reading.budget is not None and not any(reading.budget.limits):  # a directory bills nothing
        reading = reading._replace(budget=None)
    return LocalStore(url, os.path.expanduser(path), reading)  # noqa: PTH111 - a plain str, for any bytes


def _open_s3fs(url: str, options: dict[str, Any], reading: Reading) -> Store:
    from importlib.util import find_spec

    if find_spec("s3fs") is None:
        raise ArgumentError("client='s3fs' needs the package: pip install 'torch-fastload[s3fs]'")
    from fastload.store.fsspec import S3fsStore

    return S3fsStore(url, options, reading)


def _open_fsspec(url: str, protocol: str, options: dict[str, Any], reading: Reading) -> Store:
    import fsspec

    from fastload.store.fsspec import FsspecStore

    if protocol == "obs":
        raise ArgumentError(
            f"url {redacted(url)!r}: Huawei OBS is read as s3://BUCKET/PREFIX, with the storage option "
            "endpoint_url='https://obs.REGION.myhuaweicloud.com'"
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        known = sorted({"file", *NATIVE_PROTOCOLS, *fsspec.available_protocols()})
        near = difflib.get_close_matches(protocol, known, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ArgumentError(f"url scheme {protocol!r} is unknown{hint}; known: {', '.join(known)}") from None
    except ImportError as error:
        why = "pip install huggingface_hub" if protocol == "hf" else error
        raise ArgumentError(f"url scheme {protocol!r} needs a package that is not installed: {why}") from None
    return FsspecStore(url, protocol, options, reading)


PROTOCOLS = frozenset({*NATIVE_PROTOCOLS, "file", "local", "memory"})
_IN_BUCKETS = frozenset({"s3", "gs", "az"})


def check_protocol(url: Any, named_by: str, instead: str) -> str:
    """Return the protocol of a URL that a file names; of a path it is "file".

    Args:
        named_by: the file, in words.
        instead: what the user may do to open it, in words.

    Raises:
        ArgumentError: it is none of `PROTOCOLS`.
    """
    if not isinstance(url, str):
        raise ArgumentError(f"{named_by} has the url {url!r}, which is no text: {instead}")
    protocol, separator, _ = url.partition("://")
    protocol = protocol.lower() if separator else "file"
    if protocol not in PROTOCOLS or "::" in url:
        raise ArgumentError(
            f"{named_by} names {redacted(url)!r}, a place that only you may name (a file may name one of "
            f"{', '.join(sorted(PROTOCOLS))}): if you know it, {instead}"
        )
    return protocol


def options_from_state(url: Any, options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options to open a place that a state names. Nothing is sent meanwhile.

    Args:
        url, options: what the state says.
        given: the options of the user, which count more.

    Raises:
        ArgumentError: the state says something that only the user may say; the message names it.
    """
    protocol = check_protocol(url, "the state", "pass --data URL")
    if NATIVE_PROTOCOLS.get(protocol) in _IN_BUCKETS:
        bucket = url.partition("://")[2].partition("/")[0]
        for part in bucket.split("@", 1):  # a container of an account
            check_host_part("the state: the bucket of its url", part)
    allowed, refused = public_options({name: value for name, value in options.items() if name not in given})
    if refused:
        raise ArgumentError(
            f"the state sets the storage option {refused[0]!r}, which only you may set: if you need it, "
            f"pass --storage-option {refused[0]}=VALUE, else --data URL"
        )
    chosen = {**without_endpoint(allowed), **given}
    server = endpoint_in(allowed)
    if server and not endpoint_in(given):
        own = endpoint_in(open_store(url, **chosen).public_options()[0])
        if server != own:
            raise ArgumentError(
                f"the state names the server {server!r}, and your environment names "
                f"{repr(own) if own else 'no server'}. Requests may carry your credentials: if you know that "
                "server, pass it with --endpoint-url"
            )
    return chosen
