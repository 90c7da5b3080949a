"""The promises of datasets: map-style and iterable ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from fastload.datasets.mixture import new_sampler
from fastload.testing.promises import (
    OTHER_SEED,
    SEED,
    Contents,
    broken,
    check_once,
    check_same,
    check_same_lists,
    contents,
    made,
    not_promised,
)
from fastload.testing.read_tests import ReadTests

_BATCHES = 4  # of an epoch at most: the state at the end of each one is resumed
_SAME = "a sample is the same for the same seed, epoch and index"
_DRAW = (
    "draw random numbers in __getitem__ only, from torch, random or np.random, which seed= sets for each "
    "sample; keep nothing of one sample for the next; use no time, no process id, no generator of your own"
)


class DatasetTests(ReadTests):
    """The promises of a map-style dataset, by which a loader can shuffle, divide, resume and replay it.

    Example::

        from fastload.testing import DatasetTests

        class TestSquares(DatasetTests):
            def make(self):
                return [number**2 for number in range(10)]

    Each test reads all samples a few times, so `make` should give a small dataset, of 10 to 100 samples. If
    yours does not make a promise, set its test to None in your class.

    Attributes:
        random: whether samples draw random numbers. None: the tests find out.
        num_workers: of the loaders with workers.
        start_methods: of worker processes. The first one is used everywhere, the others are tried with two
            workers. "spawn" imports everything again, which takes seconds.
        patience: seconds until all that a dataset has left behind must be gone.
    """

    random: ClassVar[bool | None] = None

    def make_damaged(self) -> tuple[Any, Sequence[int]] | None:
        """Return (dataset, indices of its bad samples). None: the tests of bad samples are skipped."""
        return None

    # --- length and indices

    def test_length_is_the_number_of_samples(self) -> None:
        dataset = self.make()
        length, again = len(dataset), len(self.make())
        if length < 2:
            broken("make() gives a dataset with samples", f"len() is {length}", "let it have 10 samples")
        if length != again:
            broken(
                "all datasets that make() gives have the same samples",
                f"len() is {length}, and {again} of the next one",
                "let nothing that changes decide which samples there are",
            )
        count = len(self._epoch(dataset))
        if length != count:
            broken(
                "len() is the number of samples",
                f"len() is {length}, and an epoch has {count}",
                "correct __len__",
            )

    def test_index_past_the_end_raises_index_error(self) -> None:
        dataset = self.make()
        for index in (len(dataset), len(dataset) + 7):
            self._must_raise_index_error(dataset, index)

    def test_negative_index_counts_from_the_end_or_raises(self) -> None:
        dataset = self.make()
        length = len(dataset)
        for index in (-1, -length):
            try:
                sample = self._sample(dataset, index)
            except Exception:  # it has no negative indices, and says so
                return
            check_same(
                "a negative index counts from the end, as in a list, or raises an error",
                f"the sample of index {index}",
                sample,
                self._sample(dataset, length + index),
                ("", f"by index {length + index}"),
                "add len(self) to indices below 0, or raise IndexError for them",
            )
        try:
            dataset[-length - 1]
        except Exception:
            return
        broken(
            "an index that no sample has raises an error",
            f"len() is {length}, and dataset[{-length - 1}] gave a sample",
            "raise IndexError below -len(self)",
        )

    # --- the same sample

    def test_same_seed_gives_the_same_samples(self) -> None:
        dataset = self.make()
        expected = self._epoch(dataset)
        for again, name in (
            (self.make(), "from the next dataset of make()"),
            (dataset, "in a second loader"),
        ):
            check_same_lists(_SAME, expected, self._epoch(again), ("at first", name), _DRAW)

    def test_order_does_not_change_a_sample(self) -> None:
        dataset = self.make()
        backwards = self._epoch(self.make(), sampler=range(len(dataset))[::-1])[::-1]
        check_same_lists(_SAME, self._epoch(dataset), backwards, ("in order", "in the opposite order"), _DRAW)

    def test_workers_give_the_same_samples(self) -> None:
        expected = self._epoch(self.make())
        for workers in self.num_workers:
            self._check_workers(expected, *self._processes(workers))

    def test_start_methods_give_the_same_samples(self) -> None:
        if len(self.start_methods) < 2:
            not_promised("start_methods names one only")
        expected = self._epoch(self.make())
        for method in self.start_methods[1:]:
            self._check_workers(expected, *self._processes(2, method))

    def test_loader_gives_the_samples_of_the_dataset(self) -> None:
        dataset = self.make()
        direct = [made(partial(dataset.__getitem__, index), SEED) for index in range(len(dataset))]
        other = [self._sample(dataset, index, OTHER_SEED) for index in range(len(dataset))]
        steady = [at for at, (sample, drew) in enumerate(direct) if sample == other[at] and not drew]
        if not steady:
            not_promised("all samples draw random numbers, which are others in a loader")
        check_same_lists(
            "a loader gives the samples that dataset[index] gives",
            [direct[index][0] for index in steady],
            self._epoch(
                dataset, sampler=steady, seed=None
            ),  # with a seed, __getitems__ gets one index a call
            ("by dataset[index]", "by a loader"),
            "let __getitems__, if there is one, give the samples of __getitem__, in the order of indices",
            lambda number: f"sample {steady[number]}",
        )

    # --- each sample once

    def test_epoch_has_every_sample_once(self) -> None:
        first: dict[Contents, int] = {}
        for batch in self._loader(self.make()):
            for sample in batch:
                key = self.identify(sample)
                if key is None:
                    not_promised("identify() is not defined: equal samples may be different ones")
                number = len(first)
                before = first.setdefault(contents(key), number)
                if before != number:
                    broken(
                        "an epoch has every sample once",
                        f"samples {before} and {number} are both {key!r}",
                        "give each index a sample of its own. Do not put another one in the place of a bad "
                        "sample, but raise an error: on_error= of the loader replaces it",
                    )

    # --- random numbers

    def test_random_numbers_change_with_seed_and_epoch(self) -> None:
        promise = "a sample that draws has other random numbers with another seed, and in another epoch"
        dataset = self.make()
        loader = self._loader(dataset)
        first, second = self._read(loader), self._read(loader)
        other = self._epoch(self.make(), seed=OTHER_SEED)
        drew = [number for number, sample in enumerate(first) if sample != other[number]]
        if self.random is False and drew:
            check_same(
                "samples draw no random numbers (random = False)",
                f"sample {drew[0]}",
                first[drew[0]],
                other[drew[0]],
                (f"with seed={SEED}", f"with seed={OTHER_SEED}"),
                "take out what draws, or set random = True",
            )
        if self.random and not drew:
            broken(
                promise,
                f"no sample differs between seed={SEED} and seed={OTHER_SEED}, although random is True",
                "set no seed in __getitem__, and keep no random numbers; or set random = False",
            )
        if not drew:
            not_promised("no sample draws random numbers")
        if all(first[number] == second[number] for number in drew):
            broken(
                promise,
                f"sample {drew[0]} (as all others) is the same in epochs 0 and 1",
                "keep no random numbers, and no samples that were drawn, over the end of an epoch",
            )

    # --- bad samples

    def test_bad_sample_raises_its_error_in_every_process(self) -> None:
        dataset, bad = self._damaged()
        kind = type(self._error_of(dataset, bad[0]))
        self._error_of(dataset, bad[0])  # the second time too
        options, name = self._processes(1)
        found = f"sample {bad[0]} raised {kind.__name__} in this process, and"
        remedy = "let pickle.loads(pickle.dumps(error)) work: an error is recreated from its `args`"
        try:
            self._epoch(dataset, sampler=[bad[0]], **options)
        except Exception as error:
            if not isinstance(error, kind):
                promise = "a bad sample raises the same error in a worker"
                broken(promise, f"{found} {type(error).__name__} {name}: {error}", remedy)
        else:
            broken("a bad sample raises its error in a worker too", f"{found} none {name}", remedy)

    def test_on_error_keeps_all_other_samples(self) -> None:
        dataset, bad = self._damaged()
        length = len(dataset)
        found = {}
        for on_error in ("repeat", "replace"):
            loader = self._loader(dataset, batch_size=length, on_error=on_error)
            found[on_error] = self._read(loader)
            counted = int(loader.stats()["counters"].get("bad.samples", 0))
            if len(found[on_error]) != length or counted < len(set(bad)):
                broken(
                    "with on_error= an epoch has all its rows, and the bad samples are counted",
                    f"{len(found[on_error])} rows of {length} with on_error={on_error!r}, and {counted} bad "
                    f"samples of {len(set(bad))}",
                    "raise an error for every bad sample; name the right ones in make_damaged()",
                )
        for index in sorted(set(range(length)) - set(bad)):
            check_same(
                "on_error= changes no good sample",
                f"sample {index}",
                found["repeat"][index],
                found["replace"][index],
                ("with on_error='repeat'", "with on_error='replace'"),
                "keep nothing of a bad sample for the next one",
            )

    # --- what these are made of

    def _loader(self, dataset: Any, **options: Any) -> Any:
        options = {"batch_size": max(1, -(-len(dataset) // _BATCHES)), **options}
        if new_sampler(dataset, shuffle=False, seed=0) is None:  # it has a sampler of its own
            options = {"sampler": range(len(dataset)), **options}
        return super()._loader(dataset, **options)

    def _sample(self, dataset: Any, index: int, seed: int = SEED) -> Contents:
        return made(partial(dataset.__getitem__, index), seed)[0]

    def _must_raise_index_error(self, dataset: Any, index: int) -> None:
        promise = "an index that no sample has raises IndexError"
        where = f"len() is {len(dataset)}, and dataset[{index}]"
        remedy = "raise IndexError in __getitem__: by it `for sample in dataset` ends, which else never ends"
        try:
            sample = dataset[index]
        except IndexError:
            return
        except Exception as error:
            broken(promise, f"{where} raised {type(error).__name__}: {error}", remedy)
        broken(promise, f"{where} gave a {type(sample).__name__}", remedy)

    def _check_workers(self, expected: list[Contents], options: dict[str, Any], name: str) -> None:
        found = self._epoch(self.make(), **options)
        check_same_lists(_SAME, expected, found, ("with num_workers=0", name), _DRAW)

    def _damaged(self) -> tuple[Any, Sequence[int]]:
        made = self.make_damaged()
        if made is None:
            not_promised("make_damaged() is not defined")
        return made

    def _error_of(self, dataset: Any, index: int) -> Exception:
        """Return the error of a bad sample."""
        promise = "a bad sample raises an error each time, and none that ends an iteration"
        try:
            dataset[index]
        except (StopIteration, IndexError) as error:
            found = f"sample {index} raised {type(error).__name__}"
            broken(promise, found, "raise ValueError, OSError or an error of your own")
        except Exception as error:
            return error
        broken(promise, f"dataset[{index}] gave a sample", "raise the error, or correct make_damaged()")


_BATCH_SIZE = 4
_DIVIDE = (
    "divide the samples by torch.utils.data.get_worker_info() in __iter__: each worker has a copy of the "
    "dataset, and gives all samples unless it takes its own part. If samples draw random numbers, define "
    "identify() too"
)


class IterableDatasetTests(ReadTests):
    """The promises of an iterable dataset, by which workers can divide and a loader can resume it.

    Example::

        from torch.utils.data import IterableDataset, get_worker_info

        from fastload.testing import IterableDatasetTests

        class Squares(IterableDataset):
            def __iter__(self):
                info = get_worker_info()
                first, step = (0, 1) if info is None else (info.id, info.num_workers)
                return (number**2 for number in range(first, 20, step))

        class TestSquares(IterableDatasetTests):
            def make(self):
                return Squares()

    Each test reads all samples a few times, so `make` should give a small dataset, of 10 to 100 samples. If
    samples draw random numbers, define `identify`. If yours does not make a promise, set its test to None in
    your class. A shard dataset of fastload that is not indexed yet is read as streams, and can be tested by
    this class too.

    Attributes:
        num_workers, start_methods, patience: as for `DatasetTests`.
    """

    def test_every_sample_once_for_any_number_of_workers(self) -> None:
        first, *others = self.start_methods
        self._check_workers([(first, workers) for workers in self.num_workers])
        self._check_workers([(method, 2) for method in others])

    def test_next_epoch_gives_all_samples_again(self) -> None:
        loader = self._loader(self.make())
        names = "in the first epoch", "in the second one"
        remedy = "let __iter__ return a new iterator each time, and do not keep a position over its end"
        first, second = self._read(loader), self._read(loader)
        check_once("every epoch gives all samples", first, second, names, remedy)

    def test_same_seed_gives_the_same_samples(self) -> None:
        for workers in (0, 2):
            options, name = self._processes(workers)
            first, second = (self._read(self._loader(self.make(), **options), whole=True) for _ in range(2))
            check_same_lists(
                "two runs with one seed give the same samples in the same order",
                first,
                second,
                (f"at first {name}", "in the second run"),
                "draw random numbers from torch, random or np.random only, which are seeded in workers; sort "
                "the files of a folder; use no time and no process id",
            )

    def test_length_if_any_is_the_number_of_samples(self) -> None:
        dataset = self.make()
        count = len(self._epoch(dataset))
        if not count:
            broken("make() gives a dataset with samples", "there is none", "let it have 10 samples")
        try:
            length = len(self.make())
        except TypeError:  # it has none
            return
        if length != count:
            broken(
                "len() is the number of samples", f"len() is {length}, there are {count}", "correct __len__"
            )

    # --- what these are made of

    def _loader(self, dataset: Any, **options: Any) -> Any:
        return super()._loader(dataset, **{"batch_size": _BATCH_SIZE, **options})

    def _contents(self, sample: Any) -> Contents:
        key = self.identify(sample)
        return contents(sample if key is None else key)

    def _check_workers(self, kinds: Sequence[tuple[str, int]]) -> None:
        expected = self._epoch(self.make())
        for method, workers in kinds:
            options, name = self._processes(workers, method)
            found = self._epoch(self.make(), **options)
            names = "with num_workers=0", name
            check_once("workers together give every sample once", expected, found, names, _DIVIDE)
