"""`python -m bench report`: the schema of a result, its figures, what the pages show of it."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.show import charts, figures, losses, report, report_page, report_readme, singles, tables
from bench.show.figures import MODES

ROOT = Path(__file__).parents[2]
Document = dict[str, Any]


@pytest.fixture
def small() -> Document:
    document: Document = json.loads((ROOT / "tests/data/compare-small.json").read_text())
    return document


def row(document: Document, case: str, contender: str) -> Document:
    found = figures.find(figures.rows_of(document, "cold", case), contender)
    assert found is not None
    return found


# --- the schema


def test_the_schema_is_one_and_accepts_the_small_result(small: Document) -> None:
    report.jsonschema.Draft202012Validator.check_schema(json.loads(report.SCHEMA.read_text()))
    report.check(small)


DAMAGE: dict[str, tuple[Callable[[Document], object], str]] = {
    "a part is missing": (lambda d: d.pop("growth"), "'growth' is a required property"),
    "a rate of 0": (lambda d: d["rows"][0].update(rates=[1, 0, 1]), "less than or equal to the minimum of 0"),
    "not a number": (lambda d: d["rows"][0].update(rates=[1, float("nan"), 1]), "not JSON compliant"),
    "a case of another section": (lambda d: d["rows"][0].update(case="raw"), "not valid under any"),
    "local time": (lambda d: d.update(date="2026-11-20T10:00:00+01:00"), "does not match"),
    "a name that breaks a table": (lambda d: d["contenders"][0].update(name="a|b"), "does not match"),
    "nobody's row": (lambda d: d["rows"][0].update(contender="x"), "'x' is not among the contenders"),
    "nobody's limit": (lambda d: d["rows"][0].update(limit="x"), "no limit 'x'"),
    "a row twice": (lambda d: d["rows"].append(d["rows"][0]), "2 rows of"),
    "a turn is missing": (lambda d: d["rows"][0]["rates"].pop(), "cold: [2, 3] turns"),
    "a limit's turn is missing": (lambda d: d["limits"][0]["rates"].pop(), "cold: [2, 3] turns"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_result_is_refused(small: Document, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(small)
    with pytest.raises(ValueError, match=re.escape(message)):
        report.check(small)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("section", ["later", "decode"])
def test_a_result_may_have_every_cache_mode(small: Document, section: str, mode: str) -> None:
    """A run of an hour ended in an error, because the schema lacked a mode that was measured."""
    about = {"section": section, "case": mode}
    limit = {"name": "a limit", "rates": [1, 2, 3], "unit": "images/s"}
    small["rows"] = [small["rows"][0] | about | {"limit": "a limit"}]
    small["limits"] = [about | limit]
    report.check(small)
    assert mode in tables.cases(small, section)


# --- figures


def test_medians_and_spreads(small: Document) -> None:
    ours = row(small, "20 ms", "fastload")  # 1000, 900, 1200 of 2000, 1000, 1500
    assert figures.median(ours["rates"]) == 1000
    assert figures.spread(ours["rates"]) == "900–1,200"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "–"), (0, "0"), (1, "1.00"), (0.05, "0.0500"), (36.14, "36.1"), (999.6, "1,000")),
        *((9.996, "10.0"), (1034, "1,030"), (18380.0, "18,400"), (-4.5, "-4.50")),
    ],
)
def test_three_digits(value: float | None, text: str) -> None:
    assert figures.number(value) == text


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_table_is_whole(small: Document) -> None:
    """In each table of the text, all lines have as many cells as the heading."""
    tables_found = re.findall(r"(?:^\|.*\n?)+", report_page.markdown(small), re.MULTILINE)
    assert len(tables_found) == 9
    for text in tables_found:
        assert len({len(cells(line)) for line in text.splitlines()}) == 1, text


def test_other_load_is_a_ratio_to_the_idle_machine(small: Document) -> None:
    lines = [cells(line) for line in tables.other_load(small).splitlines()[2:]]
    assert lines == [
        ["first epoch", "**fastload**", "1,000", "600", "0.600", "1.20", "0.720"],
        ["", "WebDataset <sup>2,3</sup>", "800", "400", "0.500", "0.960", "0.480"],
    ]


# --- where fastload loses


def test_a_planted_loss_is_named(small: Document) -> None:
    """WebDataset's 1,100 images/s against our 1,000; its requests; its memory in later epochs."""
    rate, requests, memory = losses.losses(small)
    assert (rate.what, rate.case, rate.contender) == ("Rate", "20 ms", "WebDataset")
    assert (rate.theirs, rate.ours, rate.turns) == (1100, 1000, (2, 3))
    assert rate.kin == ("fastload, tar shards", 1400)
    assert (requests.what, requests.theirs, requests.ours) == ("Requests", 0.02, 1)
    assert (memory.what, memory.case, memory.theirs, memory.ours) == ("Memory", "raw", 300, 420)
    text = losses.paragraph(small)
    assert (
        "* Rate, first epoch (images/s): WebDataset 1,100 against 1,000 "
        "(20 ms, ahead in 2 of 3 rounds; *fastload, tar shards* 1,400)." in text
    )
    assert "* Memory, later epochs (MB): WebDataset 300 against 420 (raw)." in text
    assert "* Requests, first epoch (GETs per image): WebDataset 0.0200 against 1.00 (20 ms)." in text
    assert "* No other loader has its first batch sooner or uses less CPU time." in text


