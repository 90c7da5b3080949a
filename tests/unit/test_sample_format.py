"""Samples as bytes: everything comes back as it was, damage is found, nothing is executed."""

from __future__ import annotations

import contextlib
from collections import namedtuple
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fastload.errors import ArgumentError, DecodeError
from fastload.formats.sample import Drawn, dump, load

any_text = st.text(st.characters(codec=None, categories=None), max_size=20)  # lone surrogates too
scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.binary(max_size=200)),
    *(any_text, any_text.map(np.str_), st.binary(max_size=20).map(np.bytes_)),
    st.integers(0, 20_000).map(lambda bits: -(1 << bits)),
)
dtypes = st.one_of(
    st.sampled_from([np.uint8, np.int64, np.float32, np.complex64, np.bool_]).map(np.dtype),
    *(hnp.datetime64_dtypes(), hnp.timedelta64_dtypes(), hnp.unicode_string_dtypes(max_len=4)),
    *(
        hnp.byte_string_dtypes(max_len=4),
        hnp.floating_dtypes(),
        hnp.integer_dtypes(),
        hnp.complex_number_dtypes(),
    ),
)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
arrays |= arrays.map(np.asfortranarray) | arrays.map(lambda array: array.T)
arrays |= arrays.filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0])  # numpy scalars
samples = st.recursive(
    st.one_of(scalars, arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=5), inner, max_size=3),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return type(b) is torch.Tensor and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@given(samples)
def test_round_trip(sample: Any) -> None:
    assert same(load(dump(sample)), sample)
    assert same(load(bytearray(dump(sample))), sample)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.complex64])
def test_tensors(dtype: torch.dtype) -> None:
    ones = torch.ones(3, 4, dtype=dtype)
    for tensor in (ones, ones.t(), torch.empty(0, 2, dtype=dtype)):
        assert same(load(dump({"x": tensor, "n": 3})), {"x": tensor, "n": 3})
    assert same(load(dump(torch.tensor(7))), torch.tensor(7))
    assert same(load(dump(np.float32(2.5))), np.float32(2.5))


@given(st.data())
def test_any_tensor(data: st.DataObject) -> None:
    kinds = [torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
    dtype = data.draw(st.sampled_from(kinds))
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tensor = (torch.rand(shape, generator=generator, dtype=torch.float64) * 9).to(dtype)
    if dtype.is_complex:
        tensor = tensor + 1j * tensor.real.flip(tuple(range(tensor.ndim)))
        tensor = data.draw(
            st.sampled_from(
                [tensor, tensor.conj(), tensor.conj().imag, tensor.conj().mT.imag]
                if tensor.ndim > 1
                else [tensor, tensor.conj(), tensor.conj().imag]
            )
        )
    again = load(bytearray(dump({"x": tensor})))["x"]
    assert same(again, tensor) and again.shape == tensor.shape


@pytest.mark.parametrize(
    "value",
    [
        np.array(["2020-01-01", "NaT"], "datetime64[D]"),
        np.datetime64("2020-01-01T00:00:00.5"),
        np.array([1, 2], "timedelta64[s]"),
        np.timedelta64(5, "ms"),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        "a\udce9",
        {"\ud800": "\ud800\udc00"},
        np.str_("a\0"),
        np.bytes_(b"a\0"),
        10**5000,
        -(10**5000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_once_failed_or_changed(value: Any) -> None:
    assert same(load(dump(value)), value)
    assert same(load(bytearray(dump([value]))), [value])


def test_drawn_array_dumped_gives_the_record_of_the_array() -> None:
    image, other = np.arange(60, dtype=np.int16).reshape(4, 5, 3), np.ones(1000)

    def draw(out: np.ndarray[Any, Any]) -> None:
        assert out.shape == image.shape and out.dtype == image.dtype
        out[:] = image

    drawn = Drawn(image.shape, image.dtype, draw)
    for around in (
        lambda value: value,
        lambda value: (value, 6),
        lambda value: {"a": other, "b": [value, value], "c": b"after", "d": other},
    ):
        assert dump(around(drawn)) == dump(around(image))
        assert same(load(dump(around(drawn))), around(image))


def test_failure_to_draw_reaches_the_caller_of_dump() -> None:
    def draw(out: np.ndarray[Any, Any]) -> None:
        raise DecodeError("damaged")

    with pytest.raises(DecodeError, match="damaged"):
        dump({"image": Drawn((2, 2, 3), np.dtype(np.uint8), draw)})


def test_record_dumped_is_read_only_and_apart_from_the_sample() -> None:
    image = np.zeros((20, 20, 3), np.uint8)
    record = dump(image)
    image[:] = 9
    assert record.readonly and not load(record).any()


@pytest.mark.parametrize("digits", [b"99", b"0x", b"0x1_0", b" 0x10", b"0b11"])
def test_large_int_is_hexadecimal(digits: bytes) -> None:
    with pytest.raises(DecodeError, match="hexadecimal"):
        load(b"I" + len(digits).to_bytes(4, "little") + digits)


def test_arrays_are_views_of_the_record() -> None:
    record = bytearray(dump(("label", np.zeros((20, 20, 3), np.uint8))))
    image = load(record)[1]
    image[3, 4, 2] = 9
    assert load(record)[1][3, 4, 2] == 9


def endless() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_refusal_names_type_and_place() -> None:
    point = namedtuple("point", "x y")
    for sample, where in [
        ({"a": [1, object()]}, r"sample\['a'\]\[1\] is a builtins.object"),
        (point(1, 2), "point"),
        (np.array([object()]), "dtype object"),
        (torch.ones(2, requires_grad=True), "requires_grad=True"),
        (torch.ones(2).to_sparse(), "sparse"),
        ({1, 2}, "builtins.set"),
        ({"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, r"sample\['a'\]"),
        ([np.zeros(2, "i4,f4")], r"sample\[0\] is an array of dtype .*f4"),
        (endless(), r"nested deeper than 64"),
    ]:
        with pytest.raises(ArgumentError, match=where):
            dump(sample)


@given(st.data())
@settings(max_examples=300)
def test_damage_is_an_error_or_another_value_but_never_more(data: st.DataObject) -> None:
    """The cache's checksum finds damage. Behind it, damage causes no crash and no huge allocation."""
    image = np.arange(60, dtype=np.int32).reshape(3, 20)
    record = bytearray(dump({"image": image, "label": 3, "name": "cat"}))
    cut = data.draw(st.integers(0, len(record)))
    position = data.draw(st.integers(0, len(record) - 1))
    record[position] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(record), bytes(record[:cut])):
        with contextlib.suppress(DecodeError):
            load(damaged)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([*(1 << bit for bit in range(8)), 127, 255], id="each bit"),
        pytest.param(range(1, 256), id="all", marks=pytest.mark.stress),
    ],
)
def test_each_damaged_byte_of_a_header_is_an_error_or_another_value(changes: Iterable[int]) -> None:
    record = dump({"image": np.arange(6, dtype=np.int32).reshape(3, 2), "label": torch.zeros(2)})
    for position in range(len(record)):
        for change in changes:
            damaged = bytearray(record)
            damaged[position] ^= change
            with contextlib.suppress(DecodeError):
                load(bytes(damaged))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(DecodeError):
        load(b"l\1\0\0\0" * 10_000)
