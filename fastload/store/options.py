"""`storage_options`: their names, the environment and the AWS profile, turned into a client's configuration.

s3fs's names are the common ones (key, secret, token, anon, profile, endpoint_url, region, client_kwargs);
obstore's own names pass through. This is the only module that reads the environment or a profile.
"""

from __future__ import annotations

import configparser
import difflib
import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from fastload.errors import ArgumentError
from fastload.store.failures import public_url

_S3_OWN = (
    *("key", "secret", "token", "anon", "profile", "endpoint_url", "region", "client_kwargs"),
    *("requester_pays", "use_ssl", "client", "credential_provider"),
)
_S3_NATIVE = (
    *("access_key_id", "secret_access_key", "session_token", "default_region", "endpoint"),
    *("skip_signature", "request_payer", "virtual_hosted_style_request", "unsigned_payload"),
    *("s3_express", "metadata_endpoint", "imdsv1_fallback", "role_arn", "role_session_name"),
    *("web_identity_token_file", "sts_endpoint", "container_credentials_relative_uri"),
    *("container_credentials_full_uri", "container_authorization_token_file", "server_side_encryption"),
    *("sse_kms_key_id", "sse_bucket_key_enabled", "sse_customer_key_base64"),
)
_GCS_OWN = ("token", "anon", "endpoint_url")
_GCS_NATIVE = (
    *("service_account", "service_account_key", "base_url", "bearer_token", "application_credentials"),
    *("skip_signature",),
)
_AZURE_OWN = ("sas_token", "anon", "endpoint_url")
_AZURE_NATIVE = (
    *("account_name", "account_key", "client_id", "client_secret", "credential_type", "tenant_id"),
    *("authority_host", "sas_key", "token", "use_emulator", "endpoint", "msi_endpoint", "object_id"),
    *("msi_resource_id", "federated_token_file", "use_azure_cli", "skip_signature"),
)
# Spellings of other clients. The value is the obstore name.
_S3_NAMES = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token"}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_SPELLED = {"region_name": "region"}  # by boto
# Names of options that hold secrets, and of the parts of one ("AccountKey=...;", "?sig=...").
SECRET = re.compile(
    r"secret|token|passw|passphrase|passcode|pwd|credential|cookie|signature|authorization|"
    r"(?:^|[_-])(?:auth|acct|pass|sas|sig|tok)(?:$|[_-])|keys?(?:$|[_-](?:id|data|file|filename|base64)$)",
    re.IGNORECASE,
)
PARTS = re.compile(r"[;&?]")
# What a file may say of a place; `options_from_state` takes it. No secret is among these, and nothing
# that chooses whose credentials are used, where they are sent, how the server is verified, or who pays.
_PUBLIC = (
    *("anon", "client", "region", "default_region", "skip_signature", "virtual_hosted_style_request"),
    *("s3_express", "account_name"),
)
_PUBLIC_URLS = ("endpoint_url", "endpoint", "base_url")
_PUBLIC_NESTED = ("endpoint_url", "region_name")
_IN_HOST_NAMES = re.compile(r"[A-Za-z0-9._-]+")


class Connection(NamedTuple):
    """The configuration of a client.

    Args:
        config: obstore's configuration of the store class.
        client_options: obstore's HTTP client options.
        credentials: fixed credentials (S3 only), used instead of everything that obstore would look up.
        profile: the AWS profile that boto3 must resolve (roles, SSO), or "".
        endpoint: the server's URL as messages may show it, or "" for the provider's own.
        tried: the places where credentials were looked for, in words, for error messages.
        secrets: values to keep out of messages.
        provider: the user's own source of credentials, which expire (S3 only).
    """

    config: dict[str, Any]
    client_options: dict[str, Any]
    credentials: dict[str, Any] | None = None
    profile: str = ""
    endpoint: str = ""
    tried: str = ""
    secrets: tuple[str, ...] = ()
    provider: Callable[[], Any] | None = None


