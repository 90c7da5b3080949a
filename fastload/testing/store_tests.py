"""The promises of a store."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from fastload.errors import ArgumentError, NotFoundError, ObjectChangedError, ShortReadError, StoreError
from fastload.store.base import ObjectInfo, Store, is_time_version
from fastload.testing.promises import broken, not_promised

_THREADS = 8
_ABSENT = "absent/key"


class StoreTests:
    """The promises of a store: one of yours, or a file system of fsspec's kind that fastload opens.

    Example::

        import fsspec

        import fastload
        from fastload.testing import StoreTests

        class TestMemory(StoreTests):
            def make(self):
                return fastload.open_store("memory://root")

            def put(self, key, body):
                fsspec.filesystem("memory").pipe(f"/root/{key}", body)

    `put` should not use the store under test: an error in it could hide behind itself. The objects of the
    tests, a few kilobytes, stay below the URL that `make` opens. If yours does not make a promise, set its
    test to None in your class.

    Attributes:
        keys: of the objects that are put.
    """

    keys: ClassVar[tuple[str, ...]] = (
        "a.bin",
        "empty.bin",
        "a b.bin",
        "ü/é+1%20#&=;.bin",
        "deep/er/est/z",
        "deep/er.bin",
    )

    def make(self) -> Store:
        """Return a new store, open on the same place each time."""
        raise NotImplementedError(f"{type(self).__name__} lacks make(self), which returns a store")

    def put(self, key: str, body: bytes) -> None:
        """Put an object there. By default the store itself writes it."""
        self.make().write(key, body)

    # --- what is there

    def test_listing_has_every_object_once(self) -> None:
        bodies = self._filled()
        listed: dict[str, ObjectInfo] = {}
        for page in self.make().list():
            for info in page:
                if info.key in listed:
                    broken("a listing has every object once", f"{info.key!r} came twice", "end its pages")
                listed[info.key] = info
        for key, body in bodies.items():
            if key not in listed:
                broken(
                    "a listing has every object, by its key below the URL",
                    f"{key!r} is missing in {sorted(listed)}",
                    "return keys without the prefix of the URL, and not quoted",
                )
            if listed[key].size != len(body):
                broken(
                    "a listing has the size of every object",
                    f"{key!r} has {len(body)} bytes, and is listed with {listed[key].size}",
                    "return the size in bytes of the whole object",
                )

    def test_head_is_what_the_listing_has(self) -> None:
        bodies, store = self._filled(), self.make()
        for info in (info for page in store.list() for info in page if info.key in bodies):
            head = store.head(info.key)
            if head != info:
                broken(
                    "head() of an object is what the listing has, its version too",
                    f"{head} by head(), {info} by list()",
                    "make the version from the same field of both answers",
                )

    def test_read_gives_the_object(self) -> None:
        bodies, store = self._filled(), self.make()
        for key, body in bodies.items():
            info = store.head(key)
            for how, found in (
                ("read(key)", store.read(key)),
                ("read(key, version, size)", store.read(key, info.version, info.size)),
            ):
                self._check_body(how, key, body, found)

    def test_range_gives_those_bytes(self) -> None:
        bodies, store = self._filled(), self.make()
        for key, body in bodies.items():
            version, size = store.head(key).version, len(body)
            for start, stop in {(0, 0), (0, size), (size // 3, size // 2), (size // 2, size), (size, size)}:
                found = store.read_range(key, start, stop, version)
                self._check_body(f"read_range(key, {start}, {stop})", key, body[start:stop], found)

    def test_threads_may_share_a_store(self) -> None:
        bodies, store = self._filled(), self.make()
        keys = list(bodies) * _THREADS
        with ThreadPoolExecutor(_THREADS) as pool:
            for key, found in zip(keys, pool.map(store.read, keys), strict=True):
                self._check_body(f"read(key) by {_THREADS} threads", key, bodies[key], found)

    def test_pickled_store_reads_the_same(self) -> None:
        bodies, store = self._filled(), self.make()
        for when in ("before", "after"):
            try:
                copy = pickle.loads(pickle.dumps(store))
            except Exception as error:
                broken(
                    "a store can be pickled, before and after it was used",
                    f"{when} it was used, pickle raised {type(error).__name__}: {error}",
                    "make the client on first use in each process, and leave it out of the pickle",
                )
            if copy.identity != store.identity:
                broken(
                    "a pickled store names the same place",
                    f"identity is {store.identity!r}, and {copy.identity!r} of the copy",
                    "make `identity` from the place only: caches are kept by it",
                )
            for key, body in bodies.items():
                self._check_body(f"read(key) of a copy pickled {when} use", key, body, copy.read(key))
                store.read(key)

    # --- what fails

    def test_absent_object_is_not_found(self) -> None:
        self._filled()
        store = self.make()
        for how, read in (
            ("head", lambda: store.head(_ABSENT, wait=_no_more)),
            ("read", lambda: store.read(_ABSENT, wait=_no_more)),
            ("read_range", lambda: store.read_range(_ABSENT, 0, 1, wait=_no_more)),
        ):
            error = self._error(f"{how}() of an object that does not exist", NotFoundError, read)
            if error.key != _ABSENT:
                broken(
                    "the error of an object names its key",
                    f"NotFoundError.key is {error.key!r} for {_ABSENT!r}",
                    "raise NotFoundError(message, key=key)",
                )

    def test_range_past_the_end_is_an_error(self) -> None:
        bodies, store = self._filled(), self.make()
        key = max(bodies, key=lambda one: len(bodies[one]))
        size = len(bodies[key])
        for start, stop in ((0, size + 1), (size + 1, size + 2)):
            self._error(
                f"read_range({start}, {stop}) of {size} bytes",
                StoreError,
                lambda start=start, stop=stop: store.read_range(key, start, stop, wait=_no_more),  # type: ignore[misc]
            )

    def test_short_body_is_an_error(self) -> None:
        bodies, store = self._filled(), self.make()
        key = max(bodies, key=lambda one: len(bodies[one]))
        wanted = len(bodies[key]) + 1
        self._error(
            f"read() of {wanted - 1} bytes where {wanted} were promised",
            (ShortReadError, ObjectChangedError),
            lambda: store.read(key, None, wanted, wait=_no_more),
        )

    def test_object_that_changed_is_refused(self) -> None:
        self._filled()
        store, key = self.make(), self.keys[0]
        listed = store.head(key)
        if not listed.version:
            not_promised("the store has no versions, so no change can be noticed")
        # A time may be too coarse to show a change at once: then the size shows it.
        self.put(key, bytes(listed.size + is_time_version(listed.version)))
        for how, read in (
            ("read", lambda: store.read(key, listed.version, wait=_no_more)),
            ("read_range", lambda: store.read_range(key, 0, 4, listed.version, wait=_no_more)),
        ):
            self._error(f"{how}() with the version before a change", ObjectChangedError, read)

    def test_key_leads_nowhere_else(self) -> None:
        self._filled()
        store = self.make()
        for key in ("../a.bin", "deep/../a.bin", "./a.bin", "/a.bin"):
            self._error(f"read({key!r})", StoreError, lambda key=key: store.read(key, wait=_no_more))  # type: ignore[misc]

    # --- writing

    def test_written_object_is_read_back(self) -> None:
        store = self.make()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "body"
            file.write_bytes(b"from a file")
            for body, expected in (
                (b"new", b"new"),
                (b"in its place", b"in its place"),
                (file, b"from a file"),
            ):
                with _only_readable():
                    store.write("written/x", body, wait=_no_more)
                self._check_body(
                    f"read(key) after write(key, {body!r})", "written/x", expected, store.read("written/x")
                )
        listed = [info.key for page in self.make().list() for info in page if info.key.startswith("written/")]
        if listed != ["written/x"]:
            broken(
                "a write leaves the object, and nothing else",
                f"the listing has {listed}",
                "remove the parts of a write, or let them lie where no listing shows them",
            )

    # --- what these are made of

    def _filled(self) -> dict[str, bytes]:
        """Put the objects; key -> body."""
        bodies = {key: b"" if key.startswith("empty") else key.encode() * 100 for key in self.keys}
        with _only_readable():
            for key, body in bodies.items():
                self.put(key, body)
        return bodies

    def _check_body(self, how: str, key: str, body: bytes, found: Any) -> None:
        there = bytes(found)
        if there != body:
            unlike = next(
                (at for at, pair in enumerate(zip(there, body, strict=False)) if pair[0] != pair[1]), None
            )
            broken(
                "a read gives exactly the bytes that were asked for",
                f"{how} of {key!r} gave {len(there)} bytes of {len(body)}"
                + (
                    ""
                    if unlike is None
                    else f", and byte {unlike} is {there[unlike]} in place of {body[unlike]}"
                ),
                "ask for the bytes [start, stop): the last byte of an HTTP range is stop - 1",
            )

    def _error(
        self, what: str, kinds: type[StoreError] | tuple[type[StoreError], ...], read: Callable[[], Any]
    ) -> StoreError:
        """Return the error of a read that must fail."""
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        names = " or ".join(kind.__name__ for kind in kinds)
        try:
            body = read()
        except kinds as error:
            return error
        except Exception as error:
            result = f"raised {type(error).__name__}: {error}"
        else:
            result = f"gave {body!r}"[:100]
        broken(
            f"{what} raises {names}",
            f"it {result}",
            "translate the errors of the client to those of fastload.errors, and compare version and length "
            "of every answer",
        )


def _no_more(error: StoreError, seconds: float) -> None:
    """Do nothing in place of a pause before the next attempt."""
    raise error


@contextmanager
def _only_readable() -> Iterator[None]:
    """Skip the test where a store cannot be written to."""
    try:
        yield
    except ArgumentError as error:
        if "can only be read" not in str(error):
            raise
        not_promised(f"{error}; define put() to test its reads")
