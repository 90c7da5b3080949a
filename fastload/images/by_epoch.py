"""ByEpoch: another transform from certain epochs on; progressive resolution without new workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastload.errors import ArgumentError, refuse_class

__all__ = ["ByEpoch", "all_transforms", "current_transform"]


class ByEpoch:
    """Another transform from certain epochs on, as in `ByEpoch({0: RandomResizedCrop(128), 18: ...})`.

    Which one is in use is a function of the epoch, as all randomness of a sample is: a loader that resumes
    takes up the right one, and persistent workers change over without a message of their own. (A size in
    shared memory that the trainer sets was rejected: batches of the next epoch are made before it is set.)

    fastload's datasets follow the epochs of their DataLoader, counted from 0 over its iterations and kept by
    its state_dict(). Outside of a DataLoader it is epoch 0.

    Args:
        transforms: first epoch -> transform; one for epoch 0 is needed.

    Raises:
        ArgumentError: there is none for epoch 0, an epoch is no int from 0 on, a transform is not callable.
    """

    def __init__(self, transforms: Mapping[int, Callable[[Any], Any]]) -> None:
        if not isinstance(transforms, Mapping) or 0 not in transforms:
            raise ArgumentError(f"transforms must be a dict that begins with epoch 0: not {transforms!r}")
        for epoch, transform in transforms.items():
            if not isinstance(epoch, int) or epoch < 0:
                raise ArgumentError(f"an epoch must be an integer from 0 on, not {epoch!r}")
            refuse_class(f"the transform from epoch {epoch} on", transform)
            if not callable(transform):
                raise ArgumentError(f"what is used from epoch {epoch} on must be callable: not {transform!r}")
        self.transforms = dict(sorted(transforms.items()))
        self.current = self.transforms[0]

    def start_epoch(self, epoch: int) -> None:
        """From now on, samples are of this epoch."""
        self.current = self.transforms[max(first for first in self.transforms if first <= epoch)]

    def __call__(self, sample: Any) -> Any:
        return self.current(sample)

    def __repr__(self) -> str:
        return f"ByEpoch({self.transforms!r})"


def current_transform(transform: Any) -> Any:
    """The transform that is in use, where it may be one by epochs."""
    return transform.current if isinstance(transform, ByEpoch) else transform


def all_transforms(transform: Any) -> list[Any]:
    """The transforms that will be in use in some epoch or other."""
    return list(transform.transforms.values()) if isinstance(transform, ByEpoch) else [transform]
