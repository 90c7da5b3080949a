"""Manifests: the right objects in the right order, small and shared, made without harm to this process."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fastload.cache.listings import Listings
from fastload.cli.demo.s3_server import serve_s3
from fastload.errors import NotFoundError
from fastload.store import listing, open_store
from fastload.store.base import ObjectInfo, Page, Store
from fastload.store.listing import ListingQuery, Selection, list_objects
from fastload.store.manifest import Manifest
from tests.commands import script
from tests.faultserver import LIST, Fault, FaultServer
from tests.patience import PATIENCE, wait_until
from tests.shortform import stress
from tests.storedata import write

pytestmark = pytest.mark.usefixtures("no_aws_settings")
FILES = {
    "cat/2.jpg": b"22",
    "cat/10.JPEG": b"1010",
    "cat/sub/a.png": b"a",
    "cat/sub-b/c.png": b"c",
    "cat/sub.png": b"s",
    "cat/notes.txt": b"not an image",
    "cat-2/x.webp": b"x",
    "Dog/é.tiff": b"",
    "dog/1.jpg": b"1",
    "readme.md": b"",
    "top.jpg": b"no class",
}


def opened(
    store: Store, *, directory: Path | None = None, max_age: float | str = "1d", **asked: Any
) -> Manifest:
    return Listings(directory, max_age).open(store, ListingQuery(**asked))


class Listed(Store):
    """A store of given keys; each has its own size and version."""

    native = False

    def __init__(self, keys: list[str], *, page: int = 1000, identity: str = "listed") -> None:
        super().__init__("listed://x", identity)
        self.keys, self.page, self.listings = keys, page, 0

    def _list(self) -> Iterator[Page]:
        self.listings += 1
        for first in range(0, len(self.keys), self.page):
            yield [ObjectInfo(key, len(key), f"v-{key}") for key in self.keys[first : first + self.page]]

    def _head(self, key: str) -> ObjectInfo:
        raise NotImplementedError

    _read = _read_range = _head  # type: ignore[assignment]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return Path(write(tmp_path / "tree", FILES))


def _keys(manifest: Manifest) -> list[str]:
    return [manifest.key(index) for index in range(len(manifest))]


def _as_torchvision(root: Path) -> list[tuple[str, int]]:
    """(key, label) in the order that torchvision's `make_dataset` documents."""
    samples = []
    for label, name in enumerate(sorted(entry.name for entry in root.iterdir() if entry.is_dir())):
        for directory, _, files in sorted(os.walk(root / name)):
            for file in sorted(files):
                if file.lower().endswith(listing.IMAGE_EXTENSIONS):
                    samples.append((str((Path(directory) / file).relative_to(root)), label))
    return samples


# --- Content and order --------------------------------------------------------------------------------------


def test_all_objects_in_key_order(tree: Path) -> None:
    store = open_store(tree)
    manifest = list_objects(store)
    assert _keys(manifest) == sorted(FILES)
    assert len(manifest) == len(FILES)
    assert manifest.total_bytes == sum(map(len, FILES.values()))
    assert manifest.labels is None and manifest.classes is None
    for index, key in enumerate(sorted(FILES)):
        assert manifest.size(index) == len(FILES[key]) == manifest.sizes[index]
        assert manifest.version(index) == store.head(key).version
    assert str(tree) not in repr(manifest)


def test_labels_and_order_are_those_of_torchvision(tree: Path) -> None:
    manifest = list_objects(open_store(tree), ListingQuery(labels=True))
    assert manifest.classes == ["Dog", "cat", "cat-2", "dog"]
    assert manifest.labels is not None and manifest.labels.dtype == np.int64
    found = [(manifest.key(i), manifest.label(i)) for i in range(len(manifest))]
    assert found == _as_torchvision(tree)
    for index, (key, _) in enumerate(found):
        assert manifest.size(index) == len(FILES[key])


def test_names_that_are_no_utf8_have_torchvisions_order(tmp_path: Path) -> None:
    for folder in ("\udc80", "é"):
        (tmp_path / folder).mkdir()
        for name in ("\udc80.jpg", "é.jpg", "\ue000.jpg"):
            (tmp_path / folder / name).touch()
    manifest = list_objects(open_store(tmp_path), ListingQuery(labels=True))
    found = [(manifest.key(i), manifest.label(i)) for i in range(len(manifest))]
    assert found == _as_torchvision(tmp_path)


