"""The structure of samples that `fields=` writes down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from fastload.datasets.sample_fields import Shape
from fastload.errors import ArgumentError

VALUES = {"image": torch.zeros(3), "label": 7, "path": "a.jpg"}


@pytest.mark.parametrize(
    ("fields", "sample"),
    [
        ("label", 7),
        (("label", "path"), (7, "a.jpg")),
        (["label", "path"], (7, "a.jpg")),
        (("path", ("label",)), ("a.jpg", (7,))),
        (("path", {"label": "anything"}), ("a.jpg", {"label": 7})),
    ],
)
def test_sample_has_the_structure_of_fields(fields: Any, sample: Any) -> None:
    assert Shape(fields).sample(VALUES) == sample


@pytest.mark.parametrize(
    "fields", ["label", "path", ("label", "path"), (("label", "path"), {"name": "label"}), {"a": ("path",)}]
)
def test_batch_has_the_structure_of_default_collate(fields: Any) -> None:
    shape = Shape(fields)
    samples = [shape.sample({"label": n, "name": n, "path": str(n)}) for n in range(3)]
    texts = ["0", "1", "2"]
    made = shape.batch({"label": torch.arange(3), "name": torch.arange(3), "path": texts})
    assert repr(made) == repr(default_collate(samples))


def test_leaves_are_named_by_key_or_by_text_once_each() -> None:
    shape = Shape(("image", "image", {"x": "label", "image": "path"}))
    assert shape.leaves == {"image": "image", "image (2)": "image", "x": "label", "image (3)": "path"}
    values = {"image": 1, "image (2)": 2, "x": 3, "image (3)": 4}
    assert shape.sample(values) == (1, 2, {"x": 3, "image": 4})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("image", 3), r"fields\[1\] must be a str.*found 3"),
        ((), r"fields must be a str.*not empty"),
        ({"x": {}}, r"fields\['x'\]"),
        ({1: "image"}, "has the key 1: the keys of a sample are text"),
    ],
)
def test_fields_that_are_no_structure_of_leaves_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Shape(fields)
