"""The parts of examples/resnet50, one by one, against the formulas that they name."""

from __future__ import annotations

import argparse
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import resnet50  # it puts examples/resnet50 on sys.path

import model  # isort: skip
import optim  # isort: skip
import step  # isort: skip
import options  # isort: skip
import ranks  # isort: skip
import train  # isort: skip
from extras import ceiling, simulate  # isort: skip
from ranks import Ranks, StopVote, check_identical  # isort: skip

ALONE = Ranks(0, 1, 1, torch.device("cpu"))


# --- LARS, arXiv 1708.03888


def paper_lars(
    weights: list[list[float]],
    gradients: list[list[list[float]]],
    rates: list[float],
    m: float,
    b: float,
    eta: float,
) -> list[list[float]]:
    """Algorithm 1, written down with plain floats: per step and layer, rate, buffer, weights."""
    weights = [list(layer) for layer in weights]
    buffers = [[0.0] * len(layer) for layer in weights]
    for gradient, rate in zip(gradients, rates, strict=True):
        for w, g, v in zip(weights, gradient, buffers, strict=True):
            w_norm, g_norm = math.hypot(*w), math.hypot(*g)
            local = eta * w_norm / (g_norm + b * w_norm)
            for i in range(len(w)):
                v[i] = m * v[i] + rate * local * (g[i] + b * w[i])
            for i in range(len(w)):
                w[i] -= v[i]
    return weights


@pytest.mark.parametrize(
    ("momentum", "decay", "trust"), [(0.9, 0.0, 0.001), (0.9, 0.05, 0.02), (0.0, 0.01, 1.0)]
)
def test_lars_equals_the_paper(momentum: float, decay: float, trust: float) -> None:
    torch.manual_seed(1)
    shapes = [(3, 4), (7,), (2, 3, 2, 2)]
    start = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    gradients = [
        [torch.randn(shape, dtype=torch.float64) * 10**k for shape in shapes] for k in (0, -3, 2, 0, 1)
    ]
    rates = [0.1, 0.4, 5.0, 2.0, 0.0]
    expected = paper_lars(
        [w.flatten().tolist() for w in start],
        [[g.flatten().tolist() for g in step] for step in gradients],
        rates,
        momentum,
        decay,
        trust,
    )
    weights = [nn.Parameter(w.clone()) for w in start]
    lars = optim.Lars(weights, lr=0.0, momentum=momentum, weight_decay=decay, trust=trust)
    for gradient, rate in zip(gradients, rates, strict=True):
        for weight, g in zip(weights, gradient, strict=True):
            weight.grad = g.clone()
        lars.param_groups[0]["lr"] = rate
        lars.step()
    for weight, layer in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach().flatten(), torch.tensor(layer, dtype=torch.float64))


def test_lars_without_adaption_is_sgd_with_the_rate_in_the_buffer() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    lars = optim.Lars([{"params": [weight], "adapt": False}], lr=0.5, momentum=0.5)
    for _ in range(2):
        weight.grad = torch.tensor([1.0, -1.0])
        lars.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([1 - 0.5 - 0.75, 2 + 0.5 + 0.75]))


def test_lars_moves_zeros() -> None:
    """A layer that begins at 0 (the last norm's weights, a bias) would stay there with the bare formula."""
    weight, still = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    lars = optim.Lars([weight, still], lr=0.1, trust=0.01)
    weight.grad, still.grad = torch.ones(3), torch.zeros(3)
    lars.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), -0.1))
    assert torch.equal(still.detach(), torch.ones(3))


def test_norms_and_biases_have_no_decay() -> None:
    module = model.MODELS["small"](classes=4)
    decayed, others = optim.parameter_groups(module, 0.1)
    assert decayed["weight_decay"] == 0.1 and decayed["adapt"]
    assert others["weight_decay"] == 0 and not others["adapt"]
    kinds = {id(p): name for name, p in module.named_parameters()}
    assert all("weight" in kinds[id(p)] and p.ndim > 1 for p in decayed["params"])
    assert {p.ndim for p in others["params"]} == {1}
    assert len(decayed["params"]) + len(others["params"]) == len(kinds)


