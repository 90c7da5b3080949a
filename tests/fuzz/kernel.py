"""Fuzz the JPEG kernel: `python -m tests.fuzz.kernel --seconds 60`.

Builds the kernel's C code with AddressSanitizer, LeakSanitizer and UBSan into a program that mutates real
JPEGs of every kind, and records of them, and decodes them with random crops (see kernel.c); and into one
whose threads make rows from records of a cache (see pool.c), which runs under ThreadSanitizer too. A finding
stops the run, prints the sanitizer's report and keeps the input. The system's libjpeg is not instrumented
itself, but what it allocates and what it is given is.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.photos import variants

ROOT = Path(__file__).parents[2]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
PROGRAMS = {  # name -> source, sanitizers
    "kernel": ("kernel.c", SANITIZE),
    "pool": ("pool.c", SANITIZE),
    "races": ("pool.c", ["-fsanitize=thread"]),
}
MAX_PIXELS = 1_000_000  # small, so that mutated sizes cost little
SHAPES = (45, 33), (160, 16)
MOST = 1 << 40


@dataclass
class Report:
    """What a run found."""

    runs: int = 0
    decoded: int = 0
    refused: int = 0
    crashes: list[str] = field(default_factory=list)


def missing() -> str | None:
    """Why this machine cannot fuzz; None if it can."""
    if shutil.which("cc") is None:
        return "no C compiler"
    return None if _probed() is not None else "no libjpeg headers or no sanitizers"


def leaks_are_found() -> bool:
    """LeakSanitizer needs ptrace, which some containers forbid: then every run of a program fails."""
    return _probed() == 0


@functools.cache
def _probed() -> int | None:
    """What a program that does nothing returns; None: it cannot be compiled."""
    source = "#include <stdio.h>\n#include <jpeglib.h>\nint main(void) { return 0; }"
    with tempfile.TemporaryDirectory() as folder:
        command = ["cc", *SANITIZE, "-x", "c", "-", "-o", f"{folder}/probe"]
        if subprocess.run(command, input=source.encode(), capture_output=True, check=False).returncode != 0:
            return None
        env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "LD_PRELOAD": ""}
        return subprocess.run([f"{folder}/probe"], env=env, capture_output=True, check=False).returncode


def build(name: str, folder: Path, root: Path, optimise: str) -> Path:
    """Compile one of `PROGRAMS` from the sources below `root`."""
    source, sanitizers = PROGRAMS[name]
    program = folder / f"{name}_fuzz"
    flags = ["-std=gnu11", optimise, "-g", "-pthread", *sanitizers]
    command = ["cc", *flags, str(root / "tests/fuzz" / source), "-o", str(program), "-ljpeg", "-lm"]
    subprocess.run(command, check=True)
    return program


def corpus(folder: Path, shapes: tuple[tuple[int, int], ...]) -> list[str]:
    """Small JPEGs of every kind, and one with a restart interval in a multi-scan file."""
    paths = []
    for shape in shapes:
        for name, data in variants(*shape).items():
            path = folder / f"{name} {shape[0]}x{shape[1]}.jpg"
            path.write_bytes(data)
            paths.append(str(path))
    return paths


def run(
    seconds: int,
    seed: int = 0,
    root: Path = ROOT,
    name: str = "kernel",
    runs: int = MOST,
    short: bool = False,
) -> Report:
    """Fuzz with one of `PROGRAMS`, up to a time or a number of images, whichever comes first.

    Leaves the input of a finding in the temporary folder, and names it. short: compiled in a third of the
    time, for runs of a few seconds; and half the files, which are of every kind too.
    """
    folder = Path(tempfile.mkdtemp(prefix="fastload-fuzz-"))
    report = Report()
    program = str(build(name, folder, root, "-O0" if short else "-O2"))
    env = {**os.environ, "ASAN_OPTIONS": f"allocator_may_return_null=1:detect_leaks={int(leaks_are_found())}"}
    env["LD_PRELOAD"] = ""
    files = corpus(folder, SHAPES[:1] if short else SHAPES)
    command = [program, str(seconds), str(runs), str(seed), str(MAX_PIXELS), *files]
    try:
        result = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds + 60, check=False
        )
        output, failed = result.stdout + result.stderr, result.returncode != 0
    except subprocess.TimeoutExpired as error:
        output, failed = f"one input took more than 60 s: {error}", True
    counts = re.search(r"runs (\d+) decoded (\d+) refused (\d+)", output)
    if counts:
        report.runs, report.decoded, report.refused = map(int, counts.groups())
    if failed:
        report.crashes.append(
            f"input kept in {folder}/{'last.jpg' if name == 'kernel' else 'segment'}\n{output}"
        )
    else:
        shutil.rmtree(folder)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if (reason := missing()) is not None:
        sys.stderr.write(f"cannot fuzz here: {reason}\n")
        return 1
    findings = 0
    for name in PROGRAMS:
        report = run(options.seconds, options.seed, name=name)
        for crash in report.crashes:
            sys.stderr.write(crash + "\n")
        findings += len(report.crashes)
        sys.stdout.write(
            f"{name}: {report.runs} images in {options.seconds} s, {report.decoded} decoded, "
            f"{report.refused} refused, {len(report.crashes)} findings\n"
        )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
