"""`max_gets` and `max_egress`: the server counts what it was asked for, over all processes.

A loader that reads ahead may end before all that it reserved went out: its requests have an upper bound only.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload import DataLoader, ObjectDataset
from fastload.errors import ArgumentError, LimitError
from fastload.store import open_store, with_budget
from fastload.store.budget import Limits, RequestBudget
from tests.faultserver import Fault, FaultServer
from tests.patience import wait_until
from tests.shortform import stress

OBJECTS = {f"{number:03d}.bin": bytes([number]) * 1000 for number in range(48)}


def value(body: Any) -> int:
    assert bytes(body) == bytes([body[0]]) * 1000
    return int(body[0])


def gets(server: FaultServer) -> int:
    return sum(server.count(key) for key in OBJECTS)


def dataset_of(server: FaultServer, cache: Path | None = None, **limits: Any) -> ObjectDataset:
    return ObjectDataset(
        "s3://bucket", decode=value, cache=cache, storage_options={**server.options, **limits}
    )


def take(dataset: ObjectDataset, **arguments: Any) -> list[int]:
    """What was handed out before the limit; whole batches only."""
    found: list[int] = []
    with pytest.raises(LimitError) as caught:
        for batch in DataLoader(dataset, 4, **arguments):
            assert len(batch) == 4
            found += torch.as_tensor(batch).tolist()
    assert caught.value.stage == "get" and caught.value.key in OBJECTS
    assert "raise max_" in str(caught.value)
    return found


@pytest.mark.parametrize("workers", [*stress(0), 1])
def test_batch_that_met_the_limit_is_still_to_come(server: FaultServer, workers: int) -> None:
    loader = DataLoader(dataset_of(server, max_gets=20), 4, num_workers=workers, shuffle=True, seed=1)
    batches, seen = iter(loader), []
    with pytest.raises(LimitError) as first:
        while True:
            seen += torch.as_tensor(next(batches)).tolist()
    with pytest.raises(LimitError) as again:
        next(batches)
    assert str(again.value) == str(first.value) and gets(server) <= 20
    more = DataLoader(dataset_of(server, max_gets=48), 4, num_workers=workers, shuffle=True, seed=1)
    more.load_state_dict(loader.state_dict())
    rest = [number for batch in more for number in torch.as_tensor(batch).tolist()]
    assert sorted(seen + rest) == list(range(48))
    with pytest.raises(LimitError):
        list(loader)


@pytest.mark.parametrize("persistent", [False, True])
def test_limit_leaves_no_worker_to_the_garbage_collector(server: FaultServer, persistent: bool) -> None:
    loader = DataLoader(
        dataset_of(server, max_gets=9), 4, num_workers=1, in_order=False, persistent_workers=persistent
    )
    batches: Any = iter(loader)
    (worker,) = batches._workers
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(LimitError):
                for _ in batches:
                    pass
        del loader, batches
        assert not worker.is_alive()
    finally:
        gc.enable()


def test_trainer_and_workers_share_one_limit(server: FaultServer) -> None:
    dataset = dataset_of(server, max_gets=10)
    assert [dataset[number] for number in (40, 41, 42)] == [40, 41, 42]
    take(dataset, num_workers=2)
    assert gets(server) <= 10


STARTS = ("fork", "forkserver", "spawn")


@pytest.mark.parametrize(
    ("limits", "most", "options"),
    [
        *(({"max_gets": 17}, 17, {"num_workers": 2, "multiprocessing_context": one}) for one in STARTS[:2]),
        *stress(({"max_gets": 17}, 17, {"num_workers": 2, "multiprocessing_context": STARTS[2]})),
        ({"max_egress": "10500"}, 10, {"num_workers": 2}),
        ({"max_gets": 9}, 9, {"num_workers": 1, "on_error": "repeat"}),
        ({"max_gets": 9}, 9, {"num_workers": 1, "on_error": "replace"}),
    ],
)
def test_limit_is_never_passed_nor_skipped_as_a_bad_sample(
    server: FaultServer, limits: dict[str, Any], most: int, options: dict[str, Any]
) -> None:
    found = take(dataset_of(server, **limits), **options)
    assert gets(server) <= most
    assert found == list(range(len(found))) and len(found) <= gets(server)


def test_limit_that_is_just_enough_is_no_error(server: FaultServer) -> None:
    loader = DataLoader(dataset_of(server, max_gets=48, max_egress=48_000), 4, num_workers=2)
    assert torch.cat([torch.as_tensor(batch) for batch in loader]).tolist() == list(range(48))
    assert gets(server) == 48


def test_retries_count(server: FaultServer) -> None:
    server.script("000.bin", Fault(status=503), repeat=True)
    store = open_store("s3://bucket", **server.options, max_gets=3)
    with pytest.raises(LimitError, match="max_gets=3"):
        store.read("000.bin")
    assert gets(server) == 3


def test_read_of_unknown_size_under_max_egress_asks_for_the_size_first(server: FaultServer) -> None:
    store = open_store("s3://bucket", **server.options, max_egress=1500, max_gets=9)
    assert len(store.read("001.bin")) == 1000
    with pytest.raises(LimitError, match="1 KB were asked for, and this request is for 1 KB more"):
        store.read("002.bin")
    assert server.count("002.bin") == 0
    assert len(store.read_range("003.bin", 0, 500)) == 500


def test_threads_never_pass_the_limit() -> None:
    budget = RequestBudget(Limits(500, None))

    def ask(_: int) -> bool:
        try:
            budget.reserve("key", 1)
        except LimitError:
            return False
        return True

    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(ask, range(2000))) == 500
    assert budget.used() == (500, 500)


def ask_until_refused(budget: RequestBudget, made: Any) -> None:
    while True:
        try:
            budget.reserve("key", 0)
        except LimitError:
            return
        with made.get_lock():
            made.value += 1


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.stress)])
def test_processes_never_pass_the_limit(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    budget, made = RequestBudget(Limits(3000, None)), context.Value("i", 0)
    processes = [context.Process(target=ask_until_refused, args=(budget, made)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert made.value == 3000 and budget.used() == (3000, 0)


def ask_often(budget: RequestBudget) -> None:
    for _ in range(10_000):
        budget.reserve("key", 0)


def test_numbers_read_while_another_process_counts_never_fall() -> None:
    budget, before = RequestBudget(Limits()), 0
    process = multiprocessing.get_context("fork").Process(target=ask_often, args=(budget,))
    process.start()
    while process.is_alive():
        now = budget.spent().gets
        assert now >= before
        before = now
    process.join(60)
    assert budget.spent().gets == 10_000


def hold(budget: RequestBudget, held: Any) -> None:
    with budget._locked():
        held.set()
        signal.pause()


def test_process_killed_with_the_lock_stops_nobody() -> None:
    context = multiprocessing.get_context("fork")
    budget, held = RequestBudget(Limits(5, None)), context.Event()
    process = context.Process(target=hold, args=(budget, held))
    process.start()
    assert held.wait(30) and process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    budget.reserve("key", 0)
    assert budget.used() == (1, 0)


def test_copy_shares_the_limit_and_a_pickle_goes_on_from_it() -> None:
    budget = RequestBudget(Limits(3, None))
    copy.deepcopy(budget).reserve("key", 7)
    other = pickle.loads(pickle.dumps(budget))
    other.reserve("key", 1)
    assert budget.used() == (1, 7) and other.used() == (2, 8)


NO_NUMBER = "storage option max_gets must be a whole number >= 1, found"
NO_SIZE = r'storage option max_egress=.*give bytes .* such as "500GB"'


@pytest.mark.parametrize(
    ("name", "words", "values"),
    [
        ("max_gets", NO_NUMBER, [0, -1, 1.5, float("nan"), "many", "-1", True, [5]]),
        ("max_egress", NO_SIZE, [0, -1, 1.5, float("nan"), True, "much", "nan", "-5GB", "5XB", "9" * 400]),
        ("budget", "budget must be a RequestBudget, found", [5, {"max_gets": 5}]),
    ],
)
def test_wrong_limits_are_refused(name: str, words: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ArgumentError, match=words):
            open_store("s3://bucket", key="k", secret="s", **{name: value})


def test_hedged_reads_count(server: FaultServer) -> None:
    for key in OBJECTS:
        server.script(key, Fault(delay=0.3), None)
    found = take(dataset_of(server, max_gets=30, hedge=True), num_workers=1)
    assert gets(server) <= 30 and found == list(range(len(found)))


def test_request_repeated_after_its_client_process_was_killed_counts_again(server: FaultServer) -> None:
    server.script("000.bin", Fault(delay=3.0), None)
    store: Any = open_store("s3://bucket", **server.options, max_gets=2)
    store.pid = os.getpid  # the client process is forked with it
    client = store._process.call(store, "pid")
    assert client != os.getpid()
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(store.read, "000.bin")
        wait_until(lambda: gets(server) == 1, "the request has come")
        os.kill(client, signal.SIGKILL)
        assert bytes(read.result(30)) == OBJECTS["000.bin"]
    assert gets(server) == 2
    with pytest.raises(LimitError):
        store.read("001.bin")


def test_dataset_that_opens_two_stores_has_one_limit(server: FaultServer) -> None:
    both = with_budget({**server.options, "max_gets": 3})
    first, second = open_store("s3://bucket", **both), open_store("s3://bucket", **both)
    first.read("000.bin"), second.read("001.bin"), first.read("002.bin")
    with pytest.raises(LimitError):
        second.read("003.bin")
