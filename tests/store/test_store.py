"""Stores: what they list and read is what is there, and every failure says what failed and what to do."""

from __future__ import annotations

import ftplib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fastload.cli.demo.s3_server import S3Server
from fastload.errors import (
    AccessDeniedError,
    ArgumentError,
    NotFoundError,
    ObjectChangedError,
    ShortReadError,
    StoreError,
)
from fastload.store import fsspec as s3fs_store
from fastload.store import object_store as native
from fastload.store import open_store, options
from tests.commands import script
from tests.faultserver import LIST, Fault, FaultServer
from tests.patience import PATIENCE
from tests.storedata import BODY, CANARY, CLIENTS, clients, listed, sizes

KEY = "403 a.jpg"  # must not be taken for a status
OBJECTS = {KEY: BODY}
pytestmark = pytest.mark.usefixtures("no_aws_settings")


# --- Keys ---------------------------------------------------------------------------------------------------

REFUSED_BY_OBSTORE = {"a//b", "/lead", "../up", "x/../y", "./z", "..", "tab\tkey"}
ODD_KEYS = [*REFUSED_BY_OBSTORE, "+", "%", "#", "?", "a%2Fb", "\\", "k" * 1024, "🦊"]


def test_every_key_by_s3fs() -> None:
    with FaultServer({key: key.encode() for key in ODD_KEYS}, page_size=4) as server:
        store = open_store("s3://bucket", **server.options, client="s3fs")
        assert sorted(listed(store)) == sorted(ODD_KEYS)
        for key in ODD_KEYS:
            assert store.read(key, server.etag(key)) == key.encode()


def test_every_key_by_obstore_is_read_or_refused() -> None:
    good = [key for key in ODD_KEYS if key not in REFUSED_BY_OBSTORE]
    with FaultServer({key: key.encode() for key in ODD_KEYS}, page_size=4) as server:
        store = open_store("s3://bucket", **server.options)
        for key in good:
            assert bytes(store.read(key, server.etag(key))) == key.encode()
        for key in REFUSED_BY_OBSTORE:
            with pytest.raises(StoreError) as caught:
                store.read(key)
            assert caught.value.key == key
        with pytest.raises(StoreError, match=r"a//b|\.\.|tab"):
            listed(store)
        for key in REFUSED_BY_OBSTORE:
            del server.objects[key]
        assert sorted(listed(store)) == sorted(good)


@pytest.mark.parametrize(("lost", "key"), [("/root//a.txt", "//"), ("/root/d//b.txt", "d//")])
def test_a_key_with_an_empty_segment_ends_a_listing_by_fsspec(lost: str, key: str) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe({"/root/a.txt": b"x", lost: b"y"})
    try:
        with pytest.raises(StoreError, match=f"'{key}' have an empty segment") as caught:
            listed(open_store("memory://root"))
    finally:
        fs.rm_file(lost)
    assert caught.value.key == key and caught.value.stage == "list"


@pytest.mark.parametrize("kind", ["path", "memory"])
def test_a_key_stays_below_its_root(kind: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("outside")
    (tmp_path / "root" / "in").mkdir(parents=True)
    fsspec.filesystem("memory").pipe({"/secret": b"outside", "/root/in/x": b"x"})
    store = open_store(tmp_path / "root" if kind == "path" else "memory://root")
    for key in (
        "../secret",
        "in/../../secret",
        "/secret",
        str(tmp_path / "secret"),
        "./../secret",
        "..",
        ".",
    ):
        for read in (store.head, store.read, lambda key: store.read_range(key, 0, 3)):
            with pytest.raises(NotFoundError):
                read(key)


def test_a_local_folder_deleted_during_a_listing_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1").touch()
    monkeypatch.setattr("fastload.store.local._PAGE", 1)
    pages = open_store(tmp_path).list()
    first = next(pages)[0].key[0]
    shutil.rmtree(tmp_path / ("b" if first == "a" else "a"))
    assert list(pages) == []


def test_local_trees_with_links_and_strange_names(tmp_path: Path) -> None:
    (tmp_path / "root" / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "linked").write_bytes(b"1")
    (tmp_path / "root" / "sub" / "loop").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "root" / "self").symlink_to("self")
    (tmp_path / "root" / "line\nbreak").write_bytes(b"22")
    os.mkfifo(tmp_path / "root" / "fifo")
    Path(os.fsdecode(os.fsencode(tmp_path / "root") + b"/latin\xe9")).write_bytes(b"333")
    store = open_store(tmp_path / "root")
    link = len(str(tmp_path / "nowhere"))
    assert sizes(store) == {"link/linked": 1, "line\nbreak": 2, "latin\udce9": 3, "dangling": link, "self": 4}
    assert store.folders() == {"sub", "link"}
    assert store.read("latin\udce9") == b"333"
    info = listed(store)["dangling"]
    with pytest.raises(NotFoundError, match="link to a file that is not there"):
        store.read("dangling", info.version, info.size)
    (tmp_path / "nowhere").write_bytes(b"there again")
    with pytest.raises(ObjectChangedError):
        store.read("dangling", info.version, info.size)
    assert listed(store)["dangling"].size == 11


