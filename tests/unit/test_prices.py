"""The bill of `fastload plan`: whose prices, and how much."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastload.cli.demo.photos import make_dataset
from fastload.cli.plan.prices import find_prices, format_money
from fastload.errors import ArgumentError
from tests.commands import answer

OWN = 'currency = "EUR"\nget = 0.5\nlist = 5\negress = 0.25\nsource = "contract, 2026-11-22"\n'


def test_bill_of_imagenet_over_the_internet_equals_the_hand_computed_one() -> None:
    prices = find_prices("gs://bucket/train", {}, None)
    assert prices is not None and prices.currency == "USD" and "2026-11-22" in prices.source
    cost = prices.bill(1_281_167, 1_281_167 * 115_000)
    assert (round(cost.requests, 4), round(cost.egress, 2)) == (0.5125, 17.68)


@pytest.mark.parametrize("url", ["az://box", "https://host/a", "/data", "gs/train"])
def test_store_without_a_confirmed_price_has_none(url: str) -> None:
    assert find_prices(url, {}, None) is None


def test_s3_has_amazons_price_unless_an_endpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    prices = find_prices("s3://bucket", {"region": "us-east-1"}, None)
    assert prices is not None and "2026-09-29" in prices.source
    for name in ("endpoint_url", "endpoint"):
        assert find_prices("s3://bucket", {name: "https://obs.example.com"}, None) is None
    nested = {"client_kwargs": {"endpoint_url": "https://obs.example.com"}}
    assert find_prices("s3://bucket", nested, None) is None
    assert find_prices("gs://bucket", {"base_url": "https://gcs.example.com"}, None) is None
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://minio.example.com")
    assert find_prices("s3://bucket", {}, None) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("get = ", "TOML"),
        (OWN.replace("get", "gets"), "gets"),
        (OWN.replace("0.5", "-1"), "get must be a number >= 0, found -1"),
        (OWN.replace("0.5", "nan"), "found nan"),
        (OWN.replace("0.5", "true"), "found True"),
        (OWN.replace("egress = 0.25\n", ""), "egress must be a number >= 0, found None"),
        (OWN.replace('"EUR"', '""'), "currency must be a code"),
        (OWN.replace('"EUR"', "1"), "currency must be a code"),
        (None, "cannot be read"),
    ],
)
def test_file_of_prices_that_is_wrong_is_refused(text: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ArgumentError, match=words):
        find_prices("gs://bucket", {}, file)


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "EUR 0.00"), (0.0042, "EUR 0.0042"), (0.00001, "EUR 1e-05"), (1234.5, "EUR 1,234.50")],
)
def test_money_is_written_with_its_currency(amount: float, text: str) -> None:
    assert format_money(amount, "EUR") == text


def test_plan_with_own_prices_quotes_all_epochs(tmp_path: Path) -> None:
    make_dataset(tmp_path / "photos", 20, 2)
    (tmp_path / "prices.toml").write_text(OWN)
    common = [*("--size-limit", "1GB", "--gpus", "1", "--gpu-rate", "100"), "--epochs", "3"]
    made = []
    for more in ([], ["--prices", str(tmp_path / "prices.toml")]):
        made.append(answer("plan", tmp_path / "photos", *common, *more))
    without, quoted = made
    assert without["prices"] is None and without["modes"]["raw"]["cost"] is None
    assert any("--prices" in line for line in without["assumptions"])
    assert quoted["prices"]["currency"] == "EUR" and quoted["prices"]["source"] == "contract, 2026-11-22"
    mode = quoted["modes"]["raw"]
    gets = mode["first"]["requests"] + 2 * mode["later"]["requests"]
    egress = mode["first"]["egress_bytes"] + 2 * mode["later"]["egress_bytes"]
    assert gets >= 20 and mode["cost"]["requests"] == pytest.approx(gets / 1000 * 0.5)
    assert mode["cost"]["egress"] == pytest.approx(egress / 1e9 * 0.25)


def test_warm_with_own_prices_quotes_what_it_has_read(tmp_path: Path) -> None:
    make_dataset(tmp_path / "photos", 20, 2)
    (tmp_path / "prices.toml").write_text(OWN)
    paths = [str(tmp_path / "photos"), "--cache", str(tmp_path / "cache"), "--num-workers", "0"]
    for gets in (20, 0):  # the second run has nothing left
        found = answer("warm", *paths, "--mode", "raw", "--prices", tmp_path / "prices.toml")
        assert found["requests"] == found["quote"]["requests"] == found["quote"]["objects"] == gets
        assert found["quote"]["read_bytes"] == found["read_bytes"]
        assert found["quote"]["cost"] == pytest.approx(found["cost"])
        assert found["cost"]["requests"] == pytest.approx(gets / 1000 * 0.5)
        assert found["cost"]["egress"] == pytest.approx(found["read_bytes"] / 1e9 * 0.25)
