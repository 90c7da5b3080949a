"""fastload.DataLoader: torch's, with its own path from sampler to batch.

    sampler ─ index batches ─▶ workers: prefetcher ▶ cache ▶ decode · transform ▶ slot ─▶ in order ─▶ batch
                                      with device, batch_transform:  copy, transform, ahead ◀─┘ └─────▶

`fastload/loader/iterator.py` is that way, on one page.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch.utils.data
from torch.utils.data import IterableDataset, default_collate

from fastload.datasets.protocols import as_streams, check_dataset, inner_datasets
from fastload.distributed import find_rank
from fastload.distributed.sampler import ShardSampler
from fastload.errors import ArgumentError, refuse_class
from fastload.gpu.cuda import resolve_device
from fastload.loader.context import LoaderContext
from fastload.loader.iterator import LoaderIterator
from fastload.metrics.bottleneck import explain_bottleneck, find_bottleneck
from fastload.workers.autoscale import Autoscaler, ceiling, why_fixed

if TYPE_CHECKING:
    from fastload.gpu.dali import Dali
    from fastload.gpu.decoding import Decoding

__all__ = ["DataLoader"]

T_co = TypeVar("T_co", covariant=True)

_ON_ERROR = ("raise", "skip", "replace")


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """A drop-in for `torch.utils.data.DataLoader`: every argument of torch's, in its order, with its default.

    Args:
        num_workers: also "auto": the first epoch finds how many of the node's cores it takes, see
            `fastload.workers.autoscale`. `loader.num_workers` is then the most that there can be, an int; the
            samples and states are those of any number. A dataset that is split by worker gets the most at
            once.
        device: where the batches come to lie. None: in host memory. "cuda", "cuda:1" or a torch.device: on
            that GPU, copied one or two batches ahead beside the running work; `pin_memory` is then of no use.
            "cuda" is the current device when an iteration starts. "cpu": the same path without the copy.
        batch_transform: called with every batch in this process, for example `fastload.Normalize(mean, std)`;
            on a GPU after the copy, beside the running work. It may be called for batches that are never
            handed out. On a GPU its stream does not wait for the training's, so it must not read tensors that
            the training loop changes in place, such as averaged weights or a learned augmentation.
        decode: who decodes images. "cpu": the workers. "dali", "nvjpeg": the device, by NVIDIA DALI (install
            `fastload[dali-cuda13]` or `[dali-cuda12]`; it has operators for the CPU too) or torchvision's
            nvJPEG (on a CUDA device only); workers then only fetch, and draw the same crops and flips.
            "auto": times what there is on the first batches, keeps the fastest and says so in
            `stats()["decode"]`. A `fastload.Dali`: DALI with other settings. All but "cpu" need an
            ImageFolder or ObjectDataset with a fused transform and cache mode "raw" or "shrunk".
            Damage in the middle of a JPEG is an error with "cpu"; the others may show it.
        on_error: what a sample does that cannot be read or decoded: "raise"; "skip" (another row of its batch
            is repeated in its place); "replace" (another sample takes its place, the same one in every run).
            The batch stays full, and `stats()` counts and names the bad samples.
        seed: makes all randomness of a sample a function of (seed, epoch, index), and that of `collate_fn` a
            function of the batch: the same for any number of workers. This is what they draw from torch's
            generator of the CPU, Python's `random` and `np.random`; generators of GPUs are left alone. After
            100 samples that drew from neither of the last two, the first one that does is made twice. A
            `__getitems__` is asked for one sample at a time. None: drawn from torch's generator, as torch
            seeds its workers. (fastload's fused transforms are independent of the number of workers either
            way, but where a subclass of its datasets makes the samples.)

    A subclass of fastload's datasets that overrides `__getitem__` or `__getitems__` is obeyed, always: it is
    still read ahead, and asked for its samples in place of writing rows into the batch.

    A shard dataset that is given no sampler gets a `fastload.ShardSampler`: each rank reads its own part, as
    streams until the samples are indexed.

    Raises:
        ArgumentError: device, batch_transform, decode, on_error or seed is not what it can be.
        ValueError, TypeError: as torch's.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        device: str | torch.device | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
        decode: str | Dali = "cpu",
        on_error: str = "raise",
        seed: int | None = None,
    ) -> None:
        _check(dataset, batch_size, num_workers, batch_transform, on_error, seed)
        if sampler is None and batch_sampler is None and as_streams(dataset) is not None:
            sampler, shuffle = ShardSampler(dataset, shuffle=bool(shuffle), seed=seed or 0), None
        context = LoaderContext()
        if num_workers == "auto":
            num_workers = ceiling()
            context.autoscaler = None if why_fixed(dataset) else Autoscaler(num_workers)
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.device = resolve_device(device)
        self.batch_transform = batch_transform
        self.decode = decode
        self.on_error = on_error
        self.seed = seed
        self.loader_context = context
        if decode != "cpu":
            context.decoding = self._new_decoding(decode)
        _warn_of_lone_reads(dataset)
        if drop_last:
            _warn_of_an_empty_epoch(self)

    def __iter__(self) -> Any:
        if isinstance(self._iterator, LoaderIterator) and self._iterator.broken:
            self._iterator = None  # its workers have ended: new ones are started, if they are persistent
        with self.loader_context.position.starting(self) as positions:
            iterator: Any = super().__iter__()
        if isinstance(iterator, LoaderIterator):  # a subclass may wrap it
            iterator.take_up(positions)
        return iterator

    def _get_iterator(self) -> Any:
        if self.num_workers > 0:
            self.check_worker_number_rationality()
        return LoaderIterator(self, self.loader_context)

    def state_dict(self) -> dict[str, Any]:
        """The position in the iteration that began last: what was handed out, not what is prefetched.

        Exact at any point: before the first batch, between batches, after the last one (resumed, that epoch
        has none left), and once the iteration is over (resumed, the next epoch begins). No sample is lost or
        repeated. A state is JSON of a few hundred bytes for any number of samples, or a few kilobytes where
        it has the state of a generator, as long as the states of the user's own sampler and dataset are.

        * `shuffle=True` and `RandomSampler`: the state has the seed of the epoch's order, which is the one
          number that torch draws. torch's other samplers, and those that were given a generator: it has the
          generator's state. What was handed out is passed over unread.
        * A sampler or dataset with `state_dict()` and `load_state_dict()` is resumed by these (datasets in
          each worker, and iterators over iterable datasets too). An iterable dataset without them is moved to
          its place by drawing and dropping samples.
        * Any other sampler is iterated over once more, and its first batches are dropped. It has to give the
          same order again; where it does not, the resumed iteration raises ArgumentError.
        * A batch whose error was raised to the user counts as handed out, as it does for the iterator.

        Not in a state are the process-wide generators of torch, Python and numpy. Two things follow. Epochs
        after the resumed one are shuffled as torch's generator then stands, like those of torch's loader:
        they are those of the unbroken run if the script restores `torch.get_rng_state()`, or has given the
        loader a `generator`, and the loader has persistent workers in both runs or in neither. And a sampler of one's own that draws from these generators needs a seed of its
        own for each epoch, or a state.
        """
        return self.loader_context.position.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next iteration goes on where `state_dict` was taken; those after it are whole epochs.

        The number of workers may be another one, unless the dataset keeps a state in each. The number of
        ranks and the batch size may be others if the order comes from `fastload.DistributedSampler`.
        Persistent workers are ended, and new ones started. `set_epoch` of the sampler, called after this,
        names the epoch of the next iteration: a state from between two epochs goes on with that one; a
        position in the middle of another epoch is dropped.

        Generators that were given to the loader or its sampler are moved to their place. The process-wide
        ones are not moved, and an epoch that is resumed draws nothing from them that the saved run had drawn.

        States that older versions of fastload have saved are loaded too, except in the middle of an epoch
        whose order comes from a sampler of the user's own without a state.

        Raises:
            ArgumentError: it is no state of a loader, or of one with another dataset length, sampler, batch
                size, seed, generator or (where that matters) number of workers.
        """
        self.loader_context.position.load_state_dict(self, state_dict)
        self._iterator = None

    def stats(self) -> dict[str, Any]:
        """What this rank's loader did, with all its workers.

        Returns:
            "rank": of torch.distributed or the launcher; "epochs": iterations started; "counters": flat sums
            since the loader was made, see `fastload.metrics.counters`; "rates": flat numbers of the epoch
            that runs, or the last one, see `Meter.gauges`; of the same epoch "limit", the stage it would
            be faster
            without, and "verdict", one sentence that says what to change; "bad": (key, error) of the last bad
            samples;
            "autoscale": what num_workers="auto" chose, and why, else "";
            "decode": who decodes ("decoder"), and for decode="auto" why.
        """
        context = self.loader_context
        epoch, gauges = context.meter.counters(), context.meter.gauges()
        return {
            "rank": find_rank()[0],
            "epochs": context.position.epoch,
            "counters": context.counters.as_dict(),
            "rates": gauges,
            "autoscale": "" if context.autoscaler is None else context.autoscaler.sentence(),
            "limit": find_bottleneck(epoch),
            "verdict": explain_bottleneck(epoch, gauges),
            "bad": list(context.bad.copy()),
            "decode": {"decoder": "cpu"} if context.decoding is None else context.decoding.stats(),
        }

    def _new_decoding(self, decode: Any) -> Decoding:
        from fastload.gpu.decoding import Decoding, check_decode  # not for loaders that need no decoder

        own_collate = self.collate_fn is not default_collate or self.batch_sampler is None
        check_decode(decode, self.dataset, self.device, not own_collate)
        return Decoding(
            decode,
            self.device,
            workers=self.num_workers,
            on_error=self.on_error,
            counters=self.loader_context.counters,
            bad=self.loader_context.bad,
        )


def _warn_of_lone_reads(dataset: Any) -> None:
    """Nothing is read ahead through a dataset of the user's own: only that knows what it will ask for."""
    lone = next((inner for inner in inner_datasets(dataset) if inner.alone), None)
    if lone is not None:
        kind = type(lone.dataset).__name__
        warnings.warn(
            f"{type(dataset).__name__} asks the {kind} in its attribute {lone.where!r} for one sample at a "
            "time, so nothing is read ahead: from an object store this is several times slower. A subclass "
            f"of {kind} that overrides __getitem__ is read ahead, and so are its transform= (ImageFolder: "
            "also target_transform=), a torch Subset of it, and a collate_fn of the loader",
            stacklevel=3,
        )


