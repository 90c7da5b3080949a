"""Readers of shards take linear time, whatever the bytes are. Bounds are ten times what was measured here."""

from __future__ import annotations

import bz2
import gzip
import io
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fastload.errors import DecodeError
from fastload.formats.pieces import Inflater, zstd
from fastload.formats.tar import TarSplitter
from tests.sharddata import split

PIECE = 1 << 20


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Processor time, so that a busy machine fails no test."""
    before = time.process_time()
    yield
    took = time.process_time() - before
    assert took < seconds, f"{took:.1f} s of processor time"


def pieces(data: bytes, size: int = PIECE) -> Callable[[], bytes | None]:
    parts = iter([data[at : at + size] for at in range(0, len(data), size)])
    return lambda: next(parts, None)


def inflated(data: bytes, size: int = PIECE) -> bytes:
    inflater = Inflater(pieces(data, size))
    return b"".join(bytes(part) for part in iter(inflater, None))


def member(name: str, body: bytes = b"", kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = len(body), kind
    return info.tobuf(tarfile.USTAR_FORMAT) + body + bytes(-len(body) % 512)


MEMBERS = {
    "gzip": gzip.compress(b"a", mtime=0),
    "empty gzip": gzip.compress(b"", mtime=0),
    "gzip and a zero": gzip.compress(b"a", mtime=0) + b"\0",
    "gzip and zeros": gzip.compress(b"a", mtime=0) + bytes(1000),
    "bzip2": bz2.compress(b"a"),
}


# Those of gzip with a byte of content take the way of the empty ones and of those before zeros.
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.stress] * (kind == "gzip")) for kind in MEMBERS]
)
def test_many_small_members_take_linear_time(kind: str) -> None:
    """4 MiB of them took 8 s and more: the end of each member copied all that followed."""
    count = (4 << 20) // len(MEMBERS[kind])
    with within(4):
        assert inflated(MEMBERS[kind] * count, 4 << 20) == b"a" * count * (kind != "empty gzip")


def test_many_empty_zstd_frames_take_linear_time() -> None:
    frame = zstd().compress(b"")
    with within(4):
        assert inflated(frame * ((1 << 19) // len(frame))) == b""


@pytest.mark.parametrize("size", [7, 1000, 1 << 20])
@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lambda data: zstd().compress(data)])
def test_members_of_all_sizes_are_inflated_whole(compress: Callable[[bytes], bytes], size: int) -> None:
    bodies = [bytes([at]) * length for at, length in enumerate((0, 1, 1023, 1024, 1025, 5000, 70_000))]
    random_like = bytes(at * at % 251 for at in range(3000))
    data = b"".join(compress(body) for body in [*bodies, random_like, *bodies])
    assert inflated(data, size) == b"".join([*bodies, random_like, *bodies])


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K", b"X"])
def test_chain_of_extended_headers_is_refused(kind: bytes) -> None:
    """Each was parsed again for each that followed: a chain of 2 MB took 27 s."""
    chain = member("p", kind=kind) * (1 << 14)
    with within(4):
        records = split(TarSplitter, member("a.txt", b"1") + chain + member("b.txt", b"2"))
    assert isinstance(records[-1].error, DecodeError) and "extended headers" in str(records[-1].error)


def test_bytes_of_extended_headers_are_limited_together() -> None:
    first, last = member("a.txt", b"1"), member("b.txt", b"2")
    chain = member("p", b"1000 comment=" + b"x" * 986 + b"\n", kind=b"g") * 2
    assert [record.error for record in split(TarSplitter, first + chain + last)] == [None] * 2
    large = member("p", bytes(700_000), kind=b"K") * 2
    assert "extended headers" in str(split(TarSplitter, first + large + last)[-1].error)


def test_directories_within_a_sample_take_linear_time() -> None:
    """They span many pieces, and each header asked for a byte more of one joined copy."""
    data = member("a.txt", b"1") + member("folder", kind=tarfile.DIRTYPE) * (1 << 16) + member("a.cls", b"2")
    with within(6):
        (record,) = split(TarSplitter, data)
    assert record.error is None and record.size == len(data)


def test_headers_of_every_writer_are_read() -> None:
    """GNU's two long names and pax's headers for name, link and time are far below the limit."""
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=form, pax_headers={"comment": "c" * 500}) as tar:
            info = tarfile.TarInfo("n" * 3000 + ".txt")
            info.size, info.mtime, info.uname = 3, 1.5, "u" * 40
            tar.addfile(info, io.BytesIO(b"abc"))
        (record,) = split(TarSplitter, file.getvalue())
        assert record.error is None
