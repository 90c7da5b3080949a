"""The documentation for language models: llms.txt, llms-full.txt (llmstxt.org), and each page as Markdown.

docs/_build/html/PAGE.md is the page's source with the tables of commands and the docstrings in their places.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
from docutils import nodes
from sphinx.addnodes import toctree

import fastload
from fastload.errors import DOCS

__all__ = ["setup"]

SUMMARY = (
    "A drop-in torch.utils.data.DataLoader for object stores (S3, OBS, GCS, Azure, HTTP): it reads with "
    "hundreds of requests in flight, keeps the data on the local SSD during the first epoch, and decodes "
    "straight into the batch."
)
# What readers of the source see and readers of the site do not.
HIDDEN = re.compile(r"<!-- (?:run first:|run:|not run:).*?-->\n?", re.DOTALL)
FENCED = re.compile(r"^```\{([\w-]+)\}[^\n]*\n(.*?)^```\n?", re.DOTALL | re.MULTILINE)
AUTO = re.compile(r"^\.\. auto(?:class|method|function|exception):: *([\w.]+)((?:\n +:.*)*)", re.MULTILINE)


def setup(sphinx: Any) -> dict[str, bool]:
    sphinx.connect("build-finished", _write)
    return {"parallel_read_safe": True}


def _write(sphinx: Any, error: Exception | None) -> None:
    if error is not None or sphinx.builder.name not in ("html", "dirhtml"):
        return
    env, out = sphinx.env, Path(sphinx.outdir)
    lines, whole = [f"# {sphinx.config.project}", "", f"> {SUMMARY}"], []
    for heading, pages in _sections(env):
        lines += ["", f"## {heading}", ""]
        for page in pages:
            text = _markdown(Path(env.doc2path(page)))
            target = out / f"{page}.md"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            lines.append(f"- [{env.titles[page].astext()}]({DOCS}{page}.md): {_first_sentence(env, page)}")
            whole.append(f"<!-- {DOCS}{page}.html -->\n\n{text.strip()}\n")
    (out / "llms.txt").write_text("\n".join(lines) + "\n")
    (out / "llms-full.txt").write_text("\n\n".join(whole))


def _sections(env: Any) -> Iterator[tuple[str, list[str]]]:
    """(caption, pages) of each part of the root's table of contents."""
    root = env.config.root_doc
    for tree in env.get_doctree(root).findall(toctree):
        yield tree["caption"], [page for top in tree["includefiles"] for page in _below(env, top)]


def _below(env: Any, page: str) -> Iterator[str]:
    yield page
    for inner in env.toctree_includes.get(page, ()):
        yield from _below(env, inner)


def _first_sentence(env: Any, page: str) -> str:
    tops = (one for one in env.get_doctree(page).findall(nodes.paragraph) if one.parent.tagname == "section")
    paragraph = next(tops, None)
    text = "" if paragraph is None else " ".join(paragraph.astext().split())
    return re.split(r"(?<=[.:])\s", text)[0].rstrip(":")


def _markdown(path: Path) -> str:
    text = FENCED.sub(lambda match: _directive(path, match[1], match[2], match[0]), path.read_text())
    return HIDDEN.sub("", commands.filled(text))


def _directive(path: Path, name: str, body: str, whole: str) -> str:
    if name == "include":
        return (path.parent / whole.splitlines()[0].partition("}")[2].strip()).read_text()
    if name == "eval-rst":
        return "\n\n".join(part for match in AUTO.finditer(body) for part in _described(match[1], match[2]))
    return "" if name == "toctree" else whole


def _described(name: str, options: str) -> Iterator[str]:
    """Signature and docstring of a public name, and of its members."""
    thing = _thing(name)
    shown = "" if isinstance(thing, property) else _signature(thing)
    yield f"`{name.removeprefix('fastload.')}{shown}`\n\n{inspect.getdoc(thing)}\n"
    members = re.search(r":members: *([\w, ]+)", options)
    for member in members[1].split(",") if members else ():
        yield from _described(f"{name}.{member.strip()}", "")


def _thing(name: str) -> Any:
    module, found = "fastload", fastload
    for part in name.split(".")[1:]:
        module = f"{module}.{part}"
        if not hasattr(found, part):
            importlib.import_module(module)
        found = getattr(found, part)
    return found


def _signature(thing: Any) -> str:
    try:
        return str(inspect.signature(thing))
    except (TypeError, ValueError):
        return ""
