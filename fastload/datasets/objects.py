"""One sample per object under a URL; and torchvision's ImageFolder, whose samples have a target too."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.cache import Cache, as_cache
from fastload.cache.codecs import Images
from fastload.cache.listings import Listings
from fastload.checks import check_function, check_index, check_one_of
from fastload.datasets.payloads import ObjectPayloads, needs_files
from fastload.datasets.sample_fields import SampleFields, Shape, still_encoded
from fastload.datasets.sample_transforms import Transform, images_kept
from fastload.datasets.samples import SampleBuilder
from fastload.datasets.store_dataset import StoreDataset, override_of
from fastload.errors import ArgumentError, FastloadError, shorten_errors
from fastload.fetch.reads import ObjectSource
from fastload.images.crop import Crop
from fastload.images.decode import decode_pil
from fastload.images.transforms import all_transforms
from fastload.store.listing import Keys, ListingQuery, as_keys
from fastload.store.manifest import Manifest
from fastload.store.open import checked_options, open_store

_OBJECT = "object"


class ImageFields(SampleFields):
    """The one field of a sample that is an object: an encoded image.

    Args:
        name: of the field.
        open_image: its bytes, or pixels of the cache -> its value in a sample without a fused transform.
    """

    def __init__(self, name: str, open_image: Callable[[Any], Any]) -> None:
        self._images, self._open_image = [name], open_image

    def images(self, fields: Mapping[str, Any]) -> Sequence[str]:
        return self._images

    def open_image(self, value: Any) -> Any:
        return self._open_image(value)


class ObjectDataset(StoreDataset):
    """A map-style dataset with one sample per object under `url`.

    A subclass may override `__getitem__` or `__getitems__`: a loader then calls that method for every sample,
    as torch's loader does, and still reads ahead. `transform` may be set again at any time.

    Example::

        import numpy as np
        from fastload import DataLoader, ObjectDataset

        def spectrum(data):
            return np.frombuffer(data, np.float32)

        dataset = ObjectDataset("s3://bucket/spectra", decode=spectrum, cache="/ssd/cache")
        for batch in DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8):
            batch.shape  # (256, 32), float32

    Args:
        url: any fsspec URL or path: `s3://bucket/prefix`, `gs://`, `az://`, `file://`, `memory://`, ...
        decode: bytes -> object; deterministic. A function with a parameter `key` (without default) also gets
            the object's key: `def decode(data, key)`. Default: none; `transform` gets the bytes. Cache mode
            "decoded" keeps its results under keys that describe all that it holds (its code, arguments,
            closure, attributes, the globals it uses), or have its `__fingerprint__` instead, if it has one.
        transform: one of fastload's fused transforms (the object must then be an image; the sample is a uint8
            tensor), or any callable on the result of `decode`; or a `ByEpoch` of these.
        keys: the samples: keys of objects, relative to `url`, in this order; one may be there twice. A list,
            a numpy or Arrow array, or a column of a data frame. None: all objects below `url`, in the order
            of their keys.
        cache: a `Cache`, or a directory for one in mode "auto"; filled during the first epoch. If the store
            gives no versions of its objects, nothing is cached and a warning says so.
        storage_options: for `open_store`.
        listing_max_age: how old a listing that the cache keeps may be, to be used in place of a new one: text
            such as "12h" or "7d", or seconds. 0: every job lists again; its ranks share that listing.
        on_change: what to do if an object changed since it was listed: "error", or "refresh" to read the new
            version. `stats()` counts these as `get.refreshed`.

    Raises:
        ArgumentError, NotFoundError, AccessDeniedError, StoreError: within 10 s, before any worker starts. A
            key without an object is a NotFoundError.
    """

    @shorten_errors
    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        decode: Callable[..., Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        keys: Iterable[str] | None = None,
        cache: Cache | str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        listing_max_age: float | str = 0,
        on_change: str = "error",
    ) -> None:
        check_one_of("on_change", on_change, ("error", "refresh"))
        super().__init__(url, decode)
        self.on_change = on_change
        check_function("transform", transform)
        self.transform = transform
        kept_in = as_cache(cache)
        images = self._known_images(transform)
        self._payloads = ObjectPayloads(kept_in, decode, images=images)
        self._payloads.check_transform(transform)
        self._store = open_store(url, **checked_options(storage_options))
        self._budget = self._store.budget
        if kept_in is not None and self._store.holds(kept_in.path):
            raise ArgumentError(
                f"cache {kept_in.path!r} lies within {url!r}, and its files would be read as samples: "
                "give a directory outside it"
            )
        chosen = None if keys is None else as_keys(keys)
        self._listings = Listings.of(kept_in, listing_max_age)
        self._manifest = self._list(chosen)
        self.cache = None if self._manifest.why_not_cached(self._store) else kept_in  # a warning has said why
        self._settle_mode(self._manifest.total_bytes, len(self._manifest))

    def __len__(self) -> int:
        return len(self._manifest)

    def __repr__(self) -> str:
        cache = "" if self.cache is None else f", cache={self.cache!r}"
        return f"{type(self).__name__}({self._store.url!r}, {len(self):,} samples{cache})"

    def listing(self) -> Manifest:
        """Return the objects as they were listed: key, size and version of each sample."""
        return self._manifest

    def find(self, keys: Iterable[str]) -> dict[str, list[int]]:
        """Return key -> indices of the samples that have it; keys that no sample has are left out."""
        return self._manifest.find(keys)

    # --- the layout

    # Errors of a sample, for `on_error` to decide on. All others, such as MemoryError, are raised.
    _row_errors: ClassVar[tuple[type[Exception], ...]] = (FastloadError, IndexError)
    _sends_encoded: ClassVar[bool] = True
    _image: ClassVar[str] = _OBJECT  # the name of the field that is an object

    def _list(self, keys: list[str] | None) -> Manifest:
        return self._listings.open(self._store, ListingQuery(keys=None if keys is None else Keys(keys)))

    def _source(self) -> ObjectSource:
        return ObjectSource(self._store, self._manifest, key=self._cache_key, on_change=self.on_change)

    def _record(self, index: int) -> int:
        return check_index(index, len(self._manifest), f"samples of {self.url}")

    def _name(self, record: int) -> str:
        return str(self._manifest.key(record))

    def _cache_key(self, item: int, version: str | None = None) -> bytes:
        assert self.cache is not None
        manifest, payloads = self._manifest, self._payloads
        version = manifest.version(item) if version is None else version
        return self.cache.key(
            self._store.identity, manifest.key(item), version, *payloads.key, codec=payloads.codec
        )

    def _identities(self, records: NDArray[np.int64]) -> NDArray[np.uint64]:
        return self._manifest.identities(records)

    def _listed(self) -> tuple[Listings, Manifest]:
        return self._listings, self._manifest

    # --- images, and their transforms

    def _new_builder(self, transform: Transform) -> SampleBuilder:
        if self.decode is not None:
            return SampleBuilder(None, transform)
        return SampleBuilder(ImageFields(_OBJECT, still_encoded), transform, Shape(_OBJECT), image=_OBJECT)

    def _restore(self, record: int, payload: Any, *, readonly: bool = False) -> Any:
        value = super()._restore(record, payload, readonly=readonly)
        return value if self.decode is not None else {self._image: value}

    @property
    def _crop_hash(self) -> int:
        crops = self._builder.transforms.crops.values() if self._builder.fused else ()
        return next((crop._number for crop in crops), 0)

    def _check_transform(self, transform: Any) -> None:
        super()._check_transform(transform)
        codec = self._payloads.codec
        if self._known_images(transform) < codec.needs:
            raise needs_files(codec, transform)

    def _known_images(self, transform: Any) -> Images:
        fused = all(isinstance(item, Crop) and not item._own_values for item in all_transforms(transform))
        return self._unless_overridden() if fused and self.decode is None else Images.UNKNOWN

    def _unless_overridden(self) -> Images:
        # A method of the user may want the bytes: "dct" is of someone who knows that it does not.
        return Images.CROPPED if override_of(self) is None else Images.OPENED

    def _why_not_encoded(self, decoder: str) -> str | None:
        override = override_of(self)
        if override is not None:
            return f"samples are made by {override}, in the workers: use decoder='cpu'"
        transforms = all_transforms(self.transform)
        if self.decode is not None or not all(isinstance(transform, Crop) for transform in transforms):
            return (
                "the dataset's transform has to be fastload's RandomResizedCrop or CenterCrop, without any "
                f"decode=; found transform={self.transform!r}, decode={self.decode!r}"
            )
        if not all(transform._runs_on_device for transform in transforms):
            return (
                "the device makes RGB by interpolation='bilinear', of RandomResizedCrop and CenterCrop "
                f"themselves, with Normalize as batch_transform=; found transform={self.transform!r}"
            )
        return self._payloads.codec.why_not_on(decoder)


_CHOOSE = "choose samples with torch.utils.data.Subset(dataset, indices)"
_RELABEL = "change labels with target_transform=, or override __getitem__"
_NAME = "pass the class names, in the order of their indices, as classes="
_HOOKS = dict.fromkeys(("find_classes", "make_dataset"), f"{_NAME}; {_CHOOSE}")
_CHUNK = 4096
_WHOLE, _SHOWN = 20, 3  # items of a list whose text is whole; of each end of a longer one
_IMAGE, _TARGET = "image", "target"
_OPEN = "open images with transform=, or in a __getitem__ of your own"

T = TypeVar("T")


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
            `PIL.Image` (torchvision's convention). None: the `PIL.Image`.
        target_transform: function of the class index that returns the target, any object. None: the class
            index. `targets` and `samples` keep the index.
        keys: the samples, as "class/name.jpg" relative to `url`, in this order; one may be there twice. As in
            `ObjectDataset`. None: all images below `url`, in torchvision's order.
        classes: the class names, in the order of their indices; they are not sorted. A folder with another
            name is an error. None: every folder below `url`, sorted by name, also with `keys` of a few of
            them. An http server tells no folders: there, the folders of `keys`.
        allow_empty: accept classes without images. Otherwise they are an error, unless `keys` are given.
        cache: a `Cache`, or a directory for one in mode "auto"; filled during the first epoch.
        storage_options, listing_max_age, on_change: as in `ObjectDataset`.

    Raises:
        NotFoundError: there are no folders, or a class has no image.
        ArgumentError: a folder is not among `classes`, or an argument is invalid.
        AccessDeniedError, StoreError: as in `ObjectDataset`.
    """

    _computed: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("samples", "imgs"), f"{_CHOOSE}; {_RELABEL}"),
        "targets": f"{_RELABEL}; {_CHOOSE}",
        **dict.fromkeys(("classes", "class_to_idx"), _NAME),
        "loader": _OPEN,
        **dict.fromkeys(("is_valid_file", "extensions"), _CHOOSE),
    }

    _image = _IMAGE

    @shorten_errors
    def __init__(
        self,
        url: str | os.PathLike[str],
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
        for name, instead in (self._computed | _HOOKS).items():
            if getattr(type(self), name, None) is not getattr(ImageFolder, name, None):
                raise ArgumentError(f"{type(self).__name__}.{name} is not supported: {instead}")
        self.target_transform = target_transform
        self._classes: list[str] | None = None if classes is None else _checked_names(classes)
        self._allow_empty = allow_empty
        super().__init__(
            url,
            transform=transform,
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
        return ReadOnlyList(len(self._manifest), self._labels, self._computed["targets"])

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """(key, class index) of every sample."""
        return ReadOnlyList(len(self._manifest), self._entries, self._computed["samples"])

    imgs = samples

    @property
    def target_transform(self) -> Any:
        """As it was given; it may be set again."""
        return self._target_transform

    @target_transform.setter
    def target_transform(self, function: Callable[[int], Any] | None) -> None:
        check_function("target_transform", function)
        self._target_transform = function
        if "_transform" in self.__dict__:
            self.transform = self._transform

    def _list(self, keys: list[str] | None) -> Manifest:
        query = ListingQuery(
            labels=True,
            classes=self._classes,
            allow_empty=self._allow_empty or keys is not None,
            keys=None if keys is None else Keys(keys, folders=self._classes is None),
        )
        return self._listings.open(self._store, query)

    def _labels(self, start: int, stop: int) -> list[int]:
        labels: list[int] = self._class_indices(slice(start, stop)).tolist()
        return labels

    def _entries(self, start: int, stop: int) -> list[tuple[str, int]]:
        return list(zip(self._manifest.keys(start, stop), self._labels(start, stop), strict=True))

    def _identities(self, records: NDArray[np.int64]) -> NDArray[np.uint64]:
        return super()._identities(records) + self._class_indices(records).view(np.uint64)

    def _class_indices(self, records: Any) -> NDArray[np.int64]:
        assert self._manifest.labels is not None
        indices: NDArray[np.int64] = self._index_of[self._manifest.labels[records]]
        return indices

    def _new_builder(self, transform: Transform) -> SampleBuilder:
        functions = {_IMAGE: transform, _TARGET: self.target_transform}
        parts = {name: function for name, function in functions.items() if function is not None}
        fields, values = ImageFields(_IMAGE, decode_pil), _Targets(self)
        return SampleBuilder(fields, parts, Shape((_IMAGE, _TARGET)), values=values, image=_IMAGE)

    def _known_images(self, transform: Any) -> Images:
        # A mask's values are in its file.
        return Images.UNKNOWN if images_kept(transform) else self._unless_overridden()


class _Targets:
    """The class indices of the samples of a folder. See `ValueColumns`."""

    names = (_TARGET,)
    dtypes: ClassVar[dict[str, torch.dtype | None]] = {_TARGET: torch.int64}

    def __init__(self, dataset: ImageFolder) -> None:
        self._dataset = dataset

    def row(self, record: int) -> dict[str, Any]:
        return {_TARGET: int(self._dataset._class_indices(record))}

    def fill(self, columns: Mapping[str, Any], rows: list[int], records: list[int]) -> None:
        columns[_TARGET].numpy()[rows] = self._dataset._class_indices(records)


def _checked_names(classes: Any) -> list[str]:
    names = list(classes) if isinstance(classes, Sequence) and not isinstance(classes, str) else []
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ArgumentError(
            "classes must be a list of different class names, in the order of their indices, found "
            f"{classes!r}"
        )
    return names


class ReadOnlyList(Sequence[T]):
    """Behaves as the list of its items, but cannot be changed; slices of it and sums with it are lists.

    Args:
        count: how many items there are.
        items: (start, stop) -> the list of these items.
        instead: advice for the error of those that try to change it.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, count: int, items: Callable[[int, int], list[T]], instead: str) -> None:
        self._count, self._items, self._instead = count, items, instead

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        places = range(self._count)[index]  # an IndexError of it is a list's, except for one word
        if isinstance(places, int):
            return self._items(places, places + 1)[0]
        if places.step == 1:
            return self._items(places.start, max(places.start, places.stop))
        return [self[place] for place in places]

    def __iter__(self) -> Iterator[T]:
        for start in range(0, self._count, _CHUNK):  # one by one takes ten times as long
            yield from self._items(start, min(start + _CHUNK, self._count))

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise TypeError(f"this list is made from the listing, and cannot be changed: {self._instead}")

    def __delitem__(self, index: object) -> NoReturn:
        self[index] = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(list, name) and not name.startswith("_"):
                raise AttributeError(
                    f"this list is made from the listing, and has no {name}(): {self._instead}"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReadOnlyList | list):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self, *other] if isinstance(other, ReadOnlyList | list) else NotImplemented

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        """Return the list's text, cut where it is long: of a million items it would be 40 MB."""
        if self._count <= _WHOLE:
            return repr(list(self))
        begin, end = (repr(self[part])[1:-1] for part in (slice(_SHOWN), slice(self._count - _SHOWN, None)))
        return f"[{begin}, ..., {end}] ({self._count:,} items)"
