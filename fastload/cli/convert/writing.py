"""Writes the shards of `fastload convert`: one after the other here; with --ray, each on any node.

The shards of a cluster are byte for byte those of one machine, for the cuts are known before the first one is
written. Each task reads one part and sends one shard. NAME.json lists the shards up to the first that is
missing, so a run that was interrupted goes on with --ray or without.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from fastload.checks import format_size
from fastload.cli.cluster import Cluster, Task
from fastload.cli.convert.shard_set import ShardSet, UnsentShard, WrittenShard, find_fault
from fastload.cli.convert.source import Objects, Packed
from fastload.cli.report import Bar, Bars, Fault
from fastload.errors import ArgumentError, FastloadError, StoreError
from fastload.store.manifest import Manifest


class Written:
    """Samples and bytes so far, shown by a bar."""

    def __init__(self, bar: Bar) -> None:
        self.samples = self.bytes = 0
        self._bar = bar

    def add(self, samples: int, size: int) -> None:
        """Count more of them, and show it."""
        self.samples += samples
        self.bytes += size
        self._bar.show_rates(self.bytes, "samples", self.samples, self.bytes)


class Writing:
    """Writes the missing shards, and reads all of them again.

    Args:
        source: `Objects` or `Records`; with a cluster, `Objects`.
        shards: what is written.
        cluster: its nodes do both, a task a CPU; None: this process does.
        bars: show how far they are.
    """

    def __init__(self, source: Any, shards: ShardSet, cluster: Cluster | None, bars: Bars) -> None:
        self._source, self._shards, self._cluster, self._bars = source, shards, cluster, bars
        self.written = Written(bars.add("writing", source.total_bytes, format_size))
        self._sending: tuple[threading.Thread, WrittenShard, list[BaseException]] | None = None

    def run(self) -> None:
        """Write the missing shards. After an exception those that arrived are still counted."""
        if done := self._shards.shards:
            self._source.position = done[-1].next
        try:
            if self._cluster is not None:
                self._write_on_nodes(self._cluster)
            else:
                self._write_here()
        except BaseException:
            self._wait()
            with contextlib.suppress(FastloadError):
                self._shards.save(wait=_give_up)
            raise

    def verify(self) -> list[Fault]:
        """Return the shards that differ from what was written."""
        present, shards = self._shards.present(), self._shards
        total = sum(shard.bytes for shard in shards.shards)
        read = Written(self._bars.add("verifying", total, format_size))
        faults: Iterator[tuple[WrittenShard, str]]
        if self._cluster is None:
            faults = ((shard, find_fault(shards, present.get(shard.name), shard)) for shard in shards.shards)
        else:
            target = shards.unfilled()
            tasks = (
                Task(find_fault, (target, present.get(shard.name), shard), f"shard {shard.name}")
                for shard in shards.shards
            )
            faults = ((task.arguments[2], fault) for task, fault in self._cluster.run_anywhere(tasks))
        wrong = []
        for shard, fault in faults:
            if fault:
                wrong.append(Fault(shard=shard.name, fault=fault))
            read.add(shard.samples, shard.bytes)
        return sorted(wrong, key=lambda fault: fault.shard)

    def _write_here(self) -> None:
        """Make each shard while the one before it is sent: two temporary files at a time."""
        source, done = self._source, self._shards.shards
        while source.position is not None:
            made = self._shards.make(
                len(done) + (self._sending is not None),
                source.part(),
                lambda: source.position,
                lambda sample: self.written.add(1, sample.size),
            )
            with contextlib.ExitStack() as stack:
                stack.callback(made.file.close)
                self._wait()
                stack.pop_all()
            self._send(made)
        self._wait()

    def _send(self, made: UnsentShard) -> None:
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

    def _write_on_nodes(self, cluster: Cluster) -> None:
        source, shards = self._source, self._shards
        starts = source.starts()
        packed, listing = source.packed()
        listed, target = cluster.share(listing), shards.unfilled()
        tasks = (
            Task(
                _write_shard,
                (packed, listed, target, number, starts[number], source.fingerprint),
                f"shard {shards.file_name(number)}",
            )
            for number in range(len(shards.shards), len(starts))
        )
        arrived: dict[int, WrittenShard] = {}
        for task, (shard, size) in cluster.run_anywhere(tasks):
            arrived[task.arguments[3]] = shard
            self.written.add(shard.samples, size)
            while len(shards.shards) in arrived:
                shards.add(arrived.pop(len(shards.shards)))


def _give_up(error: StoreError, seconds: float) -> None:
    """Do not retry: another error came before."""
    raise error


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
