"""Several datasets in exact proportions: the sources, their weights, and what was read of each.

The order is made by `fastload.order.mixture_sampler`. The upper bits of its indices have the pass over
the source. So a sample that a small source gives twice in an epoch has other random numbers:

    index = pass << 40 | position in the concatenation of the sources
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import ConcatDataset, Dataset, IterableDataset

from fastload.checks import whole_number
from fastload.datasets.composed import ConcatView, Location
from fastload.datasets.views import Reach, View, check_dataset
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError, shorten_errors
from fastload.order.mixing import MOST_SAMPLES, PASS_BITS, GivenWeights, Proportions
from fastload.order.mixture_sampler import MixtureSampler
from fastload.order.sampler import indexed_length


class SourceRead(NamedTuple):
    """What was read of a source of a mixture.

    Attributes:
        weight: its part of the samples now, from 0 to 1.
        samples: the samples that it gave, over all ranks and epochs.
        share: its part of all samples so far, from 0 to 1.
        epochs: passes over the source: 1.37 is one whole pass and 37 % of the second.
        remaining: samples until the pass ends.
    """

    weight: float
    samples: int
    share: float
    epochs: float
    remaining: int


class Ledger(dict[str, SourceRead]):
    """Name of a source -> what was read of it. As text it is a table."""

    def __str__(self) -> str:
        head = ("source", "weight", "samples", "share", "epochs", "remaining")
        forms = (".4f", ",", ".4f", ".2f", ",")
        rows = [(name, *map(format, one, forms)) for name, one in self.items()]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
            for name, *cells in (head, *rows)
        ]
        return "\n".join(lines)


class Mixture(ConcatDataset[Any]):
    """Several map-style datasets, read in proportion to weights.

    Example::

        from fastload import DataLoader, ImageFolder, Mixture, RandomResizedCrop

        crop = RandomResizedCrop(224, flip=0.5)
        web, own = ImageFolder("s3://bucket/train", crop), ImageFolder("s3://bucket/val", crop)
        mixture = Mixture({"web": web, "own": own}, {"web": 0.9, "own": 0.1}, num_samples=100)
        loader = DataLoader(mixture, batch_size=10, shuffle=True, num_workers=2)
        for images, labels in loader:  # 9 images of "web" and 1 of "own" in each batch of 10
            ...
        print(mixture.ledger())

    After every sample, over all ranks together, the number of samples of each source is less than one sample
    away from its weight's part. If weights change during a run, a source is never a whole sample ahead; with
    four or more sources, it may be slightly more than one sample behind for a while.

    Each source is read in passes: it repeats no sample before it has given all, across the ends of epochs. An
    exhausted source begins its next pass, in another order with `shuffle=True` of the loader, else by index.
    A sample that is repeated within an epoch has other random numbers than before.

    `fastload.DataLoader` takes a `MixtureSampler` by itself: each rank reads its own part. For another loader
    pass that sampler. As a `ConcatDataset`, a mixture has each sample of its sources once, by index.

    Args:
        datasets: name -> dataset, or a sequence of datasets, whose names are then "0", "1", and so on. The
            names stand in the states, and in the random order of each source.
        weights: of the sources, by name or in their order: numbers >= 0, whose sum need not be 1. They are
            taken as they are written, so that 0.1 is a tenth. 0 leaves a source out. Or a function from the
            epoch (0, 1, ...) to these, which must be the same on all ranks.
        num_samples: the samples of an epoch, over all ranks. Default: as many as all sources have.

    Raises:
        ArgumentError: there is no source, or one is empty, has no length, or is itself a mixture; a weight is
            missing, negative, infinite or no number, or all are 0; num_samples is no whole number >= 1.
    """

    @shorten_errors
    def __init__(
        self,
        datasets: Mapping[str, Dataset[Any]] | Sequence[Dataset[Any]],
        weights: GivenWeights,
        *,
        num_samples: int | None = None,
    ) -> None:
        sources = _named(datasets)
        for name, dataset in sources.items():
            _check_source(name, dataset)
        super().__init__(sources.values())
        if len(self) >= MOST_SAMPLES:
            raise ArgumentError(
                f"the sources have {len(self):,} samples, a mixture takes {MOST_SAMPLES:,} at most"
            )
        ends = self.cumulative_sizes
        lengths = dict(zip(sources, map(operator.sub, ends, [0, *ends[:-1]]), strict=True))
        whole = len(self) if num_samples is None else whole_number("num_samples", num_samples)
        self._proportions = Proportions(lengths, weights, whole)

    def __getitem__(self, index: int) -> Any:
        index = operator.index(index)
        return super().__getitem__(index % MOST_SAMPLES if index >= MOST_SAMPLES else index)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        lengths = self._proportions.lengths.items()
        sources = ", ".join(f"{name!r}: {length:,} samples" for name, length in lengths)
        return f"{type(self).__name__}({sources}; {self.num_samples:,} samples an epoch)"

    @property
    def num_samples(self) -> int:
        """The samples of an epoch, over all ranks."""
        return self._proportions.num_samples

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the next samples, with the sum 1.

        They can be set, before or while the mixture is read. A loader draws samples ahead, so new weights
        take effect `prefetch_factor * num_workers` batches later, or 256 samples a worker where that is more:
        at the first batch that is not drawn yet. Set them on all ranks at the same step. Where
        torch.distributed is initialized the ranks check that, wait for each other, and begin at the same
        sample. Weights that are set hold in later epochs too, and are part of the loader's state once a
        sample was drawn: those that you set before, set again before you resume, as the constructor's.

        Raises:
            ArgumentError: when set: as the constructor; a function of the epoch while the mixture is read;
                or another rank sets other weights.
            WorkerError: when set: another rank does not set them.
        """
        return self._proportions.weights()

    @weights.setter
    def weights(self, weights: GivenWeights) -> None:
        self._proportions.set_weights(weights)

    def ledger(self) -> Ledger:
        """What was read of each source, over all ranks and epochs, up to the batch that was delivered last.

        Example (not run: it goes on from the example of the class)::

            print(mixture.ledger())  # a table
            mixture.ledger()["own"].epochs  # 1.37: the second pass is at 37 %

        It counts what the loader has delivered, not what it has read ahead, and goes on after a resume.
        """
        samples, weights = self._proportions.read()
        total = sum(samples.values())
        return Ledger(
            (
                name,
                SourceRead(
                    weight=weights[name],
                    samples=samples[name],
                    share=samples[name] / total if total else 0.0,
                    epochs=samples[name] / length,
                    remaining=length - samples[name] % length,
                ),
            )
            for name, length in self._proportions.lengths.items()
        )

    def _view(self) -> MixtureView:
        """See `fastload.datasets.wrappers`."""
        return MixtureView(
            [view_of(source) for source in self.datasets],
            self.cumulative_sizes,
            list(self._proportions.lengths),
        )


