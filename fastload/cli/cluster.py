"""A Ray cluster for the commands whose work is cut into slices: `warm --ray` and `convert --ray`.

    slices ─▶ lanes, one task in flight each ─▶ a node ─▶ outcomes, as tasks end
                                                  └ its process was lost: the slice is done again

Ray places the tasks, notices dead processes and nodes, and carries functions, arguments and outcomes. Its own
retries are off: they are silent, and a process that dies of one slice would take the others' turns.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, NamedTuple, Self

import typer

import fastload
from fastload.errors import ArgumentError, FastloadError, WorkerError

__all__ = ["RAY_FLAG", "Cluster", "Lost", "Node", "RayOption", "Task"]

RAY_FLAG = "--ray"
RayOption = Annotated[
    str | None,
    typer.Option(
        RAY_FLAG,
        metavar="[ADDRESS]",
        help="Work on all nodes of a Ray cluster: HOST:PORT; the cluster of this machine without ADDRESS; "
        "'local' starts one.",
        show_default="this process's machine",
    ),
]
TRIES = 4  # of a slice, before the run ends
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 120.0  # until every node has started a process and imported fastload
_POLL_SECONDS = 0.5
_CANCEL_SECONDS = 10.0


class Node(NamedTuple):
    """A node of the cluster that has CPUs for tasks."""

    address: str
    cpus: int
    id: str


class Task(NamedTuple):
    """A slice.

    Args:
        run: a function of a module that the nodes have too.
        arguments: of the function; Ray's references among them arrive as values.
        name: of the slice, for errors.
        cpus: that Ray reserves for it.
        node: the node that has to do it; None: any.
    """

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    name: str
    cpus: int = 1
    node: Node | None = None


class Lost(NamedTuple):
    """The outcome of a task whose node is gone."""

    reason: str


class Cluster:
    """A connection to a Ray cluster whose nodes have this fastload.

    Args:
        address: HOST:PORT of its head, "auto", or "local".

    Attributes:
        nodes: those with CPUs, in the order of their addresses. It is the same in every run on them.
        redone: how many times a slice was done again.

    Raises:
        ArgumentError: Ray is not installed, no cluster is there, or its Ray, Python or fastload is another.
    """

    def __init__(self, address: str) -> None:
        self.address, self.redone = address, 0
        try:
            import ray
        except ImportError as error:
            raise ArgumentError(
                f"--ray needs Ray ({error}): type pip install 'torch-fastload[ray]'"
            ) from None
        self._ray = ray
        self._connect(address)
        try:
            self.nodes = sorted(
                Node(found["NodeManagerAddress"], int(found["Resources"]["CPU"]), found["NodeID"])
                for found in ray.nodes()
                if found["Alive"] and found["Resources"].get("CPU", 0) >= 1
            )
            self._check_nodes()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection. Ray ends the tasks that still run."""
        self._ray.shutdown()

    def share(self, value: Any) -> Any:
        """A reference to a value that many tasks take: it is sent to each node once."""
        return self._ray.put(value)

    def run(self, lanes: Iterable[Iterator[Task]]) -> Iterator[tuple[Task, Any]]:
        """(task, outcome) as tasks end; `Lost` if the task's node is gone.

        Args:
            lanes: each has one task in flight. The same iterator may stand in several of them.

        Raises:
            FastloadError: what the task raised.
            WorkerError: a slice lost its process again and again.
        """
        running: dict[Any, tuple[Task, Iterator[Task], int]] = {}
        try:
            for lane in lanes:
                self._start(next(lane, None), lane, 1, running)
            while running:
                ended, _ = self._ray.wait(list(running), timeout=_POLL_SECONDS)
                for reference in ended:
                    task, lane, tried = running.pop(reference)
                    outcome = self._outcome(reference, task, tried)
                    if outcome is None:
                        self.redone += 1
                        self._start(task, lane, tried + 1, running)
                        continue
                    yield task, outcome[0]
                    self._start(next(lane, None), lane, 1, running)
        finally:
            self._cancel(list(running))

    def _start(self, task: Task | None, lane: Iterator[Task], tried: int, running: dict[Any, Any]) -> None:
        if task is None:
            return
        options: dict[str, Any] = {"num_cpus": task.cpus, "max_retries": 0}
        if task.node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(task.node.id, soft=False)
        remote = self._ray.remote(**options)(task.run)
        running[remote.remote(*task.arguments)] = task, lane, tried

    def _outcome(self, reference: Any, task: Task, tried: int) -> tuple[Any] | None:
        """(outcome,); None: the task's process was lost, and the task has to be done again."""
        from ray.exceptions import NodeDiedError, RayError, RayTaskError, TaskUnschedulableError

        try:
            return (self._ray.get(reference),)
        except RayTaskError as error:
            if isinstance(error.cause, FastloadError):
                raise error.cause from None
            if "No module named 'fastload" in str(error):
                raise ArgumentError(
                    f"{task.name}: the Python of Ray's nodes has no fastload: install torch-fastload "
                    f"{fastload.__version__} on each of them"
                ) from None
            raise
        except RayError as error:
            reason = _line(error)
            if task.node is not None and isinstance(error, NodeDiedError | TaskUnschedulableError):
                return (Lost(reason),)
            if tried == TRIES:
                raise WorkerError(
                    f"{task.name}: its process died {TRIES} times, at last by {type(error).__name__} "
                    f"({reason}): see Ray's logs of the node, then run the same command to resume"
                ) from error
        return None

    def _cancel(self, references: list[Any]) -> None:
        """End the tasks in flight by KeyboardInterrupt, so that they write what they have read."""
        for reference in references:
            self._ray.cancel(reference, force=False)
        if references:
            self._ray.wait(references, num_returns=len(references), timeout=_CANCEL_SECONDS)

    def _connect(self, address: str) -> None:
        host, colon, port = address.rpartition(":")
        if "://" in address:
            raise ArgumentError(
                f"--ray {address!r}: give HOST:PORT of the head; from outside of the cluster use "
                "`ray job submit`"
            )
        if colon:
            try:  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
            except (OSError, ValueError) as error:
                raise ArgumentError(
                    f"--ray {address!r}: nothing answers there ({error}); give HOST:PORT as "
                    "`ray start` printed it"
                ) from error
        try:
            self._ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise ArgumentError(
                f"--ray {address!r}: no Ray cluster let this process in ({_line(error)}): start one by "
                "`ray start --head`, give the cluster's token in RAY_AUTH_TOKEN, or give --ray local"
            ) from error
        except RuntimeError as error:
            text = " ".join(str(error).split())
            if "Version mismatch" not in text:
                raise
            raise ArgumentError(
                f"--ray {address!r}: {text}; install the cluster's versions here, or run the command there "
                "by `ray job submit`"
            ) from error

    def _check_nodes(self) -> None:
        """Every node answers, and has this version of fastload."""
        if not self.nodes:
            raise ArgumentError(f"--ray {self.address!r}: no node of the cluster has a CPU for tasks")
        deadline = time.monotonic() + _ANSWER_SECONDS
        running: dict[Any, Any] = {}
        for node in self.nodes:
            task = Task(_version, (), f"node {node.address}", 0, node)
            self._start(task, iter(()), TRIES, running)
        while running:
            ended, _ = self._ray.wait(list(running), timeout=_POLL_SECONDS)
            for reference in ended:
                task = running.pop(reference)[0]
                self._check_version(task, self._outcome(reference, task, TRIES))
            if time.monotonic() > deadline:
                silent = ", ".join(task.name for task, _, _ in running.values())
                raise WorkerError(
                    f"{silent}: no answer in {_ANSWER_SECONDS:.0f} s: see `ray status`, and run the command "
                    "again"
                )

    def _check_version(self, task: Task, outcome: Any) -> None:
        (found,) = outcome
        if isinstance(found, Lost):
            raise WorkerError(f"{task.name} is gone ({found.reason}): run the command again")
        if found != fastload.__version__:
            raise ArgumentError(
                f"{task.name} has fastload {found}, and this is {fastload.__version__}: install the same "
                "version on all nodes"
            )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _version() -> str:
    return fastload.__version__
