"""Each error carries the address of its remedies: once, in tracebacks, and over the border of processes."""

from __future__ import annotations

import copy
import pickle
import traceback
from typing import Any

import pytest
from torch.utils.data import Dataset

from fastload import DataLoader, errors
from fastload.errors import DOCS, DecodeError, FastloadError

CLASSES = [getattr(errors, name) for name in errors.__all__]


class Bad(Dataset[int]):
    """Its first sample is bad."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        if index == 0:
            raise DecodeError("bad bytes", key="cat/0.jpg")
        return index


@pytest.mark.parametrize("cls", CLASSES)
def test_traceback_ends_with_the_address(cls: type[FastloadError]) -> None:
    error = cls("message", key="a.jpg")
    assert error.help == f"{DOCS}reference/errors.html#{cls.__name__.lower()}"
    assert "http" not in str(error)
    assert "".join(traceback.format_exception(error)).endswith(f"\nsee {error.help}\n")


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))]
)
def test_copies_keep_one_address_and_other_notes(copied: Any) -> None:
    error = DecodeError("message")
    error.__notes__.append("of the user")
    assert copied(error).__notes__ == [f"see {error.help}", "of the user"]


def test_subclass_of_a_public_class_has_its_address() -> None:
    class Special(DecodeError):
        pass

    assert Special("message").help == DecodeError("message").help


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_of_a_worker_prints_the_address_once(num_workers: int) -> None:
    with pytest.raises(DecodeError) as caught:
        list(DataLoader(Bad(), num_workers=num_workers))
    assert "".join(traceback.format_exception(caught.value)).count(DOCS) == 1
