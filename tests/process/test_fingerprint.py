"""The keys of `decode=` and `cached()`: what changes the samples changes the key, and nothing else does."""

from __future__ import annotations

import compileall
import dataclasses
import enum
import functools
import io
import logging
import multiprocessing
import os
import runpy
import sys
import tarfile
import textwrap
import threading
import types
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import fastload
from fastload import Cache, ImageFolder, ObjectDataset, TarDataset, TFRecordDataset, cached
from fastload.datasets.fingerprint import describe
from fastload.errors import ArgumentError
from tests.commands import script
from tests.patience import PATIENCE
from tests.photos import pillow_jpeg, scene
from tests.storedata import write

pytestmark = pytest.mark.usefixtures("no_leaks")


def scale(data: bytes, k: int = 1) -> int:
    return len(data) * k


def other_scale(data: bytes, k: int = 1) -> int:
    return len(data) + k


class Scale:
    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, data: bytes) -> int:
        return scale(data, self.k)

    def run(self, data: bytes) -> int:
        return scale(data, self.k)


class Slots:
    __slots__ = ("k",)

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, data: bytes) -> int:
        return self.k


@dataclasses.dataclass
class Settings:
    k: int
    names: tuple[str, ...] = ()
    more: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, data: bytes) -> int:
        return self.k


class Mode(enum.Enum):
    SMALL = 1
    LARGE = 2


class Flags(enum.Flag):
    A = 1
    B = 2
    C = 4


Point = namedtuple("Point", "x y")


def closure(k: Any) -> Callable[[bytes], Any]:
    return lambda data: k


def with_default(k: int) -> Callable[..., int]:
    return lambda data, k=k: k


def with_kwdefault(k: int) -> Callable[..., int]:
    def decode(data: bytes, *, k: int = k) -> int:
        return k

    return decode


def made_by(code: str) -> Any:
    """`decode` as a module of the user's has it."""
    names: dict[str, Any] = {"__name__": "mine"}
    exec(textwrap.dedent(code), names)
    return names["decode"]


def wrapped(k: int) -> Any:
    @functools.lru_cache
    def decode(data: bytes) -> int:
        return k

    return decode


def in_a_class(k: int) -> Any:
    class Decoder:
        factor = k

        @classmethod
        def of_class(cls, data: bytes) -> int:
            return cls.factor

    return Decoder.of_class


def network(*names: str) -> torch.nn.Sequential:
    torch.manual_seed(0)
    made = {"a": torch.nn.Linear(2, 2), "b": torch.nn.ReLU()}
    return torch.nn.Sequential(OrderedDict((name, made[name]) for name in names))


def cycle(k: int) -> list[Any]:
    items: list[Any] = [k]
    items.append(items)
    return items


PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "arguments of a partial": lambda: (functools.partial(scale, k=1), functools.partial(scale, k=2)),
    "function of a partial": lambda: (functools.partial(scale), functools.partial(other_scale)),
    "positional argument": lambda: (functools.partial(scale, b"a"), functools.partial(scale, b"b")),
    "attribute": lambda: (Scale(1), Scale(2)),
    "slot": lambda: (Slots(1), Slots(2)),
    "bound method": lambda: (Scale(1).run, Scale(2).run),
    "method's name": lambda: (Scale(1).run, Scale(1).__call__),
    "closure": lambda: (closure(1), closure(2)),
    "closure's type": lambda: (closure(1), closure(True)),
    "default": lambda: (with_default(1), with_default(2)),
    "keyword default": lambda: (with_kwdefault(1), with_kwdefault(2)),
    "lambdas on one line": lambda: (lambda d: 64, lambda d: 128),
    "function behind lru_cache": lambda: (wrapped(1), wrapped(2)),
    "class attribute": lambda: (in_a_class(1), in_a_class(2)),
    "dataclass": lambda: (Settings(1), Settings(2)),
    "nested dataclass": lambda: (closure(Settings(1, ("a",))), closure(Settings(1, ("b",)))),
    "enum": lambda: (closure(Mode.SMALL), closure(Mode.LARGE)),
    "flags": lambda: (closure(Flags.A | Flags.B), closure(Flags.A | Flags.C)),
    "path": lambda: (closure(Path("/a")), closure(Path("/b"))),
    "array": lambda: (closure(np.arange(4)), closure(np.arange(4)[::-1])),
    "array's dtype": lambda: (closure(np.zeros(4, "<i4")), closure(np.zeros(4, "<f4"))),
    "array's shape": lambda: (closure(np.zeros((2, 3))), closure(np.zeros((3, 2)))),
    "array of objects": lambda: (closure(np.array([{}, 1])), closure(np.array([{}, 2]))),
    "numpy scalar": lambda: (closure(np.float32(1)), closure(np.float64(1))),
    "datetime64": lambda: (closure(np.datetime64("2020")), closure(np.datetime64("2021"))),
    "tensor": lambda: (closure(torch.zeros(4)), closure(torch.ones(4))),
    "tensor's dtype": lambda: (closure(torch.zeros(4)), closure(torch.zeros(4, dtype=torch.int32))),
    "weight of a network": lambda: (network("a", "b").eval(), _changed(network("a", "b").eval())),
    "order of layers": lambda: (network("a", "b"), network("b", "a")),
    "eval and train": lambda: (network("a").train(), network("a").eval()),
    "set": lambda: (closure({1, 2}), closure({1, 3})),
    "set and list": lambda: (closure({1}), closure([1])),
    "dict": lambda: (closure({"a": scale}), closure({"a": other_scale})),
    "order of a dict": lambda: (
        closure({"a": scale, "b": other_scale}),
        closure({"b": other_scale, "a": scale}),
    ),
    "namedtuple": lambda: (closure(Point(1, scale)), closure(Point(2, scale))),
    "list of functions": lambda: (closure([scale]), closure([other_scale])),
    "cycle": lambda: (closure(cycle(1)), closure(cycle(2))),
    "constant": lambda: (made_by("decode = lambda d: 1"), made_by("decode = lambda d: 2")),
    "method taken": lambda: (
        made_by("decode = lambda d: d.upper()"),
        made_by("decode = lambda d: d.lower()"),
    ),
    "global": lambda: (made_by("K = 1\ndef decode(d): return K"), made_by("K = 2\ndef decode(d): return K")),
    "helper": lambda: (made_by(HELPED.format(1)), made_by(HELPED.format(2))),
    "helper in a comprehension": lambda: (made_by(NESTED.format(1)), made_by(NESTED.format(2))),
    "base class": lambda: (made_by(BASED.format(1)), made_by(BASED.format(2))),
    "function of a library": lambda: (np.sum, np.mean),
    "method of a builtin": lambda: (bytes.upper, bytes.lower),
    "object that a builtin method is bound to": lambda: (b"a".join, b"b".join),
    "C object": lambda: (closure(np.random.default_rng(1)), closure(np.random.default_rng(2))),
}
HELPED = """
    def deeper(d): return {}
    def helper(d): return deeper(d) if d else decode(d)
    def decode(d): return helper(d)
"""
NESTED = """
    def helper(d): return {}
    def decode(d): return [(lambda: helper(x))() for x in d]
"""
BASED = """
    class Base:
        def __call__(self, d): return {}
    class Decoder(Base):
        pass
    decode = Decoder()
"""


