"""`fastload convert`: every sample arrives once and unchanged, whatever happens on the way."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from data.make_shards import COUNT, FILES, HERE, features
from PIL import Image

import fastload
from fastload.cli.convert import shard_set
from fastload.cli.demo.s3_server import delay_proxy, serve_s3
from fastload.errors import DecodeError
from fastload.formats.pieces import Splitter
from fastload.formats.tfrecord import TFRecordSplitter, TFRecordWriter, encode_example, parse_example
from tests.bucketdata import Bucket
from tests.commands import command, run, start, store_words
from tests.patience import PATIENCE, wait_until
from tests.photos import png
from tests.sharddata import write

IMAGES, CLASSES = 60, 3
SPEC = {"image": bytes, "label": int, "key": str}

pytestmark = pytest.mark.usefixtures("no_leaks")


def image(number: int) -> bytes:
    return b"\xff\xd8\xff" + hashlib.sha256(b"%d" % number).digest() * (100 + 7 * number % 300)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images that nobody decodes, in 3 classes."""
    files = {f"class_{n % CLASSES}/img {n:03d}.v1.jpg": image(n) for n in range(IMAGES)}
    return Path(write(tmp_path / "photos", files))


# What of `photos` must arrive, by key: (image, class).
WANTED = {
    f"class_{label}/img {number:03d}.v1": (image(number), label)
    for label in range(CLASSES)
    for number in range(label, IMAGES, CLASSES)
}
ORDERS = ([], ["--shuffle", "5"])
IN_TAR = {key.replace(" ", "_").replace(".", "_"): sample for key, sample in WANTED.items()}


def convert(source: object, target: object, to: str, *more: object) -> tuple[int, dict[str, Any]]:
    """(exit code, JSON document)"""
    return run("convert", source, target, "--to", to, "--shard-size", "100KB", *more)


