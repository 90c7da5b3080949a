"""One body over torch's DataLoader and ours: the same batches, errors, warnings and random draws."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import inspect
import itertools
import multiprocessing
import os
import pickle
import random
import re
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, Subset, default_collate

import fastload
from tests.loaderdata import (
    At,
    Bulk,
    Numbers,
    Point,
    Record,
    RecordingSampler,
    Stream,
    Subclass,
    identity,
    randomness,
)
from tests.shortform import short_form

Body = Callable[[Any], Any]
WORKERS = [0, 2]


def _name(value: object) -> str:
    """Of a case: the same in every process, as addresses are not."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def same(body: Body) -> Any:
    """Run `body` with both classes; check that it returned, raised and warned the same; return what."""
    theirs, ours = outcome(body, torch.utils.data.DataLoader), outcome(body, fastload.DataLoader)
    assert_equal(ours, theirs)
    return ours[0]


def outcome(body: Body, loader_class: Any) -> tuple[Any, list[str]]:
    torch.manual_seed(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = body(loader_class)
        except Exception as error:
            value = told(error)
            if loader_class is torch.utils.data.DataLoader:
                # Else torch's handler may raise for them, in whatever runs when they die.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for worker in multiprocessing.active_children():
                    worker.terminate()  # torch's iterator often waits 10 s for them when an error ends it
    gc.collect()
    texts = [f"{w.category.__name__}: {_without_addresses(str(w.message))}" for w in caught]
    return value, [text for text in texts if "Triggered internally" not in text]  # those come once a process


def told(error: Exception) -> tuple[type[Exception], str]:
    """Type and text, without what may differ: the frames of a worker's traceback, and the sample's number."""
    text, _, traceback = str(error).partition("Original Traceback")
    last = re.sub(r"\(sample .*\)$", "", traceback.strip()).strip().rpartition("\n")[2]
    return type(error), _without_addresses(text + last)


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x...", text)


def assert_equal(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.layout) == (theirs.dtype, theirs.shape, theirs.layout)
        assert (ours.requires_grad, ours.is_leaf) == (theirs.requires_grad, theirs.is_leaf)
        assert (ours._base is None) == (theirs._base is None)
        a, b = ours.detach(), theirs.detach()
        assert torch.equal(a.to_dense(), b.to_dense())
    elif isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype and ours.flags.writeable == theirs.flags.writeable
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(ours, Mapping):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_equal(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_equal(a, b)
    elif dataclasses.is_dataclass(ours):
        assert_equal(vars(ours), vars(theirs))
    else:
        assert ours == theirs


# --- the constructor ---------------------------------------------------------------------------------------


def test_signature() -> None:
    theirs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    ours = inspect.signature(fastload.DataLoader.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(ours)[len(theirs) :])


def test_is_a_generic_subclass() -> None:
    class Mine(fastload.DataLoader[int]):
        pass

    assert issubclass(Mine, torch.utils.data.DataLoader)
    assert list(Mine(Numbers(2), batch_size=None)) == [0, 1]


def test_positional_arguments() -> None:
    numbers, generator = Numbers(7), torch.Generator()

    def body(Loader: Any) -> Any:
        loader = Loader(
            numbers, 2, False, None, None, 1, identity, False, True, 0, None, "fork", generator.manual_seed(3)
        )
        context = loader.multiprocessing_context.get_start_method()
        return list(loader), loader.drop_last, loader.generator is generator, loader.num_workers, context

    assert same(body)[0] == [[0, 1], [2, 3], [4, 5]]


REFUSED: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"timeout": -1},
    {"prefetch_factor": 2},
    {"num_workers": 1, "prefetch_factor": -1},
    {"persistent_workers": True},
    {"sampler": [1], "shuffle": True},
    {"batch_sampler": [[1]], "batch_size": 2},
    {"batch_sampler": [[1]], "shuffle": True},
    {"batch_sampler": [[1]], "sampler": [1]},
    {"batch_sampler": [[1]], "drop_last": True},
    {"batch_size": None, "drop_last": True},
    {"batch_size": 0},
    {"batch_size": -3},
    {"batch_size": 2.5},
    {"batch_size": True},
    {"multiprocessing_context": "fork"},
    {"num_workers": 1, "multiprocessing_context": "thread"},
    {"num_workers": 1, "multiprocessing_context": 5},
    {"shuffle": "yes", "sampler": [0]},
]


