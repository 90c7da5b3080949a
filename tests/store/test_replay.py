"""`fastload replay`: any step of a run from its checkpoint, by a loader that is made again from the state."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset

from fastload import (
    ByEpoch,
    CenterCrop,
    DataLoader,
    DistributedSampler,
    File,
    ImageFolder,
    Normalize,
    ObjectDataset,
    RandomResizedCrop,
    TableDataset,
)
from fastload.errors import ArgumentError
from fastload.trace.recipe import restore
from tests.commands import answer, command
from tests.faultserver import FaultServer
from tests.pins.cases import KINDS
from tests.pins.objects import ROOT, write_objects
from tests.sharddata import write

CROP = RandomResizedCrop(16, flip=0.5)
NORMALIZE = Normalize([0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
COUNT, BATCH = 24, 4
MADE_AGAIN = [
    *("ImageFolder", "ObjectDataset", "ParquetDataset", "MDSDataset", "LitDataset", "BetonDataset"),
    "TokenDataset",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images of one colour each, in two classes; the names hold what HTML has to escape."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(COUNT):
        path = root / ("cat", "dog")[number % 2] / f"<{number:02}> & é.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (40 + number, 30), (10 * number, 120, 255 - 10 * number)).save(path)
    return root


def shuffled(folder: Path) -> DataLoader[Any]:
    images: Any = ImageFolder(str(folder), CROP)
    return DataLoader(images, BATCH, shuffle=True, seed=3, batch_transform=NORMALIZE)


@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> Path:
    """The state of a shuffled run in its second epoch, in the checkpoint of a training."""
    loader = shuffled(folder)
    list(loader)
    next(iter(loader))
    torch.save({"model": torch.zeros(3), "loops": [{"train": loader.state_dict()}]}, tmp_path / "run.pt")
    return tmp_path / "run.pt"


def refusal(*arguments: object) -> str:
    result = command("replay", *arguments)
    assert result.exit_code == 2, result.output
    return str(result.stderr)


def as_json(samples: list[Any], rank: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(json.dumps([{"rank": rank, **one._asdict()} for one in samples]))
    return found


def saved_as(path: Path, state: Any) -> Path:
    path.write_text(json.dumps(state))
    return path


def test_rows_and_tensors_of_a_step_equal_what_the_run_handed_out(folder: Path, tmp_path: Path) -> None:
    loader = shuffled(folder)
    epochs = [list(loader), list(loader)]
    state = saved_as(tmp_path / "state.json", loader.state_dict())
    assert json.loads(state.read_text()) == loader.state_dict(), "no tuples, no keys that are not texts"
    for epoch, step in ((0, 5), (1, 0)):
        tensors = tmp_path / "batch.pt"
        document = answer("replay", state, "--step", step, "--epoch", epoch, "--tensors", tensors)
        assert document["samples"] == as_json(loader.samples_at(step, epoch))
        assert (document["missing"], document["notes"]) == (None, [])
        content = torch.load(tensors, weights_only=True)
        assert (content["epoch"], content["step"], content["ranks"]) == (epoch, step, [0])
        for found, handed_out in zip(content["batches"][0], epochs[epoch][step], strict=True):
            assert torch.equal(found, handed_out)


@pytest.mark.parametrize(
    "transform",
    [CenterCrop(16, resize=20, channels_last=True), ByEpoch({0: CROP, 1: RandomResizedCrop(8)})],
    ids=["centre", "by epoch"],
)
def test_objects_with_other_transforms_are_made_again(folder: Path, tmp_path: Path, transform: Any) -> None:
    loader = DataLoader(ObjectDataset(str(folder), transform=transform), BATCH, generator=torch.Generator())
    list(loader)
    batch = next(iter(loader))
    state = saved_as(tmp_path / "state.json", loader.state_dict())
    answer("replay", state, "--step", 0, "--tensors", tmp_path / "batch.pt")
    assert torch.equal(torch.load(tmp_path / "batch.pt")["batches"][0], batch)


@pytest.mark.parametrize("kind", [DistributedSampler, torch.utils.data.DistributedSampler])
def test_ranks_of_a_step_are_those_of_the_run(folder: Path, tmp_path: Path, kind: Any) -> None:
    dataset = ImageFolder(str(folder), CROP)
    loaders = [DataLoader(dataset, BATCH, sampler=kind(dataset, 3, rank), seed=1) for rank in range(3)]
    labels = [[batch[1].tolist() for batch in loader] for loader in loaders]
    state = saved_as(tmp_path / "state.json", loaders[1].state_dict())
    assert "give --rank 0 to 2, or --rank all" in refusal(state, "--step", 1, "--epoch", 0)
    assert "below the 3 ranks" in refusal(state, "--step", 1, "--epoch", 0, "--rank", 3)
    document = answer("replay", state, "--step", 1, "--epoch", 0, "--rank", "all")
    found = [[one["label"] for one in document["samples"] if one["rank"] == rank] for rank in range(3)]
    assert found == [of_rank[1] for of_rank in labels]
    document = answer("replay", state, "--step", 0, "--epoch", 0, "--rank", 1, "--world-size", 2)
    expected = DataLoader(dataset, BATCH, sampler=kind(dataset, 2, 1), seed=1).samples_at(0, 0)
    assert document["samples"] == as_json(expected, rank=1)


def test_sheets_show_each_image_before_batch_transform(saved: Path, tmp_path: Path) -> None:
    html, png = tmp_path / "step.html", tmp_path / "step.png"
    document = answer("replay", saved, "--step", 2, "--html", html, "--png", png)
    text = html.read_text()
    assert text.count("<img ") == BATCH and "&lt;" in text and 'src="data:image/png' in text
    assert not re.search(r"<\d\d>|https?://", text)  # nothing unescaped, nothing to be fetched
    sheet = np.asarray(Image.open(png).convert("RGB"))
    for sample in document["samples"]:
        number = int(sample["key"].partition("<")[2][:2])
        colour = np.array([10 * number, 120, 255 - 10 * number])
        assert (np.abs(sheet.astype(int) - colour).max(-1) < 8).sum() >= 128 * 128


def test_run_on_s3_is_replayed_with_its_endpoint_and_without_its_secrets(
    folder: Path, tmp_path: Path
) -> None:
    objects = {
        f"train/{path.parent.name}/{path.name[1:3]}.jpg": path.read_bytes() for path in folder.glob("*/*.jpg")
    }
    with FaultServer(objects) as server:
        dataset = ImageFolder("s3://bucket/train", CROP, storage_options=server.options)
        loader = DataLoader(dataset, BATCH, shuffle=True, seed=3)
        next(iter(loader))
        text = json.dumps(loader.state_dict())
        assert "fault-access-key" not in text and "fault-secret-key" not in text
        state = saved_as(tmp_path / "state.json", json.loads(text))
        assert repr(server.endpoint_url) in refusal(state, "--step", 3, "--anon")
        document = answer("replay", state, "--step", 3, "--anon", "--endpoint-url", server.endpoint_url)
        assert document["missing"] is None
        assert document["samples"] == as_json(loader.samples_at(3))
        dataset.close()


def test_data_that_moved_is_found_by_data(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.symlink_to(folder, target_is_directory=True)
    loader = DataLoader(ImageFolder(str(moved), CROP), BATCH)
    next(iter(loader))
    samples = as_json(loader.samples_at(0))
    state = saved_as(tmp_path / "state.json", loader.state_dict())
    moved.unlink()
    document = answer("replay", state, "--step", 0)
    assert [one["index"] for one in document["samples"]] == [0, 1, 2, 3]
    assert document["samples"][0]["key"] is None
    assert "does not exist" in document["missing"]
    assert "--html and --png: the data cannot be read" in refusal(
        state, "--step", 0, "--png", tmp_path / "x.png"
    )
    assert not (tmp_path / "x.png").exists()
    document = answer("replay", state, "--step", 0, "--data", folder)
    assert document["missing"] is None and document["samples"] == samples


def test_data_that_is_another_is_not_taken_for_the_runs(folder: Path, saved: Path, tmp_path: Path) -> None:
    for name, count, why in (
        ("fewer", 23, "has 23 samples, and the run had 24"),
        ("other", 24, "other names"),
    ):
        url = write(tmp_path / name, {f"{('cat', 'dog')[n % 2]}/{n}.jpg": b"" for n in range(count)})
        document = answer("replay", saved, "--step", 0, "--data", url)
        assert why in document["missing"]
        assert {one["key"] for one in document["samples"]} == {None}


LOADER = """
from torch.utils.data import Subset
from fastload import DataLoader, ImageFolder, RandomResizedCrop

