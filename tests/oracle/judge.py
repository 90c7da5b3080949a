"""Runs a job on both sides, and says where they differ."""

from __future__ import annotations

import itertools
import json
import random
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

import fastload
from fastload.errors import ArgumentError
from tests.oracle.jobs import FIXED, streamed
from tests.oracle.worlds import BLOCK, BLUE, UNEVEN, Bad, Job, World, open_world

STEPS = 300  # more than any epoch of a job has
MASK_TOLERANCE = 40  # of 255: the red of a photo, averaged, beside that of the nearest pixel


class Difference(NamedTuple):
    """What differs ("batch", "error", "order", "resume", ...), and how."""

    what: str
    text: str


class Event(NamedTuple):
    """What one `next` gave: a batch, or the name and the text of an error."""

    batch: Any
    error: str = ""
    text: str = ""


# --- trees of values --------------------------------------------------------------------------------------


def unlike(a: Any, b: Any, pixels: str = "exact", at: str = "") -> str:
    """The first difference of two batches, in words; "" if there is none."""
    if type(a) is not type(b):
        return f"{at}: {type(a).__name__} {str(a)[:60]} beside {type(b).__name__} {str(b)[:60]}"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{at}: keys {list(a)} beside {list(b)}"
        return next((d for k in a if (d := unlike(a[k], b[k], pixels, f"{at}[{k!r}]"))), "")
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{at}: {len(a)} items beside {len(b)}"
        return next(
            (
                d
                for i, (x, y) in enumerate(zip(a, b, strict=True))
                if (d := unlike(x, y, pixels, f"{at}[{i}]"))
            ),
            "",
        )
    if isinstance(a, np.ndarray | np.generic):
        a, b = torch.from_numpy(np.asarray(a)), torch.from_numpy(np.asarray(b))
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{at}: {a.dtype} {tuple(a.shape)} beside {b.dtype} {tuple(b.shape)}"
        if is_mask(a) and pixels == "drawn":
            return ""  # see `misplaced_mask`
        if a.dtype == torch.uint8 and a.ndim >= 3 and not is_mask(a) and pixels != "exact":
            if pixels == "drawn":
                a, b = (x[..., 2, :, :].float().mean((-2, -1)) for x in (a, b))  # JPEG blurs a pixel by 3
            off = float((a.float() - b.float()).abs().mean()) if a.numel() else 0.0
            return f"{at}: pixels differ by {off:.1f} on average" if off > 3 else ""
        alike = torch.equal(a, b) or bool(((a == b) | (a != a) & (b != b)).all())
        return "" if alike else f"{at}: {a.flatten()[:6]!s} beside {b.flatten()[:6]!s}"
    return "" if a == b else f"{at}: {a!r} beside {b!r}"


def is_mask(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.uint8
        and value.ndim >= 3
        and value.shape[-3] == 1
    )


def misplaced_mask(tree: Any) -> str:
    """Say whether a mask, whose file has the red of its photo, is cut otherwise than the photo."""
    if not isinstance(tree, dict | list | tuple):
        return ""
    parts = list(tree.values()) if isinstance(tree, dict) else list(tree)
    for photo, mask in itertools.pairwise(parts):
        if is_mask(mask) and photo.shape[-3] == 3:
            off = float((photo[..., :1, :, :].float() - mask.float()).abs().max())
            return f"a mask is off by {off:.0f}" if off > MASK_TOLERANCE else ""
    return next((text for part in parts if (text := misplaced_mask(part))), "")


def pixels_of(job: Job) -> str:
    return {"drawn": "drawn", "plain": "exact", "none": "exact"}.get(job["transform"], "near")


