"""What an attacker writes: the harmful relatives of each example. The same seed gives the same cases.

made        bombs, chains and deep nesting, made for one format
damaged     any file, cut, doubled, or with other numbers at some places; also what stands inside a file,
            behind right sizes and checksums
retyped     JSON with another value, of another type or size, at one place
"""

from __future__ import annotations

import bz2
import functools
import gzip
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

from fastload.formats.pieces import zstd
from fastload.trace.sample_log import _STEP, RunBegins, _framed, header
from tests.hostile import readers as of
from tests.hostile.readers import Files, Reader
from tests.photos import with_size

MB = 1 << 20
BOMB = 240 * MB
DEEP = 200_000
Attacks = dict[str, Any]  # name -> the attacked file, or some of all files
_WORDS = [-1, 0, 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
_DIGITS = [b"-1", b"0", b"99", b"9223372036854775808", b"9" * 5000, b"NaN", b"1e999"]
ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 10**30, 1e308, float("nan"), "", "9" * 5000, "../../etc/passwd",
    "\x1b[31m\u202e\ud800", [], [[]], {}, {"a": 1}, ["x"] * 3,
]  # fmt: skip


def attacks(name: str, reader: Reader, rng: random.Random, few: int) -> Iterator[tuple[str, Files]]:
    """(name, files) of each attack on a reader: those made for it, and some of each random kind."""
    for pattern, make in _MADE.items():
        if re.fullmatch(pattern, name):
            for title, found in make().items():
                yield title, found if isinstance(found, dict) else {reader.attacked: found}
    example: Any = reader.example()[reader.attacked]
    told = _json_of(example)
    for number in range(few):
        seed = rng.getrandbits(32)
        yield f"damaged {number}", {reader.attacked: damaged(example, seed)}
        if told is not None:
            yield f"retyped {number}", {reader.attacked: retyped(example, seed)}
        for kind, (inner, wrap) in _INNER.get(name, {}).items():
            found = wrap(damaged(inner(), seed))
            yield f"{kind} {number}", found if isinstance(found, dict) else {reader.attacked: found}


