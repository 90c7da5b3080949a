"""TFRecord files as a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastload.cache import Cache, as_cache
from fastload.datasets.sample_fields import RecordFields, still_encoded
from fastload.datasets.sample_transforms import always_fused
from fastload.errors import ArgumentError, shorten_errors
from fastload.formats.sample import own_bytes
from fastload.formats.tfrecord import Spec, check_spec, parse_example, read_example
from fastload.images.transforms import is_fused
from fastload.shards.catalog import ShardList
from fastload.shards.dataset import ShardDataset
from fastload.shards.epoch_streams import StreamOptions
from fastload.shards.formats import TFRECORD
from fastload.shards.record_fields import (
    ChosenFields,
    Leaf,
    NamedFields,
    check_decode,
    shape_of,
)

# As a leaf of `fields=` writes them.
_TYPES: dict[str, Any] = {
    text: kind
    for each in (bytes, str, int, float)
    for text, kind in ((each.__name__, each), (f"[{each.__name__}]", [each]))
}


class ExampleFields(NamedFields):
    """Features of a tf.train.Example.

    Args:
        features: see `Spec`.
        images: the features that are encoded images; None: the only one of type bytes.
        lacking: whether an Example may lack any of the features, which its fields then lack too.
    """

    def __init__(self, features: Spec, images: list[str] | None, *, lacking: bool = False) -> None:
        check_spec(features)
        self._features = dict(features)
        self._lacking = lacking
        single = [name for name, kind in features.items() if kind is bytes]
        self._images = images if images is not None else single if len(single) == 1 else []
        for name in self._images:
            if self._features.get(name) is not bytes:
                raise ArgumentError(
                    f"transform names {name!r} as an image, and fields has it as "
                    f"{self._features.get(name)!r}: write fields={{{name!r}: bytes, ...}}"
                )

    @property
    def key(self) -> str:
        return repr((sorted((name, repr(kind)) for name, kind in self._features.items()), self._images))

    def needs_files(self, transform: Any) -> bool:
        return not always_fused(self._images, transform)  # else a sample has an image's bytes

    def split(self, payload: memoryview) -> dict[str, Any]:
        return parse_example(payload, self._features, lacking=self._lacking)

    def names(self, payload: memoryview) -> list[str]:
        return list(read_example(payload))

    def is_image(self, name: str) -> bool:
        return name in self._images

    def images(self, fields: Mapping[str, Any]) -> list[str]:
        return self._images

    def open(self, name: str, value: Any) -> Any:
        return own_bytes(value)

    def open_image(self, value: Any) -> Any:
        return still_encoded(value)


class TFRecordDataset(ShardDataset):
    """The records of TFRecord files, read without TensorFlow; both CRCs of every record are checked.

    Example::

        from fastload import DataLoader, RandomResizedCrop, TFRecordDataset

        dataset = TFRecordDataset(
            "s3://bucket/shards/train-*.tfrecord",
            ("image:bytes", "label:int"),
            transform=RandomResizedCrop(224, flip=0.5),
            cache="/ssd/cache",
        )
        for images, labels in DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8):
            images, labels  # uint8 (256, 3, 224, 224), int64 (256,)

    Records are read at random or streamed as the samples of `TarDataset` are; index files are those of
    tfrecord2idx. A damaged record is an error with file and offset, or counted under `on_error`. A damaged
    length ends its file, as one bad record.

    Args:
        url: a prefix, one file, `{000..099}`, a glob, a list of these: any fsspec URL or path.
        fields: the structure of a sample: a tuple, a dict, nested or not, or one leaf. A leaf is a feature
            and its type, "label:int". bytes, str, int and float are for one value; lists of these, such as
            [int], for any number: a list, or a numpy array (int64, float32). In a dict the type is enough
            where the key is the feature: {"image": bytes, "counts": [int]}. Of alternatives the first that a
            record has counts ("image;image/encoded:bytes"). "box:[float]?" may be absent: the value is None
            then, and its column in a batch always a list. In `transform={...}` a leaf has the name of its key
            in a dict, else of its first alternative. None: records are no Examples; a sample is the bytes of
            its record.
        decode: function from the bytes, or from the values of a dict of features, to the sample.
            Deterministic.
        transform: a fused transform, which takes the one feature of type bytes as an image (the sample then
            has a uint8 tensor in its place); a dict {feature: function or fused transform}; or any callable
            on the sample. Fused transforms write their images straight into the batch.
        num_samples, cycle_length, shuffle_buffer: see `TarDataset`.
        cache, index, storage_options, listing_max_age: see `TarDataset`.

    Raises:
        ArgumentError, NotFoundError, AccessDeniedError, StoreError: within 10 s, before any worker starts.
    """

    @shorten_errors
    def __init__(
        self,
        url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        fields: Any = None,
        *,
        decode: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = None,
        num_samples: int | None = None,
        cycle_length: int = 32,
        shuffle_buffer: int | str = "64MB",
        cache: Cache | str | os.PathLike[str] | None = None,
        index: str | os.PathLike[str] | bool | None = None,
        storage_options: dict[str, Any] | None = None,
        listing_max_age: float | str = 0,
    ) -> None:
        known = None if fields is None else _fields(fields, decode, transform)
        kept_in = as_cache(cache)
        super().__init__(
            url,
            TFRECORD,
            lambda: ShardList(url, TFRECORD, kept_in, listing_max_age, storage_options),
            known,
            decode=decode,
            transform=transform,
            num_samples=num_samples,
            streams=StreamOptions.of(cycle_length, shuffle_buffer),
            cache=kept_in,
            index=index,
        )


def _fields(fields: Any, decode: Any, transform: Any) -> RecordFields:
    """Return the fields of a record, by the argument `fields` of the user."""
    parts = transform.items() if isinstance(transform, Mapping) else []
    fused = [name for name, part in parts if is_fused(part)]
    types: dict[str, Any] = {}
    chosen = _without_types(fields, None, types)
    if isinstance(chosen, dict) and chosen == {name: name for name in types}:
        return ExampleFields({name: types[name] for name in chosen}, fused or None)
    check_decode(fields, decode)
    leaves = {name: Leaf.parse(text).names for name, text in shape_of(chosen).leaves.items()}
    if fused:
        images = [feature for name in fused for feature in leaves.get(name, ())]
    else:  # the one leaf that is bytes
        encoded = [names for names in leaves.values() if all(types[name] is bytes for name in names)]
        images = list(encoded[0]) if len(encoded) == 1 else []
    return ChosenFields(ExampleFields(types, images, lacking=True), chosen)


def _without_types(fields: Any, key: str | None, types: dict[str, Any]) -> Any:
    """Return the structure with the names of features as leaves; their types are added to `types`.

    Args:
        key: that `fields` has in a dict.

    Raises:
        ArgumentError: a leaf has no type, or a feature has two.
    """
    if isinstance(fields, str):
        names, _, word = fields.removesuffix("?").rpartition(":")
        if not names or "?" in names or word not in _TYPES:
            raise ArgumentError(
                f"fields= has the leaf {fields!r}: write a feature and its type, one of {', '.join(_TYPES)}, "
                f"as in '{fields.removesuffix('?')}:bytes'"
            )
        leaf = f"{names}?" if fields.endswith("?") else names
        features, kind = Leaf.parse(leaf).names, _TYPES[word]
    elif key is not None and (isinstance(fields, type) or fields in _TYPES.values()):
        leaf, features, kind = key, (key,), fields
    elif isinstance(fields, Mapping):
        return {name: _without_types(part, name, types) for name, part in fields.items()}
    elif isinstance(fields, tuple | list):
        return tuple(_without_types(part, None, types) for part in fields)
    else:
        raise ArgumentError(
            "fields must be a feature and its type such as 'label:int', or a tuple or dict of these, found "
            f"{fields!r}"
        )
    for feature in features:
        if types.setdefault(feature, kind) != kind:
            raise ArgumentError(
                f"fields= has {feature!r} as {types[feature]!r} and as {kind!r}: give one type"
            )
    return leaf
