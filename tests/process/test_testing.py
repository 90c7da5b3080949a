"""`fastload.testing` refuses what breaks a promise: a planted fault for each, and what the user is told."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from fastload import testing
from fastload.errors import NotFoundError
from fastload.store import ObjectInfo, Store
from fastload.store.base import check_end, check_key, check_length, check_version
from fastload.testing import (
    DatasetTests,
    IterableDatasetTests,
    SamplerTests,
    StoreTests,
    TransformTests,
    read_tests,
)
from fastload.testing.promises import contents, difference

N = 10
pytest_plugins = "pytester"


def promises_of(cls: type) -> list[str]:
    return [name for name in dir(cls) if name.startswith("test_")]


def refused(cls: Any, test: str, words: str) -> None:
    """The test fails with these words, and says what to do."""
    with pytest.raises((AssertionError, SkipTest), match=words) as caught:
        getattr(cls(), test)()
    assert re.fullmatch(
        r"broken promise: [^\n]+\.\nFound: .+\.\nWhat to do: .+\.", str(caught.value), re.DOTALL
    )


def passes(cls: Any) -> None:
    """Every promise is kept, or not made."""
    for test in promises_of(cls):
        try:
            getattr(cls(), test)()
        except SkipTest:
            continue


# --- datasets


class Good:
    """Samples that draw, with negative indices."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __repr__(self) -> str:  # the same in all processes of the tests, for the names of tests
        return "Good()"

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if not -N <= index < N:
            raise IndexError(index)
        return self.sample(index % N)

    def sample(self, index: int) -> Any:
        return {"number": index, "noise": torch.rand(2), "python": random.random(), "numpy": np.random.rand()}


class Coins(Good):
    """Some fall alike with all the seeds of the tests."""

    def sample(self, index: int) -> Any:
        return index, bool(torch.rand(1) < 0.5)


class Numbers(Good):
    def sample(self, index: int) -> Any:
        return index


class OfFork(DatasetTests):
    start_methods = ("fork",)
    patience = 0.2
    kind: Callable[[], Any]

    def make(self) -> Any:
        return type(self).kind()

    def identify(self, sample: Any) -> Any:
        return sample["number"] if isinstance(sample, dict) else sample