def test_ema_averages_and_exchanges_weights() -> None:
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, 0)
    ema = optim.Ema(module, 0.75)
    nn.init.constant_(module.weight, 4)
    ema.update()
    with ema.in_place():
        assert module.weight.tolist() == [[1, 1]]
    assert module.weight.tolist() == [[4, 4]]
    again = optim.Ema(module, 0.75)
    again.load_state_dict(ema.state_dict())
    with pytest.raises(ZeroDivisionError), again.in_place():
        assert module.weight.tolist() == [[1, 1]]
        raise ZeroDivisionError
    assert module.weight.tolist() == [[4, 4]]


# --- learning rate, batches, resolution


def test_warm_up_and_decays() -> None:
    def rates(decay: str) -> list[float]:
        rate = optim.LearningRate(peak=8, warmup=4, total=14, decay=decay, power=2)
        return [rate.at(i) for i in range(15)]

    for decay in optim.DECAYS:
        assert rates(decay)[:4] == [2, 4, 6, 8]
        assert all(a >= b for a, b in zip(rates(decay)[4:], rates(decay)[5:], strict=False))
    assert rates("polynomial")[4] == 8
    assert rates("polynomial")[9] == pytest.approx(8 * 0.5**2)
    assert rates("cosine")[9] == pytest.approx(4)
    assert rates("linear-cosine")[9] == pytest.approx(8 * (0.5 * 0.5 + 0.001))
    assert rates("polynomial")[14] == 0 and rates("cosine")[14] == pytest.approx(0)
    rate = optim.LearningRate(peak=8, warmup=4, total=14)  # with another batch
    assert rate.at(3.5) == 8 and rate.at(2.5) == 7


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("of_all", [24, 32_768, 81_920])
@pytest.mark.parametrize("limit", [1, 5, 256])
def test_global_batch_is_split_evenly(of_all: int, ranks: int, limit: int) -> None:
    if of_all % ranks:
        with pytest.raises(SystemExit, match="evenly"):
            optim.Batches.split(of_all, ranks, limit)
        return
    batches = optim.Batches.split(of_all, ranks, limit)
    assert batches.micro <= limit
    assert batches.micro * batches.passes * batches.ranks == of_all
    smaller = [n for n in range(1, batches.passes) if batches.per_rank % n == 0]
    assert all(batches.per_rank // n > limit for n in smaller)


@pytest.mark.parametrize(
    ("of_all", "ranks", "limit", "refused"),
    [(12302, 2, 256, "of 12,288 or 12,800"), (7, 1, 6, "of 6 or 12"), (12302, 2, 6151, ""), (14, 1, 10, "")],
)
def test_passes_less_than_half_full_are_refused(of_all: int, ranks: int, limit: int, refused: str) -> None:
    if refused:
        with pytest.raises(SystemExit, match=refused):
            optim.Batches.split(of_all, ranks, limit)
    else:
        assert optim.Batches.split(of_all, ranks, limit).micro * 2 >= limit


def test_values_by_epoch() -> None:
    assert optim.by_epoch("224") == {0: 224}
    sizes = optim.by_epoch("0:128,18:224")
    assert sizes == {0: 128, 18: 224}
    assert [optim.value_at(sizes, epoch) for epoch in (0, 17, 18, 90)] == [128, 128, 224, 224]
    for wrong in ("", "0:128,x", "0:1,-2:3", "0:0"):
        with pytest.raises(ValueError):
            optim.by_epoch(wrong)


# --- one update


def arguments(*more: str) -> argparse.Namespace:
    return options.parse(["nowhere", *more])


def tiny(**more: Any) -> step.Task:
    torch.manual_seed(0)
    return step.Task(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), **more)


