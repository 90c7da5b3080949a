"""What an error of a store's client is, whatever numbers and names stand in its text."""

from __future__ import annotations

import re

import pytest

from fastload.errors import AccessDeniedError, NotFoundError, ObjectChangedError, StoreError
from fastload.store import failures
from fastload.store.failures import StoreLocation

PLACE = StoreLocation("s3://bucket", bucket="bucket 'bucket'", endpoint="http://127.0.0.1:404")
# What the statuses are: the class, and how asking again helps.
KINDS = {
    "401 Unauthorized": (AccessDeniedError, "renewed"),
    "403 Forbidden": (AccessDeniedError, "never"),
    "404 Not Found": (NotFoundError, "never"),
    "412 Precondition Failed": (ObjectChangedError, "never"),
    "400 Bad Request": (StoreError, "never"),
    "429 Too Many Requests": (StoreError, "slower"),
    "500 Internal Server Error": (StoreError, "later"),
    "503 Service Unavailable": (StoreError, "slower"),
}
BODY = "<?xml version='1.0'?><Error><Code>X</Code><Message>m</Message>{}</Error>"


class GenericError(Exception):
    """As obstore calls its own."""


class ContentLengthError(Exception):
    """As aiohttp calls a body that ends early."""


def found(error: Exception, key: str = "a.jpg") -> tuple[type[Exception], str]:
    translated = PLACE.translate(error, "get", key)
    return type(translated), getattr(translated, "retry", "never")


def answer(status: str, seconds: str = "1.5ms", body: str = "") -> GenericError:
    """An answer's error, in obstore's words."""
    return GenericError(
        f"Generic S3 error: Error performing GET http://127.0.0.1:404/bucket/a.jpg in {seconds} - "
        f"Server returned non-2xx status code: {status}: {BODY.format(body)}"
    )


@pytest.mark.parametrize("status", KINDS)
def test_a_status_whatever_time_it_took(status: str) -> None:
    assert found(answer(status)) == KINDS[status]
    for number in (301, 401, 403, 404, 408, 412, 429, 500, 503):
        for seconds in (f"{number}.123456ms", f"{number}ms", f"{number}.5µs", f"{number}ns", f"{number}.25s"):
            assert found(answer(status, seconds)) == KINDS[status], seconds


@pytest.mark.parametrize("status", KINDS)
@pytest.mark.parametrize("key", ["404", "403 a.jpg", "NoSuchKey.jpg", "not found/412.jpg", "timeout 503"])
def test_a_status_whatever_the_key_is_called(status: str, key: str) -> None:
    """MinIO repeats it in each answer, with the request's id. Of a long one the error keeps the beginning."""
    for name in (key, f"{key} " * 40):
        body = f"<Key>{name}</Key><Resource>/bucket/{name}</Resource><RequestId>x-404-y</RequestId>"
        assert found(answer(status, body=body), name) == KINDS[status]


@pytest.mark.parametrize("number", [401, 403, 404, 412])
def test_no_status_but_a_number(number: int) -> None:
    cut = ContentLengthError(
        "Response payload is not completed: <ContentLengthError: 400, message='Not enough data to satisfy "
        f"content length header (received {number} of 1000 bytes).'>"
    )
    assert found(cut) == (StoreError, "later")
    lost = GenericError(
        f"Error performing GET http://127.0.0.1/a in {number}.5ms, after 2 retries, max_retries: 2, "
        "retry_timeout: 1s - HTTP error: error sending request"
    )
    assert found(lost) == (StoreError, "reachable")
    assert found(GenericError(f"received {number} of 1000 bytes, connection reset")) == (StoreError, "later")


def test_a_status_in_the_words_of_other_clients() -> None:
    for text in ("404 Client Error: for url: https://x/y", "HTTP 404, message='gone'", "got 404"):
        assert found(GenericError(text)) == (NotFoundError, "never")
    assert found(GenericError("HttpError: backend is tired, 503")) == (StoreError, "slower")


