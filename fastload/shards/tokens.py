"""Large objects of tokens as a dataset: blocks of equal length, or whole documents, read by ranges."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from fastload.cache import Cache, as_cache
from fastload.checks import check_index, whole_number
from fastload.datasets.payloads import ObjectPayloads
from fastload.datasets.sample_fields import Shape
from fastload.datasets.samples import RowBatch, RowFailures, SampleBuilder, Todo
from fastload.datasets.store_dataset import StoreDataset
from fastload.datasets.views import Allocate
from fastload.errors import ArgumentError, shorten_errors
from fastload.fetch.reads import Source, record_name
from fastload.formats.tokens import HEAD, TokenHeader, header_of, is_token_type
from fastload.images.rng import mix_all
from fastload.shards.catalog import ShardList
from fastload.shards.documents import Documents, read_documents
from fastload.shards.formats import TOKENS
from fastload.shards.reader import Shard, naming
from fastload.store.base import Buffer
from fastload.store.failures import Wait

_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip")
_TOKENS = "tokens"


class TokenDataset(StoreDataset):
    """Samples of `block` tokens each, or documents of at most so many, read at random from large objects.

    The objects hold token numbers of one integer type, one after the other: raw files, as nanoGPT, Megatron
    and OLMo write them; `.npy` files; and files with the header of llm.c. The first bytes of each tell which,
    so the constructor makes one request per object. All objects of a dataset are of one kind.

    The objects are laid end to end, in the order of a list or else of their keys, so a sample may begin in
    one and end in the next. Sample i has the tokens from `i * block` on. What is left at the end is smaller
    than a sample and not used: `tokens - (len(dataset) * block + overlap)` tokens.

    With `documents=` a sample is a document in place of that; one that is longer than `block` is cut into
    several samples. They have different lengths: `sizes` has these for a `BudgetSampler`, and `PackTokens`
    makes rows of them.

    It is a map-style dataset: shuffled exactly, by any sampler. A sample that the cache does not have costs
    one request, and one more for each object that it continues in.

    Example::

        from fastload import DataLoader, TokenDataset

        dataset = TokenDataset("s3://bucket/corpus", "uint16", block=64, overlap=1)
        for batch in DataLoader(dataset, batch_size=32, shuffle=True, num_workers=8):
            inputs, targets = batch[:, :-1], batch[:, 1:]  # int64 (32, 64) both, of a batch (32, 65)

    Args:
        url: a prefix (all objects below it that are named .bin or .npy), one object, `{000..099}`, a glob, or
            a list of these: any fsspec URL or path.
        dtype: of the tokens as they are stored: any integer type of numpy that fits into int64, such as
            "uint16", or ">u2" for big-endian.
        block: tokens from the beginning of one sample to that of the next, at least 1; with `documents=` the
            most tokens of a sample.
        overlap: tokens that a sample shares with the next one, at its end. It has `block + overlap` tokens.
            With 1, all tokens but the first are a target once. 0 with `documents=`.
        documents: None, or the ending of the index beside each object, in place of its own: ".idx" of
            Megatron, ".csv.gz" of OLMo and Dolma, or any other of an index in numpy's format, which has the
            number of tokens before the end of each document: int64, ascending. The first bytes tell these
            apart. Empty documents are no samples.
        cache: a `Cache` in mode "auto" or "raw", or a directory for one; filled during the first epoch.
        storage_options, listing_max_age: see `TarDataset`.

    Attributes:
        tokens: the number of tokens in all objects.
        sizes: the tokens of each sample, int64.

    Raises:
        ArgumentError: an argument is invalid; or an object does not hold whole tokens of `dtype`, is cut, or
            is compressed; or some objects have a header and others none; or all together hold less than one
            sample; or an index of documents does not fit its object.
        DecodeError: the header of an object, or an index, cannot be read.
        NotFoundError, AccessDeniedError, StoreError: within 10 s, before any worker starts.
    """

    _settled: ClassVar[frozenset[str]] = StoreDataset._settled | {"dtype", "block", "overlap", "documents"}
    _computed: ClassVar[dict[str, str]] = {
        "tokens": "it is the number of tokens in the objects of url",
        "sizes": "it has the tokens of each sample",
    }

    @shorten_errors
    def __init__(
        self,
        url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        dtype: npt.DTypeLike,
        block: int,
        *,
        overlap: int = 0,
        documents: str | None = None,
        cache: Cache | str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        listing_max_age: float | str = 0,
    ) -> None:
        super().__init__(url, None)
        self.dtype = _checked_dtype(dtype)
        block = whole_number("block", block)
        overlap = whole_number("overlap", overlap, 0)
        self.block, self.overlap, self.documents = block, overlap, documents
        _check_documents(documents, overlap)
        kept_in = as_cache(cache)
        self._payloads = ObjectPayloads(kept_in, None)
        if kept_in is not None and kept_in._codec.wants_images:
            raise ArgumentError(f"cache mode {kept_in.mode!r} is for images: tokens need mode 'raw'")
        shards = ShardList(url, TOKENS, kept_in, listing_max_age, storage_options)
        self.cache = kept_in if shards.cacheable else None  # a warning has said why
        self._corpus = _Corpus(shards, self.cache, self.dtype, block, overlap, documents)
        self._budget = shards.store.budget
        self.transform = None
        if documents is not None and not self._corpus.samples:
            raise ArgumentError(f"the indexes of {shards.store.url!r} have no document that is not empty")
        if not self._corpus.samples:
            raise ArgumentError(
                f"{shards.store.url!r} has {self.tokens:,} tokens of type {self.dtype}, and a sample has "
                f"{self._corpus.length:,} (block={block}, overlap={overlap}): give a smaller block="
            )

    @property
    def tokens(self) -> int:
        return self._corpus.tokens

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        return np.full(len(self), self._corpus.spans(np.arange(len(self)))[1], np.int64)

    def __len__(self) -> int:
        return self._corpus.samples

    def __repr__(self) -> str:
        corpus = self._corpus
        most = "" if corpus.documents is None else "at most "
        samples = f"{corpus.samples:,} samples of {most}{corpus.length:,} tokens"
        cache = "" if self.cache is None else f", cache={self.cache!r}"
        where = f"{corpus.shards.store.url!r}, {len(corpus.shards):,} objects"
        return f"{type(self).__name__}({where}, {samples}{cache})"

    # --- what `StoreDataset` asks for

    def _identities(self, records: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        return self._corpus.identities(records)

    def _source(self) -> Source:
        return self._corpus

    def _record(self, index: int) -> int:
        return check_index(index, self._corpus.samples, f"samples of {self.url}")

    def _name(self, record: int) -> str:
        return self._corpus.name(record)

    def _cache_key(self, record: int) -> bytes:
        return self._corpus.cache_key(record)

    def _new_builder(self, transform: Any) -> SampleBuilder:
        if transform is not None:
            raise ArgumentError(
                f"transform={transform!r}: a TokenDataset has none; apply a function with fastload.map"
            )
        return _TokenBuilder(self.dtype, None if self._corpus.documents else self._corpus.length)


class _TokenBuilder(SampleBuilder):
    """Makes samples of tokens: each is one row of a matrix, where all have the same length."""

    def __init__(self, dtype: np.dtype[Any], length: int | None) -> None:
        super().__init__(None, None, Shape(_TOKENS))
        self._dtype, self._length = dtype, length

    def sample(self, value: Any, record: int) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(value, self._dtype).astype(np.int64))

    def new_batch(self, n: int, allocate: Allocate, **_: Any) -> RowBatch | None:
        if self._length is None:
            return None
        batch = RowBatch(n, allocate)
        batch.values = batch.columns = {_TOKENS: allocate((n, self._length), torch.int64)}
        batch.is_complete = True
        return batch

    def fill(self, batch: RowBatch, todo: Todo) -> RowFailures:
        tokens = batch.columns[_TOKENS].numpy()
        for row, value in zip(todo.rows, todo.values, strict=True):
            tokens[row] = np.frombuffer(value, self._dtype)
        return []

    def row(self, batch: RowBatch, row: int) -> Any:
        return batch.columns[_TOKENS][row]


class _Piece(NamedTuple):
    """The bytes [start, stop) of an object."""

    shard: int
    start: int
    stop: int


class _Corpus(Source):
    """Objects of tokens, laid end to end and cut into samples. A sample is read by ranges.

    Attributes:
        shards: the objects.
        tokens: in all of them.
        length: tokens of a sample; of documents, at most.
        samples: their number.
        documents: where each sample begins, and how long it is; None: by blocks.
    """

    def __init__(
        self,
        shards: ShardList,
        cache: Cache | None,
        dtype: np.dtype[Any],
        block: int,
        overlap: int,
        ending: str | None,
    ) -> None:
        self.shards, self.store, self._cache = shards, shards.store, cache
        self.length = block + overlap
        self._block, self._itemsize = block, dtype.itemsize
        form = f"{dtype.str} {self.length}" if ending is None else f"{dtype.str} documents"
        self._form = np.uint64(xxhash.xxh3_64_intdigest(form.encode()))
        # Of each object: the bytes before its tokens, and the number of its first token; one more at the end.
        skipped, counts = _measure(shards, dtype)
        self._skipped = np.array(skipped, dtype=np.int64)
        self._firsts = np.cumsum([0, *counts], dtype=np.int64)
        self.tokens = int(self._firsts[-1])
        self.samples = max(0, self.tokens - overlap) // block
        self.documents: Documents | None = None
        if ending is not None:
            self.documents = read_documents(shards, ending, dtype, self._firsts, block)
            self.samples = len(self.documents.firsts)

    def spans(self, samples: Any) -> tuple[Any, Any]:
        """Return (number of the first token, tokens) of samples, one or an array of them."""
        if self.documents is None:
            return samples * self._block, self.length
        return self.documents.firsts[samples], self.documents.lengths[samples]

    def pieces(self, sample: int) -> list[_Piece]:
        """Return where the tokens of a sample are, in order."""
        first, missing = map(int, self.spans(sample))
        shard = int(np.searchsorted(self._firsts, first, side="right")) - 1
        pieces = []
        while missing:
            taken = min(missing, int(self._firsts[shard + 1]) - first)
            if taken:
                start = int(self._skipped[shard]) + (first - int(self._firsts[shard])) * self._itemsize
                pieces.append(_Piece(shard, start, start + taken * self._itemsize))
            first, missing, shard = first + taken, missing - taken, shard + 1
        return pieces

    def identities(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return a number for each sample: of the objects that it is cut from, and where it begins."""
        first, lengths = self.spans(samples)
        begin = np.searchsorted(self._firsts, first, side="right") - 1
        end = np.searchsorted(self._firsts, first + lengths - 1, side="right") - 1
        start = first - self._firsts[begin]
        found = mix_all(self.shards.identities(begin) + start.view(np.uint64))
        if self.documents is not None:
            found = mix_all(found + lengths.view(np.uint64))
        found ^= np.where(end > begin, self.shards.identities(end), 0).astype(np.uint64)
        for at in np.flatnonzero(end > begin + 1).tolist():
            between = np.arange(begin[at] + 1, end[at])
            found[at] ^= np.bitwise_xor.reduce(
                mix_all(self.shards.identities(between) + between.view(np.uint64))
            )
        return mix_all(found ^ self._form)

    def name(self, index: int) -> str:
        """Return the name of a sample in error messages: where it begins."""
        first = self.pieces(index)[0]
        return record_name(self.shards[first.shard].key, first.start)

    def size(self, index: int) -> int:
        return int(self.spans(index)[1]) * self._itemsize

    def cache_key(self, index: int) -> bytes:
        assert self._cache is not None
        parts = [self.store.identity]
        for number, start, stop in self.pieces(index):
            shard = self.shards[number]
            parts += [shard.key, shard.version, str(start), str(stop)]
        return self._cache.key(TOKENS.code, *parts)

    def read(self, index: int, wait: Wait) -> Buffer:
        # Pieces one after the other: only the last sample of an object has two, as a rule.
        bodies = []
        for number, start, stop in self.pieces(index):
            shard = self.shards[number]
            bodies.append(self.store.read_range(shard.key, start, stop, shard.version, wait=wait))
        return bodies[0] if len(bodies) == 1 else b"".join(bodies)


