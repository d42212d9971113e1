"""Options of the HTTP server: contradictions, and unusable certificates."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import OptionError
from engine.options.read import read_options
from engine.options.resolve_http import resolve_http
from tests.paths import REPOSITORY

TLS = REPOSITORY / "tests" / "api" / "tls"
KEY, CERTIFICATE = str(TLS / "key.pem"), str(TLS / "certificate.pem")


def test_defaults_are_empty() -> None:
    assert not any(resolve_http(read_options([], {}), "").values())


def test_one_file_or_two(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(KEY).read_text() + Path(CERTIFICATE).read_text())
    assert resolve_http(read_options(["--ssl-certfile", str(both)], {}), "")["ssl_keyfile"] == ""
    given = ["--ssl-certfile", CERTIFICATE, "--ssl-keyfile", KEY, "--root-path", "/llm/"]
    assert resolve_http(read_options(given, {}), "") == {
        "root_path": "/llm",
        "uds": "",
        "ssl_keyfile": KEY,
        "ssl_certfile": CERTIFICATE,
    }


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--ssl-keyfile", KEY], "--ssl-certfile"),
        (["--ssl-certfile", CERTIFICATE], "certificate and its key"),
        (["--ssl-certfile", "/no/such/file"], "No such file"),
        (["--ssl-certfile", KEY, "--ssl-keyfile", KEY], "certificate and its key"),
        (["--root-path", "llm"], "such as /llm"),
        (["--root-path", "/a?b"], "such as /llm"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        resolve_http(read_options(arguments, {}), "")


def test_a_socket_takes_the_place_of_a_port() -> None:
    options = read_options(["--uds", "api.sock", "--port", "8001"], {})
    assert resolve_http(options, "")["uds"] == str(Path("api.sock").absolute())
    assert ["--port has no effect" in note for note in options.notes] == [True]


def test_a_socket_of_the_run() -> None:
    assert resolve_http(read_options(["--uds", "auto"], {}), "/run/dir")["uds"] == "/run/dir/api.sock"