class OwnGenerator(Good):
    """Its generator goes on from sample to sample, and each worker has a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(0)

    def sample(self, index: int) -> Any:
        return index, self.generator.random()


class ByTheProcess(Good):
    def sample(self, index: int) -> Any:
        return index, os.getpid()


class DrawnOnce(Good):
    """The first random numbers are kept."""

    def sample(self, index: int) -> Any:
        self.kept = self.kept or [torch.rand(())]
        return index, self.kept[0]


class OwnSeed(Good):
    def sample(self, index: int) -> Any:
        torch.manual_seed(index)
        return torch.rand(2)


class Endless(Good):
    def __getitem__(self, index: int) -> Any:
        return index % N


class WrongKey(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index >= N:
            raise KeyError(index)
        return index


class AbsoluteIndex(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index >= N:
            raise IndexError(index)
        return abs(index)


class GrowsShorter(Numbers):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.length = N - type(self).made % 2

    def __len__(self) -> int:
        return self.length


class NextForBad(Numbers):
    """In the place of a bad sample it gives the next one."""

    def sample(self, index: int) -> Any:
        return index + (index == 3)


class OtherBatches(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return sorted(indices, reverse=True)


class HoldsLock(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class ConnectsOnUse(Numbers):
    """What it holds from the first sample on cannot be pickled."""

    def sample(self, index: int) -> Any:
        self.kept = [threading.Lock()]
        return index


class ForgetsInPickle(Numbers):
    scale = 1

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2

    def __getstate__(self) -> Any:
        return {"kept": []}

    def sample(self, index: int) -> Any:
        return index * self.scale


class Counts(Numbers):
    """Samples depend on what was read before."""

    def sample(self, index: int) -> Any:
        self.kept.append(index)
        return index, len(self.kept)


_left: list[Any] = []


class LeavesFilesOpen(Numbers):
    def __init__(self) -> None:
        super().__init__()
        _left.append(os.open(os.devnull, os.O_RDONLY))


class LeavesThreads(Numbers):
    def __init__(self) -> None:
        super().__init__()
        event = threading.Event()
        _left.append(event)
        threading.Thread(target=event.wait, daemon=True).start()


_DRAWS = "test_random_numbers_change_with_seed_and_epoch"
_WORKERS = "test_workers_give_the_same_samples"
DATASETS: list[Any] = [
    (
        OwnGenerator,
        "test_same_seed_gives_the_same_samples",
        r"sample 0 at \[1\] is 0\.\d+ at first, and 0\.\d+ in a second loader",
    ),
    (Counts, "test_order_does_not_change_a_sample", r"sample 0 at \[1\] is 1 in order, and 10"),
    (ByTheProcess, _WORKERS, r"with num_workers=0, and \d+ with num_workers=1 \(fork\)"),
    (
        ByTheProcess,
        "test_start_methods_give_the_same_samples",
        r"with num_workers=2 \(fork\)",
        {"start_methods": ("fork", "fork")},
    ),
    (DrawnOnce, _DRAWS, r"sample 0 \(as all others\) is the same in epochs 0 and 1"),
    (OwnSeed, _DRAWS, r"no sample differs between seed=1 and seed=2", {"random": True}),
    (Good, _DRAWS, r"sample 0 at \['noise'\]\[0\] is 0\.\d+ with seed=1", {"random": False}),
    (
        Endless,
        "test_index_past_the_end_raises_index_error",
        r"dataset\[10\] gave a int.\nWhat to do: raise IndexError in __getitem__",
    ),
    (WrongKey, "test_index_past_the_end_raises_index_error", r"raised KeyError: 10"),
    (
        AbsoluteIndex,
        "test_negative_index_counts_from_the_end_or_raises",
        r"the sample of index -1 is 1 , and 9 by index 9",
    ),
    (GrowsShorter, "test_length_is_the_number_of_samples", r"len\(\) is \d+, and \d+ of"),
    (NextForBad, "test_epoch_has_every_sample_once", r"samples 3 and 4 are both 4"),
    (
        OtherBatches,
        "test_loader_gives_the_samples_of_the_dataset",
        r"sample 0 is 0 by dataset\[index\], and 2 by a loader",
    ),
    (HoldsLock, "test_pickled_dataset_gives_the_same_samples", r"before it was read, pickle"),
    (ConnectsOnUse, "test_pickled_dataset_gives_the_same_samples", r"after it was read, pickle"),
    (
        ForgetsInPickle,
        "test_pickled_dataset_gives_the_same_samples",
        r"sample 1 is 2 from the dataset, and 1 from its copy, pickled before it was read",
    ),
    (
        Counts,
        "test_state_resumes_with_the_next_sample",
        r"sample 3 at \[1\] is 4 in the whole run, and 1 resumed after 0 samples, and one batch later again",
    ),
    (LeavesFilesOpen, "test_nothing_is_left_behind", r"later .* descriptors: \('\d+', '/dev/"),
    (LeavesThreads, "test_nothing_is_left_behind", r"0 s later there are more .*threads: \d"),
    (Counts, "test_state_resumes_in_workers", r"resumed after \d samples with num_"),
]


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    for one in _left:
        one.set() if isinstance(one, threading.Event) else os.close(one)
    _left.clear()


class TwoParts(Exception):
    """It cannot be made again from `args`."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")


class Damaged(Numbers):
    def __init__(self, error: Callable[[], Exception], *, once: bool = False) -> None:
        super().__init__()
        self.error, self.once = error, once

    def sample(self, index: int) -> Any:
        if index == 3 and not (self.once and self.kept):
            self.kept.append(index)
            raise self.error()
        return index if not self.kept else index + self.once