@pytest.mark.parametrize("arguments", REFUSED, ids=_name)
def test_refused_arguments(arguments: dict[str, Any]) -> None:
    raised = same(lambda Loader: Loader(Numbers(4), **arguments))
    assert isinstance(raised, tuple) and issubclass(raised[0], Exception)


@pytest.mark.parametrize(
    "arguments",
    [{"shuffle": True}, {"sampler": [0]}, {"batch_sampler": [[0]]}, {"batch_size": None, "drop_last": True}],
    ids=_name,
)
def test_refused_for_an_iterable_dataset(arguments: dict[str, Any]) -> None:
    same(lambda Loader: Loader(Stream([1]), **arguments))


def test_refused_at_iteration() -> None:
    same(lambda Loader: list(Loader(Numbers(4), timeout=3)))
    same(lambda Loader: len(Loader(Stream([1]))))
    same(lambda Loader: list(Loader(Numbers(0), shuffle=True)))
    with pytest.raises(AssertionError, match=r"^prefetch_factor must be greater than 0 for Multi"):
        iter(fastload.DataLoader(Numbers(4), num_workers=1, prefetch_factor=0))  # torch's says no more


def test_error_of_a_property_is_its_own() -> None:
    def body(Loader: Any) -> Any:
        class Named(Loader):  # type: ignore[misc]
            @property
            def names(self) -> Any:
                return self.dataset.clases

        return Named(Numbers(2)).names

    assert "'clases'" in same(body)[1]
    raised = same(lambda Loader: Loader(Numbers(2)).clases)
    assert raised == (AttributeError, "'DataLoader' object has no attribute 'clases'")


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_attributes_that_must_not_be_set_again(name: str) -> None:
    raised = same(lambda Loader: setattr(Loader(Numbers(4)), name, 1))
    assert raised[0] is ValueError


def test_attributes_that_may_be_set_again() -> None:
    def body(Loader: Any) -> Any:
        loader = Loader(Numbers(6), batch_size=2)
        loader.num_workers, loader.prefetch_factor = 2, 2
        loader.collate_fn = identity
        return list(loader)

    assert same(body) == [[0, 1], [2, 3], [4, 5]]


def test_what_frameworks_look_at() -> None:
    def body(Loader: Any) -> Any:
        batched = Loader(Numbers(6), batch_size=2, num_workers=2, persistent_workers=True)
        single = Loader(Numbers(6), batch_size=None)
        iterator = iter(batched)
        assert batched._index_sampler is batched.batch_sampler and single._index_sampler is single.sampler
        assert batched._iterator is iterator and iter(iterator) is iterator
        alive = [process.is_alive() and process.daemon and process.pid > 0 for process in iterator._workers]
        with pytest.raises(NotImplementedError):
            pickle.dumps(iterator)
        return (
            (batched._auto_collation, single._auto_collation, batched.multiprocessing_context),
            (alive, len(iterator), len(batched), iterator._num_workers, iterator._persistent_workers),
            isinstance(iterator, torch.utils.data.dataloader._BaseDataLoaderIter),
        )

    same(body)


def test_pickled_and_copied_loaders() -> None:
    def body(Loader: Any) -> Any:
        loader = Loader(Numbers(6), batch_size=2, num_workers=1)
        return list(pickle.loads(pickle.dumps(loader))), list(copy.copy(loader)), list(copy.deepcopy(loader))

    same(body)


# --- batches -----------------------------------------------------------------------------------------------

