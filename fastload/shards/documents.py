"""Where the documents of a corpus are: read from an index beside each object of tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ArgumentError, NotFoundError
from fastload.formats.tokens import DocumentBounds, document_bounds
from fastload.shards.catalog import ShardList
from fastload.shards.reader import naming

_READS = 64  # at once


class Documents(NamedTuple):
    """The documents of a corpus, or the pieces of long ones: the number of the first token, and of tokens."""

    firsts: NDArray[np.int64]
    lengths: NDArray[np.int64]


def read_documents(
    shards: ShardList, ending: str, dtype: np.dtype[Any], firsts: NDArray[np.int64], most: int
) -> Documents:
    """Read the indexes of all objects of a corpus.

    Args:
        ending: of the key of an index, in place of that of its object.
        dtype: of the tokens.
        firsts: the number of the first token of each object, and of all tokens.
        most: tokens of a document; longer ones are cut.

    Raises:
        ArgumentError: an index does not fit its object.
        DecodeError: an index cannot be read.
        NotFoundError: there is none.
    """

    def read(number: int) -> DocumentBounds:
        return _read(shards, number, ending, dtype, int(firsts[number + 1] - firsts[number]))

    with ThreadPoolExecutor(shards.store.reading.at_once(_READS)) as pool:
        bounds = list(pool.map(read, range(len(shards))))
    starts = np.concatenate([one.starts + first for one, first in zip(bounds, firsts[:-1], strict=True)])
    lengths = np.concatenate([one.stops - one.starts for one in bounds])
    pieces = -(-lengths // most)  # none of an empty document
    behind = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts, lengths = np.repeat(starts, pieces), np.repeat(lengths, pieces)
    return Documents(starts + behind * most, np.minimum(lengths - behind * most, most))


def _read(shards: ShardList, number: int, ending: str, dtype: np.dtype[Any], tokens: int) -> DocumentBounds:
    shard = shards[number].key
    folder, slash, name = shard.rpartition("/")
    key = f"{folder}{slash}{name.rpartition('.')[0] or name}{ending}"
    try:
        with naming(key):
            body = bytes(shards.store.read(key))
            bounds = document_bounds(body, shards.store.reading.max_inflated)
    except NotFoundError as error:
        raise NotFoundError(
            f"there is no index {key!r} of the documents of {shard!r}: give the ending that the indexes have "
            "as documents=, or write them",
            key=key,
        ) from error
    _check(bounds, f"index {key!r} does not fit {shard!r}", dtype, tokens)
    return bounds


def _check(bounds: DocumentBounds, misfit: str, dtype: np.dtype[Any], tokens: int) -> None:
    if bounds.dtype is not None and bounds.dtype != dtype:
        raise ArgumentError(
            f"{misfit}: it is of tokens of type {bounds.dtype}, and dtype is {dtype}: give dtype="
            f"{bounds.dtype.str!r}"
        )
    starts, stops = bounds.starts, bounds.stops
    before = np.concatenate([[0], stops])[:-1]
    for bad, what in (
        (starts > stops, "ends before it begins"),
        (starts < before, "begins before the one before it ends"),
        (stops > tokens, f"ends beyond the {tokens:,} tokens there"),
    ):
        if bad.any():
            first = int(bad.argmax())
            raise ArgumentError(
                f"{misfit}: document {first}, tokens {starts[first]:,} to {stops[first]:,}, {what}. Make the "
                "index again from this object"
            )
