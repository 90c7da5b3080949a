"""`seed=`: what samples draw is a function of (seed, epoch, index); generators of devices are left alone."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

import fastload
from fastload import DataLoader
from tests.loaderdata import seed_all
from tests.sharddata import jpeg, shards

LENGTH = 400


def drawn(seed: int, epoch: int, index: int) -> tuple[float, float, float]:
    """What a sample draws from torch, Python and numpy: each seeded from the digest of the three numbers."""
    text = repr((seed, epoch, index)).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    torch_number = torch.rand((), generator=torch.Generator().manual_seed(number & (2**63 - 1))).item()
    state = np.random.RandomState(number & (2**32 - 1))
    return torch_number, random.Random(number).random(), state.rand()


class Drawing(Dataset[Any]):
    """Samples of which those in `where` draw from every generator, the others from none."""

    def __init__(self, where: range) -> None:
        self.where = where
        self.calls: list[int] = []

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.calls.append(index)
        if index not in self.where:
            return index, (0.0, 0.0, 0.0)
        return index, (torch.rand(()).item(), random.random(), np.random.rand())


ALL, NONE, SOME = range(LENGTH), range(0), range(305, LENGTH, 7)


def _ways(*ways: tuple[range, int, int | None], marks: Any = ()) -> list[Any]:
    names = {ALL: "all", NONE: "none", SOME: "some, late"}
    return [pytest.param(*way, marks=marks, id=f"{names[way[0]]}-{way[1]}-{way[2]}") for way in ways]


@pytest.mark.parametrize(
    ("where", "workers", "batch_size"),
    [
        *_ways((ALL, 0, 16), (NONE, 0, 16), (SOME, 0, 16), (ALL, 1, 64), (SOME, 1, 64)),
        *_ways((NONE, 2, 5), (SOME, 2, 5), (SOME, 2, None)),
        *_ways((NONE, 1, 64), (ALL, 2, 5), (ALL, 2, None), (NONE, 2, None), marks=pytest.mark.stress),
    ],
)
def test_samples_that_draw_are_functions_of_seed_epoch_and_index(
    where: range, workers: int, batch_size: int | None
) -> None:
    loader = DataLoader(
        Drawing(where), batch_size, shuffle=True, num_workers=workers, seed=5, collate_fn=lambda batch: batch
    )
    for epoch in range(2):
        batches: list[Any] = list(loader)
        samples = [sample for batch in batches for sample in batch] if batch_size else batches
        assert sorted(index for index, _ in samples) == list(range(LENGTH))
        for index, numbers in samples:
            assert numbers == (drawn(5, epoch, index) if index in where else (0, 0, 0)), index


@pytest.mark.parametrize(("where", "again"), [(ALL, 0), (NONE, 0), (SOME, 1)], ids=["all", "none", "late"])
def test_samples_are_made_once_but_the_first_late_one_that_draws(where: range, again: int) -> None:
    dataset = Drawing(where)
    assert len(list(DataLoader(dataset, 16, seed=5))) == LENGTH / 16
    assert len(dataset.calls) == LENGTH + again
    assert sorted(set(dataset.calls)) == list(range(LENGTH))


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_index_draws_the_same_in_a_list_an_array_or_a_tensor(kind: Any) -> None:
    batches = ([3, 5], kind([3, 5]))
    loaders = [DataLoader(Drawing(ALL), batch_sampler=[batch], seed=1) for batch in batches]
    rows = [torch.stack([torch.as_tensor(part) for part in batch[1]]) for run in loaders for batch in run]
    assert torch.equal(*rows)


class Failing(Drawing):
    """Samples fail by chance, late ones only."""

    def __getitem__(self, index: int) -> Any:
        if index in self.where and random.random() < 0.5:
            raise ValueError("bad luck")
        return index


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_samples_that_fail_by_chance_are_the_same_ones_for_any_number_of_workers(workers: int) -> None:
    loader = DataLoader(Failing(SOME), 16, num_workers=workers, seed=5, on_error="repeat")
    list(loader)
    bad = {int(key) for key, _ in loader.stats()["bad"]}
    assert bad == {index for index in SOME if drawn(5, 0, index)[1] < 0.5}


def mixed(batch: Any) -> Any:
    return default_collate(batch), torch.rand(()).item(), random.random(), np.random.rand()


@pytest.mark.parametrize("where", [ALL, NONE, SOME], ids=["all", "none", "some, late"])
def test_collate_fn_that_draws_does_not_depend_on_the_number_of_workers(where: range) -> None:
    epochs = [
        [batch[1:] for batch in DataLoader(Drawing(where), 16, num_workers=n, seed=5, collate_fn=mixed)]
        for n in (0, 1, 2)
    ]
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(set(epochs[0])) == LENGTH / 16


def test_trainers_generators_of_all_kinds_are_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = []
    for device in (torch.cuda, torch.mps, torch.xpu):
        monkeypatch.setattr(device, "manual_seed", seeded.append)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    monkeypatch.setattr(torch.xpu, "manual_seed_all", seeded.append)
    seed_all(1)
    loader = iter(DataLoader(Drawing(ALL), 16, seed=5))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    seeded.clear()
    list(loader)
    assert not seeded
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert str(np.random.get_state()) == str(before[2])


def noisy(fields: Any) -> Any:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


@pytest.mark.parametrize("collate_fn", [None, mixed], ids=["in place", "collated"])
def test_function_beside_a_fused_transform_draws_the_same_for_any_number_of_workers(
    collate_fn: Any, tmp_path: Path
) -> None:
    for name, content in shards("tar", index=True).items():
        (tmp_path / name).write_bytes(content)
    data = fastload.TarDataset(
        str(tmp_path), transform={"jpg": fastload.RandomResizedCrop(16), "json": noisy}
    )

    def epoch(workers: int, batch_size: int, seed: int) -> dict[Any, Any]:
        loader = DataLoader(data, batch_size, num_workers=workers, seed=seed, collate_fn=collate_fn)
        found = {}
        for batch in loader:
            samples = batch[0] if collate_fn else batch
            for key, numbers in zip(samples["__key__"], zip(*samples["json"], strict=True), strict=True):
                found[key] = [float(number) for number in numbers]
        return found

    expected = epoch(0, 16, 5)
    assert len({tuple(numbers) for numbers in expected.values()}) == len(data)
    assert epoch(1, 16, 5) == epoch(2, 7, 5) == expected
    assert epoch(0, 16, 6) != expected
    data.close()


def add_one_and_draw_late(values: Any) -> Any:
    values += 1
    if values[0] > 100:
        random.random()
    return values


def test_function_that_draws_late_and_changes_its_field_gets_it_once(tmp_path: Path) -> None:
    """A hundred samples without a draw come before."""
    (tmp_path / "photo.jpg").write_bytes(jpeg(0))
    data = fastload.TableDataset(
        {"photo": ["photo.jpg"] * 101, "values": [[row] for row in range(101)]},
        {"photo": fastload.File("photo"), "values": "values"},
        url=tmp_path,
        transform={"photo": fastload.CenterCrop(8), "values": add_one_and_draw_late},
    )
    (batch,) = DataLoader(data, 101, seed=1)
    assert batch["values"].flatten().tolist() == list(range(1, 102))
    data.close()
