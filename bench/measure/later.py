"""A loader in later epochs against its kernel: `python -m bench later`.

The loader reads a full cache on the local disk. The other side is as many processes that run the transform's
kernel on the same records, held in memory; a third one the same loader with `processes=True`.
RandomResizedCrop(224) with flips, batches of 64, by default photos of 500 x 375 pixels and 138 KB. All sides
take turns in each round, so that other work of the machine slows all. Figures are medians; a ratio is the
median of the ratios of each round. CPU time is that of all processes of a side, the trainer's too: the work
itself, whoever else uses the cores.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from torch.utils.data import RandomSampler

from bench.command import add_photos, begin, finish, make_parser
from bench.data import BATCH, KEPT_QUALITY, KEPT_SIDE, SIZE, WORKERS, WORKPLACE, photo_folder
from bench.measure.kernels import Fill
from fastload import Cache, DataLoader, ImageFolder, RandomResizedCrop
from fastload.cli.report import figures
from fastload.images import kernel as native

MODES = ["auto", "raw", "dct", "shrunk", "decoded"]
PASSES = {
    "decoded": 10,
    "dct": 4,
    "shrunk": 3,
    "auto": 2,
}  # over the photos, in a turn: turns of about the same length


class Turn(NamedTuple):
    """A turn of one side: images per second, CPU time of an image in us, seconds until the first batch."""

    rate: float
    cpu: float
    first: float


def dataset_of(folder: Path, cache: Path, mode: str) -> Any:
    kept = Cache(cache, mode, short_side=KEPT_SIDE, quality=KEPT_QUALITY)  # type: ignore[arg-type]
    return ImageFolder(str(folder), RandomResizedCrop(SIZE, flip=0.5), cache=kept)


class Loader:
    """A loader with running workers over a full cache; `samples` an epoch, in passes over the dataset."""

    def __init__(self, dataset: Any, samples: int, workers: int, *, processes: bool = False) -> None:
        self.loader = DataLoader(
            dataset,
            BATCH,
            sampler=RandomSampler(dataset, num_samples=samples),
            num_workers=workers,
            persistent_workers=True,
            processes=processes,
        )
        before = set(psutil.Process().children())
        self()  # starts them
        while dataset.cache.info()["entries"] < len(dataset):  # filling never waits for the disk
            self()
        self._processes = [psutil.Process(), *(set(psutil.Process().children()) - before)]
        dataset.cache.close()

    def __call__(self) -> Turn:
        cpu, start, first, images = self._cpu_seconds(), time.perf_counter(), 0.0, 0
        for batch, _ in self.loader:
            first = first or time.perf_counter() - start
            images += len(batch)
        seconds = time.perf_counter() - start
        return Turn(images / seconds, 1e6 * (self._cpu_seconds() - cpu) / images, first)

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in getattr(self, "_processes", [])]
        return sum(time.user + time.system for time in times)


class Kernels:
    """Processes that run the kernel, each on its share of the records; `samples` a turn, in batches."""

    def __init__(self, dataset: Any, samples: int, count: int) -> None:
        self._samples = samples
        context = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for part in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=self._serve, args=(dataset, part, count, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def __call__(self) -> Turn:
        start = time.perf_counter()
        for pipe in self._pipes:
            pipe.send("go")
        cpu = sum(pipe.recv() for pipe in self._pipes)
        return Turn(self._samples / (time.perf_counter() - start), 1e6 * cpu / self._samples, 0.0)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def _serve(self, dataset: Any, part: int, count: int, pipe: Any) -> None:
        mine = range(part, len(dataset), count)
        records = [dataset._restore(i, dataset._payload(i), readonly=True)["image"] for i in mine]
        samples, rng = self._samples // count, random.Random(part)
        pipe.send("ready")
        while True:
            pipe.recv()
            cpu = time.process_time()
            passes = -(-samples // len(records))
            order = [one for _ in range(passes) for one in rng.sample(records, len(records))][:samples]
            Fill(order, dataset.transform, native.kernel)([rng.getrandbits(64) for _ in order])
            pipe.send(time.process_time() - cpu)


def measure(folder: Path, mode: str, passes: int, workers: int, rounds: int) -> dict[str, Any]:
    """One row: the turns of both sides over a cache of this mode."""
    with tempfile.TemporaryDirectory(dir=WORKPLACE) as scratch:
        dataset = dataset_of(folder, Path(scratch), mode)
        samples = passes * len(dataset) // (BATCH * workers) * BATCH * workers
        if not samples:
            raise SystemExit(f"{len(dataset)} photos are no batch for each worker: give more --images")
        kernels = Kernels(dataset, samples, workers)
        sides = {
            "loader": Loader(dataset, samples, workers),
            "processes": Loader(dataset, samples, workers, processes=True),
            "kernels": kernels,
        }
        turns: dict[str, list[Turn]] = {name: [] for name in sides}
        for round_ in range(rounds + 1):
            for name, side in sides.items():
                turn = side()
                if round_:  # the first warms up
                    turns[name].append(turn)
        kernels.close()
        taken = {name: [turn._asdict() for turn in of] for name, of in turns.items()}
        return {"mode": mode, "samples": samples, "medians": summary(taken), **taken}


def summary(row: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """The medians of a row; a ratio is of the loader to another side, in the same round."""

    def median(side: str, what: str) -> float:
        return statistics.median(turn[what] for turn in row[side])

    def ratio(what: str, other: str) -> float:
        pairs = zip(row["loader"], row[other], strict=True)
        return statistics.median(one[what] / two[what] for one, two in pairs)

    return {
        "rate": median("loader", "rate"),
        "kernel rate": median("kernels", "rate"),
        "of kernel": ratio("rate", "kernels"),
        "of processes": ratio("rate", "processes"),
        "cpu": median("loader", "cpu"),
        "kernel cpu": median("kernels", "cpu"),
        "cpu of kernel": ratio("cpu", "kernels"),
        "first": median("loader", "first"),
    }


def show(console: Console, rows: list[dict[str, Any]], workers: int) -> None:
    rate, cpu = ("img/s", "kernel img/s", "ratio", "to processes"), ("CPU us/img", "kernel us/img", "ratio")
    table = figures("mode", *rate, *cpu, "first batch s")
    table.title = f"later epochs, {workers} workers, against {workers} processes with the kernel alone"
    for row in rows:
        shown = zip(row["medians"].values(), (0, 0, 3, 3, 0, 0, 3, 3), strict=True)
        table.add_row(row["mode"], *(f"{figure:,.{digits}f}" for figure, digits in shown))
    console.print(table)


def main() -> None:
    parser = make_parser(__doc__, save=True)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--images", type=int, default=2000, help="photos in the cache (default 2000)")
    parser.add_argument("--passes", type=int, help="passes over the photos in a turn")
    parser.add_argument("--workers", type=int, default=WORKERS, help="and kernel processes (default 2)")
    parser.add_argument("--rounds", type=int, default=5)
    add_photos(parser)
    options = parser.parse_args()
    if native.kernel is None:
        raise SystemExit("the kernel is not built: `fastload doctor` says what to install")
    console = Console(width=110)
    result = begin("later")
    folder, rows = photo_folder(options.images, photos=options.photos), []
    for mode in options.modes:
        passes = options.passes or PASSES.get(mode, 1)
        rows.append(measure(folder, mode, passes, options.workers, options.rounds))
    show(console, rows, options.workers)
    result |= {"workers": options.workers, "photos": options.photos, "rows": rows}
    finish(result, save=options.save)
