"""The datasets that commands make of shards, from a probe of the first records or from options."""

from __future__ import annotations

import json
from typing import Annotated, Any, NamedTuple

import typer

from fastload.cli.kinds import Kind
from fastload.errors import ArgumentError, NotFoundError

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
    if spec is None and arguments["cache"].codec.wants_images:
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
