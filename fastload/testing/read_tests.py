"""The promises that map-style and iterable datasets share: pickling, resume, nothing left behind."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, ClassVar

from fastload.store import client_process
from fastload.testing.promises import (
    SEED,
    Contents,
    broken,
    check_same_lists,
    contents,
    in_processes,
    loader_of,
    seeded,
)

Held = dict[str, set[object]]  # kind -> what there is of it
_LOOK_SECONDS = 0.05
_FIRST_SECONDS = 1.5
_LOOKS_A_COLLECTION = 5  # garbage collection takes 0.1 s and more where torch is loaded
_SHARED = ("torch", "fastload", "psm_")  # the last: multiprocessing.shared_memory


def held() -> Held:
    """Find child processes, threads, open files and shared memory. Elsewhere than on Linux: threads.

    What multiprocessing keeps on purpose until the end of this process does not count, nor do the client
    processes of stores. All sockets to those of one store count as one thing: a thread that was there before
    may have made its store start a new one.
    """
    resources: Held = {"threads": {thread.ident for thread in threading.enumerate()}}
    if sys.platform != "linux":
        return resources
    servers, pipes = _multiprocessing_servers()
    clients = client_process.connections()
    on_linux: Held = {
        "processes": _children() - servers - client_process.started(),
        "descriptors": {
            ("client process", clients[int(fd.name)]) if int(fd.name) in clients else described
            for fd in Path("/proc/self/fd").iterdir()
            if int(fd.name) not in pipes and (described := _describe(fd)) is not None
        },
        "shared memory": {
            path for path in Path("/dev/shm").iterdir() if path.name.startswith(_SHARED) and _is_mine(path)
        },
    }
    return resources | on_linux


def left_behind(before: Held, seconds: float) -> Held:
    """Return what is there now and was not before; what goes within `seconds` does not count."""
    deadline = time.monotonic() + seconds
    looks, collected = 0, False
    while left := {kind: more for kind, now in held().items() if (more := now - before[kind])}:
        looks += 1
        late = time.monotonic() > deadline
        if late and collected:
            break
        if late or looks % _LOOKS_A_COLLECTION == 0:
            gc.collect()
            collected = True
        else:
            time.sleep(_LOOK_SECONDS * min(looks, 10))
    return left


def _children() -> set[object]:
    """Return the children of this process, and theirs."""
    parents: dict[int, list[int]] = {}
    for folder in os.scandir("/proc"):
        if folder.name.isdigit():
            try:
                # Without a buffer and a Path: that takes a third of the CPU.
                with open(f"{folder.path}/stat", "rb", buffering=0) as file:  # noqa: PTH123
                    status = file.read(1024)
            except OSError:  # it has ended meanwhile
                continue
            # The name stands in brackets and may have any character in it: the fields begin behind it.
            parents.setdefault(int(status.rpartition(b")")[2].split()[1]), []).append(int(folder.name))
    found: set[object] = set()
    todo = [os.getpid()]
    while todo:
        children = parents.get(todo.pop(), [])
        found.update(children)
        todo += children
    return found


def _multiprocessing_servers() -> tuple[set[Any], set[Any]]:
    """Return (processes, descriptors) that multiprocessing keeps on purpose until this process ends."""
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    return {server._forkserver_pid, tracker._pid}, {server._forkserver_alive_fd, tracker._fd}


def _is_mine(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:  # it has gone meanwhile
        return False


def _describe(fd: Path) -> tuple[str, str] | None:
    try:
        target = str(fd.readlink())
    except OSError:
        return None
    # obstore's runtime has three of these for the life of a process that used it.
    return None if target in ("anon_inode:[eventpoll]", "anon_inode:[eventfd]") else (fd.name, target)


State = dict[str, Any]


class ReadTests:
    """The base of `DatasetTests` and `IterableDatasetTests`, which have its attributes and methods."""

    num_workers: ClassVar[Sequence[int]] = (1, 2)
    start_methods: ClassVar[Sequence[str]] = ("fork", "spawn")
    patience: ClassVar[float] = 30.0

    def make(self) -> Any:
        """Return a new dataset, with the same samples each time."""
        raise NotImplementedError(f"{type(self).__name__} lacks make(self), which returns a new dataset")

    def identify(self, sample: Any) -> Any:
        """Return a key that no two samples share, whatever their random numbers; None: not known."""
        return None

    def test_pickled_dataset_gives_the_same_samples(self) -> None:
        dataset = self.make()
        expected: list[Contents] = []
        for when in ("before", "after"):
            try:
                copy = pickle.loads(pickle.dumps(dataset))
            except Exception as error:
                broken(
                    "a dataset can be pickled, before and after it was read",
                    f"{when} it was read, pickle raised {type(error).__name__}: {error}",
                    "define its classes and functions at the top of a module, not as lambdas; open files and "
                    "connections on first use, and leave them out in __getstate__",
                )
            expected = expected or self._epoch(dataset)
            check_same_lists(
                "a pickled dataset gives the same samples",
                expected,
                self._epoch(copy),
                ("from the dataset", f"from its copy, pickled {when} it was read"),
                "keep all that the samples depend on in __getstate__",
            )

    def test_state_resumes_with_the_next_sample(self) -> None:
        states, expected = self._states()
        for state, start in states:
            loader = self._resumed(state)
            batches = iter(loader)
            seen = [self._contents(sample) for sample in next(batches, [])]
            if seen:  # what was resumed is saved, and resumed; at its end it would be the next epoch
                seen += self._read(self._resumed(loader.state_dict()))
            name = f"resumed after {start} samples, and one batch later again"
            self._check_rest(expected, start, seen, name)

    def test_state_resumes_in_workers(self) -> None:
        states, expected = self._states(2)
        state, start = states[len(states) // 2]
        found = self._read(self._resumed(state, 2))
        self._check_rest(expected, start, found, f"resumed after {start} samples with num_workers=2")

    def test_nothing_is_left_behind(self) -> None:
        left: Held = {}
        # What is made once in a process, and kept for good, is no leak: the second time it is there before.
        for seconds in (min(_FIRST_SECONDS, self.patience), self.patience):
            before = held()
            self._use()
            left = left_behind(before, seconds)
            if not left:
                break
        if left:
            shown = [f"{kind}: {', '.join(sorted(map(str, left[kind]))[:3])}" for kind in sorted(left)]
            broken(
                "a dataset leaves no processes, threads, descriptors and shared memory behind",
                f"{self.patience:.0f} s later there are more {'; '.join(shown)}",
                "close what the dataset opens: in a method close(), which this test calls, or when the "
                "dataset is collected (weakref.finalize)",
            )

    # --- what these are made of

    def _loader(self, dataset: Any, **options: Any) -> Any:
        return loader_of(dataset, **options)

    def _contents(self, sample: Any) -> Contents:
        return contents(sample)

    def _read(self, loader: Any, *, whole: bool = False) -> list[Contents]:
        """Return the samples of an epoch; not `whole`: without what `identify` leaves out."""
        told = contents if whole else self._contents
        with seeded(SEED):
            return [told(sample) for batch in loader for sample in batch]

    def _epoch(self, dataset: Any, **options: Any) -> list[Contents]:
        return self._read(self._loader(dataset, **options))

    def _processes(self, workers: int, method: str = "") -> tuple[dict[str, Any], str]:
        """Return (options of a loader, the same in words)."""
        return in_processes(method or self.start_methods[0], workers)

    def _states(self, workers: int = 0) -> tuple[list[tuple[State, int]], list[Contents]]:
        """Return (state, samples delivered) before, between and after the batches; the samples."""
        loader = self._loader(self.make(), **self._processes(workers)[0])
        states, samples = [(loader.state_dict(), 0)], []
        with seeded(SEED):
            for batch in loader:
                samples += [self._contents(sample) for sample in batch]
                states.append((loader.state_dict(), len(samples)))
        return states, samples

    def _resumed(self, state: State, workers: int = 0) -> Any:
        """Return a loader of another dataset that goes on from a state, as a file would have it."""
        loader = self._loader(self.make(), **self._processes(workers)[0])
        loader.load_state_dict(pickle.loads(pickle.dumps(state)))
        return loader

    def _check_rest(self, expected: list[Contents], start: int, found: list[Contents], name: str) -> None:
        check_same_lists(
            "a resumed run gives exactly the samples that were not delivered",
            expected[start:],
            found,
            ("in the whole run", name),
            "let samples depend on nothing but (seed, epoch, index); or give the dataset state_dict() and "
            "load_state_dict() with all that they depend on",
            lambda number: f"sample {start + number}",
        )

    def _use(self) -> None:
        """Read to the end and not, in this process and in a worker, and close."""
        for workers in (0, 1):
            dataset = self.make()
            loader = self._loader(dataset, **self._processes(workers)[0])
            next(iter(loader), None)
            self._read(loader)
            getattr(dataset, "close", lambda: None)()
