"""Datasets over object stores. Each is two functions, `decode` (deterministic, cacheable) then `transform`."""