COLLATED: dict[str, Callable[[int], Any]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "complex number": lambda i: complex(i, 1),
    "str": str,
    "bytes": lambda i: b"%d" % i,
    "None": lambda i: None,
    "0-dim": lambda i: torch.tensor(i),
    "tensor": lambda i: torch.full((2, 3), i),
    "large tensor": lambda i: torch.full((3, 64, 64), i, dtype=torch.float32),
    "bool tensor": lambda i: torch.tensor([i > 2, True]),
    "bfloat16": lambda i: torch.full((3,), i, dtype=torch.bfloat16),
    "half": lambda i: torch.full((3,), i, dtype=torch.float16),
    "float8": lambda i: torch.full((3,), i).to(torch.float8_e4m3fn),
    "complex": lambda i: torch.full((3,), i + 2j),
    "uint16": lambda i: torch.full((3,), i, dtype=torch.uint16),
    "empty": lambda i: torch.empty(0, 3),
    "transposed": lambda i: torch.full((2, 3), i).t(),
    "expanded": lambda i: torch.tensor([i]).expand(5),
    "ragged": lambda i: torch.zeros(i + 1),
    "two dtypes": lambda i: torch.zeros(2, dtype=torch.float32 if i % 2 == 0 else torch.int64),
    "tensor or number": lambda i: torch.zeros(()) if i % 2 == 0 else 1.0,
    "requires grad": lambda i: torch.zeros(2, requires_grad=True),
    "sparse": lambda i: torch.eye(3).to_sparse(),
    "subclass": lambda i: torch.zeros(2).as_subclass(Subclass),
    "array": lambda i: np.full((2, 2), i),
    "array uint8": lambda i: np.full((2, 2), i, np.uint8),
    "array of strings": lambda i: np.array(["a"]),
    "array of objects": lambda i: np.array([None]),
    "number": lambda i: np.float32(i),
    "0-dim array": lambda i: np.array(i),
    "tuple": lambda i: (i, str(i), torch.zeros(2)),
    "list": lambda i: [i, [torch.tensor(i)]],
    "dict": lambda i: {"a": i, "b": {"c": torch.zeros(1), "d": "x"}},
    "dict of None": lambda i: {"a": None},
    "named tuple": lambda i: Point(torch.zeros(1), i),
    "dataclass": lambda i: Record("r", torch.zeros(1)),
}


@pytest.mark.parametrize("kind", COLLATED)
def test_default_collate(kind: str) -> None:
    same(lambda Loader: list(Loader(Numbers(6, COLLATED[kind]), batch_size=4)))


def test_default_collate_in_a_worker() -> None:
    batches_in_a_worker(COLLATED, [range(4), range(4, 6)])


def batches_in_a_worker(kinds: dict[str, Callable[[int], Any]], batches: list[range], **options: Any) -> None:
    """Compare these batches of each kind, or their errors; one worker makes them all."""
    sampler = [[(kind, i) for i in batch] for kind in kinds for batch in batches]
    names = [kind for kind in kinds for _ in batches]

    def body(Loader: Any) -> Any:
        dataset = Numbers(len(sampler), lambda index: kinds[index[0]](index[1]))  # type: ignore[index]
        found = given_or_told(Loader(dataset, batch_sampler=sampler, num_workers=1, **options))
        return list(zip(names, found, strict=True))

    same(body)


def given_or_told(loader: Any) -> list[Any]:
    """The batches of an epoch, or what their errors say."""
    iterator, found = iter(loader), []
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as caught:
            found.append(told(caught))


def _twice(i: int) -> Any:
    tensor = torch.full((4000,), i)
    return {"a": tensor, "b": [tensor, tensor], "c": Point(tensor, None)}


AS_IT_IS: dict[str, Callable[[int], Any]] = {
    "None": lambda i: None,
    "str": lambda i: "ä" * i,
    "bytes": lambda i: bytes(100_000),
    "set": lambda i: {i, "x"},
    "named tuple": lambda i: Point(i, torch.zeros(5000)),
    "dataclass": lambda i: Record("r", torch.arange(5000), {"n": None}),
    "nested": lambda i: {"a": [{"b": (torch.arange(i), [])}], 3: frozenset({1})},
    "torch types": lambda i: (torch.float32, torch.Size([1, i]), torch.device("cpu")),
    "sparse": lambda i: torch.eye(100).to_sparse(),
    "csr": lambda i: torch.eye(100).to_sparse_csr(),
    "requires grad": lambda i: torch.zeros(5000, requires_grad=True),
    "parameter": lambda i: torch.nn.Parameter(torch.zeros(5000)),
    "buffer": lambda i: torch.nn.Buffer(torch.zeros(5)),
    "subclass": lambda i: torch.arange(5000).as_subclass(Subclass),
    "channels last": lambda i: torch.randn(2, 3, 40, 40).to(memory_format=torch.channels_last),
    "expanded": lambda i: torch.arange(5000).expand(3, 5000),
    "gaps": lambda i: torch.arange(20_000)[:: i + 1],
    "overlapping": lambda i: torch.arange(9.0).as_strided((2, 2, 2), (1, 1, 5)),
    "offset": lambda i: torch.arange(10_000)[5000:],
    "bool": lambda i: torch.arange(5000) > i,
    "bfloat16": lambda i: torch.arange(5000).to(torch.bfloat16),
    "complex128": lambda i: torch.arange(3000).to(torch.complex128),
    "0-dim": lambda i: torch.tensor(i),
    "empty": lambda i: (torch.empty(0), torch.empty(0), torch.empty(3, 0, dtype=torch.int8)),
    "twice": _twice,
    "array": lambda i: np.arange(5000),
    "read-only arrays": lambda i: [_read_only(np.arange(n)) for n in (3, 5000)],
    "0-dim array": lambda i: np.array(1.5),
    "array with gaps": lambda i: np.arange(5000)[::3],
    "fortran array": lambda i: np.asfortranarray(np.arange(6000).reshape(60, 100)),
    "array of objects": lambda i: np.array([None, {"a": 1}], dtype=object),
    "record array": lambda i: np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
    "dates": lambda i: np.array(["2024-01-01"], dtype="datetime64[D]"),
    "many": lambda i: [torch.full((40_000,), n) for n in range(40)],
}


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def test_any_structure() -> None:
    batches_in_a_worker(AS_IT_IS, [range(2), range(2, 3)], collate_fn=identity)


