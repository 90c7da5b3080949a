"""fastload as a data loader of DLIO, the engine of MLPerf Storage.

DLIO says which files this rank reads, in which order, and how many are a batch; the plug-in only reads them.
DLIO's own readers count the bytes of a file and hand over a dummy. So does `sample: bytes`; `sample: crops`
decodes.

In the workload's YAML (DLIO makes `storage_options` free for its storages)::

    reader: {data_loader_classname: bench.dlio.plugin.FastloadLoader, data_loader_sampler: index}
    storage: {storage_options: {fastload: {sample: crops, cache: /ssd/cache, mode: raw}}}
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from dlio_benchmark.common.enumerations import DataLoaderType, DatasetType, StorageType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
from PIL import Image

from fastload import Cache, DataLoader, ObjectDataset, RandomResizedCrop

SIZE = 224  # pixels of a crop's side


class FilesOfTheEpoch(torch.utils.data.Sampler[int]):
    """The indices of DLIO's files, which it gives to the ranks anew for every epoch."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


class FastloadLoader(BaseDataLoader):
    """One dataset of the files of all ranks, and a loader whose sampler is DLIO's list of this rank's files.

    `storage_options.fastload` has `sample` ("bytes" or "crops"), `cache` (a directory, or none), its `mode`,
    and for a check `record`: a file that gets, for each epoch, DLIO's files and the xxh3 of the samples.
    """

    def __init__(self, format_type: Any, dataset_type: Any, epoch: int) -> None:
        super().__init__(format_type, dataset_type, epoch, DataLoaderType.PYTORCH)
        options = self._args.storage_options or {}
        self._given = {"sample": "bytes", "cache": None, "mode": "raw", "record": None}
        self._given |= options.get("fastload", {})
        if len(self._given) > 4 or self._given["sample"] not in ("bytes", "crops"):
            known = "sample (bytes or crops), cache, mode and record"
            raise ValueError(f"storage_options.fastload takes {known}: found {options['fastload']}")
        names = {"endpoint_url": "endpoint_url", "access_key_id": "key", "secret_access_key": "secret"}
        self._options = {ours: options[theirs] for theirs, ours in names.items() if theirs in options}

    def read(self) -> None:
        args, given = self._args, self._given
        local = args.storage_type is StorageType.LOCAL_FS
        folder = f"{args.data_folder}/{self.dataset_type}"
        crops = given["sample"] == "crops"
        dataset = ObjectDataset(
            folder if local else f"s3://{args.storage_root}/{folder}",
            transform=RandomResizedCrop(SIZE, flip=0.5) if crops else None,
            cache=Cache(given["cache"], given["mode"]) if given["cache"] else None,
            storage_options=None if local else self._options,
        )
        self._index = {key: index for index, key in enumerate(dataset.listing().keys(0, len(dataset)))}
        workers = args.read_threads
        # DLIO starts the workers of its own loaders before its clock, and they read. These read one file.
        self._order = FilesOfTheEpoch([0] * self.batch_size * max(1, workers))
        # Its readers of files stack a dummy for each file, those of S3 give one for the batch.
        dummy = partial(dummies, args.resized_image.shape, local)
        # Not named `_dataset`: DLIO would begin an epoch of that, and fill the cache, before its clock.
        self._loader = DataLoader(
            dataset,
            self.batch_size,
            sampler=self._order,
            num_workers=workers,
            collate_fn=digests if given["record"] else None if crops else dummy,
            multiprocessing_context=args.multiprocessing_context if workers else None,
            persistent_workers=workers > 0,
            drop_last=True,
        )
        for _ in self._loader:
            pass

    def next(self) -> Iterator[Any]:
        training = self.dataset_type is DatasetType.TRAIN
        files = list(self._args.file_list_train if training else self._args.file_list_eval)
        self._order.indices = [self._index[file.rsplit(f"/{self.dataset_type}/", 1)[1]] for file in files]
        found: list[str] = []
        for batch in self._loader:
            if self._given["record"]:
                found += batch
            yield batch
        if self._given["record"]:
            with Path(f"{self._given['record']}-{self._args.my_rank}").open("a") as file:
                file.write(json.dumps({"files": files, "digests": found}) + "\n")

    def finalize(self) -> None:
        pass


class PillowLoader(BaseDataLoader):
    """For comparison: DLIO's way to local files, torch's DataLoader, with crops by Pillow."""

    def __init__(self, format_type: Any, dataset_type: Any, epoch: int) -> None:
        super().__init__(format_type, dataset_type, epoch, DataLoaderType.PYTORCH)

    def read(self) -> None:
        pass

    def next(self) -> Iterator[Any]:
        crops = PillowCrops(list(self._args.file_list_train))
        yield from torch.utils.data.DataLoader(
            crops, self.batch_size, num_workers=self._args.read_threads, drop_last=True
        )

    def finalize(self) -> None:
        pass


class PillowCrops(torch.utils.data.Dataset[Any]):
    """Files as crops of 8 to 100 % of a photo's area."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        with Image.open(self.files[index]) as photo:
            part = math.sqrt(random.uniform(0.08, 1))
            width, height = photo.width * part, photo.height * part
            left, top = random.uniform(0, photo.width - width), random.uniform(0, photo.height - height)
            box = (left, top, left + width, top + height)
            crop = photo.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR, box)
        return torch.from_numpy(np.asarray(crop).transpose(2, 0, 1).copy())


def dummies(shape: tuple[int, ...], local: bool, samples: list[Any]) -> Any:
    """What DLIO's own readers hand over for these samples, which are bytes."""
    assert all(map(len, samples))
    return torch.zeros((len(samples), *shape) if local else shape, dtype=torch.uint8)


def digests(samples: list[Any]) -> list[str]:
    return [xxhash.xxh3_64_hexdigest(sample) for sample in samples]
