"""The last module that a fork server imports: its forks take 15 ms of CPU then, not 30, and copy less."""

from tests.commands import command
from tests.settle import settle

command("cache", "info")  # Typer imports pydantic for the first one: 0.2 s, which no fork has to take again
settle()