def make_loader():
    dataset = Subset(ImageFolder({folder!r}, RandomResizedCrop(16, flip=0.5)), range(3, 23))
    return DataLoader(dataset, 4, shuffle=True, seed=3, collate_fn=list)

def broken():
    return {{}}["absent"]

def other():
    return [1, 2]
"""


def test_loader_of_the_user_is_run_where_the_state_does_not_tell(folder: Path, tmp_path: Path) -> None:
    train = tmp_path / "train_for_replay.py"
    train.write_text(LOADER.format(folder=str(folder)))
    dataset = Subset(ImageFolder(str(folder), CROP), range(3, 23))
    loader = DataLoader(dataset, 4, shuffle=True, seed=3, collate_fn=list)
    next(iter(loader))
    state = saved_as(tmp_path / "state.json", loader.state_dict())
    document = answer("replay", state, "--step", 1)
    assert "its dataset is a Subset: pass --loader" in document["missing"]
    assert [one["index"] for one in document["samples"]] == [one.index for one in loader.samples_at(1)]
    document = answer(
        "replay", state, "--step", 1, "--loader", f"{train}:make_loader", "--tensors", tmp_path / "b.pt"
    )
    assert document["samples"] == as_json(loader.samples_at(1))
    (content,) = torch.load(tmp_path / "b.pt", weights_only=True)["batches"]
    for (image, label), (known, known_label) in zip(content, loader.batch_at(1), strict=True):
        assert torch.equal(image, known) and label == known_label
    for name, why in (
        ("broken", "raised in line 10: KeyError: 'absent'"),
        ("other", "other() has to return a fastload.DataLoader, and returned a list"),
        ("absent", "has no function 'absent'"),
        ("no name", "write FILE.py:FUNCTION"),
    ):
        assert why in refusal(state, "--step", 1, "--loader", f"{train}:{name}")
    assert "leave out --data" in refusal(
        state, "--step", 1, "--loader", f"{train}:make_loader", "--data", folder
    )


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda root: DataLoader(ImageFolder(root, keys=["cat/<00> & é.jpg"])), "given keys="),
        (lambda root: DataLoader(ObjectDataset(root, decode=len)), "a decode= of your script"),
        (lambda root: DataLoader(ImageFolder(root, np.asarray)), "neither RandomResizedCrop"),
        (lambda root: DataLoader(ImageFolder(root, CROP, str)), "a target_transform= of your script"),
        (lambda root: DataLoader(ImageFolder(root, CROP), collate_fn=list), "collate_fn= is a function"),
        (lambda root: DataLoader(ImageFolder(root, CROP), batch_transform=list), "batch_transform= is a"),
    ],
    ids=["keys", "decode", "transform", "target_transform", "collate_fn", "batch_transform"],
)
def test_batch_of_the_users_functions_is_refused_with_the_reason(
    folder: Path, tmp_path: Path, make: Callable[[str], Any], why: str
) -> None:
    state = saved_as(tmp_path / "state.json", make(str(folder)).state_dict())
    message = refusal(state, "--step", 0, "--tensors", tmp_path / "batch.pt")
    assert why in message and "--loader FILE.py:FUNCTION" in message
    assert not (tmp_path / "batch.pt").exists()


def test_wrong_arguments_are_answered_in_words(saved: Path, tmp_path: Path) -> None:
    for words, why in (
        ("--step 99", "has no step 99"),
        ("--step 98 --epoch 7", "epoch 7 has no step 98"),
        ("--step 0 --rank 1", "were not dealt to ranks"),
        ("--step 0 --rank -1", "a number from 0 on, or 'all'"),
        ("--step 0 --rank 1 --world-size 2", "deals to one rank"),
        ("--step 0 --at x", "has no state of a loader at 'x', but at 'loops.0.train'"),
        (f"--step 0 --png {tmp_path}/absent/x.png", "cannot be written"),
    ):
        assert why in refusal(saved, *words.split())


def test_table_of_a_batch_without_images_is_shown_and_the_sheet_refused(tmp_path: Path) -> None:
    url = write(tmp_path / "data", dict.fromkeys((f"{number}.bin" for number in range(5)), b"abc"))
    loader = DataLoader(ObjectDataset(url), 2)
    next(iter(loader))
    state = saved_as(tmp_path / "state.json", loader.state_dict())
    result = command("replay", state, "--step", 1, "--tensors", tmp_path / "batch.pt")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines == ["epoch 0, step 1", "row index key", "0 2 2.bin", "1 3 3.bin"]
    assert torch.load(tmp_path / "batch.pt", weights_only=True)["batches"] == [[b"abc", b"abc"]]
    assert "the batch has no images" in refusal(state, "--step", 1, "--html", tmp_path / "x.html")


class Foreign:
    pass


def test_checkpoints_that_are_not_states_are_refused(saved: Path, tmp_path: Path) -> None:
    state = torch.load(saved, weights_only=True)["loops"][0]["train"]
    both = "has the states of 2 loaders, at '0', '1.b': choose one, as in --at 0"
    for name, content, why in (
        ("two", [state, {"b": state}], both),
        ("none", {"step": 3}, "has no state of a fastload.DataLoader"),
        ("class", {"a": Foreign(), "b": state}, "to read it could run code"),
        ("part", {key: state[key] for key in state if key != "recipe"}, "the state lacks ['recipe']"),
        ("version", state | {"version": 3}, "the state has version 3, this fastload reads version 2"),
        ("damaged", state | {"recipe": {"dataset": 3}}, "is damaged, or a newer fastload wrote it"),
    ):
        torch.save(content, tmp_path / name)
        assert why in refusal(tmp_path / name, "--step", 0)
    whole = saved.read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text").write_text("[1, 2")
    for name in ("cut", "text"):
        assert "neither JSON nor a whole file of torch.save" in refusal(tmp_path / name, "--step", 0)
    assert "No such file" in refusal(tmp_path / "absent", "--step", 0)
    torch.save([state, {"b": state}], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert answer("replay", tmp_path / "old.pt", "--step", 0, "--at", "1.b")["epoch"] == 1


def test_state_of_a_thousand_classes_stays_small(tmp_path: Path) -> None:
    url = write(tmp_path, {f"n{number:08}/a.jpg": b"" for number in range(1000)})
    listed = ImageFolder(url, CROP)
    state = DataLoader(ImageFolder(url, CROP, classes=listed.classes), BATCH).state_dict()
    assert "classes" not in state["recipe"]["dataset"]["arguments"]
    assert len(json.dumps(state)) < 3000
    turned = ImageFolder(url, CROP, classes=listed.classes[::-1])
    assert "1000 names as classes=" in DataLoader(turned, BATCH).state_dict()["recipe"]["dataset"]["why"]


def make_table(folder: Path) -> Any:
    rows = "\n".join(f"{n % 4}.jpg,{n},{n % 3 + 7}" for n in range(12))
    (folder / "table.csv").write_text(f"photo,number,stop\n{rows}\n")
    fields = {"image": File("photo"), "head": File("photo", range=(6, "stop")), "label": "number"}
    return TableDataset(str(folder / "table.csv"), fields, url=f"{ROOT}/photos", transform={"image": CROP})


@pytest.mark.parametrize("kind", [*MADE_AGAIN, "TableDataset"])
def test_state_makes_the_batches_of_any_kind_of_dataset_again(kind: str, tmp_path: Path) -> None:
    write_objects()
    dataset = make_table(tmp_path) if kind == "TableDataset" else KINDS[kind][0](None)
    loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, 1, 0), seed=3)
    list(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    made = restore(state)
    assert made[1:] == (None, None, None, [])
    again: Any = DataLoader(**made.arguments)
    again.load_state_dict(state)
    for step in (0, 1):
        torch.testing.assert_close(again.batch_at(step, 0), loader.batch_at(step, 0), rtol=0, atol=0)


def test_state_sets_no_argument_that_only_the_user_may_set() -> None:
    write_objects()
    whole = DataLoader(KINDS["MDSDataset"][0](None), BATCH).state_dict()
    fields = ({"File": 3}, {"File": []}, {"type": "object"}, {"pickle": "x"}, {"dtype": "O"}, {})
    for arguments in (
        *({"unsafe": True}, {"cache": "/tmp/x"}, {"decode": "x"}, {"keys": ["a"]}, {"xyz": 1}),
        {"storage_options": {"dict": {}}},
        *({"fields": wrong} for wrong in fields),
    ):
        state = copy.deepcopy(whole)
        state["recipe"]["dataset"]["arguments"] |= arguments
        with pytest.raises(ArgumentError, match="is damaged, or a newer fastload wrote it"):
            restore(state)


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part of a JSON value."""
    yield way
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*way, key))


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


