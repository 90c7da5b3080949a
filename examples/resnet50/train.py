"""Train a ResNet-50 on the images of a bucket, on any number of ranks, and see whether it waits for data.

    python examples/resnet50/train.py s3://bucket/imagenet --cache /ssd/cache --out runs/a
    torchrun --nproc-per-node 8 examples/resnet50/train.py s3://bucket/imagenet --cache /ssd/cache \\
        --amp bf16 --channels-last --batch-size 256 --epochs 18 --resolution 0:128,6:224,14:288 --out runs/b
    torchrun --nproc-per-node 8 --max-restarts 3 examples/resnet50/train.py ... --optimizer lars \\
        --global-batch 32768 --base-lr 0.2 --warmup 5 --decay polynomial
    python examples/resnet50/train.py s3://bucket/imagenet --cache /ssd/cache --simulate-gpu-rate 1785.7

The URL holds the folders train/ and val/, each with one folder of images per class. Stop it in whatever way
and start it again with the same --out, on another number of ranks too: it goes on with the very next sample.
This file is the run, read from top to bottom; beside it: step.py (one update of the weights), model.py,
optim.py, schedule.py, checkpoint.py, report.py, ranks.py, simulate.py. For something else, see your_own.py.
"""

from __future__ import annotations

import argparse
import signal
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import checkpoint
from fastload import (
    ByEpoch,
    Cache,
    CenterCrop,
    DataLoader,
    DistributedSampler,
    ImageFolder,
    Normalize,
    RandomResizedCrop,
)
from model import MODELS
from options import parse
from ranks import Ranks, StopVote
from report import Clock, Meter, Report
from schedule import Batches, LearningRate, resolutions
from step import AMP, SimulatedStep, Step, Task, recompute_batch_norm

__all__ = ["Task", "run"]

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation of each channel


# --- the two functions that say what is trained on what


def images(args: argparse.Namespace, mode: str) -> ImageFolder:
    """The samples of mode "train" or "eval"."""
    sizes = resolutions(args.resolution)
    if mode == "eval":
        size = args.eval_size or max(sizes.values())
        crop = CenterCrop(size, resize=round(size * 256 / 224), channels_last=args.channels_last)
        return ImageFolder(f"{args.url}/val", crop, cache=cache(args))
    options = {"scale": (args.min_area, 1), "flip": 0.5, "channels_last": args.channels_last}
    crops = {epoch: RandomResizedCrop(size, **options) for epoch, size in sizes.items()}
    return ImageFolder(f"{args.url}/train", ByEpoch(crops), cache=cache(args))


def cache(args: argparse.Namespace) -> Cache | None:
    return Cache(args.cache, args.cache_mode) if args.cache else None


def resnet(args: argparse.Namespace, dataset: ImageFolder) -> Task:
    """The network for the samples, and its loss."""
    variant = {"variant": args.variant, "blur": args.blur, "bn_momentum": args.bn_momentum}
    floats = Normalize(*IMAGENET, dtype=AMP[args.amp] or torch.float32, channels_last=args.channels_last)
    return Task(
        MODELS[args.model](classes=len(dataset.classes), **variant),
        loss=partial(nn.functional.cross_entropy, label_smoothing=args.label_smoothing),
        batch_transform=lambda batch: (floats(batch[0]), batch[1]),
    )


# --- the run


def run(
    input_fn: Callable[[argparse.Namespace, str], Any],
    model_fn: Callable[[argparse.Namespace, Any], Task],
    arguments: list[str] | None = None,
) -> dict[str, Any]:
    """Train what `model_fn` makes on what `input_fn` reads; returns the summary that Report.finish makes.

    Args:
        input_fn: (args, "train" or "eval") -> a map-style dataset of (input, target).
        model_fn: (args, training dataset) -> a Task; torch's generator is seeded, alike on all ranks.
        arguments: of the command line; default: sys.argv's.
    """
    args = parse(arguments, __doc__)
    ranks = Ranks.join(args.device)
    stop = StopVote(ranks)
    if args.out is not None and ranks.first:
        args.out.mkdir(parents=True, exist_ok=True)
    saved = checkpoint.load(args.out / "checkpoint.pt", ranks) if args.out is not None else None

    torch.manual_seed(args.seed)
    dataset = input_fn(args, "train")
    task = model_fn(args, dataset)
    if args.simulate_gpu_rate:
        step: Any = SimulatedStep(args.simulate_gpu_rate)
    else:
        step = Step(task, args, ranks, len(dataset))

    known = saved["global_batch"] if saved else args.batch_size * ranks.size
    batches = Batches.split(args.global_batch or known, ranks.size, args.batch_size)
    loader = make_loader(dataset, batches.micro, args, ranks, task)
    run = Run(args, ranks, batches, step, loader, stop)
    if saved is not None:
        run.load_state_dict(saved)
    run.report.say(
        f"{ranks.size} ranks on {ranks.nodes} nodes, {len(dataset):,} samples, batch {batches.of_all:,} = "
        f"{ranks.size} x {batches.passes} x {batches.micro}, initial weights {step.checksum}"
        + (f"; going on in epoch {run.epoch + 1} after {run.consumed:,} samples" if saved else "")
    )
    evaluation = (
        None if args.simulate_gpu_rate or args.no_eval else make_evaluation(input_fn, task, args, ranks)
    )
    run.clock.start()
    while run.epoch < args.epochs and not (run.done or run.stopped):
        meter = run.train_epoch()
        if not run.stopped:
            run.finish_epoch(meter, evaluation)
    summary = run.report.finish(run.clock)
    stop.close()
    ranks.leave()
    return summary


