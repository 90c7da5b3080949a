"""extras/dgc.py against the formulas of its paper (arXiv 1712.01887), and optim.py's counting of bytes.

The reference is Algorithm 4 of the paper in NumPy, in float64, one rank after the other in one process. The
real thing runs in DistributedDataParallel on two gloo ranks; see dgc_ranks.py.
"""

from __future__ import annotations

import multiprocessing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import dgc_ranks  # puts examples/resnet50 on sys.path
from tests.dgc_ranks import OPTIONS, SHAPES, STEP_SAMPLES, STEPS, VARIANTS, gradients

import optim  # isort: skip
from extras import dgc  # isort: skip
from options import parse  # isort: skip
from tests.patience import PATIENCE

RANKS = 2
COMPRESSED = ("conv", "matrix")
RTOL, ATOL = 1e-4, 1e-5

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without torch.distributed"
)


def launch(directory: Path, *scenarios: str) -> dict[str, list[Any]]:
    """Scenario -> the results of each rank; forked from a server that has torch."""
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=dgc_ranks.run, args=(directory, rank, RANKS, scenarios))
        for rank in range(RANKS)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE)
    finally:
        for process in processes:
            process.kill()
    said = "\n".join((directory / f"{rank}.txt").read_text() for rank in range(RANKS))
    assert [process.exitcode for process in processes] == [0] * RANKS, said
    return {
        name: [torch.load(directory / f"{name}-{rank}.pt", weights_only=True) for rank in range(RANKS)]
        for name in scenarios
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return launch(tmp_path_factory.mktemp("dgc"), "variants", "all_reduces", "resume", "learns")


# --- the paper's algorithm


class Paper:
    """Algorithm 4, for one layer of one rank; without sparsity, all is sent and no momentum is masked."""

    def __init__(self, shape: tuple[int, ...], nesterov: bool, masking: bool, momentum: float = 0.9) -> None:
        self.u = np.zeros(shape)
        self.v = np.zeros(shape)
        self.nesterov, self.masking, self.momentum = nesterov, masking, momentum

    def step(self, gradient: np.ndarray, sparsity: float) -> np.ndarray:
        if self.nesterov:
            self.u = self.momentum * (self.u + gradient)
            self.v = self.v + self.u + gradient
        else:
            self.u = self.momentum * self.u + gradient
            self.v = self.v + self.u
        if not sparsity:
            sent, self.v = self.v, np.zeros_like(self.v)
            return sent
        kept = max(1, round(self.v.size * (1 - sparsity)))
        threshold = np.sort(np.abs(self.v), axis=None)[-kept]
        mask = np.abs(self.v) >= threshold
        sent = self.v * mask
        self.v = self.v * ~mask
        if self.masking:
            self.u = self.u * ~mask
        return sent


def momentum_sgd(nesterov: bool, momentum: float = 0.9) -> list[dict[str, np.ndarray]]:
    """What dense momentum makes of the averaged gradients: by step, by layer."""
    u = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    updates = []
    for step in range(STEPS):
        update = {}
        for name in SHAPES:
            g = sum(gradients(rank, step)[name].double().numpy() for rank in range(RANKS)) / RANKS
            u[name] = momentum * u[name] + g
            update[name] = g + momentum * u[name] if nesterov else u[name]
        updates.append(update)
    return updates


def paper(
    momentum_type: str = "vanilla",
    momentum_factor_masking: bool = True,
    clip_norm: float | None = None,
    sparsity_strategy: tuple[float, ...] = OPTIONS["sparsity_strategy"],
) -> tuple[list[dict[str, np.ndarray]], list[dict[str, Paper]]]:
    """(by step, by layer: what is added to the weights; by rank, by layer: its memory)"""
    nesterov = momentum_type == "nesterov"
    memory = [
        {name: Paper(SHAPES[name], nesterov, momentum_factor_masking) for name in COMPRESSED}
        for _ in range(RANKS)
    ]
    small = {name: np.zeros(SHAPES[name]) for name in SHAPES if name not in COMPRESSED}
    updates = []
    for step in range(STEPS):
        epoch = step * STEP_SAMPLES // OPTIONS["total_samples"]
        sparsity = sparsity_strategy[min(epoch, len(sparsity_strategy) - 1)]
        if 1 - sparsity >= 1 / RANKS:  # not smaller than dense
            sparsity = 0.0
        update = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for rank in range(RANKS):
            own = {name: g.double().numpy() / RANKS for name, g in gradients(rank, step).items()}
            if clip_norm is not None:
                norm = np.sqrt(sum((g**2).sum() for g in own.values()))
                scale = min(1.0, clip_norm / np.sqrt(RANKS) / norm)
                assert scale < 0.9, "the limit has to bite"
                own = {name: g * scale for name, g in own.items()}
            for name, g in own.items():
                update[name] += memory[rank][name].step(g, sparsity) if name in COMPRESSED else g
        for name in small:
            g, small[name] = update[name], 0.9 * small[name] + update[name]
            update[name] = g + 0.9 * small[name] if nesterov else small[name]
        updates.append(update)
    return updates, memory


def differs(result: dict[str, Any], updates: list[dict[str, np.ndarray]]) -> list[str]:
    """Where the updates of a rank are not those."""
    return [
        f"step {step}, {name}"
        for step, (got, wanted) in enumerate(zip(result["updates"], updates, strict=True))
        for name in SHAPES
        if not np.allclose(got[name].numpy(), wanted[name], rtol=RTOL, atol=ATOL)
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_step_equals_the_papers(results: dict[str, list[Any]], variant: str) -> None:
    updates, memory = paper(**VARIANTS[variant])
    for rank in range(RANKS):
        result = results["variants"][rank][variant]
        assert differs(result, updates) == []
        for name in COMPRESSED:
            residual = result["state"]["residual"][name].numpy()
            np.testing.assert_allclose(residual, memory[rank][name].v, rtol=RTOL, atol=ATOL)
        assert result["state"]["residual"].keys() == set(COMPRESSED), "biases and small layers are sent whole"


def test_weights_are_equal_on_all_ranks(results: dict[str, list[Any]]) -> None:
    first, second = results["variants"]
    for variant in first:
        for name in SHAPES:
            assert torch.equal(first[variant]["weights"][name], second[variant]["weights"][name])


@pytest.mark.stress
@pytest.mark.parametrize(
    ("mutant", "options"),
    [
        ("unmasked", {}),
        ("uncorrected", {}),
        ("forgetful", {"momentum_factor_masking": False}),
        ("unshared", {"clip_norm": 5.0}),
    ],
)
def test_guard_removed_the_comparison_finds_each_missing_part(
    results: dict[str, list[Any]], mutant: str, options: dict[str, Any]
) -> None:
    """Without masking, without correction, without memory, without N**-0.5."""
    assert differs(results["variants"][0][mutant], paper(**options)[0])


def test_sent_and_residual_add_up_to_dense_momentum(results: dict[str, list[Any]]) -> None:
    dense = momentum_sgd(nesterov=False)
    for name in COMPRESSED:
        wanted = sum(update[name] for update in dense)

        def total(variant: str, name: str = name) -> Any:
            sent = sum(update[name] for update in results["variants"][0][variant]["updates"])
            held = sum(result[variant]["state"]["residual"][name] for result in results["variants"])
            return (sent + held).numpy()

        np.testing.assert_allclose(total("unmasked"), wanted, rtol=RTOL, atol=ATOL)
        assert not np.allclose(total("forgetful"), wanted, rtol=RTOL, atol=ATOL), "without memory"


@pytest.mark.parametrize("variant", ["dense", "dense nesterov"])
def test_without_sparsity_it_is_momentum_sgd(results: dict[str, list[Any]], variant: str) -> None:
    nesterov = "nesterov" in variant
    updates = momentum_sgd(nesterov)
    assert differs(results["variants"][0][variant], updates) == []

    module = dgc_ranks.Given()
    groups = [{"params": [module.conv, module.matrix], "weight_decay": 0.1}]
    groups += [{"params": [module.bias, module.tiny]}]
    sgd = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=nesterov)
    for step in range(STEPS):
        for name, weight in module.named_parameters():
            weight.grad = (gradients(0, step)[name] + gradients(1, step)[name]) / 2
        sgd.step()
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(results["variants"][0][variant]["weights"][name], weight)


# --- the largest


@pytest.mark.parametrize(
    ("size", "count"), [(5000, 3), (40_000, 400), (300_000, 300), (20_000, 15_000), (64, 64)]
)
@pytest.mark.parametrize("scale", ["normal", "heavy", "sparse"])
def test_largest_finds_the_largest(size: int, count: int, scale: str) -> None:
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=generator).abs()
    values = {"normal": values, "heavy": values**8, "sparse": values * (torch.arange(size) % 97 == 5)}[scale]
    for number in range(5):
        found = dgc.largest(values, count, number)
        assert len(found) == len(found.unique()) == count
        assert torch.equal(values[found].sort().values, values.topk(count, sorted=True).values.flip(0))


