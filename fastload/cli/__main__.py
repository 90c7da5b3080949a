"""`python -m fastload.cli`, the same as `fastload`."""

from __future__ import annotations

from fastload.cli import main

main()
