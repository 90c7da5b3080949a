"""`max_gets` with every shape of data: never one request more, then the rest of the epoch from its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload.errors import LimitError
from tests.faultserver import LIST, Fault, FaultServer
from tests.store import test_shapes as shapes

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

WANTED = Counter(range(shapes.COUNT))
SHAPES = [shapes.table, shapes.tar, shapes.parquet, shapes.mds, shapes.lit]
WRITERS = (shapes.write_objects, shapes.write_tars, shapes.write_parquet, shapes.copy_formats)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("objects")
    for write in WRITERS:
        write(root)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def server(objects: dict[str, bytes]) -> Iterator[FaultServer]:
    with FaultServer(objects) as running:
        yield running


def fail_again(server: FaultServer) -> None:
    """Each fourth object fails once more."""
    for key in sorted(server.objects)[::4]:
        server.script(key, None, Fault(status=503), None)


def asked(server: FaultServer) -> int:
    """GETs and HEADs since the last call."""
    found = sum(one.key != LIST and one.method in ("GET", "HEAD") for one in server.requests)
    server.requests.clear()
    return found


def stopped_early(loader: Any) -> list[int]:
    """The samples handed out before the limit; whole batches only."""
    found: list[int] = []
    with pytest.raises(LimitError, match="max_gets="):
        for batch in shapes.samples(loader):
            assert len(batch) == shapes.BATCH
            found += batch
    return found


def check(shape: Callable[..., Any], server: FaultServer, cache: Path, workers: int, part: float) -> None:
    fail_again(server)
    dataset = shape(None, server.options)
    opening = asked(server)
    assert Counter(shapes.flat(shapes.samples(shapes.loader_of(dataset, 0)))) == WANTED
    epoch = asked(server)
    counted = dataset.budget.spent()
    assert counted.gets + counted.heads == opening + epoch, "each request is counted once"

    limit = opening + max(1, int(part * (epoch - 1)))
    fail_again(server)  # the retries count too
    limited = shape(None, {**server.options, "max_gets": limit})
    loader = shapes.loader_of(limited, workers)
    seen = stopped_early(loader)
    assert asked(server) <= limit
    (told,) = loader.stats()["limits"]
    assert told["max_gets"] == limit and opening <= told["gets"] <= limit

    raised = shapes.loader_of(shape(cache, {**server.options, "max_gets": 10_000}), workers)
    raised.load_state_dict(loader.state_dict())
    assert Counter(seen + shapes.flat(shapes.samples(raised))) == WANTED
    assert Counter(shapes.flat(shapes.samples(raised))) == WANTED, "the cache has all after this epoch"
    asked(server)

    hits = shape(cache, {**server.options, "max_gets": max(1, opening)})
    assert Counter(shapes.flat(shapes.samples(shapes.loader_of(hits, 0)))) == WANTED
    assert asked(server) <= opening, "a hit counts for nothing"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_limit_stops_in_time_and_the_state_goes_on_with_each_sample_once(
    shape: Callable[..., Any], server: FaultServer, tmp_path: Path
) -> None:
    check(shape, server, tmp_path / "cache", workers=1, part=0.6)


@pytest.mark.stress
@pytest.mark.parametrize("part", [0.1, 0.4, 0.9])
@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_limit_stops_in_time_at_any_place(
    shape: Callable[..., Any], server: FaultServer, tmp_path: Path, workers: int, part: float
) -> None:
    check(shape, server, tmp_path / "cache", workers, part)
