"""Which place a store is and which version an object has: what a cache, a listing and a check go by."""

from __future__ import annotations

import os
import pickle
import tarfile
import threading
import zipfile
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import fastload
from fastload.errors import ArgumentError, ObjectChangedError, StoreError
from fastload.store import open_store
from fastload.store.listing import list_objects
from tests.commands import script
from tests.faultserver import FaultServer
from tests.storedata import CANARY, CLIENTS, clients, listed

OBJECTS = {"x": b"there"}


@pytest.fixture(autouse=True)
def no_environment(no_aws_settings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


class Hub(MemoryFileSystem):
    """A file system whose options choose the repository, and which says of a file what `fields` holds."""

    protocol = "hub"
    cachable = False
    repositories: ClassVar[dict[str, dict[str, bytes]]] = {}
    # file -> what `info` and `ls` say beside name, size and type
    fields: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, repo: str = "", **options: Any) -> None:
        super().__init__()
        self._files = self.repositories.get(repo, {})

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("hub://").strip("/")

    def isdir(self, path: str) -> bool:
        return True

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        name = path.rpartition("/")[2]
        if name not in self._files:
            raise FileNotFoundError(path)
        size = len(self._files[name])
        return {"name": path, "size": size, "type": "file", **self.fields.get(name, {})}

    def ls(self, path: str, **options: Any) -> list[dict[str, Any]]:
        return [self.info(f"{path}/{name}") for name in self._files]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return self._files[path.rpartition("/")[2]][start:end]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    fsspec.register_implementation("hub", Hub, clobber=True)
    monkeypatch.setattr(Hub, "repositories", {"": {"x": b"12345"}})
    monkeypatch.setattr(Hub, "fields", {})
    return Hub


# --- Which place: file systems of fsspec --------------------------------------------------------------------

PLACES: list[dict[str, Any]] = [
    {},
    *({"org": "a", "repo": "x"}, {"org": "a", "repo": "y"}, {"org": "b", "repo": "x"}),
    *({"repo": "x", "sha": "main"}, {"repo": "x", "ref": "main"}, {"repo": "x", "branch": "main"}),
    *({"endpoint": "https://one.example"}, {"endpoint": "https://two.example"}),
    *(
        {"endpoint_url": "https://one.example"},
        {"account_name": "one"},
        {"project": "one"},
        {"region": "one"},
    ),
    *({"client_kwargs": {"endpoint_url": "http://a"}}, {"client_kwargs": {"endpoint_url": "http://b"}}),
    *({"hosts": ["a", "b"]}, {"hosts": ["b", "a"]}, {"unheard_of": 1}, {"other": 1}),
    *({"connection": "Account=one;AccountKey=k"}, {"connection": "Account=two;AccountKey=k"}),
    *({"endpoint": "https://one.example?tenant=1"}, {"endpoint": "https://one.example?tenant=2"}),
]


def test_file_systems_with_other_options_are_other_places(hub: type[Hub]) -> None:
    identities = {open_store("hub://data", **options).identity for options in PLACES}
    assert len(identities) == len(PLACES)
    assert len({open_store(f"hub://{path}", repo="x").identity for path in ("data", "data2")}) == 2


SECRETS = dict.fromkeys(("token", "account_key", "password", "sas_token"), CANARY)
AMAZON = {"aws_secret_access_key": CANARY, "region_name": "r"}
ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"timeout": 3, "retries": 9, "block_size": 1, "use_listings_cache": False}, {}),
    ({**SECRETS, "auth": ("u", CANARY)}, {}),
    ({"client_kwargs": AMAZON}, {"client_kwargs": AMAZON | {"aws_secret_access_key": "another"}}),
    ({"endpoint": f"https://user:{CANARY}@one.example"}, {"endpoint": "https://one.example"}),
    ({"endpoint": f"https://one.example?sig={CANARY}"}, {"endpoint": "https://one.example?sig=another"}),
    (
        {"connection_string": f"Account=one;AccountKey={CANARY}"},
        {"connection_string": "Account=one;AccountKey=another"},
    ),
    ({"port": "2101"}, {"port": 2101}),
    ({"repo": None}, {}),
]


