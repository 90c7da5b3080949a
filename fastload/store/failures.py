"""A request that failed: the error that it becomes, and whether, when and how often to ask again.

    error of obstore, fsspec, botocore, the system ─▶ StoreLocation.translate ─▶ StoreError, with `retry`
    StoreError ─▶ Attempts.next_pause ─▶ a pause, and the next attempt; or the error

Foreign exceptions are not chained: their texts, and the texts of their causes, may hold secrets that no log
may show (signed URLs, tokens). The redacted first line of the text is kept.

The clients' own retries are switched off for reads: two loops inside each other multiply, and the prefetcher
would not see that a store asks for fewer requests.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from fastload.errors import (
    AccessDeniedError,
    ArgumentError,
    FastloadError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
    StoreTimeoutError,
)

# Matched against a text without URLs, quoted names, the key, times and sizes: a key may be called "403", and
# a 503 may have come "in 404.1ms".
_DENIED = re.compile(
    r"\b40[13]\b|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|"
    r"TokenRefreshRequired|UnsupportedAlgorithm|MissingSecurityHeader|MissingAuthenticationToken|"
    r"NoCredentials|Unable to locate credentials|Unauthenticated|PermissionDenied|"
    r"Forbidden|CredentialRetrieval",
    re.IGNORECASE,
)
# Where clients ask a cloud machine for its own credentials, when nothing else gave any.
_METADATA = re.compile(
    r"169\.254\.169\.254|169\.254\.170\.2|metadata\.google|/latest/api/token|metadata/identity"
)
_NO_CREDENTIALS = re.compile(r"NoCredentials|Unable to locate credentials", re.IGNORECASE)
_DENIED_TYPES = ("PermissionError", "PermissionDeniedError", "UnauthenticatedError")
_CHANGED = re.compile(r"\b412\b|Precondition")
CHANGED_REMEDY = (
    "the next run lists it anew, and on_change='refresh' of datasets of objects reads the new version"
)
_MISSING = re.compile(r"\b404\b|NoSuchKey|NoSuchBucket|Not ?Found", re.IGNORECASE)
_REDIRECT = re.compile(r"\b301\b|redirect|AuthorizationHeaderMalformed|PermanentRedirect", re.IGNORECASE)
_TIMEOUT = re.compile(r"timed ?out|(?<!retry_)timeout", re.IGNORECASE)
_UNREACHABLE = re.compile(
    r"error sending request|connect error|dns|Could not connect|Connection ?refused|EndpointConnection|"
    r"Cannot connect|Name or service|resolve",
    re.IGNORECASE,
)
# The reason is deep in what obstore prints of an error, or a sentence of OpenSSL's.
_CERTIFICATE = re.compile(
    r"InvalidCertificate\(\s*(\w{1,100})|certificate verify failed:? ?([^\](]{0,200})", re.IGNORECASE
)
# Answers that asking again may change, and the ones that ask for fewer requests.
_LATER = re.compile(
    r"\b(408|5\d\d)\b|InternalError|ServiceUnavailable|RequestTimeout\b|response body|connection|incomplete|"
    r"reset|broken pipe|socket is closed|session not active|\bEOFError|payload|disconnected|checksum|"
    r"unexpected (EOF|end)|BadDigest",
    re.IGNORECASE,
)
_SLOWER = re.compile(
    r"\b(429|503)\b|SlowDown|reduce your request rate|TooManyRequests|Throttl", re.IGNORECASE
)
_REFUSED_CREDENTIALS = re.compile(
    r"ExpiredToken|InvalidToken|TokenRefreshRequired|\bInvalidAccessKeyId|\b401\b|Unauthenticated|RequestExpired",
    re.IGNORECASE,
)
_LONGEST = 400  # characters of a client's words
# A server chooses what follows, up to megabytes: no more is looked at, and each pattern takes linear time.
_MOST_READ = 8_000
_NAMES = re.compile(r"[a-z0-9+.-]{0,20}://\S+|'[^']*'", re.IGNORECASE)
_STATUS = re.compile(r"status code: (\d{3})\b")
_NUMBER = re.compile(r"\d+")
_AMOUNT = re.compile(r"\d+\.\d+|\b\d+(?=\s?(?:ns|[µu]s|ms|s|of|bytes?)\b)")
# Of an answer in XML: its parts but these repeat the key, or identify the request.
_ELEMENT = re.compile(r"<(?!Code\b|Message\b)(\w+)>[^<]*(</\1>|$)")
# An answer in XML as such, and what it says.
_XML = re.compile(r"(<\?xml[^>]{0,100}\?> ?)?<Error>.*?(</Error>|$)")
_SAID = re.compile(r"<(Code|Message)>([^<]*)")
_QUERY = re.compile(r"\?[^\s\"')>?=]*=[^\s\"')>]*")
_AMAZON = re.compile(r"(?:(.{1,63})\.)?s3(?:[.-][a-z0-9.-]*)?\.amazonaws\.com(?:\.cn)?")
_ENDS, _HTTP_ENDS = re.compile(r"\?"), re.compile(r"[?#]|;[^/=]*=")
_USER = re.compile(r"://[^/\s@]+@")
# S3 repeats the session token in its answer that the token has expired.
_TOKEN = re.compile(
    r"<(Token-\d{1,9}|AWSAccessKeyId|(?:StringToSign|CanonicalRequest)[^>]{0,20})>.*?(</\1>|$)"
)


def public_url(url: str) -> str:
    """Return `url` as messages show it: without user information and query; of http(s) without parameters."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    user, _, server = host.rpartition("@")
    if user and (":" in user or not scheme.startswith("abfs")):  # abfss://container@account holds no user
        host = server
    shown = f"{scheme}://{host}{slash}{path}"
    return (_HTTP_ENDS if scheme.lower() in ("http", "https") else _ENDS).split(shown, maxsplit=1)[0]


