"""The data of a job: files in the open formats, written plainly, and what each sample is by definition.

Nothing here imports the inside of fastload: `World.make` opens the data by fastload's public names, and
`World.slow` is a torch dataset that says what the samples are.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, get_worker_info

import fastload
from bench.peers.scripts.torchvision_on_cpu import torchvision

Job = dict[str, Any]
BLUE = 6  # an image's blue is its number times this


class Bad(Exception):
    """A sample that cannot be made. The name is that of the error which the user gets."""


class World(NamedTuple):
    """See the module.

    Attributes:
        make: the dataset, opened anew by fastload.
        slow: the same samples by definition, in the same order.
        refused: the error that `make` has to raise; "": none.
    """

    make: Callable[[], Any]
    slow: Any
    refused: str = ""


# --- values -----------------------------------------------------------------------------------------------

# name -> value of sample i. What differs from sample to sample, differs with a phase of the job's.
VALUES: dict[str, Callable[[int], Any]] = {
    "int": lambda i: 7 * i,
    "float": lambda i: i / 4,
    "bool": lambda i: i % 2 == 0,
    "text": lambda i: f"t{i}",
    "array": lambda i: [i + 0.5, 1.5, -2.0],
    "dict": lambda i: {"a": i, "b": [i, 2 * i]},
    "words": lambda i: ["a", f"b{i}"],
    "pairs": lambda i: [{"a": "x", "b": [str(i), 1.5]}, i],
    "mixed": lambda i: i if i % 2 else i + 0.5,
    "boolint": lambda i: bool(i % 4) if i % 2 else i,
    "null": lambda i: None if i % 5 == 4 else i,
    "ragged": lambda i: list(range(i % 3)),
    "boxes": lambda i: [[i, 1, 2, 3]] * (i % 3),
    "empties": lambda i: [[[]], [[], []], []][i % 3],
    "deep": lambda i: {"a": [1, i if i % 3 else i / 2], "b": "x"},
    "members": lambda i: {"a": i} | ({"b": 1} if i % 3 == 0 else {}),
    "big": lambda i: 2**40 + i,
    "conj": lambda i: torch.tensor([complex(i, 1)]).conj(),
    "negative": lambda i: torch.tensor([complex(0, i + 1)]).conj().imag,
    "scalar": lambda i: np.float32(i / 8),
    "half": lambda i: torch.tensor(i / 8, dtype=torch.bfloat16),
}
PLAIN = ["int", "float", "bool", "text", "array", "dict", "words", "pairs", "big"]
UNEVEN = ["mixed", "boolint", "null", "ragged", "boxes", "empties", "deep", "members"]
JSON = PLAIN + UNEVEN
TYPED = ["int", "float", "bool", "text", "array", "big", "mixed", "null", "ragged", "boxes", "empties"]


def values_of(job: Job, i: int) -> dict[str, Any]:
    return {"id": i} | {name: VALUES[name](i + job["salt"]) for name in job["values"]}


# --- images -----------------------------------------------------------------------------------------------

SIZES = [(31, 31), (40, 30), (30, 41), (52, 37), (24, 25), (61, 44)]


@functools.cache
def image_file(i: int, salt: int = 0) -> bytes:
    """A photo whose red grows to the right, whose green grows downwards, and whose blue tells its number."""
    width, height = SIZES[(i + salt) % len(SIZES)]
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    file = io.BytesIO()
    pixels = np.stack([across, down, np.full_like(down, BLUE * i)], axis=2).astype(np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", quality=100, subsampling=0)
    return file.getvalue()


@functools.cache
def mask_file(i: int, salt: int = 0) -> bytes:
    """A mask whose numbers are the red of the photo."""
    width, height = SIZES[(i + salt) % len(SIZES)]
    file = io.BytesIO()
    across = np.tile(np.linspace(0, 255, width), (height, 1)).astype(np.uint8)
    Image.fromarray(across).save(file, "PNG")
    return file.getvalue()


def to_tensor(image: Any) -> torch.Tensor:
    pixels = np.array(image.convert("RGB").resize((9, 7), Image.Resampling.NEAREST))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


@functools.cache
def torchvision_steps(salt: int) -> Any:
    steps = torchvision.transforms
    height, width = 12 + salt % 5, 10 + salt % 7
    crop = (height - salt % 3, width + salt % 11)
    flips = [steps.RandomHorizontalFlip(1.0)] if salt % 3 else []
    return steps.Compose([*flips, steps.Resize((height, width)), steps.CenterCrop(crop), steps.PILToTensor()])


def transform_of(job: Job) -> Any:
    return {
        "none": None,
        "plain": to_tensor,
        "center": fastload.CenterCrop(8),
        "drawn": fastload.RandomResizedCrop(8, flip=0.5),
        "fuse": fastload.fuse(torchvision_steps(job["salt"])) if job["transform"] == "fuse" else None,
    }[job["transform"]]


def mask_transform(job: Job) -> Any:
    options: Any = {"interpolation": "nearest", "channels": 1}
    if job["transform"] == "center":
        return fastload.CenterCrop(8, **options)
    return fastload.RandomResizedCrop(8, flip=0.5, **options)


def slow_image(job: Job, data: bytes) -> torch.Tensor:
    """What the transform of the job makes of a file, by Pillow and torchvision.

    Of a random crop only the shape and the blue are known here; the judge asks for the box that was drawn.
    """
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except OSError:
        raise Bad("DecodeError") from None
    if job["transform"] == "plain":
        return to_tensor(image)
    if job["transform"] == "fuse":
        return torchvision_steps(job["salt"])(image)
    pixels = torch.from_numpy(np.atleast_3d(np.array(image))).permute(2, 0, 1)
    return torchvision.transforms.functional.center_crop(pixels, [8, 8])


# --- datasets of torch ------------------------------------------------------------------------------------


class Made(Dataset[Any]):
    """Samples that functions make."""

    def __init__(self, makers: list[Callable[[], Any]]) -> None:
        self.makers = makers

    def __len__(self) -> int:
        return len(self.makers)

    def __getitem__(self, index: Any) -> Any:
        index = index[0] if isinstance(index, tuple) else index  # (index, scale) of `own-pairs`
        return self.makers[index]()


class MadeAtOnce(Made):
    """Offers `__getitems__` too."""

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        return [self[index] for index in indices]


class Flow(IterableDataset[Any]):
    """The same samples, shared out to the workers."""

    def __init__(self, made: Made) -> None:
        self.made = made

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        return (self.made[index] for index in range(first, len(self.made), step))


class SlowMap(Dataset[Any]):
    """`fastload.map` by definition."""

    def __init__(self, dataset: Any, function: Callable[[Any], Any]) -> None:
        self.dataset, self.function = dataset, function

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.function(self.dataset[index])


def with_one(sample: Any) -> Any:
    return {"sample": sample, "one": 1}


def wrap(job: Job, dataset: Any, *, slow: bool) -> Any:
    mapped = SlowMap if slow else fastload.map
    n, kind = (0 if job["wrap"] == "none" else len(dataset)), job["wrap"]
    if n == 0:
        return dataset
    indices = [(3 * i + job["salt"]) % n for i in range(max(n - 1, 1))]
    if kind == "subset":
        return Subset(dataset, indices)
    if kind == "concat":
        return ConcatDataset([Subset(dataset, indices[: n // 2 + 1]), dataset])
    if kind == "stack":
        return StackDataset(first=dataset, second=Subset(dataset, list(range(n))[::-1]))
    if kind == "map":
        return mapped(dataset, with_one)
    if kind == "nested":
        return Subset(mapped(ConcatDataset([dataset, Subset(dataset, indices)]), with_one), indices)
    if kind == "split":
        return torch.utils.data.random_split(dataset, [n - n // 3, n // 3], torch.Generator().manual_seed(3))[
            0
        ]
    return dataset


# --- files ------------------------------------------------------------------------------------------------


def put(path: Path, body: bytes) -> Path:
    """Write a file, unless it is there: it would be another version."""
    if not path.exists() or path.read_bytes() != body:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return path


def lay(folder: Path, objects: dict[str, bytes]) -> None:
    """Make the files of a folder be these."""
    for path in [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []:
        if str(path.relative_to(folder)) not in objects:
            path.unlink()
    for key, body in objects.items():
        put(folder / key, body)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def items_of(job: Job, changed: bool) -> list[tuple[str, int]]:
    """(key, number) of each object; `changed`: after the change of the bucket."""
    n = job["n"]
    items = {f"c{i % 3}/{i:03d}": i for i in range(n)}
    if changed:
        kind, at = job["change"], f"c{job['salt'] % n % 3}/{job['salt'] % n:03d}"
        items |= {"add": {"c0/zzz": n}, "class": {"b/000": n}, "replace": {at: n + 1}}.get(kind, {})
        if kind == "delete" and len([key for key in items if key[:2] == at[:2]]) > 1:
            del items[at]
    return sorted(items.items())


def photo(job: Job, i: int) -> bytes:
    return b"\xff\xd8\xff\xe0 damaged" if i in job["bad"] else image_file(i, job["salt"])


def folder_world(job: Job, folder: Path, cache: Any, changed: bool) -> World:
    items = items_of(job, changed)
    lay(folder, {f"{key}.jpg": photo(job, i) for key, i in items})
    classes = sorted({key.partition("/")[0] for key, _ in items})

    def maker(key: str, i: int) -> Any:
        return lambda: (slow_image(job, photo(job, i)), classes.index(key.partition("/")[0]))

    make = lambda: fastload.ImageFolder(str(folder), transform_of(job), cache=cache)  # noqa: E731
    return World(make, Made([maker(key, i) for key, i in items]))


def decode_json(data: bytes) -> Any:
    return json.loads(data)


def objects_world(job: Job, folder: Path, cache: Any, changed: bool) -> World:
    items = items_of(job, changed)
    if job["transform"] != "none":
        lay(folder, {key: photo(job, i) for key, i in items})
        make = lambda: fastload.ObjectDataset(str(folder), transform=transform_of(job), cache=cache)  # noqa: E731
        return World(make, Made([functools.partial(slow_image, job, photo(job, i)) for _, i in items]))

    def body(i: int) -> bytes:
        return b'{"id": ' if i in job["bad"] else json.dumps(values_of(job, i)).encode()

    def load(i: int) -> Any:
        if i in job["bad"]:
            raise Bad("JSONDecodeError")
        return json.loads(body(i))

    lay(folder, {key: body(i) for key, i in items})
    make = lambda: fastload.ObjectDataset(str(folder), decode=decode_json, cache=cache)  # noqa: E731
    return World(make, Made([functools.partial(load, i) for _, i in items]))


def plain_world(job: Job, folder: Path, cache: Any, changed: bool) -> World:
    def make_sample(i: int) -> Any:
        if i in job["bad"]:
            raise ValueError("bad")
        return values_of(job, i)

    made = (MadeAtOnce if job["bulk"] else Made)([functools.partial(make_sample, i) for i in range(job["n"])])
    if job["kind"] == "iterable":
        return World(lambda: Flow(made), Flow(made))
    if job["kind"] == "cached":
        made.__fingerprint__ = f"{folder}"  # type: ignore[attr-defined]
        return World(lambda: fastload.cached(made, cache or str(folder / "cache")), made)
    return World(lambda: made, made)


class Part(Made):
    """One source of a mixture."""


def mixture_world(job: Job, folder: Path, cache: Any, changed: bool) -> World:
    n = job["n"]
    makers = [functools.partial(values_of, job, i) for i in range(n)]
    parts = {"a": Part(makers[: n // 2]), "b": Part(makers[n // 2 :])}
    weights = [7, 1] if job["restart"] == "other" and changed else [1 + job["salt"] % 3, 2]
    return World(lambda: fastload.Mixture(parts, weights), Made(makers))


# --- tables -----------------------------------------------------------------------------------------------


def sampled(value: Any, kind: Any) -> Any:
    """A value of an Arrow column as a sample has it: lists of numbers are arrays of the column's type."""
    if isinstance(value, list) and pa.types.is_nested(kind):
        inner = kind.value_type
        if pa.types.is_integer(inner) or pa.types.is_floating(inner):
            return value if None in value else np.array(value, inner.to_pandas_dtype())
        items = [sampled(one, inner) for one in value]
        alike = len({one.shape for one in items if isinstance(one, np.ndarray)}) == 1
        return np.stack(items) if items and alike and pa.types.is_nested(inner) else items
    return value


