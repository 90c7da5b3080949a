"""torchvision's ImageFolder over any fsspec URL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from fastload.cache import Cache
from fastload.cache.keys import Mode
from fastload.datasets.base import check_function
from fastload.datasets.objects import ObjectDataset
from fastload.datasets.pairs import images_kept
from fastload.datasets.protocols import Allocate, RowErrors
from fastload.datasets.seeds import SampleSeeds
from fastload.datasets.view import View
from fastload.errors import ArgumentError
from fastload.images.decode import decode_pil
from fastload.images.encoded import EncodedBatch
from fastload.store.listing import Keys, ListingQuery
from fastload.store.manifest import Manifest

_CHOOSE = "choose samples with torch.utils.data.Subset(dataset, indices)"
_RELABEL = "change labels with target_transform=, or override __getitem__"
_NAME = "pass the class names, in the order of their indices, as classes="
_HOOKS = dict.fromkeys(("find_classes", "make_dataset"), f"{_NAME}; {_CHOOSE}")
_OPEN = "open images with transform=, or in a __getitem__ of your own"


class ImageFolder(ObjectDataset):
    """Images in one folder per class, `url/class/.../name.jpg`; samples are (image, target).

    Classes, their order, the order of samples and the accepted file names are torchvision's. A subclass may
    override `__getitem__` or `__getitems__`, as in `ObjectDataset`; the other hooks of torchvision's class,
    such as `find_classes` and `loader`, are refused.

    Example::

        from fastload import CenterCrop, ImageFolder, RandomResizedCrop

        train = ImageFolder("s3://bucket/train", RandomResizedCrop(224, flip=0.5), cache="/ssd/cache")
        val = ImageFolder("s3://bucket/val", CenterCrop(224, resize=256), classes=train.classes)
        image, label = val[0]  # uint8 tensor (3, 224, 224), int
        train.classes, train.targets[0], train.samples[0]  # ["cat", "dog"], 0, ("cat/0000.jpg", 0)

    Args:
        url: any fsspec URL or path.
        transform: a fused transform of fastload (the image is then a uint8 tensor), or any callable on a
            `PIL.Image` (torchvision's convention; needs Pillow or pillow-simd). None: the `PIL.Image`.
        target_transform: function of the class index that returns the target, any object. None: the class
            index. `targets` and `samples` keep the index.
        keys: the samples, as "class/name.jpg" relative to `url`, in this order; one may be there twice. As in
            `ObjectDataset`. None: all images below `url`, in torchvision's order.
        classes: the class names, in the order of their indices; they are not sorted. A folder with another
            name is an error. None: every folder below `url`, sorted by name, also with `keys` of a few of
            them. An http server tells no folders: there, the folders of `keys`.
        allow_empty: accept classes without images. Otherwise they are an error, unless `keys` are given.
        cache: a `Cache`, or a directory for one in mode "auto"; filled during the first epoch.
        storage_options: for `open_store`.
        listing_max_age: how old a listing that the cache keeps may be, to be used in place of a new one: text
            such as "12h" or "7d", or seconds. 0: every job lists again; its ranks share that listing.
        on_change: as in `ObjectDataset`.

    Raises:
        NotFoundError: there are no folders, or a class has no image.
        ArgumentError: a folder is not among `classes`, or an argument is invalid.
        AccessDeniedError, StoreError: as in `ObjectDataset`.
    """

    computed: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("samples", "imgs"), f"{_CHOOSE}; {_RELABEL}"),
        "targets": f"{_RELABEL}; {_CHOOSE}",
        **dict.fromkeys(("classes", "class_to_idx"), _NAME),
        "loader": _OPEN,
        **dict.fromkeys(("is_valid_file", "extensions"), _CHOOSE),
    }

    def __init__(
        self,
        url: str,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        *,
        keys: Iterable[str] | None = None,
        classes: Sequence[str] | None = None,
        allow_empty: bool = False,
        cache: Cache | str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        listing_max_age: float | str = 0,
        on_change: str = "error",
    ) -> None:
        for name, instead in (self.computed | _HOOKS).items():
            if getattr(type(self), name, None) is not getattr(ImageFolder, name, None):
                raise ArgumentError(f"{type(self).__name__}.{name} is not supported: {instead}")
        check_function("target_transform", target_transform)
        self.target_transform = target_transform
        self._classes: list[str] | None = None if classes is None else _checked_names(classes)
        self._allow_empty = allow_empty
        super().__init__(
            url,
            None,
            transform,
            keys=keys,
            cache=cache,
            storage_options=storage_options,
            listing_max_age=listing_max_age,
            on_change=on_change,
        )
        if self._classes is None:
            self._classes = self._manifest.classes or []
        indices = self.class_to_idx
        # Of folders, not of samples: the labels of millions stay in memory that workers share.
        self._index_of = np.array([indices[name] for name in self._manifest.classes or []], dtype=np.int64)

    @property
    def classes(self) -> list[str]:
        """The class names, in the order of their indices."""
        return list(self._classes or [])

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class name -> class index."""
        return {name: index for index, name in enumerate(self.classes)}

    @property
    def targets(self) -> Sequence[int]:
        """The class index of every sample."""
        return View(len(self._manifest), self._labels, self.computed["targets"])

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """(key, class index) of every sample."""
        return View(len(self._manifest), self._entries, self.computed["samples"])

    imgs = samples

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return super().__getitem__(index), self._target(self._record(index))

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        images = super().new_batch(n, allocate)
        return None if images is None else [images, self._new_targets(n, allocate)]

    def finish_batch(self, batch: Any) -> Any:
        """See `fastload.datasets.protocols.finish_batch`."""
        images, targets = batch
        if isinstance(targets, list):
            targets = default_collate(tuple(targets))  # type: ignore[arg-type]  # so texts stay a tuple, as in torch
        return [images, targets]

    def new_encoded_batch(self, n: int, allocate: Allocate) -> Any:
        return [super().new_encoded_batch(n, allocate), self._new_targets(n, allocate)]

    def finish_encoded_batch(self, batch: Any) -> Any:
        return self.finish_batch([super().finish_encoded_batch(batch[0]), batch[1]])

    def sample(self, batch: Any, row: int) -> tuple[Any, Any]:
        images, targets = batch
        target = targets[row] if isinstance(targets, list) else int(targets[row])
        return super().sample(images, row), target

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        super().copy_row(batch, target, source)
        targets = batch[1]
        targets[target] = targets[source]

    def identities(self, records: NDArray[np.int64]) -> NDArray[np.uint64]:
        assert self._manifest.labels is not None
        labels = self._index_of[self._manifest.labels[records]]
        return super().identities(records) + labels.view(np.uint64)

    def _list(self, keys: list[str] | None) -> Manifest:
        query = ListingQuery(
            labels=True,
            classes=self._classes,
            allow_empty=self._allow_empty or keys is not None,
            keys=None if keys is None else Keys(keys, folders=self._classes is None),
        )
        return self._listings.open(self._store, query)

    def _label(self, index: int) -> int:
        return int(self._index_of[self._manifest.label(index)])

    def _labels(self, start: int, stop: int) -> list[int]:
        assert self._manifest.labels is not None
        return self._index_of[self._manifest.labels[start:stop]].tolist()  # type: ignore[no-any-return]

    def _entries(self, start: int, stop: int) -> list[tuple[str, int]]:
        return list(zip(self._manifest.keys(start, stop), self._labels(start, stop), strict=True))

    def _target(self, index: int) -> Any:
        label = self._label(index)
        return label if self.target_transform is None else self.target_transform(label)

    def _new_targets(self, n: int, allocate: Allocate) -> Any:
        """A tensor of class indices, or a list for the results of a function, collated at the end."""
        return allocate((n,), torch.int64) if self.target_transform is None else [None] * n

    def _images_of(self, batch: Any) -> torch.Tensor | EncodedBatch:
        return batch[0]  # type: ignore[no-any-return]

    def _fill_rows(
        self, batch: Any, rows: list[int], records: list[int], values: list[Any], seed: int, epoch: int
    ) -> RowErrors:
        errors = super()._fill_rows(batch, rows, records, values, seed, epoch)
        failed = {row for row, _ in errors}
        targets = batch[1] if isinstance(batch[1], list) else batch[1].numpy()
        seeds = None if self.target_transform is None else SampleSeeds.current()
        if seeds is not None:
            seeds.begin_batch(records[0])
        for row, record in zip(rows, records, strict=True):
            if row not in failed:
                try:
                    targets[row] = (
                        self._target(record) if seeds is None else seeds.call(record, self._target, record)
                    )
                except Exception as error:  # of the user's function: `on_error` decides
                    errors.append((row, error))
        return errors

    def _known_images(self, transform: Any) -> tuple[Mode, ...]:
        # A mask's values are in its file.
        return () if images_kept(transform) else self._unless_own_samples()

    def _open(self, value: Any) -> Any:
        return value if self._takes_encoded else decode_pil(value)


def _checked_names(classes: Any) -> list[str]:
    names = list(classes) if isinstance(classes, Sequence) and not isinstance(classes, str) else []
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ArgumentError(
            "classes must be a list of different class names, in the order of their indices, found "
            f"{classes!r}"
        )
    return names
