"""What an attacker writes: of each reader's example, its harmful relatives. The same seed gives the same cases.

made        bombs, chains and deep nesting, made for one format
damaged     any file that is cut, doubled, or has other numbers at some places
retyped     JSON with another value, of another type or size, at one place
"""

from __future__ import annotations

import bz2
import copy
import functools
import gzip
import io
import json
import random
import re
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from fastload.formats.inflate import zstd
from fastload.formats.sample_log import _STEP, RunBegins, _framed, header
from tests.hostile import readers as of
from tests.hostile.readers import Files, Reader
from tests.photos import with_size

MB = 1 << 20
DEEP = 200_000
Attack = Callable[[], bytes | Files]  # the attacked file, or all files
BIG = [0, 1, 0x7F, 0xFF]
_WORDS = [-1, 0, 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 10**30, 1e308, float("nan"), "", "9" * 5000, "../../etc/passwd",
    "\x1b[31m\u202e\ud800", [], [[]], {}, {"a": 1}, ["x"] * 3,
]  # fmt: skip


def attacks(name: str, reader: Reader, rng: random.Random, few: int) -> Iterator[tuple[str, Attack]]:
    """(name, attack) of a reader: those made for it, and some of each random kind."""
    yield from made(name).items()
    data = reader.example()[reader.attacked]
    assert isinstance(data, bytes)
    for number in range(few):
        seed = rng.getrandbits(32)
        for kind, change in (("damaged", damaged), ("retyped", retyped)):
            if change is damaged or _json_of(data) is not None:
                yield f"{kind} {number}", functools.partial(change, data, seed)
        for kind, (inner, wrap) in _INNER.get(name, {}).items():
            yield f"{kind} {number}", lambda i=inner, w=wrap, s=seed: w(damaged(i(), s))