def make_loader(dataset: Any, micro: int, args: argparse.Namespace, ranks: Ranks, task: Task) -> Any:
    """The training samples of this rank, on its device, for ever new epochs."""
    loader = DataLoader(
        dataset,
        micro,
        sampler=DistributedSampler(dataset, seed=args.seed, partition=args.partition),
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        worker_init_fn=leave_signals_to_the_trainer,
        on_error=args.on_error,
        seed=args.seed,
        device=None if args.simulate_gpu_rate else ranks.device,
        batch_transform=None if args.simulate_gpu_rate else task.batch_transform,
    )
    return Resident(loader) if args.synthetic else loader


def make_evaluation(
    input_fn: Callable[[argparse.Namespace, str], Any], task: Task, args: argparse.Namespace, ranks: Ranks
) -> Any:
    """Every sample exactly once over all ranks."""
    dataset = input_fn(args, "eval")
    return DataLoader(
        dataset,
        args.eval_batch or args.batch_size,
        sampler=DistributedSampler(dataset, shuffle=False, mode="eval"),
        num_workers=args.num_workers,
        worker_init_fn=leave_signals_to_the_trainer,
        on_error=args.on_error,
        device=ranks.device,
        batch_transform=task.batch_transform,
    )


def leave_signals_to_the_trainer(worker: int) -> None:
    """torchrun and SLURM send SIGTERM to every process of a job, and the last steps still need data."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Resident:
    """--synthetic: the first batch stays on the device, and is every batch. What no loader can beat."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batch: Any = None
        self.sampler = loader.sampler
        self.batch_size = loader.batch_size

    def __iter__(self) -> Iterator[Any]:
        if self._batch is None:
            self._batch = next(iter(self._loader))
        left = len(self.sampler)
        while left > 0:
            yield [part[:left] for part in self._batch]
            left -= self.batch_size

    def stats(self) -> dict[str, Any]:
        return {"verdict": "no loader: one batch stays on the device", "bad": []}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise SystemExit("--synthetic is a measurement: start it without a checkpoint, in another --out")


