"""A Ray cluster for the commands whose work is cut into slices: `warm --ray` and `convert --ray`.

    slices ─▶ lanes, one task in flight each ─▶ a node ─▶ outcomes, as tasks end
                                                  └ its process was lost: the slice is done again

Ray places the tasks, notices dead processes and nodes, and carries functions, arguments and outcomes. Its own
retries are off: they are silent, and a process that dies of one slice would take the others' places.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Self

import typer

import fastload
from fastload.errors import ArgumentError, FastloadError, WorkerError

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
WAIT_SECONDS = 30.0  # for CPUs, before a warning
_CONNECT_SECONDS = 10.0
# Ray reads these when it is imported, and when it connects. It would try for 12 minutes where something else
# than Ray listens; one try takes half a minute.
_ONE_TRY = {"RAY_NUM_REDIS_GET_RETRIES": "1", "RAY_gcs_server_port_wait_time_s": "1"}
_ANSWER_SECONDS = 120.0  # until every node has started a process and imported fastload
_POLL_SECONDS = 0.5
_CANCEL_SECONDS = 10.0


class Node(NamedTuple):
    """A node of the cluster that has CPUs for tasks."""

    address: str
    cpus: int
    id: str


class Task(NamedTuple):
    """A slice: what a node runs.

    Args:
        run: a function of a module that the nodes have too.
        arguments: of the function; Ray's references among them arrive as values.
        name: name of the slice, for errors.
        cpus: CPUs that Ray reserves for it.
        node: node that has to do it; None: any.
    """

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    name: str
    cpus: int = 1
    node: Node | None = None


class Lost(NamedTuple):
    """The outcome of a task whose node is gone."""

    reason: str


@dataclass
class _Flight:
    """A task that Ray has; `runs`: it has its CPUs."""

    task: Task
    lane: Iterator[Task]
    since: float
    tried: int = 1
    runs: bool = False


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
        self._flights: dict[Any, _Flight] = {}  # by Ray's stream of what the task says
        if address != "local":
            for name, value in _ONE_TRY.items():
                os.environ.setdefault(name, value)
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
                Node(node["NodeManagerAddress"], int(node["Resources"]["CPU"]), node["NodeID"])
                for node in ray.nodes()
                if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
            )
            self._check_nodes()
        except BaseException:
            ray.shutdown()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.shutdown()  # which ends the tasks that still run

    def share(self, value: Any) -> Any:
        """Return a reference to a value that many tasks take: it is sent to each node once.

        Ray may write it to the disks of the nodes, so it has no secrets. They travel in small arguments of
        tasks, which Ray keeps in memory.
        """
        return self._ray.put(value)

    def run(self, lanes: Iterable[Iterator[Task]], within: float | None = None) -> Iterator[tuple[Task, Any]]:
        """Yield (task, outcome) as tasks end; `Lost` if the task's node is gone.

        Tasks wait without a deadline for CPUs that other work holds; a warning says so.

        Args:
            lanes: each has one task in flight. The same iterator may stand in several of them.
            within: seconds after which all must have ended.

        Raises:
            FastloadError: what the task raised.
            WorkerError: a slice lost its process again and again, or not all have ended in time.
        """
        flights, start, warned = self._flights, time.monotonic(), False
        try:
            for lane in lanes:
                self._start_next(lane)
            while flights:
                for stream in self._ray.wait(list(flights), timeout=_POLL_SECONDS)[0]:
                    flight = flights[stream]
                    if (outcome := self._look(stream, flight)) is not None:
                        yield flight.task, outcome[0]
                        self._start_next(flight.lane)
                if within is not None and time.monotonic() - start > within:
                    silent = ", ".join(flight.task.name for flight in flights.values())
                    raise WorkerError(
                        f"{silent}: no answer in {within:.0f} s: see `ray status`, and run the command again"
                    )
                warned = warned or self._warn_of_waiting()
        finally:
            self._cancel()

    def run_anywhere(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, Any]]:
        """Yield (task, outcome) of tasks for any node, one at a time on each CPU."""
        return self.run([tasks] * sum(node.cpus for node in self.nodes))

    def _start_next(self, lane: Iterator[Task]) -> None:
        if (task := next(lane, None)) is not None:
            self._start(_Flight(task, lane, time.monotonic()))

    def _start(self, flight: _Flight) -> None:
        task = flight.task
        options: dict[str, Any] = {"num_cpus": task.cpus, "max_retries": 0, "name": task.run.__name__}
        if task.node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(task.node.id, soft=False)
        remote = self._ray.remote(num_returns="streaming", **options)(_run_aloud)
        self._flights[remote.remote(task.run, *task.arguments)] = flight

    def _look(self, stream: Any, flight: _Flight) -> tuple[Any] | None:
        """Return (outcome,) if the task has ended; None: it has begun, or begins again."""
        from ray.exceptions import NodeDiedError, RayError, RayTaskError, TaskUnschedulableError

        task = flight.task
        try:
            said = self._ray.get(next(stream))
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
            del self._flights[stream]
            if task.node is not None and isinstance(error, NodeDiedError | TaskUnschedulableError):
                return (Lost(_line(error)),)
            if flight.tried == TRIES:
                raise WorkerError(
                    f"{task.name}: its process died {TRIES} times, at last by {type(error).__name__} "
                    f"({_line(error)}): see Ray's logs of the node, then run the same command to resume"
                ) from error
            self.redone += 1
            self._start(_Flight(task, flight.lane, time.monotonic(), flight.tried + 1))
            return None
        if not flight.runs:
            flight.runs = True
            return None
        del self._flights[stream]
        return (said,)

    def _warn_of_waiting(self) -> bool:
        """Return whether tasks have waited for long, and say so."""
        now = time.monotonic()
        waiting = [
            each for each in self._flights.values() if not each.runs and now - each.since > WAIT_SECONDS
        ]
        if waiting:
            warnings.warn(
                f"{len(waiting)} of {len(self._flights)} slices have waited for {WAIT_SECONDS:.0f} s for "
                f"CPUs that other work of the cluster holds; the first is {waiting[0].task.name}. They begin "
                "when CPUs are free: `ray status` shows the use, and Ctrl-C ends this command",
                stacklevel=3,
            )
        return bool(waiting)

    def _cancel(self) -> None:
        """End the tasks in flight by KeyboardInterrupt, so that they write what they have read."""
        streams = list(self._flights)
        self._flights.clear()
        for stream in streams:
            self._ray.cancel(stream, force=False)
        deadline = time.monotonic() + _CANCEL_SECONDS
        while streams and time.monotonic() < deadline:
            ended, streams = self._ray.wait(streams, timeout=_POLL_SECONDS)
            for stream in ended:
                with suppress(Exception):  # that it was cancelled, or whatever else ended it
                    self._ray.get(next(stream))
                    streams.append(stream)  # it had only begun

    def _connect(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        if "://" in address:
            raise ArgumentError(
                f"--ray {address!r}: give HOST:PORT of the head; from outside of the cluster use "
                "`ray job submit`"
            )
        if address not in ("auto", "local"):
            try:  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
            except (OSError, ValueError) as error:
                raise ArgumentError(
                    f"--ray {address!r}: nothing answers there ({error}); give HOST:PORT as "
                    "`ray start` printed it"
                ) from error
        try:
            self._ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError) as error:
            raise ArgumentError(
                f"--ray {address!r}: no Ray cluster let this process in ({_line(error)}): start one by "
                "`ray start --head`, install its versions here, give its token in RAY_AUTH_TOKEN, or give "
                "--ray local"
            ) from error

    def _check_nodes(self) -> None:
        """Leave out dead nodes, and refuse those with another fastload.

        Ray lists a node that was killed for some ten seconds more, beside the one that has taken its place
        and address.
        """
        lanes = [iter([Task(_version, (), f"node {node.address}", 0, node)]) for node in self.nodes]
        for task, version in self.run(lanes, within=_ANSWER_SECONDS):
            if isinstance(version, Lost):
                self.nodes = [node for node in self.nodes if node != task.node]
            elif version != fastload.__version__:
                raise ArgumentError(
                    f"{task.name} has fastload {version}, and this is {fastload.__version__}: install the "
                    "same version on all nodes"
                )
        if not self.nodes:
            raise ArgumentError(f"--ray {self.address!r}: no node of the cluster has a CPU for tasks")


def refuse_limits(options: Mapping[str, Any]) -> None:
    """Refuse limits of requests: each slice opens the store, and would have all of them for itself."""
    limits = sorted({"max_gets", "max_egress"} & options.keys())
    if limits:
        raise ArgumentError(
            f"{limits[0]} with --ray would be a limit of each slice, not of the command: leave it out, or "
            "run the command without --ray"
        )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _version() -> str:
    return fastload.__version__


def _run_aloud(run: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Yield once when Ray has begun the task, then the outcome."""
    yield None
    yield run(*arguments)
