"""Data at a URL, of any kind: which kind it is, and the dataset that reads it.

kind       what lies at the URL                                   dataset
folder     images in one folder per class                        ImageFolder
objects    other objects                                         ObjectDataset
table      a CSV or JSON lines file; Parquet by --from table     TableDataset
tar, ...   shards: the formats of fastload.shards.formats         TarDataset, ...
"""

from __future__ import annotations

import inspect
import json
import re
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fastload.errors import ArgumentError, NotFoundError
from fastload.shards.formats import FORMATS, format_of, format_of_index

AUTO, FOLDER, OBJECTS, TABLE = "auto", "folder", "objects", "table"
KINDS = (FOLDER, OBJECTS, TABLE, *FORMATS)
INDEXABLE = tuple(name for name, form in FORMATS.items() if form.index_files is not None)
_TABLES = re.compile(r".*\.(?:csv|tsv|jsonl|ndjson)(?:\.gz)?", re.IGNORECASE)
_DATASETS = {FOLDER: "ImageFolder", OBJECTS: "ObjectDataset", TABLE: "TableDataset"}
_DATASETS |= {name: form.dataset for name, form in FORMATS.items()}
_MOST_JSON = 64 << 20
_RECORDS = 64  # that are looked at
_BYTES = 8 << 20

DataUrl = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="Images in one folder per class, shards, a table, or objects: s3://bucket/prefix, a path, ...",
    ),
]
if TYPE_CHECKING:
    Kind = str
else:  # for Typer, which knows the choices of an option by its type
    Kind = StrEnum("Kind", [AUTO, *KINDS])
KindOption = Annotated[
    Kind,
    typer.Option(
        "--from",
        help="What lies at the URL.",
        show_default="by the names there",
    ),
]


@dataclass(frozen=True)
class SourceOptions:
    """What lies at a URL, and which parts of it the script uses."""

    kind: KindOption = AUTO
    fields: Annotated[
        str | None,
        typer.Option(
            metavar="FIELDS",
            help="fields= of your script, as 'jpg;png,cls' or JSON. Of TFRecords: with types, as "
            "'image:bytes,label:int'. Of a table: its columns, with @ before those that name files, as "
            "'@image,label'.",
        ),
    ] = None
    files: Annotated[
        str | None, typer.Option(metavar="URL", help="Table: what the names of its files are relative to.")
    ] = None
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Tokens: their type, such as uint16.")
    ] = None
    block: Annotated[int | None, typer.Option(metavar="N", min=1, help="Tokens: block= of your script.")] = (
        None
    )
    overlap: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Tokens: overlap= of your script, if it has one.")
    ] = None
    documents: Annotated[
        str | None, typer.Option(metavar="ENDING", help="Tokens: documents= of your script, such as .idx.")
    ] = None

    def arguments(self, kind: str) -> dict[str, Any]:
        """Return the arguments of the dataset of that kind.

        Raises:
            ArgumentError: an option is malformed, missing, or for another kind.
        """
        given = {name: value for name, value in vars(self).items() if name != "kind" and value is not None}
        if self.fields is not None:
            given["fields"] = _parse_fields(self.fields, kind)
        takes = {*inspect.signature(dataset_class(kind)).parameters, *(["files"] if kind == TABLE else [])}
        if wrong := sorted(given.keys() - takes):
            raise ArgumentError(
                f"--{wrong[0]} is not for {kind}: leave it out, or say what lies there by --from"
            )
        needed = ("fields",) if kind == TABLE else FORMATS[kind].required if kind in FORMATS else ()
        if missing := [name for name in needed if name not in given]:
            raise ArgumentError(f"{kind} needs --{missing[0]}, as your script passes it")
        return given


def dataset_class(kind: str) -> Any:
    """Return the public class that reads data of that kind."""
    import fastload

    return getattr(fastload, _DATASETS[kind])