def of_damaged(error: Callable[[], Exception], bad: tuple[int, ...] = (3,), **options: Any) -> Any:
    return of_kind(OfFork, Numbers, make_damaged=lambda self: (Damaged(error, **options), bad))


def _value_error() -> Exception:
    return ValueError("damaged")


def _two_parts() -> Exception:
    return TwoParts("3", "damaged")


_BAD = "test_bad_sample_raises_its_error_in_every_process"


def test_bad_samples_that_end_iterations_stop_coming_or_change_their_error_are_refused() -> None:
    passes(of_damaged(_value_error))
    refused(of_damaged(StopIteration), _BAD, "sample 3 raised StopIteration")
    refused(of_damaged(_value_error, once=True), _BAD, r"dataset\[3\] gave a sample")
    refused(of_damaged(_two_parts), _BAD, "sample 3 raised TwoParts in this process, and RuntimeError with")
    on_error = "test_on_error_keeps_all_other_samples"
    refused(of_damaged(_value_error, (3, 5)), on_error, "1 bad samples of 2")


# --- iterable datasets


class Parts(IterableDataset[Any]):
    def __init__(self) -> None:
        self.passes = 0

    def part(self) -> range:
        info = get_worker_info()
        return range(N) if info is None else range(info.id, N, info.num_workers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.part())


class EachHasAll(Parts):
    def part(self) -> range:
        return range(N)


class OnePass(Parts):
    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(self.part() if self.passes == 1 else ())


class WithLength(Parts):
    def __len__(self) -> int:
        return N + 1


class ByChance(Parts):
    def __iter__(self) -> Iterator[Any]:
        return iter(np.random.default_rng().permutation(list(self.part())).tolist())


class OwnNumbers(Parts):
    """Samples draw, so that their keys are compared elsewhere."""

    def __iter__(self) -> Iterator[Any]:
        generator = random.Random()
        for number in super().__iter__():
            yield number, generator.random()


class WrongState(Parts):
    """Its state is one sample behind."""

    def __init__(self) -> None:
        super().__init__()
        self.at = self.first = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        for index in self.part()[first:]:
            self.at = index
            yield index

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.first = state["at"]


class OfIterable(IterableDatasetTests):
    start_methods = ("fork",)
    kind: Callable[[], Any]

    def make(self) -> Any:
        return type(self).kind()

    def identify(self, sample: Any) -> Any:
        return sample[0] if isinstance(sample, tuple) else None


ITERABLE: list[Any] = [
    (
        EachHasAll,
        "test_every_sample_once_for_any_number_of_workers",
        r"the sample 0 came once with num_workers=0, and twice with num_workers=2 \(fork\)",
    ),
    (OnePass, "test_next_epoch_gives_all_samples_again", r"once in the first epoch, and not at all in the"),
    (WithLength, "test_length_if_any_is_the_number_of_samples", r"len\(\) is 11, there are 10"),
    (ByChance, "test_same_seed_gives_the_same_samples", r"sample \d is \d at first with num_workers=0"),
    (OwnNumbers, "test_same_seed_gives_the_same_samples", r"sample 0 at \[1\] is 0\.\d+ at first with"),
    (WrongState, "test_state_resumes_with_the_next_sample", r"sample 4 is 4 in the whole run, and 3 resumed"),
]


# --- samplers


