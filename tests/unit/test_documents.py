"""Documents of a corpus: bounds from an index of any writer, and rows that are packed of them."""

from __future__ import annotations

import gzip
import io
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastload import BudgetSampler, DataLoader, PackTokens, TokenDataset
from fastload.errors import ArgumentError, DecodeError, FastloadError, NotFoundError
from fastload.formats.tokens import document_bounds

pytestmark = pytest.mark.usefixtures("no_leaks")

LENGTHS = [[3, 9, 1, 30, 4], [7, 7, 2], [5]]  # tokens of the documents of each object
MOST = 1 << 20


def megatron(lengths: list[int]) -> bytes:
    """One sequence a document, but for the first, which has two."""
    sequences = [1, lengths[0] - 1, *lengths[1:]]
    starts = np.cumsum([0, *sequences])[:-1] * 2
    edges = [0, *range(2, len(sequences) + 1)]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(sequences), len(edges))
    parts = np.array(sequences, "<i4"), starts.astype("<i8"), np.array(edges, "<i8")
    return head + b"".join(part.tobytes() for part in parts)


def olmo(lengths: list[int]) -> bytes:
    ends = np.cumsum(lengths).tolist()
    rows = zip([0, *ends[:-1]], ends, strict=True)
    return gzip.compress("".join(f'{start},{end},"a,b",source,7\n' for start, end in rows).encode())


def gz(text: bytes) -> bytes:
    """Return the same bytes in every process: names of tests have them."""
    return gzip.compress(text, mtime=0)


def npy(lengths: list[int]) -> bytes:
    file = io.BytesIO()
    np.save(file, np.cumsum(lengths))
    return file.getvalue()


WRITERS: dict[str, Callable[[list[int]], bytes]] = {".idx": megatron, ".csv.gz": olmo, ".ends": npy}


def write(folder: Path, ending: str, lengths: list[list[int]] = LENGTHS, tail: int = 3) -> list[list[int]]:
    """Write a corpus, whose objects end in `tail` tokens of no document. Returns the documents."""
    folder.mkdir()
    documents, first = [], 1
    for number, some in enumerate(lengths):
        tokens = np.arange(first, first + sum(some) + tail, dtype=np.uint16)
        (folder / f"part.{number}.bin").write_bytes(tokens.tobytes())
        (folder / f"part.{number}{ending}").write_bytes(WRITERS[ending](some))
        documents += [part.tolist() for part in np.split(tokens[: sum(some)], np.cumsum(some)[:-1])]
        first += len(tokens)
    return documents


@pytest.mark.parametrize("ending", WRITERS)
def test_samples_are_the_documents_of_the_index(tmp_path: Path, ending: str) -> None:
    documents = write(tmp_path / "corpus", ending)
    dataset = TokenDataset(tmp_path / "corpus", "uint16", block=64, documents=ending)
    assert [dataset[index].tolist() for index in range(len(dataset))] == documents
    assert dataset.sizes.tolist() == [len(document) for document in documents]
    assert dataset[3].dtype == torch.int64 and dataset.key(0) == "part.0.bin @ 0"


def test_a_document_that_is_longer_than_a_block_is_cut(tmp_path: Path) -> None:
    documents = write(tmp_path / "corpus", ".idx")
    dataset = TokenDataset(tmp_path / "corpus", "uint16", block=8, documents=".idx")
    pieces = [document[at : at + 8] for document in documents for at in range(0, len(document), 8)]
    assert [dataset[index].tolist() for index in range(len(dataset))] == pieces
    assert dataset.sizes.max() == 8


def test_empty_documents_are_no_samples(tmp_path: Path) -> None:
    documents = write(tmp_path / "corpus", ".ends", [[0, 4, 0, 0, 5, 0]])
    dataset = TokenDataset(tmp_path / "corpus", "uint16", block=8, documents=".ends")
    assert [dataset[index].tolist() for index in range(len(dataset))] == [part for part in documents if part]


def test_two_documents_at_one_place_are_told_apart(tmp_path: Path) -> None:
    """In digests: the same first token, and another length."""
    digests = []
    for number, lengths in enumerate(([[4, 4]], [[4, 3]])):
        write(tmp_path / f"{number}", ".ends", lengths, tail=8 - sum(lengths[0]))
        dataset = TokenDataset(tmp_path / f"{number}", "uint16", block=8, documents=".ends")
        loader = DataLoader(dataset, batch_size=None)
        list(loader)
        digests.append(loader.digest())
    assert digests[0] != digests[1]


# --- packed rows


