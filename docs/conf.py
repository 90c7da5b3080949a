"""The documentation: `make docs` writes it to docs/_build/html, and treats every warning as an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, get_type_hints

import torch
from docutils import nodes
from sphinx.util.typing import stringify_annotation

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

import fastload  # noqa: E402 - from this checkout; its names load on first use, so this takes no time
from fastload import errors  # noqa: E402

project = "fastload"
author = "the fastload authors"
project_copyright = "2026, the fastload authors"
version = release = fastload.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "commands",
    "llms",
]
exclude_patterns = ["_build", "README.md"]
root_doc = "index"

# `-t draft`: other pages may be missing still. Everything else stays an error.
if tags.has("draft"):  # type: ignore[name-defined] # noqa: F821 - Sphinx defines it
    suppress_warnings = ["toc.not_readable", "toc.no_title", "myst.xref_missing", "ref.doc"]
    root_files = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
    exclude_patterns += [page for page, file in root_files.items() if not (HERE.parent / file).exists()]

# --- Markdown

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4  # page.md#a-heading works, as on GitHub; a wrong one is a warning
myst_links_external_new_tab = False
smartquotes = False  # "raw" is a value, to be copied as it is
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

# --- names from docstrings

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
autodoc_inherit_docstrings = False
autodoc_default_options = {"exclude-members": "__init__, __new__"}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
add_module_names = False

# Nothing is fetched, so names of torch, numpy and Python are not links; ours are, or they are errors.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!fastload\b).*")]
# Of arguments that fastload's own datasets give.
nitpick_ignore = [
    ("py:class", "fastload.cache.codecs.CacheCodec"),
    ("py:class", "fastload.store.budget.RequestBudget"),
]

PUBLIC = {name: f"fastload.{name}" for name in fastload.__all__}
PUBLIC |= {name: f"fastload.errors.{name}" for name in errors.__all__}
PUBLIC |= {full: full for full in (*PUBLIC.values(), "fastload.errors")}
_QUOTED = re.compile(r"(?<![`:\w])`(~?[^`\n]+(?:\n[^`\n]+)?)`(?![`_])")


def _link_names(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """In docstrings, `name` is a link if it is public; everything else in backticks is code."""

    def replaced(match: re.Match[str]) -> str:
        text = match[1].removeprefix("~")
        if text in PUBLIC:
            return f":py:obj:`{text} <{PUBLIC[text]}>`"
        return f"``{text}``"

    lines[:] = _QUOTED.sub(replaced, "\n".join(lines)).split("\n")


def _constructor_types(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str, result: str
) -> None:
    """Arguments of a class have the types of its constructor, where an attribute of that name has another."""
    if what == "class":
        types = app.env.current_document.autodoc_annotations.setdefault(name, {})
        names = {public: getattr(fastload, public) for public in fastload.__all__} | {"torch": torch}
        for argument, kind in get_type_hints(thing.__init__, localns=names).items():
            types[argument] = stringify_annotation(kind, "smart")


def _dashes(app: Any, doctree: nodes.document, page: str) -> None:
    """The dash between an argument and its description, which Sphinx writes as " -- "."""
    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \u2013 "))


# --- the site

html_theme = "furo"
html_title = f"fastload {version}"
html_static_path = ["_static"]
html_css_files = ["fastload.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "source_repository": "https://github.com/torch-fastload/torch-fastload/",
    "source_branch": "main",
    "source_directory": "docs/",
    "navigation_with_keys": True,
}
pygments_style = "friendly"
pygments_dark_style = "monokai"


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _link_names)
    app.connect("autodoc-process-signature", _constructor_types, priority=600)
    app.connect("doctree-resolved", _dashes)
