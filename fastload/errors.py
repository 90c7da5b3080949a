"""Every error that fastload raises on purpose, its warnings, and the text and frames that they show.

    FastloadError
    ├── ArgumentError      (ValueError)          an invalid argument, found before any work starts
    ├── StoreError         (OSError)             the object store failed, after all retries that could help
    │   ├── NotFoundError      (FileNotFoundError)   no such object, bucket or prefix
    │   ├── AccessDeniedError  (PermissionError)     credentials missing, refused or expired
    │   ├── LimitError                               a request would pass max_gets= or max_egress=
    │   ├── ObjectChangedError                       the object is not the version that was listed
    │   ├── ShortReadError                           fewer bytes than the store promised
    │   └── StoreTimeoutError  (TimeoutError)        no progress within the deadline
    ├── CacheError         (OSError)             a cache directory that cannot be used at all
    ├── DecodeError        (ValueError)          bytes that are not a valid image or record
    ├── PlatformError      (ImportError)         this system is not Linux
    └── WorkerError        (RuntimeError)        a worker process died or did not answer

Each carries `stage` (the place on the path from store to batch) and `key` (the sample), so that a message
names both at the consumer. The builtin parents are for callers who catch those. `help` is the address of the
page with causes and remedies; tracebacks print it, as a note below the message.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# The only place with the address of the documentation. Until a tag makes a release, "stable" leads nowhere.
DOCS = "https://torch-fastload.readthedocs.io/en/latest/"

__all__ = [
    "AccessDeniedError",
    "ArgumentError",
    "CacheError",
    "DecodeError",
    "FastloadError",
    "LimitError",
    "NotFoundError",
    "ObjectChangedError",
    "PlatformError",
    "ShortReadError",
    "StoreError",
    "StoreTimeoutError",
    "WorkerError",
]


def address(anchor: str) -> str:
    """The address of an error or warning in the documentation: its causes and remedies."""
    return f"{DOCS}reference/errors.html#{anchor}"


class FastloadError(Exception):
    """Base of all fastload errors.

    Example::

        import fastload

        try:
            dataset = fastload.ImageFolder("s3://bucket/absent")
        except fastload.errors.FastloadError as error:
            print(error)  # [list] ... does not exist: check the url
            print(error.stage, error.key, error.help)

    Args:
        message: the finding, and the next thing to do.
        stage: "argument", "list", "get", "put", "cache", "decode", "transform", "collate" or "worker".
        key: the object key or sample index, where there is one.
    """

    stage = ""
    __notes__: list[str]

    def __init__(self, message: str, *, stage: str | None = None, key: object = None) -> None:
        # The explicit call keeps builtin parents such as OSError from parsing the arguments their own way.
        # Its text may quote a server, a file or a library.
        self.message = printable(message, keep="\n\t")
        Exception.__init__(self, self.message)
        self.stage = stage if stage is not None else type(self).stage
        self.key = key
        # Not by `add_note`: a copy in another process has the notes of the original, and no second one.
        self.__notes__ = [f"see {self.help}"]

    @property
    def help(self) -> str:
        """The address of the causes and remedies in the documentation."""
        public = next(cls for cls in type(self).__mro__ if cls.__name__ in __all__)
        return address(public.__name__.lower())

    def __str__(self) -> str:
        where = self.stage
        if self.key is not None:
            where = f"{where} {self.key!r}" if where else f"{self.key!r}"
        return f"[{where}] {self.message}" if where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # The instance's own dict is the state: notes cross process borders too.
        return _rebuild, (type(self), self.message, self.stage, self.key), self.__dict__


def _rebuild(cls: type[FastloadError], message: str, stage: str, key: object) -> FastloadError:
    return cls(message, stage=stage, key=key)


class ArgumentError(FastloadError, ValueError):
    """An argument has an invalid value. Raised before any worker starts.

    Example::

        import fastload

        try:
            fastload.DataLoader([1, 2, 3], on_error="ignore")
        except fastload.errors.ArgumentError as error:
            print(error)  # [argument] on_error must be one of ('raise', 'repeat', 'replace'), found 'ignore'
    """

    stage = "argument"


class StoreError(FastloadError, OSError):
    """The object store failed, and retrying did not help or could not.

    Example::

        import fastload

        store = fastload.open_store("s3://bucket/train")
        try:
            data = store.read("cat/0000.jpg")
        except fastload.errors.StoreError as error:  # after all retries: three minutes
            print(error.key, error.retry)


    Attributes:
        retry: how a retry may help: "never"; "later"; "slower" (the store asked for fewer requests);
            "renewed" (with new credentials); "reachable" (once the server answers at all).
    """

    stage = "get"
    retry = "never"


class NotFoundError(StoreError, FileNotFoundError):
    """The object, bucket or prefix does not exist.

    Example::

        import fastload

        try:
            fastload.open_store("s3://bucket/train").read("cat/absent.jpg")
        except fastload.errors.NotFoundError as error:  # a FileNotFoundError too
            print(error.key)  # cat/absent.jpg
    """


class AccessDeniedError(StoreError, PermissionError):
    """The store refused the credentials, or there were none.

    Example::

        import fastload

        try:
            fastload.ImageFolder("s3://bucket/train", storage_options={"key": "wrong", "secret": "wrong"})
        except fastload.errors.AccessDeniedError as error:  # a PermissionError too
            print(error)  # names the places where credentials were looked for, never a secret
    """


class LimitError(StoreError):
    """A request would pass the storage option `max_gets` or `max_egress`, and was not made.

    Example::

        import fastload

        dataset = fastload.ImageFolder("s3://bucket/train", storage_options={"max_gets": 1})
        try:
            dataset[0], dataset[1]
        except fastload.errors.LimitError as error:
            print(error)  # [get 'cat/0001.jpg'] max_gets=1 requests of this dataset were reserved, ...
    """


class ObjectChangedError(StoreError):
    """The object in the store is no longer the version that the manifest lists.

    Example::

        import fastload

        dataset = fastload.ImageFolder("s3://bucket/train", cache="/ssd/cache")
        try:
            dataset[0]
        except fastload.errors.ObjectChangedError:
            dataset = fastload.ImageFolder("s3://bucket/train", cache="/ssd/cache")
    """


class ShortReadError(StoreError):
    """A body ended before the length that the listing or the response promised.

    Example::

        import fastload

        store = fastload.open_store("s3://bucket/train")
        try:
            data = store.read("cat/0000.jpg")
        except fastload.errors.ShortReadError as error:  # in every attempt of three minutes
            print(error.key)
    """

    retry = "later"


class StoreTimeoutError(StoreError, TimeoutError):
    """The store made no progress within the deadline.

    Example::

        import fastload

        store = fastload.open_store("s3://bucket/train")
        try:
            data = store.read("cat/0000.jpg")
        except fastload.errors.StoreTimeoutError as error:  # a TimeoutError too
            print(error)
    """

    retry = "later"


class CacheError(FastloadError, OSError):
    """The cache directory cannot be used (for example: its path is a file).

    Example::

        import fastload

        try:
            fastload.Cache("/proc/version")
        except fastload.errors.CacheError as error:  # an OSError too
            print(error)  # [cache] path='/proc/version' is not a directory; ...
    """

    stage = "cache"


class DecodeError(FastloadError, ValueError):
    """The bytes are not a valid image or record, or exceed a safety limit.

    Example::

        import fastload

        try:
            fastload.CenterCrop(224)(b"<html>404</html>")
        except fastload.errors.DecodeError as error:  # a ValueError too
            print(error)  # [decode] this is HTML or XML, not an image: ...
    """

    stage = "decode"


class PlatformError(FastloadError, ImportError):
    """A part of fastload needs Linux, and this is another system.

    Example::

        import fastload

        try:
            from fastload import DataLoader
        except fastload.errors.PlatformError:  # an ImportError too: macOS, Windows
            from torch.utils.data import DataLoader
    """


class WorkerError(FastloadError, RuntimeError):
    """A worker process died, or did not answer within its deadline.

    Example::

        import fastload

        loader = fastload.DataLoader(range(1000), batch_size=100, num_workers=2)
        try:
            for batch in loader:
                ...
        except fastload.errors.WorkerError as error:  # names the pid and the signal, such as SIGKILL
            print(error)
    """

    stage = "worker"


# --- text as a terminal, a log or a page may show it, wherever it came from


def printable(text: str, keep: str = "") -> str:
    r"""Return `text` with escapes, those of `repr`, in place of its characters that are not printable.

    They are the controls of a terminal (C0, DEL, C1), those that hide or reorder text (bidirectional and
    others), separators of lines and paragraphs, spaces that are not " ", and lone surrogates.

    Example::

        printable("a\x1b[2J.jpg")  # a\x1b[2J.jpg, with a backslash

    Args:
        text: from a key, a file, a server or a library.
        keep: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def warn(text: str) -> None:
    """Warn of what training goes on with: a RuntimeWarning; under `-W error` a line of the log."""
    try:
        warnings.warn(printable(text), RuntimeWarning, user_level())
    except RuntimeWarning:
        logging.getLogger("fastload").warning("%s", printable(text))


# --- the frames that a traceback shows

# The folder of the files whose frames are fastload's. Not of fastload_train.py beside it.
PACKAGE = str(Path(__file__).parent) + os.sep
_THREADS = str(Path(concurrent.futures.__file__).parent)


def user_level() -> int:
    """Return the `stacklevel` with which a warning of the caller shows the line outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


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
        import difflib  # rarely needed, and every command imports this module

        near = difflib.get_close_matches(unknown, names, n=1)
        says = f"did you mean {near[0]!r}" if near else f"it has {', '.join(names)}"
        if unknown == "root" and "url" in names:  # torchvision's word
            says = "it is called 'url' here, which may be a path too"
        elif "storage_options" in names:  # without the value, which may be a secret
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
