"""torchvision's ImageFolder over any fsspec URL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastload.cache import Cache
from fastload.datasets.objects import ObjectDataset
from fastload.encoded import EncodedBatch
from fastload.images.decode import decode_pil
from fastload.rows import Allocate

__all__ = ["ImageFolder"]


class ImageFolder(ObjectDataset):
    """Images in one folder per class, `url/class/.../name.jpg`; samples are (image, class index).

    Classes, their order, the order of samples and the accepted file names are torchvision's.

    Args:
        url: any fsspec URL or path.
        transform: a fused transform of fastload (the image is then a uint8 tensor), or any callable on a
            `PIL.Image` (torchvision's convention; needs Pillow or pillow-simd). None: the `PIL.Image`.
        cache: a `Cache`, or the path of one in mode "raw"; filled during the first epoch.
        storage_options: for `open_store`.
        refresh: list the URL again where the cache holds an earlier listing.
        on_change: as `ObjectDataset`'s.
    """

    _images_only = True
    _labels = True

    def __init__(
        self,
        url: str,
        transform: Callable[[Any], Any] | None = None,
        *,
        cache: Cache | str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        refresh: bool = False,
        on_change: str = "error",
    ) -> None:
        super().__init__(
            url,
            None,
            transform,
            cache=cache,
            storage_options=storage_options,
            refresh=refresh,
            on_change=on_change,
        )

    @property
    def classes(self) -> list[str]:
        """The class names, sorted."""
        return list(self._manifest.classes or [])

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class name -> class index."""
        return {name: index for index, name in enumerate(self.classes)}

    @property
    def targets(self) -> list[int]:
        """The class index of every sample."""
        labels = self._manifest.labels
        assert labels is not None
        return labels.tolist()  # type: ignore[no-any-return]

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """(key, class index) of every sample."""
        return [(self._manifest.key(i), self._manifest.label(i)) for i in range(len(self))]

    imgs = samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return super().__getitem__(index), self._manifest.label(self._checked(index))

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        images = super().new_batch(n, allocate)
        return None if images is None else [images, allocate((n,), torch.int64)]

    def new_encoded_batch(self, n: int, allocate: Allocate) -> Any:
        return [super().new_encoded_batch(n, allocate), allocate((n,), torch.int64)]

    def finish_encoded_batch(self, batch: Any) -> Any:
        return [super().finish_encoded_batch(batch[0]), batch[1]]

    def sample(self, batch: Any, row: int) -> tuple[torch.Tensor, int]:
        images, labels = batch
        return images[row], int(labels[row])

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        super().copy_row(batch, target, source)
        labels = batch[1]
        labels[target] = labels[source]

    def _images_of(self, batch: Any) -> torch.Tensor | EncodedBatch:
        return batch[0]  # type: ignore[no-any-return]

    def _fill_rows(
        self, batch: Any, rows: list[int], indices: list[int], payloads: list[Any], seed: int, epoch: int
    ) -> Any:
        labels = batch[1].numpy()
        for row, index in zip(rows, indices, strict=True):
            labels[row] = self._manifest.label(index)
        return super()._fill_rows(batch, rows, indices, payloads, seed, epoch)

    def _open(self, value: Any) -> Any:
        return value if self._fused is not None else decode_pil(value)