def test_accumulated_passes_equal_one_large_batch() -> None:
    """A short last pass too: each counts by its share."""
    x, y = torch.randn(10, 4), torch.randint(0, 3, (10,))
    whole, parts = (step.Step(tiny(), arguments("--clip-norm", "0.5"), ALONE, 10) for _ in range(2))
    for number in range(3):
        whole.begin(number, 0, 0.5)
        whole.add(x, y, 1.0, last=True)
        whole.update()
        parts.begin(number, 0, 0.5)
        for start in (0, 4, 8):
            part = slice(start, min(10, start + 4))
            parts.add(x[part], y[part], len(y[part]) / 10, last=start == 8)
        parts.update()
    for one, other in zip(whole.module.parameters(), parts.module.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert whole.loss_sum.item() == pytest.approx(parts.loss_sum.item())


@pytest.mark.parametrize("mode", step.CUDA_GRAPHS)
def test_gradients_add_up_outside_of_cuda_graphs(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The next run of a graph overwrites what it has made, also a gradient that a weight has taken over."""
    monkeypatch.setattr(torch, "compile", lambda network, mode: network)
    marks: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    plain, graphed = (step.Step(tiny(), arguments("--compile", m), ALONE, 10) for m in ("off", mode))
    places = [weight.grad.data_ptr() for weight in graphed.module.parameters()]
    for stepped in (plain, graphed):
        for number in range(2):
            stepped.begin(number, 0, 1.0)
            for part in (slice(0, 3), slice(3, 6)):
                stepped.add(x[part], y[part], 0.5, last=part.stop == 6)
            stepped.update()
    assert [weight.grad.data_ptr() for weight in graphed.module.parameters()] == places
    assert len(marks) == 4
    for one, other in zip(plain.module.parameters(), graphed.module.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_are_clipped() -> None:
    x, y = torch.randn(10, 4) * 100, torch.randint(0, 3, (10,))
    stepped = step.Step(
        tiny(), arguments("--clip-norm", "0.1", "--momentum", "0", "--weight-decay", "0"), ALONE, 10
    )
    before = [weight.detach().clone() for weight in stepped.module.parameters()]
    stepped.begin(0, 0, 1.0)
    stepped.add(x, y, 1.0, last=True)
    stepped.update()
    moved = [a.detach() - b for a, b in zip(stepped.module.parameters(), before, strict=True)]
    assert torch.cat([m.flatten() for m in moved]).norm().item() == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("options", [[], ["--optimizer", "lars"], ["--ema", "0.9"], ["--amp", "bf16"]])
def test_measuring_the_ceiling_leaves_the_state_unchanged(options: list[str]) -> None:
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    args = arguments("--clip-norm", "1", *options)
    undisturbed, measured = (step.Step(tiny(), args, ALONE, 10) for _ in range(2))
    for stepped in (undisturbed, measured):
        for number in range(3):
            stepped.begin(number, 0, 0.1)
            stepped.add(x, y, 1.0, last=True)
            stepped.update()
            if stepped is measured:
                measured_rates = ceiling.measure(stepped, x, y, passes=2, updates=2)
                assert measured_rates.rate > 0 and measured_rates.overlap is None
    assert measured.loss_sum == undisturbed.loss_sum
    for name, value in undisturbed.module.state_dict().items():
        assert torch.equal(value, measured.module.state_dict()[name])


def test_an_average_that_a_resumed_run_adds_begins_with_its_weights() -> None:
    saved = step.Step(tiny(), arguments(), ALONE, 10).state_dict()
    saved["model"] = {name: value + 1 for name, value in saved["model"].items()}
    resumed = step.Step(tiny(), arguments("--ema", "0.9"), ALONE, 10)
    resumed.load_state_dict(saved)
    with resumed.averaged([]):
        for name, value in resumed.module.state_dict().items():
            assert torch.equal(value, saved["model"][name])


@pytest.mark.parametrize(("before", "now"), [("bf16", "fp16"), ("fp16", "off"), ("fp16", "fp16")])
def test_a_resumed_run_may_have_another_precision(before: str, now: str) -> None:
    saved = step.Step(tiny(), arguments("--amp", before), ALONE, 10).state_dict()
    resumed = step.Step(tiny(), arguments("--amp", now), ALONE, 10)
    resumed.load_state_dict(saved)
    assert bool(resumed.state_dict()["scaler"]) == (now == "fp16")


def test_control_group_waits_no_longer_than_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it is a group of its own, for which torch would wait 30 minutes."""
    groups: dict[str, Any] = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0" if name == "RANK" else "1")
    for name, stub in (("is_available", True), ("device_count", 1), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, stub=stub: stub)
    monkeypatch.setattr(ranks.dist, "init_process_group", lambda *_, **options: None)
    monkeypatch.setattr(ranks.dist, "new_group", lambda **options: groups.update(options))
    Ranks.join("cuda", timeout=7)
    assert groups["timeout"].total_seconds() == 7


def test_batch_norm_is_recomputed() -> None:
    """Its statistics are the plain averages over the batches, whatever they were before."""
    norm = nn.BatchNorm1d(3, momentum=0.3)
    batches = [torch.randn(8, 3) * k + k for k in (1, 2, 3)]
    for _ in range(5):
        norm(torch.randn(8, 3) * 100)
    step.prepare_norms(norm, batches, norm, ALONE)
    torch.testing.assert_close(norm.running_mean, torch.stack([b.mean(0) for b in batches]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack([b.var(0) for b in batches]).mean(0))
    assert norm.momentum == 0.3
    kept = norm.running_mean.clone()
    step.prepare_norms(norm, [], norm, ALONE)
    assert torch.equal(norm.running_mean, kept)


@pytest.mark.parametrize(
    ("options", "largest", "ranks", "batches"),
    [
        ([], 4095, 8, 0),
        ([], 4096, 1, 8),
        ([], 256, 9, 8),
        (["--ema", "0.9"], 256, 1, 8),
        (["--ema", "0.9", "--bn-batches", "0"], 8192, 64, 0),
        (["--bn-batches", "3"], 256, 1, 3),
    ],
)
def test_batch_norm_is_recomputed_where_running_averages_lag(
    options: list[str], largest: int, ranks: int, batches: int
) -> None:
    assert train.norm_batches(arguments(*options), largest, ranks) == batches


class Silent:
    """A communication that exchanges nothing, and writes down how it is called."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.buckets: list[Any] = []

    def begin(self, samples: int) -> None:
        self.positions.append(samples)

    def average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self.buckets.append((bucket.buffer().clone(), len(bucket.gradients()), len(bucket.parameters())))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer().zero_())
        return future

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_the_ceiling_has_the_sparsity_of_the_epoch_and_its_own_exchange() -> None:
    """Every measured update is at the position of the last real one, the bare exchange is the hook's."""
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    stepped = step.Step(tiny(), arguments(), ALONE, 10)
    stepped.communication = Silent()
    stepped.begin(7, 12345, 0.1)
    stepped.add(x, y, 1.0, last=True)
    stepped.update()
    rates = ceiling.measure(stepped, x, y, passes=1, updates=2)
    assert set(stepped.communication.positions) == {12345}
    assert len(stepped.communication.buckets) == 3
    for buffer, gradients, weights in stepped.communication.buckets:
        assert buffer.abs().min() > 0 and (gradients, weights) == (4, 4), "again random in every exchange"
    assert rates.bare > 0 and rates.exposed == 0 and rates.overlap == 1


def test_top5() -> None:
    outputs = torch.arange(10.0).repeat(3, 1)
    assert step.top5(outputs, torch.tensor([9, 5, 4])) == 2
    assert step.top5(outputs[:, :3], torch.tensor([0, 1, 2])) == 3, "fewer classes than five"


# --- options


@pytest.mark.parametrize(
    ("given", "passes"),
    [
        ([], 20),
        (["--target", "0.7"], 0),
        (["--target-top5", "0.9"], 0),
        (["--mllog", "file"], 0),
        (["--mllog", "file", "--ceiling-steps", "3"], 3),
    ],
)
def test_the_ceiling_is_not_measured_where_the_time_is(given: list[str], passes: int) -> None:
    assert options.parse(["nowhere", *given], add_options=model.options).ceiling_steps == passes


@pytest.mark.parametrize(("passes", "updates"), [(1, 4), (3, 1), (16, 1)])
def test_a_measurement_of_the_ceiling_has_few_passes(
    passes: int, updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def measured(step: Any, inputs: Any, targets: Any, *numbers: int) -> ceiling.Ceiling:
        called.append(numbers)
        return ceiling.Ceiling(1.0)

    monkeypatch.setattr(ceiling, "measure", measured)
    run = argparse.Namespace(
        step=argparse.Namespace(communication=None),
        full=(torch.zeros(2), torch.zeros(2)),
        batch=optim.Batches(2 * passes, 1, 2),
        ranks=ALONE,
        loader=argparse.Namespace(stats=lambda: {"verdict": "", "limit": ""}),
    )
    ceilings = ceiling.Ceilings(4)
    for _ in range(2):
        ceilings(run, argparse.Namespace(after_first=(2, 1.0), waited=0.0))
    assert called == [(passes, updates)]


def test_the_schedule_is_a_factor_of_the_rates_of_an_own_optimizer() -> None:
    def two_rates(module: nn.Module, args: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [{"params": [p], "lr": 0.1 * 2**i} for i, p in enumerate(module.parameters())]
        )

    stepped = step.Step(tiny(), options.parse(["nowhere"], own_optimizer=True), ALONE, 10, two_rates)
    for factor in (0.5, 1.0, 0.25):
        stepped.begin(0, 0, factor)
        rates = [group["lr"] for group in stepped.optimizer.param_groups]
        assert rates == pytest.approx([0.1 * factor, 0.2 * factor, 0.4 * factor, 0.8 * factor])


@pytest.mark.parametrize("own_optimizer", [False, True])
def test_the_rate_is_proportional_to_the_batch_of_an_epoch(own_optimizer: bool) -> None:
    args = options.parse(
        ["nowhere", "--batch-by-epoch", "1:128", "--decay", "constant", "--warmup", "0"],
        own_optimizer=own_optimizer,
    )
    batches = {0: optim.Batches(512, 1, 64), 1: optim.Batches(128, 1, 64)}
    rates = []
    for epoch, batch in batches.items():
        run = argparse.Namespace(
            args=args,
            batches=batches,
            batch=batch,
            progress=train.Progress(epoch=epoch),
            schedule=optim.LearningRate(1.0, 0, 100, "constant"),
            _updates=lambda epoch: 10,
        )
        rates.append(train.Run._rate(run))
    assert rates == pytest.approx([1, 0.25] if own_optimizer else [0.2, 0.05])


IMAGES, OWN = {"add_options": model.options}, {"own_optimizer": True}


@pytest.mark.parametrize(
    ("given", "what", "message"),
    [
        # of images, without images
        *(
            (f"--{option}", {}, f"unrecognized arguments: --{option}")
            for option in ("model=small", "label-smoothing=0.2")
        ),
        # of the optimizer, with another one
        ("--momentum=0.5", OWN, "unrecognized arguments: --momentum=0.5"),
        ("--communication=dgc", OWN, "--communication dgc has its own optimizer"),
        # what would do nothing
        ("--batch-by-epoch 0:8", IMAGES, "the batch of epoch 0 is --global-batch"),
        ("--no-eval --target 0.7", IMAGES, "a target needs an evaluation"),
        ("--simulate-gpu-rate 9 --target-top5 0.7", IMAGES, "a target needs an evaluation"),
        ("--optimizer lars --nesterov", IMAGES, "--nesterov is for --optimizer sgd"),
        ("--resolution 1:128", IMAGES, "resolutions must begin with epoch 0, found '1:128'"),
    ],
)
def test_options_are_refused(
    given: str, what: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options.parse(["nowhere", *given.split()], **what)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--optimizer", "lars"], "with --optimizer sgd, and here it is lars: give the same"),
        (["--momentum", "0.8"], "with --momentum 0.9, and here it is 0.8"),
        (["--communication", "dgc"], "with --communication fp32, and here it is dgc"),
        (["--batch-by-epoch", "2:24,4:48"], "with --batch-by-epoch not given, and here it is 2:24,4:48"),
        (["--model", "small"], "with --model resnet50, and here it is small"),
        ([], "with other classes: give another --out"),
        (["--base-lr", "0.2", "--epochs", "5"], ""),
    ],
)
def test_a_resumed_run_has_the_options_of_its_checkpoint(given: list[str], message: str) -> None:
    def kept(*more: str, classes: str = "cat") -> tuple[dict[str, Any], argparse.Namespace]:
        args = options.parse(["nowhere", *more], add_options=model.options)
        return options.kept(args, {"model": args.model, "classes": [classes]}), args

    before, _ = kept()
    now, args = kept(*given, classes="dog" if "classes" in message else "cat")
    if message:
        with pytest.raises(SystemExit, match=message):
            options.refuse_changes(before, now, args)
    else:
        options.refuse_changes(before, now, args)


# --- pretrained weights


def as_torchvision(network: model.ResNet) -> dict[str, torch.Tensor]:
    """Its weights under the names of torchvision's ResNets."""
    counts, names, number = [3, 4, 6, 3], {}, 0
    for layer, count in enumerate(counts, start=1):
        for block in range(count):
            for kind, index in (("conv", 0), ("bn", 1)):
                for k in (1, 2, 3):
                    names[f"layer{layer}.{block}.{kind}{k}"] = f"stages.{number}.branch.{3 * (k - 1) + index}"
                names[f"layer{layer}.{block}.downsample.{index}"] = f"stages.{number}.shortcut.{index}"
            number += 1
    ours = {ours: theirs for theirs, ours in names.items()}
    ours |= {"stem.0": "conv1", "stem.1": "bn1", "classifier": "fc"}
    state = {}
    for name, value in network.state_dict().items():
        layer_name, _, last = name.rpartition(".")
        state[f"{ours[layer_name]}.{last}"] = value
    return state


@pytest.mark.parametrize(
    ("kind", "classes"),
    [
        ("own", 7),
        ("own", 10),
        ("own with averages", 7),
        ("own with averages", 10),
        ("torchvision", 7),
        pytest.param("torchvision", 10, marks=pytest.mark.stress),  # a ResNet-50, which takes seconds
    ],
)
def test_pretrained_weights_are_loaded_but_for_a_head_of_other_classes(kind: str, classes: int) -> None:
    torch.manual_seed(1)
    name = "resnet50" if kind == "torchvision" else "small"
    trained, network = model.MODELS[name](classes=10), model.MODELS[name](classes=classes)
    saved: dict[str, Any] = {"model": trained.state_dict(), "ema": None}
    if kind == "own with averages":
        saved["ema"] = {"average": [weight + 1 for weight in trained.parameters()]}
    if kind == "torchvision":
        saved = as_torchvision(trained)
    new = network.state_dict()
    said = model.load_pretrained(network, saved, "FILE")
    shift = 1 if kind == "own with averages" else 0
    for name, weight in network.named_parameters():
        head = name.startswith("classifier") and classes == 7
        wanted = new[name] if head else trained.state_dict()[name] + shift
        assert torch.equal(weight.detach(), wanted)
    total = len(new)
    if classes == 7:
        width = new["classifier.weight"].shape[1]
        assert said == (
            f"loaded {total - 2} of {total} weights of FILE; new: "
            f"classifier.weight (7, {width}), classifier.bias (7,)"
        )
    else:
        assert said == f"loaded {total} of {total} weights of FILE; new: none"


def small(**options: Any) -> model.ResNet:
    return model.MODELS["small"](classes=4, **options)


def zeros(network: nn.Module) -> dict[str, Any]:
    return {name: torch.zeros(9) for name in network.state_dict()}


@pytest.mark.parametrize(
    ("network", "saved", "says"),
    [
        (
            small(),
            {"model": small(blur=True, variant="d").state_dict(), "ema": None},
            r"\d+ of \d+ weights do",
        ),
        (small(), {"model": {}, "ema": {"average": [torch.zeros(2)]}}, "it has 1 averaged weights, and this"),
        (nn.Linear(4, 3), zeros(nn.Linear(4, 3)), "2 of 2 weights do not fit"),
        (nn.Sequential(nn.Linear(4, 3)), zeros(nn.Sequential(nn.Linear(4, 3))), "2 of 2 weights do not fit"),
    ],
    ids=["another", "averages of another", "none fits", "none fits, nested"],
)
def test_weights_of_another_network_are_refused(network: nn.Module, saved: dict[str, Any], says: str) -> None:
    with pytest.raises(SystemExit, match=f"FILE is of another network: {says}"):
        model.load_pretrained(network, saved, "FILE")


def test_a_checkpoint_of_another_network_is_refused_on_resume() -> None:
    saved = step.Step(tiny(), arguments(), ALONE, 10).state_dict()
    other = step.Step(step.Task(nn.Linear(4, 3)), arguments(), ALONE, 10)
    with pytest.raises(SystemExit, match="the checkpoint is of another network"):
        other.load_state_dict(saved)


# --- ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(SystemExit, match="--device cuda: torch finds no GPU here"):
        Ranks.join("cuda")


@pytest.mark.parametrize(("rank", "said"), [(0, "rank 0 of 2 waits at localhost:11234\n"), (1, "")])
def test_rank_0_of_srun_says_where_it_waits(
    rank: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in resnet50.variables("srun", rank, 2, 1234).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", "11234")
    assert ranks._address(rank, 2, 1) == ("localhost", 11234)
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-09,12],login", "gpu07"),
        ("gpu3", "gpu3"),
        ("a-1,a-2", "a-1"),
        ("rack[1-2]node[10,11]-ib", "rack1node10-ib"),
        ("", ""),
    ],
)
def test_first_host_of_slurms_list(nodes: str, first: str) -> None:
    assert ranks.first_host(nodes) == first


def test_ranks_on_two_nodes_of_mpirun_ask_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in resnet50.variables("mpirun", 1, 4, 1234).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    with pytest.raises(
        SystemExit, match=r"rank 1 of 4 on 2 nodes.*set MASTER_ADDR to its host and MASTER_PORT"
    ):
        Ranks.join("cpu")


# --- models


@pytest.mark.parametrize("variant", ["b", "d"])
@pytest.mark.parametrize("blur", [False, True])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.stress] * (n == "resnet50")) for n in sorted(model.MODELS)],
)
def test_models_at_two_resolutions(name: str, variant: str, blur: bool) -> None:
    with torch.device("meta"):
        network = model.MODELS[name](classes=10, variant=variant, blur=blur)
        for side in (64, 96):
            assert network(torch.empty(2, 3, side, side)).shape == (2, 10)


