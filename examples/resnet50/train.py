"""Train a ResNet-50 on the images of a bucket, on any number of ranks, and measure its wait for data.

    python examples/resnet50/train.py s3://bucket/imagenet --cache /ssd/cache --out runs/a
    torchrun --nproc-per-node 8 examples/resnet50/train.py s3://bucket/imagenet --cache /ssd/cache \\
        --amp bf16 --channels-last --batch-size 256 --epochs 18 --resolution 0:128,6:224,14:288 --out runs/b
    torchrun --nproc-per-node 8 --max-restarts 3 examples/resnet50/train.py ... --optimizer lars \\
        --global-batch 32768 --base-lr 0.2 --warmup 5 --decay polynomial
    python examples/resnet50/train.py s3://bucket/imagenet --cache /ssd/cache --simulate-gpu-rate 1785.7

The URL holds the folders train/ and val/, each with one folder of images per class. A run that stopped for
any reason continues with the next sample when it starts again with the same --out, on any number of ranks.

This file is the run, from top to bottom; step.py is one update, optim.py the optimizer and the schedules,
ranks.py the other ranks, model.py the images and the network. What is in extras/ is imported only if an
option asks for it. your_own.py trains another network on other data.
"""

from __future__ import annotations

import argparse
import copy
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

import ranks as distributed
from fastload import DataLoader, DistributedSampler
from model import check_classes, images, load_pretrained, options, resnet
from optim import Batches, LearningRate, make_optimizer, value_at
from options import kept, parse, refuse_changes
from ranks import Clock, Ranks, Report, StopVote
from step import Meter, Step, Task

__all__ = ["Task", "run"]


def run(
    input_fn: Callable[[argparse.Namespace, str], Any],
    model_fn: Callable[[argparse.Namespace, Any], Task],
    optimizer_fn: Callable[[Any, argparse.Namespace], torch.optim.Optimizer] | None = None,
    *,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
    arguments: list[str] | None = None,
) -> dict[str, Any]:
    """Train the network of `model_fn` on the samples of `input_fn`; returns the summary of the run.

    Args:
        input_fn: (args, "train" or "eval") -> a map-style dataset of (input, target).
        model_fn: (args, training dataset) -> a Task; torch's generator has the same seed on all ranks.
        optimizer_fn: (module, args) -> an optimizer. The schedule (warm-up, decay) is a factor of its rates;
            the options of the built-in optimizers are then refused.
        add_options: adds the task's own options to the command line.
        arguments: the command line; default: sys.argv.
    """
    begun = time.time()
    args = parse(arguments, __doc__, add_options, optimizer_fn is not None)
    ranks = Ranks.join(args.device)
    stop = StopVote(ranks)
    report = Report(args.out, ranks)
    saved = distributed.load(args.out / "checkpoint.pt", ranks) if args.out is not None else None

    torch.manual_seed(args.seed)
    dataset = input_fn(args, "train")
    task = model_fn(args, dataset)
    clock = Clock.of_run(args, task.metrics, begun)
    if args.init_from is not None and saved is None:
        pretrained = distributed.load(args.init_from, ranks)
        if pretrained is None:
            raise SystemExit(f"--init-from: there is no file {args.init_from}")
        report.say(load_pretrained(task.module, pretrained, args.init_from))
    if args.simulate_gpu_rate:
        from extras.simulate import SimulatedStep

        step: Any = SimulatedStep(args.simulate_gpu_rate)
    else:
        step = Step(task, args, ranks, len(dataset), optimizer_fn or make_optimizer)

    run = Run(args, ranks, task, dataset, step, stop, report, clock, saved)
    evaluation = None
    if not (args.simulate_gpu_rate or args.no_eval):
        evaluated = input_fn(args, "eval")
        check_classes(dataset, evaluated)
        evaluation = make_evaluation(evaluated, task, args, ranks)
    add_extras(run, evaluation)
    run.train(evaluation)
    summary = report.finish({"targets": clock.targets, "time to target": clock.time_to_target})
    if args.chart and ranks.first:
        from extras.chart import draw

        report.say(draw(report.epochs, args.out / "chart.png"))
    stop.close()
    ranks.leave()
    return summary


def add_extras(run: Run, evaluation: Any) -> None:
    """What the options ask for beside training."""
    args = run.args
    if args.ceiling_steps:
        from extras.ceiling import Ceilings

        run.observers.append(Ceilings(args.ceiling_steps))
    if args.tensorboard and run.ranks.first:
        from extras.chart import Board

        run.report.listeners.append(Board(args.out))
    if args.mllog and run.ranks.first:
        from extras.mllog import MlLog

        run.mark = MlLog(args.mllog, run, 0 if evaluation is None else len(evaluation.dataset))


@dataclass
class Progress:
    """The position of a run, part of its checkpoint.

    Attributes:
        epoch: finished epochs.
        number: updates of the weights.
        consumed: samples of the current epoch, of all ranks.
        trained: the same with the padding that gives all ranks equally many.
        done: the target is reached.
    """

    epoch: int = 0
    number: int = 0
    consumed: int = 0
    trained: int = 0
    done: bool = False


