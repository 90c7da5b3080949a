"""ByEpoch: another transform from certain epochs on; progressive resolution without new workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastload.checks import refuse_class
from fastload.errors import ArgumentError


class ByEpoch:
    """Transforms that change at given epochs, as in `ByEpoch({0: RandomResizedCrop(128), 18: ...})`.

    Example::

        from fastload import ByEpoch, DataLoader, ImageFolder, RandomResizedCrop

        sizes = ByEpoch({0: RandomResizedCrop(128), 18: RandomResizedCrop(224), 30: RandomResizedCrop(288)})
        loader = DataLoader(ImageFolder("s3://bucket/train", sizes), batch_size=256, num_workers=8)
        next(iter(loader))[0].shape  # (256, 3, 128, 128) in epochs 0 to 17

    The transform in use is a function of the epoch, like a sample's randomness: a resumed loader uses the
    right one, and persistent workers need no extra message to change it. (A size in shared memory, set by
    the trainer, was rejected: workers make batches of the next epoch before it is set.)

    fastload's datasets follow the epochs of their DataLoader: its iterations, counted from 0 and kept in its
    state_dict(). Outside a DataLoader the epoch is 0.

    Args:
        transforms: first epoch -> transform. Epoch 0 must have one.

    Raises:
        ArgumentError: epoch 0 has none, an epoch is not an int from 0 on, or a transform is not callable.
    """

    def __init__(self, transforms: Mapping[int, Callable[[Any], Any]]) -> None:
        if not isinstance(transforms, Mapping) or 0 not in transforms:
            raise ArgumentError(f"transforms must be a dict with a transform for epoch 0, not {transforms!r}")
        for epoch, transform in transforms.items():
            if not isinstance(epoch, int) or epoch < 0:
                raise ArgumentError(f"an epoch must be an integer from 0 on, not {epoch!r}")
            refuse_class(f"the transform from epoch {epoch}", transform)
            if not callable(transform):
                raise ArgumentError(f"the transform from epoch {epoch} must be callable, not {transform!r}")
        self.transforms = dict(sorted(transforms.items()))
        self.current = self.transforms[0]

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which all samples are from now on."""
        self.current = transform_at(self, epoch)

    def __call__(self, sample: Any) -> Any:
        return self.current(sample)

    def __repr__(self) -> str:
        return f"ByEpoch({self.transforms!r})"


def current_transform(transform: Any) -> Any:
    """Return the transform in use in this epoch, also where `transform` is not a `ByEpoch`."""
    return transform.current if isinstance(transform, ByEpoch) else transform


def all_transforms(transform: Any) -> list[Any]:
    """Return the transforms of all epochs."""
    return list(transform.transforms.values()) if isinstance(transform, ByEpoch) else [transform]


def first_epochs(transform: Any) -> list[int]:
    """Return the epochs from which on another transform is in use."""
    return list(transform.transforms) if isinstance(transform, ByEpoch) else [0]


def transform_at(transform: Any, epoch: int) -> Any:
    """Return the transform of one epoch."""
    if not isinstance(transform, ByEpoch):
        return transform
    return transform.transforms[max(first for first in transform.transforms if first <= epoch)]
