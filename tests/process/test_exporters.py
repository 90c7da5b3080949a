"""`fastload.watch(exporter=)`: real scrapes over HTTP, and real collections of OpenTelemetry's SDK."""

from __future__ import annotations

import gc
import multiprocessing
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import prometheus_client
import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

import fastload
from fastload import DataLoader, watch
from fastload.errors import ArgumentError
from fastload.metrics.bottleneck import BOTTLENECKS
from fastload.metrics.counters import Counters, Meter
from fastload.metrics.exporters import METRICS
from tests.loaderdata import Gate, Numbers
from tests.patience import PATIENCE, wait_until

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    # Python 3.12 warns of forks beside threads, such as that of a server.
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
COUNTERS = {metric.source: metric for metric in METRICS if metric.kind == "counter"}


@contextmanager
def served(registry: CollectorRegistry) -> Iterator[str]:
    """The address of a server of prometheus_client."""
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def scraped(address: str) -> str:
    with urlopen(address, timeout=PATIENCE) as answer:
        return str(answer.read().decode())


def series(text: str) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def here(registry: CollectorRegistry) -> Series:
    return series(generate_latest(registry).decode())


def labels(**given: str) -> frozenset[tuple[str, str]]:
    return frozenset({"rank": "0", **given}.items())


def collected(reader: InMemoryMetricReader) -> dict[str, Any]:
    """The metrics that were collected, by name; those without points are left out."""
    data = reader.get_metrics_data()
    found = {}
    for resource in data.resource_metrics if data is not None else ():
        for scope in resource.scope_metrics:
            assert scope.scope.name == "fastload" and scope.scope.version == fastload.__version__
            found |= {metric.name: metric for metric in scope.metrics if list(metric.data.data_points)}
    return found


# --- Prometheus


@pytest.mark.parametrize("num_workers", [0, 2])
def test_scrape_over_http_has_the_counters_rates_and_bottleneck_of_stats(num_workers: int) -> None:
    registry = CollectorRegistry()
    loader = DataLoader(Numbers(30), 2, num_workers=num_workers)
    with served(registry) as address, watch(loader, exporter=registry):
        assert len(list(loader)) == 15
        text = scraped(address)
        found, stats = series(text), loader.stats()
    for name, metric in COUNTERS.items():
        assert found[metric.prometheus, labels()] == stats["counters"].get(name, 0), name
        assert f"# TYPE {metric.prometheus} counter\n" in text
    for name, value in stats["rates"].items():
        (metric,) = [metric for metric in METRICS if metric.source == name]
        assert found[metric.prometheus, labels()] == pytest.approx(value, abs=1e-9), name
        assert f"# TYPE {metric.prometheus} gauge\n" in text
    stages = {name: found["fastload_bottleneck", labels(stage=name)] for name in BOTTLENECKS}
    assert stages == {name: float(name == stats["limit"]) for name in BOTTLENECKS}
    assert found["fastload_info", labels(version=fastload.__version__, dataset="Numbers")] == 1
    assert {name for name, _ in found} <= {metric.prometheus for metric in METRICS}


def test_one_metric_asked_for_by_name_is_all_that_is_answered() -> None:
    registry = CollectorRegistry()
    with served(registry) as address, watch(DataLoader(Numbers(4)), exporter=registry):
        found = series(scraped(f"{address}?name[]=fastload_wait_batches_total"))
    assert found == {("fastload_wait_batches_total", labels()): 0}


def test_two_loaders_are_told_apart_by_name_and_described_once() -> None:
    registry = CollectorRegistry()
    train, val = DataLoader(Numbers(30), 2), DataLoader(Numbers(8), 2)
    with watch(train, exporter=registry, name="train"), watch(val, exporter=registry, name="val"):
        list(train), list(val)
        text = generate_latest(registry).decode()
        with pytest.raises(ArgumentError, match="another loader is exported with name='val'"):
            watch(DataLoader(Numbers(4)), exporter=registry, name="val")
        with pytest.raises(ArgumentError, match="watched already"):
            watch(train, exporter=registry, name="again")
    assert text.count("# TYPE fastload_wait_batches_total ") == 1
    assert series(text)["fastload_wait_batches_total", labels(loader="train")] == 15
    assert series(text)["fastload_wait_batches_total", labels(loader="val")] == 4
    with watch(val, exporter=registry, name="train"):  # the name is free again
        assert here(registry)["fastload_wait_batches_total", labels(loader="train")] == 4


