"""Writes the shards of `fastload convert`: one after the other here; with --ray, each on any node.

The shards of a cluster are byte for byte those of one machine, for the cuts are known before the first one is
written. Each task reads one part and sends one shard. NAME.json lists the shards up to the first that is
missing, so a run that was interrupted goes on with --ray or without.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fastload.checks import format_size
from fastload.cli.cluster import Cluster, Task
from fastload.cli.convert.shard_set import READS, ShardSet, WrittenShard, find_fault, verify
from fastload.cli.convert.source import Objects, Packed
from fastload.cli.report import Bars, Rate
from fastload.errors import ArgumentError, FastloadError, StoreError
from fastload.fetch.threads import ReadPool
from fastload.metrics.counters import Counters
from fastload.store import ObjectInfo
from fastload.store.manifest import Manifest


def check_source(source: Any) -> None:
    """Refuse a source whose shards cannot be made apart from each other."""
    if not isinstance(source, Objects):
        raise ArgumentError(
            f"--ray and {source.kind} shards in {source.url!r}: where a new shard begins is known only after "
            "the one before it was read; run the command without --ray"
        )


class Written:
    """Samples and bytes so far."""

    def __init__(self) -> None:
        self.samples = self.bytes = 0
        self._rate = Rate("samples")

    def add(self, samples: int, size: int) -> tuple[int, str]:
        """Return (bytes done, rates in words)."""
        self.samples += samples
        self.bytes += size
        return self.bytes, self._rate.words(self.samples, self.bytes)


class Writing:
    """Makes shards and sends each while the next one is made: two temporary files at a time.

    Args:
        source: a `Source`.
        shards: a `ShardSet`.
        cluster: does both on its nodes; None: this process does.
    """

    def __init__(self, source: Any, shards: Any, cluster: Cluster | None) -> None:
        self._source, self._shards = source, shards
        self._nodes = None if cluster is None else NodesWriting(cluster, source, shards)
        self.written = Written()
        self._sending: tuple[threading.Thread, Any, list[BaseException]] | None = None

    def run(self, bars: Bars) -> None:
        """Write the missing shards. After an exception those that arrived are still counted."""
        source, done = self._source, self._shards.shards
        if done:
            source.position = done[-1].next
        bar = bars.add("writing", source.total_bytes, format_size)
        try:
            if self._nodes is not None:
                self._nodes.write(lambda samples, size: bar.show(*self.written.add(samples, size)))
                return
            while source.position is not None:
                made = self._shards.make(
                    len(done) + (self._sending is not None),
                    source.part(),
                    lambda: source.position,
                    lambda sample: bar.show(*self.written.add(1, sample.size)),
                )
                with contextlib.ExitStack() as stack:
                    stack.callback(made.file.close)
                    self._wait()
                    stack.pop_all()
                self._send(made)
            self._wait()
        except BaseException:
            self._wait()
            with contextlib.suppress(FastloadError):
                self._shards.save(wait=_give_up)
            raise

    def verify(self, progress: Callable[[Any], None]) -> list[tuple[str, str]]:
        """Return (name, fault) of each shard that differs from what was written."""
        if self._nodes is not None:
            return self._nodes.verify(progress)
        return verify(self._shards, progress)

    def _send(self, made: Any) -> None:
        errors: list[BaseException] = []

        def send() -> None:
            try:
                self._shards.send(made)
            except BaseException as error:
                errors.append(error)

        # No pool: a second Ctrl-C must not wait for a store that no longer answers.
        thread = threading.Thread(target=send, name="fastload-send", daemon=True)
        thread.start()
        self._sending = thread, made.shard, errors

    def _wait(self) -> None:
        """Wait until the shard that is being sent has arrived."""
        if self._sending is None:
            return
        thread, shard, errors = self._sending
        thread.join()
        self._sending = None
        if errors:
            raise errors[0]
        self._shards.add(shard)


def _give_up(error: StoreError, seconds: float) -> None:
    """Do not retry: another error came before."""
    raise error


class NodesWriting:
    """Writes and verifies the shards of a conversion.

    Args:
        cluster: its CPUs are the number of tasks at once.
        source: what is read.
        shards: what is written.
    """

    def __init__(self, cluster: Cluster, source: Objects, shards: ShardSet) -> None:
        self._cluster, self._source, self._shards = cluster, source, shards
        self._tasks = sum(node.cpus for node in cluster.nodes)

    def write(self, progress: Callable[[int, int], None]) -> None:
        """Write the missing shards. `progress(samples, bytes)` is called after each."""
        source, shards = self._source, self._shards
        starts = source.starts()
        packed, listing = source.packed()
        listed, target = self._cluster.share(listing), shards.unfilled()
        tasks = iter(
            [
                Task(
                    _write_shard,
                    (packed, listed, target, number, starts[number], source.fingerprint),
                    f"shard {shards.file_name(number)}",
                )
                for number in range(len(shards.shards), len(starts))
            ]
        )
        arrived: dict[int, WrittenShard] = {}
        for task, (shard, size) in self._cluster.run([tasks] * self._tasks):
            arrived[task.arguments[3]] = shard
            progress(shard.samples, size)
            while len(shards.shards) in arrived:
                shards.add(arrived.pop(len(shards.shards)))

    def verify(self, progress: Callable[[WrittenShard], None]) -> list[tuple[str, str]]:
        """Return as `shard_set.verify` does."""
        present, target = self._shards.present(), self._shards.unfilled()
        tasks: Iterator[Task] = iter(
            [
                Task(_verify_shard, (target, present.get(shard.name), shard), f"shard {shard.name}")
                for shard in self._shards.shards
            ]
        )
        wrong = []
        for task, fault in self._cluster.run([tasks] * self._tasks):
            if fault:
                wrong.append((task.arguments[2].name, fault))
            progress(task.arguments[2])
        return sorted(wrong)


def _write_shard(
    packed: Packed, listing: Manifest, shards: ShardSet, number: int, start: int, fingerprint: str
) -> tuple[WrittenShard, int]:
    """Return a shard that has arrived, and the bytes of the objects that it was made of."""
    source = Objects.unpacked(packed, listing)
    if source.fingerprint != fingerprint:
        raise ArgumentError(
            "a node draws another order of the samples: install the same version of numpy on all nodes, or "
            "run the command without --shuffle"
        )
    sizes: list[int] = []
    try:
        source.seek(start)
        made = shards.make(
            number, source.part(), lambda: source.position, lambda sample: sizes.append(sample.size)
        )
        shards.send(made)
    finally:
        source.close()
    return made.shard, sum(sizes)


def _verify_shard(shards: ShardSet, info: ObjectInfo | None, shard: WrittenShard) -> str:
    pool = ReadPool(READS, Counters())
    try:
        return find_fault(shards, pool, info, shard)
    finally:
        pool.close()