@pytest.mark.parametrize("seed", range(8))
def test_any_tree_in_any_listing_order(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    letters = np.array(list("ab-./_é ~"))
    keys = set()
    while len(keys) < 60:
        parts = ["".join(random.choice(letters, random.integers(1, 4))) for _ in range(random.integers(2, 5))]
        parts = [re.sub(r"[./]", "", part) + "a" for part in parts]
        keys.add("/".join(parts) + random.choice([".jpg", ".PNG", ".jpg"]))
    write(tmp_path, dict.fromkeys(keys, b""))
    shuffled = [sorted(keys)[i] for i in random.permutation(len(keys))]
    manifest = list_objects(Listed(shuffled, page=7), ListingQuery(labels=True))
    assert [(manifest.key(i), manifest.label(i)) for i in range(len(manifest))] == _as_torchvision(tmp_path)
    assert [manifest.size(i) for i in range(len(manifest))] == [len(key) for key in _keys(manifest)]
    assert [manifest.version(i) for i in range(len(manifest))] == [f"v-{key}" for key in _keys(manifest)]
    assert _keys(list_objects(Listed(shuffled, page=7))) == sorted(keys)


@pytest.mark.parametrize(
    ("keys", "labels", "words"),
    [
        ([], False, "no objects there: check the prefix"),
        (["a.jpg"], True, "no class directories"),
        (["cat/1.jpg", "dog/1.txt", "elk/x/2.doc"], True, "no valid image for the classes 'dog', 'elk'"),
    ],
)
def test_nothing_to_read_is_an_error_in_words(keys: list[str], labels: bool, words: str) -> None:
    with pytest.raises(NotFoundError, match=words) as caught:
        list_objects(Listed(keys), ListingQuery(labels=labels))
    assert "listed://x" in str(caught.value) and caught.value.stage == "list"


def test_an_empty_directory_is_said_in_the_words_of_directories(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"this directory holds no files: check the path\n") as caught:
        list_objects(open_store(tmp_path))
    assert "prefix" not in str(caught.value) and "upload" not in str(caught.value)


# --- Kept and shared ----------------------------------------------------------------------------------------


def test_a_saved_manifest_is_used_until_refreshed(tmp_path: Path) -> None:
    store, kept = Listed(["a.jpg", "b.txt"]), tmp_path / "kept"
    for _ in range(3):
        assert _keys(opened(store, directory=kept)) == ["a.jpg", "b.txt"]
    assert store.listings == 1
    assert _keys(opened(store, directory=kept, selection=Selection(r".*\.jpg"))) == ["a.jpg"]
    assert store.listings == 2, "another selection is another manifest"
    store.keys.append("c.jpg")
    assert [len(opened(store, directory=kept, max_age=age)) for age in ("1d", 0, "1d")] == [2, 3, 3]
    assert len(opened(Listed(["z"], identity="other"), directory=kept)) == 1
    assert kept.stat().st_mode & 0o777 == 0o700
    assert len([*kept.glob("*.manifest")]) == 4, "an older listing is kept for states of it"


@pytest.mark.parametrize("where", ["magic", "format", "count", "keys", "end", "cut", "empty", "link"])
def test_a_damaged_manifest_is_listed_again(where: str, tmp_path: Path) -> None:
    store = Listed([f"{i:03d}.jpg" for i in range(100)])
    opened(store, directory=tmp_path)
    (path,) = tmp_path.glob("*.manifest")
    content = bytearray(path.read_bytes())
    offset = {"magic": 0, "format": 8, "count": 24, "keys": 3000, "end": len(content) - 1}.get(where)
    if offset is not None:
        content[offset] ^= 1
    path.unlink()
    if where == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes({"cut": content[:-9], "empty": b""}.get(where, content))
    assert _keys(opened(store, directory=tmp_path)) == store.keys
    assert store.listings == 2


@pytest.mark.stress
def test_guard_removed_damage_comes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would fail without the checksum."""
    store = Listed(["a.jpg", "b.jpg"])
    opened(store, directory=tmp_path)
    (path,) = tmp_path.glob("*.manifest")
    path.write_bytes(path.read_bytes().replace(b"a.jpgb.jpg", b"a.jpgX.jpg"))
    monkeypatch.setattr("fastload.store.manifest._is_whole", lambda descriptor: True)
    assert _keys(opened(store, directory=tmp_path)) == ["a.jpg", "X.jpg"]


def test_a_directory_that_cannot_be_used_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert len(opened(Listed(["a"]), directory=tmp_path / "file")) == 1


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **folders: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        opened(Listed(["a"]), directory=tmp_path)
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def _check_in_child(manifest: Manifest, expected: list[str]) -> None:
    assert _keys(manifest) == expected
    assert not manifest.sizes.flags.writeable


@pytest.mark.parametrize(
    ("method", "saved"),
    [*itertools.product(["fork", "forkserver"], [False, True]), *stress(("spawn", True))],
)
def test_processes_share_it(method: str, saved: bool, tmp_path: Path) -> None:
    """Whether it was made in memory, or saved to a file."""
    store = Listed([f"{i:03d}.jpg" for i in range(100)])
    directory = tmp_path if saved else None
    manifest = opened(store, directory=directory)
    if saved:
        manifest = opened(store, directory=directory)
        for path in tmp_path.iterdir():
            path.unlink()  # a refresh by another run replaces the file; what is open stays as it was
    process = multiprocessing.get_context(method).Process(target=_check_in_child, args=(manifest, store.keys))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0


def test_copies_and_pickles() -> None:
    manifest = list_objects(Listed(["a", "b"]))
    assert copy.deepcopy(manifest) is manifest
    again = pickle.loads(pickle.dumps(manifest))
    assert _keys(again) == ["a", "b"] and again.version(1) == "v-b"


def test_nothing_stays_open(no_leaks: None, tmp_path: Path) -> None:
    for _ in range(3):
        pickle.loads(pickle.dumps(opened(Listed(["a", "b"]), directory=tmp_path)))


class Many(Listed):
    def __init__(self, count: int) -> None:
        super().__init__([], identity="many")
        self.count = count

    def _list(self) -> Iterator[Page]:
        for first in range(0, self.count, 1000):
            numbers = range(first, first + 1000)
            yield [ObjectInfo(_name(i), 100_000 + i % 7, f"{i:032x}") for i in numbers]


def _name(number: int) -> str:
    return f"train/n{number // 1300:08d}/n{number // 1300:08d}_{number:08d}.JPEG"


@pytest.mark.parametrize("count", [200_000, pytest.param(1_000_000, marks=pytest.mark.stress)])
def test_many_keys(count: int, tmp_path: Path) -> None:
    """Listed in memory near the bytes of the names; opened again in less than a second, for few megabytes."""
    names = count * (44 + 32)
    before = psutil.Process().memory_info().rss
    peak = [0]

    def watch(listed: int) -> None:
        if listed % 50_000 == 0:
            peak[0] = max(peak[0], psutil.Process().memory_info().rss - before)

    list_objects(Many(count), progress=watch).save(tmp_path / "m")
    assert peak[0] < 3 * names
    code = """if True:
        import os, sys, time, psutil
        from pathlib import Path
        from fastload.store.manifest import Manifest
        me = psutil.Process(); before = me.memory_info(); start = time.monotonic()
        manifest = Manifest.load(Path(sys.argv[1]), "many")
        spent = time.monotonic() - start; after = me.memory_info()
        private = (after.rss - after.shared) - (before.rss - before.shared)
        print(len(manifest), manifest.key(len(manifest) - 1), spent, private)
    """
    found, last, spent, private = script(code, tmp_path / "m").split()
    assert (int(found), last) == (count, _name(count - 1))
    assert float(spent) < 10, "it is mapped, not read"
    assert int(private) < 4_000_000


# --- In the trainer ------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, threading, time
from fastload.errors import FastloadError
from fastload.store import open_store
from fastload.store.listing import ListingProgress, ListingQuery, list_objects
options = {"key": sys.argv[1], "secret": sys.argv[2], "endpoint_url": sys.argv[3]}
if sys.argv[4]:
    options["client"] = sys.argv[4]
def run(url="s3://bucket", **arguments):
    try:
        with ListingProgress(url) as progress:  # as `Listings.open`, which imports torch
            manifest = list_objects(open_store(url, **options), ListingQuery(**arguments), progress)
        print("listed", len(manifest), manifest.key(len(manifest) - 1))
    except FastloadError as error:
        print(type(error).__name__, str(error).replace(chr(10), " | "))
    print("clean", "s3fs" not in sys.modules, "obstore" not in sys.modules, threading.active_count())
"""


def _run(body: str, server: Any, client: str = "") -> list[str]:
    return script(SCRIPT + body, *_place(server), client).splitlines()


def _place(server: Any) -> list[str]:
    return [server.options["key"], server.options["secret"], server.options["endpoint_url"]]


@pytest.mark.parametrize("client", ["", "s3fs"])
def test_the_listing_leaves_this_process_fork_safe(client: str, tree: Path, tmp_path: Path) -> None:
    tree.rename(tmp_path / "bucket")
    with serve_s3(tmp_path) as server:
        said = _run("run(labels=True)\nrun('s3://nobucket')\nrun('s3://bucket/nothing')\n", server, client)
    assert said[0] == "listed 8 dog/1.jpg"
    assert said[2].startswith("NotFoundError [list] bucket 'nobucket' does not exist")
    assert said[4].startswith("NotFoundError [list] 's3://bucket/nothing': no objects there")
    assert said[1::2] == ["clean True True 1"] * 3


def test_threads_beside_the_fork_are_no_warning() -> None:
    """Python 3.12 and later warn of a fork beside threads; the script turns warnings into errors."""
    with FaultServer({"a": b"1"}) as server:
        said = _run("threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\nrun()\n", server)
    assert said == ["listed 1 a", "clean True True 2"]


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_listing_ends_with_its_trainer(number: int) -> None:
    with FaultServer({"a": b"1"}) as server:
        server.script(LIST, None, Fault(delay=60), repeat=True)
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT + "run()\n", *_place(server), ""],
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        wait_until(lambda: server.count(LIST) >= 2, "it waits for the second page")
        (client,) = [psutil.Process(pid) for pid in psutil.pids() if _group(pid) == process.pid != pid]
        process.send_signal(number)
        _, stderr = process.communicate(timeout=PATIENCE)
        assert psutil.wait_procs([client], timeout=PATIENCE)[1] == []
    if number == signal.SIGINT:
        assert stderr.rstrip().endswith("KeyboardInterrupt") and stderr.count("Traceback") == 1


