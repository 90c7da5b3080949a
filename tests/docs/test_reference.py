"""The reference is complete, its examples run, and its tables are those of the code."""

from __future__ import annotations

import ast
import functools
import gc
import importlib.util
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fastload
from fastload import errors, testing
from fastload.cli.app import REPORTS, app
from fastload.cli.demo.photos import make_dataset
from fastload.metrics.counters import Counters, Meter, rates
from fastload.metrics.exporters import COUNTERS, METRICS
from fastload.store import options as store_options
from tests.commands import run as run_command
from tests.docs.pages import runs

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted(REFERENCE.glob("*.md"))
# "Example::" or "Example (not run: REASON)::", and the indented code after it
EXAMPLE = re.compile(
    r"^( *)Example(?: \(not run: (?P<reason>[^)]+)\))?::\n\n(?P<code>(?:\1 {4}.*\n|\s*\n)+)", re.M
)
DIRECTIVE = re.compile(r"^ *\.\. (?:auto|py:)\w+:: *([\w.]+)", re.M)

NAMES = [f"fastload.{name}" for name in fastload.__all__ if name != "__version__"]
NAMES += [f"fastload.errors.{name}" for name in errors.__all__]
NAMES += [f"fastload.testing.{name}" for name in testing.__all__]
METHODS = [
    f"DataLoader.{name}"
    for name in [
        "state_dict",
        "load_state_dict",
        "stats",
        "samples_at",
        "batch_at",
        "skip",
        "exclude",
        "digest",
    ]
]


def names_on(page: Path) -> list[str]:
    """The public names whose docstrings are on a page."""
    return [name for name in DIRECTIVE.findall(page.read_text()) if name in NAMES]


