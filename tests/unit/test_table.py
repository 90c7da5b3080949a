"""TableDataset: tables of every kind, samples of every shape, several objects a sample, and bad input."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing.context
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from fastload import (
    Cache,
    CenterCrop,
    DataLoader,
    File,
    ImageFolder,
    ObjectDataset,
    RandomResizedCrop,
    TableDataset,
    cached,
)
from fastload.datasets.views import Prefetches, noted_prefetches
from fastload.errors import ArgumentError, DecodeError, NotFoundError
from tests.photos import pillow_jpeg, scene

N = 12
ROWS = [{"id": f"{n:03d}", "label": n % 3, "score": n / 4, "text": f'say "{n}",\nand go'} for n in range(N)]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """images/000.jpg, masks/000.png, and files of other kinds, all by the ids of the rows."""
    root = tmp_path_factory.mktemp("objects")
    for folder in ("images", "masks", "other"):
        (root / folder).mkdir()
    for number, row in enumerate(ROWS):
        pixels = scene(40, 32, number)
        (root / f"images/{row['id']}.jpg").write_bytes(pillow_jpeg(pixels))
        Image.fromarray(pixels[:, :, 0] // 16).save(root / f"masks/{row['id']}.png")
        (root / f"other/{row['id']}").write_bytes(pillow_jpeg(pixels))
        (root / f"other/{row['id']}.txt").write_text(f"text {number}")
        (root / f"other/{row['id']}.json").write_text(json.dumps({"n": number}))
        (root / f"other/{row['id']}.bin").write_bytes(bytes([number]))
        (root / f"other/{row['id']}.pkl").write_bytes(pickle.dumps(number))
        np.save(root / f"other/{row['id']}.npy", np.full(3, number))
    return root


@pytest.fixture
def table(objects: Path, no_leaks: None, keep: Callable[[Any], Any]) -> Callable[..., TableDataset]:
    """Make a dataset of `ROWS` or another table over `objects`."""

    def make(fields: Any, rows: Any = ROWS, **options: Any) -> Any:
        if "url" not in options and "File" in repr(fields):
            options["url"] = objects
        return keep(TableDataset(rows, fields, **options))

    return make


IMAGE = File("images/{id}.jpg")
MASK = File("masks/{id}.png")


def csv_of(delimiter: str = ",") -> bytes:
    lines = [delimiter.join(ROWS[0])]
    for row in ROWS:
        text = str(row["text"]).replace('"', '""')
        lines.append(delimiter.join([str(row["id"]), str(row["label"]), str(row["score"]), f'"{text}"']))
    return "\n".join(lines).encode()


def lines_of() -> bytes:
    return "\n".join(map(json.dumps, ROWS)).encode()


def parquet_of() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS), sink, row_group_size=5)
    return bytes(sink.getvalue())


FILES = {
    "t.csv": csv_of(),
    "t.CSV": b"\xef\xbb\xbf" + csv_of(),
    "t.tsv": csv_of("\t"),
    "t.csv.gz": gzip.compress(csv_of(), mtime=0),
    "plain-named.csv": gzip.compress(csv_of(), mtime=0),
    "t.jsonl": lines_of(),
    "t.ndjson.gz": gzip.compress(lines_of(), mtime=0),
    "t.json": json.dumps(ROWS, indent=1).encode(),
    "lines.json": lines_of(),
    "t.parquet": parquet_of(),
}


# --- tables


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_kind_have_the_same_rows(name: str, table: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    found = table(("id", "label", "score", "text", IMAGE), tmp_path / name)
    for index, row in enumerate(ROWS):
        *values, image = found[index]
        assert values == list(row.values())
        assert found.key(index) == f"images/{row['id']}.jpg" and image.size == (40, 32)


def _frame() -> Any:
    return pytest.importorskip("pandas").DataFrame(ROWS)


class Streams:
    """A frame of a library that only speaks Arrow's protocol."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return pa.Table.from_pylist(ROWS).__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ROWS,
        lambda: tuple(ROWS),
        lambda: {name: [row[name] for row in ROWS] for name in ROWS[0]},
        lambda: pa.Table.from_pylist(ROWS),
        lambda: pa.concat_tables([pa.Table.from_pylist(ROWS[:5]), pa.Table.from_pylist(ROWS[5:])]),
        lambda: pa.RecordBatch.from_pylist(ROWS),
        lambda: pa.Table.from_pylist(ROWS).set_column(
            0, "id", pa.array([row["id"] for row in ROWS]).dictionary_encode()
        ),
        _frame,
        lambda: _frame().astype({"id": "category", "label": "Int64"}),
        Streams,
    ],
)
def test_tables_in_memory_of_every_kind_have_the_same_rows(make: Any, table: Any) -> None:
    found = table(("id", "label", "score", "text"), make())
    assert len(found) == N and [found[index] for index in range(N)] == [tuple(row.values()) for row in ROWS]
    assert [type(value) for value in found[1]] == [str, int, float, str]


