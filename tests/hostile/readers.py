"""All that reads bytes of others: an example that is read, and the public door through which it goes.

`read` gets a folder with the files. A dataset is read twice by a loader: with on_error="raise", which shows the
error of a bad sample, and with "skip", which may not end before the good samples of the other files.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import fastload
from fastload.cache import pack
from fastload.cache.pull import pull
from fastload.cache.segment import checksum
from fastload.errors import DecodeError, FastloadError
from fastload.formats.example import encode_example
from fastload.formats.inflate import zstd
from fastload.formats.packed_row import dump_row, load_row
from fastload.formats.sample import dump, load
from fastload.formats.sample_log import LoggedStep, RunBegins, header
from fastload.formats.write import TarWriter, TFRecordWriter
from fastload.images import heif
from fastload.images.dct import to_dct
from fastload.loader.made_from import restore
from fastload.loader.saved_state import read_state
from fastload.store.translate import StoreLocation
from tests.photos import pillow_jpeg, png, scene

Files = dict[str, bytes | int]  # name -> content, or the size of a sparse file
DATA = Path(__file__).parent.parent / "data"
CROP = fastload.CenterCrop(16)
FEATURES = {"image": bytes, "label": int, "score": float}
FIELDS = {"x": "key", "label": "label"}


class Reader(NamedTuple):
    """`example`: files that are read; `attacked`: the one among them that attacks write; `read`: the door."""

    example: Callable[[], Files]
    attacked: str
    read: Callable[[Path], object]


# --- doors


def epochs(make: Callable[[Path], Any]) -> Callable[[Path], object]:
    """Read all samples of a dataset, as a training does, and some of them at random."""

    def read(folder: Path) -> object:
        dataset = make(folder)
        batches = functools.partial(
            fastload.DataLoader, dataset, 512, shuffle=False, collate_fn=len, num_workers=0
        )
        errors: list[FastloadError] = []
        with noting(errors):
            sum(batches())
        bad = isinstance(next(iter(errors), None), DecodeError)
        for number in range(_length(dataset)):
            with noting(errors):
                dataset[number]
        try:
            if sum(batches(on_error="skip")) == 0:
                raise AssertionError(f"on_error='skip' left nothing of the good samples: {errors}")
        except FastloadError as error:
            if bad:
                raise AssertionError(f"on_error='skip' ended the epoch: {error}") from error
            raise
        for error in errors[:1]:
            raise error
        return "all"

    return read


@contextlib.contextmanager
def noting(errors: list[FastloadError]) -> Iterator[None]:
    """Collect an error that is meant for users; any other one passes."""
    try:
        yield
    except FastloadError as error:
        errors.append(error)


def _length(dataset: Any) -> int:
    try:
        return min(len(dataset), 16)
    except TypeError:  # its shards are not indexed, as the epoch ended early
        return 0


def image(folder: Path) -> object:
    data = (folder / "input").read_bytes()
    fastload.RandomResizedCrop(16, max_pixels=4_000_000)(data)
    return tuple(fastload.CenterCrop(16, max_pixels=4_000_000)(data).shape)


def content(function: Callable[[bytes], object]) -> Callable[[Path], object]:
    return lambda folder: function((folder / "input").read_bytes())


def answer(body: bytes) -> object:
    """What a user sees of a server's answer. It is an error itself, and need not be raised."""
    error = StoreLocation("s3://bucket").translate(OSError(body.decode("utf-8", "replace")), "get", "key")
    if len(str(error)) > 2000:
        raise AssertionError(f"a message of {len(str(error)):,} characters")
    return type(error)


def packs(folder: Path) -> object:
    cache = fastload.Cache(folder / "cache", size_limit="64MB")
    try:
        return pull(cache, fastload.open_store(str(folder / "packs"))).damaged
    finally:
        cache.close()


def proved(folder: Path) -> object:
    return str(fastload.prove(folder / "log", folder / "log"))


def resumed(folder: Path) -> object:
    state = read_state(folder / "input")
    try:
        restore(state, url=str(folder / "photos"))
    finally:
        loader = loader_of(folder)
        loader.load_state_dict(state)
        found = len(list(loader))
    return found


def loader_of(folder: Path) -> Any:
    dataset = fastload.ImageFolder(str(folder / "photos"), CROP)
    sampler = fastload.DistributedSampler(dataset, 1, 0, seed=5)
    return fastload.DataLoader(dataset, 1, sampler=sampler, seed=3, num_workers=0)


# --- examples


@functools.cache
def jpeg() -> bytes:
    return pillow_jpeg(scene(40, 32), quality=70)


