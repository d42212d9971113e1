"""The tokenizer and the chat template of a GGUF file as the files of a checkpoint: tokenizer.json or tokenizer.model, and
tokenizer_config.json.

Called by `convert.py`. A file that carries its original tokenizer.json keeps it. "gpt2" (byte-level BPE) becomes a
tokenizer.json with the splitting rule that the file names (`pre_tokenizers.py`), as "gemma4" (BPE of UTF-8), "bert" (WordPiece)
and "t5" (unigram) do; "llama" (BPE by scores) becomes a sentencepiece model.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

from engine.checkpoint.gguf.pre_tokenizers import DEFAULT_NAME, PRE_TOKENIZERS, PreTokenizer
from engine.checkpoint.json_fields import JsonOptions
from engine.errors import CheckpointError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # token types; sentencepiece has the same
_TYPES = frozenset(range(7))  # 0: undefined
_ROLES = {
    **{"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "separator": "sep"},
    **{"mask": "mask", "cls": "cls"},
}
_MAX_SCORE = 3.4e38
_SPACE = "\u2581"  # written for a space by tokenizers that are not byte-level
_UTF8_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
_END_ROLES = ("eos", "eot", "eom")
_END_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>")


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
    if kind == "llama":
        return files | {"tokenizer.model": _sentencepiece(options)}
    if kind not in _WRITERS:
        raise options.error(
            "tokenizer.ggml.model", f"{kind!r} is not supported; expected llama or one of {', '.join(_WRITERS)}"
        )
    return files | {"tokenizer.json": _json(_WRITERS[kind](options))}


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _tokens(options: JsonOptions) -> tuple[str, ...]:
    return options.texts("tokenizer.ggml.tokens")


def _types(options: JsonOptions) -> list[int]:
    """Return the type of each token."""
    tokens = _tokens(options)
    types = [int(kind) for kind in options.numbers("tokenizer.ggml.token_type")] or [1] * len(tokens)
    if not set(types) <= _TYPES:
        kind = min(set(types) - _TYPES)
        raise options.error("tokenizer.ggml.token_type", f"{kind} is not a type of tokens; expected 0 to {max(_TYPES)}")
    if not tokens or len(types) != len(tokens):
        raise options.error("tokenizer.ggml.token_type", f"has {len(types)} values for {len(tokens)} tokens")
    return types


def _scores(options: JsonOptions) -> tuple[float, ...]:
    """Return the score of each token, a float32."""
    scores, num_tokens = options.numbers("tokenizer.ggml.scores"), len(_tokens(options))
    if len(scores) != num_tokens:
        raise options.error("tokenizer.ggml.scores", f"has {len(scores)} values for {num_tokens} tokens")
    if scores and max(map(abs, scores)) > _MAX_SCORE:
        raise options.error("tokenizer.ggml.scores", f"{max(scores, key=abs):g} exceeds the range of float32")
    return scores


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


def _bpe(options: JsonOptions) -> dict[str, Any]:
    """Return a tokenizer.json. Unused tokens only fill the embedding: their ids stay free."""
    is_gemma4 = options.text("tokenizer.ggml.model", "") == "gemma4"
    name = "gemma4" if is_gemma4 else options.text("tokenizer.ggml.pre", DEFAULT_NAME)
    if name not in PRE_TOKENIZERS:
        raise options.error("tokenizer.ggml.pre", f"{name!r} is not supported; expected one of {', '.join(PRE_TOKENIZERS)}")
    rule = PRE_TOKENIZERS[name]
    tokens, types = _tokens(options), _types(options)
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in rule.patterns
    ]
    if rule.is_byte_level:
        splits.append(_byte_level_part())
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(options),
        "normalizer": _normalizer(rule),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "post_processor": _around(options, {"bos": rule.adds_bos, "eos": False, "sep": rule.adds_sep}),
        "decoder": _byte_level_part() if rule.is_byte_level else _UTF8_DECODER,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": not rule.is_byte_level,
            "ignore_merges": rule.ignores_merges,
            "vocab": {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED},
            "merges": [_merged(options, merge) for merge in options.texts("tokenizer.ggml.merges")],
        },
    }


def _normalizer(rule: PreTokenizer) -> dict[str, Any] | None:
    if rule.is_nfc:
        return {"type": "NFC"}
    return {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE} if rule.escapes_spaces else None


def _merged(options: JsonOptions, merge: str) -> list[str]:
    """Return the two halves; the first may begin with a space."""
    at = merge.find(" ", 1)
    if at < 0:
        raise options.error("tokenizer.ggml.merges", f"{merge[:80]!r} should be two tokens with a space between them")
    return [merge[:at], merge[at + 1 :]]


def _added_tokens(options: JsonOptions) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": token_id, "content": token, "special": kind == _CONTROL, **flags}
        for token_id, (token, kind) in enumerate(zip(_tokens(options), _types(options), strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _byte_level_part() -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def _around(options: JsonOptions, defaults: Mapping[str, bool]) -> dict[str, Any] | None:
    """Return the tokens around a prompt, as a post-processor. `defaults`: roles that are added if the file does not say."""
    tokens = _tokens(options)
    settings = _settings(options)
    template: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special: dict[str, Any] = {}
    for role, is_default in defaults.items():
        is_adding = options.flag(f"tokenizer.ggml.add_{role}_token", is_default)
        token = settings.get(f"{role}_token")
        if is_adding and token is not None:
            part = {"SpecialToken": {"id": token, "type_id": 0}}
            template = [part, *template] if role in ("bos", "cls") else [*template, part]
            special[token] = {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
    if not special:
        return None
    return {"type": "TemplateProcessing", "single": template, "pair": template, "special_tokens": special}


# ----------------------------------------------------------------------------------------------- WordPiece and unigram


def _word_piece(options: JsonOptions) -> dict[str, Any]:
    """Return BERT's tokenizer.json. In the file, tokens that begin a word have a U+2581 in front, instead of ## in front of the
    others."""
    tokens, types = _tokens(options), _types(options)
    vocab = {}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _CONTROL or (token.startswith("[") and token.endswith("]")):
            text = token
        elif token.startswith(_SPACE):
            text = token[1:]
        else:
            text = f"##{token}"
        vocab[text] = token_id
    unknown = _settings(options).get("unk_token", "[UNK]")
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(options),
        "normalizer": normalizer | {"lowercase": options.flag("tokenizer.ggml.normalizer.lowercase", True)},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _around(options, {"cls": True, "sep": True}),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }


def _unigram(options: JsonOptions) -> dict[str, Any]:
    """Return the tokenizer.json of a sentencepiece unigram model."""
    tokens, scores = _tokens(options), _scores(options)
    normalizers: list[dict[str, Any]] = []
    charsmap = bytes(number & 0xFF for number in options.counts("tokenizer.ggml.precompiled_charsmap", ()))
    if charsmap:
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if options.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        normalizers += [
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ]
    prepend = "always" if options.flag("tokenizer.ggml.add_space_prefix", True) else "never"
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": prepend, "split": True}
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(options),
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": metaspace,
        "post_processor": _around(options, {"bos": False, "eos": True}),
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": options.count("tokenizer.ggml.unknown_token_id", 0, least=0),
            "vocab": list(zip(tokens, scores, strict=True)),
            "byte_fallback": _types(options).count(_BYTE) == 256,
        },
    }


_WRITERS: dict[str, Callable[[JsonOptions], dict[str, Any]]] = {
    "gpt2": _bpe,
    "gemma4": _bpe,
    "bert": _word_piece,
    "t5": _unigram,
}


# ------------------------------------------------------------------------------------------------------ sentencepiece


def _sentencepiece(options: JsonOptions) -> bytes:
    """Return a serialized sentencepiece ModelProto: pieces (1), trainer_spec (2), normalizer_spec (3)."""
    tokens, types = _tokens(options), _types(options)
    scores = _scores(options)
    unknown = options.count("tokenizer.ggml.unknown_token_id", types.index(_UNKNOWN) if _UNKNOWN in types else -1, least=0)
    if unknown < 0:
        raise options.error("tokenizer.ggml.token_type", "has no unknown token, and unknown_token_id names none")
    if unknown >= len(tokens):
        raise options.error("tokenizer.ggml.unknown_token_id", f"{unknown} is outside the vocabulary of {len(tokens)} tokens")
    types = [_UNUSED if kind == _UNKNOWN else kind for kind in types]  # sentencepiece has one unknown token alone
    types[unknown] = _UNKNOWN
    try:
        pieces = b"".join(
            _field(1, _field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
            for token, score, kind in zip(tokens, scores, types, strict=True)
        )
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{options.path}: a token is not valid Unicode: {error}") from error
    has_bytes = types.count(_BYTE) == 256
    trainer = _number(3, 2) + _number(4, len(tokens)) + _number(35, has_bytes)  # model_type BPE, vocab_size, byte_fallback
    trainer += _number(40, unknown) + _field(45, tokens[unknown].encode())
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