def test_a_nan_is_the_largest() -> None:
    values = torch.rand(40_000)
    values[77] = torch.nan
    assert all(77 in dgc.largest(values, 400, number) for number in range(100))


# --- bytes


def test_bytes_of_all_reduces(results: dict[str, list[Any]]) -> None:
    weights = sum(int(np.prod(shape)) for shape in SHAPES.values())
    exact = momentum_sgd(nesterov=False, momentum=0.0)
    for kind, size, tolerance in (("fp32", 4, 1e-6), ("fp16", 2, 2e-3), ("bf16", 2, 2e-2)):
        result = results["all_reduces"][0][kind]
        # A ring of two: each rank sends its half, then the sum of the other half.
        assert result["state"]["traffic"] == {
            "ranks": 2,
            "steps": STEPS,
            "sent": STEPS * weights * size,
            "dense": STEPS * weights * 4,
        }
        for got, wanted in zip(result["updates"], exact, strict=True):
            for name in SHAPES:
                np.testing.assert_allclose(got[name].numpy(), wanted[name], rtol=0, atol=tolerance)


def test_bytes_of_dgc(results: dict[str, list[Any]]) -> None:
    kept = [
        sum(round(np.prod(SHAPES[name]) * (1 - sparsity)) for name in COMPRESSED)
        for sparsity in OPTIONS["sparsity_strategy"]
    ]
    small = sum(int(np.prod(shape)) for name, shape in SHAPES.items() if name not in COMPRESSED)
    # A value and its place are 8 bytes; each of the three sparsities holds for two steps. The first is sent
    # dense, which are as many bytes: two ranks send each of them half of 4 bytes a weight, twice.
    traffic = optim.Traffic(**results["variants"][0]["vanilla"]["state"]["traffic"])
    assert traffic.sent == 2 * sum(8 * count for count in kept) + STEPS * small * 4
    report = traffic.take()
    assert report["communication MB per step"] == report["communication MB"] / STEPS
    assert report["compression"] == report["communication MB dense"] / report["communication MB"]
    assert traffic.take()["communication MB"] == 0