def as_arrow(rows: list[dict[str, Any]]) -> Any:
    table = pa.Table.from_pylist(rows)
    if "empties" not in table.column_names:
        return table
    kind = pa.list_(pa.list_(pa.int32()))  # which nobody can infer
    return table.set_column(
        table.column_names.index("empties"), "empties", pa.array([row["empties"] for row in rows], kind)
    )


def table_world(job: Job, folder: Path, cache: Any, changed: bool) -> World:
    n, source, photos = job["n"], job["source"], job["transform"] != "none"
    rows = [values_of(job, i) | ({"key": f"{i:03d}"} if photos else {}) for i in range(n)]
    files = {f"{i:03d}": photo(job, i) for i in range(n)} if photos else {}
    if job["mask"]:
        rows = [row | {"mask": f"m{i:03d}"} for i, row in enumerate(rows)]
        files |= {f"m{i:03d}": mask_file(i, job["salt"]) for i in range(n)}
    lay(folder / "photos", files)
    table = pa.Table.from_pylist(rows) if source == "list" else as_arrow(rows)
    path = folder / f"table.{source}"
    given: Any = str(path)
    if source == "csv":
        pa.csv.write_csv(table, path)
        table = pa.csv.read_csv(path)
    elif source == "json":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        table = pa.json.read_json(path)
    elif source == "parquet":
        pq.write_table(table, path)
    else:
        given = {"list": rows, "arrow": table}[source]
    names = ["id", *job["values"]]
    fields: Any = {name: name for name in names} | ({"key": fastload.File("key")} if photos else {})
    fields |= {"mask": fastload.File("mask")} if job["mask"] else {}
    if job["shape"] == "tuple":
        fields = tuple(fields.values())
    kinds = {name: table.schema.field(name).type for name in names}
    whole = table.select(names).to_pylist()
    refused = any(has_null(row[name], kinds[name]) for row in whole for name in names)
    refused |= any(pa.types.is_null(kind) for kind in kinds.values())

    def maker(i: int) -> Any:
        row = {
            name: regular(sampled(whole[i][name], kinds[name]), kinds[name], name, whole) for name in names
        }
        row |= {"key": slow_image(job, photo(job, i))} if photos else {}
        row |= {"mask": slow_image(job, mask_file(i, job["salt"]))} if job["mask"] else {}
        return tuple(row.values()) if job["shape"] == "tuple" else row

    url = {"url": str(folder / "photos"), "cache": cache} if photos else {}
    transform = {"transform": transform_of(job)} if photos else {}
    if transform and job["transform"] == "plain":
        transform = {"transform": {"key": to_tensor}}
    if job["mask"]:
        transform = {"transform": {"key": transform_of(job), "mask": mask_transform(job)}}
    make = lambda: fastload.TableDataset(given, fields, **url, **transform)  # noqa: E731
    return World(
        make, Made([functools.partial(maker, i) for i in range(n)]), "ArgumentError" if refused else ""
    )


