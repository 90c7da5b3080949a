"""TFRecord files, and the tf.train.Example in a record, without TensorFlow or protobuf.

    uint64 length | uint32 masked CRC32C of the length | data | uint32 masked CRC32C of the data

Little-endian, read in pieces. A CRC is masked by a rotation and a constant
(tensorflow/core/lib/hash/crc32c.h). Both are always checked. After a good CRC of the length the offset of the
next record is certain, so bad data costs one record. A bad one ends the shard: the format has no mark by
which to find the next record.

The crc32c package is used. google-crc32c was rejected: it takes `bytes` only, and a copy of every record
costs more than its checksum (8.4 against 5.1 us for 138 KB).

An Example is four nested messages:

    Example { 1: Features }                    Feature { 1: BytesList | 2: FloatList | 3: Int64List }
    Features { 1: map<string, Feature> }       BytesList { 1: bytes... }  FloatList { 1: float... }
    map entry { 1: key  2: value }             Int64List { 1: varint... }    packed or not

Source: tensorflow/core/example/{example,feature}.proto and protobuf's encoding guide. Unknown fields are
skipped; where a name or list repeats, the last one counts. Every length is checked against the message
around it, and no allocation depends on a length alone.

The index file of NVIDIA DALI's tfrecord2idx has a line "offset size" per record, the size with its framing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ArgumentError, DecodeError
from fastload.formats.pieces import (
    HEAD,
    Offsets,
    Record,
    Sink,
    Splitter,
    check_offsets,
    hint,
    masked_crc,
    too_large,
    varint,
)

HEADER = 12
FOOTER = 4
_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")


def frame(data: Any) -> tuple[bytes, bytes]:
    """Return (header, footer) of a record with this data."""
    length = struct.pack("<Q", len(data))
    return length + _FOOTER.pack(masked_crc(length)), _FOOTER.pack(masked_crc(data))


def unframe(record: memoryview) -> memoryview:
    """Return the data of one whole record.

    Raises:
        DecodeError: `record` is not exactly one record.
    """
    if len(record) < HEADER + FOOTER:
        raise DecodeError(f"a TFRecord has at least {HEADER + FOOTER} bytes, found {len(record)}")
    length = _checked_length(record[:HEADER])
    if length != len(record) - HEADER - FOOTER:
        raise DecodeError(
            f"the record has {length:,} bytes of data, but the index says {len(record) - HEADER - FOOTER:,}: "
            "the index does not belong to this shard; write it again"
        )
    return _checked_data(record)


class TFRecordSplitter(Splitter):
    """See `Splitter`."""

    def __init__(self, offset: int, end: int | None) -> None:
        super().__init__(offset, end)
        self._size = 0  # of the record whose header was read

    def next(self) -> Record | None:
        pieces = self._pieces
        if self.over:
            return None
        if not self._size:
            header = pieces.peek(HEADER)
            if header is None:
                return self._cut() if pieces.closed and pieces.available else None
            try:
                self._size = self._fitting(_checked_length(header)) + HEADER + FOOTER
            except DecodeError as error:
                head = pieces.peek(min(HEAD, pieces.available)) if not pieces.offset else None
                return self._last(DecodeError(error.message + hint(head)) if head is not None else error)
        size = self._size
        record = pieces.peek(size)
        if record is None:
            return self._cut() if pieces.closed else None
        self._size = 0
        offset = pieces.offset
        pieces.skip(size)
        try:
            return Record(offset, size, _checked_data(record))
        except DecodeError as error:
            return Record(offset, size, None, error)

    def _fitting(self, length: int) -> int:
        if self._end is None:
            if length > self.max_inflated:
                raise DecodeError(too_large("a record", length, self.max_inflated))
        elif length > self._end - self._pieces.offset - HEADER - FOOTER:
            raise DecodeError(
                f"a record of {length:,} bytes begins {self._end - self._pieces.offset:,} bytes before the "
                "end of the shard: the shard was cut"
            )
        return length

    def _cut(self) -> Record:
        return self._last(
            DecodeError(
                f"the shard was cut: it ends {self._pieces.available:,} bytes into a record"
                + (f" of {self._size:,}" if self._size else "")
            )
        )


def _checked_length(header: memoryview) -> int:
    length, crc = _HEADER.unpack(header)
    if masked_crc(header[:8]) != crc:
        raise DecodeError("bad CRC of a record's length, so the start of the next record is unknown")
    return int(length)


def _checked_data(record: memoryview) -> memoryview:
    data = record[HEADER:-FOOTER]
    if masked_crc(data) != _FOOTER.unpack(record[-FOOTER:])[0]:
        raise DecodeError(f"bad CRC of a record's {len(data):,} bytes of data")
    return data


# Name of a feature -> bytes, str, int or float for exactly one value; a list of one of these, such as [int],
# for any number: a list of bytes or str, an int64 array, a float32 array.
Spec: TypeAlias = Mapping[str, Any]

_KINDS = {bytes: 1, str: 1, float: 2, int: 3}
_NAMES = {1: "bytes", 2: "float", 3: "int"}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def check_spec(features: Spec) -> None:
    """Raise `ArgumentError` unless `features` is a spec."""
    if not isinstance(features, Mapping) or not features:
        raise ArgumentError(f"fields must be a dict of name: type, found {features!r}")
    for name, wanted in features.items():
        one = wanted[0] if isinstance(wanted, list) and len(wanted) == 1 else wanted
        if not isinstance(name, str) or not isinstance(one, type) or one not in _KINDS:
            raise ArgumentError(
                f"fields[{name!r}] must be bytes, str, int, float, or a list of one of these such as "
                f"[int], found {wanted!r}"
            )


def parse_example(record: memoryview, features: Spec, *, lacking: bool = False) -> dict[str, Any]:
    """Return the wanted features of one serialised Example, in the order of the spec.

    Single bytes come as views of the record.

    Args:
        lacking: leave out features that are missing, and those of one value that have none.

    Raises:
        DecodeError: not an Example; or a wanted feature is missing, is of another kind, or has no single
        value.
    """
    try:
        found = _features(record, features)
        return {
            name: _value(name, wanted, found)
            for name, wanted in features.items()
            if not (lacking and _lacks(name, wanted, found))
        }
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, DecodeError):
            raise
        raise DecodeError(f"not a tf.train.Example: {error}") from error


def read_example(record: memoryview) -> dict[str, list[memoryview] | NDArray[Any]]:
    """Return all features of an Example: a list of views of the record, an int64 or float32 array.

    A feature without a list has no kind and becomes an empty list.

    Raises:
        DecodeError: not an Example.
    """
    try:
        found = _features(record, None)
        return {name: [] if values is None else values for name, (_, values) in found.items()}
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise DecodeError(f"not a tf.train.Example: {error}") from error


def _lacks(name: str, wanted: Any, found: Mapping[str, tuple[int, Any]]) -> bool:
    if name not in found:
        return True
    number, values = found[name]
    return not isinstance(wanted, list) and (number == 0 or not len(values))


def _value(name: str, wanted: Any, found: Mapping[str, tuple[int, Any]]) -> Any:
    several = isinstance(wanted, list)
    kind = wanted[0] if several else wanted
    if name not in found:
        raise DecodeError(f"the Example has no feature {name!r}; it has {', '.join(sorted(found)) or 'none'}")
    number, values = found[name]
    if number == 0:  # a feature without any list is an empty list of any kind
        values = np.empty(0, np.int64 if kind is int else np.float32) if kind in (int, float) else []
    elif number != _KINDS[kind]:
        raise DecodeError(f"feature {name!r} is a list of {_NAMES[number]}, not of {kind.__name__}")
    if not several and len(values) != 1:
        raise DecodeError(
            f"feature {name!r} has {len(values)} values, but fields= says one; "
            f"[{kind.__name__}] takes any number"
        )
    if kind is str:
        values = [str(value, "utf-8") for value in values]
    elif kind is bytes and several:
        values = [bytes(value) for value in values]
    if several:
        return values
    return values[0] if kind in (bytes, str) else kind(values[0])


def _features(record: memoryview, wanted: Spec | None) -> dict[str, tuple[int, Any]]:
    """Return name -> (kind, values) of the wanted features; `wanted` None: of all."""
    found: dict[str, tuple[int, Any]] = {}
    for number, wire, features in _fields(record):
        if number != 1 or wire != _BYTES:
            continue
        for number, wire, entry in _fields(features):
            if number != 1 or wire != _BYTES:
                continue
            name, feature = "", memoryview(b"")
            for number, wire, content in _fields(entry):
                if wire == _BYTES and number == 1:
                    name = str(content, "utf-8")
                elif wire == _BYTES and number == 2:
                    feature = content
            found[name] = _feature(feature) if wanted is None or name in wanted else (0, None)
    return found


def _feature(feature: memoryview) -> tuple[int, Any]:
    kind, values = 0, memoryview(b"")
    for number, wire, content in _fields(feature):
        if wire == _BYTES and number in _NAMES:
            kind, values = number, content
    if kind == 1:
        return kind, [content for number, wire, content in _fields(values) if (number, wire) == (1, _BYTES)]
    if kind == 2:
        return kind, _floats(values)
    if kind == 3:
        return kind, _ints(values)
    return 0, None


def _floats(values: memoryview) -> NDArray[np.float32]:
    parts = [
        content for number, wire, content in _fields(values) if number == 1 and wire in (_BYTES, _FIXED32)
    ]
    if any(len(part) % 4 for part in parts):
        raise ValueError("the size of a packed list of floats is not a multiple of 4 bytes")
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    return np.frombuffer(data, "<f4").astype(np.float32)


def _ints(values: memoryview) -> NDArray[np.int64]:
    found: list[int] = []
    for number, wire, content in _fields(values):
        if number == 1 and wire == _VARINT:
            found.append(content)
        elif number == 1 and wire == _BYTES:
            at, stop = 0, len(content)
            while at < stop:
                value, at = varint(content, at)
                found.append(value)
    return np.array(found, np.uint64).view(np.int64)


def _fields(message: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Return (field number, wire type, content) of a message: an int, or a view of the bytes."""
    at, stop = 0, len(message)
    content: Any
    while at < stop:
        tag, at = varint(message, at)
        wire = tag & 7
        if wire == _VARINT:
            content, at = varint(message, at)
        elif wire in (_BYTES, _FIXED32, _FIXED64):
            size, at = varint(message, at) if wire == _BYTES else (4 if wire == _FIXED32 else 8, at)
            if size > stop - at:
                raise ValueError(f"a field of {size} bytes, but only {stop - at} are left")
            content = message[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {wire}")
        if tag >> 3 == 0:
            raise ValueError("field number 0")
        yield tag >> 3, wire, content


def encode_example(features: Mapping[str, Any]) -> bytes:
    """Return one serialised Example, features in the order of their names, numbers packed.

    Args:
        features: name -> bytes (or another buffer), str, int, bool, float, or a list, tuple or
            one-dimensional array of these, all of one kind.

    Raises:
        ArgumentError: a value of another type, or an integer beyond 64 bits.
    """
    entries = [
        _field(1, _field(1, name.encode()) + _field(2, _encode_feature(name, features[name])))
        for name in sorted(features)
    ]
    return _field(1, b"".join(entries))


def _encode_feature(name: str, value: Any) -> bytes:
    values = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    if not isinstance(values, list | tuple):
        values = [values]
    if all(isinstance(one, bytes | bytearray | memoryview | str) for one in values):
        data = b"".join(_field(1, one.encode() if isinstance(one, str) else one) for one in values)
        return _field(1, data)
    if all(isinstance(one, int) for one in values):
        return _field(3, _field(1, b"".join(_encode_int(name, one) for one in values)))
    if all(isinstance(one, int | float) for one in values):
        return _field(2, _field(1, np.array(values, "<f4").tobytes()))
    raise ArgumentError(
        f"feature {name!r}: an Example keeps bytes, str, int and float and flat lists of one of these, "
        f"found {_type_names(values)}"
    )


def _type_names(values: Sequence[Any]) -> str:
    return ", ".join(sorted({type(one).__name__ for one in values}))


def _encode_int(name: str, value: int) -> bytes:
    if not -(2**63) <= value < 2**63:
        raise ArgumentError(f"feature {name!r}: {value} does not fit into 64 bits")
    return _encode_varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def _field(number: int, content: Any) -> bytes:
    return b"".join((bytes([number << 3 | _BYTES]), _encode_varint(len(content)), content))


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class TFRecordWriter:
    """Writes the records of one TFRecord file to `sink`.

    Attributes:
        size: bytes written so far.
        samples: records written so far.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._index: list[tuple[int, int]] = []
        self.size = self.samples = 0

    def write(self, record: Any) -> None:
        """Append a record: bytes, or another buffer of bytes; for example what `encode_example` returns."""
        start = self.size
        before, after = frame(record)
        for part in (before, record, after):
            self._sink.write(part)
            self.size += len(part)
        self._index.append((start, self.size - start))
        self.samples += 1

    def close(self) -> None:
        """Finish the file. A TFRecord file has no end marker, so nothing is written."""

    def index(self) -> bytes:
        """Return lines "offset size" of the records with their framing, as tfrecord2idx writes them."""
        return tfrecord_index(self._index)


def tfrecord_index(offsets: list[tuple[int, int]]) -> bytes:
    """Return the lines of tfrecord2idx: (offset, size) of each record."""
    return "".join(f"{start} {size}\n" for start, size in offsets).encode()


def parse_tfrecord_index(text: bytes, shard_size: int) -> Offsets:
    """Return the offsets of the records of a shard of that size.

    Raises:
        DecodeError: not such an index, or one of another shard.
    """
    try:
        numbers = np.array(text.split(), np.uint64).reshape(-1, 2)
    except (ValueError, OverflowError) as error:
        raise DecodeError(f"not an index of tfrecord2idx: {error}") from None
    return check_offsets(numbers, shard_size, whole=True)
