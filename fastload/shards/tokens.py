"""Large objects of tokens as a dataset: what a file of tokens is, and the samples that are cut from them.

    raw       nanoGPT's .bin, Megatron's .bin, OLMo's .npy (which are no .npy files)
    .npy      \\x93NUMPY, version, header with type and shape (numpy.lib.format)
    llm.c     256 int32, little-endian: magic, version, number of tokens, zeros (dev/data/data_common.py);
              also those of modded-nanogpt

The first bytes tell them apart, not the names.
"""

from __future__ import annotations

import math
import os
import random
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from fastload.cache import Cache, as_cache
from fastload.checks import check_index, shorten_errors, whole_number
from fastload.datasets.payloads import ObjectPayloads
from fastload.datasets.sample_fields import Shape
from fastload.datasets.samples import RowBatch, RowFailures, SampleBuilder, Todo
from fastload.datasets.store_dataset import SOME, StoreDataset
from fastload.datasets.views import Allocate
from fastload.errors import ArgumentError, DecodeError
from fastload.fetch.ranges import record_name
from fastload.fetch.reads import Source
from fastload.images.rng import mix_all
from fastload.shards.catalog import ShardList
from fastload.shards.formats import TOKENS
from fastload.shards.reader import Shard
from fastload.store.base import Buffer
from fastload.store.failures import Wait

HEAD = 1024  # bytes that are enough
_NPY = b"\x93NUMPY"
_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_LLM_C: dict[bytes, np.dtype[Any]] = {
    struct.pack("<ii", 20240520, 1): np.dtype("<u2"),  # GPT-2
    struct.pack("<ii", 20240801, 7): np.dtype("<u4"),  # Llama 3
}
_LLM_C_SIZE = 1024


class TokenHeader(NamedTuple):
    """What a header says.

    Attributes:
        size: its bytes; the tokens follow.
        dtype: of a token.
        tokens: their number.
    """

    size: int
    dtype: np.dtype[Any]
    tokens: int


def is_token_type(dtype: np.dtype[Any]) -> bool:
    """Return whether all its values fit into int64, as samples have them."""
    return dtype.kind in "iu" and np.can_cast(dtype, np.int64)


def header_of(head: Any) -> TokenHeader | None:
    """Return the header of a file that begins with these bytes; None: it has none, and is raw.

    Args:
        head: the first 1024 bytes, or all of a smaller file.

    Raises:
        DecodeError: it begins as a .npy file, and is not one of integers in order; or it ends within the
            header of llm.c.
    """
    begin = bytes(head[:HEAD])
    if begin.startswith(_NPY):
        return _npy_header(begin)
    dtype = _LLM_C.get(begin[:8])
    if dtype is None:
        return None
    if len(begin) < _LLM_C_SIZE:
        raise DecodeError("it begins as a file of llm.c, and ends within the header: upload the object again")
    return TokenHeader(_LLM_C_SIZE, dtype, int.from_bytes(begin[8:12], "little"))


def _npy_header(begin: bytes) -> TokenHeader:
    file = BytesIO(begin)
    try:
        version = np.lib.format.read_magic(file)
        if version not in _READERS:
            raise ValueError(f"its version is {version}, known are 1.0 and 2.0")
        shape, fortran, dtype = _READERS[version](file)
    except Exception as error:  # hostile bytes: what numpy's parser raises is not documented
        raise DecodeError(f"it begins as a .npy file, and its header cannot be read: {error}") from None
    if not is_token_type(dtype):
        raise DecodeError(
            f"it is a .npy file of type {dtype}, and tokens are integers that fit into int64: name other "
            "objects"
        )
    if fortran and len(shape) > 1:
        raise DecodeError(
            f"it is a .npy file of shape {shape} in Fortran order: save np.ascontiguousarray(tokens)"
        )
    return TokenHeader(file.tell(), dtype, math.prod(shape))


_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip")
_TOKENS = "tokens"


