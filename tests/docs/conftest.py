"""A store for the pages' code: the bucket that every page names.

s3://bucket/ has train/ and val/, with a folder a class (cat, dog: 24 and 8 photos);
shards/train-{00000..00003} of 8 records as .tar (jpg, cls) and .tfrecord (image, label);
labels.csv, the keys and labels (0, 1) of train/;
parquet/train-{00000..00001} of 12 rows (image as Hugging Face keeps it, label, width, split);
clicks/{0,1}.parquet of 200 rows (user, price, items, vector);
spectra/*.bin, 32 float32 numbers each;
corpus/{000,001}.bin, documents of uint16 tokens from 1 to 255 that end with token 0;
corpus/{000,001}.idx, where these documents end;
mds/ and lit/, photos with labels as MosaicML Streaming and LitData write them.
/data/train.beton is a file of FFCV, with the fields jpg and int among others.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastload.cli.demo.s3_server import delay_proxy, serve_s3
from fastload.formats.tar import TarWriter
from fastload.formats.tfrecord import TFRecordWriter, encode_example
from tests.docs.pages import run_page
from tests.patience import PATIENCE
from tests.photos import pillow_jpeg, scene
from tests.sharddata import write

FORMATS = Path(__file__).parent.parent / "data" / "formats"
SECONDS = 2 * PATIENCE  # a page


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("s3") / "bucket"
    for part, count in (("train", 24), ("val", 8)):
        names = {n: f"{part}/{('cat', 'dog')[n % 2]}/{n:04d}.jpg" for n in range(count)}
        write(root, {name: photo(n) for n, name in names.items()})
    (root / "shards").mkdir()
    for shard in range(4):
        tar, records = io.BytesIO(), io.BytesIO()
        tar_writer, record_writer = TarWriter(tar), TFRecordWriter(records)
        for number in range(8 * shard, 8 * shard + 8):
            tar_writer.write(f"{number:05d}", {"jpg": photo(number), "cls": b"%d" % (number % 2)})
            record_writer.write(encode_example({"image": photo(number), "label": number % 2}))
        tar_writer.close()
        record_writer.close()
        (root / "shards" / f"train-{shard:05d}.tar").write_bytes(tar.getvalue())
        (root / "shards" / f"train-{shard:05d}.tfrecord").write_bytes(records.getvalue())
    labels = [f"{('cat', 'dog')[n % 2]}/{n:04d}.jpg,{n % 2}" for n in range(24)]
    (root / "labels.csv").write_text("\n".join(["image,label", *labels]))
    write_parquet(root / "parquet")
    write_clicks(root / "clicks")
    write(root / "spectra", {f"{n:04d}.bin": np.full(32, n, np.float32).tobytes() for n in range(16)})
    (root / "corpus").mkdir()
    for number, tokens in enumerate(np.split(documents(10_000), [6_001])):
        tokens.tofile(root / "corpus" / f"{number:03d}.bin")
        with (root / "corpus" / f"{number:03d}.idx").open("wb") as ends:
            np.save(ends, np.append(np.flatnonzero(tokens == 0) + 1, len(tokens)))
    shutil.copytree(FORMATS / "mds-gz", root / "mds")
    shutil.copytree(FORMATS / "lit-photos", root / "lit")
    return root


def write_clicks(folder: Path) -> None:
    folder.mkdir()
    for file in range(2):
        rows = range(200 * file, 200 * file + 200)
        columns = {
            "user": pa.array(rows),
            "price": pa.array([row / 4 for row in rows], pa.float32()),
            "items": pa.array([list(range(row % 4)) for row in rows]),
            "vector": pa.array([[row, 1, 2, 3] for row in rows], pa.list_(pa.float32(), 4)),
        }
        pq.write_table(pa.table(columns), folder / f"{file}.parquet", row_group_size=50)


def write_parquet(folder: Path) -> None:
    folder.mkdir()
    for number in range(2):
        rows = range(12 * number, 12 * number + 12)
        columns = {
            "image": [{"bytes": photo(row), "path": f"{row}.jpg"} for row in rows],
            "label": [row % 2 for row in rows],
            "width": [320 for row in rows],
            "split": ["val" if row % 4 == 3 else "train" for row in rows],
        }
        features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}
        told = {"huggingface": json.dumps({"info": {"features": features}})}
        table = pa.table(columns).replace_schema_metadata(told)
        pq.write_table(table, folder / f"train-{number:05d}.parquet", row_group_size=5)


def documents(count: int) -> npt.NDArray[np.uint16]:
    """Tokens in a circle, so that a model can learn the next one; every 90th or so ends a document."""
    tokens = np.arange(count) * 7 % 255 + 1
    tokens[89::90] = tokens[-1] = 0
    return tokens.astype(np.uint16)


def photo(number: int) -> bytes:
    return pillow_jpeg(scene(320, 260, number % 4), quality=80)


class Store:
    """A copy of the bucket, a server and a proxy for it: new ones for a page where one before it wrote."""

    def __init__(self, original: Path, folder: Path) -> None:
        self._original, self._folder = original, folder
        self._opened = contextlib.ExitStack()
        self._copied: dict[Path, tuple[int, int]] = {}
        self._variables: dict[str, str] = {}

    def variables(self) -> dict[str, str]:
        """Those of the environment by which a page finds it."""
        if not self._variables or self._files() != self._copied:
            self.close()
            shutil.copytree(self._original, self._folder / "bucket")
            self._copied = self._files()
            server = self._opened.enter_context(serve_s3(self._folder, read_only=False))
            proxy = self._opened.enter_context(delay_proxy(server.endpoint_url, 0.0))
            self._variables = {
                "AWS_ENDPOINT_URL": proxy.url,
                "AWS_ACCESS_KEY_ID": server.key,
                "AWS_SECRET_ACCESS_KEY": server.secret,
                "AWS_REGION": "us-east-1",
            }
        return self._variables

    def close(self) -> None:
        self._opened.close()
        shutil.rmtree(self._folder)
        self._folder.mkdir()

    def _files(self) -> dict[Path, tuple[int, int]]:
        found = {path: path.stat() for path in self._folder.rglob("*")}
        return {path: (state.st_mtime_ns, state.st_size) for path, state in found.items()}


@pytest.fixture(scope="session")
def store(bucket: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    opened = Store(bucket, tmp_path_factory.mktemp("served"))
    yield opened
    opened.close()


@pytest.fixture
def run(bucket: Path, store: Store, tmp_path: Path) -> Callable[[Path], None]:
    """Runs the code of a page, which may write to the bucket."""
    folder = tmp_path / "page"
    for name in ("ssd", "home", "bin"):
        (folder / name).mkdir(parents=True)
    for part in ("train", "val"):
        shutil.copytree(bucket / part, folder / "data" / part)
    (folder / "data" / "train.beton").write_bytes(gzip.decompress((FORMATS / "fields.beton.gz").read_bytes()))
    # All of it: the fork server has the one of the test that started it.
    environment = dict(os.environ) | store.variables() | {"HOME": str(folder / "home"), "COLUMNS": "120"}

    def run_in_process(page: Path) -> None:
        output = tmp_path / "output.txt"
        process = multiprocessing.get_context("forkserver").Process(
            target=run_page, args=(page, folder, environment, output)
        )
        process.start()
        assert process.pid is not None
        try:
            process.join(SECONDS)
            ended = not process.is_alive()
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it started may outlive it
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        assert ended, f"{page} did not end in {SECONDS:.0f} s:\n{output.read_text()}"
        assert process.exitcode == 0, output.read_text()

    return run_in_process
