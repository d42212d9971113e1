"""Real chat templates: the parsers that are chosen for them, and random calls that they rendered and that are parsed back."""

from __future__ import annotations

import json
import random
import re
from datetime import datetime
from functools import lru_cache
from typing import Any

import pytest

from engine.errors import RequestError
from engine.messages import ChatPrompt
from engine.parsers.choice import choose_call_parser, choose_reasoning_parser, shows_tools
from engine.parsers.registry import Parsers
from engine.tokenizer.chat.template import ChatTemplates
from tests.engine.chat_templates import OWN_TEMPLATES, TEMPLATES
from tests.engine.parsers.answers import (
    CALL_FAMILIES,
    calls,
    content,
    parse,
    pieces_of,
    reasoning,
    stream_of,
    submit_of,
    tokens_of,
    vocabulary_of,
)

_CALLING = {  # published templates with a format of calls that is known; all others write none, or in another format
    "Apertus-8B-Instruct": "apertus",
    "Apriel-1.6-15b-Thinker-fixed": "hunyuan_a13b",
    "Bielik-11B-v3.0-Instruct": "hermes",
    "ByteDance-Seed-OSS": "seed_oss",
    "Cohere2MoE": "command_a",
    "CohereForAI-c4ai-command-r-plus-tool_use": "command_r",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command_a",
    "GLM-4.6": "glm45",
    "GLM-4.7-Flash": "glm45",
    "Kimi-K2-Instruct": "kimi_k2",
    "Kimi-K2-Thinking": "kimi_k2",
    "LFM2-8B-A1B": "pythonic",
    "MiniMax-M1": "minimax_m1",
    "MiniMax-M2": "minimax_m2",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "Spark2.5": "glm45",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "deepseek_v4",
    "fireworks-ai-llama-3-firefunction-v2": "phi4_mini_json",
    "google-gemma-4-31B-it": "gemma4",
    "google-gemma-4-31B-it-interleaved": "gemma4",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "inclusionai-ling-3.0-flash": "glm45",
    "meetkai-functionary-medium-v3.1": "functionary_v31",
    "meetkai-functionary-medium-v3.2": "functionary_v32",
    "moonshotai-Kimi-K2": "kimi_k2",
    "openai-gpt-oss-120b": "harmony",
    "poolside-Laguna-S-2.1": "glm45",
    "poolside-Laguna-XS-2.1": "glm45",
    "poolside-Laguna-XS.2": "glm45",
    "unsloth-Apriel-1.5": "hunyuan_a13b",
    "LFM2.5-8B-A1B": "pythonic",
    "MiMo-VL": "hermes",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_coder",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5-4B": "qwen3_coder",
    "Reka-Edge": "hermes",
    "StepFun3.5-Flash": "qwen3_coder",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek_v3",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "ibm-granite-granite-4.0": "hermes",
    "ibm-granite-granite-4.1": "hermes",
    "llama-cpp-deepseek-r1": "deepseek_v3",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_json",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
}
CALLING = {name: name for name in OWN_TEMPLATES} | {name: family for name, family in _CALLING.items() if name in TEMPLATES}
_THINKING = {
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_r1",
    "ernie45": "ernie45",
    "hermes": "qwen3",
    "qwen3_coder": "qwen3",
    "harmony": "harmony",
    "ibm-granite-granite-3.3-2B-Instruct": "ernie45",
    "Apertus-8B-Instruct": "apertus",
    "ByteDance-Seed-OSS": "seed_oss",
    "Cohere2MoE": "command_a",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command_a",
    "google-gemma-4-31B-it": "gemma4",
    "google-gemma-4-31B-it-interleaved": "gemma4",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "openai-gpt-oss-120b": "harmony",
    **{name: "deepseek_r1" for name in TEMPLATES if "deepseek" in name and name not in OWN_TEMPLATES},
    **dict.fromkeys(
        (
            "Bielik-11B-v3.0-Instruct",
            "GLM-4.6",
            "GLM-4.7-Flash",
            "HuggingFaceTB-SmolLM3-3B",
            "Kimi-K2-Thinking",
            "LFM2.5-8B-A1B",
            "MiniMax-M2",
            "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            "NVIDIA-Nemotron-Nano-v2",
            "Qwen-QwQ-32B",
            "Qwen-Qwen3-0.6B",
            "Qwen3.5-4B",
            "Reka-Edge",
            "Spark2.5",
            "StepFun3.5-Flash",
            "inclusionai-ling-3.0-flash",
            "llama-cpp-rwkv-world",
            "openbmb-MiniCPM5-1B",
            "poolside-Laguna-S-2.1",
            "poolside-Laguna-XS-2.1",
            "poolside-Laguna-XS.2",
        ),
        "qwen3",
    ),
}
THINKING = {name: family for name, family in _THINKING.items() if name in TEMPLATES}
WITH_REASONING = ("hermes", "qwen3_coder", "ernie45", "Qwen-Qwen3-0.6B", "Qwen3.5-4B", "StepFun3.5-Flash")  # of calls, too
MOST_CALLS = {name: 1 for name in CALLING if CALLING[name] == "llama3_json"} | {  # in one answer
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": 2  # from the second on, it writes the end of all behind each
}
SAYING = ("hermes", "qwen3_coder", "ernie45", "deepseek_v31")  # show a content beside calls, except Nous's
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string", "description": "d"},
    "count": {"type": "integer", "description": "d"},
    "ratio": {"type": "number", "description": "d"},
    "flag": {"type": "boolean", "description": "d"},
    "items": {"type": "array", "items": {}, "description": "d"},
    "options": {"type": "object", "description": "d"},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in ("get_weather", "files.read", "run-it")
]
USER = {"role": "user", "content": "hi"}
TEXTS = (
    "",
    "a",
    "Größe 日本 😀",
    'say "no"',
    "it's \\ a\\n",
    "line\nline",
    "{}",
    "[1]",
    "12",
    "true",
    "null",
    " <tool_call> ",
    "a, b)",
)