def s3(options: Mapping[str, Any], bucket: str) -> Connection:
    """Configure `s3://bucket`, by the order options, environment, profile, machine's own identity.

    Raises:
        ArgumentError: an unknown option, an endpoint_url without scheme, or a profile that does not exist.
    """
    settings = _s3_options(options)
    provider = settings.pop("credential_provider", None)
    if provider is not None and not callable(provider):
        raise ArgumentError("storage option credential_provider must be a function without arguments")
    profile, tried_profile = _profile(settings.pop("profile", None))
    endpoint = settings.pop("endpoint", None) or _environment(*_ENDPOINTS, "AWS_ENDPOINT")
    endpoint = endpoint or profile.get("endpoint_url", "")
    refuse_user("endpoint_url", endpoint, "key and secret")
    region = settings.pop("region", None) or _environment("AWS_REGION", "AWS_DEFAULT_REGION")
    region = region or profile.get("region") or "us-east-1"
    check_host_part("storage option region", region)
    anon = bool(settings.pop("skip_signature", False))
    credentials, tried = _s3_credentials(settings, profile, tried_profile, named=bool(options.get("profile")))
    client_options = _client_options(endpoint, settings.pop("client_kwargs", {}))
    config = {**settings, "bucket": bucket, "region": region}
    if endpoint:
        config["endpoint"] = (
            _virtual_host(endpoint, bucket) if settings.get("virtual_hosted_style_request") else endpoint
        )
    if anon:
        config["skip_signature"] = True
        credentials, tried = None, "none (anon=True)"
    if provider is not None:
        credentials, tried = None, "option credential_provider"
    by_boto3 = "" if anon or credentials or provider else profile.get("_needs_boto3", "")
    secrets = secret_values({**options, **(credentials or {})})
    shown = _shown(endpoint)
    return Connection(config, client_options, credentials, by_boto3, shown, tried, secrets, provider)


def s3fs(options: Mapping[str, Any]) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """Return the arguments of `s3fs.S3FileSystem`, the endpoint as messages may show it ("": Amazon's), and
    the values to keep out of them.

    s3fs reads the environment and the profiles itself; only their endpoint is looked up here too.

    Raises:
        ArgumentError: an endpoint_url that holds a user and password, with keys to sign requests.
    """
    arguments = {name: value for name, value in options.items() if name not in ("client", "region")}
    nested = _client_kwargs(arguments)
    if options.get("region"):
        nested.setdefault("region_name", options["region"])
    if nested:
        arguments["client_kwargs"] = nested
    from fsspec.config import conf

    effective: dict[str, Any] = {**conf.get("s3", {}), **conf.get("s3a", {}), **arguments}
    endpoint = effective.get("endpoint_url") or _client_kwargs(effective).get("endpoint_url")
    endpoint = endpoint or _configured_endpoint(effective)
    if not effective.get("anon"):  # a signature takes the header that would carry a user
        refuse_user("endpoint_url", endpoint, "key and secret")
    return arguments, _shown(endpoint), (*secret_values(effective), *_user_of(endpoint))


def _configured_endpoint(arguments: Mapping[str, Any]) -> str:
    """Return the endpoint that boto takes from the environment or the profile, in its order."""
    profile, _ = _profile(
        arguments.get("profile") or _environment("AWS_DEFAULT_PROFILE", "AWS_PROFILE") or None, strict=False
    )
    ignore = dict(arguments.get("config_kwargs") or {}).get("ignore_configured_endpoint_urls")
    ignored = _environment("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") or profile.get(
        "ignore_configured_endpoint_urls", ""
    )
    if ignore or (ignore is None and ignored.lower() == "true"):
        return ""
    return _environment(*_ENDPOINTS) or profile.get("endpoint_url", "")


def gcs(options: Mapping[str, Any], bucket: str) -> Connection:
    """Configure `gs://bucket`: gcsfs's `token` (a file path or "anon"), or obstore's names."""
    settings = _known(options, "gs", _GCS_OWN, _GCS_NATIVE)
    token = settings.pop("token", None)
    if settings.pop("anon", False) or token == "anon":
        settings["skip_signature"] = True
    elif isinstance(token, (str, os.PathLike)):
        settings["application_credentials"] = os.fspath(token)
    elif token is not None:
        raise ArgumentError("storage option token must be 'anon' or the path of a credentials file for gs://")
    endpoint = (
        settings.pop("endpoint_url", None) or settings.get("base_url") or _environment("GOOGLE_BASE_URL")
    )
    refuse_user("endpoint_url", endpoint, "token")
    if endpoint:
        settings["base_url"] = endpoint
    tried = "options token, service_account, bearer_token; GOOGLE_APPLICATION_CREDENTIALS; machine identity"
    return Connection(
        {**settings, "bucket": bucket},
        _client_options(endpoint, {}),
        endpoint=_shown(endpoint),
        tried=tried,
        secrets=secret_values(options),
    )


