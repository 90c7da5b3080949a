"""A script with torch's loader replaced: `python -m fastload SCRIPT.py`, and `fastload try`."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload.cli import trial
from tests.bucketdata import PHOTOS
from tests.commands import command, start
from tests.forked import Forked
from tests.patience import PATIENCE
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
OURS = "fastload.loader.dataloader"
TRAIN = """
import sys, time
from pathlib import Path
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

class Photos(Dataset):
    def __init__(self, root):
        self.paths = sorted(Path(root).rglob("*.jpg"))
        self.classes = sorted({path.parent.name for path in self.paths})

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        with Image.open(path) as image:
            pixels = bytearray(image.convert("RGB").resize((32, 32)).tobytes())
        return torch.frombuffer(pixels, dtype=torch.uint8) / 255, self.classes.index(path.parent.name)

if __name__ == "__main__":
    torch.manual_seed(7)  # SEED
    loader = DataLoader(Photos(sys.argv[1]), batch_size=4, shuffle=True, num_workers=2)
    for epoch in range(int(sys.argv[2])):
        for images, labels in loader:
            time.sleep(float(sys.argv[3]))
"""


@pytest.fixture(autouse=True, scope="module")
def fork_server() -> None:
    """It runs before a test sets its own TMPDIR, whose path may be too long for the server's socket."""
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of all scripts; logs go with the test."""
    for name, value in {"TMPDIR": tmp_path, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "train.py") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def fastload(
    *arguments: object, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fastload", *map(str, arguments)],
        env={**os.environ, **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def forked(
    *arguments: object, cwd: Path | None = None, module: str = "fastload", **variables: str
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `python -m MODULE ARGUMENTS`, forked."""
    with start(*arguments, module=module, cwd=cwd, **variables) as running:
        out, err = running.communicate(PATIENCE)
    return running.wait(), out, err


@pytest.fixture
def runs_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `fastload try`. That they are started by Python: `test_same_order_and_labels`."""
    monkeypatch.setattr(subprocess, "Popen", Forked)


forks = pytest.mark.usefixtures("runs_are_forked")


def tried(*arguments: object, seconds: int = 600) -> tuple[int, dict[str, Any]]:
    """(exit code, report) of the command in this process; each of the two runs is a process of its own."""
    done = command("try", "--seconds", seconds, "--json", *arguments)
    assert done.stdout, done.stderr
    return done.exit_code, json.loads(done.stdout.splitlines()[-1])


# --- python -m fastload SCRIPT.py

WHAT_A_SCRIPT_SEES = """
import json, sys
import helper
here = 1
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], __spec__ is None, sys.modules["__main__"].here]))
"""


def test_script_sees_what_python_shows(write: Any, tmp_path: Path) -> None:
    write("", "helper.py")
    write(WHAT_A_SCRIPT_SEES, "sub.py")
    options: Any = {"cwd": tmp_path, "capture_output": True, "text": True}
    plain = subprocess.run([sys.executable, "sub.py", "--seconds", "a b"], **options, check=True)
    ours = fastload("sub.py", "--seconds", "a b", cwd=tmp_path)
    assert ours.stdout == plain.stdout and ours.returncode == 0


NAMES = """
import os
os.environ["OMP_NUM_THREADS"] = "1"  # before torch
import sys
assert "torch" not in sys.modules
import torch
import torch.utils.data.dataloader
from torch.utils.data import DataLoader

class Framework(DataLoader):
    pass

loader = Framework([1, 2, 3], 2)
assert isinstance(loader, torch.utils.data.DataLoader) and issubclass(Framework, DataLoader)
assert torch.utils.data.DataLoader is torch.utils.data.dataloader.DataLoader is DataLoader
print(DataLoader.__module__, [batch.tolist() for batch in loader])
"""


def test_every_name_of_the_loader_is_replaced(write: Any) -> None:
    done = fastload(write(NAMES))
    assert done.stdout == f"{OURS} [[1, 2], [3]]\n", done.stderr


def test_no_name_of_the_loader_is_replaced_where_that_is_off(write: Any) -> None:
    script = write(NAMES.replace('assert "torch" not in sys.modules', ""))
    code, out, err = forked(script, FASTLOAD_OFF="1")
    assert out == "torch.utils.data.dataloader [[1, 2], [3]]\n", err
    assert code == 0


PROCESSES = """
import multiprocessing as mp
import os
import sys
import torch
from torch.utils.data import DataLoader, Dataset

