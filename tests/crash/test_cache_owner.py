"""Whose a cache directory is: made for this user only, and nothing read that others can have written."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tempfile
import warnings
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from fastload import Cache, DataLoader, ImageFolder, ObjectDataset, TarDataset
from tests.storedata import write

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return Path(write(tmp_path / "photos", dict.fromkeys(("cat/1.jpg", "dog/1.jpg"), b"\xff\xd8\xff\xd9")))


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for i in range(5):
            info = tarfile.TarInfo(f"{i}.txt")
            info.size = 1
            file.addfile(info, io.BytesIO(str(i).encode()))
    return tmp_path / "a.tar"


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077], ids=lambda mask: f"umask-{mask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(path: Path) -> set[int]:
    return {found.stat().st_mode & 0o777 for found in (path, *path.rglob("*")) if found.is_dir()}


def test_a_dataset_that_comes_first_makes_it_for_this_user_only(
    photos: Path, tmp_path: Path, umask: int
) -> None:
    for _ in range(2):  # the second one finds what the first one has made
        dataset = ObjectDataset(str(photos), cache=tmp_path / "cache")
        assert len(dataset[0]) == 4
        dataset.close()
        dataset.cache.close()
        assert modes(tmp_path / "cache") == {0o700}
    assert dataset.cache.info()["entries"] == 1
    dataset.cache.close()


def test_a_shard_dataset_that_comes_first_does_too(tar: Path, tmp_path: Path, umask: int) -> None:
    dataset = TarDataset(str(tar), cache=tmp_path / "cache")
    assert modes(tmp_path / "cache") == {0o700}
    assert read(dataset) == [*"01234"]
    assert modes(tmp_path / "cache") == {0o700}
    dataset.close()


def read(dataset: Any) -> list[str]:
    found = sorted(text for batch in DataLoader(dataset, 2, num_workers=0) for text in batch["txt"])
    dataset._flush_cache()
    return found


def warned(make: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    return made, [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]


def test_listings_in_a_folder_that_others_can_write_are_left_alone(photos: Path, tmp_path: Path) -> None:
    """What another user plants there would be the labels of a training."""
    cache = tmp_path / "cache"
    ImageFolder(str(photos), cache=cache)
    (photos / "wolf").mkdir()
    (photos / "wolf" / "1.jpg").write_bytes(b"\xff\xd8\xff\xd9")
    kept_for_a_day = {"cache": cache, "listing_max_age": "1d"}
    assert ImageFolder(str(photos), **kept_for_a_day).classes == ["cat", "dog"], "the listing that is kept"
    (cache / "manifests").chmod(0o777)
    contents = {path: path.read_bytes() for path in (cache / "manifests").iterdir()}
    dataset, words = warned(lambda: ImageFolder(str(photos), **kept_for_a_day))
    assert dataset.classes == ["cat", "dog", "wolf"]
    assert len(words) == 1 and "can be written by other users" in words[0] and "manifests" in words[0]
    assert {path: path.read_bytes() for path in (cache / "manifests").iterdir()} == contents, "nor written"
    kept = Cache(cache)
    assert kept.write(kept.key("a"), b"a") and kept.flush()
    foreign = kept.check().foreign_files
    kept.clear()
    kept.close()
    assert foreign == ["manifests"]
    assert all(path.exists() for path in contents)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change owners")
def test_listings_of_another_user_are_left_alone(photos: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    ImageFolder(str(photos), cache=cache)
    (photos / "wolf").mkdir()
    (photos / "wolf" / "1.jpg").write_bytes(b"\xff\xd8\xff\xd9")
    os.chown(cache / "manifests", 2000, 2000)
    dataset, words = warned(lambda: ImageFolder(str(photos), cache=cache, listing_max_age="1d"))
    assert dataset.classes == ["cat", "dog", "wolf"]
    assert len(words) == 1 and "belongs to user id 2000" in words[0]


def test_tables_of_shards_that_others_can_write_are_left_alone(
    tar: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    first = TarDataset(str(tar), cache=cache)
    assert read(first) == [*"01234"]
    first.close()
    assert len(TarDataset(str(tar), cache=cache)) == 5, "its table is known"
    (table,) = (cache / "manifests").glob("*.places")
    table.chmod(0o666)
    again = TarDataset(str(tar), cache=cache)
    with pytest.raises(TypeError, match="no length yet"):
        len(again)
    assert f"{table} can be written by other users" in caplog.text
    assert read(again) == [*"01234"] and len(again) == 5, "learned anew, in a file of ours"
    assert table.stat().st_mode & 0o777 == 0o600
    again.close()
    (cache / "manifests").chmod(0o777)
    third, words = warned(lambda: TarDataset(str(tar), cache=cache))
    assert len(words) == 1, "for listings and tables together"
    assert read(third) == [*"01234"]
    third.close()


# As another user: each line that is printed is something that this user can read or change.
_INTRUDER = """
for pid in {pids}; do
    for file in environ maps; do
        head -c 1 /proc/$pid/$file >/dev/null 2>&1 && echo "$file of a process"
    done
    ls /proc/$pid/fd >/dev/null 2>&1 && echo "descriptors of a process"
done
ls {cache} >/dev/null 2>&1 && echo "names in the cache"
for file in {files}; do cat $file >/dev/null 2>&1 && echo "content of $file"; done
for folder in {folders}; do
    touch $folder/x 2>/dev/null && echo "a file made in $folder"
    ln -s /etc/passwd $folder/y 2>/dev/null && echo "a link made in $folder"
done
mv {cache} {cache}.gone 2>/dev/null && echo "the cache was moved"
exit 0
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
def test_another_user_reads_and_changes_nothing_of_a_running_job() -> None:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        here.chmod(0o755)
        cache, photos = here / "cache", here / "photos"
        photos.mkdir()
        for number in range(40):
            (photos / f"{number}.bin").write_bytes(bytes(100))
        dataset = ObjectDataset(str(photos), decode=bytes, cache=cache)
        loader = DataLoader(dataset, 2, num_workers=2, collate_fn=len)
        batches = iter(loader)
        next(batches)
        parts = list(cache.rglob("*"))
        processes = [process.pid for process in active_children()]
        assert len(processes) >= 2 and len(parts) > 5
        script = _INTRUDER.format(
            pids=" ".join(map(str, [os.getpid(), *processes])),
            cache=cache,
            files=" ".join(str(part) for part in parts if part.is_file()),
            folders=" ".join([str(cache), *(str(part) for part in parts if part.is_dir())]),
        )
        other = subprocess.run(
            ["/bin/sh", "-c", script],
            user=65534,
            group=65534,
            extra_groups=(),
            capture_output=True,
            text=True,
        )
        assert len(list(batches)) == 19
        dataset.close()
        dataset.cache.close()
        same = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True)
    assert (other.stdout, other.stderr, other.returncode) == ("", "", 0)
    for words in ("environ of", "descriptors of", "names in", "content of", "a file made", "a link", "moved"):
        assert words in same.stdout, "the question is asked in a way that finds something"