class Order:
    """Right: the order is a function of the epoch."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.epoch = rank, ranks, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return torch.randperm(N, generator=generator).tolist()

    def __len__(self) -> int:
        return len(range(self.rank, N, self.ranks))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order()[self.rank :: self.ranks])


class EveryRankAll(Order):
    def __iter__(self) -> Iterator[Any]:
        return iter(self.order())


class RanksDiffer(Order):
    def order(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.epoch + self.rank)
        return torch.randperm(N, generator=generator).tolist()


class Tensors(Order):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.tensor(self.order())[self.rank :: self.ranks])


class TooLong(Order):
    def __len__(self) -> int:
        return N


class GoesOn(Order):
    """What was left is the next epoch."""

    rest: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        first = next(self.rest, None)
        if first is None:
            self.rest = iter(self.order()[self.rank :: self.ranks])
            first = next(self.rest)
        return itertools.chain([first], self.rest)


class NoSeed(Order):
    def order(self) -> list[int]:
        return np.random.default_rng().permutation(N).tolist()


class ForgetsEpoch(Order):
    def set_epoch(self, epoch: int) -> None:
        pass


class History(Order):
    """The order goes on from that of the epoch before."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.generator = torch.Generator().manual_seed(0)

    def order(self) -> list[int]:
        return torch.randperm(N, generator=self.generator).tolist()


class AheadState(Order):
    """Its state is one index ahead."""

    start = at = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for number, index in enumerate(self.order()[start:], start + 1):
            self.at = number
            yield index

    def state_dict(self) -> Any:
        return {"at": self.at + 1}

    def load_state_dict(self, state: Any) -> None:
        self.start = state["at"]


class ForgetsRanks(Order):
    """Its state is an index of this rank, and is taken for one of all."""

    start = at = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.start = self.start, 0
        for place in range(self.rank + self.at, N, self.ranks):
            self.at += 1
            yield self.order()[place]
        self.at = 0

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.start = self.at = state["at"]


class OfSampler(SamplerTests):
    length = N
    kind: Callable[[int, int], Any]

    def make(self, rank: int, world_size: int) -> Any:
        return type(self).kind(rank, world_size)


_COVER = "test_every_index_once_over_all_ranks"
SAMPLERS: list[Any] = [
    (EveryRankAll, _COVER, r"index \d came 2 times over 2 ranks"),
    (RanksDiffer, _COVER, r"index \d is missing over 2 ranks, and \d others"),
    (Tensors, "test_indices_are_those_of_the_dataset", r"number 0 of rank 0 of 1 is tensor\(\d\)"),
    (TooLong, "test_length_is_what_an_epoch_gives", r"len\(\) of rank 0 of 2 is 10, and an epoch has 5"),
    (GoesOn, "test_epoch_left_early_does_not_shorten_the_next", r"rank 0 of 3 had 2 in place of 4"),
    (NoSeed, "test_same_seed_and_epoch_give_the_same_order", r"in epoch 0 of rank 0 of 1 index number \d is"),
    (ForgetsEpoch, "test_next_epoch_has_another_order", r"epochs 0 and 1 both begin with \d, \d, \d"),
    (History, "test_set_epoch_gives_the_order_of_that_epoch", r"by set_epoch\(1\) after epoch 3"),
    (AheadState, "test_state_resumes_with_the_next_index", r"resumed after 0 indices, and one batch later"),
    (ForgetsRanks, "test_state_resumes_with_the_next_index", r"rank 0 of 3 resumed after 0 indices, and one"),
]


# --- transforms


def noise(image: Any) -> Any:
    return torch.from_numpy(np.array(image)).float() + torch.rand(())


def coin(image: Any) -> Any:
    """Falls alike with seeds 1 and 2."""
    return torch.rand(1) < 0.5


def hidden_coin(image: Any) -> Any:
    torch.rand(1)
    return image.size


class OwnNoise:
    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __call__(self, image: Any) -> Any:
        return image.size, self.generator.random()


class OneBuffer:
    def __init__(self) -> None:
        self.buffer = torch.zeros(1)

    def __call__(self, image: Any) -> Any:
        return self.buffer.fill_(image.size[0])


def paints(image: Any) -> Any:
    image.putpixel((0, 0), (0, 0, 0))
    return image.size


class Remembers:
    last = 0

    def __call__(self, image: Any) -> Any:
        self.last += 1
        return self.last


class OfTransform(TransformTests):
    start_methods = ("fork",)
    kind: Any

    def make(self) -> Any:
        return type(self).kind()