class MixtureView(ConcatView):
    """The view of a mixture. Random numbers are a function of the pass too.

    Args:
        parts, ends: see `ConcatView`.
        names: of the sources.
    """

    def __init__(self, parts: Sequence[View], ends: Sequence[int], names: Sequence[str]) -> None:
        super().__init__(parts, ends)
        self._names = names

    def locate(self, index: Any) -> Location:
        index = operator.index(index)
        part, path, position = super().locate(index % MOST_SAMPLES if index >= MOST_SAMPLES else index)
        return part, (index >> PASS_BITS, *path), position

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        return super().reached(None)  # each pass has an order of its own

    def lengths(self, length: int) -> dict[str, int]:
        return dict(zip(self._names, map(operator.sub, self._ends, self._starts), strict=True))

    def position(self, index: int, length: int) -> int:
        """Return the position of a sample in the concatenation of the sources, whatever the pass."""
        return index % MOST_SAMPLES

    def replacement(self, index: int, number: int, length: int) -> int:
        """Return the index of another sample of the same source and pass."""
        source, _, position = self.locate(index)
        start = int(index - position)
        return start + number % (self._ends[source] - self._starts[source])

    def sample_name(self, index: Any) -> str:
        source, _, position = self.locate(index)
        return f"sample {position} of source {self._names[source]!r}"


def new_sampler(dataset: Any, *, shuffle: bool, seed: int) -> MixtureSampler | None:
    """Return the sampler that a loader gives to a `Mixture`; None for another dataset."""
    return MixtureSampler(dataset, shuffle=shuffle, seed=seed) if isinstance(dataset, Mixture) else None


def sources_of(dataset: Any) -> dict[str, Any]:
    """Return name -> dataset of the sources of a `Mixture`; {"": dataset} for another dataset."""
    if isinstance(dataset, Mixture):
        return dict(zip(dataset._proportions.lengths, dataset.datasets, strict=True))
    return {"": dataset}


class ChosenIndices(list[Any]):
    """Indices that the sampler of a mixture has given: its weights were used."""


def check_weights(dataset: Any, sampler: Any) -> None:
    """Raise `ArgumentError` where the weights of a mixture would not be used."""
    if isinstance(dataset, Mixture):
        if sampler is not None and not isinstance(sampler, MixtureSampler | ChosenIndices):
            raise ArgumentError(
                f"a {type(sampler).__name__} does not use the weights of a Mixture: leave sampler= out, or "
                "pass a fastload.MixtureSampler"
            )
        return
    inside = getattr(dataset, "__dict__", {}).get("dataset")  # no property: that would run the user's code
    if isinstance(inside, Mixture) or _has_mixture(view_of(dataset)):
        raise ArgumentError(
            f"a {type(dataset).__name__} of a Mixture does not use its weights: wrap each of its sources "
            "instead, and mix the results"
        )


def _has_mixture(view: View) -> bool:
    return isinstance(view, MixtureView) or any(map(_has_mixture, view.parts))


def _named(datasets: Any) -> dict[str, Any]:
    if isinstance(datasets, Mapping):
        sources = dict(datasets)
    elif isinstance(datasets, list | tuple):
        sources = {str(number): dataset for number, dataset in enumerate(datasets)}
    else:
        raise ArgumentError(
            f"datasets must be a dict of names and datasets, or a list, found {type(datasets).__name__}"
        )
    if not sources:
        raise ArgumentError("datasets is empty: a mixture needs at least one source")
    for name in sources:
        if not isinstance(name, str):
            raise ArgumentError(f"the name of a source must be a str, found {name!r}")
    return sources


def _check_source(name: str, dataset: Any) -> None:
    check_dataset(dataset)
    if isinstance(dataset, Mixture):
        raise ArgumentError(
            f"source {name!r} is itself a Mixture, whose weights would not be used: give its sources to the "
            "outer mixture, each with the product of its two weights"
        )
    map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not map_style or isinstance(dataset, IterableDataset):
        raise ArgumentError(
            f"source {name!r} must be a map-style dataset (__getitem__ and __len__), found "
            f"{type(dataset).__name__}: a mixture reads samples by index"
        )
    try:
        length = len(dataset)
        for leaf in view_of(dataset).leaves():
            indexed_length(leaf)  # whose `len()` may be a hint
    except TypeError as error:
        raise ArgumentError(
            f"source {name!r} has no length yet, and a mixture reads samples by index: index its shards "
            "first with `fastload index URL`, or read them once through a cache"
        ) from error
    if length == 0:
        raise ArgumentError(f"source {name!r} is empty: leave it out, or check its URL and filters")
