"""A run sees the bucket as it is; the ranks of a run see the same; whoever wants a kept listing says so."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import Subset

from fastload import Cache, DataLoader, File, ImageFolder, ObjectDataset, ParquetDataset, TableDataset
from fastload.cache import listings
from fastload.cache.listings import parse_duration
from fastload.distributed import launcher
from fastload.errors import ArgumentError, StoreError
from tests.cachedata import no_room
from tests.faultserver import LIST, Fault, FaultServer
from tests.patience import PATIENCE, wait_until
from tests.sharddata import shards
from tests.shortform import stress

OBJECTS = {f"cat/{i}.jpg": b"%d" % i for i in range(3)} | {"dog/0.jpg": b"dog"}


def listings_at(server: FaultServer) -> float:
    """How often the bucket was listed: by a first page of one object, and all of them."""
    return server.count(LIST) / 2


# --- What one run sees --------------------------------------------------------------------------------------


def folder(server: FaultServer, **options: Any) -> Any:
    return ImageFolder("s3://bucket", storage_options=server.options, **options)


def objects(server: FaultServer, **options: Any) -> Any:
    return ObjectDataset("s3://bucket", storage_options=server.options, **options)


def replace(server: FaultServer) -> None:
    server.objects["cat/1.jpg"] = b"new"


def add(server: FaultServer) -> None:
    server.objects["cat/9.jpg"] = b"nine"


def delete(server: FaultServer) -> None:
    del server.objects["cat/0.jpg"]


def add_class(server: FaultServer) -> None:
    server.objects["fox/0.jpg"] = b"fox"


CHANGES = [replace, add, delete, add_class]


def seen(dataset: Any) -> dict[str, bytes]:
    with contextlib.closing(dataset):
        return {dataset.key(i): bytes(dataset._payload(i)) for i in range(len(dataset))}


@pytest.mark.parametrize("kind", [ObjectDataset, ParquetDataset])
def test_opening_obeys_max_requests(kind: Any, server: FaultServer) -> None:
    server.objects = shards("parquet")
    for key in server.objects:
        server.script(key, Fault(delay=0.02), repeat=True)
    keys = {"keys": list(server.objects)} if kind is ObjectDataset else {}
    options = {**server.options, "max_requests": 2}
    with contextlib.closing(kind("s3://bucket", storage_options=options, **keys)):
        assert server.most_at_once == 2


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(*((folder, change) for change in CHANGES), (objects, replace)),
        *stress(*((objects, change) for change in CHANGES[1:])),
    ],
)
def test_the_next_run_sees_a_change(
    change: Callable[[FaultServer], None], kind: Any, tmp_path: Path, server: FaultServer
) -> None:
    cached = {"cache": Cache(tmp_path / "cache", "raw")}
    assert seen(kind(server, **cached)) == OBJECTS
    change(server)
    assert seen(kind(server, **cached)) == server.objects
    if kind is folder:
        assert kind(server, **cached).classes == sorted({key.split("/")[0] for key in server.objects})


@pytest.mark.parametrize("change", CHANGES)
def test_a_kept_listing_is_used_by_whoever_says_so(
    change: Callable[[FaultServer], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: FaultServer,
) -> None:
    cached = {"cache": Cache(tmp_path / "cache", "raw")}
    assert seen(folder(server, **cached)) == OBJECTS
    change(server)
    lists = server.count(LIST)
    assert seen(folder(server, listing_max_age="12h", **cached)) == OBJECTS, "the cache has these bytes"
    assert server.count(LIST) == lists
    later = time.time() + 12 * 3600 + 1
    monkeypatch.setattr(listings.time, "time", lambda: later)
    assert seen(folder(server, listing_max_age="12h", **cached)) == server.objects
    assert server.count(LIST) > lists


def test_a_table_looks_its_objects_up_again(tmp_path: Path, server: FaultServer) -> None:
    rows = [{"image": key} for key in OBJECTS]

    def run(**options: Any) -> list[bytes]:
        options |= {"url": "s3://bucket", "cache": tmp_path / "c", "storage_options": server.options}
        table = TableDataset(rows, File("image", decode=bytes), **options)
        with contextlib.closing(table):
            return [bytes(table[i]) for i in range(len(table))]

    assert run() == list(OBJECTS.values())
    replace(server)
    assert run(listing_max_age=3600) == list(OBJECTS.values())
    assert run() == list(server.objects.values())


def test_ages(tmp_path: Path) -> None:
    ages = {0: 0, 90: 90, 0.5: 0.5, "45": 45, "30s": 30, "30m": 1800, "12h": 43200, " 1.5 D ": 129600}
    assert {text: parse_duration(text, "listing_max_age") for text in ages} == ages
    for wrong in (-1, "", "-1h", "1w", "12 hours", True, None, float("nan"), float("inf"), "1e3"):
        for cache in (None, tmp_path / "cache"):
            with pytest.raises(ArgumentError, match=r'listing_max_age=.*such as "30m", "12h" or "7d"'):
                ObjectDataset(tmp_path / "data", cache=cache, listing_max_age=wrong)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"listings": [3], "jobs": []}', b'{"listings": [], "jobs": [{}]}', b"\xff"],
)
def test_a_damaged_record_is_listed_again(content: bytes, tmp_path: Path, server: FaultServer) -> None:
    for _ in range(2):
        assert len(objects(server, cache=tmp_path / "c", listing_max_age="1d")) == 4
        (record,) = (tmp_path / "c" / "manifests").glob("*.listings")
        record.write_bytes(content)
    assert listings_at(server) == 2


def test_a_record_whose_lock_stays_taken_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped while it wrote the record held up all others for ever."""
    monkeypatch.setattr(listings, "_CHANGING_SECONDS", 0.2)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.bin").write_bytes(b"1")

    def opened() -> int:
        return len(ObjectDataset(tmp_path / "data", cache=Cache(tmp_path / "cache"), listing_max_age="1h"))

    assert opened() == 1
    (path,) = tmp_path.glob("cache/**/listings.lock")
    with path.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert opened() == 1


