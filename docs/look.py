# ruff: noqa: T201
"""Looks at the built documentation in a real browser: `make docs-look`.

Opens every page of docs/_build/html, wide and narrow, light and dark. It fails where a page is wider than its
window, an image is missing, or a script fails, and leaves screenshots in docs/_build/look. Needs Chromium
(Debian: apt install chromium) and `pip install playwright`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HTML = Path(__file__).parent / "_build" / "html"
SHOTS = HTML.parent / "look"
WIDTHS = {"wide": 1400, "narrow": 390}
TOO_WIDE = """() => {
    const page = document.documentElement;
    if (page.scrollWidth <= page.clientWidth) return [];
    const scrolls = (one) => {
        for (; one && one !== document.body; one = one.parentElement)
            if (["auto", "scroll", "hidden"].includes(getComputedStyle(one).overflowX)) return true;
        return false;
    };
    return [...document.querySelectorAll("article *")]
        .filter((one) => one.getBoundingClientRect().right > page.clientWidth + 1 && !scrolls(one))
        .map((one) => `${one.tagName.toLowerCase()}: ${(one.textContent || "").trim().slice(0, 60)}`)
        .slice(0, 3).concat([`${page.scrollWidth} px`]);
}"""
MISSING = (
    "() => [...document.images].filter((one) => one.complete && !one.naturalWidth).map((one) => one.src)"
)


def look(page: Any, path: Path, theme: str, width: str) -> Iterator[str]:
    """What is wrong with a page."""
    page.goto(path.as_uri())
    page.evaluate(f"document.body.dataset.theme = '{theme}'")
    for image in page.evaluate(MISSING):
        yield f"an image is missing: {image}"
    wide = page.evaluate(TOO_WIDE)
    if wide:
        yield f"wider than {WIDTHS[width]} px: {'; '.join(wide)}"
    name = str(path.relative_to(HTML).with_suffix("")).replace("/", "-")
    page.screenshot(path=SHOTS / f"{name}-{width}-{theme}.png", full_page=width == "narrow")


def main() -> int:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("pip install playwright")
        return 2
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    SHOTS.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[1:]
    pages = [
        one for one in sorted(HTML.rglob("*.html")) if one.stem not in ("genindex", "search", "py-modindex")
    ]
    pages = [one for one in pages if not wanted or any(part in str(one.relative_to(HTML)) for part in wanted)]
    faults = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for width, pixels in WIDTHS.items():
            for theme in ("light", "dark"):
                context = browser.new_context(viewport={"width": pixels, "height": 900}, color_scheme=theme)
                page = context.new_page()
                page.on("pageerror", lambda error: print(f"  script: {error}"))
                for path in pages:
                    for fault in look(page, path, theme, width):
                        faults += 1
                        print(f"{path.relative_to(HTML)} ({width}, {theme}): {fault}")
        browser.close()
    print(f"{len(pages)} pages, {faults} faults; screenshots in {SHOTS}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
