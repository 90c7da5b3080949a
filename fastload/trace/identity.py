"""Which samples a loader has, and what holds their order, in a state: so that it is not resumed with others.

    Contents.identify ─▶ the state's "samples": digests ─▶ check_identity: an error, or a warning
                        the state's "recipe": the place, the listing and the crop ◀┘

Two loaders of the same length may have other samples: another folder, another random split, another list of
indices. The keys of some samples tell the one, and all indices of a `Subset` or sampler the other. The
address of the data may change: whoever has moved it is told so, and goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import xxhash
from torch.utils.data import IterableDataset, Subset, SubsetRandomSampler, WeightedRandomSampler

from fastload.datasets.mixture import sources_of
from fastload.datasets.store_dataset import StoreDataset
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError
from fastload.order.sampler import known_length
from fastload.order.samplers import content_of
from fastload.order.state import (
    DatasetIdentity,
    DatasetRecipe,
    Identity,
    Recipe,
    SamplerRecipe,
    State,
    Unknown,
)
from fastload.shards.epoch_streams import STREAMED, StreamOptions
from fastload.trace.recipe import describe

_KEYS = 64  # of samples that are compared, from all over the dataset
_DEPTH = 100  # of datasets in datasets
_ORDER = ("replacement", "shuffle", "seed")  # of a sampler, what its order is made from
_SAME_KEYS = "resume with the dataset of the saved run; its place may have changed, its keys may not"
_LIKE = {
    "indices": "pass the same indices, as by a split with a seed of its own; where each rank has indices of "
    "its own, load the state that this rank has saved",
    "keys": _SAME_KEYS,
}


class Contents:
    """The digests of what a loader holds. Large lists are read once; they may be changed in place later."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[Any, str | None]] = {}

    def identify(self, loader: Any) -> Identity:
        """Return what tells the samples of a loader from others."""
        datasets = {name: self._of(dataset) for name, dataset in _datasets(loader.dataset)}
        return Identity([self._digest(held) for held in _held_by(loader)], datasets)

    def _of(self, dataset: Any) -> DatasetIdentity:
        chosen = [self._digest(subset.indices) for subset in _subsets(dataset)]
        leaf = _leaf(dataset)
        listed = None if leaf is None else view_of(leaf).listed()
        return DatasetIdentity(type(dataset).__qualname__, chosen, _keys(dataset), listed)

    def _digest(self, held: Any) -> str | None:
        """Return a digest; None: it has no bytes that are the same in another process."""
        before, digest = self._read.get(id(held), (None, None))
        if before is not held:
            content = content_of(held)
            digest = None if content is None else xxhash.xxh3_128_hexdigest(content)[:16]
            self._read[id(held)] = held, digest
        return digest


def check_identity(loader: Any, own: Identity, state: State) -> None:
    """Compare the samples of a state with those of the loader that resumes it.

    Args:
        own: by `Contents.identify`.

    Raises:
        ArgumentError: it has other samples, or another order of them.
    """
    saved = state.samples
    if saved.sampler != own.sampler:
        raise ArgumentError(
            f"state_dict was saved with a {state.samplers[-1]} of other contents, so the order of the "
            "samples would differ: pass the same list, indices or weights"
        )
    recipe = describe(loader)
    if state.sampler.state is None:  # which says it too
        _check_order(state.recipe, recipe)
    if state.streams is not None and loader.sampler.shuffle:
        _check_blocks(state.recipe, recipe)
    pairs = [
        (f"source {name!r} has" if name else "the dataset has", name, before, own.datasets[name])
        for name, before in saved.datasets.items()
        if name in own.datasets
    ]
    for source, name, before, now in pairs:
        for what in _LIKE:
            texts = getattr(before, what), getattr(now, what)
            if None not in texts and texts[0] != texts[1]:
                _refuse(source, what, changes_since(loader, state, name))
        if before.type != now.type:
            warnings.warn(
                f"state_dict was saved with a {before.type}, and this loader has a {now.type}: the "
                "batches go on with its samples of the same numbers",
                stacklevel=4,
            )
    if _check_recipe(state.recipe, recipe, changes_since(loader, state)):
        return
    for source, name, before, now in pairs:
        if before.type == now.type and before.listing is not None and now.listing is not None:
            since = changes_since(loader, state, name)
            if before.listing[0] != now.listing[0]:
                _refuse(source, "keys", since)
            if before.listing[1] != now.listing[1]:
                change = f"{source} objects that were copied or written again since{since}"
                warnings.warn(f"state_dict is of a run with the same keys, but {change}", stacklevel=4)


def _refuse(source: str, what: str, since: str) -> NoReturn:
    raise ArgumentError(f"{source} other {what} than in the run that was saved{since}: {_LIKE[what]}")


def _check_order(saved: Recipe | Unknown, own: Recipe | Unknown) -> None:
    """Raise ArgumentError where the sampler of a state was made to give another order than the loader's."""
    made = [recipe.sampler for recipe in (saved, own) if isinstance(recipe, Recipe)]
    orders = [
        {name: getattr(sampler, name) for name in _ORDER}
        for sampler in made
        if isinstance(sampler, SamplerRecipe)
    ]
    if len(orders) == 2 and orders[0] != orders[1]:
        before, now = _differing(*orders)
        raise ArgumentError(
            f"state_dict was saved with a sampler of {before}, and this loader's has {now}: the order of the "
            "samples would differ; make the sampler with the arguments of the saved run"
        )