def find_kind(url: str, options: dict[str, Any], asked: str = AUTO) -> str:
    """Return what is at `url`: as asked for, else by its name, else by the first keys below it."""
    from fastload.shards.names import expand_braces
    from fastload.store import open_store
    from fastload.store.listing import IMAGE_EXTENSIONS

    if asked != AUTO:
        return asked
    url = next(expand_braces(url))
    last = url.rpartition("/")[2].lower()
    if last.endswith(".json"):  # wids
        return "tar"
    if _TABLES.fullmatch(last):
        return TABLE
    if (form := format_of([last])) is not None:
        return form.name
    store = open_store(re.split(r"/[^/]*[*?\[]", url)[0], **options)
    infos = next(store.list(), [])
    keys = [info.key for info in infos]
    if "index.json" in keys:
        form = format_of_index(read_json(store, infos[keys.index("index.json")]))
        if form is not None:
            return form.name
    # Images in folders count before shards that lie beside them.
    images = [key for key in keys if key.lower().endswith(IMAGE_EXTENSIONS)]
    if images and all("/" in key for key in images):
        return FOLDER
    form = format_of([key.lower() for key in keys])
    return OBJECTS if form is None else form.name


def read_json(store: Any, info: Any) -> Any:
    """Return a JSON document of at most 64 MiB; None where it is larger, or none."""
    if info.size > _MOST_JSON:
        return None
    try:
        return json.loads(bytes(store.read(info.key, info.version, info.size)))
    except (ValueError, RecursionError):
        return None


def open_dataset(
    url: str, kind: str, options: SourceOptions, *, transform: Any = None, **arguments: Any
) -> Any:
    """Return the dataset of what is at `url`.

    Args:
        arguments: cache, storage_options and listing_max_age of the dataset.
    """
    chosen = options.arguments(kind)
    if transform is not None and kind != "tokens":
        arguments["transform"] = transform
    if kind == TABLE:
        return dataset_class(kind)(
            url, chosen.pop("fields"), url=chosen.pop("files", ""), **chosen, **arguments
        )
    return dataset_class(kind)(url, **chosen, **arguments)


def list_shards(kind: str, url: str, *, cache: Any, storage_options: dict[str, Any]) -> Any:
    """Return the shards, listed, and keep the listing in the cache."""
    from fastload.shards.catalog import ShardList

    return ShardList(url, FORMATS[kind], cache, 0, storage_options)


# --- images


class Images(NamedTuple):
    """A dataset whose images are cropped, where its samples have one.

    length: samples; an estimate, if the shards are not indexed.
    words: for people, what there is.
    """

    dataset: Any
    length: int
    words: str


def open_images(url: str, kind: str, options: SourceOptions, transform: Any, **arguments: Any) -> Images:
    """Open what is at `url`, with the transform for the image of a sample, where it has one.

    Raises:
        ArgumentError: shards without an index have no image, or samples have several. Otherwise as
            `open_dataset`.
    """
    if kind in INDEXABLE and options.fields is None:
        return _open_shards(url, kind, options, transform, arguments)
    if kind == FOLDER:
        dataset = open_dataset(url, kind, options, transform=transform, **arguments)
        words = f"{len(dataset):,} images in {len(dataset.classes):,} classes"
        return Images(dataset, len(dataset), words)
    dataset = open_dataset(url, kind, options, **arguments)
    has_image = len(dataset) > 0 and any(map(_is_image, _values(dataset[0])))
    if has_image:
        dataset.close()
        dataset = open_dataset(url, kind, options, transform=transform, **arguments)
    words = "samples" if has_image else "samples without an image"
    return Images(dataset, len(dataset), f"{len(dataset):,} {words}, {kind}")


def _values(sample: Any) -> list[Any]:
    if isinstance(sample, dict):
        return list(sample.values())
    return list(sample) if isinstance(sample, tuple | list) else [sample]


def _is_image(value: Any) -> bool:
    """Return whether a value is an encoded image, an opened one, or its pixels."""
    from PIL.Image import Image

    return isinstance(value, Image) or _is_encoded(value) or len(getattr(value, "shape", ())) == 3


def _is_encoded(value: Any) -> bool:
    from fastload.images.decode import is_image

    return isinstance(value, bytes | bytearray | memoryview) and is_image(value)


def open_encoded(url: str, kind: str, options: SourceOptions, **arguments: Any) -> Any:
    """Open what is at `url`, with samples as they are encoded; see `encoded_image`."""
    if kind in (TABLE, "tfrecord"):  # whose fields open no image
        return open_dataset(url, kind, options, **arguments)
    if kind in FORMATS and not FORMATS[kind].required:
        arguments["decode"] = dict
    return open_dataset(url, kind, replace(options, fields=None), **arguments)


