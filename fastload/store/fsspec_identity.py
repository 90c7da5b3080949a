"""The identity of an fsspec store: its URL and the options of its file system, without secrets.

A repository, an account, an endpoint, a branch or a port may each be an option, under a name that only its
file system knows. So every option counts, except secrets and options that are known not to affect the place,
such as a timeout. At worst an unknown option makes a second identity, and the data is read once more.

Secrets are left out, not hashed: a reader of the cache directory could test passwords against a digest. Where
only a token identifies the account (Dropbox, Google Drive), two accounts have the same identity, and each one
needs its own cache directory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from enum import Enum
from hashlib import blake2b
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.config import apply_config

from fastload.store.translate import public_url

__all__ = ["identity_of"]

# Options of fsspec and its file systems that say how to read, not where.
_NOT_A_PLACE = frozenset(
    (
        *("asynchronous", "batch_size", "block_size", "cache_options", "cache_type", "default_block_size"),
        *("default_cache_type", "default_fill_cache", "listings_expiry_time", "loop", "max_concurrency"),
        *("max_paths", "retries", "skip_instance_cache", "timeout", "use_listings_cache"),
    )
)
# Names of options that hold secrets, and of the parts of one ("AccountKey=...;", "?sig=...").
_SECRET = re.compile(
    r"secret|token|passw|passphrase|passcode|pwd|credential|cookie|signature|authorization|"
    r"(?:^|[_-])(?:auth|acct|pass|sas|sig|tok)(?:$|[_-])|keys?(?:$|[_-](?:id|data|file|filename|base64)$)",
    re.IGNORECASE,
)
_PARTS = re.compile(r"[;&]")
_PATHS = ("fo", "path")  # an archive or a repository on this machine, unless a protocol is given for it


class _Opaque(Exception):
    """An option that cannot be described; its argument is the option's name."""


def identity_of(cls: type[AbstractFileSystem], arguments: Mapping[str, Any]) -> tuple[str, str]:
    """A digest of the arguments that name the place, and why two places may share it ("": they do not).

    Args:
        cls: the file system's class. What fsspec's configuration sets for it counts too.
        arguments: its arguments: the options given, and what its URL says of the host.
    """
    why = ""
    try:
        described = _described_options(apply_config(cls, dict(arguments)))
    except _Opaque as error:
        described = {}
        why = f"its storage option {error} is an object that fastload cannot describe"
    text = json.dumps(described, sort_keys=True, ensure_ascii=True)
    return blake2b(text.encode(), digest_size=8).hexdigest(), why


def _described_options(options: Mapping[str, Any]) -> dict[str, Any]:
    local = not options.get("target_protocol")
    found = {}
    for name, value in options.items():
        if value is None or name in _NOT_A_PLACE or _SECRET.search(name):
            continue
        if local and name in _PATHS and isinstance(value, str | os.PathLike):
            path = os.fsdecode(value)
            value = path if "://" in path else os.path.abspath(path)  # noqa: PTH100 - no link is resolved
        found[name] = _described(name, value)
    return found


def _described(name: str, value: Any) -> Any:
    """`value` in JSON, the same in every process."""
    if isinstance(value, Enum):
        return _described(name, value.value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return str(value)  # in a URL it is a text
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, str | os.PathLike):
        return _without_secrets(os.fspath(value))
    if isinstance(value, Mapping):
        return _described_options({str(key): inner for key, inner in value.items()})
    if isinstance(value, list | tuple):
        return [_described(name, inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted((_described(name, inner) for inner in value), key=repr)
    if isinstance(value, AbstractFileSystem):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return [kind, _described(name, value.storage_args), _described_options(value.storage_options)]
    raise _Opaque(name)


def _without_secrets(text: str | bytes) -> str:
    """A text without a URL's user information and query, or the secret parts of a connection string."""
    text = os.fsdecode(text)
    if "://" in text:
        _, mark, query = text.partition("?")
        return f"{public_url(text)}{mark}{_without_secret_parts(query)}"
    return _without_secret_parts(text) if "=" in text else text


def _without_secret_parts(text: str) -> str:
    return ";".join(part for part in _PARTS.split(text) if not _SECRET.search(part.partition("=")[0]))
