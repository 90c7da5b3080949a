"""The whole path, from sampler to batch in order."""
