"""One case -> what is pinned of it, as text.

    keys      the cache keys of two samples
    identity  of a store: a part of the keys of its objects
    order     what two epochs hand out, batch by batch: the labels of the samples, which number them (of
              images alone, what `samples_at` says)
    streams   the labels of the streams of two ranks in two epochs, of shards that are not indexed
    digest    `loader.digest()` after the first epoch
    items     a hash of each of the first three samples by `dataset[index]`, after torch.manual_seed
    rows      a hash of each row of the first batch
    batches   a hash of all batches of two epochs
    start, middle, end    `state_dict()` before the first batch, after it, and after the first epoch
    whole     the state after the first batch, as it is

All but keys, identities and streams is public behaviour. A state is JSON of sorted keys. An entry of it
stands in the pins as it is where it is short or says which samples these are, else as a hash. The middle and
the end have only the entries that differ from the state before. No path and no time is in any of them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastload import Cache, DataLoader
from tests.pins.cases import Case
from tests.pins.objects import write_objects

_EPOCHS = 2
_SHORT = 48  # characters of an entry of a state


# --- the only three functions here that know inner names


def keys_of(dataset: Any, index: int) -> list[bytes]:
    """Return the keys under which the cache has a sample; of a wrapper, a sample of what it holds first."""
    while not hasattr(dataset, "_cache_keys"):
        parts = getattr(dataset, "datasets", None)
        dataset = parts[0] if parts else dataset.dataset
    return list(dataset._cache_keys(index))


def streams_of(dataset: Any) -> list[str]:
    """Return the labels of the stream of each of two ranks in each epoch, as they would agree on them."""
    texts = []
    for epoch, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        [state] = dataset._streams().plan_streams(1, seed=3, epoch=epoch, shuffle=True, rank=rank, ranks=2)
        stream, labels = dataset._streams().open_stream(json.loads(json.dumps(state))), []
        while numbers := stream.take(3):
            labels += [sample[1] for sample in map(dataset.__getitem__, numbers)]
        stream.close()
        texts.append(" ".join(map(str, labels)))
    return texts


def identity_of(store: Any) -> str:
    """Return what stands for a store in the cache keys of its objects."""
    return str(store.identity)


# --- the measurement


def state_texts(loader: Any) -> dict[str, str]:
    """Return each entry of the loader's state as JSON with sorted keys."""
    return {name: json.dumps(one, sort_keys=True) for name, one in loader.state_dict().items()}


_ALONE = {"streams": streams_of, "identity": identity_of}  # measured without a loader


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Return the parts that are pinned of a case."""
    write_objects()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    cache = None if case.mode is None else Cache(folder, case.mode, short_side=20, quality=80)
    dataset = case.make(cache)
    try:
        if case.parts[0] in _ALONE:
            return {case.parts[0]: _ALONE[case.parts[0]](dataset)}
        loader = DataLoader(dataset, **_arguments(case, dataset))
        found = _run(case, loader, cache)
        if "items" in case.parts:
            torch.manual_seed(9)
            found["items"] = " ".join(_hash(dataset[index]) for index in range(3))
        if cache is not None:
            found["keys"] = " ".join(key.hex() for index in (0, 2) for key in keys_of(dataset, index))
    finally:
        _close(dataset)
        if cache is not None:
            cache.close()
    return {part: found[part] for part in case.parts if part in found}


def order_from(case: Case, state: dict[str, str]) -> str:
    """Return the rest of an epoch that a new loader hands out after a state, given as JSON of its entries."""
    write_objects()
    dataset = case.make(None)
    try:
        loader = DataLoader(dataset, **_arguments(case, dataset))
        loader.load_state_dict({name: json.loads(text) for name, text in state.items()})
        return " | ".join(" ".join(map(str, labels_of(batch))) for batch in loader)
    finally:
        _close(dataset)


def _arguments(case: Case, dataset: Any) -> dict[str, Any]:
    made = {name: one(dataset) if callable(one) else one for name, one in case.loader.items()}
    return {"batch_size": 5} | made


def _run(case: Case, loader: Any, cache: Cache | None) -> dict[str, Any]:
    states, order, rows, whole = [state_texts(loader)], [], "", hashlib.blake2b(digest_size=8)
    digest = ""
    for epoch in range(_EPOCHS):
        steps = []
        for step, batch in enumerate(loader):
            labels = labels_of(batch)
            if isinstance(batch, torch.Tensor) and batch.ndim == 4:  # images alone
                labels = [one.index for one in loader.samples_at(step, epoch)]
            steps.append(" ".join(map(str, labels)))
            _add(whole, batch)
            if epoch == step == 0:
                if "rows" in case.parts:
                    rows = " ".join(_hash(row_of(batch, row)) for row in range(len(labels)))
                if case.touch is not None:
                    case.touch(loader)
                states.append(state_texts(loader))
        order.append(" | ".join(steps))
        if epoch == 0:
            states.append(state_texts(loader))
            digest = loader.digest().hex()
        if cache is not None:
            assert cache.flush(30)
    found = {"whole": states[1], "digest": digest, "rows": rows, "batches": whole.hexdigest(), "order": order}
    return found | dict(zip(("start", "middle", "end"), _differences(states), strict=True))


def _differences(states: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """The entries of each state that are unlike the state before."""
    before: dict[str, str] = {}
    for state in states:
        names = sorted({*before, *state})
        yield {
            name: _brief(name, state.get(name, "-")) for name in names if before.get(name) != state.get(name)
        }
        before = state


def _brief(name: str, text: str) -> str:
    whole = len(text) <= _SHORT or name == "samples"
    return text if whole else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# --- batches


def labels_of(batch: Any) -> list[int]:
    """Return the numbers of the samples of a batch: their labels, or their first tokens."""
    if isinstance(batch, torch.Tensor):
        return [int(one.reshape(-1)[0]) for one in batch]
    label = batch["label"] if isinstance(batch, dict) else batch[1]
    return [int(one) for one in torch.as_tensor(label).reshape(-1)]


def row_of(batch: Any, row: int) -> Any:
    """Return a row of a batch, in the batch's structure."""
    if isinstance(batch, dict):
        return {name: row_of(one, row) for name, one in batch.items()}
    if isinstance(batch, list | tuple):
        return [row_of(one, row) for one in batch]
    return batch[row]


def _hash(value: Any) -> str:
    whole = hashlib.blake2b(digest_size=4)
    _add(whole, value)
    return whole.hexdigest()


def _add(whole: Any, value: Any) -> None:
    """Add the structure, types, shapes and bytes of a batch to a hash."""
    if isinstance(value, dict):
        for name, one in value.items():
            whole.update(f"{name}:".encode())
            _add(whole, one)
    elif isinstance(value, list | tuple):
        for one in value:
            _add(whole, one)
    elif isinstance(value, torch.Tensor):
        whole.update(f"{value.dtype} {tuple(value.shape)}:".encode())
        whole.update(value.contiguous().numpy().tobytes())
    else:
        whole.update(f"{value!r}:".encode())


def _close(dataset: Any) -> None:
    parts = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    for one in parts.values() if isinstance(parts, dict) else parts:
        if one is not None:
            _close(one)
    if hasattr(dataset, "close"):
        dataset.close()
