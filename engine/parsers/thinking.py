"""Formats of reasoning in families of models, by vLLM's names."""

from __future__ import annotations

import msgspec


class ThinkingFamily(msgspec.Struct, frozen=True):
    """Newlines around the reasoning, and before the content after it, belong to the format."""

    name: str
    begin: str = "<think>"
    end: str = "</think>"
    wrappers: tuple[str, ...] = ()  # markers around the content that are not part of it
    label: str = ""  # a text right after `begin` that is not part of the reasoning
    call_family: str = ""  # that reads the reasoning itself (`CallFamily.has_sections`)


_COMMAND_WRAPPERS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
THINKING_FAMILIES = {
    family.name: family
    for family in (
        ThinkingFamily("qwen3"),
        ThinkingFamily("deepseek_r1"),
        ThinkingFamily("ernie45", wrappers=("<response>", "</response>")),
        ThinkingFamily("hunyuan_a13b", wrappers=("<answer>", "</answer>")),
        ThinkingFamily("mistral", "[THINK]", "[/THINK]"),
        ThinkingFamily("seed_oss", "<seed:think>", "</seed:think>"),
        ThinkingFamily("gemma4", "<|channel>", "<channel|>", label="thought"),
        ThinkingFamily("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
        ThinkingFamily("command_a", "<|START_THINKING|>", "<|END_THINKING|>", wrappers=_COMMAND_WRAPPERS),
        ThinkingFamily("harmony", "<|channel|>analysis<|message|>", "<|end|>", call_family="harmony"),
    )
}


def register_reasoning(family: ThinkingFamily) -> None:
    """Add a parser of a plugin. Raises ValueError if its name is taken."""
    if family.name in (*THINKING_FAMILIES, "none", "auto"):
        raise ValueError(f"there is already a parser of reasoning named {family.name}")
    THINKING_FAMILIES[family.name] = family
