"""Writes tests/data/formats with the libraries that own the formats, and what their own readers make of it.

    python tests/data/make_formats.py mds FOLDER        mosaicml-streaming 0.13.0
    python tests/data/make_formats.py litdata FOLDER    litdata 0.2.76
    python tests/data/make_formats.py beton FOLDER      ffcv 1.0.2

Each runs in the environment of its peer, see bench/peers/scripts. Every dataset becomes a folder or a file,
and NAME.json beside it has `describe` of each sample, read by the library. The tests read both.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COUNT = 7
NUMBERED = 24  # photos of one colour each, which tells their number: for tests/kinds.py


def numbered(number: int) -> Image.Image:
    file = io.BytesIO()
    Image.new("RGB", (32, 24), (8 * number + 4,) * 3).save(file, "JPEG")
    return Image.open(file)


def describe(value: Any) -> Any:
    """A value as JSON: its type, and its contents or a digest of them."""
    if isinstance(value, memoryview):  # LitData's views of its mapped chunk
        value = bytes(value)
    if isinstance(value, dict):
        return {str(key): describe(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(describe(one) for one in value)]
    if isinstance(value, Image.Image):
        return ["pil", value.mode, list(value.size), _digest(value.tobytes())]
    if isinstance(value, np.ndarray | np.generic):
        return ["numpy", value.dtype.str, list(value.shape), _digest(np.ascontiguousarray(value).tobytes())]
    if type(value).__name__ == "Tensor":
        import torch

        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ["tensor", str(value.dtype), list(value.shape), _digest(data)]
    return [type(value).__name__, repr(value) if not isinstance(value, bytes) else _digest(value)]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def pixels(number: int, height: int = 18, width: int = 24) -> np.ndarray[Any, Any]:
    """Smooth colours that differ from image to image."""
    down, across = np.mgrid[0:height, 0:width]
    planes = [
        (down * 9 + number * 31) % 256,
        (across * 7 + number * 17) % 256,
        (down + across + number * 5) % 256,
    ]
    return np.stack(planes, axis=2).astype(np.uint8)


def encoded(number: int, form: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(number)).save(file, format=form, **({"quality": 92} if form == "JPEG" else {}))
    return file.getvalue()


def save(folder: Path, name: str, samples: list[Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps([describe(one) for one in samples], indent=0) + "\n")


# --- MDS

MDS_COLUMNS = {
    "a_bytes": "bytes", "b_str": "str", "c_int": "int", "d_uint8": "uint8", "d_uint16": "uint16",
    "d_uint32": "uint32", "d_uint64": "uint64", "e_int8": "int8", "e_int16": "int16", "e_int32": "int32",
    "e_int64": "int64", "f_float16": "float16", "f_float32": "float32", "f_float64": "float64",
    "g_str_int": "str_int", "g_str_float": "str_float", "g_str_decimal": "str_decimal", "h_any": "ndarray",
    "h_dtype": "ndarray:int16", "h_fixed": "ndarray:float32:2,3", "i_pil": "pil", "j_jpeg": "jpeg",
    "k_png": "png", "l_array": "jpeg_array", "l_pils": "list[pil]", "l_jpegs": "list[jpeg]",
    "l_pngs": "list[png]", "m_json": "json",
}  # fmt: skip


def mds_sample(number: int) -> dict[str, Any]:
    image = Image.fromarray(pixels(number, 4, 5))
    jpeg = Image.open(io.BytesIO(encoded(number)))
    found: dict[str, Any] = {name: number * 3 + 1 for name, kind in MDS_COLUMNS.items() if "int" in kind}
    found |= {name: number / 4 - 1 for name, kind in MDS_COLUMNS.items() if kind.startswith("float")}
    return found | {
        "a_bytes": bytes(range(number)),
        "b_str": "grün " * number,
        "g_str_int": 10**30 + number,
        "g_str_float": number / 3,
        "g_str_decimal": Decimal("1.50") * number,
        "h_any": np.arange(6 + number, dtype=np.float64),
        "h_dtype": np.full((number + 1, 2), number, np.int16),
        "h_fixed": np.full((2, 3), number / 2, np.float32),
        "i_pil": image.convert("L") if number % 2 else image,
        "j_jpeg": jpeg.convert("L") if number == 3 else jpeg,
        "k_png": image.convert("P") if number == 2 else image,
        "l_array": [encoded(number), encoded(number + 1)],
        "l_pils": [image] * (number % 3),
        "l_jpegs": [image, image.convert("L")],
        "l_pngs": [image],
        "m_json": {"number": number, "boxes": [[1, 2.5], None]},
    }


def make_mds(folder: Path) -> None:
    from streaming import MDSWriter, StreamingDataset

    kinds = {"mds": None, "mds-zstd": "zstd:7", "mds-gz": "gz", "mds-bz2": "bz2", "mds-br": "br"}
    for name, compression in kinds.items():
        columns = MDS_COLUMNS if compression is None else {"image": "jpeg", "label": "int", "text": "str"}
        out = folder / name
        size = 12_000 if compression is None else 4_000
        with MDSWriter(
            out=str(out), columns=columns, size_limit=size, compression=compression, hashes=["xxh64"]
        ) as w:
            for number in range(COUNT):
                plain = {"image": encoded(number), "label": number, "text": "x" * number}
                w.write(mds_sample(number) if compression is None else plain)
        local = None if compression is None else str(folder / f"{name}-local")
        found = StreamingDataset(
            local=local or str(out), remote=str(out) if local else None, shuffle=False, batch_size=1
        )
        save(folder, name, [found[number] for number in range(COUNT)])
    with MDSWriter(
        out=str(folder / "mds-numbered"), columns={"image": "jpeg", "label": "int"}, size_limit=6_000
    ) as w:
        for number in range(NUMBERED):
            w.write({"image": numbered(number), "label": number})
    with MDSWriter(out=str(folder / "mds-pkl"), columns={"thing": "pkl", "label": "int"}) as w:
        for number in range(2):
            w.write({"thing": {1, number}, "label": number})


# --- LitData


def lit_sample(number: int) -> Any:
    import torch

    image = Image.fromarray(pixels(number, 4, 5))
    return {
        "str": "grün " * number,
        "bool": number % 2 == 0,
        "int": number - 3,
        "float": number / 3,
        "bytes": bytes(range(number)),
        "jpeg": Image.open(io.BytesIO(encoded(number))),
        "pil": image,
        "jpegs": [Image.open(io.BytesIO(encoded(number))), Image.open(io.BytesIO(encoded(number + 1)))],
        "flat_numpy": np.arange(number + 1, dtype=np.int16),
        "numpy": np.full((2, number + 1), number / 2, np.float32),
        "flat_tensor": torch.arange(number + 1),
        "tensor": torch.full((2, 1, number), number / 2, dtype=torch.float64),
        "tuple": (number, [float(number), {"deep": "x" * number}]),
        "json": [{"a": number, "b": None}, {"a": 2, "b": "x"}],
    }


def lit_tuple(number: int) -> Any:
    return (Image.open(io.BytesIO(encoded(number))), number)


def lit_list(number: int) -> Any:
    return [encoded(number, "PNG"), str(number)]


def lit_photo(number: int) -> Any:
    return {"image": Image.open(io.BytesIO(encoded(number))), "label": number}


def lit_numbered(number: int) -> Any:
    return (numbered(number), number)


def rgb_tensor(data: bytes) -> Any:
    import torch

    image = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    return torch.from_numpy(image).permute(2, 0, 1)


def make_litdata(folder: Path) -> None:
    import litdata
    from litdata.streaming import serializers
    from litdata.streaming.cache import Cache

    # torchvision's own JPEG operator cannot be loaded beside a CPU build of torch; both are libjpeg-turbo.
    serializers._decode_image_tensor = rgb_tensor

    makers = {
        "lit": (lit_sample, {}),
        "lit-tuple": (lit_tuple, {}),
        "lit-list": (lit_list, {}),
        "lit-photos": (lit_photo, {}),
        "lit-chunk": (lit_photo, {"compression": "zstd", "compression_level": "chunk"}),
        "lit-batch": (
            lit_photo,
            {"compression": "zstd", "compression_level": "batch", "compression_batch_size": 2},
        ),
        "lit-single": (lit_photo, {"compression": "zstd", "compression_level": "sample"}),
        "lit-arrow": (lambda number: {"text": "x" * number, "label": number}, {}),
    }
    for name, (make, options) in makers.items():
        cache = Cache(str(folder / name), chunk_size=3, **options)
        for number in range(COUNT):
            cache[number] = make(number)
        cache.done()
        cache.merge()
        if name != "lit-arrow":
            with tempfile.TemporaryDirectory() as copy:  # LitData inflates chunks in place
                shutil.copytree(folder / name, copy, dirs_exist_ok=True)
                found = litdata.StreamingDataset(copy, shuffle=False)
                save(folder, name, [found[number] for number in range(COUNT)])
    cache = Cache(str(folder / "lit-numbered"), chunk_size=7)
    for number in range(NUMBERED):
        cache[number] = lit_numbered(number)
    cache.done()
    cache.merge()


# --- FFCV


class BetonSamples:
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> Any:
        import torch

        number = int(number)
        return (
            pixels(number, 16, 24),
            pixels(number, 6, 8),
            number - 3,
            number / 3,
            np.frombuffer(b"abc" * (number + 1), np.uint8),
            np.full((2, 3), number, np.int32),
            {"number": number},
            torch.full((3,), number / 2),
        )


class NumberedSamples:
    def __len__(self) -> int:
        return NUMBERED

    def __getitem__(self, number: int) -> Any:
        return np.asarray(numbered(int(number))), int(number)


def make_beton(folder: Path) -> None:
    import torch
    from ffcv import fields
    from ffcv.loader import Loader, OrderOption
    from ffcv.writer import DatasetWriter

    kinds = {
        "jpg": fields.RGBImageField(write_mode="jpg", jpeg_quality=92), "raw": fields.RGBImageField(),
        "int": fields.IntField(), "float": fields.FloatField(), "bytes": fields.BytesField(),
        "array": fields.NDArrayField(np.dtype("int32"), (2, 3)), "json": fields.JSONField(),
        "tensor": fields.TorchTensorField(torch.float32, (3,)),
    }  # fmt: skip
    path = folder / "fields.beton"
    DatasetWriter(str(path), kinds, page_size=1 << 21, num_workers=1).from_indexed_dataset(
        BetonSamples(), chunksize=2
    )
    loader = Loader(str(path), batch_size=1, num_workers=1, order=OrderOption.SEQUENTIAL)
    found = []
    for jpg, raw, whole, real, data, array, told, tensor in loader:
        size = 3 * (len(found) + 1)
        found.append(
            {
                "jpg": jpg.numpy()[0].tolist(),
                "raw": describe(raw.numpy()[0]),
                "int": describe(int(whole)),
                "float": describe(float(real)),
                "bytes": describe(data.numpy()[0][:size].tobytes()),
                "array": describe(array.numpy()[0]),
                "json": describe(fields.JSONField.unpack(told)[0]),
                "tensor": describe(tensor[0]),
            }
        )
    (folder / "fields.json").write_text(json.dumps(found) + "\n")
    (folder / "fields.beton.gz").write_bytes(gzip.compress(trimmed(path.read_bytes()), mtime=0))
    path.unlink()
    path = folder / "numbered.beton"
    kinds = {"image": fields.RGBImageField(write_mode="jpg"), "label": fields.IntField()}
    DatasetWriter(str(path), kinds, page_size=1 << 21, num_workers=1).from_indexed_dataset(
        NumberedSamples(), chunksize=2
    )
    (folder / "numbered.beton.gz").write_bytes(gzip.compress(trimmed(path.read_bytes()), mtime=0))
    path.unlink()


def trimmed(beton: bytes) -> bytes:
    """The file without the zeros that fill its last page, with the allocation table there: 2 MiB, not 4."""
    at = int.from_bytes(beton[16:24], "little")
    parts = np.frombuffer(beton, "<u8", offset=at).reshape(-1, 3)
    end = int((parts[:, 1] + parts[:, 2]).max())
    return beton[:16] + end.to_bytes(8, "little") + beton[24:end] + beton[at:]


if __name__ == "__main__":
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    {"mds": make_mds, "litdata": make_litdata, "beton": make_beton}[sys.argv[1]](target)
