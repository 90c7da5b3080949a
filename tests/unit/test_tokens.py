"""Tokens by ranges: samples are slices of all objects laid end to end, and bad objects are found early."""

from __future__ import annotations

import os
import pickle
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

import fastload
from fastload import DataLoader, TokenDataset
from fastload.errors import ArgumentError, DecodeError, NotFoundError, ObjectChangedError, StoreError
from fastload.formats.tokens import header_of

pytestmark = pytest.mark.usefixtures("no_leaks")

COUNTS = [50, 0, 7, 3, 61, 29]  # tokens of each object: some smaller than a sample, one empty
TOKENS = np.random.default_rng(1).integers(0, 50_000, sum(COUNTS)).astype(np.uint16)
LLM_C = np.zeros(256, np.int32)
LLM_C[:2] = 20240520, 1


def raw(tokens: npt.NDArray[Any]) -> bytes:
    return tokens.tobytes()


def npy(tokens: npt.NDArray[Any]) -> bytes:
    import io

    file = io.BytesIO()
    np.save(file, tokens)
    return file.getvalue()


def llm_c(tokens: npt.NDArray[Any]) -> bytes:
    header = LLM_C.copy()
    header[2] = len(tokens)
    return header.tobytes() + tokens.tobytes()


def write(
    folder: Path,
    tokens: npt.NDArray[Any] = TOKENS,
    counts: list[int] = COUNTS,
    form: Callable[[npt.NDArray[Any]], bytes] = raw,
    end: str = ".bin",
) -> Path:
    folder.mkdir(exist_ok=True)
    first = 0
    for number, count in enumerate(counts):
        (folder / f"{number:03d}{end}").write_bytes(form(tokens[first : first + count]))
        first += count
    return folder


def expected(tokens: npt.NDArray[Any], block: int, overlap: int = 0) -> list[list[int]]:
    """All whole samples, by slices of one array."""
    starts = range(0, len(tokens) - block - overlap + 1, block)
    return [tokens[start : start + block + overlap].tolist() for start in starts]


# --- samples


@pytest.mark.parametrize(("block", "overlap"), [(1, 0), (8, 0), (8, 1), (64, 0), (5, 20), (150, 0), (149, 1)])
def test_samples_are_slices_of_all_objects_end_to_end(tmp_path: Path, block: int, overlap: int) -> None:
    dataset = TokenDataset(write(tmp_path / "c"), "uint16", block, overlap=overlap)
    wanted = expected(TOKENS, block, overlap)
    assert [dataset[index].tolist() for index in range(len(dataset))] == wanted
    assert dataset[0].dtype == torch.int64
    assert dataset.tokens == len(TOKENS)
    assert 0 <= dataset.tokens - (len(dataset) * block + overlap) < block
    dataset.close()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "<u2", ">u2", "int32", ">i4", "uint32", "int64"])
def test_every_integer_type_is_read_as_int64(tmp_path: Path, dtype: str) -> None:
    info = np.iinfo(dtype)
    tokens = np.array([info.min, info.max, 1, 2, 3, 4], dtype)
    dataset = TokenDataset(write(tmp_path / "c", tokens, [4, 2]), dtype, 3)
    assert [dataset[0].tolist(), dataset[1].tolist()] == [[info.min, info.max, 1], [2, 3, 4]]
    assert next(iter(DataLoader(dataset, batch_size=2))).tolist() == [[info.min, info.max, 1], [2, 3, 4]]
    dataset.close()


@pytest.mark.parametrize(("form", "end"), [(npy, ".npy"), (npy, ".bin"), (llm_c, ".bin"), (raw, ".npy")])
def test_headers_are_known_by_content_and_skipped(
    tmp_path: Path, form: Callable[[npt.NDArray[Any]], bytes], end: str
) -> None:
    dataset = TokenDataset(write(tmp_path / "c", form=form, end=end), "uint16", 16)
    assert [sample.tolist() for sample in map(dataset.__getitem__, range(len(dataset)))] == expected(
        TOKENS, 16
    )
    dataset.close()


def test_npy_of_two_dimensions_is_read_row_by_row(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy(TOKENS.reshape(15, 10)))
    dataset = TokenDataset(tmp_path, np.uint16, 150)
    assert dataset[0].tolist() == TOKENS.tolist()
    dataset.close()