def test_an_answer_in_xml_is_cut_to_its_code_and_message() -> None:
    text = str(
        PLACE.translate(
            answer("403 Forbidden", body="<RequestId>1</RequestId><HostId>h</HostId>"), "get", "a"
        )
    )
    assert text.endswith("403 Forbidden: X: m")
    cut = GenericError("status code: 403: <Error><Code>AccessDenied</Code><Message>not you</Mess")
    assert str(PLACE.translate(cut, "get", "a")).endswith("403: AccessDenied: not you")
    assert str(PLACE.translate(GenericError("400: <Error></Error> x"), "get", "a")).endswith("400:  x")


@pytest.mark.parametrize("guard", ["_NUMBER", "_ELEMENT", "_AMOUNT"])
@pytest.mark.stress
def test_guard_removed_a_number_or_a_name_is_a_status(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {
        "_NUMBER": answer("503 Service Unavailable", "404.1ms"),
        "_ELEMENT": answer("503 Service Unavailable", body="<Key>NoSuchKey.jpg</Key>"),
        "_AMOUNT": GenericError("received 404 of 1000 bytes, connection reset"),
    }
    assert found(errors[guard])[0] is StoreError
    monkeypatch.setattr(failures, guard, re.compile("(?!)"))
    assert found(errors[guard])[0] is NotFoundError


def test_a_long_key_hides_no_status() -> None:
    """Percent-encoded, thirty Chinese characters make a URL that alone is longer than a message may be."""
    url = "http://127.0.0.1:404/bucket/" + "%E5%9B%BE" * 60
    text = (
        f"Generic S3 error: Error performing GET {url} in 1ms - Server returned non-2xx status code: 503: x"
    )
    assert found(GenericError(text)) == (StoreError, "slower")
    lost = GenericError(f"Error performing GET {url} in 1ms - HTTP error: error sending request")
    assert found(lost) == (StoreError, "reachable")
    assert len(str(PLACE.translate(GenericError(text), "get", "x"))) < 700


METADATA = "Error performing PUT http://169.254.169.254/latest/api/token in 1.2s"


def test_a_bad_moment_of_the_metadata_service_is_none_of_the_credentials() -> None:
    silent = GenericError(f"{METADATA} - HTTP error: error sending request")
    assert found(silent) == (AccessDeniedError, "reachable")
    busy = GenericError(f"{METADATA} - Server returned non-2xx status code: 503 Service Unavailable: x")
    assert found(busy) == (AccessDeniedError, "reachable")
    nothing_attached = GenericError(f"{METADATA} - Server returned non-2xx status code: 404 Not Found: x")
    assert found(nothing_attached) == (AccessDeniedError, "never")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "Generic S3 error: Error performing GET https://host/bucket?list-type=2 in 44.8ms - HTTP error: "
            "error sending request\n\nDebug source:\nGeneric {\n    inner: Custom {\n"
            "        error: InvalidCertificate(\n            UnknownIssuer,\n        ),\n    },\n}",
            "UnknownIssuer",
        ),
        (
            "Cannot connect to host minio:9000 ssl:True [SSLCertVerificationError: (1, '[SSL: "
            "CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)')]",
            "self-signed certificate",
        ),
    ],
)
def test_a_certificate_that_is_not_accepted_is_named_and_not_tried_again(said: str, reason: str) -> None:
    error = PLACE.translate(GenericError(said), "list", None)
    assert f"is not accepted for 's3://bucket': {reason}. Set SSL_CERT_FILE" in str(error)
    assert isinstance(error, StoreError) and error.retry == "never"


@pytest.mark.parametrize("piece", ["://user:PASSWORD@host", "?sig=PASSWORD"])
def test_a_secret_that_the_cut_of_a_long_answer_splits_is_not_shown(piece: str) -> None:
    place = StoreLocation("s3://b", secrets=("a PASSWORD in two words, PASSWORD",))
    for padding in range(7_950, 8_010):
        # All before it is replaced by a few characters, so that it would be among the characters shown.
        said = str(
            place.translate(OSError(f"said <Token-0>{'x' * padding}</Token-0>{piece} more"), "get", "k")
        )
        assert "PASS" not in said, said
    assert "PASS" not in str(place.translate(OSError(f"{place.secrets[0]} {'x' * 9_000}"), "get", "k"))
