"""`python -m fastload SCRIPT.py`: a script as Python runs it, with fastload's loader in the place of torch's.

The name `DataLoader` of torch is replaced as soon as torch is imported. Before that the script may set what
torch reads, such as OMP_NUM_THREADS. Frameworks are imported after torch, and find fastload's loader.

A process that multiprocessing spawns would run the script again without this. It runs this module instead
(`_preparation_data`), which replaces the loader and runs the script as `__mp_main__`.

With the variable FASTLOAD_TRY, which `fastload try` sets, the loaders are measured. For that the base of
torch's iterators is changed, from which both loaders derive theirs. The script gets the objects that it gets
without.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import io
import json
import os
import random
import runpy
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from pathlib import Path
from typing import Any

OFF = "FASTLOAD_OFF"  # 1: torch's loader stays
MEASURE = "FASTLOAD_TRY"  # a directory for the measurements
FAILED = "failed"  # a file there, once the script has raised an exception
_SCRIPT = "FASTLOAD_SCRIPT"  # its path, for spawned processes

LEADING = 64  # batches whose order and integers are noted
_LEADING_INTEGERS = 8192  # of each tensor
_SECONDS_BETWEEN_WRITES = 0.5


def run(argv: list[str]) -> None:
    """Run a script as `__main__`, in this process.

    Args:
        argv: path of the script, and its arguments.
    """
    script = Path(argv[0])
    try:
        with io.open_code(str(script)) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"fastload: {argv[0]!r} cannot be opened: {error.strerror}\n")
        raise SystemExit(2) from None
    path = str(script.absolute())
    sys.argv = argv
    if not sys.flags.safe_path:
        sys.path[0] = str(script.resolve().parent)
    os.environ[_SCRIPT] = os.path.normpath(path)
    prepare()
    # runpy was rejected: its `__file__` may be relative, and its module is gone when the interpreter ends.
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    try:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    except Exception:
        if directory := os.environ.get(MEASURE):
            (Path(directory) / FAILED).touch()  # now, as its workers may take long to end
        raise


def prepare() -> None:
    """Replace the loader once torch is imported, here and in the processes that multiprocessing starts."""
    off, directory = os.environ.get(OFF, "0") not in ("", "0"), os.environ.get(MEASURE)
    if off and not directory:
        return
    if directory:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background ignores

    def torch_is_here() -> None:
        if not off:
            _replace()
        if directory:
            _measure(Path(directory))

    if "torch" in sys.modules:
        torch_is_here()
    else:
        sys.meta_path.insert(0, _AfterTorch(torch_is_here))
    prepared: Any = spawn  # its name in multiprocessing is looked up at each start of a process
    prepared.get_preparation_data = functools.partial(_preparation_data, spawn.get_preparation_data)


class _AfterTorch:
    """A finder of modules that calls a function once torch is imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                self._then()

            loader.exec_module = exec_module
        return spec


def _replace() -> None:
    import torch.utils.data

    import fastload

    for module in (torch.utils.data, torch.utils.data.dataloader):
        setattr(module, "DataLoader", fastload.DataLoader)  # noqa: B010 - mypy allows no assignment to a class


