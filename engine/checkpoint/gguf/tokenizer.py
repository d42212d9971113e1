"""The tokenizer and the chat template of a GGUF file as the files of a checkpoint: tokenizer.json or tokenizer.model, and
tokenizer_config.json.

Called by `convert.py`. A file that carries its original tokenizer.json keeps it. "gpt2" (byte-level BPE) becomes a
tokenizer.json with the splitting rule that the file names; "llama" (BPE by scores) a sentencepiece model.
"""

from __future__ import annotations

import json
import re
import struct
from typing import Any

from engine.checkpoint.json_fields import JsonOptions
from engine.errors import CheckpointError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # token types; sentencepiece has the same
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "mask": "mask"}
_END_ROLES = ("eos", "eot", "eom")
_END_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>")

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
}
_ADDING_BOS = ("llama-bpe", "llama3", "llama-v3")  # defaults if the file does not say; these also look up whole words first


def end_token_ids(options: JsonOptions) -> tuple[int, ...]:
    """Return tokens that end an answer: from the file, and control tokens known to do so."""
    named = [options.values.get(f"tokenizer.ggml.{role}_token_id") for role in _END_ROLES]
    typed = enumerate(zip(_tokens(options), options.numbers("tokenizer.ggml.token_type"), strict=False))
    known = [token_id for token_id, (token, kind) in typed if kind == _CONTROL and token in _END_TOKENS]
    return tuple(dict.fromkeys(token_id for token_id in (*named, *known) if isinstance(token_id, int)))


def tokenizer_files(options: JsonOptions) -> dict[str, bytes]:
    """Return file contents by name; none if the file has no tokenizer. Raises CheckpointError."""
    files = {name: text.encode() for name, text in _templates(options).items()}
    files["tokenizer_config.json"] = _json(_settings(options))
    original = options.text("tokenizer.huggingface.json", "")
    if original:
        return files | {"tokenizer.json": original.encode()}
    kind = options.text("tokenizer.ggml.model", "none")
    if kind == "gpt2":
        return files | {"tokenizer.json": _json(_byte_level(options))}
    if kind == "llama":
        return files | {"tokenizer.model": _sentencepiece(options)}
    raise options.error("tokenizer.ggml.model", f"{kind!r} is not supported; expected gpt2 (byte-level BPE) or llama")


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _tokens(options: JsonOptions) -> tuple[str, ...]:
    return options.texts("tokenizer.ggml.tokens")


def _types(options: JsonOptions) -> list[int]:
    """Return the type of each token."""
    tokens = _tokens(options)
    types = [int(kind) for kind in options.numbers("tokenizer.ggml.token_type")] or [1] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise options.error("tokenizer.ggml.token_type", f"has {len(types)} values for {len(tokens)} tokens")
    return types


def _settings(options: JsonOptions) -> dict[str, Any]:
    tokens = _tokens(options)
    settings: dict[str, Any] = {}
    for name, role in _ROLES.items():
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = options.count(key, -1, least=0)
        if token_id >= len(tokens):
            raise options.error(key, f"{token_id} is outside the vocabulary of {len(tokens)} tokens")
        if token_id >= 0:
            settings[f"{role}_token"] = tokens[token_id]
    is_llama = options.text("tokenizer.ggml.model", "none") == "llama"
    settings["add_bos_token"] = options.flag("tokenizer.ggml.add_bos_token", is_llama)
    settings["add_eos_token"] = options.flag("tokenizer.ggml.add_eos_token", False)
    if is_llama:
        settings["added_tokens_decoder"] = {
            str(token_id): {"content": tokens[token_id], "special": kind == _CONTROL}
            for token_id, kind in enumerate(_types(options))
            if kind in (_CONTROL, _USER_DEFINED)
        }
    return settings


def _templates(options: JsonOptions) -> dict[str, str]:
    templates = {}
    for key, text in options.values.items():
        match = re.fullmatch(r"tokenizer\.chat_template(?:\.([\w-]+))?", key)
        if match and isinstance(text, str):
            name = f"additional_chat_templates/{match[1]}.jinja" if match[1] else "chat_template.jinja"
            templates[name] = text
    return templates


# ----------------------------------------------------------------------------------------------------- byte-level BPE


def _byte_level(options: JsonOptions) -> dict[str, Any]:
    """Return a tokenizer.json. Unused tokens only fill the embedding: their ids stay free."""
    rule = options.text("tokenizer.ggml.pre", "gpt-2")
    if rule not in _PATTERNS:
        raise options.error("tokenizer.ggml.pre", f"{rule!r} is not supported; expected one of {', '.join(_PATTERNS)}")
    tokens, types = _tokens(options), _types(options)
    added = [
        _added_token(token_id, tokens[token_id], is_special=kind == _CONTROL)
        for token_id, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    split = {"type": "Split", "pattern": {"Regex": _PATTERNS[rule]}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if rule == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, _byte_level_part()]},
        "post_processor": _around(options, rule in _ADDING_BOS),
        "decoder": _byte_level_part(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule in _ADDING_BOS,
            "vocab": {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED},
            "merges": [merge.split(" ", 1) for merge in options.texts("tokenizer.ggml.merges")],
        },
    }


def _added_token(token_id: int, content: str, is_special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": is_special, **flags}


def _byte_level_part() -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def _around(options: JsonOptions, is_adding_bos: bool) -> dict[str, Any] | None:
    """Return the tokens around a prompt, as a post-processor."""
    tokens = _tokens(options)
    settings = _settings(options)
    template: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special: dict[str, Any] = {}
    sides = {"bos": options.flag("tokenizer.ggml.add_bos_token", is_adding_bos), "eos": settings["add_eos_token"]}
    for role, is_adding in sides.items():
        token = settings.get(f"{role}_token")
        if is_adding and token is not None:
            part = {"SpecialToken": {"id": token, "type_id": 0}}
            template = [part, *template] if role == "bos" else [*template, part]
            special[token] = {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
    if not special:
        return None
    return {"type": "TemplateProcessing", "single": template, "pair": template, "special_tokens": special}


# ------------------------------------------------------------------------------------------------------ sentencepiece


def _sentencepiece(options: JsonOptions) -> bytes:
    """Return a serialized sentencepiece ModelProto: pieces (1), trainer_spec (2), normalizer_spec (3)."""
    tokens, types = _tokens(options), _types(options)
    scores = options.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise options.error("tokenizer.ggml.scores", f"has {len(scores)} values for {len(tokens)} tokens")
    if types.count(_UNKNOWN) != 1:
        raise options.error("tokenizer.ggml.token_type", f"has {types.count(_UNKNOWN)} unknown tokens, expected one")
    try:
        pieces = b"".join(
            _field(1, _field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
            for token, score, kind in zip(tokens, scores, types, strict=True)
        )
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{options.path}: a token is not valid Unicode: {error}") from error
    has_bytes = types.count(_BYTE) == 256
    trainer = _number(3, 2) + _number(4, len(tokens)) + _number(35, has_bytes)  # model_type BPE, vocab_size, byte_fallback
    trainer += _number(40, types.index(_UNKNOWN)) + _field(45, tokens[types.index(_UNKNOWN)].encode())
    prefix = options.flag("tokenizer.ggml.add_space_prefix", True)
    stripped = options.flag("tokenizer.ggml.remove_extra_whitespaces", False)
    normalizer = _field(1, b"identity") + _number(3, prefix) + _number(4, stripped) + _number(5, 1)
    return pieces + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Return a number in 7-bit groups, the lowest first; the highest bit says that more follow."""
    encoded = bytearray()
    value = int(value)
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])
