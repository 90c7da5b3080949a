"""The readers of TFRecord, Example, tar and index files: right, and harmless to hostile bytes."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import random
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.errors import DecodeError
from fastload.formats import tfrecord
from fastload.formats.pieces import Pieces, Record, is_compressed, kind_of
from fastload.formats.tar import TarSplitter, parse_wds_index, parse_wids, read_sample, sample_name
from fastload.formats.tfrecord import (
    TFRecordSplitter,
    TFRecordWriter,
    encode_example,
    frame,
    masked_crc,
    parse_example,
    parse_tfrecord_index,
    unframe,
)
from tests.sharddata import split

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def tfrecord_file(records: list[bytes]) -> bytes:
    file = io.BytesIO()
    writer = TFRecordWriter(file)
    for record in records:
        writer.write(record)
    return file.getvalue()


def member(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def tar_file(
    *members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT, end: bool = True
) -> bytes:
    blocks = []
    for info, content in members:
        blocks.append(info.tobuf(form, "utf-8", "surrogateescape"))
        blocks.append(content + bytes(-len(content) % 512))
    return b"".join(blocks) + (bytes(1024) if end else b"")


def samples(records: list[Record]) -> list[tuple[str, dict[str, bytes]]]:
    found = []
    for record in records:
        assert record.error is None and record.payload is not None, record.error
        key, members = read_sample(record.payload)
        found.append((key, {name: bytes(content) for name, content in members.items()}))
    return found


# --- Pieces -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_one_sequence(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        _check_pieces(rng, [rng.randbytes(rng.choice((0, 1, 5, 20))) for _ in range(rng.randrange(13))])


def _check_pieces(rng: random.Random, parts: list[bytes]) -> None:
    pieces, whole, at, fed = Pieces(5), b"".join(parts), 0, 0
    waiting = list(parts)
    while waiting or pieces.available:
        if waiting and rng.random() < 0.5:
            piece = waiting.pop(0)
            pieces.feed(memoryview(piece))
            fed += len(piece)
        n = rng.randint(0, 30)
        seen = pieces.peek(n)
        assert (seen is None) == (n > fed - at)
        if seen is not None:
            assert bytes(seen) == whole[at : at + n]
        step = rng.randint(0, pieces.available) if waiting else pieces.available
        pieces.skip(step)
        at += step
        assert pieces.offset == 5 + at and pieces.available == fed - at


# --- TFRecord ---------------------------------------------------------------------------------------------

RECORDS = [b"", b"a", b"b" * 1000, bytes(range(256)) * 40, b"end"]


def test_masked_crc_is_the_specified_one() -> None:
    """crc32c("123456789") = 0xE3069283, the check value of RFC 3720's polynomial; then the mask by hand."""
    crc = 0xE3069283
    assert masked_crc(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


@pytest.mark.parametrize("piece", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize("known", [True, False])
def test_tfrecord_round_trip(piece: int, known: bool) -> None:
    data = tfrecord_file(RECORDS)
    found = split(TFRecordSplitter, data, piece=piece, known=known)
    assert [bytes(record.payload or b"") for record in found] == RECORDS
    for record, content in zip(found, RECORDS, strict=True):
        assert bytes(unframe(memoryview(data)[record.offset : record.offset + record.size])) == content


def test_whole_pieces_are_not_copied() -> None:
    data = tfrecord_file([b"x" * 100_000] * 20)
    tracemalloc.start()
    found = split(TFRecordSplitter, data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 20 and peak < 300_000  # one record spans two pieces


@pytest.mark.parametrize("byte", range(16 + 4))
@pytest.mark.parametrize("known", [True, False])
def test_every_damaged_byte_of_a_record_is_found(byte: int, known: bool) -> None:
    """Length and its CRC: the shard ends there. Data and its CRC: one record is lost."""
    data = bytearray(tfrecord_file([b"first", b"data", b"third"]))
    at = 16 + 5 + byte
    data[at] ^= 0x10
    found = split(TFRecordSplitter, bytes(data), known=known)
    assert bytes(found[0].payload or b"") == b"first"
    assert found[1].error is not None and found[1].offset == 21
    if byte < 12:
        assert len(found) == 2 and "length" in found[1].error.message
        assert not known or found[1].offset + found[1].size == len(data)
    else:
        assert "data" in found[1].error.message and bytes(found[2].payload or b"") == b"third"


@pytest.mark.parametrize("known", [True, False])
def test_cut_shard_gives_its_whole_records(known: bool) -> None:
    data = tfrecord_file([b"first", b"second"])
    for length in range(len(data)):
        found = split(TFRecordSplitter, data[:length], known=known)
        good = [record for record in found if record.error is None]
        assert len(good) == (length >= 21)
        cut = length not in (0, 21)
        assert len(found) - len(good) == cut
        if cut:
            assert "cut" in str(found[-1].error)


@pytest.mark.parametrize("known", [True, False])
def test_length_beyond_the_shard_is_refused(known: bool) -> None:
    """A length of exabytes with a good CRC does not lead to an allocation."""
    header = struct.pack("<Q", 1 << 60)
    data = header + struct.pack("<I", masked_crc(header)) + b"x" * 100
    tracemalloc.start()
    found = split(TFRecordSplitter, data, known=known)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert len(found) == 1 and found[0].error is not None


@pytest.mark.stress
def test_damage_with_guard_removed_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of the data's CRC."""
    data = bytearray(tfrecord_file([b"data"]))
    data[12] ^= 1
    monkeypatch.setattr(tfrecord, "_checked_data", lambda record: record[12:-4])
    assert split(TFRecordSplitter, bytes(data))[0].error is None


@given(st.binary(max_size=300), st.integers(1, 64), st.booleans())
def test_arbitrary_bytes_are_no_shard(data: bytes, piece: int, known: bool) -> None:
    for make in (TFRecordSplitter, TarSplitter):
        for record in split(make, data, piece=piece, known=known):
            assert (record.payload is None) == (record.error is not None)


def test_unframe_refuses_more_or_less_than_one_record() -> None:
    data = memoryview(tfrecord_file([b"data"]))
    for wrong in (data[:3], data[:-1], memoryview(bytes(data) + b"x")):
        with pytest.raises(DecodeError):
            unframe(wrong)


def _tar_of(name: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    return file.getvalue()


ZLIB_LIKE = frame(b"x" * 0x0178)[0] + b"x" * 0x0178 + frame(b"x" * 0x0178)[1]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (gzip.compress(b"x" * 99, mtime=0), "gzip"),
        (gzip.compress(b"x" * 9999, 0, mtime=0), "gzip"),
        *((zlib.compress(b"x" * 99, level), "zlib") for level in (0, 1, 5, 6, 9)),
        (bz2.compress(b"x" * 99), "bzip2"),
        (lzma.compress(b"x" * 99), "xz"),
        (tfrecord_file([b"one", b"two"]), "tfrecord"),
        (ZLIB_LIKE, "tfrecord"),  # whose length begins as zlib data do
        (_tar_of("a.txt"), "tar"),
        (_tar_of("x^.txt"), "tar"),  # whose name does
        (_tar_of("\x1f\udc8b\x08.txt"), "tar"),
        (b"", ""),
        (b"\x1f\x8b", ""),
        (bytes(2000), ""),
        (b"\xff\xd8\xff" + b"z" * 600, ""),
    ],
)
def test_kind_of_a_file_by_its_first_bytes(data: bytes, kind: str) -> None:
    assert kind_of(memoryview(data)) == kind
    assert is_compressed(memoryview(data)) == (kind in ("gzip", "zlib"))


@pytest.mark.parametrize(
    ("make", "data", "says"),
    [
        (TFRecordSplitter, _tar_of("a.txt"), "it is a tar: read it with fastload.TarDataset"),
        (TarSplitter, tfrecord_file([b"x" * 600]), "a TFRecord file: read it with fastload.TFRecordDataset"),
        (TFRecordSplitter, bz2.compress(bytes(99)), "compressed by bzip2, which is not read"),
        (TarSplitter, lzma.compress(random.Random(0).randbytes(999)), "compressed by xz, which is not read"),
        (
            TFRecordSplitter,
            gzip.compress(b"z" * 40, mtime=0),
            "these are gzip data: decompress the file once",
        ),
    ],
)
def test_a_file_of_another_kind_is_named(make: Any, data: bytes, says: str) -> None:
    assert says in str(split(make, data)[0].error)


# --- Example ----------------------------------------------------------------------------------------------

SPEC = {"b": bytes, "s": str, "i": int, "f": float, "bb": [bytes], "ss": [str], "ii": [int], "ff": [float]}


@given(
    st.binary(max_size=50),
    st.text(max_size=20),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(width=32, allow_nan=False),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), max_size=5),
)
def test_example_round_trip(b: bytes, s: str, i: int, f: float, ii: list[int], ff: list[float]) -> None:
    given_ = {"b": b, "s": s, "i": i, "f": f, "bb": [b, b""], "ss": [s], "ii": ii or [0], "ff": ff or [0.0]}
    found = parse_example(memoryview(encode_example(given_)), SPEC)
    assert list(found) == list(SPEC)
    assert (bytes(found["b"]), found["s"], found["i"], found["f"]) == (b, s, i, f)
    assert found["bb"] == [b, b""] and found["ss"] == [s]
    assert found["ii"].tolist() == (ii or [0]) and found["ii"].dtype == np.int64
    assert found["ff"].tolist() == (ff or [0.0]) and found["ff"].dtype == np.float32


