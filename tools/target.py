"""The HTTP server of a client tool, found by its URL or as the engine that runs on this machine, and its error messages.

Used by `tokamak chat` and `tokamak bench serve`; works against any server that speaks OpenAI's API.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from engine.errors import OptionError, TokamakError
from engine.process.run_directory import choose_run, find_runs

DEFAULT_URL = "http://127.0.0.1:8000"
_HEADER = re.compile(r"[ -~]*")


@dataclass(frozen=True, slots=True)
class Target:
    """Server that receives requests. `path("/v1/models")` is the request path below the URL's prefix."""

    url: str  # as shown to users, without a trailing slash or /v1
    host: str
    port: int
    is_tls: bool
    prefix: str
    api_key: str = ""
    uds: str = ""  # path of a UNIX socket; empty: host and port

    @classmethod
    def parse(cls, url: str, api_key: str = "") -> Target:
        """A server's base URL, with or without the `/v1` that OpenAI clients append. Raises OptionError."""
        if not _HEADER.fullmatch(api_key):
            raise OptionError("--api-key contains characters that are not allowed in a header; pass only the key")
        scheme, _, path = url.partition(":")
        if scheme == "unix" and path:
            return cls(url, "localhost", 80, False, "", api_key, path)
        base = url.rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(base)
        except ValueError as error:
            raise OptionError(f"--url {url!r} is invalid: {error}; expected a URL such as {DEFAULT_URL}") from None
        if not _HEADER.fullmatch(base) or " " in base:
            raise OptionError(f"--url {url!r} contains characters that are not allowed in a URL; write them as %XX")
        try:
            port = parts.port
        except ValueError as error:
            raise OptionError(f"--url {url!r} has no valid port: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError(f"--url {url!r} is not an HTTP URL; expected a URL such as {DEFAULT_URL}")
        is_tls = parts.scheme == "https"
        return cls(base, parts.hostname, port or (443 if is_tls else 80), is_tls, parts.path, api_key)

    def path(self, path: str) -> str:
        return self.prefix + path

    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        headers = {"accept": "application/json, text/event-stream", "user-agent": "tokamak"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        return headers


def add_target_arguments(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """--url, --run, --run-dir and --api-key, for `find_target`."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--url", "--base-url", default="", help=f"default: the running engine, otherwise {DEFAULT_URL}")
    which.add_argument("--run", default="", metavar="ID", help="engine with this run id or beginning of one")
    which.add_argument("--run-dir", type=Path, metavar="DIR", help="engine with this run directory")
    key = os.environ.get("TOKAMAK_API_KEY", "").partition(",")[0]
    parser.add_argument("--api-key", default=key, metavar="KEY", help="default: the first key in $TOKAMAK_API_KEY")


def find_target(options: argparse.Namespace) -> Target:
    """Return the server selected by the options of `add_target_arguments`. OptionError for an invalid URL; TokamakError if the
    engine does not run."""
    if options.url:
        return Target.parse(options.url, options.api_key)
    if not (options.run or options.run_dir or any(run.is_alive() for run in find_runs())):
        return Target.parse(DEFAULT_URL, options.api_key)
    run = choose_run(options.run, options.run_dir)
    if not run.is_alive():
        raise TokamakError(f"engine {run.run_id} is not running; start it again, or choose another with --run or --url")
    config = run.manifest().config
    if config.api_key and not options.api_key:
        raise TokamakError(f"engine {run.run_id} requires an API key; pass one with --api-key or TOKAMAK_API_KEY")
    return Target.parse(config.url, options.api_key)


class _Error(msgspec.Struct):
    message: str


class _ErrorReply(msgspec.Struct):
    error: _Error


def error_text(body: bytes) -> str:
    """Return the message of an error reply in OpenAI's format, otherwise the beginning of its text."""
    try:
        return msgspec.json.decode(body, type=_ErrorReply).error.message
    except msgspec.DecodeError:
        return body[:300].decode(errors="replace")