def test_resnet50_has_the_known_parameters() -> None:
    with torch.device("meta"):
        network = model.resnet50(classes=1000)
    assert sum(p.numel() for p in network.parameters()) == 25_557_032
    assert sum(p.numel() for p in model.resnet18(classes=1000).parameters()) == 11_689_512


def test_blocks_start_as_the_identity() -> None:
    network = model.MODELS["small"](classes=2, bn_momentum=0.02)
    last = [[n for n in block.branch if isinstance(n, nn.BatchNorm2d)][-1] for block in network.stages]
    assert all(not norm.weight.any() for norm in last)
    assert {n.momentum for n in network.modules() if isinstance(n, nn.BatchNorm2d)} == {0.02}


def test_blur_pool_is_a_low_pass_filter() -> None:
    blur = model.BlurPool(2)
    flat = torch.ones(1, 2, 8, 8)
    assert torch.equal(blur(flat), torch.ones(1, 2, 4, 4))
    checks = ((torch.arange(8)[:, None] + torch.arange(8)) % 2).float().expand(1, 2, 8, 8)
    torch.testing.assert_close(blur(checks), torch.full((1, 2, 4, 4), 0.5))
    assert not blur.state_dict()


# --- checkpoints


def test_checkpoint_is_whole_or_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"
    assert ranks.load(path, ALONE) is None
    ranks.save(path, {"a": torch.arange(3), "b": [1, "x", None]})
    (tmp_path / "checkpoint.pt.123.tmp").write_bytes(b"of a run that was killed")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, "fsync", full)
        ranks.save(path, {"a": torch.arange(4)})
    state = ranks.load(path, ALONE)
    assert state is not None
    assert state["a"].tolist() == [0, 1, 2] and state["b"] == [1, "x", None]
    ranks.save(path, {"a": 1})
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_checkpoint_is_not_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"harm": Path("/")}, path)  # not of weights_only's kinds
    with pytest.raises(SystemExit, match="is not a checkpoint"):
        ranks.load(path, ALONE)
    path.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(SystemExit, match="is not a checkpoint"):
        ranks.load(path, ALONE)


