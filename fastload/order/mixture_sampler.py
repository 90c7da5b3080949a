"""The samples of a mixture, of each rank: by exact proportions, each source in passes of its own.

    sample of the mixture    0   1   2   3   4   5   6  ...    the same on every rank
    its source               a   a   b   a   a   b   a  ...    `Mixing`
    number in the source     0   1   0   2   3   1   4  ...    number k is position k mod n of pass k div n
    rank r of N              r, r + N, r + 2N, ...

A position is the number of samples that each source has given, and what it is due. So a run goes on exactly
with another number of ranks, another batch size, other weights or other sources.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed

from fastload.distributed.agreement import Ranks
from fastload.distributed.launcher import can_agree
from fastload.errors import ArgumentError
from fastload.order.mixing import ONE, Mixing, Proportions, in_units
from fastload.order.permutations import small_permutation
from fastload.order.sampler import DistributedSampler

_VERSION = 1


class MixtureSampler(DistributedSampler):
    """This rank's part of a mixture: the default sampler of `fastload.DataLoader` for a `Mixture`.

    Example::

        from fastload import DataLoader, ImageFolder, Mixture, MixtureSampler, RandomResizedCrop

        crop = RandomResizedCrop(224)
        sources = [ImageFolder("s3://bucket/train", crop), ImageFolder("s3://bucket/val", crop)]
        mixture = Mixture(sources, [0.7, 0.3])
        sampler = MixtureSampler(mixture, num_replicas=8, rank=0, seed=1)
        for images, labels in DataLoader(mixture, batch_size=256, sampler=sampler, num_workers=2):
            ...

    An epoch has `mixture.num_samples` samples, rounded up so that all ranks get equally many. Nothing is
    padded: the next epoch goes on where this one has ended, in the passes over the sources too. So does the
    epoch after one that was left early, at the first sample that fastload's loader did not deliver. The same
    holds for the samples that `drop_last=True` of the loader leaves at the end of an epoch.

    Each rank computes the sources of all ranks' samples, at 1 to 2 microseconds per sample.

    Args:
        mixture: the loader's dataset.
        num_replicas, rank, seed: as for `DistributedSampler`.
        shuffle: each pass over a source is a permutation, drawn from (seed, name of the source, pass); else
            it is by index.

    Raises:
        ArgumentError: the dataset is no `Mixture`, or as `DistributedSampler`.
    """

    _by_epoch = False
    _compared = ("version", "seed", "shuffle")  # and the length of each source

    def __init__(
        self,
        mixture: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        proportions = getattr(mixture, "_proportions", None)
        if not isinstance(proportions, Proportions):
            raise ArgumentError(f"mixture must be a fastload.Mixture, found {type(mixture).__name__}")
        self._mixture = proportions
        super().__init__(mixture, num_replicas, rank, shuffle, seed)
        self.num_samples = self._share(0)
        self.total_size = self.num_samples * self.num_replicas
        self._lengths = proportions.lengths
        self._sources = list(self._lengths.items())
        were_set, nothing = proportions.were_set, [0] * len(self._lengths)
        self._were_set = were_set is not None  # the weights, while the mixture was read
        self._mixing = Mixing(in_units(were_set or proportions.weights_in(self.epoch)), nothing, nothing, 0)
        # The weights that were set while the mixture was read: (samples drawn before them, in units).
        self._changes: list[tuple[int, list[int]]] = []
        self._loaded = 0  # samples that were drawn before this run
        self._passes: dict[int, tuple[int, np.ndarray[Any, Any]]] = {}  # source -> (number, its order)
        self._ranks: Ranks | None = None

    def _draw(self, epoch: int, start: int) -> Iterator[int]:
        mixing, self._mixture.reader = self._mixing.copy(), self
        if start == 0 and not self._were_set:
            mixing.set_weights(in_units(self._mixture.weights_in(epoch)))
        after = self.num_replicas - 1 - self._column
        for row in range(1, self._share(start) + 1):
            self._advance(mixing, self._column)
            source = self._advance(mixing, 1)
            number = mixing.counts[source] - 1
            self._advance(mixing, after)
            self._mixing, self._position = mixing, (epoch, start + row * self.num_replicas)
            yield self._index(source, number)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in plain numbers: epoch, and of each source its samples, weight and due."""
        epoch, consumed = self._position
        mixing, names = self._mixing, self._lengths
        columns = zip(names, names.values(), mixing.counts, mixing.weights, mixing.dues, strict=True)
        state = {
            "version": _VERSION,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": epoch,
            "consumed": consumed,
            "drawn": mixing.total,
            "advances": self._advances,
            "given": self._mixture.given(),
            "were_set": self._were_set,
            "sources": {
                name: {"length": length, "samples": samples, "weight": weight, "due": due}
                for name, length, samples, weight, due in columns
            },
        }
        return self._with_changes(state)

    def _with_changes(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return an earlier state, with the changes of weights that were decided since."""
        before = [change for change in state.get("changes", []) if change[0] < self._loaded]
        later = [[at, dict(zip(self._lengths, weights, strict=True))] for at, weights in self._since(state)]
        return dict(state) | {"changes": before + later}

    def _since(self, state: Mapping[str, Any]) -> list[tuple[int, list[int]]]:
        """Return the changes of weights after a state."""
        later = itertools.takewhile(lambda change: change[0] >= state["drawn"], reversed(self._changes))
        return list(later)[::-1]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume: the next iteration continues there. The number of ranks may differ.

        Sources are known by their names. A new one begins with its first pass, one that is gone is dropped,
        the others go on. Weights that were set while the saved run read the mixture hold here too, unless
        this mixture was made with other weights or sources.

        Raises:
            ArgumentError: it is no state of this class, or of another seed or shuffle; or a source has
                another length than in the saved run.
        """
        super().load_state_dict(state_dict)
        alike = state_dict["given"] == self._mixture.given()
        alike = alike and state_dict["sources"].keys() == self._lengths.keys()
        self._were_set = alike and bool(state_dict["were_set"])
        self._changes = self._changes_in(state_dict) if alike else []
        weights = None if alike else in_units(self._mixture.weights_in(self.epoch))
        self._mixing = self._resumed(state_dict, weights)
        self._loaded, self._delivered = self._mixing.total, None
        last = self._changes[-1][1] if self._changes else self._mixing.weights
        in_force = {name: Fraction(unit, ONE) for name, unit in zip(self._lengths, last, strict=True)}
        self._mixture.were_set = in_force if self._were_set or self._changes else None
        self._mixture.reader = self

    def _set_weights(self, weights: Mapping[str, Any]) -> None:
        """Use these weights from the next sample on that no rank has drawn yet. All ranks call it together.

        Raises:
            ArgumentError: another rank sets other weights.
            WorkerError: another rank does not call it.
        """
        units, at = in_units(weights), self._mixing.total
        if self.num_replicas > 1 and can_agree() and torch.distributed.get_world_size() == self.num_replicas:
            self._ranks = self._ranks or Ranks(self.rank, self.num_replicas)
            summary = {"at": at, "weights": units}
            for rank, other in enumerate(self._ranks.begin_epoch(summary, "to set weights")):
                if other["weights"] != units:
                    raise ArgumentError(
                        f"rank {rank} sets other weights than rank {self.rank}: set the same weights on all "
                        "ranks, at the same step"
                    )
                at = max(at, other["at"])
        self._changes = [change for change in self._changes if change[0] < at]
        self._changes.append((at, units))

    def _at_state(self, state: Mapping[str, Any], *, rank: int, replicas: int) -> Self:
        """Return a copy that stands at a state. Iterating over it does not make it the mixture's reader.

        Raises:
            ArgumentError: the mixture has other sources than in that state, or had weights by a function.
        """
        if list(state["sources"]) != list(self._lengths):  # where several are due, the first of them comes
            raise ArgumentError(
                f"the mixture had the sources {list(state['sources'])} then, and has {list(self._lengths)}"
            )
        constant = state["given"] is not None
        if not (constant or state["consumed"] or state["were_set"]) and self._mixture.given() is not None:
            raise ArgumentError("the mixture had weights by a function of the epoch then, and has others now")
        again = self._at(int(state["epoch"]), int(state["consumed"]), rank=rank, replicas=replicas)
        again._were_set = constant or bool(state["were_set"])  # so the weights are those of the state
        again._changes, again._mixing = self._changes_in(state), self._resumed(state)
        again._mixture, again._delivered, again._passes = copy.copy(self._mixture), None, {}
        return again

    # --- what reached the user

    def _rewind(self) -> bool:
        """Let what was drawn and not delivered be drawn again in the next epoch, by the last weights."""
        if self._delivered is None:
            return True
        state, self._delivered = self._delivered, None
        later = self._since(state)
        self._mixing = self._resumed(state, later[-1][1] if later else None)
        self._changes = self._changes[: len(self._changes) - len(later)]
        self._were_set |= bool(later)
        return True

    def _samples_of_sources(self) -> tuple[dict[str, int], dict[str, float]]:
        """Return (samples, weight) of each source at what was delivered."""
        state = self.state_dict() if self._delivered is None else self._delivered
        sources = state["sources"]
        samples = {name: source["samples"] for name, source in sources.items()}
        return samples, {name: source["weight"] / ONE for name, source in sources.items()}

    # --- what this is made of

    def _length(self) -> int:
        return self._mixture.num_samples

    def _share(self, start: int) -> int:
        return -(-max(0, self._length() - start) // self.num_replicas)

    def _advance(self, mixing: Mixing, samples: int) -> int:
        """Go on by this number of samples. Returns the source of the last one."""
        source, end = 0, mixing.total + samples
        while mixing.total < end:
            stop = end
            for at, weights in reversed(self._changes):
                if at > mixing.total:
                    stop = min(stop, at)
                    continue
                if at == mixing.total:
                    mixing.set_weights(weights)
                    self._were_set = True
                break
            source = mixing.advance(stop - mixing.total)
        return source

    def _index(self, source: int, number: int) -> int:
        """Return the index of the sample that a source gives as its sample `number`."""
        name, length = self._sources[source]
        lap, position = divmod(number, length)
        if self.shuffle:
            order = self._passes.get(source)
            if order is None or order[0] != lap:
                order = self._passes[source] = (lap, _permutation(length, self.seed, name, lap))
            position = int(order[1][position])
        return int(self._mixture.index(source, position, lap))

    def _changes_in(self, state: Mapping[str, Any]) -> list[tuple[int, list[int]]]:
        return [(int(at), [weights[name] for name in self._lengths]) for at, weights in state["changes"]]

    def _resumed(self, state: Mapping[str, Any], weights: list[int] | None = None) -> Mixing:
        """Return the mixing at a state. `weights`: None: those of the state."""
        new = {"samples": 0, "due": 0}
        sources = [state["sources"].get(name, new) for name in self._lengths]
        counts, dues = ([int(source[what]) for source in sources] for what in ("samples", "due"))
        if weights is None:
            weights = [source["weight"] for source in sources]
        return Mixing(weights, counts, dues, int(state["drawn"]))

    def _check_state(self, state: Mapping[str, Any]) -> None:
        super()._check_state(state)
        for name, length in self._lengths.items():
            saved = state["sources"].get(name)
            if saved is not None and saved["length"] != length:
                raise ArgumentError(
                    f"source {name!r} had {saved['length']:,} samples in the saved run, and has {length:,} "
                    "now: give it another name, to begin with its first pass, or use the data of that run"
                )


class MixedAt(NamedTuple):
    """What a state of a `MixtureSampler` says of its mixture.

    Attributes:
        proportions: its sources, and the weights that were given.
        consumed: samples of the epoch, over all ranks.
    """

    proportions: tuple[list[str], Any]
    consumed: int


def mixed_at(state: Any) -> MixedAt | None:
    """Return what the state of a sampler says of a mixture; None where it is not a mixture's."""
    if not isinstance(state, dict) or not {"sources", "given", "consumed"} <= state.keys():
        return None
    return MixedAt((list(state["sources"]), state["given"]), state["consumed"])


def _permutation(length: int, seed: int, name: str, lap: int) -> np.ndarray[Any, Any]:
    """Return the order of a pass over a source. By its name, so that it does not depend on other sources."""
    number = hashlib.blake2b(repr((seed, name, lap)).encode(), digest_size=8).digest()
    return small_permutation(length, torch.Generator().manual_seed(int.from_bytes(number, "little") >> 1))