def test_what_was_one_object_stays_one() -> None:
    loader = fastload.DataLoader(Numbers(1, _twice), batch_size=None, num_workers=1, collate_fn=identity)
    (batch,) = loader
    assert batch["a"] is batch["b"][0] is batch["b"][1] is batch["c"].x
    empty = Numbers(1, AS_IT_IS["empty"])
    ((first, second, _),) = fastload.DataLoader(empty, batch_size=None, num_workers=1, collate_fn=identity)
    assert first is not second


def test_strides_travel() -> None:
    for kind in ("channels last", "expanded"):
        for Loader in (torch.utils.data.DataLoader, fastload.DataLoader):
            (batch,) = Loader(Numbers(1, AS_IT_IS[kind]), batch_size=None, num_workers=1, collate_fn=identity)
            assert batch.stride() == AS_IT_IS[kind](0).stride()


def _collate_and_more(samples: list[Any]) -> Any:
    batch = default_collate(samples)
    return {"whole": batch, "part": batch[:, 1:], "sum": batch.sum(0), "also": default_collate([1, 2])}


@pytest.mark.parametrize("size", [4, 5000])
def test_default_collate_inside_collate_fn(size: int) -> None:
    dataset = Numbers(5, lambda i: torch.arange(size) + i)
    same(lambda Loader: list(Loader(dataset, batch_size=2, num_workers=2, collate_fn=_collate_and_more)))


def _stacked_in_shared_memory(_: int) -> bool:
    return default_collate([torch.ones(8)] * 2).is_shared()


def test_default_collate_inside_a_dataset_is_torchs() -> None:
    """In the memory of the batch, its tensors would not be free before the batch is sent."""
    dataset = Numbers(4, _stacked_in_shared_memory)
    assert same(lambda Loader: list(Loader(dataset, None, num_workers=1))) == [True] * 4


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [
        pytest.param(Numbers(10), 0, id="items-0"),
        pytest.param(Bulk(10), 0, id="getitems-0"),
        pytest.param(Numbers(10), 2, id="items-2", marks=pytest.mark.stress),
        pytest.param(Bulk(10), 2, id="getitems-2"),
    ],
)
@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 3},
        {"batch_size": 3, "drop_last": True},
        {"batch_size": None},
        {"batch_size": 3, "shuffle": True},
        {"sampler": [5, 0, 5], "batch_size": 2},
        {"batch_sampler": BatchSampler(SequentialSampler(range(10)), 4, False)},
        {"batch_sampler": [[1, 2], (3,), range(2), torch.tensor([4, 5])]},
        {"batch_size": None, "sampler": [[1, 2], [3]], "collate_fn": identity},
        {"sampler": torch.tensor([3, 1, 2]), "batch_size": 2},
    ],
    ids=_name,
)
def test_samplers(dataset: Any, arguments: dict[str, Any], workers: int) -> None:
    if arguments.get("sampler") == [[1, 2], [3]] and type(dataset) is Numbers:
        dataset = Numbers(10, identity)

    def body(Loader: Any) -> Any:
        loader = Loader(dataset, num_workers=workers, **arguments)
        return list(loader), workers or list(loader), len(loader)

    same(body)


