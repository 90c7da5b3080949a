"""The tables of `python -m bench report`, in Markdown, from the document of `python -m bench compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.show.figures import (
    BUSY,
    EPOCHS,
    MAIN,
    cases,
    find,
    is_ours,
    limits_of,
    median,
    number,
    rows_of,
    short_size,
    spread,
    table,
)

Document = dict[str, Any]
Row = dict[str, Any]


def differences(document: Document) -> list[str]:
    """In what the work of others is not that of ours, each phrase once; footnotes are numbered by it."""
    phrases = [phrase for contender in document["contenders"] for phrase in _phrases(contender)]
    return list(dict.fromkeys(phrases))


def _phrases(contender: Document) -> list[str]:
    return [phrase.strip() for phrase in contender["differs"].split(";") if phrase.strip()]


def _name(document: Document, contender: str) -> str:
    """The name with its footnotes; ours in bold."""
    known = differences(document)
    entries = [entry for entry in document["contenders"] if entry["name"] == contender]
    marks = sorted({known.index(phrase) + 1 for entry in entries for phrase in _phrases(entry)})
    shown = f"**{contender}**" if is_ours(contender) else contender
    return shown + (f" <sup>{','.join(map(str, marks))}</sup>" if marks else "")


def _bold(contender: str, text: str) -> str:
    return f"**{text}**" if is_ours(contender) and text != "–" else text


def _with_spread(contender: str, row: Row | None) -> str:
    if row is None:
        return "–"
    return f"{_bold(contender, number(median(row['rates'])))} <sub>{spread(row['rates'])}</sub>"


def _scaled(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


def _workers(row: Row) -> str:
    return "–" if row["workers"] is None else str(row["workers"])


def first_epoch(document: Document) -> str:
    """One line a contender, the fastest at 20 ms first; the limits last."""
    latencies = cases(document, "cold")
    main = rows_of(document, "cold", MAIN)
    names = [row["contender"] for row in main]
    names += [n for n in dict.fromkeys(r["contender"] for r in rows_of(document, "cold")) if n not in names]
    costs = ("first batch, s", "CPU, s per 1,000", "GETs / image", "memory, MB", "workers")
    headings = ["images/s, from S3", *latencies, *costs]
    lines = [_first_epoch_line(document, latencies, name) for name in names]
    return table(headings, lines + _limit_lines(document, latencies, len(headings)))


def _first_epoch_line(document: Document, latencies: Sequence[str], name: str) -> list[str]:
    found = {case: find(rows_of(document, "cold", case), name) for case in latencies}
    rates = [
        _with_spread(name, row) if case == MAIN else number(median(row["rates"]) if row else None)
        for case, row in found.items()
    ]
    row = found.get(MAIN)
    return [_name(document, name), *rates, *(["–"] * 5 if row is None else _first_epoch_costs(row))]


def _first_epoch_costs(row: Row) -> list[str]:
    return [
        number(median(row["first_batch_seconds"])),
        number(median(row["cpu_seconds_per_1000"])),
        number(row["store_requests_per_image"]),
        number(_scaled(row["pss_bytes"], 1e6)),
        _workers(row),
    ]


def _limit_lines(document: Document, latencies: Sequence[str], width: int) -> list[list[str]]:
    """A limit a line. Its name may end with the latency: the column says it."""
    found: dict[str, dict[str, str]] = {}
    for case in latencies:
        for limit in limits_of(document, rows_of(document, "cold", case)):
            name = limit["name"].removesuffix(f", {case}")
            found.setdefault(name, {})[case] = f"*{number(median(limit['rates']))}*"
    lines = [[f"*limit: {name}*", *(by.get(case, "") for case in latencies)] for name, by in found.items()]
    return [line + [""] * (width - len(line)) for line in lines]


def later_epochs(document: Document) -> str:
    """The fastest first in each mode, and the mode's limits below."""
    headings = ["", "images/s", "min–max", "CPU, s per 1,000", "memory, MB"]
    return table(["mode", *headings], _by_mode(document, "later"), texts=2)


def decoding(document: Document) -> str:
    """The same for photos in memory, on one core and without a loader; nothing of memory."""
    headings = ["mode", "", "images/s", "min–max", "CPU, s per 1,000"]
    return table(headings, [line[:-1] for line in _by_mode(document, "decode")], texts=2)


def handing_over(document: Document) -> str:
    """The rates at which batches of ready samples come, by their dtype."""
    dtypes = cases(document, "handover")
    names = dict.fromkeys(row["contender"] for row in rows_of(document, "handover"))
    found = {dtype: rows_of(document, "handover", dtype) for dtype in dtypes}
    lines = [
        [_name(document, name)] + [_with_spread(name, find(found[dtype], name)) for dtype in dtypes]
        for name in names
    ]
    return table(["samples/s", *dtypes], lines)


def _by_mode(document: Document, section: str) -> list[list[str]]:
    lines = []
    for case in cases(document, section):
        rows = rows_of(document, section, case)
        block = [_epoch_line(document, row) for row in rows]
        block += [
            [f"*limit: {x['name']}*", f"*{number(median(x['rates']))}*", spread(x["rates"]), "", ""]
            for x in limits_of(document, rows)
        ]
        lines += _labelled(f"`{case}`", block)
    return lines


def _labelled(label: str, block: list[list[str]]) -> list[list[str]]:
    """The lines with a first cell, which only the first of them fills."""
    return [[label if i == 0 else "", *line] for i, line in enumerate(block)]


