"""Chooses the parsers of a model's answers from its chat template and vocabulary, never from its name.

Called by the start. A template shows the format of calls, because it writes those of earlier turns, and the marker of
reasoning, because it removes reasoning from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from engine.parsers.thinking import THINKING_FAMILIES

if TYPE_CHECKING:
    from engine.parsers.family import CallFamily

REASONING_PARSERS = tuple(THINKING_FAMILIES)  # without those of plugins
NONE, AUTO, JSON = "none", "auto", "json"
CALL_PARSERS: dict[str, str | CallFamily] = {  # the module of each, or that of a plugin itself
    "hermes": "json_calls",
    "qwen3_coder": "xml_calls",
    "llama3_json": "llama3_json",
    "pythonic": "pythonic",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "deepseek_v32": "xml_calls",
    "deepseek_v4": "xml_calls",
    "ernie45": "json_calls",
    "mistral": "mistral",
    "harmony": "harmony",
    "gemma4": "gemma4",
    "glm45": "glm45",
    "kimi_k2": "kimi_k2",
    "minimax_m1": "json_calls",
    "minimax_m2": "xml_calls",
    "seed_oss": "xml_calls",
    "granite": "json_calls",
    "phi4_mini_json": "json_calls",
    "nemotron": "json_calls",
    "hunyuan_a13b": "json_calls",
    "apertus": "json_calls",
    "command_a": "json_calls",
    "command_r": "json_calls",
    "functionary_v31": "functionary",
    "functionary_v32": "functionary",
    "json": "json_calls",  # only for calls that are forced
}
_JSON_CALL = re.compile(r"""<tool_call>.{0,40}?\{\\?["']name""", re.DOTALL)  # newlines and quotes as templates may write them
_JSON_LINES = re.compile(r"<tool_calls>(\\n|\s)*(['\"]\s*[-~+}]+\s*|\{\\?[\"'])")
_RESPONSE = re.compile(r"(assistant|</think>).{0,160}<response>", re.DOTALL)
_NAME_AND_PARAMETERS = re.compile(r"""\{\\?"name\\?": .{0,200}?\\?"parameters\\?": """, re.DOTALL)
_COMMENT, _TOOLS = re.compile(r"\{#.*?#\}", re.DOTALL), re.compile(r"\b(tools|functions)\b")
_PYTHONIC = re.compile(r"\[\s*func(tion)?_?name_?1?\(")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>")
_CALL_MARKS = (  # a template that has all of them writes the format
    ("deepseek_v32", ("｜DSML｜", "function_calls>")),
    ("deepseek_v4", ("｜DSML｜", "tool_calls>")),
    ("harmony", _HARMONY),
    ("gemma4", ("<|tool_call>call:",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("nemotron", ("<TOOLCALL>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("command_a", ("<|START_ACTION|>",)),
    ("command_r", ("Action:", "```json", "tool_name")),
    ("functionary_v32", (">>>${recipient}",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("phi4_mini_json", ("functools",)),
    ("phi4_mini_json", ("<|tool_call|>", "<|/tool_call|>")),
    ("granite", ("<|tool_call|>",)),
    ("functionary_v31", ("<function=", "</function>")),
)


def choose_call_parser(templates: Mapping[str, str], has_token: Callable[[str], bool]) -> str:
    """Choose the parser of tool calls. `templates` by name, as in `ChatTemplates`. `has_token`: whether the vocabulary has a
    single token for a marker. JSON: the template shows no format."""
    text = templates.get("tool_use") or templates.get("default", "")
    if not text:
        return NONE
    plugins = [(name, each.template_marks) for name, each in CALL_PARSERS.items() if not isinstance(each, str)]
    for name, marks in (*((name, marks) for name, marks in plugins if marks), *_CALL_MARKS):
        if all(mark in text for mark in marks):
            return name
    if "<tool_calls>" in text:
        return "minimax_m1" if _JSON_LINES.search(text) else "hunyuan_a13b"
    if _JSON_CALL.search(text):
        return "ernie45" if _RESPONSE.search(text) else "hermes"
    if (
        "<|tool_call_start|>" in text
        or "<|tool_list_start|>" in text
        or ("tools" in text and has_token("<|tool_call_start|>"))
        or _PYTHONIC.search(text)
    ):
        return "pythonic"
    if "<|tool|>" in text and has_token("<|tool_call|>"):
        return "phi4_mini_json"
    if "ipython" in text and _NAME_AND_PARAMETERS.search(text):
        return "llama3_json"
    return JSON


def register_calls(family: CallFamily) -> None:
    """Add a parser of a plugin. Raises ValueError if its name is taken."""
    if family.name in (*CALL_PARSERS, NONE, AUTO):
        raise ValueError(f"there is already a parser of tool calls named {family.name}")
    CALL_PARSERS[family.name] = family


def shows_tools(templates: Mapping[str, str]) -> bool:
    """Return whether the template that renders a conversation with tools mentions them at all."""
    text = templates.get("tool_use") or templates.get("default", "")
    return _TOOLS.search(_COMMENT.sub("", text)) is not None


def choose_reasoning_parser(templates: Mapping[str, str], has_token: Callable[[str], bool]) -> str:
    """Choose the parser of reasoning (see `choose_call_parser`)."""
    text = templates.get("default", "")
    for family in THINKING_FAMILIES.values():
        if family.name not in REASONING_PARSERS and family.begin in text and family.end in text:  # of a plugin
            return family.name
    for name, marks in _THINKING_MARKS:
        if all(mark in text for mark in marks):
            return name
    if "</think>" not in text or not ("<think>" in text or has_token("<think>")):
        return NONE
    if _RESPONSE.search(text):
        return "ernie45"
    if "<answer>" in text:
        return "hunyuan_a13b"
    return "deepseek_r1" if "<｜Assistant｜>" in text else "qwen3"


_THINKING_MARKS = (
    ("harmony", _HARMONY),
    ("gemma4", ("<|channel>thought",)),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("apertus", ("<|inner_prefix|>",)),
    ("command_a", ("<|START_THINKING|>",)),
)