def ids_in(tree: Any) -> Any:
    """The number of a sample, or the list of those of a batch; None if nothing in it tells."""
    if is_mask(tree):
        return None
    if isinstance(tree, torch.Tensor) and tree.dtype == torch.uint8 and tree.ndim >= 3:
        blue = tree[..., 2, tree.shape[-2] // 2, tree.shape[-1] // 2].float() / BLUE
        return blue.round().int().tolist()
    if (
        isinstance(tree, torch.Tensor)
        and tree.dtype == torch.int64
        and tree.shape[-1:] in ((BLOCK,), (BLOCK + 1,))
    ):
        return (tree[..., 0] // BLOCK).tolist()
    if isinstance(tree, dict) and "id" in tree:
        found = tree["id"]
        return found.tolist() if isinstance(found, torch.Tensor) else found
    if isinstance(tree, int) or (
        isinstance(tree, torch.Tensor) and tree.dtype == torch.int64 and tree.ndim == 0
    ):
        return None
    parts: Iterable[Any] = (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    )
    return next((found for part in parts if (found := ids_in(part)) is not None), _first_number(tree))


def numbers_in(job: Job, event: Event) -> Any:
    """The numbers of the samples of a batch; of one sample, where a batch is one."""
    if job["collate"] == "list" and job["batch_size"] is not None:
        return [ids_in(sample) for sample in event.batch]
    return ids_in(event.batch)


def _first_number(tree: Any) -> Any:
    """Of a table's row as a tuple: its first column is the number."""
    if isinstance(tree, list | tuple) and tree and isinstance(tree[0], torch.Tensor | int):
        first = tree[0]
        return first.tolist() if isinstance(first, torch.Tensor) else first
    return None


# --- the slow side ----------------------------------------------------------------------------------------


class Indices(Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return index


class Own:
    """A sampler of the user's, without a state."""

    def __init__(self, order: list[Any]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Any:
        return iter(self.order)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:  # of streams
        return None


def sampler_of(job: Job, dataset: Any, *, fast: bool, again: bool = False) -> dict[str, Any]:
    """The arguments of a loader that choose its order. `again`: made in the process that resumes."""
    kind, size, drop = job["sampler"], job["batch_size"], job["drop_last"]
    other = again and job["restart"] == "other"
    given: dict[str, Any] = {"batch_size": size} | ({"drop_last": drop} if drop else {})
    if kind == "sequential":
        return given
    if kind == "shuffle":
        return given | {"shuffle": _length(dataset) != 0}  # torch has no shuffled order of nothing
    if not len(dataset):
        return given
    n, rng = len(dataset), random.Random(f"{job['salt']} {other}")
    order, generator = rng.sample(range(n), max(n - n // 4, 1)), torch.Generator().manual_seed(5)
    if kind == "batches":
        size = size or 1
        return {"batch_sampler": [order[at : at + size] for at in range(0, len(order), size)]}
    if kind == "batch-sampler":
        return {"batch_sampler": BatchSampler(SequentialSampler(range(n)), size, drop)}
    ranks = {"num_replicas": 2, "rank": job["salt"] % 2}
    if kind == "node":
        nodes = 1 if other else 2
        return given | {
            "sampler": fastload.DistributedSampler(
                dataset, nodes, 0, seed=3, partition="node", num_nodes=nodes
            )
        }
    if kind == "eval" and fast:
        return given | {"sampler": fastload.DistributedSampler(dataset, **ranks, shuffle=False, mode="eval")}
    kinds = {
        "generator": lambda: RandomSampler(range(n), generator=generator),
        "replacement": lambda: RandomSampler(range(n), True, n + 3, generator),
        "subset": lambda: SubsetRandomSampler(order, generator),
        "weighted": lambda: WeightedRandomSampler([rng.random() for _ in range(n)], n, generator=generator),
        "list": lambda: order,
        "own": lambda: Own(order),
        "pairs": lambda: Own([(i, rng.choice([0.5, 1.0])) for i in order]),
        "distributed": lambda: (fastload if fast else torch.utils.data).DistributedSampler(
            dataset, **ranks, seed=2, drop_last=drop
        ),
        "torch-distributed": lambda: torch.utils.data.DistributedSampler(
            dataset, **ranks, seed=2, drop_last=drop
        ),
        "eval": lambda: list(range(n))[job["salt"] % 2 :: 2],
    }
    return given | {"sampler": kinds[kind]()}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def torch_order(job: Job, length: int) -> list[list[Any]] | None:
    """The index batches of each epoch as torch draws them; None where another law holds."""
    if streamed(job) and (job["sampler"] == "shuffle" or job["workers"] > 1 or job["cache"] != "none"):
        return None
    if job["kind"] == "mixture" or job["sampler"] == "node" or (job["sampler"] == "shuffle" and job["seed"]):
        return None
    indices = Indices(length)
    made = sampler_of(job, indices, fast=False)
    loader: Any = torch.utils.data.DataLoader(indices, **made, collate_fn=_as_it_is)
    epochs = []
    for epoch in range(job["epochs"]):
        _set_epoch(loader.sampler, epoch)
        epochs.append(list(loader))
    return epochs


def _set_epoch(sampler: Any, epoch: int) -> None:
    if type(sampler) is torch.utils.data.DistributedSampler or type(sampler) is fastload.DistributedSampler:
        sampler.set_epoch(epoch)


def _as_it_is(samples: Any) -> Any:
    return samples


class Slow:
    """The samples by definition, and the batches that torch would make of them."""

    def __init__(self, job: Job, slow: Any) -> None:
        self.job, self.slow = job, slow
        self._samples: dict[Any, Any] = {}

    def sample(self, index: Any) -> Any:
        """The sample, or the error that it raises."""
        if index not in self._samples:
            state = torch.get_rng_state()  # torchvision draws, also where there is one outcome only
            try:
                self._samples[index] = self.slow[index]
            except (Bad, ValueError) as error:
                self._samples[index] = error
            torch.set_rng_state(state)
        return self._samples[index]

    def all(self) -> list[Any]:
        return [self.sample(index) for index in range(len(self.slow))]

    def errors(self) -> set[str]:
        """The names of the errors of bad samples."""
        bad = [one for one in self.all() if isinstance(one, Exception)]
        return {str(one) if isinstance(one, Bad) else type(one).__name__ for one in bad}

    def good(self) -> dict[Any, Any]:
        """Number -> the index of a good sample."""
        indices = [index for index in range(len(self.slow)) if not isinstance(self.sample(index), Exception)]
        return {ids_in(self.sample(index)): index for index in reversed(indices)}

    def excluded(self, index: Any) -> bool:
        return index in self.job["exclude"]

    def again(self, event: Event) -> Any:
        """What of an event does not depend on random numbers: its samples, if none is a substitute."""
        substitutes = self.job["exclude"] or (self.errors() and self.job["on_error"] == "replace")
        if substitutes and (self.errors() or self.may_not_fit()):
            return None  # one that stands in for another sample may be bad, or may not fit to the others
        found = None if event.error else numbers_in(self.job, event)
        if event.error or self.job["exclude"] or self.errors():
            return event.error or (len(found) if isinstance(found, list) else 1)
        return found

    def may_not_fit(self) -> bool:
        """Whether some of the samples make no batch."""
        everything = [made for made in self.all() if not isinstance(made, Exception)]
        for first in everything:  # torch asks the first one for its members
            try:
                default_collate([first, *everything])
            except Exception:
                return True
        return False

    def check(self, indices: Any, event: Event) -> Difference | None:
        """Whether a batch, or an error, is what these indices have to give."""
        one = self.job["batch_size"] is None and self.job["sampler"] not in ("batches", "batch-sampler")
        rows = [indices] if one else list(indices)
        samples = [self.sample(index) for index in rows]
        gone = [row for row, index in enumerate(rows) if self.excluded(index)]
        bad = [row for row, made in enumerate(samples) if isinstance(made, Exception) and row not in gone]
        if bad and self.job["on_error"] == "raise":
            first = samples[bad[0]]
            name = str(first) if isinstance(first, Bad) else type(first).__name__
            return (
                None
                if event.error == name
                else Difference("error", f"{event.error or 'a batch'}, not {name}")
            )
        if bad and event.error and not self.good():
            return None  # there is nothing that could stand in for them
        if gone and event.error in self.errors():
            return None  # the sample that stands in for an excluded one is bad
        repeats = self.job["on_error"] == "repeat" or streamed(
            self.job
        )  # a stream has no other samples at hand
        if len(bad) == len(rows) and repeats and event.error:
            return None
        if len(bad) == len(rows) and self.job["on_error"] == "repeat":
            return None if event.error else Difference("error", "all rows are bad, and there is a batch")
        if event.error:
            return self._check_error(samples, bad + gone, event)
        found = numbers_in(self.job, event)
        found = [found] if one else found
        if bad or gone:
            if not isinstance(found, list) or len(found) != len(rows):
                return Difference("batch", f"{found} rows, not {len(rows)}")
            good = self.good()
            for row in bad + gone:
                others = [found[at] for at in range(len(rows)) if at not in bad]
                allowed = others if repeats and row in bad else good
                if found[row] not in allowed or self.excluded(good[found[row]]):
                    return Difference(
                        "policy", f"row {row} has sample {found[row]}, which may not stand there"
                    )
                samples[row] = self.sample(good[found[row]])
        try:
            collate = (
                _as_it_is if self.job["collate"] == "list" else default_convert if one else default_collate
            )
            wanted = collate(samples[0] if one else samples)
        except Exception as error:
            name = type(error).__name__
            return Difference("error", f"a batch, where torch raises {name}: {str(error)[:80]}")
        text = unlike(event.batch, wanted, pixels_of(self.job))
        if self.job["mask"] and not text:
            text = misplaced_mask(event.batch)
        ids = [ids_in(one) for one in samples]
        what = "order" if ids != (found if isinstance(found, list) else [found]) else "batch"
        return Difference(what, f"samples {ids}, found {found}: {text}") if text else None

    def _check_error(self, samples: list[Any], open_rows: list[int], event: Event) -> Difference | None:
        known = [made for row, made in enumerate(samples) if row not in open_rows]
        known = [] if self.job["collate"] == "list" else known
        try:
            default_collate(known) if known else None
        except Exception as error:
            name = type(error).__name__
            if event.error != name and not open_rows:
                return Difference("error", f"{event.error}, where torch raises {name}: {event.text[:200]}")
            alone = len(known) < 2 or name == "TypeError"  # of what no batch takes, not of two that differ
            return (
                None
                if alone or "sample" in event.text
                else Difference("error", f"names no sample: {event.text[:200]}")
            )
        if open_rows and self.may_not_fit():  # the substitutes, which nobody can know here
            return None
        return Difference("error", f"{event.error} where torch has a batch: {event.text[:300]}")


# --- fastload's side --------------------------------------------------------------------------------------


class Ran(NamedTuple):
    """A run of a loader.

    Attributes:
        epochs: the events of each.
        digests: at the end of each.
        state: saved at the cut, as JSON.
        said: (when, epoch, step, ids or None): what `samples_at` said.
        made: (when, epoch, step, event): what `batch_at` made.
    """

    epochs: list[list[Event]]
    digests: list[bytes]
    state: str
    said: list[tuple[str, int, int, list[Any]]]
    made: list[tuple[str, int, int, Event]]


def loader_of(job: Job, dataset: Any, *, again: bool = False) -> Any:
    workers = job["resume_workers" if again else "workers"]
    options = {"num_workers": workers, "on_error": job["on_error"], "seed": job["seed"]}
    options |= {"collate_fn": _as_it_is} if job["collate"] == "list" else {}
    return fastload.DataLoader(dataset, **options, **sampler_of(job, dataset, fast=True, again=again))


def next_event(iterator: Any) -> Event | None:
    try:
        return Event(next(iterator))
    except StopIteration:
        return None
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return Event(None, type(error).__name__, f"{error} {notes}")


def run(
    job: Job, loader: Any, slow: Slow, *, first: int = 0, epochs: int | None = None, saved: str = ""
) -> Ran:
    """Iterate, from epoch `first` on; with `saved`, from that state on."""
    ran = Ran([], [], "", [], [])
    if saved:
        loader.load_state_dict(json.loads(saved))
    else:
        if job["exclude"]:
            loader.exclude(job["exclude"])
        if job["skip"]:
            loader.skip([step for step in job["skip"] if step < len(loader)])
    state, (cut_epoch, cut_step) = "", job["cut"] or (-1, 0)
    cut_epoch = -1 if saved else cut_epoch
    for epoch in range(first, job["epochs"] if epochs is None else first + epochs):
        _set_epoch(loader.sampler, epoch)
        if epoch == cut_epoch and cut_step == 0 and not job["begun"]:
            state = json.dumps(loader.state_dict())
        if not saved:
            ask(job, loader, slow, ran, "before", epoch)
        iterator, events = iter(loader), list[Event]()
        if epoch == cut_epoch and cut_step == 0 and job["begun"]:
            state = json.dumps(loader.state_dict())
        for count in itertools.count(1):
            event = next_event(iterator)
            if event is None or count > STEPS:
                break
            events.append(event)
            if epoch == cut_epoch and count == cut_step:
                state = json.dumps(loader.state_dict())
            if count == 1:
                ask(job, loader, slow, ran, "during", epoch)
        del iterator
        if epoch == cut_epoch and not state:
            state = json.dumps(loader.state_dict())
        ask(job, loader, slow, ran, "after", epoch)
        ran.epochs.append(events)
        ran.digests.append(b"" if job["kind"] == "iterable" else loader.digest())
    return ran._replace(state=state)


def ask(job: Job, loader: Any, slow: Slow, ran: Ran, when: str, epoch: int) -> None:
    if not job["ask"]:
        return
    for step in range(3) if when == "during" else [job["salt"] % 3]:
        try:
            rows = loader.samples_at(step, epoch=epoch)
        except (ArgumentError, TypeError):  # of what is not known; TypeError: it has no length yet
            continue
        indices = [None if row.error else row.index for row in rows]
        if job["kind"] == "mixture":
            found = [None if index is None else ids_in(loader.dataset[index]) for index in indices]
        else:
            found = [None if index is None else ids_in(slow.sample(index)) for index in indices]
        ran.said.append((when, epoch, step, found))
        if when != "during":
            try:
                ran.made.append((when, epoch, step, Event(loader.batch_at(step, epoch=epoch))))
            except ArgumentError:  # its random numbers are not known
                continue
            except Exception as error:
                ran.made.append((when, epoch, step, Event(None, type(error).__name__, str(error))))


# --- judgement --------------------------------------------------------------------------------------------


def judge(job: Job, folder: Path) -> list[Difference]:
    """All differences of a job."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(_judge(job, folder))


def _judge(job: Job, folder: Path) -> Iterable[Difference]:
    world = open_world(job, folder)
    try:
        dataset = world.make()
    except Exception as error:
        if type(error).__name__ != world.refused:
            yield Difference("refused", f"{type(error).__name__}: {error}")
        return
    if world.refused:
        yield Difference("refused", f"not refused: {world.refused}")
        return
    if job["kind"] == "iterable":
        yield from judge_iterable(job, world)
        return
    slow = Slow(job, world.slow)
    seed_all(job["draw"])
    order = torch_order(job, len(world.slow))
    drawn = torch.get_rng_state()
    seed_all(job["draw"])
    loader = loader_of(job, dataset)
    ran = run(job, loader, slow)
    left = torch.get_rng_state()
    yield from judge_epochs(job, slow, order, ran)
    if order is not None and not job["ask"] and job["cut"] is None and not torch.equal(drawn, left):
        yield Difference("draws", "torch's generator stands elsewhere than after torch's loader")
    yield from judge_said(job, ran)
    if job["cut"] is not None:
        yield from judge_resume(job, folder, slow, ran)
    if job["seed"] and job["sampler"] == "shuffle":
        seed_all(job["draw"] + 1)
        second = run(job | {"ask": False, "cut": None}, loader_of(job, open_world(job, folder).make()), slow)
        # A cache that is full now ends the streams, and with workers streams take turns as they come.
        if not streamed(job) and (text := unlike(plain(second.epochs), plain(ran.epochs))):
            yield Difference("seed", f"another run with the same seed= differs: {text}")
    if job["change"] != "none":
        yield from judge_change(job, folder)


def plain(epochs: list[list[Event]]) -> Any:
    return [[(event.batch, event.error) for event in events] for events in epochs]


def steps_of(job: Job, epoch: int, total: int) -> list[int]:
    """The steps that are handed out. `skip` was called for the first epoch."""
    return [step for step in range(total) if epoch > 0 or step not in job["skip"]]


def judge_epochs(job: Job, slow: Slow, order: list[list[Any]] | None, ran: Ran) -> Iterable[Difference]:
    for epoch, events in enumerate(ran.epochs):
        if order is None:
            yield from judge_cover(job, slow, epoch, events)
            continue
        batches = [order[epoch][step] for step in steps_of(job, epoch, len(order[epoch]))]
        if len(batches) != len(events):
            yield Difference("order", f"epoch {epoch} has {len(events)} batches, torch's {len(batches)}")
            continue
        for step, (indices, event) in enumerate(zip(batches, events, strict=True)):
            if (found := slow.check(indices, event)) is not None:
                yield found._replace(text=f"epoch {epoch} step {step}: {found.text}")


def judge_cover(job: Job, slow: Slow, epoch: int, events: list[Event]) -> Iterable[Difference]:
    """An order of fastload's own: batches are right for their samples, and each good sample comes once."""
    good = slow.good()
    seen: Counter[Any] = Counter()
    for step, event in enumerate(events):
        one = job["batch_size"] is None
        if event.error:
            names = slow.errors()
            if (
                set(UNEVEN) & set(job["values"]) or "extra" in job["quirks"]
            ):  # which of these torch raises depends on the order
                names |= {"RuntimeError", "KeyError", "TypeError"}
            if event.error not in names:
                yield Difference("error", f"epoch {epoch} step {step}: {event.error}: {event.text[:300]}")
            continue
        found = numbers_in(job, event)
        rows = [found] if one else found
        seen.update(rows)
        unknown = [row for row in rows if row not in good]
        if unknown:
            yield Difference("order", f"epoch {epoch} step {step}: no samples {unknown}")
            continue
        indices: Any = good[rows[0]] if one else [good[row] for row in rows]
        if (different := slow.check(indices, event)) is not None:
            yield different._replace(text=f"epoch {epoch} step {step}: {different.text}")
    failed = any(event.error for event in events)
    if failed or job["kind"] == "mixture" or job["sampler"] == "node" or job["exclude"] or job["skip"]:
        return
    wanted = Counter(ids_in(one) for one in slow.all() if not isinstance(one, Exception))
    lost, spare = wanted - seen, seen - wanted
    bad = len(slow.slow) - sum(wanted.values()) if job["on_error"] != "raise" else 0
    cut = ((job["batch_size"] or 1) - 1) * max(1, job["workers"]) if job["drop_last"] else 0
    if sum(lost.values()) > cut or sum(spare.values()) > bad:
        yield Difference("order", f"epoch {epoch}: lost {dict(lost)}, too often {dict(spare)}")


def judge_said(job: Job, ran: Ran) -> Iterable[Difference]:
    """`samples_at` names the samples that are handed out, and `batch_at` makes their batch."""
    for when, epoch, step, said in ran.said:
        steps = steps_of(job, epoch, len(ran.epochs[epoch]) + len(job["skip"]))
        if step not in steps or steps.index(step) >= len(ran.epochs[epoch]):
            continue
        event = ran.epochs[epoch][steps.index(step)]
        found = None if event.error else numbers_in(job, event)
        if found is None:
            continue
        found = found if isinstance(found, list) else [found]
        if len(said) != len(found) or any(a is not None and a != b for a, b in zip(said, found, strict=True)):
            yield Difference(
                f"samples_at {when}", f"epoch {epoch} step {step}: said {said}, handed out {found}"
            )
    for when, epoch, step, event in ran.made:
        steps = steps_of(job, epoch, len(ran.epochs[epoch]) + len(job["skip"]))
        if step in steps and steps.index(step) < len(ran.epochs[epoch]):
            delivered = ran.epochs[epoch][steps.index(step)]
            if text := unlike(plain([[event]]), plain([[delivered]])):
                yield Difference(f"batch_at {when}", f"epoch {epoch} step {step}: {text}")


def begin_of(loader: Any, steps: int) -> list[Any]:
    """The first batches of a loader's sampler."""
    return list(itertools.islice(iter(loader.batch_sampler or loader.sampler), max(0, steps)))


def judge_resume(job: Job, folder: Path, slow: Slow, ran: Ran) -> Iterable[Difference]:
    """A fresh loader goes on where the state was saved, and says what it does."""
    epoch, step = job["cut"]
    ended = step < 0 or step > len(ran.epochs[epoch])
    if ended and epoch + 1 >= len(ran.epochs):
        return
    first = epoch + 1 if ended else epoch
    rest = ran.epochs[first][0 if ended else step :]
    seed_all(job["draw"] + 77)
    again = open_world(job, folder, changed=job["kind"] == "mixture")
    try:
        loader = loader_of(job, again.make(), again=True)
        own = job["sampler"] in ("own", "pairs")
        same_begin = own and begin_of(loader, step) == begin_of(
            loader_of(job, open_world(job, folder).make()), step
        )
        following = ran.epochs[first + 1 : first + 2]
        epochs = 2 if job["ask"] or following else 1
        resumed = run(job, loader, slow, first=first, epochs=epochs, saved=ran.state)
    except ArgumentError as error:
        if job["restart"] == "same":
            yield Difference("resume", f"refused: {error}")
        return
    events = resumed.epochs[0]
    if any(event.error == "ArgumentError" for event in events) and job["restart"] == "other":
        return
    may_differ = job["restart"] == "other" and (job["kind"] == "mixture" or job["sampler"] == "node")
    if ended or step == 0:
        # An epoch that has not begun is read as streams, or by index, as the cache allows when it begins, and
        # its streams are those of its workers.
        may_differ |= streamed(job) and (job["cache"] != "none" or job["workers"] != job["resume_workers"])
    # Another order of one's own is noticed by what was handed out of this epoch, and by nothing else.
    may_differ |= job["restart"] == "other" and own and (ended or step == 0 or same_begin)
    if not may_differ:
        if (ended or (step == 0 and not job["begun"])) and job["seed"] is None and draws(job, slow):
            # The randomness of an epoch is drawn when it begins: its order is known, its crops are not.
            given = [slow.again(event) for event in events], [slow.again(event) for event in rest]
            if text := unlike(*given):
                yield Difference("resume", f"from epoch {epoch} step {step} on: {text[:300]}")
        elif text := unlike(plain([events]), plain([rest])):
            yield Difference("resume", f"from epoch {epoch} step {step} on: {text[:300]}")
        elif resumed.digests[:1] != ran.digests[first : first + 1]:
            yield Difference("digest", f"of the run that resumed at epoch {epoch} step {step}")
        if following and job["sampler"] in FIXED and not streamed(job) and not text:
            given = (
                [[slow.again(event) for event in events] for events in side]
                for side in (resumed.epochs[1:], following)
            )
            if text := unlike(*given):
                yield Difference("resume", f"the epoch after the resumed one: {text[:300]}")
    if job["sampler"] == "node" and job["restart"] == "other" and job["skip"]:
        return  # a skipped step of two ranks is two steps of one
    for when, said_epoch, said_step, said in resumed.said:
        events = resumed.epochs[said_epoch - first]
        begin = step if said_epoch == epoch and not ended else 0
        at = steps_of(job, said_epoch, STEPS)[begin:]
        if said_step in at and at.index(said_step) < len(events):
            event = events[at.index(said_step)]
            found = None if event.error else numbers_in(job, event)
            found = [found] if isinstance(found, int) else found
            if found is not None and (
                len(said) != len(found) or any(a not in (None, b) for a, b in zip(said, found, strict=False))
            ):
                text = f"epoch {said_epoch} step {said_step}: said {said}, handed out {found}"
                yield Difference(f"samples_at {when}, resumed", text)


def draws(job: Job, slow: Slow) -> bool:
    """Whether something but the order is random."""
    bad = bool(slow.errors()) and job["on_error"] == "replace"
    return job["transform"] in ("drawn", "fuse") or bool(job["exclude"]) or bad


def judge_change(job: Job, folder: Path) -> Iterable[Difference]:
    """The same script after a change of the bucket sees the bucket as it is."""
    job = job | {"sampler": "sequential", "cut": None, "ask": False, "skip": [], "exclude": [], "epochs": 1}
    world = open_world(job, folder, changed=True)
    seed_all(job["draw"])
    order = torch_order(job, len(world.slow))
    slow = Slow(job, world.slow)
    for different in judge_epochs(job, slow, order, run(job, loader_of(job, world.make()), slow)):
        yield Difference("change", different.text)


def judge_iterable(job: Job, world: World) -> Iterable[Difference]:
    """An iterable dataset: torch's own loader is the oracle."""
    options = {"batch_size": job["batch_size"], "drop_last": job["drop_last"], "num_workers": job["workers"]}
    options |= {"collate_fn": _as_it_is} if job["collate"] == "list" else {}
    limited = [list(itertools.islice(iter_events(kind(world.make(), **options)), STEPS)) for kind in _LOADERS]
    text = unlike(*(plain([events]) for events in limited))
    if text:
        yield Difference("batch", text)


_LOADERS: tuple[Any, Any] = (fastload.DataLoader, torch.utils.data.DataLoader)


def iter_events(loader: Any) -> Iterable[Event]:
    iterator = iter(loader)
    while (event := next_event(iterator)) is not None:
        yield event