def _preparation_data(original: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """Return what a spawned process prepares: this module where it would run the script."""
    data = original(name)
    if data.get("init_main_from_path") == os.environ[_SCRIPT]:
        del data["init_main_from_path"]
        data["init_main_from_name"] = "fastload.cli.script"
    return data


# --- the measurement of `fastload try`


class _Deliveries:
    """What one loader delivered.

    Args:
        about: what is said about the loader.
        ahead: batches that workers make ahead. The rate counts from the next one on.

    Attributes:
        marks: at the beginning and after each batch: seconds of reading and training, those of waiting among
            them, samples.
        order: digests of the leading index batches.
        integers: digests of the integers in the leading batches.
        context: of a loader of fastload, else None.
    """

    def __init__(self, about: dict[str, Any], ahead: int) -> None:
        self._about, self._ahead = about, ahead
        self.marks = [(0.0, 0.0, 0)]
        self.order: list[str] = []
        self.integers: list[str] = []
        self.context: Any = None

    def note_order(self, index_batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the index batches, with note of the leading ones."""
        for index in index_batches:
            first = next(iter(index), None) if isinstance(index, list) else index
            if first is not None and len(self.order) < LEADING:  # iterable datasets have no indices
                self.order.append(_digest(repr(index).encode()))
            yield index

    def add(self, batch: Any, seconds: float, waited: float) -> None:
        """Count a batch.

        Args:
            seconds: time since the batch before it, or since the iteration began.
            waited: time of the call that returned it.
        """
        from fastload.gpu.tree import tree_leaves

        leaves = list(tree_leaves(batch))
        lengths = [len(leaf) for leaf in leaves if leaf.ndim]
        samples = lengths[0] if lengths else len(batch) if hasattr(batch, "__len__") else 1
        before = self.marks[-1]
        self.marks.append((before[0] + seconds, before[1] + waited, before[2] + samples))
        # Images are left out: they are large, and random.
        whole = [
            leaf for leaf in leaves if leaf.ndim <= 2 and not (leaf.is_floating_point() or leaf.is_complex())
        ]
        if whole and len(self.integers) < LEADING and len(self.integers) == len(self.marks) - 2:
            parts = [leaf.detach().flatten()[:_LEADING_INTEGERS].cpu().numpy().tobytes() for leaf in whole]
            self.integers.append(
                _digest(*(f"{leaf.dtype} {tuple(leaf.shape)}".encode() for leaf in whole), *parts)
            )

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        from fastload.metrics.bottleneck import explain_bottleneck

        verdict = None
        if self.context is not None:  # as stats() has it
            verdict = explain_bottleneck(self.context.meter.counters(), self.context.meter.gauges())
        batches = len(self.marks) - 1
        before, last = self.marks[min(max(1, self._ahead), batches // 2)], self.marks[-1]
        seconds = max(last[0] - before[0], 1e-9)
        return {
            **self._about,
            "batches": batches,
            "samples": last[2],
            "samples_per_second": round((last[2] - before[2]) / seconds, 1),
            "first_batch_seconds": round(self.marks[1][0], 3) if batches else None,
            "waited": round((last[1] - before[1]) / seconds, 3),
            "verdict": verdict,
            "order": self.order,
            "integers": self.integers,
        }


class _Measurement:
    """The deliveries of all loaders of this process, and the file that they are written to.

    Args:
        directory: of the files, one for each process.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._loaders: dict[tuple[Any, ...], _Deliveries] = {}  # by what makes them alike
        self._written = 0.0

    def of(self, loader: Any) -> _Deliveries:
        """Return the deliveries of a loader, and of those like it: scripts make one for each epoch."""
        dataset, length = loader.dataset, None
        with contextlib.suppress(Exception):  # a dataset without length may raise anything
            length = len(dataset)
        about = {
            "dataset": type(dataset).__qualname__,
            "length": length,
            "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
            "num_workers": loader.num_workers,
        }
        ahead = loader.num_workers * (loader.prefetch_factor or 2)
        key = (type(dataset), type(loader.sampler), ahead, *about.values())
        deliveries = self._loaders.setdefault(key, _Deliveries(about, ahead))
        # Not the loader itself: it must not live longer than without a measurement.
        deliveries.context = getattr(loader, "_context", None)
        return deliveries

    def write(self, *, now: bool = True) -> None:
        """Write the file of this process, unless it was written a moment ago."""
        from fastload.distributed import find_rank

        clock = time.perf_counter()
        if find_rank()[0] or not (now or clock - self._written > _SECONDS_BETWEEN_WRITES):
            return
        document = [deliveries.document() for deliveries in self._loaders.values()]
        path = self._directory / f"{os.getpid()}.json"
        path.with_suffix(".part").write_text(json.dumps(document))
        path.with_suffix(".part").replace(path)
        self._written = clock


def _measure(directory: Path) -> None:
    """Measure all loaders of this process from now on. Its random numbers are those of every other run."""
    import numpy as np
    import torch

    from fastload.metrics.torch_private import TorchIterator

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    measurement = _Measurement(directory)
    atexit.register(measurement.write)
    base: Any = TorchIterator
    init, reset, advance = base.__init__, base._reset, base.__next__

    def new_init(self: Any, loader: Any) -> None:
        self._tried_since = time.perf_counter()
        self._tried_first = True  # the wait for the first batch began with the iteration
        self._tried = measurement.of(loader)
        measurement.write()
        init(self, loader)
        self._sampler_iter = self._tried.note_order(self._sampler_iter)

    def new_reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self._tried_since, self._tried_first = time.perf_counter(), True
        reset(self, loader, first_iter)
        self._sampler_iter = self._tried.note_order(self._sampler_iter)

    def new_next(self: Any) -> Any:
        called = self._tried_since if self._tried_first else time.perf_counter()
        try:
            batch = advance(self)
        except StopIteration:
            measurement.write()
            raise
        arrived = time.perf_counter()
        self._tried.add(batch, arrived - self._tried_since, arrived - called)
        self._tried_since, self._tried_first = arrived, False
        measurement.write(now=False)
        return batch

    base.__init__, base._reset, base.__next__ = new_init, new_reset, new_next


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()


if __name__ == "__mp_main__":  # multiprocessing has spawned this process
    prepare()
    globals().update(runpy.run_path(os.environ[_SCRIPT], run_name="__mp_main__"))
