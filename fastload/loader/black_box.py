"""The questions that a loader answers about its samples, and what can be left out of them."""

from __future__ import annotations

from fastload.loader.context import LoaderContext

__all__ = ["BlackBox"]


class BlackBox:
    """The part of `fastload.DataLoader` that is asked about its samples.

    The order of an epoch and the randomness of a sample are functions of (seed, epoch, index), so that past
    and coming batches can be named and made again.
    """

    loader_context: LoaderContext