@pytest.mark.parametrize(("others", "same"), ALIKE, ids=lambda options: next(iter(options), ""))
def test_options_that_are_secret_or_no_place_leave_the_identity(
    others: dict[str, Any], same: dict[str, Any], hub: type[Hub]
) -> None:
    store = open_store("hub://data", **others)
    assert store.identity == open_store("hub://data", **same).identity
    assert not store.unidentified
    assert CANARY not in store.identity + repr(store) + store.url


def test_the_identity_of_a_file_system_is_the_same_in_every_process(hub: type[Hub]) -> None:
    options = {"hosts": {"a", "b", "c"}, "client_kwargs": {"b": 1, "a": 2}, "org": "o"}
    code = (
        "import fsspec; from fsspec.implementations.memory import MemoryFileSystem\n"
        "fsspec.register_implementation('hub', MemoryFileSystem)\n"
        f"from fastload.store import open_store; print(open_store('hub://data', **{options!r}).identity)"
    )
    said = [script(code, environment=os.environ | {"PYTHONHASHSEED": seed}) for seed in "12"]
    here = open_store("hub://data", **dict(reversed(options.items()))).identity
    assert {one.split("|")[1] for one in said} == {here.split("|")[1]}


def test_fsspecs_own_configuration_says_the_place_too(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"endpoint": "https://one.example"}
    plain = open_store("hub://data").identity
    monkeypatch.setitem(fsspec.config.conf, "hub", options)
    assert plain != open_store("hub://data").identity == open_store("hub://data", **options).identity


def test_two_repositories_chosen_by_options_share_no_cache(hub: type[Hub], tmp_path: Path) -> None:
    hub.repositories = {"x": {"0.bin": b"AAAA"}, "y": {"0.bin": b"BBBB"}}
    hub.fields = {"0.bin": {"sha": "same"}}
    for repo, body in (("x", b"AAAA"), ("y", b"BBBB"), ("x", b"AAAA")):
        dataset = fastload.ObjectDataset("hub://data", cache=tmp_path / "c", storage_options={"repo": repo})
        assert dataset[0] == body
        dataset._flush_cache()
        dataset.close()


def test_an_option_that_cannot_be_told_from_others_is_cached_by_nobody(
    hub: type[Hub], tmp_path: Path
) -> None:
    hub.fields = {"x": {"etag": "1"}}
    options = {"session": object()}
    with pytest.warns(UserWarning, match=r"storage option session.*nothing is cached"):
        dataset = fastload.ObjectDataset("hub://data", cache=tmp_path / "c", storage_options=options)
    assert dataset[0] == b"12345"
    dataset.close()
    assert not list((tmp_path / "c").rglob("*.manifest"))


# --- Which version: file systems of fsspec ------------------------------------------------------------------

FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"etag": '"1"'}, {"etag": '"2"'}),
    ({"blob_id": "1", "last_commit": None}, {"blob_id": "2", "last_commit": None}),  # Hugging Face
    ({"sha": "1"}, {"sha": "2"}),  # GitHub
    ({"hex": "1"}, {"hex": "2"}),  # git
    ({"oid": "1"}, {"oid": "2"}),
    ({"md5": "1"}, {"md5": "2"}),
    ({"generation": 1}, {"generation": 2}),
    ({"modify": "20240101000000"}, {"modify": "20240101000001"}),  # FTP with MLSD
    ({"modify": "20240101000000.123"}, {"modify": "20240101000000.124"}),
    ({"modificationTime": 1700000000000}, {"modificationTime": 1700000000001}),  # webhdfs
    ({"last_modified": "2025-01-01T00:00:00Z"}, {"last_modified": "2025-01-01T00:00:01Z"}),  # Jupyter
    ({"LastModified": 1735689600}, {"LastModified": 1735689601}),  # OSS
]


@pytest.mark.parametrize(("before", "after"), FIELDS, ids=lambda fields: next(iter(fields)))
def test_a_changed_file_of_the_same_size_is_noticed(before: Any, after: Any, hub: type[Hub]) -> None:
    hub.fields = {"x": before}
    store = open_store("hub://data")
    info = listed(store)["x"]
    assert info.version and info == store.head("x")
    assert store.read("x", info.version, info.size) == b"12345"
    hub.repositories[""]["x"], hub.fields["x"] = b"54321", after
    with pytest.raises(ObjectChangedError):
        store.read("x", info.version, info.size)
    assert listed(store)["x"].version != info.version


