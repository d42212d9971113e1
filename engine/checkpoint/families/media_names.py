"""Token ids of media placeholders that are only in the tokenizer's files, for families without them in config.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint.json_fields import JsonOptions, read_json
from engine.errors import CheckpointError

_ADDED, _TOKENIZER_CONFIG, _TOKENIZER = "added_tokens.json", "tokenizer_config.json", "tokenizer.json"


def named_token_ids(directory: Path, names: Sequence[str], vocab_size: int) -> tuple[int, ...]:
    """Return the ids of these tokens. Raises CheckpointError if one is in none of the files."""
    found: dict[str, int] = {}
    for file_name in (_TOKENIZER, _TOKENIZER_CONFIG, _ADDED):
        path = directory / file_name
        if path.is_file():
            found |= _added(file_name, JsonOptions(read_json(path), path))
    for name in names:
        if not 0 <= found.get(name, -1) < vocab_size:
            raise CheckpointError(
                f"{directory}: {name} has no token id below {vocab_size} in {_TOKENIZER}, {_TOKENIZER_CONFIG} or {_ADDED}, so "
                "media cannot be placed in prompts"
            )
    return tuple(found[name] for name in names)


def _added(file_name: str, options: JsonOptions) -> dict[str, int]:
    if file_name == _ADDED:
        return {name: token_id for name, token_id in options.values.items() if type(token_id) is int}
    if file_name == _TOKENIZER_CONFIG:
        tokens: list[tuple[Any, Any]] = [
            (token, token_id) for token_id, token in options.mapping("added_tokens_decoder").items()
        ]
    else:
        tokens = [(token, token.get("id")) for token in options.values.get("added_tokens") or [] if isinstance(token, dict)]
    return {
        token["content"]: int(token_id)
        for token, token_id in tokens
        if isinstance(token, dict) and isinstance(token.get("content"), str) and str(token_id).isdecimal()
    }
