"""Reading ahead: the window of requests in flight, its size, and how large objects are cut."""

from fastload.fetch.source import ObjectSource, Source
from fastload.fetch.window import Window

__all__ = ["ObjectSource", "Source", "Window"]