class Run:
    """Where the run is, and what it takes to go on."""

    def __init__(
        self, args: argparse.Namespace, ranks: Ranks, batches: Batches, step: Any, loader: Any, stop: StopVote
    ) -> None:
        self.args, self.ranks, self.batches, self.step, self.loader = args, ranks, batches, step, loader
        self.stop = stop
        self.samples = len(loader.sampler.dataset)  # of an epoch
        updates = -(-self.samples // batches.of_all)
        self.rate = LearningRate(
            args.base_lr * batches.of_all / 256,
            round(args.warmup * updates),
            args.epochs * updates,
            args.decay,
            args.power,
        )
        self.report = Report(args.out, ranks, args.tensorboard)
        self.clock = Clock(args.target)
        self.epoch = self.number = 0  # epochs that are over; updates
        self.consumed = self.trained = 0  # samples of this epoch, of all ranks; the latter with padding
        self.done = self.stopped = False
        self._ceilings: dict[tuple[int, ...], Any] = {}  # by the shape of a batch
        self._kept: deque[Any] = deque(maxlen=args.bn_batches)
        self._full: Any = None

    def train_epoch(self) -> Meter:
        """Train on what is left of the epoch, or until all ranks have agreed to stop."""
        meter = Meter(self.step.synchronize)
        self._full = None
        iterator = iter(self.loader)
        left = -(-(self.samples - self.consumed) // self.ranks.size)  # of this rank; ranks are padded alike
        while left > 0:
            planned = min(self.batches.per_rank, left)
            self.step.begin(self.number, self.number * self.batches.of_all, self.rate.at(self.number))
            taken = 0
            while taken < planned:
                with meter.waiting():
                    inputs, targets = next(iterator)
                taken += len(targets)
                self.step.add(inputs, targets, len(targets) / planned, last=taken >= planned)
                self._keep(inputs, targets)
            self.step.update()
            left -= taken
            self.number += 1
            self.trained += taken * self.ranks.size
            self.consumed = min(self.samples, self.consumed + taken * self.ranks.size)
            meter.step(taken)
            self.stopped = self.stop.agreed() and left > 0
            if self.stopped or (left > 0 and self.number % self.args.checkpoint_steps == 0):
                with meter.outside():
                    self.save()
            if self.stopped:
                self.report.say(
                    f"asked to stop: update {self.number}, in epoch {self.epoch + 1}, was the last"
                )
                return meter
        meter.end()
        for _ in iterator:  # lets the loader end its epoch
            raise RuntimeError("the loader has more samples than the sampler promised")
        return meter

    def finish_epoch(self, meter: Meter, evaluation: Any) -> None:
        """Accuracy, report and checkpoint."""
        ceiling = self._ceiling()
        loss = sum(self._loss_sums()) / self.trained
        more: dict[str, Any] = {"loss": loss, "learning rate": self.rate.at(self.number - 1)}
        if evaluation is not None:
            more["accuracy"] = self.evaluate(evaluation)
            self.done = self.clock.evaluated(more["accuracy"])
            more["time to accuracy"] = self.clock.time_to_accuracy
        stats = self.loader.stats()
        more["bad samples"] = len(stats["bad"])
        more |= self.step.traffic()
        self.report.epoch(self.epoch + 1, meter, ceiling, self.batches.of_all, stats, **more)
        self.epoch, self.consumed, self.trained = self.epoch + 1, 0, 0
        self.step.loss_sum.zero_()
        self.save()

    def evaluate(self, evaluation: Any) -> float:
        """The share of the evaluation's samples that are right; of the averaged weights, if there are any."""
        step = self.step
        right, seen = torch.zeros((), dtype=torch.int64, device=self.ranks.device), 0
        with step.averaged():
            recompute_batch_norm(step.module, list(self._kept), step.predict, self.ranks)
            step.module.eval()
            for inputs, targets in evaluation:
                right += step.task.correct(step.predict(inputs), targets)
                seen += len(targets)
            step.module.train()
        right_of_all, seen_by_all = self.ranks.sums(int(right), seen)
        return right_of_all / seen_by_all

    def save(self) -> None:
        """By rank 0; the other ranks wait, so that none is ahead of the file."""
        if self.args.out is not None and not self.args.synthetic:
            state = self.state_dict()
            if self.ranks.first:
                checkpoint.save(self.args.out / "checkpoint.pt", state)
            self.ranks.barrier()

    def state_dict(self) -> dict[str, Any]:
        """On all ranks together."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "trained": self.trained,
            "number": self.number,
            "done": self.done,
            "loss_sums": self._loss_sums(),
            "global_batch": self.batches.of_all,
            "epochs": self.report.epochs,
            "clock": self.clock.state_dict(),
            "loader": self.loader.state_dict(),
            "communication": self.step.gather_communication(),
            **self.step.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["global_batch"] != self.batches.of_all:
            raise SystemExit(
                f"the checkpoint is of a run with a global batch of {state['global_batch']:,}, "
                f"and --global-batch is {self.batches.of_all:,}: leave the option out, or use another --out"
            )
        for name in ("epoch", "consumed", "trained", "number", "done"):
            setattr(self, name, state[name])
        self.report.epochs = state["epochs"]
        self.clock.load_state_dict(state["clock"])
        self.loader.load_state_dict(state["loader"])
        self.step.load_state_dict(state)
        self.step.load_communication(state["communication"])
        sums = state["loss_sums"]
        if len(sums) != self.ranks.size:  # one rank carries on what all of them had summed up
            sums = [sum(sums)] + [0.0] * (self.ranks.size - 1)
        self.step.loss_sum.fill_(sums[self.ranks.rank])

    def _loss_sums(self) -> list[float]:
        """Of each rank, so that a resumed run adds them up in the same order."""
        own = float(self.step.loss_sum)
        return self.ranks.sums(*[own if rank == self.ranks.rank else 0.0 for rank in range(self.ranks.size)])

    def _keep(self, inputs: Any, targets: Any) -> None:
        if self._kept.maxlen:
            self._kept.append(inputs)
        if self._full is None or len(targets) >= len(self._full[1]):
            self._full = (inputs, targets)

    def _ceiling(self) -> Any:
        """The rate without a loader, measured once for each resolution with the batch that was here last."""
        inputs, targets = self._full
        shape = tuple(inputs.shape)
        if shape not in self._ceilings:
            self._ceilings[shape] = self.step.measure(
                inputs, targets, self.batches.passes, self.args.ceiling_steps
            )
        return self._ceilings[shape]


if __name__ == "__main__":
    run(images, resnet)