def test_stop_vote_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    vote = StopVote(ALONE)
    assert not vote.agreed()
    os.kill(os.getpid(), signal.SIGTERM)
    assert vote.agreed()
    vote.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_checksum_depends_on_every_weight() -> None:
    checksums = set()
    for index in range(3):
        task = tiny()
        with torch.no_grad():
            task.module[2].weight[index, 7] += 1e-6
        checksums.add(check_identical(task.module, ALONE))
    assert len(checksums) == 3 and check_identical(tiny().module, ALONE) == check_identical(
        tiny().module, ALONE
    )


# --- the simulated device, and what the report makes of it


class FakeTime:
    """A clock that goes on only where something takes time; a sleep ends late."""

    def __init__(self, late: float) -> None:
        self.time, self.late = 1000.0, late

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds + self.late


@pytest.mark.parametrize("late", [0.0, 0.003])
def test_simulated_device_does_not_drift(late: float) -> None:
    clock = FakeTime(late)
    device = simulate.SimulatedDevice(1000, clock.now, clock.sleep)
    start = clock.time
    for _ in range(500):
        clock.time += 0.02  # fetching a batch
        device.run(50)
    assert device.synchronize() == pytest.approx(start + 0.02 + 500 * 0.05)
    assert device.idle == pytest.approx(0)
    assert device.busy == pytest.approx(25)