TRANSFORMS: list[Any] = [
    (OwnNoise, "test_same_seed_gives_the_same_results", r"the result of input 0 at \[1\]"),
    (Remembers, "test_order_does_not_change_a_result", r"input 0 is 1 in order, and 3 in the"),
    (lambda: lambda image: os.getpid(), "test_workers_give_the_same_results", r"\(fork\)"),
    (lambda: lambda image: 1, "test_pickled_transform_gives_the_same_results", r"pickle raised"),
    (
        lambda: noise,
        "test_another_seed_gives_other_random_numbers",
        "results differ with seeds 1 and 2",
        {"random": False},
    ),
    (
        lambda: hidden_coin,
        "test_another_seed_gives_other_random_numbers",
        "a generator has moved on",
        {"random": False},
    ),
    (
        lambda: np.asarray,
        "test_another_seed_gives_other_random_numbers",
        "all results are the same with seed 1 and with 32 others",
        {"random": True},
    ),
    (lambda: paints, "test_input_stays_as_it_is", r"input 0 at \[0, 0, 0\] is \d+ before, and 0"),
    (OneBuffer, "test_result_stays_as_it_is", r"result 0 at \[0\] is 48\.0 at first, and 64"),
    (
        lambda: noise,
        "test_result_is_as_declared",
        r"result 0 is float32 \(32, 48, 3\)",
        {"out": ("uint8", (None, None, 3))},
    ),
]


# --- stores


class InMemory(Store):
    """Right: objects of a dict, whose versions count."""

    native = False
    objects: dict[str, tuple[int, bytes]] = {}  # noqa: RUF012 - it stands for the place
    prefix = ""

    def __init__(self) -> None:
        super().__init__("dict://", "dict")

    def __reduce__(self) -> Any:
        return type(self), ()

    def _list(self) -> Iterator[Any]:
        yield [self._head(key) for key in self.objects]

    def _head(self, key: str) -> ObjectInfo:
        check_key(key, why="a path")
        if key not in self.objects:
            raise NotFoundError("no such object", key=key)
        version, body = self.objects[key]
        return ObjectInfo(key, len(body), f"v{version}")

    def _read(self, key: str, version: str | None, size: int | None) -> Any:
        check_version(key, self._head(key).version, version)
        check_length(key, self.objects[key][1], size)
        return self.objects[key][1]

    def _read_range(self, key: str, start: int, stop: int, version: str | None) -> Any:
        body = self._read(key, version, None)
        check_end(key, stop, len(body))
        return body[start:stop]

    def _write(self, key: str, body: Any) -> None:
        body = body.read_bytes() if isinstance(body, Path) else bytes(body)
        self.objects[key] = (self.objects.get(key, (0, b""))[0] + 1, body)


class ListsTwice(InMemory):
    def _list(self) -> Iterator[Any]:
        yield from itertools.chain(super()._list(), super()._list())


class ListsOtherVersions(InMemory):
    def _list(self) -> Iterator[Any]:
        yield [self._head(key)._replace(version="") for key in self.objects]


class Cuts(InMemory):
    def _read(self, key: str, version: str | None, size: int | None) -> Any:
        return super()._read(key, version, size)[:100]


class LastByteToo(InMemory):
    def _read_range(self, key: str, start: int, stop: int, version: str | None) -> Any:
        super()._read_range(key, start, stop, version)
        return self._read(key, version, None)[start : stop + 1]


class OneBody(InMemory):
    """Threads see each other's answers."""

    def _read(self, key: str, version: str | None, size: int | None) -> Any:
        with barrier:
            asked.append(key)
            return super()._read(asked[0], None, None) if len(asked) > 1 else super()._read(key, None, size)


barrier, asked = threading.Lock(), list[str]()


class Locked(InMemory):
    def __reduce__(self) -> Any:
        return type(self), (threading.Lock(),)