class Seen(Dataset):  # what a worker sees
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index, DataLoader.__module__, __name__, sys.argv[1:]

class Square:
    def __init__(self, number):
        self.number = number

def child(queue, square, more):
    batches = [batch.tolist() for batch in DataLoader(range(4), 2)]
    queue.put((os.getpid(), DataLoader.__module__, square.number ** 2, __name__, sys.argv[1:], batches))
    if more:  # and a child of the child
        inner = mp.get_context("spawn").Process(target=child, args=(queue, Square(5), False))
        inner.start()
        inner.join()

print("begins", __name__, os.getpid(), flush=True)
if __name__ == "__main__":
    mp.set_forkserver_preload(["torch"])
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Seen(), 2, num_workers=1, collate_fn=list, multiprocessing_context=method)
        print(method, type(loader).__module__, *loader, flush=True)
    context = mp.get_context("forkserver")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue, Square(3), True))
    process.start()
    print(*[queue.get() for _ in range(2)], sep="\\n", flush=True)
    process.join()
    assert process.exitcode == 0
"""


def test_workers_and_processes_of_every_start_method_have_the_loader_too(write: Any, tmp_path: Path) -> None:
    """In one script, as each process that is spawned imports torch. Measured, where that is asked."""
    (tmp_path / "measured").mkdir()
    _, out, err = forked(write(PROCESSES), "a", "b", FASTLOAD_TRY=str(tmp_path / "measured"))
    lines = out.splitlines()
    begun = [line.split() for line in lines if line.startswith("begins ")]
    assert begun[0][1] == "__main__", err
    assert len(begun) == 5 and {name for _, name, _ in begun[1:]} == {"__mp_main__"}, err
    assert len({pid for _, _, pid in begun}) == len(begun), "no process runs the script twice"
    *loaders, three, five = [line for line in lines if not line.startswith("begins ")]
    wanted = []
    for method in ("fork", "spawn", "forkserver"):
        name = "__main__" if method == "fork" else "__mp_main__"
        wanted.append(f"{method} {OURS} {[(index, OURS, name, ['a', 'b']) for index in range(2)]}")
    assert loaders == wanted, err
    pids = []
    for line, square in ((three, 9), (five, 25)):
        pid, *others = ast.literal_eval(line)
        assert others == [OURS, square, "__mp_main__", ["a", "b"], [[0, 1], [2, 3]]], err
        pids.append(pid)
    files = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "measured").glob("*.json")}
    batches = {pid: [loader["batches"] for loader in loaders] for pid, loaders in files.items() if loaders}
    assert batches == {begun[0][2]: [3], str(pids[0]): [2], str(pids[1]): [2]}, "the file of each process"


RANKS = """
import os
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
loader = DataLoader(range(8), 2, sampler=DistributedSampler(range(8), shuffle=False))
seen = [None, None]
dist.all_gather_object(seen, (DataLoader.__module__, [batch.tolist() for batch in loader]))
if dist.get_rank() == 0:
    print(*seen, flush=True)
dist.barrier()
os._exit(0)  # without gloo's teardown, which aborts now and then
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize(
    "way",
    [
        ["-m", "fastload"],
        pytest.param(["--no-python", sys.executable, "-m", "fastload"], marks=pytest.mark.stress),
    ],
)
def test_torchrun(write: Any, way: list[str]) -> None:
    run = ["--nproc-per-node=2", "--standalone", "--local-addr=127.0.0.1"]
    _, out, err = forked(*run, *way, write(RANKS), module="torch.distributed.run")
    assert out == f"('{OURS}', [[0, 2], [4, 6]]) ('{OURS}', [[1, 3], [5, 7]])\n", err