def as_bucket(url: str) -> str:
    """Return the bucket to open in place of an http(s) URL, in words: a bucket can be listed."""
    parts = urlsplit(public_url(url))
    path = parts.path.strip("/")
    amazon = _AMAZON.fullmatch(parts.hostname or "")
    if amazon:
        return f"open 's3://{'/'.join(filter(None, (amazon[1], path)))}'"
    if parts.hostname == "storage.googleapis.com":
        return f"open 'gs://{path}'"
    endpoint = f"{parts.scheme}://{parts.netloc}"
    return (
        f"if that server speaks S3, open 's3://{path or 'BUCKET/PREFIX'}' with "
        f"storage_options={{'endpoint_url': {endpoint!r}}}"
    )


def redacted(text: str) -> str:
    """Return one line of `text`, a few hundred characters at most, without secrets and queries of URLs."""
    return _bounded(_without_secrets(text))


def _without_secrets(text: str, secrets: Sequence[str] = ()) -> str:
    for secret in secrets:
        text = text.replace(secret, "<secret>")
    # The word that the cut splits goes: no pattern would know the rest of a secret in it.
    words = text[:_MOST_READ].split()
    text = _TOKEN.sub(r"<\1><secret>", " ".join(words[:-1] if len(text) > _MOST_READ else words))
    return _USER.sub("://<user>@", _QUERY.sub("?<query>", text))