def _warn_of_an_empty_epoch(loader: DataLoader[Any]) -> None:
    """Torch says nothing, and a training that never takes a step looks like a fast one."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return
    try:
        samples = len(loader.sampler)  # type: ignore[arg-type]
    except Exception:  # it has no length, or one that torch would not ask for here
        return
    if samples < loader.batch_size:
        warnings.warn(
            f"every epoch is empty: drop_last=True drops its only batch, as {samples:,} samples are fewer "
            f"than batch_size={loader.batch_size}",
            stacklevel=3,
        )


def _check(
    dataset: Any, batch_size: Any, num_workers: Any, batch_transform: Any, on_error: Any, seed: Any
) -> None:
    """Raise `ArgumentError` for what only fastload takes; torch checks its own."""
    check_dataset(dataset)
    if on_error not in _ON_ERROR:
        raise ArgumentError(f"on_error must be one of {_ON_ERROR}, found {on_error!r}")
    if on_error != "raise" and isinstance(dataset, IterableDataset) and as_streams(dataset) is None:
        raise ArgumentError(f"on_error={on_error!r}: what an iterable dataset raises ends it; use 'raise'")
    if isinstance(batch_size, str):
        raise ArgumentError(f"batch_size must be an int >= 1 or None, found the text {batch_size!r}")
    if isinstance(num_workers, str) and num_workers != "auto":
        raise ArgumentError(f"num_workers must be an int >= 0 or 'auto', found {num_workers!r}")
    refuse_class("batch_transform", batch_transform)
    if not (batch_transform is None or callable(batch_transform)):
        raise ArgumentError(f"batch_transform must be a function of a batch, found {batch_transform!r}")
    if seed is not None and not isinstance(seed, int):
        raise ArgumentError(f"seed must be an int or None, found {seed!r}")
