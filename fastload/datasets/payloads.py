"""From what was read to what the cache keeps, and from there to what a sample is made of.

    bytes ─▶ encode ─▶ payload, in the cache ─▶ open ─▶ value ─▶ sample or row of a batch

    ObjectPayloads   an object: an image, or whatever the user's `decode` makes of it
    FilePayloads     an object of any kind, of which a table names several (`datasets.sample_files`)
    RecordPayloads   a record of several fields, of a shard

The cache's mode says what is kept of an image (`fastload.cache.codecs`). With a `decode` of the user, mode
"decoded" keeps what it returned, and modes "dct" and "auto" the bytes. A mask, an image whose transform needs
its own values, is kept as it is in all modes.

In every epoch, the first too, samples are made from what the cache keeps: training sees one distribution. A
`decode` with a parameter `key` gets the object's key too; the cache's keys have it in them in any case.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fastload.cache import Cache
from fastload.cache.codecs import CacheCodec, Images, Raw
from fastload.datasets.fingerprint import describe, own_text
from fastload.datasets.sample_fields import RecordFields
from fastload.datasets.sample_transforms import NO_IMAGES, KeptImages, images_kept, is_cropped, is_lenient
from fastload.errors import ArgumentError
from fastload.formats.sample import dump, load, own_bytes
from fastload.images.decode import Unindexed, with_rows

# Part of the cache's keys: raise it when the same bytes would be kept as something else.
_VERSION = "2"


class ObjectPayloads:
    """The way of an object through the cache.

    Args:
        cache: its mode decides; None is as "raw".
        decode: the dataset's own decode function, or None for images and plain bytes.
        images: how much is known of the objects as images that fastload decodes.
        kept: the images that are kept as they are, whatever the mode.
        layout: of a subclass: what else its results depend on.

    Attributes:
        codec: of its images; that of "raw" where the cache's mode does not apply.
        key: what tells these payloads apart from others of the same object, beside the codec.
        asks_for_key: whether `decode` gets the key of the object.
    """

    _way_out = "use mode 'raw'"

    def __init__(
        self,
        cache: Cache | None,
        decode: Callable[..., Any] | None,
        *,
        images: Images = Images.UNKNOWN,
        kept: KeptImages = NO_IMAGES,
        layout: tuple[str, ...] = (),
    ) -> None:
        self.codec: CacheCodec = Raw() if cache is None else cache._codec.for_images(images)
        self._decode = decode
        self.asks_for_key = asks_for_key(decode)
        self._kept = kept
        self._check()
        self.key = () if self.codec.keeps_bytes else (_VERSION, *layout, *_key_of(decode))

    def __fingerprint__(self) -> dict[str, Any]:
        """Return what samples depend on: the same for all modes that lose nothing. See
        `datasets.fingerprint`.
        """
        state = {name: value for name, value in vars(self).items() if name not in ("codec", "key")}
        lossless = self.codec.lossless
        mode = "raw" if lossless else repr((self.codec.mode, *self.codec.key_parts))
        return state | {"mode": mode, "key": () if lossless else self.key}

    def with_codec(self, codec: CacheCodec) -> ObjectPayloads:
        """Return the same with another codec: that of "raw", or one that has learned to choose."""
        other = copy.copy(self)
        other.codec = codec
        other.key = () if codec.keeps_bytes else self.key
        return other

    @property
    def encode(self) -> Callable[..., Any] | None:
        """Bytes, and their key where `decode` asks for it -> the cached payload.

        None if it is the bytes themselves.
        """
        return None if self.codec.keeps_bytes else self._encode

    def open(self, payload: Any, key: str | None = None, *, readonly: bool = False) -> Any:
        """Return what a sample is made of, by a payload from the cache or from `encode`.

        Args:
            key: of the object, where `decode` asks for it.
            readonly: it is only read: pixels in the cache's memory are not copied out of it.

        Raises:
            DecodeError: the payload is not what it should be. What `decode` raises.
        """
        if self.codec.keeps_bytes:
            return self._decoded(payload, key)
        value = self._load(payload, readonly)
        return value if self._decode is not None else self._map_images(value, self.codec.open)

    def check_transform(self, transform: Any) -> None:
        """Refuse a transform of what the cache does not keep: an image's own values, or damaged images.

        Raises:
            ArgumentError: it does.
        """
        codec = self.codec
        if codec.keeps_bytes or self._decode is not None:
            return
        if not codec.lossless and is_lenient(transform):
            raise ArgumentError(
                f"cache mode {codec.mode!r} keeps no copy of a damaged image, so strict=False has no effect: "
                f"leave it out, or use mode 'auto', 'raw' or 'dct'; found transform={transform!r}"
            )
        if self._kept.covers(images_kept(transform)):
            return
        if codec.lossless:
            raise ArgumentError(
                f"a cache in mode {codec.mode!r} keeps these images for another transform, and "
                "interpolation='nearest' and channels=1 need their files: make a new dataset with this "
                f"transform=; found transform={transform!r}"
            )
        raise ArgumentError(
            f"cache mode {codec.mode!r} keeps smaller copies of images, and interpolation='nearest' and "
            f"channels=1 need an image's own values: {self._way_out}; found transform={transform!r}"
        )

    # --- what differs for a record of several fields

    def _check(self) -> None:
        """Raise `ArgumentError` where the mode does not go with the other arguments."""
        if self._decode is not None and not self.codec.keeps_decoded:
            raise ArgumentError(
                f"cache mode {self.codec.mode!r} keeps {self.codec.records} and does not work with decode=: "
                "use mode 'raw' or 'decoded'"
            )

    def _split(self, payload: Any) -> Any:
        """Return the value that holds the images, and is the argument of `decode`."""
        return payload

    def _argument(self, value: Any) -> Any:
        """Return the argument of `decode`."""
        return bytes(value)

    def _map_images(self, value: Any, function: Callable[[Any], Any]) -> Any:
        """Return the value with `function` of each image in its place."""
        return function(value)

    def _dump(self, value: Any) -> Any:
        return dump(value) if self.codec.packs else value

    def _load(self, payload: Any, readonly: bool) -> Any:
        return load(payload, readonly=readonly) if self.codec.packs else payload

    # --- the same for all

    def _decoded(self, payload: Any, key: str | None) -> Any:
        value = self._split(payload)
        if self._decode is None:
            return value
        value = self._argument(value)
        return self._decode(value, key=key) if self.asks_for_key else self._decode(value)

    def _encode(self, payload: Any, key: str | None = None) -> Any:
        value = self._decoded(payload, key)
        if self._decode is not None:
            return dump(value)
        return self._dump(self._map_images(value, self.codec.encode))


class RecordPayloads(ObjectPayloads):
    """The way of a record. Its fields are kept, with images as the mode says.

    Args:
        cache: as of `ObjectPayloads`.
        fields: splits records; None: a record is bytes.
        decode: of the user: the fields, or the bytes, -> object.
        transform: the first one of the dataset, which tells the masks among the images.
    """

    _way_out = "make a new dataset with this transform="

    def __init__(
        self,
        cache: Cache | None,
        fields: RecordFields | None,
        decode: Callable[[Any], Any] | None,
        transform: Any = None,
    ) -> None:
        self._fields = fields
        kept = images_kept(transform)
        readable = fields is not None and decode is None and not fields.needs_files(transform)
        known = known_images(transform) if readable else Images.UNKNOWN
        layout = ("" if fields is None else fields.key, *((f"kept: {kept}",) if kept else ()))
        super().__init__(cache, decode, images=known, kept=kept, layout=layout)

    def check_transform(self, transform: Any) -> None:
        super().check_transform(transform)
        if self.codec.needs and self._fields is not None and self._fields.needs_files(transform):
            raise needs_files(self.codec, transform)

    def _check(self) -> None:
        if self.asks_for_key:
            raise ArgumentError(
                "decode asks for a key, and a record of a shard has none: leave the parameter out (a sample "
                "of a tar has its key in the field '__key__')"
            )
        codec = self.codec
        if (self._decode is not None or self._fields is None) and not codec.keeps_decoded:
            raise ArgumentError(
                f"cache mode {codec.mode!r} keeps {codec.records}: it needs the fields of a record and does "
                "not work with decode=; use mode 'raw' or 'decoded'"
            )
        if self._decode is None and self._fields is None and not codec.keeps_bytes:
            raise ArgumentError(
                f"cache mode {codec.mode!r} keeps {codec.records}: pass fields= or decode=, or use 'raw'"
            )

    def _split(self, payload: Any) -> Any:
        return bytes(payload) if self._fields is None else self._fields.split(memoryview(payload))

    def _argument(self, value: Any) -> Any:
        return value if self._fields is None else _plain(value)

    def _map_images(self, value: Any, function: Callable[[Any], Any]) -> Any:
        assert self._fields is not None
        images = [name for name in self._fields.images(value) if name not in self._kept]
        return value | {name: function(value[name]) for name in images}

    def _dump(self, value: Any) -> Any:
        return dump(_plain(value))

    def _load(self, payload: Any, readonly: bool) -> Any:
        # Where images are no arrays, arrays are the user's to write to, as without a cache.
        return load(payload, readonly=readonly and self.codec.packs)


def known_images(transform: Any) -> Images:
    """Return how much is known of images that fastload would decode, by their transform."""
    return Images.CROPPED if is_cropped(transform) else Images.OPENED


def needs_files(codec: CacheCodec, transform: Any) -> ArgumentError:
    """Return the error of a transform that takes the files of images, of which there are records."""
    return ArgumentError(
        f"a cache in mode {codec.mode!r} keeps these images for transforms that decode them, and "
        f"this one takes their files: make a new dataset with transform={transform!r}"
    )


def settled(payloads: list[Any]) -> list[Any]:
    """Return payloads as the cache keeps them, now that no sample is made of them."""
    keep(payloads)
    return [with_rows(each.data) if isinstance(each, Unindexed) else each for each in payloads]


def keep(payload: Any) -> None:
    """Write what was waiting for its first decode, of a payload or of those of several objects."""
    for each in payload if isinstance(payload, list) else [payload]:
        if isinstance(each, Unindexed):
            each.keep()


def asks_for_key(decode: Callable[..., Any] | None) -> bool:
    """Return whether a function has a parameter `key` without default, beside its first one.

    One with a default was rejected: a `partial` that binds `key` would be given another.
    """
    if decode is None:
        return False
    try:
        parameters = list(inspect.signature(decode).parameters.values())
    except (TypeError, ValueError):  # a function of C, or a class, that has no signature
        return False
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return any(
        each.name == "key" and each.default is each.empty and each.kind in kinds for each in parameters[1:]
    )


def _key_of(decode: Callable[..., Any] | None) -> tuple[str, ...]:
    """Return what tells the results of `decode` from those of another function, as parts of a key.

    Raises:
        ArgumentError: `decode` holds what cannot be described, and has no `__fingerprint__`.
    """
    text = own_text(decode, "decode")
    if text is not None:
        return "fingerprint", text
    return ("",) if decode is None else ("described", describe(decode, "decode"))


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with bytes of their own in place of views."""
    return {name: _own_bytes(each) for name, each in fields.items()}


def _own_bytes(value: Any) -> Any:
    if isinstance(value, Unindexed):  # its record cannot wait for a sample: other fields are in it too
        return bytes(with_rows(value.data))
    return own_bytes(value)
