"""A cache with `remote=` under kill -9: of its trainer, or of the processes that pull and push for it.

Each round begins with an empty node and half of the data published. A training there is killed at random
moments. The training after it must see every sample once and right, and clean up.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import xxhash

import fastload
from fastload import Cache, DataLoader, open_store
from fastload.cache.exchange import pull, push
from fastload.cache.packs import Pack, tail_size
from fastload.store import Store
from tests.bucketdata import Bucket
from tests.cachedata import payload_of
from tests.faultserver import Fault, FaultServer
from tests.patience import PATIENCE, wait_until
from tests.smallpacks import SmallPacks

pytestmark = pytest.mark.usefixtures("no_leaks", "no_aws_settings")

COUNT = 40
EPOCHS = 2
_MARK = "FASTLOAD_TEST_TRAINER"  # in the environment of the processes that a trainer starts


class SlowServer(FaultServer):
    """Its answers take a random time, so that a kill meets requests on their way."""

    def _next_fault(self, key: str) -> Fault:
        return Fault(delay=random.uniform(0, 0.03))


class Place:
    """A server with data, and the URL of a round for packs.

    Attributes:
        content: the digests of all samples.
    """

    def __init__(self, data: str, packs: str, options: dict[str, str], content: list[bytes]) -> None:
        self.data, self.packs, self.options = data, packs, options
        self.content = Counter(hashlib.sha256(body).hexdigest() for body in content)

    def store(self) -> Store:
        return open_store(self.packs, **self.options)


@pytest.fixture
def slow_server() -> Iterator[FaultServer]:
    with SlowServer({f"data/{i:02}.bin": payload_of(f"{i}", 3000 + 50 * i) for i in range(COUNT)}) as server:
        yield server


def train(place: Place, path: Path, said: Path, num_workers: int) -> None:
    """A training script: for each epoch, a line with the digests of its samples."""
    os.environ[_MARK] = str(path)
    with said.open("a", buffering=1) as file:
        file.write("began\n")
        cache = SmallPacks(path, "raw", remote=place.store(), push=True)
        dataset = fastload.ObjectDataset(place.data, cache=cache, storage_options=place.options)
        loader = DataLoader(dataset, 4, shuffle=True, collate_fn=list, num_workers=num_workers)
        for _ in range(EPOCHS):
            samples = [hashlib.sha256(sample).hexdigest() for batch in loader for sample in batch]
            file.write(json.dumps(samples) + "\n")


class Trainer:
    """A process that trains. `began` when it did is known."""

    def __init__(self, place: Place, path: Path, said: Path, num_workers: int) -> None:
        said.unlink(missing_ok=True)
        self._path, self._said = path, said
        context = multiprocessing.get_context("forkserver")
        self.process: BaseProcess = context.Process(target=train, args=(place, path, said, num_workers))
        self.process.start()
        wait_until(lambda: said.exists() and said.stat().st_size, "the trainer began")
        self.began = time.monotonic()

    def background(self) -> list[psutil.Process]:
        """The processes that pull and push for it."""
        return [one for one in self.users() if any("cache.remote import" in word for word in _command(one))]

    def users(self) -> list[psutil.Process]:
        """The processes that it has started, or that have files of its cache open."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                files = [file.path for file in process.open_files()]
                if process.environ().get(_MARK) == str(self._path) or any(
                    file.startswith(f"{self._path}/") for file in files
                ):
                    found.append(process)
        return found

    def end(self) -> int | None:
        """Its exit code. All that it started must end after it, at the lowest priority."""
        self.process.join(PATIENCE)
        code = self.process.exitcode
        self.process.close()
        wait_until(lambda: not self.users(), "nothing outlives its trainer")
        return code

    def epochs(self) -> list[Counter[str]]:
        """The samples of each whole epoch."""
        text = self._said.read_text()
        return [Counter(json.loads(line)) for line in text[: text.rfind("\n")].split("\n")[1:]]


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def publish_half(place: Place, path: Path) -> None:
    """A first node has read half of the objects, and published them."""
    with contextlib.closing(SmallPacks(path, "raw")) as cache:
        dataset = fastload.ObjectDataset(place.data, cache=cache, storage_options=place.options)
        for index in range(0, COUNT, 2):
            dataset[index]
        assert cache.flush(PATIENCE)
        dataset.close()
        push(cache, place.store())


