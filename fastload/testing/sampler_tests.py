"""The promises of a sampler."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from fastload.testing.promises import SEED, broken, loader_of, not_promised, seeded

_ONCE = "in an epoch all ranks together give every index once"


class SamplerTests:
    """The promises of a sampler or batch sampler, by which an epoch is divided among ranks, and resumed.

    Example::

        from torch.utils.data import SequentialSampler

        from fastload.testing import SamplerTests

        class TestSequential(SamplerTests):
            length = 20
            shuffles = False
            world_sizes = (1,)  # it knows no ranks

            def make(self, rank, world_size):
                return SequentialSampler(range(20))

    If yours does not make a promise, set its test to None in your class.

    Attributes:
        length: of the dataset: the indices are 0 to length - 1.
        world_sizes: the numbers of ranks that are tried.
        cover: what all ranks together give in an epoch. "exact": every index once. "padded": every index, and
            fewer than `world_size` of them twice, so that all ranks give equally many. "cut": equally many
            too, by leaving out fewer than `world_size` indices. "any": indices by chance, as with weights.
        shuffles: whether every epoch has another order.
    """

    length: ClassVar[int]
    world_sizes: ClassVar[Sequence[int]] = (1, 2, 3)
    cover: ClassVar[Literal["exact", "padded", "cut", "any"]] = "exact"
    shuffles: ClassVar[bool] = True

    def make(self, rank: int, world_size: int) -> Any:
        """Return a new sampler of a rank, with the same seed each time."""
        raise NotImplementedError(
            f"{type(self).__name__} lacks make(self, rank, world_size), which returns a new sampler"
        )

    # --- what an epoch has

    def test_every_index_once_over_all_ranks(self) -> None:
        if self.cover == "any":
            not_promised('cover is "any"')
        for world in self.world_sizes:
            for epoch in (0, 2):
                parts = [self._epoch(self._ready(epoch, rank, world)) for rank in range(world)]
                self._check_cover(world, parts)

    def test_indices_are_those_of_the_dataset(self) -> None:
        for world in self.world_sizes:
            for rank, sampler in enumerate(self._ranks(world)):
                for number, index in enumerate(self._epoch(sampler)):
                    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < self.length:
                        broken(
                            "an index is an int from 0 to length - 1",
                            f"number {number} of {_rank(rank, world)} is {index!r}; length is {self.length}",
                            "give ints: call tolist() of an array or tensor; correct `length` of the test",
                        )

    def test_length_is_what_an_epoch_gives(self) -> None:
        for world in self.world_sizes:
            for rank, sampler in enumerate(self._ranks(world)):
                length, count = len(sampler), len(self._drawn(sampler))
                if length != count:
                    broken(
                        "len() is what an epoch of this rank has",
                        f"len() of {_rank(rank, world)} is {length}, and an epoch has {count}",
                        "correct __len__, or the end of __iter__",
                    )

    def test_epoch_left_early_does_not_shorten_the_next(self) -> None:
        for rank, sampler in enumerate(self._ranks(self.world_sizes[-1])):
            whole = len(sampler)
            with seeded(SEED):
                list(itertools.islice(sampler, 2))
            count = len(self._drawn(sampler))
            if count != whole:
                broken(
                    "an epoch that is left early does not shorten the next one",
                    f"after two draws that were the end of an epoch, the next one of "
                    f"{_rank(rank, self.world_sizes[-1])} had {count} in place of {whole}",
                    "let __iter__ begin again, and keep a position only for state_dict()",
                )

    # --- which order

    def test_same_seed_and_epoch_give_the_same_order(self) -> None:
        for epoch, (rank, world) in itertools.product((0, 1), self._each_rank()):
            first, second = (self._epoch(self._ready(epoch, rank, world)) for _ in range(2))
            if first != second:
                broken(
                    "two samplers with the same seed and epoch give the same order",
                    f"in epoch {epoch} of {_rank(rank, world)} {_first_unlike(first, second)}",
                    "make the order from (seed, epoch) only, by a generator that is made for it",
                )

    def test_next_epoch_has_another_order(self) -> None:
        if not self.shuffles:
            not_promised("shuffles is False")
        sampler = self._ready(0)
        with seeded(SEED):
            first = self._draw(sampler)
            _set_epoch(sampler, 1)
            second = self._draw(sampler)
        if first == second:
            broken(
                "every epoch has another order",
                f"epochs 0 and 1 both begin with {str(first[:6])[1:-1]}",
                "make the order from seed and epoch, which set_epoch() sets and an iteration counts up",
            )

    def test_set_epoch_gives_the_order_of_that_epoch(self) -> None:
        if not hasattr(self.make(0, 1), "set_epoch"):
            not_promised("the sampler has no set_epoch()")
        used = self._ready(3)
        self._epoch(used)
        _set_epoch(used, 1)
        for name in ("set_epoch(1) after epoch 3", "a second iteration after set_epoch(1)"):
            found, expected = self._epoch(used), self._epoch(self._ready(1))
            if found != expected:
                broken(
                    "set_epoch() gives the order of that epoch, whatever was read before",
                    f"by {name}, not as by set_epoch(1) alone, {_first_unlike(found, expected)}",
                    "make the order from (seed, epoch) only, when an iteration begins",
                )

    # --- resume

    def test_state_resumes_with_the_next_index(self) -> None:
        """By a loader, which resumes a sampler without a state by drawing again."""
        for rank, world in self._each_rank():
            self._check_resume(rank, world)

    # --- what these are made of

    def _each_rank(self) -> list[tuple[int, int]]:
        """Return (rank, number of ranks): of one rank, and of the most that are tried."""
        most = self.world_sizes[-1]
        return sorted({(0, 1), *((rank, most) for rank in range(most))})

    def _check_resume(self, rank: int, world: int) -> None:
        loader = self._loader(self._ready(0, rank, world))
        states, expected = [(loader.state_dict(), 0)], []
        with seeded(SEED):
            for batch in loader:
                expected += batch
                states.append((loader.state_dict(), len(expected)))
        for state, start in states:
            resumed = self._resumed(state, rank, world)
            with seeded(SEED):
                seen = list(next(iter(resumed), []))
                state = resumed.state_dict()
            if seen:  # what was resumed is saved, and resumed; at its end it would be the next epoch
                with seeded(SEED):
                    seen += [index for batch in self._resumed(state, rank, world) for index in batch]
            if seen != expected[start:]:
                broken(
                    "a resumed run gives exactly the indices that were not delivered",
                    f"{_rank(rank, world)} resumed after {start} indices, and one batch later again, "
                    f"{_first_unlike(seen, expected[start:])}",
                    "let state_dict() return a copy of all that the order depends on, and the iteration "
                    "after load_state_dict() go on there; without a state, give one order for one epoch",
                )

    def _ranks(self, world: int) -> list[Any]:
        return [self.make(rank, world) for rank in range(world)]

    def _ready(self, epoch: int, rank: int = 0, world: int = 1) -> Any:
        sampler = self.make(rank, world)
        _set_epoch(sampler, epoch)
        return sampler

    def _drawn(self, sampler: Any) -> list[Any]:
        with seeded(SEED):
            return list(sampler)

    def _draw(self, sampler: Any) -> list[Any]:
        """Return the indices of an epoch, of batches too."""
        drawn = [one if isinstance(one, list | tuple) else [one] for one in sampler]
        return list(itertools.chain.from_iterable(drawn))

    def _epoch(self, sampler: Any) -> list[Any]:
        with seeded(SEED):
            return self._draw(sampler)

    def _loader(self, sampler: Any) -> Any:
        with seeded(SEED):
            batches = isinstance(next(iter(self._ready(0)), None), list | tuple)
        options = {"batch_sampler": sampler} if batches else {"sampler": sampler, "batch_size": 3}
        return loader_of(range(self.length), **options)

    def _resumed(self, state: dict[str, Any], rank: int, world: int) -> Any:
        loader = self._loader(self._ready(0, rank, world))
        loader.load_state_dict(pickle.loads(pickle.dumps(state)))
        return loader

    def _check_cover(self, world: int, parts: list[list[Any]]) -> None:
        counts = Counter(itertools.chain(*parts))
        where = f"over {world} rank{'s' if world > 1 else ''}"
        missing = [index for index in range(self.length) if not counts[index]]
        double = [index for index, count in counts.items() if count > 1]
        more = counts.total() - len(counts)
        remedy = (
            "give rank r the places r, r + world_size, r + 2 * world_size, ... of an order that is made from "
            "(seed, epoch) and the same on all ranks; or set `cover` of the test"
        )
        if missing and (self.cover != "cut" or len(missing) >= world):
            broken(_ONCE, f"index {missing[0]} is missing {where}, and {len(missing) - 1} others", remedy)
        if double and (self.cover != "padded" or more >= world):
            broken(_ONCE, f"index {double[0]} came {counts[double[0]]} times {where}", remedy)
        sizes = {len(part) for part in parts}
        if self.cover in ("padded", "cut") and len(sizes) > 1:
            broken("all ranks give equally many indices", f"{sorted(sizes)} {where}", remedy)


def _set_epoch(sampler: Any, epoch: int) -> None:
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def _rank(rank: int, world: int) -> str:
    return f"rank {rank} of {world}"


def _first_unlike(found: Sequence[Any], expected: Sequence[Any]) -> str:
    """Return the first difference of two orders, in words."""
    for number, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            return f"index number {number} is {one}, where it should be {other}"
    return f"there are {len(found)} indices, where there should be {len(expected)}"