def test_a_file_is_compared_by_the_field_that_its_listing_had(hub: type[Hub]) -> None:
    """Some say more of one file than in a listing."""
    hub.fields = {"x": {"mtime": 5.0}}
    store = open_store("hub://data")
    info = listed(store)["x"]
    hub.fields = {"x": {"mtime": 5.0, "etag": "1"}}
    assert store.read("x", info.version, info.size) == b"12345"
    assert store.read_range("x", 1, 3, info.version) == b"23"
    hub.fields = {"x": {"mtime": 6.0, "etag": "1"}}
    with pytest.raises(ObjectChangedError):
        store.read("x", info.version, info.size)


NO_VERSION: list[dict[str, Any]] = [
    {},
    {"modify": "Nov 21 10:30"},  # FTP without MLSD
    {"mtime": 0},
    {"etag": "", "last_modified": None},
]


@pytest.mark.parametrize("fields", NO_VERSION, ids=["nothing", "coarse time", "zero", "empty"])
def test_objects_without_versions_are_read_and_not_cached(
    fields: dict[str, Any], hub: type[Hub], tmp_path: Path
) -> None:
    hub.repositories = {"": {"x": b"AAAA"}}
    hub.fields = {"x": fields}
    store = open_store("hub://data")
    assert listed(store)["x"].version == store.head("x").version == ""
    assert store.read("x", "", 4) == b"AAAA" and store.read_range("x", 1, 3, "") == b"AA"
    cache = tmp_path / "cache"
    for body in (b"AAAA", b"BBBB"):
        hub.repositories[""]["x"] = body
        with pytest.warns(UserWarning, match=r"no version of 1 of 1 objects.*nothing is cached"):
            dataset = fastload.ObjectDataset("hub://data", cache=cache)
        assert dataset[0] == body
        with pytest.raises(ArgumentError, match="nothing is cached"):
            next(dataset.warm([0]))
        dataset._flush_cache()
        dataset.close()
    assert not list(cache.rglob("*.manifest"))


def test_shards_without_versions_are_read_and_not_cached(hub: type[Hub], tmp_path: Path) -> None:
    for body in (b"AAAA", b"BBBB"):
        (tmp_path / "0.txt").write_bytes(body)
        with tarfile.open(tmp_path / "0.tar", "w") as tar:
            tar.add(tmp_path / "0.txt", "0.txt")
        hub.repositories = {"": {"0.tar": (tmp_path / "0.tar").read_bytes()}}
        with pytest.warns(UserWarning, match="nothing is cached"):
            dataset = fastload.TarDataset("hub://data", cache=tmp_path / "cache")
        for _ in range(2):
            batches = fastload.DataLoader(dataset, batch_size=None, num_workers=0)
            assert [sample["txt"] for sample in batches] == [body.decode()]
        dataset.close()
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix in (".manifest", ".places")]


def test_a_zip_archive_has_checksums_for_versions(tmp_path: Path) -> None:
    def write(body: bytes) -> None:
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.writestr("in/x", body)
            archive.writestr("in/empty", b"")

    write(b"one")
    store = open_store("zip://in", fo=str(tmp_path / "a.zip"))
    found = listed(store)
    assert {key: info.size for key, info in found.items()} == {"x": 3, "empty": 0}
    assert all(info.version for info in found.values())
    assert store.read("x", found["x"].version) == b"one"
    write(b"two")
    changed = pickle.loads(pickle.dumps(store))
    assert changed.identity == store.identity
    with pytest.raises(ObjectChangedError):
        changed.read("x", found["x"].version)
    assert open_store("zip://in", fo=str(tmp_path / "b.zip")).identity != store.identity


def test_an_http_server_that_names_no_version_is_read_and_not_cached() -> None:
    class Bare(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None: ...

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "3")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(b"abc")

        do_HEAD = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Bare) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = open_store(f"http://127.0.0.1:{server.server_port}")
        info = store.head("a")
        assert info == ("a", 3, "")
        assert bytes(store.read("a", info.version, info.size)) == b"abc"
        server.shutdown()


def test_a_manifest_with_one_object_without_version_says_so(hub: type[Hub]) -> None:
    hub.repositories = {"": {"x": b"1", "y": b"2", "z": b"3"}}
    hub.fields = {"x": {"etag": "1"}, "z": {"etag": "3"}}
    manifest = list_objects(open_store("hub://data"))
    assert manifest.unversioned == 1 and [manifest.version(i) for i in range(3)] == ["1", "", "3"]


