"""The places that a file names: a state, a table. Such a file may be somebody else's.

    protocol    one of `PROTOCOLS`: no file system that writes files, runs commands or leads to another one
    options     those of `public_options`: none of them sends a secret or a file anywhere
    server      the environment's or the user's own, never the file's

Everything else has to come from the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastload.errors import ArgumentError
from fastload.store.object_store import NATIVE_PROTOCOLS
from fastload.store.open import open_store
from fastload.store.options import check_host_part, endpoint_in, public_options, without_endpoint
from fastload.store.translate import redacted

__all__ = ["PROTOCOLS", "check_protocol", "options_from_file"]

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


def options_from_file(
    url: Any, options: Mapping[str, Any], given: Mapping[str, Any], named_by: str
) -> dict[str, Any]:
    """Return the options to open a place that a file names. Nothing is sent meanwhile.

    Args:
        url, options: what the file says.
        given: the options of the user, which count more.
        named_by: the file, in words.

    Raises:
        ArgumentError: the file says something that only the user may say; the message names it.
    """
    protocol = check_protocol(url, named_by, "pass --data URL")
    if NATIVE_PROTOCOLS.get(protocol) in _IN_BUCKETS:
        bucket = url.partition("://")[2].partition("/")[0]
        for part in bucket.split("@", 1):  # a container of an account
            check_host_part(f"{named_by}: the bucket of its url", part)
    said, refused = public_options({name: value for name, value in options.items() if name not in given})
    if refused:
        raise ArgumentError(
            f"{named_by} sets the storage option {refused[0]!r}, which only you may set: if you need it, "
            f"pass --storage-option {refused[0]}=VALUE, else --data URL"
        )
    found = {**without_endpoint(said), **given}
    server = endpoint_in(said)
    if server and not endpoint_in(given):
        own = endpoint_in(open_store(url, **found).public_options()[0])
        if server != own:
            raise ArgumentError(
                f"{named_by} names the server {server!r}, and your environment names "
                f"{repr(own) if own else 'no server'}. Requests may carry your credentials: if you know that "
                "server, pass it with --endpoint-url"
            )
    return found