def value_of(key: str, draw: random.Random, depth: int = 2) -> Any:
    """Return a value that matches the schema."""
    if key == "text":
        return draw.choice(TEXTS)
    if key == "count":
        return draw.randint(-(10**12), 10**12)
    if key == "ratio":
        return draw.choice((0.5, -1e-7, 3.25e20, 7))
    if key == "flag":
        return draw.random() < 0.5
    keys = draw.choices([*PROPERTIES][: 6 if depth else 4], k=draw.randint(0, 3))
    values = [value_of(inner, draw, depth - 1) for inner in keys]
    return values if key == "items" else dict(zip(keys, values, strict=True))


def random_calls(draw: random.Random, most: int) -> list[tuple[str, dict[str, Any]]]:
    names = [tool["function"]["name"] for tool in TOOLS]  # type: ignore[index]
    keys = [draw.sample(list(PROPERTIES), draw.randint(0, 4)) for _ in range(draw.randint(1, most))]
    return [(draw.choice(names), {key: value_of(key, draw) for key in chosen}) for chosen in keys]


@lru_cache
def templates_of(name: str) -> ChatTemplates:
    return ChatTemplates(
        {"default": TEMPLATES[name]},
        {"bos_token": "<s>", "eos_token": "</s>"},
        1 << 20,
        trusts_requests=False,
        write_calls=Parsers(CALLING[name], "none", []).write_calls,
    )


def rendered(name: str, messages: list[dict[str, Any]], has_prompt: bool) -> str:
    prompt = ChatPrompt(json.dumps(messages).encode(), json.dumps(TOOLS).encode(), add_generation_prompt=has_prompt)
    return templates_of(name).render(prompt, datetime(2026, 1, 1))


def answer_of(name: str, message: dict[str, Any]) -> tuple[str, str]:
    """Return the prompt, and the answer as the template renders it in history: the text after the prompt. Where the prompt
    begins to think and history does not show that, the text after the common prefix."""
    prompt, history = rendered(name, [USER], True), rendered(name, [USER, message], False)
    if history.startswith(prompt):
        return prompt, history[len(prompt) :]
    num_common = next(place for place, (a, b) in enumerate(zip(prompt, history, strict=False)) if a != b)
    shared = re.sub(r"[^>\n]*\Z", "", prompt[:num_common])
    return shared, history[len(shared) :]


def markers_of(name: str) -> list[str]:
    family = CALL_FAMILIES[CALLING[name]]
    known = [*family.triggers, *family.markers, "<think>", "</think>", "<response>", "</response>"]
    return [marker for marker in known if marker in TEMPLATES[name]]