def thing(name: str) -> Any:
    found: Any = fastload
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def examples(name: str) -> Iterator[re.Match[str]]:
    """The examples of a public name, and of the methods that have some."""
    of = [
        thing(name),
        *(thing(f"fastload.{method}") for method in METHODS if name == f"fastload.{method.split('.')[0]}"),
    ]
    for one in of:
        yield from EXAMPLE.finditer(inspect.getdoc(one) + "\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_reference_code_of_page_runs(page: Path, run: Callable[[Path], None]) -> None:
    if runs(page):
        run(page)


@pytest.mark.parametrize("name", NAMES)
def test_public_name_is_on_a_page_and_has_an_example(name: str) -> None:
    on = [page.name for page in PAGES if name in names_on(page)]
    assert len(on) == 1, f"{name} is on the pages {on} of docs/reference"
    assert list(examples(name)), f"the docstring of {name} has no 'Example::'"


@pytest.mark.parametrize("page", [page for page in PAGES if names_on(page)], ids=lambda page: page.stem)
def test_examples_of_docstrings_run(page: Path, run: Callable[[Path], None], tmp_path: Path) -> None:
    """Those of a page in one process: a server for each name would take minutes."""
    made = tmp_path / page.name
    made.write_text(
        "".join(
            f"```python\n# {name}\n{textwrap.dedent(one['code'])}```\n"
            for name in names_on(page)
            for one in examples(name)
            if not one["reason"]
        )
    )
    run(made)


@pytest.mark.parametrize("method", METHODS)
def test_method_has_an_example(method: str) -> None:
    assert EXAMPLE.search(inspect.getdoc(thing(f"fastload.{method}")) + "\n")


def section(page: str, heading: str) -> str:
    """The text of a page from a heading to the next of its level."""
    text = (REFERENCE / page).read_text()
    return re.split(r"^## ", text.split(f"\n## {heading}\n")[1], flags=re.M)[0]


def documented(text: str) -> set[str]:
    """The names in the first column of the tables of a text."""
    cells = re.findall(r"^\| (`[^|]+) \|", text, re.M)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_storage_options_are_those_of_the_code(scheme: str) -> None:
    prefix = {"s3": "S3", "gs": "GCS", "az": "AZURE"}[scheme]
    known = {*getattr(store_options, f"_{prefix}_OWN"), *getattr(store_options, f"_{prefix}_NATIVE")}
    assert documented(section("stores.md", f"Options of {scheme}://")) == known


# --- errors


def template(node: ast.expr) -> str:
    """A message with "\0" for what varies."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return "\0"


@functools.cache
def modules() -> dict[Path, ast.Module]:
    """What the package's files say."""
    gc.disable()  # to look for garbage among so many new objects takes twice as long as to make them
    try:
        package = Path(fastload.__file__).parent
        return {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    finally:
        gc.enable()


def words(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def test_every_message_of_the_page_is_in_the_code() -> None:
    nodes = (node for tree in modules().values() for node in ast.walk(tree))
    texts = (node for node in nodes if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)))
    text = "\n".join(words(template(node)) for node in texts)
    gone = []
    for first in re.findall(r"^\| (`.*?) \| ", (REFERENCE / "errors.md").read_text(), re.M):
        for message in re.findall(r"`([^`]+)`", first):
            parts = [words(re.sub(r"^\w+Error: ", "", part)) for part in message.split("…")]
            known = [part.strip(" .:;,'\"()[]") for part in parts if len(part) > 12]
            if known and not any(part in text for part in known):
                gone.append(message)
    assert not gone, "\n".join(gone)


@pytest.mark.parametrize("name", errors.__all__)
def test_address_of_error_is_a_heading(name: str) -> None:
    assert f"\n## {name}\n" in (REFERENCE / "errors.md").read_text()


def test_addresses_of_warnings_are_headings() -> None:
    package = Path(fastload.__file__).parent
    text = "".join(path.read_text() for path in package.rglob("*.py"))
    anchors = set(re.findall(r"address\([\"']([\w-]+)[\"']\)", text))
    headings = re.findall(r"^##+ (.+)$", (REFERENCE / "errors.md").read_text(), re.M)
    assert anchors and anchors <= {heading.lower().replace(" ", "-") for heading in headings}


# --- the command line


@pytest.fixture(scope="module")
def commands() -> Any:
    """The extension of the documentation that writes the options of commands."""
    found = importlib.util.spec_from_file_location("commands", ROOT / "docs" / "_ext" / "commands.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def command_paths(group: Any, before: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        path = f"{before}{name}"
        yield from command_paths(command, f"{path} ") if hasattr(command, "commands") else (path,)


def test_every_command_and_option_is_on_the_page(commands: Any) -> None:
    page = commands.filled((REFERENCE / "cli.md").read_text())
    assert "<!-- options" not in page
    for path in command_paths(commands.command("")):
        (text,) = re.findall(rf"^## fastload {path}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
        shown = (
            CliRunner().invoke(app, [*path.split(), "--help"], env={"TERM": "dumb", "COLUMNS": "200"}).stdout
        )
        options = set(re.findall(r"--[a-z][\w-]+", shown)) - {"--help"}
        assert options <= set(re.findall(r"--[a-z][\w-]+", text)), path
        assert "Exit code 1" in text or "Exit code" not in shown


# --- counters and JSON


@functools.cache
def bumped() -> set[str]:
    """The counters that the code adds to."""
    found = {"idle.seconds", "slot.seconds"}  # by an f-string
    for tree in modules().values():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.func, ast.Attribute):
                continue
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if isinstance(name, str) and node.func.attr == "timed":
                found.add(f"{name}.seconds")
            elif (
                isinstance(name, str)
                and node.func.attr in ("add", "put")
                and re.fullmatch(r"[a-z_]+\.[a-z_.]+", name)
            ):
                found.add(name)
    return found


def test_counters_are_those_that_the_code_adds_to(commands: Any) -> None:
    assert documented(commands.filled(section("stats.md", "Counters"))) == bumped()


def test_rates_are_documented() -> None:
    counters = dict.fromkeys(bumped(), 1.0)
    found = {*rates(counters, 1.0), *Meter(Counters()).gauges()}
    assert documented(section("stats.md", "Rates")) == found


def test_metrics_are_on_the_page(commands: Any) -> None:
    assert documented(commands.filled(section("stats.md", "Metrics"))) >= {one.source for one in METRICS}


def test_every_counter_and_rate_is_a_metric() -> None:
    assert set(COUNTERS) == bumped(), "list a new counter in fastload/metrics/exporters.py, with its unit"
    found = {*rates(dict.fromkeys(COUNTERS, 1.0), 1.0), *Meter(Counters()).gauges()}
    assert {one.source for one in METRICS} == {*COUNTERS, *found, "bottleneck", "info"}
    for names in ([one.prometheus for one in METRICS], [one.opentelemetry for one in METRICS]):
        assert len(set(names)) == len(names)


def test_queries_name_metrics_that_exist() -> None:
    page = (ROOT / "docs" / "how-to" / "monitoring.md").read_text()
    assert set(re.findall(r"\bfastload_\w+", page)) <= {one.prometheus for one in METRICS}
    assert set(re.findall(r'"(fastload\.wait\.\w+)"', page)) <= {one.opentelemetry for one in METRICS}


def test_page_of_json_has_every_report(commands: Any) -> None:
    """The tables come from the dataclasses that the documents come from."""
    page = (REFERENCE / "json.md").read_text()
    assert set(re.findall(r"<!-- keys of fastload ([\w ]+) -->", page)) == {*REPORTS, "measurements"}
    assert set(REPORTS) == set(command_paths(commands.command("")))
    rows = re.findall(r"^\| `(.+?)` \| (.*) \|$", commands.filled(page), re.M)
    assert len(rows) > 200 and all(text for _, text in rows)


def keys(document: Any, before: str, known: set[str]) -> set[str]:
    """The keys of a document in the notation of the page, down to those that it knows."""
    found = {before} & known
    if isinstance(document, list):
        return found.union(*(keys(one, f"{before}[]", known) for one in document if isinstance(one, dict)))
    if not isinstance(document, dict):
        return found or {before}
    if any(key.startswith(f"{before}.*") for key in known):
        return found.union(*(keys(value, f"{before}.*", known) for value in document.values()))
    if found and not any(key.startswith(f"{before}.") for key in known):
        return found
    inner = (keys(value, f"{before}.{name}".removeprefix("."), known) for name, value in document.items())
    return found.union(*inner)


@pytest.fixture
def check_keys(commands: Any) -> Callable[[str, dict[str, Any]], None]:
    def check(name: str, document: dict[str, Any]) -> None:
        known = {"command", *(key for key, _ in commands.keys(REPORTS[name]))}
        missing = known - (seen := keys(document, "", known))
        assert seen <= known
        above = {key for key in seen if value_at(document, key) in (None, [])}
        assert not {key for key in missing if not any(key.startswith(part) for part in above)}

    return check


def value_at(document: Any, key: str) -> Any:
    """The value of a key that is in no list; [] of others."""
    for name in key.split("."):
        document = document.get(name, []) if isinstance(document, dict) else []
    return document


def test_keys_of_json_are_documented(
    tmp_path: Path, check_keys: Callable[[str, dict[str, Any]], None]
) -> None:
    cache, photos = tmp_path / "cache", tmp_path / "photos"
    make_dataset(photos, 16, 2)
    (photos / "bad").mkdir()
    (photos / "bad" / "bad.jpg").write_bytes(b"not a photo")

    def answer(*words: object) -> dict[str, Any]:
        return run_command(*words)[1]

    check_keys("warm", answer("warm", photos, "--cache", cache, "--mode", "shrunk", "--num-workers", 2))
    check_keys("cache info", answer("cache", "info", cache))
    check_keys("cache check", answer("cache", "check", cache))
    check_keys("cache push", answer("cache", "push", cache, tmp_path / "packs"))
    done = answer("cache", "pull", tmp_path / "packs", tmp_path / "pulled")
    check_keys("cache pull", done | {"faults": [{"pack": "a", "fault": "b"}]})
    check_keys("cache clear", answer("cache", "clear", cache, "--yes"))
    error = answer("cache", "check", tmp_path / "absent")["error"]
    assert {f"error.{name}" for name in error} == documented(section("json.md", "An error"))
    check_keys("doctor", answer("doctor"))
    log = tmp_path / "log"
    list(fastload.DataLoader(list(range(4)), sample_log=log))  # type: ignore[arg-type]
    check_keys("prove", answer("prove", log, log))
    (photos / "bad" / "bad.jpg").unlink()
    (photos / "bad").rmdir()
    check_keys("bench", answer("bench", photos, "--num-workers", 0, "--epochs", 1))
    check_keys("plan", answer("plan", photos, "--size-limit", "1GB", "--gpus", 1, "--gpu-rate", 100))
    loader = fastload.DataLoader(fastload.ImageFolder(str(photos), fastload.CenterCrop(8)), 2)
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    check_keys("replay", answer("replay", tmp_path / "state.json", "--step", 0))
    done = answer("convert", photos, tmp_path / "shards", "--to", "tar")
    check_keys("convert", done | {"faults": [{"shard": "a", "fault": "b"}]})
    shards = tmp_path / "shards"
    check_keys("index", answer("index", shards, "--refresh") | {"faults": [{"shard": "a", "fault": "b"}]})
    done = answer("warm", shards, "--cache", cache, "--num-workers", 0)
    check_keys("warm", done | {"failures": [{"key": "a", "error": "b"}]})
    check_keys("plan", answer("plan", shards, "--size-limit", "1GB", "--gpus", 1, "--gpu-rate", 100))
    check_keys("bench", answer("bench", shards, "--num-workers", 0, "--epochs", 1))