class Run:
    """The parts of a run, and its progress."""

    def __init__(
        self,
        args: argparse.Namespace,
        ranks: Ranks,
        task: Task,
        dataset: Any,
        step: Any,
        stop: StopVote,
        report: Report,
        clock: Clock,
        saved: dict[str, Any] | None,
    ) -> None:
        self.args, self.ranks, self.task, self.dataset, self.step = args, ranks, task, dataset, step
        self.stop, self.report, self.clock = stop, report, clock
        self.samples = len(dataset)  # of an epoch
        known = saved["global_batch"] if saved else args.batch_size * ranks.size
        sizes = {0: args.global_batch or known, **args.batch_by_epoch}
        self.batches = {e: Batches.split(size, ranks.size, args.batch_size) for e, size in sizes.items()}
        updates = self._updates(0)
        self.schedule = LearningRate(
            1.0, round(args.warmup * updates), args.epochs * updates, args.decay, args.power
        )
        self.progress = Progress()
        # The last inputs of the epoch, for the statistics of batch norms.
        norms = 0 if args.simulate_gpu_rate else norm_batches(args, max(sizes.values()), ranks.size)
        self.recent: deque[Any] = deque(maxlen=norms)
        self.full: Any = None  # (inputs, targets): the last batch of full size of an epoch
        self.loader: Any = None
        self.bad_before = 0.0
        self.stopped = False
        self.observers: list[Callable[[Run, Meter], dict[str, Any]]] = []  # each adds to an epoch's line
        self.mark: Callable[..., None] = lambda key, value=None, **metadata: None  # of MLPerf's log
        self._loader_state: Any = None
        if saved is not None:
            self._load_state_dict(saved)

    def train(self, evaluation: Any) -> None:
        """Train to the end, to the target, or until all ranks have agreed to stop."""
        now, batches = self.progress, self.batch
        self.report.say(
            f"{self.ranks.size} ranks on {self.ranks.nodes} nodes, {self.samples:,} samples, batch "
            f"{batches.of_all:,} = {self.ranks.size} x {batches.passes} x {batches.micro}, initial weights "
            f"{self.step.checksum}"
            + (f"; resumed in epoch {now.epoch + 1} after {now.consumed:,} samples" if now.number else "")
        )
        self.mark("run_start")
        while not (self.over or self.stopped):
            meter = self.train_epoch()
            if not self.stopped:
                self.finish_epoch(meter, evaluation)
        if not self.stopped:  # else it is going to be resumed
            self.mark("run_stop", status="success" if now.done or not self.clock.targets else "aborted")

    @property
    def over(self) -> bool:
        return self.progress.done or self.progress.epoch >= self.args.epochs

    @property
    def batch(self) -> Batches:
        """The division of the current epoch's global batch."""
        return value_at(self.batches, self.progress.epoch)

    def train_epoch(self) -> Meter:
        """Train on the rest of the epoch, or until all ranks have agreed to stop."""
        self.mark("epoch_start", epoch_num=self.progress.epoch + 1)
        self.full = None
        self.recent.clear()
        if self.progress.consumed:
            self._read_again()
        meter = Meter(self.step.synchronize)
        self._prepare_loader()
        self.bad_before = self._bad_samples()
        iterator = iter(self.loader)
        # Samples of this rank; the sampler pads, so all ranks have equally many.
        left = -(-(self.samples - self.progress.consumed) // self.ranks.size)
        while left > 0:
            left -= self._train_update(iterator, min(self.batch.per_rank, left), meter)
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
        self.mark("epoch_stop", epoch_num=self.progress.epoch + 1)
        return meter

    def _train_update(self, iterator: Iterator[Any], planned: int, meter: Meter) -> int:
        """One update of the weights by `planned` samples of this rank; the number of samples it took."""
        now = self.progress
        self.step.begin(now.number, now.epoch * self.samples + now.consumed, self._rate())
        taken = 0
        while taken < planned:
            with meter.waiting():
                inputs, targets = next(iterator)
            taken += len(targets)
            self.step.add(inputs, targets, len(targets) / planned, last=taken >= planned)
            self._keep(inputs, targets)
        self.step.update()
        now.number += 1
        now.trained += taken * self.ranks.size
        now.consumed = min(self.samples, now.consumed + taken * self.ranks.size)
        meter.step(taken)
        return taken

    def finish_epoch(self, meter: Meter, evaluation: Any) -> None:
        """Evaluation, report and checkpoint."""
        now, number = self.progress, self.progress.epoch + 1
        line = {
            "epoch": number,
            "batch size": self.batch.of_all,
            **meter.columns(self.ranks, self.batch.of_all),
        }
        for observer in self.observers:
            line |= observer(self, meter)
        line |= {"loss": sum(self._loss_sums()) / now.trained, "learning rate": self.step.rate}
        if evaluation is not None:
            self.mark("eval_start", epoch_num=number)
            metrics = self.step.evaluate(evaluation, list(self.recent))
            self.mark("eval_accuracy", metrics.get("accuracy"), epoch_num=number)
            self.mark("eval_stop", epoch_num=number)
            now.done = self.clock.evaluated(metrics)
            line |= metrics | {"time to target": self.clock.time_to_target}
        elif not self.args.simulate_gpu_rate:
            with self.step.averaged(list(self.recent)):
                pass  # the checkpoint gets the statistics
        [bad] = self.ranks.sums(self._bad_samples() - self.bad_before)
        line |= {"bad samples": round(bad), **self.step.traffic()}
        self.report.epoch(line, () if evaluation is None else tuple(metrics))
        now.epoch, now.consumed, now.trained = number, 0, 0
        self.step.loss_sum.zero_()
        self.save()

    def save(self) -> None:
        """Write a checkpoint, by rank 0; the other ranks wait, so that none is ahead of the file."""
        if self.args.out is not None and not self.args.synthetic:
            self.step.prepare_norms([])
            state = self.state_dict()
            if self.ranks.first:
                distributed.save(self.args.out / "checkpoint.pt", state)
            self.ranks.barrier()

    def state_dict(self) -> dict[str, Any]:
        """The state of the run; all ranks call it together."""
        return {
            **asdict(self.progress),
            "record": self.task.record,
            "loss_sums": self._loss_sums(),
            "global_batch": self.batches[0].of_all,
            "kept": kept(self.args, self.task.record),
            "epochs": self.report.epochs,
            "clock": self.clock.state_dict(),
            "loader": self.loader.state_dict(),
            "communication": self.step.gather_communication(),
            **self.step.state_dict(),
        }

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        refuse_changes(state["kept"], kept(self.args, self.task.record), self.args)
        if state["global_batch"] != self.batches[0].of_all:
            raise SystemExit(
                f"the checkpoint is of a run with a global batch of {state['global_batch']:,}, "
                f"and --global-batch is {self.batches[0].of_all:,}: omit the option, or give another --out"
            )
        self.progress = Progress(**{field.name: state[field.name] for field in fields(Progress)})
        self.report.epochs = state["epochs"]
        self.clock.load_state_dict(state["clock"])
        self.progress.done &= self.clock.reached is not None
        self._loader_state = state["loader"]
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

    def _bad_samples(self) -> float:
        """Those that this rank's loader has replaced since it was made."""
        return self.loader.stats()["counters"].get("bad.samples", 0.0)

    def _prepare_loader(self) -> None:
        """A new loader, with the state of the previous one, where the batch of a pass changes."""
        if self.loader is not None and self.loader.batch_size != self.batch.micro:
            self._loader_state, self.loader = self.loader.state_dict(), None
        if self.loader is None:
            self.loader = make_loader(self.dataset, self.batch.micro, self.args, self.ranks, self.task)
            if self._loader_state:
                self.loader.load_state_dict(self._loader_state)

    def _read_again(self) -> None:
        """After a resume: the batches before the position, for batch norms. A checkpoint has no inputs."""
        samples = self.batch.micro * self.ranks.size  # of one pass of all ranks
        count = min(self.recent.maxlen or 0, self.progress.consumed // samples)
        if count:
            state = copy.deepcopy(self._loader_state)
            state["sampler"]["state"]["consumed"] -= count * samples
            loader = make_loader(self.dataset, self.batch.micro, self.args, self.ranks, self.task)
            loader.load_state_dict(state)
            for _, (inputs, targets) in zip(range(count), loader, strict=False):
                self._keep(inputs, targets)

    def _keep(self, inputs: Any, targets: Any) -> None:
        # A smaller batch, at the end of an epoch, would count as much as the others.
        if self.recent.maxlen and (len(targets) >= self.batch.micro or not self.recent):
            self.recent.append(inputs)
        if self.full is None or len(targets) >= len(self.full[1]):
            self.full = (inputs, targets)

    def _updates(self, epoch: int) -> int:
        return -(-self.samples // value_at(self.batches, epoch).of_all)

    def _rate(self) -> float:
        """The factor of the optimizer's rates: by epochs, as an epoch may have another number of updates."""
        first, now = self._updates(0), self.progress
        done = now.trained // self.batch.of_all  # updates of this epoch
        factor = self.schedule.at(first * now.epoch + first * done / self._updates(now.epoch))
        if "base_lr" not in self.args:  # the task's own rate, for the batch of the first epoch
            return factor * self.batch.of_all / self.batches[0].of_all
        return factor * self.args.base_lr * self.batch.of_all / 256


def norm_batches(args: argparse.Namespace, largest: int, ranks: int) -> int:
    """Batches for the statistics of batch norms: some where the running averages lag behind the weights.

    They do so if the evaluated weights are averages, if a few updates change the weights much (`largest`: the
    global batch), and if a rank has seen a small part of the samples (many ranks).
    """
    if args.bn_batches is not None:
        return args.bn_batches
    return 8 if args.ema or largest >= 4096 or ranks > 8 else 0


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
    if args.synthetic:
        from extras.simulate import SyntheticLoader

        return SyntheticLoader(loader)
    return loader


def make_evaluation(dataset: Any, task: Task, args: argparse.Namespace, ranks: Ranks) -> Any:
    """Every sample exactly once over all ranks."""
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
    run(images, resnet, add_options=options)
