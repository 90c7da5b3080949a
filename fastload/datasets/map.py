"""`map`: a function of each sample of any map-style dataset, which is still read ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from fastload.checks import check_function
from fastload.datasets.composed import MapView
from fastload.datasets.protocols import check_dataset
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError


def map(dataset: Dataset[Any], function: Callable[[Any], Any]) -> MapDataset:
    """A dataset of the results of `function`, one for each sample of `dataset`.

    The loader reads `dataset` ahead, and fastload's fused transforms still decode whole batches. `function`
    gets one sample at a time, as `dataset[index]` returns it, in the process that makes the batch. Its
    results are collated as the samples of any dataset.

    Example::

        import fastload
        from fastload import DataLoader, ImageFolder, RandomResizedCrop

        def named(sample):
            image, label = sample
            return {"image": image, "label": label, "bright": image.float().mean()}

        dataset = fastload.map(ImageFolder("s3://bucket/train", RandomResizedCrop(224)), named)
        for batch in DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8):
            batch["image"].shape  # (256, 3, 224, 224), uint8

    Args:
        dataset: map-style; one of fastload's, one of the user's, or a wrapper of these. A shard dataset may
            still be without an index.
        function: sample -> sample. With `seed=` of the loader its random numbers are those of the sample.

    Raises:
        ArgumentError: `dataset` is not map-style, or `function` cannot be called.
    """
    check_dataset(dataset)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ArgumentError(
            f"dataset of map must be map-style, found {type(dataset).__name__}: apply the function in its "
            "__iter__, or in collate_fn of the loader"
        )
    if function is None or not callable(function):
        raise ArgumentError(f"function must be a function of one sample, found {function!r}")
    check_function("function", function)
    return MapDataset(dataset, function)


class MapDataset(Dataset[Any]):
    """What `map` returns: a map-style dataset with the length of `dataset`.

    Attributes:
        dataset, function: as they were given.
    """

    def __init__(self, dataset: Any, function: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.function = function

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.function(self.dataset[index])

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        if many is None or type(self).__getitem__ is not MapDataset.__getitem__:
            return [self[index] for index in indices]
        return [self.function(sample) for sample in many(indices)]

    def __repr__(self) -> str:
        return f"map({self.dataset!r}, {getattr(self.function, '__qualname__', self.function)})"

    def prefetch(self, indices: list[Any]) -> None:
        """Start reading these samples: for the `prefetch(indices)` of a dataset that holds this one."""
        view_of(self.dataset).prefetch(list(indices))

    def _view(self) -> MapView:
        """See `fastload.datasets.wrappers`."""
        return MapView(view_of(self.dataset), self.function)