def test_commands_are_commands(write: Any, tmp_path: Path) -> None:
    write("print('a script')", "prove")
    write("print('a script')", "train")
    assert "Usage: fastload prove" in forked("prove", "--help", cwd=tmp_path)[1]
    assert forked("train", cwd=tmp_path)[:2] == (0, "a script\n")
    code, _, unknown = forked("trian", cwd=tmp_path)
    assert code == 2 and "No such command 'trian'" in unknown
    missing = "fastload: 'trian.py' cannot be opened: No such file or directory\n"
    assert forked("trian.py", cwd=tmp_path) == (2, "", missing)


def test_errors_and_exit_codes_are_the_scripts(write: Any) -> None:
    failed = fastload(write("from __future__ import annotations\n\n1 / 0\n"))
    assert failed.returncode == 1 and "line 3" in failed.stderr and "ZeroDivisionError" in failed.stderr
    assert fastload(write("raise SystemExit(7)")).returncode == 7


ACCELERATE = """
import warnings
import torch
from torch.utils.data import DataLoader

class Adapter:  # as accelerate's DataLoaderShard: a loader inside, one batch ahead, a state for each batch
    def __init__(self, dataset, **options):
        self.base_dataloader = DataLoader(dataset, **options)
        self.dl_state_dict = self.base_dataloader.state_dict()
        self.device = None

    def __getattr__(self, name):
        if name == "base_dataloader":
            raise AttributeError
        return getattr(self.base_dataloader, name)

    @property
    def __class__(self):
        return self.base_dataloader.__class__

    def __iter__(self):
        batches = self.base_dataloader.__iter__()
        current = next(batches)
        while True:
            try:
                self.dl_state_dict = {**self.base_dataloader.state_dict(), "_iterator_finished": False}
                following = next(batches)
            except StopIteration:
                yield current
                return
            yield current
            current = following

def prepare(loader):
    assert not getattr(loader, "_is_accelerate_prepared", False)
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
             "multiprocessing_context", "generator", "persistent_workers")
    options = {name: getattr(loader, name) for name in names}
    return Adapter(loader.dataset, batch_sampler=loader.batch_sampler, **options)

warnings.simplefilter("error", RuntimeWarning)
prepared = prepare(DataLoader(range(6), 2, num_workers=1))
assert isinstance(prepared, DataLoader)
print(type(prepared.base_dataloader).__module__, [batch.tolist() for batch in prepared])
"""


def test_loaders_that_accelerate_makes_are_fastloads(write: Any) -> None:
    _, out, err = forked(write(ACCELERATE))
    assert out == f"{OURS} [[0, 1], [2, 3], [4, 5]]\n", err


# --- fastload try


def test_same_order_and_labels(write: Any, demo_photos: Path) -> None:
    code, report = tried(write(TRAIN), demo_photos, 1000, 0.05, seconds=2)
    assert code == 0, report
    (loader,) = report["loaders"]
    assert (loader["dataset"], loader["length"], loader["batch_size"], loader["num_workers"]) == (
        "Photos",
        PHOTOS,
        4,
        2,
    )
    assert loader["same_order"] is True and loader["same_integers"] is True
    assert loader["comparison"].startswith("the order and the labels of the first ")
    for side in ("torch", "fastload"):
        measured = loader[side]
        assert measured["batches"] > 6 and measured["samples"] == 4 * measured["batches"]
        assert measured["samples_per_second"] > 0 and 0 <= measured["waited"] <= 1
        assert 0 < measured["first_batch_seconds"] < PATIENCE
        assert (
            report[side]["ended"] == "interrupted"
            and "KeyboardInterrupt" in Path(report[side]["log"]).read_text()
        )
    assert loader["ratio"] > 0 and loader["verdict"]
    assert report["changes"][0] == "line 6: from fastload import DataLoader"


