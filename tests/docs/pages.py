"""The code blocks of a Markdown page, and a process that runs them in order, as a reader would.

Blocks of `python` run in one namespace, those of `bash` in a shell, and of a `console` block the lines behind
"$ ". All start in one empty directory. Three comments steer this:

    <!-- not run: REASON -->        the next block does not run
    <!-- save as: FILE -->          the next block is written to that file in place of being run
    <!-- run first:                 what the page does not show runs at this place
    code
    -->
    <!-- run: FILE -->              the same, where it is long: the file beside this one, below checks/, in
                                    the folder of the page's name; PAGE is the page's path in it

The paths that pages name are replaced: /ssd and /data become folders of the test. Two workers stand for more.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs import shims

SHELL = ("bash", "console")
RUN = ("python", *SHELL)
SHOWN = ("text", "json", "mermaid")  # output, not code
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<language>[\w-]*)[^\n]*$")
DIRECTIVE = re.compile(r"^ *(?P<fence>```+)\{(?P<name>[\w-]+)\}")  # of Sphinx: what is in it is searched too
NOT_RUN = re.compile(r"^\s*<!-- not run: (?P<reason>.+?) -->\s*$")
SAVE_AS = re.compile(r"^\s*<!-- save as: (?P<name>[\w.-]+) -->\s*$")
RUN_FIRST = re.compile(r"^\s*<!-- run first:\s*$")
RUN_FILE = re.compile(r"^\s*<!-- run: (?P<name>[\w.-]+) -->\s*$")
DOCS = Path(__file__).parents[2] / "docs"
CHECKS = Path(__file__).parent / "checks"


@dataclass(frozen=True)
class Block:
    """A block of code."""

    language: str
    line: int  # of the page, from 1
    code: str
    reason: str = ""  # why it does not run
    file: str = ""  # where it is written in place of being run
    check: str = ""  # the file that has the code, if the page has not


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order, hidden ones included."""
    file = ""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    reason, at = "", 0
    directives: list[str] = []  # the fences of those that are open
    while at < len(lines):
        if directives and lines[at].strip() == directives[-1]:
            directives.pop()
        elif directive := DIRECTIVE.match(lines[at]):
            assert not directive["name"].startswith("code"), f"{page}:{at + 1}: write a plain fence"
            directives.append(directive["fence"])
        elif RUN_FIRST.match(lines[at]):
            end = next(i for i in range(at, len(lines)) if lines[i].strip() == "-->")
            found.append(Block("python", at + 2, textwrap.dedent("\n".join(lines[at + 1 : end]))))
            at = end
        elif mark := RUN_FILE.match(lines[at]):
            check = CHECKS / page.relative_to(DOCS).parent / mark["name"]
            found.append(Block("python", 1, check.read_text(), check=str(check)))
        elif fence := FENCE.match(lines[at]):
            closing = fence["fence"]
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == closing)
            code = textwrap.dedent("\n".join(lines[at + 1 : end]))
            found.append(Block(fence["language"], at + 2, code, reason, file))
            reason, file, at = "", "", end
        elif mark := NOT_RUN.match(lines[at]):
            reason = mark["reason"]
        elif mark := SAVE_AS.match(lines[at]):
            file = mark["name"]
        elif lines[at].strip():
            reason = file = ""
        at += 1
    return found


def runs(page: Path) -> bool:
    """Whether a page has code that runs; why a block does not run has to be said."""
    found = blocks(page)
    others = [one for one in found if not (one.reason or one.file)]
    unexplained = [one.line for one in others if one.language not in (*RUN, *SHOWN)]
    assert not unexplained, f"{page}: say <!-- not run: REASON --> before the blocks of lines {unexplained}"
    return any((one.file or one.language in RUN) and not one.reason for one in found)


def run_page(page: Path, folder: Path, environment: dict[str, str], output: Path) -> None:
    """Run the blocks of a page, in a process of its own; exits with 1 at the first failure.

    Args:
        folder: where it starts. `folder/ssd` and `folder/data` stand for the pages' /ssd and /data.
        environment: of the process.
        output: receives what is printed, and the traceback.
    """
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.setsid()  # what a page starts and leaves ends with this group
    multiprocessing.set_start_method("fork", force=True)  # as in a script: this process has the fork server's
    os.environ.clear()
    os.environ.update(environment)
    os.environ["PATH"] = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    os.environ["PYTHON_EXEC"] = "python"  # of the ranks of torchrun
    os.chdir(folder)
    found = blocks(page)
    if any(block.language in SHELL or "sys.executable" in block.code for block in found):
        shims.install(folder / "bin")
        sys.executable = str(folder / "bin" / "python")
    if not any("pandas" in block.code for block in found):
        sys.meta_path.insert(0, _NoPandas)
    sys.path.insert(0, str(folder))
    namespace: dict[str, Any] = sys.modules["__main__"].__dict__ | {"__name__": "__main__", "PAGE": str(page)}
    for block in found:
        if block.reason or not (block.file or block.language in RUN):
            continue
        code = re.sub(r"(?<![\w/.:])/(ssd|data)(?=[/\"'\s])", lambda m: f"{folder}/{m[1]}", block.code)
        code = re.sub(r"\bnum_workers=([3-9]|\d\d+)\b", "num_workers=2", code)
        if block.file:
            Path(block.file).write_text(code + "\n")
        elif block.language == "python":
            tree = ast.increment_lineno(ast.parse(code), block.line - 1)
            try:
                exec(compile(tree, block.check or str(page), "exec"), namespace)
            except SystemExit as error:
                raise RuntimeError(f"line {block.line}: the block ends the page before its end") from error
        else:
            _shell(block, code)


class _NoPandas:
    """A finder without pandas: pyarrow imports it where it can, which takes 0.3 s."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def _shell(block: Block, code: str) -> None:
    if block.language == "console":
        code = "\n".join(line[2:] for line in code.splitlines() if line.startswith("$ "))
        assert code, f"line {block.line}: no line begins with '$ '"
        assert not re.search(r"\\$", code, re.MULTILINE), (
            f"line {block.line}: a command goes on in the next line"
        )
    subprocess.run(["bash", "-xeuo", "pipefail", "-c", code], check=True)
