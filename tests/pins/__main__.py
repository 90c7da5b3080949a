"""Writes the pins, or says which of them do not hold.

python -m tests.pins            # the cases that differ
python -m tests.pins --write    # writes tests/pins/pins.json again
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.pins.cases import CASES
from tests.pins.measure import measure
from tests.pins.pins import differences, read_pins, write_pins


def main() -> int:
    """Measure all cases; return 1 if one differs and is not written."""
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: measure(case, Path(folder) / str(number))
            for number, (name, case) in enumerate(CASES.items())
        }
    if "--write" in sys.argv[1:]:
        write_pins(found)
        return 0
    pinned = read_pins()
    lines = [
        line for name in {**pinned, **found} for line in differences(name, pinned.get(name), found.get(name))
    ]
    print("\n".join(lines) or f"all {len(found)} cases are as they were pinned")
    return bool(lines)


sys.exit(main())
