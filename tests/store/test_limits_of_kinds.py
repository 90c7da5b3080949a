"""`max_gets` with every kind of data: never one request more, then the rest of the epoch from its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload.datasets.wrappers import view_of
from fastload.errors import LimitError
from tests.faultserver import LIST, Fault, FaultServer
from tests.kinds import COUNT, KINDS, Kind, numbers, photo
from tests.shortform import stress

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

BATCH = 4
WANTED = Counter(range(COUNT))
CHOSEN = [kind for kind in KINDS if kind.name in ("table", "tar", "parquet", "tokens")]
LONG = [kind for kind in KINDS if kind.name in ("mds", "litdata")]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("objects")
    for kind in CHOSEN + LONG:
        kind.write(root / kind.folder, photo)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def opened(kind: Kind, cache: Path | None, options: Any) -> Any:
    return kind.make(f"s3://bucket/{kind.folder}", cache=cache, storage_options=options)


def loader_of(dataset: Any, workers: int) -> Any:
    return fastload.DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, seed=3)


def samples(loader: Any) -> list[int]:
    return [found for batch in loader for found in numbers(batch)]


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
        for batch in loader:
            assert len(numbers(batch)) == BATCH
            found += numbers(batch)
    return found


ELSEWHERE = [(workers, part) for workers in (0, 2, 3) for part in (0.1, 0.4, 0.9)]


@pytest.mark.parametrize(("workers", "part"), [(1, 0.6), *stress(*ELSEWHERE)])
@pytest.mark.parametrize(
    "kind",
    [*CHOSEN, *stress(*LONG)],
    ids=lambda kind: kind.name,
)
def test_limit_stops_in_time_and_the_state_goes_on_with_each_sample_once(
    kind: Kind, server: FaultServer, tmp_path: Path, workers: int, part: float
) -> None:
    cache = tmp_path / "cache"
    fail_again(server)
    dataset = opened(kind, None, server.options)
    opening = asked(server)
    assert Counter(samples(loader_of(dataset, 0))) == WANTED
    epoch = asked(server)
    counted = view_of(dataset).budget().spent()
    assert counted.gets + counted.heads == opening + epoch, "each request is counted once"

    limit = opening + max(1, int(part * (epoch - 1)))
    fail_again(server)  # the retries count too
    limited = opened(kind, None, {**server.options, "max_gets": limit})
    loader = loader_of(limited, workers)
    seen = stopped_early(loader)
    assert asked(server) <= limit
    (told,) = loader.stats()["limits"]
    assert told["max_gets"] == limit and opening <= told["gets"] <= limit

    raised = loader_of(opened(kind, cache, {**server.options, "max_gets": 10_000}), workers)
    raised.load_state_dict(loader.state_dict())
    assert Counter(seen + samples(raised)) == WANTED
    assert Counter(samples(raised)) == WANTED, "the cache has all after this epoch"
    asked(server)

    hits = opened(kind, cache, {**server.options, "max_gets": max(1, opening)})
    assert Counter(samples(loader_of(hits, 0))) == WANTED
    assert asked(server) <= opening, "a hit counts for nothing"
