"""A run sees the bucket as it is; the ranks of a run see the same; whoever wants a kept listing says so."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Subset

from fastload import Cache, DataLoader, File, ImageFolder, ObjectDataset, TableDataset
from fastload.cache import listings
from fastload.checks import parse_duration
from fastload.errors import ArgumentError
from tests.faultserver import LIST, Fault, FaultServer
from tests.patience import PATIENCE, wait_until

IMAGES = {f"cat/{i}.jpg": b"%d" % i for i in range(3)} | {"dog/0.jpg": b"dog"}


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


@pytest.mark.parametrize("kind", [folder, objects])
@pytest.mark.parametrize("change", CHANGES)
def test_the_next_run_sees_a_change(change: Callable[[FaultServer], None], kind: Any, tmp_path: Path) -> None:
    with FaultServer(dict(IMAGES)) as server:
        cached = {"cache": Cache(tmp_path / "cache", "raw")}
        assert seen(kind(server, **cached)) == IMAGES
        change(server)
        assert seen(kind(server, **cached)) == server.objects
        if kind is folder:
            assert kind(server, **cached).classes == sorted({key.split("/")[0] for key in server.objects})


@pytest.mark.parametrize("change", CHANGES)
def test_a_kept_listing_is_used_by_whoever_says_so(
    change: Callable[[FaultServer], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultServer(dict(IMAGES)) as server:
        cached = {"cache": Cache(tmp_path / "cache", "raw")}
        assert seen(folder(server, **cached)) == IMAGES
        change(server)
        lists = server.count(LIST)
        assert seen(folder(server, listing_max_age="12h", **cached)) == IMAGES, "the cache has these bytes"
        assert server.count(LIST) == lists
        later = time.time() + 12 * 3600 + 1
        monkeypatch.setattr(listings.time, "time", lambda: later)
        assert seen(folder(server, listing_max_age="12h", **cached)) == server.objects
        assert server.count(LIST) > lists


def test_a_table_looks_its_objects_up_again(tmp_path: Path) -> None:
    rows = [{"image": key} for key in IMAGES]

    def run(**options: Any) -> list[bytes]:
        table = TableDataset(
            rows,
            File("image", decode=bytes),
            url="s3://bucket",
            cache=tmp_path / "c",
            storage_options=server.options,
            **options,
        )
        with contextlib.closing(table):
            return [bytes(table[i]) for i in range(len(table))]

    with FaultServer(dict(IMAGES)) as server:
        assert run() == list(IMAGES.values())
        replace(server)
        assert run(listing_max_age=3600) == list(IMAGES.values())
        assert run() == list(server.objects.values())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (0, 0),
        (90, 90),
        (0.5, 0.5),
        ("45", 45),
        ("30s", 30),
        ("30m", 1800),
        ("12h", 43200),
        (" 1.5 D ", 129600),
    ],
)
def test_ages(text: Any, seconds: float) -> None:
    assert parse_duration(text, "listing_max_age") == seconds


@pytest.mark.parametrize(
    "wrong", [-1, "", "-1h", "1w", "12 hours", True, None, float("nan"), float("inf"), "1e3"]
)
def test_what_is_no_age(wrong: Any, tmp_path: Path) -> None:
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(ArgumentError, match=r'listing_max_age=.*such as "30m", "12h" or "7d"'):
            ObjectDataset(tmp_path / "data", cache=cache, listing_max_age=wrong)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"listings": [3], "jobs": []}', b'{"listings": [], "jobs": [{}]}', b"\xff"],
)
def test_a_damaged_record_is_listed_again(content: bytes, tmp_path: Path) -> None:
    with FaultServer(dict(IMAGES)) as server:
        for _ in range(2):
            assert len(objects(server, cache=tmp_path / "c", listing_max_age="1d")) == 4
            (record,) = (tmp_path / "c" / "manifests").glob("*.listings")
            record.write_bytes(content)
        assert listings_at(server) == 2


def test_a_few_listings_are_kept(tmp_path: Path) -> None:
    with FaultServer(dict(IMAGES)) as server:
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

RANK = """
import json, os, sys
import fastload
cache, options, store = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
if store:
    import torch
    rank, ranks = int(sys.argv[4]), int(sys.argv[5])
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
sys.stdin.readline()
try:
    dataset = fastload.ObjectDataset("s3://bucket", cache=cache, storage_options=options)
    print(len(dataset), flush=True)
