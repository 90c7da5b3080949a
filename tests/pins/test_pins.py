"""What a change of the inside must not change: keys, orders, digests, states and pixels, as they were pinned.

`pins.json` has one line a case, and `python -m tests.pins --write` writes it. The inputs are fixed bytes in
memory, so that the values are the same on every machine. They hold for these decoders: the first four photos
are JPEGs, decoded by the kernel's libjpeg-turbo (islow is bit exact in 2.x and 3.x) and its own Huffman
decoder; the other two are PNGs, whose pixels no decoder changes. Mode "shrunk" also pins libjpeg-turbo's
encoder. Orders are those of torch's generator on the CPU. Payloads of the cache are not pinned: mode "auto"
may choose another form for them.

Not pinned, as they depend on the machine: keys of local files (the path and the time are in them), and keys
of `decode=` and `cached` without `__fingerprint__` (the versions of Python and of libraries are in them).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.pins.cases import CASES
from tests.pins.measure import measure, order_from
from tests.pins.pins import ADVICE, differences, read_pins

PINNED = read_pins()


@pytest.mark.parametrize("name", CASES)
def test_case_is_as_it_was_pinned(name: str, tmp_path: Path) -> None:
    found = measure(CASES[name], tmp_path / "cache")
    lines = list(differences(name, PINNED.get(name), found))
    if lines:
        pytest.fail("\n".join([*lines, ADVICE]), pytrace=False)


def test_every_pin_has_a_case() -> None:
    assert list(PINNED) == list(CASES), ADVICE


@pytest.mark.parametrize("name", ["ImageFolder", "TarDataset", "Mixture"])
def test_pinned_state_resumes_the_pinned_order(name: str) -> None:
    state = PINNED[f"whole state of a loader over {name}"]["whole"]
    first, _, rest = PINNED[name]["order"][0].partition(" | ")
    assert first and order_from(CASES[name], state) == rest, ADVICE


def test_states_do_not_name_the_folder_of_the_cache(tmp_path: Path) -> None:
    case = replace(CASES["ImageFolder: dct"], parts=("whole",))
    assert str(tmp_path) not in json.dumps(measure(case, tmp_path / "cache"))
