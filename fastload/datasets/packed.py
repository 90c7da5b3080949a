"""Documents end to end in rows of a fixed number of tokens, and where each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastload.checks import whole_number
from fastload.errors import ArgumentError


class PackTokens:
    """Puts the documents of a batch end to end into one row of exactly `length` tokens: a `collate_fn`.

    Example::

        from fastload import BudgetSampler, DataLoader, PackTokens, TokenDataset

        dataset = TokenDataset("s3://bucket/corpus", "uint16", block=2048, documents=".idx")
        sampler = BudgetSampler(dataset.sizes, budget=2048, pack=True)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PackTokens(2048), num_workers=8)
        for batch in loader:
            batch["tokens"].shape  # (2048,)

    A batch is a dict of tensors on the CPU:

    * "tokens": int64 (length,). Behind the documents stands `pad`.
    * "labels": int64 (length,), the next token of the same document; -100, which torch's `cross_entropy`
      ignores, at the last token of a document and in the padding.
    * "positions": int64 (length,), from 0 in each document, and in the padding.
    * "seq_lens": int64 (n,), tokens of each document, and of the padding as the last one if there is any.
    * "cu_seqlens": int32 (n + 1,), the same as edges, from 0 to length, as FlashAttention takes them.

    Bounds come from the documents, and no token means one.

    Args:
        length: tokens of a row; of the sampler its budget.
        pad: token that fills the row.

    Raises:
        ArgumentError: a sample is no sequence of whole numbers, or all of a batch have more than `length`.
    """

    def __init__(self, length: int, *, pad: int = 0) -> None:
        self.length, self.pad = whole_number("length", length), whole_number("pad", pad, 0)

    def __call__(self, documents: Sequence[Any]) -> dict[str, torch.Tensor]:
        arrays = [_as_tokens(row, document) for row, document in enumerate(documents)]
        lengths = [len(array) for array in arrays]
        used = sum(lengths)
        if used > self.length:
            raise ArgumentError(
                f"a batch has {used:,} tokens in {len(arrays)} documents, and length={self.length:,}: let a "
                f"fastload.BudgetSampler with budget={self.length} and pack=True choose the batches, with "
                "on_error='raise'"
            )
        tokens = np.full(self.length, self.pad, np.int64)
        np.concatenate([*arrays, tokens[used:]], out=tokens)
        if used < self.length:
            lengths.append(self.length - used)
        edges = np.cumsum([0, *lengths])
        labels = np.append(tokens[1:], 0)
        labels[edges[1:] - 1] = labels[used:] = -100
        positions = np.arange(self.length) - np.repeat(edges[:-1], lengths)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "positions": torch.from_numpy(positions),
            "seq_lens": torch.tensor(lengths, dtype=torch.int64, device="cpu"),
            "cu_seqlens": torch.from_numpy(edges.astype(np.int32)),
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.length}, pad={self.pad})"


def _as_tokens(row: int, document: Any) -> Any:
    try:
        tokens = np.asarray(document)
    except ValueError:
        tokens = np.empty((0, 0))
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        raise ArgumentError(
            f"row {row} of a batch is a {type(document).__name__} of shape {tokens.shape} and type "
            f"{tokens.dtype}, and a document is a sequence of whole numbers, at least one: let the dataset "
            "return its tokens alone"
        )
    return tokens
