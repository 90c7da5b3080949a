"""Datasets of the museum, with the faults that lie in a dataset, a cache, a mixture, or in random numbers."""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fastload import (
    File,
    ImageFolder,
    Mixture,
    MixtureSampler,
    ObjectDataset,
    RandomResizedCrop,
    TableDataset,
    TarDataset,
)
from fastload.datasets import composed
from fastload.formats.tar import TarWriter
from fastload.order.mixing import Mixing, in_units
from fastload.workers.batch import BatchMaker
from fastload.workers.protocol import EpochStart
from tests.museum.training import SAMPLES, Numbered
from tests.photos import pillow_jpeg, scene

BAD = 10  # the index of a sample that cannot be read
LONG_AGO = 1_700_000_000  # the time of all files: a version of a local object has it


# --- files


def write_files(folder: Path, files: dict[str, bytes], age: int = 0) -> str:
    """Key -> content; the times of the files do not depend on when the museum runs."""
    for key, content in files.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (LONG_AGO - age, LONG_AGO - age))
    return str(folder)


def object_keys() -> list[str]:
    """Two directories with the same names in them."""
    return [f"{part}/{number:02}.bin" for part in ("a", "b") for number in range(SAMPLES // 2)]


def write_objects(folder: Path) -> str:
    """The objects of `object_keys`, of one byte each."""
    return write_files(folder, {key: bytes([number]) for number, key in enumerate(object_keys())})


def write_other_objects(folder: Path) -> str:
    """Objects of the same keys, sizes and times."""
    return write_files(folder, {key: bytes([100 + number]) for number, key in enumerate(object_keys())})


def as_numbers(content: bytes) -> torch.Tensor:
    return torch.tensor(list(content))


def objects(url: str, keys: list[str]) -> ObjectDataset:
    return ObjectDataset(url, decode=as_numbers, keys=keys)


def as_listed(url: str) -> ObjectDataset:
    return objects(url, object_keys())


def as_another_disk_lists(url: str) -> ObjectDataset:
    """Some file systems list the names of a directory in the order of a hash."""
    keys = object_keys()
    keys[6], keys[7] = keys[7], keys[6]
    return objects(url, keys)


def cached_by_last_name(url: str) -> ObjectDataset:
    """A cache whose file names are the last part of a key: who comes first is read for all of that name."""
    first: dict[str, str] = {}
    for key in object_keys():
        first.setdefault(key.rpartition("/")[2], key)
    return objects(url, [first[key.rpartition("/")[2]] for key in object_keys()])


def labelled(url: str, corrected: int = 1) -> TableDataset:
    """The labels of four objects were wrong."""
    labels = [int(number in range(4, 8)) * corrected for number in range(SAMPLES)]
    fields = (File("file", decode=as_numbers), "label")
    return TableDataset({"file": object_keys(), "label": labels}, fields, url=url)


def labelled_before(url: str) -> TableDataset:
    return labelled(url, corrected=0)


def write_shards(folder: Path) -> str:
    """Three shards of eight records, with their index files."""
    for shard in range(3):
        _write_shard(folder, shard, first_label=8 * shard)
    return str(folder)


def write_shards_again(folder: Path) -> str:
    """The second one was labelled again a minute later."""
    write_shards(folder)
    _write_shard(folder, 1, first_label=108, age=-60)
    return str(folder)


def _write_shard(folder: Path, shard: int, first_label: int, age: int = 0) -> None:
    body = _Bytes()
    writer = TarWriter(body)
    for number in range(8):
        writer.write(f"{8 * shard + number:03}", {"cls": b"%d" % (first_label + number)})
    writer.close()
    write_files(folder, {f"{shard}.tar": bytes(body), f"{shard}.tar.idx": writer.index()}, age)


class _Bytes(bytearray):
    """A file to append to."""

    def write(self, data: bytes) -> None:
        self.extend(data)


def shards(url: str) -> TarDataset:
    return TarDataset(url, fields=("cls",))


def write_images(folder: Path) -> str:
    """24 photos of two classes, which are wide enough for crops to differ."""
    return write_files(folder, _photos())


@functools.cache
def _photos() -> dict[str, bytes]:
    names = [f"{'cat' if number < SAMPLES // 2 else 'dog'}/{number:02}.jpg" for number in range(SAMPLES)]
    return {name: pillow_jpeg(scene(40, 32, number), quality=60) for number, name in enumerate(names)}


def images(url: str, cache: Any = None) -> ImageFolder:
    return ImageFolder(url, RandomResizedCrop(8, flip=0.5), cache=cache)


# --- a bad sample


class Broken(Numbered):
    """One sample cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BAD:
            raise ValueError("not an image")
        return super().__getitem__(index)


class AnotherInstead(Broken):
    """The dataset gives any other sample, and nobody hears of it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        try:
            return super().__getitem__(index)
        except ValueError:
            return self[random.randrange(self.length)]


# --- mixtures


def mixture(weights: dict[str, float] | None = None) -> Mixture:
    sources = {"web": Numbered(SAMPLES // 2), "own": Numbered(SAMPLES // 2, first=SAMPLES // 2)}
    return Mixture(sources, weights or {"web": 0.5, "own": 0.5}, num_samples=2 * SAMPLES)


class WeightsForgotten(MixtureSampler):
    """The state lacks the weights that were set during the run."""

    def load_state_dict(self, state: Any) -> None:
        given = in_units(self._mixture.weights_in(self.epoch))
        sources = dict(state["sources"])
        for name, weight in zip(sources, given, strict=True):
            sources[name] = sources[name] | {"weight": weight}
        super().load_state_dict(state | {"sources": sources, "were_set": False, "changes": []})


class CountedAnew(MixtureSampler):
    """What each source has given is computed from the number of samples, and by the weights of today."""

    def load_state_dict(self, state: Any) -> None:
        weights = in_units(self._mixture.weights_in(self.epoch))
        nothing = [0] * len(weights)
        mixing = Mixing(weights, nothing, nothing, 0)
        if state["drawn"]:
            mixing.advance(state["drawn"])
        columns = zip(state["sources"].items(), mixing.counts, mixing.dues, strict=True)
        sources = {name: old | {"samples": samples, "due": due} for (name, old), samples, due in columns}
        super().load_state_dict(state | {"sources": sources})


# --- random numbers: what stands for (seed, epoch, index) where samples are made


@contextlib.contextmanager
def _told(epoch_of: Any) -> Iterator[None]:
    """Those who make batches are told what `epoch_of(maker, seed, epoch)` gives as their seed and epoch."""
    told = BatchMaker.start_epoch

    def start_epoch(self: Any, start: EpochStart) -> None:
        seed, epoch = epoch_of(self, start.seed, start.epoch)
        told(self, start._replace(seed=seed, epoch=epoch))

    BatchMaker.start_epoch = start_epoch  # type: ignore[method-assign]
    try:
        yield
    finally:
        BatchMaker.start_epoch = told  # type: ignore[method-assign]


def first_epoch_for_ever(number: int) -> Any:
    """Workers that live on do not hear of a new epoch."""

    def epoch_of(maker: Any, seed: int, epoch: int) -> tuple[int, int]:
        maker.told_first = getattr(maker, "told_first", epoch)
        return seed, maker.told_first

    return _told(epoch_of)


def seeds_from_the_start(number: int) -> Any:
    """Whoever resumes begins with the first random numbers of the run."""
    return _told(lambda maker, seed, epoch: (seed, 0 if number else epoch))


@contextlib.contextmanager
def one_seed_for_both_views(number: int) -> Iterator[None]:
    """The two views of an image get the seed of the first."""
    digest = composed.digest
    composed.digest = lambda seed, part: digest(seed, 0)
    try:
        yield
    finally:
        composed.digest = digest
