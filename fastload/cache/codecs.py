"""The modes of a cache: what each keeps of an image, and what a sample is made of later.

    mode      the cache keeps of an image             the transform gets
    raw       its file                                the file
    dct       a JPEG without its Huffman codes        that record, which decodes to the same pixels
    shrunk    a JPEG with a smaller short side        its bytes
    decoded   pixels at a smaller short side, and     the (H, W, 3) array, with that orientation
              the EXIF orientation
    auto      as "dct", or the file with an index     as these
              of its rows

A mode is a class here, and nobody else asks for the name of one. What is no image is kept as its bytes in all
modes. `fastload.datasets.payloads` says which parts of a sample are images.

Images are decoded with torch's help, which a process that only pulls records does not need: so `encode` and
the like import what they need.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar, Literal

from fastload.checks import format_size
from fastload.errors import ArgumentError
from fastload.formats.jpeg import DCT_MAGIC, ROWS_MAGIC

Mode = Literal["auto", "raw", "dct", "shrunk", "decoded"]


class Images(IntEnum):
    """How much is known of the images of a dataset, before one of them is read."""

    UNKNOWN = 0  # its samples may hold any bytes, or are made by code of the user
    OPENED = 1  # fastload itself decodes an image of each sample
    CROPPED = 2  # a fused transform of fastload does so


class CacheCodec:
    """A mode of a cache, as a dataset uses it. The class itself is not a mode.

    Args:
        short_side, quality: the cache's.
        has_room: bytes -> whether the cache would now keep so many.

    Attributes:
        mode: its name.
        key_mode: the mode in the keys of its records.
        lossless: samples are those of the images' own files.
        keeps_bytes: a payload is what was read, whatever it is.
        packs: an image alone is stored in the layout of a sample, as an array is.
        needs: what must be known of images for the mode to apply; where less is known, "raw" does.
        wants_images: whoever names the mode has images in mind.
        records: what it keeps, in words.
        keeps_decoded: what the user's `decode` returned may be kept in its place.
        keeps_samples: whole samples may be kept in a cache of this mode too; see `fastload.cached`.
        decoders: the decoders of `DataLoader` that take what it keeps, beside "cpu".
        why_not_others: why other decoders do not, and what to do.
        follows_size: its records are larger for larger objects, in proportion.
        chooses: the first samples decide what is kept.
    """

    mode: ClassVar[str] = ""
    key_mode: ClassVar[str] = ""
    lossless: ClassVar[bool] = True
    keeps_bytes: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    needs: ClassVar[Images] = Images.UNKNOWN
    wants_images: ClassVar[bool] = True
    records: ClassVar[str] = ""
    keeps_decoded: ClassVar[bool] = True
    keeps_samples: ClassVar[bool] = True
    decoders: ClassVar[tuple[str, ...]] = ()
    why_not_others: ClassVar[str] = ""
    follows_size: ClassVar[bool] = False
    chooses: ClassVar[bool] = False

    def __init__(
        self, short_side: int = 0, quality: int = 0, has_room: Callable[[int], bool] | None = None
    ) -> None:
        self.short_side = short_side
        self.quality = quality
        self._has_room = has_room

    def __repr__(self) -> str:
        return f"the codec of mode {self.mode!r}"

    @classmethod
    def check_available(cls) -> None:
        """Raise `ArgumentError` where this installation cannot use the mode."""

    @property
    def key_parts(self) -> tuple[Any, ...]:
        """Return what tells records of this mode apart, beside `key_mode`."""
        return ()

    def for_images(self, known: Images) -> CacheCodec:
        """Return the codec for a dataset of which so much is known."""
        return Raw() if known < self.needs else self

    def without_choice(self) -> CacheCodec:
        """Return the codec where there is nothing to choose: of payloads that are no images, for example."""
        return self

    def encode(self, image: Any) -> Any:
        """Return what the cache keeps of an image's file.

        Raises:
            DecodeError: it is damaged, and the mode has to decode it.
        """
        raise NotImplementedError

    def open(self, kept: Any) -> Any:
        """Return the image that a transform takes, of what `encode` made or the cache gave back."""
        return kept

    def why_not_on(self, decoder: str) -> str | None:
        """Return why a device decoder cannot take what is kept, and what to do; None where it can.

        Args:
            decoder: its name; "": any of them.
        """
        taken = bool(self.decoders) if not decoder else decoder in self.decoders
        return None if taken else self.why_not_others

    def advice(self, raw_bytes: int, room: int) -> str:
        """Return what to do where the records do not fit.

        Args:
            raw_bytes: what all samples take in mode "raw".
            room: bytes that are left.
        """
        raw = format_size(raw_bytes)
        return f"mode='shrunk' takes less than the {raw} of mode='raw'; or give the cache more room"

    def _kept(self, image: Any, form: Callable[[Any], Any]) -> Any:
        """Return a form of an image, or the image itself, of the same pixels, where none would be kept."""
        has_room = self._has_room is None or self._has_room(memoryview(image).nbytes)
        return form(image) if has_room else image


class Raw(CacheCodec):
    """Objects and records as the store has them."""

    mode = key_mode = "raw"
    keeps_bytes = True
    wants_images = False
    decoders = ("dali",)
    why_not_others = (
        "torch decodes what a cache in mode 'dct' keeps: use Cache(path, 'dct'), or decoder='cpu'"
    )

    def encode(self, image: Any) -> Any:
        return image


class Dct(CacheCodec):
    """JPEGs without their Huffman codes."""

    mode = key_mode = "dct"
    needs = Images.OPENED
    keeps_samples = False
    decoders = ("torch",)
    why_not_others = (
        "a cache in mode 'dct' keeps what only fastload decodes: use mode 'raw', decoder='torch' or "
        "decoder='cpu'"
    )
    follows_size = True

    @classmethod
    def check_available(cls) -> None:
        from fastload.images import decode

        if not decode.has_records():
            raise ArgumentError(
                "mode='dct' needs fastload's compiled kernel, which is missing here: use mode='raw', or "
                "'auto', which is 'raw' without it; fastload doctor says what to install"
            )

    @property
    def key_parts(self) -> tuple[Any, ...]:
        return DCT_MAGIC, ROWS_MAGIC  # they tell the versions of the records

    def for_images(self, known: Images) -> CacheCodec:
        from fastload.images import decode

        return super().for_images(known if decode.has_records() else Images.UNKNOWN)

    def encode(self, image: Any) -> Any:
        from fastload.images import decode
        from fastload.images.decode import is_pixels

        return image if is_pixels(image) else self._kept(image, decode.to_dct)

    def advice(self, raw_bytes: int, room: int) -> str:
        return _smaller_modes(raw_bytes, room) or super().advice(raw_bytes, room)


class Auto(Dct):
    """Whichever suits this machine: files with an index of their rows, or records of "dct".

    Whatever a process decides, its keys are those of "dct", and a payload says itself what it is. So
    processes and runs that decide apart read each other's records.

    Attributes:
        choose: image -> what is kept of it; set by a dataset, see `datasets.cache_forecast`.
    """

    mode = "auto"
    needs = Images.CROPPED
    wants_images = False
    keeps_samples = True
    decoders = Raw.decoders
    why_not_others = Raw.why_not_others
    chooses = True
    choose: Callable[[Any], Any] | None = None

    @classmethod
    def check_available(cls) -> None:
        pass

    def without_choice(self) -> CacheCodec:
        return Raw()

    def encode(self, image: Any) -> Any:
        from fastload.images.decode import is_pixels

        if self.choose is None or is_pixels(image):
            return super().encode(image)
        return self.choose(image)


class Shrunk(CacheCodec):
    """JPEGs with a smaller short side."""

    mode = key_mode = "shrunk"
    lossless = False
    records = "smaller JPEGs"
    keeps_decoded = False
    decoders = Raw.decoders
    why_not_others = Raw.why_not_others

    @property
    def key_parts(self) -> tuple[Any, ...]:
        return self.short_side, self.quality

    def encode(self, image: Any) -> Any:
        from fastload.images.decode import shrink

        return shrink(image, self.short_side, self.quality)

    def advice(self, raw_bytes: int, room: int) -> str:
        return "A smaller short_side or quality takes less"


class Decoded(CacheCodec):
    """Pixels at a smaller short side. An image that EXIF turns is a pair of pixels and orientation."""

    mode = key_mode = "decoded"
    lossless = False
    packs = True
    records = "pixels"
    why_not_others = "a cache in mode 'decoded' keeps pixels: use mode 'raw' or 'shrunk', or decoder='cpu'"

    @property
    def key_parts(self) -> tuple[Any, ...]:
        return (self.short_side,)

    def encode(self, image: Any) -> Any:
        import numpy as np

        from fastload.formats.sample import Drawn
        from fastload.images.decode import open_smaller

        smaller = open_smaller(image, self.short_side)
        # Decoded where the record lies: an array of its own is copied with the GIL, 0.03 ms for 360 KB.
        pixels = Drawn(smaller.shape, np.dtype(np.uint8), smaller.draw)
        return pixels if smaller.orientation == 1 else (pixels, smaller.orientation)

    def open(self, kept: Any) -> Any:
        if type(kept) is not tuple:
            return kept
        from fastload.images.decode import Oriented

        return Oriented(*kept)

    def advice(self, raw_bytes: int, room: int) -> str:
        return _smaller_modes(raw_bytes, room) or super().advice(raw_bytes, room)


def _smaller_modes(raw_bytes: int, room: int) -> str:
    if raw_bytes > room:
        return ""
    return f"mode='raw' takes {format_size(raw_bytes)} and fits, mode='shrunk' takes less"


CODECS: dict[str, type[CacheCodec]] = {codec.mode: codec for codec in (Auto, Raw, Dct, Shrunk, Decoded)}