# --- Which version: listings and answers that name different ones -------------------------------------------


@clients
def test_a_listing_without_etags_is_checked_by_size_and_time(client: dict[str, Any]) -> None:
    with FaultServer({"a.jpg": b"1" * 100}) as server:
        server.lists_etags = False
        server.modified["a.jpg"] = 1735689600.789  # a listing has more digits than a header
        store = open_store("s3://bucket", **server.options, **client)
        info = listed(store)["a.jpg"]
        assert info.version.startswith("100-1735689600")
        for answers in (True, False):
            server.answers_etags = answers
            assert bytes(store.read("a.jpg", info.version, info.size)) == b"1" * 100
            assert bytes(store.read_range("a.jpg", 10, 20, info.version)) == b"1" * 10
        server.answers_etags = True
        for body, written in ((b"2" * 100, 1735689601.0), (b"2" * 101, 1735689600.789)):
            server.objects["a.jpg"], server.modified["a.jpg"] = body, written
            for read in (
                lambda: store.read("a.jpg", info.version, info.size),
                lambda: store.read_range("a.jpg", 10, 20, info.version),
            ):
                with pytest.raises(ObjectChangedError):
                    read()
        assert "if-match" not in {name for request in server.requests for name in request.headers}


@clients
def test_a_cached_dataset_over_a_listing_without_etags_takes_up_changes(
    client: dict[str, Any], tmp_path: Path
) -> None:
    with FaultServer({"a.jpg": b"one"}) as server:
        server.lists_etags = False
        options = {**server.options, **client}

        def epoch() -> list[bytes]:
            dataset = fastload.ObjectDataset(
                "s3://bucket", cache=tmp_path, storage_options=options, on_change="refresh"
            )
            batches = fastload.DataLoader(dataset, batch_size=None, num_workers=1)
            return [bytes(sample) for sample in batches]

        assert epoch() == epoch() == [b"one"]
        gets = server.count("a.jpg")
        assert gets == 1, "the second epoch came from the cache"
        server.objects["a.jpg"], server.modified["a.jpg"] = b"two", 1735689700.0
        assert epoch() == [b"two"]


@clients
def test_answers_without_the_etag_that_was_listed_are_refused_in_words(client: dict[str, Any]) -> None:
    with FaultServer({"a.jpg": b"1"}) as server:
        store = open_store("s3://bucket", **server.options, **client)
        info = listed(store)["a.jpg"]
        server.answers_etags = server.honours_if_match = False
        with pytest.raises(StoreError, match=r"response to a read has none.*proxy") as caught:
            store.read("a.jpg", info.version, info.size)
        assert type(caught.value) is StoreError


# --- Which place: endpoints ---------------------------------------------------------------------------------


