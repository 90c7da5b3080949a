"""What all test classes share: samples that can be compared, broken promises, seeds, passes of a loader.

A sample may be any Python object: tensors of another dtype are unequal, NaN equals NaN, and objects without
an `==` of their own are equal if their attributes are. `==` itself was rejected: it has no single answer for
tensors, and compares most objects by identity, so that no copy from a worker would be equal.
"""

from __future__ import annotations

import pickle
import random
import reprlib
import sys
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import PurePath
from typing import Any, NamedTuple, NoReturn
from unittest import SkipTest

import numpy as np
import torch

from fastload.loader.dataloader import DataLoader
from fastload.workers.sample_threads import GeneratorStates

SEED, OTHER_SEED = 1, 2

# (where in the sample, what is there) of each part, in the order of the sample.
Contents = tuple[tuple[str, Hashable], ...]

_PLAIN = (type(None), bool, int, str, bytes, complex, Enum, PurePath, torch.dtype, torch.device, torch.Size)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)


class _Values(NamedTuple):
    """A tensor, array or image."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __str__(self) -> str:
        return f"{self.dtype} {self.kind} of shape {self.shape}"

    def first_unlike(self, other: _Values) -> int:
        """Return the first element that is not the same in `other`, which has the same dtype and shape."""
        mine, theirs = (np.frombuffer(values.data, np.uint8) for values in (self, other))
        size = len(self.data) // max(1, int(np.prod(self.shape)))
        return int(np.flatnonzero(mine != theirs)[0]) // size

    def element(self, number: int) -> Any:
        """Return one element; its bytes where numpy lacks the dtype."""
        size = len(self.data) // max(1, int(np.prod(self.shape)))
        part = self.data[number * size : (number + 1) * size]
        try:
            return np.frombuffer(part, self.dtype)[0].item()
        except TypeError:
            return part


class _Plain(NamedTuple):
    """A value that Python compares."""

    kind: str
    value: Hashable

    def __str__(self) -> str:
        return reprlib.repr(self.value) if self.kind != "object" else str(self.value)


class _Holder(NamedTuple):
    """What holds other parts."""

    kind: str
    size: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.size}"


class Difference(NamedTuple):
    """The first difference of two samples, in words.

    Attributes:
        where: the part, as in "['image'][0, 3]"; "" for the sample itself.
        one, other: what is there.
    """

    where: str
    one: str
    other: str


def contents(sample: Any) -> Contents:
    """Return all parts of a sample; equal for equal samples, and hashable."""
    parts: list[tuple[str, Hashable]] = []
    _add(sample, "", parts, ())
    return tuple(parts)


def difference(one: Contents, other: Contents) -> Difference | None:
    """Return the first difference; None between equal samples."""
    if one == other:
        return None
    mine, theirs = dict(one), dict(other)
    for where in {**mine, **theirs}:
        left, right = mine.get(where), theirs.get(where)
        if left == right:
            continue
        if isinstance(left, _Values) and isinstance(right, _Values) and left[:3] == right[:3]:
            number = left.first_unlike(right)
            place = [int(part) for part in np.unravel_index(number, left.shape)] if left.shape else ""
            return Difference(f"{where}{place}", str(left.element(number)), str(right.element(number)))
        return Difference(
            where, *("missing" if part is None else _told(part, left, right) for part in (left, right))
        )
    return Difference("", "in another order", "the same parts")


def _told(part: Any, left: Any, right: Any) -> str:
    """Return a part in words, with its type where the types are the difference."""
    by_type = isinstance(left, _Plain) and isinstance(right, _Plain) and left.kind != right.kind
    return f"{part.kind} {part}" if by_type else str(part)


def _add(value: Any, where: str, gathered: list[tuple[str, Hashable]], outer: tuple[int, ...]) -> None:
    kind = type(value).__name__
    if id(value) in outer:
        gathered.append((where, _Plain("object", "itself")))
    elif isinstance(value, _PLAIN):
        gathered.append((where, _Plain(kind, value)))
    elif isinstance(value, float):
        gathered.append((where, _Plain(kind, value if value == value else "nan")))  # NaN is not equal to NaN
    elif isinstance(value, _NAMED):
        gathered.append((where, _Plain(kind, f"{value.__module__}.{value.__qualname__}")))
    elif (values := _values(value, kind)) is not None:
        gathered.append((where, values))
    else:
        parts = _parts(value)
        if parts is None:
            gathered.append((where, _Plain("object", _by_pickle(value))))
            return
        gathered.append((where, _Holder(kind, len(parts))))
        for name, part in parts:
            _add(part, f"{where}{name}", gathered, (*outer, id(value)))


def _values(value: Any, kind: str) -> _Values | None:
    """Return a tensor, array or image; None for all else."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes()
        return _Values(
            "tensor" if kind == "Tensor" else kind,
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            data,
        )
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        shown = "array" if kind == "ndarray" else "numpy scalar"
        return _Values(shown, str(value.dtype), value.shape, value.tobytes())
    image = sys.modules.get("PIL.Image")
    if image is not None and isinstance(value, image.Image):
        pixels = np.asarray(value)
        return _Values(f"{value.mode} image", str(pixels.dtype), pixels.shape, pixels.tobytes())
    return None


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Return (where, part) of what holds other things; None for what does not."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in sorted(value.items(), key=lambda item: repr(item[0]))]
    if isinstance(value, list | tuple):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    if isinstance(value, np.ndarray):
        return [(f"[{number}]", part) for number, part in enumerate(value.tolist())]
    if isinstance(value, set | frozenset):
        return [(f" element {number}", part) for number, part in enumerate(sorted(value, key=repr))]
    names = list(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [(f".{name}", getattr(value, name)) for name in names if hasattr(value, name)] or None


def _by_pickle(value: Any) -> Hashable:
    try:
        return pickle.dumps(value)
    except Exception:  # it has no state that could be compared
        return type(value).__qualname__


# --- promises


def broken(promise: str, found: str, remedy: str) -> NoReturn:
    """Fail the test.

    Args:
        promise: what should hold.
        found: the first thing that shows that it does not.
        remedy: the usual cause, and the next thing to do.
    """
    __tracebackhide__ = True
    raise AssertionError(f"broken promise: {promise}.\nFound: {found}.\nWhat to do: {remedy}.")


def not_promised(why: str) -> NoReturn:
    """Skip the test: pytest takes this exception of the standard library for its own."""
    raise SkipTest(why)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed a block: the process's generators (torch's of the CPU, Python's, numpy's) begin with this seed."""
    with GeneratorStates():
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield


def made(call: Callable[[], Any], seed: int) -> tuple[Contents, bool]:
    """Return (what a call gives with this seed, whether it draws from the process's generators)."""
    with seeded(seed):
        before = _generators()
        return contents(call()), _generators() != before


def _generators() -> Hashable:
    numpys = pickle.dumps(np.random.get_state())
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpys


def as_it_is(samples: Any) -> Any:
    """Change nothing, as a `collate_fn`; a worker that is spawned finds it by its name."""
    return samples


def check_same(
    promise: str, what: str, one: Contents, other: Contents, names: tuple[str, str], remedy: str
) -> None:
    """Check that two contents are equal.

    Args:
        what: the name of the sample.
        names: where `one` and `other` come from.
    """
    __tracebackhide__ = True
    unlike = difference(one, other)
    if unlike is not None:
        at = f" at {unlike.where}" if unlike.where else ""
        broken(promise, f"{what}{at} is {unlike.one} {names[0]}, and {unlike.other} {names[1]}", remedy)


def check_same_lists(
    promise: str,
    one: Sequence[Contents],
    other: Sequence[Contents],
    names: tuple[str, str],
    remedy: str,
    what: Callable[[int], str] = "sample {}".format,
) -> None:
    """Check that two lists of samples are equal."""
    __tracebackhide__ = True
    for number, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        check_same(promise, what(number), mine, theirs, names, remedy)
    if len(one) != len(other):
        broken(promise, f"{len(one)} samples {names[0]}, and {len(other)} {names[1]}", remedy)


def check_once(
    promise: str,
    expected: Sequence[Contents],
    found: Sequence[Contents],
    names: tuple[str, str],
    remedy: str,
) -> None:
    """Check that two lists have the same samples, in any order."""
    __tracebackhide__ = True
    wanted, there = Counter(expected), Counter(found)
    for key in {**wanted, **there}:
        if wanted[key] != there[key]:
            broken(
                promise,
                f"{_shown(key)} came {_times(wanted[key])} {names[0]}, and {_times(there[key])} {names[1]}",
                remedy,
            )


def _times(count: int) -> str:
    return ("not at all", "once", "twice")[count] if count < 3 else f"{count} times"


def _shown(sample: Contents) -> str:
    """Return a sample in a few words: its first small parts."""
    parts = [f"{where}={part}" if where else str(part) for where, part in sample]
    return "the sample " + ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")


def loader_of(dataset: Any, **options: Any) -> DataLoader[Any]:
    """Return a loader that gives samples as they are, with `seed=`."""
    return DataLoader(dataset, collate_fn=as_it_is, **{"seed": SEED, **options})


def in_processes(start_method: str, workers: int) -> tuple[dict[str, Any], str]:
    """Return (options of a loader, the same in words)."""
    if not workers:
        return {}, "with num_workers=0"
    if sys.platform != "linux":
        not_promised("worker processes need Linux")
    return (
        {"num_workers": workers, "multiprocessing_context": start_method},
        f"with num_workers={workers} ({start_method})",
    )