def damaged(data: bytes, seed: int) -> bytes:
    """The file, cut, doubled, or with other bytes at some places."""
    rng = random.Random(seed)
    kind = rng.choice(["cut", "doubled", "numbers", "numbers", "bytes", "bytes", "digits"])
    if kind == "cut" or not data:
        return data[: rng.choice([0, 1, len(data) // 2, rng.randrange(len(data) + 1), len(data) - 1])]
    if kind == "doubled":
        at, stop = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        return data[:stop] + data[at:stop] * rng.choice([1, 2, 50]) + data[stop:]
    found = list(re.finditer(rb"\d+", data[: 1 << 16])) if kind == "digits" else []
    if found:
        one = rng.choice(found)
        return data[: one.start()] + rng.choice(_DIGITS) + data[one.end() :]
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        # Headers and tables stand at the beginning and at the end.
        at = rng.randrange(min(rng.choice([64, 1024, len(data)]), len(data)))
        at = rng.choice([at, at, len(data) - 1 - at])
        if kind == "numbers":
            size, order = rng.choice([2, 4, 8]), rng.choice(["little", "big"])
            value = rng.choice(_WORDS) % (1 << 8 * size)
            changed[at : at + size] = value.to_bytes(size, order)[: len(data) - at]  # type: ignore[arg-type]
        else:
            changed[at] = rng.choice([0, 1, 255, 127, 128, rng.randrange(256)])
    return bytes(changed)


def retyped(data: bytes, seed: int) -> bytes:
    """The JSON with another value at one place, or without it, or with it a thousand times."""
    rng = random.Random(seed)
    told = _json_of(data)
    way = rng.choice(list(_places(told)))
    if not way:
        return json.dumps(rng.choice(ODD)).encode()
    inner = told
    for step in way[:-1]:
        inner = inner[step]
    kind = rng.choice(["odd", "odd", "odd", "gone", "deep", "many"])
    if kind == "gone":
        del inner[way[-1]]
    else:
        values = {"odd": rng.choice(ODD), "many": [inner[way[-1]]] * 1000, "deep": "DEEP"}
        inner[way[-1]] = values[kind]
    return json.dumps(told).encode().replace(b'"DEEP"', b"[" * DEEP + b"]" * DEEP)


def _json_of(data: bytes) -> Any:
    try:
        return json.loads(data) if data[:1] in (b"{", b"[") else None
    except ValueError:
        return None


def _places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield way
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        yield from _places(one, (*way, key))


# --- made for one format


def tar_header(name: str, size: int, kind: bytes = b"0") -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def with_sum(head: bytes) -> bytes:
    """A tar header with its right checksum."""
    head = head.ljust(512, b"\0")
    return head[:148] + b"%06o\0 " % (sum(head) - sum(head[148:156]) + 8 * 32) + head[156:]


def zeros(squeeze: Callable[[bytes], bytes], head: bytes = b"", tail: bytes = b"") -> bytes:
    """A file of many members that inflates to a large number of zeros."""
    return squeeze(head) + squeeze(bytes(16 * MB)) * (BOMB // (16 * MB)) + squeeze(tail)


def empty(squeeze: Callable[[bytes], bytes], tail: bytes) -> bytes:
    """256 KB of members without content, and one with it. Longer ones: unit/test_reading_time."""
    return squeeze(b"") * (MB // 4 // len(squeeze(b""))) + squeeze(tail)


def _tar() -> Attacks:
    good, end = tar_header("a.txt", 3) + b"abc".ljust(512, b"\0"), bytes(1024)
    chains = {f"chain of headers {kind.decode()}": tar_header("x", 0, kind) * 3000 for kind in (b"x", b"L")}
    heads = chains | {
        "chain of long names": (tar_header("x", 100_000, b"L") + b"n" * 100_352) * 30,
        "long pax": tar_header("x", 900_000, b"x") + b"9 a=bcde\n" * 100_000 + bytes(224),
        "skipped members": tar_header(".x", 0) * 3000,
        "members of one name": good * 1000,
        "one sample of many members": b"".join(tar_header(f"a.{n}", 0) for n in range(2000)),
        "many small members": b"".join(tar_header(f"{n}.txt", 0) for n in range(300)),
        "size beyond the shard": tar_header("b.bin", 8**11 - 1),
        "negative size": with_sum(tar_header("b.bin", 0)[:124] + b"\xff" * 12 + tar_header("b.bin", 0)[136:]),
    }
    members = [("json", b"[" * DEEP), ("json", b"9" * 5000), ("json", b"\xff"), ("cls", b"9" * 5000)]
    members += [("cls", b"nan"), ("jpg", b""), ("jpg", b"<html>")]
    inner = {f"{kind} {data!r:.20}": of.tar(**{kind: data}) for kind, data in members}
    inner |= {f"npy {name}": of.tar(npy=data) for name, data in _npy().items()}
    return inner | {name: head + good + end for name, head in heads.items()}


def _gzip_tar() -> Attacks:
    return {
        "a bomb": zeros(gzip.compress, tar_header("a.bin", BOMB), bytes(1024)),
        "a bomb behind the end": zeros(gzip.compress, of.tar()),
        "empty members": empty(gzip.compress, of.tar()),
        "zeros behind": gzip.compress(of.tar()) + bytes(4 * MB),
    }


def masked(data: bytes) -> bytes:
    """TFRecord's checksum of these bytes, which an attacker knows."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _tfrecord() -> Attacks:
    names = b"\x0a\x07\x0a\x05label" * 16_384
    heads = {size: struct.pack("<Q", size) for size in (2**31, 2**40, 2**63, 2**64 - 1)}
    return {f"a record of {size}": head + masked(head) + bytes(64) for size, head in heads.items()} | {
        "empty records": of.tfrecord(*[b""] * 300),
        "empty features": of.tfrecord(b"\x0a\x00" * 100_000, b"\x0a\xc0\x9a\x0c" + b"\x0a\x00" * 100_000),
        "one name often": of.tfrecord(b"\x0a\x80\x80\x09" + names),
        "a varint without end": of.tfrecord(b"\xff" * 100_000),
    }


def _gzip_tfrecord() -> Attacks:
    head = struct.pack("<Q", BOMB)
    return {
        "a bomb": zeros(gzip.compress, head + masked(head)),
        "empty members": empty(gzip.compress, of.tfrecord()),
    }


def _squeezed(name: str, squeeze: Callable[[bytes], bytes]) -> Attacks:
    """Attacks on a shard of MDS or a chunk of LitData, of the size that index.json says."""
    head = struct.pack("<III", 1, 12, BOMB)  # one sample, in all of it
    bomb, chain = zeros(squeeze, head), empty(squeeze, head)
    good = _shard_of(name)
    at = 4 + 4 * int.from_bytes(good[:4], "little")  # of the end of the last sample
    short = good[:at] + struct.pack("<I", len(good) + 1000) + good[at + 4 :]
    return {
        "a bomb": _in_index(name, bomb, BOMB, 1),
        "empty members": _in_index(name, chain, BOMB, 1),
        "an end before the last sample": _in_index(name, squeeze(short), len(good) + 1000),
    }


def _in_index(name: str, body: bytes, size: int, samples: int | None = None) -> Files:
    reader = of.readers()[name]
    told = json.loads(reader.example()["index.json"])
    for shard in told.get("shards", [])[:1]:
        shard["raw_data"]["bytes"] = size
        if shard["zip_data"]:
            shard["zip_data"]["bytes"] = len(body)
        shard["samples"] = samples or shard["samples"]
    for chunk in told.get("chunks", [])[:1]:
        chunk["chunk_bytes"], chunk["chunk_size"] = size, samples or chunk["chunk_size"]
    return {reader.attacked: body, "index.json": json.dumps(told).encode()}


@functools.cache
def _parquet() -> Attacks:
    def bomb(value: Any, rows: int) -> bytes:
        same = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, "i4")), pa.array([value]))
        point = pa.ListArray.from_arrays(np.arange(0, 2 * rows + 1, 2, "i4"), np.ones(2 * rows))
        columns = {"image": same, "key": same, "name": same, "label": np.zeros(rows, "i8"), "p": point}
        # Without Arrow's own schema the columns are no dictionaries, and each row holds the value.
        return of.parquet(pa.table(columns), row_group_size=rows, compression="zstd", store_schema=False)

    def odd(**columns: Any) -> bytes:
        return of.parquet(pa.table({"image": [b""], "label": [1], "p": [[1.0]], "key": ["k"]} | columns))

    nested: Any = pa.int8()
    for _ in range(300):
        nested = pa.list_(nested)
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["label", "label"])
    return {
        "a large value in each row": bomb(b"y" * (4 * MB), 60),
        "a large text in each row": bomb("y" * (4 * MB), 60),
        "many rows of one value": bomb(b"x", 5_000),
        "deep types": odd(image=pa.array([None], nested)),
        "two columns of a name": of.parquet(twice),
        "a footer of 2 GB": b"PAR1" + bytes(64) + struct.pack("<I", 2**31 - 1) + b"PAR1",
        "many columns": odd(**{f"c{n}": [1] for n in range(1000)}),
    }


def _csv() -> Attacks:
    names = b",".join(b"c%d" % n for n in range(20_000))
    rows = {
        "two columns of a name": b",label\na,1,2\n", "an open quote": b'\n"' + b"a,1\n" * 200_000,
        "ragged rows": b"\n" + b"a\na,1,2\n" * 1000, "a long value": b"\n" + b"a" * (8 * MB) + b",1\n",
        "large numbers": b"\na,9223372036854775808\nb,-9e999\nc,NaN\n",
        "many columns": b"," + names + b"\n" + b"1," * 20_001 + b"1\n",
    }  # fmt: skip
    quotes = {"a header of quotes": b'"' * 500_001 + b"\n1,2\n", "no text": bytes(1000)}
    return quotes | {name: b"key,label" + rest for name, rest in rows.items()}


def _gzip_csv() -> Attacks:
    head = gzip.compress(b"key,label\n")
    return {
        "a bomb of long rows": head + gzip.compress((b"a" * MB + b",1\n") * 16) * 15,
        "a bomb of short rows": head + gzip.compress(b"a,1\n" * (4 * MB)) * 15,
        "a bomb of zeros": zeros(gzip.compress, b"key,label\n"),
        "empty members": empty(gzip.compress, b"key,label\na,1\n"),
    }


def _json() -> Attacks:
    values = {
        "deep": b"[" * DEEP + b"]" * DEEP, "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        "twice": b'1, "label": 2',
        "a long number": b"9" * 5000, "infinity": b"1e999", "no number": b"NaN", "a surrogate": rb'"\ud800"',
    }  # fmt: skip
    row = b'{"key": "a", "label": %s}'
    found = {f"{name}, {form}": text % row % value for name, value in values.items()
             for form, text in (("line", b"%s\n"), ("array", b"[%s]"))}  # fmt: skip
    mixed = b"\n".join(row % value for value in (b"1", b'"x"', b"[1]", b"null"))
    many = b"".join(b'{"key": "a", "label": 1, "n%d": 1}\n' % n for n in range(3000))
    return found | {"types that change": mixed, "many names": many}


def _gzip_json() -> Attacks:
    return {"a bomb": gzip.compress((b'{"key": "' + b"a" * MB + b'", "label": 1}\n') * 16) * 15}


def _text() -> Attacks:
    return {"deep": b"[" * DEEP, "deep objects": b'{"a":' * DEEP, "a long number": b"[" + b"9" * 5000 + b"]"}


def _lit_index() -> Attacks:
    """Structures of a sample: JSON within JSON."""
    told = json.loads(of.stored("lit")["index.json"])
    leaf = '{"type": null, "context": null, "children_spec": []}'
    one = '{"type": "builtins.list", "context": "null", "children_spec": [%s]}'
    deep = functools.reduce(lambda inner, _: one % inner, range(300), leaf)
    specs = [
        "[" * DEEP,
        f"[1, {deep}]",
        f"[1, {one % ', '.join([leaf] * 20_000)}]",
        f"[1, {leaf.replace('[]', '[[]]')}]",
    ]
    configs = [told["config"] | {"data_spec": spec} for spec in specs]
    return {f"data_spec {n}": json.dumps(told | {"config": one}).encode() for n, one in enumerate(configs)}


def _npy() -> Attacks:
    def with_header(shape: str = "(4,)", descr: str = "'<u2'") -> bytes:
        body = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(body)) + body + bytes(256)

    shapes = ["(" * 400 + ")" * 400, "(-5,)", "(9223372036854775808,)", "('x',)", "(1.5,)",
              "(" + "1," * 400 + ")",
              "(4294967296, 4294967296)", "(0,)"]  # fmt: skip
    types = [
        "'|O'",
        "'<M8[s]'",
        "'V99999999'",
        "[('a', '<u2')]",
        "'<u2,<u2'",
        "'" + "9" * 300 + "'",
        "'|S2147483647'",
    ]
    return {f"shape {one:.20}": with_header(one) for one in shapes} | {
        f"type {one:.20}": with_header(descr=one) for one in types
    }


def _llm_c() -> Attacks:
    heads = {n: np.array([20240520, 1, n], "<i4").tobytes() for n in (-1, 0, 2**31 - 1)}
    return {f"{n} tokens": head.ljust(1024, b"\0") + bytes(128) for n, head in heads.items()}


def _jpeg(kind: str) -> Attacks:
    jpeg = of.pictures()[kind]
    scan = jpeg.index(b"\xff\xda")
    heads = {
        "chain of markers": b"\xff\xe2\x00\x02" * 250_000,
        "chain of EXIF": (b"\xff\xe1\x00\x40Exif\0\0" + b"x" * 56) * 100_000,
        "fill bytes": b"\xff" * 1_000_000, "chain of tables": (b"\xff\xdb\x00\x43\x00" + b"\1" * 64) * 10_000,
    }  # fmt: skip
    found = {name: jpeg[:2] + head + jpeg[2:] for name, head in heads.items()}
    sizes = {f"{side} x {side}": with_size(jpeg, side, side) for side in (0, 1999, 13000, 65500)}
    return found | sizes | {"chain of scans": jpeg[:-2] + jpeg[scan:-2] * 1000 + jpeg[-2:]}


def _png() -> Attacks:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def sized(width: int, height: int, data: bytes, extra: bytes = b"", depth: int = 8) -> bytes:
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))
        return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")

    plain, bomb = zlib.compress(bytes(16 * 49)), zlib.compress(bytes(256 * MB), 1)
    sizes = [(2**31 - 1, 2**31 - 1), (2**31 - 1, 1), (13000, 13000), (1999, 1999)]
    extras = {
        "a bomb of text": chunk(b"zTXt", b"a\0\0" + bomb),
        "a bomb of a profile": chunk(b"iCCP", b"a\0\0" + bomb),
        "chain of chunks": chunk(b"tEXt", b"a\0b") * 50_000,
    }  # fmt: skip
    found = {f"{width} x {height}": sized(width, height, plain) for width, height in sizes}
    found |= {name: sized(16, 16, plain, extra) for name, extra in extras.items()}
    return found | {
        "a bomb of pixels": sized(16, 16, bomb),
        "a depth of 255": sized(16, 16, plain, depth=255),
    }


def _boxes(kind: str) -> Attacks:
    file = of.pictures()[kind]
    size, at = int.from_bytes(file[:4], "big"), file.index(b"ispe") + 8
    deep = b""
    for _ in range(2000):
        deep = struct.pack(">I4s", len(deep) + 8, b"meta") + deep
    boxes = {
        "chain of boxes": struct.pack(">I4s", 8, b"free") * 100_000, "nested boxes": deep,
        "boxes of no bytes": struct.pack(">I4s", 0, b"free") * 1000,
        "a box of 2**63 bytes": struct.pack(">I4sQ", 1, b"meta", 2**63),
    }  # fmt: skip
    found = {name: file[:size] + more + file[size:] for name, more in boxes.items()}
    return found | {
        f"{side} x {side}": file[:at] + struct.pack(">II", side, side) + file[at + 8 :]
        for side in (0, 1999, 13000, 2**31)
    }


def _sample() -> Attacks:
    def block(tag: bytes, dtype: bytes, shape: tuple[int, ...]) -> bytes:
        out = tag + bytes([len(dtype), len(shape)]) + dtype + struct.pack(f"<{len(shape)}Q", *shape)
        return out + bytes(-len(out) % 64)

    shapes = [(0, 2**62, 9), (0, 2**63), (2**62,), (2**64 - 1, 0), (1,) * 60, (0,) * 255]
    types = [
        "xfloat32",
        "xquint8",
        "xbits16",
        "xdtype",
        "xuint4",
        "xcomplex32",
        "a<f4",
        "a|U0",
        "a|V0",
        "a<M8[7D]",
        "g<i4",
    ]
    found = {
        f"{kind} {shape!s:.24}": block(kind[:1].encode(), kind[1:].encode(), shape)
        for kind in types
        for shape in shapes
    }
    return found | {f"{depth} lists in lists": b"l\1\0\0\0" * depth + b"N" for depth in (10, 100, 10_000)} | {
        "a promised list": b"l\xff\xff\xff\xff", "a list as a key": b"m\1\0\0\0" + b"l\0\0\0\0" + b"N",
        "names twice": b"m\2\0\0\0" + b"s\1\0\0\0aN" * 2, "a long number": b"I\x88\x13\0\0" + b"9" * 5000,
        "a huge number": b"I\0\0\x10\0" + b"0x" + b"f" * (MB - 2),
    }  # fmt: skip


def _row() -> Attacks:
    values: list[Any] = [
        1, None, [1, 2], ({}, [1]), ({"a": 1}, {"b": "x"}), ({"a": 1}, {"b": -5}), (1, {"b": 0}),
        ({"a": 1}, {"b": 2.0}), ({}, {"b": 2**70}), ({}, {1: 0}), ([], {"b": 0}),
    ]  # fmt: skip
    heads = {f"a head {value!r:.30}": bytes(of.dump(value)) for value in values}
    return {name: head + struct.pack("<I", len(head)) for name, head in heads.items()}


def _answer() -> Attacks:
    words = [
        "a", "?", "'", "<Error>", "<Code>", "://", "a://", "?a=", "@", "<Token-1>", "<Message>", "9", "<a",
        "<a>", " ", "s3.", "AccessDenied ", "status code: ", "\x1b[31m", "path ", "1 s ",
    ]  # fmt: skip
    return {f"a page of {word!r}": (word * 200_000)[:200_000].encode() for word in words}


def _pack() -> Attacks:
    sources = [b'"x"', b"null", b"[1" + b"0" * 5000 + b"]", b"[NaN]", b"[[1]]", b"[%s1]" % (b"1," * 100_000)]
    heads = [b"[" * DEEP, b"[]", *[b'{"sources": %s}' % one for one in sources]]
    sizes = [[2**32 - 1], [2**31, 2**31], [0] * 1000]
    records = [
        np.array([(bytes([n % 256] * 16), size, 0) for n, size in enumerate(one)], of.packs_module._RECORDS)
        for one in sizes
    ]
    many = 1 << 28
    return {f"head {head!r:.28}": of.packed(head, payload=b"y" * 99) for head in heads} | {
        f"lengths {one!r:.28}": of.packed(records=table) for one, table in zip(sizes, records, strict=True)
    } | {
        "one record often": of.packed(records=np.array([(bytes(16), 9, 0)] * 11, of.packs_module._RECORDS)),
        "an index of 1 GB": {f"packs/{'0' * 32}-{4 * many}.pack": 4 * many},
        "eight indexes of 256 MB": {f"packs/{n:032x}-{many}.pack": many for n in range(8)},
        "names of other sizes": {f"packs/{'0' * 32}-{n}.pack": 100 for n in (0, 1, 23, 24, 101, 10**12 - 1)},
    }  # fmt: skip


def _log() -> Attacks:
    def run(**other: Any) -> bytes:
        return _framed(b"R", json.dumps({"run_step": 0, "time": 1.0, "world_size": 1} | other).encode())

    def step(run_step: int = 0, count: int = 1, width: int = 4) -> bytes:
        return _framed(b"S", _STEP.pack(run_step, 0, 0, count, width) + bytes(12))

    runs = [b'{"x": 1}', b"[]", b"\xff", b"[" * DEEP]
    frames = {f"run {told!r:.20}": _framed(b"R", told) + step() for told in runs}
    steps = [
        step(width=3),
        step(width=0),
        step(count=9),
        step(count=2**32 - 1),
        step(2**63),
        _framed(b"S", b""),
        _framed(b"Q", b"x"),
    ]
    frames |= {f"frame {number}": run() + one for number, one in enumerate(steps)}
    frames |= {
        f"{name}: {odd!r:.20}": run(**{name: odd}) + step()
        for name in ("run_step", "time", "world_size")
        for odd in ODD
    }
    frames |= {"many steps": run() + b"".join(map(step, range(3000))), "many runs": (run() + step()) * 1500}
    return {name: header(0) + frame for name, frame in frames.items()}


_MADE: dict[str, Callable[[], Attacks]] = {
    "tar": _tar,
    r"tar\.gz": _gzip_tar,
    "tfrecord": _tfrecord,
    r"tfrecord\.gz": _gzip_tfrecord,
    "mds-gz": lambda: _squeezed("mds-gz", gzip.compress),
    "mds-bz2": lambda: _squeezed("mds-bz2", bz2.compress),
    "mds-zstd": lambda: _squeezed("mds-zstd", zstd().compress),
    "lit-chunk": lambda: _squeezed("lit-chunk", zstd().compress),
    "parquet|table parquet": _parquet,
    "table csv": _csv,
    r"table csv\.gz": _gzip_csv,
    "table json": _json,
    r"table jsonl\.gz": _gzip_json,
    "index of (mds|lit|wids).*|state": _text,
    "index of lit": _lit_index,
    "npy": _npy,
    r"llm\.c": _llm_c,
    "jpeg": lambda: _jpeg("jpeg"),
    "progressive": lambda: _jpeg("progressive"),
    "png": _png,
    "avif": lambda: _boxes("avif"),
    "heic": lambda: _boxes("heic"),
    "sample": _sample,
    "row": _row,
    "answer": _answer,
    "pack": _pack,
    "sample log": _log,
}  # fmt: skip


# --- what stands inside a file, and what puts it there with right sizes and checksums


def _shard_of(name: str) -> bytes:
    body: Any = of.readers()[name].example()[of.readers()[name].attacked]
    unpack = {"mds-gz": gzip.decompress, "mds-bz2": bz2.decompress, "mds": bytes}
    return unpack[name](body) if name in unpack else zstd().decompress(body)


def _chunks_with_sums(data: bytes) -> bytes:
    out, at = data[:8], 8
    while at + 12 <= len(data):
        size = min(int.from_bytes(data[at : at + 4], "big"), len(data) - at - 12)
        body = data[at + 4 : at + 8 + size]
        out += data[at : at + 4] + body + struct.pack(">I", zlib.crc32(body))
        at += 12 + size
    return out


def _headers_with_sums(data: bytes) -> bytes:
    heads = [with_sum(data[at : at + 512]) for at in range(0, len(data), 512)]
    return b"".join(head + of.tar()[512:2048] for head in heads) + of.tar()


def _records_of(data: bytes) -> Files:
    return of.packed(records=np.frombuffer(data[: len(data) // 28 * 28], of.packs_module._RECORDS))


_INNER: dict[str, dict[str, tuple[Callable[[], bytes], Callable[[bytes], bytes | Files]]]] = {
    "tar": {
        "picture": (of.jpeg, lambda data: of.tar(jpg=data)),
        "headers": (lambda: of.tar()[:512] * 3, _headers_with_sums),
    },
    "tar.gz": {"shard": (of.tar, gzip.compress)},
    "tfrecord": {"Example": (of.example, lambda data: of.tfrecord(data, of.example()))},
    "tfrecord.gz": {"shard": (of.tfrecord, gzip.compress)},
    "mds": {"shard": (lambda: _shard_of("mds"), lambda data: _in_index("mds", data, len(data)))},
    "mds-gz": {
        "shard": (
            lambda: _shard_of("mds-gz"),
            lambda data: _in_index("mds-gz", gzip.compress(data), len(data)),
        )
    },
    "state": {"checkpoint": (of.checkpoint, bytes)},
    "png": {"chunks": (lambda: of.pictures()["png"], _chunks_with_sums)},
    "pack": {
        "head": (lambda: b'{"sources": ["file:/data"]}', lambda data: of.packed(data.replace(b"\n", b" "))),
        "records": (lambda: bytes(84), _records_of),
    },
    "sample log": {
        "step": (lambda: _STEP.pack(0, 0, 0, 1, 4) + bytes(12), lambda data: of.log() + _framed(b"S", data)),
        "run": (
            lambda: RunBegins(0, 1.0, 1).dump()[12:],
            lambda data: header(0) + _framed(b"R", data) + of.log()[16:],
        ),
    },
}  # fmt: skip