def field(number: int, content: bytes, wire: int = 2) -> bytes:
    return bytes([number << 3 | wire]) + (bytes([len(content)]) if wire == 2 else b"") + content


def example(feature: bytes, name: bytes = b"x") -> bytes:
    return field(1, field(1, field(1, name) + field(2, feature)))


def test_lists_that_are_not_packed_and_unknown_fields() -> None:
    ints = field(3, field(1, b"\x05", wire=0) + field(1, b"\x07\x08") + field(9, b"?"))
    assert parse_example(memoryview(example(ints)), {"x": [int]})["x"].tolist() == [5, 7, 8]
    floats = field(2, field(1, struct.pack("<f", 1.5), wire=5) + field(1, struct.pack("<2f", 2, 3)))
    unknown = field(7, b"skip me") + field(2, b"\1" * 8, wire=1) + field(3, b"\x01", wire=0)
    assert parse_example(memoryview(unknown + example(floats)), {"x": [float]})["x"].tolist() == [1.5, 2, 3]


@pytest.mark.parametrize(
    ("record", "spec", "says"),
    [
        (encode_example({"a": 1}), {"b": int}, "no feature 'b'; it has a"),
        (encode_example({"a": 1}), {"a": bytes}, "list of int, not of bytes"),
        (encode_example({"a": [1, 2]}), {"a": int}, "2 values"),
        (encode_example({"a": b"\xff"}), {"a": str}, "not a tf.train.Example"),
        (b"\x0a\xff\xff\xff\xff\x0f", {"a": int}, "bytes, but only 0 are left"),
        (b"\x0a\x7f", {"a": int}, "bytes, but only 0 are left"),
        (b"\xff" * 20, {"a": int}, "varint"),
        (b"\x0b", {"a": int}, "wire type 3"),
        (b"\x02\x00", {"a": int}, "field number 0"),
        (example(field(2, field(1, b"123"))), {"x": float}, "multiple of 4"),
        (b"", {"a": int}, "it has none"),
    ],
)
def test_errors_of_an_example_name_the_cause(record: bytes, spec: dict[str, Any], says: str) -> None:
    with pytest.raises(DecodeError, match=says):
        parse_example(memoryview(record), spec)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_example(data: bytes) -> None:
    for record in (data, encode_example({"x": 1}) + data, example(data[:100])):
        with pytest.raises(DecodeError):
            parse_example(memoryview(record), {"x": [float], "y": int})


