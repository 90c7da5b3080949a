"""The C kernel that decodes JPEGs. Everything else about the package is in pyproject.toml.

It is built against the stable ABI: one wheel serves Python 3.11 and every later one. On Linux a kernel that
cannot be built ends the installation, because pip hides warnings and training would be slow without a word.
On other systems the kernel is optional.

    FASTLOAD_KERNEL=0 pip install .      without the kernel: simplejpeg and Pillow decode
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

REMEDY = """
fastload's C kernel could not be built: the compiler's message is above. The kernel needs a C compiler and
the headers of libjpeg-turbo and Python:

    Debian, Ubuntu   apt install gcc libjpeg-dev python3-dev
    Fedora           dnf install gcc libjpeg-turbo-devel python3-devel
    conda            conda install -c conda-forge c-compiler libjpeg-turbo

To install without the kernel (JPEGs are decoded more slowly):

    FASTLOAD_KERNEL=0 pip install --no-cache-dir ...

Without --no-cache-dir, pip keeps what it built, and installs it again later without asking.
"""
ON_LINUX = sys.platform == "linux"
# Free-threaded builds of Python 3.13 and 3.14 have no stable ABI.
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildKernel(build_ext):
    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            if not ON_LINUX:
                raise  # of an optional extension: setuptools warns and goes on
            raise SystemExit(f"{error}\n{REMEDY}") from error

    def copy_extensions_to_source(self) -> None:
        """For editable installations. Python would prefer a kernel for one version, of an older checkout."""
        super().copy_extensions_to_source()
        if STABLE_ABI:
            for old in Path("fastload/images").glob("compiled.cpython-*.so"):
                old.unlink()


kernel = Extension(
    "fastload.images.compiled",
    ["fastload/images/kernel.c"],
    depends=sorted(map(str, Path("fastload/images").glob("*.h"))),
    libraries=["jpeg", "m"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else [],
    extra_compile_args=["-std=c11", "-O3", "-fvisibility=hidden", "-pthread", "-ffp-contract=off"],
    # The published wheels hold a static libjpeg-turbo, whose names stay inside: Pillow brings another one.
    extra_link_args=["-pthread", "-Wl,--exclude-libs,ALL"] if ON_LINUX else ["-pthread"],
    py_limited_api=STABLE_ABI,
    optional=not ON_LINUX,
)
options: dict[str, Any] = {"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {}

if os.environ.get("FASTLOAD_KERNEL") == "0":
    setup()
else:
    setup(ext_modules=[kernel], cmdclass={"build_ext": BuildKernel}, options=options)
