"""Mistral's models: a list or, since tokenizer version 11, a marker for each call, with or without an id.

[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]
[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.parsers.family import CallFamily, Tools, digest, json_call, named_call, object_text
from engine.parsers.grammar import Lark, MarkerIds, json_rule, literal, marker, object_schema
from engine.parsers.reader import Reader, Reading

_NAME = re.compile(r"[^\[{\s]*")
_ID = re.compile(r"[A-Za-z0-9]*")
ID_CHARACTERS = 9  # templates reject others


class Mistral(CallFamily):
    name = "mistral"
    triggers = ("[TOOL_CALLS]",)
    markers = ("[ARGS]", "[CALL_ID]")

    def read(self, reader: Reader, trigger: str, tools: Tools) -> Reading[None]:
        yield from reader.space()
        if (yield from reader.peek()) == "[":
            yield from self._list(reader)
            return
        name = yield from reader.name(_NAME)
        if (yield from reader.peek()) == "[":
            yield from reader.literal("[")
            if (yield from reader.peek()) == "C":
                yield from reader.literal("CALL_ID]")
                yield from reader.run(_ID, 64)
                yield from reader.literal("[")
            yield from reader.literal("ARGS]")
        yield from reader.space()
        reader.complete(name, object_text((yield from reader.json())))

    def _list(self, reader: Reader) -> Reading[None]:
        yield from reader.literal("[")
        while True:
            yield from reader.space()
            reader.complete(*named_call((yield from reader.json())))
            yield from reader.space()
            if (yield from reader.one_of(",", "]")) == "]":
                return

    def call_id(self, request_id: str, index: int) -> str:
        return digest(request_id, index, ID_CHARACTERS)[:ID_CHARACTERS]

    def frame(self, id_of: MarkerIds) -> tuple[str, str, str]:
        """Return the frame; with a marker for arguments there is one frame for each call."""
        if id_of("[ARGS]") is not None:
            return "", "", ""
        return f"{marker('[TOOL_CALLS]', id_of)} {literal('[')}", literal(", "), literal("]")

    def call_rule(self, lark: Lark, rule: str, name: str, parameters: Mapping[str, Any], id_of: MarkerIds, strict: bool) -> str:
        if id_of("[ARGS]") is None:
            return json_call(name, "arguments", parameters, strict)
        begin, arguments = marker("[TOOL_CALLS]", id_of), marker("[ARGS]", id_of)
        return f"{begin} {literal(name)} {arguments} {json_rule(object_schema(parameters), strict)}"


FAMILIES = (Mistral(),)