def _changed(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        next(module.parameters())[0, 0] += 1
    return module


@pytest.mark.parametrize("case", PAIRS)
def test_what_makes_other_samples_has_another_text(case: str) -> None:
    one, two = PAIRS[case]()
    again, _ = PAIRS[case]()
    assert describe(one, "decode") != describe(two, "decode")
    assert describe(one, "decode") == describe(again, "decode") == describe(one, "decode")


PROGRAM = """
{blank}import functools, re, types
from pathlib import Path
import numpy as np, torch
from fastload.datasets.fingerprint import describe
import helpers

NAMES = {{"b", "a", "c"}}
class Decoder:
    sizes = frozenset(["x", "y", "z"])
    def __init__(self):
        self.where, self.pattern, self.kinds = Path("/data"), re.compile("a+"), {{"u", "v", ("w", 1)}}
        self.module = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.zeros_(self.module.weight)
        self.partial = functools.partial(helpers.help, np.arange(3), key=lambda x: x in {{"p", "q", "r"}})
        self.object = types.SimpleNamespace(a=object(), b=..., c=range(3), d=torch.float16, e=np.float32)
    def __call__(self, data):
        import json, PIL.Image
        from lazy import helper
        assert data in NAMES
        return self.partial(data), helper(json.loads(data)), helpers.SIZE, Decoder
decode = Decoder()
first = describe(decode, "decode")
if {calls}:
    for _ in range(200):  # Python specialises the code
        decode.partial.keywords["key"]("p")
assert describe(decode, "decode") == first
print(first)
"""


def test_it_is_the_same_in_every_process_and_run(tmp_path: Path) -> None:
    """Whatever the hash seed is, where the file lies, at which line, and whether it came from a .pyc."""
    found = []
    for number in range(2):
        folder = tmp_path / ("first", "second")[number]
        folder.mkdir()
        (folder / "helpers.py").write_text(
            "SIZE = 3\ndef help(*a, **k): return a in {(1, 2), (1, ('x', 3))}\n"
        )
        (folder / "lazy.py").write_text("def helper(x): return x\n")
        (folder / "program.py").write_text(PROGRAM.format(blank="\n" * number, calls=number))
        if number == 0:  # a fork has the hash seed of this process, which is random
            process = multiprocessing.get_context("fork").Process(target=_run_program, args=(folder,))
            process.start()
            process.join(PATIENCE)
            process.close()
            found.append((folder / "out").read_text())
        else:
            assert compileall.compile_dir(folder, quiet=1)
            variables = {"PYTHONHASHSEED": "1", "PYTHONPATH": f"{_ROOT}:{folder}"}
            found.append(script("import program", environment=os.environ | variables))
    assert len(set(found)) == 1 and found[0], found


def _run_program(folder: Path) -> None:
    for name in ("helpers", "lazy"):  # of other tests
        sys.modules.pop(name, None)
    sys.path.insert(0, str(folder))
    with (folder / "out").open("w") as out, redirect_stdout(out):
        runpy.run_path(str(folder / "program.py"), run_name="__main__")


_ROOT = Path(fastload.__file__).parents[1]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ("helpers.py", "SIZE = 4\ndef help(x): return x\n"),
        ("helpers.py", "SIZE = 3\ndef help(x): return -x\n"),
        ("lazy.py", "def helper(x): return -x\n"),
        ("pack/inner.py", "K = 2\n"),
    ],
)
def test_a_module_of_the_users_own_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, text: str
) -> None:
    """By what is taken of it; where it is imported only when the function runs, by its file."""
    files = {
        "helpers.py": "SIZE = 3\ndef help(x): return x\n",
        "lazy.py": "def helper(x): return x\n",
        "pack/__init__.py": "",
        "pack/inner.py": "K = 1\n",
        "main.py": """
import helpers
def decode(x):
    import lazy
    from pack import inner
    return helpers.help(x), helpers.SIZE, lazy.helper(x), inner.K
""",
    }
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for content in (files, files, files | {changed: text}, files | {"unrelated.py": "x = 1"}):
        for name, written in content.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(written)
        for name in ("helpers", "lazy", "main", "pack", "pack.inner"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        found.append(describe(__import__("main").decode, "decode"))
    assert found[0] == found[1] == found[3] != found[2]


def test_what_a_library_is_made_of_is_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = functools.partial(np.frombuffer, dtype=np.uint8)
    first = describe(decode, "decode")
    monkeypatch.setattr("fastload.datasets.fingerprint.library", lambda module: "another version")
    assert describe(decode, "decode") != first


def locked() -> Any:
    decoder = Scale(1)
    decoder.model = types.SimpleNamespace(lock=threading.Lock())  # type: ignore[attr-defined]
    return decoder


LOCK = threading.Lock()


def uses_a_lock(data: bytes) -> bytes:
    with LOCK:
        return data


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (locked, r"decode\.model\.lock is a _thread\.lock"),
        (lambda: functools.partial(scale, {"a": [io.BytesIO(), Scale]}), None),
        (lambda: functools.partial(scale, k=threading.Lock()), r"decode\.keywords\['k'\] is a _thread\.lock"),
        (
            lambda: closure([1, (2, iter([3]), sys._getframe())]),
            r"decode\.__closure__\['k'\]\[1\]\[2\] is a builtins\.frame",
        ),
        (lambda: uses_a_lock, r"decode\.__globals__\['LOCK'\] is a _thread\.lock"),
        (lambda: closure(torch.ones(2, device="meta")), r"__closure__\['k'\] is a torch\.Tensor"),
        (lambda: closure(i for i in range(3)), r"is a builtins\.generator"),
    ],
)
def test_what_cannot_be_described_is_refused_by_its_place(make: Callable[[], Any], words: str | None) -> None:
    if words is None:  # what pickles is described
        assert describe(make(), "decode") == describe(make(), "decode")
        return
    with pytest.raises(ArgumentError, match=words) as caught:
        describe(make(), "decode")
    assert "set decode.__fingerprint__ to a text" in caught.value.message