@dataclass(frozen=True)
class StoreLocation:
    """The facts about a store that an error message may show; translates foreign errors with them.

    Args:
        url: without secrets.
        bucket: bucket, container or base directory, as users call it.
        endpoint: the server, or "" where there is none.
        tried: the places where credentials were looked for, in words.
        secrets: values that must not appear in any message.
        unread: another cause for a listed object that is not found, in words.
    """

    url: str
    bucket: str = ""
    endpoint: str = ""
    tried: str = ""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    unread: str = ""

    @contextmanager
    def errors(self, stage: str, key: str | None = None) -> Iterator[None]:
        """Turn what the block raises into a fastload error of this stage and key."""
        try:
            yield
        except FastloadError as error:
            if key is not None and error.key is None:
                error.key = key
            raise
        except Exception as error:
            translated = self.translate(error, stage, key)
        else:
            return
        raise translated from None

    def translate(self, error: BaseException, stage: str, key: str | None) -> FastloadError:
        """Return the fastload error for a foreign one, by the first rule that holds."""
        failure = _describe(error, self.secrets, stage, key)
        make = next(make for holds, make in _RULES if holds(failure))
        translated = make(self, failure)
        if not isinstance(translated, ArgumentError):
            translated.stage, translated.key = stage, key
        return translated

    # --- what the rules make

    @property
    def _where(self) -> str:
        return f" at endpoint_url {self.endpoint!r}" if self.endpoint else ""

    def _changed(self, failure: _Failure) -> FastloadError:
        return ObjectChangedError(f"the object changed since it was listed: {CHANGED_REMEDY}")

    def _denied(self, failure: _Failure) -> FastloadError:
        text, asked_machine = failure.text, bool(_METADATA.search(failure.whole))
        # No credentials were found, and the machine, the last source that was asked, has none.
        none = asked_machine or bool(_NO_CREDENTIALS.search(text))
        words = f"{self.url!r} refused access."
        if none:
            words = f"no credentials found for {self.url!r}."
        if self.tried:
            words += f" Looked for: {self.tried}." if none else f" Credentials tried: {self.tried}."
        who = "The last of these" if none and self.tried else "The store"
        denied = AccessDeniedError(f"{words} {who} said: {failure.summary}")
        if not failure.is_denied and not _MISSING.search(text):
            denied.retry = "reachable"  # the machine gave no answer, and may give one later
        elif _REFUSED_CREDENTIALS.search(text):
            denied.retry = "renewed"
        return denied

    def _missing(self, failure: _Failure) -> FastloadError:
        if failure.stage != "put" and failure.key is not None and "NoSuchBucket" not in failure.text:
            return NotFoundError(
                f"no such object in {self.url!r}: it may have been deleted since the listing (the next run "
                f"lists again){self.unread}"
            )
        server = f" and the endpoint_url {self.endpoint!r}" if self.endpoint else ""
        return NotFoundError(f"{self.bucket or self.url} does not exist: check the url {self.url!r}{server}")

    def _no_package(self, failure: _Failure) -> FastloadError:
        return ArgumentError(f"{self.url!r} needs a package that is not installed: {failure.summary}")

    def _unknown_option(self, failure: _Failure) -> FastloadError:
        return ArgumentError(
            f"storage option not known to the file system of {self.url!r}: {failure.summary}"
        )

    def _other_region(self, failure: _Failure) -> FastloadError:
        return StoreError(
            f"{self.bucket} is not in the region of this request: set region=... in storage_options "
            f"(or AWS_REGION). The store said: {failure.summary}"
        )

    def _bad_certificate(self, failure: _Failure) -> FastloadError:
        certificate = _CERTIFICATE.search(f"{failure.error}")
        reason = certificate and (certificate[1] or certificate[2].strip())
        return StoreError(
            f"the certificate of the server{self._where} is not accepted for {self.url!r}: "
            f"{reason or 'verification failed'}. Set SSL_CERT_FILE to the PEM file of the authority that "
            "signed it (s3://: or pass client_kwargs={'verify': 'ca.pem'})"
        )

    def _unreachable(self, failure: _Failure) -> FastloadError:
        unreachable = StoreError(
            f"no answer{self._where} for {self.url!r}: check the endpoint_url, its port, and the network. "
            f"The client said: {failure.summary}"
        )
        unreachable.retry = "reachable"
        return unreachable

    def _timeout(self, failure: _Failure) -> FastloadError:
        return StoreTimeoutError(
            f"no progress{self._where} for {self.url!r}: check the endpoint_url and the network. "
            f"The client said: {failure.summary}"
        )

    def _failed(self, failure: _Failure) -> FastloadError:
        failed = StoreError(f"{self.url!r} failed{self._where}: {failure.summary}")
        if _SLOWER.search(failure.text):
            failed.retry = "slower"
        elif isinstance(failure.error, ConnectionError) or _LATER.search(failure.text):
            failed.retry = "later"
        return failed


class _Failure(NamedTuple):
    """A foreign error as the rules see it.

    Args:
        error: the error itself.
        types: the names of its classes.
        whole: its text without secrets.
        summary: `whole` in one line, for a message.
        text: its type, its status and its words, to be searched; see `_searchable`.
        stage, key: where it happened.
    """

    error: BaseException
    types: frozenset[str]
    whole: str
    summary: str
    text: str
    stage: str
    key: str | None

    @property
    def is_missing(self) -> bool:
        """Whether its type says that there is no such object."""
        return isinstance(self.error, (FileNotFoundError, NotADirectoryError))

    @property
    def is_denied(self) -> bool:
        """Whether the store refused access, by the error's type or words."""
        by_type = not self.types.isdisjoint(_DENIED_TYPES)
        return not self.is_missing and (by_type or bool(_DENIED.search(self.text)))


def _describe(error: BaseException, secrets: Sequence[str], stage: str, key: str | None) -> _Failure:
    types = frozenset(cls.__name__ for cls in type(error).__mro__)
    whole = _without_secrets(f"{error}".split("\n\nDebug source")[0], secrets) or type(error).__name__
    summary, text = _bounded(_XML.sub(_words, whole)), _searchable(error, whole, key)
    return _Failure(error, types, whole, summary, text, stage, key)


_NO_ROUTE = (101, 111, 113)  # numbers of system errors: no network, refused, no route

# Rule -> the error that it makes; the first one that holds counts. Types come before words within a rule.
_RULES: tuple[tuple[Callable[[_Failure], Any], Callable[[StoreLocation, _Failure], FastloadError]], ...] = (
    (lambda f: "PreconditionError" in f.types or _CHANGED.search(f.text), StoreLocation._changed),
    (
        lambda f: f.is_denied or (not f.is_missing and _METADATA.search(f.whole)),
        StoreLocation._denied,
    ),
    (lambda f: f.is_missing or _MISSING.search(f.text), StoreLocation._missing),
    (lambda f: isinstance(f.error, ModuleNotFoundError), StoreLocation._no_package),
    (
        lambda f: isinstance(f.error, TypeError) and "unexpected keyword" in f.text,
        StoreLocation._unknown_option,
    ),
    (lambda f: _REDIRECT.search(f.text), StoreLocation._other_region),
    (lambda f: _CERTIFICATE.search(f"{f.error}"), StoreLocation._bad_certificate),
    (
        lambda f: (
            _UNREACHABLE.search(f.text) or (isinstance(f.error, OSError) and f.error.errno in _NO_ROUTE)
        ),
        StoreLocation._unreachable,
    ),
    (lambda f: isinstance(f.error, TimeoutError) or _TIMEOUT.search(f.text), StoreLocation._timeout),
    (lambda f: True, StoreLocation._failed),
)