def to_tensors(images: list[Any]) -> list[torch.Tensor]:
    return [to_tensor(image) for image in images]


def parts_world(job: Job, folder: Path, cache: Any, changed: bool) -> World:
    """Samples that lie in two objects, in any order and with other bytes between them; and lists of parts."""
    n, salt, photos = job["n"], job["salt"], job["transform"] != "none"
    packs = {f"{number}.bin": b"-" * (salt % 7) for number in range(2)}
    rows: list[dict[str, Any]] = [{"id": i, "pack": f"{(i + salt) % 2}.bin"} for i in range(n)]

    def add(i: int, body: bytes) -> tuple[int, int]:
        name = rows[i]["pack"]
        start = len(packs[name])
        packs[name] += body + b"-" * ((i + salt) % 3)
        return start, start + len(body)

    lists = [[i + k for k in range((i + salt) % 3 if "extra" in job["quirks"] else 2)] for i in range(n)]
    for i in sorted(range(n), key=lambda i: (i * (salt + 1) % 11, i)):
        damaged = i in job["bad"] and not photos
        body = b'{"id": ' if damaged else json.dumps(values_of(job, i)).encode()
        edges = [add(i, str(value).encode()) for value in lists[i]]
        rows[i] |= {"froms": [start for start, _ in edges], "tos": [stop for _, stop in edges]}
        rows[i] |= dict(zip(("start", "stop"), add(i, body), strict=True))
        if photos:
            rows[i] |= dict(zip(("from", "to"), add(i, photo(job, i)), strict=True))
            rows[i]["images"] = [f"{i}.jpg", f"{i}.jpg"]
    images = {f"{i}.jpg": image_file(i, salt) for i in range(n)} if photos else {}
    lay(folder / "objects", packs | images)
    fields: Any = {
        "id": "id",
        "part": fastload.File("pack", range=("start", "stop"), decode=decode_json),
        "list": fastload.File("pack", range=("froms", "tos"), decode=decode_json),
    }
    if photos:
        fields |= {"key": fastload.File("pack", range=("from", "to")), "pair": fastload.File("images")}
    if job["shape"] == "tuple":
        fields = tuple(fields.values())
    one, two = ("key", "pair") if job["shape"] == "dict" else ("pack (3)", "images")

    def maker(i: int) -> Any:
        if i in job["bad"] and not photos:
            raise Bad("JSONDecodeError")
        row = {"id": i, "part": values_of(job, i), "list": lists[i]}
        if photos:
            row |= {"key": slow_image(job, photo(job, i))}
            row |= {"pair": [slow_image(job, image_file(i, salt)) for _ in range(2)]}
        return tuple(row.values()) if job["shape"] == "tuple" else row

    transform: Any = {one: transform_of(job), two: transform_of(job)} if photos else None
    if job["transform"] == "plain":
        transform = {one: to_tensor, two: to_tensors}
    make = lambda: fastload.TableDataset(  # noqa: E731
        rows, fields, url=str(folder / "objects"), transform=transform, cache=cache
    )
    return World(make, Made([functools.partial(maker, i) for i in range(n)]))