def test_an_open_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(ArgumentError, match=r"_io\.BufferedWriter"):
        describe(closure(file), "decode")


def test_loggers_tell_nothing_apart() -> None:
    assert describe(closure(logging.getLogger("a")), "x") == describe(closure(logging.getLogger("a")), "x")


def test_what_nests_too_deeply_is_refused() -> None:
    items: list[Any] = [object]
    for _ in range(100_000):
        items = [items]
    with pytest.raises(ArgumentError, match="nested too deeply"):
        describe(items, "dataset")
    while items:  # freed step by step, not by recursion
        items = items[0] if isinstance(items[0], list) else []


# --- The datasets that take `decode`


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "data", {str(i): b"x" * (i + 1) for i in range(3)})
    write(tmp_path / "images", {"a/0.jpg": pillow_jpeg(scene(20, 20, 0))})
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i in range(3):
            info = tarfile.TarInfo(f"{i}.bin")
            info.size = i + 1
            tar.addfile(info, io.BytesIO(b"x" * info.size))
    return tmp_path


def of_folder(folder: Path, decode: Any, text: str | None = None, **options: Any) -> list[Any]:
    if text is not None:
        decode.__fingerprint__ = text
    dataset = ObjectDataset(str(folder / "data"), decode=decode, **options)
    samples = [dataset[i] for i in range(3)]
    dataset._flush_cache()
    dataset.close()
    return samples


def of_tar(folder: Path, decode: Any, text: str | None = None, **options: Any) -> list[Any]:
    def of_fields(fields: dict[str, Any]) -> Any:
        return decode(fields["bin"])

    if text is not None:
        of_fields.__fingerprint__ = text  # type: ignore[attr-defined]
    dataset = TarDataset(str(folder / "a.tar"), decode=of_fields, **options)
    samples = [int(batch[0]) for batch in fastload.DataLoader(dataset, num_workers=0)]
    dataset._flush_cache()
    dataset.close()
    return sorted(samples)


@pytest.mark.parametrize("read", [of_folder, of_tar])
def test_another_decode_finds_nothing_of_the_one_before(folder: Path, read: Any) -> None:
    cache = Cache(folder / "cache", "decoded")
    assert read(folder, functools.partial(scale, k=1), cache=cache) == [1, 2, 3]
    assert read(folder, functools.partial(scale, k=10), cache=cache) == [10, 20, 30]
    assert cache.info()["entries"] == 6
    assert read(folder, functools.partial(scale, k=10), cache=cache) == [10, 20, 30]
    assert cache.info()["entries"] == 6, "the same decode finds its own"
    cache.close()


@pytest.mark.parametrize("read", [of_folder, of_tar])
def test_fingerprint_takes_the_place_of_the_description(folder: Path, read: Any) -> None:
    cache = Cache(folder / "cache", "decoded")
    assert read(folder, functools.partial(scale, k=1), cache=cache, text="a") == [1, 2, 3]
    assert read(folder, functools.partial(scale, k=9), cache=cache, text="a") == [1, 2, 3], "as stated"
    assert read(folder, functools.partial(scale, k=9), cache=cache, text="b") == [9, 18, 27]
    calls = Locked()
    with pytest.raises(ArgumentError, match=r"decode.*\.lock is a _thread\.lock"):
        read(folder, calls, cache=cache)
    assert read(folder, calls, cache=cache, text="c") == [1, 2, 3]
    cache.close()
    calls = Locked()
    assert read(folder, calls, cache=Cache(folder / "raw")) == [1, 2, 3], "mode raw keeps bytes: all may come"
    assert read(folder, calls) == [1, 2, 3]


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, data: bytes) -> int:
        with self.lock:
            return len(data)


def test_the_fingerprint_is_text(folder: Path) -> None:
    decode, cache = functools.partial(scale, k=1), Cache(folder / "cache", "decoded")
    decode.__fingerprint__ = 7  # type: ignore[attr-defined]
    for kind, url in ((ObjectDataset, "data"), (TarDataset, "a.tar"), (TFRecordDataset, "a.tar")):
        with pytest.raises(ArgumentError, match=r"decode\.__fingerprint__ must be a str, found 7"):
            kind(str(folder / url), decode=decode, cache=cache)