def members(path: Path) -> dict[str, bytes]:
    """The members of a tar, read by Python's tarfile."""
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def samples(directory: Path) -> dict[str, tuple[bytes, int]]:
    """(image, class) by key, from the members of tars, or record by record."""
    found: dict[str, tuple[bytes, int]] = {}
    for path in sorted(directory.glob("*.tar")):
        content = members(path)
        for name, body in content.items():
            key, _, extension = name.rpartition(".")
            if extension == "jpg":
                assert key not in found, "twice"
                found[key] = body, int(content[f"{key}.cls"])
    for path in sorted(directory.glob("*.tfrecord")):
        splitter: Splitter = TFRecordSplitter(0, path.stat().st_size)
        splitter.feed(memoryview(path.read_bytes()))
        splitter.close()
        while (record := splitter.next()) is not None:
            assert record.payload is not None
            example = parse_example(record.payload, SPEC)
            assert example["key"] not in found, "twice"
            found[example["key"]] = bytes(example["image"]), example["label"]
    return found


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# --- Everything arrives -------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["tar", "tfrecord"])
@pytest.mark.parametrize("more", ORDERS)
def test_a_folder(to: str, more: list[str], photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, document = convert(photos, out, to, *more)
    assert code == 0 and document["complete"] and document["samples"] == IMAGES
    wanted = IN_TAR if to == "tar" else WANTED
    found = samples(out)
    assert found == wanted
    assert (list(found) == list(wanted)) is not bool(more)
    assert document["shards"] > 3
    names = {path.name for path in out.iterdir()}
    count = document["shards"]
    form = "photos-{:06d}.tar" if to == "tar" else f"photos-{{:05d}}-of-{count:05d}.tfrecord"
    assert {form.format(number) for number in range(count)} < names
    assert len(names) == 2 * count + 1, "shards, an index for each, photos.json"
    assert json.loads((out / "photos.json").read_bytes())["classes"] == ["class_0", "class_1", "class_2"]
    # The same again, elsewhere: the same bytes.
    convert(photos, tmp_path / "again", to, *more)
    assert files(tmp_path / "again") == files(out)


@pytest.mark.parametrize("more", ORDERS)
def test_from_one_form_to_the_other_and_back(photos: Path, tmp_path: Path, more: list[str]) -> None:
    convert(photos, tmp_path / "a", "tar")
    assert convert(tmp_path / "a", tmp_path / "b", "tfrecord", "--shard-size", "150KB", *more)[0] == 0
    assert samples(tmp_path / "b") == IN_TAR
    assert convert(tmp_path / "b", tmp_path / "c", "tfrecord", "--shard-size", "70KB", *more)[0] == 0
    assert samples(tmp_path / "c") == IN_TAR
    code, document = convert(tmp_path / "c", tmp_path / "d", "tar", "--name", "new", *more)
    assert (code, document["settings"]["from"]) == (0, "tfrecord")
    assert samples(tmp_path / "d") == IN_TAR
    assert (list(samples(tmp_path / "d")) == list(IN_TAR)) is not bool(more)
    classes = json.loads((tmp_path / "d" / "new.json").read_bytes())["classes"]
    assert classes == ["class_0", "class_1", "class_2"]


@pytest.mark.parametrize("compression", list(FILES))
def test_tensorflows_shards(compression: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    shutil.copy(HERE / FILES[compression], tmp_path / "in" / "train-00000-of-00001")
    code, document = convert(tmp_path / "in", tmp_path / "out", "tar", "--from", "tfrecord")
    assert (code, document["samples"]) == (0, COUNT)
    found = members(tmp_path / "out" / "in-000000.tar")
    for number in range(COUNT):
        wanted = features(number)
        key = wanted["key"][0].decode().replace(" ", "_")
        assert found[f"{key}.cls"] == b"%d" % (number % 3)
        assert found[f"{key}.image"] == wanted["image"][0], "no magic of an image: by the feature's name"
        assert json.loads(found[f"{key}.counts.json"]) == wanted["counts"]
        assert [found[f"{key}.words.{i}"] for i in range(3)] == wanted["words"]


def test_objects_and_strange_names(tmp_path: Path) -> None:
    names = [
        "a.b.c.txt",
        "a_b.c.txt",
        "a_b_c.txt",
        "a b_c.txt",
        "no extension",
        "ü/é x.JSON",
        ".hidden",
        "x.y z",
    ]
    write(tmp_path / "in", {name: name.encode() for name in names})
    assert convert(tmp_path / "in", tmp_path / "tar", "tar")[0] == 0
    found = members(tmp_path / "tar" / "in-000000.tar")
    assert sorted(found.values()) == sorted(name.encode() for name in names)
    assert all(re.fullmatch(r"[^\s.][^\s.]*\.(txt|json|bin)", name) for name in found)
    assert convert(tmp_path / "in", tmp_path / "tfrecord", "tfrecord")[1]["samples"] == len(names)


# The key of an Example, and that of the member.
HOSTILE = {
    "../../slip": "slip",
    "/etc/abs": "etc/abs",
    "//a//./b/": "a/b",
    "..": "_",
    "../.ssh/authorized_keys": ".ssh/authorized_keys",
    "c/../../d": "c/d",
    ".\x1b./e": "e",
    "a\x1b[31m/x\u202ey": "a[31m/xy",
    "w\\..\\..\\x": "w_______x",
    "new\nline tab\t": "new_line_tab_",
    "\udcff": "_udcff",
    "plain/a": "plain/a",
}


def test_members_lie_in_the_folder_they_are_extracted_to(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    twice = ["plain/../plain/./a", "slip"]  # become the same as another one
    with (tmp_path / "in" / "0.tfrecord").open("wb") as file:
        writer = TFRecordWriter(file)
        for key in (*HOSTILE, *twice):
            writer.write(
                encode_example(
                    {"key": key.encode("utf-8", "surrogateescape"), "txt": key.encode("utf-8", "replace")}
                )
            )
        writer.close()
    code, document = convert(tmp_path / "in", tmp_path / "out", "tar")
    assert (code, document["samples"]) == (0, len(HOSTILE) + len(twice))
    assert document["renamed"] == len(HOSTILE) + len(twice) - 1
    assert document["renames"] == dict(list(HOSTILE.items())[:3])
    with tarfile.open(tmp_path / "out" / "in-000000.tar") as tar:
        names = tar.getnames()
        tar.extractall(tmp_path / "extracted", filter="fully_trusted")
    assert len(set(names)) == len(names) == len(HOSTILE) + len(twice)
    assert {f"{key}.txt" for key in HOSTILE.values()} < set(names)
    assert all(name.isprintable() and ".." not in name.split("/") and name[0] != "/" for name in names)
    assert sum(path.is_file() for path in (tmp_path / "extracted").rglob("*")) == len(names)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out", "extracted"}


def test_it_says_which_samples_have_another_key(tmp_path: Path) -> None:
    write(tmp_path / "in", {"a.b.txt": b"1", "c.txt": b"1"})
    said = command("convert", tmp_path / "in", tmp_path / "out", "--to", "tar")
    assert "1 samples have another key in the tar" in said.output and "'a.b' is 'a_b'" in said.output


def test_damaged_shards_stop_it(photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "a", "tfrecord")
    shard = sorted((tmp_path / "a").glob("*.tfrecord"))[1]
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    code, document = convert(tmp_path / "a", tmp_path / "b", "tar")
    assert code == 1
    assert document["error"]["type"] == "DecodeError" and shard.name in document["error"]["key"]


@pytest.mark.parametrize("to", ["tar", "tfrecord"])
def test_its_first_epoch_is_random_access(to: str, photos: Path, tmp_path: Path) -> None:
    """fastload's datasets find the indexes: a length and any sample at once."""
    convert(photos, tmp_path / "out", to, "--shuffle", "1")
    names, wanted = ("__key__", "jpg", "cls"), IN_TAR
    if to == "tar":
        dataset: Any = fastload.TarDataset(str(tmp_path / "out"), decode=dict)
    else:
        dataset = fastload.TFRecordDataset(str(tmp_path / "out"), SPEC)
        names, wanted = ("key", "image", "label"), WANTED
    read = ([dataset[index][name] for name in names] for index in range(IMAGES))
    assert {key: (bytes(image), int(label)) for key, image, label in read} == wanted
    assert len(dataset) == IMAGES
    dataset.close()


# --- On S3, interrupted -------------------------------------------------------------------------------------


class OnS3(NamedTuple):
    """A folder of a bucket behind a slow line, which has "photos", and the options that lead to it."""

    url: str
    folder: Path
    words: list[str]


@pytest.fixture
def s3(bucket: Bucket, photos: Path) -> Iterator[OnS3]:
    name = photos.parent.name
    store = fastload.open_store(f"s3://bucket/{name}/photos", **bucket.options)
    for path in photos.rglob("*.jpg"):  # by the server, which would not see at once what another one writes
        store.write(str(path.relative_to(photos)), path)
    with delay_proxy(bucket.server.endpoint_url, 0.02) as proxy:
        words = store_words(bucket.options | {"endpoint_url": proxy.url}, "--storage-option", "--dst-option")
        yield OnS3(f"s3://bucket/{name}", bucket.root / "bucket" / name, words)


@pytest.mark.parametrize("to", ["tar", pytest.param("tfrecord", marks=pytest.mark.stress)])
def test_on_s3(to: str, s3: OnS3) -> None:
    code, document = convert(f"{s3.url}/photos", f"{s3.url}/deep", to, *s3.words)
    assert code == 0, document
    assert samples(s3.folder / "deep") == (IN_TAR if to == "tar" else WANTED)
    other = "tfrecord" if to == "tar" else "tar"
    assert convert(f"{s3.url}/deep", f"{s3.url}/other", other, *s3.words)[0] == 0
    assert samples(s3.folder / "other") == IN_TAR


def shards_of(directory: Path) -> list[str]:
    """The names of the shards that are whole."""
    try:
        return [shard["name"] for shard in json.loads((directory / "photos.json").read_bytes())["shards"]]
    except (OSError, ValueError):
        return []


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.stress)])
def test_interrupted_and_gone_on(how: signal.Signals, s3: OnS3, photos: Path, tmp_path: Path) -> None:
    few = ["--storage-option", "max_requests=2"]  # slow enough to be interrupted
    made, source, target = s3.folder / "out", f"{s3.url}/photos", f"{s3.url}/out"
    words = [source, target, "--to", "tar", "--shard-size", "100KB", "--json"]
    with start("convert", *words, *s3.words, *few) as running:
        wait_until(lambda: len(shards_of(made)) >= 2 or running.poll() is not None, "two shards")
        assert running.poll() is None, running.communicate()
        os.killpg(running.pid, how)
        out, err = running.communicate(timeout=PATIENCE)
    document = json.loads((made / "photos.json").read_bytes())
    assert not document["complete"]
    if how == signal.SIGINT:
        assert running.returncode == 130 and "Traceback" not in err and "run the same command" in err
        assert json.loads(out.splitlines()[-1])["interrupted"]
    whole = shards_of(made)
    was = {name: (made / name).stat().st_mtime_ns for name in whole}

    code, after = convert(source, target, "tar", *s3.words)
    assert code == 0, after
    assert after["complete"] and after["kept"] == len(whole) >= 2
    assert {name: (made / name).stat().st_mtime_ns for name in whole} == was, "written once"
    assert samples(made) == IN_TAR
    convert(photos, tmp_path / "unbroken", "tar", "--name", "photos")
    shards = {name: body for name, body in files(tmp_path / "unbroken").items() if name != "photos.json"}
    assert {name: body for name, body in files(made).items() if name in shards} == shards