def regular(value: Any, kind: Any, name: str, rows: list[dict[str, Any]]) -> Any:
    """Lists of lists that have one length in the whole column are one array, also where it is empty."""
    if not pa.types.is_nested(kind) or not pa.types.is_nested(kind.value_type):
        return value
    lengths = {len(inner) for row in rows for inner in row[name]}
    numbers = pa.types.is_integer(kind.value_type.value_type) or pa.types.is_floating(
        kind.value_type.value_type
    )
    if len(lengths) != 1 or not numbers:
        return value
    dtype = kind.value_type.value_type.to_pandas_dtype()
    return np.array(value, dtype).reshape(len(value), *lengths)


def has_null(value: Any, kind: Any) -> bool:
    return value is None or (isinstance(value, list) and any(has_null(one, None) for one in value))


def parquet_world(job: Job, folder: Path, cache: Any, changed: bool) -> World:
    rows = [values_of(job, i) for i in range(job["n"])]
    table = as_arrow(rows)
    if job["filter"]:
        column = pa.array([(i % 5) / 10 for i in range(job["n"])], pa.float32())
        table = table.append_column("x", column)
    if job["transform"] != "none":
        table = table.append_column("key", pa.array([photo(job, row["id"]) for row in rows], pa.binary()))
    size, cut = 2 + job["salt"] % 5, len(rows) // 2
    for name, part in (("a", table.slice(0, cut)), ("b", table.slice(cut))):
        file = io.BytesIO()
        pq.write_table(part, file, row_group_size=size)
        put(folder / f"{name}.parquet", file.getvalue())
    filters, kept = filter_of(job, table)
    whole = table.to_pylist()

    def maker(i: int) -> Any:
        row = {}
        for name, value in whole[i].items():
            kind = table.schema.field(name).type
            if value is None and not pa.types.is_string(kind):
                raise Bad("DecodeError")
            row[name] = slow_image(job, value) if name == "key" else sampled(value, kind)
        return row

    transform = {"key": to_tensor} if job["transform"] == "plain" else transform_of(job)
    make = lambda: fastload.ParquetDataset(  # noqa: E731
        str(folder / "*.parquet"), transform=transform, filters=filters, cache=cache
    )
    return World(make, Made([functools.partial(maker, i) for i in kept]))