@forks
def test_report_in_words_of_a_script_that_fails_at_its_end_with_one_loader(
    write: Any, demo_photos: Path
) -> None:
    failing = "    assert not DataLoader.__module__.startswith('fastload'), 'too bad'\n"
    done = command("try", write(TRAIN + failing), demo_photos, 1, 0)
    assert done.exit_code == 1, done.output
    for words in (
        "samples/s",
        "first batch",
        "the order and the labels of the first 10 batches: the same with both",
        "with fastload, ",
        "the script failed with fastload's loader, exit code 1:",
        "  AssertionError: too bad",
    ):
        assert words in done.stdout
    assert "nothing was loaded yet" not in done.stdout and "with torch's loader, exit" not in done.stdout


THREE_LOADERS = (
    TRAIN.partition("if __name__")[0]
    + """
class Unseeded(Photos):
    pass

class Relabelled(Photos):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, label + (index == 3 and DataLoader.__module__.startswith("fastload"))

def train(rank, root):
    unseeded = torch.Generator()
    unseeded.seed()
    for dataset, generator in ((Unseeded, unseeded), (Photos, None), (Relabelled, None)):
        loader = DataLoader(
            dataset(root), 4, shuffle=True, num_workers=1, generator=generator, multiprocessing_context="fork"
        )
        for batch in loader:
            pass

if __name__ == "__main__":
    torch.multiprocessing.start_processes(train, (sys.argv[1],), start_method="fork")
"""
)


@forks
def test_orders_and_labels_of_each_loader_are_compared(write: Any, demo_photos: Path) -> None:
    """Three loaders of one script, in a process that it starts, as ranks are."""
    code, report = tried(write(THREE_LOADERS), demo_photos)
    unseeded, plain, relabelled = report["loaders"]
    assert code == 1, report
    assert plain["same_order"] is True, "without a seed of the script's"
    assert plain["same_integers"] is True
    assert unseeded["same_order"] is None and unseeded["same_integers"] is None
    assert "with torch's loader too" in unseeded["comparison"]
    assert "torch.manual_seed(0)" in unseeded["comparison"]
    # The script itself gives fastload's loader other labels than torch's.
    assert relabelled["same_order"] is True and relabelled["same_integers"] is False
    assert "the sequence of the labels differs from torch's" in relabelled["comparison"]


@forks
def test_script_without_a_loader(write: Any) -> None:
    code, report = tried(write("import torch\nprint('nothing')"), seconds=2)
    assert code == 2
    error = report["error"]
    assert error["type"] == "ArgumentError" and "read from no torch.utils.data.DataLoader" in error["message"]
    assert "there is no script" in command("try", "absent.py").stderr


FRAMEWORK = """
import torch
from torch.utils.data import DataLoader

class Repeat:
    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        while True:
            yield from iter(self.batches)

class MultiEpochsLoader(DataLoader):  # as timm's
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeat(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.batches)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)

loader = MultiEpochsLoader(range(100), 10, shuffle=True, num_workers=1)
for epoch in range(3):
    assert sorted(int(x) for batch in loader for x in batch) == list(range(100))
"""


@forks
def test_framework_with_a_loader_of_its_own(write: Any) -> None:
    write(FRAMEWORK, "framework.py")
    code, report = tried(write("import framework\n"))
    assert code == 0, report
    loader = report["loaders"][0]
    assert loader["torch"]["batches"] == loader["fastload"]["batches"] == 30
    assert loader["same_order"] is True and loader["same_integers"] is True
    assert "python -m fastload train.py" in report["changes"][0]


@forks
@pytest.mark.parametrize(
    ("handler", "patience", "ended"),
    [
        ("signal.SIG_IGN", 0.2, "killed"),
        # As where it comes in a finalizer.
        ("lambda *_: signal.signal(signal.SIGINT, signal.default_int_handler)", 3, "interrupted"),
    ],
    ids=["ignores all", "loses the first"],
)
def test_script_that_ignores_interrupts_is_killed(
    handler: str, patience: float, ended: str, write: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trial, "_SECONDS_TO_END", patience)
    script = write(
        "import signal, time\nfrom torch.utils.data import DataLoader\nloader = DataLoader(range(10**6))\n"
        f"signal.signal(signal.SIGINT, {handler})\nfor batch in loader:\n    time.sleep(0.01)\n"
    )
    run, loaders = trial._run([str(script)], tmp_path / "log", off=False, seconds=0.5)
    assert (run.ended, run.exit_code, run.failure) == (ended, None, None)
    assert loaders[0]["batches"] > 1


