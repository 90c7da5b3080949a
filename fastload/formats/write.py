"""Writers of shards and of the index files beside them.

An index file has the offset of each record, so the first epoch over such shards is random access already. The
same records give the same bytes, in any process and at any time.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from typing import Any, Protocol

from fastload.errors import ArgumentError
from fastload.formats.tar import BLOCK, sample_name
from fastload.formats.tfrecord import frame

__all__ = ["Sink", "TFRecordWriter", "TarWriter"]


class Sink(Protocol):
    """The destination of a shard's bytes, such as a file."""

    def write(self, data: Any, /) -> Any: ...


class TFRecordWriter:
    """Writes the records of one TFRecord file to `sink`.

    Attributes:
        size: bytes written so far.
        samples: records written so far.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._index: list[str] = []
        self.size = self.samples = 0

    def write(self, record: Any) -> None:
        """Append a record: bytes, or another buffer of bytes; for example what `encode_example` returns."""
        start = self.size
        before, after = frame(record)
        for part in (before, record, after):
            self._sink.write(part)
            self.size += len(part)
        self._index.append(f"{start} {self.size - start}\n")
        self.samples += 1

    def close(self) -> None:
        """Finish the file. A TFRecord file has no end marker, so nothing is written."""

    def index(self) -> bytes:
        """Lines "offset size" of the records with their framing, as tfrecord2idx writes them."""
        return "".join(self._index).encode()


class TarWriter:
    """Writes the samples of one WebDataset tar to `sink`: its members lie together, as `key.extension`.

    Headers are plain ustar (pax where a name or size asks for it), with time 0, owner 0 and mode 0644.

    Attributes:
        size: bytes written so far.
        samples: samples written so far.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._index: list[str] = []
        self._keys: set[str] = set()
        self.size = self.samples = 0

    def write(self, key: str, members: Mapping[str, Any]) -> None:
        """Append a sample.

        Args:
            key: its name. It has no "." after its last "/", and no white space, which would break the index.
            members: extension -> bytes, or another buffer of bytes. Extensions are lower-case.

        Raises:
            ArgumentError: readers would see another sample or none; or the key was written before.
        """
        if not members or key in self._keys:
            why = "was written already" if members else "has no members"
            raise ArgumentError(f"sample {key!r} {why}", key=key)
        line = []
        for extension, content in members.items():
            name = f"{key}.{extension}"
            plain = name.isprintable() and "\\" not in name and len(name.split()) == 1
            if sample_name(name) != (key, extension) or not plain:
                raise ArgumentError(
                    f"member {name!r} would not be read as key {key!r} and extension {extension!r}: a key "
                    "has no '.' after its last '/', an extension is lower-case, and neither has white space, "
                    "control characters or backslashes",
                    key=key,
                )
            self._write_header(name, len(content))
            line.append(f"{extension} {self.size} {len(content)} {name}")
            self._put(content)
            self._put(bytes(-len(content) % BLOCK))
        self._keys.add(key)
        self._index.append(" ".join(line) + "\n")
        self.samples += 1

    def close(self) -> None:
        """Write the end marker, padded to a whole tar record."""
        self._put(bytes(2 * BLOCK + -(self.size + 2 * BLOCK) % tarfile.RECORDSIZE))

    def index(self) -> bytes:
        """The index in wds2idx's format 1.2: per sample "extension offset size name" of each member."""
        return f"v1.2 {self.samples}\n".encode() + "".join(self._index).encode()

    def _write_header(self, name: str, size: int) -> None:
        header = tarfile.TarInfo(name)
        header.size = size
        self._put(header.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict"))

    def _put(self, data: Any) -> None:
        self._sink.write(data)
        self.size += len(data)