def test_simulated_device_is_idle_without_data() -> None:
    clock = FakeTime(0)
    device = simulate.SimulatedDevice(1000, clock.now, clock.sleep)
    for _ in range(100):
        clock.time += 0.08
        device.run(40)
    assert device.busy == pytest.approx(4)
    assert device.idle == pytest.approx(99 * 0.04)
    with pytest.raises(ValueError, match="above 0"):
        simulate.SimulatedDevice(0)


def test_utilisation_equals_mlperf_storages() -> None:
    # Its example: 5 epochs' steps of 400 samples on an H100 (0.224 s), in a run of 1.02 times that.
    steps = 3202
    assert ceiling.utilisation(steps * 400, 400 / 0.224, steps * 0.224 * 1.02) == pytest.approx(1 / 1.02)
    assert ceiling.utilisation(100, 10, 0) == 0
    assert ceiling.utilisation(100, 10, 9.99) == 1


def test_limit_is_the_device_the_loader_or_this_process() -> None:
    stats = {"verdict": "the slowest stage is decode"}
    assert ceiling.limit(0.991, 0.009, stats) == "the device"
    assert ceiling.limit(0.9, 0.09, stats) == "the loader: the slowest stage is decode"
    process = "this process and its cores: it waited for data"
    assert ceiling.limit(0.6, 0.01, stats).startswith(f"{process} 1.0%")
    # A loader that says that it waited for the consumer is not the limit.
    consumer = {"verdict": "the consumer is the bottleneck", "limit": "consumer"}
    assert ceiling.limit(0.97, 0.02, consumer) == f"{process} 2.0% of the time"


