"""A store's client in a process of its own, so that the trainer's process stays safe to fork.

    trainer                                           client process, forked at the first request
    a thread ─ method, arguments ──── socket pair ──▶ a thread ─ one attempt ─▶ object store
             ◀─ bytes, result, items or an error ───

The threads of a native client do not survive a fork: a child that uses the client after its parent did
hangs. So the client process makes the trainer's own reads (`dataset[0]`, `num_workers=0`, `open_store`),
and workers start as they would without fastload. A worker has a client of its own: nothing is forked from it.

Rejected: starting workers by forkserver once the trainer has used a client, because the dataset must then be
picklable and the script needs a `__main__` guard. Bodies in shared memory, which saves one copy of two but
needs a pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import threading
import time
import traceback
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fastload.errors import FastloadError, StoreError, StoreTimeoutError
from fastload.metrics.machine import call_in_forks, use_one_arena

IDLE_SECONDS = 10.0  # without a request, after which it ends; the next request forks a new one
_LOOK_SECONDS = 1.0
_START_SECONDS = 60.0
_SILENT_SECONDS = 60.0  # without an answer, after which the process is asked whether it lives
_ITEM_SECONDS = 600.0  # between two items: longer than the store's own retries of one page can take
_BUFFER = 4 << 20  # asked for as a socket's buffer; the kernel grants what the system allows
_PING = pickle.dumps(("", []))
_PR_SET_NAME = 15

# A message is a code, a length, and that many bytes.
_BYTES, _RESULT, _ITEM, _ERROR, _REFUSED = range(5)  # codes; the last one ends a connection
_HEADER = struct.Struct("<BQ")  # code and length
_MOST_FILES = 4  # sent with a request

_keep_here = False


def keep_clients_here() -> None:
    """Let this process use native clients itself from now on: it will fork no process that uses them."""
    global _keep_here
    _keep_here = True


def clients_live_here() -> bool:
    """Return whether this process uses native clients itself, as a worker does: nothing is forked from it."""
    return _keep_here or multiprocessing.current_process().daemon


class ClientProcess:
    """The client process of one store, for all threads of this process.

    It ends with the store, with this process however that ends, and after 10 s without a request. If it has
    ended, another one takes its place, and the request is repeated.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: _Running | None = None
        _all.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return ClientProcess, ()

    def call(
        self, target: Any, method: str, *arguments: Any, before_repeat: Callable[[], None] = lambda: None
    ) -> Any:
        """Return the result of `target.method(*arguments)` there; one with the buffer protocol as `bytes`.

        Args:
            before_repeat: called before the request is repeated in a new process.

        Raises:
            FastloadError: what the method raised.
            StoreError: no process could be started, or it was killed at this request, twice.
        """
        # The client process may have another working directory: files are sent as open descriptors.
        sent = [_FileArgument() if isinstance(argument, Path) else argument for argument in arguments]
        with contextlib.ExitStack() as opened:
            paths = [argument for argument in arguments if isinstance(argument, Path)]
            files = [opened.enter_context(path.open("rb")).fileno() for path in paths]
            ((_, result),) = self._ask(target, (method, sent), files, before_repeat=before_repeat)
            return result

    def iterate(self, target: Any, method: str) -> Iterator[Any]:
        """Yield the items of the generator `target.method()`, made there. Raises as `call`."""
        for code, value in self._ask(target, (method, []), patience=_ITEM_SECONDS):
            if code == _ITEM:
                yield value

    def _ask(
        self,
        target: Any,
        request: tuple[str, list[Any]],
        files: Sequence[int] = (),
        *,
        patience: float = math.inf,
        before_repeat: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[int, Any]]:
        """Yield the (code, value) of each message that answers a request.

        If the process is killed before the first message, the request is made once more.

        Args:
            files: descriptors that are sent with it.
            patience: seconds between two messages.
        """
        body, is_last = pickle.dumps(request), False
        heard = time.monotonic()

        def check() -> None:
            running.check()
            if time.monotonic() - heard > patience:
                raise StoreTimeoutError(f"the listing made no progress for {patience:.0f} s", stage="list")

        while True:
            running = self._start(target)
            try:
                with running.connection() as connection:  # one that is left half-way is closed
                    _send(connection, _RESULT, body, files)
                    while (answer := _receive(connection, check))[0] == _ITEM:
                        is_last = True
                        yield answer
                        heard = time.monotonic()
                    if answer[0] == _REFUSED:
                        raise answer[1]
                break
            except (EOFError, ConnectionError):
                running.close()
                if is_last:
                    raise StoreError(
                        "the client process of the store was killed during this request; memory may have "
                        "run out"
                    ) from None
                is_last = True
                before_repeat()
        if answer[0] == _ERROR:
            raise answer[1]
        yield answer

    def _start(self, target: Any) -> _Running:
        """Return the process that runs, or a new one."""
        with self._lock:
            if self._running is None or self._running.ended():
                self._running = _launch(target)
            return self._running

    def forget(self) -> None:
        """Leave the parent's client process to the parent, in a forked child."""
        self._lock = threading.Lock()
        if self._running is not None:
            self._running.close()
            self._running = None


