"""Tar shards in WebDataset's layout as a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastload.cache import Cache, as_cache
from fastload.checks import refuse_class
from fastload.datasets.sample_files import IMAGES, PICKLES, extension_of, open_file
from fastload.errors import DecodeError, shorten_errors
from fastload.formats.tar import read_sample
from fastload.shards.catalog import ShardList
from fastload.shards.dataset import ShardDataset
from fastload.shards.epoch_streams import StreamOptions
from fastload.shards.formats import TAR
from fastload.shards.record_fields import ChosenFields, NamedFields, check_decode


class MemberFields(NamedFields):
    """Members of a tar shard's sample.

    Args:
        decoders: extension -> function of its bytes; they replace the built-in ones.
        unsafe: unpickle .pyd, .pkl, .pickle, .pth and .pt, which can run any code.
    """

    def __init__(self, decoders: Mapping[str, Callable[[bytes], Any]], *, unsafe: bool) -> None:
        for name, function in decoders.items():
            refuse_class(f"decode[{name!r}]", function)
        self._decoders = {name.lower().lstrip("."): function for name, function in decoders.items()}
        self._unsafe = unsafe

    @property
    def key(self) -> str:
        return repr(sorted(self._decoders))

    def split(self, payload: memoryview) -> dict[str, Any]:
        key, members = read_sample(payload)
        if "__key__" in members:
            raise DecodeError(
                f"sample {key!r} has a member '__key__': this name is taken by the key of the sample"
            )
        return {"__key__": key, **members}

    def names(self, payload: memoryview) -> list[str]:
        return list(read_sample(payload)[1])

    def is_image(self, name: str) -> bool:
        return extension_of(name) in IMAGES and self._decoder(name) is None

    def images(self, fields: Mapping[str, Any]) -> list[str]:
        return [name for name in fields if self.is_image(name)]

    def open(self, name: str, value: Any) -> Any:
        if name == "__key__":
            return value
        decoder = self._decoder(name)
        if decoder is not None:
            return decoder(bytes(value))
        kind = extension_of(name)
        if kind in PICKLES and not self._unsafe:
            raise DecodeError(
                f"member {name!r} is a pickle, which can run any code: pass unsafe=True if you trust the "
                f"author of the shards, or decode={{{name!r}: function}}"
            )
        return open_file(kind, value, f"member {name!r}")

    def _decoder(self, name: str) -> Callable[[bytes], Any] | None:
        return self._decoders.get(name) or self._decoders.get(extension_of(name))


class TarDataset(ShardDataset):
    """The samples of tar files in WebDataset's layout: members that differ only in their extension.

    `fields=` names what a sample consists of. Without it, a sample is a dict: "__key__", the members' path up
    to the first dot of its last component, and each extension in lower case with its content: jpg, jpeg, png,
    webp, ... a `PIL.Image` in RGB; cls, index, id an int; json; txt a str; npy an array; anything else its
    bytes. Pickles (.pyd, .pkl, .pickle, .pth, .pt) are refused. No name in a tar ever becomes a path on this
    machine.

    Give a segmentation mask a fused transform with interpolation="nearest" and channels=1: it is cut like its
    image, and its class numbers stay, in every cache mode. Otherwise it is treated as an ordinary image, in
    RGB and interpolated.

    Example::

        from fastload import DataLoader, RandomResizedCrop, TarDataset

        dataset = TarDataset(
            "s3://bucket/shards/train-{00000..00003}.tar",
            fields=("jpg;jpeg;png;webp", "cls"),
            transform=RandomResizedCrop(224, flip=0.5),
            cache="/ssd/cache",
        )
        for images, labels in DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8):
            images, labels  # uint8 (256, 3, 224, 224), int64 (256,)

    Once its shards are indexed, it is a map-style dataset with random access and an exact shuffle. The index
    comes from index files (DALI's wds2idx), or is made in the first epoch and kept in the cache. Until then
    `[]` raises TypeError, `len()` is the hint `num_samples` or raises too, and `fastload.DataLoader` reads it
    as streams: `cycle_length` files at once per rank, read ahead in large ranges, shuffled in blocks; without
    a shuffle one after the other, so that one worker, or none, gives the order of the files. The same loop
    reads both.

    With index files and no cache it is read at random too, unless samples are smaller than 32 KiB on average
    or files are compressed: then every epoch is streamed. A tar without its end marker is accepted
    if it ends with a member. A damaged sample is an error with file and offset, or counted under `on_error`.

    Args:
        url: a prefix, one file, `{000..099}`, a glob, a list of these, wids' index file: any fsspec URL or
            path. `pipe:` is refused.
        decode: a dict {extension: function of bytes} that replaces built-in decoders; or a function from the
            dict of all members' bytes to the sample. Deterministic.
        transform: a fused transform, which takes the one image of a sample (the sample then has a uint8
            tensor in its place); a dict {extension: function or fused transform}; or any callable on the
            sample. Fused transforms write their images straight into the batch.
        fields: the structure of a sample: a tuple, a dict, nested or not, or one leaf. A leaf is an
            extension; alternatives, of which the first that a sample has counts ("jpg;jpeg;png"); or
            "__key__". "json?" may be absent: the value is None then, and its column in a batch always a list.
            Other members are not opened, and cache modes "shrunk" and "decoded" do not keep them. In
            `transform={...}` a leaf has the name of its key in a dict, else of its first alternative. None: a
            dict of all members.
        num_samples: a hint for `len()` while the shards are not indexed, for schedules and progress bars.
        cycle_length: files open at once, by all workers of a rank together.
        shuffle_buffer: size of a shuffled block per worker: samples as int, or bytes as text ("64MB").
        cache: a `Cache`, or a directory for one in mode "auto"; filled during the first epoch.
        index: the URL of the index files; None: beside the shards, if there are any; False: use none.
        unsafe: unpickle pickles. A pickle can run any code of the author of the files.
        storage_options: for `open_store`.
        listing_max_age: how old a listing that the cache keeps may be, to be used in place of a new one: text
            such as "12h" or "7d", or seconds. 0: every job lists again; its ranks share that listing.

    Raises:
        ArgumentError, NotFoundError, AccessDeniedError, StoreError: within 10 s, before any worker starts.
    """

    @shorten_errors
    def __init__(
        self,
        url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        fields: Any = None,
        *,
        decode: Mapping[str, Callable[[bytes], Any]] | Callable[[dict[str, Any]], Any] | None = None,
        transform: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = None,
        num_samples: int | None = None,
        cycle_length: int = 32,
        shuffle_buffer: int | str = "64MB",
        cache: Cache | str | os.PathLike[str] | None = None,
        index: str | os.PathLike[str] | bool | None = None,
        unsafe: bool = False,
        storage_options: dict[str, Any] | None = None,
        listing_max_age: float | str = 0,
    ) -> None:
        decoders = decode if isinstance(decode, Mapping) else {}
        members = MemberFields(decoders, unsafe=unsafe)
        check_decode(fields, decode)
        chosen = None if fields is None else ChosenFields(members, fields)
        kept_in = as_cache(cache)
        super().__init__(
            url,
            TAR,
            lambda: ShardList(url, TAR, kept_in, listing_max_age, storage_options),
            members if chosen is None else chosen,
            decode=decode,
            transform=transform,
            num_samples=num_samples,
            streams=StreamOptions.of(cycle_length, shuffle_buffer),
            cache=kept_in,
            index=index,
        )
