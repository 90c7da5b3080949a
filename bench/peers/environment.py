"""The peers' virtual environments: `.bench/env-NAME`, by the first lines of `bench/peers/scripts/NAME.py`.

    # apt install PACKAGE ...         system packages that have to be there
    # pip install REQUIREMENT ...     a step; lines that begin with "#     " continue the step before them

A script without such lines runs in the environment of the project.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.data import ROOT, WORKPLACE

SCRIPTS = Path(__file__).parent / "scripts"
WHEELS = WORKPLACE / "wheels"
SECONDS = 900


class Unavailable(Exception):
    """A peer cannot run here; the message says why."""


class Needs(NamedTuple):
    """The packages that a script's first lines name; `text` is those lines."""

    text: str
    apt: list[str]
    pip: list[list[str]]


def needs(name: str) -> Needs:
    lines = list(_header((SCRIPTS / f"{name}.py").read_text()))
    steps: list[tuple[str, list[str]]] = []
    for line in lines:
        kind, *words = line.removeprefix("#").split()
        if line.startswith("#     "):
            steps[-1][1].extend([kind, *words])
        elif kind in ("apt", "pip") and words[0] == "install":
            steps.append((kind, words[1:]))
        else:
            raise ValueError(f"bench/peers/scripts/{name}.py: {line!r} is neither a step nor the rest of one")
    apt = [word for kind, words in steps if kind == "apt" for word in words]
    return Needs("\n".join(lines), apt, [words for kind, words in steps if kind == "pip"])


def _header(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        yield line


def is_installed(name: str) -> bool:
    wanted = needs(name)
    if not wanted.pip:
        return not _missing(wanted.apt)
    stamp = WORKPLACE / f"env-{name}" / "ready"
    return stamp.exists() and stamp.read_text() == wanted.text and not _missing(wanted.apt)


def python_of(name: str) -> Path:
    """The interpreter for `bench/peers/scripts/NAME.py`; makes its environment first if that is missing.

    Raises:
        Unavailable: something could not be installed.
    """
    wanted = needs(name)
    _install_packages(wanted.apt)
    if not wanted.pip:
        return Path(sys.executable)
    folder = WORKPLACE / f"env-{name}"
    python = folder / "bin" / "python"
    if is_installed(name):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    for words in wanted.pip:
        # An option adds to pip's configured places; an environment variable would replace them.
        _run([str(python), "-m", "pip", "install", "--quiet", "--find-links", str(WHEELS), *words])
    (folder / "ready").write_text(wanted.text)
    return python


def _install_packages(packages: list[str]) -> None:
    missing = _missing(packages)
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unavailable(f"needs: sudo apt-get install {' '.join(missing)}")
    _run(["apt-get", "update"])
    _run(["apt-get", "install", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", *missing])


def _missing(packages: list[str]) -> list[str]:
    if shutil.which("dpkg-query") is None:
        return packages
    asked = [["dpkg-query", "--show", "--showformat=${db:Status-Status}", package] for package in packages]
    states = [subprocess.run(command, capture_output=True, text=True).stdout for command in asked]
    return [package for package, state in zip(packages, states, strict=True) if state != "installed"]


def build_pillow() -> None:
    """A wheel of the project's pillow-simd for the many environments: a build takes half a minute."""
    pinned = re.search(r"^pillow-simd==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    if any(WHEELS.glob("pillow_simd-*.whl")):
        return
    avx2 = "avx2" in Path("/proc/cpuinfo").read_text()
    compiler = {"CC": "cc -mavx2"} if avx2 else {}
    _run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(WHEELS), pinned[0]], **compiler)


def _run(command: list[str], **environment: str) -> None:
    surroundings = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(
            command,
            check=True,
            timeout=SECONDS,
            capture_output=True,
            text=True,
            env=surroundings | environment,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"could not be installed within {SECONDS} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "rror" in line] or [str(error)]
        raise Unavailable(f"could not be installed: {lines[-1].strip()[:200]}") from None
