"""Tokenizer settings of a checkpoint outside the vocabulary itself: special tokens and chat templates.

Called by `vocabulary.py` and `actor.py` in the tokenizer processes. Reads the files of Hugging Face repositories that accompany
the vocabulary, as loaded at the start; each may be missing.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import msgspec

from engine.checkpoint.record import TEMPLATES, ModelRecord
from engine.errors import CheckpointError


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is found in a text before the tokenizer itself processes it."""

    token_id: int
    content: str
    is_special: bool


class TokenizerSettings(msgspec.Struct, frozen=True, kw_only=True):
    special_tokens: dict[str, str]  # by role: bos_token, eos_token, pad_token, ...
    more_special_tokens: tuple[str, ...]  # without a role
    added_tokens: tuple[AddedToken, ...]
    is_adding_bos: bool  # around a prompt; only if the vocabulary does not define it itself (tokenizer.model)
    is_adding_eos: bool
    chat_templates: dict[str, str]  # by name: "default", "tool_use", ...

    @classmethod
    def of(cls, model: ModelRecord) -> TokenizerSettings:
        """Return the settings of the checkpoint. Raises CheckpointError naming the bad file."""
        config = _object(model, "tokenizer_config.json")
        named = _object(model, "special_tokens_map.json") | config
        is_llama = str(config.get("tokenizer_class", "")).startswith("Llama")
        return cls(
            special_tokens={role: _content(value) for role, value in named.items() if _is_token(role, value)},
            more_special_tokens=tuple(
                _content(value) for key in _LISTS_OF_SPECIAL_TOKENS for value in _values(named.get(key)) if _content(value)
            ),
            added_tokens=_added_tokens(config, _object(model, "added_tokens.json")),
            is_adding_bos=bool(config.get("add_bos_token", is_llama)),
            is_adding_eos=bool(config.get("add_eos_token", False)),
            chat_templates=_chat_templates(model, config.get("chat_template")),
        )


_MAX_ID_DIGITS = 20
_LISTS_OF_SPECIAL_TOKENS = ("additional_special_tokens", "extra_special_tokens")


def _object(model: ModelRecord, name: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(model.files.get(name, b"{}"), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{model.path}/{name} cannot be read: {error}") from error


def _content(value: Any) -> str:
    """Return the text of a token, given as a string or as the dictionary of an AddedToken."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _is_token(role: str, value: Any) -> bool:
    return role.endswith("_token") and bool(_content(value))


def _values(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _added_tokens(config: dict[str, Any], ids: dict[str, Any]) -> tuple[AddedToken, ...]:
    """Read tokenizer_config.json's `added_tokens_decoder` ({id: token}) and the older added_tokens.json ({content: id})."""
    tokens = {token_id: AddedToken(token_id, content, False) for content, token_id in ids.items() if isinstance(token_id, int)}
    decoder = config.get("added_tokens_decoder")
    for key, value in decoder.items() if isinstance(decoder, dict) else ():
        if len(key) <= _MAX_ID_DIGITS and key.isdecimal() and _content(value):
            tokens[int(key)] = AddedToken(int(key), _content(value), isinstance(value, dict) and bool(value.get("special")))
    return tuple(tokens[token_id] for token_id in sorted(tokens))


def _chat_templates(model: ModelRecord, configured: Any) -> dict[str, str]:
    """Return template texts by name. Files take precedence over tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, dict):
        templates |= {str(name): text for name, text in configured.items() if isinstance(text, str)}
    elif isinstance(configured, list):
        named = ((entry.get("name"), entry.get("template")) for entry in configured if isinstance(entry, dict))
        templates |= {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
    from_processor = _object(model, "chat_template.json").get("chat_template")
    if isinstance(from_processor, str):
        templates["default"] = from_processor
    for name in model.files:
        if name.startswith(f"{TEMPLATES}/"):
            templates[PurePath(name).stem] = _text(model, name)
    if "chat_template.jinja" in model.files:
        templates["default"] = _text(model, "chat_template.jinja")
    return templates


def _text(model: ModelRecord, name: str) -> str:
    try:
        return model.files[name].decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{model.path}/{name} cannot be read: {error}") from error
