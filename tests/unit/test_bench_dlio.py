"""`python -m bench dlio`: the plug-in reads what DLIO says, in its order, and a check finds what is wrong.

DLIO itself is tested where it is installed, beside this Python; elsewhere the plug-in gets a stand-in for it.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import random
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import xxhash

from bench.dlio import dlio

INSTALLED = importlib.util.find_spec("dlio_benchmark") is not None
needs_dlio = pytest.mark.skipif(not INSTALLED, reason="dlio_benchmark is not installed")
BATCH = 4


def make_files(folder: Path, count: int) -> list[Path]:
    """Files of different bytes, as DLIO lists them."""
    train = folder / "train"
    train.mkdir(parents=True)
    (folder / "valid").mkdir()
    paths = [train / f"img_{number:03d}.jpeg" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(random.Random(number).randbytes(500 + number))
    return paths


class Words(enum.Enum):
    """DLIO's enumerations write themselves as their values."""

    def __str__(self) -> str:
        return str(self.value)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plug-in over a stand-in for the classes of DLIO that it names."""
    names = {
        "DataLoaderType": Words("DataLoaderType", {"PYTORCH": "pytorch"}),
        "DatasetType": Words("DatasetType", {"TRAIN": "train", "VALID": "valid"}),
        "StorageType": Words("StorageType", {"LOCAL_FS": "local_fs", "S3": "s3"}),
    }

    class BaseDataLoader:
        arguments: Any = None

        def __init__(self, format_type: Any, dataset_type: Any, epoch: int, kind: Any) -> None:
            self._args, self.dataset_type, self.batch_size = self.arguments, dataset_type, BATCH

    contents = {
        "common.enumerations": names,
        "data_loader.base_data_loader": {"BaseDataLoader": BaseDataLoader},
    }
    for name in ("", ".common", ".data_loader", *(f".{name}" for name in contents)):
        module = ModuleType(f"dlio_benchmark{name}")
        vars(module).update(contents.get(name[1:], {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "bench.dlio.plugin", raising=False)
    yield importlib.import_module("bench.dlio.plugin")
    sys.modules.pop("bench.dlio.plugin", None)


@pytest.mark.skipif(INSTALLED, reason="dlio_benchmark is installed, and tested itself")
def test_plugin_hands_over_the_files_of_each_epoch_in_dlios_order(plugin: Any, tmp_path: Path) -> None:
    files = [str(path) for path in make_files(tmp_path / "data", 11)]
    given = {"cache": str(tmp_path / "cache"), "record": str(tmp_path / "record")}
    plugin.BaseDataLoader.arguments = args = SimpleNamespace(
        storage_options={"fastload": given},
        storage_type=plugin.StorageType.LOCAL_FS,
        data_folder=str(tmp_path / "data"),
        resized_image=SimpleNamespace(shape=(2, 2)),
        read_threads=0,
        my_rank=0,
    )
    loader = plugin.FastloadLoader("jpeg", plugin.DatasetType.TRAIN, 1)
    loader.read()
    for epoch in (1, 2):
        args.file_list_train = random.Random(epoch).sample(files, 9)  # a rank's part, another in each epoch
        handed = [digest for batch in loader.next() for digest in batch]
        assert handed == [
            xxhash.xxh3_64_hexdigest(Path(file).read_bytes()) for file in args.file_list_train[:8]
        ]
    assert len((tmp_path / "record-0").read_text().splitlines()) == 2


def as_recorded(files: list[Path]) -> dict[str, list[str]]:
    return {
        "files": [str(path) for path in files],
        "digests": [xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in files],
    }


def test_the_check_finds_another_order_other_bytes_and_files_that_came_twice(tmp_path: Path) -> None:
    paths = make_files(tmp_path / dlio.FOLDER, 2 * dlio.BATCH)
    place = dlio.Place(tmp_path, len(paths), {})
    one, two = as_recorded(paths[::2]), as_recorded(paths[1::2])
    contender = dlio.Contender("s3", "fastload", ranks=2)

    def found(*ranks: dict[str, list[str]]) -> str:
        return " ".join(dlio.differences(place, contender, [[rank] for rank in ranks]))

    assert found(one, two) == ""
    assert "rank 1: other bytes, or another order" in found(one, two | {"digests": two["digests"][::-1]})
    assert "rank 0: other bytes" in found(one | {"digests": [*one["digests"][:-1], "0" * 16]}, two)
    assert f"{dlio.BATCH} of {len(paths)} files" in found(one, one)


def test_contenders_have_names_of_their_own() -> None:
    names = [name for contender in dlio.contenders("dct") for name in contender.epochs]
    assert len(set(names)) == len(names)
    assert "s3, fastload, crops, dct, 3 ranks, cached" in names


@needs_dlio
@pytest.mark.stress  # a run takes half a minute of CPU, most of it for imports
@pytest.mark.parametrize("ranks", [1, 2])
def test_dlio_with_the_plugin_keeps_its_order_and_shards(ranks: int, tmp_path: Path) -> None:
    if ranks > 1 and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    count = 4 * dlio.BATCH
    make_files(tmp_path / dlio.FOLDER, count)
    place = dlio.Place(tmp_path, count, {"endpoint_url": "", "key": "", "secret": ""})
    contender = dlio.Contender("local", "fastload", "bytes", "raw", ranks, compute=0.0)
    epochs, recorded = dlio.run(Path(sys.executable), contender, place, record=True)
    assert len(epochs) == 2 and len(recorded) == ranks
    assert dlio.differences(place, contender, recorded) == []