def encoded_image(dataset: Any, index: int) -> bytes | None:
    """Return the first image of a sample of `open_encoded`; None: it has none."""
    payload = dataset._payload(index)
    parts = payload if isinstance(payload, list) else [payload]  # a row of a table has one for each file
    if not any(map(_is_encoded, parts)):
        parts = _values(dataset[index])
    return next((bytes(part) for part in parts if _is_encoded(part)), None)


def _open_shards(
    url: str, kind: str, options: SourceOptions, transform: Any, arguments: dict[str, Any]
) -> Images:
    """Open shards that may have no index: the first records say what is in them."""
    import fastload
    from fastload.checks import format_size
    from fastload.datasets.sample_files import IMAGES
    from fastload.order.sampler import indexed_length

    listed = {name: arguments[name] for name in ("cache", "storage_options")}
    first = first_records(list_shards(kind, url, **listed), kind)
    name = first.image
    more: dict[str, Any] = {"transform": transform, **arguments}
    if kind == "tfrecord":
        dataset: Any = fastload.TFRecordDataset(url, (f"{name}:bytes",), **more)
    else:
        others = [extension for extension in IMAGES if extension != name] if name in IMAGES else []
        dataset = fastload.TarDataset(url, fields=(";".join([name, *others]),), **more)
    shards = dataset.shards()
    total = sum(shards[number].size for number in range(len(shards)))
    try:
        images, about = indexed_length(dataset), ""
    except TypeError:
        images, about = max(1, round(total / first.record_bytes)), "about "
    where = f"{len(shards):,} {kind} shards of {format_size(total)}"
    return Images(dataset, images, f"{about}{images:,} images ({name}) in {where}")


class FirstRecords(NamedTuple):
    """What a probe of the first records shows.

    image: the member or feature that is an image.
    record_bytes: of a record in the shard, on average.
    """

    image: str
    record_bytes: float


def first_records(shards: Any, kind: str) -> FirstRecords:
    """Read the first records of the shards, one request or two.

    Raises:
        ArgumentError: they have no image. NotFoundError: there is no record.
    """
    from fastload.fetch.reads import record_name
    from fastload.fetch.threads import ReadPool
    from fastload.images.decode import is_image
    from fastload.metrics.counters import Counters
    from fastload.shards.reader import ReadAhead, ShardReader

    form: Any = FORMATS[kind]
    records, size = list[dict[str, Any]](), 0
    with closing(ReadPool(1, Counters())) as pool:
        for shard in (shards[number] for number in range(len(shards))):
            reader = ShardReader(shards.store, shard, form.splitter, ahead=ReadAhead(1 << 20, 1), pool=pool)
            while len(records) < _RECORDS and size < _BYTES and (record := reader.next()) is not None:
                if record.error is not None:
                    record.error.key = record_name(shard.key, record.offset)
                    raise record.error
                size += record.size
                records.append(dict(form.read_fields(record.payload)))
            reader.close()
            if records:
                break
    if not records:
        raise NotFoundError(f"{shards.store.url!r}: the shards have no samples", stage="get")
    image = next((name for name, value in records[0].items() if is_image(value)), None)
    if image is None:
        raise ArgumentError(
            f"the first sample of the shards has no image among {', '.join(records[0]) or 'its parts'}: this "
            "command measures images"
        )
    return FirstRecords(image, size / len(records))


def _parse_fields(text: str, kind: str) -> Any:
    """Return the tuple of "jpg;png,cls"; JSON gives nested structures and dicts."""
    if not text.startswith(("{", "[")):
        structure: Any = tuple(text.split(","))
    else:
        try:
            structure = json.loads(text)
        except ValueError as error:
            raise ArgumentError(f"--fields {text!r} is no JSON: {error}") from None
    return _with_files(structure) if kind == TABLE else structure


def _with_files(structure: Any) -> Any:
    """Return the structure with a `File` for each leaf "@column"."""
    import fastload

    if isinstance(structure, str):
        return fastload.File(structure[1:]) if structure.startswith("@") else structure
    if isinstance(structure, dict):
        return {name: _with_files(part) for name, part in structure.items()}
    return type(structure)(_with_files(part) for part in structure)