def _check_blocks(saved: Recipe | Unknown, own: Recipe | Unknown) -> None:
    """Raise ArgumentError where the blocks in which streams are shuffled would have other records."""
    made = [recipe.dataset for recipe in (saved, own) if isinstance(recipe, Recipe)]
    blocks = [_blocks(dataset) for dataset in made if isinstance(dataset, DatasetRecipe)]
    if len(blocks) == 2 and blocks[0] != blocks[1]:
        raise ArgumentError(
            "state_dict was saved in the middle of an epoch that was read as streams, with another "
            "shuffle_buffer, or other fields of Parquet: records would be lost and repeated; resume with the "
            "shuffle_buffer and fields of the saved run, or from a state between two epochs"
        )


def _blocks(made: DatasetRecipe) -> tuple[StreamOptions, Any]:
    """Return what decides which records a block has: its limits, and what the bytes of a record are."""
    limits = StreamOptions.of(1, made.arguments.get("shuffle_buffer", "64MB"))
    by_columns = made.class_ == "ParquetDataset" and limits.most_records == STREAMED.most_records
    return limits, made.arguments.get("fields") if by_columns else None


def _check_recipe(saved: Recipe | Unknown, own: Recipe | Unknown, since: str) -> bool:
    """Compare the dataset of a state with the loader's: what it lists, where, and how its images are cut.

    Args:
        since: what has changed in the bucket since, in brackets.

    Returns:
        whether both are described.

    Raises:
        ArgumentError: they have other keys. What else differs is a warning.
    """
    if isinstance(saved, Unknown) or isinstance(own, Unknown):
        return False
    before, now = saved.dataset, own.dataset
    if isinstance(before, Unknown) or isinstance(now, Unknown):
        return False
    if before.keys != now.keys:
        raise ArgumentError(
            f"state_dict was saved with the samples of {before.url!r}, and those of {now.url!r} have "
            f"other keys or classes{since}: {_SAME_KEYS}"
        )
    places = [_place(before), _place(now)]
    changes = []
    if places[0] != places[1]:
        changes.append(f"its samples were read from {places[0]}, and are now read from {places[1]}")
    elif before.versions != now.versions:
        changes.append(f"objects of {now.url!r} were written again since{since}")
    transforms = [_transform_of(recipe) for recipe in (before, now)]
    if transforms[0] != transforms[1]:
        texts = _differing(*transforms)
        changes.append(f"its transform had {texts[0]}, and has now {texts[1]}")
    for change in changes:
        warnings.warn(f"state_dict is of a run with the same keys, but {change}", stacklevel=5)
    return True


def _transform_of(made: DatasetRecipe) -> dict[str, Any]:
    """Return the one crop of a dataset's images; {}: it has none."""
    transform = made.arguments.get("transform") or {}
    return dict(transform.get("transform") or {})


def _place(made: DatasetRecipe) -> str:
    endpoint = made.options.get("endpoint_url")
    return repr(str(made.url).rstrip("/")) + (f" at {endpoint}" if endpoint else "")


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the arguments of two transforms that are not alike; an empty one is none of fastload's."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    texts = [", ".join(f"{name}={made[name]!r}" for name in names if name in made) for made in (before, now)]
    return [text or "none of these" for text in texts]


def changes_since(loader: Any, state: State, name: str = "") -> str:
    """Return what has changed in the bucket since a state was made, in brackets; "" if that is not known.

    Args:
        name: of the source of a mixture.
    """
    leaf = _leaf(dict(_datasets(loader.dataset)).get(name))
    saved = state.samples.datasets.get(name)
    if leaf is None or saved is None or saved.listing is None:
        return ""
    changes = view_of(leaf).changes_since(*saved.listing)
    return f" ({changes})" if changes else ""


def _datasets(dataset: Any) -> list[tuple[str, Any]]:
    """Return (name, dataset) of each source of a mixture; else ("", the dataset)."""
    # In `fastload replay` a range stands for samples that are not there.
    return [] if isinstance(dataset, IterableDataset | range) else list(sources_of(dataset).items())


def _held_by(loader: Any) -> Iterator[Any]:
    """Yield what the samplers of a loader have been given and draw from."""
    outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for sampler in (outer, getattr(outer, "sampler", None)):
        if type(sampler) in (list, tuple):
            yield sampler
        elif type(sampler) is SubsetRandomSampler:
            yield sampler.indices
        elif type(sampler) is WeightedRandomSampler:
            yield sampler.weights


def _leaf(dataset: Any) -> StoreDataset | None:
    """Return the dataset that a `Subset` of subsets takes its samples from, if it is one over a store."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset if isinstance(dataset, StoreDataset) else None


def _subsets(dataset: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the `Subset`s that a dataset is made of, at any depth."""
    if isinstance(dataset, Subset):
        yield dataset
    attributes = getattr(dataset, "__dict__", {})  # so that no property of the user's runs
    parts = attributes.get("datasets", [attributes.get("dataset")])
    for part in parts.values() if isinstance(parts, dict) else parts:
        if part is not None and depth < _DEPTH:
            yield from _subsets(part, depth + 1)


def _keys(dataset: Any) -> str | None:
    """Return a digest of the keys of some samples; None where they have none, or are not known yet."""
    length = known_length(dataset)
    if not length:
        return None
    rows, count = view_of(dataset), min(_KEYS, length)
    try:
        keys = [rows.key(length * number // count) for number in range(count)]
    except (TypeError, NotImplementedError):  # shards that are not indexed
        return None
    if None in keys:
        return None
    return xxhash.xxh3_128_hexdigest("\n".join(map(str, keys)).encode("utf-8", "surrogatepass"))[:16]