def _epoch_line(document: Document, row: Row) -> list[str]:
    return [
        _name(document, row["contender"]),
        _bold(row["contender"], number(median(row["rates"]))),
        spread(row["rates"]),
        number(median(row["cpu_seconds_per_1000"])),
        number(_scaled(row["pss_bytes"], 1e6)),
    ]


def other_load(document: Document) -> str:
    """The rates of both kinds of epochs, on an idle machine and with one core kept busy, and their ratio."""

    def cores(row: dict[str, Any]) -> str:
        pairs = zip(row["rates"], row["cpu_seconds_per_1000"], strict=True)
        return number(median([rate * seconds / 1000 for rate, seconds in pairs]))

    lines = []
    for epoch in EPOCHS:
        block = []
        for row in rows_of(document, "load", epoch):
            loaded = find(rows_of(document, "load", f"{epoch}{BUSY}"), row["contender"])
            if loaded is not None:
                idle, busy = median(row["rates"]), median(loaded["rates"])
                figures = [number(idle), number(busy), number(busy / idle), cores(row), cores(loaded)]
                block.append([_name(document, row["contender"]), *figures])
        lines += _labelled(epoch, block)
    headings = ["", "images/s", "idle", "one core busy", "ratio", "cores used, idle", "beside"]
    return table(headings, lines, texts=2) if lines else ""


def photographs(document: Document) -> str:
    """Both kinds of epochs with smaller photos."""
    lines = []
    for epoch in EPOCHS:
        rows = rows_of(document, "photographs", epoch)
        lines += _labelled(epoch, [_epoch_line(document, row) for row in rows])
    headings = ["", "", "images/s", "min–max", "CPU, s per 1,000", "memory, MB"]
    return table(headings, lines, texts=2) if lines else ""


def workers(document: Document) -> str:
    """Rate and memory over the number of workers."""
    entries = document["growth"]["workers"]
    counts = sorted({entry["workers"] for entry in entries})
    lines = []
    for case, name in dict.fromkeys((entry["case"], entry["contender"]) for entry in entries):
        by = {e["workers"]: e for e in entries if (e["case"], e["contender"]) == (case, name)}
        cells = [_rate_and_memory(by.get(count)) for count in counts]
        lines.append([case.replace("cold", "first epoch,"), _name(document, name), *cells])
    headings = ["", "images/s with workers:", *(str(count) for count in counts)]
    return table(headings, lines, texts=2) if lines else ""


def beside(document: Document, name: str) -> str:
    """fastload and the contenders whose names begin with `name`, in both kinds of epochs."""
    columns: list[tuple[str, str, str, str, float]] = [
        ("first epoch, images/s", "cold", MAIN, "rates", 1),
        ("first batch, s", "cold", MAIN, "first_batch_seconds", 1),
        ("GETs / image", "cold", MAIN, "store_requests_per_image", 1),
        ("memory, MB", "cold", MAIN, "pss_bytes", 1e6),
        *(
            (f"later epochs, `{mode}`, images/s", "later", mode, "rates", 1)
            for mode in cases(document, "later")
        ),
    ]
    columns = [
        column
        for column in columns
        if any(row["contender"].startswith(name) for row in rows_of(document, *column[1:3]))
    ]
    places = dict.fromkeys(column[1:3] for column in columns)
    rows = [row for place in places for row in rows_of(document, *place)]
    found = dict.fromkeys(r["contender"] for r in rows if r["contender"].startswith(("fastload", name)))
    lines = [
        [_name(document, contender).split(" <sup>")[0]]
        + [_figure(document, contender, *column[1:]) for column in columns]
        for contender in found
        if not contender.startswith("fastload, filling")
    ]
    return table(["", *(column[0] for column in columns)], lines)


def _figure(document: Document, contender: str, section: str, case: str, key: str, divisor: float) -> str:
    row = find(rows_of(document, section, case), contender)
    return "–" if row is None else _bold(contender, number(_scaled(median(row[key]), divisor)))


def _rate_and_memory(row: Row | None) -> str:
    if row is None:
        return "–"
    return f"{number(median(row['rates']))} <sub>{number(_scaled(row['pss_bytes'], 1e6))} MB</sub>"


def growth(document: Document) -> str:
    """More objects, larger objects: a table for each that was measured."""
    parts = document["growth"]
    made = (_growth_objects(parts["objects"]), _growth_sizes(document))
    return "\n\n".join(part for part in made if part)


def _growth_objects(entries: list[Row]) -> str:
    lines = [
        [
            entry["contender"],
            f"{entry['objects']:,}",
            number(median(entry["start_seconds"])),
            number(median(entry["again_seconds"])),
            number(_scaled(entry["pss_bytes"], 1e6)),
            number(_scaled(entry["manifest_bytes"], 1e6)),
        ]
        for entry in sorted(entries, key=lambda entry: (entry["objects"], entry["contender"]))
    ]
    headings = ["", "objects", "first start, s", "second start, s", "memory, MB", "list on disk, MB"]
    return table(headings, lines) if entries else ""


def _growth_sizes(document: Document) -> str:
    entries = document["growth"]["sizes"]
    sizes = sorted({entry["object_bytes"] for entry in entries})
    lines = []
    for name in dict.fromkeys(entry["contender"] for entry in entries):
        by = {
            entry["object_bytes"]: median(entry["bytes_per_second"])
            for entry in entries
            if entry["contender"] == name
        }
        lines.append(
            [_name(document, name), *(_bold(name, number(_scaled(by.get(size), 1e6))) for size in sizes)]
        )
    headings = ["MB/s from objects of", *(short_size(size) for size in sizes)]
    return table(headings, lines) if entries else ""