@pytest.mark.parametrize("wrap", [lambda part: part, lambda part: fastload.map(part, torch.neg)])
@pytest.mark.parametrize("workers", WORKERS)
def test_subset_takes_a_list_as_one_index(wrap: Any, workers: int) -> None:
    dataset = wrap(Subset(Numbers(10, torch.as_tensor), [9, 7, 5, 3, 1]))  # type: ignore[arg-type]

    def body(Loader: Any) -> Any:
        return list(Loader(dataset, batch_size=None, sampler=[[0, 1], [4, 2, -1]], num_workers=workers))

    assert len(same(body)) == 2


class Refills:
    """A batch sampler that fills the same buffer for each batch; without one, it gives iterators."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        for first in range(0, 12, 4):
            if self.buffer is None:
                yield iter(range(first, first + 4))
                continue
            for row in range(4):
                self.buffer[row] = first + row
            yield self.buffer


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("buffer", [[0] * 4, np.zeros(4, int), torch.zeros(4).long(), None], ids=type)
def test_batch_sampler_that_fills_one_buffer(buffer: Any, workers: int, tmp_path: Path) -> None:
    """Batches of a dataset that reads ahead are drawn ahead."""
    for number in range(12):
        (tmp_path / f"{number:02}").write_text(str(number))
    with contextlib.closing(fastload.ObjectDataset(str(tmp_path), decode=int)) as objects:
        for dataset in (objects, Numbers(12)):
            loader = fastload.DataLoader(dataset, batch_sampler=Refills(buffer), num_workers=workers)
            iterator = iter(loader)
            assert next(iterator).tolist() == [0, 1, 2, 3]
            state = loader.state_dict()
            rest = [batch.tolist() for batch in iterator]
            assert rest == [[4, 5, 6, 7], [8, 9, 10, 11]]
            loader.load_state_dict(state)
            assert [batch.tolist() for batch in loader] == rest


class Buckets(list[list[int]]):
    """Batches of several sizes."""

    batch_size = (2, 1)


def test_batch_sampler_with_a_batch_size_that_is_no_number(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}").write_text(str(number))
    with contextlib.closing(fastload.ObjectDataset(str(tmp_path), decode=int)) as objects:
        loader = fastload.DataLoader(objects, batch_sampler=Buckets([[0, 1], [2]]))
        assert [batch.tolist() for batch in loader] == [[0, 1], [2]]
        assert loader.state_dict()["batch_size"] is None


LENGTHS = [5, 5], [0, 4], [7, 2], [0, 0]
WAYS: list[dict[str, Any]] = [{"batch_size": 2}, {"batch_size": None}, {"batch_size": 3, "drop_last": True}]
IN_WORKERS = (0, 0), (1, 1), (2, 0), (2, 2), (3, 1)  # those of the short form


@pytest.mark.parametrize(
    ("lengths", "arguments", "workers"),
    short_form(
        itertools.product(LENGTHS, WAYS, WORKERS),
        lambda lengths, way, workers: not workers or (LENGTHS.index(lengths), WAYS.index(way)) in IN_WORKERS,
    ),
    ids=_name,
)
def test_iterable_datasets(lengths: list[int], arguments: dict[str, Any], workers: int) -> None:
    same(lambda Loader: list(Loader(Stream(lengths), num_workers=workers, **arguments)))


class Restarting(IterableDataset[int]):
    """Is its own iterator, which goes on where it was, and begins anew when it is asked after its end."""

    drawn = 0

    def __init__(self, end: int) -> None:
        self.end = end

    def __iter__(self) -> Restarting:
        return self

    def __next__(self) -> int:
        time.sleep(0.005)  # a worker has not made all that it was given when the first batch is here
        if self.drawn == self.end:
            self.drawn = 0
            raise StopIteration
        self.drawn += 1
        return self.drawn - 1


def test_iterator_is_not_asked_again_after_its_end() -> None:
    def body(Loader: Any) -> Any:
        loader = Loader(Restarting(4), batch_size=None, num_workers=1, persistent_workers=True)
        return [list(loader) for _ in range(3)]

    assert same(body) == [[0, 1, 2, 3]] * 3


def _drawn_slowly(_: int) -> float:
    time.sleep(0.005)
    return random.random()


@pytest.mark.parametrize("dataset", [Numbers(400, _drawn_slowly), Restarting(400)], ids=type)
def test_epoch_that_was_left_early_has_moved_the_workers_as_far(dataset: Any) -> None:
    def body(Loader: Any) -> Any:
        loader = Loader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
        return [list(itertools.islice(loader, taken)) for taken in (1, 3, 2)]

    same(body)


@pytest.mark.parametrize("workers", WORKERS)
def test_length_warning_of_iterable_datasets(workers: int) -> None:
    def body(Loader: Any) -> Any:
        loader = Loader(Stream([5, 5], reported=4), batch_size=None, num_workers=workers)
        return len(loader), list(loader)

    same(body)


# --- randomness --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "own_generator", "persistent"),
    [
        (0, False, False),
        (0, True, False),
        (2, True, False),
        (2, False, True),
        pytest.param(2, False, False, marks=pytest.mark.stress),
        pytest.param(2, True, True, marks=pytest.mark.stress),
    ],
)
def test_order_and_draws(workers: int, own_generator: bool, persistent: bool) -> None:
    def body(Loader: Any) -> Any:
        generator = torch.Generator().manual_seed(5) if own_generator else None
        loader = Loader(
            Numbers(20),
            batch_size=3,
            shuffle=True,
            num_workers=workers,
            generator=generator,
            persistent_workers=persistent,
        )
        epochs = [list(loader) for _ in range(3)]
        return epochs, torch.get_rng_state(), generator.get_state() if generator is not None else None

    same(body)


@pytest.mark.parametrize("persistent", [False, True])
def test_seeds_of_workers(persistent: bool) -> None:
    dataset = Numbers(6, randomness)

    def body(Loader: Any) -> Any:
        loader = Loader(
            dataset, batch_size=1, collate_fn=identity, num_workers=2, persistent_workers=persistent
        )
        return list(loader), list(loader)

    same(body)


def test_worker_init_fn() -> None:
    seen = Numbers(4, lambda i: seen.mark)  # type: ignore[attr-defined]

    def init(worker_id: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None and info.dataset is seen and info.id == worker_id
        info.dataset.mark = (worker_id, torch.initial_seed() == info.seed)  # type: ignore[attr-defined]

    same(lambda Loader: list(Loader(seen, num_workers=2, worker_init_fn=init, collate_fn=identity)))


@pytest.mark.parametrize("persistent", [False, True])
def test_iterator_names_its_processes_when_the_epoch_is_over(persistent: bool) -> None:
    """Private, but torch's own tests and many scripts look there."""
    seen = Numbers(6, lambda i: seen.mark)  # type: ignore[attr-defined]

    def init(worker_id: int) -> None:
        seen.mark = (worker_id, os.getpid())  # type: ignore[attr-defined]

    def body(Loader: Any) -> Any:
        iterator = iter(
            Loader(
                seen,
                2,
                num_workers=2,
                worker_init_fn=init,
                collate_fn=identity,
                persistent_workers=persistent,
            )
        )
        before = list(iterator._workers)
        marks = [mark for batch in iterator for mark in batch]
        assert iterator._workers == before
        pids = [worker.pid for worker in iterator._workers]
        return [pids[worker_id] == pid for worker_id, pid in marks], [
            (worker.is_alive(), worker.exitcode) for worker in iterator._workers
        ]

    same(body)


