"""The loaders of the exhibits, and the healthy and the faulty run that are made with them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data import StackDataset

import fastload
from tests.museum import orders, samples
from tests.museum.training import BATCH, SAMPLES, Leg, Numbered, Plan, replaced

SEED = 5


def make_loader(leg: Leg, dataset: Any, batch_size: int = BATCH, **options: Any) -> Any:
    """As all runs of the museum make theirs."""
    if "batch_sampler" not in options:
        options["batch_size"] = batch_size
    options = {"seed": SEED, "sample_log": str(leg.log)} | options
    return fastload.DataLoader(dataset, **options)


@functools.cache
def in_order_of(sampler: Any, **options: Any) -> Callable[[Leg], Any]:
    """A loader of numbered samples with this sampler."""

    def loader(leg: Leg) -> Any:
        own = sampler(leg.rank, leg.ranks)
        return make_loader(leg, Numbered(), sampler=own, **options)

    return loader


@functools.cache
def in_batches_of(sampler: Any, length: int = SAMPLES) -> Callable[[Leg], Any]:
    """A loader of numbered samples with this batch sampler."""

    def loader(leg: Leg) -> Any:
        own = sampler(leg.rank, leg.ranks, length)
        return make_loader(leg, Numbered(length), batch_sampler=own)

    return loader


@functools.cache
def from_files(write: Any, dataset: Any, **options: Any) -> Callable[[Leg], Any]:
    """A loader of a dataset over files, in a random order."""

    def loader(leg: Leg) -> Any:
        own = orders.Epochs(leg.rank, leg.ranks)
        return make_loader(leg, dataset(write(leg.data)), sampler=own, **options)

    return loader


def of_mixture(sampler: Any, later: dict[str, float] | None = None) -> Callable[[Leg], Any]:
    """A loader of a mixture, which a resumed run makes with other weights, if there are any."""

    def loader(leg: Leg) -> Any:
        own = samples.mixture(later if leg.number else None)
        return make_loader(leg, own, sampler=sampler(own, leg.ranks, leg.rank, seed=1))

    return loader


def two_views(leg: Leg) -> Any:
    """A loader of two views of each image."""
    one = samples.images(samples.write_images(leg.data))
    return make_loader(leg, StackDataset(one, one), sampler=orders.Epochs(leg.rank, leg.ranks))


def broken(dataset: Any, on_error: str) -> Callable[[Leg], Any]:
    """A loader of a dataset with samples that cannot be made."""

    def loader(leg: Leg) -> Any:
        return make_loader(leg, dataset(), sampler=orders.Epochs(leg.rank, leg.ranks), on_error=on_error)

    return loader


def of_images(**options: Any) -> Callable[[Leg], Any]:
    """A loader of images in files, in a random order."""
    return from_files(samples.write_images, samples.images, **options)


def sampled(sampler: Any, healthy: Any = orders.Epochs, **options: Any) -> dict[str, Plan]:
    """The two runs of a fault in a sampler."""
    batch = {name: options.pop(name) for name in ("batch_size", "drop_last") if name in options}
    plan = Plan(in_order_of(healthy, **batch), **options)
    return {"healthy": plan, "faulty": replaced(plan, loader=in_order_of(sampler, **batch))}


def pair(healthy: Plan, **changes: Any) -> dict[str, Plan]:
    """A healthy run, and the one with these changes."""
    return {"healthy": healthy, "faulty": replaced(healthy, **changes)}
