"""Formats of reasoning in families of models, by vLLM's names."""

from __future__ import annotations

import msgspec


class ThinkingFamily(msgspec.Struct, frozen=True):
    """Newlines around the reasoning, and before the content after it, belong to the format."""

    name: str
    begin: str = "<think>"
    end: str = "</think>"
    wrappers: tuple[str, ...] = ()  # markers around the content that are not part of it


THINKING_FAMILIES = {
    family.name: family
    for family in (
        ThinkingFamily("qwen3"),
        ThinkingFamily("deepseek_r1"),
        ThinkingFamily("ernie45", wrappers=("<response>", "</response>")),
    )
}
