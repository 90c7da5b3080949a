"""fastload.DataLoader: torch's, with its own path from sampler to batch.

    sampler ─ index batches ─▶ workers: prefetcher ▶ cache ▶ decode · transform ▶ slot ─▶ in order ─▶ batch
                                      with device, batch_transform:  copy, transform, ahead ◀─┘ └─────▶

`fastload/loader/iterator.py` is that way, on one page.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch.utils.data
from torch.utils.data import IterableDataset, default_collate

from fastload.datasets.mixture import ChosenIndices, check_weights, new_sampler
from fastload.datasets.wrappers import view_of
from fastload.distributed.frameworks import ASKED_BY_PREPARE, is_prepared, warn_of_ray
from fastload.errors import shorten_errors
from fastload.gpu.transfer import resolve_device
from fastload.loader.arguments import (
    check_arguments,
    check_log,
    check_threads,
    warn_of_an_empty_epoch,
    warn_of_unprefetched,
)
from fastload.loader.context import LoaderContext, kernel_processes, kernel_threads
from fastload.loader.iterator import LoaderIterator
from fastload.loader.samples_at import Inspection
from fastload.metrics.bottleneck import explain_bottleneck, find_bottleneck
from fastload.metrics.machine import need_linux
from fastload.order.budget_sampler import check_sampler
from fastload.order.sampler import known_length
from fastload.order.shard_sampler import ShardSampler
from fastload.order.state import parse_state, plain_state, reading_state
from fastload.trace.digest import Digest, find_part
from fastload.trace.sample_log import LogWriter
from fastload.workers.autoscale import Autoscaler, ceiling, why_fixed
from fastload.workers.memory_limit import MemoryLimit, MemoryUse, most_workers

if TYPE_CHECKING:
    from fastload.gpu.dali import Dali
    from fastload.gpu.decoding import Decoding

T_co = TypeVar("T_co", covariant=True)


class DataLoader(Inspection, torch.utils.data.DataLoader[T_co]):
    """A drop-in for `torch.utils.data.DataLoader`: it takes torch's arguments, in torch's order.

    Example::

        from fastload import DataLoader, ImageFolder, RandomResizedCrop

        dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224, flip=0.5), cache="/ssd/cache")
        loader = DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8)
        for images, labels in loader:
            images.shape  # (256, 3, 224, 224), uint8

    The arguments below are new, or accept more than torch's. All others have torch's meaning and default.

    Args:
        num_workers: an int, or "auto": the first epoch finds the number that training needs, up to this
            rank's share of the node's cores (less one for the trainer, and one for every 16), and
            `stats()["autoscale"]` says why. `loader.num_workers` is the upper limit. Samples and states do
            not depend on it. Workers may then make up to 16 batches ahead, unless `prefetch_factor` is given.
        device: the device of the batches. None: host memory. "cuda", "cuda:1" or a torch.device: that GPU
            (not yet run on one), with one or two batches copied ahead; `pin_memory` has no effect. "cpu": the
            same path without the copy.
        batch_transform: a function of a batch, called in this process, for example `fastload.Normalize(mean,
            std)`; on a GPU after the copy, during the training step, on a stream of its own, so it must not
            read tensors that your loop changes in place. It may be called for batches that are never
            returned.
        decoder: where images are decoded. "cpu": in the workers. "dali" or a `fastload.Dali`: on the device
            (not yet run on a GPU), by NVIDIA DALI of the extra `dali-cuda13` or `dali-cuda12`; workers then
            only read, and draw the same crops and flips. "torch": the records of a cache in mode "dct", by
            torch's operations. All but "cpu" need an ImageFolder or ObjectDataset with a fused transform, and
            may return a damaged image where "cpu" raises.
        on_error: what to do when a sample cannot be read or decoded: "raise"; "repeat" (repeat another row of
            its batch in its place); "replace" (use another sample in its place: the same one in every run
            with this seed, as long as the same samples are bad). The batch stays full, and `stats()` counts
            and names the bad samples.
        seed: makes all randomness of a sample a function of (seed, epoch, index), that of `collate_fn` one of
            the batch, and the order of `shuffle=True` and torch's random samplers one of (seed, epoch),
            unless a `generator` was given. So none depends on the number of workers. It covers torch's CPU
            generator, Python's `random` and `np.random`. A `__getitems__` is called for one sample at a time.
            None: workers are seeded from torch's generator, as by torch; fastload's fused transforms do not
            depend on the number of workers then either, unless a subclass of its datasets makes the samples.
        processes: True: always have `num_workers` processes. False: where only fastload's code makes the
            samples, one process with `num_workers` threads makes the batches; `stats()["workers"]` says which
            it is. That is so for `ImageFolder` and `ObjectDataset` with fused transforms, also inside torch's
            wrappers and `Mixture`, and for `batches="columns"`; under torch's default `collate_fn`, without
            `worker_init_fn`, `threads` and `decoder`. All threads work on the batch that is due next, and
            `prefetch_factor` is the number of batches made ahead in all.
        threads: number of threads per worker (with num_workers=0: in this process) that call `__getitem__`
            concurrently, for a map-style dataset that is thread-safe and waits for something like a store.
            With `seed=` one thread runs at a time, and another one while it waits for a read of fastload's
            datasets; each sample gets the same random numbers as without threads. No effect on samples that
            fastload writes into the batch itself, and on shard datasets, which it reads ahead.
        memory_limit: upper bound for all worker processes of this rank and their batches: bytes or text such
            as "2GB"; or "50%" of the memory of the machine or container, shared by the ranks of the node.
            What is read ahead gives way first, then batches made ahead. Batches that you keep, the
            dataset's own memory, `shuffle_buffer=` and `threads=` are counted but not reduced. With
            num_workers=0: a bound for what is read ahead. `stats()["memory"]` has what is used.
        sample_log: the path of a directory. Each rank appends what it got, row by row, to a file
            there ("rank-00000.samples", about 12 bytes per sample); `fastload.prove` compares two such logs.
            Where the file cannot be written, one warning says so, and training continues.

    If a subclass of fastload's datasets overrides `__getitem__` or `__getitems__`, the loader always calls
    that method instead of writing rows into the batch, and still reads its objects ahead.

    A shard dataset without a sampler gets a `fastload.ShardSampler`: each rank reads its own part, as streams
    until the samples are indexed. A `fastload.Mixture` gets a `fastload.MixtureSampler` likewise.

    Raises:
        ArgumentError: num_workers, device, batch_transform, decoder, on_error, seed, processes, threads,
            memory_limit or sample_log has an invalid value.
        ValueError, TypeError: as torch's.
    """

    @shorten_errors
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
        decoder: str | Dali = "cpu",
        on_error: str = "raise",
        seed: int | None = None,
        threads: int = 0,
        memory_limit: int | str | None = None,
        sample_log: str | os.PathLike[str] | None = None,
        processes: bool = False,
    ) -> None:
        check_arguments(dataset, batch_size, num_workers, batch_transform, on_error, seed, processes)
        check_log(dataset, sample_log)
        check_threads(dataset, threads)
        check_weights(dataset, sampler if batch_sampler is None else getattr(batch_sampler, "sampler", None))
        check_sampler(dataset, sampler, batch_sampler, on_error)
        if num_workers:
            need_linux()
        if sampler is None and batch_sampler is None:
            sampler, shuffle = _own_sampler(dataset, shuffle, seed or 0)
        auto = num_workers == "auto"
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            ceiling() if num_workers == "auto" else num_workers,
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
        self.memory_limit = memory_limit
        self.sample_log = sample_log
        self.device = resolve_device(device)
        self.batch_transform = batch_transform
        self.decoder = decoder
        self.on_error = on_error
        self.seed = None if seed is None else int(seed)
        self.threads = threads
        self.processes = processes
        self._context = context = LoaderContext()
        if sample_log is not None:
            context.log = LogWriter(sample_log, context.counters)
        if decoder != "cpu":
            context.decoding = self._new_decoding(decoder)
        self._settle_workers(auto, prefetch_factor)
        if self.num_workers > 0:
            self.check_worker_number_rationality()
        if not threads:
            warn_of_unprefetched(dataset)
        if drop_last:
            warn_of_an_empty_epoch(self)
        if torch.utils.data.DataLoader is not DataLoader:  # else frameworks make fastload's
            warn_of_ray(self)

    if not TYPE_CHECKING:  # which would take every name for one of the loader's

        def __getattr__(self, name: str) -> Any:
            if name == ASKED_BY_PREPARE and torch.utils.data.DataLoader is not DataLoader:
                return is_prepared(self, self.device)
            return object.__getattribute__(self, name)  # raises the error of a property itself

    def __repr__(self) -> str:
        length = None if isinstance(self.dataset, IterableDataset) else known_length(self.dataset)
        name = type(self.dataset).__name__ + ("" if length is None else f" of {length:,} samples")
        shown: dict[str, Any] = {"batch_size": self.batch_size, "num_workers": self.num_workers}
        if self.seed is not None:
            shown["seed"] = self.seed
        if self.device is not None:
            shown["device"] = str(self.device)
        arguments = "".join(f", {argument}={value!r}" for argument, value in shown.items())
        return f"{type(self).__name__}({name}{arguments})"

    def __iter__(self) -> Any:
        if isinstance(self._iterator, LoaderIterator) and self._iterator.broken:
            self._iterator = None  # its workers have ended: new ones are started, if they are persistent
        with self._context.position.starting(self):
            iterator: Any = super().__iter__()
        self._context.remote_caches.start_epoch(self)  # the workers read already
        return iterator

    def _get_iterator(self) -> Any:
        if self.num_workers > 0:
            self.check_worker_number_rationality()
        return LoaderIterator(self, self._context)

    def check_worker_number_rationality(self) -> None:
        """Warn, as torch does, of more worker processes than cores; threads of the kernel are none."""
        known = "_context" in self.__dict__  # not in torch's constructor, which calls this too early
        if known and not kernel_threads(self, self._context):
            super().check_worker_number_rationality()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the latest iteration. It counts returned batches, not prefetched ones.

        Example::

            state = loader.state_dict()  # after any batch; torch.save takes it together with the model

        Exact at any point: before the first batch, between batches, after the last batch (the resumed epoch
        then has none left), and after the end of the iteration (the next epoch then begins). No sample is
        lost or repeated, except for the padding or truncation at the end of an epoch that ranks share. A
        state is JSON of one to ten kilobytes for any number of samples, with some hundred bytes more for each
        of the last 10,000 epochs, and more with the state of a generator, or of a sampler or dataset of your
        own. It serves on all ranks where a `DistributedSampler` deals the samples, or `seed=` makes their
        order; only its digest is that of the rank that saved it. An order that each rank draws for itself is
        in the state of that rank alone, and so is the middle of an epoch of streams: each rank then saves its
        own, and the number of ranks can change between epochs only.

        * `shuffle=True` and `RandomSampler`: the state has the seed of the epoch's order, the one number that
          torch draws, or that `seed=` gives. torch's other samplers, and samplers with a generator of their
          own: the state has the generator's state. Samples that were returned are skipped unread.
        * A sampler or dataset with `state_dict()` and `load_state_dict()` is resumed by these (datasets in
          each worker, and iterators over iterable datasets too). For an iterable dataset without them, the
          samples up to the position are read and dropped; the state has the seed of torch's data pipes.
        * Any other sampler is iterated over again, and its first batches are dropped. It has to give the same
          order again; otherwise the resumed iteration raises ArgumentError.
        * Between two epochs, and before the first batch: the seeds that the coming epoch draws from torch's
          generator, settled by asking. What the script draws until it begins does not change it any more.
        * Digests of the samples' keys, and of the indices and weights that samplers and subsets hold.
        * A batch whose error was raised to the user counts as returned.
        * For `fastload replay` the state says how the dataset, its transform and the sampler were made, if
          fastload or torch made them: the url and public options of the store, no credentials.

        A state does not contain the process-wide generators of torch, Python and numpy. Two things follow.
        The order of epochs after the resumed one comes from torch's generator at that time, as with torch's
        loader. It is the order of the unbroken run if the loader has a `seed`, or if the script restores
        `torch.get_rng_state()`, or gave the loader a `generator`, and both runs have persistent workers or
        neither has. A sampler of your
        own that draws from these generators needs a seed for each epoch, or a state.
        """
        context = self._context
        context.flush_log()
        state = context.position.state(self)
        state.history, state.exclusions = context.history.find(), context.exclusions.state()
        state.digest = context.digest.state()
        return plain_state(state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume: the next iteration continues where `state_dict` was taken; later ones are whole epochs.

        Example::

            loader.load_state_dict(state)
            for images, labels in loader:  # begins with the batch after the saved one
                ...

        The number of workers may differ, unless the dataset keeps a state in each worker. The number of ranks
        and the batch size may differ if the order comes from `fastload.DistributedSampler`, and for a
        `fastload.Mixture`, whose sources may differ too. Persistent workers are ended, and new ones started.
        `set_epoch` of the sampler, called after this, names the epoch of the next iteration: a state from
        between two epochs continues with that epoch; a position in the middle of another epoch is dropped.

        What `exclude` and `skip` left out before is replaced by what the state has, with a warning where
        samples are used again by that.

        Generators that were given to the loader or its sampler are restored. The process-wide ones are not,
        and a resumed epoch does not repeat the draws that the saved run made from them.

        A warning names what may be unlike: the same data at another URL or endpoint, objects that were
        written again, another fused transform, or a dataset of another class.

        Raises:
            ArgumentError: this is not a state of a loader, or the loader had another dataset length, other
                samples, another sampler, batch size, seed, generator or (where that matters) number of
                workers.
        """
        context = self._context
        with reading_state("state_dict", "load it as state_dict() returned it"):
            state = parse_state(state_dict, "state_dict")
            digest = Digest.of(state.digest)
            context.position.load(self, state)
            self._iterator = None
            context.history.load(state.history)
            context.digest.load(digest, *find_part(self))
            if context.log is not None:
                context.log.run_resumes()
            context.exclusions.load(state.exclusions)  # last: its warning may be an error

    def stats(self) -> dict[str, Any]:
        """Return counters, rates and the bottleneck of this rank's loader and its workers.

        Example::

            stats = loader.stats()
            print(stats["verdict"])  # the bottleneck in one sentence, and what to change
            print(stats["counters"].get("get.requests", 0), stats["rates"]["loader.samples_per_second"])

        Returns:
            "rank": from torch.distributed or the launcher.
            "epochs": the number of iterations started.
            "counters": flat sums since the loader was made; the page "Counters and rates" has each.
            "rates": flat numbers of the current epoch, or else the last one; on the same page.
            "limit": the slowest stage of the same epoch.
            "verdict": one sentence on that bottleneck, and what to change.
            "bad": (key, error) of the last bad samples.
            "workers": "kind" ("threads" of the kernel in a process, "processes", or "": this one), "count".
            "autoscale": the choice of num_workers="auto", with the reason; else "".
            "memory": with `memory_limit=`, bytes: "limit", and of workers "used" and "peak"; else empty.
            "limits": of each dataset with limits: "max_gets", "gets", "max_egress" and "egress".
            "decode": the decoder ("decoder").
        """
        context = self._context
        context.find_budgets(self.dataset)
        context.count_requests()
        epoch, gauges = context.meter.counters(), context.meter.gauges()
        return {
            "rank": context.rank(),
            "epochs": context.position.epoch,
            "counters": {"bad.samples": 0, **context.counters.as_dict()},
            "rates": gauges,
            "workers": {"kind": context.kind, "count": context.meter.workers},
            "autoscale": "" if context.autoscaler is None else context.autoscaler.sentence(),
            "limit": find_bottleneck(epoch),
            "verdict": explain_bottleneck(epoch, gauges),
            "bad": list(context.bad.last.copy()),
            "memory": {} if context.memory is None else context.memory.stats(),
            "limits": context.limits(),
            "decode": {"decoder": "cpu"} if context.decoding is None else context.decoding.stats(),
        }

    def _loader_of_one(self, index: Any) -> DataLoader[T_co]:
        """Return a loader like this one, of one batch, which is made in this process.

        Args:
            index: the index batch; one index where this loader has batch_size=None.
        """
        alone = self.batch_sampler is None
        return DataLoader(
            self.dataset,
            batch_size=None if alone else 1,
            sampler=ChosenIndices([index]) if alone else None,
            batch_sampler=None if alone else [list(index)],
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            device=self.device,
            batch_transform=self.batch_transform,
            decoder=self.decoder,
            on_error=self.on_error,
            seed=self.seed,
        )

    def _settle_workers(self, auto: bool, prefetch_factor: int | None) -> None:
        """Find the upper limit of num_workers="auto", and refuse a memory limit that is too small."""
        context = self._context
        processes = kernel_processes(kernel_threads(self, context))
        if auto and not processes:
            self.num_workers = most_workers(self.memory_limit, self.multiprocessing_context)
        if auto and not why_fixed(self.dataset):
            context.autoscaler = Autoscaler(self.num_workers, prefetch_factor)
        if self.memory_limit is not None:
            MemoryLimit.of(self.memory_limit, processes or self.num_workers, self.multiprocessing_context)
            context.memory = MemoryUse()

    def _new_decoding(self, decoder: Any) -> Decoding:
        from fastload.gpu.decoding import Decoding, check_decoder  # not for loaders that need no decoder

        own_collate = self.collate_fn is not default_collate or self.batch_sampler is None
        check_decoder(decoder, self.dataset, self.device, not own_collate)
        encoded = view_of(self.dataset).encoded()
        if encoded is not None:
            encoded.keep_raw()
        return Decoding(
            decoder,
            self.device,
            on_error=self.on_error,
            counters=self._context.counters,
            bad=self._context.bad,
        )


def _own_sampler(dataset: Any, shuffle: bool | None, seed: int) -> tuple[Any, bool | None]:
    """Return (sampler, shuffle): the sampler of a dataset that has one of its own, else None."""
    mixed = new_sampler(dataset, shuffle=bool(shuffle), seed=seed)
    if mixed is not None:
        return mixed, None
    if view_of(dataset).streams() is not None:
        return ShardSampler(dataset, shuffle=bool(shuffle), seed=seed), None
    return None, shuffle