def _measure(shards: ShardList, dtype: np.dtype[Any]) -> tuple[list[int], list[int]]:
    """Return (bytes before the tokens, number of tokens) of each object.

    The first bytes of all objects are read. Rejected: those of one object only. A `.npy` file of another type
    among raw ones would be served as tokens that nobody wrote.

    Raises:
        ArgumentError, DecodeError: as `TokenDataset`.
    """
    objects = [shards[number] for number in range(len(shards))]
    for key, *_ in objects:
        if key.lower().endswith(_COMPRESSED):
            raise ArgumentError(f"{key!r} is compressed, and tokens are read at random: store them plain")
    heads = shards.heads(range(len(objects)), HEAD)
    headers: list[TokenHeader | None] = []
    for shard, head in zip(objects, heads, strict=True):
        with naming(shard.key):
            headers.append(header_of(head))
    raw = next((shard.key for shard, header in zip(objects, headers, strict=True) if header is None), None)
    other = next((shard.key for shard, header in zip(objects, headers, strict=True) if header), None)
    if raw is not None and other is not None:
        raise ArgumentError(
            f"{other!r} begins with a header, and {raw!r} has none: make one dataset of each kind, and join "
            "them with torch.utils.data.ConcatDataset"
        )
    skipped = [0 if header is None else header.size for header in headers]
    counts = [_count(shard, header, dtype) for shard, header in zip(objects, headers, strict=True)]
    return skipped, counts