def test_no_loss_is_reported_for_a_tie(small: Document) -> None:
    row(small, "20 ms", "WebDataset").update(  # a tie is no loss
        rates=[1000, 850, 1000], store_requests_per_image=1
    )
    (memory,) = losses.losses(small)
    assert memory.what == "Memory"
    never = "has a higher rate, has its first batch sooner, uses less CPU time or makes fewer requests"
    assert f"* No other loader {never}." in losses.paragraph(small)
    figures.find(figures.rows_of(small, "later", "raw"), "WebDataset")["pss_bytes"] = 420_000_000
    assert losses.paragraph(small) == "No other loader is better in any of these figures."


def test_a_first_batch_before_that_of_the_default_cache_is_a_loss(small: Document) -> None:
    """Which fills the cache, and begins later than fastload without one."""
    cached = copy.deepcopy(row(small, "20 ms", "fastload"))
    cached.update(contender="fastload, default cache", first_batch_seconds=[9.0, 9.0, 9.0])
    small["rows"].append(cached)
    found = [loss for loss in losses.losses(small) if loss.what == "First batch"]
    assert found and all((loss.case, loss.ours) == ("20 ms, default cache", 9) for loss in found)
    assert found[0].kin is not None and found[0].kin[0] == "fastload"
    assert "has its first batch sooner" not in losses.paragraph(small)


def other_figures(small: Document) -> list[Document]:
    """The small result, each time with one more figure in which ours is behind."""
    changed = []
    for key in ("first_batch_seconds", "cpu_seconds_per_1000"):
        document = copy.deepcopy(small)
        row(document, "0 ms", "torch + s3fs")[key] = [0.01, 0.01, 0.01]
        changed.append(document)
    for part, entry in (
        (
            "workers",
            {
                "contender": "WebDataset",
                "case": "cold 20 ms",
                "workers": 2,
                "rates": [1001] * 3,
                "pss_bytes": None,
            },
        ),
        ("sizes", {"contender": "WebDataset", "object_bytes": 10240, "bytes_per_second": [31000001] * 3}),
    ):
        document = copy.deepcopy(small)
        document["growth"][part].append(entry)
        changed.append(document)
    changed.append(copy.deepcopy(small))
    changed[-1]["growth"]["objects"][1]["start_seconds"] = [0.39]
    return changed


def test_every_kind_of_loss_is_found(small: Document) -> None:
    before = losses.losses(small)
    found = []
    for document in other_figures(small):
        report.check(document)
        (new,) = [loss for loss in losses.losses(document) if loss not in before]
        found.append((new.what, new.place, new.case))
    assert found == [
        ("First batch", "first epoch", "0 ms"),
        ("CPU", "first epoch", "0 ms"),
        ("Rate", "growth, cold 20 ms", "2 workers"),
        ("Rate", "growth", "objects of 10 KiB"),
        ("Start", "growth", "1,000 objects"),
    ]


# --- the text


def test_who_could_not_run_and_what_differs(small: Document) -> None:
    text = report_page.markdown(small)
    assert "* tf.data (first epoch): it has no S3 file system" in text
    assert "2. shuffled within 1,000 photos\n3. decodes the whole photo\n" in text
    assert "WebDataset: webdataset 1.0.2; torch + s3fs: s3fs 2026.9.0." in text
    assert "commit `abc1234+`" in text and "2 cores of A small CPU, 8 GiB" in text
    assert "fastload reads and decodes 1,000 images/s; WebDataset is 1.10 times as fast (1,100)" in text


def test_a_quick_result_with_little_in_it(small: Document) -> None:
    small["rows"] = small["rows"][2:3]
    small.update(quick=True, growth={"workers": [], "objects": [], "sizes": []})
    report.check(small)
    text = report_page.markdown(small)
    assert "--quick" in text and "latency" not in text and "Later" not in text
    assert list(charts.CHARTS["first-epoch"].specification(small, charts.THEMES["light"]))


