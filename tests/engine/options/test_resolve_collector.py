"""The collector of spans: valid addresses, and missing packages."""

from __future__ import annotations

import pytest

from engine.errors import OptionError
from engine.options.resolve_collector import resolve_collector


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://127.0.0.1:4318/v1/traces", "http://127.0.0.1:4318/v1/traces"),
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://[::1]/", "https://[::1]/v1/traces"),
        ("http://collector/otlp/v1/traces", "http://collector/otlp/v1/traces"),
    ],
)
def test_an_address(given: str, expected: str) -> None:
    assert resolve_collector(given) == expected


@pytest.mark.parametrize(
    "given", ["grpc://localhost:4317", "localhost:4318", "http://", "http://a:b", "http://a:99999", "http://["]
)
def test_invalid_url_is_refused(given: str) -> None:
    with pytest.raises(OptionError, match="expected the OTLP over HTTP URL of a collector"):
        resolve_collector(given)


def test_missing_packages_are_named() -> None:
    with pytest.raises(OptionError, match="pip install"):
        resolve_collector("http://127.0.0.1:4318", ("opentelemetry.no_such_package.trace",))
