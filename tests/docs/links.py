"""The links of the README and of the documentation. `python -m tests.docs.links` lists those that leave it.

Those are not followed: tests run without a network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fastload.errors import DOCS

ROOT = Path(__file__).parents[2]
SOURCE = "https://github.com/torch-fastload/torch-fastload/"
CODE = re.compile(r"^ *(```+|~~~+)(?!\{).*?^ *\1 *$|<!--.*?-->|``.+?``|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(
    r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)|(?:src|srcset|href)=\"([^\"]+)\""
)
BARE = re.compile(r"https?://[^\s)>\"'`\]|,]+")
HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)


class Link(NamedTuple):
    """A link, and the page that it is on."""

    page: Path
    target: str


def pages() -> list[Path]:
    """The Markdown of the project."""
    return sorted(
        [*ROOT.glob("*.md"), *(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]
    )


def links(page: Path) -> Iterator[Link]:
    """The links of a page, outside code and comments."""
    text = page.read_text()
    # Only code is dropped; the text of a link may be code.
    plain = CODE.sub(lambda match: "code" if match[0].startswith("`") and "\n" not in match[0] else "", text)
    for found in LINK.finditer(plain):
        yield Link(page, found[1] or found[2])


def anchors(page: Path) -> set[str]:
    """The anchors of a page: its headings, by GitHub's and by Sphinx's rule, and its explicit ones."""
    text = page.read_text()
    for included in re.findall(r"^```\{include\} (\S+)", text, re.MULTILINE):
        text += (page.parent / included).read_text()
    code = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
    found = set(re.findall(r"^\(([\w.-]+)\)=$", text, re.MULTILINE)) | set(
        re.findall(r"id=\"([^\"]+)\"", text)
    )
    found |= set(re.findall(r"^\.\. (?:auto\w+|py:\w+):: *([\w.]+)", text, re.MULTILINE))
    for heading in HEADING.findall(code.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
        found.add(re.sub(r"[^a-z0-9]+", "-", words).strip("-"))
    return found


def fault(link: Link) -> str:
    """Why a link leads nowhere, or "". Links that leave the project are not followed."""
    target = link.target
    if target.startswith(DOCS):
        place, _, anchor = target.removeprefix(DOCS).partition("#")
        place = place.removesuffix("/") or "index.html"
        if not place.endswith(".html"):
            return ""  # llms.txt and others that the build makes
        path = ROOT / "docs" / f"{place.removesuffix('.html')}.md"
    elif target.startswith((f"{SOURCE}blob/main/", f"{SOURCE}tree/main/")):
        path, anchor = ROOT / target.split("/main/", 1)[1].partition("#")[0], ""
    elif re.match(r"[a-z]+:", target):
        return ""
    else:
        place, _, anchor = target.partition("#")
        path = (link.page.parent / place).resolve() if place else link.page
    if not path.exists():
        return f"there is no {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}"
    if anchor and path.suffix == ".md" and anchor not in anchors(path):
        return f"{path.relative_to(ROOT)} has no heading #{anchor}"
    return ""


def main() -> None:
    external: dict[str, set[str]] = {}
    for page in pages():
        for target in {link.target for link in links(page)} | set(BARE.findall(page.read_text())):
            if re.match(r"https?://", target) and not target.startswith((DOCS, SOURCE)):
                external.setdefault(target.rstrip("."), set()).add(str(page.relative_to(ROOT)))
    for target, on in sorted(external.items()):
        sys.stdout.write(f"{target}  {', '.join(sorted(on))}\n")


if __name__ == "__main__":
    main()