# --- tar --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("piece", [100, 512, 5000, 1 << 20])
def test_tar_of_every_kind(form: int, piece: int) -> None:
    long = "d/" * 60 + "x" * 120 if form != tarfile.USTAR_FORMAT else "d/" * 60 + "x" * 80
    wanted = [
        ("a/0001", {"jpg": b"1" * 1000, "seg.png": b"", "cls": b"7"}),
        (long, {"txt": b"long name", "json": b"{}"}),
        ("b/ä" if form != tarfile.USTAR_FORMAT else "b/a", {"bin": bytes(512)}),
        ("c", {"jpg": b"x" * 3000}),
    ]
    members = [member("LICENSE", b"?" * 9000), member("a", type=tarfile.DIRTYPE)]
    for key, parts in wanted:
        members += [member(f"{key}.{name.upper()}", content) for name, content in parts.items()]
        members.append(member(f"{key.rpartition('/')[0] or 'z'}/.hidden.txt", b"not a sample's"))
        members.append(member("__MACOSX/a/0001.jpg", b"nor this") if key == "c" else member("README", b"?"))
    for known in (True, False):
        assert samples(split(TarSplitter, tar_file(*members, form=form), piece=piece, known=known)) == wanted


def test_sizes_in_base_256() -> None:
    info, content = member("a.bin", b"12345")
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\x80" + (5).to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    data = bytes(block) + content + bytes(507) + bytes(1024)
    assert samples(split(TarSplitter, data)) == [("a", {"bin": b"12345"})]


