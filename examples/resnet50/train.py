"""Train a ResNet-50 on the images of a bucket, on any number of ranks, and measure its wait for data.

    python examples/resnet50/train.py s3://bucket/imagenet --cache /ssd/cache --out runs/a
    torchrun --nproc-per-node 8 examples/resnet50/train.py s3://bucket/imagenet --cache /ssd/cache \\
        --amp bf16 --channels-last --batch-size 256 --epochs 18 --resolution 0:128,6:224,14:288 --out runs/b
    torchrun --nproc-per-node 8 --max-restarts 3 examples/resnet50/train.py ... --optimizer lars \\
        --global-batch 32768 --base-lr 0.2 --warmup 5 --decay polynomial
    python examples/resnet50/train.py s3://bucket/imagenet --cache /ssd/cache --simulate-gpu-rate 1785.7

The URL holds the folders train/ and val/, each with one folder of images per class. A run that stopped for
any reason continues with the next sample when it starts again with the same --out, on any number of ranks.

This file is the run, from top to bottom; each other file is one part of it (see README.md). your_own.py
trains another network on other data.
"""

from __future__ import annotations

import argparse
import signal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn

import batch_norm
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
from model import IMAGENET, MODELS
from options import parse
from ranks import Ranks, StopVote
from report import Clock, Meter, Report
from schedule import Batches, LearningRate, resolutions
from simulate import SimulatedStep, SyntheticLoader
from step import AMP, Step, Task

__all__ = ["Task", "run"]

# --- the two functions that define the data and the network


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
    variant = {"variant": args.variant, "blur": args.blur}
    floats = Normalize(*IMAGENET, dtype=AMP[args.amp] or torch.float32, channels_last=args.channels_last)
    return Task(
        MODELS[args.model](classes=len(dataset.classes), bn_momentum=args.bn_momentum, **variant),
        loss=partial(nn.functional.cross_entropy, label_smoothing=args.label_smoothing),
        batch_transform=lambda batch: (floats(batch[0]), batch[1]),
        record={"model": args.model, "classes": list(dataset.classes), **variant},
    )


# --- the run