def check_packs(place: Place) -> int:
    """The number of packs, all of which must be whole, with payloads that are samples."""
    store = place.store()
    infos = [info for page in store.list() for info in page]
    for info in infos:
        body = bytes(store.read(info.key, info.version, info.size))
        for record in Pack(info.key, info.version, info.size, body[-tail_size(info.key) :]):
            payload = body[record.offset : record.offset + record.length]
            assert xxhash.xxh3_64_intdigest(payload) == record.checksum
            assert hashlib.sha256(payload).hexdigest() in place.content
    return len(infos)


def kill_and_train_again(
    place: Place, path: Path, draw: random.Random, victim: str, num_workers: int
) -> None:
    """One round."""
    publish_half(place, path / "first")
    second, said = path / "second", path / "said"
    span = 4.0 if num_workers else 2.0  # of an undisturbed training
    for _ in range(draw.choice([1, 1, 2])):
        trainer = Trainer(place, second, said, num_workers)
        time.sleep(draw.uniform(0, span))  # a random moment, not a state to wait for
        if victim == "trainer":
            trainer.process.kill()
            assert trainer.end() in (0, -signal.SIGKILL)
        else:
            running = wait_until(lambda: trainer.background() or not trainer.process.is_alive(), "one runs")  # noqa: B023
            for process in running if isinstance(running, list) else []:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            assert trainer.end() == 0, "the training goes on"
            assert trainer.epochs() == [place.content] * EPOCHS
        assert all(epoch == place.content for epoch in trainer.epochs())
    trainer = Trainer(place, second, said, num_workers)
    assert trainer.end() == 0
    assert trainer.epochs() == [place.content] * EPOCHS
    assert check_packs(place) > 0
    assert not list(path.rglob("*.part"))
    with contextlib.closing(Cache(second, "raw")) as cache:
        report = cache.check()
        assert report.ok and report.entries == COUNT and not report.foreign_files, report
    with contextlib.closing(Cache(path / "third", "raw")) as cache:
        assert pull(cache, place.store()).records == COUNT, "all is published"


def kill_for(rounds: int, place: Place, path: Path, seed: int) -> None:
    draw = random.Random(seed)
    url = place.packs
    for number in range(rounds):
        place.packs = f"{url}/{path.name}-{number}"
        victim = ("trainer", "background")[number % 2]
        num_workers = 0 if rounds == 2 else draw.choice([0, 2])
        sys.stdout.write(f"seed {seed}, round {number}: kills the {victim}, {num_workers} workers\n")
        kill_and_train_again(place, path / str(number), draw, victim, num_workers)


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(2, id="short"),
        pytest.param(40, id="long", marks=[pytest.mark.stress, pytest.mark.timeout(1800)]),
    ],
)
def test_killed_training_then_another_sees_every_sample(
    slow_server: FaultServer, tmp_path: Path, rounds: int
) -> None:
    content = list(slow_server.objects.values())
    place = Place("s3://bucket/data", "s3://bucket/packs", slow_server.options, content)
    kill_for(rounds, place, tmp_path, 7 if rounds == 2 else random.randrange(1 << 32))


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_killed_training_over_a_real_s3_server(bucket: Bucket, tmp_path: Path) -> None:
    content = [file.read_bytes() for file in (bucket.root / "photos").rglob("*.jpg")]
    assert len(content) == COUNT
    place = Place("s3://photos", "s3://packs", bucket.options, content)
    kill_for(12, place, tmp_path, random.randrange(1 << 32))