def test_table_in_a_store_is_read_by_its_url(table: Any) -> None:
    import fsspec

    with fsspec.open("memory://tables/t.csv", "wb") as file:
        file.write(csv_of())
    assert table("label", "memory://tables/t.csv")[4] == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        (b"\0x", b"\0x"),
        ([1, 2], np.array([1, 2])),
        ([[1.5, 2.0, 3.0, 4.0]] * 2, np.array([[1.5, 2, 3, 4]] * 2)),
        ([[1.0], [2.0, 3.0]], [np.array([1.0]), np.array([2.0, 3.0])]),
        (["a", "b"], ["a", "b"]),
        ({"a": 1, "b": [2.0]}, {"a": 1, "b": np.array([2.0])}),
        ([{"box": [1.0, 2.0], "kind": 3}], [{"box": np.array([1.0, 2.0]), "kind": 3}]),
        (np.eye(2, dtype=np.float32).tolist(), np.eye(2)),
    ],
)
def test_values_of_columns_have_pythons_and_numpys_types(table: Any, value: Any, expected: Any) -> None:
    found = table("value", [{"value": value}])[0]
    assert type(found) is type(expected)
    np.testing.assert_equal(found, expected)


def test_rows_without_boxes_have_the_shape_of_the_others(table: Any) -> None:
    found = table("boxes", [{"boxes": [[1.0, 2.0, 3.0, 4.0]] * count} for count in (2, 0, 1)])
    assert [found[index].shape for index in range(3)] == [(2, 4), (0, 4), (1, 4)]


def test_arrays_and_tensors_of_columns_keep_their_shape(table: Any) -> None:
    columns = {
        "a": np.arange(12.0).reshape(3, 4),
        "b": torch.arange(3),
        "c": [np.ones(2), np.ones(3), np.ones(0)],
    }
    found = table(("a", "b", "c"), columns)
    assert found[1][0].tolist() == [4, 5, 6, 7] and found[1][1] == 1 and found[2][2].shape == (0,)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "bool", ">i2"])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_arrays_and_tensors_of_a_list_keep_dtype(table: Any, dtype: str, shape: tuple[int, ...]) -> None:
    kept = np.dtype(dtype).newbyteorder("=")
    arrays = [np.ones((count, *shape), dtype) for count in (3, 1)]
    tensors = [torch.from_numpy(one.astype(kept)) for one in arrays]
    found = table(("a", "b"), {"a": [*arrays, np.array([])], "b": [*tensors, torch.empty(0)]})
    for index, array in enumerate(arrays):
        for value in found[index]:
            assert value.dtype == kept and np.array_equal(value, array)
    assert [len(value) for value in found[2]] == [0, 0]
    assert table("a", [{"a": one} for one in arrays])[1].dtype == kept


def test_arrays_of_several_dtypes_and_tensors_that_numpy_has_not_are_numbers(table: Any) -> None:
    mixed = [np.ones(2, np.float32), np.ones(2, np.int8)]
    found = table(("a", "b"), {"a": mixed, "b": [torch.ones(2, dtype=torch.bfloat16)] * 2})
    assert [value.dtype for value in found[1]] == [np.float64, np.float64]