def _count(shard: Shard, header: TokenHeader | None, dtype: np.dtype[Any]) -> int:
    """Return the number of tokens in an object."""
    if header is not None and header.dtype != dtype:
        raise ArgumentError(
            f"{shard.key!r} has tokens of type {header.dtype}, as its header says: give "
            f"dtype={header.dtype.str!r} in place of {dtype.str!r}"
        )
    size = shard.size - (0 if header is None else header.size)
    if size % dtype.itemsize:
        raise ArgumentError(
            f"{shard.key!r} has {size:,} bytes of tokens, no whole number of type {dtype}: give another "
            "dtype=, or upload the object again if it was cut"
        )
    tokens = size // dtype.itemsize
    if header is not None and tokens != header.tokens:
        raise ArgumentError(
            f"{shard.key!r} has {tokens:,} tokens, and its header says {header.tokens:,}: upload the object "
            "again if it was cut"
        )
    return tokens


def _check_documents(ending: Any, overlap: int) -> None:
    if ending is None:
        return
    if not isinstance(ending, str) or not ending.startswith(".") or "/" in ending:
        raise ArgumentError(
            "documents must be the ending of the indexes beside the objects, such as '.idx' or '.csv.gz', "
            f"found {ending!r}"
        )
    if overlap:
        raise ArgumentError(
            "overlap goes with samples of equal length, and documents= has others: leave it out"
        )


def _checked_dtype(value: Any) -> np.dtype[Any]:
    with suppress(TypeError):
        dtype: np.dtype[Any] = np.dtype(value)
        if value is not None and is_token_type(dtype):
            return dtype
    raise ArgumentError(
        "dtype must be an integer type of numpy that fits into int64, such as 'uint16' or '>u2', found "
        f"{value!r}"
    )
