"""All that reads bytes of others: an example that is read, and the public door through which it goes.

`read` gets a folder with the files. A dataset is read twice by a loader: with on_error="raise", which shows
the error of a bad sample, and with "repeat", which goes on to the good samples of the other files.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash

import fastload
from fastload.cache import packs as packs_module
from fastload.cache.exchange import pull
from fastload.cache.segment import checksum
from fastload.errors import DecodeError, FastloadError
from fastload.formats.pieces import zstd
from fastload.formats.sample import dump, load
from fastload.formats.tar import TarWriter
from fastload.formats.tfrecord import TFRecordWriter, encode_example
from fastload.images import heif
from fastload.images.decode import to_dct
from fastload.order.state import read_state
from fastload.store.failures import StoreLocation
from fastload.trace.recipe import restore
from fastload.trace.sample_log import LoggedStep, RunBegins, header
from tests.hostile.oracle import MAX_INFLATED
from tests.photos import pillow_jpeg, png, scene

Files = dict[str, bytes | int]  # name -> content, or the size of a sparse file
DATA = Path(__file__).parent.parent / "data"
CROP = fastload.CenterCrop(16)
FEATURES = {"image": bytes, "label": int, "score": float}
FIELDS = {"x": "key", "label": "label"}
LIMITED: dict[str, Any] = {"storage_options": {"max_inflated": MAX_INFLATED}}


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
        bad, numbers = isinstance(next(iter(errors), None), DecodeError), range(_length(dataset))
        good = not numbers  # those of the other file
        for number in numbers:
            with noting(errors):
                dataset[number]
                good = True
        try:
            if sum(batches(on_error="repeat")) == 0:
                raise AssertionError(f"on_error='repeat' left nothing of the good samples: {errors}")
        except FastloadError as error:
            if bad and good:
                raise AssertionError(f"on_error='repeat' ended the epoch: {error}") from error
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
    crops = fastload.RandomResizedCrop(16), fastload.CenterCrop(16)
    for crop in crops:
        crop._max_pixels = 4_000_000
    return [tuple(crop(data).shape) for crop in crops][-1]


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


def tar(**members: bytes) -> bytes:
    """A shard; its first sample has these members in place of its own."""
    return _sharded("tar", members)[0]


def _sharded(kind: str, members: dict[str, bytes] | None = None) -> tuple[bytes, bytes]:
    """(shard of four samples, its index file)."""
    file = io.BytesIO()
    writer: Any = (TarWriter if kind == "tar" else TFRecordWriter)(file)
    own = {"jpg": jpeg(), "cls": b"1", "json": b'{"n": [1]}', "npy": npy()}
    for one in range(4):
        sample = own | (members or {}) if one == 0 else own
        writer.write(*((f"d/{one}", sample) if kind == "tar" else (example(),)))
    writer.close()
    return file.getvalue(), bytes(writer.index())


def tfrecord(*records: bytes) -> bytes:
    file = io.BytesIO()
    writer = TFRecordWriter(file)
    for one in records or [example()] * 4:
        writer.write(one)
    writer.close()
    return file.getvalue()


def example() -> bytes:
    return encode_example({"image": jpeg(), "label": 3, "score": 0.5})


def parquet(rows: Any | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    images = {"image": [jpeg()] * 6, "label": list(range(6)), "name": ["a", "b"] * 3, "p": [[1.0, 2.0]] * 6}
    pq.write_table(pa.table(images) if rows is None else rows, file, **{"row_group_size": 3, **options})
    return file.getvalue()


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(64, dtype="<u2"))
    return file.getvalue()


def llm_c() -> bytes:
    return np.array([20240520, 1, 64], "<i4").tobytes().ljust(1024, b"\0") + bytes(128)


def packed(head: bytes = b'{"sources": []}', records: Any = None, payload: bytes = b"x" * 99) -> Files:
    """A pack under its right name."""
    if records is None:
        records = np.array([(bytes(16), len(payload), checksum(payload))], packs_module._RECORDS)
    index = head + b"\n" + records.tobytes()
    tail = index + packs_module._TRAILER.pack(b"FLPK", 1, 0, len(index), xxhash.xxh3_64_intdigest(index))
    return {f"packs/{packs_module.pack_name(tail)}": payload + tail}


def log() -> bytes:
    indices = np.arange(4)
    steps = [LoggedStep(step, 0, step, indices, indices.astype(np.uint64)).dump() for step in range(3)]
    return header(0) + RunBegins(0, 1.0, 1).dump() + b"".join(steps)


def photos() -> Files:
    return {f"photos/{name}/{one}.jpg": jpeg() for name in "ab" for one in range(4)}


@functools.cache
def state() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), photos())
        loader = loader_of(Path(folder))
        batches = iter(loader)
        next(batches), next(batches)
        found: dict[str, Any] = loader.state_dict()
        del batches
    return found


def checkpoint() -> bytes:
    file = io.BytesIO()
    torch.save({"model": torch.arange(8), "loader": state()}, file)
    return file.getvalue()


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


# --- the table


@functools.cache
def readers() -> dict[str, Reader]:
    """Name -> reader."""
    return {**_shards(), **_indexed(), **_tables(), **_single()}


def _shards() -> dict[str, Reader]:
    crop, jpg = {"image": CROP}, {"jpg": CROP}
    zipped: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zlib": zlib.compress}
    kinds: dict[str, tuple[Callable[[], bytes], Callable[[Path], Any]]] = {
        "parquet": (
            parquet,
            lambda at: fastload.ParquetDataset(at, ("image", "label", "p"), transform=crop, **LIMITED),
        ),
        "tokens": (lambda: bytes(128), lambda at: fastload.TokenDataset(at, "uint16", 8, **LIMITED)),
        "npy": (npy, lambda at: fastload.TokenDataset(at, "uint16", 8, **LIMITED)),
        "llm.c": (llm_c, lambda at: fastload.TokenDataset(at, "uint16", 8, **LIMITED)),
    }
    for end, squeeze in zipped.items():
        kinds[f"tfrecord{end}"] = (
            lambda s=squeeze: s(tfrecord()),
            lambda at: fastload.TFRecordDataset(at, FEATURES, transform=crop, **LIMITED),
        )
    for end in ("", ".gz"):
        kinds[f"tar{end}"] = (
            lambda s=zipped[end]: s(tar()),
            lambda at: fastload.TarDataset(
                at, fields=("jpg", "cls", "json", "npy"), transform=jpg, **LIMITED
            ),
        )
    made = {}
    for name, (example, make) in kinds.items():
        end = "bin" if name in ("tokens", "npy", "llm.c") else name
        files = lambda e=example, n=end: {f"{one}.{n}": e() for one in range(2)}  # noqa: E731
        made[name] = Reader(files, f"0.{end}", epochs(make))
    return made


def _indexed() -> dict[str, Reader]:
    """Shards with an index, and their indexes."""
    at_random = {
        "tar": ("0.idx", lambda at: fastload.TarDataset(at, index=True, **LIMITED)),
        "tfrecord": (
            "0.tfrecord.idx",
            lambda at: fastload.TFRecordDataset(at, FEATURES, index=True, **LIMITED),
        ),
    }
    made = {}
    for kind, (index, make) in at_random.items():
        files = lambda k=kind, i=index: dict(zip((f"0.{k}", i), _sharded(k), strict=True))  # noqa: E731
        made[f"index of {kind}"] = Reader(files, index, epochs(make))
    wids = json.dumps({"shardlist": [{"url": "0.tar", "nsamples": 4}], "wids_version": 1}).encode()
    made["index of wids"] = Reader(
        lambda: {"index.json": wids, "0.tar": tar()},
        "index.json",
        epochs(lambda folder: fastload.TarDataset(folder / "index.json", **LIMITED)),
    )
    names = ["mds", "mds-gz", "mds-bz2", "lit", "lit-tuple"]
    with contextlib.suppress(DecodeError):
        zstd()
        names += ["mds-zstd", "lit-chunk", "lit-single", "lit-batch"]
    for name in names:
        kind: Any = fastload.MDSDataset if name.startswith("mds") else fastload.LitDataset
        read, files = epochs(functools.partial(kind, **LIMITED)), functools.partial(stored, name)
        shard = next(one for one in stored(name) if one != "index.json")
        made |= {name: Reader(files, shard, read), f"index of {name}": Reader(files, "index.json", read)}
    made["beton"] = Reader(beton, "0.beton", epochs(functools.partial(fastload.BetonDataset, **LIMITED)))
    return made


def _tables() -> dict[str, Reader]:
    rows = [{"key": f"{n}.jpg", "label": n} for n in range(6)]
    csv = b"key,label\n" + b"".join(b"%d.jpg,%d\n" % (n, n) for n in range(6))
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    found: dict[str, Callable[[], bytes]] = {
        "csv": lambda: csv,
        "jsonl": lambda: lines,
        "json": lambda: json.dumps(rows).encode(),
        "csv.gz": lambda: gzip.compress(csv),
        "jsonl.gz": lambda: gzip.compress(lines),
        "parquet": lambda: parquet(pa.Table.from_pylist(rows)),  # imports pandas
    }
    return {
        f"table {end}": Reader(
            lambda e=end: {f"t.{e}": found[e]()},
            f"t.{end}",
            epochs(lambda folder, e=end: fastload.TableDataset(folder / f"t.{e}", FIELDS, **LIMITED)),
        )
        for end in found
    }


def _single() -> dict[str, Reader]:
    row = {"a": 1, "b": memoryview(b"xyz"), "c": [1.5]}
    error = b"<Error><Code>NoSuchKey</Code><Message>s3://b/k?sig=x is gone</Message></Error>"
    doors: dict[str, tuple[Callable[[], bytes], Callable[[Path], object]]] = {
        "sample": (sample, content(lambda data: type(load(bytearray(data))))),
        "row": (lambda: bytes(dump(row)), content(lambda data: type(load(data)))),
        "answer": (lambda: error, content(answer)),
        **{name: (lambda n=name: pictures()[n], image) for name in pictures()},
    }
    made = {name: Reader(lambda e=one: {"input": e()}, "input", read) for name, (one, read) in doors.items()}
    made["pack"] = Reader(packed, next(iter(packed())), packs)
    made["sample log"] = Reader(lambda: {"log/rank-0.samples": log()}, "log/rank-0.samples", proved)
    made["state"] = Reader(lambda: {"input": json.dumps(state()).encode(), **photos()}, "input", resumed)
    return made