@pytest.mark.parametrize(
    ("column", "first", "batch"),
    [
        (pa.array([b"0" * 16, b"1" * 16], pa.uuid()), b"0" * 16, (b"0" * 16, b"1" * 16)),
        (
            pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1], pa.int8())),
            False,
            torch.tensor([False, True]),
        ),
        (
            pa.ExtensionArray.from_storage(
                pa.fixed_shape_tensor(pa.int32(), (2, 1)), pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
            ),
            np.array([[1], [2]], np.int32),
            torch.tensor([[[1], [2]], [[3], [4]]], dtype=torch.int32),
        ),
    ],
    ids=["uuid", "bool8", "tensor"],
)
def test_extension_columns_are_what_they_stand_for(table: Any, column: Any, first: Any, batch: Any) -> None:
    found = table(("x",), pa.table({"x": column}))
    assert np.array_equal(found[0][0], first) and type(found[0][0]) is type(first)
    [(made,)] = DataLoader(found, batch_size=2)
    assert torch.equal(made, batch) if isinstance(batch, torch.Tensor) else made == batch


def test_frame_with_numbers_for_names_has_its_columns_as_text(table: Any) -> None:
    pd = pytest.importorskip("pandas")
    assert table(("1", "0"), pd.DataFrame([[5, 6]]))[0] == (6, 5)


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_dates_in_a_file_of_text_stay_text(table: Any, objects: Path, tmp_path: Path, name: str) -> None:
    (objects / "2024-01-02.txt").write_text("a day")
    row = {"day": "2024-01-02", "time": "12:30:00", "n": 1}
    lines = [",".join(row), ",".join(map(str, row.values()))] if name == "t.csv" else [json.dumps(row)]
    (tmp_path / name).write_text("\n".join(lines))
    found = table((File("{day}.txt"), "day", "time", "n"), tmp_path / name)
    assert found[0] == ("a day", "2024-01-02", "12:30:00", 1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", b"score\n1e20\n3\n-9223372036854775808\n"),
        ("t.jsonl", b'{"score": 1e20}\n{"score": 3}\n{"score": -9223372036854775808}\n'),
    ],
)
def test_large_floats_beside_whole_numbers_are_floats(
    name: str, content: bytes, table: Any, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    data = table("score", tmp_path / name)
    assert [data[row] for row in range(3)] == [1e20, 3.0, -(2.0**63)]


def test_nan_of_a_frame_stays_nan(table: Any) -> None:
    pandas = pytest.importorskip("pandas")
    assert np.isnan(table("y", pandas.DataFrame({"y": [1.0, float("nan")]}))[1])


# --- shapes and batches


@pytest.mark.parametrize(
    "fields",
    [
        (IMAGE, "label"),
        {"x": IMAGE, "y": "score"},
        (IMAGE, {"y": "label", "more": ("text", "score")}),
        [IMAGE, "label", "label"],
    ],
)
def test_batches_of_any_shape_are_the_collated_samples(table: Any, fields: Any) -> None:
    found = table(fields, transform={"x" if isinstance(fields, dict) else "id": CenterCrop(8)})
    [batch] = DataLoader(found, batch_size=N)
    expected = default_collate([found[index] for index in range(N)])
    assert repr(batch) == repr(expected)


@pytest.mark.parametrize("fields", ["label", ("label", "text"), {"a": "score", "b": ("label", "id")}])
def test_tables_without_objects_need_no_store(table: Any, fields: Any) -> None:
    found = table(fields)
    assert found.key(3) == "row 3"
    [batch] = DataLoader(found, batch_size=N)
    assert repr(batch) == repr(default_collate([found[index] for index in range(N)]))
    [listed] = DataLoader(found, batch_size=N, collate_fn=list)
    assert listed == [found[index] for index in range(N)]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "uint64", "float16", "float32", "float64", "S3"])