@forks
def test_script_that_fails_and_does_not_end_has_failed(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_SECONDS_TO_END", 0.4)
    thread = "threading.Thread(target=time.sleep, args=(999,)).start()"
    done = command("try", write(f"import threading, time\n{thread}\n1 / 0\n"))
    assert done.exit_code == 1, done.output
    for name in ("torch", "fastload"):
        assert f"the script failed with {name}'s loader, and was killed:" in done.stdout
    assert done.stdout.count("  ZeroDivisionError: ") == 2


IMAGENET = """
import argparse
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.utils.data
import torch.utils.data.distributed

parser = argparse.ArgumentParser()
parser.add_argument("data", nargs="?", default="imagenet")
parser.add_argument("-j", "--workers", default=4, type=int)
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("-b", "--batch-size", default=256, type=int)
parser.add_argument("--dist-url", default="tcp://127.0.0.1:23456", type=str)
parser.add_argument("--world-size", default=1, type=int)
parser.add_argument("--multiprocessing-distributed", action="store_true")
parser.add_argument("--dummy", action="store_true")

class FakeData(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((3, 16, 16), float(index)), torch.tensor(index % 10)

def main():
    args = parser.parse_args()
    if args.multiprocessing_distributed:
        mp.spawn(main_worker, nprocs=args.world_size, args=(args,))
    else:
        main_worker(0, args)

def main_worker(rank, args):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
    if args.multiprocessing_distributed:
        dist.init_process_group("gloo", init_method=args.dist_url, world_size=args.world_size, rank=rank)
        model = nn.parallel.DistributedDataParallel(model)
    assert args.dummy
    train_dataset, val_dataset = FakeData(640), FakeData(128)
    if args.multiprocessing_distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
        val_sampler = torch.utils.data.distributed.DistributedSampler(val_dataset, shuffle=False)
    else:
        train_sampler = val_sampler = None
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=args.batch_size, shuffle=(train_sampler is None),
        num_workers=args.workers, sampler=train_sampler)
    val_loader = torch.utils.data.DataLoader(
        val_dataset, batch_size=args.batch_size, shuffle=False, num_workers=args.workers, sampler=val_sampler)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    for epoch in range(args.epochs):
        if train_sampler is not None:
            train_sampler.set_epoch(epoch)
        for images, target in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), target).backward()
            optimizer.step()
        with torch.no_grad():
            correct = sum(int((model(images).argmax(1) == target).sum()) for images, target in val_loader)
        print("epoch", epoch, "correct", correct)

if __name__ == "__main__":
    main()
"""


@pytest.mark.stress  # two ranks take 48 s of CPU, most of it for what DDP imports
@pytest.mark.parametrize("ranks", [1, 2])
def test_script_like_the_imagenet_example_of_torch(write: Any, ranks: int) -> None:
    arguments = ["--dummy", "-b", "32", "-j", "1", "--epochs", "1"]
    if ranks > 1:
        address = f"tcp://127.0.0.1:{free_port()}"
        arguments += ["--multiprocessing-distributed", "--world-size", str(ranks), "--dist-url", address]
    code, report = tried(write(IMAGENET), *arguments)
    assert code == 0, report
    train, val = report["loaders"]
    assert (train["length"], val["length"], train["dataset"]) == (640, 128, "FakeData")
    for loader, batches in ((train, 20), (val, 4)):
        assert loader["same_order"] is True and loader["same_integers"] is True, loader
        assert loader["torch"]["batches"] == loader["fastload"]["batches"] == batches // ranks
    assert report["changes"][0].endswith("fastload.DataLoader, with `import fastload` above")
