"""The short form of `python -m tests.fuzz.kernel`, and that it finds bugs which are planted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.fuzz import kernel as fuzz


@pytest.fixture(autouse=True)
def can_fuzz() -> None:
    if (reason := fuzz.missing()) is not None:
        pytest.skip(reason)


# That threads share nothing is held in `make test` by the rows that they make: unit/test_kernel_threads.
@pytest.mark.parametrize("program", ["kernel", "pool", pytest.param("races", marks=pytest.mark.stress)])
def test_a_short_fuzz_run_finds_nothing(program: str) -> None:
    report = fuzz.run(seconds=20, seed=1, name=program, runs=2000, short=True)
    assert report.crashes == []
    assert report.runs > 100 and report.decoded > 10


@pytest.mark.parametrize(
    ("name", "sound", "planted", "told", "program"),
    [
        (  # rows of the ring that are one byte too short
            "jpeg.h",
            "((size_t)d->jpeg.output_width * 3 + 63) / 64 * 64",
            "((size_t)d->jpeg.output_width * 3 - 1)",
            "AddressSanitizer",
            "kernel",
        ),
        # Other bugs of the same program, whose compilation takes seconds.
        *(
            pytest.param("huffman.h", *bug, "kernel", marks=pytest.mark.stress)
            for bug in [
                ("return b.made_up <= (b.count & 63);", "return true;", "huffman.h: 1"),
                # an index of rows: DC predictors that are left out, and a place that is off by some bits
                ("scan->last_dc[c] = last_dc[c];", "scan->last_dc[c] = 0;", "with an index of rows"),
                ("* 8 + (-unread & 7)", "* 8 + (unread & 7)", "with an index of rows"),
            ]
        ),
        pytest.param(
            "segment.h",
            "height * width * 3 + behind != size",
            "height * width * 3 + behind < size",
            "AddressSan",
            "pool",
            marks=pytest.mark.stress,
        ),
        pytest.param(
            "pool.h",
            "    Scratch scratch;",
            "    static Scratch scratch;",
            # What the race does may come before its report.
            "ThreadSanitizer: (data race|SEGV)|another row by threads",
            "races",
            marks=pytest.mark.stress,
        ),
    ],
)
def test_fuzzing_finds_a_planted_bug(
    name: str, sound: str, planted: str, told: str, program: str, tmp_path: Path
) -> None:
    sources = [*fuzz.ROOT.glob("fastload/images/*.h"), *fuzz.ROOT.glob("tests/fuzz/*.c")]
    for source in sources:
        part = tmp_path / source.relative_to(fuzz.ROOT)
        part.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, part)
    header = tmp_path / "fastload/images" / name
    assert sound in header.read_text()
    header.write_text(header.read_text().replace(sound, planted))
    report = fuzz.run(seconds=20, seed=1, root=tmp_path, name=program, short=True)
    assert len(report.crashes) == 1 and re.search(told, report.crashes[0])
    kept = Path(re.findall("kept in (.*)", report.crashes[0])[0])
    # A JPEG, a record of one, or a segment with all records.
    assert kept.read_bytes()[:2] in (b"\xff\xd8", b"\x89D", b"FL")
    shutil.rmtree(kept.parent)
