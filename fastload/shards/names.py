"""The ways to name shards.

    s3://bucket/train/                      all shards below
    s3://bucket/train/{0000..0146}.tar      147 shards; also {train,val}, {00..98..2}, nested
    s3://bucket/**/part-*.tfrecord          ? and * within a path component, ** across, [a-z]
    s3://bucket/train/index.json            the shards that wids' index lists, relative to it

Anybody may have written an index: its names lead to its folder, or its own bucket, and nowhere else.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fastload.errors import ArgumentError
from fastload.shards.formats import ShardFormat, title_of
from fastload.store.listing import Selection

_MOST_SHARDS = 1_000_000
_SPECIAL = re.compile(r"[*?\[]")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_OPERATORS = re.compile(r"[\\\[&~|]|-(?=-)")  # of sets in regular expressions, and not in globs
_STARS = {"": "", "**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
INDEX_FILES = r".*\.(?:idx|index)"
_NOT_IN_NAMES = re.compile(r"[\\*?\[\]{}\x00-\x1f]|//|^/|/$|^$|(?:^|/)\.{1,2}(?:/|$)|:")


class Named(NamedTuple):
    """Named shards: the URL that holds all of them, and the selection of its objects.

    `keys`: in the order in which they are named; empty where a prefix or a glob names some.
    `alone`: the name taken as one file, if it may be a prefix as well as a file without a known ending.
    """

    root: str
    selection: Selection
    keys: tuple[str, ...] = ()
    alone: Named | None = None


def resolve(
    urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], form: ShardFormat, *, files: bool = False
) -> Named:
    """Return the shards that `urls` names.

    Args:
        urls: as above.
        form: of the shards; it knows them below a prefix by their names.
        files: whether each of `urls` is one file, whatever its name.

    Raises:
        ArgumentError: `urls` names nothing, shards in two buckets, a shard twice, or a file of another kind.
    """
    given = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    names = [name for url in given for name in expand_braces(_text(url))]
    if not names:
        raise ArgumentError(f"url names no shards: {urls!r}")
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise ArgumentError(f"url names a shard twice: {name!r}; each is read once per epoch")
    heads = names[0].lower().startswith(("http://", "https://"))
    if len(names) == 1 and not (heads or files) and not _SPECIAL.search(names[0]):
        base = names[0].rpartition("/")[2]
        if not base or not form.names_shard(base):
            return _prefix(names[0], form)
    split = [_split(name) for name in names]
    root = _common([directory for directory, _ in split])
    if not root and "://" in names[0]:
        raise ArgumentError("url names shards of several buckets: one dataset reads one bucket")
    prefix = f"{root}/" if root not in ("", "/") else root
    keys = [name.removeprefix(prefix) for name in names]
    globs = [key for key in keys if _SPECIAL.search(key)]
    patterns = [glob_pattern(key) for key in globs]
    required = tuple(sorted(key for key in keys if not _SPECIAL.search(key)))
    if patterns and heads:
        raise ArgumentError("a glob needs a store that can list: over http, use braces or a list")
    selection = Selection("|".join([*patterns, INDEX_FILES]), required, heads)
    if globs:
        selection = selection._replace(wanted=f"matched by {', '.join(map(repr, globs))}")
    return Named(root or ".", selection, () if globs else tuple(keys))


def _prefix(name: str, form: ShardFormat) -> Named:
    """Return the shards below a name, or the one file that has this name."""
    directory, _, base = name.rpartition("/")
    other = title_of(base)
    if other is not None:
        raise ArgumentError(f"url {name!r} is named as {other[0]}: read it with fastload.{other[1]}")
    hidden = r"(?!(?:.*/)?[._])" if form.skips_hidden else ""
    pattern = f"{hidden}(?:{form.names})|{INDEX_FILES}"
    alone = None
    if base and not directory.endswith(":/"):
        root = directory or ("/" if name.startswith("/") else ".")
        alone = Named(root, Selection("(?!)", (base,), heads=True))
    return Named(name, Selection(pattern, wanted=form.words), alone=alone)


def is_index(key: str) -> bool:
    """Return whether an object beside shards is an index file."""
    return re.fullmatch(INDEX_FILES, key, re.DOTALL) is not None


def check_name(name: Any, root: str) -> str:
    """Return the name of a shard in an index file, if it stays below the folder.

    Raises:
        ArgumentError: it does not, or it is no name.
    """
    if not isinstance(name, str) or _NOT_IN_NAMES.search(name) or is_index(name):
        raise ArgumentError(
            f"{root!r}: the index names the file {name!r}, which is not a plain name below this folder: "
            "write the index again"
        )
    return name


def listed_url(name: str, folder: str) -> str:
    """Return the URL of a shard in the index of wids: a name below its folder, or a URL of its own bucket.

    Raises:
        ArgumentError: it leads elsewhere.
    """
    scheme, separator, rest = folder.partition("://")
    place = folder
    if separator and scheme.lower() not in ("file", "local"):
        place = f"{scheme}://{rest.partition('/')[0]}"
    if folder and name.startswith(f"{place}/"):
        return f"{place}/{check_name(name.removeprefix(f'{place}/'), place)}"
    return f"{folder}/{check_name(name, folder)}" if folder else check_name(name, ".")


def expand_braces(text: str) -> Iterator[str]:
    """Return all texts that the braces stand for, in order, by the rules of bash.

    Raises:
        ArgumentError: a brace is not closed, or there are more than a million texts.
    """
    found, open_braces = [text], True
    while open_braces:
        spans = [(one, _outer_braces(one)) for one in found]
        open_braces = any(span is not None for _, span in spans)
        found = []
        for one, span in spans:
            found += [one] if span is None else _alternatives(one, *span)
            if len(found) > _MOST_SHARDS:
                raise ArgumentError(f"url {text!r} stands for more than {_MOST_SHARDS:,} shards")
    return iter(found)


def _outer_braces(text: str) -> tuple[int, int] | None:
    """Return the positions of the first opening brace and of its closing one; None: there is no brace."""
    start = text.find("{")
    if start < 0:
        return None
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return start, at
    raise ArgumentError(f"url {text!r}: a brace is not closed")


def _alternatives(text: str, start: int, stop: int) -> list[str]:
    before, inner, after = text[:start], text[start + 1 : stop], text[stop + 1 :]
    span = _RANGE.fullmatch(inner)
    if span is None:
        parts, depth = [""], 0
        for character in inner:
            depth += (character == "{") - (character == "}")
            if character == "," and not depth:
                parts.append("")
            else:
                parts[-1] += character
        if len(parts) < 2:
            raise ArgumentError(f"url {text!r}: {{{inner}}} is neither a range {{a..b}} nor a list {{a,b}}")
        return [f"{before}{part}{after}" for part in parts]
    first, last, step = int(span[1]), int(span[2]), abs(int(span[3] or 1)) or 1
    padded = any(re.match(r"-?0\d", edge) for edge in (span[1], span[2]))
    width = max(len(span[1]), len(span[2])) if padded else 0
    if abs(last - first) // step >= _MOST_SHARDS:
        raise ArgumentError(f"url {text!r} stands for more than {_MOST_SHARDS:,} shards")
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    return [f"{before}{number:0{width}d}{after}" for number in numbers]


def glob_pattern(glob: str) -> str:
    """Return the regular expression of a glob. A `*` does not match a slash, as in a shell; `**` does.

    A star is not tried again at a later place (`(?>...)`) where the next one takes what lies between: the
    time is linear in the length of a key, however many `*` there are.
    """
    parts = [("", "")]  # a star, and the pattern of the characters up to the next one
    at = 0
    while at < len(glob):
        star, text = parts[-1]
        if glob[at] == "*":
            star = next(star for star in _STARS if star and glob.startswith(star, at))
            parts.append((star, ""))
            at += len(star)
        elif glob[at] == "?":
            parts[-1], at = (star, text + "[^/]"), at + 1
        elif glob[at] == "[" and (end := glob.find("]", at + 2)) > 0:
            parts[-1], at = (star, text + _one_of(glob[at + 1 : end])), end + 1
        else:
            parts[-1], at = (star, text + re.escape(glob[at])), at + 1
    pattern = ""
    for (star, text), following in itertools.zip_longest(parts, [star for star, _ in parts[1:]]):
        once = star in ("*", "**") and following in (star, "**")
        pattern += f"(?>{_STARS[star]}?{text})" if once else f"{_STARS[star]}{text}"
    return pattern


def _one_of(inner: str) -> str:
    """Return the regular expression of one character, by what stands between the brackets of a glob."""
    escaped = _OPERATORS.sub(r"\\\g<0>", inner)
    negated = escaped[0] == "!"
    one = f"(?!/)[{'^' * negated}{escaped[negated:]}]"
    try:
        re.compile(one)
    except re.error:
        raise ArgumentError(f"[{inner}] in url is no set of characters: write a range as [a-z]") from None
    return one


def _text(url: str | os.PathLike[str]) -> str:
    text = os.fspath(url)
    if text.startswith("pipe:"):
        raise ArgumentError(
            "url is a pipe:, a command to run. fastload runs none: give the URL of the shards"
        )
    return text


def _split(name: str) -> tuple[str, str]:
    """Return (directory, rest) where the directory has no special character."""
    match = _SPECIAL.search(name)
    plain = name if match is None else name[: match.start()]
    directory, slash, _ = plain.rpartition("/")
    return (directory or slash), name[len(directory) + 1 :]


def _common(directories: list[str]) -> str:
    """Return the deepest directory that holds all of these."""
    parts = [directory.split("/") for directory in directories]
    shared = [
        one[0] for one in itertools.takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False))
    ]
    least = 3 if "://" in directories[0] else 0  # "s3:", "", "bucket"
    if "://" in directories[0] and len(shared) < least:
        return ""
    return "/".join(shared) or ("/" if directories[0].startswith("/") else "")
