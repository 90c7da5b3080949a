"""The promises of a transform."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from fastload.testing.promises import (
    OTHER_SEED,
    SEED,
    Contents,
    broken,
    check_same,
    check_same_lists,
    contents,
    in_processes,
    loader_of,
    made,
    not_promised,
    seeded,
)

_SAME = "a transform gives the same result for the same seed and input"
_DRAW = (
    "draw random numbers from torch, random or np.random when the transform is called, and keep nothing of "
    "one call for the next; a generator of your own is not seeded in workers"
)
_SEEDS = range(OTHER_SEED, OTHER_SEED + 32)
_SIZES = ((48, 32), (31, 57), (64, 64))  # (width, height) of the images


class TransformTests:
    """The promises of a transform: any function of one sample, or of one part of it.

    Example::

        from fastload import RandomResizedCrop
        from fastload.testing import TransformTests

        class TestCrop(TransformTests):
            out = "uint8", (3, 24, 24)
            random = True

            def make(self):
                return RandomResizedCrop(24)

    If yours does not make a promise, set its test to None in your class.

    Attributes:
        out: (dtype, shape) of the result, a tensor or an array: the dtype's name, and None for a length that
            varies. None: any result.
        random: whether it draws random numbers. None: the tests find out.
        start_methods: of the workers that are tried.
    """

    out: ClassVar[tuple[str, Sequence[int | None]] | None] = None
    random: ClassVar[bool | None] = None
    start_methods: ClassVar[Sequence[str]] = ("fork", "spawn")

    def make(self) -> Any:
        """Return a new transform, the same each time."""
        raise NotImplementedError(f"{type(self).__name__} lacks make(self), which returns a new transform")

    def inputs(self) -> Sequence[Any]:
        """Return what it is called with; by default three RGB images of PIL, of several sizes."""
        noise = np.random.default_rng(0)
        return [
            Image.fromarray(noise.integers(0, 256, (height, width, 3), np.uint8)) for width, height in _SIZES
        ]

    # --- the same result

    def test_same_seed_gives_the_same_results(self) -> None:
        transform = self.make()
        expected = self._results(transform)
        for again, name in ((transform, "the second time"), (self.make(), "by the next one of make()")):
            self._check(_SAME, expected, self._results(again), ("at first", name), _DRAW)

    def test_order_does_not_change_a_result(self) -> None:
        transform = self.make()
        backwards = [self._result(transform, value) for value in reversed(self.inputs())][::-1]
        names = "in order", "in the opposite order"
        self._check(_SAME, self._results(self.make()), backwards, names, _DRAW)

    def test_workers_give_the_same_results(self) -> None:
        data = _Transformed(self.make(), self.inputs())
        here = self._loaded(data)
        for method in self.start_methods:
            options, name = in_processes(method, 2)
            self._check(_SAME, here, self._loaded(data, **options), ("with num_workers=0", name), _DRAW)

    def test_pickled_transform_gives_the_same_results(self) -> None:
        transform = self.make()
        expected = self._results(transform)
        for name in ("", ", and pickled again"):
            try:
                transform = pickle.loads(pickle.dumps(transform))
            except Exception as error:
                broken(
                    "a transform can be pickled, after it was called too",
                    f"pickle raised {type(error).__name__}: {error}",
                    "define classes and functions at the top of a module, not as lambdas",
                )
            self._check(
                "a pickled transform gives the same results",
                expected,
                self._results(transform),
                ("by the transform", f"by its copy{name}"),
                "keep all that the results depend on in __getstate__",
            )

    # --- random numbers

    def test_another_seed_gives_other_random_numbers(self) -> None:
        transform = self.make()
        first = [made(partial(transform, value), SEED) for value in self.inputs()]
        results, drew = [result for result, _ in first], any(drew for _, drew in first)
        # Another seed may give the same: two of three coins fall alike.
        unlike = next((seed for seed in _SEEDS if self._results(transform, seed) != results), None)
        if self.random is False and (drew or unlike is not None):
            broken(
                "the transform draws no random numbers (random = False)",
                f"its results differ with seeds {SEED} and {unlike}"
                if unlike
                else "a generator has moved on",
                "take out what draws, or set random = True",
            )
        if self.random and unlike is None:
            broken(
                "the transform draws random numbers (random = True)",
                f"all results are the same with seed {SEED} and with {len(_SEEDS)} others",
                "draw when the transform is called, set no seed in it; or set random = False",
            )
        if not drew and unlike is None:
            not_promised("the transform draws no random numbers")

    # --- inputs and results

    def test_input_stays_as_it_is(self) -> None:
        transform = self.make()
        for number, value in enumerate(self.inputs()):
            before = contents(copy.deepcopy(value))
            self._result(transform, value)
            check_same(
                "a transform does not change its input",
                f"input {number}",
                before,
                contents(value),
                ("before", "after the call"),
                "copy the input first: a dataset may keep it, and give it again",
            )

    def test_result_stays_as_it_is(self) -> None:
        transform = self.make()
        first, *others = self.inputs()
        with seeded(SEED):
            kept = transform(first)
            before = contents(kept)
            for value in (first, *others):
                transform(value)
        check_same(
            "a result does not change when the transform is called again",
            "result 0",
            before,
            contents(kept),
            ("at first", "after the next calls"),
            "make a new result for each call, no buffer that is used again",
        )

    def test_result_is_as_declared(self) -> None:
        transform = self.make()
        with seeded(SEED):
            results = [transform(value) for value in self.inputs()]
        for number, result in enumerate(results):
            if result is None:
                broken("a transform returns its result", f"result {number} is None", "return the result")
            if self.out is None:
                continue
            dtype, shape = self.out
            form = _form(result)
            if (
                form is None
                or form[0] != dtype
                or len(form[1]) != len(shape)
                or any(want not in (None, length) for want, length in zip(shape, form[1], strict=True))
            ):
                shown = type(result).__name__ if form is None else f"{form[0]} {form[1]}"
                broken(
                    f"every result is {dtype} {tuple(shape)} (out)",
                    f"result {number} is {shown}",
                    "convert the result, or correct `out` of the test",
                )
        if self.out is None:
            not_promised("out is not set")

    # --- what these are made of

    def _result(self, transform: Callable[[Any], Any], value: Any, seed: int = SEED) -> Contents:
        return made(partial(transform, value), seed)[0]

    def _results(self, transform: Callable[[Any], Any], seed: int = SEED) -> list[Contents]:
        return [self._result(transform, value, seed) for value in self.inputs()]

    def _loaded(self, data: Any, **options: Any) -> list[Contents]:
        return [contents(sample) for batch in loader_of(data, **options) for sample in batch]

    def _check(
        self, promise: str, one: list[Contents], other: list[Contents], names: tuple[str, str], remedy: str
    ) -> None:
        check_same_lists(promise, one, other, names, remedy, "the result of input {}".format)


class _Transformed:
    """A dataset of results."""

    def __init__(self, transform: Callable[[Any], Any], values: Sequence[Any]) -> None:
        self.transform = transform
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.values[index])


def _form(result: Any) -> tuple[str, tuple[int, ...]] | None:
    """Return (dtype, shape) of a tensor or array; None for all else."""
    if not hasattr(result, "dtype") or not hasattr(result, "shape"):
        return None
    return str(result.dtype).removeprefix("torch."), tuple(result.shape)