def azure(options: Mapping[str, Any], container: str, account: str) -> Connection:
    """Configure `az://container` or `abfss://container@account...`: adlfs's names, or obstore's."""
    settings = _known(options, "az", _AZURE_OWN, _AZURE_NATIVE)
    if settings.pop("anon", False):
        settings["skip_signature"] = True
    if "sas_token" in settings:
        settings["sas_key"] = settings.pop("sas_token")
    if account := account or _environment("AZURE_STORAGE_ACCOUNT_NAME"):
        settings.setdefault("account_name", account)
    if settings.get("account_name") is not None:
        check_host_part("storage option account_name", settings["account_name"])
    endpoint = settings.pop("endpoint_url", None) or settings.get("endpoint")
    endpoint = endpoint or _environment("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    refuse_user("endpoint_url", endpoint, "account_key or sas_token")
    if endpoint:
        settings["endpoint"] = endpoint
    if not settings.get("account_name") and not endpoint:
        raise ArgumentError(
            "az:// needs an account: give account_name=..., set AZURE_STORAGE_ACCOUNT_NAME, or write "
            "abfss://container@account.dfs.core.windows.net/prefix"
        )
    tried = "options account_key, sas_token, client_id; AZURE_STORAGE_*; the machine's own identity"
    return Connection(
        {**settings, "container_name": container},
        _client_options(endpoint, {}),
        endpoint=_shown(endpoint),
        tried=tried,
        secrets=secret_values(options),
    )


def http(options: Mapping[str, Any], base: str) -> Connection:
    """Configure an http(s) base URL; there are no options. A user in it is sent with each request."""
    _known(options, "http(s)", (), ())
    parts = urlsplit(base)
    client_options = _client_options(base, {})
    secrets = _user_of(base)
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        basic = b64encode(user.encode()).decode()
        client_options["default_headers"] = {"Authorization": f"Basic {basic}"}
        secrets = (*secrets, basic)
    host = parts.netloc.rpartition("@")[2]
    return Connection({}, client_options, endpoint=f"{parts.scheme}://{host}", secrets=secrets)


def public_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return (options that a file may hold, names of the others; those of a nested one follow a dot)."""
    shown: dict[str, Any] = {}
    withheld: list[str] = []
    for name, value in options.items():
        if name in _PUBLIC and isinstance(value, bool | str):
            shown[name] = value
        elif name in _PUBLIC_URLS and isinstance(value, str):
            shown[name] = _without_user(value)
        elif name == "client_kwargs" and isinstance(value, Mapping):
            plain = {inner: nested for inner, nested in value.items() if inner in _PUBLIC_NESTED}
            shown[name] = {
                inner: _without_user(nested) for inner, nested in plain.items() if isinstance(nested, str)
            }
            withheld += [f"{name}.{inner}" for inner in value if inner not in shown[name]]
        elif value is not None:
            withheld.append(str(name))
    return shown, sorted(withheld)


def _without_user(value: str) -> str:
    return public_url(value) if "://" in value else value


def endpoint_in(options: Mapping[str, Any]) -> str:
    """Return the server that these options name, under whichever name, as messages may show it; "": none."""
    nested = options.get("client_kwargs")
    urls = [options.get(name) for name in _PUBLIC_URLS]
    urls.append(nested.get("endpoint_url") if isinstance(nested, Mapping) else None)
    return next((_without_user(str(url)).rstrip("/") for url in urls if url), "")


def without_endpoint(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same options; which server they are for is left to the environment."""
    kept = {name: value for name, value in options.items() if name not in _PUBLIC_URLS}
    if "client_kwargs" in kept:
        nested = (kept.pop("client_kwargs") or {}).items()
        kept |= {"client_kwargs": rest} if (rest := {a: b for a, b in nested if a != "endpoint_url"}) else {}
    return kept


def check_host_part(name: str, value: Any) -> None:
    """Raise `ArgumentError` for what clients would put into a host name, and would make another one of it."""
    if not isinstance(value, str) or not _IN_HOST_NAMES.fullmatch(value):
        raise ArgumentError(f"{name} {value!r} must have letters, digits, '.', '_' and '-' only")


def secret_values(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the values of `options`, nested ones too, that no message may show."""
    values = (value for name, option in options.items() for value in _secrets_in(name, option))
    return tuple(value for value in values if len(value) > 3)


def _secrets_in(name: str, value: Any, secret: bool = False) -> Iterator[str]:
    # More names than `SECRET`, by which a place is known: a message may lack what is not secret.
    secret = secret or "key" in name.lower() or SECRET.search(name) is not None
    if isinstance(value, Mapping):
        for inner, nested in value.items():
            yield from _secrets_in(str(inner), nested, secret)
    elif isinstance(value, list | tuple):
        for nested in value:
            yield from _secrets_in(name, nested, secret)
    elif secret and isinstance(value, str | bytes):
        yield value if isinstance(value, str) else value.decode(errors="replace")
    elif isinstance(value, str) and "=" in value:  # a connection string
        for part in PARTS.split(value):
            yield from _secrets_in(*part.partition("=")[::2])


def _known(
    options: Mapping[str, Any], scheme: str, own: tuple[str, ...], native: tuple[str, ...]
) -> dict[str, Any]:
    for name in options:
        if name not in own and name not in native:
            near = [_SPELLED[name]] if name in _SPELLED else difflib.get_close_matches(name, own + native, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            known = ", ".join(own) or "none"
            raise ArgumentError(
                f"unknown storage option {name!r}{hint} for {scheme}://. Known: {known}; and obstore's names"
            )
    return {name: value for name, value in options.items() if value is not None}


def _s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten s3fs's names and nesting to obstore's."""
    settings = _known(options, "s3", _S3_OWN, _S3_NATIVE)
    nested = _client_kwargs(settings)
    for outer, inner in (("endpoint_url", "endpoint_url"), ("region", "region_name")):
        value = nested.pop(inner, None)
        if value is not None:
            settings.setdefault(outer, value)
    if set(nested) - {"verify"}:
        raise ArgumentError(
            f"client_kwargs {sorted(set(nested) - {'verify'})} are boto's: known here are endpoint_url, "
            "region_name and verify; or pass client='s3fs', which takes them all"
        )
    settings.pop("client", None)
    if settings.pop("use_ssl", True) is False and not settings.get("endpoint_url"):
        raise ArgumentError("use_ssl=False needs an endpoint_url that begins with http://")
    if settings.pop("requester_pays", False):
        settings["request_payer"] = True
    if settings.pop("anon", False):
        settings["skip_signature"] = True
    for other, name in _S3_NAMES.items():
        if other in settings:
            settings[name] = settings.pop(other)
    if "endpoint_url" in settings:
        settings["endpoint"] = settings.pop("endpoint_url")
    if "default_region" in settings:
        settings.setdefault("region", settings.pop("default_region"))
    return {**settings, "client_kwargs": nested}


def _client_kwargs(options: Mapping[str, Any]) -> dict[str, Any]:
    nested = options.get("client_kwargs") or {}
    if not isinstance(nested, Mapping):
        raise ArgumentError(
            f"storage option client_kwargs must be a dict, as in {{'verify': False}}, found {_kind(nested)}"
        )
    return dict(nested)


def _s3_credentials(
    settings: dict[str, Any], profile: dict[str, str], tried_profile: str, *, named: bool
) -> tuple[dict[str, Any] | None, str]:
    """Return the first complete set of fixed credentials, which never mixes parts of two sources.

    obstore would complete a given key with a session token of the environment, and knows no profiles.
    """
    key, secret = settings.pop("access_key_id", None), settings.pop("secret_access_key", None)
    token = settings.pop("session_token", None)
    if (key is None) != (secret is None):
        raise ArgumentError("storage options key and secret belong together: one of them is missing")
    tried = "options key and secret"
    if key is None and not named:
        tried += "; AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        key, secret = _environment("AWS_ACCESS_KEY_ID"), _environment("AWS_SECRET_ACCESS_KEY")
        token = _environment("AWS_SESSION_TOKEN") or None
    if not key or not secret:
        tried += f"; {tried_profile}"
        # As boto has it: a role and SSO come before keys of their profile, which may be the role's source.
        if any(name in profile for name in ("role_arn", "sso_session", "sso_start_url")):
            profile = {}
        key, secret = profile.get("aws_access_key_id"), profile.get("aws_secret_access_key")
        token = profile.get("aws_session_token")
    if not key or not secret:
        tried += "; web identity, container and machine roles (for a public bucket give anon=True)"
        return None, tried
    credentials = {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}
    return credentials, tried.rsplit("; ", 1)[-1]


def _profile(name: str | None, *, strict: bool = True) -> tuple[dict[str, str], str]:
    """Return the settings of an AWS profile, and its name and files in words.

    The endpoint of its services section, if it has one for S3, is its `endpoint_url`. A profile that boto3
    must resolve (a role, SSO, a credential process) has `_needs_boto3` = its name.

    Args:
        strict: whether it must exist.
    """
    chosen = name or _environment("AWS_PROFILE") or "default"
    files = [
        Path(_environment("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser(),
        Path(_environment("AWS_CONFIG_FILE") or "~/.aws/config").expanduser(),
    ]
    settings: dict[str, str] = {}
    services: dict[str, str] = {}  # section -> its settings for S3
    for file in reversed(files):
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (OSError, configparser.Error, UnicodeDecodeError):
            raise ArgumentError(
                f"the AWS profile file {str(file)!r} cannot be read; correct or remove it"
            ) from None
        for section in (chosen, f"profile {chosen}"):
            if parser.has_section(section):
                settings.update(parser.items(section))
        services.update(
            (name, parser.get(name, "s3")) for name in parser.sections() if parser.has_option(name, "s3")
        )
    words = f"profile {chosen!r} in {files[0]} and {files[1]}"
    for line in services.get(f"services {settings.get('services', '')}", "").splitlines():
        setting, _, value = line.partition("=")
        if setting.strip() == "endpoint_url" and value.strip():
            settings["endpoint_url"] = value.strip()
    if not settings and chosen != "default" and strict:
        raise ArgumentError(f"no AWS profile {chosen!r}: looked in {files[0]} and {files[1]}")
    if any(name in settings for name in ("role_arn", "sso_session", "sso_start_url", "credential_process")):
        settings["_needs_boto3"] = chosen
    return settings, words


def _client_options(endpoint: str, nested: Mapping[str, Any]) -> dict[str, Any]:
    if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
        shown = endpoint.rpartition("@")[2].partition("?")[0]
        raise ArgumentError(f"endpoint_url {shown!r} has no scheme: write http://... or https://...")
    result: dict[str, Any] = {}
    if endpoint.startswith("http://"):
        result["allow_http"] = True
    verify = nested.get("verify")
    if verify is False:
        result["allow_invalid_certificates"] = True
    elif verify is not True and verify is not None:
        try:
            result["root_certificate"] = Path(verify).read_bytes()
        except (OSError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"client_kwargs verify={verify!r} is no file of certificates that can be read: {error}. Give "
                "its path, True or False"
            ) from None
    return result


def _user_of(url: str) -> tuple[str, ...]:
    """Return the user and the password in a URL, as they are written and as they are meant."""
    user = urlsplit(url).netloc.rpartition("@")[0]
    parts = {part for part in user.split(":") if part}
    return tuple(part for part in {*parts, *map(unquote, parts)} if len(part) > 3)


def refuse_user(name: str, url: str, instead: str) -> None:
    """Raise `ArgumentError` for what is no URL, or has a user in it, which clients do not send."""
    if not isinstance(url, str):
        raise ArgumentError(f"{name} must be a URL, as in 'http://localhost:9000', found {_kind(url)}")
    if "@" in urlsplit(url).netloc:
        raise ArgumentError(
            f"{name} {public_url(url)!r} contains a user or password, which requests do not carry: "
            f"remove it, and pass the storage options {instead}"
        )


def _kind(value: object) -> str:
    """Return what a message says of a value that may hold a secret."""
    return f"a value of type {type(value).__name__}"


def _shown(endpoint: str) -> str:
    return public_url(endpoint) if endpoint else ""


def _virtual_host(endpoint: str, bucket: str) -> str:
    """Return the endpoint with the bucket in front of its host name, as obstore wants it for that style."""
    scheme, _, rest = endpoint.rstrip("/").partition("://")  # a slash would begin each key
    return f"{scheme}://{rest}" if rest.startswith(f"{bucket}.") else f"{scheme}://{bucket}.{rest}"


def _environment(*names: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")