# --- Listing ------------------------------------------------------------------------------------------------


@clients
def test_pages_and_a_page_that_fails(client: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    objects = {f"{i:04d}": b"x" * i for i in range(50)}
    monkeypatch.setattr(native, "_PAGE", 7)
    with FaultServer(objects, page_size=7) as server:
        server.script(LIST, None, None, None, Fault(status=503, code="SlowDown"), Fault(reset_after=100))
        store = open_store("s3://bucket", **server.options, **client)
        assert sizes(store) == {key: len(body) for key, body in objects.items()}
        assert server.count(LIST) == 1 + 8 + 2  # the contact, eight pages, two of them asked for again


@clients
def test_a_page_that_never_comes_is_an_error_not_an_end(client: dict[str, Any], gives_up: None) -> None:
    with FaultServer({f"{i:04d}": b"x" for i in range(50)}, page_size=7) as server:
        server.script(LIST, None, None, None, Fault(status=500), repeat=True)
        store = open_store("s3://bucket", **server.options, **client)
        with pytest.raises(StoreError) as caught:
            listed(store)
        assert caught.value.stage == "list"


# --- Faults of a read ---------------------------------------------------------------------------------------

# More of them, through the whole loader: `PASSING` of tests/engine_cases.py.
RECOVERED = {
    "503": [Fault(status=503, code="SlowDown")] * 2,
    "cut in the middle": [Fault(cut_after=100_001)],
    "reset twice": [Fault(reset_after=50_000), Fault(reset_after=1)],
    "stall": [Fault(stall_after=70_000)],
    "slow": [Fault(delay=0.3)],
}
REFUSED = {
    "403": (Fault(status=403, code="AccessDenied"), AccessDeniedError),
    "expired": (Fault(status=400, code="ExpiredToken"), AccessDeniedError),
    "404": (Fault(status=404, code="NoSuchKey"), NotFoundError),
    "other region": (Fault(status=400, code="AuthorizationHeaderMalformed"), StoreError),
    "412": (Fault(status=412, code="PreconditionFailed"), ObjectChangedError),
    "empty body": (Fault(body=b""), ShortReadError),
    "XML in a 200": (Fault(body=b"<Error><Code>InternalError</Code></Error>"), ShortReadError),
    "short body of its own length": (Fault(body=BODY[:1000]), ShortReadError),
    "long body": (Fault(body=BODY + b"x"), ObjectChangedError),
    "other ETag": (Fault(etag="0123456789abcdef"), ObjectChangedError),
    "503 for ever": (Fault(status=503, code="SlowDown"), StoreError),
    "cut for ever": (Fault(cut_after=1000), StoreError),
}


@clients
@pytest.mark.parametrize("name", RECOVERED)
def test_faults_that_retries_help(
    name: str, client: dict[str, Any], server: FaultServer, impatient: None
) -> None:
    server.script(KEY, *RECOVERED[name])
    store = open_store("s3://bucket", **server.options, **client)
    assert bytes(store.read(KEY, server.etag(KEY), len(BODY))) == BODY
    if name != "slow":
        assert server.count(KEY) == 1 + len(RECOVERED[name])


@clients
@pytest.mark.parametrize("name", REFUSED)
def test_faults_that_are_errors(
    name: str, client: dict[str, Any], server: FaultServer, gives_up: None
) -> None:
    fault, expected = REFUSED[name]
    server.script(KEY, fault, repeat=True)
    store = open_store("s3://bucket", **server.options, **client)
    start = time.monotonic()
    with pytest.raises(expected, match=r"403 a\.jpg") as caught:
        store.read(KEY, server.etag(KEY), len(BODY))
    assert type(caught.value) is expected
    assert time.monotonic() - start < 20
    assert caught.value.key == KEY and caught.value.stage == "get"
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    if expected in (AccessDeniedError, NotFoundError, ObjectChangedError):
        assert server.count(KEY) == 1, "asking again could not help"


@clients
def test_a_resumed_read_never_mixes_versions(
    client: dict[str, Any], server: FaultServer, gives_up: None
) -> None:
    etag = server.etag(KEY)
    server.script(KEY, Fault(cut_after=100_000), Fault(etag="another-version"), repeat=True)
    store = open_store("s3://bucket", **server.options, **client)
    with pytest.raises(StoreError):
        store.read(KEY, etag, len(BODY))


@clients
@pytest.mark.parametrize("honoured", [True, False], ids=["412", "server ignores If-Match"])
def test_versions_travel_with_every_read(client: dict[str, Any], server: FaultServer, honoured: bool) -> None:
    server.honours_if_match = honoured
    store = open_store("s3://bucket", **server.options, **client)
    old = store.head(KEY)
    assert bytes(store.read_range(KEY, 1000, 2000, old.version)) == BODY[1000:2000]
    server.objects[KEY] = bytes(len(BODY))
    for read in (
        lambda: store.read(KEY, old.version, old.size),
        lambda: store.read_range(KEY, 1000, 2000, old.version),
    ):
        with pytest.raises(ObjectChangedError, match=r"403 a\.jpg"):
            read()
    reads = [request for request in server.requests if request.method == "GET"]
    assert {request.headers.get("if-match") for request in reads} == {f'"{old.version}"'}


@pytest.mark.stress
@clients
def test_guard_removed_wrong_bytes_come_through(
    client: dict[str, Any], server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above would fail without `check_version` and `check_length`."""
    module = s3fs_store if client else native
    monkeypatch.setattr(module, "check_version", lambda *arguments: None)
    monkeypatch.setattr(module, "check_length", lambda *arguments: None)
    store = open_store("s3://bucket", **server.options, **client)
    listed = store.head(KEY)
    server.script(KEY, Fault(body=b""))
    assert bytes(store.read(KEY, listed.version, listed.size)) == b""
    server.honours_if_match = False
    server.objects[KEY] = bytes(len(BODY))
    assert bytes(store.read(KEY, listed.version, listed.size)) == bytes(len(BODY))


@clients
@pytest.mark.parametrize(
    ("status", "code"), [(301, "PermanentRedirect"), (400, "AuthorizationHeaderMalformed")]
)
def test_another_region_is_said(status: int, code: str, client: dict[str, Any], server: FaultServer) -> None:
    server.script(KEY, Fault(status=status, code=code), repeat=True)
    with pytest.raises(StoreError, match="set region="):
        open_store("s3://bucket", **server.options, **client).read(KEY)


@clients
def test_ranges_past_the_end(client: dict[str, Any], server: FaultServer) -> None:
    store = open_store("s3://bucket", **server.options, **client)
    with pytest.raises(StoreError, match=r"403 a\.jpg"):
        store.read_range(KEY, 10, len(BODY) + 1)
    for start, stop in [(-1, 5), (5, 4)]:
        with pytest.raises(ArgumentError):
            store.read_range(KEY, start, stop)


# --- First contact ------------------------------------------------------------------------------------------


@clients
@pytest.mark.parametrize(
    ("url", "changes", "expected", "words"),
    [
        ("s3://nobucket/x", {}, NotFoundError, "bucket 'nobucket' does not exist.*endpoint_url"),
        ("s3://bucket", {"key": "wrong", "secret": CANARY}, AccessDeniedError, "options key"),
        ("s3://bucket", {"secret": CANARY}, AccessDeniedError, "options key"),
        ("s3://bucket", {"endpoint_url": "http://127.0.0.1:1"}, StoreError, "http://127.0.0.1:1.*check"),
        ("s3://bucket", {"endpoint_url": "http://no.such.host.invalid"}, StoreError, "no.such.host.invalid"),
        ("s3://bucket", {"endpoint_url": "silent"}, StoreError, "no progress|no answer"),
    ],
    ids=["bucket", "key", "secret", "refused", "dns", "silent"],
)
def test_first_contact_fails_soon_and_in_words(
    url: str,
    changes: dict[str, str],
    expected: type[StoreError],
    words: str,
    client: dict[str, Any],
    s3: S3Server,
) -> None:
    listener = None
    if changes.get("endpoint_url") == "silent":
        listener = socket.create_server(("127.0.0.1", 0))
        changes = {"endpoint_url": f"http://127.0.0.1:{listener.getsockname()[1]}"}
    store = open_store(url, **{**s3.options, **changes}, **client)
    start = time.monotonic()
    with pytest.raises(expected, match=words) as caught:
        listed(store)
    assert time.monotonic() - start < 10
    assert caught.value.stage == "list"
    assert CANARY not in str(caught.value) and s3.options["secret"] not in str(caught.value)
    if listener is not None:
        listener.close()


def test_no_credentials_and_no_metadata_service(s3: S3Server) -> None:
    """Off the clouds, the address of the machine's identity answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        metadata = f"http://127.0.0.1:{listener.getsockname()[1]}"
        store = open_store("s3://bucket", endpoint_url=s3.endpoint_url, metadata_endpoint=metadata)
        start = time.monotonic()
        words = r"^\[list\] no credentials found.*AWS_ACCESS_KEY_ID.*profile 'default'.*anon=True"
        with pytest.raises(StoreError, match=words) as caught:
            listed(store)
        assert time.monotonic() - start < 10
        assert type(caught.value) is AccessDeniedError


def test_no_credentials_for_s3fs(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = open_store("s3://bucket", endpoint_url=s3.endpoint_url, client="s3fs")
    with pytest.raises(AccessDeniedError, match=r"^\[list\] no credentials found.*anon=True"):
        listed(store)


@clients
def test_the_stores_refusal_is_its_code_and_message(client: dict[str, Any], s3: S3Server) -> None:
    store = open_store("s3://bucket", **{**s3.options, "secret": CANARY}, **client)
    with pytest.raises(AccessDeniedError, match="The request signature we calculated does not") as caught:
        listed(store)
    assert "<" not in str(caught.value).replace("<query>", "")


@pytest.mark.parametrize(
    ("url", "given", "words"),
    [
        ("s4://bucket", {}, "'s4' is unknown.*known: "),
        ("ftpp://host/x", {}, "did you mean 'ftp'"),
        ("", {}, "empty"),
        ("s3://", {}, "names no bucket"),
        ("https://", {}, "names no host"),
        ("https://host/x?signature=" + CANARY, {}, "takes no query"),
        (f"https://host/x#{CANARY}", {}, "takes no query"),
        (f"https://host/x;token={CANARY}/y", {}, "no parameters"),
        (f"s3://bucket/x?X-Amz-Signature={CANARY}", {}, "'s3://bucket/x' is a base for keys"),
        (f"az://container/x?sig={CANARY}", {"account_name": "a"}, "takes no query"),
        (f"abfss://c@a.dfs.core.windows.net/x?sig={CANARY}", {}, "takes no query"),
        (f"memory://x?token={CANARY}", {}, "takes no query"),
        (f"jupyter://host:8888/?token={CANARY}", {}, "Pass a token as a storage option"),
        (f"ftp://user:P/{CANARY}@host/x", {}, "a url of ftp:// cannot be read: write / : @ #"),
        ("simplecache::s3://bucket", {}, "give 's3://bucket' alone.*cache=DIRECTORY"),
        ("filecache::zip://x::s3://b/a.zip", {}, "unpack the archive"),
        (f"zip://*.jpg::s3://key:{CANARY}@bucket/a.zip", {}, "unpack the archive"),
        ("zip://x::a.zip", {}, "unpack the archive"),
        (["s3://a", f"http://user:{CANARY}@b"], {}, "one URL or path.*ConcatDataset.*shards take a list"),
        (None, {}, "one URL or path"),
        (b"/data", {}, "one URL or path"),
        ("az://container", {}, "account_name"),
        ("s3://bucket", {"secrt": "x"}, "'secrt'.*did you mean 'secret'"),
        ("s3://bucket", {"region_name": "us-east-1"}, "did you mean 'region'"),
        ("https://s3.console.aws.amazon.com/s3/buckets/b/train/?x=1", {}, "give 's3://b/train'"),
        ("https://console.cloud.google.com/storage/browser/b/train;tab=objects", {}, "give 'gs://b/train'"),
        ("s3://bucket", {"key": CANARY}, "belong together"),
        ("s3://bucket", {"endpoint_url": "localhost:9000"}, "no scheme: write http://"),
        ("s3://bucket", {"client": "boto3"}, "only 's3fs'"),
        ("s3://bucket", {"profile": "nobody"}, "no AWS profile 'nobody'"),
        ("s3://bucket", {"client_kwargs": {"config": 1}}, "client='s3fs'"),
        ("s3://bucket", {"client_kwargs": CANARY}, "client_kwargs must be a dict"),
        ("s3://bucket", {"client_kwargs": CANARY, "client": "s3fs"}, "client_kwargs must be a dict"),
        ("s3://bucket", {"client_kwargs": {"verify": "/nope.pem"}}, "'/nope.pem' is no file of certificates"),
        ("s3://bucket", {"client_kwargs": {"verify": 5}}, "verify=5 is no file of certificates"),
        ("s3://bucket", {"endpoint_url": 5}, "endpoint_url must be a URL.*type int"),
        ("gs://bucket", {"endpoint_url": 5}, "endpoint_url must be a URL.*type int"),
        ("gs://bucket", {"token": {"x": 1}}, "'anon' or the path"),
        ("file:///tmp", {"endpoint_url": "http://x"}, "takes none"),
    ],
)
def test_wrong_arguments_are_found_at_once(url: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as caught:
        open_store(url, **given)
    assert CANARY not in str(caught.value)


def test_http_is_read_but_not_listed(server: FaultServer) -> None:
    store = open_store(f"{server.endpoint_url}/bucket")
    info = store.head(KEY)
    assert bytes(store.read(KEY, info.version, info.size)) == BODY
    assert bytes(store.read_range(KEY, 5, 10, info.version)) == BODY[5:10]
    with pytest.raises(NotFoundError, match="nope"):
        store.read("nope")
    with pytest.raises(ArgumentError, match="no listing"):
        listed(store)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://bucket.s3.eu-west-1.amazonaws.com/train", "open 's3://bucket/train'"),
        ("https://my.bucket.s3.amazonaws.com", "open 's3://my.bucket'"),
        ("https://s3-eu-west-1.amazonaws.com/bucket/train/", "open 's3://bucket/train'"),
        ("https://storage.googleapis.com/bucket/train", "open 'gs://bucket/train'"),
        ("https://minio:9000/bucket/x", "open 's3://bucket/x' with .*'endpoint_url': 'https://minio:9000'"),
        ("https://example.com", "open 's3://BUCKET/PREFIX' with"),
    ],
)
def test_http_without_a_listing_says_what_to_open(url: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as caught:
        listed(open_store(url))
    assert f"take keys=, and datasets of shards a list of URLs, or '{url.rstrip('/')}/{{" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("bucket/train", r"(?m)does not exist; check the url \(is it s3://bucket/train\?\)$"),
        (Path("s3://bucket/train"), r"(?m)\(is it s3://bucket/train\?\)$"),
        ("gs:bucket", r"(?m)\(is it gs://bucket\?\)$"),
        ("train", "(?m)check the url$"),
        ("/data/train", "(?m)check the url$"),
        ("./data/train", "(?m)check the url$"),
        ("~/no-such-data/train", "(?m)check the url$"),
    ],
)
def test_a_directory_that_is_not_there_may_be_meant_as_a_bucket(
    path: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError, match=words):
        listed(open_store(path))


def test_google_and_azure_by_endpoint(server: FaultServer) -> None:
    store = open_store("gs://bucket", endpoint_url=server.endpoint_url, token="anon")
    info = listed(store)[KEY]
    assert bytes(store.read(KEY, info.version, info.size)) == BODY
    assert store.identity == f"gs|{server.endpoint_url}|bucket|"
    store = open_store("az://bucket", endpoint_url=server.endpoint_url, anon=True, account_name="account")
    assert bytes(store.read(KEY, server.etag(KEY))) == BODY


def test_every_request_to_a_requester_pays_bucket_says_who_pays(server: FaultServer) -> None:
    options = {"endpoint_url": server.endpoint_url, "key": "key", "secret": "secret", "requester_pays": True}
    store = open_store("s3://bucket", **options)
    info = listed(store)[KEY]
    store.head(KEY)
    store.read(KEY, info.version, info.size)
    assert len(server.requests) >= 3
    assert {request.headers.get("x-amz-request-payer") for request in server.requests} == {"requester"}


# --- Options and credentials --------------------------------------------------------------------------------


def test_credentials_come_from_one_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = file-key\naws_secret_access_key = file-secret\n"
        "[other]\naws_access_key_id = other-key\naws_secret_access_key = other-secret\n"
        "aws_session_token = t\n"
        "[role]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = default\n"
        "[own-role]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = own-role\n"
        "aws_access_key_id = source-key\naws_secret_access_key = source-secret\n"
    )
    (tmp_path / "config").write_text(
        "[profile other]\nregion = eu-west-1\nendpoint_url = http://minio:9000\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    def found(**given: Any) -> tuple[Any, ...]:
        connection = options.s3(given, "bucket")
        credentials = connection.credentials or {}
        return credentials.get("access_key_id"), credentials.get("token"), connection.config["region"]

    assert found() == ("file-key", None, "us-east-1")
    assert found(profile="other") == ("other-key", "t", "eu-west-1")
    assert options.s3({"profile": "other"}, "b").client_options == {"allow_http": True}
    assert options.s3({"profile": "role"}, "b").profile == "role"
    assert options.s3({"profile": "own-role"}, "b").profile == "own-role"
    assert found(profile="own-role")[0] is None, "boto assumes the role; the keys are what it does that with"
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert found() == ("other-key", "t", "eu-west-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "env-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "env-token")
    monkeypatch.setenv("AWS_REGION", "ap-south-1")
    assert found() == ("env-key", "env-token", "ap-south-1")
    assert found(profile=None)[0] == "env-key"
    assert found(profile="other", region="x") == ("other-key", "t", "x")
    assert found(key="k", secret="s") == ("k", None, "ap-south-1")
    assert found(key="k", secret="s", token="t", client_kwargs={"region_name": "r"}) == ("k", "t", "r")
    assert found(access_key_id="k", secret_access_key="s", session_token="t")[:2] == ("k", "t")
    assert options.s3({"anon": True}, "bucket").credentials is None


@clients
def test_a_listing_gets_new_credentials_from_their_source(
    client: dict[str, Any], server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    store = None
    for token in ("first-token", "second-token"):
        server.token = token
        (tmp_path / "credentials").write_text(
            "[default]\naws_access_key_id = kkkkkk\naws_secret_access_key = ssssss\n"
            f"aws_session_token = {token}\n"
        )
        store = store or open_store("s3://bucket", endpoint_url=server.endpoint_url, **client)
        assert set(listed(store)) == set(server.objects)
        assert bytes(store.read(KEY)) == BODY


def test_given_keys_are_not_sent_with_the_environments_token(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", CANARY)
    open_store("s3://bucket", **server.options).read(KEY)
    assert "x-amz-security-token" not in server.requests[-1].headers
    assert "fault-access-key" in server.requests[-1].headers["authorization"]


def test_endpoint_and_anonymous_from_environment(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
    for client in CLIENTS:
        store = open_store("s3://bucket", anon=True, **client)
        assert bytes(store.read(KEY)) == BODY
        assert "authorization" not in server.requests[-1].headers
        assert store.identity == f"s3|{server.endpoint_url}|bucket|"


def test_a_bucket_as_host_name() -> None:
    """A slash behind it begins no key."""
    for endpoint in ("https://obs.example.com", "https://obs.example.com/", "https://b.obs.example.com/"):
        given = {"endpoint_url": endpoint, "virtual_hosted_style_request": True, "anon": True}
        assert options.s3(given, "b").config["endpoint"] == "https://b.obs.example.com"


def test_other_places_have_other_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them has listed, and what was cached of it, is nothing to the other."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    named = open_store("abfss://train@one.dfs.core.windows.net/x").identity
    assert named == open_store("az://train/x", account_name="one").identity
    assert named != open_store("az://train/x", account_name="two").identity
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "one")
    assert named == open_store("az://train/x").identity
    places = ["ftp://me:pw@host:2101/data", "ftp://host:2102/data", "ftp://host/data", "ftp://other/data"]
    found = {open_store(place).identity for place in places}
    assert len(found) == 4 and not any("pw" in one or "me" in one for one in found)


def test_what_answered_once_is_waited_for_in_other_processes_too(tmp_path: Path) -> None:
    from fastload.store.listing import list_objects

    (tmp_path / "a").touch()
    store = open_store(tmp_path)
    assert not store.reached
    list_objects(store)
    assert pickle.loads(pickle.dumps(store)).reached
    for one in (
        open_store("s3://b", anon=True),
        open_store("s3://b", client="s3fs"),
        open_store("memory://x"),
    ):
        one.reached = True
        assert pickle.loads(pickle.dumps(one)).reached


def test_a_web_server_that_knows_no_ranges(tmp_path: Path) -> None:
    """Python's own answers with all of the file."""
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None: ...

    (tmp_path / "a").write_bytes(BODY)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        store = open_store(f"http://127.0.0.1:{running.server_port}")
        for start, stop in ((0, 10), (5, 100), (len(BODY) - 3, len(BODY))):
            assert bytes(store.read_range("a", start, stop)) == BODY[start:stop]
        running.shutdown()


@pytest.mark.parametrize("version", ["", 'W/"x'])
def test_a_version_that_can_be_no_condition(version: str) -> None:
    store = open_store("s3://b", client="s3fs")
    assert "IfMatch" not in store._object("key", version)  # type: ignore[attr-defined]
    assert store._object("key", "x")["IfMatch"] == '"x"'  # type: ignore[attr-defined]


def test_nothing_shows_a_secret(s3: S3Server, gives_up: None) -> None:
    assert s3.secret not in repr(s3)
    shown: list[str] = []
    for extra in CLIENTS:
        store = open_store(
            "s3://bucket/pre", **{**s3.options, "secret": CANARY, "token": CANARY + "t"}, **extra
        )
        shown += [repr(store), str(store), store.url, store.identity]
        for call, arguments in ((listed, (store,)), (store.head, ("x",)), (store.read, ("x",))):
            with pytest.raises(StoreError) as caught:
                call(*arguments)
            shown += [str(caught.value), repr(caught.value), repr(caught.value.__dict__)]
    web = open_store(f"http://user:{CANARY}@127.0.0.1:1/base")
    shown += [repr(web), web.url, web.identity, repr(vars(web)["_location"])]
    with pytest.raises(StoreError) as caught:
        web.head("x")
    shown.append(str(caught.value))
    sftp = "sftp://user:" + CANARY + "@host/dir"
    try:
        shown += [repr(open_store(sftp))]
    except ArgumentError as error:  # paramiko is not installed
        shown.append(str(error))
    assert not [text for text in shown if CANARY in text]


# --- Processes ----------------------------------------------------------------------------------------------


FORKED = (
    f"KEY = {KEY!r}"
    + """
import os, sys, signal
from fastload.store import open_store
from fastload.store.client_process import keep_clients_here
options = {"key": "k" * 8, "secret": "s" * 8, "endpoint_url": sys.argv[1]}
if sys.argv[2]: options["client"] = sys.argv[2]
store = open_store("s3://bucket", **options)
if sys.argv[3] == "kept": keep_clients_here()
for reads in sys.argv[3:]:
    if reads: store.read(KEY)
    assert ("obstore" in sys.modules) == (reads == "kept")
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            print(len(store.read(KEY)), flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    print(os.waitpid(pid, 0)[1], flush=True)
"""
)


@pytest.mark.parametrize("client", ["", "s3fs"])
def test_a_forked_child_reads_whether_or_not_its_parent_has(client: str, server: FaultServer) -> None:
    assert script(FORKED, server.endpoint_url, client, "", "read").split() == [str(len(BODY)), "0"] * 2


def test_a_fork_of_a_process_that_keeps_its_client_is_an_error_not_a_hang(server: FaultServer) -> None:
    said = script(FORKED, server.endpoint_url, "", "kept")
    assert "StoreError" in said and "forkserver" in said and said.endswith("0\n")


_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)


@pytest.mark.stress
def test_guard_removed_that_fork_would_hang(server: FaultServer) -> None:
    """The same script without the record of use dies by its alarm.

    Or its parent does. The two share an epoll instance; what a new connection of the child announces there is
    an address in the child's memory, and the parent's threads follow it.
    """
    unguarded = FORKED.replace(
        "pid = os.fork()",
        "from fastload.store.object_store import obstore_in_use as used; used.drop(); pid = os.fork()",
    )
    command = [sys.executable, "-W", "error", "-c", unguarded.replace("alarm(20)", "alarm(3)")]
    command += [server.endpoint_url, "", "kept"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert result.stdout.split() == ["14"] or result.returncode in _CRASHES, result


def test_threads_share_one_client(server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    built: list[int] = []
    build = native.NativeStore._client

    def counted(store: native.NativeStore, patience: Any) -> Any:
        built.append(os.getpid())
        return build(store, patience)

    monkeypatch.setattr(native.NativeStore, "_client", counted)
    monkeypatch.setattr(native.NativeStore, "_built", lambda _: built, raising=False)
    store = open_store("s3://bucket", **server.options)
    with ThreadPoolExecutor(16) as pool:
        bodies = list(pool.map(lambda _: bytes(store.read(KEY)), range(64)))
    (where,) = store._attempt("_built")
    assert set(bodies) == {BODY} and where != os.getpid()


@pytest.mark.parametrize("protocol", ["ftp", "sftp", "ssh", "unheard"])
def test_threads_take_turns_at_the_one_connection_of_a_file_system(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    both, together, limits = threading.Barrier(2), list[str](), list[float]()

    class OneConnection(fsspec.get_filesystem_class("file")):  # type: ignore[misc]
        ftp = SimpleNamespace(get_channel=lambda: SimpleNamespace(settimeout=limits.append))

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return path.removeprefix(f"{protocol}://host")

        def cat_file(self, path: str, **span: Any) -> Any:
            with suppress(threading.BrokenBarrierError):
                both.wait(0.1)
                together.append(path)
            return super().cat_file(path, **span)

    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, protocol, OneConnection)
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    store = open_store(f"{protocol}://host{tmp_path}")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(store.read, "ab")) == [b"a", b"b"]
    assert not together and sizes(store) == {"a": 1, "b": 1}
    assert bool(limits) == (protocol in ("sftp", "ssh")), "paramiko's channel has no time limit of its own"


def test_s3fs_asks_again_where_a_server_answers_another_range(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.objects["x"] = b"0123456789"
    get, asked = s3fs_store._get, list[str]()

    async def aligned(fs: Any, request: Any) -> Any:
        asked.append(request["Range"])
        return await get(fs, {**request, "Range": "bytes=0-3"} if len(asked) == 1 else request)

    monkeypatch.setattr(s3fs_store, "_get", aligned)
    store = open_store("s3://bucket", client="s3fs", **server.options)
    assert store.read_range("x", 4, 8) == b"4567" and server.count("x") == 2


class Flaky(MemoryFileSystem):
    """A file system with the objects a/1 and b/2, whose `faults` are raised at a path, one at a call."""

    protocol = "flaky"
    cachable = False
    faults: dict[str, list[Exception]]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("flaky://").strip("/")

    def info(self, path: str, **options: Any) -> Any:
        self._fail(path)
        return super().info(path, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._fail(path)
        return super().ls(path, detail, **options)

    def _fail(self, path: str) -> None:
        if self.faults.get(path):
            raise self.faults[path].pop(0)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> type[Flaky]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(Flaky, "store", {})
    monkeypatch.setattr(Flaky, "pseudo_dirs", [""])
    monkeypatch.setattr(Flaky, "faults", {}, raising=False)
    Flaky().pipe({"/r/a/1": b"1", "/r/b/2": b"2"})
    return Flaky


def test_a_folder_that_a_file_system_cannot_list_is_an_error_and_not_empty(flaky: type[Flaky]) -> None:
    flaky.faults = {"/r/b": [PermissionError("/r/b")]}
    with pytest.raises(AccessDeniedError, match="/r/b") as caught:
        listed(open_store("flaky://r"))
    assert caught.value.stage == "list"


@pytest.mark.parametrize(
    "options",
    [
        *({"Auth": ("someuser", CANARY)}, {"passphrase": CANARY}, {"password": CANARY.encode()}),
        *({"config": {"user": "one", "key_content": CANARY}}, {"token": {"value": CANARY}}),
        *({"login": f"Account=one;AccountKey={CANARY}"}, {"account_url": f"https://x/?sig={CANARY}&sv=1"}),
    ],
    ids=str,
)
def test_no_error_shows_a_secret_whatever_the_option(flaky: type[Flaky], options: dict[str, Any]) -> None:
    flaky.faults = {"/r/b": [PermissionError(f"refused: {options}")]}
    with pytest.raises(AccessDeniedError, match="refused") as caught:
        listed(open_store("flaky://r", **options))
    assert CANARY not in str(caught.value)


def test_a_folder_that_is_not_listed_at_once_is_asked_for_again(flaky: type[Flaky]) -> None:
    flaky.faults = {"/r/b": [TimeoutError("no answer"), ConnectionResetError("reset")]}
    assert set(listed(open_store("flaky://r"))) == {"a/1", "b/2"}


def test_a_second_listing_is_no_older_one_that_the_file_system_keeps(
    flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    def keeping(self: Flaky, path: str, detail: bool = True, **options: Any) -> Any:
        if path not in self.dircache:
            self.dircache[path] = MemoryFileSystem.ls(self, path, detail)
        return self.dircache[path]

    monkeypatch.setattr(flaky, "ls", keeping)
    monkeypatch.setattr(flaky, "invalidate_cache", lambda self, path=None: self.dircache.clear())
    store = open_store("flaky://r")
    assert set(listed(store)) == {"a/1", "b/2"}
    flaky().pipe({"/r/b/3": b"3"})
    assert set(listed(store)) == {"a/1", "b/2", "b/3"}


def test_a_first_contact_that_fails_is_asked_for_again(flaky: type[Flaky]) -> None:
    flaky.faults = {"/r": [TimeoutError("no answer")]}
    assert set(listed(open_store("flaky://r"))) == {"a/1", "b/2"}


def test_a_first_contact_that_is_refused_is_not_taken_for_a_missing_directory(flaky: type[Flaky]) -> None:
    flaky.faults = {"/r": [PermissionError("/r")]}
    with pytest.raises(AccessDeniedError):
        listed(open_store("flaky://r"))
    with pytest.raises(NotFoundError, match="no such directory"):
        listed(open_store("flaky://other"))


def test_folders_that_are_not_listed_at_once_are_asked_for_again(flaky: type[Flaky]) -> None:
    store = open_store("flaky://r")
    flaky.faults = {"/r": [TimeoutError("no answer"), ConnectionResetError("reset")]}
    assert store.folders() == {"a", "b"}


@pytest.mark.parametrize("lost", [OSError("Socket is closed"), EOFError(), BrokenPipeError("broken pipe")])
def test_a_connection_that_is_lost_is_replaced_by_a_new_one(
    lost: Exception, flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Flaky] = []

    def read(self: Flaky, path: str, **span: Any) -> Any:
        used.append(self)
        if self is used[0]:
            raise lost
        return MemoryFileSystem.cat_file(self, path, **span)

    monkeypatch.setattr(flaky, "cat_file", read)
    assert open_store("flaky://r").read("a/1") == b"1" and len(used) == 2


class ScriptedFtp(ftplib.FTP):
    """A client of FTP without a server. `refused` are the server's words to a command, one at a time."""

    bodies: ClassVar[dict[str, bytes]] = {
        "MLSD /": b"type=dir; r\r\n",
        "MLSD /r": b"type=dir; a\r\ntype=dir; b\r\n",
        "MLSD /r/a": b"type=file;size=1;modify=20240101000000; 1\r\n",
        "MLSD /r/b": b"type=file;size=1;modify=20240101000000; 2\r\n",
        "RETR /r/a/1": b"1",
    }
    refused: ClassVar[dict[str, list[str]]] = {}

    def connect(self, *arguments: Any, **options: Any) -> str:
        return "220 welcome"

    def putcmd(self, line: str) -> None:
        self._line = line

    def getmultiline(self) -> str:
        refused = self.refused.get(self._line)
        return refused.pop(0) if refused else "226 done"

    def ntransfercmd(self, cmd: str, rest: Any = None) -> Any:
        self.sendcmd(cmd)
        here, there = socket.socketpair()
        with there:
            there.sendall(self.bodies[cmd])
        return here, None


@pytest.fixture
def ftp(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedFtp]:
    monkeypatch.setattr("fsspec.implementations.ftp.FTP", ScriptedFtp)
    monkeypatch.setattr(ScriptedFtp, "refused", {})
    return ScriptedFtp


@pytest.mark.parametrize("command", ["USER me", "MLSD /", "MLSD /r", "MLSD /r/b", "RETR /r/a/1"])
def test_a_busy_ftp_server_is_asked_again(command: str, ftp: type[ScriptedFtp]) -> None:
    ftp.refused = {command: ["425 busy", "450 busy"]}
    store = open_store("ftp://me@host/r")
    found = listed(store)
    assert set(found) == {"a/1", "b/2"}
    assert store.read("a/1", found["a/1"].version) == b"1"


def test_what_an_ftp_server_refuses_is_neither_missing_nor_empty(ftp: type[ScriptedFtp]) -> None:
    ftp.refused = {"MLSD /r/b": ["550 no"], "LIST /r/b": ["550 no"]}
    with pytest.raises(StoreError, match="does not list the folder '/r/b'"):
        listed(open_store("ftp://host/r"))
    ftp.refused = {"USER me": ["530 no"]}
    with pytest.raises(AccessDeniedError, match="530 no"):
        listed(open_store("ftp://me@host/r"))


def test_a_link_that_a_file_system_lists_as_such_is_the_file_that_it_leads_to(
    flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    def linked(self: Flaky, path: str, detail: bool = True, **options: Any) -> Any:
        entries = MemoryFileSystem.ls(self, path, detail)
        return [{**entry, "type": "link", "size": 4} if entry["name"] == link else entry for entry in entries]

    monkeypatch.setattr(flaky, "ls", linked)
    link = "/r/b/2"
    store = open_store("flaky://r")
    info = listed(store)["b/2"]
    assert info.size == 1 and info == store.head("b/2")
    flaky.faults = {link: [FileNotFoundError(link)]}
    with pytest.raises(NotFoundError, match="'/r/b/2' is a link to a file that is not there"):
        listed(store)
    link = "/r/b"
    with pytest.raises(StoreError, match="'/r/b' is a link to a folder"):
        listed(store)
