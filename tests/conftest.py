"""Set-up of all tests, and the check that a test leaves nothing behind.

unit: pure parts, without another process or a server. process: loaders with their workers. store: object
stores, the cache and shards, with an S3 server on this machine. crash: writers of the cache that are killed.
trainer: the reference trainer. hostile: what attackers write, for all that reads. oracle: random jobs beside
a slow loader. pins: values that no change may change unsaid. Beside these, stress holds the long, random
forms, soak hours of faults, gpu what needs a GPU, and fuzz hostile bytes for the kernel. Modules without
test_ in their names are support for these.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

# Several test processes share the cores. Threads of torch that have no work must not spin there: that was
# half of the CPU of some tests. It is read where torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Each client of a store reads the authorities that the machine trusts, 6 ms for 150 of them. No server of the
# tests has a certificate: one authority, whose key nobody has, is enough.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "data" / "authority.pem")
os.environ["SSL_CERT_DIR"] = os.devnull

from fastload.fetch import threads
from fastload.store import client_process
from fastload.testing import read_tests
from fastload.workers.processes import PRELOADED
from tests.bucketdata import bucket, demo_photos  # noqa: F401 - fixtures
from tests.cachedata import open_cache  # noqa: F401 - a fixture
from tests.patience import PATIENCE
from tests.settle import settle

# A shell that starts the tests in the background lets them ignore Ctrl-C, and all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
with suppress(ImportError):  # tests/gpu does without it
    from hypothesis import HealthCheck, settings

    # How long an example takes says how busy the machine is.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")
# One fork server serves all tests of a process. A loader says so too late where another test has started it.
multiprocessing.set_forkserver_preload(
    [*PRELOADED, "torch._dynamo", "tests.resnet50", "pytest", "tests.docs.pages", "tests.settled"]
)

# What a test did not close ends soon, as leak checks wait for it: reader threads, and the client's process.
threads.IDLE_SECONDS = 0.1
client_process.IDLE_SECONDS = 1.0
_FAILED = pytest.StashKey[bool]()
ROOT = Path(__file__).parents[1]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    gc.disable()  # what is imported stays: to look for garbage in it took a tenth of the time
    try:
        if "PYTEST_XDIST_WORKER" in os.environ:
            _import_tests(session.config.args)
        return (yield)
    finally:
        gc.enable()


def _import_tests(paths: list[str]) -> None:
    """Import the test modules, each process of xdist from another one on.

    In a fresh checkout each finds compiled what another has compiled, where all would compile the same ones
    side by side: 9 s of CPU each.
    """
    number, count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    modules = sorted({module for path in paths for module in Path(path).absolute().rglob("test_*.py")})
    first = number * len(modules) // count
    for module in modules[first:] + modules[:first]:
        name = ".".join(module.relative_to(ROOT).with_suffix("").parts)
        with suppress(Exception, pytest.skip.Exception):  # collecting it fails again, and says so
            importlib.import_module(name)


def pytest_collection_finish() -> None:
    settle()


@pytest.fixture(autouse=True, scope="module")
def settled() -> Iterator[None]:
    """Settle what the tests of a module left, too: of those of the docs, 0.5 s a garbage collection."""
    yield
    settle()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    item.stash[_FAILED] = report.failed or item.stash.get(_FAILED, False)
    return report


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test if it leaves processes, threads, descriptors or shared memory behind.

    A test that failed is not looked at: its traceback keeps all that its frames hold.
    """
    before = read_tests.held()
    yield
    if request.node.stash.get(_FAILED, False):
        return
    left = read_tests.left_behind(before, PATIENCE)
    if left:
        pytest.fail(f"left behind after {PATIENCE:.0f} s: {left}")


@pytest.fixture
def keep() -> Iterator[Callable[[Any], Any]]:
    """Return what it is given, such as a dataset, and close it at the end of the test."""
    with ExitStack() as stack:

        def close_later(opened: Any) -> Any:
            stack.callback(opened.close)
            return opened

        yield close_later


@pytest.fixture
def no_aws_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the environment nor the profiles of this machine have AWS settings."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