@pytest.mark.parametrize(
    ("ranks", "sparse_from"), [(2, 0.75), (4, 0.9375), (8, 0.9375), (64, 0.996), (900, 0.999), (1100, None)]
)
def test_dense_until_sparse_is_smaller(
    monkeypatch: pytest.MonkeyPatch, ranks: int, sparse_from: float | None
) -> None:
    """In the paper's warm-up, an epoch is sparse only if that is fewer bytes with this number of ranks."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    compression = dgc.DeepGradientCompression(torch.nn.Linear(640, 1000, bias=False), 100)
    found = []
    for epoch in range(5):
        compression.begin(100 * epoch)
        found.append(compression.sparsity)
    wanted = [share if sparse_from and share >= sparse_from else 0.0 for share in dgc.SPARSITY_STRATEGY]
    assert found == wanted


def test_results_are_used_once_the_device_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A future of NCCL is complete at once: only `wait` makes the device wait for the results, as here."""
    base: Any = torch.futures.Future.__bases__[0]
    wait = base.wait

    def waits(future: Any) -> None:
        for target, result in wait(future):
            target.copy_(result)

    def begun(results: list[tuple[torch.Tensor, torch.Tensor]]) -> SimpleNamespace:
        future = torch.futures.Future[Any]()
        future.set_result(results)
        return SimpleNamespace(get_future=lambda: future)

    monkeypatch.setattr(base, "wait", waits)
    of_ranks = {  # both have the same gradients
        "get_world_size": lambda: 2,
        "all_reduce": lambda tensor, async_op: begun([(tensor, 2 * tensor)]),
        "all_gather": lambda tensors, tensor, async_op: begun([(each, tensor) for each in tensors]),
    }
    for name, stub in of_ranks.items():
        monkeypatch.setattr(torch.distributed, name, stub)
    module = torch.nn.Linear(64, 32)
    weights = list(module.parameters())
    buffer = torch.randn(64 * 32 + 32)
    parts = zip(buffer.split([64 * 32, 32]), weights, strict=True)
    bucket = [part.view_as(weight) for part, weight in parts]
    own = buffer.clone()
    values = {"buffer": buffer, "gradients": bucket, "parameters": weights, "is_last": True}
    compression = dgc.DeepGradientCompression(module, 100, sparsity_strategy=(0.9,))
    compression.begin(0)
    given: Any = SimpleNamespace(**{name: partial(values.get, name) for name in values})
    compression.average(given)
    sent = buffer != 0
    assert int(sent.sum()) == round(64 * 32 * 0.1) + 32 and torch.equal(buffer[sent], own[sent])


