"""The deterministic first step of a record, as far as the cache keeps its result; see `datasets.prefix`.

mode      the cache keeps                                        a sample is made of
raw       the record as the shard has it                         its fields
shrunk    its fields, images as JPEGs with a smaller short side  these fields
decoded   its fields, images as pixels at a smaller short side,  these fields,
          or what the user's `decode` returned                   or that object
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload.cache import Cache
from fastload.datasets.prepare import check_fingerprint, key_of
from fastload.errors import ArgumentError
from fastload.formats.sample import dump, load
from fastload.images.decode import Oriented, decode_oriented, shrink
from fastload.shards.fields import Fields

__all__ = ["RecordPrepareStep"]

# Part of the cache's keys: raise it when the same record would be kept as something else.
_VERSION = "2"


class RecordPrepareStep:
    """What happens to a record before the cache, and after it.

    Args:
        cache: its mode decides; None is as "raw".
        fields: splits records; None: a record is bytes.
        decode: of the user: the fields, or the bytes, -> object.
        fingerprint: of the user, in place of a description of `decode`.

    Attributes:
        prepare: payload -> what is cached; None where that is the payload itself.
        key: what tells these results from those of another prefix.
    """

    def __init__(
        self,
        cache: Cache | None,
        fields: Fields | None,
        decode: Callable[[Any], Any] | None,
        fingerprint: str | None,
    ) -> None:
        check_fingerprint(fingerprint)
        self.mode = "raw" if cache is None else cache.mode
        self._fields = fields
        self._decode = decode
        self._short_side = cache.short_side if cache is not None else 0
        self._quality = cache.quality if cache is not None else 0
        if self.mode == "shrunk" and (decode is not None or fields is None):
            raise ArgumentError(
                "cache mode 'shrunk' keeps smaller JPEGs: it needs the fields of a record and goes with no "
                "decode=; use mode 'raw' or 'decoded'"
            )
        if self.mode == "decoded" and decode is None and fields is None:
            raise ArgumentError("cache mode 'decoded' keeps pixels: pass features= or decode=, or use 'raw'")
        self.key: tuple[str, ...] = ()
        if self.mode != "raw":
            of_fields = "" if fields is None else fields.key
            self.key = (_VERSION, of_fields, *key_of(decode, fingerprint))

    @property
    def prepare(self) -> Callable[[Any], bytes] | None:
        return None if self.mode == "raw" else self._to_record

    def restore(self, payload: Any, *, readonly: bool = False) -> Any:
        """What the cache kept (or `prepare` returned) -> fields, or what `decode` returned.

        Args:
            readonly: see `layout.load`.

        Raises:
            DecodeError: the payload is not what it should be; and what `decode` raises.
        """
        if self.mode == "raw":
            return self._split(memoryview(payload))
        value = load(payload, readonly=readonly)
        if self._decode is None and self._fields is not None:
            for name in self._fields.images(value):
                if type(value[name]) is tuple:
                    value[name] = Oriented(*value[name])
        return value

    def _split(self, payload: memoryview) -> Any:
        if self._fields is None:
            data = bytes(payload)
            return data if self._decode is None else self._decode(data)
        fields = self._fields.split(payload)
        return fields if self._decode is None else self._decode(_plain(fields))

    def _to_record(self, payload: Any) -> bytes:
        value = self._split(memoryview(payload))
        if self._decode is None and self._fields is not None:
            images = self._fields.images(value)
            value = _plain(value | {name: self._smaller(value[name]) for name in images})
        return dump(value)

    def _smaller(self, image: Any) -> Any:
        if self.mode == "shrunk":
            return shrink(image, self._short_side, self._quality)
        pixels = decode_oriented(image, self._short_side)
        return tuple(pixels) if isinstance(pixels, Oriented) else pixels


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields with bytes of their own in place of views."""
    return {name: bytes(one) if isinstance(one, memoryview) else one for name, one in fields.items()}
