"""examples/resnet50/infer.py: pruning removes channels that do nothing; int8 keeps the accuracy."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from torch import nn

import fastload
from tests.resnet50 import RESNET50  # puts examples/resnet50 on sys.path

import infer  # isort: skip
from model import MODELS, ResNet, check_classes  # isort: skip
from tests.patience import PATIENCE

ROOT = Path(fastload.__file__).parents[1]
VARIANTS: list[dict[str, Any]] = [{}, {"variant": "d"}, {"blur": True}]


def network(bottleneck: bool = False, **variant: Any) -> ResNet:
    """A network with the statistics and scales of a trained one, not the trivial ones of a new one."""
    torch.manual_seed(5)
    made = ResNet([1, 1], 8, bottleneck=bottleneck, width=16, **variant).eval()
    for layer in made.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor, (low, high) in (
                (layer.running_mean, (-1, 1)),
                (layer.running_var, (0.5, 2)),
                (layer.weight, (0.5, 2)),
                (layer.bias, (-1, 1)),
            ):
                nn.init.uniform_(tensor, low, high)
    return made


def silence(made: ResNet, every: int = 2) -> None:
    """Make channels inside the blocks and the stem do nothing: small filters, and norms that return 0."""
    for chain in (made.stem, *(block.branch for block in made.stages)):
        norms = [index for index, layer in enumerate(chain) if isinstance(layer, nn.BatchNorm2d)]
        with torch.no_grad():
            for index in norms[:-1]:
                chain[index].weight[::every] = 0
                chain[index].bias[::every] = 0
                chain[index - 1].weight[::every] *= 0.01


@pytest.mark.parametrize("by", ["l1", "gamma"])
@pytest.mark.parametrize("variant", VARIANTS, ids=["b", "d", "blur"])
@pytest.mark.parametrize("bottleneck", [False, True], ids=["basic", "bottleneck"])
def test_pruning_removes_channels_that_do_nothing_first(
    bottleneck: bool, variant: dict[str, Any], by: str
) -> None:
    made = network(bottleneck, **variant)
    shapes = [weight.shape for weight in made.parameters()]
    silence(made)
    images = torch.randn(2, 3, 64, 64)
    pruned = infer.prune(made, 1 / 2, by)
    with torch.no_grad():
        torch.testing.assert_close(pruned(images), made(images), rtol=1e-3, atol=1e-3)
    assert size(pruned) < 0.7 * size(made)
    assert [weight.shape for weight in made.parameters()] == shapes, "the original is unchanged"


@pytest.mark.stress
@pytest.mark.parametrize("by", ["l1", "gamma"])
def test_guard_removed_pruning_of_other_channels_changes_the_outputs(by: str) -> None:
    """Where the silent channels are not those with small filters, pruning is not exact."""
    made = network()
    silence(made)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        for layer in made.modules():
            if isinstance(layer, nn.Conv2d):
                layer.weight.copy_(layer.weight.flip(0))
            elif isinstance(layer, nn.BatchNorm2d):
                layer.weight.copy_(layer.weight.abs().clamp(min=0.5))
        wrong = infer.prune(made, 1 / 2, by)
        assert not torch.allclose(wrong(images), made(images), rtol=1e-3, atol=1e-3)


def size(made: nn.Module) -> int:
    return sum(weight.numel() for weight in made.parameters())


@pytest.mark.parametrize("variant", VARIANTS, ids=["b", "d", "blur"])
def test_folded_network_has_the_same_outputs(variant: dict[str, Any]) -> None:
    made = network(**variant)
    images = torch.randn(2, 3, 64, 64)
    folded = infer.folded(made)
    with torch.no_grad():
        torch.testing.assert_close(folded(images), made(images), rtol=1e-4, atol=1e-4)
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in folded.modules()) == 0


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_pruning_refuses_a_wrong_share(share: float) -> None:
    with pytest.raises(ValueError, match=f"below 1, found {share}"):
        infer.prune(network(), share)


def test_padded_batch_returns_only_its_own_outputs() -> None:
    made, images = network(), torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(infer.padded(made, images, 8), made(images), rtol=1e-4, atol=1e-4)


def make_colours(directory: Path, count: int) -> None:
    """Four classes of `count` noisy JPEGs, each of a colour."""
    rng = np.random.default_rng(count)
    for name, colour in {
        "blue": (60, 90, 160),
        "green": (80, 140, 80),
        "grey": (115,) * 3,
        "red": (160, 90, 70),
    }.items():
        (directory / name).mkdir(parents=True)
        for number in range(count):
            pixels = (rng.normal(colour, 40, (48, 48, 3)) + rng.normal(0, 15)).clip(0, 255).astype(np.uint8)
            (directory / name / f"{number}.jpg").write_bytes(simplejpeg.encode_jpeg(pixels))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other make such small networks several times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "not a checkpoint of train.py's images: KeyError"),
        ({"classes": ["cat", "dog"]}, r"2 classes \(cat, dog ...\), and there/train has 1 \(cat ...\)"),
    ],
)
def test_another_checkpoint_is_refused_in_words(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    torch.save({"record": {"model": "small", **record}}, tmp_path / "checkpoint.pt")
    args = infer.parse([str(tmp_path / "checkpoint.pt"), "there"])
    with pytest.raises(SystemExit, match=message):
        infer.load(args, ["cat"])


def test_other_classes_to_evaluate_are_refused_by_name() -> None:
    trained, evaluated = (argparse.Namespace(classes=classes) for classes in (["a", "b", "c"], ["b", "c"]))
    check_classes(trained, trained)
    with pytest.raises(SystemExit, match=r"only in the first are \['a'\], only in the second \[\]"):
        check_classes(trained, evaluated)


@pytest.mark.parametrize("variant", VARIANTS, ids=["b", "d", "blur"])
def test_the_network_is_that_of_the_checkpoint(tmp_path: Path, variant: dict[str, Any]) -> None:
    record = {"model": "small", "variant": "b", "blur": False, "classes": ["cat", "dog"]} | variant
    made = MODELS["small"](classes=2, **variant)
    torch.save({"model": made.state_dict(), "ema": None, "record": record}, tmp_path / "checkpoint.pt")
    loaded = infer.load(infer.parse([str(tmp_path / "checkpoint.pt"), "there"]), ["cat", "dog"])
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(images), made.eval()(images))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.stress
@pytest.mark.parametrize("pruned", [0.0, 0.5])
def test_table_of_a_small_network_keeps_the_accuracy(tmp_path: Path, pruned: float) -> None:
    """A small network, trained for some seconds. The long form prunes, and quantises again."""
    for part, count in (("train", 48), ("val", 25)):
        make_colours(tmp_path / part, count)
    arguments = [str(tmp_path / "checkpoint.pt"), str(tmp_path), "--json", str(tmp_path / "table.json")]
    arguments += ["--size", "32", "--batch-size", "32", "--num-workers", "1"]
    arguments += ["--prune", str(pruned), "--finetune", "10", "--calibrate", "4"]

    torch.manual_seed(0)
    made = MODELS["small"](classes=4)
    loader = infer.make_loader(infer.parse(arguments), "train", fastload.RandomResizedCrop(32), shuffle=True)
    infer.finetune(made, loader, 40, 0.05)
    record = {"model": "small", "variant": "b", "blur": False, "classes": loader.dataset.classes}
    torch.save({"model": made.state_dict(), "ema": None, "record": record}, tmp_path / "checkpoint.pt")

    done = subprocess.run(
        [sys.executable, str(RESNET50 / "infer.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["network"]: row for row in json.loads((tmp_path / "table.json").read_text())["rows"]}
    assert list(rows) == ["fp32", "fp32 folded", "int8"] + ["pruned", "pruned int8"] * (pruned > 0)
    assert all(row["images_per_second"] > 0 and row["alone"] > 0 for row in rows.values())
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[1:]] == list(rows)

    accuracy = {name: row["accuracy"] for name, row in rows.items()}
    assert accuracy["fp32"] > 0.5, "four classes"
    assert accuracy["fp32 folded"] == accuracy["fp32"]
    assert abs(accuracy["int8"] - accuracy["fp32"]) < 0.05
    assert rows["int8"]["megabytes"] == rows["fp32"]["megabytes"] / 4
    if pruned:
        assert abs(accuracy["pruned int8"] - accuracy["pruned"]) < 0.05
        assert accuracy["pruned"] > 0.5
        assert rows["pruned"]["weights"] < 0.8 * rows["fp32"]["weights"]
