"""The values of Arrow columns, as samples have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastload.datasets.arrow import check_type, is_numeric, to_python, why_not_number
from fastload.errors import ArgumentError

GRIDS = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
TURNED = pa.fixed_shape_tensor(pa.int8(), (2, 2), permutation=[1, 0])


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pa.array([1, None, 3]), [1, None, 3]),
        (pa.array([1.5, 2.0], pa.float16()), [1.5, 2.0]),
        (pa.array([True, False]), [True, False]),
        (pa.array(["a", None]), ["a", None]),
        (pa.array(["a", "b"], pa.large_string()), ["a", "b"]),
        (pa.array([b"a", None]), [b"a", None]),
        (pa.array([b"ab", b"cd"], pa.binary(2)), [b"ab", b"cd"]),
        (pa.array(["x", "y", "x"]).dictionary_encode(), ["x", "y", "x"]),
        (pa.array([["a", "b"], None, []]), [["a", "b"], None, []]),
        (pa.array([{"bytes": b"x", "path": None}, None]), [{"bytes": b"x", "path": None}, None]),
        (pa.array([[{"a": 1}], []]), [[{"a": 1}], []]),
        (pa.array([None, None]), [None, None]),
        (pa.chunked_array([[1], [2, 3]]), [1, 2, 3]),
        (pa.array([0, 1, 2, 3])[1:3], [1, 2]),
    ],
    ids=str,
)
def test_column_becomes_python_values(column: Any, values: list[Any]) -> None:
    found = to_python(column)
    assert found == values
    assert list(map(type, found)) == list(map(type, values))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pa.array([[1, 2], [3], []], pa.list_(pa.int16())), [[1, 2], [3], []]),
        (pa.array([[9, 9], [1, 2], [3]], pa.large_list(pa.float32()))[1:], [[1, 2], [3]]),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.float32(), 2)), [[1, 2], None, [3, 4]]),
        (pa.array([[True], [False, True]]), [[True], [False, True]]),
        (pa.array([[[1, 2], [3, 4]], [[5, 6]]]), [[[1, 2], [3, 4]], [[5, 6]]]),
        (pa.array([[[1.0, 2.0]]], pa.list_(pa.list_(pa.float64(), 2), 1)), [[[1.0, 2.0]]]),
        (pa.ListArray.from_arrays([0, 2, 3], pa.array([5, 6, 7]).dictionary_encode()), [[5, 6], [7]]),
        (pa.FixedShapeTensorArray.from_numpy_ndarray(GRIDS), GRIDS.tolist()),
        (
            pa.ExtensionArray.from_storage(TURNED, pa.array([[1, 2, 3, 4]], pa.list_(pa.int8(), 4))),
            [[[1, 3], [2, 4]]],
        ),
    ],
    ids=str,
)
def test_lists_of_numbers_become_arrays_of_their_dtype(column: Any, values: list[Any]) -> None:
    kind = column.type
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    for found, wanted in zip(to_python(column), values, strict=True):
        if wanted is None:
            assert found is None
            continue
        assert found.dtype == kind.to_pandas_dtype()
        assert found.flags.writeable
        assert np.array_equal(found, wanted)


def test_lists_of_empty_lists_become_arrays() -> None:
    column = pa.array([[[]], [[], []], []], pa.list_(pa.list_(pa.int32(), 0)))
    assert [value.shape for value in to_python(column)] == [(1, 0), (2, 0), (0, 0)]


def test_ragged_lists_of_lists_become_lists_of_arrays() -> None:
    (found,) = to_python(pa.array([[[1, 2], [3]]]))
    assert [one.tolist() for one in found] == [[1, 2], [3]]


@pytest.mark.skipif(not hasattr(pa, "bool8"), reason="of pyarrow 18 and later")
def test_bool_of_8_bits_becomes_bool() -> None:
    flags = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, None], pa.int8()))
    assert to_python(flags) == [True, False, None]


@pytest.mark.parametrize("kind", [pa.int64(), pa.bool_(), pa.float16()], ids=str)
def test_null_in_a_list_of_numbers_spoils_its_row_only(kind: Any) -> None:
    bad, good = to_python(pa.array([[1.0, None], [1.0]]).cast(pa.list_(kind)))
    assert why_not_number(bad) == "has a null in its list"
    assert why_not_number(good) is None and good.tolist() == [1]
    assert why_not_number(None) == "is null"


def test_views_of_binary_values_are_not_copied() -> None:
    column = pa.array([b"skipped", b"abc", None, b""])[1:]
    first, null, empty = to_python(column, views=True)
    assert (bytes(first), null, bytes(empty)) == (b"abc", None, b"")
    assert first.readonly


@pytest.mark.parametrize(
    "kind",
    [
        pa.timestamp("us"),
        pa.duration("s"),
        pa.decimal128(5, 2),
        pa.map_(pa.string(), pa.int8()),
        pa.list_(pa.date32()),
        pa.struct([("inner", pa.time32("s"))]),
    ],
    ids=str,
)
def test_types_without_one_form_are_refused_by_column(kind: Any) -> None:
    with pytest.raises(ArgumentError, match=r"column 'when.*leave it out with fields=.*cast"):
        check_type("when", kind)


def test_numeric_types() -> None:
    numeric = [pa.int8(), pa.bool_(), pa.list_(pa.list_(pa.float16())), pa.dictionary(pa.int8(), pa.int64())]
    assert all(is_numeric(kind) for kind in numeric)
    others = [pa.string(), pa.binary(), pa.list_(pa.string()), pa.struct([("a", pa.int8())]), pa.null()]
    assert not any(is_numeric(kind) for kind in others)