class RaisesFileNotFound(InMemory):
    def _head(self, key: str) -> ObjectInfo:
        if key not in self.objects:
            raise FileNotFoundError(key)
        return super()._head(key)


class NoEnd(InMemory):
    def _read_range(self, key: str, start: int, stop: int, version: str | None) -> Any:
        return self._read(key, version, None)[start:stop]


class NoVersions(InMemory):
    def _read(self, key: str, version: str | None, size: int | None) -> Any:
        return super()._read(key, None, size)


class NoSizes(InMemory):
    def _read(self, key: str, version: str | None, size: int | None) -> Any:
        return super()._read(key, version, None)


class Normalizes(InMemory):
    def _head(self, key: str) -> ObjectInfo:
        return super()._head(os.path.normpath("/" + key)[1:])

    def _read(self, key: str, version: str | None, size: int | None) -> Any:
        return super()._read(os.path.normpath("/" + key)[1:], version, size)


class WritesParts(InMemory):
    def _write(self, key: str, body: Any) -> None:
        super()._write(key, body)
        super()._write(f"{key}.part", b"")


class OfStore(StoreTests):
    kind: Callable[[], Any]

    def make(self) -> Any:
        return type(self).kind()

    def put(self, key: str, body: bytes) -> None:
        InMemory()._write(key, body)


STORES: list[Any] = [
    (ListsTwice, "test_listing_has_every_object_once", r"'a\.bin' came twice"),
    (ListsOtherVersions, "test_head_is_what_the_listing_has", r"version='v1'\) by head\(\), .*version=''"),
    (Cuts, "test_read_gives_the_object", r"read\(key\) of 'a\.bin' gave 100 bytes of 500"),
    (LastByteToo, "test_range_gives_those_bytes", r"read_range\(key, \d+, \d+\) of 'a\.bin' gave"),
    (OneBody, "test_threads_may_share_a_store", r"read\(key\) by 8 threads of .* gave"),
    (Locked, "test_pickled_store_reads_the_same", r"before it was used, pickle raised TypeError"),
    (
        RaisesFileNotFound,
        "test_absent_object_is_not_found",
        r"raises NotFoundError.\nFound: it raised FileNot",
    ),
    (NoEnd, "test_range_past_the_end_is_an_error", r"read_range\(0, \d+\) of \d+ bytes raises StoreError"),
    (NoSizes, "test_short_body_is_an_error", r"where \d+ were promised raises ShortReadError or"),
    (NoVersions, "test_object_that_changed_is_refused", r"the version before a change raises ObjectChanged"),
    (Normalizes, "test_key_leads_nowhere_else", r"read\('\.\./a\.bin'\) raises StoreError"),
    (WritesParts, "test_written_object_is_read_back", r"the listing has \['written/x', 'written/x\.part'\]"),
]


@pytest.fixture
def _empty_store() -> Iterator[None]:
    yield
    InMemory.objects.clear()
    asked.clear()


# --- the whole

TABLES: list[tuple[type, type, list[Any]]] = [
    (DatasetTests, OfFork, DATASETS),
    (IterableDatasetTests, OfIterable, ITERABLE),
    (SamplerTests, OfSampler, SAMPLERS),
    (TransformTests, OfTransform, TRANSFORMS),
    (StoreTests, OfStore, STORES),
]
FAULTS = [
    pytest.param(of, kind, test, words, dict(*more), id=f"{tests.__name__}-{test}")
    for tests, of, rows in TABLES
    for kind, test, words, *more in rows
]


def of_kind(of: type, kind: Any, **attributes: Any) -> Any:
    return type("OfIt", (of,), {"kind": staticmethod(kind), **attributes})


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.usefixtures("_empty_store")
@pytest.mark.parametrize(("of", "kind", "test", "words", "attributes"), FAULTS)
def test_fault_is_refused(of: type, kind: Any, test: str, words: str, attributes: Any) -> None:
    refused(of_kind(of, kind, **attributes), test, words)