def test_the_name_of_a_loader_that_nobody_uses_is_free() -> None:
    registry = CollectorRegistry()
    loader = DataLoader(Numbers(8), 2)
    loader.itself = loader  # type: ignore[attr-defined]  # only garbage collection finds it
    watch(loader, exporter=registry, name="train")
    loader = DataLoader(Numbers(8), 2)
    watch(loader, exporter=registry, name="train")
    list(loader)
    assert here(registry)["fastload_wait_batches_total", labels(loader="train")] == 4


def test_counters_never_go_down_over_epochs_new_iterators_and_a_loaded_state() -> None:
    registry = CollectorRegistry()
    loader = DataLoader(Numbers(20), 2, num_workers=1)
    seen = [here(registry)]

    def look() -> None:
        before, now = seen[-1], here(registry)
        counters = {key: value for key, value in before.items() if key[0].endswith("_total")}
        assert all(now[key] >= value for key, value in counters.items())
        seen.append(now)

    with watch(loader, exporter=registry):
        state = None
        for number, _ in enumerate(loader):
            look()
            state = loader.state_dict() if number == 3 else state
        look()
        next(iter(loader))  # an iterator that is given up
        look()
        assert state is not None
        loader.load_state_dict(state)
        look()
        assert len(list(loader)) == 6
        look()
    assert seen[-1]["fastload_wait_batches_total", labels()] == 10 + 1 + 6


def test_scrapes_from_another_thread_see_no_half_epoch() -> None:
    """No counter goes down, and no rate is negative, although epochs begin while they are read."""
    registry = CollectorRegistry()
    loader = DataLoader(Numbers(3), 1)
    wrong, scrapes, over = [], [0], threading.Event()

    def scrape() -> None:
        before: Series = {}
        while not over.is_set():
            now = here(registry)
            wrong.extend(key for key, value in now.items() if value < 0)
            wrong.extend(key for key in now if key[0].endswith("_total") and now[key] < before.get(key, 0))
            before = now
            scrapes[0] += 1

    thread = threading.Thread(target=scrape)
    with watch(loader, exporter=registry):
        thread.start()
        while scrapes[0] < 30:
            assert len(list(loader)) == 3 and thread.is_alive()
        over.set()
        thread.join()
    assert not wrong


def test_an_epoch_that_begins_during_a_scrape_makes_no_rate_negative() -> None:
    class Overtaken(Counters):
        """The trainer's thread goes on while the scrape's has its copy."""

        def as_dict(self) -> dict[str, float]:
            values = super().as_dict()
            if started:
                started.pop()
                self.add("get.bytes", 1000)
                meter.start(1)
            return values

    counters, started = Overtaken(), [True]
    meter = Meter(counters)
    gauges = meter.gauges()
    assert not started and gauges.get("get.bytes_per_second", 0) >= 0
    counters.add("get.bytes", 1000)
    started.append(True)
    assert meter.gauges()["get.bytes_per_second"] >= 0