def test_one_slow_loader_of_eight_is_the_limit() -> None:
    class Eight:
        size = 8

        def sums(self, *values: float) -> list[float]:
            return [8 * value for value in values]

        def gather(self, own: Any) -> list[Any]:
            return [own] * 5 + [(0.4, {"verdict": "the store is slow", "limit": "store"})] + [own] * 2

    device = simulate.SimulatedStep(10)
    stats = {"verdict": "the consumer is the bottleneck", "limit": "consumer", "bad": []}
    run = argparse.Namespace(step=device, ranks=Eight(), loader=argparse.Namespace(stats=lambda: stats))
    line = ceiling.Ceilings(1)(run, argparse.Namespace(after_first=(60, 10.0), waited=0.05))
    assert line["utilisation"] == 0.6 and line["limit"] == "the loader: the store is slow"


def test_clock_counts_downtime_until_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([160.0])
    monkeypatch.setattr(ranks.time, "time", lambda: next(times))
    targets = {"accuracy": 0.75, "top-5": 0.93}
    clock = ranks.Clock(100.0, targets)
    assert not clock.evaluated({"accuracy": 0.76, "top-5": 0.92}) and clock.time_to_target is None
    resumed = ranks.Clock(150.0, targets)
    resumed.load_state_dict(clock.state_dict())  # it continues, and does not restart
    assert resumed.evaluated({"accuracy": 0.75, "top-5": 0.93}) and resumed.time_to_target == 60
    assert resumed.evaluated({"accuracy": 0.8, "top-5": 0.95}) and resumed.time_to_target == 60


def test_without_a_target_none_is_reached() -> None:
    assert not ranks.Clock(0.0, {}).evaluated({"accuracy": 1.0})
    with pytest.raises(SystemExit, match="a target for accuracy, and the task has no such metric"):
        ranks.Clock.of_run(arguments("--target", "0.5"), ["error"], 0.0)