class Stated:
    """It says itself what its code does; its attributes are described."""

    __fingerprint__ = "stated 1"

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, data: bytes) -> int:
        return self.k * len(data)


def test_a_function_class_or_object_may_say_itself_what_it_does() -> None:
    def text(decode: Any) -> str:
        return describe(decode, "decode")

    one, two = Stated(1), Stated(2)
    assert text(one) == text(Stated(1)) != text(two), "the text stands for the class, not for its objects"
    other = type("Stated", (), {"__fingerprint__": "stated 1", "__call__": lambda self, data: 0})
    assert text(Stated) == text(other)
    other.__fingerprint__ = "stated 2"  # type: ignore[attr-defined]
    assert text(Stated) != text(other)
    one.__fingerprint__ = two.__fingerprint__ = "mine"
    assert text(one) == text(two) != text(Stated(1)), "of the object itself, it stands for all of it"

    def of_lock(data: bytes, lock: Any = threading.Lock()) -> int:  # noqa: B008
        return len(data)

    with pytest.raises(ArgumentError, match="lock"):
        text(functools.partial(of_lock, data=b""))
    of_lock.__fingerprint__ = "by length"  # type: ignore[attr-defined]
    whole = functools.partial(of_lock, data=b"")
    assert text(whole) != text(functools.partial(of_lock, data=b"1")), "inside of others too"


# --- Datasets, for `cached`


class Base(Dataset[int]):
    def __init__(self, k: int = 1, transform: Any = None) -> None:
        self.k = k
        self.transform = transform

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index * self.k


DATASETS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "indices": lambda: (Subset(Base(), [0, 1]), Subset(Base(), [0, 2])),
    "dataset of a subset": lambda: (Subset(Base(1), [0]), Subset(Base(2), [0])),
    "part": lambda: (ConcatDataset([Base(1), Base(2)]), ConcatDataset([Base(1), Base(3)])),
    "order of parts": lambda: (ConcatDataset([Base(1), Base(2)]), ConcatDataset([Base(2), Base(1)])),
    "tensors": lambda: (TensorDataset(torch.zeros(3)), TensorDataset(torch.ones(3))),
    "transform": lambda: (Base(transform=Scale(1)), Base(transform=Scale(2))),
    "list": lambda: ([1, 2], [1, 3]),
    "length": lambda: ([1, 2], [1, 2, 2]),
    "arrays in tuples": lambda: ([(np.zeros(2), 0)], [(np.ones(2), 0)]),
    "string dataset": lambda: (["a"], ["b"]),
}


@pytest.mark.parametrize("case", DATASETS)
def test_a_nested_dataset_is_told_apart(case: str, tmp_path: Path) -> None:
    one, two = DATASETS[case]()
    again, _ = DATASETS[case]()
    cache = Cache(tmp_path / "cache")
    assert cached(one, cache).fingerprint == cached(again, cache).fingerprint
    assert cached(one, cache).fingerprint != cached(two, cache).fingerprint


def test_a_dataset_of_fastload_is_described(folder: Path) -> None:
    def of(decode: Any) -> str:
        return cached(ObjectDataset(str(folder / "data"), decode=decode), folder / "cache").fingerprint

    assert of(scale) == of(scale) != of(other_scale)
    used = ObjectDataset(str(folder / "data"), decode=scale)
    before = cached(used, folder / "cache").fingerprint
    assert used[0] == 1
    assert cached(used, folder / "cache").fingerprint == before == of(scale), "reading changes nothing"
    used.close()


def test_what_a_dataset_of_fastload_learns_as_it_is_read_changes_no_fingerprint(folder: Path) -> None:
    """When it was listed, and whether from a kept listing; what a shard holds."""

    def of(dataset: Any) -> str:
        return cached(dataset, folder / "cache").fingerprint

    for kind, url in ((ImageFolder, folder / "images"), (TarDataset, folder / "a.tar")):
        first = kind(str(url), cache=folder / "kept")
        assert sum(1 for _ in fastload.DataLoader(first, None)) > 0  # shards are indexed by this
        first.close()
        before = of(kind(str(url), cache=folder / "kept"))
        again = kind(str(url), cache=folder / "kept")
        assert of(again) == before
        assert len(list(fastload.DataLoader(again, None))) > 0
        assert of(again) == before == of(kind(str(url), cache=folder / "kept", listing_max_age="1d"))
        again.close()
