"""The prepare step of objects of any kind, of which a table names several for a sample.

The extension says what an object is (`fastload.datasets.file_kinds`). An object with an unknown extension, or
with none, is an image if it begins like one, and bytes otherwise.

mode      the cache keeps of an image                of other objects   of one with a `decode` of the user
raw       the object's bytes                         the bytes          the bytes
dct       a JPEG without its Huffman codes           the bytes          the bytes
shrunk    a JPEG with a smaller short side           the bytes          (refused)
decoded   pixels at a smaller short side             the bytes          what `decode` returned

A mask, an image whose transform needs its own values, is kept as it is in all modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fastload.cache import Cache
from fastload.datasets.file_kinds import IMAGES, PICKLES, extension_of, has_opener, open_file
from fastload.datasets.pairs import images_kept, known_images
from fastload.datasets.prepare import PrepareStep, with_orientation
from fastload.errors import DecodeError
from fastload.formats.sample import dump
from fastload.images.decode import find_format


class Picture(NamedTuple):
    """An image that is to be decoded: its bytes, or pixels of the cache."""

    source: Any


class FilePrepareStep(PrepareStep):
    """What happens to an object's bytes before the cache, and after it; each time with its key.

    Args:
        cache, decode, fingerprint: as of `PrepareStep`.
        transform: the first one of the objects. If it needs an image's own values, such as those of a mask,
            the cache keeps the object's bytes.
    """

    _way_out = "make a new dataset with this transform="

    def __init__(
        self,
        cache: Cache | None,
        decode: Callable[..., Any] | None,
        fingerprint: str | None,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        self._kept = images_kept(transform)
        images = known_images(decode is None and not self._kept, transform)
        super().__init__(cache, decode, fingerprint, images=images, layout=("kept",) if self._kept else ())

    def restore(self, payload: Any, key: str | None = None, *, readonly: bool = False) -> Any:
        """The payload from the cache or from `prepare` -> a `Picture`, or the value of another kind.

        Raises:
            DecodeError: the payload is not what its key says, or it is a pickle. What `decode` raises.
        """
        if self._decode is not None:
            return super().restore(payload, key, readonly=readonly)
        assert key is not None
        if self.mode == "decoded":
            payload = self._load(payload, readonly)
            if not isinstance(payload, bytes):
                return Picture(with_orientation(payload))
        if _is_image(key, payload):
            return Picture(payload)
        return _opened(key, payload)

    def _to_record(self, payload: Any, key: str | None = None) -> Any:
        assert key is not None
        if self._decode is None and (self._kept or not _is_image(key, payload)):
            return dump(bytes(payload)) if self.mode == "decoded" else bytes(payload)
        return super()._to_record(payload, key)


def _is_image(key: str, payload: Any) -> bool:
    extension = extension_of(key).lower()
    if extension in IMAGES:
        return True
    if has_opener(extension):
        return False
    try:
        find_format(payload)
    except DecodeError:
        return False
    return True


def _opened(key: str, payload: Any) -> Any:
    extension = extension_of(key).lower()
    if extension in PICKLES:
        raise DecodeError(
            "the object is a pickle, which can run any code: if you trust its author, pass a function that "
            "reads it, File(column, decode=function)",
            key=key,
        )
    return open_file(extension, payload, "the object")
