"""Training frameworks run on our class unchanged. Those that are not installed are skipped by name."""

from __future__ import annotations

import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload import DataLoader, DistributedSampler
from tests.kinds import photo
from tests.loaderdata import Numbers
from tests.scripts import serve_scripts


def _row(index: int) -> torch.Tensor:
    return torch.full((4,), float(index))


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.seen: list[int] = []

        def training_step(self, batch: torch.Tensor) -> Any:
            self.seen += batch[:, 0].int().tolist()
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    model = Model()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path
    )
    loader = DataLoader(Numbers(12, _row), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    trainer.fit(model, loader)
    assert sorted(model.seen) == sorted([*range(12)] * 2)
    assert isinstance(trainer.train_dataloader, DataLoader)


@pytest.mark.filterwarnings("ignore")
def test_accelerate_keeps_the_state_of_a_loader(tmp_path: Path) -> None:
    """`prepare` keeps no state of a loader, so it is registered."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)

    def new_loader() -> DataLoader[Any]:
        loader = DataLoader(Numbers(12, _row), batch_size=4, shuffle=True, num_workers=1)
        accelerator.register_for_checkpointing(loader)
        return loader

    batches = iter(new_loader())
    seen = next(batches)[:, 0].tolist()
    accelerator.save_state(str(tmp_path))
    accelerator._custom_objects.clear()
    resumed = new_loader()
    accelerator.load_state(str(tmp_path))
    assert sorted(seen + [int(x) for batch in resumed for x in batch[:, 0]]) == list(range(12))


@pytest.mark.filterwarnings("ignore")
def test_accelerate_keeps_the_loader() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    given = DataLoader(Numbers(12, _row), batch_size=4, shuffle=True, num_workers=1)
    loader = accelerator.prepare(given)
    assert loader is given
    assert sorted(int(x) for batch in loader for x in batch[:, 0]) == list(range(12))


def _accelerate(device: str, processes: int) -> types.ModuleType:
    """A stand-in for the module, as it is after `Accelerator()`."""
    module: Any = types.ModuleType("accelerate")
    state = types.SimpleNamespace(device=torch.device(device), num_processes=processes)
    module.PartialState = lambda: state
    module.state = types.SimpleNamespace(is_initialized=lambda: True)
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("device", "processes", "options", "kept"),
    [
        ("cpu", 1, {"shuffle": True}, True),
        ("cuda", 1, {"shuffle": True, "device": "cpu"}, True),  # some device was chosen
        ("cuda", 1, {"shuffle": True}, False),
        ("cpu", 2, {"shuffle": True}, False),
        ("cpu", 2, {"sampler": DistributedSampler(range(4), 2, 0)}, True),
        ("cpu", 2, {"sampler": torch.utils.data.DistributedSampler(range(4), 2, 0)}, True),  # type: ignore[arg-type]
    ],
)
def test_accelerate_keeps_a_loader_that_has_what_it_would_add(
    monkeypatch: pytest.MonkeyPatch, device: str, processes: int, options: dict[str, Any], kept: bool
) -> None:
    """`Accelerator.prepare_data_loader` asks each loader for this attribute first."""
    monkeypatch.setitem(sys.modules, "accelerate", _accelerate(device, processes))
    loader = DataLoader(Numbers(4, _row), batch_size=4, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert getattr(loader, "_is_accelerate_prepared", False) == kept
    assert len(said) == (not kept)


def test_warning_before_accelerate_makes_a_loader_of_torch() -> None:
    loader = DataLoader(Numbers(4, _row), batch_size=4)
    with pytest.warns(
        RuntimeWarning, match=r"accelerator.prepare would .* device=accelerator.device and sampler="
    ):
        assert not getattr(loader, "_is_accelerate_prepared", False)
    with pytest.raises(AttributeError, match=r"^'DataLoader' object has no attribute 'stat'$"):
        loader.stat  # type: ignore[attr-defined]  # noqa: B018


def test_warning_before_ray_makes_a_loader_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's `prepare_data_loader` gives a loader a DistributedSampler, where there are several ranks."""
    monkeypatch.setitem(sys.modules, "ray.train.torch", types.ModuleType("ray.train.torch"))
    with warnings.catch_warnings(action="error"):
        DataLoader(Numbers(4, _row), shuffle=True)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        DataLoader(Numbers(4, _row))  # one that each rank iterates over as a whole, as for evaluation
    with pytest.warns(RuntimeWarning, match="prepare_data_loader of Ray would"):
        DataLoader(Numbers(4, _row), shuffle=True)


TRAINER = """
import sys, types
import torch.utils.data
from fastload import {names}

if __name__ == "__main__":
    sys.modules["transformers.trainer"] = types.ModuleType("transformers.trainer")
    ImageFolder(sys.argv[1], CenterCrop(8))[0]
    dataset = ImageFolder(sys.argv[1], CenterCrop(8))
    for _ in torch.utils.data.DataLoader(dataset, 2, num_workers={workers}): pass
"""


def test_warning_where_trainer_got_a_dataset_alone(tmp_path: Path) -> None:
    for number in range(4):
        path = tmp_path / "photos" / "cat" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(number))
    cases = {
        ("CenterCrop, ImageFolder", 0): 1,
        ("CenterCrop, ImageFolder", 2): 1,
        ("CenterCrop, DataLoader, ImageFolder", 0): 0,
    }
    scripts = [tmp_path / f"train{number}.py" for number in range(len(cases))]
    for script, (names, workers) in zip(scripts, cases, strict=True):
        script.write_text(TRAINER.format(names=names, workers=workers))
    with serve_scripts("import torch.utils.data") as forks:
        done = forks.run_files(*(([script, tmp_path / "photos"], {}) for script in scripts))
    assert [one.returncode for one in done] == [0] * len(cases), done
    sentence = "Trainer reads this ImageFolder through a torch.utils.data.DataLoader"
    assert [one.stderr.count(sentence) for one in done] == list(cases.values())