@pytest.mark.usefixtures("_empty_store")
def test_process_whose_name_is_no_text_is_found_too() -> None:
    """The kernel cuts a name after 15 bytes, in the middle of a letter too."""
    before = read_tests.held()
    name = "ctypes.CDLL(None).prctl(15, b'\\xd0', 0, 0, 0)"
    script = f"import ctypes, sys; {name}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert read_tests.held()["processes"] - before["processes"] == {process.pid}
        process.communicate()


def test_what_has_no_fault_passes() -> None:
    passes(of_kind(OfFork, Good, random=True))
    passes(of_kind(OfFork, Coins))
    passes(of_kind(OfTransform, lambda: coin, random=True))
    for of, kind in ((OfIterable, Parts), (OfSampler, Order), (OfStore, InMemory)):
        passes(of_kind(of, kind))


@pytest.mark.parametrize(("tests", "of", "rows"), TABLES, ids=[row[0].__name__ for row in TABLES])
def test_every_promise_is_broken_by_one_above(tests: type, of: type, rows: list[Any]) -> None:
    own = vars(tests) if tests is IterableDatasetTests else dir(tests)
    promised = {name for name in own if name.startswith("test_")}
    if tests is DatasetTests:  # see test_bad_samples_...
        promised = {name for name in promised if "bad_sample" not in name and "on_error" not in name}
    assert promised <= {row[1] for row in rows}


def test_pytest_collects_the_promises_of_a_subclass_and_shows_what_is_broken(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        "from fastload.testing import SamplerTests\n"
        "class TestMine(SamplerTests):\n"
        "    length = 6\n"
        "    shuffles = False\n"
        "    world_sizes = (1,)\n"
        "    test_length_is_what_an_epoch_gives = None\n"
        "    def make(self, rank, world_size):\n"
        "        return [0, 1, 2, 3, 4]\n"
    )
    shown = str(pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider").stdout)
    assert "1 failed, 4 passed, 2 skipped" in shown
    assert "broken promise: in an epoch all ranks together give every index once." in shown
    assert "Found: index 5 is missing over 1 rank, and 0 others." in shown
    assert "shuffles is False" in shown


def test_pytest_is_not_imported() -> None:
    for path in Path(testing.__file__).parent.glob("*.py"):
        assert "import pytest" not in path.read_text(), path


def test_public_names_are_documented_classes() -> None:
    assert testing.__all__ == sorted(testing.__all__)
    for name in testing.__all__:
        assert getattr(testing, name).__doc__


def test_class_without_make_says_what_it_lacks() -> None:
    for name in testing.__all__:
        cls = type("TestIt", (getattr(testing, name),), {"length": 3})
        with pytest.raises(NotImplementedError, match=r"TestIt lacks make\(self"):
            getattr(cls(), promises_of(cls)[-1])()


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (float("nan"), float("nan"), None),
        ({"a": torch.zeros(2, 3)}, {"a": torch.zeros(2, 3)}, None),
        ({"a": torch.zeros(2, 3)}, {"a": torch.eye(2, 3)}, "['a'][0, 0] 0.0 1.0"),
        (
            torch.zeros(2),
            torch.zeros(2).double(),
            " float32 tensor of shape (2,) float64 tensor of shape (2,)",
        ),
        (
            torch.zeros((), dtype=torch.bfloat16),
            torch.ones((), dtype=torch.bfloat16),
            " b'\\x00\\x00' b'\\x80?'",
        ),
        ([1, 2], (1, 2), " list of 2 tuple of 2"),
        ({"a": 1}, {"b": 1}, "['a'] 1 missing"),
        (1, True, " int 1 bool True"),
        (slice(1), slice(1), None),
        (Good(), Good(), None),
    ],
    ids=str,
)
def test_first_difference_of_two_samples(one: Any, other: Any, words: str | None) -> None:
    found = difference(contents(one), contents(other))
    assert (None if found is None else " ".join(found)) == words
