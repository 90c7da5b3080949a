"""Batches on a device: copied ahead, decoded and transformed there."""
