"""What stores do wrong, through the whole loader: one JSON document per case.

Each client runs in a process of its own, which never uses a native client: its workers start by fork, the
default, and inherit the short patience that is set here. Each case reads every object with a worker, the
clean one with two, hashes what it got, and looks for what was left behind.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

import fastload
from fastload.fetch import threads
from fastload.fetch.threads import ReadSettings
from fastload.store import failures, fsspec
from fastload.store import object_store as native
from fastload.testing.read_tests import held
from tests.faultserver import Fault, FaultServer
from tests.forked import start_afresh
from tests.patience import PATIENCE

CLIENTS = ["obstore", "s3fs"]
N = 24
BAD = "0007"
KEY, SECRET = "canary-access-key-1234", "canarySECRETcanary0123456789"
_generator = random.Random(0)
OBJECTS = {f"{i:04d}": _generator.randbytes(2000 + 37 * i) for i in range(N)}
BODY = OBJECTS[BAD]
XML = b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>"


LONG = failures.RetryPolicy(budget=60.0, first=0.01, longest=0.2)


def short(client: dict[str, Any]) -> failures.RetryPolicy:
    """Where asking again does not help.

    s3fs builds its client in the first attempt, half a second if nothing else runs, and a second is to come.
    """
    return failures.RetryPolicy(budget=5.0 if client else 2.0, first=0.01, longest=0.2)


def digest(body: Any) -> str:
    return hashlib.blake2b(body, digest_size=8).hexdigest()


def collate(samples: list[Any]) -> list[str]:
    return [digest(sample) for sample in samples]


def provider() -> dict[str, Any]:
    """Credentials that the server takes."""
    return {
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "token": CURRENT.token,
        "expires_at": datetime.now(UTC) + timedelta(hours=1),
    }


class CURRENT:
    token = "canaryTOKENcanary0123456789"


def load(server: FaultServer, client: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """One epoch; what came of it."""
    given = {"key": KEY, "secret": SECRET, "endpoint_url": server.endpoint_url, **client}
    given.update(arguments.pop("storage_options", {}))
    workers = arguments.pop("workers", 1)
    before_read: Callable[[Any], None] = arguments.pop("before_read", lambda dataset: None)
    loader_arguments = {name: arguments.pop(name) for name in ("on_error",) if name in arguments}
    dataset = fastload.ObjectDataset("s3://bucket", storage_options=given, **arguments)
    before_read(dataset)
    server.requests.clear()
    loader = fastload.DataLoader(dataset, 4, num_workers=workers, collate_fn=collate, **loader_arguments)
    found: list[str] = []
    error: Exception | None = None
    start = time.monotonic()
    try:
        for batch in loader:
            found += batch
    except Exception as caught:
        error = caught
    seconds = time.monotonic() - start
    bodies = {digest(body): key for key, body in server.objects.items()}
    stats = loader.stats()
    shown = [repr(dataset), repr(loader), json.dumps(stats), json.dumps(loader.state_dict(), default=str)]
    if error is not None:
        shown += [
            str(error),
            repr(error),
            repr(error.__dict__),
            repr(error.__cause__),
            repr(error.__context__),
        ]
    return {
        "keys": [bodies.get(one, "WRONG BYTES") for one in found],
        "error": None if error is None else type(error).__name__,
        "message": str(error),
        "seconds": seconds,
        "requests": Counter(request.key for request in server.requests if request.method == "GET"),
        "if_match": sorted({request.headers.get("if-match", "") for request in server.requests}),
        "counters": stats["counters"],
        "shows_secret": [text for text in shown if SECRET in text or CURRENT.token in text],
    }


Case = Callable[[FaultServer, dict[str, Any]], dict[str, Any]]
CASES: dict[str, Case] = {}


def scripted(name: str, *faults: Fault | None, repeat: bool = False, **arguments: Any) -> None:
    def case(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
        with changed((failures, "READ_POLICY", short(client) if repeat else LONG)):
            return load(
                server, client, before_read=lambda _: server.script(BAD, *faults, repeat=repeat), **arguments
            )

    CASES[name] = case


# Faults of which asking again helps, each of an object of its own: name -> (key, faults).
PASSING: dict[str, tuple[str, tuple[Fault, ...]]] = {}


def passing(name: str, *faults: Fault) -> None:
    PASSING[name] = f"{len(PASSING):04d}", faults


# N1
passing("500", Fault(status=500))
passing("503", Fault(status=503, code="SlowDown"), Fault(status=503, code="SlowDown"))
passing("429", Fault(status=429, code="TooManyRequests"))
# N2
for _how in ("cut_after", "reset_after"):
    for _at in (0, 1, 1000, len(OBJECTS[f"{len(PASSING) + 3:04d}"]) - 1):
        passing(f"{_how} {_at}", Fault(**{_how: _at}))  # type: ignore[arg-type]
# N3
passing("empty 200", Fault(body=b""))
passing("XML in a 200", Fault(body=XML))
passing("long XML in a 200", Fault(body=XML + b" " * 9000))
passing("short 200", Fault(body=BODY[:1000]))

scripted("clean", workers=2)
scripted("500 for ever", Fault(status=500), repeat=True)
scripted("stall", Fault(stall_after=500))
scripted("stalls for ever", Fault(stall_after=500), repeat=True)
scripted("XML in a 200 for ever", Fault(body=XML), repeat=True)
# N4
scripted("flipped byte", Fault(flip=99))
# N6
scripted("403", Fault(status=403, code="AccessDenied"), repeat=True)
scripted("404", Fault(status=404, code="NoSuchKey"), repeat=True)
scripted("404, skipped", Fault(status=404, code="NoSuchKey"), repeat=True, on_error="repeat")


def case(name: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES[name] = function
        return function

    return register


def change(server: FaultServer) -> Callable[[Any], None]:
    def replace(_: Any) -> None:
        server.objects[BAD] = b"another object" * 100

    return replace


@case("faults that pass")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    def script(_: Any) -> None:
        for key, faults in PASSING.values():
            server.script(key, *faults)

    return load(server, client, before_read=script)


@case("flipped byte, with a checksum")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    server.checksums = True
    return load(server, client, before_read=lambda _: server.script(BAD, Fault(flip=99)))


@case("storm")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    def storm(_: Any) -> None:
        for key in server.objects:
            server.script(key, Fault(status=503, code="SlowDown"))

    return load(server, client, before_read=storm)


@case("changed")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    return load(server, client, before_read=change(server))


@case("changed, server ignores If-Match")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    server.honours_if_match = False
    return load(server, client, before_read=change(server))


@case("changed, refresh")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    return load(server, client, on_change="refresh", before_read=change(server))


@case("deleted, refresh")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    return load(server, client, on_change="refresh", before_read=lambda _: server.objects.pop(BAD))


@case("expired, static")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    def expire(_: Any) -> None:
        server.token = "other"

    given = {"token": CURRENT.token, "max_requests": 4}
    return load(server, client, storage_options=given, before_read=expire)


@case("expired, provider")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    server.token = CURRENT.token
    given = {"credential_provider": old_first, "key": None, "secret": None}
    return {} if client else load(server, client, storage_options=given)


_asked = 0


def old_first() -> dict[str, Any]:
    """In each process: a token that has expired, then the right one."""
    global _asked
    _asked += 1
    credentials = provider()
    in_worker = get_worker_info() is not None
    return credentials | ({"token": "an-earlier-token"} if in_worker and _asked == 1 else {})


@case("cached")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        given = {"token": CURRENT.token}
        first = load(server, client, cache=directory, storage_options=given)
        second = load(server, client, cache=directory, storage_options=given)
        files = [path for path in Path(directory).rglob("*") if path.is_file()]
        second["shows_secret"] += [str(path) for path in files if _secret_in(path.read_bytes())]
        return {**second, "keys": first["keys"] + second["keys"], "files": len(files)}


def _secret_in(content: bytes) -> bool:
    return SECRET.encode() in content or CURRENT.token.encode() in content


@case("large objects")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    with changed((threads, "SETTINGS", ReadSettings(large_object=2000, range_size=700))):
        return load(server, client)


@case("large object changed between its ranges")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    with changed((threads, "SETTINGS", ReadSettings(large_object=2000, range_size=700))):
        return load(server, client, before_read=lambda _: server.script(BAD, None, Fault(etag="0" * 32)))


@case("hedged")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    with changed((threads, "SETTINGS", ReadSettings(hedge_after=2, hedge_share=0.5))):
        return load(
            server,
            client,
            storage_options={"hedge": True},
            before_read=lambda _: server.script("0020", Fault(delay=3)),
        )


# What is above the clients, with the slower one of them: only for `make stress`.
OF_THE_ENGINE = (
    "stalls for ever",
    "404, skipped",
    "cached",
    "hedged",
    "changed, refresh",
    "deleted, refresh",
)


def is_long(name: str, client: str) -> bool:
    return name.startswith("guard removed") or (client == "s3fs" and name in OF_THE_ENGINE)


# With DEBUG, s3fs logs 5 MB, a quarter of the time: these cases are for what its log shows.
LOGGED = ("clean", "403", "expired, static", "faults that pass")


# A guard is removed, and the harm that it prevents happens. Only for `make stress`.


@case("guard removed: no version check")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    server.honours_if_match = False
    module = fsspec if client else native
    nothing: Callable[..., None] = lambda *arguments: None  # noqa: E731
    with changed((module, "check_version", nothing), (module, "check_length", nothing)):
        return load(server, client, before_read=change(server))


@case("guard removed: no length check")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    module = fsspec if client else native
    with changed((module, "check_length", lambda *arguments: None)):
        return load(server, client, before_read=lambda _: server.script(BAD, Fault(body=b"")))


@case("guard removed: no retry")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    with changed((failures, "READ_POLICY", failures.RetryPolicy(budget=-1))):
        return load(server, client, before_read=lambda _: server.script(BAD, Fault(status=500)))


@case("guard removed: everything is retried")
def _(server: FaultServer, client: dict[str, Any]) -> dict[str, Any]:
    from fastload.errors import StoreError

    with changed((StoreError, "retry", "later"), (failures, "READ_POLICY", short(client))):
        fault = Fault(status=404, code="NoSuchKey")
        return load(server, client, before_read=lambda _: server.script(BAD, fault, repeat=True))


@contextmanager
def changed(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    for place, name, value in changes:
        setattr(place, name, value)
    yield
    for place, name, value in before:
        setattr(place, name, value)


def left_behind(before: dict[str, set[object]]) -> dict[str, list[str]]:
    deadline = time.monotonic() + PATIENCE
    while True:
        gc.collect()
        left = {kind: [str(one) for one in now - before[kind]] for kind, now in held().items()}
        left = {kind: found for kind, found in left.items() if found}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def set_read_timeout(client: dict[str, Any], seconds: float) -> None:
    """After so long without progress a read ends. The workers inherit it."""
    if client:
        import s3fs as package

        package.S3FileSystem.read_timeout = seconds
    else:
        patience = {**native._PATIENT, "read_timeout": f"{seconds * 1000:.0f}ms"}
        native._READER = {**native._READER, "client": patience}


def main(folder: Path, client_name: str, long: bool) -> None:
    """Run the cases of a client: one JSON document each in CLIENT.out, and its log in CLIENT.err."""
    os.setsid()
    start_afresh()
    for number, end in ((1, "out"), (2, "err")):
        with (folder / f"{client_name}.{end}").open("w") as file:
            os.dup2(file.fileno(), number)
    sys.modules.pop("obstore", None)  # the server of forks has it
    warnings.simplefilter("error")
    logging.basicConfig(stream=os.fdopen(2, "w"))  # from the workers too
    failures.READ_POLICY = LONG
    client: dict[str, Any] = {"client": "s3fs"} if client_name == "s3fs" else {}
    gc.freeze()  # every case collects garbage, and searching all of torch takes 0.1 to 0.4 s
    for name, run in CASES.items():
        if is_long(name, client_name) is not long:
            continue
        logging.getLogger().setLevel(logging.DEBUG if long or not client or name in LOGGED else logging.INFO)
        # Most cases count requests, and a read that a loaded machine delays is not to be asked for again.
        set_read_timeout(client, 0.5 if "stall" in name else 20.0)
        before = held()
        with FaultServer(OBJECTS) as server:
            try:
                result = run(server, client)
            except Exception as error:
                result = {"raised": f"{type(error).__name__}: {error}"}
            # An error keeps the iterator, whose workers read on: they end at once while they get answers.
            gc.collect()
        result["left"] = left_behind(before)
        threads = [thread.name for thread in threading.enumerate()]
        result["native"] = "obstore" in sys.modules or "fsspecIO" in threads
        os.write(1, f"{json.dumps([name, result])}\n".encode())