def _words(answer: re.Match[str]) -> str:
    """Return an error document of a store in one line, "Code: Message"."""
    parts = dict(_SAID.findall(answer[0]))
    return ": ".join(parts[name].strip() for name in ("Code", "Message") if parts.get(name, "").strip())


def _bounded(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def _searchable(error: BaseException, whole: str, key: str | None) -> str:
    """Return the type, the status and the words of an error, without other numbers as far as can be told."""
    status = _code(error)
    # Strip names before truncating, or a long key would push the status out.
    words = _ELEMENT.sub("", _NAMES.sub("", whole)[:_LONGEST])
    words = words.replace(f"path {key}", "").replace(f"location {key}", "")
    if not status and (match := _STATUS.search(words)):
        status = match[1]
    return f"{type(error).__name__}: {status} {(_NUMBER if status else _AMOUNT).sub('', words)}"


def _code(error: BaseException | None) -> str:
    """Return the HTTP status and S3's code that botocore keeps; s3fs raises builtin errors from them."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
            return f"{status} {response.get('Error', {}).get('Code', '')}".strip()
        error = error.__cause__
    return ""


# --- retries: pure rules, and a thin loop

T = TypeVar("T")
Wait = Callable[[StoreError, float], None]  # (what failed, seconds to pause); may raise to give up


class RetryPolicy(NamedTuple):
    """How long to retry.

    Args:
        budget: seconds from the first attempt after which no further one begins.
        first, longest: seconds; attempt n + 1 comes after a pause from [0, min(longest, first * 2^(n-1))].
    """

    budget: float
    first: float = 0.2
    longest: float = 15.0


READ_POLICY = RetryPolicy(budget=180.0)
CONTACT_SECONDS = 6.0  # instead of the budget, while no request of this store was ever answered
_RENEWALS = 2  # of the credentials, in one read
_random = random.SystemRandom()  # forked workers share the state of any other generator


def pause_before(attempt: int, policy: RetryPolicy, draw: Callable[[], float] = _random.random) -> float:
    """Return seconds to wait before attempt number `attempt` (the second is 2): full jitter.

    Many readers that failed together come back spread over the whole interval, not in waves.
    """
    return draw() * min(policy.longest, policy.first * 2.0 ** min(attempt - 2, 60))


class Attempts:
    """The attempts made so far for one request.

    Args:
        start: when the first attempt began, by `time.monotonic`.
        policy: how long to retry.
        renew: gets new credentials unless they are newer than the given time; returns whether there are any.
        reached: whether this store ever answered. An address that never answered is wrong, not busy.
    """

    def __init__(
        self, start: float, policy: RetryPolicy, renew: Callable[[float], bool], reached: bool
    ) -> None:
        self._start = self._began = start
        self._policy = policy
        self._renew = renew
        self._reached = reached
        self._failures = self._renewals = 0

    def next_pause(self, error: StoreError) -> float:
        """Return seconds to wait before the next attempt after `error`.

        Raises:
            StoreError: `error` itself, where a retry cannot help or the budget is spent.
        """
        now = time.monotonic()
        began, self._began = self._began, now
        self._failures += 1
        if error.retry == "renewed" and self._renewals < _RENEWALS and self._renew(began):
            self._renewals += 1
            return 0.0
        if error.retry in ("later", "slower", "reachable"):
            seconds = pause_before(self._failures + 1, self._policy)
            known = self._reached or error.retry != "reachable"
            budget = self._policy.budget if known else min(CONTACT_SECONDS, self._policy.budget)
            if now - self._start + seconds <= budget:
                self._began += seconds
                return seconds
        if self._failures > 1:
            error.message += f" ({self._failures} attempts in {now - self._start:.1f} s)"
        raise error


def sleep(error: StoreError, seconds: float) -> None:
    """Wait, and do nothing else."""
    time.sleep(seconds)


def retried(attempt: Callable[[], T], attempts: Callable[[float], Attempts], wait: Wait = sleep) -> T:
    """Return the result of `attempt`, tried as often as `attempts` allows."""
    start, tried = time.monotonic(), None
    while True:
        try:
            return attempt()
        except StoreError as caught:
            error = caught
        tried = tried or attempts(start)
        wait(error, tried.next_pause(error))
