"""The prepare step: the deterministic part of making a sample, as far as the cache keeps its result.

    mode      the cache keeps                         the transform gets
    raw       the object's bytes                      the bytes (or decode(bytes))
    dct       a JPEG without its Huffman codes        that record, which decodes to the same pixels
    shrunk    a JPEG with a smaller short side        its bytes
    decoded   pixels at a smaller short side, and     the (H, W, 3) array, or
              the EXIF orientation, or                that object
              what the user's `decode` returned

Mode "dct" is for images that fastload decodes: all other objects are kept as in mode "raw", and so are images
of other formats and masks. In mode "auto" each process decides between the two (`AutoChoice`). Whatever it
decides, the keys are those of "dct", and a payload tells itself what it is: processes and runs that decide
apart read each other's records.

In every epoch, the first too, samples are made from what the cache keeps: training sees one distribution. A
`decode` with a parameter `key` gets the object's key too; the cache's keys have it in them in any case.
`fastload.datasets.prepare_fields` does the same for records of several fields.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from fastload.cache import Cache
from fastload.cache.keys import Mode
from fastload.datasets.cache_choice import AutoChoice, to_kept
from fastload.datasets.fingerprint import describe
from fastload.datasets.pairs import KeptImages, images_kept
from fastload.errors import ArgumentError
from fastload.formats.sample import Drawn, dump, load
from fastload.images import dct
from fastload.images.decode import Oriented, is_pixels, open_smaller, shrink
from fastload.store.process import ProcessLocal

# Part of the cache's keys: raise it when the same bytes would be kept as something else.
_VERSION = "2"
LOSSLESS = ("raw", "dct", "auto")


class PrepareStep:
    """What happens to an object's bytes before the cache, and after it.

    Args:
        cache: its mode decides; None is as "raw".
        decode: the dataset's own decode function, or None for images and plain bytes.
        fingerprint: of the user, in place of a description of `decode`.
        images: the cache modes in which the objects are known to be images that fastload decodes, so that the
            cache need not keep their bytes: of "dct" and "auto".
        layout: of a subclass: what else its results depend on.

    Attributes:
        mode: the cache's; "raw" where its mode does not apply.
        key: what tells these results apart from those of another prepare step, beside `key_mode`.
        choice: makes the records of mode "auto".
        asks_for_key: whether `decode` gets the key of the object.
    """

    choice: ProcessLocal[AutoChoice] | None = None
    _kept = KeptImages()
    _way_out = "use mode 'raw'"

    def __init__(
        self,
        cache: Cache | None,
        decode: Callable[..., Any] | None,
        fingerprint: str | None = None,
        *,
        images: tuple[Mode, ...] = (),
        layout: tuple[str, ...] = (),
    ) -> None:
        check_fingerprint(fingerprint)
        self._cache = cache
        self.mode: Mode = "raw" if cache is None else cache.mode
        if self.mode in ("dct", "auto") and (self.mode not in images or not dct.available()):
            self.mode = "raw"
        self._decode = decode
        self.asks_for_key = asks_for_key(decode)
        self._short_side = cache.short_side if cache is not None else 0
        self._quality = cache.quality if cache is not None else 0
        self._check()
        self.key = () if self.mode == "raw" else (_VERSION, *layout, *_key_of(decode, fingerprint))

    def __fingerprint__(self) -> dict[str, Any]:
        """What samples depend on: the same for all modes that lose nothing. See `datasets.fingerprint`."""
        state = {name: value for name, value in vars(self).items() if name not in ("choice", "_cache")}
        return state | ({"mode": "raw", "key": ()} if self.mode in LOSSLESS else {})

    @property
    def key_mode(self) -> Mode:
        """The mode of the cache's keys."""
        return "dct" if self.mode == "auto" else self.mode

    def as_raw(self) -> PrepareStep:
        """The same, where the cache keeps the objects' bytes."""
        step = copy.copy(self)
        step.mode, step.key, step.choice = "raw", (), None
        return step

    @property
    def prepare(self) -> Callable[..., Any] | None:
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
        """Refuse a transform that needs an image's own values, where the cache keeps something else of it.

        Raises:
            ArgumentError: it does.
        """
        if self.mode == "raw" or self._decode is not None or self._kept.covers(images_kept(transform)):
            return
        if self.mode in LOSSLESS:
            raise ArgumentError(
                f"a cache in mode {self.mode!r} keeps these images for another transform, and "
                "interpolation='nearest' and channels=1 need their files: make a new dataset with this "
                f"transform=; found transform={transform!r}"
            )
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

    def _dump(self, value: Any) -> Any:
        return dump(value) if self.mode == "decoded" else value

    def _load(self, payload: Any, readonly: bool) -> Any:
        return load(payload, readonly=readonly) if self.mode == "decoded" else payload

    # --- the same for both

    def _open(self, payload: Any, key: str | None) -> Any:
        value = self._split(payload)
        if self._decode is None:
            return value
        value = self._decoded_from(value)
        return self._decode(value, key=key) if self.asks_for_key else self._decode(value)

    def _to_record(self, payload: Any, key: str | None = None) -> Any:
        value = self._open(payload, key)
        if self._decode is not None:
            return dump(value)
        return self._dump(self._map_images(value, self._kept_form))

    def _kept_form(self, image: Any) -> Any:
        if self.mode in ("dct", "auto"):
            if is_pixels(image):  # of a format that stores them
                return image
            assert self._cache is not None
            if self.choice is not None:
                return self.choice.get().keep(image)
            return to_kept(image, self._cache, dct.to_dct)
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