class _Running:
    """One client process, as its parent sees it: it lives until `close()`."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._free: deque[socket.socket] = deque()
        # Not `__del__`: sockets that are collected with this one would warn before it closes them.
        self.close = weakref.finalize(self, _close, control, self._free)

    def sockets(self) -> list[socket.socket]:
        """Return those that no request uses now."""
        return [self._control, *self._free.copy()]

    def check(self) -> None:
        """Ask whether it lives, when an answer takes long: requests have the client's own deadlines.

        Raises:
            StoreTimeoutError: it does not answer.
        """
        with contextlib.suppress(ConnectionRefusedError), self.connection() as connection:
            _send(connection, _RESULT, _PING)
            if _receive(connection, self._give_up)[0] == _REFUSED:
                raise ConnectionRefusedError  # it lives

    def _give_up(self) -> None:
        self.close()
        raise StoreTimeoutError(
            f"the client process of the store has not answered for {_SILENT_SECONDS:.0f} s: is it stopped?"
        )

    def ended(self) -> bool:
        """Return whether it has ended, or was closed."""
        try:
            return not self._control.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    @contextlib.contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """Have a connection for one request; it is kept for another one if the answer was read to its end."""
        try:
            ours = self._free.pop()
        except IndexError:
            ours = self._connect()
        try:
            yield ours
        except BaseException:
            ours.close()
            raise
        self._free.append(ours)
        if not self.close.alive:  # meanwhile
            _close(self._control, self._free)

    def _connect(self) -> socket.socket:
        ours, theirs = _pair()
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            # By the kernel: a socket with a timeout of Python's gives what it waits for in small pieces.
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(_SILENT_SECONDS))
            while True:
                try:
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                    return ours
                except BlockingIOError:  # it has not yet taken those before
                    time.sleep(0.001)
                except OSError as error:
                    ours.close()
                    raise ConnectionResetError from error


def _close(control: socket.socket, free: deque[socket.socket]) -> None:
    """End a client process. Takes no lock: garbage may be collected anywhere."""
    control.close()
    while free:
        with contextlib.suppress(IndexError):  # another thread was faster
            free.pop().close()


def _launch(target: Any) -> _Running:
    """Start a client process for `target`, and wait until it runs."""
    ours, theirs = _pair()
    running = _Running(ours)
    with theirs:
        _fork(target, theirs)
    ours.settimeout(_START_SECONDS)
    try:
        if not ours.recv(1):
            raise StoreError("the client process of the store ended at once; memory may have run out")
    except TimeoutError:
        raise StoreTimeoutError(
            f"the client process of the store did not start within {_START_SECONDS:.0f} s"
        ) from None
    ours.setblocking(False)
    return running


def _pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        failed = StoreError(f"no connection to the client process of the store: {error}; raise ulimit -n")
        failed.retry = "later"  # other requests end meanwhile
        raise failed from error


def _fork(target: Any, control: socket.socket) -> None:
    """Fork the client process: a child, so that whatever runs as init need not wait for it."""
    _wait_for_ended()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads. This child takes no lock of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
        except OSError as error:
            failed = StoreError(f"no client process of the store can be started: {error}")
            failed.retry = "later"
            raise failed from error
    if pid == 0:
        try:
            _main(target, control)
        finally:
            os._exit(0)
    _started.append(pid)


def started() -> set[int]:
    """Return the client processes of this process: those that live, and those not waited for yet."""
    return set(_started)


def connections() -> dict[int, int]:
    """Return the descriptors that lead to client processes, each with a number of its `ClientProcess`."""
    running = {id(process): process._running for process in list(_all)}
    return {
        opened.fileno(): number
        for number, client in running.items()
        if client is not None
        for opened in client.sockets()
    }


def _wait_for_ended() -> None:
    """Let the kernel forget the client processes that have ended."""
    for _ in range(len(_started)):
        # Another thread was faster; or SIGCHLD is ignored.
        with contextlib.suppress(IndexError, ChildProcessError):
            pid = _started.popleft()
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                _started.append(pid)


def _main(target: Any, control: socket.socket) -> NoReturn:
    """Live the life of a client process. It leaves by `_exit`: exit handlers belong to the parent."""
    try:
        gc.freeze()  # never collect the parent's garbage here: finalizers must run in the parent only
        keep_clients_here()
        use_one_arena()
        _leave_signals_to_parent()
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"fastload-client")
        _let_go_of_files(control.fileno())
        control.sendall(b"+")
        control.settimeout(_LOOK_SECONDS)
        work = _Work(target)
        while not work.idle():
            with contextlib.suppress(TimeoutError):
                message, (*descriptors,), _, _ = socket.recv_fds(control, 1, 1)
                if not message:
                    break
                for descriptor in descriptors:
                    work.begin(socket.socket(fileno=descriptor))
    finally:
        os._exit(0)


def _leave_signals_to_parent() -> None:
    """Run no handler of the parent's: Ctrl-C and a scheduler's signals reach all processes of a job."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _let_go_of_files(keep: int) -> None:
    """Let the parent's pipes and sockets end when the parent closes them, and make room for connections.

    /dev/null takes their numbers: an object of the parent that is collected here closes nothing else.
    """
    import resource  # not on every system that fastload can be imported on

    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all that is needed
        if int(name) > 2 and int(name) not in (keep, null):
            os.dup2(null, int(name))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Work:
    """The work of the threads of a client process."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._busy: set[socket.socket] = set()
        self._last = time.monotonic()

    def idle(self) -> bool:
        """Return whether there was no request for a while."""
        return not self._busy and time.monotonic() - self._last > IDLE_SECONDS

    def begin(self, connection: socket.socket) -> None:
        """Have a thread serve a connection; where none can be started, its first request is refused."""
        try:
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()
        except RuntimeError as error:
            refused = StoreError(
                f"the client process of the store cannot serve another request: {error}; raise the limit of "
                "processes (ulimit -u, or pids of the container)"
            )
            refused.retry = "later"  # other requests end meanwhile, and leave their threads
            with connection, contextlib.suppress(EOFError, ConnectionError):
                files, _ = _receive_request(connection)
                for file in files:
                    os.close(file)
                _send(connection, _REFUSED, pickle.dumps(refused))

    def serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection until it is closed."""
        with connection, contextlib.suppress(EOFError, ConnectionError):
            while True:
                files, (method, arguments) = _receive_request(connection)
                self._busy.add(connection)
                try:
                    for code, body in self._answer(method, arguments):
                        _send(connection, code, body)
                finally:
                    for file in files:
                        os.close(file)
                    self._last = time.monotonic()
                    self._busy.discard(connection)

    def _answer(self, method: str, arguments: list[Any]) -> Iterator[tuple[int, Any]]:
        """Yield the answers to a request, as (code, bytes)."""
        try:
            result: Any = getattr(self._target, method)(*arguments) if method else None
            if isinstance(result, types.GeneratorType):
                for item in result:
                    yield _ITEM, pickle.dumps(item)
                result = None
            try:
                yield _BYTES, memoryview(result)
            except TypeError:
                yield _RESULT, pickle.dumps(result)
        except FastloadError as error:
            yield _ERROR, pickle.dumps(error)
        except GeneratorExit:  # the other side has gone
            raise
        except BaseException:  # a panic of the client is no Exception
            text = f"the client process of the store failed:\n{traceback.format_exc()}"
            yield _ERROR, pickle.dumps(StoreError(text))


