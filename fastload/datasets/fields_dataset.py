"""What datasets share whose samples are made of named fields: records of shards, and rows of a table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from fastload.datasets.base import StoreDataset
from fastload.datasets.protocols import Allocate, RowErrors
from fastload.datasets.samples import SampleMaker
from fastload.datasets.seeds import SampleSeeds
from fastload.images.rng import sample_seed


class FieldsDataset(StoreDataset):
    """A `StoreDataset` whose values, once restored, are the fields of a record by name."""

    _row_errors = (Exception,)  # the user's `decode` runs where a value is restored

    @property
    def transform(self) -> Any:
        """As it was given; it may be set again."""
        return self._transform

    @transform.setter
    def transform(self, transform: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None) -> None:
        maker = self._new_maker(transform)
        if "_step" in self.__dict__:  # not in the constructor, where the step is made for this transform
            self._step.check_transform(transform)
        self._maker = maker
        self._transform = transform

    @property
    def made_by_kernel(self) -> bool:
        return self._maker.made_by_kernel

    def start_epoch(self, epoch: int) -> None:
        """From now on, samples are of this epoch: for transforms that go by it."""
        self._maker.start_epoch(epoch)

    # --- RowDataset

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        return self._maker.new_batch(n, allocate) if self._maker.by_rows else None

    def finish_batch(self, batch: Any) -> Any:
        """See `fastload.datasets.protocols.finish_batch`."""
        return self._maker.finish(batch)

    def sample(self, batch: Any, row: int) -> Any:
        return self._maker.row(batch, row)

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        self._maker.copy_row(batch, target, source)

    @property
    def draws(self) -> bool:
        return self._maker.draws

    @property
    def cut(self) -> int:
        return self._maker.cut

    # --- what `StoreDataset` asks for

    def _sample(self, value: Any) -> Any:
        return self._maker.sample(value)

    def _fill_rows(
        self, batch: Any, rows: list[int], records: list[int], values: list[Any], seed: int, epoch: int
    ) -> RowErrors:
        errors: RowErrors = []
        filled: dict[
            tuple[str, ...], list[tuple[int, int, list[Any]]]
        ] = {}  # images -> (row, record, images)
        seeded = SampleSeeds.current() if self._maker.runs_user_code else None
        if seeded is not None:
            seeded.begin_batch(records[0])
        for row, record, fields in zip(rows, records, values, strict=True):
            try:
                if seeded is None:
                    found = self._maker.put(batch, row, fields)
                else:
                    found = seeded.call(record, self._maker.put, batch, row, fields)
            except Exception as error:  # of the user's functions too: `on_error` decides
                errors.append((row, self._named(error, record)))
                continue
            filled.setdefault(tuple(found), []).append((row, record, list(found.values())))
        with self.counters.timed("decode"):
            for names, group in filled.items():
                images = {name: [encoded[at] for _, _, encoded in group] for at, name in enumerate(names)}
                seeds = [sample_seed(seed, epoch, record) for _, record, _ in group]
                bad = self._maker.put_images(batch, [row for row, _, _ in group], images, seeds)
                errors += [(group[at][0], self._named(error, group[at][1])) for at, error in bad]
        return errors

    # --- what a subclass supplies

    @abstractmethod
    def _new_maker(
        self, transform: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None
    ) -> SampleMaker:
        """What makes samples of the fields, with this transform.

        Raises:
            ArgumentError: the transform does not go with the fields.
        """
