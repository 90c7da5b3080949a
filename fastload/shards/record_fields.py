"""The named fields of a record, split without copies and opened when a sample is made of them.

    TFRecord   the features that the spec names         {"image": view of the bytes, "label": 7}
    tar        the members, by their extension          {"__key__": "0001", "jpg": view, "cls": view}

Images stay encoded, for a fused transform or for the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastload.datasets.file_kinds import IMAGES, PICKLES, extension_of, open_file
from fastload.errors import ArgumentError, DecodeError, refuse_class
from fastload.formats.example import Spec, check_spec, parse_example
from fastload.formats.tar import read_sample
from fastload.images.decode import Oriented, decode_pil

__all__ = ["ExampleFields", "MemberFields"]


class ExampleFields:
    """Features of a tf.train.Example.

    Args:
        features: see `Spec`.
        images: the features that are encoded images; None: the only one of type bytes.
    """

    def __init__(self, features: Spec, images: list[str] | None) -> None:
        check_spec(features)
        self._features = dict(features)
        single = [name for name, kind in features.items() if kind is bytes]
        self._images = images if images is not None else single if len(single) == 1 else []
        for name in self._images:
            if self._features.get(name) is not bytes:
                raise ArgumentError(
                    f"transform names {name!r} as an image, and features has it as "
                    f"{self._features.get(name)!r}: write features={{{name!r}: bytes, ...}}"
                )

    @property
    def key(self) -> str:
        return repr((sorted((name, repr(kind)) for name, kind in self._features.items()), self._images))

    def split(self, payload: memoryview) -> dict[str, Any]:
        return parse_example(payload, self._features)

    def images(self, fields: Mapping[str, Any]) -> list[str]:
        return self._images

    def open(self, name: str, value: Any) -> Any:
        return bytes(value) if isinstance(value, memoryview) else value

    def open_image(self, value: Any) -> Any:
        if isinstance(value, Oriented):
            return value.pixels
        return bytes(value) if isinstance(value, memoryview) else value


class MemberFields:
    """Members of a tar shard's sample.

    Args:
        decoders: extension -> function of its bytes; they replace the built-in ones.
        unsafe: unpickle .pyd, .pkl, .pickle, .pth and .pt, which can run any code.
    """

    def __init__(self, decoders: Mapping[str, Callable[[bytes], Any]], *, unsafe: bool) -> None:
        for name, function in decoders.items():
            refuse_class(f"decode[{name!r}]", function)
        self._decoders = {name.lower().lstrip("."): function for name, function in decoders.items()}
        self._unsafe = unsafe
        self._last: tuple[tuple[str, ...], list[str]] = ((), [])  # names, and those of images

    def __fingerprint__(self) -> Any:
        """All but the memory of the last sample: see `datasets.fingerprint`."""
        return self._decoders, self._unsafe

    @property
    def key(self) -> str:
        return repr(sorted(self._decoders))

    def split(self, payload: memoryview) -> dict[str, Any]:
        key, members = read_sample(payload)
        if "__key__" in members:
            raise DecodeError(
                f"sample {key!r} has a member '__key__': this name is taken by the key of the sample"
            )
        return {"__key__": key, **members}

    def images(self, fields: Mapping[str, Any]) -> list[str]:
        # Called twice a sample, and most samples have the same members.
        names, last = tuple(fields), self._last  # reader threads share it
        if names != last[0]:
            last = self._last = (
                names,
                [n for n in names if extension_of(n) in IMAGES and self._decoder(n) is None],
            )
        return last[1]

    def open(self, name: str, value: Any) -> Any:
        if name == "__key__":
            return value
        decoder = self._decoder(name)
        if decoder is not None:
            return decoder(bytes(value))
        kind = extension_of(name)
        if kind in PICKLES and not self._unsafe:
            raise DecodeError(
                f"member {name!r} is a pickle, which can run any code: pass unsafe=True if you trust the "
                f"author of the shards, or decode={{{name!r}: function}}"
            )
        return open_file(kind, value, f"member {name!r}")

    def open_image(self, value: Any) -> Any:
        return decode_pil(value)

    def _decoder(self, name: str) -> Callable[[bytes], Any] | None:
        return self._decoders.get(name) or self._decoders.get(extension_of(name))