def filter_of(job: Job, table: Any) -> tuple[Any, list[int]]:
    """(filters of a job, the rows that pass): a float32 is widened to a double."""
    if not job["filter"]:
        return None, list(range(len(table)))
    name, operator, value = job["filter"]
    column = table.column(name).to_pylist()
    passes = {
        "=": lambda x: x is not None and x == value,
        "in": lambda x: x is not None and x in value,
        "not in": lambda x: x not in value,  # of a null too, as pyarrow has it
        "<": lambda x: x is not None and x < value,
        ">=": lambda x: x is not None and x >= value,
    }[operator]
    return [(name, operator, value)], [i for i, x in enumerate(column) if passes(x)]


# --- shards -----------------------------------------------------------------------------------------------


def shards_of(job: Job) -> list[range]:
    """The samples of each of three shards; one may be empty."""
    n = job["n"]
    edges = [0, n // 3, n // 3 if job["salt"] % 4 == 3 else n // 2, n]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def tar_world(job: Job, folder: Path, cache: Any, changed: bool) -> World:
    photos, samples = job["transform"] != "none", []
    for number, part in enumerate(shards_of(job)):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for i in part:
                members = {"json": json.dumps(values_of(job, i)).encode()}
                members |= {"jpg": photo(job, i)} if photos else {}
                members |= {"png": mask_file(i, job["salt"])} if job["mask"] else {}
                members |= {"txt": b"more"} if "extra" in job["quirks"] and i % 4 == 1 else {}
                for end, body in members.items():
                    member = tarfile.TarInfo(f"{i:04d}.{end}")
                    member.size = len(body)
                    tar.addfile(member, io.BytesIO(body))
        samples += read_tar(put(folder / f"part-{number}.tar", file.getvalue()))
    names = ("json", *(("jpg",) if photos else ()), *(("png",) if job["mask"] else ()))
    fields: Any = None if job["shape"] == "dict" else names

    def maker(members: dict[str, bytes]) -> Any:
        opened = {
            name: json.loads(body)
            if name == "json"
            else body.decode()
            if name in ("__key__", "txt")
            else body
            for name, body in members.items()
        }
        opened |= {name: slow_image(job, members[name]) for name in names if name != "json"}
        return opened if fields is None else tuple(opened[name] for name in fields)

    transform = {"jpg": to_tensor} if job["transform"] == "plain" else transform_of(job)
    if job["mask"]:
        transform = {"jpg": transform, "png": mask_transform(job)}
    make = lambda: fastload.TarDataset(  # noqa: E731
        str(folder / "part-*.tar"), transform=transform, fields=fields, cache=cache
    )
    return World(make, Made([functools.partial(maker, one) for one in samples]))


def read_tar(path: Path) -> list[dict[str, bytes]]:
    """The samples of a tar by Python's own reader: members that differ only in their extension."""
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, _, end = member.name.partition(".")
            found.setdefault(key, {"__key__": key.encode()})[end] = tar.extractfile(member).read()  # type: ignore[union-attr]
    return list(found.values())


@functools.cache
def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


def masked_crc(data: bytes) -> bytes:
    crc, table = 0xFFFFFFFF, _crc_table()
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _wire(number: int, body: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    value, out = value & (1 << 64) - 1, b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def example(features: dict[str, Any]) -> bytes:
    """A tf.train.Example: the kind of a list is that of its type here, even where it is empty."""
    entries = b""
    for name, (kind, value) in features.items():
        values = value if isinstance(kind, list) else [value]
        kind = kind[0] if isinstance(kind, list) else kind
        if kind is int:
            body = _wire(3, _wire(1, b"".join(map(_varint, values))))
        elif kind is float:
            body = _wire(2, _wire(1, struct.pack(f"<{len(values)}f", *values)))
        else:
            body = _wire(1, b"".join(_wire(1, v.encode() if kind is str else v) for v in values))
        entries += _wire(1, _wire(1, name.encode()) + _wire(2, body))
    return _wire(1, entries)


FEATURES: dict[str, Any] = {
    "int": int,
    "float": float,
    "text": str,
    "big": int,
    "array": [float],
    "ragged": [int],
}


def tfrecord_world(job: Job, folder: Path, cache: Any, changed: bool) -> World:
    photos = job["transform"] != "none"
    features = (
        {"id": int} | {name: FEATURES[name] for name in job["values"]} | ({"key": bytes} if photos else {})
    )
    for number, part in enumerate(shards_of(job)):
        body, index = b"", ""
        for i in part:
            row = values_of(job, i) | ({"key": photo(job, i)} if photos else {})
            record = example({name: (kind, row[name]) for name, kind in features.items()})
            length = struct.pack("<Q", len(record))
            framed = length + masked_crc(length) + record + masked_crc(record)
            index += f"{len(body)} {len(framed)}\n"
            body += framed
        put(folder / f"part-{number}.tfrecord", body)
        if "index" in job["quirks"]:
            put(folder / f"part-{number}.idx", index.encode())

    def maker(i: int) -> Any:
        row = values_of(job, i)
        for name, kind in features.items():
            if kind == [float] or kind == [int]:
                row[name] = np.array(row[name], np.float32 if kind == [float] else np.int64)
            elif kind is float:
                row[name] = float(np.float32(row[name]))
        return row | ({"key": slow_image(job, photo(job, i))} if photos else {})

    transform = {"key": to_pixels} if job["transform"] == "plain" else transform_of(job)
    make = lambda: fastload.TFRecordDataset(  # noqa: E731
        str(folder / "part-*.tfrecord"), features, transform=transform, cache=cache
    )
    return World(make, Made([functools.partial(maker, i) for i in range(job["n"])]))


def to_pixels(data: Any) -> torch.Tensor:
    try:
        return to_tensor(Image.open(io.BytesIO(data)) if isinstance(data, bytes) else data)
    except OSError:
        raise fastload.errors.DecodeError("not an image") from None


def numbered(bodies: list[bytes], config: bytes = b"") -> bytes:
    """MDS's and LitData's shards: the number of samples, their offsets, MDS's description, the samples."""
    at = 4 * (len(bodies) + 2) + len(config)
    offsets = np.cumsum([at, *map(len, bodies)]).astype("<u4")
    return struct.pack("<I", len(bodies)) + offsets.tobytes() + config + b"".join(bodies)


MDS: dict[str, tuple[str, int | None]] = {
    "int": ("int", 8), "float": ("float64", 8), "text": ("str", None), "big": ("int64", 8),
    **dict.fromkeys(("array", "dict", "words", "pairs", *UNEVEN), ("json", None)),
}  # fmt: skip
_PACKED: dict[str, Callable[[Any], bytes]] = {
    "int": functools.partial(struct.pack, "<q"), "int64": functools.partial(struct.pack, "<q"),
    "float64": functools.partial(struct.pack, "<d"), "float": functools.partial(struct.pack, "<d"),
    "str": str.encode, "json": lambda value: json.dumps(value).encode(), "jpeg": bytes,
    "bool": lambda value: bytes([value]),
}  # fmt: skip


def mds_world(job: Job, folder: Path, cache: Any, changed: bool) -> World:
    photos, shards = job["transform"] != "none", []
    columns = {"id": ("int", 8)} | {name: MDS[name] for name in job["values"]}
    columns |= {"key": ("jpeg", None)} if photos else {}
    for number, part in enumerate(shards_of(job)):
        bodies = []
        for i in part:
            row = values_of(job, i) | ({"key": photo(job, i)} if photos else {})
            cells = {name: _PACKED[kind](row[name]) for name, (kind, _) in columns.items()}
            sizes = [len(cells[name]) for name, (_, size) in columns.items() if size is None]
            bodies.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(cells.values()))
        data = numbered(bodies, b"{}")
        put(folder / f"shard.{number}.mds", data)
        shards.append(
            {
                "version": 2,
                "format": "mds",
                "compression": None,
                "samples": len(part),
                "hashes": [],
                "column_names": list(columns),
                "column_encodings": [kind for kind, _ in columns.values()],
                "column_sizes": [size for _, size in columns.values()],
                "size_limit": 1 << 20,
                "zip_data": None,
                "raw_data": {"basename": f"shard.{number}.mds", "bytes": len(data), "hashes": {}},
            }
        )
    put(folder / "index.json", json.dumps({"version": 2, "shards": shards}).encode())
    scalars = {"float64": np.float64, "int64": np.int64}

    def maker(i: int) -> Any:
        row = values_of(job, i)
        row = {name: scalars.get(columns[name][0], lambda one: one)(value) for name, value in row.items()}
        return row | ({"key": slow_image(job, photo(job, i))} if photos else {})

    transform = {"key": to_tensor} if job["transform"] == "plain" else transform_of(job)
    make = lambda: fastload.MDSDataset(str(folder), transform=transform, cache=cache)  # noqa: E731
    return World(make, Made([functools.partial(maker, i) for i in range(job["n"])]))


LIT = {"int": "int", "float": "float", "text": "str", "big": "int", "bool": "bool"}


def lit_world(job: Job, folder: Path, cache: Any, changed: bool) -> World:
    photos, chunks = job["transform"] != "none", []
    leaves = {"id": "int"} | {name: LIT[name] for name in job["values"]} | ({"key": "jpeg"} if photos else {})
    for number, part in enumerate(shards_of(job)):
        bodies = []
        for i in part:
            row = values_of(job, i) | ({"key": photo(job, i)} if photos else {})
            cells = [_PACKED[kind](row[name]) for name, kind in leaves.items()]
            bodies.append(struct.pack(f"<{len(cells)}I", *map(len, cells)) + b"".join(cells))
        if bodies:
            data, name = numbered(bodies), f"chunk-0-{number}.bin"
            put(folder / name, data)
            chunks.append({"filename": name, "chunk_size": len(part), "chunk_bytes": len(data), "dim": None})
    leaf = {"type": None, "context": None, "children_spec": []}
    spec = {
        "type": "builtins.dict",
        "context": json.dumps(list(leaves)),
        "children_spec": [leaf] * len(leaves),
    }
    config = {
        "compression": None, "chunk_size": None, "chunk_bytes": 1 << 20, "data_format": list(leaves.values()),
        "data_spec": json.dumps([1, spec]), "encryption": None, "item_loader": "PyTreeLoader",
    }  # fmt: skip
    put(folder / "index.json", json.dumps({"chunks": chunks, "config": config, "updated_at": "0"}).encode())

    def maker(i: int) -> Any:
        return values_of(job, i) | ({"key": slow_image(job, photo(job, i))} if photos else {})

    make = lambda: fastload.LitDataset(str(folder), transform=transform_of(job), cache=cache)  # noqa: E731
    return World(make, Made([functools.partial(maker, i) for i in range(job["n"])]))


BLOCK = 211  # more than a batch has samples, so that none is taken for a sample


def tokens_world(job: Job, folder: Path, cache: Any, changed: bool) -> World:
    overlap = job["salt"] % 2
    tokens = np.arange(job["n"] * BLOCK + overlap, dtype=np.uint16)
    cut = len(tokens) // 2 + job["salt"] % 7
    lay(folder, {"a.bin": tokens[:cut].tobytes(), "b.bin": tokens[cut:].tobytes()})

    def maker(i: int) -> Any:
        return torch.from_numpy(tokens[i * BLOCK : (i + 1) * BLOCK + overlap].astype(np.int64))

    make = lambda: fastload.TokenDataset(  # noqa: E731
        str(folder), "uint16", block=BLOCK, overlap=overlap, cache=cache
    )
    return World(make, Made([functools.partial(maker, i) for i in range(job["n"])]))


class Kind(NamedTuple):
    """A kind of data.

    Attributes:
        build: (job, folder, cache, changed) -> world.
        values: names of the values that it can hold.
        transforms: that its images can have; "none": it can do without images.
        streams: an epoch is read as streams: none, or all, or only until it is indexed.
    """

    build: Callable[[Job, Path, Any, bool], World]
    values: list[str]
    transforms: tuple[str, ...] = ("none",)
    streams: bool = False
    indexed: bool = True


_ALL = ("none", "plain", "center", "drawn", "fuse")
KINDS = {
    "plain": Kind(plain_world, [*JSON, "conj", "negative", "scalar", "half"]),
    "iterable": Kind(plain_world, JSON),
    "cached": Kind(plain_world, [*JSON, "scalar"]),
    "folder": Kind(folder_world, [], _ALL[1:]),
    "objects": Kind(objects_world, JSON, ("none", "center", "drawn", "fuse")),
    "table": Kind(table_world, TYPED, _ALL),
    "parts": Kind(parts_world, JSON, _ALL),
    "mixture": Kind(mixture_world, PLAIN),
    "tokens": Kind(tokens_world, []),
    "tar": Kind(tar_world, JSON, _ALL, streams=True, indexed=False),
    "tfrecord": Kind(tfrecord_world, list(FEATURES), _ALL, streams=True, indexed=False),
    "parquet": Kind(parquet_world, TYPED, _ALL, streams=True),
    "mds": Kind(mds_world, list(MDS), _ALL, streams=True),
    "lit": Kind(lit_world, list(LIT), ("none", "center", "drawn", "fuse"), streams=True),
}


def open_world(job: Job, folder: Path, *, changed: bool = False) -> World:
    """Write the data of a job below `folder`, and say what it is. `changed`: as it is for the second run."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    cache = None
    if job["cache"] != "none":
        cache = fastload.Cache(folder / "cache", job["cache"])
    world = KINDS[job["kind"]].build(job, data, cache, changed)
    make, slow = world.make, world.slow
    if job["kind"] == "iterable":
        return world
    return World(lambda: wrap(job, make(), slow=False), wrap(job, slow, slow=True), world.refused)
