"""Checks of arguments and calls that several rooms have; and sizes, times and money, from text and to text.

So the same mistake has the same words everywhere, and its traceback shows the line of the user.
"""

from __future__ import annotations

import concurrent.futures
import difflib
import functools
import inspect
import math
import operator
import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fastload.errors import PACKAGE, ArgumentError, FastloadError

_THREADS = str(Path(concurrent.futures.__file__).parent)

P = ParamSpec("P")
R = TypeVar("R")


def whole_number(argument: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Return the value as an int, numpy's whole numbers too.

    Raises:
        ArgumentError: it is no whole number in this range.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        wanted = f">= {least}" if most is None else f"from {least} to {most:,}"
        raise ArgumentError(f"{argument} must be a whole number {wanted}, found {value!r}")
    return number


def check_one_of(argument: str, value: Any, choices: Collection[str]) -> None:
    """Raise `ArgumentError` unless the value is one of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{argument} must be one of {tuple(choices)}, found {value!r}")


def check_function(argument: str, value: Any) -> None:
    """Raise `ArgumentError` unless the value is a function or None, and no class of such functions."""
    refuse_class(argument, value)
    if isinstance(value, list | tuple):
        raise ArgumentError(
            f"{argument} must be one function or None, found a {type(value).__name__} of {len(value)}: join "
            "them, as in torchvision.transforms.v2.Compose([...]); a Normalize is the batch_transform of the "
            "DataLoader"
        )
    if value is not None and not callable(value):
        such = ", as RandomResizedCrop(224) is" if argument == "transform" else ""
        raise ArgumentError(f"{argument} must be callable or None{such}; found {value!r}")


def as_index(index: Any) -> int:
    """Return the number that an index of a sample is.

    Raises:
        TypeError: it is no whole number.
    """
    try:
        return operator.index(index)  # two tensors of one number are not one key
    except TypeError:
        raise TypeError(
            f"an index must be a whole number, found {index!r}. For several samples take "
            "torch.utils.data.Subset(dataset, indices); dataset.find(keys) gives the indices of keys"
        ) from None


def check_index(index: Any, count: int, of: str) -> int:
    """Return the position, from 0 on, that an index of a sequence of `count` elements means.

    Args:
        of: the elements, in words.

    Raises:
        IndexError: there is no such element.
        TypeError: it is no whole number.
    """
    index = as_index(index)
    if not -count <= index < count:
        raise IndexError(f"index {index} is out of range for {count:,} {of}")
    return int(index % count)


def refuse_class(argument: str, value: Any) -> None:
    """Refuse a class where an instance is meant: a class with callable instances, or one of fastload's.

    Other classes, such as `float`, pass: their constructor is a function like any other.

    Raises:
        ArgumentError: it is such a class; the message names the call to write.
    """
    if not isinstance(value, type):
        return
    if any("__call__" in vars(base) or base.__module__.startswith("fastload.") for base in value.__mro__):
        raise ArgumentError(f"{argument} is a class: write {_call_of(value)}")


def _call_of(kind: type) -> str:
    """The call that makes an instance, as far as the signature tells."""
    empty = inspect.Parameter.empty
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    needed = [one.name for one in parameters if one.default is empty and one.kind in kinds]
    return f"{kind.__name__}({', '.join('224' if name == 'size' else name for name in needed)})"


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE | re.ASCII)

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)\s*", re.IGNORECASE | re.ASCII)


def parse_duration(value: float | str, name: str) -> float:
    """Return seconds, from a number or text such as "30m", "12h" or "7d"; text without a unit is seconds."""
    seconds = math.nan
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        seconds = float(match[1]) * _SECONDS[match[2].lower() or "s"] if match else math.nan
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise ArgumentError(f'{name}={value!r}; give seconds, or text such as "30m", "12h" or "7d"')
    return seconds


def parse_size(value: int | str, name: str = "size_limit") -> int:
    """Return bytes, from an int or from text such as "500GB" or "200MiB"."""
    size = None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        number = float(match[1]) * _UNITS[match[2].lower()] if match else math.inf
        size = int(number) if math.isfinite(number) else None
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    if size is None or size < 1:
        raise ArgumentError(
            f'{name}={value!r}; give bytes as a positive int, or text such as "500GB" or "200MiB"'
        )
    return size


def format_size(count: float) -> str:
    """Return `count` bytes for people: "110 KB", "1.2 GB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def format_money(amount: float, currency: str) -> str:
    """Return `amount` for people: "USD 12.30"; two digits of less than a cent, such as "USD 0.0042"."""
    return f"{currency} {amount:,.2f}" if amount == 0 or amount >= 0.01 else f"{currency} {amount:.2g}"


# --- the border of the API


def shorten_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Return a public function whose errors show the line that called it, and not fastload's frames below it.

    A call that does not fit the signature is a TypeError as before, and says what to write.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except FastloadError as error:
            if raised_by_us(error.__cause__):
                error.__cause__, error.__suppress_context__ = None, True
            if _is_ours(error):
                error.__traceback__ = None
            raise
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise  # from the body of the function
            raise TypeError(_explain_call(function, args, kwargs) or str(error)) from None

    return call


def raised_by_us(error: BaseException | None) -> bool:
    """Return whether an error and its causes come from frames of fastload alone, which tell nobody more."""
    while error is not None:
        if error.__traceback__ is None or not _is_ours(error):
            return False
        error = error.__cause__
    return True


def _is_ours(error: BaseException) -> bool:
    """Return whether all frames between here and an error are fastload's, or of threads that it started."""
    frames = traceback.walk_tb(error.__traceback__)
    return all(frame.f_code.co_filename.startswith((PACKAGE, _THREADS)) for frame, _ in frames)


def _explain_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return why a call does not fit the signature, and what to write; None: for another reason."""
    parameters = list(inspect.signature(function).parameters.values())
    name = function.__qualname__.removesuffix(".__init__")
    if name != function.__qualname__:  # a constructor
        parameters, args = parameters[1:], args[1:]
    names = [one.name for one in parameters]
    unknown = next((word for word in kwargs if word not in names), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, names, n=1)
        says = f"did you mean {near[0]!r}" if near else f"it has {', '.join(names)}"
        if "storage_options" in names:  # without the value, which may be a secret
            says += f". An option of the store is written as storage_options={{{unknown!r}: ...}}"
        return f"{name}() has no argument {unknown!r}: {says}"
    by_position = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    if len(args) > len(by_position):
        named = ", ".join(f"{one}=" for one in names[len(by_position) :])
        return (
            f"{name}() takes {', '.join(by_position)} by position, and {len(args)} values were given: name "
            f"the others ({named})"
        )
    missing = [
        one.name
        for one in parameters[len(args) :]
        if one.default is one.empty and one.name not in kwargs and one.kind is not one.VAR_KEYWORD
    ]
    if missing:
        return f"{name}() needs {' and '.join(missing)}: write {name}({', '.join(by_position)})"
    return None
