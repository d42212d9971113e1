"""Choice of parsers: by options, otherwise by the chat template and vocabulary of the start."""

from __future__ import annotations

import pytest

from engine.checkpoint.record import ModelRecord
from engine.options.resolve_parsers import resolve_parsers
from tests.engine.chat_templates import OWN_TEMPLATES
from tests.paths import GOLDEN

AUTO = {"tool_call_parser": "auto", "reasoning_parser": "auto"}


@pytest.fixture(scope="module")
def record() -> ModelRecord:
    return ModelRecord.read(GOLDEN / "qwen3")


@pytest.mark.parametrize(
    ("template", "given", "expected"),
    [
        ("", {}, ("json", "none")),
        ("{{ messages }}", {}, ("json", "none")),
        ("{{ messages }}", {"tool_call_parser": "none"}, ("none", "none")),
        ("qwen3_coder", {}, ("qwen3_coder", "qwen3")),
        ("qwen3_coder", {"tool_call_parser": "none", "reasoning_parser": "ernie45"}, ("none", "ernie45")),
        ("deepseek_v31", {"reasoning_parser": "none"}, ("deepseek_v31", "none")),
    ],
)
def test_choice(record: ModelRecord, template: str, given: dict[str, str], expected: tuple[str, str]) -> None:
    text = OWN_TEMPLATES.get(template, template)
    found = resolve_parsers(AUTO | given, record, text)
    assert (found["tool_call_parser"], found["reasoning_parser"]) == expected
    assert found["shows_tools"] == ("tools" in text)
