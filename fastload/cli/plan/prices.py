"""Prices of requests and egress, and the bill of what was asked for.

A row of the table names what was read, and when. Looked for on 2026-11-22 and 2026-11-23, and left out:

* Azure Blob Storage: azure.microsoft.com/pricing/details/storage/blobs loads its prices by script, and
  Microsoft's documentation has "sample prices" only.
* Huawei OBS: support.huaweicloud.com/intl/en-us/price-obs has examples "for reference only", and prices by
  region in its calculator.

Rejected: asking the providers' price interfaces, which need an account and a network.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from fastload.errors import ArgumentError

_NUMBERS = ("get", "list", "egress")


@dataclass(frozen=True)
class Cost:
    """What requests and egress cost."""

    requests: Annotated[float, "money for the GETs"]
    egress: Annotated[float, "money for the bytes that leave the store"]

    def words(self, currency: str) -> tuple[str, str]:
        """Return (requests, egress) for people."""
        return format_money(self.requests, currency), format_money(self.egress, currency)


@dataclass(frozen=True)
class Prices:
    """The prices of one store. HEADs cost as much as GETs, and PUTs as much as LISTs."""

    currency: Annotated[str, 'its code, such as `"USD"`']
    get: Annotated[float, "of 1,000 GETs"]
    list: Annotated[float, "of 1,000 LISTs"]
    egress: Annotated[float, "of a GB (10⁹ bytes) that leaves the store"]
    source: Annotated[str, "where the prices are from, and the day"]

    def bill(self, gets: float, egress_bytes: float) -> Cost:
        """Return what so many GETs and bytes cost."""
        return Cost(gets / 1000 * self.get, egress_bytes / 1e9 * self.egress)


_TABLE = {
    # Standard storage in a region; class A operations are lists and writes, class B are reads. Egress: to the
    # internet, the first tier.
    "gs": Prices("USD", 0.0004, 0.005, 0.12, "cloud.google.com/storage/pricing-examples, read on 2026-11-22"),
    # S3 Standard; to the internet, the first tier. aws.amazon.com/s3/pricing loads its prices by script, so
    # this is a copy: the constants of infra_model.py, a public cost model that names the file and the day.
    "s3": Prices(
        "USD", 0.0004, 0.005, 0.09, "AWS's price list of us-east-1 on 2026-09-29, as a public model copies it"
    ),
}
_TABLE["gcs"], _TABLE["s3a"] = _TABLE["gs"], _TABLE["s3"]


def find_prices(url: str, options: Mapping[str, Any], file: Path | None) -> Prices | None:
    """Return the prices in a TOML file, else those of the store of `url`; None: they are not known.

    Args:
        url, options: as for `open_store`. An s3:// URL with an endpoint is not Amazon's.
        file: with own prices; None: the table counts.

    Raises:
        ArgumentError: the file cannot be read, or lacks something.
    """
    if file is None:
        prices = _TABLE.get(url.partition("://")[0].lower())
        return prices if prices and not _has_endpoint(url, options) else None
    try:
        document: dict[str, Any] = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--prices {str(file)!r} cannot be read as TOML: {error}") from None
    names = [field.name for field in fields(Prices)]
    unknown = sorted(document.keys() - set(names))
    if unknown:
        raise ArgumentError(f"--prices {str(file)!r} has {unknown}; known are {names}")
    for name in _NUMBERS:
        value = document.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise ArgumentError(f"--prices {str(file)!r}: {name} must be a number >= 0, found {value!r}")
    if not isinstance(document.get("currency"), str) or not document["currency"]:
        raise ArgumentError(f"--prices {str(file)!r}: currency must be a code, such as 'USD'")
    get, listing, egress = (float(document[name]) for name in _NUMBERS)
    return Prices(document["currency"], get, listing, egress, str(document.get("source", file)))


def _has_endpoint(url: str, options: Mapping[str, Any]) -> bool:
    """Return whether an option or the environment names the server."""
    from fastload.store import open_store

    public = open_store(url, **options).public_options()[0]
    named = public.keys() | public.get("client_kwargs", {}).keys()
    return bool({"endpoint", "endpoint_url", "base_url"} & named)


def format_money(amount: float, currency: str) -> str:
    """Return `amount` for people: "USD 12.30"; two digits of less than a cent, such as "USD 0.0042"."""
    return f"{currency} {amount:,.2f}" if amount == 0 or amount >= 0.01 else f"{currency} {amount:.2g}"