def test_the_readme_shows_the_best_of_the_others(small: Document) -> None:
    text = report_readme.markdown(small)
    lines = [cells(line) for line in text.splitlines() if line.startswith("|")]
    assert lines[2:5] == [
        [
            "first epoch from S3, one photo per object, no cache",
            "50.0 (torch + s3fs)",
            "**1,100 (WebDataset)**",
            "1,000",
        ],
        [
            "first epoch from S3, tar shards (torch: photos), no cache",
            "50.0 (torch + s3fs)",
            "1,100 (WebDataset)",
            "**1,400**",
        ],
        ["later epochs, from the default cache", "–", *lines[4][2:]],
    ]
    assert lines[5][0].startswith("memory in the first epoch, no cache, MB") and lines[5][3] == "**400**"
    assert "WebDataset (shuffled within 1,000 photos)" in text
    assert "benchmarks.html#where-others-win" in text and "compare-best-dark.png" in text


def test_page_for_users_of_a_peer_has_its_rows_and_ours(small: Document) -> None:
    heading, _, *lines = (cells(line) for line in tables.beside(small, "WebDataset").splitlines())
    assert heading[1:4] == ["first epoch, images/s", "first batch, s", "GETs / image"]
    names = ["**fastload, tar shards**", "WebDataset", "**fastload**", "**fastload, default cache**"]
    assert [line[0] for line in lines] == names
    assert [line[1] for line in lines] == ["**1,400**", "1,100", "**1,000**", "–"]


def test_include() -> None:
    page = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    once = report.include(page, "new")
    assert once == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"
    assert report.include(once, "new") == once
    for damaged in ("", page + page, page.replace(report.END, ""), f"{report.END}{report.BEGIN}"):
        with pytest.raises(ValueError, match="the page needs one"):
            report.include(damaged, "new")


def test_write(small: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts and the charts of the newest full result; a quick one is passed over."""
    monkeypatch.setattr(charts, "CHARTS", {name: charts.CHARTS[name] for name in ("best", "first-epoch")})
    monkeypatch.setattr(report_page, "_pictures", lambda document, *names: [])
    for date, quick in (("2026-11-19", False), ("2026-11-20", False), ("2026-11-21", True)):
        document = {**small, "date": f"{date}T10:00:00+00:00", "quick": quick}
        (tmp_path / f"compare-{date}.json").write_text(json.dumps(document))
    newest = report.newest(tmp_path)
    assert newest == tmp_path / "compare-2026-11-20.json"
    texts = report.texts(json.loads(newest.read_text()))
    for name in texts:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{report.BEGIN}\n{report.END}\n")
    monkeypatch.setattr(report, "SINGLES", ())
    written = report.write(newest, tmp_path, tmp_path)
    assert all(text in (tmp_path / name).read_text() for name, text in texts.items())
    pictures = [f"compare-{name}{dark}.png" for name in ("best", "first-epoch") for dark in ("", "-dark")]
    assert [str(path.relative_to(tmp_path)) for path in written] == [*texts, *pictures]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[len(texts) :])
    with pytest.raises(ValueError, match="is a quick result"):
        report.write(tmp_path / "compare-2026-11-21.json", tmp_path, tmp_path)


def test_names_at_the_ends_of_lines_do_not_cover_each_other() -> None:
    ends = [(str(i), 1.0, y) for i, y in enumerate((379, 380, 100, 101, 102, 380))]
    ys = [y for _, _, y in charts._apart(ends)]
    assert all(b - a >= charts.LINE for a, b in itertools.pairwise(ys)) and ys[-1] <= charts.HEIGHT


# --- what is committed


def test_the_pages_have_the_newest_result() -> None:
    newest = report.newest()
    if newest is None:
        pytest.skip("no full result of bench compare is committed yet")
    document = json.loads(newest.read_text())
    report.check(document)
    for page, text in report.pages_with(document).items():
        assert page.read_text() == text, f"{page.name}: run python -m bench report"


def test_each_table_of_the_measurements_is_of_the_result_and_beside_its_command() -> None:
    text = (ROOT / "docs/explanation/measurements.md").read_text()
    document = json.loads(report.newest().read_text())
    commands = {part["command"] for name, part in document["parts"].items() if name != "wrappers"}
    assert not [command for command in commands if f"`{command}`" not in text]
    tables = re.findall(r"(?<!\|\n)(?:^\|.*\n){3,}", text, re.MULTILINE)
    assert len(tables) == text.count("<!-- measured:") == len(singles.MARKED.findall(text)) > 0
