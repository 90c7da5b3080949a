"""An exception on its way from a worker to the trainer's process."""

from __future__ import annotations

import pickle
import traceback
from multiprocessing.reduction import ForkingPickler
from typing import NamedTuple, NoReturn

from fastload.errors import FastloadError

__all__ = ["Failure"]


class Failure(NamedTuple):
    """What a worker's exception was, so that the trainer can raise the same.

    The exception travels as bytes: one that cannot be rebuilt over there must not take its message with it.
    """

    pickled: bytes  # (the exception or None, its type or None)
    name: str
    text: str  # the worker's traceback
    sample: str  # the sample or samples to blame, and why; or ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Take down an exception that was just caught."""
        text = "".join(traceback.format_exception(error))
        sample = error.__dict__.pop("fastload_sample", "")
        pickled = _round_trip((error, type(error))) or _round_trip((None, type(error))) or _NOTHING
        return cls(pickled, type(error).__name__, text, sample)

    def reraise(self, where: str) -> NoReturn:
        """Raise what the dataset raised: its own type, the worker's traceback in its text or as its cause."""
        text = f"Caught {self.name} {where}.\nOriginal {self.text}"
        if self.sample:
            text += f"({self.sample})\n"
        try:
            error, kind = pickle.loads(self.pickled)
        except Exception:
            error = kind = None
        if isinstance(error, FastloadError) or (error is not None and not _is_one_text(error)):
            raise error from RuntimeError(text)
        try:
            # A subclass of KeyError shows its argument's repr, which would hide the line breaks.
            rebuilt = kind(_Verbatim(text) if issubclass(kind, KeyError) else text)
        except Exception:
            raise RuntimeError(text) from error
        rebuilt.__dict__.update(error.__dict__ if error is not None else {})
        raise rebuilt


_NOTHING = pickle.dumps((None, None))


def _round_trip(thing: tuple[Exception | None, type[Exception]]) -> bytes | None:
    """Its pickle, where it comes back as what it was: an exception may pickle and yet fail to be rebuilt."""
    try:
        pickled = bytes(ForkingPickler.dumps(thing))
        return pickled if type(pickle.loads(pickled)[0]) is type(thing[0]) else None
    except Exception:
        return None


class _Verbatim(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _is_one_text(error: BaseException) -> bool:
    return len(error.args) <= 1 and all(isinstance(arg, str) for arg in error.args)