@pytest.mark.parametrize(
    "name", ["../../etc/passwd.jpg", "/etc/passwd.jpg", "a\\..\\b.jpg", "C:/x.jpg", "..jpg"]
)
def test_hostile_names_are_only_text(name: str) -> None:
    found = split(TarSplitter, tar_file(member(name, b"x")))
    key = sample_name(name)[0]
    assert [found_key for found_key, _ in samples(found)] == ([key] if key else [])


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (tarfile.LNKTYPE, "hard link"),
        (tarfile.SYMTYPE, "symbolic link"),
        (tarfile.CHRTYPE, "device"),
        (tarfile.BLKTYPE, "device"),
        (tarfile.FIFOTYPE, "FIFO"),
        (b"Z", "unknown type"),
    ],
)
def test_links_and_devices_make_their_sample_an_error(kind: bytes, says: str) -> None:
    data = tar_file(
        member("a.jpg", b"1"), member("b.jpg", type=kind, linkname="a.jpg"), member("c.jpg", b"3")
    )
    first, second, third = split(TarSplitter, data)
    assert says in str(second.error) and samples([first, third]) == [
        ("a", {"jpg": b"1"}),
        ("c", {"jpg": b"3"}),
    ]


def test_sparse_files_are_refused() -> None:
    sparse = member("a.bin", b"", type=b"S")
    assert "sparse" in str(split(TarSplitter, tar_file(sparse, form=tarfile.GNU_FORMAT))[0].error)
    pax = member("a.bin", b"x", pax_headers={"GNU.sparse.major": "1"})
    assert "sparse" in str(split(TarSplitter, tar_file(pax))[0].error)


def test_doubles_are_errors() -> None:
    twice = split(TarSplitter, tar_file(member("a.jpg", b"1"), member("a.JPG", b"2"), member("b.cls", b"3")))
    assert "two members 'jpg'" in str(twice[0].error) and twice[1].error is None
    apart = split(TarSplitter, tar_file(member("a.jpg"), member("b.jpg"), member("a.cls")))
    assert [record.error is None for record in apart] == [True, True, False]
    assert "twice" in str(apart[2].error)


def test_every_damaged_byte_of_a_header_is_found_or_harmless() -> None:
    """The checksum covers the whole header; its own field has several forms of one number."""
    data = tar_file(member("a.jpg", b"1"), member("b.jpg", b"2" * 600), member("c.jpg", b"3"))
    for byte in range(512):
        broken = bytearray(data)
        broken[1024 + byte] ^= 0x41
        found = split(TarSplitter, bytes(broken))
        good = [record for record in found if record.error is None]
        if len(good) == 3:
            assert 148 <= byte < 156 and samples(good)[1] == ("b", {"jpg": b"2" * 600})
        else:
            # Whether the sample before was complete, nobody can know: the damaged member may be its own.
            assert len(found) == 1
            assert any(word in str(found[0].error) for word in ("checksum", "not a number"))


def test_cut_tars() -> None:
    whole = tar_file(member("a.jpg", b"1"), member("b.jpg", b"2" * 600), end=False)
    for length in range(0, len(whole) + 1, 128):
        for known in (True, False):
            found = split(TarSplitter, whole[:length], known=known)
            good = samples([record for record in found if record.error is None])
            if length in (1024, len(whole)):  # between members: as a writer that was stopped leaves it
                assert len(good) == len(found) == {1024: 1, len(whole): 2}[length]
            elif not length:
                assert "the shard is empty" in str(found[-1].error)
            else:
                assert "cut" in str(found[-1].error) or "reaches" in str(found[-1].error)


def test_a_tar_ends_at_its_mark() -> None:
    data = tar_file(member("a.jpg", b"1")) + tar_file(member("b.jpg", b"2"))
    assert samples(split(TarSplitter, data)) == [("a", {"jpg": b"1"})]


