"""`tokamak launch`: the command of a client, and messages where it cannot start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.api_server import ApiServer
from tests.paths import REPOSITORY
from tools.launch import CLIENTS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("run")) as running:
        yield running


RECORDER = """#!{python}
import json, os, sys
kept = {{name: value for name, value in os.environ.items() if name.startswith(("ANTHROPIC", "CLAUDE", "TOKAMAK", "OPENCODE"))}}
print(json.dumps([sys.argv[1:], kept]))
"""


def launch(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": str(path), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "tools.cli", "launch", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False)


def recorded(server: ApiServer, place: Path, client: str) -> tuple[list[str], dict[str, str], str]:
    program = place / CLIENTS[client].program
    program.write_text(RECORDER.format(python=sys.executable))
    program.chmod(0o755)
    done = launch(place, client, "--url", server.url, "--api-key", "k", "--", "-p", "hi")
    assert done.returncode == 0, done.stderr
    arguments, variables = json.loads(done.stdout)
    assert arguments[-2:] == ["-p", "hi"]
    return arguments, variables, done.stderr


def test_claude_gets_its_environment(server: ApiServer, tmp_path: Path) -> None:
    _, variables, said = recorded(server, tmp_path, "claude")
    assert (variables["ANTHROPIC_BASE_URL"], variables["ANTHROPIC_AUTH_TOKEN"]) == (server.url, "k")
    assert (variables["ANTHROPIC_MODEL"], variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]) == ("tiny", "256")
    assert "256 tokens is too small" in said


def test_codex_gets_its_settings(server: ApiServer, tmp_path: Path) -> None:
    arguments, variables, _ = recorded(server, tmp_path, "codex")
    assert f'model_providers.tokamak.base_url="{server.url}/v1"' in arguments
    assert variables["TOKAMAK_KEY"] == "k"


def test_opencode_gets_its_settings(server: ApiServer, tmp_path: Path) -> None:
    _, variables, _ = recorded(server, tmp_path, "opencode")
    assert json.loads(variables["OPENCODE_CONFIG_CONTENT"])["model"] == "tokamak/tiny"


@pytest.mark.parametrize("client", CLIENTS)
def test_missing_client_is_named_with_its_package(client: str, tmp_path: Path) -> None:
    done = launch(tmp_path, client, "--url", "http://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"npm install -g {CLIENTS[client].package}" in done.stderr
