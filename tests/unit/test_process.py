"""`ProcessLocal`: a value for each process, whatever it was forked from."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

from fastload.store.node import ProcessLocal
from tests.cachedata import in_child


def test_the_value_is_made_once_at_first_use() -> None:
    local = ProcessLocal(object)
    assert local.peek() is None and not local.inherited
    assert local.get() is local.get() is local.peek()


def test_none_is_a_value() -> None:
    made: list[None] = []
    local = ProcessLocal(lambda: made.append(None))
    local.get()
    local.get()
    assert len(made) == 1


def test_a_set_value_replaces_the_made_one_and_a_dropped_one_is_made_again() -> None:
    local = ProcessLocal(list)
    local.get()
    local.set([1])
    assert local.get() == [1] and local.drop() == [1] and local.drop() is None
    assert local.peek() is None and local.get() == []


def test_threads_get_the_same_value() -> None:
    barrier, made = threading.Barrier(8), []

    def make() -> object:
        made.append(threading.get_ident())
        return object()

    def get(_: int) -> object:
        barrier.wait()
        return local.get()

    local = ProcessLocal(make)
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(get, range(8)))) == len(made) == 1


def test_a_forked_child_makes_its_own_and_leaves_its_parents_alone() -> None:
    local = ProcessLocal(os.getpid)
    assert local.get() == os.getpid()

    def child() -> bool:
        fresh = local.inherited and local.peek() is None
        return fresh and local.get() == os.getpid() and not local.inherited and in_child(grandchild)

    def grandchild() -> bool:
        return local.inherited and local.get() == os.getpid()

    assert in_child(child)
    assert local.get() == os.getpid() and not local.inherited


def test_an_inherited_value_is_never_destroyed_in_the_child() -> None:
    """The destructor of a client would talk to threads that the child lacks."""

    class Client:
        def __del__(self) -> None:
            os._exit(3)

    local = ProcessLocal(Client)
    local.get()

    def child() -> bool:
        local.set(None)  # type: ignore[arg-type]
        gc.collect()
        return True

    try:
        assert in_child(child)
    finally:
        Client.__del__ = lambda self: None  # type: ignore[method-assign]


def test_a_lock_that_a_thread_held_at_the_fork_does_not_stop_the_child() -> None:
    entered, leave = threading.Event(), threading.Event()

    def make() -> int:
        if os.getpid() == parent:
            entered.set()
            leave.wait(60)
        return 1

    parent, local = os.getpid(), ProcessLocal(make)
    thread = threading.Thread(target=local.get)
    thread.start()
    entered.wait(60)
    try:
        assert in_child(lambda: local.get() == 1)
    finally:
        leave.set()
        thread.join()


def test_a_copy_and_a_pickle_have_no_value() -> None:
    local = ProcessLocal(list)
    local.get().append(1)
    assert pickle.loads(pickle.dumps(local)).get() == [] and local.get() == [1]
