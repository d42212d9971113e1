"""Turns the pieces of a tokenizer into bytes: the `decoder` section of tokenizer.json as a rule.

Called by `vocabulary.py`. Decoding is concatenation: the text of tokens is the concatenated bytes of their pieces, read as
UTF-8. So a byte table of the vocabulary is enough for an incremental decoder. Only the first piece of a text may be different
(it loses the space before its word), so a rule gets that as an argument.

Steps work on `str`, with a byte that is not a whole character as a lone surrogate (`surrogateescape`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Regex, decoders

from engine.errors import CheckpointError

PieceRule = Callable[[str, bool], bytes]
"""(piece, whether it is the first of its text) -> its bytes."""

WORD_START = "\u2581"  # sentencepiece's replacement of a space

_Step = Callable[[str, bool], str]
_Section = dict[str, Any]
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def rule_of(section: _Section | None) -> PieceRule:
    """Return the rule of a `decoder` section; None joins pieces with spaces, as `tokenizers` does. Raises CheckpointError."""
    steps = list(_steps_of(section)) if section else [_spaced]

    def rule(piece: str, is_first: bool) -> bytes:
        for step in steps:
            piece = step(piece, is_first)
        return piece.encode("utf-8", "surrogateescape")

    return rule


def is_byte_level(section: _Section | None) -> bool:
    """Return whether pieces are bytes in GPT-2's alphabet (added tokens never are)."""
    return any(part["type"] == "ByteLevel" for part in _flat(section)) if section else False


def byte_of_piece(piece: str) -> str | None:
    """Return the escaped byte of a piece such as `<0xE2>`; None for an ordinary piece."""
    match = _BYTE_PIECE.fullmatch(piece)
    return _escaped(bytes.fromhex(match[1])) if match else None


def _escaped(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _flat(section: _Section) -> Iterator[_Section]:
    if section["type"] == "Sequence":
        for part in section["decoders"]:
            yield from _flat(part)
    else:
        yield section


def _steps_of(section: _Section) -> Iterator[_Step]:
    is_fused = False
    for part in _flat(section):
        kind = part["type"]
        if kind == "Fuse":
            is_fused = True
        elif kind == "Strip":
            yield _strip(part, is_fused)
        elif kind in _STEPS:
            is_fused |= kind == "ByteLevel"
            yield _STEPS[kind](part)
        else:
            raise CheckpointError(
                f"tokenizer.json has the unsupported decoder {kind!r}; expected Fuse, Strip, {', '.join(_STEPS)}"
            )


def _spaced(piece: str, is_first: bool) -> str:
    return piece if is_first else " " + piece


def _byte_level(section: _Section) -> _Step:
    def step(piece: str, is_first: bool) -> str:
        try:
            return _escaped(bytes(map(_BYTE_OF_SYMBOL.__getitem__, piece)))
        except KeyError:  # not a piece of bytes
            return piece

    return step


def _byte_fallback(section: _Section) -> _Step:
    def step(piece: str, is_first: bool) -> str:
        byte = byte_of_piece(piece)
        return piece if byte is None else byte

    return step


def _replace(section: _Section) -> _Step:
    pattern, content = section["pattern"], section["content"]
    if "String" in pattern:
        return lambda piece, is_first: piece.replace(pattern["String"], content)
    replace = decoders.Replace(Regex(pattern["Regex"]), content)
    return lambda piece, is_first: replace.decode([piece])


def _strip(section: _Section, is_fused: bool) -> _Step:
    """Return a Strip step: after a Fuse it strips the whole text, that is its first piece, otherwise every piece."""
    content, start, stop = section["content"], section["start"], section["stop"]
    if is_fused and stop:
        raise CheckpointError("tokenizer.json strips the end of text when decoding, which streaming does not support")

    def step(piece: str, is_first: bool) -> str:
        if is_first or not is_fused:
            num_leading = len(piece) - len(piece.lstrip(content))
            piece = piece[min(start, num_leading) :]
            num_trailing = len(piece) - len(piece.rstrip(content))
            piece = piece[: len(piece) - min(stop, num_trailing)]
        return piece

    return step


def _metaspace(section: _Section) -> _Step:
    replacement = section["replacement"]
    default_scheme = "always" if section.get("add_prefix_space", True) else "never"
    is_prepended = section.get("prepend_scheme", default_scheme) != "never"
    return lambda piece, is_first: piece.replace(replacement, "" if is_first and is_prepended else " ")


def _word_piece(section: _Section) -> _Step:
    decoder = decoders.WordPiece(prefix=section["prefix"], cleanup=section["cleanup"])
    return lambda piece, is_first: decoder.decode([piece]) if is_first else decoder.decode(["a", piece])[1:]


_STEPS: dict[str, Callable[[_Section], _Step]] = {
    "ByteLevel": _byte_level,
    "ByteFallback": _byte_fallback,
    "Replace": _replace,
    "Metaspace": _metaspace,
    "WordPiece": _word_piece,
}


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: a printable byte is its Latin-1 character, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_SYMBOL = _byte_alphabet()