def test_error_in_worker_init_fn() -> None:
    def init(worker_id: int) -> None:
        raise ValueError("no init")

    same(lambda Loader: next(iter(Loader(Numbers(4), num_workers=1, worker_init_fn=init))))


# --- what happens in the loop ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    "error", [ValueError("bad"), KeyError("key"), NotImplementedError(), OSError("os")], ids=_name
)
def test_an_error_and_then_the_rest(error: Exception, workers: int) -> None:
    def raise_at_three(i: int) -> int:
        if i == 3:
            raise copy.copy(error)  # what is noted on one that was raised would show in the next run
        return i

    def body(Loader: Any) -> Any:
        return given_or_told(Loader(Numbers(8, raise_at_three), batch_size=2, num_workers=workers))

    assert len(same(body)) == 4


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Takes no attribute."""

    path: str


def _raise_frozen_at_three(index: int) -> int:
    if index == 3:
        raise Frozen("3.txt")
    return index


@pytest.mark.parametrize("workers", WORKERS)
def test_error_that_takes_no_attribute(workers: int) -> None:
    dataset = Numbers(6, _raise_frozen_at_three)
    told_of = same(lambda Loader: given_or_told(Loader(dataset, batch_size=2, num_workers=workers)))
    assert told_of[1][0] is Frozen
    loader = fastload.DataLoader(dataset, batch_size=2, num_workers=workers, on_error="repeat")
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 2], [4, 5]]


@pytest.mark.parametrize("ahead", [None, 1, 3])
def test_how_far_ahead_indices_are_drawn(ahead: int | None) -> None:
    def body(Loader: Any) -> Any:
        sampler = RecordingSampler(20)
        loader = Loader(Numbers(20), sampler=sampler, batch_size=1, num_workers=2, prefetch_factor=ahead)
        drawn = []
        for _ in itertools.islice(loader, 4):
            drawn.append(sampler.drawn)
        return drawn

    same(body)


@pytest.mark.parametrize("sampler", [list(range(12)), RecordingSampler(12)], ids=type)
def test_warning_in_the_loop_is_shown_once(sampler: Any) -> None:
    """Python forgets which warnings it has shown whenever somebody enters `catch_warnings`."""

    def body(Loader: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in Loader(Numbers(12), batch_size=3, sampler=sampler):
                warnings.warn("careful", stacklevel=1)
        return len(caught)

    assert same(body) == 1


def test_out_of_order() -> None:
    def body(Loader: Any) -> Any:
        loader = Loader(Numbers(30), batch_size=3, num_workers=2, in_order=False)
        return sorted(batch.tolist() for batch in loader), loader.in_order

    same(body)


def test_persistent_workers_keep_their_dataset() -> None:
    def body(Loader: Any) -> Any:
        loader = Loader(Numbers(8), batch_size=2, num_workers=2, persistent_workers=True)
        first = iter(loader)
        pids = [process.pid for process in first._workers]
        next(first)  # and leave the rest
        again = iter(loader)
        return again is first, [process.pid for process in again._workers] == pids, list(again), list(loader)

    same(body)


def test_timeout() -> None:
    dataset = Numbers(4, At(1, "sleep", 1.0))
    raised = same(lambda Loader: list(Loader(dataset, num_workers=1, timeout=0.2)))
    assert raised == (RuntimeError, "DataLoader timed out after 0.2 seconds")


def test_too_many_workers_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: 1)
    same(lambda Loader: list(Loader(Numbers(2), num_workers=2)))


@pytest.mark.parametrize("workers", WORKERS)
def test_pin_memory_without_an_accelerator(workers: int) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    same(lambda Loader: list(Loader(Numbers(2), num_workers=workers, pin_memory=True)))
    same(lambda Loader: list(Loader(Numbers(2), pin_memory=True, pin_memory_device="cuda")))


def test_unpicklable_dataset_under_spawn() -> None:
    def body(Loader: Any) -> Any:
        return list(Loader(Numbers(2, lambda i: i), num_workers=1, multiprocessing_context="spawn"))

    assert issubclass(same(body)[0], AttributeError | pickle.PicklingError)


@pytest.mark.parametrize(
    "context",
    [
        "forkserver",
        # Each of the two imports torch again. The short form with "spawn": test_kernel_workers
        pytest.param(multiprocessing.get_context("spawn"), id="spawn", marks=pytest.mark.stress),
    ],
)
def test_start_methods(context: Any) -> None:
    dataset = Numbers(4, randomness)

    def body(Loader: Any) -> Any:
        loader = Loader(dataset, collate_fn=identity, num_workers=1, multiprocessing_context=context)
        return list(loader), loader.multiprocessing_context.get_start_method()

    same(body)


def test_data_pipes() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    def body(Loader: Any) -> Any:
        pipe = IterableWrapper(list(range(12))).shuffle().sharding_filter()
        loader = Loader(pipe, batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)
        return [list(loader) for _ in range(2)]

    same(body)


# --- that the comparison would notice ----------------------------------------------------------------------


class _Wrong(torch.utils.data.DataLoader[Any]):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


@pytest.mark.parametrize(
    "body",
    [
        lambda Loader: list(Loader(Numbers(4))),
        lambda Loader: [batch.double() if Loader is _Wrong else batch for batch in Loader(Numbers(1))],
        lambda Loader: warnings.warn("mine", stacklevel=1) if Loader is _Wrong else None,
        lambda Loader: 1 / (Loader is not _Wrong),
    ],
)
def test_a_difference_is_noticed(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastload, "DataLoader", _Wrong)
    with pytest.raises(AssertionError):
        same(body)
