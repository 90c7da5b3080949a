"""Patterns over text from outside take linear time: an answer, a key or a file's text stalls no process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from fastload.cli.convert.sample_forms import member_key, split_name
from fastload.formats.jpeg import jpeg_orientation
from fastload.formats.tar import sample_name
from fastload.order.state import _CLASS
from fastload.shards.formats import FORMATS, title_of
from fastload.shards.names import glob_pattern, is_index
from fastload.store.failures import StoreLocation, as_bucket, redacted

_LARGEST = 1 << 20
_SECONDS = 60  # for all cases; a quadratic one takes an hour at the largest size


def _answer(text: str) -> None:
    StoreLocation("s3://b", secrets=("a secret",)).translate(OSError(text), "get", "k")


def _globs(key: str) -> None:
    for glob in ("a*a*a*a*b", "**/*a*a*b", "*/*a*a*a*[!a]*b", "**a**b"):
        re.fullmatch(glob_pattern(glob), key, re.DOTALL)


def _shard_names(key: str) -> None:
    for form in FORMATS.values():
        form.names_shard(key)
    title_of(key)
    is_index(key)


def _xmp(text: str) -> None:
    body = b"http://ns.adobe.com/xap/1.0/\0" + text.encode()[:65_000]
    jpeg_orientation(b"\xff\xd8\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body + b"\xff\xda")


# What reads the text, and the pieces that it is made of.
CASES: tuple[tuple[Callable[[str], Any], tuple[str, ...]], ...] = (
    (
        _answer,
        (
            *(
                "a",
                "A",
                "1",
                "?",
                "?a",
                "'",
                "://",
                "a://",
                ":// ",
                "://a@",
                "<",
                "<a>",
                "<a",
                "</a>",
                "a ",
                " ",
                "\n",
            ),
            *("<?xml", "<?xml ", "<Error>", "<Code>", "<StringToSign", "<Token-1>", "<Token-", "=", "\x1b"),
            *("certificate verify failed:", "InvalidCertificate(", "InvalidCertificate( "),
            *("status code: 1", "1.", "a secret", "path ", "http://a?b=c "),
        ),
    ),
    (redacted, ("a", "?", "?a=", "://", "a.b-")),
    (lambda text: as_bucket(f"https://s3{text}.example.com/"), ("-a", ".s3", "-", ".a-", ".s3-a")),
    (_globs, ("a", "/", "a/", "ab", "a/a")),
    (_shard_names, (".tar", ".mds", ".", "a", ".tfrec", ".tfrec-", ".tfrec-/", "-00000-of-00001", "1")),
    (_shard_names, ("chunk-1-1", "chunk-1-1.a", "chunk-1-1/")),
    (sample_name, ("a", "/", ".", "a/", "./", "a.", "/a.b/", "__MACOSX")),
    (split_name, ("a", ".", "/", ".a/")),
    (member_key, (" ", "__MACOSX/", "/", "../", "a")),
    (_xmp, ("tiff:Orientation", 'tiff:Orientation="', "t")),
    (_CLASS.search, ("GLOBAL", "GLOBAL ", "G")),
)


def _run() -> None:
    for function, pieces in CASES:
        for piece in pieces:
            print(getattr(function, "__name__", function), repr(piece), flush=True)  # noqa: T201
            size = 1 << 10
            while size <= _LARGEST:
                function(piece * (size // len(piece)))
                size *= 2


def test_time_is_linear_in_the_length_of_text_from_outside() -> None:
    child = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    try:
        said, _ = child.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        said, _ = child.communicate()
        raise AssertionError(f"not linear: {said.splitlines()[-1]}") from None
    assert child.returncode == 0, said


if __name__ == "__main__":
    _run()
