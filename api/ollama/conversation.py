"""Translates a body of Ollama's API to a chat request, or to a completion of a bare prompt. Pure.

Images become parts of their message, `options` sampling parameters, `format` structured output. A final message of the
assistant is continued. Unsupported fields that would change the answer are rejected by name.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Container
from typing import Any

import msgspec

from api.model import ServedModel
from api.ollama.requests import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions, OllamaRequest, OllamaTurn
from api.schemas.requests import ToolDefinition, invalid
from api.translation import Translation

_NAMES = {
    "response_format": "format",
    "reasoning_effort": "think",
    "continue_final_message": "messages",
    "truncate_prompt_tokens": "truncate",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{
        name: f"options.{name}"
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop"),
            *("presence_penalty", "frequency_penalty"),
        )
    },
}
_SAME_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop")
_PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty")
_LARGEST_EFFORT = {"max": "xhigh"}
_CALL_ID_LENGTH = 9  # some templates allow only letters and digits

Fields = dict[str, Any]


def translate_chat(body: OllamaChatRequest, model: ServedModel) -> Translation:
    """Translate the request into a chat. Raises RequestError with the client's name of the field."""
    turns = body.messages or []
    messages = [_message(turn) for turn in turns]
    _give_ids(turns, messages)
    fields = _common(body) | _thinking(body, model) | {"messages": messages}
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        fields["continue_final_message"] = True
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields["tool_choice"] = msgspec.to_builtins(body.tool_choice)
    return Translation(fields, [f"messages[{index}]" for index in range(len(messages))], _NAMES)


def translate_generate(body: OllamaGenerateRequest, model: ServedModel) -> Translation:
    """Translate the request into a conversation of one turn."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": _content(body.prompt or "", body.images)}]
    fields = _common(body) | _thinking(body, model) | {"messages": messages}
    return Translation(fields, [*("system" for _ in system), "images" if body.images else "prompt"], _NAMES)


def is_bare(body: OllamaGenerateRequest) -> bool:
    """Return whether its prompt is sent to the model without a template."""
    return bool(body.raw) or bool(body.suffix)


def translate_bare(body: OllamaGenerateRequest) -> Translation:
    """Translate the request into a completion."""
    why = "raw" if body.raw else "suffix"
    for param in ("system", "images", "think"):
        if getattr(body, param):
            raise invalid(param, f"cannot be combined with {why}, because that prompt has no template; remove one of them")
    fields = _common(body) | {"prompt": body.prompt or ""}
    if body.suffix:
        fields["suffix"] = body.suffix
    if "logprobs" in fields:
        fields["logprobs"] = fields.pop("top_logprobs")
    return Translation(fields, [], _NAMES | {"logprobs": "top_logprobs"})


def _common(body: OllamaRequest) -> Fields:
    if body.shift:
        raise invalid("shift", "context shifting is not supported, answers end at the context limit; remove it")
    fields: Fields = {"stream": body.is_stream, **_sampling(body.options or OllamaOptions())}
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    elif body.top_logprobs:
        raise invalid("top_logprobs", "only allowed if logprobs is true")
    if body.truncate:
        fields["truncate_prompt_tokens"] = -1
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format not in (None, ""):
        json_schema = {"name": "answer", "schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    return fields


def _sampling(options: OllamaOptions) -> Fields:
    given = [name for name in _PENALTIES if getattr(options, name) is not None]
    last_n = options.repeat_last_n
    if given and last_n is not None and last_n > 0:
        raise invalid("options.repeat_last_n", f"{last_n}: {given[0]} always counts all tokens; send -1, or 0 for none")
    fields = {name: value for name in _SAME_OPTIONS if (value := getattr(options, name)) is not None}
    if given and last_n != 0:
        names = {"repeat_penalty": "repetition_penalty"}
        fields |= {names.get(name, name): getattr(options, name) for name in given}
    if last_n == 0:
        fields["repetition_penalty"] = 1.0  # the model's own default is disabled too
    if (options.num_predict or 0) > 0:
        fields["max_tokens"] = options.num_predict
    return fields


def _thinking(body: OllamaRequest, model: ServedModel) -> Fields:
    """Return template variables for reasoning; without `think`, the template decides."""
    if body.think is None:
        return {}
    if body.think and model.reasoning_parser == "none":
        raise invalid("think", f"model {model.names[0]} has no reasoning that can be parsed; remove it")
    if isinstance(body.think, bool):
        return {"chat_template_kwargs": {"enable_thinking": body.think, "thinking": body.think}}
    return {"reasoning_effort": _LARGEST_EFFORT.get(body.think, body.think)}


def _message(turn: OllamaTurn) -> Fields:
    message: Fields = {"role": turn.role, "content": _content(turn.content or "", turn.images)}
    if turn.thinking:
        message["reasoning_content"] = turn.thinking
    if turn.tool_name:
        message["name"] = turn.tool_name
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}
            for call in turn.tool_calls
        ]
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    return message


def _content(text: str, images: list[str] | None) -> str | list[Fields]:
    """Return images before the text. A link is not accepted: it is not valid base64."""
    if not images:
        return text
    urls = (image if image[:5].lower() == "data:" else f"data:image/png;base64,{image}" for image in images)
    parts: list[Fields] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _give_ids(turns: list[OllamaTurn], messages: list[Fields]) -> None:
    """Give ids to calls and their results: some templates print them, some require them, but most clients of this API drop
    them. A result belongs to the first call without a result, of its tool if it names one."""
    unanswered: set[str] = set()
    in_order: deque[str] = deque()
    by_tool: defaultdict[str | None, deque[str]] = defaultdict(deque)
    for place, (turn, message) in enumerate(zip(turns, messages, strict=True)):
        for index, call in enumerate(message.get("tool_calls", ())):
            call["id"] = call["id"] or hashlib.blake2b(f"{place}.{index}".encode()).hexdigest()[:_CALL_ID_LENGTH]
            unanswered.add(call["id"])
            in_order.append(call["id"])
            by_tool[call["function"]["name"]].append(call["id"])
        if turn.role != "tool":
            continue
        call_id = turn.tool_call_id or _first(by_tool[turn.tool_name], unanswered) or _first(in_order, unanswered)
        if call_id:
            unanswered.discard(call_id)
            message["tool_call_id"] = call_id


def _first(call_ids: deque[str], unanswered: Container[str]) -> str | None:
    """Return the first unanswered call; answered ones are dropped."""
    while call_ids and call_ids[0] not in unanswered:
        call_ids.popleft()
    return call_ids[0] if call_ids else None


def _tool(tool: ToolDefinition) -> Fields:
    function = tool.function
    given = {name: getattr(function, name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}
