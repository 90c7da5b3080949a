"""Files of somebody else: no place, option or server of theirs is used that only the user may name."""

from __future__ import annotations

import ast
import copy
import inspect
import json
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.cached import CachingFileSystem
from PIL import Image

from fastload import DataLoader, File, ImageFolder, RandomResizedCrop, TableDataset, TarDataset, open_store
from fastload.errors import ArgumentError, FastloadError
from fastload.store import options as storage_options
from fastload.trace.recipe import restore
from tests.commands import command
from tests.faultserver import FaultServer

pytestmark = pytest.mark.usefixtures("no_aws_settings")
OBJECTS = {"x/cat/0.jpg": b"x"}

# What a state may say of its place. Each other option belongs to the user.
ALLOWED = {
    *("anon", "client", "region", "default_region", "skip_signature", "virtual_hosted_style_request"),
    *("s3_express", "account_name", "client_kwargs"),
}
SERVERS = {"endpoint_url", "endpoint", "base_url"}
PLACES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "http", "https", "file", "local", "memory"}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run on a folder of two images."""
    root = tmp_path_factory.mktemp("photos")
    for name in ("cat", "dog"):
        (root / name).mkdir()
        Image.new("RGB", (20, 20)).save(root / name / "0.jpg")
    loader = DataLoader(ImageFolder(str(root), RandomResizedCrop(8)), 1, shuffle=True, seed=1)
    next(iter(loader))
    return loader.state_dict()


def changed(state: dict[str, Any], **place: Any) -> dict[str, Any]:
    found = copy.deepcopy(state)
    found["recipe"]["dataset"] |= place
    return found


def options_of_obstore() -> set[str]:
    """Each key of its configurations, from the types that it ships."""
    spec = find_spec("obstore")
    assert spec is not None and spec.submodule_search_locations
    names = set()
    for path in (Path(spec.submodule_search_locations[0]) / "_store").glob("*.pyi"):
        for kind in ast.walk(ast.parse(path.read_text())):
            if isinstance(kind, ast.ClassDef):
                lines = (line for line in kind.body if isinstance(line, ast.AnnAssign))
                names |= {line.target.id for line in lines if isinstance(line.target, ast.Name)}
    assert {"container_credentials_full_uri", "federated_token_file", "proxy_url"} <= names
    return names


def file_systems() -> Iterator[tuple[str, Any]]:
    """The file systems of fsspec that are installed, by protocol."""
    for protocol in fsspec.available_protocols():
        with suppress(ImportError):
            yield protocol, fsspec.get_filesystem_class(protocol)


def options_of_fsspec() -> set[str]:
    """Each argument of the file systems that are installed."""
    names = {"target_protocol", "cache_storage", "same_names", "fo", "config_kwargs", "session"}
    for _, kind in file_systems():
        for base in kind.__mro__[:-1]:
            names |= set(inspect.signature(base.__init__).parameters)
    assert {"cache_storage", "remote_protocol"} <= names
    return names - {"self", "args", "kwargs", "region_name"}


def own_options() -> set[str]:
    kinds = ("_S3_OWN", "_S3_NATIVE", "_GCS_OWN", "_GCS_NATIVE", "_AZURE_OWN", "_AZURE_NATIVE")
    return {name for kind in kinds for name in getattr(storage_options, kind)}


def test_option_that_a_state_may_not_set_is_refused_by_its_name(state: dict[str, Any]) -> None:
    options = {*options_of_obstore(), *options_of_fsspec(), *own_options(), "max_gets", "hedge"}
    for name in options - ALLOWED - SERVERS:
        for url in ("s3://bucket/x", "memory://x"):
            with pytest.raises(ArgumentError, match=f"the storage option '{name}', which only you may set"):
                restore(changed(state, url=url, options={name: "x"}))
        with pytest.raises(ArgumentError, match=rf"the storage option 'client_kwargs\.{name}'"):
            restore(changed(state, url="s3://bucket/x", options={"client_kwargs": {name: "x"}}))


def test_protocol_that_a_state_may_not_name_is_refused(state: dict[str, Any]) -> None:
    for protocol in {*fsspec.available_protocols(), "nosuch", "FileCache"} - PLACES:
        with pytest.raises(ArgumentError, match="a place that only you may name"):
            restore(changed(state, url=f"{protocol}://x", options={}))
    for url in ("s3://bucket::filecache://x", "simplecache::file:///x", "zip::/x", 3, None):
        with pytest.raises(ArgumentError, match=r"only you may name|no text"):
            restore(changed(state, url=url, options={}))


def test_every_file_system_that_leads_to_another_one_is_refused() -> None:
    for protocol, kind in file_systems():
        leads = {"fo", "target_protocol", "remote_protocol", "fs"} & {*inspect.signature(kind).parameters}
        if leads or issubclass(kind, CachingFileSystem):
            assert protocol not in PLACES, protocol


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket/x", {"region": "evil.example/"}),  # https://s3.evil.example/.amazonaws.com
        ("s3://bucket/x", {"region": "a@evil.example#"}),
        ("s3://bucket/x", {"default_region": "evil.example\\"}),
        ("s3://bucket/x", {"client_kwargs": {"region_name": "evil.example/"}}),
        ("s3://evil.example\\/x", {"virtual_hosted_style_request": True}),
        ("s3://evil.example#/x", {"virtual_hosted_style_request": True}),
        ("gs://evil.example:80/x", {}),
        ("az://container/x", {"account_name": "evil.example/"}),
        ("abfss://container@1249763844\\.dfs.core.windows.net/x", {}),
    ],
)
def test_text_that_would_become_another_host_is_refused(
    state: dict[str, Any], url: str, options: dict[str, Any]
) -> None:
    found = restore_text(changed(state, url=url, options=options))
    assert "must have letters, digits, '.', '_' and '-' only" in found


def restore_text(state: dict[str, Any]) -> str:
    """Why its data cannot be read."""
    try:
        return str(restore(state).missing)
    except ArgumentError as error:
        return str(error)


@pytest.mark.parametrize(
    ("url", "variable", "named"),
    [
        ("s3://bucket/x", "AWS_ENDPOINT_URL", {"endpoint_url": "{}"}),
        ("s3://bucket/x", "AWS_ENDPOINT_URL", {"endpoint": "{}"}),
        ("s3://bucket/x", "AWS_ENDPOINT_URL", {"client_kwargs": {"endpoint_url": "{}"}}),
        ("s3://bucket/x", "AWS_ENDPOINT_URL", {"client": "s3fs", "endpoint_url": "{}"}),
        ("gs://bucket/x", "GOOGLE_BASE_URL", {"endpoint_url": "{}"}),
        ("gs://bucket/x", "GOOGLE_BASE_URL", {"base_url": "{}"}),
        ("az://bucket/x", "AZURE_STORAGE_ENDPOINT", {"endpoint_url": "{}", "account_name": "a"}),
        ("az://bucket/x", "AZURE_STORAGE_ENDPOINT", {"endpoint": "{}", "account_name": "a"}),
    ],
)
def test_server_of_a_state_is_asked_only_if_it_is_the_environments(
    state: dict[str, Any],
    url: str,
    variable: str,
    named: dict[str, Any],
    server: FaultServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = json.loads(json.dumps(named).replace("{}", server.endpoint_url))
    hostile = changed(state, url=url, options=place)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "ya29.token")
    monkeypatch.setenv("AZURE_STORAGE_TOKEN", "token")
    for own in (None, "http://127.0.0.1:9"):
        if own is not None:
            monkeypatch.setenv(variable, own)
        with pytest.raises(ArgumentError, match=r"names the server .*pass it with --endpoint-url"):
            restore(hostile)
    assert not server.requests
    monkeypatch.setenv(variable, f"{server.endpoint_url}/")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "fault-access-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "fault-secret-key")
    assert "names the server" not in restore_text(hostile)
    assert server.requests


def test_server_of_the_user_takes_the_place_of_the_states(state: dict[str, Any], server: FaultServer) -> None:
    with FaultServer({}) as evil:
        for name in SERVERS - {"base_url"}:
            hostile = changed(state, url="s3://bucket/x", options={name: evil.endpoint_url})
            restore(hostile, storage_options=server.options)
        nested = {"client_kwargs": {"endpoint_url": evil.endpoint_url}}
        restore(changed(state, url="s3://bucket/x", options=nested), storage_options=server.options)
        assert server.requests and not evil.requests


def test_option_of_the_user_is_not_the_states(state: dict[str, Any], server: FaultServer) -> None:
    given = {**server.options, "requester_pays": True}
    hostile = changed(state, url="s3://bucket/x", options={"requester_pays": False, "anon": True})
    assert "has 1 samples, and the run had 2" in str(restore(hostile, storage_options=given).missing)


def test_replay_of_a_hostile_state_writes_no_file(state: dict[str, Any], tmp_path: Path) -> None:
    root = Path(state["recipe"]["dataset"]["url"])
    options = {"target_protocol": "file", "cache_storage": str(tmp_path / "home"), "same_names": True}
    for protocol in ("filecache", "simplecache", "blockcache"):
        hostile = changed(state, url=f"{protocol}://{root}", options=options)
        (tmp_path / "state.json").write_text(json.dumps(hostile))
        result = command("replay", tmp_path / "state.json", "--step", 0)
        assert result.exit_code == 2 and "--data URL" in result.stderr
        assert not (tmp_path / "home").exists()


def test_what_a_state_keeps_opens_the_store_again() -> None:
    """What is written down is what is read: nothing that `describe` keeps is refused."""
    for url, options in (
        ("s3://bucket/x", {"region": "eu-west-1", "anon": True, "client_kwargs": {"region_name": "a"}}),
        ("s3://bucket/x", {"client": "s3fs", "anon": True, "requester_pays": True}),
        ("az://bucket/x", {"account_name": "account", "anon": True}),
        ("gs://bucket/x", {"anon": True}),
    ):
        kept, withheld = open_store(url, **options).public_options()
        assert storage_options.public_options(kept) == (kept, []) and kept.keys() <= ALLOWED
        assert withheld == [name for name in options if name == "requester_pays"]


@pytest.mark.parametrize(
    ("folder", "key", "says"),
    [
        ("memory://tables", "filecache://x/a.jpg", "a place that only you may name"),
        ("memory://tables", "hf://datasets/x/a.jpg", r"pass url='hf://\.\.\.'"),
        ("memory://tables", "simplecache::s3://bucket/x/a.jpg", "a place that only you may name"),
        ("memory://tables", "/home/somebody/.ssh/id", "names files of this machine"),
        ("memory://tables", "file:///home/somebody/.ssh/id", "names files of this machine"),
        ("{}", "filecache://x/a.jpg", "a place that only you may name"),
    ],
)
def test_place_that_a_table_may_not_name_is_refused(folder: str, key: str, says: str, tmp_path: Path) -> None:
    path = f"{folder.format(tmp_path)}/t.csv"
    with fsspec.open(path, "w") as file:
        file.write(f"image\n{key}\n")
    with pytest.raises(ArgumentError, match=says):
        TableDataset(path, File("image"))


@pytest.mark.parametrize("key", ["../a.jpg", "x/../../a.jpg", "/etc/passwd"])
def test_key_of_a_table_stays_below_its_url(key: str, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"x")
    (tmp_path / "in").mkdir()
    with pytest.raises(FastloadError, match="have no object"):
        TableDataset({"image": [key]}, File("image", decode=bytes), url=str(tmp_path / "in"))[0]


@pytest.mark.parametrize("folder", ["memory://shards/in", "{}"])
def test_shard_that_an_index_names_lies_in_its_bucket(folder: str, tmp_path: Path) -> None:
    folder = folder.format(tmp_path)
    for name in (
        *("/etc/passwd", "../b.tar", "a/../../b.tar", "s3://bucket/b.tar", "file:///etc/b.tar", "a//b.tar"),
        *("filecache://x/b.tar", "simplecache::s3://bucket/b.tar", "pipe:touch b", "b{0..9}.tar", "*.tar"),
        *("memory://elsewhere/b.tar", "memory://shards/../b.tar", "memory://shards2/b.tar", ""),
    ):
        with fsspec.open(f"{folder}/index.json", "w") as file:
            json.dump({"shardlist": [{"url": name}]}, file)
        with pytest.raises(ArgumentError, match="not a plain name below this folder"):
            TarDataset(f"{folder}/index.json")


@pytest.mark.parametrize("name", ["in/b.tar", "memory://shards/in/b.tar", "memory://shards/b.tar"])
def test_shards_of_the_index_own_bucket_are_read(name: str) -> None:
    with fsspec.open("memory://shards/index.json", "w") as file:
        json.dump([{"url": name}], file)
    with fsspec.open(f"memory://shards/{name.removeprefix('memory://shards/')}", "wb") as file:
        file.write(bytes(1024))
    assert "1 shard" in repr(TarDataset("memory://shards/index.json"))
