"""The page docs/benchmarks.md from the document of `python -m bench compare`: the text between its marks."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

from bench.show import charts, losses, node, tables
from bench.show.figures import MAIN, best_other, median, number, ours_of, rows_of

PICTURES = "../bench/results"  # from docs/
_DECODING = "Photos in memory, decoded, cropped and resized; no loader:"
_HANDING_OVER = "Ready samples of 224 pixels, from two workers to the training loop:"
_OTHER_LOAD = (
    "The same processes, in turns on an idle machine and beside a process that keeps one core busy. The more "
    "of an idle machine a loader uses, the more it can lose:"
)
_WORKERS = "Images per second, and the memory of all processes (small), over the number of workers:"

Document = dict[str, Any]


def markdown(document: Document) -> str:
    """The page's text about the result, between its marks."""
    parts = [
        _section(f"The first epoch from S3, {MAIN} away", _headline(document)),
        *_pictures(document, "first-epoch"),
        tables.first_epoch(document),
        _caption(document),
        *_pictures(document, "latency"),
    ]
    if tables.cases(document, "later"):
        parts.append(_section("Later epochs", "From a full cache or the local disk:"))
        parts += [*_pictures(document, "later-epochs"), tables.later_epochs(document)]
    if tables.cases(document, "decode"):
        parts.append(_section("Decoding on one core", f"{_DECODING}\n\n{tables.decoding(document)}"))
    if tables.cases(document, "handover"):
        parts.append(_section("Handing over", f"{_HANDING_OVER}\n\n{tables.handing_over(document)}"))
    if text := tables.other_load(document):
        parts.append(_section("Beside other load", f"{_OTHER_LOAD}\n\n{text}"))
    if text := tables.photographs(document):
        size = number(document["settings"]["photograph_bytes"] / 1000)
        parts.append(_section("Smaller photos", f"Photos of {size} KB (`bench/photographs.py`):\n\n{text}"))
    if text := tables.workers(document):
        parts.append(_section("Workers and memory", f"{_WORKERS}\n\n{text}"))
    parts.append(_section("Where others win", losses.paragraph(document)))
    if text := tables.growth(document):
        parts.append(_section("More objects, larger objects", text))
    with contextlib.suppress(LookupError):  # a short run lacks rows that it takes
        parts.append(
            _section(f"{node.NODES} nodes of {node.GPUS} GPUs: calculated, not run", node.markdown(document))
        )
    return "\n\n".join([*parts, _section("Differences, missing contenders, versions", _notes(document))])


def _section(heading: str, text: str) -> str:
    """Of a page whose title is on level 1. Other pages link to "Where others win"."""
    return f"## {heading}\n\n{text}"


def _pictures(document: Document, *names: str) -> list[str]:
    """The existing charts of these names, in the colours of the reader's page (by furo's classes)."""
    return [
        f"![{charts.CHARTS[name].alt}]({PICTURES}/{charts.file_name(name, theme)}){{.only-{theme}}}"
        for name in names
        if charts.CHARTS[name].has_data(document)
        for theme in charts.THEMES
    ]


def _headline(document: Document) -> str:
    """fastload and the best of the others in the first epoch at 20 ms, whichever is ahead."""
    rows = rows_of(document, "cold", MAIN)
    ours, other = ours_of(rows), best_other(rows)
    if ours is None or other is None:
        return "Images per second:"
    mine, best = median(ours["rates"]), median(other["rates"])
    start = f"{ours['contender']} reads and decodes {number(mine)} images/s"
    if mine >= best:
        times = f"{number(mine / best)} times the best other loader"
        return f"{start}, {times} ({other['contender']}, {number(best)})."
    return f"{start}; {other['contender']} is {number(best / mine)} times as fast ({number(best)})."


def _caption(document: Document) -> str:
    """The work, the method, the machine, the command."""
    settings, minutes = document["settings"], document["minutes"]
    date = datetime.datetime.fromisoformat(document["date"])
    latencies = [case.removesuffix(" ms") for case in tables.cases(document, "cold")]
    away = f"{', '.join(latencies)} ms away" if latencies else "on this machine"
    quick = " --quick" if document["quick"] else ""
    size = number(settings["image_bytes"] / 1000)
    work = (
        f"{settings['images']:,} photos of {size} KB from an S3 server {away} (round trip), "
        f"RandomResizedCrop {settings['size']} and flip to uint8, batches of {settings['batch']}."
    )
    manner = (
        f"Medians of {settings['repeats']} rounds (small: min–max). In each round all contenders run, one\n"
        "after the other, each written as its own documentation recommends, with its fastest number of\n"
        "workers. Raised numbers refer to the differences below. The limit, in italics, is a bare loop that\n"
        "does one part of the work, such as the GETs alone. The epochs of slow contenders are cut short:\n"
        "their GETs include batches that came too late to count."
    )
    installing = (
        f", and {minutes['installing']:.0f} to install the others" if minutes["installing"] >= 0.5 else ""
    )
    command = (
        f"`python -m bench compare{quick}`, {date:%Y-%m-%d}, commit `{document['commit']}`, "
        f"{minutes['measuring']:.0f} minutes{installing}."
    )
    return "\n".join([work, manner, _machine(document), command])


def _machine(document: Document) -> str:
    machine, cache = document["machine"], document["settings"]["page_cache"]
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {memory}; the server runs on the same cores, "
        f"the page cache is {cache}."
    )


def _notes(document: Document) -> str:
    """How the others' work differs; which are missing and why; versions."""
    parts = []
    if phrases := tables.differences(document):
        numbered = [f"{i}. {phrase}" for i, phrase in enumerate(phrases, 1)]
        parts.append("\n".join(["Differences from the work above, by the raised numbers:", "", *numbered]))
    if document["unavailable"]:
        parts.append("\n".join(["Could not run:", "", *_unavailable(document)]))
    return "\n\n".join([*parts, _versions(document)])


def _unavailable(document: Document) -> list[str]:
    """A line for each name and reason, with the sections."""
    words = {**losses.PLACES, "growth": "growth"}
    found: dict[tuple[str, str], list[str]] = {}
    for entry in document["unavailable"]:
        found.setdefault((entry["name"], " ".join(entry["reason"].split())), []).append(
            words[entry["section"]]
        )
    return [f"* {name} ({', '.join(sections)}): {reason}" for (name, reason), sections in found.items()]


def _versions(document: Document) -> str:
    """Our versions, then those that each of the others had in addition."""
    ours = document["versions"]
    texts = [", ".join(f"{name} {version}" for name, version in ours.items())]
    seen = {}
    for contender in document["contenders"]:
        own = [
            f"{name} {version}"
            for name, version in contender["versions"].items()
            if ours.get(name) != version
        ]
        if own and not seen.get((contender["script"], tuple(own))):
            seen[contender["script"], tuple(own)] = True
            texts.append(f"{contender['name']}: {', '.join(own)}")
    return "Versions: " + "; ".join(texts) + "."
