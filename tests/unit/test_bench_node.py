"""`python -m bench node` and its listing server: small documents, with numbers computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bench.measure.listing_server import Keys, list_page
from bench.show import node


def row(section: str, case: str, contender: str, rate: float, cpu: float) -> dict[str, Any]:
    return {
        "section": section,
        "case": case,
        "contender": contender,
        "workers": 2,
        "rates": [rate, rate + 10, rate - 10],
        "cpu_seconds_per_1000": [cpu, cpu + 0.1, cpu - 0.1],
        "store_bytes_per_image": 100_500.0 if section == "cold" else 0.0,
        "store_requests_per_image": 1.0 if section == "cold" else 0.0,
    }


DOCUMENT: dict[str, Any] = {
    "machine": {"cores": 2},
    "settings": {"images": 2000, "image_bytes": 100_000},
    "rows": [
        row("cold", "20 ms", "fastload", 1000.0, 1.2),
        row("cold", "20 ms", "fastload, filling raw", 950.0, 1.3),
        row("cold", "20 ms", "torch + s3fs", 40.0, 8.0),
        row("later", "raw", "fastload", 1900.0, 1.0),
        row("later", "shrunk", "fastload", 5000.0, 0.4),
        row("later", "decoded", "fastload", 18000.0, 0.1),
    ],
    "limits": [
        {
            "section": "cold",
            "case": "20 ms",
            "name": "bare ROI decode",
            "rates": [2400.0],
            "unit": "images/s",
        },
        {
            "section": "cold",
            "case": "20 ms",
            "name": "bare parallel GET",
            "rates": [2000.0],
            "unit": "images/s",
        },
    ],
}


def started(objects: int, seconds: float, memory: int, listed: int) -> dict[str, Any]:
    return {
        "contender": "fastload",
        "objects": objects,
        "start_seconds": [seconds],
        "pss_bytes": memory,
        "manifest_bytes": listed,
    }


GROWN: dict[str, Any] = {
    "growth": {"objects": [started(10, 9, 9, 9), started(2_000, 3, 700, 170), started(1_000, 2, 500, 90)]}
}


def pick(nodes: int, mode: str, epoch: str) -> node.Predicted:
    found = node.predictions(node.fit(DOCUMENT), nodes)
    (one,) = (p for p in found if (p.mode, p.epoch) == (mode, epoch))
    return one


def test_costs_are_differences_of_the_medians() -> None:
    assert node.fit(DOCUMENT) == pytest.approx(
        {
            "image_bytes": 100_000,
            "store_bytes": 100_500,
            "requests_per_image": 1,
            "decode_cpu_raw": 0.001,
            "decode_cpu_shrunk": 0.0004,
            "decode_cpu_decoded": 0.0001,
            "get_cpu": 0.0002,
            "fill_cpu_raw": 0.0001,
        }
    )


def test_one_node() -> None:
    """88 cores are left of 96, and 64 workers decode; 8 x 400 / 0.224 images are wanted a second."""
    first = pick(1, "raw", "first")
    # 1,024 in flight / 22 ms = 46,545; 64 workers / 1 ms = 64,000; 88 cores / 1.3 ms = 67,692;
    # 6.55 GB/s / 2 / 100 KB = 32,768
    assert (first.possible, first.limit) == (pytest.approx(32_768), "disk write")
    assert first.store_bytes == pytest.approx(14_285.7 * 100_500, rel=1e-5)
    assert first.disk_bytes == pytest.approx(14_285.7 * 100_000, rel=1e-5)
    assert first.cores == pytest.approx(14_285.7 * 0.0013, rel=1e-5)
    later = pick(1, "raw", "later")
    assert (later.possible, later.store_bytes, later.requests) == (pytest.approx(64_000), 0, 0)
    decoded = pick(1, "decoded", "later")
    assert decoded.possible == pytest.approx(1.6e6 * 4096 / 360_000, abs=0.1), "the disk: 18,204"


def test_nodes_share_the_data() -> None:
    one, many = pick(1, "raw", "first"), pick(64, "raw", "first")
    assert many.stored_bytes == pytest.approx(one.stored_bytes / 64, rel=1e-5)
    assert many.requests == pytest.approx(one.requests, rel=1e-4)
    assert pick(64, "no cache", "each").disk_bytes == 0


def test_start_over_more_objects_grows_as_the_two_largest_measured() -> None:
    assert node.listing(GROWN, 3_000) == {
        "start_seconds": pytest.approx(4),
        "pss_bytes": pytest.approx(900),
        "manifest_bytes": pytest.approx(250),
    }


def test_text_says_what_breaks_first() -> None:
    text = node.markdown(DOCUMENT | GROWN)
    assert "914,000 GETs/s" in text and "166 prefixes" in text
    assert "later raw: 2,000 images/s predicted, 1,900 measured (+5.3 %)" in text


def test_check_predicts_the_measured_machine() -> None:
    # later: 2 cores / 1 ms. First: a GET takes 2 cores / 2,000 = 1 ms of them, and decoding 1 ms.
    found = node.checks(DOCUMENT, node.fit(DOCUMENT))
    assert found == {
        "later raw": {"predicted": 2000, "measured": 1900, "error": 0.0526},
        "first epoch at 20 ms": {"predicted": 1000, "measured": 1000, "error": 0},
    }


def test_document_without_our_rows_has_no_prediction() -> None:
    lacking = DOCUMENT | {"rows": [row for row in DOCUMENT["rows"] if row["case"] != "raw"]}
    with pytest.raises(LookupError, match="no row of 'fastload' in section 'later', case 'raw'"):
        node.markdown(lacking | GROWN)


def test_listing_is_ordered_and_its_pages_join() -> None:
    keys = Keys(5000)
    assert list(keys) == sorted(keys) and len(set(keys)) == 5000
    assert [keys.index_of(key) for key in (keys[4321], "class_000/img_0004321.jpg", "else")] == [
        4321,
        None,
        None,
    ]
    start: int | None = 0
    seen: list[int] = []
    while start is not None:
        page = list_page(keys, prefix="class_0", start=start, most=77)
        seen, start = seen + page.objects, page.next
    assert seen == list(range(500)), "class_000 to class_099, 5 in each"
