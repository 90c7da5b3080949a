"""The last module that a fork server imports: its forks take 15 ms of CPU then, not 30, and copy less."""

from tests.settle import settle

settle()
