"""The last module that a fork server imports: its forks take 15 ms of CPU then, not 30, and copy less."""

import numpy.ma  # noqa: F401 - np.unique imports it

from tests.commands import command
from tests.settle import settle

command("cache", "info")  # Typer imports pydantic for the first one: 0.2 s, which no fork has to take again
settle()