def test_columns_of_every_type_make_the_batch_of_their_samples(table: Any, dtype: str) -> None:
    found = table({"a": "a"}, {"a": np.arange(N).astype(dtype)})
    [batch] = DataLoader(found, batch_size=N)
    assert repr(batch) == repr(default_collate([found[index] for index in range(N)]))


def test_index_outside_of_the_table_is_an_error(table: Any) -> None:
    found = table("label")
    assert found[-1] == found[N - 1] == ROWS[-1]["label"]
    for read in (lambda: found[N], lambda: list(DataLoader(found, batch_sampler=[[0, N]]))):
        with pytest.raises(IndexError, match="index 12 is out of range for 12 rows of the table"):
            read()


def test_rows_equal_those_of_an_image_folder(tmp_path: Path, table: Any) -> None:
    for number in range(N):
        path = tmp_path / f"{'ab'[number % 2]}/{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pillow_jpeg(scene(40, 32, number)))
    crop = RandomResizedCrop(16, flip=0.5)
    folder = ImageFolder(str(tmp_path), crop)
    rows = [{"image": key, "label": label} for key, label in folder.samples]
    found = table((File("image"), "label"), rows, url=tmp_path, transform=crop)
    loaders = [DataLoader(one, batch_size=5, seed=3) for one in (folder, found)]
    for _ in range(2):
        for ours, theirs in zip(*loaders, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    folder.close()


def test_transforms_are_by_name_or_of_the_whole_sample(table: Any) -> None:
    named = table((IMAGE, "label", "text"), transform={"id": CenterCrop(8), "label": float, "text": len})
    assert named[4][0].shape == (3, 8, 8) and named[4][1:] == (1.0, len(str(ROWS[4]["text"])))
    named.transform = lambda sample: (sample[1], sample[0].size)
    assert named[4] == (1, (40, 32))
    with pytest.raises(ArgumentError, match="fields of TableDataset cannot be set again"):
        named.fields = "label"


# --- objects


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (File("other/{id}.txt"), "text 7"),
        (File("other/{id}.json"), {"n": 7}),
        (File("other/{id}.bin"), b"\7"),
        (File("other/{id}.bin", decode=len), 1),
        (File("other/{id}.bin", decode=lambda data, key: key), "other/007.bin"),
    ],
)
def test_objects_are_opened_by_their_extension_or_by_decode(table: Any, file: File, expected: Any) -> None:
    assert table(file)[7] == expected


def test_pil_image_of_decode_is_cut_alike_as_sample_and_as_row(table: Any) -> None:
    file = File("masks/{id}.png", decode=lambda data: Image.open(io.BytesIO(data)))
    crop = CenterCrop(8, resize=10, interpolation="nearest", channels=1)
    found = table({"mask": file}, transform={"mask": crop})
    batch = next(iter(DataLoader(found, batch_size=2)))
    assert torch.equal(batch["mask"], torch.stack([found[0]["mask"], found[1]["mask"]]))


def test_arrays_and_images_without_extension_are_opened(table: Any, objects: Path) -> None:
    assert table(File("other/{id}.npy"))[7].tolist() == [7, 7, 7]
    assert table(File("other/{id}"))[7].size == (40, 32)
    assert table(File("other/{id}"), transform=CenterCrop(8))[7].shape == (3, 8, 8)


def test_pickle_is_refused_unless_the_user_decodes_it(table: Any) -> None:
    with pytest.raises(DecodeError, match=r"'other/002.pkl \(id of row 2\)'.*can run any code"):
        table(File("other/{id}.pkl"))[2]
    assert table(File("other/{id}.pkl", decode=pickle.loads))[2] == 2


def test_keys_may_be_full_urls_of_one_root(table: Any, objects: Path) -> None:
    rows = [{"image": f"{objects}/images/{row['id']}.jpg"} for row in ROWS]
    found = table(File("image"), rows, url="")
    assert found.url == "" and found.key(3) == "003.jpg" and found[3].size == (40, 32)
    given = table(File("image"), rows, url=objects)
    assert given.key(3) == "images/003.jpg"
    with pytest.raises(ArgumentError, match=r"several buckets, 's3://one/a.jpg' and 's3://two/b.jpg'"):
        table(File("image"), [{"image": "s3://one/a.jpg"}, {"image": "s3://two/b.jpg"}], url="")


