"""Settings for clients of this engine, printed by `--print-client` and set by `tokamak launch`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import msgspec

from engine.config import EngineConfig

KEY = "KEY"  # placeholder for the user's key, which is never printed
AGENT_CONTEXT = 32768  # tokens; the prompts and tools of coding agents alone take 10,000 to 25,000
AGENTS = ("claude-code", "codex", "opencode", "qwen-code", "copilot", "pi", "cline")


class Served(msgspec.Struct, frozen=True):
    """Facts about an engine for the configuration of a client."""

    url: str
    model: str
    key: str
    max_model_len: int


def client_settings(client: str, config: EngineConfig) -> list[str]:
    """Return the lines for `client`, one of CLIENTS."""
    served = Served(config.url, config.served_model_name[0], KEY if config.api_key else "-", config.max_model_len)
    lines = CLIENTS[client](served)
    if warning := context_warning(client, served):
        is_json = lines[0].startswith("//")
        return [f"{lines[0]} ({warning})", *lines[1:]] if is_json else [*lines, f"# {warning}"]
    return lines


def context_warning(client: str, served: Served) -> str:
    """Return why an agent would not get far; empty if it would."""
    if client not in AGENTS or served.max_model_len >= AGENT_CONTEXT:
        return ""
    return (
        f"warning: the model's context of {served.max_model_len} tokens is too small for {client}: its prompt and tools alone "
        f"take most of it; start a model with at least --max-model-len {AGENT_CONTEXT}"
    )


def claude_variables(served: Served) -> dict[str, str]:
    """Return Claude Code's environment variables."""
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("SONNET", "OPUS", "HAIKU")))
    return {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        **dict.fromkeys(models, served.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.max_model_len),
    }


def codex_settings(served: Served) -> dict[str, Any]:
    """Return Codex's settings as dotted names; the key is in the variable TOKAMAK_KEY."""
    provider = {"name": "Tokamak", "base_url": f"{served.url}/v1", "wire_api": "responses", "env_key": "TOKAMAK_KEY"}
    return {
        "model": served.model,
        "model_provider": "tokamak",
        "model_context_window": served.max_model_len,
        **{f"model_providers.tokamak.{name}": value for name, value in provider.items()},
    }


def opencode_settings(served: Served) -> dict[str, Any]:
    """Return opencode's settings."""
    limit = {"context": served.max_model_len, "output": max(1, served.max_model_len // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Tokamak",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key},
        "models": {served.model: {"name": served.model, "limit": limit}},
    }
    return {"$schema": "https://opencode.ai/config.json", "provider": {"tokamak": provider}, "model": f"tokamak/{served.model}"}


def _exports(variables: dict[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def _claude_code(served: Served) -> list[str]:
    return [*_exports(claude_variables(served)), "claude"]


def _codex(served: Served) -> list[str]:
    table = "model_providers.tokamak"
    settings = codex_settings(served)
    top = [f"{name} = {json.dumps(value)}" for name, value in settings.items() if not name.startswith(table)]
    own = [
        f"{name.removeprefix(table + '.')} = {json.dumps(value)}" for name, value in settings.items() if name.startswith(table)
    ]
    return ["# ~/.codex/config.toml", *top, f"[{table}]", *own, f"# export TOKAMAK_KEY={served.key}"]


def _opencode(served: Served) -> list[str]:
    return ["// opencode.json", *json.dumps(opencode_settings(served), indent=2).splitlines()]


def _open_webui(served: Served) -> list[str]:
    return [*_exports({"OPENAI_API_BASE_URL": f"{served.url}/v1", "OPENAI_API_KEY": served.key}), "open-webui serve"]


def _qwen_code(served: Served) -> list[str]:
    variables = {"OPENAI_BASE_URL": f"{served.url}/v1", "OPENAI_API_KEY": served.key, "OPENAI_MODEL": served.model}
    return [*_exports(variables), "qwen --auth-type openai"]


def _copilot(served: Served) -> list[str]:
    variables = {
        "COPILOT_PROVIDER_BASE_URL": f"{served.url}/v1",
        "COPILOT_PROVIDER_API_KEY": served.key,
        "COPILOT_MODEL": served.model,
    }
    return [*_exports(variables), "copilot"]


def _aider(served: Served) -> list[str]:
    variables = {"OPENAI_API_BASE": f"{served.url}/v1", "OPENAI_API_KEY": served.key}
    return [*_exports(variables), f"aider --model {shlex.quote(f'openai/{served.model}')}"]


def _llm(served: Served) -> list[str]:
    entry = {"model_id": "tokamak", "model_name": served.model, "api_base": f"{served.url}/v1", "api_key_name": "tokamak"}
    return [
        "# extra-openai-models.yaml, in the directory of `llm logs path`",
        *(f"{'- ' if name == 'model_id' else '  '}{name}: {json.dumps(value)}" for name, value in entry.items()),
        f"# llm keys set tokamak --value {served.key}",
        "# llm -m tokamak 'What are you?'",
    ]


def _pi(served: Served) -> list[str]:
    model = {"id": served.model, "contextWindow": served.max_model_len, "maxTokens": max(1, served.max_model_len // 4)}
    provider = {"baseUrl": f"{served.url}/v1", "api": "openai-completions", "apiKey": served.key, "models": [model]}
    return ["// ~/.pi/agent/models.json", *json.dumps({"providers": {"tokamak": provider}}, indent=2).splitlines()]


def _cline(served: Served) -> list[str]:
    model, key = shlex.quote(served.model), shlex.quote(served.key)
    return [
        f"cline auth --provider openai --baseurl {served.url}/v1 --apikey {key} --modelid {model}",
        "cline",
        f"# in an editor: API Provider: OpenAI Compatible, Context Window Size: {served.max_model_len}",
    ]


CLIENTS: dict[str, Callable[[Served], list[str]]] = {
    "claude-code": _claude_code,
    "codex": _codex,
    "opencode": _opencode,
    "qwen-code": _qwen_code,
    "copilot": _copilot,
    "aider": _aider,
    "llm": _llm,
    "pi": _pi,
    "cline": _cline,
    "open-webui": _open_webui,
}