@pytest.mark.parametrize("more", ORDERS)
def test_shards_go_on_in_the_middle_of_a_shard(
    more: list[str], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(photos, tmp_path / "in", "tfrecord")
    words = ["--shard-size", "40KB", "--name", "x", *more]
    convert(tmp_path / "in", tmp_path / "unbroken", "tar", *words)
    send, sent = shard_set.ShardSet.send, Counter[str]()

    def failing(shards: Any, made: Any) -> None:
        sent["shards"] += 1
        if sent["shards"] % 4 == 0:
            made.file.close()
            raise OSError(28, "No space left on device")
        send(shards, made)

    monkeypatch.setattr(shard_set.ShardSet, "send", failing)
    for _ in range(20):
        try:
            code, _ = convert(tmp_path / "in", tmp_path / "out", "tar", *words)
        except AssertionError:  # an error that is not ours ends the command without a document
            continue
        assert code == 0
        break
    assert sent["shards"] > 8
    assert files(tmp_path / "out") == files(tmp_path / "unbroken")


@pytest.mark.parametrize("more", ORDERS)
def test_shards_begun_by_a_version_with_another_order_are_refused(
    more: list[str], photos: Path, tmp_path: Path
) -> None:
    convert(photos, tmp_path / "in", "tfrecord")
    arguments = (tmp_path / "in", tmp_path / "out", "tar", *more, "--name")
    assert convert(*arguments, "x")[0] == 0
    path = tmp_path / "out" / "x.json"
    document = json.loads(path.read_bytes())
    del document["shards"][1:]
    document["shards"][0]["next"] = {"next": 1, "lanes": [[0, 7]]}
    path.write_text(json.dumps(document))
    code, document = convert(*arguments, "x")
    assert code == 2 and "another version of fastload" in document["error"]["message"]
    assert convert(*arguments, "y")[0] == 0


def test_no_empty_shard_follows_one_that_is_exactly_full(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with (tmp_path / "in" / "a.tfrecord").open("wb") as file:
        writer = TFRecordWriter(file)
        for number in range(6):
            writer.write(b"%d" % number * 984)  # 1,000 bytes with its framing
        writer.close()
    code, document = convert(tmp_path / "in", tmp_path / "out", "tfrecord", "--shard-size", "3000")
    assert (code, document["samples"], document["shards"]) == (0, 6, 2)


# --- The destination ----------------------------------------------------------------------------------------


def test_files_of_others_are_left_alone(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "photos-000001.tar").write_bytes(b"not ours")
    (out / "other.txt").write_bytes(b"of no concern")
    code, document = convert(photos, out, "tar")
    assert code == 2 and "photos-000001.tar" in document["error"]["message"]
    assert files(out) == {"photos-000001.tar": b"not ours", "other.txt": b"of no concern"}
    assert convert(photos, out, "tar", "--name", "mine")[0] == 0
    assert (out / "photos-000001.tar").read_bytes() == b"not ours"
    before = files(out)
    for other in (["--shard-size", "50KB"], ["--shuffle", "1"]):
        code, document = convert(photos, out, "tar", "--name", "mine", *other)
        assert code == 2 and other[0][2:].replace("-", "_") in document["error"]["message"]
    (photos / "class_0" / "new.jpg").write_bytes(image(999))
    code, document = convert(photos, out, "tar", "--name", "mine")
    assert code == 2 and "fingerprint" in document["error"]["message"]
    for body in (b"[]", b'{"a":1}\n{"b":2}', b"", b"\xff\xfe"):
        (out / "foreign.json").write_bytes(body)
        code, document = convert(photos, out, "tar", "--name", "foreign")
        assert code == 2 and "that fastload did not write" in document["error"]["message"]
        assert (out / "foreign.json").read_bytes() == body
    assert {name: body for name, body in files(out).items() if name != "foreign.json"} == before


def test_document_that_cannot_be_gone_on_with_is_named(photos: Path, tmp_path: Path) -> None:
    """Damaged ones, and those of other versions, ended in a traceback."""
    out = tmp_path / "out"
    assert convert(photos, out, "tar", "--name", "mine")[0] == 0
    whole = json.loads((out / "mine.json").read_bytes())
    shard = whole["shards"][0]
    for damaged in (
        {"made_by": "fastload convert"},
        whole | {"format": whole["format"] + 1},
        whole | {"settings": 5},
        whole | {"shards": [shard | {"extra": 1}]},
    ):
        (out / "mine.json").write_text(json.dumps(damaged))
        code, document = convert(photos, out, "tar", "--name", "mine")
        assert code == 2 and "damaged, or of another version" in document["error"]["message"]


def test_name_that_begins_another_name_is_free(photos: Path, tmp_path: Path) -> None:
    assert convert(photos, tmp_path / "out", "tar", "--name", "train-small")[0] == 0
    assert convert(photos, tmp_path / "out", "tar", "--name", "train")[0] == 0


def test_what_was_damaged_meanwhile_is_found_and_mended(photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "out", "tar")
    whole = files(tmp_path / "out")
    damaged = {
        "photos-000001.tar": lambda body: body[:3000] + bytes([body[3000] ^ 1]) + body[3001:],
        "photos-000002.idx": lambda body: body.replace(b" 512 ", b" 1024 ", 1),
    }
    for name, harm in damaged.items():
        (tmp_path / "out" / name).write_bytes(harm(whole[name]))
        code, document = convert(photos, tmp_path / "out", "tar")
        assert code == 1 and not document["complete"]
        assert [fault["shard"] for fault in document["faults"]] == [name.replace(".idx", ".tar")]
        code, document = convert(photos, tmp_path / "out", "tar")
        assert (code, document["complete"], document["kept"]) == (0, True, int(name[7:13]))
        assert files(tmp_path / "out") == whole
    (tmp_path / "out" / "photos-000001.tar").unlink()
    assert convert(photos, tmp_path / "out", "tar")[1]["kept"] == 1
    assert files(tmp_path / "out") == whole


def test_destinations_that_cannot_be(photos: Path, tmp_path: Path) -> None:
    assert convert(photos, photos / "shards", "tar")[0] == 2
    (tmp_path / "file").write_bytes(b"")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        assert convert(photos, target, "tar")[0] == 1
    assert convert(photos, "https://example.invalid/x", "tar")[0] == 2
    code, document = convert(photos, tmp_path / "out", "tar", "--name", "a/b")
    assert code == 2 and "--name" in document["error"]["message"]


def test_a_read_only_store(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before anything is read."""
    from fastload.store import object_store as native

    monkeypatch.setattr(native, "_WRITER", native._CONTACT)
    monkeypatch.setattr("fastload.store.failures.READ_POLICY", fastload.store.failures.RetryPolicy(budget=1))
    (tmp_path / "out").mkdir()
    with serve_s3(tmp_path) as server:
        code, document = convert(photos, "s3://out", "tar", *store_words(server.options, "--dst-option"))
    assert code == 1 and document["error"]["stage"] == "put"
    assert not list((tmp_path / "out").iterdir())


def test_samples_of_several_images_are_the_same_as_examples_and_back() -> None:
    from fastload.cli.convert.sample_forms import Sample, as_features, as_members

    images = {
        name: png(Image.new("L", (1, 1), at)) for at, name in enumerate(("png", "seg.png", "mask.jpeg"))
    }
    record = encode_example(as_features(Sample("0001", {"cls": b"7", **images})))
    assert dict(as_members(Sample("", {}, memoryview(record))).members) == {"cls": b"7", **images}


def test_folder_that_webdataset_passes_over_gets_another_key() -> None:
    from fastload.cli.convert.sample_forms import member_key

    assert member_key("__background__/0") == "_background__/0"
    assert member_key("a/__x__/0") == "a/__x__/0" and member_key("__x__") == "__x__"


def test_members_that_would_be_one_feature() -> None:
    from fastload.cli.convert.sample_forms import Sample, as_features

    def features(**parts: bytes) -> dict[str, Any]:
        return as_features(Sample("0001", {name: memoryview(data) for name, data in parts.items()}, None, 0))

    assert set(features(jpg=b"1", cls=b"2")) == {"key", "image", "label"}
    assert set(features(png=b"1", jpg=b"2", cls=b"3")) == {"key", "png", "jpg", "label"}, "one is a mask"
    for parts in ({"cls": b"3", "label": b"x"}, {"jpg": b"1", "image": b"2"}, {"key": b"x"}):
        with pytest.raises(DecodeError, match="second feature"):
            features(**parts)
