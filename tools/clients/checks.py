"""Shared parts of the clients' checks. Run in the client's environment, so it imports only the standard library."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

QUESTION = "What is 12 + 30?"
ANSWER = "42"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,  # the embedded model was not trained for these and would call others
}
SUM = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"], "additionalProperties": False}


@dataclass(frozen=True)
class Server:
    """Servers that a client is tested against."""

    url: str  # http://127.0.0.1:PORT, ready
    model: str
    embedder_url: str  # embedding model
    embedder: str
    larger_url: str  # a model large enough that the client's overhead is small
    larger: str
    agent_url: str  # the embedded model with a context for coding agents
    agent: str
    tokenizer: str  # directory of the model's files
    place: str  # directory for a client's files
    ours: tuple[str, ...]  # the command `tokamak`


class NotRunError(Exception):
    """Why a check cannot be run here."""


Check = Callable[[Server], "str | None"]  # None or a note on success; any exception is a failure
CHECKS: list[tuple[str, Check]] = []


def check(feature: str) -> Callable[[Check], Check]:
    """Register a function as a check of `feature`; checks run in the order of the file."""

    def add(function: Check) -> Check:
        CHECKS.append((feature, function))
        return function

    return add


def run(*command: str, timeout_s: float = 900) -> str:
    """Return the output of a client's program. AssertionError with its last lines if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"exit code {done.returncode}: {' '.join(done.stdout.split()[-40:])}"
    return done.stdout


def launched(server: Server, client: str, *arguments: str) -> str:
    """Return the output of a coding agent started by `tokamak launch`. NotRunError if it is not installed."""
    program = {"claude": "claude", "codex": "codex", "opencode": "opencode"}[client]
    if shutil.which(program) is None:
        raise NotRunError(f"{program} is not installed here")
    return run(*server.ours, "launch", client, "--url", server.agent_url, "--", *arguments, timeout_s=600)


def printed(server: Server, client: str) -> list[str]:
    """Return the lines of `--print-client` for the agents' server. NotRunError if the client is not installed."""
    from engine.supervisor.clients import CLIENTS, Served  # the checks of other clients run without our packages

    if shutil.which(client.partition("-")[0]) is None:
        raise NotRunError(f"{client} is not installed here")
    return CLIENTS[client](Served(server.agent_url, server.agent, "-", 131072))


def program(name: str) -> str:
    """Return the path of a program in the client's environment."""
    return str(Path(sys.executable).with_name(name))


def main() -> None:
    """`python -m tools.clients.of_NAME SERVER RESULTS`: a line of `[feature, result]` in the file RESULTS for each check."""
    server = Server(**json.loads(sys.argv[1]))
    with open(sys.argv[2], "a") as results:
        for feature, function in CHECKS:
            try:
                said = function(server)
                result = f"yes: {said}" if said else "yes"
            except NotRunError as reason:
                result = f"not run: {reason}"
            except Exception as error:  # any exception of a client is its result
                traceback.print_exc()
                result = f"NO: {type(error).__name__}: {error}"
            results.write(json.dumps([feature, " ".join(result.split())[:600]]) + "\n")
            results.flush()