def test_urls_name_one_object_a_prefix_a_glob_and_a_list(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    (folder / "README.md").write_text("no tokens")
    (folder / "000.idx").write_bytes(b"Megatron's")
    (folder / "other.u16").write_bytes(raw(TOKENS[:20]))
    cases: list[tuple[Any, npt.NDArray[Any]]] = [
        (folder, TOKENS),
        (f"{folder}/000.bin", TOKENS[:50]),
        (folder / "other.u16", TOKENS[:20]),
        (f"{folder}/00[0-2].bin", TOKENS[:57]),
        (f"{folder}/{{004..005}}.bin", TOKENS[60:]),
        ([folder / "000.bin", folder / "002.bin"], TOKENS[:57]),
    ]
    for url, tokens in cases:
        dataset = TokenDataset(url, "uint16", 10)
        assert [dataset[i].tolist() for i in range(len(dataset))] == expected(tokens, 10), url
        dataset.close()


def test_an_object_store_by_fsspec_is_read_too() -> None:
    fsspec.filesystem("memory").pipe("/tokens-test/a.bin", raw(TOKENS))
    dataset = TokenDataset("memory://tokens-test", "uint16", 100)
    assert dataset[0].tolist() == TOKENS[:100].tolist()
    dataset.close()


def test_millions_of_samples_take_no_memory_and_the_last_is_right(tmp_path: Path) -> None:
    with (tmp_path / "big.bin").open("wb") as file:  # sparse
        file.truncate(9 << 30)
        file.seek(-6, os.SEEK_END)
        file.write(np.array([1, 2, 3], np.uint16).tobytes())
    TokenDataset(tmp_path, "uint16", 1024)
    tracemalloc.start()
    dataset = TokenDataset(tmp_path, "uint16", 1024)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset) == (9 << 30) // 2048 and peak < 200_000
    assert len(pickle.dumps(dataset)) < 20_000
    assert dataset[-1].tolist() == [0] * 1021 + [1, 2, 3]
    dataset.close()


def test_repr_key_and_payload_name_the_sample(tmp_path: Path) -> None:
    dataset = TokenDataset(write(tmp_path / "c"), "uint16", 10, overlap=1)
    assert repr(dataset) == f"TokenDataset('{tmp_path}/c', 6 objects, 14 samples of 11 tokens)"
    assert dataset.key(1) == "000.bin @ 20" and dataset.key(5) == "002.bin @ 0"
    assert bytes(dataset._payload(0)) == raw(TOKENS[:11])
    for name in ("dtype", "block", "overlap", "tokens"):
        with pytest.raises(ArgumentError, match=name):
            setattr(dataset, name, 1)
    dataset.close()


# --- the cache


def test_another_block_or_version_has_other_cache_keys(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")

    def keys(block: int, overlap: int = 0) -> set[bytes]:
        dataset = TokenDataset(folder, "uint16", block, overlap=overlap, cache=tmp_path / "cache")
        found = {dataset._cache_keys(index)[0] for index in range(len(dataset))}
        assert len(found) == len(dataset)
        dataset.close()
        return found

    before = keys(10)
    assert not before & keys(11) and not before & keys(10, 1)
    os.utime(folder / "004.bin", (1, 1))
    changed = before - keys(10)  # tokens 60 to 121
    assert len(changed) == 7


def test_cache_of_images_is_refused(tmp_path: Path) -> None:
    cache = fastload.Cache(tmp_path / "cache", mode="decoded")
    with pytest.raises(ArgumentError, match="'decoded' is for images: tokens need mode 'raw'"):
        TokenDataset(write(tmp_path / "c"), "uint16", 10, cache=cache)


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float16"}, "found 'float16'"),
        ({"dtype": None}, "found None"),
        ({"dtype": "uint64"}, "fits into int64"),
        ({"dtype": "bool"}, "integer type"),
        ({"dtype": "object"}, "integer type"),
        ({"dtype": "nonsense"}, "found 'nonsense'"),
        ({"dtype": torch.int16}, r"found torch.int16"),
        ({"block": 0}, "block must be a whole number >= 1, found 0"),
        ({"block": "64"}, "block must be a whole number >= 1, found '64'"),
        ({"block": True}, "found True"),
        ({"overlap": -1}, "overlap must be a whole number >= 0, found -1"),
        ({"block": 151}, r"150 tokens of type uint16, and a sample has 151 .* give a smaller block="),
        ({"overlap": 141}, r"a sample has 151 \(block=10, overlap=141\)"),
        ({"dtype": "uint32"}, r"'002.bin' has 14 bytes of tokens, no whole number of type uint32"),
    ],
)
def test_bad_arguments_are_refused_in_words(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TokenDataset(write(tmp_path / "c"), **{"dtype": "uint16", "block": 10, **arguments})


def test_nothing_to_read_is_an_error_that_names_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no files"):
        TokenDataset(tmp_path, "uint16", 10)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(NotFoundError, match=r"the first is 'a\.txt'.*named \.bin or \.npy"):
        TokenDataset(tmp_path, "uint16", 10)
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ArgumentError, match="has 0 tokens"):
        TokenDataset(tmp_path, "uint16", 10)


