"""Collector of request spans (`--otlp-traces-endpoint`). Used by `engine/options/resolve.py`."""

from __future__ import annotations

import importlib.util
from urllib.parse import urlsplit

from engine.errors import OptionError

SENDERS = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")  # modules that send spans


def resolve_collector(given: str, senders: tuple[str, ...] = SENDERS) -> str:
    """Return the complete URL. Raises OptionError if it is not valid, or if the modules that send spans are not installed."""
    try:
        parts = urlsplit(given)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise OptionError(
            f"--otlp-traces-endpoint {given}: expected the OTLP over HTTP URL of a collector, such as "
            "http://127.0.0.1:4318/v1/traces (gRPC, port 4317, is not supported)"
        )
    if not all(map(_is_there, senders)):
        raise OptionError(
            f"--otlp-traces-endpoint {given} needs opentelemetry-sdk and its exporter; run pip install "
            "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        )
    return given if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of a parent package
        return False
