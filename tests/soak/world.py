"""A bucket whose images say which version of which object they are, on a server that fails at random."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.faultserver import LIST, Fault, FaultServer

SIDE, CELL = 64, 16  # pixels of an image, and of one of its cells: 4 x 4 bits survive any JPEG
CLASSES = 5
VERSIONS = 16


def picture(number: int, version: int) -> bytes:
    """A JPEG that shows 12 bits of `number` and 4 of `version`; half carry up to 60 KB of comments."""
    bits = np.array([(number << 4 | version) >> bit & 1 for bit in range(16)], np.uint8).reshape(4, 4)
    pixels = np.kron(bits * 255, np.ones((CELL, CELL), np.uint8))
    out = io.BytesIO()
    comment = random.Random(number).randbytes(number * 7919 % 60_000) if number % 2 else b""
    Image.fromarray(pixels).convert("RGB").save(out, "JPEG", quality=90, comment=comment)
    return out.getvalue()


def read_pictures(images: torch.Tensor) -> list[tuple[int, int]]:
    """(number, version) of each image of an uint8 batch of whole pictures."""
    middle = images[:, 1, CELL // 2 :: CELL, CELL // 2 :: CELL].reshape(len(images), 16) > 127
    values = (middle.long() << torch.arange(16)).sum(1)
    return [(int(value) >> 4, int(value) & 15) for value in values]


def key_of(number: int) -> str:
    """The key of an object below the prefix of its world."""
    return f"class{number % CLASSES}/{number:05}.jpg"


class FailingServer(FaultServer):
    """A server on which each request fails with a probability.

    Attributes:
        chance: of a fault, from 0 to 1.
        faults: how many there were.
    """

    def __init__(self, seed: int) -> None:
        super().__init__({})
        self.chance = 0.0
        self.faults = 0
        self._random = random.Random(seed)

    def _next_fault(self, key: str) -> Fault | None:
        if self._random.random() >= self.chance:
            return None
        self.faults += 1
        if key == LIST:
            return Fault(status=503, code="SlowDown")
        return self._random.choice(
            [
                Fault(status=503, code="SlowDown"),
                Fault(status=500),
                Fault(delay=self._random.uniform(0.1, 1.5)),
                Fault(cut_after=self._random.randrange(2000)),
                Fault(reset_after=self._random.randrange(2000)),
                Fault(lost=True),
            ]
        )


class World:
    """The objects below a prefix of the bucket, which change between runs.

    Attributes:
        versions: number -> version, of the objects that are there.
    """

    def __init__(self, server: FailingServer, prefix: str, count: int) -> None:
        self.server = server
        self.prefix = prefix
        self.versions: dict[int, int] = {}
        for number in range(count):
            self._put(number, 0)

    def change(self, rng: random.Random) -> str:
        """Change, delete and add a few objects; return what was done, in words."""
        changed = rng.sample(sorted(self.versions), rng.randrange(4))
        for number in changed:
            self._put(number, (self.versions[number] + 1) % VERSIONS)
        deleted = rng.sample(sorted(self.versions), rng.randrange(3))
        for number in deleted:
            del self.versions[number], self.server.objects[self.prefix + key_of(number)]
        free = [number for number in range(len(self.versions) + 20) if number not in self.versions]
        added = rng.sample(free, rng.randrange(3))
        for number in added:
            self._put(number, rng.randrange(VERSIONS))
        return f"{len(changed)} objects changed, {len(deleted)} deleted, {len(added)} added"

    def _put(self, number: int, version: int) -> None:
        self.versions[number] = version
        self.server.objects[self.prefix + key_of(number)] = picture(number, version)

    def ordered(self) -> list[int]:
        """The numbers of the objects in the order of ImageFolder's indices."""
        return sorted(self.versions, key=key_of)


def label_of(number: int, numbers: Sequence[int]) -> int:
    """The class of an object, as ImageFolder numbers the classes that have objects."""
    return sorted({other % CLASSES for other in numbers}).index(number % CLASSES)


def rows_of(batch: Any) -> list[list[int]]:
    """[number, version, label] of each row of a batch of `ImageFolder`."""
    images, labels = batch
    return [
        [number, version, int(label)]
        for (number, version), label in zip(read_pictures(images), labels, strict=True)
    ]
