"""The formats of shards, one object each, in one table; and the ways to name shards.

    name      files                           where its records lie          dataset
    tar       .tar, .tar.gz, .tgz             read, or index files           TarDataset
    tfrecord  .tfrecord, -00000-of-00128      read, or index files           TFRecordDataset
    parquet   .parquet, .pq                   the footer: rows in groups     ParquetDataset
    mds       .mds, listed in index.json      the head of each shard         MDSDataset
    litdata   chunk-0-0.bin, in index.json    the head of each chunk         LitDataset
    beton     .beton, .ffcv                   the tables of each file        BetonDataset
    tokens    .bin, .npy                      by their size                  TokenDataset

A new format is an entry here, its bytes in `fastload.formats`, and its dataset in this room.

    s3://bucket/train/                      all shards below
    s3://bucket/train/{0000..0146}.tar      147 shards; also {train,val}, {00..98..2}, nested
    s3://bucket/**/part-*.tfrecord          ? and * within a path component, ** across, [a-z]
    s3://bucket/train/index.json            the shards that wids' index lists, relative to it
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastload.errors import ArgumentError
from fastload.formats.mds import OffsetSplitter
from fastload.formats.pieces import Offsets, Record, Splitter
from fastload.formats.tar import TarSplitter, parse_wds_index, read_members, read_sample, wds_index
from fastload.formats.tfrecord import (
    TFRecordSplitter,
    parse_tfrecord_index,
    read_example,
    tfrecord_index,
    unframe,
)
from fastload.store.listing import Selection


class IndexFiles(NamedTuple):
    """How the index files that lie beside shards are read and written.

    parse: (the bytes of a file, the size of its shard) -> the offsets and sizes of the records. Raises
        DecodeError where it is not the index of this shard.
    entry: a record -> what the file says of it.
    write: the entries of all records -> the bytes of the file.
    """

    parse: Callable[[bytes, int], Offsets]
    entry: Callable[[Record], Any]
    write: Callable[[list[Any]], bytes]


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
    index_files=IndexFiles(parse_wds_index, _tar_entry, wds_index),
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
    index_files=IndexFiles(parse_tfrecord_index, _tfrecord_entry, tfrecord_index),
    compressed=None,
)
PARQUET = ShardFormat(
    name="parquet",
    code="parquet-1",
    dataset="ParquetDataset",
    endings=("parquet", "pq"),
    words=f"named as Parquet (.parquet, .pq). Read tar shards with fastload.TarDataset, and {_OTHERS}",
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


_MOST_SHARDS = 1_000_000
_SPECIAL = re.compile(r"[*?\[]")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_STARS = {"": "", "**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
_INDEX_FILES = r".*\.(?:idx|index)"
_NOT_IN_NAMES = re.compile(r"[\\*?\[\]{}\x00-\x1f]|//|^/|/$|^$|(?:^|/)\.{1,2}(?:/|$)|:")


class Named(NamedTuple):
    """Named shards: the URL that holds all of them, and the selection of its objects.

    `alone`: the name taken as one file, if it may be a prefix as well as a file without a known ending.
    """

    root: str
    selection: Selection
    alone: Named | None = None


def resolve(
    urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], form: ShardFormat, *, files: bool = False
) -> Named:
    """Return the shards that `urls` names.

    Args:
        urls: as above.
        form: of the shards; it knows them below a prefix by their names.
        files: whether each of `urls` is one file, whatever its name.

    Raises:
        ArgumentError: `urls` names nothing, shards in two buckets, a shard twice, or a file of another kind.
    """
    given = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    names = [name for url in given for name in expand_braces(_text(url))]
    if not names:
        raise ArgumentError(f"url names no shards: {urls!r}")
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise ArgumentError(f"url names a shard twice: {name!r}; each is read once per epoch")
    heads = names[0].lower().startswith(("http://", "https://"))
    if len(names) == 1 and not (heads or files) and not _SPECIAL.search(names[0]):
        base = names[0].rpartition("/")[2]
        if not base or not form.names_shard(base):
            return _prefix(names[0], form)
    split = [_split(name) for name in names]
    root = _common([directory for directory, _ in split])
    if not root and "://" in names[0]:
        raise ArgumentError("url names shards of several buckets: one dataset reads one bucket")
    prefix = f"{root}/" if root not in ("", "/") else root
    keys = [name.removeprefix(prefix) for name in names]
    globs = [key for key in keys if _SPECIAL.search(key)]
    patterns = [glob_pattern(key) for key in globs]
    required = tuple(sorted(key for key in keys if not _SPECIAL.search(key)))
    if patterns and heads:
        raise ArgumentError("a glob needs a store that can list: over http, use braces or a list")
    selection = Selection("|".join([*patterns, _INDEX_FILES]), required, heads)
    if globs:
        selection = selection._replace(wanted=f"matched by {', '.join(map(repr, globs))}")
    return Named(root or ".", selection)


def _prefix(name: str, form: ShardFormat) -> Named:
    """Return the shards below a name, or the one file that has this name."""
    directory, _, base = name.rpartition("/")
    other = title_of(base)
    if other is not None:
        raise ArgumentError(f"url {name!r} is named as {other[0]}: read it with fastload.{other[1]}")
    pattern = f"(?:{form.names})|{_INDEX_FILES}"
    alone = None
    if base and not directory.endswith(":/"):
        root = directory or ("/" if name.startswith("/") else ".")
        alone = Named(root, Selection("(?!)", (base,), heads=True))
    return Named(name, Selection(pattern, wanted=form.words), alone)


def is_index(key: str) -> bool:
    """Return whether an object beside shards is an index file."""
    return re.fullmatch(_INDEX_FILES, key, re.DOTALL) is not None


def check_name(name: Any, root: str) -> str:
    """Return the name of a shard in an index file, if it stays below the folder.

    Raises:
        ArgumentError: it does not, or it is no name.
    """
    if not isinstance(name, str) or _NOT_IN_NAMES.search(name) or is_index(name):
        raise ArgumentError(
            f"{root!r}: the index names the file {name!r}, which is not a plain name below this folder: "
            "write the index again"
        )
    return name


def listed_url(name: str, folder: str) -> str:
    """Return the URL of a shard in the index of wids: a name below its folder, or a URL of its own bucket.

    Raises:
        ArgumentError: it leads elsewhere.
    """
    scheme, separator, rest = folder.partition("://")
    place = folder
    if separator and scheme.lower() not in ("file", "local"):
        place = f"{scheme}://{rest.partition('/')[0]}"
    if folder and name.startswith(f"{place}/"):
        return f"{place}/{check_name(name.removeprefix(f'{place}/'), place)}"
    return f"{folder}/{check_name(name, folder)}" if folder else check_name(name, ".")


def expand_braces(text: str) -> Iterator[str]:
    """Return all texts that the braces stand for, in order, by the rules of bash.

    Raises:
        ArgumentError: a brace is not closed, or there are more than a million texts.
    """
    found, open_braces = [text], True
    while open_braces:
        spans = [(one, _outer_braces(one)) for one in found]
        open_braces = any(span is not None for _, span in spans)
        found = []
        for one, span in spans:
            found += [one] if span is None else _alternatives(one, *span)
            if len(found) > _MOST_SHARDS:
                raise ArgumentError(f"url {text!r} stands for more than {_MOST_SHARDS:,} shards")
    return iter(found)


def _outer_braces(text: str) -> tuple[int, int] | None:
    """Return the positions of the first opening brace and of its closing one; None: there is no brace."""
    start = text.find("{")
    if start < 0:
        return None
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return start, at
    raise ArgumentError(f"url {text!r}: a brace is not closed")


def _alternatives(text: str, start: int, stop: int) -> list[str]:
    before, inner, after = text[:start], text[start + 1 : stop], text[stop + 1 :]
    span = _RANGE.fullmatch(inner)
    if span is None:
        parts, depth = [""], 0
        for character in inner:
            depth += (character == "{") - (character == "}")
            if character == "," and not depth:
                parts.append("")
            else:
                parts[-1] += character
        if len(parts) < 2:
            raise ArgumentError(f"url {text!r}: {{{inner}}} is neither a range {{a..b}} nor a list {{a,b}}")
        return [f"{before}{part}{after}" for part in parts]
    first, last, step = int(span[1]), int(span[2]), abs(int(span[3] or 1)) or 1
    padded = any(re.match(r"-?0\d", edge) for edge in (span[1], span[2]))
    width = max(len(span[1]), len(span[2])) if padded else 0
    if abs(last - first) // step >= _MOST_SHARDS:
        raise ArgumentError(f"url {text!r} stands for more than {_MOST_SHARDS:,} shards")
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    return [f"{before}{number:0{width}d}{after}" for number in numbers]


def glob_pattern(glob: str) -> str:
    """Return the regular expression of a glob. A `*` does not match a slash, as in a shell; `**` does.

    A star is not tried again at a later place (`(?>...)`) where the next one takes what lies between: the
    time is linear in the length of a key, however many `*` there are.
    """
    parts = [("", "")]  # a star, and the pattern of the characters up to the next one
    at = 0
    while at < len(glob):
        star, text = parts[-1]
        if glob[at] == "*":
            star = next(star for star in _STARS if star and glob.startswith(star, at))
            parts.append((star, ""))
            at += len(star)
        elif glob[at] == "?":
            parts[-1], at = (star, text + "[^/]"), at + 1
        elif glob[at] == "[" and (end := glob.find("]", at + 2)) > 0:
            inner = glob[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            inner = f"^{inner[1:]}" if inner[0] == "!" else inner
            parts[-1], at = (star, f"{text}(?!/)[{inner}]"), end + 1
        else:
            parts[-1], at = (star, text + re.escape(glob[at])), at + 1
    pattern = ""
    for (star, text), following in itertools.zip_longest(parts, [star for star, _ in parts[1:]]):
        once = star in ("*", "**") and following in (star, "**")
        pattern += f"(?>{_STARS[star]}?{text})" if once else f"{_STARS[star]}{text}"
    return pattern


def _text(url: str | os.PathLike[str]) -> str:
    text = os.fspath(url)
    if text.startswith("pipe:"):
        raise ArgumentError(
            "url is a pipe:, a command to run. fastload runs none: give the URL of the shards"
        )
    return text


def _split(name: str) -> tuple[str, str]:
    """Return (directory, rest) where the directory has no special character."""
    match = _SPECIAL.search(name)
    plain = name if match is None else name[: match.start()]
    directory, slash, _ = plain.rpartition("/")
    return (directory or slash), name[len(directory) + 1 :]


def _common(directories: list[str]) -> str:
    """Return the deepest directory that holds all of these."""
    parts = [directory.split("/") for directory in directories]
    shared = [
        one[0] for one in itertools.takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False))
    ]
    least = 3 if "://" in directories[0] else 0  # "s3:", "", "bucket"
    if "://" in directories[0] and len(shared) < least:
        return ""
    return "/".join(shared) or ("/" if directories[0].startswith("/") else "")