def bare(text: str) -> str:
    """Return the text without parts that a parser may drop: space, and ERNIE's markers around a content."""
    return re.sub(r"\s|\ufffd|</?response>", "", text)


def test_auto_is_right_on_every_template() -> None:
    chosen = {name: choose_call_parser({"default": text}, lambda marker: False) for name, text in TEMPLATES.items()}
    assert {name: family for name, family in chosen.items() if family != "json"} == CALLING
    thinking = {name: choose_reasoning_parser({"default": text}, lambda marker: False) for name, text in TEMPLATES.items()}
    assert {name: family for name, family in thinking.items() if family != "none"} == THINKING


def test_templates_that_show_no_tools_are_known() -> None:
    assert not shows_tools({"default": "{{ messages[0].content }}{# no tools #}"})
    assert shows_tools({"default": OWN_TEMPLATES["hermes"]})
    assert shows_tools({"default": "{{ messages }}", "tool_use": "{{ tools }}"})
    assert choose_call_parser({}, lambda marker: True) == "none"


def test_vocabulary_decides_if_the_template_does_not() -> None:
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools }}"
    assert choose_call_parser({"default": plain}, lambda marker: marker == "<|tool_call_start|>") == "pythonic"
    cutting = "{% for message in messages %}{{ message.content.split('</think>')[-1] }}{% endfor %}"
    assert choose_reasoning_parser({"default": cutting}, lambda marker: marker == "<think>") == "qwen3"
    assert choose_reasoning_parser({"default": cutting}, lambda marker: False) == "none"
    templates = {"tool_use": OWN_TEMPLATES["qwen3_coder"], "default": "x"}
    assert choose_call_parser(templates, lambda marker: False) == "qwen3_coder"


@pytest.mark.parametrize("name", CALLING)
def test_rendered_calls_are_parsed_back(name: str) -> None:
    draw = random.Random(name)
    thinking = THINKING.get(name, "none")
    for number in range(4):
        made = random_calls(draw, MOST_CALLS.get(name, 3))
        said = draw.choice(("", "Let me look.")) if CALLING[name] in SAYING and "Nous" not in name else ""
        thought = draw.choice(("", "so\n\nit is")) if name in WITH_REASONING else ""
        message: dict[str, Any] = {"role": "assistant", "content": said} | ({"reasoning_content": thought} if thought else {})
        message["tool_calls"] = [
            {"id": f"abcdefgh{index}", "type": "function", "function": {"name": function, "arguments": json.dumps(arguments)}}
            for index, (function, arguments) in enumerate(made)
        ]
        prompt, answer = answer_of(name, message)
        for markers in ([], markers_of(name)):  # as text, and as tokens
            vocabulary = vocabulary_of(markers, special=markers if number % 2 else ())
            parsers = Parsers(CALLING[name], thinking, vocabulary.pieces)
            token_ids = tokens_of(answer, vocabulary)
            whole = parse(stream_of(parsers, vocabulary, submit_of(TOOLS), prompt), [token_ids])
            assert calls(whole) == made, answer
            if thought:
                assert reasoning(whole) == thought
            assert said in content(whole)
            streamed = parse(stream_of(parsers, vocabulary, submit_of(TOOLS), prompt), pieces_of(token_ids, number))
            assert streamed == whole
            cut = parse(stream_of(parsers, vocabulary, submit_of(TOOLS), prompt), [token_ids[: draw.randrange(len(token_ids))]])
            assert all(bare(part.text) in bare(answer) for part in cut if part.kind == "content")


def test_thinking_that_cannot_be_switched_off_is_refused() -> None:
    prompt = ChatPrompt(
        json.dumps([USER]).encode(), chat_template_kwargs=b'{"reasoning_effort": "none", "enable_thinking": false}'
    )
    assert templates_of("hermes").render(prompt, datetime(2026, 1, 1)).endswith("<think>\n\n</think>\n\n")
    with pytest.raises(RequestError, match="reasoning_effort"):
        templates_of("deepseek_v3").render(prompt, datetime(2026, 1, 1))
    templates_of("pythonic").render(prompt, datetime(2026, 1, 1))