def test_keys_of_a_csv_file_are_text_and_of_other_columns_numbers(table: Any, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("key,label\n001,01\n002,02\n")
    found = table((File("images/{key}.jpg"), "label"), tmp_path / "t.csv")
    assert found.key(0) == "images/001.jpg" and found[1][1] == 2


def broken(objects: Path, tmp_path: Path) -> Path:
    """A copy of the objects, of which one mask is cut."""
    import shutil

    shutil.copytree(objects, tmp_path / "broken")
    path = tmp_path / "broken/masks/004.png"
    path.write_bytes(path.read_bytes()[:60])
    return tmp_path / "broken"


@pytest.mark.parametrize("odd", ["000", "001"])
def test_row_that_default_collate_refuses_is_no_bad_sample(table: Any, odd: str) -> None:
    def decode(data: bytes, key: str) -> Any:
        return np.zeros(2, ">f4" if odd in key else "<f4")  # torch has no other byte order

    fields = {"image": IMAGE, "x": File("images/{id}.jpg", decode=decode), "label": "label"}
    loader = DataLoader(table(fields, transform={"image": CenterCrop(8)}), N, on_error="repeat")
    with pytest.raises(ValueError, match="byte order"):
        next(iter(loader))
    assert not loader.stats()["counters"]["bad.samples"]


def test_prefetch_of_the_users_code_is_noted_so_that_it_can_be_cancelled(table: Any) -> None:
    notes: Prefetches = []
    found = table((IMAGE, "label"))
    with noted_prefetches(notes):
        found.prefetch([3, 1])
    assert notes == [(found, [3, 1])]
    found._cancel([3, 1])


def test_row_fails_if_one_of_its_objects_fails(table: Any, objects: Path, tmp_path: Path) -> None:
    def decode_mask(data: bytes) -> Any:
        if len(data) < 61:
            raise DecodeError("a cut mask")
        return len(data)

    fields = {"image": IMAGE, "mask": File("masks/{id}.png", decode=decode_mask), "id": "id"}
    found = table(fields, url=broken(objects, tmp_path), transform={"image": CenterCrop(8)})
    with pytest.raises(DecodeError, match=r"'masks/004.png \(mask of row 4\)'"):
        found[4]
    loader = DataLoader(found, batch_size=4, on_error="repeat")
    batches = list(loader)
    assert "masks/004.png (mask of row 4)" in str(loader.stats()["bad"])
    assert "004" not in [one for batch in batches for one in batch["id"]]
    (tmp_path / "broken/images/005.jpg").unlink()
    with pytest.raises(NotFoundError, match=r"'images/005.jpg \(image of row 5\)'"):
        found[5]
    assert found._outstanding() == 0


# --- cache


@pytest.mark.parametrize("mode", ["auto", "raw", "dct", "shrunk", "decoded"])
def test_cache_of_an_object_dataset_serves_a_table(
    table: Any, objects: Path, tmp_path: Path, mode: Any
) -> None:
    cache = Cache(tmp_path / "cache", mode)
    every = ObjectDataset(str(objects / "images"), transform=CenterCrop(8), cache=cache)
    found = table((File("{id}.jpg"), "label"), url=objects / "images", transform=CenterCrop(8), cache=cache)
    assert found._cache_keys(5)[0] == every._cache_keys(5)[0]
    expected = every[5]
    every._flush_cache()
    assert found.contains(5) and torch.equal(found[5][0], expected)
    every.close()


def test_object_of_several_rows_is_cached_once(table: Any, tmp_path: Path) -> None:
    rows = [{**row, "caption": f"{row['id']} {n}"} for row in ROWS for n in range(3)]
    found = table((IMAGE, "caption"), rows, transform=CenterCrop(8), cache=Cache(tmp_path / "cache"))
    captions = [one for _, texts in DataLoader(found, batch_size=6) for one in texts]
    assert captions == [row["caption"] for row in rows]
    found._flush_cache()
    assert found.cache is not None and found.cache.info()["entries"] == N


def test_values_of_several_lengths_reach_a_collate_function_of_the_user(table: Any) -> None:
    rows = [{"id": row["id"], "boxes": [[1.0, 2.0, 3.0, 4.0]] * (n % 3)} for n, row in enumerate(ROWS)]
    found = table((IMAGE, "boxes"), rows, transform=CenterCrop(8))
    [(images, boxes)] = DataLoader(
        found, batch_size=N, collate_fn=lambda samples: tuple(zip(*samples, strict=True))
    )
    assert [one.shape for one in boxes] == [(n % 3, 4) for n in range(N)] and len(images) == N
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(found, batch_size=N, on_error="replace")))
    (note,) = caught.value.__notes__
    assert "(sample 0 'images/000.jpg' has shape (0, 4) at [1], but sample 1 'images/001.jpg' has" in note


