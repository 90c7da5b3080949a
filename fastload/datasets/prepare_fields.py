"""The prepare step of records; see `fastload.datasets.prepare`.

mode      the cache keeps                                        a sample is made of
raw       the record as the shard has it                         its fields
dct       its fields, JPEGs without their Huffman codes          these fields
shrunk    its fields, images as JPEGs with a smaller short side  these fields
decoded   its fields, images as pixels at a smaller short side,  these fields,
          or what the user's `decode` returned                   or that object

A mask, an image whose transform needs its own values, is kept as it is in all modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload.cache import Cache
from fastload.datasets.fields import Fields
from fastload.datasets.pairs import images_kept, known_images
from fastload.datasets.prepare import PrepareStep
from fastload.errors import ArgumentError
from fastload.formats.sample import dump, load
from fastload.images.dct import Unindexed, with_rows


class RecordPrepareStep(PrepareStep):
    """What happens to a record before the cache, and after it.

    Args:
        cache, fingerprint: as of `PrepareStep`.
        fields: splits records; None: a record is bytes.
        decode: of the user: the fields, or the bytes, -> object.
        transform: the first one of the dataset, which tells the masks among the images.
    """

    _way_out = "make a new dataset with this transform="

    def __init__(
        self,
        cache: Cache | None,
        fields: Fields | None,
        decode: Callable[[Any], Any] | None,
        fingerprint: str | None,
        transform: Any = None,
    ) -> None:
        self._fields = fields
        self._kept = images_kept(transform)
        readable = fields is not None and decode is None and not fields.needs_files(transform)
        images = known_images(readable, transform)
        layout = ["" if fields is None else fields.key, *([f"kept: {self._kept}"] if self._kept else [])]
        super().__init__(cache, decode, fingerprint, images=images, layout=tuple(layout))

    def check_transform(self, transform: Any) -> None:
        super().check_transform(transform)
        if self.mode in ("dct", "auto") and self._fields is not None and self._fields.needs_files(transform):
            raise ArgumentError(
                f"a cache in mode {self.mode!r} keeps these images for transforms that decode them, and "
                f"this one takes their files: make a new dataset with transform={transform!r}"
            )

    def _check(self) -> None:
        if self.asks_for_key:
            raise ArgumentError(
                "decode asks for a key, and a record of a shard has none: leave the parameter out (a sample "
                "of a tar has its key in the field '__key__')"
            )
        if self.mode == "shrunk" and (self._decode is not None or self._fields is None):
            raise ArgumentError(
                "cache mode 'shrunk' keeps smaller JPEGs: it needs the fields of a record and does not work "
                "with decode=; use mode 'raw' or 'decoded'"
            )
        if self.mode == "decoded" and self._decode is None and self._fields is None:
            raise ArgumentError("cache mode 'decoded' keeps pixels: pass features= or decode=, or use 'raw'")

    def _split(self, payload: Any) -> Any:
        return bytes(payload) if self._fields is None else self._fields.split(memoryview(payload))

    def _decoded_from(self, value: Any) -> Any:
        return value if self._fields is None else _plain(value)

    def _map_images(self, value: Any, function: Callable[[Any], Any]) -> Any:
        assert self._fields is not None
        images = [name for name in self._fields.images(value) if name not in self._kept]
        return value | {name: function(value[name]) for name in images}

    def _dump(self, value: Any) -> Any:
        return dump(_plain(value))

    def _load(self, payload: Any, readonly: bool) -> Any:
        # Of other modes than "decoded", arrays are no pixels, and the user's to write to, as without a cache.
        return load(payload, readonly=readonly and self.mode == "decoded")


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields with bytes of their own in place of views."""
    return {name: _own_bytes(one) for name, one in fields.items()}


def _own_bytes(value: Any) -> Any:
    if isinstance(value, Unindexed):  # its record cannot wait for a sample: other fields are in it too
        return bytes(with_rows(value.data))
    return bytes(value) if isinstance(value, memoryview) else value