class TokenDataset(StoreDataset):
    """Samples of `block` tokens each, cut from large objects without padding, read at random by ranges.

    The objects hold token numbers of one integer type, one after the other: raw files, as nanoGPT, Megatron
    and OLMo write them; `.npy` files; and files with the header of llm.c. The first bytes of each tell which,
    so the constructor makes one request per object. All objects of a dataset are of one kind.

    In the order of their keys the objects are laid end to end, so a sample may begin in one and end in the
    next. Sample i has the tokens from `i * block` on. What is left at the end is smaller than a sample and
    not used: `tokens - (len(dataset) * block + overlap)` tokens.

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
        block: tokens from the beginning of one sample to that of the next, at least 1.
        overlap: tokens that a sample shares with the next one, at its end. It has `block + overlap` tokens.
            With 1, all tokens but the first are a target once.
        cache: a `Cache` in mode "auto" or "raw", or a directory for one; filled during the first epoch.
        storage_options, listing_max_age: see `TarDataset`.

    Attributes:
        tokens: the number of tokens in all objects.

    Raises:
        ArgumentError: an argument is invalid; or an object does not hold whole tokens of `dtype`, is cut, or
            is compressed; or some objects have a header and others none; or all together hold less than one
            sample.
        DecodeError: the header of an object cannot be read.
        NotFoundError, AccessDeniedError, StoreError: within 10 s, before any worker starts.
    """

    _settled: ClassVar[frozenset[str]] = StoreDataset._settled | {"dtype", "block", "overlap"}
    _computed: ClassVar[dict[str, str]] = {"tokens": "it is the number of tokens in the objects of url"}

    @shorten_errors
    def __init__(
        self,
        url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        dtype: npt.DTypeLike,
        block: int,
        *,
        overlap: int = 0,
        cache: Cache | str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        listing_max_age: float | str = 0,
    ) -> None:
        super().__init__(url, None)
        self.dtype = _checked_dtype(dtype)
        block = whole_number("block", block)
        overlap = whole_number("overlap", overlap, 0)
        self.block, self.overlap = block, overlap
        kept_in = as_cache(cache)
        self._payloads = ObjectPayloads(kept_in, None)
        if kept_in is not None and kept_in.codec.wants_images:
            raise ArgumentError(f"cache mode {kept_in.mode!r} is for images: tokens need mode 'raw'")
        shards = ShardList(url, TOKENS, kept_in, listing_max_age, storage_options)
        self._corpus = _Corpus(shards, self.dtype, self.block, self.overlap)
        self.transform = None
        self.cache = kept_in if shards.cacheable else None  # a warning has said why
        if not self._corpus.samples:
            raise ArgumentError(
                f"{shards.store.url!r} has {self.tokens:,} tokens of type {self.dtype}, and a sample has "
                f"{self._corpus.length:,} (block={block}, overlap={overlap}): give a smaller block="
            )

    @property
    def tokens(self) -> int:
        return self._corpus.tokens

    def __len__(self) -> int:
        return self._corpus.samples

    def __repr__(self) -> str:
        corpus = self._corpus
        samples = f"{corpus.samples:,} samples of {corpus.length:,} tokens"
        cache = "" if self.cache is None else f", cache={self.cache!r}"
        where = f"{corpus.shards.store.url!r}, {len(corpus.shards):,} objects"
        return f"{type(self).__name__}({where}, {samples}{cache})"

    # --- which samples these are

    def _identities(self, records: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        return self._corpus.identities(records)

    # --- what `StoreDataset` asks for

    def _source(self) -> _TokenSource:
        return _TokenSource(self._corpus, self._cache_key)

    def _record(self, index: int) -> int:
        return check_index(index, self._corpus.samples, f"samples of {self.url}")

    def _name(self, record: int) -> str:
        return self._corpus.name(record)

    def _cache_key(self, record: int) -> bytes:
        assert self.cache is not None
        return self.cache.key(TOKENS.code, *self._corpus.key(record))

    def _some_keys(self) -> list[bytes]:
        n = self._corpus.samples
        return [self._cache_key(record) for record in random.Random(0).sample(range(n), min(SOME, n))]

    def _new_builder(self, transform: Any) -> SampleBuilder:
        if transform is not None:
            raise ArgumentError(
                f"transform={transform!r}: a TokenDataset has none; apply a function with fastload.map"
            )
        return _TokenBuilder(self.dtype, self._corpus.length)


class _TokenBuilder(SampleBuilder):
    """Makes samples of tokens: each is one row of a matrix."""

    def __init__(self, dtype: np.dtype[Any], length: int) -> None:
        super().__init__(None, None, Shape(_TOKENS))
        self._dtype, self._length = dtype, length

    def sample(self, value: Any, record: int) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(value, self._dtype).astype(np.int64))

    def new_batch(self, n: int, allocate: Allocate, **_: Any) -> RowBatch:
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


