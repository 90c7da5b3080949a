"""`Cache(memory=...)`: the same samples, from memory that all processes share and that leaves nothing."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastload import Cache, DataLoader, ImageFolder, RandomResizedCrop, cached
from fastload.cache.memory import IN_MEMORY, Memory
from fastload.errors import ArgumentError
from tests.loaderdata import Numbers
from tests.patience import PATIENCE, wait_until
from tests.photos import pillow_jpeg, scene

pytestmark = pytest.mark.usefixtures("no_leaks")

N = 12
KEY, OTHER = b"k" * 16, b"o" * 16


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos" / "a"
    folder.mkdir(parents=True)
    for i in range(N):
        (folder / f"{i}.jpg").write_bytes(pillow_jpeg(scene(90, 70, i)))
    return folder.parent


@pytest.fixture
def memory() -> Any:
    made = Memory(1 << 20)
    made.attach(None)
    yield made
    made.detach()
    made._held()  # pytest keeps the values of fixtures longer than `no_leaks` likes


def samples(dataset: Any, **options: Any) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The images of two epochs, and what the second one counted."""
    loader = DataLoader(dataset, 4, seed=1, **options)
    first = torch.cat([images for images, _ in loader])
    before = loader.stats()["counters"]
    second = torch.cat([images for images, _ in loader])
    after = loader.stats()["counters"]
    dataset.close()
    return [first, second], {name: value - before.get(name, 0) for name, value in after.items()}


# --- the same samples


