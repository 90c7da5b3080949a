"""What the samples of a dataset are made of, where each has several named fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class SampleFields(Protocol):
    """The fields that samples are made of."""

    def images(self, fields: Mapping[str, Any]) -> list[str]:
        """The names of the fields that are encoded images."""

    def open(self, name: str, value: Any) -> Any:
        """A field that is no image -> its value in the sample.

        Raises:
            DecodeError: its bytes are not of its kind, or its kind is refused.
        """

    def open_image(self, value: Any) -> Any:
        """An image -> its value in a sample without a fused transform.

        Its bytes, or (H, W, 3) pixels where the cache keeps pixels.
        """


class Fields(SampleFields, Protocol):
    """The fields that the records of a format have."""

    @property
    def key(self) -> str:
        """A text that differs where other arguments give other fields: part of the cache's keys."""

    def needs_files(self, transform: Any) -> bool:
        """Whether samples with this transform need the files of images, where a cache has records of them."""

    def split(self, payload: memoryview) -> dict[str, Any]:
        """The fields of a record, as they lie in it.

        Raises:
            DecodeError: it is no record of this format.
        """
