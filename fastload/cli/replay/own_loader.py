"""`--loader FILE.py:FUNCTION`: the loader that the user's own code makes."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from fastload.errors import ArgumentError, FastloadError

__all__ = ["run_loader"]


def run_loader(place: str) -> Any:
    """Run FUNCTION of FILE.py, and return the loader that it returns. Modules beside the file are found.

    Raises:
        ArgumentError: there is no such file or function; it raised; it returned something else.
    """
    import fastload

    file, colon, name = place.rpartition(":")
    path = Path(file)
    if not colon or not name.isidentifier() or path.suffix != ".py":
        raise ArgumentError(f"--loader {place!r}: write FILE.py:FUNCTION, as in train.py:make_loader")
    if not path.is_file():
        raise ArgumentError(f"--loader {place!r}: there is no file {file!r}")
    function = getattr(_module(path, place), name, None)
    if not callable(function):
        raise ArgumentError(f"--loader {place!r}: {file} has no function {name!r}")
    loader = _run(function, path, place)
    if not isinstance(loader, fastload.DataLoader):
        raise ArgumentError(
            f"--loader {place!r}: {name}() has to return a fastload.DataLoader, and returned a "
            f"{type(loader).__name__}"
        )
    return loader


def _module(path: Path, place: str) -> Any:
    """The file as a module of its own name: what stands below `if __name__ == "__main__"` does not run."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None  # a file that ends in .py
    module = importlib.util.module_from_spec(found)
    sys.path.insert(0, str(path.parent.absolute()))
    sys.modules[path.stem] = module  # where pickle looks for its classes
    _run(lambda: found.loader.exec_module(module), path, place)
    return module


def _run(function: Any, path: Path, place: str) -> Any:
    try:
        return function()
    except FastloadError:
        raise
    except Exception as error:
        lines = [one for one in traceback.extract_tb(error.__traceback__) if Path(one.filename) == path]
        where = f" in line {lines[-1].lineno}" if lines else ""
        raise ArgumentError(f"--loader {place!r} raised{where}: {type(error).__name__}: {error}") from error