@functools.cache
def pictures() -> dict[str, bytes]:
    from PIL import Image

    found = {
        "jpeg": jpeg(),
        "progressive": pillow_jpeg(scene(40, 32), progressive=True),
        "png": png(Image.fromarray(scene(40, 32))),
        "dct": bytes(to_dct(jpeg())),
    }
    for kind in ("webp", "tiff", "gif", "bmp"):
        file = io.BytesIO()
        Image.fromarray(scene(40, 32)).save(file, kind)
        found[kind] = file.getvalue()
    for kind, why in (("avif", heif.why_no_avif()), ("heic", heif.why_no_heic())):
        if why is None:
            found[kind] = (DATA / "boxed" / f"turned-1.{kind}").read_bytes()
    return found


def tar(number: int = 0, count: int = 4) -> bytes:
    file = io.BytesIO()
    writer = TarWriter(file)
    for one in range(count):
        writer.write(f"d/{number}-{one}", {"jpg": jpeg(), "cls": b"%d" % one, "json": b'{"n": [1, 2]}'})
    writer.close()
    return file.getvalue()


def tfrecord(*records: bytes) -> bytes:
    file = io.BytesIO()
    writer = TFRecordWriter(file)
    for one in records or [example()] * 4:
        writer.write(one)
    writer.close()
    return file.getvalue()


def example() -> bytes:
    return encode_example({"image": jpeg(), "label": 3, "score": 0.5})


def index_of(kind: str) -> bytes:
    writer: Any = (TarWriter if kind == "tar" else TFRecordWriter)(io.BytesIO())
    for one in range(4):
        if kind == "tar":
            writer.write(f"d/0-{one}", {"jpg": jpeg(), "cls": b"%d" % one, "json": b'{"n": [1, 2]}'})
        else:
            writer.write(example())
    return bytes(writer.index())


def table() -> Any:
    columns = {"image": [jpeg()] * 6, "label": list(range(6)), "name": ["a", "b"] * 3, "p": [[1.0, 2.0]] * 6}
    return pa.table(columns)


def parquet(rows: Any | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table() if rows is None else rows, file, **{"row_group_size": 3, **options})
    return file.getvalue()


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(64, dtype="<u2"))
    return file.getvalue()


def llm_c() -> bytes:
    return np.array([20240520, 1, 64], "<i4").tobytes().ljust(1024, b"\0") + bytes(128)


def packed(
    head: bytes = b'{"sources": ["file:/data"]}', records: Any = None, payload: bytes = b"x" * 99
) -> Files:
    """A pack under its right name."""
    if records is None:
        records = np.array([(bytes(16), len(payload), checksum(payload))], pack._RECORDS)
    index = head + b"\n" + records.tobytes()
    tail = index + pack._TRAILER.pack(b"FLPK", 1, 0, len(index), pack.xxhash.xxh3_64_intdigest(index))
    return {f"packs/{pack.pack_name(tail)}": payload + tail}


def log() -> bytes:
    indices = np.arange(4)
    steps = [LoggedStep(step, 0, step, indices, indices.astype(np.uint64)).dump() for step in range(3)]
    return header(0) + RunBegins(0, 1.0, 1).dump() + b"".join(steps)


def photos() -> Files:
    return {f"photos/{name}/{one}.jpg": jpeg() for name in "ab" for one in range(4)}


@functools.cache
def state() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), photos())
        loader = loader_of(Path(folder))
        batches = iter(loader)
        next(batches), next(batches)
        found = json.dumps(loader.state_dict()).encode()
        del batches
    return found


def sample() -> bytes:
    told = {"a": np.arange(12.0).reshape(3, 4), "t": torch.arange(6), "s": "x", "l": [1, 2.5, (True, None)]}
    return bytes(dump({**told, "i": 2**80, "b": b"xyz", "g": np.float32(1)}))


def stored(name: str) -> Files:
    folder = DATA / "formats" / name
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def beton() -> Files:
    return {"0.beton": gzip.decompress((DATA / "formats" / "fields.beton.gz").read_bytes())}


