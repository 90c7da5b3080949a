"""The promises of an iterable dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastload.testing.contents import Contents, contents
from fastload.testing.promises import broken, check_once, check_same_lists
from fastload.testing.read_tests import ReadTests

__all__ = ["IterableDatasetTests"]

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
            first, second = (self._epoch(self.make(), **options) for _ in range(2))
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
