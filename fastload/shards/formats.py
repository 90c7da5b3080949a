"""The formats of shards, one object each, in one table.

    name      files                           where its records lie          dataset
    tar       .tar, .tar.gz, .tgz             read, or index files           TarDataset
    tfrecord  .tfrecord, -00000-of-00128      read, or index files           TFRecordDataset
    parquet   .parquet, .pq                   the footer: rows in groups     ParquetDataset
    mds       .mds, listed in index.json      the head of each shard         MDSDataset
    litdata   chunk-0-0.bin, in index.json    the head of each chunk         LitDataset
    beton     .beton, .ffcv                   the tables of each file        BetonDataset
    tokens    .bin, .npy                      by their size                  TokenDataset

A new format is an entry here, its bytes in `fastload.formats`, and its dataset in this room.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastload.formats.mds import OffsetSplitter
from fastload.formats.pieces import Offsets, Record, Splitter
from fastload.formats.tar import TarSplitter, is_over, parse_wds_index, read_members, read_sample, wds_index
from fastload.formats.tfrecord import (
    TFRecordSplitter,
    parse_tfrecord_index,
    read_example,
    tfrecord_index,
    unframe,
)


class IndexFiles(NamedTuple):
    """How the index files that lie beside shards are read and written.

    parse: (the bytes of a file, the size of its shard) -> the offsets and sizes of the records. Raises
        DecodeError where it is not the index of this shard.
    entry: a record -> what the file says of it.
    write: the entries of all records -> the bytes of the file.
    is_over: (bytes behind the last record of a file, how many there are in the shard) -> whether no further
        record follows. Not called where the last record ends the shard.
    """

    parse: Callable[[bytes, int], Offsets]
    entry: Callable[[Record], Any]
    write: Callable[[list[Any]], bytes]
    is_over: Callable[[memoryview, int], bool]


def _same(record: memoryview) -> memoryview:
    return record


@dataclass(frozen=True)
class ShardFormat:
    """A way to keep many samples in one object.

    Attributes:
        name: of the format, as the command line has it.
        code: a part of the cache's keys. Raise its number when the same bytes are read as other records.
        dataset: the public class that reads it.
        endings: of the names of its files, without the dot, that no other format has.
        names: regular expression of the keys below a prefix that are shards. Default: by `endings`.
        words: for such keys in errors, as in "no objects named as a tar".
        skips_hidden: whether a prefix leaves out files and folders whose names begin with . or _: writers
            have their logs and drafts there, under the endings of shards.
        title: for one shard in errors, as in "is named as a tar".
        split: (offset, end of the shard or None) -> what finds the records in its bytes. None: the dataset
            reads an index of the shards' own, before any record.
        unwrap: the bytes of a whole record -> its payload. Raises DecodeError if it is none.
        read_fields: a payload -> its fields by name, encoded. None: they are known to a dataset only.
        index_files: those that lie beside shards; None: there are none.
        compressed: whether files may be compressed as a whole; None: the first bytes of each say whether it
            is. Where shards have an index of their own, it says so.
        can_stream: whether a shard may be read as a stream: its records lie in the order of their numbers.
        listed_in: the key that only its index.json has; "": it has none.
        writer: words for who writes such an index.json.
        required: arguments of the dataset that no file tells. With any, a format is not known by names.
    """

    name: str
    code: str
    dataset: str
    endings: tuple[str, ...]
    words: str
    title: str
    names: str = ""
    skips_hidden: bool = False
    split: Callable[[int, int | None], Splitter] | None = None
    unwrap: Callable[[memoryview], memoryview] = _same
    read_fields: Callable[[memoryview], dict[str, Any]] | None = None
    index_files: IndexFiles | None = None
    compressed: bool | None = False
    can_stream: bool = True
    listed_in: str = ""
    writer: str = ""
    required: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", rf".*\.(?:{'|'.join(map(re.escape, self.endings))})")

    def __fingerprint__(self) -> str:
        """Return the format, whatever its functions look like: see `datasets.fingerprint`."""
        return self.code

    def names_shard(self, key: str) -> bool:
        """Return whether an object with this key is a shard of this format."""
        return re.fullmatch(self.names, key, re.DOTALL) is not None

    def splitter(self, offset: int, end: int | None, offsets: Offsets | None = None) -> Splitter:
        """Return what cuts the bytes of a shard, from `offset` on, into records.

        Args:
            end: of the shard; None where it is compressed.
            offsets: of all records of the shard, where they are known.
        """
        if self.split is not None:
            return self.split(offset, end)
        assert offsets is not None  # the dataset has read the index of the shard
        return OffsetSplitter(offset, end, offsets, self.unwrap)


def _tar_entry(record: Record) -> tuple[int, Any]:
    assert record.payload is not None
    return record.offset, read_members(record.payload)[1]


def _tar_fields(payload: memoryview) -> dict[str, Any]:
    return dict(read_sample(payload)[1])


def _tfrecord_entry(record: Record) -> tuple[int, int]:
    return record.offset, record.size


def _never_over(tail: memoryview, left: int) -> bool:
    return False  # an index has the records up to the end of the file


def _tfrecord_fields(payload: memoryview) -> dict[str, Any]:
    """Return the features that are one byte string."""
    features = read_example(payload).items()
    return {name: values[0] for name, values in features if isinstance(values, list) and len(values) == 1}


_OTHERS = "objects of one sample with fastload.ImageFolder (class/file.jpg) or fastload.ObjectDataset"

TAR = ShardFormat(
    name="tar",
    code="tar-1",
    dataset="TarDataset",
    endings=("tar", "tgz", "tar.gz"),
    words="named as a tar (.tar, .tar.gz, .tgz). Read TFRecord files with fastload.TFRecordDataset, and "
    + _OTHERS,
    title="a tar",
    split=TarSplitter,
    read_fields=_tar_fields,
    index_files=IndexFiles(parse_wds_index, _tar_entry, wds_index, is_over),
    compressed=None,
    listed_in="shardlist",
    writer="wids",
)
# "train.tfrecord", "train.tfrecord-00001-of-01024", "part.tfrecords.gz", "train-00001-of-01024"
TFRECORD = ShardFormat(
    name="tfrecord",
    code="tfrecord-1",
    dataset="TFRecordDataset",
    endings=("tfrecord", "tfrecords", "tfrec", "tfrecord.gz", "tfrecords.gz", "tfrec.gz"),
    names=r"(?!.*\.(?:idx|index|json)\Z)(?>.*/)?[^/]*"  # atomic, for linear time
    r"(?:\.tfrec(?:ords?)?(?:[-_.][^/]*)?|-\d{5}-of-\d{5}(?:\.gz|\.zlib)?)",
    words="named as a TFRecord file (.tfrecord, .tfrec, -00000-of-00128). Read a tar with "
    f"fastload.TarDataset, and {_OTHERS}",
    title="a TFRecord file",
    split=TFRecordSplitter,
    unwrap=unframe,
    read_fields=_tfrecord_fields,
    index_files=IndexFiles(parse_tfrecord_index, _tfrecord_entry, tfrecord_index, _never_over),
    compressed=None,
)
PARQUET = ShardFormat(
    name="parquet",
    code="parquet-1",
    dataset="ParquetDataset",
    endings=("parquet", "pq"),
    skips_hidden=True,
    words="named as Parquet (.parquet or .pq, without a leading . or _). Read tar shards with "
    f"fastload.TarDataset, and {_OTHERS}",
    title="a Parquet file",
)
MDS = ShardFormat(
    name="mds",
    code="mds-1",
    dataset="MDSDataset",
    endings=("mds", "mds.zstd", "mds.gz", "mds.bz2", "mds.br"),
    names=r".*\.mds(?:\.\w+)?",
    words="listed in index.json",
    title="a shard of MDS, whose folder is a dataset",
    listed_in="shards",
    writer="MosaicML Streaming",
)
LITDATA = ShardFormat(
    name="litdata",
    code="litdata-1",
    dataset="LitDataset",
    endings=(),
    names=r"(?:.*/)?chunk-\d+-\d+(?:\.\w+)*\.bin",
    words="listed in index.json",
    title="a chunk of LitData, whose folder is a dataset",
    listed_in="chunks",
    writer="LitData",
)
BETON = ShardFormat(
    name="beton",
    code="beton-1",
    dataset="BetonDataset",
    endings=("beton", "ffcv"),
    words="named as a file of FFCV (.beton). Read MDS with fastload.MDSDataset, LitData with "
    "fastload.LitDataset, and a tar with fastload.TarDataset",
    title="a file of FFCV",
    can_stream=False,
)
TOKENS = ShardFormat(
    name="tokens",
    code="tokens-1",
    dataset="TokenDataset",
    endings=("bin", "npy"),
    words="named .bin or .npy. Name others with a glob or a list, such as url='s3://bucket/corpus/*.u16'",
    title="a file of tokens",
    required=("dtype", "block"),
)

FORMATS: Mapping[str, ShardFormat] = {
    form.name: form for form in (TAR, TFRECORD, PARQUET, MDS, LITDATA, BETON, TOKENS)
}


def format_of(keys: Iterable[str]) -> ShardFormat | None:
    """Return the format of the shards among objects with these keys, by their names; None: there are none.

    The first format in the table that has any counts.
    """
    names = list(keys)
    known = (form for form in FORMATS.values() if not form.required)
    return next((form for form in known if any(map(form.names_shard, names))), None)


def format_of_index(document: Any) -> ShardFormat | None:
    """Return the format whose shards an index.json lists; None: it is of none."""
    known = (form for form in FORMATS.values() if form.listed_in)
    return next((form for form in known if isinstance(document, dict) and form.listed_in in document), None)


def title_of(name: str) -> tuple[str, str] | None:
    """Return (words for a shard, its dataset) where only one format has such a name; else None."""
    for form in FORMATS.values():
        if not form.required and any(name.endswith(f".{ending}") for ending in form.endings):
            return form.title, form.dataset
    return None
