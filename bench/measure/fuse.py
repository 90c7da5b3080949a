"""A torchvision transform as it is, and through `fastload.fuse`: images a second and CPU time.

    python -m bench fuse [--rounds 5]

Local photos of 138 KB in the page cache, `ImageFolder`, 2 workers. Every form has its loader, whose workers
stay; after an epoch to warm up, the forms take turns, an epoch each. CPU time is that of the process and its
workers together.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import psutil

import fastload
from bench.command import begin, finish, make_parser
from bench.data import BATCH, SIZE, WORKERS, photo_folder
from bench.peers.scripts.torchvision_on_cpu import torchvision

PHOTOS = 400
_v1: Any = torchvision.transforms
_FLOATS = [_v1.ToTensor(), _v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
PIPELINES: dict[str, list[Any]] = {
    "crop, flip, ToTensor, Normalize": [_v1.RandomResizedCrop(SIZE), _v1.RandomHorizontalFlip(), *_FLOATS],
    "Resize(256), CenterCrop, ToTensor, Normalize": [_v1.Resize(256), _v1.CenterCrop(SIZE), *_FLOATS],
    "crop, flip, TrivialAugmentWide, ToTensor, Normalize": [
        _v1.RandomResizedCrop(SIZE),
        _v1.RandomHorizontalFlip(),
        _v1.TrivialAugmentWide(),
        *_FLOATS,
    ],
}


def cpu_seconds() -> float:
    """Of this process and its children."""
    process = psutil.Process()
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def epoch(loader: Any) -> dict[str, float]:
    began, cpu = time.perf_counter(), cpu_seconds()
    count = sum(len(images) for images, _ in loader)
    elapsed = time.perf_counter() - began
    return {"images/s": count / elapsed, "CPU ms an image": (cpu_seconds() - cpu) * 1000 / count}


def measure(steps: list[Any], rounds: int) -> dict[str, dict[str, list[float]]]:
    """{"plain" or "fused": {measure: its values}}."""
    compose = _v1.Compose(steps)
    folder = str(photo_folder(PHOTOS))
    loaders = {
        name: fastload.DataLoader(
            fastload.ImageFolder(folder, transform),
            batch_size=BATCH,
            shuffle=True,
            num_workers=WORKERS,
            persistent_workers=True,
        )
        for name, transform in (("plain", compose), ("fused", fastload.fuse(compose)))
    }
    for loader in loaders.values():
        epoch(loader)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in loaders}
    for _ in range(rounds):
        for name, loader in loaders.items():
            for what, value in epoch(loader).items():
                found[name].setdefault(what, []).append(value)
    return found


def main() -> None:
    parser = make_parser(__doc__, results=True)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    document = begin("fuse")
    rows = []
    for name, steps in PIPELINES.items():
        found = measure(steps, arguments.rounds)
        for what in found["plain"]:
            plain, fused = (statistics.median(found[form][what]) for form in ("plain", "fused"))
            rows.append({"steps": name, "what": what, "plain": plain, "fused": fused})
    finish(document | {"rows": rows}, arguments.results)