@pytest.mark.parametrize("name", ["a.bin.gz", "a.bin.zst"])
def test_compressed_objects_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(raw(TOKENS))
    with pytest.raises(ArgumentError, match="is compressed, and tokens are read at random"):
        TokenDataset(tmp_path / name, "uint16", 10)


def test_a_header_that_contradicts_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(npy(TOKENS.astype(np.int32)))
    with pytest.raises(ArgumentError, match="tokens of type int32, as its header says: give dtype='<i4'"):
        TokenDataset(tmp_path, "uint16", 10)
    path.write_bytes(npy(TOKENS)[:-20])
    with pytest.raises(
        ArgumentError, match=r"has 140 tokens, and its header says 150: upload the object again"
    ):
        TokenDataset(tmp_path, "uint16", 10)
    path.write_bytes(npy(np.asfortranarray(TOKENS.reshape(15, 10))))
    with pytest.raises(DecodeError, match=r"'a\.npy'.*Fortran order"):
        TokenDataset(tmp_path, "uint16", 10)
    path.write_bytes(npy(TOKENS.astype(np.float32)))
    with pytest.raises(DecodeError, match=r"'a\.npy'.* of type float32, and tokens are integers"):
        TokenDataset(tmp_path, "uint16", 10)
    path.write_bytes(LLM_C.tobytes()[:8])
    with pytest.raises(DecodeError, match=r"'a\.npy'.* ends within the header"):
        TokenDataset(tmp_path, "uint16", 10)
    for head in (b"\x93NUMPY\x01\x00\xff\xff{", b"\x93NUMPY\x09\x00", b"\x93NUMPY"):
        path.write_bytes(head)
        with pytest.raises(DecodeError, match=r"'a\.npy'.*its header cannot be read"):
            TokenDataset(tmp_path, "uint16", 10)


def test_a_damaged_npy_header_is_a_decode_error_or_contradicts() -> None:
    rng, good = random.Random(0), npy(TOKENS)[:200]
    outcomes = set()
    for _ in range(1000):
        damaged = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(6, 128)] = rng.choice(b"(){}[]'\",:0123456789<>\\\n \0\xff|uifO")
        try:
            outcomes.add(type(header_of(damaged)))
        except DecodeError:
            outcomes.add(DecodeError)
    assert len(outcomes) == 2


def test_objects_with_and_without_a_header_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy(TOKENS))
    (tmp_path / "b.bin").write_bytes(raw(TOKENS))
    with pytest.raises(ArgumentError, match=r"'a\.npy' begins with a header, and 'b\.bin' has none"):
        TokenDataset(tmp_path, "uint16", 10)
    (tmp_path / "c.npy").write_bytes(npy(TOKENS))
    (tmp_path / "a.npy").unlink()
    with pytest.raises(ArgumentError, match=r"'c\.npy' begins with a header, and 'b\.bin' has none"):
        TokenDataset(tmp_path, "uint16", 10)


def test_raw_tokens_are_not_taken_for_a_header() -> None:
    assert header_of(TOKENS.tobytes()) is None and header_of(b"") is None


def test_a_changed_or_cut_object_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    dataset = TokenDataset(folder, "uint16", 10)
    (folder / "004.bin").write_bytes(raw(TOKENS[:61]))
    os.utime(folder / "004.bin", (1, 1))
    (folder / "000.bin").write_bytes(raw(TOKENS[:20]))
    (folder / "005.bin").unlink()
    for index, key in ((7, "004.bin"), (0, "000.bin"), (13, "005.bin")):
        with pytest.raises(StoreError, match=key) as caught:
            dataset[index]
        assert isinstance(caught.value, ObjectChangedError) or index == 13
    loader = DataLoader(dataset, batch_size=len(dataset), on_error="repeat")
    (batch,) = loader
    assert batch.tolist() == len(dataset) * [TOKENS[50:60].tolist()]  # of 002 and 003, which are as listed
    assert loader.stats()["counters"]["bad.samples"] == len(dataset) - 1
    dataset.close()