def test_sizes_beyond_the_shard_are_refused() -> None:
    data = tar_file(member("a.jpg", size=1 << 50), form=tarfile.GNU_FORMAT)
    for known in (True, False):
        tracemalloc.start()
        (found,) = split(TarSplitter, data, known=known)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
        assert found.error is not None
    meta = member("x", b"9" * 600, type=tarfile.XHDTYPE)
    assert "pax" in str(split(TarSplitter, tar_file(meta, form=tarfile.USTAR_FORMAT))[0].error)
    huge = member("x", size=1 << 40, type=tarfile.XHDTYPE)
    assert "the limit" in str(split(TarSplitter, tar_file(huge, form=tarfile.GNU_FORMAT))[0].error)


@settings(max_examples=300)
@given(st.data())
def test_mutated_tars_never_crash_or_grow(data: st.DataObject) -> None:
    valid = bytearray(
        tar_file(
            member("é" * 90 + ".jpg", b"1" * 700), member("b.jpg", b"2"), member("b.cls", b"3"), end=False
        )
    )
    for _ in range(data.draw(st.integers(1, 6))):
        valid[data.draw(st.integers(0, len(valid) - 1))] = data.draw(st.integers(0, 255))
    mended = bytes(valid)
    if data.draw(st.booleans()):  # a header that was changed on purpose has the right sum
        block = bytearray(valid[:512])
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        mended = bytes(block) + mended[512:]
    for record in split(TarSplitter, mended, piece=data.draw(st.sampled_from([64, 1000, 10_000]))):
        if record.payload is not None:
            read_sample(record.payload)


def test_read_sample_refuses_other_offsets() -> None:
    data = tar_file(member("a.jpg", b"1"), member("a.cls", b"2"), member("b.jpg", b"3"))
    view = memoryview(data)
    assert samples([Record(0, 2048, view[:2048])]) == [("a", {"jpg": b"1", "cls": b"2"})]
    for wrong in (view[:3072], view[:700], view[512:1024], view[:0], view[4096:]):
        with pytest.raises(DecodeError):
            read_sample(wrong)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a/b.c/d.jpg", ("a/b.c/d", "jpg")),
        ("x.tar.GZ", ("x", "tar.gz")),
        ("./x.jpg", ("./x", "jpg")),
        ("noext", ("", "")),
        (".hidden.jpg", ("", "")),
        ("a/.hidden", ("", "")),
        ("x.", ("x", "")),
    ],
)
def test_names_are_split_as_webdataset_does(name: str, wanted: tuple[str, str]) -> None:
    assert sample_name(name) == wanted


# --- Index files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (b"0 10\n10 5", 14),
        (b"0 10\n9 6", 15),
        (b"0 10", 11),
        (b"0 0", 0),
        (b"10 5\n0 10", 15),
        (b"1", 1),
        (b"a b", 1),
        (b"-1 5", 4),
        (b"0 99999999999999999999", 10),
        (b"18446744073709551615 16", 15),
    ],
)
def test_an_index_that_does_not_fit_is_refused(text: bytes, size: int) -> None:
    with pytest.raises(DecodeError):
        parse_tfrecord_index(text, size)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"v1.3 1\njpg 512 1",
        b"v1.2 2\njpg 512 1 a",
        b"v1.2 1\njpg 512",
        b"v1.1 1\njpg x 1",
        b"v1.1 1\njpg 512 999999",
        b"v1.1 1\njpg 99999999999999999999 1",
        b"v1.1 " + b"1" * 5000,  # more digits than Python reads
    ],
)
def test_a_wds_index_that_does_not_fit_is_refused(text: bytes) -> None:
    with pytest.raises(DecodeError):
        parse_wds_index(text, 10_240)


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_no_index(data: bytes) -> None:
    readers: list[Callable[[], Any]] = [
        lambda: parse_tfrecord_index(data, 100),
        lambda: parse_wds_index(b"v1.2 1\n" + data, 100),
        lambda: parse_wids(data),
    ]
    for read in readers:
        with contextlib.suppress(DecodeError):
            read()


def test_wids() -> None:
    text = b'{"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": 3}, {"url": "b.tar"}]}'
    assert parse_wids(text) == [("a.tar", 3), ("b.tar", None)]


def test_frame_equals_the_writers_bytes() -> None:
    before, after = frame(b"data")
    assert before + b"data" + after == tfrecord_file([b"data"])