# --- messages


class _FileArgument:
    """Stands for a file among the arguments of a request: its descriptor comes with the message."""


def _send(connection: socket.socket, code: int, body: Any, files: Sequence[int] = ()) -> None:
    """Send one message, and these descriptors with it."""
    header = _HEADER.pack(code, len(body))
    # All at once: the other side is woken once.
    sent = socket.send_fds(connection, (header, body), files) if files else connection.sendmsg((header, body))
    if sent < len(header) + len(body):
        connection.sendall(header[sent:])
        connection.sendall(memoryview(body)[max(sent - len(header), 0) :])


def _receive_request(connection: socket.socket) -> tuple[list[int], tuple[str, list[Any]]]:
    """Return (descriptors that came with it, (method, arguments)). Raises EOFError when the sender has
    closed."""
    header, files, _, _ = socket.recv_fds(connection, _HEADER.size, _MOST_FILES)
    if not header:
        raise EOFError
    method, arguments = pickle.loads(_exactly(connection, _HEADER.unpack(header)[1], lambda: None))
    left = iter(files)
    arguments = [
        Path(f"/proc/self/fd/{next(left)}") if isinstance(argument, _FileArgument) else argument
        for argument in arguments
    ]
    return files, (method, arguments)


def _receive(connection: socket.socket, silent: Callable[[], None]) -> tuple[int, Any]:
    """Return (code, body or object); `silent` is called from time to time while nothing comes, and may raise.

    Raises:
        EOFError: the other side has ended.
    """
    code, length = _HEADER.unpack(_exactly(connection, _HEADER.size, silent))
    body = _exactly(connection, length, silent)
    return code, body if code == _BYTES else pickle.loads(body)


def _exactly(connection: socket.socket, length: int, silent: Callable[[], None]) -> bytes:
    parts: list[bytes] = []  # more than one: a signal came between, or it is larger than one call gives
    missing = length
    while missing:
        try:
            parts.append(connection.recv(missing, socket.MSG_WAITALL))
        except BlockingIOError:
            silent()
            continue
        if not parts[-1]:
            raise EOFError
        missing -= len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _forget_all() -> None:
    _started.clear()
    for process in list(_all):
        process.forget()


_all: weakref.WeakSet[ClientProcess] = weakref.WeakSet()
_started: deque[int] = deque()  # process ids, see `started`
call_in_forks(_forget_all)
