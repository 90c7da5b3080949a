"""The place of a dataset as a saved state tells it: the only reader of a store's recipe.

A state may come from anybody, and this node has credentials. So a recipe may name what `describe` writes, and
nothing else: a protocol whose bytes fastload reads itself, and options that choose neither files nor servers.
A server comes from the user or the environment. File systems of fsspec that write what they read to the disk
("filecache", "simplecache"), or read other places ("reference"), cannot be named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastload.errors import ArgumentError
from fastload.store.object_store import NATIVE_PROTOCOLS
from fastload.store.options import ENDPOINT_OPTIONS, RECIPE_OPTIONS, environment_endpoint
from fastload.store.translate import public_url

__all__ = ["options_of_recipe", "url_of_recipe"]

_LOCAL = ("file", "local", "memory")
_ENDPOINT = "endpoint_url"


def url_of_recipe(url: Any) -> str:
    """Return the URL of a recipe.

    Raises:
        ArgumentError: it is no text, or its protocol is none that a recipe may name.
    """
    if not isinstance(url, str) or not url or "\0" in url:
        raise ArgumentError(f"the state has no URL of its data, but {url!r:.100}: pass --data URL")
    protocol, separator, _ = url.partition("://")
    chained = "::" in url
    if chained or (separator and protocol.lower() not in (*NATIVE_PROTOCOLS, *_LOCAL)):
        raise ArgumentError(
            f"the state says that its data is at {public_url(url)!r}, and a state may name no place of "
            f"protocol {protocol if not chained else '::'!r}: pass --data URL if you trust it"
        )
    return url


def options_of_recipe(url: str, options: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the storage options of a recipe, with those that the user has given in their place.

    Args:
        url: of `url_of_recipe`.
        options: the recipe's.
        given: the user's.

    Raises:
        ArgumentError: an option that a recipe may not name, or a server that is neither the user's nor the
            environment's.
    """
    if not isinstance(options, Mapping):
        raise ArgumentError(f"the state has no storage options, but {options!r:.100}: pass --data URL")
    endpoints = {name: value for name, value in options.items() if name in ENDPOINT_OPTIONS}
    plain = {name: value for name, value in options.items() if name not in ENDPOINT_OPTIONS}
    nested = plain.get("client_kwargs", {})
    if isinstance(nested, Mapping) and _ENDPOINT in nested:
        endpoints[f"client_kwargs.{_ENDPOINT}"] = nested[_ENDPOINT]
        plain["client_kwargs"] = {name: value for name, value in nested.items() if name != _ENDPOINT}
    for name, value in _flat(plain):
        if name not in RECIPE_OPTIONS or not isinstance(value, bool | str):
            raise ArgumentError(
                f"the state has the storage option {name!r:.100}, which no state may name: pass --data URL, "
                "and --storage-option for what that place needs"
            )
    for name, value in endpoints.items():
        if given.get(_ENDPOINT) is None and value != environment_endpoint(url, plain.get("profile")):
            raise ArgumentError(
                f"the state says that its data is on the server {public_url(str(value))!r:.300} ({name}), "
                "which would get your credentials: pass --endpoint-url with that server if you trust it, or "
                "--data URL"
            )
    return {**plain, **given}


def _flat(options: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (name, value) of all options, nested ones as "client_kwargs.region_name"."""
    flat: list[tuple[str, Any]] = []
    for name, value in options.items():
        if name == "client_kwargs" and isinstance(value, Mapping):
            flat += [(f"{name}.{inner}", one) for inner, one in value.items()]
        else:
            flat.append((str(name), value))
    return flat
