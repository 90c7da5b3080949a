"""What a state from anybody may say of a store. The rest is refused by name, before anything is opened."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import known_implementations
from typer.testing import CliRunner

import fastload
from fastload import CenterCrop, DataLoader, ImageFolder
from fastload.cli.app import app
from fastload.errors import ArgumentError
from fastload.loader.made_from import restore
from fastload.store import options as known_options
from fastload.store.object_store import NATIVE_PROTOCOLS
from fastload.store.recipe import options_of_recipe, url_of_recipe
from tests.photos import pillow_jpeg, scene

ALLOWED = {*NATIVE_PROTOCOLS, "file", "local", "memory"}
PROTOCOLS = sorted(({*known_implementations} | {*fsspec.available_protocols()}) - ALLOWED)
OBSTORE = {
    name for table in ("_S3_OWN", "_S3_NATIVE", "_GCS_OWN", "_GCS_NATIVE", "_AZURE_OWN", "_AZURE_NATIVE")
    for name in getattr(known_options, table)
}  # fmt: skip


def fsspec_options() -> Iterator[str]:
    """The arguments of every file system that is installed here."""
    for protocol in fsspec.available_protocols():
        try:
            kind = fsspec.get_filesystem_class(protocol)
        except (ImportError, ValueError):
            continue
        for base in kind.__mro__:
            yield from inspect.signature(base.__init__).parameters


OPTIONS = sorted({*OBSTORE, *fsspec_options()} - {"self", "args", "kwargs", "client_kwargs"})
REFUSED = [name for name in OPTIONS if name not in known_options.RECIPE_OPTIONS]
NESTED = ["verify", "config", "use_ssl", "aws_secret_access_key", "api_version"]


@pytest.fixture
def state(tmp_path: Path) -> dict[str, Any]:
    for number in range(4):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pillow_jpeg(scene(32, 24, number)))
    loader = DataLoader(ImageFolder(tmp_path / "photos", CenterCrop(8, resize=9)), 2)
    next(iter(loader))
    saved: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return saved


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_protocol_outside_the_list_is_refused(state: dict[str, Any], protocol: str) -> None:
    state["made_from"]["dataset"]["url"] = f"{protocol}://somewhere/photos"
    with pytest.raises(ArgumentError, match=r"may name no place of protocol .*--data URL"):
        restore(state)


@pytest.mark.parametrize(
    "url", ["filecache::s3://b/x", "zip://*.jpg::s3://b/x", "S3://b::file://x", "simplecache::file:///etc"]
)
def test_chain_is_refused(url: str) -> None:
    with pytest.raises(ArgumentError, match="--data URL"):
        url_of_recipe(url)


@pytest.mark.parametrize("url", [None, 3, "", b"s3://b", ["s3://b"], "s3://b/\0"])
def test_url_that_is_no_text_is_refused(url: Any) -> None:
    with pytest.raises(ArgumentError, match="--data URL"):
        url_of_recipe(url)


@pytest.mark.parametrize("name", REFUSED)
def test_option_outside_the_list_is_refused(state: dict[str, Any], name: str) -> None:
    made = state["made_from"]["dataset"]
    made["url"], made["options"] = "s3://bucket/photos", {name: "http://127.0.0.1:1/x"}
    with pytest.raises(ArgumentError, match=rf"{name}.*pass --"):
        restore(state)


@pytest.mark.parametrize("name", NESTED)
def test_nested_option_outside_the_list_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"client_kwargs\.{name}"):
        options_of_recipe("s3://b/x", {"client_kwargs": {name: False}}, {})


@pytest.mark.parametrize("value", [{"a": 1}, ["x"], 3, 1.5, None])
def test_value_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match="storage option 'region'"):
        options_of_recipe("s3://b/x", {"region": value}, {})
    with pytest.raises(ArgumentError):
        options_of_recipe("s3://b/x", value or "text", {})


SERVERS = [
    *((f"{scheme}://b/x", {name: "http://127.0.0.1:1"})
    for scheme in ("s3", "gs", "az") for name in known_options.ENDPOINT_OPTIONS),
    ("s3://b/x", {"client_kwargs": {"endpoint_url": "http://127.0.0.1:1"}}),
]  # fmt: skip


@pytest.mark.parametrize(("url", "options"), SERVERS)
def test_server_is_the_users_or_the_environments(
    url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArgumentError, match=r"'http://127\.0\.0\.1:1'.*pass --endpoint-url"):
        options_of_recipe(url, options, {})
    given = {"endpoint_url": "http://127.0.0.1:2"}
    assert {"client_kwargs": {}} | options_of_recipe(url, options, given) == {"client_kwargs": {}} | given
    for name in ("AWS_ENDPOINT_URL", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert {"client_kwargs": {}} | options_of_recipe(url, options, {}) == {"client_kwargs": {}}


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("az://container/x", {"account_name": "evil.example/#"}),
        ("abfss://container@16843009#.dfs.core.windows.net/x", {}),
        ("s3://bucket/x", {"region": "evil.example/"}),
        ("s3://bucket/x", {"client_kwargs": {"region_name": "a.evil.example/?"}}),
        ("s3://evil.example?/x", {"virtual_hosted_style_request": True}),
        ("gs://bucket#/x", {}),
    ],
)
def test_name_that_would_change_the_server_is_refused(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="letters, digits"):
        fastload.open_store(url, **options)


def test_what_describe_writes_is_read(state: dict[str, Any]) -> None:
    options = {
        "region": "eu-west-1",
        "anon": True,
        "client_kwargs": {"region_name": "x", "endpoint_url": "u"},
    }
    written, withheld = known_options.public_options(options | {"secret": "s", "use_azure_cli": True})
    assert withheld == ["secret", "use_azure_cli"]
    given = {"endpoint_url": "u"}
    assert options_of_recipe("s3://b/x", written, given) == {
        "region": "eu-west-1", "anon": True, "client_kwargs": {"region_name": "x"}, "endpoint_url": "u"
    }  # fmt: skip
    assert len(restore(state).arguments["dataset"]) == 4


def test_replay_of_a_hostile_state_writes_no_file(state: dict[str, Any], tmp_path: Path) -> None:
    """A caching file system stored what it read in a folder and under a name of the state's choice."""
    made, target = state["made_from"]["dataset"], tmp_path / "victim"
    made["url"] = f"filecache://{tmp_path}/photos"
    made["options"] = {"target_protocol": "file", "cache_storage": str(target), "same_names": True}
    (tmp_path / "evil.json").write_text(json.dumps(state))
    for options in ([], ["--html", str(tmp_path / "sheet.html")]):
        result = CliRunner().invoke(app, ["replay", str(tmp_path / "evil.json"), "--step", "0", *options])
        assert result.exit_code == 2 and "filecache" in result.stderr
    made["url"] = f"{tmp_path}/photos"
    (tmp_path / "evil.json").write_text(json.dumps(state))
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "evil.json"), "--step", "0"])
    assert result.exit_code == 2 and "target_protocol" in result.stderr
    assert not target.exists()


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/x?X-Amz-Signature=PWORD1",
        "az://cont/x?sig=PWORD1",
        "abfss://cont@acc.dfs.core.windows.net/x?sv=1&sig=PWORD1",
        "memory://x?token=PWORD1",
        "jlab://host:8888/?token=PWORD1",
        "https://host/x;token=PWORD1/y",
        "ftp://user:P/WORD1@host/x",
        "https://user:P/WORD1@host/x",
    ],
)
def test_secret_in_a_url_reaches_no_message(url: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        fastload.open_store(url, account_name="acc") if url.startswith("az") else fastload.open_store(url)
    assert "WORD1" not in str(caught.value) and "'P'" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