def test_cached_knows_tables_of_other_rows_apart(table: Any, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    fields = {"image": IMAGE, "label": "label"}
    keys = set()
    for rows in (ROWS, [{**row, "label": 7} for row in ROWS], ROWS[::-1], ROWS):
        kept = cached(table(fields, rows, transform=CenterCrop(8)), cache)
        keys.add(kept.fingerprint)
        assert kept[0]["label"] == rows[0]["label"]
    assert len(keys) == 3
    cache.close()


# --- processes


def spawned(dataset: Any) -> int:
    """Bytes that a process that is being spawned gets of the dataset."""

    class Popen:
        _fds = ()

        def duplicate_for_child(self, descriptor: int) -> int:
            return descriptor

        def DupFd(self, descriptor: int) -> int:
            return descriptor

    multiprocessing.context.set_spawning_popen(Popen())  # type: ignore[arg-type]
    try:
        return len(ForkingPickler.dumps(dataset))
    finally:
        multiprocessing.context.set_spawning_popen(None)


def test_workers_get_no_more_of_a_table_with_more_rows(table: Any) -> None:
    sizes = []
    for times in (1, 400):
        rows = pa.concat_tables([pa.Table.from_pylist(ROWS)] * times)
        sizes.append(spawned(table((IMAGE, "label", "text"), rows)))
    assert sizes[1] - sizes[0] < 200


# --- bad input


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ("labl", {}, r"has no 'labl': it has 'id', 'label', .*did you mean 'label'\?"),
        (("label", 3), {}, r"fields\[1\] must be a str or File"),
        ((), {}, "fields must be a str or File"),
        ("label", {"url": "s3://bucket"}, r"url= is for objects.*write File\('image'\)"),
        ("label", {"cache": "/nowhere"}, "cache= is for objects"),
        ("label", {"storage_options": {"key": "k"}}, "storage_options= is for objects"),
        ((IMAGE, "label"), {"url": ""}, r"keys such as 'images/000.jpg': pass what they are relative to"),
        ((IMAGE, MASK), {"transform": CenterCrop(8)}, r"takes one image, and id and id \(2\) may be one"),
        (
            "label",
            {"transform": CenterCrop(8)},
            r"takes an image, and none of .* may be one: write File\('image'\)",
        ),
        (
            (IMAGE, "label"),
            {"transform": {"image": CenterCrop(8)}},
            "names 'image', and a sample has id, label",
        ),
        (
            (IMAGE, "label"),
            {"transform": {"label": CenterCrop(8)}},
            "takes an image, and that field is none: write File",
        ),
        (File("score"), {}, "column 'score' of the table is double, and File needs keys"),
        ((IMAGE,), {"on_change": "ignore"}, "on_change must be"),
        ("label", {"url": ("a", "b")}, r"the order is TableDataset\(table, fields, url=URL\)"),
        (
            (IMAGE,),
            {"storage_options": "http://localhost"},
            "storage_options must be a dict, .*'http://localhost'",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(table: Any, fields: Any, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        table(fields, **options)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (3, "takes the name of a column"),
        ("{id", "expected '}'"),
        ("{}.jpg", "names no column"),
        ("a}}.jpg{{", "every sample would have the same object"),
    ],
)
def test_file_without_a_column_is_refused(column: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        File(column)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"y": 1}, {"y": None}], "column 'y' of the table is null in row 1, counted from 0"),
        ([{"y": [1]}, {"y": [2, None]}], "null in row 1"),
        (pa.table({"y": pa.array([[1], [2, None]], pa.list_view(pa.int64()))}), "null in row 1"),
        ([{"y": 1}, {"z": 1}], "row 1 of the table has no 'y': it has 'z'"),
        ([{"y": 1}, 2], "row 1 of the table must be a dict"),
        ([{"y": 1}, {"y": "a"}], "column 'y' of the table has values of no one type"),
        ([], "the table has no rows"),
        (7, "table must be the path or URL of a file.*found a int"),
        (pa.table({"y": pa.DictionaryArray.from_arrays([0, 1], [None, "a"])}), "null in row 0"),
        ({"y": np.array([2**63], np.uint64)}, "numbers that torch's int64 cannot hold"),
        ({"y": np.array(["2020-01-01"], "datetime64[s]")}, r"column 'y' is timestamp"),
        ({"z": [1]}, "the table has 'z'"),
        (pa.table([[1], [2]], names=["y", "y"]), "has 2 columns 'y'"),
    ],
)
def test_tables_without_good_values_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TableDataset(rows, "y")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", FILES["t.parquet"], "named as CSV, and its content is Parquet"),
        ("t.csv", FILES["t.jsonl"], "named as CSV, and its content is JSON"),
        ("t.parquet", FILES["t.csv"], "named as Parquet, and its content is something else"),
        ("t.jsonl", b"<!DOCTYPE html><p>Not found", "named as JSON, and its content is HTML or XML"),
        ("t.csv", b"\x28\xb5\x2f\xfd123", "its content is zstd"),
        ("t.csv.gz", FILES["t.csv.gz"][:50], "is cut or damaged"),
        ("t.parquet", FILES["t.parquet"][:200], "cannot be read as Parquet"),
        ("t.csv", b"id,label\n1,2\n3\n", "cannot be read as CSV"),
        ("t.csv", b"", "cannot be read as CSV"),
        ("t.jsonl", b'{"label": 1}\n{"label":', "cannot be read as JSON"),
        ("t.json", b'[{"label": 1},', "cannot be read as JSON"),
        ("t.xlsx", b"PK", "a table's name ends in .csv"),
        ("t.csv", b"label\n", "the table has no rows"),
        ("t.csv", b"label\ncaf\xe9\n", "is not in UTF-8"),
        ("t.csv", b"label\n18446744073709551615\n1\n", "whole numbers that int64 cannot hold"),
        (
            "t.jsonl",
            b'{"label": 9007199254740993}\n{"label":\n 18446744073709551615}\n',
            "whole numbers that int64 cannot hold: write them in quotes",
        ),
        ("t.csv", b"a;label\n1;2\n", "has one column, 'a;label': write the file with ','"),
    ],
)
def test_files_that_are_no_such_table_are_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=message):
        TableDataset(tmp_path / name, "label")


def test_table_that_does_not_exist_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no table") as caught:
        TableDataset(tmp_path / "absent.csv", "label")
    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (["images/000.jpg", None], ArgumentError, "column 'key' of the table has no key in row 1"),
        (["images/000.jpg", ""], ArgumentError, "column 'key' of the table has no key in row 1"),
        (["images/000.jpg", "x.jpg"], NotFoundError, "1 of 2 keys have no object: 'x.jpg'"),
    ],
)
def test_keys_without_an_object_are_refused(table: Any, keys: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        table(File("key"), {"key": keys})


def test_decoder_of_the_device_is_refused_in_words(table: Any) -> None:
    with pytest.raises(ArgumentError, match="found TableDataset"):
        DataLoader(table((IMAGE, "label"), transform=CenterCrop(8)), decoder="dali", batch_size=2)
