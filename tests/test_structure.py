"""The shape of the package: public names, and who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fastload

PACKAGE = Path(fastload.__file__).parent

# part -> the parts of ours that it may import. One way only.
MAY_IMPORT = {
    "errors": set(),
    "cores": set(),
    "linux": {"errors"},
    "stats": {"cores"},
    "verdict": set(),
    "channel": set(),
    "distributed": {"errors"},
    "partition": {"distributed", "errors"},
    "sampler": {"distributed", "partition", "errors"},
    "store": {"errors", "stats"},
    "manifest": {"store", "cache", "errors"},
    "cache": {"errors", "stats"},
    "fetch": {"distributed", "store", "cache", "manifest", "formats", "stats", "errors"},
    "images": {"errors"},
    "formats": {"errors"},
    "rows": {"errors", "stats"},
    "seeds": set(),
    "encoded": {"images", "rows", "errors", "stats"},
    "dali": {"encoded", "stats", "errors"},
    "nvjpeg": {"encoded", "stats", "errors"},
    "decoding": {"dali", "nvjpeg", "encoded", "rows", "stats", "errors"},
    "mismatch": set(),
    "collate": {"mismatch", "rows", "seeds", "errors", "stats"},
    "datasets": {
        "encoded",
        "formats",
        "fetch",
        "images",
        "manifest",
        "store",
        "cache",
        "rows",
        "seeds",
        "errors",
        "stats",
    },
    "normalize": {"nested", "errors"},
    "slots": {"channel", "errors"},
    "nested": set(),
    "cuda": {"errors"},
    "device": {"cuda", "nested", "stats"},
    "streams": {"rows", "sampler", "errors"},
    "workers": {"channel", "collate", "slots", "state", "streams", "stats", "errors"},
    "state": {"errors", "sampler", "streams"},
    "in_process": {"device", "collate", "rows", "state", "streams"},
    "worker_iterator": {"device", "profile", "store", "rows", "workers", "state", "stats", "errors"},
    "profile": {"stats"},
    "watch": {"loader", "stats", "verdict", "errors"},
    "autoscale": {"cores", "distributed", "rows", "stats", "verdict"},
    "loader": {
        "autoscale",
        *(
            "cuda",
            "dali",
            "decoding",
            "device",
            "distributed",
            "in_process",
            "worker_iterator",
            "rows",
            "sampler",
            "state",
        ),
        *("stats", "verdict", "errors"),
    },
    "__main__": {"cli"},
    "cli": {
        "formats",
        "errors",
        "cores",
        "linux",
        "verdict",
        "stats",
        "images",
        "cache",
        "store",
        "manifest",
    },
}


def _modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(tree: ast.AST) -> set[str]:
    """The parts that a module imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == "fastload":
                found |= {f"fastload.{alias.name}" for alias in node.names}
            found.add(node.module)
    names = {name.split(".")[1] for name in found if name.startswith("fastload.")}
    return {name for name in names if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()}


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    part = _part(path)
    others = _imports(ast.parse(path.read_text())) - {part}
    assert others <= MAY_IMPORT[part], f"{part} may not import {sorted(others - MAY_IMPORT[part])}"


def test_environment_is_read_in_few_places() -> None:
    """Elsewhere a variable would be an argument that nobody sees."""
    readers = {
        str(path.relative_to(PACKAGE))
        for path in _modules()
        if any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            for node in ast.walk(ast.parse(path.read_text()))
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
    import subprocess
    import sys

    code = "import sys, fastload; print({'torch', 'obstore', 'lmdb'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