def test_progress_is_a_line_on_a_terminal_and_a_log_line_elsewhere() -> None:
    import pty

    body = (
        "import logging; from fastload.store import listing; listing._QUIET_SECONDS = 0.0\n"
        "logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stdout)\nrun()\n"
    )
    with FaultServer({f"{i:03d}": b"1" for i in range(30)}, page_size=10) as server:
        assert "listing s3://bucket: 30 objects" in _run(body, server)
        controller, terminal = pty.openpty()
        words = [sys.executable, "-c", SCRIPT + body.replace(", stream=sys.stdout", ""), *_place(server), ""]
        assert (
            subprocess.run(words, stderr=terminal, stdout=subprocess.DEVNULL, timeout=PATIENCE).returncode
            == 0
        )
        os.close(terminal)
        shown = os.read(controller, 65536).decode()
        os.close(controller)
    assert "listing s3://bucket: 30 objects" in shown


def test_progress_where_stderr_is_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training scripts put in its place what can write, and daemons have none."""
    from fastload.store.listing import ListingProgress

    class Tee:
        def write(self, text: str) -> int:
            return len(text)

    monkeypatch.setattr("fastload.store.listing._QUIET_SECONDS", 0.0)
    for other in (Tee(), None):
        monkeypatch.setattr(sys, "stderr", other)
        with ListingProgress("s3://bucket") as progress:
            progress(1000)


# --- Whose it is


def planted(store: Listed, folder: Path) -> Path:
    """A listing as somebody else would write it: sound, and wrong."""
    opened(Listed(["dog/a.jpg", "wolf/b.jpg"], identity=store.identity), directory=folder, labels=True)
    (path,) = folder.glob("*.manifest")
    return path


@pytest.mark.parametrize("what", ["folder", "file"])
@pytest.mark.parametrize("how", ["of another user", "for the group", "for everybody"])
def test_a_listing_that_others_can_have_written_is_not_read(
    what: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "of another user" and os.geteuid() != 0:
        pytest.skip("needs root to change owners")
    store = Listed(["cat/a.jpg", "dog/b.jpg"])
    path = planted(store, tmp_path / "kept")
    target = path if what == "file" else path.parent
    if how == "of another user":
        os.chown(target, 2000, 2000)
    else:
        target.chmod(target.stat().st_mode | {"for the group": 0o020, "for everybody": 0o002}[how])
    if what == "folder":
        with pytest.warns(UserWarning, match="cannot be kept"):
            manifest = opened(store, directory=path.parent, labels=True)
    else:
        manifest = opened(store, directory=path.parent, labels=True)
        assert opened(store, directory=path.parent, labels=True).classes == ["cat", "dog"]
        assert store.listings == 1, "it was replaced by one of ours"
    assert manifest.classes == ["cat", "dog"] and store.listings == 1
    assert "is not used" in caplog.text and str(target) in caplog.text


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
def test_a_listing_of_roots_is_read_by_others() -> None:
    """A cache that was filled by an administrator."""
    store = Listed(["cat/a.jpg", "dog/b.jpg"])
    with tempfile.TemporaryDirectory() as name:
        kept = Path(name) / "kept"
        opened(store, directory=kept, labels=True)
        for path in (kept.parent, kept, *kept.iterdir()):
            path.chmod(0o755)
        store.listings = 0
        process = multiprocessing.get_context("fork").Process(target=_read_as_another, args=(store, kept))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0


def _read_as_another(store: Listed, folder: Path) -> None:
    os.setgid(2000)
    os.setuid(2000)
    assert opened(store, directory=folder, labels=True).classes == ["cat", "dog"] and store.listings == 0


@pytest.mark.parametrize("plant", ["link", "fifo"])
def test_a_listing_that_is_no_file_is_not_read(plant: str, tmp_path: Path) -> None:
    store = Listed(["cat/a.jpg", "dog/b.jpg"])
    path = planted(store, tmp_path / "kept")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere") if plant == "link" else os.mkfifo(path)
    assert opened(store, directory=tmp_path / "kept", labels=True).classes == ["cat", "dog"]
