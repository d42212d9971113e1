"""Answers for the parsers: a small vocabulary, texts as its tokens, and parts joined again."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from engine.messages import ChatPrompt, Parsing, Part, TextOptions
from engine.parsers.choice import CALL_PARSERS
from engine.parsers.registry import Parsers, call_family
from engine.tokenizer.part_stream import PartStream
from engine.tokenizer.vocabulary import Vocabulary
from tests.requests import Submitted, submitted
from tests.requests import submit_of as message_of

CALL_FAMILIES = {name: call_family(name) for name in CALL_PARSERS}
ONE_OF_EACH_CLASS = list({type(family): name for name, family in CALL_FAMILIES.items()}.values())


def vocabulary_of(markers: Sequence[str], special: Sequence[str] = ()) -> Vocabulary:
    """Return a vocabulary: tokens 0 to 255 are bytes; then the markers, each a single token."""

    def rule(piece: str, is_first: bool) -> bytes:
        return bytes([int(piece[1:])])

    pieces = [f"b{byte}" for byte in range(256)] + list(markers)
    ids = {marker: 256 + index for index, marker in enumerate(markers)}
    return Vocabulary(
        pieces=pieces,
        rule=rule,
        encode=lambda text, _: list(text.encode()),
        special_ids=frozenset(ids[marker] for marker in special),
        special_tokens={},
        verbatim_ids=frozenset(ids.values()),
    )


def tokens_of(text: str, vocabulary: Vocabulary) -> list[int]:
    """Return the tokens of a text: markers as single tokens, the rest as bytes."""
    token_ids: list[int] = []
    markers = {vocabulary.pieces[token_id]: token_id for token_id in sorted(vocabulary.verbatim_ids)}
    place = 0
    while place < len(text):
        marker = next((marker for marker in markers if marker and text.startswith(marker, place)), None)
        if marker is None:
            token_ids += text[place].encode()
            place += 1
        else:
            token_ids.append(markers[marker])
            place += len(marker)
    return token_ids


def submit_of(tools: Sequence[dict[str, Any]] = (), stop: Sequence[str] = (), **parsing: Any) -> Submitted:
    prompt = ChatPrompt(b"[]", tools=orjson.dumps(tools) if tools else b"")
    text = TextOptions(stop=list(stop), parsing=Parsing(finds_calls=bool(tools), finds_reasoning=True, **parsing))
    return submitted(message_of(prompt, text=text))[0]


def stream_of(parsers: Parsers, vocabulary: Vocabulary, submit: Submitted, prompt_end: str = "") -> PartStream:
    parser = parsers.parser_for(
        submit.text.parsing, submit.prompt, "r", parsers.begins_thinking(submit.text.parsing, submit.prompt, prompt_end)
    )
    assert parser is not None
    return PartStream(vocabulary, submit.text, parser, parsers.marker_of_id)


def pieces_of(items: Sequence[int], seed: int) -> Iterable[Sequence[int]]:
    """Yield the tokens, cut at random places."""
    draw = random.Random(seed)
    place = 0
    while place < len(items):
        end = place + draw.choice((1, 1, 2, 3, 5, 17, 100))
        yield array("i", items[place:end])
        place = end


def parse(stream: PartStream, pieces: Iterable[Sequence[int]]) -> list[Part]:
    """Return all parts, adjacent ones joined; the released text must be that of the content."""
    parts: list[Part] = []
    for piece in pieces:
        text = stream.push(piece)
        parts += checked(stream.take_parts(), text)
    text = stream.finish()
    return joined(parts + checked(stream.take_parts(), text))


def checked(parts: list[Part], text: str) -> list[Part]:
    if not parts:
        return [Part("content", text)] if text else []
    assert "".join(part.text for part in parts if part.kind == "content") == text
    return parts


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return adjacent parts of the same kind as one, without the positions of their tokens."""
    together: list[Part] = []
    for given in parts:
        part = Part(given.kind, given.text, given.call_index, given.call_id)
        last = together[-1] if together else None
        if last and part.kind != "call" and (last.kind, last.call_index) == (part.kind, part.call_index):
            together[-1] = Part(part.kind, last.text + part.text, part.call_index)
        else:
            together.append(part)
    return together


def content(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if part.kind == "content")


def reasoning(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if part.kind == "reasoning")


def calls(parts: Iterable[Part]) -> list[tuple[str, Any]]:
    found: list[tuple[str, str]] = []
    for part in parts:
        if part.kind == "call":
            found.append((part.text, ""))
        elif part.kind == "arguments":
            found[-1] = (found[-1][0], found[-1][1] + part.text)
    return [(name, orjson.loads(arguments)) for name, arguments in found]
