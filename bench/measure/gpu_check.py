"""All that needs a GPU, in one command: the tests of tests/gpu, and the rates of batches on the device.

    make gpu-check                                        python -m bench gpu_check
    python -m bench gpu_check --device cpu --quick        every step without a GPU, as a trial of the steps

It measures with photos that it makes; nothing is downloaded. The figures: the rate of the loader's copies
against a bare copy from pinned memory (goal: 90 %); images per second onto the device by each decoder, for
several numbers of CPU cores; the share of time in which the device has no batch, beside a step as long as one
of ResNet-50; the reference trainer. Each part runs in a process of its own, so a part that fails or hangs is
one line in the table.

Writes bench/results/<gpu>-<date>.json. Exit status: 0; 1 if a test or a part failed; 3 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset

import fastload
from bench.command import describe_machine, make_parser
from bench.data import RESULTS, ROOT, WORKPLACE, photo_folder

NO_GPU = 3
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH = 256
STEP_RATE = 3000  # images per second that the synthetic step takes: ResNet-50 in bf16 on one H200
DECODERS = ("cpu", "dali", "torch")
# Each in a process of its own: a decoder that ends its process hides no other result.
TESTS = {
    "feed": ["tests/gpu/test_gpu_feed.py"],
    "dali": ["tests/gpu/test_gpu_decode.py"],
    "torch": ["tests/unit/test_torch_dct.py"],
}
PART_SECONDS = 300
TRAINER_SECONDS = 480  # photos are made, and four runs of three epochs


# --- the parts, each in a child process --------------------------------------------------------------------


class Ready(Dataset[torch.Tensor]):
    """The same batch of 256 x 3 x 224 x 224 bytes each time: only the hand-over is measured."""

    def __init__(self, length: int) -> None:
        self.batch = torch.randint(0, 256, (BATCH, 3, 224, 224), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batch


def copy_part(args: argparse.Namespace) -> dict[str, Any]:
    """GB/s of the loader's copies and of a bare pinned copy, both by events on the copying stream."""
    batches = 12 if args.quick else 200
    options: dict[str, Any] = {"num_workers": args.workers, "persistent_workers": True}
    loader = fastload.DataLoader(Ready(batches), batch_size=None, device=args.device, **options)
    for _ in loader:  # the slots are registered with the first batches
        pass
    before = loader.stats()["counters"]
    start = time.perf_counter()
    for batch in loader:  # noqa: B007
        pass
    _settle(args.device)
    elapsed = time.perf_counter() - start
    after = loader.stats()["counters"]
    result: dict[str, Any] = {
        "batch_bytes": batch.nbytes,
        "end_to_end_gb_s": batches * batch.nbytes / elapsed / 1e9,
        "unregistered_slots": after.get("copy.unregistered", 0),
    }
    if args.device != "cpu":
        moved = {
            name: after[name] - before.get(name, 0) for name in ("copy.bytes", "copy.seconds", "copy.batches")
        }
        # Bytes are counted at the start of a copy, seconds at its end.
        per_batch = moved["copy.seconds"] / moved["copy.batches"]
        result["feed_gb_s"] = batch.nbytes / per_batch / 1e9
        result["bare_gb_s"] = _bare_copy_rate(args.device, batch.nbytes)
        result["share_of_bare"] = result["feed_gb_s"] / result["bare_gb_s"]
    return result


