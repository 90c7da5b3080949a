"""The prepare step: the deterministic part of making a sample, as far as the cache keeps its result.

    mode      the cache keeps                         the transform gets
    raw       the object's bytes                      the bytes (or decode(bytes))
    shrunk    a JPEG with a smaller short side        its bytes
    decoded   pixels at a smaller short side, and     the (H, W, 3) array, or
              the EXIF orientation, or                that object
              what the user's `decode` returned

In every epoch, the first too, samples are made from what the cache keeps: training sees one distribution. A
`decode` with a parameter `key` gets the object's key too; the cache's keys have it in them in any case.
`fastload.datasets.prepare_fields` does the same for records of several fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from fastload.cache import Cache
from fastload.datasets.fingerprint import describe
from fastload.datasets.pairs import KeptImages, images_kept
from fastload.errors import ArgumentError
from fastload.formats.sample import Drawn, dump, load
from fastload.images.decode import Oriented, open_smaller, shrink

__all__ = ["Payload", "PrepareStep", "asks_for_key", "check_fingerprint", "with_orientation"]

Payload: TypeAlias = bytes | memoryview

# Part of the cache's keys: raise it when the same bytes would be kept as something else.
_VERSION = "2"


class PrepareStep:
    """What happens to an object's bytes before the cache, and after it.

    Args:
        cache: its mode decides; None is as "raw".
        decode: the dataset's own decode function, or None for images and plain bytes.
        fingerprint: of the user, in place of a description of `decode`.
        layout: of a subclass: what else its results depend on.

    Attributes:
        key: what tells these results apart from those of another prepare step, beside the cache's mode.
        asks_for_key: whether `decode` gets the key of the object.
    """

    _kept = KeptImages()
    _way_out = "use mode 'raw'"

    def __init__(
        self,
        cache: Cache | None,
        decode: Callable[..., Any] | None,
        fingerprint: str | None = None,
        *,
        layout: tuple[str, ...] = (),
    ) -> None:
        check_fingerprint(fingerprint)
        self.mode = "raw" if cache is None else cache.mode
        self._decode = decode
        self.asks_for_key = asks_for_key(decode)
        self._short_side = cache.short_side if cache is not None else 0
        self._quality = cache.quality if cache is not None else 0
        self._check()
        self.key = () if self.mode == "raw" else (_VERSION, *layout, *_key_of(decode, fingerprint))

    @property
    def prepare(self) -> Callable[..., Payload] | None:
        """Bytes, and their key where `decode` asks for it -> the cached payload.

        None if it is the bytes themselves.
        """
        return None if self.mode == "raw" else self._to_record

    def restore(self, payload: Any, key: str | None = None, *, readonly: bool = False) -> Any:
        """The payload from the cache or from `prepare` -> the input of the transform.

        Args:
            key: of the object, where `decode` asks for it.
            readonly: it is only read: pixels in the cache's memory are not copied out of it.

        Raises:
            DecodeError: the payload is not what it should be. What `decode` raises.
        """
        if self.mode == "raw":
            return self._open(payload, key)
        value = self._load(payload, readonly)
        return value if self._decode is not None else self._map_images(value, with_orientation)

    def check_transform(self, transform: Any) -> None:
        """Refuse a transform that needs an image's own values, where the cache keeps those of a smaller copy.

        Raises:
            ArgumentError: it does.
        """
        smaller = self.mode in ("shrunk", "decoded") and self._decode is None
        if smaller and not self._kept.covers(images_kept(transform)):
            raise ArgumentError(
                f"cache mode {self.mode!r} keeps smaller copies of images, and interpolation='nearest' and "
                f"channels=1 need an image's own values: {self._way_out}; found transform={transform!r}"
            )

    # --- what differs for a record of several fields

    def _check(self) -> None:
        """Raise `ArgumentError` where the mode does not go with the other arguments."""
        if self.mode == "shrunk" and self._decode is not None:
            raise ArgumentError(
                "cache mode 'shrunk' keeps smaller JPEGs and does not work with decode=: "
                "use mode 'raw' or 'decoded'"
            )

    def _split(self, payload: Any) -> Any:
        """Bytes -> the value that holds the images and the argument of `decode`."""
        return payload

    def _decoded_from(self, value: Any) -> Any:
        """The value -> the argument of `decode`."""
        return bytes(value)

    def _map_images(self, value: Any, function: Callable[[Any], Any]) -> Any:
        """The value with `function` of each image in its place."""
        return function(value)

    def _dump(self, value: Any) -> Payload:
        return value if self.mode == "shrunk" else dump(value)

    def _load(self, payload: Any, readonly: bool) -> Any:
        return payload if self.mode == "shrunk" else load(payload, readonly=readonly)

    # --- the same for both

    def _open(self, payload: Any, key: str | None) -> Any:
        value = self._split(payload)
        if self._decode is None:
            return value
        value = self._decoded_from(value)
        return self._decode(value, key=key) if self.asks_for_key else self._decode(value)

    def _to_record(self, payload: Any, key: str | None = None) -> Payload:
        value = self._open(payload, key)
        if self._decode is not None:
            return dump(value)
        return self._dump(self._map_images(value, self._smaller))

    def _smaller(self, image: Any) -> Any:
        if self.mode == "shrunk":
            return shrink(image, self._short_side, self._quality)
        smaller = open_smaller(image, self._short_side)
        # Decoded where the record lies: an array of its own is copied with the GIL, 0.03 ms for 360 KB.
        pixels = Drawn(smaller.shape, np.dtype(np.uint8), smaller.draw)
        return pixels if smaller.orientation == 1 else (pixels, smaller.orientation)


def with_orientation(image: Any) -> Any:
    """What `load` gives of kept pixels -> pixels, or `Oriented`."""
    return Oriented(*image) if type(image) is tuple else image


def _key_of(decode: Callable[..., Any] | None, fingerprint: str | None) -> tuple[str, ...]:
    """What tells the results of `decode` from those of another function, as parts of a key.

    Raises:
        ArgumentError: `decode` holds what cannot be described, and there is no fingerprint.
    """
    if fingerprint is not None:
        return "fingerprint", fingerprint
    return ("",) if decode is None else ("described", describe(decode, "decode"))


def asks_for_key(decode: Callable[..., Any] | None) -> bool:
    """Whether a function has a parameter `key` without default, beside its first one.

    One with a default was rejected: a `partial` that binds `key` would be given another.
    """
    if decode is None:
        return False
    try:
        parameters = list(inspect.signature(decode).parameters.values())
    except (TypeError, ValueError):  # a function of C, or a class, that has no signature
        return False
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return any(one.name == "key" and one.default is one.empty and one.kind in kinds for one in parameters[1:])


def check_fingerprint(fingerprint: str | None) -> None:
    """Refuse an argument that is no text.

    Raises:
        ArgumentError: it is neither a str nor None.
    """
    if not isinstance(fingerprint, str | None):
        raise ArgumentError(f"fingerprint must be a str or None, found {fingerprint!r}")
