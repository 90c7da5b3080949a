"""The state of a user's own dataset, in the process that reads it: a worker, or the trainer."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any

__all__ = ["dataset_state", "is_stateful", "load_dataset", "resume_fetcher"]


def is_stateful(thing: object) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def dataset_state(dataset: Any, fetcher: Any) -> dict[str, Any] | None:
    """The state of a dataset and of the iterator that `fetcher` has over it; None without one."""
    iterator = getattr(fetcher, "dataset_iter", None)
    own = is_stateful(dataset) and iterator is not dataset
    if not own and not is_stateful(iterator):
        return None
    return {
        "dataset": dataset.state_dict() if own else None,
        "iterator": iterator.state_dict() if iterator is not None and is_stateful(iterator) else None,
        "ended": getattr(fetcher, "ended", False),
    }


def load_dataset(dataset: Any, saved: Mapping[str, Any] | None) -> None:
    """First step of resuming: the dataset's own state, before an iterator over it is made."""
    if saved is not None and saved["state"] is not None and saved["state"]["dataset"] is not None:
        dataset.load_state_dict(saved["state"]["dataset"])


def resume_fetcher(fetcher: Any, saved: Mapping[str, Any] | None, batch_size: int) -> None:
    """Second step: move the iterator of torch's fetcher over an iterable dataset to the saved position.

    An iterator without a state is moved by drawing and dropping samples.
    """
    if saved is None:
        return
    state = saved["state"]
    if state is not None and state["iterator"] is not None:
        fetcher.dataset_iter.load_state_dict(state["iterator"])
    if saved["fresh"]:
        if state is not None:
            fetcher.dataset_iter = iter(fetcher.dataset)
        return
    if state is None:
        deque(itertools.islice(fetcher.dataset_iter, saved["batches"] * batch_size), maxlen=0)
    fetcher.ended = saved["ended"] or (state is not None and state["ended"])