def run(
    input_fn: Callable[[argparse.Namespace, str], Any],
    model_fn: Callable[[argparse.Namespace, Any], Task],
    arguments: list[str] | None = None,
) -> dict[str, Any]:
    """Train the network of `model_fn` on the samples of `input_fn`; returns the summary of `Report.finish`.

    Args:
        input_fn: (args, "train" or "eval") -> a map-style dataset of (input, target).
        model_fn: (args, training dataset) -> a Task; torch's generator has the same seed on all ranks.
        arguments: the command line; default: sys.argv.
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
    run = Run(args, ranks, batches, step, loader, stop, task.record)
    if saved is not None:
        run.load_state_dict(saved)
    now = run.progress
    run.report.say(
        f"{ranks.size} ranks on {ranks.nodes} nodes, {len(dataset):,} samples, batch {batches.of_all:,} = "
        f"{ranks.size} x {batches.passes} x {batches.micro}, initial weights {step.checksum}"
        + (f"; resumed in epoch {now.epoch + 1} after {now.consumed:,} samples" if saved else "")
    )
    evaluation = (
        None if args.simulate_gpu_rate or args.no_eval else make_evaluation(input_fn, task, args, ranks)
    )
    run.clock.start()
    while run.progress.epoch < args.epochs and not (run.progress.done or run.stopped):
        meter = run.train_epoch()
        if not run.stopped:
            run.finish_epoch(meter, evaluation)
    summary = run.report.finish(run.clock)
    stop.close()
    ranks.leave()
    return summary


@dataclass
class Progress:
    """The position of a run, part of its checkpoint.

    Attributes:
        epoch: finished epochs.
        number: updates of the weights.
        consumed: samples of the current epoch, of all ranks.
        trained: the same with the padding that gives all ranks equally many.
        done: the target accuracy is reached.
    """

    epoch: int = 0
    number: int = 0
    consumed: int = 0
    trained: int = 0
    done: bool = False


class RecentBatches:
    """The last batches of an epoch: for the statistics of batch norms, and to measure the ceiling."""

    def __init__(self, count: int) -> None:
        self.inputs: deque[Any] = deque(maxlen=count)
        self.full: Any = None  # (inputs, targets): the last batch of full size

    def keep(self, inputs: Any, targets: Any) -> None:
        if self.inputs.maxlen:
            self.inputs.append(inputs)
        if self.full is None or len(targets) >= len(self.full[1]):
            self.full = (inputs, targets)


class Run:
    """The parts of a run, and its progress."""

    def __init__(
        self,
        args: argparse.Namespace,
        ranks: Ranks,
        batches: Batches,
        step: Any,
        loader: Any,
        stop: StopVote,
        record: dict[str, Any],
    ) -> None:
        self.args, self.ranks, self.batches, self.step, self.loader = args, ranks, batches, step, loader
        self.stop = stop
        self.record = record  # of the task, for whoever uses the checkpoint
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
        self.progress = Progress()
        self.recent = RecentBatches(args.bn_batches)
        self.stopped = False
        self._ceilings: dict[tuple[int, ...], Any] = {}  # by the shape of a batch

    def train_epoch(self) -> Meter:
        """Train on the rest of the epoch, or until all ranks have agreed to stop."""
        meter = Meter(self.step.synchronize)
        self.recent.full = None
        iterator = iter(self.loader)
        # Samples of this rank; the sampler pads, so all ranks have equally many.
        left = -(-(self.samples - self.progress.consumed) // self.ranks.size)
        while left > 0:
            left -= self._train_update(iterator, min(self.batches.per_rank, left), meter)
            self.stopped = self.stop.agreed() and left > 0
            if self.stopped or (left > 0 and self.progress.number % self.args.checkpoint_steps == 0):
                with meter.outside():
                    self.save()
            if self.stopped:
                now = self.progress
                self.report.say(f"asked to stop: update {now.number}, in epoch {now.epoch + 1}, was the last")
                return meter
        meter.end()
        for _ in iterator:  # the loader's epoch ends with this call
            raise RuntimeError("the loader has more samples than the sampler promised")
        return meter

    def _train_update(self, iterator: Iterator[Any], planned: int, meter: Meter) -> int:
        """One update of the weights by `planned` samples of this rank; the number of samples it took."""
        now = self.progress
        self.step.begin(now.number, now.number * self.batches.of_all, self.rate.at(now.number))
        taken = 0
        while taken < planned:
            with meter.waiting():
                inputs, targets = next(iterator)
            taken += len(targets)
            self.step.add(inputs, targets, len(targets) / planned, last=taken >= planned)
            self.recent.keep(inputs, targets)
        self.step.update()
        now.number += 1
        now.trained += taken * self.ranks.size
        now.consumed = min(self.samples, now.consumed + taken * self.ranks.size)
        meter.step(taken)
        return taken

    def finish_epoch(self, meter: Meter, evaluation: Any) -> None:
        """Accuracy, report and checkpoint."""
        now = self.progress
        ceiling = self._ceiling()
        loss = sum(self._loss_sums()) / now.trained
        more: dict[str, Any] = {"loss": loss, "learning rate": self.rate.at(now.number - 1)}
        if evaluation is not None:
            more["accuracy"] = self.evaluate(evaluation)
            now.done = self.clock.evaluated(more["accuracy"])
            more["time to accuracy"] = self.clock.time_to_accuracy
        stats = self.loader.stats()
        more["bad samples"] = len(stats["bad"])
        more |= self.step.traffic()
        self.report.epoch(now.epoch + 1, meter, ceiling, self.batches.of_all, stats, **more)
        now.epoch, now.consumed, now.trained = now.epoch + 1, 0, 0
        self.step.loss_sum.zero_()
        self.save()

    def evaluate(self, evaluation: Any) -> float:
        """Accuracy on the evaluation's samples; of the averaged weights, where an average is kept."""
        step = self.step
        right, seen = torch.zeros((), dtype=torch.int64, device=self.ranks.device), 0
        with step.averaged():
            batch_norm.recompute(step.module, list(self.recent.inputs), step.predict, self.ranks)
            step.module.eval()
            for inputs, targets in evaluation:
                right += step.task.correct(step.predict(inputs), targets)
                seen += len(targets)
            step.module.train()
        right_of_all, seen_by_all = self.ranks.sums(int(right), seen)
        return right_of_all / seen_by_all

    def save(self) -> None:
        """Write a checkpoint, by rank 0; the other ranks wait, so that none is ahead of the file."""
        if self.args.out is not None and not self.args.synthetic:
            if not self.args.simulate_gpu_rate:
                batch_norm.average(self.step.module, self.ranks)
            state = self.state_dict()
            if self.ranks.first:
                checkpoint.save(self.args.out / "checkpoint.pt", state)
            self.ranks.barrier()

    def state_dict(self) -> dict[str, Any]:
        """The state of the run; all ranks call it together."""
        return {
            **asdict(self.progress),
            "loss_sums": self._loss_sums(),
            "global_batch": self.batches.of_all,
            "epochs": self.report.epochs,
            "clock": self.clock.state_dict(),
            "loader": self.loader.state_dict(),
            "communication": self.step.gather_communication(),
            "record": self.record,
            **self.step.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["global_batch"] != self.batches.of_all:
            raise SystemExit(
                f"the checkpoint is of a run with a global batch of {state['global_batch']:,}, "
                f"and --global-batch is {self.batches.of_all:,}: omit the option, or give another --out"
            )
        self.progress = Progress(**{field.name: state[field.name] for field in fields(Progress)})
        self.report.epochs = state["epochs"]
        self.clock.load_state_dict(state["clock"])
        self.loader.load_state_dict(state["loader"])
        self.step.load_state_dict(state)
        self.step.load_communication(state["communication"])
        sums = state["loss_sums"]
        if len(sums) != self.ranks.size:  # one rank carries the sum of all of them
            sums = [sum(sums)] + [0.0] * (self.ranks.size - 1)
        self.step.loss_sum.fill_(sums[self.ranks.rank])

    def _loss_sums(self) -> list[float]:
        """The sum of the losses of each rank, so that a resumed run adds them up in the same order."""
        own = float(self.step.loss_sum)
        return self.ranks.sums(*[own if rank == self.ranks.rank else 0.0 for rank in range(self.ranks.size)])

    def _ceiling(self) -> Any:
        """The rate without a loader, measured once for each resolution with the last full batch."""
        inputs, targets = self.recent.full
        shape = tuple(inputs.shape)
        if shape not in self._ceilings:
            self._ceilings[shape] = self.step.measure(
                inputs, targets, self.batches.passes, self.args.ceiling_steps
            )
        return self._ceilings[shape]


# --- the loaders


def make_loader(dataset: Any, micro: int, args: argparse.Namespace, ranks: Ranks, task: Task) -> Any:
    """The training samples of this rank, on its device."""
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
    return SyntheticLoader(loader) if args.synthetic else loader


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
    """A worker ignores SIGTERM: torchrun and SLURM send it to all processes, and the last steps need data."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    run(images, resnet)
