"""Ways to name shards, and the errors for names and arguments that are wrong."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload.errors import ArgumentError, DecodeError, NotFoundError
from fastload.shards.names import expand_braces, glob_pattern
from tests.cachedata import in_child
from tests.faultserver import FaultServer
from tests.sharddata import (
    COUNTS,
    KINDS,
    LABEL,
    TOTAL,
    closing,
    dataset,
    jpeg,
    labels,
    opened,
    read,
    shard,
    shards,
    write,
)

pytestmark = pytest.mark.usefixtures("close_all")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a-{000..002}.tar", ["a-000.tar", "a-001.tar", "a-002.tar"]),
        ("{8..10}", ["8", "9", "10"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{00..06..3}", ["00", "03", "06"]),
        ("{a,b}{1..2}", ["a1", "a2", "b1", "b2"]),
        ("{a,b{1..2}}", ["a", "b1", "b2"]),
        ("plain", ["plain"]),
    ],
)
def test_braces(text: str, wanted: list[str]) -> None:
    assert sorted(expand_braces(text)) == sorted(wanted)


@pytest.mark.parametrize("text", ["{0..99999999}", "{0..999}{0..1000}", "{abc}"])
def test_braces_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentError):
        list(expand_braces(text))


def test_globs() -> None:
    for glob, yes, no in (
        ("*.tar", ["a.tar", ".tar"], ["a/b.tar", "a.tarx"]),
        ("**/*.tar", ["a.tar", "a/b/c.tar"], ["a.zip"]),
        ("a?[0-3]", ["ab0", "ac3"], ["ab4", "a/1"]),
        ("x[!a].tar", ["xb.tar"], ["xa.tar"]),
        ("x[a&&b--]", ["xa", "x&", "xb", "x-"], ["xc"]),
    ):
        assert all(re.fullmatch(glob_pattern(glob), text) for text in yes)
        assert not any(re.fullmatch(glob_pattern(glob), text) for text in no)
    with pytest.raises(ArgumentError, match=r"\[z-a\] in url is no set of characters"):
        glob_pattern("[z-a]*.tar")


def test_every_way_to_name_shards(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = shards(kind)
    url = write(tmp_path / "all", objects | {"README.txt": b"x", "notes.json": b"{}"})
    listed = {"shardlist": [{"url": key, "nsamples": n} for key, n in zip(objects, COUNTS, strict=True)]}
    (tmp_path / "all" / "index.json").write_text(json.dumps(listed))
    monkeypatch.chdir(tmp_path)
    for name in (
        *(url, Path(url), f"file://{url}", f"{url}/index.json"),
        *(f"{url}/part-{{000..005}}.{kind}", f"{tmp_path}/*/part-*.{kind}", f"all/*.{kind}"),
        [f"{url}/{key}" for key in objects],
        [f"{url}/part-00[0-2].{kind}", f"{url}/part-{{003..005}}.{kind}"],
    ):
        data = opened(kind, name)
        assert sorted(labels(read(data, workers=1), LABEL[kind])) == list(range(TOTAL)), name
    one = opened(kind, f"{url}/part-002.{kind}")
    assert len(labels(read(one, workers=1), LABEL[kind])) == COUNTS[2]


def test_files_of_a_list_and_of_braces_are_read_in_the_order_given(kind: str, tmp_path: Path) -> None:
    """As WebDataset and pyarrow read them; by their keys "part-10" comes before "part-9"."""
    bodies = list(shards(kind).values())[:3]
    url = write(tmp_path, {f"part-{number}.{kind}": body for number, body in enumerate(bodies, 9)})

    def in_order(name: Any) -> list[int]:
        return labels(read(opened(kind, name), workers=1, shuffle=False), LABEL[kind])

    ninth, tenth, last = (in_order(f"{url}/part-{number}.{kind}") for number in (9, 10, 11))
    assert in_order(f"{url}/part-{{9..11}}.{kind}") == ninth + tenth + last
    assert in_order([f"{url}/part-{number}.{kind}" for number in (11, 9, 10)]) == last + ninth + tenth
    assert in_order(url) == tenth + last + ninth, "of a prefix: by their keys"


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("pipe:curl http://x", ArgumentError, "runs none"),
        ("{url}/nothing-{{0..3}}.tar", NotFoundError, "4 of the named objects"),
        ("{url}/*.zip", NotFoundError, "none is matched by '\\*.zip'"),
        ([], ArgumentError, "names no shards"),
        (["{url}/part-000.tar"] * 2, ArgumentError, "twice"),
        (["s3://a/x.tar", "s3://b/x.tar"], ArgumentError, "several buckets"),
        ("http://localhost/*.tar", ArgumentError, "glob needs a store"),
    ],
)
def test_names_that_cannot_be_read(name: Any, error: type[Exception], says: str, tmp_path: Path) -> None:
    url = write(tmp_path, shards("tar"))
    with pytest.raises(error, match=says):
        fastload.TarDataset(
            [one.format(url=url) for one in name] if isinstance(name, list) else name.format(url=url)
        )


def test_over_http_shards_are_asked_for_by_name(kind: str, tmp_path: Path) -> None:
    with FaultServer(shards(kind)) as server:
        url = f"{server.endpoint_url}/bucket/part-{{000..005}}.{kind}"
        data = opened(kind, url)
        assert sorted(labels(read(data), LABEL[kind])) == list(range(TOTAL))
        with pytest.raises(NotFoundError, match="2 of the named objects"):
            dataset(kind, f"{server.endpoint_url}/bucket/part-{{000..007}}.{kind}")


def test_the_constructor_starts_no_client(tmp_path: Path) -> None:
    objects = shards("tar", index=True)
    objects["index.json"] = json.dumps([{"url": key} for key in objects if key.endswith(".tar")]).encode()
    with FaultServer(objects) as server:

        def open_without_obstore() -> bool:
            sys.modules.pop("obstore", None)  # other tests may have imported it
            for url in ("s3://bucket", "s3://bucket/index.json"):
                assert len(fastload.TarDataset(url, storage_options=server.options)) == TOTAL
            return "obstore" not in sys.modules

        assert in_child(open_without_obstore)


@pytest.mark.parametrize(
    ("reader", "name", "error", "says"),
    [
        ("tar", "photos", NotFoundError, r"'cat/0\.jpg'.*\.tar.*ImageFolder.*ObjectDataset"),
        ("tfrecord", "photos", NotFoundError, r"TFRecord file .*ImageFolder.*ObjectDataset"),
        ("tfrecord", "tar/part-000.tar", ArgumentError, r"named as a tar: read it with fastload\.TarDataset"),
        ("tar", "tfrecord/part-000.tfrecord", ArgumentError, r"read it with fastload\.TFRecordDataset"),
        ("tfrecord", "tar", ArgumentError, r"only index files there, .* a tar with fastload\.TarDataset"),
        ("tar", "tfrecord", ArgumentError, r"TFRecord files with fastload\.TFRecordDataset"),
        ("tar", "odd/nothing", NotFoundError, "check the"),
    ],
)
@pytest.mark.parametrize("remote", [False, True])
def test_dataset_of_files_of_another_kind_names_its_reader(
    reader: str, name: str, error: type[Exception], says: str, remote: bool, tmp_path: Path
) -> None:
    objects = {f"{one}/{key}": body for one in KINDS for key, body in shards(one, index=True).items()}
    objects |= {"photos/cat/0.jpg": jpeg(0), "odd/file": shard("tar", range(3))[0]}
    with FaultServer(objects) as server:
        url = "s3://bucket" if remote else write(tmp_path, objects)
        with pytest.raises(error, match=says):
            dataset(reader, f"{url}/{name}", storage_options=server.options if remote else None)


@pytest.mark.parametrize("remote", [False, True])
def test_single_file_without_its_ending_is_read_for_what_it_is(
    kind: str, remote: bool, tmp_path: Path
) -> None:
    other = KINDS[1 - KINDS.index(kind)]
    objects = {"odd/file": shard(kind, range(9))[0]}
    with FaultServer(objects) as server:
        url = "s3://bucket" if remote else write(tmp_path, objects)
        options = {"storage_options": server.options if remote else None}
        data = opened(kind, f"{url}/odd/file", **options)
        assert labels(read(data, workers=1), LABEL[kind]) and ", 1 shards," in repr(data)
        with pytest.raises(DecodeError, match=f"read it with fastload.{type(data).__name__}"):
            read(opened(other, f"{url}/odd/file", **options), workers=1)


def test_repr_names_the_shards_and_what_is_known_of_them(kind: str, tmp_path: Path) -> None:
    url = write(tmp_path / "shards", shards(kind, index=True))
    name = type(closing(dataset(kind, url))).__name__
    assert repr(closing(dataset(kind, url, index=False))) == (
        f"{name}({url!r}, 6 shards, samples not counted yet)"
    )
    assert repr(closing(dataset(kind, f"{url}/part-00[1-3]*"))) == f"{name}({url!r}, 3 shards, 88 samples)"
    cached = closing(dataset(kind, url, cache=str(tmp_path / "cache")))
    assert repr(cached) == f"{name}({url!r}, 6 shards, 173 samples, cache={cached.cache!r})"