def test_scrapes_before_the_first_batch_have_no_share_above_one(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    go = tmp_path / "go"
    loader = DataLoader(Numbers(8, Gate(go)), 1, num_workers=2)
    found = {}

    def scrape() -> None:  # the trainer waits for worker 0, and worker 1 has counted
        try:
            found.update(wait_until(counted, "worker 1 has made a batch"))
        finally:
            go.touch()

    def counted() -> Series:
        now = here(registry)
        return now if now["fastload_collate_samples_total", labels()] else {}

    thread = threading.Thread(target=scrape)
    with watch(loader, exporter=registry):
        thread.start()
        assert len(list(loader)) == 8
        thread.join()
    assert found["fastload_wait_batches_total", labels()] == 0
    assert found["fastload_collate_samples_per_second", labels()] < 1e6
    assert all(value <= 1 for (name, _), value in found.items() if name.endswith("_ratio"))


@pytest.mark.parametrize("end", ["with", "for", "break", "loader"])
def test_nothing_is_left_when_a_watch_ends(end: str) -> None:
    registry = CollectorRegistry()
    loader = DataLoader(Numbers(8), 2)
    if end == "with":
        with watch(loader, exporter=registry):
            assert here(registry)
    elif end == "for":
        for _ in watch(loader, exporter=registry):
            assert here(registry)
    elif end == "break":
        for _ in watch(loader, exporter=registry):
            break
    else:
        watch(loader, exporter=registry)  # no block: it is exported as long as it lives
        list(loader)
        gc.collect()
        assert here(registry)["fastload_wait_batches_total", labels()] == 4
        del loader
        gc.collect()
    assert here(registry) == {}


def test_a_watch_shows_its_loader_again_in_a_second_block() -> None:
    registry = CollectorRegistry()
    view = watch(DataLoader(Numbers(8), 2), exporter=registry)
    with view, pytest.raises(ArgumentError, match="watched already"):
        list(view)
    assert here(registry) == {}
    assert len(list(view)) == 4
    with view:
        assert here(registry)["fastload_wait_batches_total", labels()] == 4


# --- forked workers


class SeenByWorkers(Numbers):
    """How many lines of metrics a worker would show."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(4)
        self.registry = registry

    def __getitem__(self, index: int) -> int:
        return generate_latest(self.registry).count(b"\n")


def test_a_forked_worker_shows_nothing() -> None:
    registry = CollectorRegistry()
    loader = DataLoader(SeenByWorkers(registry), None, num_workers=2, multiprocessing_context="fork")
    with watch(loader, exporter=registry):
        assert list(loader) == [0] * 4
        assert here(registry)


def test_a_forked_worker_does_not_keep_the_port_of_the_metrics() -> None:
    registry = CollectorRegistry()
    loader = DataLoader(Numbers(8), 2, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    with served(registry) as address, watch(loader, exporter=registry):
        list(loader)
        port = int(address.split(":")[2].split("/")[0])
    with pytest.raises(ConnectionRefusedError):  # the worker lives, and the server does not
        socket.create_connection(("127.0.0.1", port), PATIENCE)
    assert len(list(loader)) == 4


# --- What leaves the machine


def test_exports_name_no_place_no_key_and_no_secret(tmp_path: Path) -> None:
    """Texts are the rank, the stage, the version, the dataset's class, and the name that was given."""
    (tmp_path / "PRIVATE-folder").mkdir()
    for number in range(4):
        (tmp_path / "PRIVATE-folder" / f"PRIVATE-key-{number}").write_bytes(b"PRIVATE-content")
    dataset = fastload.ObjectDataset(str(tmp_path / "PRIVATE-folder"), decode=len)
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    provider = MeterProvider([reader])
    loader = DataLoader(dataset, 2)
    with watch(loader, exporter=registry):
        assert len(list(loader)) == 2
        text = generate_latest(registry).decode()
    with watch(loader, exporter=provider, name="train"):
        list(loader)
        data = reader.get_metrics_data()
        assert data is not None
        document = data.to_json()
    provider.shutdown()
    assert "PRIVATE" not in text and "PRIVATE" not in document
    names = {name for _, pairs in series(text) for name, _ in pairs}
    assert names == {"rank", "stage", "version", "dataset"}


# --- OpenTelemetry


@pytest.mark.parametrize("num_workers", [0, 2])
def test_collection_has_the_counters_rates_and_bottleneck_of_stats(num_workers: int) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    loader = DataLoader(Numbers(30), 2, num_workers=num_workers)
    with watch(loader, exporter=provider, name="train"):
        assert len(list(loader)) == 15
        found, stats = collected(reader), loader.stats()
    provider.shutdown()
    mine = {"fastload.rank": 0, "fastload.loader": "train"}
    for metric in METRICS:
        if metric.opentelemetry in found:
            assert found[metric.opentelemetry].unit == metric.unit
            assert found[metric.opentelemetry].description == metric.help
    for name, metric in COUNTERS.items():
        data = found[metric.opentelemetry].data
        assert isinstance(data, Sum) and data.is_monotonic
        (point,) = data.data_points
        assert point.value == stats["counters"].get(name, 0) and point.attributes == mine, name
    for name, value in stats["rates"].items():
        (metric,) = [metric for metric in METRICS if metric.source == name]
        (point,) = found[metric.opentelemetry].data.data_points
        assert point.value == pytest.approx(value, abs=1e-9) and point.attributes == mine, name
    points = found["fastload.bottleneck"].data.data_points
    assert {point.attributes["fastload.stage"]: point.value for point in points} == {
        name: float(name == stats["limit"]) for name in BOTTLENECKS
    }
    assert set(found) <= {metric.opentelemetry for metric in METRICS}


def test_two_loaders_of_a_meter_and_none_after_them() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    meter = provider.get_meter("fastload", fastload.__version__)

    def batches() -> dict[str, float]:
        metric = collected(reader).get("fastload.wait.batches")
        points = metric.data.data_points if metric is not None else ()
        return {point.attributes["fastload.loader"]: point.value for point in points}

    train, val = DataLoader(Numbers(30), 2), DataLoader(Numbers(8), 2)
    with watch(train, exporter=meter, name="train"):
        watch(val, exporter=meter, name="val")
        list(train), list(val)
        assert batches() == {"train": 15, "val": 4}
        list(val)
        assert batches() == {"train": 15, "val": 8}
        del val
        gc.collect()
        assert batches() == {"train": 15}
    assert batches() == {}
    provider.shutdown()


def test_global_provider_may_be_set_after_the_export_has_begun() -> None:
    """In a process of its own: it can be set once in a process."""
    process = multiprocessing.get_context("fork").Process(target=export_to_global_provider)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0


def export_to_global_provider() -> None:
    train, val = DataLoader(Numbers(30), 2), DataLoader(Numbers(8), 2)
    reader = InMemoryMetricReader()
    with watch(train, exporter="opentelemetry", name="train"):
        metrics.set_meter_provider(MeterProvider([reader]))
        with watch(val, exporter=metrics.get_meter_provider(), name="val"):
            list(train), list(val)
            points = collected(reader)["fastload.wait.batches"].data.data_points
    assert {point.attributes["fastload.loader"]: point.value for point in points} == {"train": 15, "val": 4}


# --- arguments


def test_prometheus_by_name_is_the_registry_of_its_client() -> None:
    with watch(DataLoader(Numbers(4)), exporter="prometheus"):
        assert b"fastload_info" in generate_latest(prometheus_client.REGISTRY)
    assert b"fastload_" not in generate_latest(prometheus_client.REGISTRY)


@pytest.mark.parametrize("given", ["prometeus", "", 9400, object(), CollectorRegistry])
def test_another_exporter_is_refused_with_the_choices(given: Any) -> None:
    with pytest.raises(ArgumentError, match="'prometheus', 'opentelemetry', a CollectorRegistry"):
        watch(DataLoader(Numbers(4)), exporter=given)


@pytest.mark.parametrize(
    ("exporter", "package"), [("prometheus", "prometheus_client"), ("opentelemetry", "opentelemetry")]
)
def test_a_missing_package_is_named_with_the_extra(
    exporter: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [f"fastload.loader.{exporter}", *sys.modules]:
        if name == f"fastload.loader.{exporter}" or name.split(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, f"fastload.loader.{exporter}")
    monkeypatch.delattr(f"fastload.loader.{exporter}", raising=False)
    with pytest.raises(ArgumentError, match=rf"torch-fastload\[metrics\].*{package}"):
        watch(DataLoader(Numbers(4)), exporter=exporter)


def test_arguments_of_the_view_and_of_the_export_do_not_mix() -> None:
    loader = DataLoader(Numbers(4))
    with pytest.raises(ArgumentError, match="interval and console"):
        watch(loader, exporter=CollectorRegistry(), interval=1)
    with pytest.raises(ArgumentError, match="give exporter= too"):
        watch(loader, name="train")
    with pytest.raises(ArgumentError, match="name must be a str"):
        watch(loader, exporter=CollectorRegistry(), name=1)  # type: ignore[arg-type]


def test_a_view_and_an_export_of_one_loader_go_together() -> None:
    registry = CollectorRegistry()
    loader = DataLoader(Numbers(4))
    with watch(loader, exporter=registry):
        assert len(list(watch(loader))) == 4
        assert here(registry)["fastload_wait_batches_total", labels()] == 4
