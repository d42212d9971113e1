"""Parsers of a model's answers, from the options or from its chat template and vocabulary."""

from __future__ import annotations

import json
from typing import Any

from engine.checkpoint.record import VOCABULARIES, ModelRecord
from engine.errors import CheckpointError, OptionError
from engine.parsers.choice import AUTO, CALL_PARSERS, NONE, choose_call_parser, choose_reasoning_parser, shows_tools
from engine.parsers.thinking import THINKING_FAMILIES
from engine.tokenizer.settings import TokenizerSettings


def resolve_parsers(values: dict[str, Any], record: ModelRecord, chat_template: str) -> dict[str, Any]:
    """Return fields of EngineConfig. A tokenizer that cannot be read is reported when its process starts."""
    try:
        templates = {"default": chat_template} if chat_template else TokenizerSettings.of(record).chat_templates
    except CheckpointError:
        templates = {}
    files = [
        record.files[name] for name in (*VOCABULARIES, "tokenizer_config.json", "added_tokens.json") if name in record.files
    ]

    def has_token(marker: str) -> bool:
        return any(json.dumps(marker).encode() in data or marker.encode() in data for data in files)

    calls, reasoning = values["tool_call_parser"], values["reasoning_parser"]
    for name, given, known in (("tool-call", calls, CALL_PARSERS), ("reasoning", reasoning, THINKING_FAMILIES)):
        if given not in (AUTO, NONE, *known):
            raise OptionError(
                f"--{name}-parser {given}: expected one of {', '.join((AUTO, NONE, *known))}, or a parser of a package that "
                "--plugins names"
            )
    return {
        "tool_call_parser": choose_call_parser(templates, has_token) if calls == AUTO else calls,
        "shows_tools": shows_tools(templates),
        "reasoning_parser": choose_reasoning_parser(templates, has_token) if reasoning == AUTO else reasoning,
    }
