"""The benchmarks of single subjects that a whole run has in it, each as a command of its own.

They stand in the document under "parts", by their names, as they are; docs/explanation/measurements.md shows
their tables.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.data import ROOT

# The words of each command in a whole run; all together take a fifth of its time.
PARTS = (
    ("shapes", "--turns", "3", "--seconds", "2"),
    ("starts", "--rounds", "2"),
    ("published", "--repeats", "3"),
    ("wrappers",),
    ("ranges", "--parts", "400", "--repeats", "3"),
    ("columns", "--rows", "300000", "--rounds", "3", "--batch", "65536"),
    ("fuse",),
    ("ranks", "--steps", "300"),
    ("moxing", "--repeats", "3"),
)
QUICK_PARTS = (("fuse", "--rounds", "1"),)
# Those of their other loaders.
SCRIPTS = ("ffcv", "huggingface", "litdata", "mosaicml", "torch_files", "webdataset")


def measured(words: tuple[str, ...]) -> dict[str, Any]:
    """The document of a part, measured in a process of its own, with its "command".

    Raises:
        RuntimeError: the command failed; with its last words.
    """
    command = " ".join(["python -m bench", *words])
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "bench", *words, "--results", folder],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{command} failed:\n{done.stdout[-2000:]}")
        [result] = Path(folder).glob("*.json")
        document: dict[str, Any] = json.loads(result.read_text())
    return document | {"command": command}