HOSTILE = (
    *(None, True, "x", "9" * 5000, -1, 1.5, float("nan"), 2**63, 10**30, [], {}, [None], {"x": 1}, deep(300)),
)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.stress)])
def test_any_part_of_a_state_may_be_hostile_and_commands_answer_in_words(
    folder: Path, tmp_path: Path, every: int
) -> None:
    """Each part is one of the hostile values, in turn: no traceback, whatever it is taken for."""
    dataset = ImageFolder(str(folder), ByEpoch({0: CROP, 1: CenterCrop(8)}))
    loader = DataLoader(
        dataset, BATCH, sampler=DistributedSampler(dataset, 2, 0), seed=1, batch_transform=NORMALIZE
    )
    list(loader)
    loader.skip([1])
    loader.exclude([3])
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    right, wrong = saved_as(tmp_path / "right.json", state), tmp_path / "wrong.json"
    for number, (*way, key) in [*enumerate(way for way in places(state) if way)][::every]:
        value, hostile = HOSTILE[7 * number % len(HOSTILE)], copy.deepcopy(state)
        part = hostile
        for one in way:
            part = part[one]
        part[key] = value
        saved_as(wrong, hostile)
        words = ["replay", wrong, "--step", 0, "--rank", "all"]
        if "digest" in (*way, key):
            words = ["prove", wrong, right]
        result = command(*words)
        assert isinstance(result.exception, SystemExit | None), (*way, key, value, result.exception)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"length": 10**12, "data": None}, "says that there are 1,000,000,000,000 samples"),
        ({"excluded": [[0, 10**15]]}, "leaves out all 24 samples"),
        ({"excluded": [[3, 3], [-(10**15), 5], [10**14, 10**15]]}, ""),
        ({"world": 10**9}, "give one of them"),
    ],
)
def test_false_numbers_of_a_state_take_no_memory(
    saved: Path, tmp_path: Path, entries: dict[str, Any], why: str
) -> None:
    state = torch.load(saved, weights_only=True)["loops"][0]["train"]
    arguments: list[Any] = ["--step", 0]
    if "length" in entries:
        state["length"] = state["recipe"]["sampler"]["num_samples"] = entries["length"]
        arguments += ["--data", tmp_path / "absent"]
    if "excluded" in entries:
        samples = {"": entries["excluded"]}
        excluded = {"epoch": 0, "step": 0, "ahead": [], "samples": samples}
        state["exclusions"] = {"excluded": [excluded], "skipped": []}
    if "world" in entries:
        for order in state["history"]:
            order["replicas"] = entries["world"]
        arguments += ["--rank", "all"]
    result = command("replay", saved_as(tmp_path / "state.json", state), *arguments)
    assert isinstance(result.exception, SystemExit | None) and why in result.stderr, result.output


def test_checkpoint_in_itself_or_of_many_levels_is_answered_in_words(saved: Path, tmp_path: Path) -> None:
    loop: list[Any] = []
    loop += [loop, loop, {"a": loop}]
    torch.save(loop, tmp_path / "loop")
    torch.save(deep(150), tmp_path / "deep")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name, why in (
        ("loop", "has no state of a fastload.DataLoader"),
        ("deep", "has more than 100 levels"),
        ("deep.json", "neither JSON nor a whole file"),
    ):
        assert why in refusal(tmp_path / name, "--step", 0)
        result = command("prove", tmp_path / name, saved)
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
