"""Samples as bytes: everything comes back as it was, damage is found, nothing is executed."""

from __future__ import annotations

import contextlib
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fastload.datasets.layout import dump, load
from fastload.errors import ArgumentError, DecodeError

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=200)
)
arrays = hnp.arrays(
    st.sampled_from([np.uint8, np.int64, np.float32, np.complex64, np.bool_, "<U3"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
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
@settings(max_examples=300)
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


def test_arrays_lie_in_the_record() -> None:
    record = bytearray(dump(("label", np.zeros((20, 20, 3), np.uint8))))
    image = load(record)[1]
    image[3, 4, 2] = 9
    assert load(record)[1][3, 4, 2] == 9


def test_refuses_in_words() -> None:
    point = namedtuple("point", "x y")
    for sample, where in [
        ({"a": [1, object()]}, r"sample\['a'\]\[1\] is a builtins.object"),
        (point(1, 2), "point"),
        (np.array([object()]), "dtype object"),
        (torch.ones(2, requires_grad=True), "requires_grad=True"),
        (torch.ones(2).to_sparse(), "sparse"),
        ({1, 2}, "builtins.set"),
    ]:
        with pytest.raises(ArgumentError, match=where):
            dump(sample)


@given(st.data())
@settings(max_examples=300)
def test_damage_is_an_error_or_another_value_but_never_more(data: st.DataObject) -> None:
    """The cache's checksum finds damage; this is the second line: no crash, no huge allocation."""
    image = np.arange(60, dtype=np.int32).reshape(3, 20)
    record = bytearray(dump({"image": image, "label": 3, "name": "cat"}))
    cut = data.draw(st.integers(0, len(record)))
    position = data.draw(st.integers(0, len(record) - 1))
    record[position] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(record), bytes(record[:cut])):
        with contextlib.suppress(DecodeError):
            load(damaged)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(DecodeError):
        load(b"l\1\0\0\0" * 10_000)