def test_rows_have_each_document_once_with_its_place(tmp_path: Path) -> None:
    documents = write(tmp_path / "corpus", ".csv.gz")
    dataset = TokenDataset(tmp_path / "corpus", "uint16", block=32, documents=".csv.gz", cache=tmp_path / "c")
    sampler = BudgetSampler(dataset.sizes, budget=32, pack=True, seed=3)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PackTokens(32, pad=0), num_workers=2)
    for _ in range(2):
        found = []
        for row in loader:
            assert {name: (tuple(part.shape), part.dtype) for name, part in row.items()} == {
                "tokens": ((32,), torch.int64),
                "labels": ((32,), torch.int64),
                "positions": ((32,), torch.int64),
                "seq_lens": ((len(row["seq_lens"]),), torch.int64),
                "cu_seqlens": ((len(row["seq_lens"]) + 1,), torch.int32),
            }
            assert row["cu_seqlens"].tolist() == [0, *row["seq_lens"].cumsum(0).tolist()]
            assert row["cu_seqlens"][-1] == 32
            for part in ("tokens", "labels", "positions"):
                row[part] = row[part].split(row["seq_lens"].tolist())
            for tokens, labels, places in zip(row["tokens"], row["labels"], row["positions"], strict=True):
                assert places.tolist() == list(range(len(tokens)))
                padding = not tokens[0]
                assert labels.tolist() == [-100] * len(tokens) if padding else [*tokens[1:].tolist(), -100]
                found += [] if padding else [tokens.tolist()]
        assert sorted(found) == sorted(documents)
    dataset.close()


def test_a_full_row_has_no_padding() -> None:
    row = PackTokens(5, pad=9)([torch.tensor([1, 2, 3]), np.array([4, 5], np.uint16)])
    assert row["tokens"].tolist() == [1, 2, 3, 4, 5] and row["seq_lens"].tolist() == [3, 2]
    assert row["labels"].tolist() == [2, 3, -100, 5, -100]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[1, 2], [3, 4]], "a batch has 4 tokens in 2 documents, and length=3"),
        ([[1], [0.5]], "row 1 of a batch is a list of shape (1,) and type float64"),
        ([[[1, 2]]], "row 0 of a batch is a list of shape (1, 2)"),
        ([torch.zeros(0, dtype=torch.int64)], "row 0 of a batch is a Tensor of shape (0,)"),
        (["text"], "row 0 of a batch is a str"),
    ],
)
def test_what_is_no_row_is_refused(documents: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        PackTokens(3)(documents)
    assert message in str(error.value)


# --- bad indexes


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (npy([3, 9]), "document 1, tokens 3 to 12, ends beyond the 11 tokens there"),
        (gz(b"5,4\n"), "document 0, tokens 5 to 4, ends before it begins"),
        (gz(b"0,4\n3,6\n"), "document 1, tokens 3 to 6, begins before the one before it ends"),
        (megatron([3, 4])[:9] + struct.pack("<QB", 1, 4) + megatron([3, 4])[18:], "do not lie end to end"),
        (gz(b"start,end\n"), "line 1 does not begin with two numbers"),
        (gz(b"0,4\n")[:-6], "cannot be inflated"),
        (gz(b"0,%d\n" % (1 << 70)), "more than 64 bits"),
        (megatron([3, 4])[:-1], "of its header take"),
        (megatron([3, 4])[:20], "ends within the header"),
        (npy([3, 4])[:-1], "its header says otherwise"),
        (b"0,4\n", "begins as none of the known indexes"),
    ],
)
def test_an_index_that_does_not_fit_is_named(tmp_path: Path, index: bytes, message: str) -> None:
    write(tmp_path / "corpus", ".idx", [[3, 5]])
    (tmp_path / "corpus" / "part.0.idx").write_bytes(index)
    with pytest.raises((ArgumentError, DecodeError)) as error:
        TokenDataset(tmp_path / "corpus", "uint16", block=8, documents=".idx")
    assert message in str(error.value) and "part.0.idx" in str(error.value)


def test_an_index_of_another_type_is_named(tmp_path: Path) -> None:
    write(tmp_path / "corpus", ".idx", [[3, 5]])
    with pytest.raises(ArgumentError, match="give dtype='<u2'"):
        TokenDataset(tmp_path / "corpus", "int16", block=8, documents=".idx")


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "corpus", ".idx", [[0, 0]])
    for options, message in (
        ({"documents": "idx"}, "must be the ending of the indexes"),
        ({"documents": True}, "must be the ending of the indexes"),
        ({"documents": ".idx", "overlap": 1}, "leave it out"),
    ):
        with pytest.raises(ArgumentError, match=message):
            TokenDataset(tmp_path / "corpus", "uint16", block=8, **options)
    with pytest.raises(NotFoundError, match=r"there is no index 'part\.0\.ends'"):
        TokenDataset(tmp_path / "corpus", "uint16", block=8, documents=".ends")


def test_an_index_that_inflates_beyond_the_limit_is_refused() -> None:
    with pytest.raises(DecodeError, match="max_inflated"):
        document_bounds(gzip.compress(b"0,1\n" * 1000), 100)


def test_no_damage_to_an_index_is_another_error() -> None:
    rng = random.Random(1)
    for make in WRITERS.values():
        body = make([3, 9, 1, 30, 4])
        for _ in range(500):
            damaged = bytearray(body)
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            damaged = damaged[: rng.randint(0, len(damaged))] if rng.random() < 0.3 else damaged
            try:
                document_bounds(bytes(damaged), MOST)
            except FastloadError as error:
                assert isinstance(error, DecodeError)