def damaged(data: bytes, seed: int) -> bytes:
    """The file, cut, doubled, or with other bytes at some places."""
    rng = random.Random(seed)
    kind = rng.choice(["cut", "doubled", "numbers", "numbers", "bytes", "bytes", "digits"])
    if kind == "cut" or not data:
        return data[: rng.choice([0, 1, len(data) // 2, rng.randrange(len(data) + 1), max(len(data) - 1, 0)])]
    if kind == "doubled":
        at, stop = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        return data[:stop] + data[at:stop] * rng.choice([1, 2, 50]) + data[stop:]
    if kind == "digits":
        found = list(re.finditer(rb"\d+", data[: 1 << 16]))
        if found:
            one = rng.choice(found)
            digits = rng.choice(
                [b"-1", b"0", b"9" * len(one[0]), b"9223372036854775808", b"9" * 5000, b"NaN", b"1e999"]
            )
            return data[: one.start()] + digits + data[one.end() :]
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        # Headers and tables stand at the beginning and at the end.
        reach = rng.choice([64, 1024, len(data)])
        at = rng.randrange(min(reach, len(data)))
        at = rng.choice([at, at, len(data) - 1 - at])
        if kind == "numbers":
            size, order = rng.choice([2, 4, 8]), rng.choice(["little", "big"])
            value = rng.choice(_WORDS) % (1 << 8 * size)
            changed[at : at + size] = value.to_bytes(size, order)[: len(data) - at]  # type: ignore[arg-type]
        else:
            changed[at] = rng.choice([0, 1, 255, 127, 128, rng.randrange(256)])
    return bytes(changed)


def retyped(data: bytes, seed: int) -> bytes:
    """The JSON with another value at one place, or without it, or with its name twice."""
    rng = random.Random(seed)
    told = copy.deepcopy(_json_of(data))
    way = rng.choice(list(_places(told)))
    inner = told
    for step in way[:-1]:
        inner = inner[step]
    kind = rng.choice(["odd", "odd", "odd", "gone", "deep", "many"])
    if not way:
        return json.dumps(rng.choice(ODD)).encode()
    if kind == "gone":
        del inner[way[-1]]
    else:
        odd = rng.choice(ODD) if kind == "odd" else [inner[way[-1]]] * 1000 if kind == "many" else "DEEP"
        inner[way[-1]] = odd
    return json.dumps(told).encode().replace(b'"DEEP"', b"[" * DEEP + b"]" * DEEP)


def _json_of(data: bytes) -> Any:
    if data[:1] not in (b"{", b"["):
        return None
    try:
        return json.loads(data)
    except ValueError:
        return None


def _places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield way
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        yield from _places(one, (*way, key))


# --- made for one format


def made(name: str) -> dict[str, Attack]:
    """What harms this format only."""
    found: dict[str, Attack] = {}
    for pattern, more in _MADE.items():
        if re.fullmatch(pattern, name):
            found |= more()
    return found


def tar_header(name: str, size: int, kind: bytes = b"0") -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def zeros(squeeze: Callable[[bytes], bytes], size: int, head: bytes = b"", tail: bytes = b"") -> bytes:
    """A file of many members that inflates to so many zeros."""
    return squeeze(head) + squeeze(bytes(16 * MB)) * (size // (16 * MB)) + squeeze(tail)


def _tar() -> dict[str, Attack]:
    good = tar_header("a.txt", 3) + b"abc".ljust(512, b"\0")
    end = bytes(1024)
    found: dict[str, Attack] = {
        f"chain of headers {kind.decode()}": lambda k=kind: tar_header("x", 0, k) * 3000 + good + end
        for kind in (b"x", b"g", b"L", b"K")
    }
    long = tar_header("x", 100_000, b"L") + b"n" * 100_352
    return found | {
        "chain of long names": lambda: long * 30 + good + end,
        "long pax": lambda: (
            tar_header("x", 900_000, b"x") + b"9 a=bcde\n" * 100_000 + bytes(224) + good + end
        ),
        "many small members": lambda: b"".join(tar_header(f"{n}.txt", 0) for n in range(2000)) + end,
        "one sample of many members": lambda: b"".join(tar_header(f"a.{n}", 0) for n in range(2000)) + end,
        "members of one name": lambda: good * 1000 + end,
        "size beyond the shard": lambda: tar_header("a.bin", 8**11 - 1) + end,
        "negative size": lambda: _negative() + end,
        "skipped members": lambda: tar_header(".x", 0) * 3000 + good + end,
        "name of dots": lambda: b"".join(tar_header("." * n + "/a.b", 0) for n in range(1, 90)) + end,
        "deep JSON": lambda: (
            tar_header("a.json", DEEP) + (b"[" * DEEP).ljust(-(-DEEP // 512) * 512, b"\0") + end
        ),
    }


def _negative() -> bytes:
    head = bytearray(tar_header("a.bin", 0))
    head[124:136] = b"\xff" * 12
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


def _gzip_bombs() -> dict[str, Attack]:
    size = 960 * MB
    return {
        "one huge member": lambda: zeros(gzip.compress, size, tar_header("a.bin", size), bytes(1024)),
        "empty members": lambda: gzip.compress(b"", mtime=0) * (2 * MB // 20) + gzip.compress(of.tar()),
        "zeros behind": lambda: gzip.compress(of.tar()) + bytes(4 * MB),
        "inflates without end": lambda: zeros(gzip.compress, size, of.tar()),
    }


def _record_bombs() -> dict[str, Attack]:
    size = 960 * MB
    head = struct.pack("<Q", size)
    return {
        "one huge record": lambda: zeros(gzip.compress, size, head + _masked(head)),
        "empty members": lambda: gzip.compress(b"", mtime=0) * (2 * MB // 20) + gzip.compress(of.tfrecord()),
    }


def _masked(data: bytes) -> bytes:
    """TFRecord's checksum of these bytes, which an attacker knows."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _records() -> dict[str, Attack]:
    found: dict[str, Attack] = {
        f"a record of {size}": lambda h=struct.pack("<Q", size): h + _masked(h) + bytes(64)
        for size in (2**31, 2**40, 2**63, 2**64 - 1)
    }
    many = b"\x0a\x00" * 100_000
    return found | {
        "empty records": lambda: of.tfrecord(*[b""] * 2000),
        "one sound size, no record": lambda: of.tfrecord()[:12],
        "an Example of empty features": lambda: of.tfrecord(many, b"\x0a\xc0\x9a\x0c" + many),
        "an Example of one name": lambda: of.tfrecord(
            b"\x0a" + _varint(len(one := b"\x0a\x07\x0a\x05label" * 20_000)) + one
        ),
        "a varint without end": lambda: of.tfrecord(b"\xff" * 100_000),
    }


def _varint(value: int) -> bytes:
    return (bytes([value & 127 | 128]) + _varint(value >> 7)) if value > 127 else bytes([value])


def _parquet() -> dict[str, Attack]:
    def bomb(value: Any, rows: int) -> bytes:
        images = repeated(value, rows)
        point = pa.ListArray.from_arrays(np.arange(0, 2 * rows + 1, 2, "i4"), np.ones(2 * rows))
        numbers = np.zeros(rows, "i8")
        columns = {"image": images, "label": numbers, "p": point, "key": images, "name": repeated("n", rows)}
        # Without Arrow's own schema the columns are no dictionaries, and each row holds the value.
        return of.parquet(pa.table(columns), row_group_size=rows, compression="zstd", store_schema=False)

    def repeated(value: Any, rows: int) -> Any:
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, "i4")), pa.array([value]))

    def odd(**columns: Any) -> bytes:
        return of.parquet(pa.table({"image": [b""], "label": [1], "p": [[1.0]], "key": ["k"]} | columns))

    nested: Any = pa.int8()
    for _ in range(300):
        nested = pa.list_(nested)
    return {
        "a large value in each row": lambda: bomb(b"y" * (4 * MB), 300),
        "a large text in each row": lambda: bomb("y" * (4 * MB), 300),
        "many rows of one value": lambda: bomb(b"x", 1_000_000),
        "deep types": lambda: odd(image=pa.array([None], nested)),
        "two columns of a name": lambda: of.parquet(
            pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["label", "label"])
        ),
        "a footer of 2 GB": lambda: b"PAR1" + bytes(64) + struct.pack("<I", 2**31 - 1) + b"PAR1",
        "many columns": lambda: odd(**{f"c{n}": [1] for n in range(1000)}),
    }


def _csv() -> dict[str, Attack]:
    return {
        "many columns": lambda: (
            b",".join([b"key,label"] + [b"c%d" % n for n in range(20_000)]) + b"\n" + b"1," * 20_001 + b"1\n"
        ),
        "two columns of a name": lambda: b"key,label,label\na,1,2\n",
        "an open quote": lambda: b'key,label\n"' + b"a,1\n" * 200_000,
        "a header of quotes": lambda: b'"' * 500_001 + b"\n1,2\n",
        "ragged rows": lambda: b"key,label\n" + b"a\na,1,2\n" * 1000,
        "a long value": lambda: b"key,label\n" + b"a" * (8 * MB) + b",1\n",
        "no bytes": lambda: b"\0" * 1000,
        "large numbers": lambda: b"key,label\na,9223372036854775808\nb,-9e999\nc,NaN\n",
    }


def _csv_bombs() -> dict[str, Attack]:
    line = b"a" * MB + b",1\n"
    return {
        "a bomb of long rows": lambda: gzip.compress(b"key,label\n") + gzip.compress(line * 16) * 60,
        "a bomb of short rows": lambda: (
            gzip.compress(b"key,label\n") + gzip.compress(b"a,1\n" * (4 * MB)) * 60
        ),
        "a bomb of zeros": lambda: zeros(gzip.compress, 960 * MB, b"key,label\n"),
        "empty members": lambda: (
            gzip.compress(b"", mtime=0) * (2 * MB // 20) + gzip.compress(b"key,label\na,1\n")
        ),
    }


def _json_bombs() -> dict[str, Attack]:
    line = b'{"key": "' + b"a" * MB + b'", "label": 1}\n'
    return {"a bomb": lambda: gzip.compress(line * 16) * 60}


def _json() -> dict[str, Attack]:
    row = b'{"key": "a", "label": %s}\n'
    return {
        "deep": lambda: row % (b"[" * DEEP + b"]" * DEEP),
        "deep array": lambda: b'[{"key": "a", "label": ' + b"[" * DEEP + b"]" * DEEP + b"}]",
        "deep objects": lambda: row % (b'{"a":' * DEEP + b"1" + b"}" * DEEP),
        "names twice": lambda: b'{"key": "a", "key": "b", "label": 1, "label": 2}\n',
        "many names": lambda: b"".join(b'{"key": "a", "label": 1, "n%d": 1}\n' % n for n in range(3000)),
        "types that change": lambda: row % b"1" + row % b'"x"' + row % b"[1]" + row % b"null",
        "large numbers": lambda: row % (b"9" * 5000) + row % b"1e999" + row % b"NaN",
        "array of a large number": lambda: b'[{"key": "a", "label": ' + b"9" * 5000 + b"}]",
        "surrogates": lambda: row.replace(b'"a"', rb'"\ud800"') % b"1",
        "array of surrogates": lambda: b"[" + row.replace(b'"a"', rb'"\ud800"') % b"1" + b"]",
    }


def _deep_text() -> dict[str, Attack]:
    return {
        "deep": lambda: b"[" * DEEP,
        "deep objects": lambda: b'{"a":' * DEEP,
        "a long number": lambda: b"[" + b"9" * 5000 + b"]",
    }


def _header(text: str) -> bytes:
    """A .npy file with this header."""
    body = text.encode() + b"\n"
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(body)) + body + bytes(256)


def _npy() -> dict[str, Attack]:
    shapes = {"deep": "(" * 400 + ")" * 400, "negative": "(-5,)", "large": "(9223372036854775808,)", "text": "('x',)",
              "many": "(" + "1," * 400 + ")", "float": "(1.5,)", "product": "(4294967296, 4294967296)", "zero": "(0,)"}  # fmt: skip
    line = "{'descr': '<u2', 'fortran_order': False, 'shape': %s, }"
    found: dict[str, Attack] = {
        f"a shape: {name}": lambda s=shape: _header(line % s) for name, shape in shapes.items()
    }
    types = ["|O", "<M8[s]", "V99999999", "[('a', '<u2')]", "<u2,<u2", "9" * 300, "<f8", "|S2147483647"]
    found |= {
        f"type {one[:12]}": lambda t=one: _header(
            f"{{'descr': {t!r}, 'fortran_order': False, 'shape': (4,)}}"
        )
        for one in types
    }
    return found


def _llm_c() -> dict[str, Attack]:
    return {
        f"{tokens} tokens": lambda t=tokens: (
            np.array([20240520, 1, t], "<i4").tobytes().ljust(1024, b"\0") + bytes(128)
        )
        for tokens in (-1, 0, 2**31 - 1)
    }


def _pictures(name: str) -> dict[str, Attack]:
    jpeg = of.pictures()["progressive" if name == "progressive" else "jpeg"]
    scan = jpeg.index(b"\xff\xda")
    return {
        "65500 x 65500": lambda: with_size(jpeg, 65500, 65500),
        "0 x 0": lambda: with_size(jpeg, 0, 0),
        "13000 x 13000": lambda: with_size(jpeg, 13000, 13000),
        "chain of markers": lambda: jpeg[:2] + b"\xff\xe2\x00\x02" * 250_000 + jpeg[2:],
        "chain of EXIF": lambda: jpeg[:2] + b"\xff\xe1\x00\x08Exif\0\0" * 100_000 + jpeg[2:],
        "fill bytes": lambda: jpeg[:2] + b"\xff" * 1_000_000 + jpeg[2:],
        "chain of scans": lambda: jpeg[:-2] + jpeg[scan:-2] * 1000 + jpeg[-2:],
        "chain of tables": lambda: jpeg[:2] + (b"\xff\xdb\x00\x43\x00" + b"\1" * 64) * 10_000 + jpeg[2:],
    }


def _png() -> dict[str, Attack]:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def sized(width: int, height: int, data: bytes = b"", extra: bytes = b"", depth: int = 8) -> bytes:
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))
        return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")

    plain = zlib.compress(bytes(16 * 49))
    return {
        "2**31 x 2**31": lambda: sized(2**31 - 1, 2**31 - 1),
        "13000 x 13000": lambda: sized(13000, 13000, zlib.compress(bytes(1000))),
        "a row too long": lambda: sized(2**31 - 1, 1, plain),
        "a bomb of text": lambda: sized(
            16, 16, plain, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(256 * MB)))
        ),
        "a bomb of a profile": lambda: sized(
            16, 16, plain, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(256 * MB)))
        ),
        "a bomb of pixels": lambda: sized(16, 16, zlib.compress(bytes(256 * MB))),
        "chain of chunks": lambda: sized(16, 16, plain, chunk(b"tEXt", b"a\0b") * 50_000),
        "an odd depth": lambda: sized(16, 16, plain, depth=255),
    }


def _boxes() -> dict[str, Attack]:
    file = of.pictures().get("avif", of.jpeg())
    size = int.from_bytes(file[:4], "big")
    deep = b""
    for _ in range(2000):
        deep = struct.pack(">I4s", len(deep) + 8, b"meta") + deep
    return {
        "chain of boxes": lambda: file[:size] + struct.pack(">I4s", 8, b"free") * 100_000 + file[size:],
        "boxes of no bytes": lambda: file[:size] + struct.pack(">I4s", 0, b"free") * 1000 + file[size:],
        "large boxes": lambda: file[:size] + struct.pack(">I4sQ", 1, b"meta", 2**63) + file[size:],
        "nested boxes": lambda: file[:size] + deep + file[size:],
        "large picture": lambda: _sized_box(file, 2**31, 2**31),
        "13000 x 13000": lambda: _sized_box(file, 13000, 13000),
    }


def _sized_box(file: bytes, width: int, height: int) -> bytes:
    at = file.find(b"ispe") + 8
    return file[:at] + struct.pack(">II", width & 0xFFFFFFFF, height & 0xFFFFFFFF) + file[at + 8 :]


def _blocks() -> dict[str, Attack]:
    def block(tag: bytes, dtype: bytes, shape: tuple[int, ...], data: bytes = b"") -> bytes:
        out = tag + bytes([len(dtype), len(shape)]) + dtype + struct.pack(f"<{len(shape)}Q", *shape)
        return out + b"\0" * (-len(out) % 64) + data

    shapes = [(0, 2**62, 9), (0, 2**63), (2**62,), (2**64 - 1, 0), (1,) * 60, (0,) * 255]
    types = [(b"x", b"float32"), (b"a", b"<f4"), (b"a", b"|U0"), (b"a", b"|V0"), (b"a", b"<M8[7D]"), (b"g", b"<i4"),
             (b"x", b"quint8"), (b"x", b"bits16"), (b"x", b"dtype"), (b"x", b"uint4"), (b"x", b"complex32")]  # fmt: skip
    found: dict[str, Attack] = {
        f"{tag.decode()} {kind.decode()} {str(shape)[:24]}": lambda t=tag, k=kind, s=shape: block(t, k, s)
        for tag, kind in types for shape in shapes
    }  # fmt: skip
    for depth in (10, 100, 10_000):
        found[f"{depth} lists in lists"] = lambda d=depth: b"l\1\0\0\0" * d + b"N"
    return found | {
        "a promised list": lambda: b"l\xff\xff\xff\xff",
        "a list as a key": lambda: b"m\1\0\0\0" + b"l\0\0\0\0" + b"N",
        "names twice": lambda: b"m\2\0\0\0" + b"s\1\0\0\0aN" * 2,
        "a long number": lambda: b"I" + struct.pack("<I", 5000) + b"9" * 5000,
        "a huge number": lambda: b"I" + struct.pack("<I", MB) + b"0x" + b"f" * (MB - 2),
    }


def _rows() -> dict[str, Attack]:
    values: list[Any] = [1, None, [1, 2], ({}, [1]), ({"a": 1}, {"b": "x"}), ({"a": 1}, {"b": -5}), (1, {"b": 0}),
                         ({"a": 1}, {"b": 2.0}), ({}, {"b": 2**70}), ({}, {1: 0}), ([], {"b": 0})]  # fmt: skip

    def row(value: Any) -> bytes:
        head = bytes(of.dump(value))
        return head + struct.pack("<I", len(head))

    return {f"a head {value!r:.30}": lambda v=value: row(v) for value in values}


def _answers() -> dict[str, Attack]:
    words = ["a", "?", "'", "<Error>", "<Code>", "://", "a://", "?a=", "@", "<Token-1>", "<Message>", "9", "<a", "<a>", " ",
             "s3.", "AccessDenied ", "status code: ", "\x1b[31m", "path ", "1 s "]  # fmt: skip
    return {f"a page of {word!r}": lambda w=word: (w * 200_000)[:200_000].encode() for word in words}


def _packs() -> dict[str, Attack]:
    heads = {
        "deep": b"[" * DEEP, "a list": b"[]", "sources: text": b'{"sources": "x"}', "sources: null": b'{"sources": null}',
        "sources: a long number": b'{"sources": [1' + b"0" * 5000 + b"]}", "sources: NaN": b'{"sources": [NaN]}',
        "sources: lists": b'{"sources": [[1]]}', "many sources": json.dumps({"sources": list(range(100_000))}).encode(),
    }  # fmt: skip
    good = of.packed()
    found: dict[str, Attack] = {
        f"head: {name}": lambda h=head: good | of.packed(h, payload=b"y" * 99) for name, head in heads.items()
    }
    lengths = {"beyond the pack": [2**32 - 1], "2**32 records' sum": [2**31, 2**31], "none": [0] * 1000}
    for name, sizes in lengths.items():
        records = np.array(
            [(bytes([n % 256] * 16), size, 0) for n, size in enumerate(sizes)], of.pack._RECORDS
        )
        found[f"lengths: {name}"] = lambda r=records: good | of.packed(records=r)
    size = 1 << 30
    return found | {
        "an index of 1 GB": lambda: good | {f"packs/{'0' * 32}-{size}.pack": size},
        "eight indexes of 256 MB": lambda: (
            good | {f"packs/{n:032x}-{size >> 2}.pack": size >> 2 for n in range(8)}
        ),
        "names of other sizes": lambda: (
            good | {f"packs/{'0' * 32}-{n}.pack": 100 for n in (0, 1, 23, 24, 101, 10**12 - 1)}
        ),
        "one record twice": lambda: (
            good | of.packed(records=np.array([(bytes(16), 9, 0)] * 11, of.pack._RECORDS))
        ),
    }


def _logs() -> dict[str, Attack]:
    row = np.array([1], "<i4").tobytes() + np.array([7], "<u8").tobytes()

    def run(**other: Any) -> bytes:
        told = json.dumps({"run_step": 0, "time": 1.0, "world_size": 1} | other).encode()
        return _framed(b"R", told)

    def step(run_step: int = 0, count: int = 1, width: int = 4, body: bytes = row) -> bytes:
        return _framed(b"S", _STEP.pack(run_step, 0, 0, count, width) + body)

    frames = {
        "a width of 3": run() + step(width=3), "a width of 0": run() + step(width=0), "a short step": run() + step(count=9, body=b""),
        "many rows promised": run() + step(count=2**32 - 1), "no step": run() + _framed(b"S", b""), "run step 2**63": run() + step(2**63),
        "an unknown entry": _framed(b"R", b'{"x": 1}') + step(), "a list": _framed(b"R", b"[]") + step(), "no JSON": _framed(b"R", b"\xff") + step(),
        "deep": _framed(b"R", b"[" * DEEP) + step(), "a kind": _framed(b"Q", b"x") + step(),
        "many steps": run() + b"".join(step(n) for n in range(3000)), "many runs": (run() + step()) * 1500,
    }  # fmt: skip
    for name in ("run_step", "time", "world_size"):
        for odd in ODD:
            frames[f"{name}: {odd!r:.20}"] = run(**{name: odd}) + step()
    return {name: lambda f=frame: header(0) + f for name, frame in frames.items()}


def _squeezed_bombs(name: str, squeeze: Callable[[bytes], bytes]) -> dict[str, Attack]:
    reader = of.readers()[name]

    def told(body: bytes, size: int) -> Files:
        """With an index.json that says the sizes which are there."""
        index = json.loads(reader.example()["index.json"])
        for shard in index.get("shards", [])[:1]:
            shard["zip_data"]["bytes"], shard["raw_data"]["bytes"] = len(body), size
        for chunk in index.get("chunks", [])[:1]:
            chunk["chunk_bytes"] = size
        return reader.example() | {reader.attacked: body, "index.json": json.dumps(index).encode()}

    size = 960 * MB
    whole = struct.pack("<IIII", 1, 12, size, 0)  # one sample in all of it
    empty = squeeze(b"")
    return {
        "a bomb": lambda: told(zeros(squeeze, size, whole), size),
        "empty members": lambda: told(empty * (2 * MB // len(empty)), size),
    }


_MADE: dict[str, Callable[[], dict[str, Attack]]] = {
    "tar": _tar,
    r"tar\.gz": _gzip_bombs,
    r"tfrecord": _records,
    r"tfrecord\.gz": _record_bombs,
    "parquet|table pq": _parquet,
    "table csv": _csv,
    r"table csv\.gz": _csv_bombs,
    "table jsonl|table json": _json,
    r"table jsonl\.gz": _json_bombs,
    "index of (mds|lit|wids).*|state": _deep_text,
    "npy": _npy,
    r"llm\.c": _llm_c,
    "jpeg": lambda: _pictures("jpeg"),
    "progressive": lambda: _pictures("progressive"),
    "png": _png,
    "avif|heic": _boxes,
    "sample": _blocks,
    "row": _rows,
    "answer": _answers,
    "pack": _packs,
    "sample log": _logs,
    "mds-gz": lambda: _squeezed_bombs("mds-gz", gzip.compress),
    "mds-bz2": lambda: _squeezed_bombs("mds-bz2", bz2.compress),
    "mds-zstd": lambda: _squeezed_bombs("mds-zstd", zstd().compress),
    "lit-chunk": lambda: _squeezed_bombs("lit-chunk", zstd().compress),
}


def _in_tar(data: bytes) -> bytes:
    file = io.BytesIO()
    writer = of.TarWriter(file)
    for key, content in (("a", data), ("b", of.jpeg())):
        writer.write(key, {"jpg": content, "cls": b"1", "json": b"{}"})
    writer.close()
    return file.getvalue()


def _with_sums(data: bytes) -> bytes:
    """A tar of such headers, each followed by the file of the example's first member."""
    out = b""
    for at in range(0, len(data), 512):
        head = data[at : at + 512].ljust(512, b"\0")
        total = sum(head) - sum(head[148:156]) + 8 * 32
        out += head[:148] + b"%06o\0 " % total + head[156:] + of.tar()[512:2048]
    return out + of.tar()


def _with_index(name: str, shard: bytes) -> Files:
    """The shard in place of the first one, of the size that index.json says."""
    squeeze: Callable[[bytes], bytes] = {"mds-gz": gzip.compress, "mds": bytes}[name]
    example = of.readers()[name].example()
    index = json.loads(example["index.json"])
    first = index["shards"][0]
    first["raw_data"]["bytes"] = len(shard)
    body = squeeze(shard)
    if first["zip_data"]:
        first["zip_data"]["bytes"] = len(body)
    return example | {of.readers()[name].attacked: body, "index.json": json.dumps(index).encode()}


def _shard_of(name: str) -> bytes:
    reader = of.readers()[name]
    body = reader.example()[reader.attacked]
    assert isinstance(body, bytes)
    return gzip.decompress(body) if name.endswith("gz") else body


def _chunks_with_sums(data: bytes) -> bytes:
    """A PNG of these chunks, each with its right checksum."""
    out, at = data[:8], 8
    while at + 12 <= len(data):
        size = min(int.from_bytes(data[at : at + 4], "big"), len(data) - at - 12)
        body = data[at + 4 : at + 8 + size]
        out += data[at : at + 4] + body + struct.pack(">I", zlib.crc32(body))
        at += 12 + size
    return out


# Reader -> kind -> (what stands inside its file, and what puts it there with right sizes and checksums).
_INNER: dict[str, dict[str, tuple[Callable[[], bytes], Callable[[bytes], bytes | Files]]]] = {
    "tfrecord": {"Example": (of.example, lambda data: of.tfrecord(data, of.example()))},
    "tfrecord.gz": {"shard": (of.tfrecord, gzip.compress)},
    "tar.gz": {"shard": (of.tar, gzip.compress)},
    "tar": {"picture": (of.jpeg, _in_tar), "headers": (lambda: (of.tar()[:512] * 3), _with_sums)},
    "mds": {"shard": (lambda: _shard_of("mds"), lambda data: _with_index("mds", data))},
    "mds-gz": {"shard": (lambda: _shard_of("mds-gz"), lambda data: _with_index("mds-gz", data))},
    "png": {"chunks": (lambda: of.pictures()["png"], _chunks_with_sums)},
    "pack": {
        "head": (lambda: b'{"sources": ["file:/data"]}', lambda data: of.packed(data.replace(b"\n", b" "))),
        "records": (lambda: bytes(28) * 3, lambda data: of.packed(records=np.frombuffer(data[: len(data) // 28 * 28], of.pack._RECORDS))),
    },
    "sample log": {
        "step": (lambda: _STEP.pack(0, 0, 0, 1, 4) + bytes(12), lambda data: of.log() + _framed(b"S", data)),
        "run": (lambda: RunBegins(0, 1.0, 1).dump()[12:], lambda data: header(0) + _framed(b"R", data) + of.log()[16:]),
    },
}  # fmt: skip
