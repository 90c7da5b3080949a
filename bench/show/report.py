"""The result of `python -m bench compare` as tables and charts in the README.

    python -m bench report                 # of the newest full result in bench/results
    python -m bench report RESULT.json

Writes the charts beside the result and the text between the README's two marks, and nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from bench.data import RESULTS, ROOT
from bench.show import charts, losses, tables
from bench.show.figures import MAIN, is_ours, median, number, ours_of, rows_of

__all__ = ["check", "include", "markdown", "newest", "write"]

README = ROOT / "README.md"
SCHEMA = Path(__file__).with_name("compare.schema.json")
BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"

Document = dict[str, Any]


def check(document: Document) -> None:
    """Raises ValueError with everything that is wrong in the document."""
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    wrong = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]
    if not wrong:
        json.dumps(document, allow_nan=False)
        wrong = _contradictions(document)
    if wrong:
        raise ValueError("not a result of bench compare:\n" + "\n".join(wrong))


def _contradictions(document: Document) -> list[str]:
    """Errors that a schema cannot express: unknown names, duplicate rows, different numbers of turns."""
    wrong = []
    names = {contender["name"] for contender in document["contenders"]}
    limits = {(limit["section"], limit["case"], limit["name"]) for limit in document["limits"]}
    turns: dict[str, Counter[int]] = {}
    rows = Counter((row["section"], row["case"], row["contender"]) for row in document["rows"])
    wrong += [f"{count} rows of {place}" for place, count in rows.items() if count > 1]
    for row in document["rows"]:
        place = (row["section"], row["case"])
        if row["contender"] not in names:
            wrong.append(f"{place}: {row['contender']!r} is not among the contenders")
        if row["limit"] is not None and (*place, row["limit"]) not in limits:
            wrong.append(f"{place}: no limit {row['limit']!r}")
        for key in ("rates", "first_batch_seconds", "cpu_seconds_per_1000"):
            if row[key] is not None:
                turns.setdefault(row["section"], Counter())[len(row[key])] += 1
    for limit in document["limits"]:
        turns.setdefault(limit["section"], Counter())[len(limit["rates"])] += 1
    wrong += [f"{section}: {sorted(found)} turns" for section, found in turns.items() if len(found) > 1]
    return wrong


def markdown(document: Document) -> str:
    """The README's text about the result, between its marks."""
    parts = [
        _headline(document),
        *_pictures(document, "first-epoch"),
        tables.first_epoch(document),
        _caption(document),
        losses.paragraph(document),
        *_pictures(document, "latency"),
    ]
    if tables.cases(document, "later"):
        parts += ["**Later epochs**, from a full cache or the local disk:"]
        parts += [*_pictures(document, "later-epochs"), tables.later_epochs(document)]
    if tables.cases(document, "decode"):
        parts.append(_details("Decoding only, from memory", tables.decode_only(document)))
    if tables.cases(document, "handover"):
        parts.append(_details("Handing over ready samples", tables.hand_over(document)))
    if text := tables.growth(document):
        parts.append(_details("More workers, more objects, larger objects", text))
    if document["node"]:
        parts.append(_details("Larger machines, by a model fitted to these figures", tables.node(document)))
    return "\n\n".join([*parts, _details("Differences, missing contenders, versions", _notes(document))])


def _pictures(document: Document, *names: str) -> list[str]:
    """The existing charts of these names, in the colours of the reader's page."""
    folder = RESULTS.relative_to(README.parent)
    found = []
    for name in names:
        if charts.CHARTS[name].has_data(document):
            light, dark = (folder / charts.file_name(document, name, theme) for theme in ("light", "dark"))
            found.append(
                "<picture>\n"
                f'  <source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
                f'  <img alt="{charts.CHARTS[name].alt}" src="{light}">\n'
                "</picture>"
            )
    return found


def _details(summary: str, text: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"


def _headline(document: Document) -> str:
    """fastload and the best of the others in the first epoch at 20 ms, whichever is ahead."""
    title = "**The first epoch from S3**"
    rows = rows_of(document, "cold", MAIN)
    ours = ours_of(rows)
    other = next((row for row in rows if not is_ours(row["contender"])), None)
    if ours is None or other is None:
        return title + ", images per second:"
    mine, best = median(ours["rates"]), median(other["rates"])
    start = f"{title}, {MAIN} away: {ours['contender']} reads and decodes {number(mine)} images/s"
    if mine >= best:
        times = f"{number(mine / best)} times the best of the others"
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
        f"Medians of {settings['repeats']} turns (small: min–max). In each turn all contenders run, one\n"
        "after the other, each written as its own documentation recommends, with its fastest number of\n"
        "workers. Raised numbers refer to the differences below. The share of the limit is the median over\n"
        "the turns. Objects are listed before the epoch; within it where fastload fills a cache, because\n"
        "that begins empty. The epochs of slow contenders are cut short: their GETs and bytes include\n"
        "batches that came too late to count."
    )
    command = (
        f"`python -m bench compare{quick}`, {date:%Y-%m-%d}, commit `{document['commit']}`, "
        f"{minutes['measuring']:.0f} minutes, and {minutes['installing']:.0f} to install the others."
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
    load = document["load"]
    parts += [tables.machine(document), _versions(document)]
    parts.append(
        f"{document['machine']['system']}; load {load['before']:.1f} before and {load['after']:.1f} after."
    )
    return "\n\n".join(parts)


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


def include(readme: str, text: str) -> str:
    """The README with `text` between its marks."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"the README needs one {BEGIN} and one {END} after it")
    before, after = readme[: readme.index(BEGIN)], readme[readme.index(END) :]
    return f"{before}{BEGIN}\n{text}\n{after}"


def newest(folder: Path = RESULTS) -> Path | None:
    """The newest full result in the folder, if any."""
    found = {path: json.loads(path.read_text()) for path in sorted(folder.glob("compare-*.json"))}
    full = [path for path, document in found.items() if not document["quick"]]
    return max(full, key=lambda path: found[path]["date"], default=None)


def write(result: Path, readme: Path = README, results: Path = RESULTS) -> list[Path]:
    """Write the README's part and the charts; the paths of the written files."""
    document = json.loads(result.read_text())
    check(document)
    text = include(readme.read_text(), markdown(document))
    pictures = charts.draw(document, results)
    readme.write_text(text)
    return [readme, *pictures]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__.splitlines()[0])
    parser.add_argument("result", nargs="?", type=Path, help="default: the newest full one in bench/results")
    result = parser.parse_args().result or newest()
    if result is None:
        raise SystemExit("no full result in bench/results: run python -m bench compare")
    for path in write(result):
        print(path)


if __name__ == "__main__":
    main()
