"""The shape of the package: its rooms, who may import whom, and its public names."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fastload

PACKAGE = Path(fastload.__file__).parent
ROOT = PACKAGE.parent

# The rooms from the bottom up. A room imports itself and rooms before it.
ROOMS = (
    "metrics",
    "formats",
    "images",
    "distributed",
    "order",
    "store",
    "cache",
    "fetch",
    "datasets",
    "shards",
    "workers",
    "gpu",
    "trace",
    "loader",
    "testing",
    "cli",
)
# Rooms that stand beside each other, although the table has to list one of them first.
APART = (
    {"shards", "workers", "gpu"},
    {"metrics", "formats"},
    {"metrics", "images"},
    {"distributed", "store"},
    {"order", "store"},
    {"order", "images"},
)
LOOSE = {"__init__.py", "__main__.py", "checks.py", "errors.py", "py.typed"}
# One name for one thing in two rooms: the format of a tar and the dataset over tars, the base class or the
# index of a room, a command and what it runs.
SAME_SUBJECT = {
    "tar.py",
    "tfrecord.py",
    "mds.py",
    "litdata.py",
    "beton.py",
    "parquet.py",
    "base.py",
    "index.py",
    "cache.py",
    "warm.py",
    "prove.py",
    "sample_log.py",
    "tokens.py",
    "__init__.py",
    "__main__.py",
}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute)  # what the tests look for
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def _imports(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules that a file imports, wherever in it the import stands; public names by their home."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if node.module == "fastload" and alias.name in fastload._HOME:
                    yield fastload._HOME[alias.name]
                else:
                    yield inner if inner in modules else node.module
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "fastload"
        ):
            yield fastload._HOME.get(node.attr, "fastload")


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_rooms_below_it(room: str) -> None:
    below = set(ROOMS[: ROOMS.index(room)]) | {room, "checks", "errors", ""}
    for group in APART:
        if room in group:
            below -= group - {room}
    for module, path in MODULES.items():
        if _room(module) == room:
            up = {
                name
                for name in _imports(path, MODULES)
                if name.startswith("fastload.") and _room(name) not in below
            }
            assert not up, f"{module} may not import {sorted(up)}"


def _circle(modules: dict[str, Path]) -> list[str]:
    """The modules of a circle of imports; [] where there is none. A package's facade is no part of one."""
    graph = {
        module: {name for name in _imports(path, modules) if name in modules and name != module}
        for module, path in modules.items()
        if path.name != "__init__.py"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_imports_in_a_circle() -> None:
    assert _circle(MODULES) == []


def test_no_imports_in_a_circle_in_bench() -> None:
    assert _circle({_module(path): path for path in sorted((ROOT / "bench").rglob("*.py"))}) == []


def test_nothing_is_loose_but_what_belongs_to_the_whole() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_file()} == LOOSE
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(ROOMS)


def test_no_file_name_begins_with_an_underscore() -> None:
    files = [path.name for folder in ("fastload", "bench") for path in (ROOT / folder).rglob("*.py*")]
    assert [name for name in files if name.startswith("_") and not name.startswith("__")] == []


def test_file_names_mean_one_thing() -> None:
    rooms = defaultdict(set)
    for module, path in MODULES.items():
        rooms[path.name].add(_room(module))
    shared = {name for name, homes in rooms.items() if len(homes) > 1}
    assert shared <= SAME_SUBJECT


def test_environment_is_read_in_few_places() -> None:
    """Elsewhere a variable would be an argument that nobody sees."""
    readers = {
        str(path.relative_to(PACKAGE))
        for path in MODULES.values()
        if any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in _nodes(path)
        )
    }
    allowed = {"distributed/launcher.py", "store/options.py"}
    assert {name for name in readers if not name.startswith("cli/")} == allowed


def test_public_names() -> None:
    assert len(fastload.__all__) == len(set(fastload.__all__))
    for name in fastload.__all__:
        value = getattr(fastload, name)
        assert value.__doc__, f"{name} has no docstring"
    assert set(fastload._HOME) == set(fastload.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        fastload.Nonsense  # noqa: B018


def test_import_is_cheap() -> None:
    """`import fastload` alone loads neither torch nor a native client: the command line starts at once."""
    code = "import sys, fastload; print({'torch', 'obstore', 'lmdb'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