def test_bytes_as_ranks_are_added() -> None:
    sent = []
    for ranks in (2, 8, 500):
        traffic = optim.Traffic(ranks)
        traffic.averaged(1_000_000)
        traffic.all_gathered(8 * 1000)
        sent.append(traffic.take()["compression"])
    assert sent == pytest.approx([500, 125, 2])


# --- checkpoints


def test_resume_on_the_same_ranks_is_exact(results: dict[str, list[Any]]) -> None:
    for result in results["resume"]:
        whole, again = result["whole"], result["again"]
        for kind in ("velocity", "residual"):
            for name, tensor in whole["state"][kind].items():
                assert torch.equal(tensor, again["state"][kind][name])
        for one, other in zip(whole["updates"][STEPS // 2 :], again["updates"], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in SHAPES)


def test_resume_on_other_ranks_loses_no_gradient(results: dict[str, list[Any]]) -> None:
    """The checkpoint of three ranks, the third being the first once more, on two."""
    first, second = results["resume"][0]["saved"]
    merged = [result["merged"] for result in results["resume"]]
    assert first["residual"]["matrix"].abs().max() > 0.1
    assert not torch.equal(first["residual"]["matrix"], second["residual"]["matrix"])
    for kind in ("velocity", "residual"):
        for name in COMPRESSED:
            wanted = 2 * first[kind][name] + second[kind][name]
            torch.testing.assert_close(merged[0][kind][name] + merged[1][kind][name], wanted)
    assert torch.equal(merged[0]["velocity"]["bias"], first["velocity"]["bias"]), "the same on all ranks"


# --- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_samples": 0}, "total_samples must be the samples of an epoch, found 0"),
        ({"sparsity_strategy": (0.5, 1.0)}, "shares from 0 to below 1"),
        ({"sparsity_strategy": ()}, "shares from 0 to below 1"),
        ({"momentum": 1.0}, "momentum must be from 0"),
        ({"momentum_type": "heavy"}, "one of .*found 'heavy'"),
        ({"clip_norm": 0.0}, "clip_norm must be positive, or None, found 0"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dgc.DeepGradientCompression(torch.nn.Linear(2, 2), **{"total_samples": 10, **options})


def test_options_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(["s3://bucket"])
    assert args.dgc_sparsity_strategy == dgc.SPARSITY_STRATEGY
    assert args.dgc_momentum_factor_masking
    args = parse(["s3://bucket", "--dgc-sparsity-strategy", "0.5,0.9", "--no-dgc-momentum-factor-masking"])
    assert args.dgc_sparsity_strategy == (0.5, 0.9)
    assert not args.dgc_momentum_factor_masking
    with pytest.raises(SystemExit):
        parse(["s3://bucket", "--dgc-sparsity-strategy", "most"])
    assert "--dgc-sparsity-strategy: invalid shares value: 'most'" in capsys.readouterr().err


# --- learning


def test_learns_in_three_epochs(results: dict[str, list[Any]]) -> None:
    """The short form of the next test, with 99 % of the gradients not sent from the start."""
    first, _ = results["learns"]
    assert first["traffic"]["compression"] > 10
    assert first["accuracy"] > 0.4, "guessing is right in an eighth of all cases"


@pytest.mark.stress
def test_converges_like_dense(tmp_path: Path) -> None:
    """Nine epochs, 99.9 % of the gradients not sent from the fifth on: within 1 % of dense."""
    first, _ = launch(tmp_path, "converge")["converge"]
    dense, compressed = first["dense"], first["dgc"]
    assert dense["traffic"]["compression"] == 1
    assert compressed["traffic"]["compression"] > 25, "the first layer, the last one and the norms are dense"
    assert compressed["sparsity"] >= 0.99
    assert dense["accuracy"] > 0.95
    assert compressed["accuracy"] > dense["accuracy"] - 0.01