def write(folder: Path, files: Files) -> int:
    """Write the files; the bytes that an attacker had to send."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(data) if isinstance(data, int) else file.write(data)
    return sum(len(data) for data in files.values() if isinstance(data, bytes))


@functools.cache
def readers() -> dict[str, Reader]:
    """Name -> reader."""
    made: dict[str, Reader] = {}

    def shards(name: str, files: dict[str, Any], make: Callable[[Path], Any]) -> None:
        made[name] = Reader(
            lambda: {key: one() for key, one in files.items()}, next(iter(files)), epochs(make)
        )

    squeezed: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zlib": zlib.compress}
    for end, squeeze in squeezed.items():
        both = {f"{n}.tar{end}": lambda s=squeeze, n=n: s(tar(n)) for n in range(2)}
        if end != ".zlib":
            shards(
                "tar" + end,
                both,
                lambda folder: fastload.TarDataset(
                    str(folder), fields=("jpg", "cls", "json"), transform={"jpg": CROP}
                ),
            )
        both = {f"{n}.tfrecord{end}": lambda s=squeeze: s(tfrecord()) for n in range(2)}
        shards(
            "tfrecord" + end,
            both,
            lambda folder: fastload.TFRecordDataset(str(folder), FEATURES, transform={"image": CROP}),
        )
    for kind, make in (
        ("tar", fastload.TarDataset),
        ("tfrecord", functools.partial(fastload.TFRecordDataset, features=FEATURES)),
    ):
        parts = {
            f"0.{kind}.idx" if kind != "tar" else "0.idx": lambda k=kind: index_of(k),
            f"0.{kind}": tar if kind == "tar" else tfrecord,
        }
        shards(f"index of {kind}", parts, lambda folder, m=make: m(str(folder), index=True))
    wids = {"shardlist": [{"url": "0.tar", "nsamples": 4}], "wids_version": 1}
    shards(
        "index of wids",
        {"index.json": lambda: json.dumps(wids).encode(), "0.tar": tar},
        lambda folder: fastload.TarDataset(str(folder / "index.json")),
    )
    for name in (
        "mds",
        "mds-gz",
        "mds-bz2",
        "mds-zstd",
        "lit",
        "lit-tuple",
        "lit-chunk",
        "lit-single",
        "lit-batch",
    ):
        if name in ("mds-zstd", "lit-chunk", "lit-single", "lit-batch") and not _has_zstd():
            continue
        first = sorted(stored(name))[0 if name.startswith("lit") else 1]
        kind = fastload.MDSDataset if name.startswith("mds") else fastload.LitDataset
        for part in (first, "index.json"):
            title = name if part == first else f"index of {name}"
            made[title] = Reader(
                functools.partial(stored, name), part, epochs(lambda folder, k=kind: k(str(folder)))
            )
    made["beton"] = Reader(beton, "0.beton", epochs(lambda folder: fastload.BetonDataset(str(folder))))
    shards(
        "parquet",
        {"0.parquet": parquet, "1.parquet": parquet},
        lambda folder: fastload.ParquetDataset(
            str(folder), ("image", "label", "p"), transform={"image": CROP}
        ),
    )
    csv = b"key,label\n" + b"".join(b"%d.jpg,%d\n" % (n, n) for n in range(6))
    rows = [{"key": f"{n}.jpg", "label": n} for n in range(6)]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    whole = json.dumps(rows).encode()
    texts = {
        "csv": csv,
        "csv.gz": gzip.compress(csv),
        "jsonl": lines,
        "jsonl.gz": gzip.compress(lines),
        "json": whole,
        "pq": parquet(pa.Table.from_pylist(rows)),
    }
    for end, text in texts.items():
        name = f"t.{end}"
        shards(
            f"table {end}",
            {name: lambda t=text: t},
            lambda folder, n=name: fastload.TableDataset(str(folder / n), FIELDS),
        )
    for title, head in (("tokens", lambda: bytes(128)), ("npy", npy), ("llm.c", llm_c)):
        shards(
            title,
            {"0.bin": head, "1.bin": head},
            lambda folder: fastload.TokenDataset(str(folder), "uint16", 8),
        )
    for name in pictures():
        made[name] = Reader(lambda n=name: {"input": pictures()[n]}, "input", image)
    made["sample"] = Reader(
        lambda: {"input": sample()}, "input", content(lambda data: type(load(bytearray(data))))
    )
    row = {"a": 1, "b": memoryview(b"xyz"), "c": [1.5]}
    made["row"] = Reader(
        lambda: {"input": bytes(dump_row(row))}, "input", content(lambda data: sorted(load_row(data)))
    )
    made["answer"] = Reader(
        lambda: {"input": b"<Error><Code>NoSuchKey</Code><Message>s3://b/k?sig=x gone</Message></Error>"},
        "input",
        content(answer),
    )
    made["pack"] = Reader(packed, next(iter(packed())), packs)
    made["sample log"] = Reader(lambda: {"log/rank-0.samples": log()}, "log/rank-0.samples", proved)
    made["state"] = Reader(lambda: {"input": state(), **photos()}, "input", resumed)
    return made


def _has_zstd() -> bool:
    try:
        return zstd() is not None
    except DecodeError:
        return False