class _Corpus:
    """Objects of tokens, laid end to end and cut into samples.

    Attributes:
        shards: the objects.
        tokens: in all of them.
        length: tokens of a sample.
        samples: their number.
    """

    def __init__(self, shards: ShardList, dtype: np.dtype[Any], block: int, overlap: int) -> None:
        self.shards = shards
        self.length = block + overlap
        self.bytes_per_sample = self.length * dtype.itemsize
        self._block, self._itemsize = block, dtype.itemsize
        self._form = np.uint64(xxhash.xxh3_64_intdigest(f"{dtype.str} {self.length}".encode()))
        # Of each object: the bytes before its tokens, and the number of its first token; one more at the end.
        skipped, counts = _measure(shards, dtype)
        self._skipped = np.array(skipped, dtype=np.int64)
        self._firsts = np.cumsum([0, *counts], dtype=np.int64)
        self.tokens = int(self._firsts[-1])
        self.samples = max(0, self.tokens - overlap) // block

    def pieces(self, sample: int) -> list[_Piece]:
        """Return where the tokens of a sample are, in order."""
        first, missing = sample * self._block, self.length
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
        first = samples * self._block
        begin = np.searchsorted(self._firsts, first, side="right") - 1
        end = np.searchsorted(self._firsts, first + self.length - 1, side="right") - 1
        start = first - self._firsts[begin]
        found = mix_all(self.shards.identities(begin) + start.view(np.uint64))
        found ^= np.where(end > begin, self.shards.identities(end), 0).astype(np.uint64)
        for at in np.flatnonzero(end > begin + 1).tolist():
            between = np.arange(begin[at] + 1, end[at])
            found[at] ^= np.bitwise_xor.reduce(
                mix_all(self.shards.identities(between) + between.view(np.uint64))
            )
        return mix_all(found ^ self._form)

    def name(self, sample: int) -> str:
        """Return the name of a sample in error messages: where it begins."""
        first = self.pieces(sample)[0]
        return record_name(self.shards[first.shard].key, first.start)

    def key(self, sample: int) -> list[str]:
        """Return what tells the bytes of a sample from all others."""
        parts = [self.shards.store.identity]
        for number, start, stop in self.pieces(sample):
            shard = self.shards[number]
            parts += [shard.key, shard.version, str(start), str(stop)]
        return parts


class _TokenSource(Source):
    """A sample is read by ranges.

    Args:
        corpus: the samples.
        key: sample -> cache key.
    """

    def __init__(self, corpus: _Corpus, key: Callable[[int], bytes]) -> None:
        self.store = corpus.shards.store
        self._corpus = corpus
        self._key = key

    def name(self, index: int) -> str:
        return self._corpus.name(index)

    def size(self, index: int) -> int:
        return self._corpus.bytes_per_sample

    def cache_key(self, index: int) -> bytes:
        return self._key(index)

    def read(self, index: int, wait: Wait) -> Buffer:
        # Pieces one after the other: only the last sample of an object has two, as a rule.
        bodies = [self._read_piece(piece, wait) for piece in self._corpus.pieces(index)]
        return bodies[0] if len(bodies) == 1 else b"".join(bodies)

    def _read_piece(self, piece: _Piece, wait: Wait) -> Buffer:
        key, _, version, _ = self._corpus.shards[piece.shard]
        return self.store.read_range(key, piece.start, piece.stop, version, wait=wait)


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
    headers = [_header(shard.key, head) for shard, head in zip(objects, heads, strict=True)]
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


def _header(key: str, head: bytes) -> TokenHeader | None:
    try:
        return header_of(head)
    except DecodeError as error:
        error.key = key
        raise


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


def _checked_dtype(value: Any) -> np.dtype[Any]:
    with suppress(TypeError):
        dtype: np.dtype[Any] = np.dtype(value)
        if value is not None and is_token_type(dtype):
            return dtype
    raise ArgumentError(
        "dtype must be an integer type of numpy that fits into int64, such as 'uint16' or '>u2', found "
        f"{value!r}"
    )
