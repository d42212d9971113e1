"""Chooses the parsers of a model's answers from its chat template and vocabulary, never from its name.

Called by the start. A template shows the format of calls, because it writes those of earlier turns, and the marker of
reasoning, because it removes reasoning from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

NONE = "none"
CALL_PARSERS = ("hermes", "qwen3_coder", "llama3_json", "pythonic", "deepseek_v3", "deepseek_v31", "ernie45", "mistral")
REASONING_PARSERS = ("qwen3", "deepseek_r1", "ernie45")

_JSON_CALL = re.compile(r"""<tool_call>.{0,40}?\{\\?["']name""", re.DOTALL)  # newlines and quotes as templates may write them
_RESPONSE = re.compile(r"(assistant|</think>).{0,160}<response>", re.DOTALL)
_NAME_AND_PARAMETERS = re.compile(r"""\{\\?"name\\?": .{0,200}?\\?"parameters\\?": """, re.DOTALL)
_PYTHONIC = re.compile(r"\[\s*func(tion)?_?name_?1?\(")


def choose_call_parser(templates: Mapping[str, str], has_token: Callable[[str], bool]) -> str:
    """Choose the parser of tool calls. `templates` by name, as in `ChatTemplates`. `has_token`: whether the vocabulary has a
    single token for a marker."""
    text = templates.get("tool_use") or templates.get("default", "")
    if "<｜tool▁calls▁begin｜>" in text:
        return "deepseek_v3" if "```json" in text else "deepseek_v31"
    if "[TOOL_CALLS]" in text:
        return "mistral"
    if "<tool_call>" in text and "<function=" in text and "<parameter=" in text:
        return "qwen3_coder"
    if _JSON_CALL.search(text):
        return "ernie45" if _RESPONSE.search(text) else "hermes"
    if "<|tool_call_start|>" in text or ("tools" in text and has_token("<|tool_call_start|>")) or _PYTHONIC.search(text):
        return "pythonic"
    if "ipython" in text and _NAME_AND_PARAMETERS.search(text):
        return "llama3_json"
    return NONE


def choose_reasoning_parser(templates: Mapping[str, str], has_token: Callable[[str], bool]) -> str:
    """Choose the parser of reasoning (see `choose_call_parser`)."""
    text = templates.get("default", "")
    if "</think>" not in text or not ("<think>" in text or has_token("<think>")):
        return NONE
    if _RESPONSE.search(text):
        return "ernie45"
    return "deepseek_r1" if "<｜Assistant｜>" in text else "qwen3"