def test_a_few_listings_are_kept(tmp_path: Path, server: FaultServer) -> None:
    for number in range(7):
        server.objects["cat/0.jpg"] = b"%d" % number
        objects(server, cache=tmp_path / "c")
    kept = tmp_path / "c" / "manifests"
    assert len([*kept.glob("*.manifest")]) == 4
    objects(server, cache=tmp_path / "c")
    assert len([*kept.glob("*.manifest")]) == 4, "the same again is no further one"
    assert seen(objects(server, cache=tmp_path / "c")) == server.objects
    cache = Cache(tmp_path / "c")
    assert cache.check().ok
    cache.clear()
    assert [*kept.iterdir()] == []


# --- The ranks of a job -------------------------------------------------------------------------------------


class Rank:
    """A rank of a job, forked from this process; `go` lets it open its dataset."""

    def __init__(
        self, server: FaultServer, cache: Path, rank: int, ranks: int, store: str = "", **env: str
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        environment = env if store else {"RANK": str(rank), "WORLD_SIZE": str(ranks), **env}
        group = {"init_method": store, "rank": rank, "world_size": ranks} if store else None
        self.process = context.Process(target=_rank, args=(theirs, server.options, cache, environment, group))
        self.process.start()
        theirs.close()

    def go(self) -> Rank:
        self.pipe.send("go")
        return self

    def said(self) -> Any:
        """A line of its log, the number of objects, or an error."""
        assert self.pipe.poll(PATIENCE)
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.send("end")
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0
        self.process.close()
        self.pipe.close()


def _rank(
    pipe: Connection, options: dict[str, str], cache: Path, environment: dict[str, str], group: Any
) -> None:
    os.environ.update(environment)
    launcher._forked = False  # this is no worker of a rank
    if group:
        dist.init_process_group("gloo", **group)
    if "TELLS_ITS_LOG" in environment:
        logging.getLogger("fastload").setLevel(logging.INFO)
        logging.getLogger("fastload").addHandler(handler := logging.Handler())
        handler.emit = lambda record: pipe.send(record.getMessage())  # type: ignore[method-assign]
    pipe.recv()
    try:
        pipe.send(len(ObjectDataset("s3://bucket", cache=cache, storage_options=options)))
    except StoreError as error:
        pipe.send(str(error))
    except KeyboardInterrupt:
        pipe.send("interrupted")
    pipe.recv()
    os._exit(0)


def run_job(server: FaultServer, cache: Path, count: int, *, store: str = "", **env: str) -> list[Any]:
    """What the ranks of a job say, which all begin at the same time."""
    ranks = [Rank(server, cache, rank, count, store, **env).go() for rank in range(count)]
    found = [rank.said() for rank in ranks]
    for rank in ranks:
        rank.end()
    return found


@pytest.mark.parametrize("how", ["launcher", "torch"])
def test_the_ranks_of_a_job_share_one_listing_and_the_next_job_lists_again(
    how: str, tmp_path: Path, server: FaultServer
) -> None:
    server.script(LIST, Fault(delay=0.3), repeat=True)
    for job in range(2):
        store = f"file://{tmp_path}/store{job}" if how == "torch" else ""
        assert run_job(server, tmp_path / "cache", 2, store=store) == [4 + job] * 2
        assert listings_at(server) == 1 + job
        add(server)


def test_a_rank_that_comes_late_has_the_listing_of_its_job(tmp_path: Path, server: FaultServer) -> None:
    cache = tmp_path / "cache"
    assert run_job(server, cache, 1) == [4]
    first = Rank(server, cache, 0, 2).go()
    assert first.said() == 4
    add(server)
    other, late = Rank(server, cache, 0, 1).go(), Rank(server, cache, 1, 2).go()
    assert (other.said(), late.said()) == (5, 4), "the other is of another job, which lists again"
    for rank in (first, other, late):
        rank.end()


def test_a_job_that_is_over_has_no_late_ranks(tmp_path: Path, server: FaultServer) -> None:
    """One shell starts both jobs, and the first ended before its second rank had listed."""
    for number, count in ((0, 4), (1, 5)):
        rank = Rank(server, tmp_path / "cache", number, 2).go()
        assert rank.said() == count
        rank.end()
        add(server)


def test_ranks_that_were_started_again_go_on_with_the_listing(tmp_path: Path, server: FaultServer) -> None:
    for restarts in range(2):
        again = {"TORCHELASTIC_RESTART_COUNT": str(restarts), "TORCHELASTIC_RUN_ID": "run"}
        assert run_job(server, tmp_path / "cache", 2, **again) == [4, 4]
        add(server)
    assert listings_at(server) == 1


def test_ranks_share_a_listing_that_they_cannot_note_as_theirs(
    tmp_path: Path, server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, or can only be read."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert len(objects(server, cache=tmp_path / "c")) == 4
    monkeypatch.setattr(listings, "save_kept", no_room(errno.ENOSPC))
    monkeypatch.setenv("RANK", "1")
    with pytest.warns(UserWarning, match="the listing cannot be kept in .*No space left"):
        assert len(objects(server, cache=tmp_path / "c")) == 4
    assert listings_at(server) == 1


@pytest.mark.parametrize("changed", [False, True])
def test_nodes_that_list_other_objects_are_an_error(
    changed: bool, tmp_path: Path, server: FaultServer
) -> None:
    store = f"file://{tmp_path}/store"
    first, second = (Rank(server, tmp_path / f"node{rank}", rank, 2, store) for rank in range(2))
    assert first.go().said() == 4
    if changed:
        add(server)
    told = second.go().said()
    assert ("another node of this job has listed other objects" in str(told)) == changed
    for rank in (first, second):
        rank.end()


def test_waiting_for_another_rank_is_shown_and_can_be_interrupted(
    tmp_path: Path, server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script(LIST, Fault(delay=60.0), repeat=True)
    first = Rank(server, tmp_path / "cache", 0, 2).go().process
    wait_until(lambda: server.count(LIST) == 1, "the first rank lists")
    assert first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)  # it would give up before the second one begins, on a busy machine
    monkeypatch.setattr("fastload.store.listing._QUIET_SECONDS", 0.0)
    second = Rank(server, tmp_path / "cache", 1, 2, TELLS_ITS_LOG="").go()
    line = "listing s3://bucket: waiting for another process, which lists it for this one too"
    assert second.said() == line
    os.kill(second.process.pid, signal.SIGINT)  # type: ignore[arg-type]
    assert second.said() == "interrupted"
    second.end()
    first.kill()
    first.join(PATIENCE)
    assert server.count(LIST) == 1


# --- A state of another listing -----------------------------------------------------------------------------


PARTS = [f"{i}.jpg" for i in range(6)]


def chosen(server: FaultServer, **options: Any) -> Any:
    return objects(server, keys=PARTS, **options)


def table(server: FaultServer, **options: Any) -> Any:
    rows = [{"image": key} for key in PARTS]
    options |= {"url": "s3://bucket", "storage_options": server.options}
    return TableDataset(rows, File("image", decode=bytes), **options)


def half(server: FaultServer, **options: Any) -> Any:
    return Subset(objects(server, **options), range(1, 5))


@pytest.mark.parametrize("kind", [objects, chosen, table, half])
def test_a_resume_is_told_which_objects_were_written_again(
    kind: Any, tmp_path: Path, server: FaultServer
) -> None:
    server.objects = {key: key.encode() for key in PARTS}

    def loader() -> Any:
        return DataLoader(kind(server, cache=tmp_path / "c"), 2, num_workers=0, collate_fn=list)

    state = loader().state_dict()
    loader().load_state_dict(state)  # nothing has changed
    server.objects["3.jpg"] = b"new"
    with pytest.warns(UserWarning, match=r"again since \(objects were 1 changed \(first '3.jpg'\)\)"):
        loader().load_state_dict(state)
    if kind is not objects:
        return
    server.objects["7.jpg"] = server.objects["8.jpg"] = b"more"
    told = r"\(objects were 2 added \(first '7.jpg'\), 1 changed \(first '3.jpg'\)\)"
    with pytest.raises(ArgumentError, match="length 6, this loader has 8 " + told):
        loader().load_state_dict(state)
    del server.objects["0.jpg"], server.objects["7.jpg"]
    told = r"\(objects were 1 added \(first '8.jpg'\), 1 removed \(first '0.jpg'\), 1 changed"
    with pytest.raises(ArgumentError, match="other keys.*" + told):
        loader().load_state_dict(state)