@clients
@pytest.mark.parametrize("where", ["profile", "services", "environment", "services before profile"])
def test_an_endpoint_of_a_profile_is_part_of_the_identity(
    where: str,
    client: dict[str, Any],
    server: FaultServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = server.endpoint_url
    settings = {
        "profile": f"endpoint_url = {url}\n",
        "services": f"services = mine\n[services mine]\ns3 =\n  endpoint_url = {url}\n",
        "environment": "endpoint_url = http://127.0.0.1:1\n",
        "services before profile": "endpoint_url = http://127.0.0.1:1\nservices = mine\n"
        f"[services mine]\ns3 =\n  endpoint_url = {url}\nsqs =\n  endpoint_url = http://127.0.0.1:2\n",
    }[where]
    (tmp_path / "config").write_text(f"[profile dev]\nregion = us-east-1\n{settings}")
    (tmp_path / "credentials").write_text(
        "[dev]\naws_access_key_id = kkkkkk\naws_secret_access_key = ssssss\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    if where == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    stores = [open_store("s3://bucket/p", profile="dev", **client)]
    monkeypatch.setenv("AWS_PROFILE", "dev")
    stores.append(open_store("s3://bucket/p", **client))
    assert {store.identity for store in stores} == {f"s3|{url}|bucket|p"}
    assert bytes(open_store("s3://bucket", profile="dev", **client).read("x")) == b"there"


@pytest.mark.parametrize(
    ("name", "url", "options"),
    [
        ("GOOGLE_BASE_URL", "gs://bucket", {"token": "anon"}),
        ("AZURE_STORAGE_ENDPOINT", "az://bucket", {"anon": True, "account_name": "a"}),
        ("AZURE_ENDPOINT", "az://bucket", {"anon": True, "account_name": "a"}),
    ],
)
def test_an_endpoint_of_the_environment_is_part_of_the_identity(
    name: str, url: str, options: dict[str, Any], server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, server.endpoint_url)
    store = open_store(url, **options)
    assert server.endpoint_url in store.identity
    assert bytes(store.read("x")) == b"there"


def test_an_endpoint_that_boto_is_told_to_ignore_is_ignored_and_one_of_fsspecs_configuration_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("[default]\nendpoint_url = http://127.0.0.1:1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert open_store("s3://b", client="s3fs").identity == "s3|http://127.0.0.1:1|b|"
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert open_store("s3://b", client="s3fs").identity == "s3||b|"
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "http://127.0.0.1:2"})
    assert open_store("s3://b", client="s3fs").identity == "s3|http://127.0.0.1:2|b|"


WITH_USER = f"http://someuser:{CANARY}@127.0.0.1:9"


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b/p", {"endpoint_url": WITH_USER}),
        ("s3://b/p", {"endpoint_url": WITH_USER, "anon": True}),
        ("s3://b/p", {"client_kwargs": {"endpoint_url": WITH_USER}}),
        ("s3://b/p", {"endpoint_url": WITH_USER, "client": "s3fs", "key": "k", "secret": "s"}),
        ("s3://b/p", {"endpoint_url": WITH_USER.removeprefix("http://")}),
        ("gs://b/p", {"endpoint_url": WITH_USER, "token": "anon"}),
        ("az://b/p", {"endpoint_url": WITH_USER, "anon": True}),
        (f"s3://someuser:{CANARY}@b/p", {}),
        (f"s3://someuser:{CANARY}@b/p", {"client": "s3fs"}),
        (f"az://someuser:{CANARY}@b/p", {"account_name": "a"}),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "-".join(value),
)
def test_a_user_that_no_request_would_carry_is_refused(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"user or password|no scheme") as caught:
        open_store(url, **options)
    assert CANARY not in str(caught.value) and "someuser" not in str(caught.value)


def test_a_user_of_the_environments_endpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", WITH_USER)
    for client in CLIENTS:
        with pytest.raises(ArgumentError, match=r"endpoint_url 'http://127\.0\.0\.1:9'"):
            open_store("s3://b/p", **client)


def test_a_user_in_an_endpoint_that_s3fs_sends_is_shown_nowhere() -> None:
    with FaultServer({"x": b"there"}) as server:
        endpoint = server.endpoint_url.replace("http://", f"http://someuser:{CANARY}@")
        store = open_store("s3://bucket", endpoint_url=endpoint, anon=True, client="s3fs")
        assert bytes(store.read("x")) == b"there"
        assert server.requests[-1].headers["authorization"].startswith("Basic ")
        assert store.identity == f"s3|{server.endpoint_url}|bucket|"
    shown = [store.identity, store.url, repr(store), repr(vars(store)["_location"])]
    with pytest.raises(StoreError) as caught:
        store.read("x", wait=_give_up)
    shown += [str(caught.value), repr(vars(caught.value))]
    assert not [text for text in shown if CANARY in text or "someuser" in text]


def _give_up(error: StoreError, seconds: float) -> None:
    raise error


def test_a_user_in_an_http_url_is_sent_and_shown_nowhere(server: FaultServer) -> None:
    base = server.endpoint_url.replace("http://", f"http://some%40user:{CANARY}@")
    store = open_store(f"{base}/bucket")
    assert bytes(store.read("x")) == b"there"
    sent = b64decode(server.requests[-1].headers["authorization"].removeprefix("Basic "))
    assert sent.decode() == f"some@user:{CANARY}"
    assert store.identity == open_store(f"{server.endpoint_url}/bucket").identity
    assert CANARY not in repr(vars(store)["_location"]) + store.url + repr(store)


def test_a_secret_in_nested_options_is_in_no_message() -> None:
    nested = {"aws_access_key_id": "k" * 8, "aws_secret_access_key": CANARY}
    store = open_store("s3://b", client="s3fs", client_kwargs=nested)
    failure = vars(store)["_location"].translate(OSError(f"signed with {CANARY}"), "get", None)
    assert CANARY not in str(failure)
