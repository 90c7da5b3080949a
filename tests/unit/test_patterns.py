"""Patterns over text from outside take linear time: an answer, a key or a file's text stalls no process."""

from __future__ import annotations

import multiprocessing
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastload.cli.convert.sample_forms import member_key, split_name
from fastload.formats.jpeg import jpeg_orientation
from fastload.formats.tar import sample_name
from fastload.order.state import _CLASS
from fastload.shards.formats import FORMATS, title_of
from fastload.shards.names import glob_pattern, is_index
from fastload.store.failures import StoreLocation, as_bucket, redacted

_SIZES = 1 << 10, 1 << 14, 1 << 19
_SECONDS = 60  # of processor time for all cases; a quadratic one takes 15 minutes at the largest size


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


def _exif(text: str) -> None:
    segment = b"\xff\xe1\0\x40Exif\0\0" + 56 * text[:1].encode()
    jpeg_orientation(b"\xff\xd8" + segment * len(text) + b"\xff\xda")


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
    (_exif, ("x",)),
    (_CLASS.search, ("GLOBAL", "GLOBAL ", "G")),
)


def _run(at: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    for function, pieces in CASES:
        for piece in pieces:
            at.write_text(f"{getattr(function, '__name__', function)} {piece!r}")
            for size in _SIZES:
                function(piece * (size // len(piece)))


def test_time_is_linear_in_the_length_of_text_from_outside(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_run, args=(tmp_path / "at",))
    child.start()
    child.join()  # the limit of its processor time ends it
    assert child.exitcode == 0, f"not linear: {(tmp_path / 'at').read_text()}"