@pytest.mark.parametrize("mode", ["raw", "shrunk", "decoded"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_same_samples(photos: Path, tmp_path: Path, mode: Any, num_workers: int) -> None:
    def folder(where: str, **options: Any) -> ImageFolder:
        cache = Cache(tmp_path / where, mode, short_side=40, **options)
        return ImageFolder(str(photos), RandomResizedCrop(16), cache=cache)

    expected, counters = samples(folder("disk"), num_workers=num_workers)
    assert "cache.memory_hits" not in counters
    found, counters = samples(folder("both", memory="4MB"), num_workers=num_workers)
    assert counters["cache.memory_hits"] == counters["cache.hits"] == N
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_that_inherit_nothing(photos: Path, tmp_path: Path, method: str) -> None:
    cache = Cache(tmp_path / "cache", "decoded", short_side=40, memory=4_000_000)
    dataset = ImageFolder(str(photos), RandomResizedCrop(16), cache=cache)
    _, counters = samples(dataset, num_workers=1, multiprocessing_context=method)
    assert counters["cache.memory_hits"] == N


def test_what_the_directory_has_is_kept_in_memory_when_read(tmp_path: Path) -> None:
    with_disk = Cache(tmp_path / "cache")
    with_disk.write(with_disk.key("a"), b"payload")
    with_disk.close()
    cache = Cache(tmp_path / "cache", memory="1MB")
    for _ in range(3):
        assert cache.read(cache.key("a")) == b"payload"
    assert cache.counters["cache.memory_hits"] == 2
    cache.close()


def test_users_cannot_write_into_the_memory(tmp_path: Path) -> None:
    dataset = cached(Numbers(4, lambda i: torch.full((100,), i)), Cache(tmp_path / "cache", memory="1MB"))
    for _ in range(3):
        for i in range(4):
            sample = dataset[i]
            assert torch.equal(sample, torch.full((100,), i))
            sample += 1
    assert dataset.counters["cache.memory_hits"] == 8
    view = dataset.cache.read(dataset.cache.key("cached", dataset.fingerprint, "0"))
    assert view is not None and view.readonly
    del view
    dataset.close_cache()


# --- the tier itself


def test_closing_while_a_thread_fills_touches_no_other_file(memory: Memory, tmp_path: Path) -> None:
    """The descriptor outlives `detach` for as long as a thread is about to write to it."""
    mapped = memory._mapped
    assert mapped is not None
    memory.detach()
    with (tmp_path / "other").open("w+b") as other:  # would get the number, were it free
        assert other.fileno() != mapped.fd
        assert mapped.keep(KEY, memoryview(b"x" * 100))
        assert other.read() == b""
    del mapped


def test_reads_are_not_copies(memory: Memory) -> None:
    memory.keep(KEY, memoryview(b"x" * 1000))
    entry = memory.find(KEY)
    assert entry is not None and entry.segment == IN_MEMORY and memory.find(OTHER) is None
    one, two = memory.read(entry), memory.read(entry)
    assert one == b"x" * 1000
    assert np.frombuffer(one, np.uint8).ctypes.data == np.frombuffer(two, np.uint8).ctypes.data


def test_the_budget_is_kept_and_the_rest_passes_through(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", memory=200_000)
    keys = [cache.key(str(i)) for i in range(40)]
    for i, key in enumerate(keys):
        cache.write(key, bytes([i]) * 10_000)
    cache.flush()
    assert [cache.read(key) == bytes([i]) * 10_000 for i, key in enumerate(keys)] == [True] * 40
    assert 15 <= cache.counters["cache.memory_hits"] <= 20
    assert cache.memory is not None and os.fstat(cache.memory._mapped.fd).st_blocks * 512 <= 200_000 + 4096
    cache.close()


def test_a_row_that_is_being_written_is_none(memory: Memory) -> None:
    """Its checksum comes last; without that check a reader would take the bytes of nobody."""
    memory.keep(KEY, memoryview(b"x" * 100))
    place = next(memory._mapped.places(KEY))
    row = os.pread(memory._mapped.fd, 40, place)
    for torn in (row[:32] + bytes(8), row[:24] + bytes(16), row[:16] + struct.pack("<Q", 1 << 40) + row[24:]):
        os.pwrite(memory._mapped.fd, torn, place)
        assert memory.find(KEY) is None
    os.pwrite(memory._mapped.fd, row, place)
    assert memory.find(KEY) is not None


def test_rows_that_share_a_place_are_told_apart(memory: Memory) -> None:
    keys = [b"\0" * 8 + bytes([i]) * 8 for i in range(1, 100)]
    kept = [memory.keep(key, memoryview(key)) for key in keys]
    assert kept == [True] * 64 + [False] * 35
    for key in keys[:64]:
        entry = memory.find(key)
        assert entry is not None and memory.read(entry) == key


def test_threads_and_processes_fill_at_once(memory: Memory) -> None:
    """Each payload names its key; every row leads to the payload of its key, and to nobody else's."""
    keys = [bytes([i]) * 16 for i in range(200)]

    def fill() -> None:
        mine = Memory.__new__(Memory)
        mine.__setstate__(memory.__getstate__())
        mine.attach(None)
        for key in keys:
            mine.keep(key, memoryview(key * 30))
        mine.detach()

    processes = [multiprocessing.get_context("fork").Process(target=fill) for _ in range(3)]
    for process in processes:
        process.start()
    threads = [threading.Thread(target=fill) for _ in range(2)]
    for thread in threads:
        thread.start()
    for worker in [*processes, *threads]:
        worker.join(PATIENCE)
    found = [memory.find(key) for key in keys]
    assert sum(entry is not None for entry in found) == 200
    for key, entry in zip(keys, found, strict=True):
        assert entry is not None and memory.read(entry) == key * 30


def test_nobody_waits_for_a_process_that_stopped_with_the_lock(memory: Memory) -> None:
    holder = os.open(f"/proc/self/fd/{memory._mapped.fd}", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    assert memory.keep(KEY, memoryview(b"x")) is False
    os.close(holder)
    assert memory.keep(KEY, memoryview(b"x")) is True


def test_an_entry_of_another_file_is_a_miss(tmp_path: Path) -> None:
    """As when the directory's memory is gone and another one has taken its place."""
    cache = Cache(tmp_path / "cache", memory="1MB")
    key = cache.key("a")
    cache.write(key, b"payload")
    entry = cache.lookup(key)
    assert entry is not None and entry.segment == IN_MEMORY
    assert cache.read(key, entry._replace(checksum=entry.checksum + 1)) is None
    assert cache.read(key, entry) == b"payload"
    cache.close()
    assert cache.read(key, entry) == b"payload"  # opened again, the same file
    cache.close()


@pytest.mark.parametrize("wrong", ["lots", 0, -1, 1.5, "10000000TB"])
def test_arguments(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="memory="):
        Cache(tmp_path, memory=wrong)


# --- the node

OTHER_RANK = """
import sys
from fastload import Cache
cache = Cache(sys.argv[1], memory="1MB")
key = cache.key("a")
print(cache.read(key) == b"payload", cache.counters["cache.memory_hits"], flush=True)
cache.write(cache.key("b"), b"from the other")
if len(sys.argv) > 2:
    input()
"""


def other_rank(path: Path) -> str:
    return subprocess.check_output([sys.executable, "-c", OTHER_RANK, str(path)], text=True, timeout=PATIENCE)


def test_ranks_of_a_node_share_it(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", memory="1MB")
    cache.write(cache.key("a"), b"payload")
    assert other_rank(tmp_path / "cache").split() == ["True", "1"]
    assert cache.read(cache.key("b")) == b"from the other"
    assert cache.counters["cache.memory_hits"] == 1
    assert cache.check().foreign_files == []
    cache.close()


def test_the_note_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", memory="1MB")
    cache.write(cache.key("a"), b"payload")
    cache.close()
    note = tmp_path / "cache" / "v1" / "memory"
    pid, fd, name = note.read_text().split()
    other = f"fastload-{'0' * 32}"
    for stale in (f"{2**22 + 1} {fd} {name}", f"{pid} {fd} {other}", f"{pid} 0 {name}", "nonsense"):
        note.write_text(stale)
        assert other_rank(tmp_path / "cache").split() == ["True", "0"]  # from the directory
        assert note.read_text() != stale


CLEARS = """
import sys
from fastload import Cache
cache = Cache(sys.argv[1], memory="1MB" if sys.argv[2] == "sharing" else None)
print(cache.read(cache.key("0")) is not None, cache.clear() > 0, cache.read(cache.key("0")))
cache.close()
"""


@pytest.mark.parametrize("who", ["itself", "sharing", "without memory"])
def test_clear_forgets_what_is_in_memory(tmp_path: Path, who: str) -> None:
    """Also where another process holds the memory; what users have of it stays as it is."""
    cache = Cache(tmp_path / "cache", memory="1MB")
    held = {}
    for i in range(100):
        cache.write(cache.key(str(i)), b"%d" % i * 100)
        held[i] = cache.read(cache.key(str(i)))
    assert cache.flush() and cache.counters["cache.memory_hits"] == 100
    if who == "itself":
        assert cache.clear() > 0
    else:
        done = subprocess.run(
            [sys.executable, "-c", CLEARS, str(tmp_path / "cache"), who],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.stdout.split() == ["True", "True", "None"], done.stderr
    assert all(cache.lookup(cache.key(str(i))) is None for i in range(100))
    assert cache.read(cache.key("0")) is None
    assert all(bytes(view) == b"%d" % i * 100 for i, view in held.items() if view is not None)
    cache.write(cache.key("0"), b"new")
    assert bytes(cache.read(cache.key("0")) or b"") == b"new", "and it goes on"
    assert cache.counters["cache.memory_hits"] == 101
    assert bytes(held[0] or b"") == b"0" * 100
    cache.close()
    cache.clear()


def test_clear_where_there_is_only_memory(memory: Memory) -> None:
    memory.keep(KEY, memoryview(b"payload"))
    assert memory.find(KEY) is not None
    memory.clear()
    assert memory.find(KEY) is None and memory.keep(OTHER, memoryview(b"other"))
    assert memory.find(OTHER) is not None


KILLED = """
import sys
from fastload import Cache, DataLoader, cached
from tests.loaderdata import Numbers
if __name__ == "__main__":
    loader = DataLoader(cached(Numbers(64), Cache(sys.argv[1], memory="1MB")), 4, num_workers=2)
    while True:
        for batch in loader:
            print(flush=True)
"""


def test_nothing_is_left_after_kill_9(tmp_path: Path) -> None:
    script = textwrap.dedent(KILLED)
    before = set(Path("/dev/shm").glob("fastload*"))
    command = [sys.executable, "-c", script, str(tmp_path / "cache")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, start_new_session=True, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    for _ in range(40):  # into the second epoch
        process.stdout.readline()
    name = (tmp_path / "cache" / "v1" / "memory").read_text().split()[2]
    assert holders(name)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_until(lambda: not holders(name), "nobody holds the memory")
    assert set(Path("/dev/shm").glob("fastload*")) <= before
    cache = Cache(tmp_path / "cache", memory="1MB")
    assert cache.check().ok
    cache.close()


def holders(name: str) -> list[str]:
    """Who has the memory file open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            for fd in (process / "fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    if name in str(fd.readlink()):
                        found.append(str(fd))
    return found
