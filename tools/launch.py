"""`tokamak launch CLIENT`: starts a coding agent that uses a running engine.

Its process becomes the client's. Settings are passed in the environment or on the command line; no file of the user is read or
written.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

import msgspec

from engine.errors import OptionError, TokamakError
from engine.options.argument_parser import ArgumentParser
from engine.supervisor.clients import Served, claude_variables, codex_settings, context_warning, opencode_settings
from tools.target import Target, add_target_arguments, error_text, find_target

TIMEOUT_S = 10.0


class Client(msgspec.Struct, frozen=True):
    program: str
    package: str  # npm package
    name: str  # name in `--print-client`


CLIENTS = {
    "claude": Client("claude", "@anthropic-ai/claude-code", "claude-code"),
    "codex": Client("codex", "@openai/codex", "codex"),
    "opencode": Client("opencode", "opencode-ai", "opencode"),
}


class ModelCard(msgspec.Struct):
    id: str
    max_model_len: int


class ModelList(msgspec.Struct):
    data: list[ModelCard]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 2 for a wrong command line, 1 if the client or the engine is missing; otherwise the client's own."""
    parser = ArgumentParser(
        prog="tokamak launch",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Arguments after -- are passed to the client.",
    )
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--model", default="", help="default: the first model that is served")
    add_target_arguments(parser)
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    client = CLIENTS[options.client]
    try:
        program = shutil.which(client.program)
        if program is None:
            raise TokamakError(f"{client.program} is not installed; install it with: npm install -g {client.package}")
        served = served_by(find_target(options), options.model)
    except (TokamakError, OptionError) as error:
        print(f"tokamak launch: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    if warning := context_warning(client.name, served):
        print(f"tokamak launch: {warning}", file=sys.stderr)
    command, variables = command_of(options.client, served)
    sys.stderr.flush()
    os.execve(program, [*command, *arguments[end + 1 :]], os.environ | variables)


def served_by(target: Target, model: str) -> Served:
    """Return a server's first model, or the one of that name. TokamakError if there is none."""
    if target.uds:
        raise TokamakError("the engine listens on a UNIX socket, which this client cannot reach; start the engine with --port")
    request = urllib.request.Request(f"{target.url}/v1/models", headers=target.headers())
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            cards = msgspec.json.decode(answer.read(), type=ModelList).data
    except urllib.error.HTTPError as error:
        raise TokamakError(f"{target.url}: {error_text(error.read())}") from None
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        raise TokamakError(f"{target.url} does not answer: {error}; start an engine with `tokamak serve`") from None
    for card in cards:
        if model in ("", card.id):
            return Served(target.url, card.id, target.api_key or "-", card.max_model_len)
    raise TokamakError(f"model {model!r} is not served; available: {', '.join(card.id for card in cards)}")


def command_of(client: str, served: Served) -> tuple[list[str], dict[str, str]]:
    """Return a client's command, and its environment variables besides those of the user."""
    if client == "claude":
        return ["claude"], claude_variables(served)
    if client == "codex":
        settings = [f"{name}={json.dumps(value)}" for name, value in codex_settings(served).items()]
        return ["codex", *(word for setting in settings for word in ("-c", setting))], {"TOKAMAK_KEY": served.key}
    return ["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(opencode_settings(served))}


if __name__ == "__main__":
    sys.exit(main())
