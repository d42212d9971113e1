"""Grammars of the text arguments of calls: as plain text, and within JSON, in every family."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from engine.errors import RequestError
from engine.parsers.text_grammar import KEY, escaped
from tests.engine.parsers.test_grammars import FORCED

PATCH = r"""start: "*** Begin" LF hunk+ "*** End"
hunk: "@@ " /(.+)/ LF line+
line: ("+" | "-") /(.*)/ LF
%import common.LF
"""
RIGHT = '*** Begin\n@@ a "q" \\ b\n-x\t1\n+yé/z{}\n+\n*** End'
WRONG = ["", "hello", RIGHT + "\n", RIGHT.replace("@@ ", "@@"), RIGHT.replace("\n", "\\n"), RIGHT.removesuffix("d")]


def as_json(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False)


CALLS: dict[str, Callable[[str], str]] = {
    "hermes": lambda text: f'<tool_call>\n{{"name": "patch", "arguments": {as_json(text)}}}\n</tool_call>',
    "llama3_json": lambda text: f'{{"name": "patch", "parameters": {as_json(text)}}}',
    "pythonic": lambda text: f"[patch(input={json.dumps(text, ensure_ascii=False)})]",
    "qwen3_coder": lambda text: (
        f"<tool_call>\n<function=patch>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"
    ),
}


def tools_of(lark: str) -> list[Any]:
    parameters = {"type": "object", "properties": {"input": {"type": "string", KEY: lark}}, "required": ["input"]}
    function = {"name": "patch", "parameters": parameters | {"additionalProperties": False}, "strict": True}
    return [{"type": "function", "function": function}]


@pytest.mark.parametrize("name", CALLS)
def test_a_text_has_its_grammar(name: str) -> None:
    forced = FORCED[name, True]

    def allows(text: str) -> bool:
        return forced.allows(CALLS[name](text), tools_of(PATCH), choice="named", names=["patch"])

    assert allows(RIGHT)
    assert not any(map(allows, WRONG))


@pytest.mark.parametrize(
    ("lark", "right", "wrong"),
    [
        ('start: X ("," X)*\nX: /-?[0-9]+(\\.[0-9]+)?/ | /"[^"]*"/', ['1,-2.5,"a\nb"', '"\\"'], ["1,", '"', "x"]),
        ("start: /[a-z]+\\n?x/ INT\n%import common.INT\n", ["ab\nx12", "abx1"], ["ab\n12"]),
        ('start: "a\\tb"? /\\w{2,3}/', ["a\tbcd", "cde"], ["a\tb", "cdef"]),
        ('start: /(?s:.)/ /[^\\n"]+/', [], []),
        ("start: /.+/s", ['a\n"b"\\'], [""]),
    ],
)
def test_within_json(lark: str, right: list[str], wrong: list[str]) -> None:
    forced = FORCED["hermes", True]
    if not right:
        with pytest.raises(RequestError, match="not supported"):
            escaped(lark)
        return
    for text in right + wrong:
        is_allowed = forced.allows(CALLS["hermes"](text), tools_of(lark), choice="required")
        assert is_allowed == (text in right), text


@pytest.mark.parametrize(
    "lark", ["start: /(?=a)b/", "start: /a/i", "start: %json {}", 'start: "a".."z"', "start: /[/", "%ignore /a/"]
)
def test_unsupported_grammars_are_refused(lark: str) -> None:
    with pytest.raises(RequestError) as raised:
        escaped(lark)
    assert (raised.value.status, raised.value.param) == (400, "tools")


@pytest.mark.parametrize("text", ["<", "<a", '"', '"\\', "/", "/a\\", "%", "@", "<[", "A", "//"])
def test_work_is_linear_in_the_grammar(text: str) -> None:
    """Quadratic work on that many would take minutes, and the test would time out."""
    many = "start: " + text * 200_000
    with suppress(RequestError):
        assert len(escaped(many)) >= len(many)