def _bare_copy_rate(device: str, nbytes: int) -> float:
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    rates = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(nbytes / start.elapsed_time(end) * 1000 / 1e9)
    return sorted(rates)[len(rates) // 2]


def images_part(args: argparse.Namespace) -> dict[str, Any]:
    """Images per second from files to normalised bf16 batches on the device, by one decoder."""
    loader = _image_loader(args)
    rates = []
    for _ in range(1 if args.quick else 3):
        done, start = 0, 0.0
        for number, (images, _) in enumerate(loader):
            if number == 1:  # the first batch includes the start-up
                _settle(args.device)
                start = time.perf_counter()
            elif number:
                done += len(images)
        _settle(args.device)
        rates.append(done / (time.perf_counter() - start))
    counters = loader.stats()["counters"]
    return {"images_per_s": max(rates), "all": rates, "bad": counters.get("bad.samples", 0)}


def idle_part(args: argparse.Namespace) -> dict[str, Any]:
    """The share of time in which the device has no batch; a batch is the work of a ResNet-50 step."""
    loader = _image_loader(args)
    step = _step(args.device, args.batch / STEP_RATE)
    next(iter(loader))
    before = loader.stats()["counters"]
    start = time.perf_counter()
    count = 0
    for _ in range(1 if args.quick else 3):
        for images, _ in loader:
            step(images)
            count += len(images)
    _settle(args.device)
    elapsed = time.perf_counter() - start
    after = loader.stats()["counters"]
    moved = {name: after[name] - before.get(name, 0) for name in after}
    watched, idle = moved.get("device.seconds", 0), moved.get("device.idle.seconds", 0)
    if args.device == "cpu":
        watched, idle = elapsed, moved["wait.seconds"]
    return {"idle_share": idle / watched, "images_per_s": count / elapsed, "wanted_images_per_s": STEP_RATE}


def _image_loader(args: argparse.Namespace) -> Any:
    options: dict[str, Any] = {} if args.decoder == "cpu" else {"decoder": args.decoder}
    cache = fastload.Cache(WORKPLACE / "gpu-check-dct", "dct") if args.decoder == "torch" else None
    return fastload.DataLoader(
        fastload.ImageFolder(
            str(photo_folder(args.photos, 95)), fastload.RandomResizedCrop(224, flip=0.5), cache=cache
        ),
        args.batch,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=True,
        device=args.device,
        batch_transform=lambda batch: [NORMALIZE(batch[0]), batch[1]],
        **options,
    )


NORMALIZE = fastload.Normalize(MEAN, STD, dtype=torch.bfloat16, memory_format=torch.channels_last)


def _step(device: str, seconds: float) -> Any:
    """Work that keeps the device busy for about `seconds`."""
    if device == "cpu":
        return lambda images: time.sleep(seconds / 10)
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        matrix @ matrix
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    torch.cuda.synchronize()
    times = max(1, round(seconds / ((time.perf_counter() - start) / 20)))

    def work(images: torch.Tensor) -> None:
        images.float().mean()
        for _ in range(times):
            matrix @ matrix

    return work


def _settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


PARTS = {"copy": copy_part, "images": images_part, "idle": idle_part}


# --- the whole --------------------------------------------------------------------------------------------


def build_kernel() -> str:
    """The name of the CPU decoder here; builds the kernel first where sources and headers allow it."""
    try:
        from fastload.images import compiled  # noqa: F401

        return "native kernel"
    except ImportError:
        pass
    folder = ROOT / "fastload" / "images"
    target = folder / f"compiled{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = ["gcc", "-std=c11", "-O3", "-fvisibility=hidden", "-shared", "-fPIC"]
    command += [
        f"-I{sysconfig.get_path('include')}",
        str(folder / "kernel.c"),
        "-o",
        str(target),
        "-ljpeg",
        "-lm",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        why = done.stderr.strip().splitlines()[0] if done.returncode else ""
    except OSError as error:
        why = str(error)
    return (
        f"Python fallback through simplejpeg (the kernel was not built: {why})"
        if why
        else "native kernel, built now"
    )


def run_tests() -> dict[str, Any]:
    if importlib.util.find_spec("pytest") is None:
        return {"skipped": "pytest is not installed"}
    results = {name: _run_tests(tests) for name, tests in TESTS.items()}
    failures = {name: result for name, result in results.items() if result["status"]}
    counts = {
        kind: sum(result.get(kind, 0) for result in results.values())
        for kind in ("passed", "failed", "skipped", "error")
    }
    whole: dict[str, Any] = counts | {"status": max(result["status"] for result in results.values())}
    return whole | ({"failed_parts": failures} if failures else {})


def _run_tests(tests: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=PART_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"said": f"not finished after {PART_SECONDS} s", "status": 124}
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    result: dict[str, Any] = counts | {"status": abs(done.returncode)}  # a decoder may end it by a signal
    if done.returncode:
        result["failed_output"] = done.stdout[-4000:] + done.stderr[-1000:]
    return result


def run_part(name: str, args: argparse.Namespace, cores: int, decoder: str = "cpu") -> dict[str, Any]:
    """The part in a child process with `cores` cores and as many workers."""
    cpus = sorted(os.sched_getaffinity(0))[:cores]
    command = [sys.executable, "-m", "bench", "gpu_check", "--part", name, "--device", args.device]
    command += [
        "--decoder",
        decoder,
        "--workers",
        str(cores),
        "--photos",
        str(args.photos),
        "--batch",
        str(args.batch),
    ]
    command += ["--quick"] if args.quick else []
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PART_SECONDS,
            check=False,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not finished after {PART_SECONDS} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        known = re.search(
            r"ArgumentError|ModuleNotFoundError|unexpected keyword argument 'decoder'", lines[-1]
        )
        return {"skipped" if known else "failed": lines[-1], "output": done.stderr[-2000:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run_trainer(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of examples/resnet50, by `bench trainer`."""
    command = [sys.executable, "-m", "bench", "trainer", "--gpu"]
    command += ["--quick", "--epochs", "2"] if args.quick or args.device == "cpu" else []
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TRAINER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not finished after {TRAINER_SECONDS} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def check(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    result = describe_machine()
    result["device"] = torch.cuda.get_device_name() if args.device != "cpu" else "cpu"
    result["cpu_decoder"] = build_kernel()
    console.print(
        f"[bold]{result['device']}[/], {args.all_cores} cores; CPU decoder: {result['cpu_decoder']}"
    )
    console.print("tests")
    result["tests"] = run_tests()
    console.print("copies")
    result["copy"] = run_part("copy", args, args.all_cores)
    result["images"] = {}
    for cores in args.cores:
        for decoder in DECODERS:
            console.print(f"images, decoder={decoder!r}, {cores} cores")
            result["images"][f"{decoder} {cores}"] = run_part("images", args, cores, decoder)
    console.print("idle share")
    result["idle"] = run_part("idle", args, args.all_cores)
    result["trainer"] = run_trainer(args)
    return result


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"fastload on {result['device']}", title_justify="left")
    table.add_column("what")
    table.add_column("found", justify="right")
    table.add_column("note")

    def row(what: str, part: dict[str, Any], value: str, note: str = "") -> None:
        trouble = next(
            (f"{kind}: {part[kind]}" for kind in ("failed", "skipped") if isinstance(part.get(kind), str)), ""
        )
        table.add_row(what, "-" if trouble else value, trouble or note)

    tests, copy, idle = result["tests"], result["copy"], result["idle"]
    row("tests", tests, f"{tests.get('passed', 0)} passed", f"{tests.get('skipped', 0)} skipped")
    if "share_of_bare" in copy:
        note = f"of {copy['bare_gb_s']:.1f} GB/s bare; goal 90 %"
        row("copy", copy, f"{copy['feed_gb_s']:.1f} GB/s = {copy['share_of_bare']:.0%}", note)
    row(
        "batches, end to end",
        copy,
        f"{copy.get('end_to_end_gb_s', 0):.1f} GB/s",
        "from ready batches in workers",
    )
    for name, part in result["images"].items():
        decoder, cores = name.split()
        row(f"images, decoder={decoder!r}, {cores} cores", part, f"{part.get('images_per_s', 0):,.0f}/s")
    row(
        "device idle beside a step",
        idle,
        f"{idle.get('idle_share', 0):.1%}",
        f"{idle.get('images_per_s', 0):,.0f}/s",
    )
    row("trainer", result["trainer"], json.dumps(result["trainer"])[:60])
    console.print(table)


def failed(result: dict[str, Any]) -> bool:
    parts = [result["copy"], result["idle"], result["trainer"], *result["images"].values()]
    return bool(result["tests"].get("status")) or any("failed" in part for part in parts)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--quick", action="store_true", help="few images and batches, as a trial of the steps"
    )
    parser.add_argument("--cores", type=lambda text: [int(n) for n in text.split(",")], help="2,4,8,16")
    parser.add_argument("--photos", type=int, help="how many are read in an epoch")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--decoder", default="cpu", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.all_cores = len(os.sched_getaffinity(0))
    args.photos = args.photos or (256 if args.quick else 8192)
    args.batch = args.batch or (32 if args.quick else BATCH)
    if args.part:
        print(json.dumps(PARTS[args.part](args)))
        return
    console = Console()
    if args.device != "cpu" and not torch.cuda.is_available():
        console.print(
            "no CUDA GPU that torch can use here: nothing was run. `--device cpu --quick` tries the steps"
        )
        raise SystemExit(NO_GPU)
    wanted = args.cores or [2, 4, 8, 16]
    args.cores = sorted({min(n, args.all_cores) for n in wanted})
    result = check(args, console)
    show(result, console)
    name = re.sub(r"[^a-z0-9]+", "-", result["device"].lower()).strip("-")
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{name}-{result['date'][:10]}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {path}")
    raise SystemExit(int(failed(result)))
