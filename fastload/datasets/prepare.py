"""The deterministic first step of a sample, as far as the cache keeps its result.

    mode      the cache keeps                         the transform gets
    raw       the object's bytes                      the bytes (or decode(bytes))
    shrunk    a JPEG with a smaller short side        its bytes
    decoded   pixels at a smaller short side, and     the (H, W, 3) array, or
              the EXIF orientation, or                that object
              what the user's `decode` returned

In every epoch, the first too, samples are made from what the cache keeps: training sees one distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload.cache import Cache
from fastload.datasets.fingerprint import describe
from fastload.errors import ArgumentError
from fastload.formats.sample import dump, load
from fastload.images.decode import Oriented, decode_oriented, shrink

__all__ = ["PrepareStep", "check_fingerprint", "key_of"]

# Part of the cache's keys: raise it when `shrink` or `decode_oriented` give something else.
_VERSION = "2"


class PrepareStep:
    """What happens to an object's bytes before the cache, and after it.

    Args:
        cache: its mode decides; None is as "raw".
        decode: the dataset's own decode function, or None for images and plain bytes.
        fingerprint: of the user, in place of a description of `decode`.

    Attributes:
        prepare: bytes -> what is cached; None where that is the bytes themselves.
        key: what tells these results apart from those of another prefix, beside the cache's mode.
    """

    def __init__(
        self, cache: Cache | None, decode: Callable[[Any], Any] | None, fingerprint: str | None = None
    ) -> None:
        check_fingerprint(fingerprint)
        self.mode = "raw" if cache is None else cache.mode
        self._decode = decode
        self._short_side = cache.short_side if cache is not None else 0
        self._quality = cache.quality if cache is not None else 0
        if self.mode == "shrunk" and decode is not None:
            raise ArgumentError(
                "cache mode 'shrunk' keeps smaller JPEGs and does not go with decode=: "
                "use mode 'raw' or 'decoded'"
            )
        self.key = () if self.mode == "raw" else (_VERSION, *key_of(decode, fingerprint))

    @property
    def prepare(self) -> Callable[[Any], bytes] | None:
        return {"raw": None, "shrunk": self._shrink, "decoded": self._to_record}[self.mode]

    def restore(self, payload: Any, *, readonly: bool = False) -> Any:
        """What the cache kept (or `prepare` returned) -> what the transform gets.

        Args:
            readonly: it is only read: pixels in the cache's memory are not copied out of it.

        Raises:
            DecodeError: the payload is not what it should be.
        """
        if self.mode == "decoded":
            value = load(payload, readonly=readonly)
            return Oriented(*value) if self._decode is None and type(value) is tuple else value
        return payload if self._decode is None else self._decode(bytes(payload))

    def _shrink(self, data: Any) -> bytes:
        return shrink(data, self._short_side, self._quality)

    def _to_record(self, data: Any) -> bytes:
        if self._decode is not None:
            return dump(self._decode(bytes(data)))
        pixels = decode_oriented(data, self._short_side)
        return dump(tuple(pixels) if isinstance(pixels, Oriented) else pixels)


def key_of(decode: Callable[[Any], Any] | None, fingerprint: str | None) -> tuple[str, ...]:
    """What tells the results of `decode` from those of another function, as parts of a key.

    Raises:
        ArgumentError: `decode` holds what cannot be described, and there is no fingerprint.
    """
    if fingerprint is not None:
        return "fingerprint", fingerprint
    return ("",) if decode is None else ("described", describe(decode, "decode"))


def check_fingerprint(fingerprint: str | None) -> None:
    """Refuse an argument that is no text.

    Raises:
        ArgumentError: it is neither a str nor None.
    """
    if not isinstance(fingerprint, str | None):
        raise ArgumentError(f"fingerprint must be a str or None, found {fingerprint!r}")
