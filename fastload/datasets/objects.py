"""One sample per object under a URL."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fastload.cache import Cache, as_cache
from fastload.cache.codecs import Images
from fastload.cache.listings import Listings
from fastload.checks import check_function, check_index, shorten_errors
from fastload.datasets.payloads import ObjectPayloads, needs_files
from fastload.datasets.sample_fields import SampleFields, Shape, still_encoded
from fastload.datasets.sample_transforms import Transform
from fastload.datasets.samples import SampleBuilder
from fastload.datasets.store_dataset import SOME, StoreDataset, check_on_change, override_of
from fastload.errors import ArgumentError, FastloadError
from fastload.fetch.reads import ObjectSource
from fastload.images.crop import Crop
from fastload.images.transforms import all_transforms
from fastload.store.budget import RequestBudget
from fastload.store.listing import Keys, ListingQuery, as_keys
from fastload.store.manifest import Manifest
from fastload.store.open import checked_options, open_store

_OBJECT = "object"


class ImageFields(SampleFields):
    """The one field of a sample that is an object: an encoded image, which is opened as torchvision does."""

    def __init__(self, name: str) -> None:
        self._images = [name]

    def images(self, fields: Mapping[str, Any]) -> Sequence[str]:
        return self._images


class _Encoded(ImageFields):
    """The same, as the bytes of the object, or pixels of the cache."""

    def open_image(self, value: Any) -> Any:
        return still_encoded(value)


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
        check_on_change(on_change)
        super().__init__(url, decode)
        self.on_change = on_change
        check_function("transform", transform)
        self.transform = transform
        kept_in = as_cache(cache)
        images = self._known_images(transform)
        self._payloads = ObjectPayloads(kept_in, decode, images=images)
        self._payloads.check_transform(transform)
        self._store = open_store(url, **checked_options(storage_options))
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

    def _some_keys(self) -> list[bytes]:
        n = len(self._manifest)
        return [self._cache_key(record) for record in random.Random(0).sample(range(n), min(SOME, n))]

    def _identities(self, records: NDArray[np.int64]) -> NDArray[np.uint64]:
        return self._manifest.identities(records)

    def _listed(self) -> tuple[Listings, Manifest]:
        return self._listings, self._manifest

    @property
    def _budget(self) -> RequestBudget | None:
        return self._store.budget

    # --- images, and their transforms

    def _new_builder(self, transform: Transform) -> SampleBuilder:
        if self.decode is not None:
            return SampleBuilder(None, transform)
        return SampleBuilder(_Encoded(_OBJECT), transform, Shape(_OBJECT), image=_OBJECT)

    def _restore(self, record: int, payload: Any, *, readonly: bool = False) -> Any:
        value = super()._restore(record, payload, readonly=readonly)
        return value if self.decode is not None else {self._image: value}

    @property
    def _crop_hash(self) -> int:
        crops = self._builder.transforms.crops.values() if self._builder.fused else ()
        return next((crop.number for crop in crops), 0)

    def _check_transform(self, transform: Any) -> None:
        super()._check_transform(transform)
        codec = self._payloads.codec
        if self._known_images(transform) < codec.needs:
            raise needs_files(codec, transform)

    def _known_images(self, transform: Any) -> Images:
        fused = all(isinstance(item, Crop) and not item.own_values for item in all_transforms(transform))
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
        if not all(transform.runs_on_device for transform in transforms):
            return (
                "the device makes RGB by interpolation='bilinear', of RandomResizedCrop and CenterCrop "
                f"themselves, with Normalize as batch_transform=; found transform={self.transform!r}"
            )
        return self._payloads.codec.why_not_on(decoder)
