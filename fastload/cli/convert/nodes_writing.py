"""`fastload convert --ray`: a task for each shard, on any node of a cluster.

The shards are byte for byte those of one machine, for the cuts are known before the first one is written.
Each task reads one part and sends one shard. NAME.json lists the shards up to the first that is missing, so a
run that was interrupted goes on with --ray or without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fastload.cli.cluster import Cluster, Task
from fastload.cli.convert.inputs import ObjectsInput
from fastload.cli.convert.shard_set import ShardSet, WrittenShard
from fastload.cli.convert.verify import find_fault
from fastload.errors import ArgumentError
from fastload.fetch.threads import ReadPool
from fastload.metrics.counters import Counters
from fastload.store import ObjectInfo
from fastload.store.manifest import Manifest

__all__ = ["NodesWriting", "check_source"]

_READS = 8  # of a shard that is verified, at once


def check_source(source: Any) -> None:
    """Refuse a source whose shards cannot be made apart from each other."""
    if not isinstance(source, ObjectsInput):
        raise ArgumentError(
            f"--ray and {source.kind} shards in {source.url!r}: where a new shard begins is known only after "
            "the one before it was read; run the command without --ray"
        )


class NodesWriting:
    """Writes and verifies the shards of a conversion.

    Args:
        cluster: its CPUs are the number of tasks at once.
        source: what is read.
        shards: what is written.
    """

    def __init__(self, cluster: Cluster, source: ObjectsInput, shards: ShardSet) -> None:
        self._cluster, self._source, self._shards = cluster, source, shards
        self._tasks = sum(node.cpus for node in cluster.nodes)

    def write(self, progress: Callable[[int, int], None]) -> None:
        """Write the missing shards. `progress(samples, bytes)` is called after each."""
        source, shards = self._source, self._shards
        starts = source.starts()
        listing, given = self._cluster.share(source.manifest), shards.unfilled()
        tasks = iter(
            [
                Task(
                    _write_shard,
                    (source.opened, listing, given, number, starts[number], source.fingerprint),
                    f"shard {shards.form.file_name(shards.name, number)}",
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
        """See `verify.verify`."""
        present, given = self._shards.present(), self._shards.unfilled()
        tasks: Iterator[Task] = iter(
            [
                Task(_verify_shard, (given, present.get(shard.name), shard), f"shard {shard.name}")
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
    opened: dict[str, Any], listing: Manifest, shards: ShardSet, number: int, start: int, fingerprint: str
) -> tuple[WrittenShard, int]:
    """A shard that has arrived, and the bytes of the objects that it was made of."""
    source = ObjectsInput(**opened, manifest=listing)
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
    pool = ReadPool(_READS, Counters())
    try:
        return find_fault(shards, pool, info, shard)
    finally:
        pool.close()