except fastload.errors.StoreError as error:
    print(str(error).replace(chr(10), " "), flush=True)
sys.stdin.readline()
"""


class Started:
    """A rank that has begun."""

    def __init__(
        self,
        server: FaultServer,
        cache: Path,
        rank: int,
        ranks: int,
        store: str = "",
        go: bool = True,
        **env: str,
    ) -> None:
        given = {} if store else {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                RANK,
                str(cache),
                json.dumps(server.options),
                store,
                str(rank),
                str(ranks),
            ],
            env=os.environ | given | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None and self.process.stdin is not None
        self.out, self.input = self.process.stdout, self.process.stdin
        if go:
            self.go()

    def go(self) -> None:
        """Let it open its dataset."""
        self.input.write("\n")
        self.input.flush()

    def end(self) -> None:
        self.process.communicate("\n", timeout=PATIENCE)


@contextlib.contextmanager
def ranks_of(
    server: FaultServer, caches: list[Path], *, store: str = "", **env: str
) -> Iterator[list[Started]]:
    """A rank for each of these caches, all at the same time."""
    ranks = [Started(server, cache, i, len(caches), store, **env) for i, cache in enumerate(caches)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def said(ranks: list[Started]) -> list[str]:
    return [rank.out.readline().strip() for rank in ranks]


@pytest.mark.parametrize("how", ["launcher", "torch"])
def test_the_ranks_of_a_job_share_one_listing_and_the_next_job_lists_again(how: str, tmp_path: Path) -> None:
    with FaultServer(dict(IMAGES)) as server:
        server.script(LIST, Fault(delay=0.3), repeat=True)
        for job in range(2):
            store = f"file://{tmp_path}/store{job}" if how == "torch" else ""
            with ranks_of(server, [tmp_path / "cache"] * 2, store=store) as ranks:
                assert said(ranks) == [str(4 + job)] * 2
            assert listings_at(server) == 1 + job
            add(server)


def test_a_rank_that_comes_late_has_the_listing_of_its_job(tmp_path: Path) -> None:
    with FaultServer(dict(IMAGES)) as server:
        with ranks_of(server, [tmp_path / "cache"]) as alone:
            assert said(alone) == ["4"]
        first = Started(server, tmp_path / "cache", 0, 2)
        assert said([first]) == ["4"]
        add(server)
        other = Started(server, tmp_path / "cache", 0, 1)  # of another job, which lists again
        late = Started(server, tmp_path / "cache", 1, 2)
        assert said([other, late]) == ["5", "4"]
        for rank in (first, other, late):
            rank.end()


def test_a_job_that_is_over_has_no_late_ranks(tmp_path: Path) -> None:
    """One shell starts both jobs, and the first ended before its second rank had listed."""
    with FaultServer(dict(IMAGES)) as server:
        first = Started(server, tmp_path / "cache", 0, 2)
        assert said([first]) == ["4"]
        first.end()
        add(server)
        second = Started(server, tmp_path / "cache", 1, 2)
        assert said([second]) == ["5"]
        second.end()


def test_ranks_that_were_started_again_go_on_with_the_listing(tmp_path: Path) -> None:
    with FaultServer(dict(IMAGES)) as server:
        for restarts in range(2):
            again = {"TORCHELASTIC_RESTART_COUNT": str(restarts), "TORCHELASTIC_RUN_ID": "run"}
            with ranks_of(server, [tmp_path / "cache"] * 2, **again) as ranks:
                assert said(ranks) == ["4", "4"]
            add(server)
        assert listings_at(server) == 1


@pytest.mark.parametrize("changed", [False, True])
def test_nodes_that_list_other_objects_are_an_error(changed: bool, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    with FaultServer(dict(IMAGES)) as server:
        first, second = (
            Started(server, tmp_path / f"node{rank}", rank, 2, store, go=False) for rank in range(2)
        )
        first.go()
        answers = said([first])
        if changed:
            add(server)
        second.go()
        answers += said([second])
        for rank in (first, second):
            rank.end()
    assert answers[0] == "4"
    assert ("another node of this job has listed other objects" in answers[1]) == changed


def test_waiting_for_another_rank_is_shown_and_can_be_interrupted(tmp_path: Path) -> None:
    with FaultServer(dict(IMAGES)) as server:
        server.script(LIST, Fault(delay=60.0), repeat=True)
        first = Started(server, tmp_path / "cache", 0, 2)
        wait_until(lambda: server.count(LIST) == 1, "the first rank lists")
        # It would give up before the second one begins, on a busy machine.
        first.process.send_signal(signal.SIGSTOP)
        script = (
            "import logging, signal; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
            "from fastload.store import listing; listing._QUIET_SECONDS = 0.0\n"
        )
        second = subprocess.Popen(
            [sys.executable, "-c", script + RANK, str(tmp_path / "cache"), json.dumps(server.options), ""],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"RANK": "1", "WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert second.stderr is not None
        line = second.stderr.readline()
        assert line == "listing s3://bucket: waiting for another process, which lists it for this one too\n"
        second.send_signal(signal.SIGINT)
        assert second.communicate(timeout=PATIENCE)[1].rstrip().endswith("KeyboardInterrupt")
        first.process.kill()
        first.process.communicate(timeout=PATIENCE)
        assert server.count(LIST) == 1


# --- A state of another listing -----------------------------------------------------------------------------


def chosen(server: FaultServer, **options: Any) -> Any:
    return objects(server, keys=[f"{i}.jpg" for i in range(6)], **options)


def table(server: FaultServer, **options: Any) -> Any:
    rows = [{"image": f"{i}.jpg"} for i in range(6)]
    return TableDataset(
        rows, File("image", decode=bytes), url="s3://bucket", storage_options=server.options, **options
    )


def half(server: FaultServer, **options: Any) -> Any:
    return Subset(objects(server, **options), range(1, 5))


@pytest.mark.parametrize("kind", [objects, chosen, table, half])
def test_a_resume_is_told_which_objects_were_written_again(kind: Any, tmp_path: Path) -> None:
    with FaultServer({f"{i}.jpg": b"%d" % i for i in range(6)}) as server:

        def loader() -> Any:
            return DataLoader(kind(server, cache=tmp_path / "c"), 2, num_workers=0, collate_fn=list)

        state = loader().state_dict()
        loader().load_state_dict(state)
        server.objects["3.jpg"] = b"new"
        with pytest.warns(UserWarning, match=r"again since \(objects were 1 changed \(first '3.jpg'\)\)"):
            loader().load_state_dict(state)


def test_a_state_says_what_has_changed_since(tmp_path: Path) -> None:
    with FaultServer({f"{i}.jpg": b"%d" % i for i in range(6)}) as server:

        def loader() -> Any:
            return DataLoader(objects(server, cache=tmp_path / "c"), 2, num_workers=0, collate_fn=list)

        batches = iter(ran := loader())
        next(batches)
        state = ran.state_dict()
        loader().load_state_dict(state)  # nothing has changed
        server.objects["3.jpg"] = b"new"
        with pytest.warns(
            UserWarning, match=r"written again since \(objects were 1 changed \(first '3.jpg'\)\)"
        ):
            loader().load_state_dict(state)
        server.objects["7.jpg"] = server.objects["8.jpg"] = b"more"
        told = r"\(objects were 2 added \(first '7.jpg'\), 1 changed \(first '3.jpg'\)\)"
        with pytest.raises(ArgumentError, match="length 6, this loader has 8 " + told):
            loader().load_state_dict(state)
        del server.objects["0.jpg"], server.objects["7.jpg"]
        told = r"\(objects were 1 added \(first '8.jpg'\), 1 removed \(first '0.jpg'\), 1 changed"
        with pytest.raises(ArgumentError, match="other keys.*" + told):
            loader().load_state_dict(state)
