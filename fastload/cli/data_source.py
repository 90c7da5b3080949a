"""What lies at a URL: images in one folder per class, other objects, or shards of a kind; and its dataset."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import typer

from fastload.cli.command_options import CacheMode, CacheOptions, check_usable
from fastload.errors import ArgumentError, NotFoundError

FolderUrl = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="Images in one folder per class, or tar or TFRecord shards: s3://bucket/prefix, a path, ...",
    ),
]
FieldsOption = Annotated[
    str | None,
    typer.Option(
        metavar="FIELDS",
        help="Shards, modes dct, shrunk and decoded: fields= of the training, as 'jpg;png,cls' or JSON.",
    ),
]
FeaturesOption = Annotated[
    str | None,
    typer.Option(
        metavar="FEATURES",
        help="TFRecord, modes dct, shrunk, decoded: features= of the training, as 'image=bytes,label=int'.",
    ),
]
_TYPES: dict[str, Any] = {"bytes": bytes, "str": str, "int": int, "float": float}
_TYPES |= {f"[{name}]": [kind] for name, kind in _TYPES.items()}
_RECORDS = 64  # that are looked at
_BYTES = 8 << 20


class Kind(StrEnum):
    """What a source is."""

    auto = "auto"
    folder = "folder"
    objects = "objects"
    tar = "tar"
    tfrecord = "tfrecord"


SHARDS = (Kind.tar, Kind.tfrecord)


def find_kind(url: str, options: dict[str, Any]) -> Kind:
    """The kind of what is at `url`: by its name, where that names shards, else by the first keys below it.

    Raises:
        ArgumentError, StoreError: as a dataset's.
    """
    from fastload.shards.urls import expand_braces
    from fastload.store import open_store

    url = next(expand_braces(url))
    last = url.rpartition("/")[2]
    if last.endswith(".json"):  # wids
        return Kind.tar
    named = _shards_of([last])
    if named is not None:
        return named
    store = open_store(re.split(r"/[^/]*[*?\[]", url)[0], **options)
    return guess_kind([info.key for info in next(store.list(), [])])


def guess_kind(keys: list[str]) -> Kind:
    """The kind of objects with these keys. Images in folders count before shards that lie beside them."""
    from fastload.store.listing import IMAGE_EXTENSIONS

    images = [key for key in keys if key.lower().endswith(IMAGE_EXTENSIONS)]
    if images and all("/" in key for key in images):
        return Kind.folder
    return _shards_of(keys) or Kind.objects


def _shards_of(keys: list[str]) -> Kind | None:
    from fastload.shards.formats import format_of

    form = format_of(key.lower() for key in keys)
    return None if form is None or form.name not in SHARDS else Kind(form.name)


class FirstRecords(NamedTuple):
    """What a probe of the first records found.

    image: the member or feature that is an image.
    record_bytes: of a record in the shard, on average.
    """

    image: str
    record_bytes: float


def open_shards(
    kind: Kind, url: str, fields: str | None = None, features: str | None = None, **arguments: Any
) -> Any:
    """The dataset of shards, with the options of the command line.

    Raises:
        ArgumentError: an option is malformed, or for another kind of shards.
    """
    import fastload

    chosen = None if fields is None else _parse_fields(fields)
    if kind is Kind.tar:
        if features is not None:
            raise ArgumentError(
                "--features is for TFRecord files: a tar's members are known by their extension"
            )
        return fastload.TarDataset(url, fields=chosen, **arguments)
    spec = None if features is None else _parse_features(features)
    if spec is None and arguments["cache"].mode not in ("auto", "raw"):
        raise ArgumentError(
            f"mode {arguments['cache'].mode!r} keeps the features of a record: pass those of the training, "
            "as in --features image=bytes,label=int"
        )
    return fastload.TFRecordDataset(url, spec, fields=chosen, **arguments)


def list_shards(kind: Kind, url: str, *, cache: Any, storage_options: dict[str, Any]) -> tuple[Any, Any]:
    """(the shards, their format), listed, and the listing kept in the cache.

    Raises:
        ArgumentError, NotFoundError, AccessDeniedError, StoreError.
    """
    from fastload.cache.listings import Listings
    from fastload.shards.catalog import ShardList
    from fastload.shards.formats import FORMATS

    form = FORMATS[kind.value]
    shards = ShardList(
        url,
        form,
        compression=None,
        listings=Listings.of(cache, 0),
        storage_options=storage_options,
    )
    return shards, form


def image_dataset(kind: Kind, url: str, transform: Any, first: FirstRecords, **arguments: Any) -> Any:
    """The dataset of the images in shards alone: samples (image,), batches [images]."""
    import fastload
    from fastload.datasets.file_kinds import IMAGES

    if kind is Kind.tfrecord:
        features = {first.image: bytes}
        return fastload.TFRecordDataset(
            url, features, fields=(first.image,), transform=transform, **arguments
        )
    others = [name for name in IMAGES if name != first.image] if first.image in IMAGES else []
    return fastload.TarDataset(
        url, fields=(";".join([first.image, *others]),), transform=transform, **arguments
    )


def first_records(shards: Any, form: Any) -> FirstRecords:
    """Read the first records of the shards, one request or two.

    Raises:
        ArgumentError: they have no image. NotFoundError: there is no record.
    """
    from fastload.fetch.threads import ReadPool
    from fastload.images.decode import is_image
    from fastload.metrics.counters import Counters
    from fastload.shards.reader import ReadAhead, ShardReader

    records, size = list[dict[str, Any]](), 0
    pool = ReadPool(1, Counters())
    try:
        for number in range(len(shards)):
            reader = ShardReader(
                shards.store,
                shards[number],
                form.splitter,
                ahead=ReadAhead(1 << 20, 1),
                pool=pool,
                counters=Counters(),
            )
            while len(records) < _RECORDS and size < _BYTES and (record := reader.next()) is not None:
                if record.error is not None:
                    record.error.key = f"{shards[number].key} @ {record.offset}"
                    raise record.error
                size += record.size
                records.append(form.read_fields(record.payload))
            reader.close()
            if records:
                break
    finally:
        pool.close()
    if not records:
        raise NotFoundError(f"{shards.store.url!r}: the shards have no samples", stage="get")
    image = next((name for name, value in records[0].items() if is_image(value)), None)
    if image is None:
        raise ArgumentError(
            f"the first sample of the shards has no image among {', '.join(records[0]) or 'its parts'}: this "
            "command measures images"
        )
    return FirstRecords(image, size / len(records))


def _parse_fields(text: str) -> Any:
    """The tuple of "jpg;png,cls"; JSON gives nested structures and dicts."""
    if not text.startswith(("{", "[")):
        return tuple(text.split(","))
    try:
        return json.loads(text)
    except ValueError as error:
        raise ArgumentError(f"--fields {text!r} is no JSON: {error}") from None


def _parse_features(text: str) -> dict[str, Any]:
    features = {}
    for pair in text.split(","):
        name, _, kind = pair.partition("=")
        if not name or kind not in _TYPES:
            raise ArgumentError(f"--features {pair!r}: give NAME=TYPE with one of {', '.join(_TYPES)}")
        features[name] = _TYPES[kind]
    if sum(kind is bytes for kind in features.values()) > 1:
        raise ArgumentError(
            "--features has several of type bytes, and the training's transform says which is the image: let "
            "its first epoch fill the cache"
        )
    return features


@dataclass(frozen=True)
class Target:
    """What is warmed, and the cache of it: each node opens its own."""

    url: str
    cache: str
    cached: CacheOptions
    objects: bool
    fields: str | None
    features: str | None
    storage_options: dict[str, Any]

    def __repr__(self) -> str:
        """Leave out the options, which may be secrets."""
        return f"Target({self.url!r}, cache={self.cache!r})"

    def anywhere(self) -> Target:
        """The same for processes in other directories: without relative paths."""
        from fastload.cache.checks import absolute
        from fastload.store import open_store
        from fastload.store.local import LocalStore

        store = open_store(self.url, **self.storage_options)
        url = store.address if isinstance(store, LocalStore) else self.url
        return replace(self, url=url, cache=absolute(self.cache))

    def open(self, listing_max_age: float | str) -> tuple[Any, Kind]:
        """The dataset over the listed objects, and the kind of the data."""
        import fastload

        kept = self.cached.open(self.cache)
        check_usable(kept)
        kind = Kind.objects if self.objects else find_kind(self.url, self.storage_options)
        arguments: dict[str, Any] = {
            "cache": kept,
            "storage_options": self.storage_options,
            "listing_max_age": listing_max_age,
        }
        as_training: dict[str, Any] = {}
        if self.cached.mode is CacheMode.dct:  # its records are for transforms that decode them
            as_training["transform"] = fastload.CenterCrop(224)
        dataset: Any
        if kind in SHARDS:
            if kind is Kind.tfrecord:
                arguments |= as_training
            dataset = open_shards(kind, self.url, self.fields, self.features, **arguments)
        elif self.fields is not None or self.features is not None:
            raise ArgumentError(f"--fields and --features are for shards, and {self.url!r} holds none")
        else:
            kind = Kind.objects if self.objects else Kind.folder
            if self.objects:
                arguments |= as_training
            dataset = (fastload.ObjectDataset if self.objects else fastload.ImageFolder)(
                self.url, **arguments
            )
        if dataset.cache is None:
            raise ArgumentError(f"{dataset.url!r} cannot be cached: the warning above says why")
        return dataset, kind
